"""Run models over images to predict labels and to compute vectors, and write vectors to files."""
