"""Labelled pictures become weights."""
