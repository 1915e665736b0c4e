"""Find, read, convert and save the weights of a model."""
