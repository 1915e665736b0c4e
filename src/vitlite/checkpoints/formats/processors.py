"""Read and write transformers' preprocessor_config.json, which describes an image processor."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitlite.checkpoints.formats.keys import (
    CHANNELS,
    COUNT,
    FLAG,
    NUMBER,
    STRING,
    as_json,
    check_types,
    crops_alike,
    is_size,
    required,
)
from vitlite.errors import CheckpointError, ConfigError
from vitlite.images.naflex import NaFlexTransform
from vitlite.images.transform import Interpolation, Mode, TransformConfig

NAFLEX_GRID = 16  # rows and columns of the position table in all checkpoints
SWITCHES = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "default_to_square")  # null means false
TYPES = {
    "image_processor_type": STRING,
    "feature_extractor_type": STRING,
    "resample": COUNT,
    "image_mean": CHANNELS,
    "image_std": CHANNELS,
    "rescale_factor": NUMBER,
    "device": STRING,
    "patch_size": COUNT,
    "max_num_patches": COUNT,
    **dict.fromkeys(SWITCHES, FLAG),
}
CROPS = {  # from each supported processor to the default side of the crop; None: no crop
    "ViT": None,
    "DeiT": 224,
    "CLIP": 224,
    "Bit": 224,  # DINOv2's
    "Beit": None,
    "Siglip": None,
    "Siglip2": None,
    "DINOv3ViT": None,
    "ViTHybrid": 224,
}
BY_SHORTER_EDGE = ("CLIP", "Bit", "Siglip", "ViTHybrid")  # processors for which a single number is the shorter edge
DINOV3_ONLY = {"resample": 2, "do_rescale": True}
UNSUPPORTED = (  # settings that change the pixels in ways that a `TransformConfig` cannot describe
    "rescale_offset",
    "do_flip_channel_order",
    "crop_pct",
    "keep_aspect_ratio",
    "do_pad",
    "do_thumbnail",
    "include_top",
    "use_square_size",
)
INTERPOLATIONS: dict[int, Interpolation] = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
WRITTEN_INTERPOLATIONS = {name: number for number, name in INTERPOLATIONS.items()}


def transform_from_transformers(config: Mapping[str, Any]) -> TransformConfig:
    """Return the transform that a preprocessor_config.json describes.

    Raises:
        ConfigError: The config is invalid or not supported.
    """
    config = as_json(config)
    try:
        check_types(config, TYPES)
    except CheckpointError as error:
        raise ConfigError(f"Invalid preprocessing config: {error}") from None
    config = {name: value for name, value in config.items() if value is not None or name in SWITCHES}
    _check_processor(config)
    (resample,) = required(config, "resample")
    mean, std = [0.0], [1.0]
    if config.get("do_normalize", True):
        mean, std = required(config, "image_mean", "image_std")
    scale = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
    if isinstance(scale, int) and scale > 1:  # transformers multiplies 8-bit integers, which overflow
        raise ConfigError(
            f"Invalid preprocessing config: rescale_factor is the integer {scale}, so that 8-bit pixels overflow in "
            "transformers. Set rescale_factor to a float such as 0.00392156862745098 (1/255)."
        )
    colors: dict[str, Any] = {"mean": tuple(mean), "std": tuple(std), "scale": float(scale), "margin": "down"}
    interpolation = INTERPOLATIONS.get(resample, resample)
    if _processor(config) == "Siglip2" and config.get("do_resize", True):
        patch = config.get("patch_size", 16)
        size = (NAFLEX_GRID * patch, NAFLEX_GRID * patch)
        patches = config.get("max_num_patches", NAFLEX_GRID**2)
        return NaFlexTransform(size=size, interpolation=interpolation, max_patches=patches, patch_size=patch, **colors)
    crop, resize, mode = _crop_and_resize(config)
    return TransformConfig(size=crop, resize=resize, mode=mode, interpolation=interpolation, **colors)


def _processor(config: Mapping[str, Any]) -> str:
    name = config.get("image_processor_type", config.get("feature_extractor_type", ""))
    return re.sub("(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", name)


def _check_processor(config: Mapping[str, Any]) -> None:
    """Check that a `TransformConfig` can describe the image processor.

    Raises:
        ConfigError: The processor, or one of its settings, is not supported.
    """
    processor = _processor(config)
    if processor not in CROPS:
        raise ConfigError(
            f"transformers' image processor {processor!r} is not supported. Supported: {', '.join(CROPS)}."
        )
    unsupported = [f"{switch}={config[switch]}" for switch in UNSUPPORTED if config.get(switch)]
    if processor == "DINOv3ViT":  # resizes in floating point, so that bicubic overshoot is not clipped
        for name, only in DINOV3_ONLY.items():
            if config.get(name, only) != only:
                unsupported.append(f"{name}={config[name]}")
    if unsupported:
        raise ConfigError(f"The preprocessing config has {unsupported[0]}, which vitlite does not support.")


def _crop_and_resize(config: Mapping[str, Any]) -> tuple[tuple[int, int], tuple[int, int], Mode]:
    """Return the crop size, the size before the crop, both as (height, width), and the resize mode.

    Raises:
        ConfigError: The config does not determine the sizes.
    """
    processor = _processor(config)
    (size,) = required(config, "size")
    crop_size = config.get("crop_size", CROPS[processor])
    by_shorter_edge = processor in BY_SHORTER_EDGE
    if "default_to_square" in config:
        by_shorter_edge = not config["default_to_square"]
    if type(size) is int:
        size = {"shortest_edge": size} if by_shorter_edge else {"height": size, "width": size}
    crop = size
    if config.get("do_center_crop", CROPS[processor] is not None):
        crop = {"height": crop_size, "width": crop_size} if type(crop_size) is int else crop_size
    if _has_edges(crop, "height", "width") and config.get("do_resize", True):
        cropped = crop["height"], crop["width"]
        if _has_edges(size, "shortest_edge"):
            return cropped, (size["shortest_edge"], size["shortest_edge"]), "center"
        if _has_edges(size, "height", "width"):
            return cropped, (size["height"], size["width"]), "squash"
    raise ConfigError(
        f"Unsupported preprocessing config: size is {size!s:.200} and the crop is {crop!s:.200}. vitlite needs "
        "do_resize, a size with shortest_edge or with height and width, and a crop with height and width."
    )


def _has_edges(size: Any, *edges: str) -> bool:
    """Return whether the keys of a size are exactly `edges`, and all values are numbers of pixels."""
    if not isinstance(size, dict) or size.keys() != set(edges):
        return False
    return all(type(pixels) is int and is_size(pixels) for pixels in size.values())


def transform_to_transformers(transform: TransformConfig, channels: int = 1) -> dict[str, Any]:
    """Return the content of a preprocessor_config.json that describes a transform.

    Args:
        transform: The preprocessing of the images.
        channels: The number of channels of the images.

    Raises:
        CheckpointError: transformers has no image processor that computes this transform.
    """
    if transform.cut is not None:
        raise CheckpointError(
            f"The model uses only the upper left {transform.size[0]} x {transform.size[1]} pixels of each crop, which "
            "transformers does not support. Convert to a .safetensors file, which contains only the tensors."
        )
    if transform.background:
        raise CheckpointError(
            f"transformers cannot put the background {transform.background} behind transparent images. Convert to a "
            ".safetensors file, which contains only the tensors."
        )
    if isinstance(transform, NaFlexTransform):
        return {
            "image_processor_type": "Siglip2ImageProcessor",
            "do_resize": True,
            "patch_size": transform.patch_size,
            "max_num_patches": transform.max_patches,
            **_pixels_to_transformers(transform, channels),
        }
    if not crops_alike(transform, "down"):
        raise CheckpointError(
            "transformers would shift some crops of this model by one pixel, because it rounds odd margins down. "
            "To accept the shift, pass margin='down' (--margin down). To avoid it, convert to timm, whose files "
            "transformers can load if timm is installed, or to a .safetensors file."
        )
    height, width = transform.resize
    resize, processor = {"height": height, "width": width}, "DeiTImageProcessor"
    if transform.mode == "center":
        if height != width:
            raise CheckpointError(
                f"transformers cannot resize images to cover {height} x {width} pixels. Convert to a .safetensors "
                "file, which contains only the tensors."
            )
        resize, processor = {"shortest_edge": height}, "CLIPImageProcessor"
    return {
        "image_processor_type": processor,
        "do_resize": True,
        "size": resize,
        "do_center_crop": True,
        "crop_size": {"height": transform.size[0], "width": transform.size[1]},
        **_pixels_to_transformers(transform, channels),
    }


def _pixels_to_transformers(transform: TransformConfig, channels: int) -> dict[str, Any]:
    """Return the entries of a preprocessor_config.json that do not depend on the size of an image."""
    return {
        "resample": WRITTEN_INTERPOLATIONS[transform.interpolation],
        "do_rescale": True,
        "rescale_factor": transform.scale,
        "do_normalize": True,
        "image_mean": _for_each(transform.mean, channels),
        "image_std": _for_each(transform.std, channels),
    }


def _for_each(values: Sequence[float], channels: int) -> list[float]:
    """Return one number for each channel. A single number is repeated for all channels."""
    return [values[0]] * channels if len(values) == 1 else list(values)
