"""Run models over images, and write their vectors into files."""
