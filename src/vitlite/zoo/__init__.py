"""Find named checkpoints, and download and verify their files."""
