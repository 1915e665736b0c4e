"""Read images and preprocess them for the network."""

from typing import Any

from vitlite.images.transform import Preprocess, TransformConfig

__all__ = ["NaFlexTransform", "Preprocess", "TransformConfig"]


def __getattr__(name: str) -> Any:
    if name == "NaFlexTransform":
        from vitlite.images.naflex import NaFlexTransform

        return NaFlexTransform
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
