"""The Vision Transformer and its layers."""
