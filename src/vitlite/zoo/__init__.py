"""Named checkpoints, and how their files are downloaded and verified."""
