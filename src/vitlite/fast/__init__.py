"""Optimize a model for inference."""
