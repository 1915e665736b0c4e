"""A model becomes a fast one."""
