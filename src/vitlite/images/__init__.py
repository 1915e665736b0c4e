"""Image files, arrays and tensors become what the network takes."""

from vitlite.images.transform import Preprocess, TransformConfig

__all__ = ["Preprocess", "TransformConfig"]
