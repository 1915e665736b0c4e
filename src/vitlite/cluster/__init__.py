"""Embed and classify millions of images on a Ray cluster."""
