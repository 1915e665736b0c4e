"""Make a model fast, for inference only."""
