"""transformers' preprocessor_config.json: how its processors prepare pictures. Read first, then written."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitlite.checkpoints.formats.record import (
    COLOURS,
    SIDE,
    SWITCH,
    WORD,
    as_json,
    crops_alike,
    not_understood,
    required,
)
from vitlite.errors import CheckpointError, shown
from vitlite.images.transform import Interpolation, Mode, TransformConfig
from vitlite.schema import either, number, optional, table, verify, whole

STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
SWITCHES = (*STEPS, "default_to_square")  # of which null is off
EDGES = ("height", "width", "shortest_edge", "longest_edge", "max_height", "max_width")
SIZE = optional(either(SIDE, table(dict.fromkeys(EDGES, optional(SIDE)))))
PICTURES = table(
    {
        "image_processor_type": optional(WORD),
        "feature_extractor_type": optional(WORD),
        "size": SIZE,
        "crop_size": SIZE,
        "resample": optional(whole(0, 10)),
        "image_mean": optional(COLOURS),
        "image_std": optional(COLOURS),
        "rescale_factor": optional(number(1e-9, 1e9)),
        "device": optional(WORD),
        **dict.fromkeys(SWITCHES, SWITCH),
    }
)

CROPS = {  # the processors that do what a transform says, and the crop of each if its config has none; None: no crop
    "ViT": None,
    "DeiT": 224,
    "CLIP": 224,
    "Bit": 224,  # DINOv2's
    "Beit": None,
    "Siglip": None,
    "DINOv3ViT": None,
    "ViTHybrid": 224,
}
BY_SHORTER_EDGE = ("CLIP", "Bit", "Siglip", "ViTHybrid")  # the processors to which a size of one number is that
DINOV3_PICTURES = {"resample": 2, "do_rescale": True}
BEYOND_RECIPES = (  # switches of processors that change the pixels in ways of which a transform knows nothing
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


def transform_from_transformers(config: Mapping[str, Any], size: tuple[int, int] | None = None) -> TransformConfig:
    """The transform in preprocessor_config.json; `size` scales the file's own numbers."""
    config = as_json(config)
    try:
        verify(config, PICTURES)
    except CheckpointError as error:
        raise not_understood(f"The preprocessing config: {error.text}") from None
    config = {name: value for name, value in config.items() if value is not None or name in SWITCHES}
    processor = _processor(config)
    resize, resample = required(config, "size", "resample")
    crop, before, mode = _crop_and_size_before(config, processor, resize)
    mean, std = [0.0], [1.0]
    if config.get("do_normalize", True):
        mean, std = required(config, "image_mean", "image_std")
    scale = _scale(config)
    transform = TransformConfig(
        size=crop,
        resize=before,
        mode=mode,
        interpolation=INTERPOLATIONS.get(resample, resample),
        mean=tuple(mean),
        std=tuple(std),
        scale=scale,
        margin="down",
    )
    return transform.scaled(size) if size else transform


def _scale(config: Mapping[str, Any]) -> float:
    """What pixels are multiplied by.

    Raises:
        ConfigError: By a whole number, bytes as they are: above 255 they begin at 0 again.
    """
    if not config.get("do_rescale", True):
        return 1.0
    scale = config.get("rescale_factor", 1 / 255)
    if isinstance(scale, int) and scale > 1:
        raise not_understood(f"The preprocessing config has a rescale_factor of {scale}, in which bytes run over.")
    return float(scale)


def _processor(config: Mapping[str, Any]) -> str:
    """Which of `CROPS` prepares the pictures.

    Raises:
        ConfigError: Another does, or this one in a way that no transform has a word for.
    """
    name = config.get("image_processor_type", config.get("feature_extractor_type", "no image_processor_type"))
    processor = re.sub("(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", name)
    beyond = [switch for switch in BEYOND_RECIPES if config.get(switch)]
    if processor not in CROPS:
        beyond = [name]
    if processor == "DINOv3ViT":  # resizes before rounding, and where that sharpens, beyond black and white
        there = {word: config.get(word, usual) for word, usual in DINOV3_PICTURES.items()}
        beyond += [f"{word} {value}" for word, value in there.items() if value != DINOV3_PICTURES[word]]
    if beyond:
        raise not_understood(
            f"The preprocessing config has {shown(beyond[0])}, which is not understood.",
            f"Known are the processors {', '.join(CROPS)}.",
        )
    return processor


