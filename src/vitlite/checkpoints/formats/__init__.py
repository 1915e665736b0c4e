"""How each library describes a checkpoint."""
