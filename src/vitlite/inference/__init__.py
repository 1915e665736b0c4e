"""Predictions and embeddings of any number of images."""
