"""Images that a model cannot take are refused, in words, before they fail or mislead further on."""

from typing import Any

import torch
from torch import Tensor

from vitlite.config import ViTConfig, fitting
from vitlite.errors import InputError


def check_images(images: Any, config: ViTConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Makes sure that images fit a model of this config, device and dtype. Reads shapes and types only, never values.

    Raises:
        InputError: They do not; what was given, what is wanted, and how to get there.
    """
    if not isinstance(images, Tensor):
        raise InputError(
            f"The model takes a tensor (batch, {config.channels}, height, width), got {type(images).__name__}.",
            python="For pictures: model.predict(picture), or model(model.preprocess(picture)).",
        )
    if images.is_nested or images.layout != torch.strided:  # whose shapes may not be asked for
        kind = "nested" if images.is_nested else str(images.layout)
        raise InputError(
            f"The model takes dense tensors, got one that is {kind}.",
            python="images.to_dense(); of a nested one of equal shapes: torch.stack(images.unbind()).",
        )
    _check_shape(tuple(images.shape), config)
    if not images.is_floating_point():
        raise InputError(
            f"The model takes normalised floats, got {images.dtype}.",
            python="For pictures of whole numbers: model.preprocess(images), which scales and normalises.",
        )
    if images.device != device:
        raise InputError(
            f"Images are on {images.device}, the model on {device}.", python="Move one: images.to(model.device)."
        )
    if images.dtype != dtype and not _are_cast(images, dtype):
        raise InputError(
            f"Images are {images.dtype}, the model {dtype}.", python="Convert one: images.to(model.dtype)."
        )


def _are_cast(images: Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast brings images and weights to one type, which it does with all but float64."""
    return torch.float64 not in (images.dtype, dtype) and torch.is_autocast_enabled(images.device.type)


def _check_shape(shape: tuple[int, ...], config: ViTConfig) -> None:
    c, p = config.channels, config.patch_size
    wanted = f"(batch, {c}, height, width)"
    if len(shape) != 4:
        hint = "Add the batch: images[None]." if len(shape) == 3 else ""
        raise InputError(f"The model takes {wanted}, got shape {shape}.", python=hint)
    batch, channels, height, width = shape
    if channels != c:
        hint = f"For other channels: create(..., channels={channels})."
        if width == c:
            hint = "Channels come second: images.permute(0, 3, 1, 2)."
        raise InputError(f"The model takes {wanted}, got shape {shape}.", python=hint)
    if batch == 0:
        raise InputError(f"The batch is empty: got shape {shape}. Pass at least one image.")
    if height % p or width % p or height < p or width < p:
        raise InputError(
            f"Images of {height} x {width} pixels do not divide into patches of {p}. {fitting((height, width), p)}",
            python="Resize or crop them; model.preprocess does.",
        )
