"""Read images and preprocess them for the network."""

from vitlite.images.transform import Preprocess, TransformConfig

__all__ = ["Preprocess", "TransformConfig"]
