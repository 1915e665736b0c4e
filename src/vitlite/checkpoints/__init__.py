"""A name or a place becomes verified bytes, and these a filled model; and back."""
