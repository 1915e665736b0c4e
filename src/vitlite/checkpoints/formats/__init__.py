"""Read and write the JSON files with which each library describes a checkpoint."""