def _crop_and_size_before(
    config: Mapping[str, Any], processor: str, resize: Any
) -> tuple[tuple[int, int], tuple[int, int], Mode]:
    """What is cut out, as (height, width); of a picture of which size; and how it was resized to that.

    Raises:
        ConfigError: The sizes depend on the picture.
    """
    shorter = processor in BY_SHORTER_EDGE
    if "default_to_square" in config:
        shorter = not config["default_to_square"]
    resize = _by_edge(resize, shorter=shorter)
    crop = resize
    if config.get("do_center_crop", CROPS[processor] is not None):
        (crop,) = required({"crop_size": CROPS[processor], **config}, "crop_size")
        crop = _by_edge(crop)
    keeps_proportions = set(resize) == {"shortest_edge"}
    known = keeps_proportions or set(resize) == {"height", "width"}
    if not known or set(crop) != {"height", "width"} or not config.get("do_resize", True):
        raise not_understood(f"The config fixes no image size: size {shown(str(resize))}, crop {shown(str(crop))}.")
    size = crop["height"], crop["width"]
    if keeps_proportions:
        return size, (resize["shortest_edge"], resize["shortest_edge"]), "center"
    return size, (resize["height"], resize["width"]), "squash"


def _by_edge(size: int | Mapping[str, int], *, shorter: bool = False) -> Mapping[str, int]:
    """A size by the names of its edges, where it is a number, as written before 2023."""
    if isinstance(size, int):
        return {"shortest_edge": size} if shorter else {"height": size, "width": size}
    return size


def transform_to_transformers(transform: TransformConfig, channels: int = 1) -> dict[str, Any]:
    """The preprocessor_config.json of a transform, for pictures of so many channels.

    Raises:
        CheckpointError: transformers has no processor that does the same.
    """
    if transform.cut is not None:
        raise CheckpointError(
            f"These pictures are the upper left {transform.size[0]} x {transform.size[1]} pixels of a crop, for which "
            "transformers' processors have no word.",
            python="Convert to a .safetensors file, which has the tensors alone.",
        )
    if not crops_alike(transform, "down"):
        raise CheckpointError(
            "transformers rounds half of an odd margin down, and these pictures are cut at the nearest even number: a "
            "pixel further right or down.",
            python="If a pixel may be lost: vitlite.checkpoints.convert.convert(..., margin='down'). For the tensors "
            "alone: convert to a .safetensors file.",
            command="If a pixel may be lost: --margin down. Or convert to timm: where that is installed, transformers "
            "opens the folder too. Or to a .safetensors file, which has the tensors alone.",
        )
    height, width = transform.resize
    resize, processor = {"height": height, "width": width}, "DeiTImageProcessor"
    if transform.mode == "center":
        if height != width:
            raise CheckpointError(
                f"transformers has no preprocessing that resizes pictures to cover {height} x {width} pixels.",
                python="Convert to a .safetensors file, which has the tensors alone.",
            )
        resize, processor = {"shortest_edge": height}, "CLIPImageProcessor"
    return {
        "image_processor_type": processor,
        "do_resize": True,
        "size": resize,
        "resample": WRITTEN_INTERPOLATIONS[transform.interpolation],
        "do_center_crop": True,
        "crop_size": {"height": transform.size[0], "width": transform.size[1]},
        "do_rescale": True,
        "rescale_factor": transform.scale,
        "do_normalize": True,
        "image_mean": _for_each(transform.mean, channels),
        "image_std": _for_each(transform.std, channels),
    }


def _for_each(values: Sequence[float], channels: int) -> list[float]:
    """A number for each channel, where one may stand for all."""
    return [values[0]] * channels if len(values) == 1 else list(values)
