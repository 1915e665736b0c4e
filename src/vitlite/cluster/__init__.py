"""Many pictures become rows: on this machine, or on a cluster with Ray."""
