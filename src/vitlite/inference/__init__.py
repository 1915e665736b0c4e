"""Run models over images, and write vectors to files."""
