"""Embed and classify millions of images on a cluster with Ray."""
