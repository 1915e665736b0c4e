"""The layers and the network."""
