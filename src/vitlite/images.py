"""Pictures to tensors, as the weights were trained: a `Recipe` says how, a `Preprocess` does it for one model.

Every picture becomes 8-bit pixels first and is resampled in Pillow's own arithmetic, bit for bit as the weights
saw it, so that a file, its array and its tensor give the same result. Torch only; Pillow is needed to open files.
Shapes: b images, c channels, h and w pixels.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from os import PathLike, fspath
from typing import Any, BinaryIO, Literal, get_args

import torch
from einops import rearrange
from torch import Tensor

from vitlite.errors import ConfigError, ImageError, missing_extra

Mode = Literal["center", "squash"]
Interpolation = Literal["bilinear", "bicubic"]
Margin = Literal["nearest", "down"]

PILLOW_CODES: dict[int, Interpolation] = {2: "bilinear", 3: "bicubic"}  # as preprocessor_config.json has them
CROPS = {  # the processors of transformers that do what a recipe says, and how much they crop where it is not said
    "ViT": None, "DeiT": 224, "CLIP": 224, "Bit": 224, "Beit": None, "Siglip": None,
}  # fmt: skip
ODD = (  # what changes the pixels of others
    "rescale_offset", "do_flip_channel_order", "crop_pct", "keep_aspect_ratio", "do_pad", "do_thumbnail", "include_top",
)  # fmt: skip
PRECISION = 22  # bits behind the point in Pillow's 8-bit resampling


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How pictures were prepared when the weights were trained: resize, crop the centre, scale, normalise.

    >>> torchvision = Recipe(size=(224, 224), resize=(256, 256), mode="center", interpolation="bilinear",
    ...                      mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    >>> torchvision.resized(300, 451)
    (256, 384)
    """

    size: tuple[int, int]  # height and width of the crop, which the model gets
    resize: tuple[int, int]  # height and width before the crop
    mode: Mode  # "center" keeps the proportions and covers `resize`; "squash" stretches to it
    interpolation: Interpolation
    mean: tuple[float, ...]  # one per channel, or one for all
    std: tuple[float, ...]
    scale: float = 1 / 255  # multiplies the pixels, 0..255, before mean and std
    margin: Margin = "nearest"  # half of an odd margin: to the nearest even (torchvision, timm) or down (transformers)

    def __post_init__(self) -> None:
        for name, kind in (("mode", Mode), ("interpolation", Interpolation), ("margin", Margin)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"Recipe: {name} must be one of {get_args(kind)}, got {getattr(self, name)!r}.")
        for name in ("size", "resize"):
            side = getattr(self, name)
            if not (isinstance(side, tuple) and len(side) == 2 and all(type(n) is int and n > 0 for n in side)):
                raise ConfigError(f"Recipe: {name} must be (height, width) in pixels, got {side!r}.")
        if self.resize[0] < self.size[0] or self.resize[1] < self.size[1]:
            raise ConfigError(f"Recipe: a crop of {self.size} does not fit in a picture resized to {self.resize}.")
        if not self.mean or len(self.mean) != len(self.std) or not all(self.std):
            raise ConfigError(f"Recipe: need one mean and std per channel, no std 0, got {self.mean}, {self.std}.")

    @classmethod
    def from_record(cls, record: Any, size: tuple[int, int]) -> "Recipe":
        """The recipe of a zoo record, for images of `size`."""
        return cls.from_timm(vars(record), size)  # whose fields have timm's names

    @classmethod
    def from_timm(cls, config: Mapping[str, Any], size: tuple[int, int] | None = None) -> "Recipe":
        """The recipe in timm's config.json or pretrained_cfg; `size` replaces the file's own.

        >>> Recipe.from_timm({"input_size": [3, 224, 224], "crop_pct": 0.9, "interpolation": "bicubic",
        ...                   "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}).resize
        (248, 248)
        """
        config = config.get("pretrained_cfg", config)
        crop_pct, interpolation, mean, std = _wanted(config, "crop_pct", "interpolation", "mean", "std")
        height, width = size or _wanted(config, "input_size")[0][1:]
        return cls(
            size=(height, width),
            resize=(math.floor(height / crop_pct), math.floor(width / crop_pct)),
            mode=config.get("crop_mode") or "center",
            interpolation=interpolation,
            mean=tuple(mean),
            std=tuple(std),
        )

    @classmethod
    def from_transformers(cls, config: Mapping[str, Any], size: tuple[int, int] | None = None) -> "Recipe":
        """The recipe in transformers' preprocessor_config.json; `size` scales the file's own numbers."""
        config = {name: value for name, value in config.items() if value is not None}
        kind = config.get("image_processor_type", config.get("feature_extractor_type", "no image_processor_type"))
        family = re.sub("(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", kind)
        if odd := [kind] if family not in CROPS else [name for name in ODD if config.get(name)]:
            raise ConfigError(
                f"The preprocessing config has {odd[0]}, which is not understood. Write an images.Recipe by hand. "
                f"Known are the processors {', '.join(CROPS)}."
            )
        edge, resample = _wanted(config, "size", "resample")
        cut = config.get("do_center_crop", CROPS[family] is not None)
        crop = _wanted({"crop_size": CROPS[family], **config}, "crop_size")[0] if cut else edge
        if isinstance(edge, int):  # before 2023: the shorter edge for CLIP and DINOv2 (Bit), a square for the others
            edge = {"shortest_edge": edge} if family in ("CLIP", "Bit") else {"height": edge, "width": edge}
        if isinstance(crop, int):
            crop = {"height": crop, "width": crop}
        fixed = set(crop) == {"height", "width"} and set(edge) in ({"shortest_edge"}, {"height", "width"})
        if not fixed or not config.get("do_resize", True):
            raise ConfigError(f"The config fixes no image size: size {edge}, crop {crop}. Write a Recipe by hand.")
        before = [edge.get(side) or edge["shortest_edge"] for side in ("height", "width")]
        normalize = config.get("do_normalize", True)
        mean, std = _wanted(config, "image_mean", "image_std") if normalize else ([0.0], [1.0])
        recipe = cls(
            size=(crop["height"], crop["width"]),
            resize=(before[0], before[1]),
            mode="center" if "shortest_edge" in edge else "squash",
            interpolation=PILLOW_CODES.get(resample, resample),
            mean=tuple(mean),
            std=tuple(std),
            scale=config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0,
            margin="down",
        )
        return recipe.scaled(size) if size else recipe

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], size: tuple[int, int] | None = None) -> "Recipe":
        """The recipe that `to_dict` wrote, also by way of JSON; `size` scales its own numbers."""
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        try:
            recipe = cls(**known)
        except TypeError as error:
            raise ConfigError(f"These are not the fields of a Recipe: {error}. Given: {', '.join(fields)}.") from error
        return recipe.scaled(size) if size else recipe

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return asdict(self)

    def scaled(self, size: tuple[int, int]) -> "Recipe":
        """The recipe for images of another size: the roundest crop share that gives this one gives that one too.

        >>> Recipe(size=(224, 224), resize=(248, 248), mode="center", interpolation="bicubic",
        ...        mean=(0.5,), std=(0.5,)).scaled((384, 384)).resize  # as timm counts with its .9
        (426, 426)
        """
        sides = [*zip(self.size, self.resize, strict=True)]
        for digits in range(1, 9):
            share = min(side * 10**digits // before for side, before in sides) / 10**digits
            if share and all(math.floor(side / share) == before for side, before in sides):
                return replace(self, size=size, resize=(math.floor(size[0] / share), math.floor(size[1] / share)))
        rows, columns = (before * new // side for new, (side, before) in zip(size, sides, strict=True))
        return replace(self, size=size, resize=(rows, columns))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """What a picture of this size is resized to before the crop."""
        rows, columns = self.resize
        if self.mode == "squash":
            return rows, columns
        if rows == columns:  # torchvision's Resize cuts the longer side's fraction off
            return (rows, int(rows * width / height)) if height <= width else (int(rows * height / width), rows)
        ratio = min(height / rows, width / columns)  # timm's ResizeKeepRatio rounds it
        return round(height / ratio), round(width / ratio)


@dataclass(frozen=True, eq=False)
class Preprocess:
    """Prepares pictures for one model: a picture, or a list of them -> (b, c, h, w) on its device, in its dtype.

    A picture is a path, an open file, a Pillow image, or an array or tensor, (h, w, c) or (c, h, w) or (h, w), of
    uint8 or of floats from 0 to 1. A 4-D array or tensor is a list of pictures.
    """

    recipe: Recipe
    model: Any  # a ViT; its config, device and dtype are read when called

    def __call__(self, images: Any) -> Tensor:
        """The batch that the model takes.

        Raises:
            ImageError: a picture cannot be read, or is not what it should be; its name and the reason.
        """
        several = pictures(images)
        if several is None:
            return self.batch([self.pixels(images)])
        prepared = []
        for i, image in enumerate(several):
            try:
                prepared.append(self.pixels(image))
            except ImageError as error:
                raise ImageError(f"Picture {i} of {len(several)}: {error}") from error
        return self.batch(prepared)

    def pixels(self, image: Any) -> Tensor:
        """Resizes and crops one picture: anything -> uint8 (c, h, w) on the CPU."""
        recipe = self.recipe
        picture = _read(image, self.model.config.channels)
        height, width = recipe.resized(*picture.shape[:2])
        halves = (height - recipe.size[0]) / 2, (width - recipe.size[1]) / 2
        top, left = (round(half) if recipe.margin == "nearest" else int(half) for half in halves)
        rows = _taps(picture.shape[0], height, top, recipe.size[0], recipe.interpolation)
        columns = _taps(picture.shape[1], width, left, recipe.size[1], recipe.interpolation)
        first, last = int(rows[0].min()), int(rows[0].max())
        strips = torch.split(picture[first : last + 1], 512)  # which stay in the processor's cache
        across = torch.cat([_resample(rearrange(strip, "h w c -> w (h c)"), *columns) for strip in strips], dim=1)
        down = _resample(rearrange(across, "w (h c) -> h (w c)", c=picture.shape[2]), rows[0] - first, rows[1])
        return rearrange(down, "h (w c) -> c h w", c=picture.shape[2]).contiguous()

    def batch(self, pixels: Sequence[Tensor]) -> Tensor:
        """Normalises what `pixels` made: a list of uint8 (c, h, w) -> (b, c, h, w) on the model's device."""
        if not pixels:
            raise ImageError("There are no pictures in this batch. Pass at least one.")
        mean, std = (self._per_channel(values) for values in (self.recipe.mean, self.recipe.std))
        images = torch.stack(list(pixels)).to(self.model.device)
        return images.float().mul_(self.recipe.scale).sub_(mean).div_(std).to(self.model.dtype)

    def _per_channel(self, values: tuple[float, ...]) -> Tensor:
        """(channels or 1, 1, 1)"""
        channels = self.model.config.channels
        if len(set(values)) == 1:  # the same for every channel, however many there are
            values = values[:1]
        elif len(values) != channels:
            raise ImageError(
                f"The recipe has mean and std for {len(values)} channels, the model takes {channels}. Attach another: "
                "model.preprocess = Preprocess(dataclasses.replace(model.preprocess.recipe, mean=..., std=...), model)."
            )
        return torch.tensor(values, dtype=torch.float32, device=self.model.device)[:, None, None]


def pictures(images: Any) -> list[Any] | None:
    """The pictures of a list, a tuple or a 4-D batch; None where `images` is a single picture."""
    return list(images) if isinstance(images, (list, tuple)) or getattr(images, "ndim", None) == 4 else None


def read_image(file: str | PathLike[str] | BinaryIO, channels: int = 3) -> Tensor:
    """Reads a picture file, or an open one, turned upright: uint8 (h, w, channels); 3 channels are RGB and 1 is grey.

    Raises:
        ImageError: the file is missing, damaged, too large, or no picture.
        MissingExtraError: Pillow is not installed.
    """
    name = fspath(file) if isinstance(file, (str, PathLike)) else getattr(file, "name", "the open file")
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra(f"Opening {name}", "images") from error
    try:
        with Image.open(file) as image:
            pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
            if most and pixels > most:  # of which Pillow itself only warns
                raise ImageError(f"{pixels} pixels, allowed are {most}; trusted: raise PIL.Image.MAX_IMAGE_PIXELS")
            return _from_pillow(image, channels)
    except Exception as error:  # a broken file makes Pillow's decoders raise nearly anything
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> ImageError:
    reason = "no such file" if isinstance(error, FileNotFoundError) else str(error) or type(error).__name__
    return ImageError(f"Cannot read {name} as a picture: {reason}")


def _read(image: Any, channels: int) -> Tensor:
    """Any single picture: uint8 (h, w, channels)."""
    if isinstance(image, (str, PathLike)) or hasattr(image, "read"):
        return read_image(image, channels)
    pillow = sys.modules.get("PIL.Image")  # a Pillow image exists only where this is loaded
    if pillow is not None and isinstance(image, pillow.Image):
        try:
            return _from_pillow(image, channels)
        except Exception as error:  # as above: opened lazily, it may be found broken only now
            raise _unreadable(getattr(image, "filename", "") or f"the {image.mode} image", error) from error
    if hasattr(image, "__array_interface__"):
        try:
            image = torch.as_tensor(image.copy(), device="cpu")  # torch minds read-only ones and odd strides
        except (TypeError, ValueError) as error:
            raise ImageError(f"A picture must be uint8, or float from 0 to 1, got {image.dtype}.") from error
    if isinstance(image, Tensor):
        if image.is_meta or image.layout != torch.strided:
            raise ImageError(
                f"A picture must be a dense tensor with data, got one of {image.layout} on {image.device}. "
                "Of a sparse one, pass image.to_dense()."
            )
        return _from_tensor(image.detach().cpu(), channels)
    raise ImageError(
        f"A picture is a path, an open file, a Pillow image, an array or a tensor, got {type(image).__name__}. "
        "Several come in a list; model.predict also takes an iterator."
    )


def _from_pillow(image: Any, channels: int) -> Tensor:
    """A Pillow image of any mode, turned as its EXIF says: uint8 (h, w, channels). Alpha is dropped."""
    from PIL import ExifTags, ImageOps

    if channels not in (1, 3):
        raise ImageError(f"the model takes {channels} channels, a picture gives 1 or 3; pass an array or a tensor")
    sixteen_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    tags = getattr(image, "tag_v2", {})  # of a TIFF: 258 is its bits, 262 what zero means, 0 white and 1 black
    if sixteen_bits and tags and (tags[258], tags.get(262)) != ((16,), 1):
        raise ImageError("a TIFF of 12 bits, or with white as 0; save it with 8 or 16 bits and black as 0")
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if sixteen_bits:  # convert() would clip at 255
        values = torch.frombuffer(bytearray(image.convert("I").tobytes()), dtype=torch.int32)
        levels = ((values * 255 + 32767) // 65535).to(torch.uint8)
        return levels.view(image.height, image.width, 1).expand(-1, -1, channels)
    if image.mode in ("I", "F"):
        raise ImageError(f"mode {image.mode!r} has no value for white; scale it to 0..1 and pass an array")
    if image.mode == "P" and "transparency" in image.info:  # the same colours, without Pillow's warning
        image = image.convert("RGBA")
    mode = "RGB" if channels == 3 else "L"
    image = image if image.mode == mode else image.convert(mode)
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, channels)


def _from_tensor(image: Tensor, channels: int) -> Tensor:
    """(h, w), (h, w, c) or (c, h, w), uint8 or float in 0..1: uint8 (h, w, channels)."""
    shape = tuple(image.shape)
    if len(shape) not in (2, 3) or 0 in shape:
        raise ImageError(f"A picture has the shape (h, w, c), (c, h, w) or (h, w), got {shape}.")
    fits = (1, 3) if channels == 3 else (channels,)  # one channel stands for three equal ones
    first = len(shape) == 3 and shape[0] in fits
    last = shape[2] in fits if len(shape) == 3 else 1 in fits
    if first and last:
        raise ImageError(f"The shape {shape} can be read as (c, h, w) and as (h, w, c). Pass a Pillow image instead.")
    if not first and not last:
        hint = " To drop an alpha channel: image[..., :3]." if 4 in shape else ""
        raise ImageError(f"The model takes {channels} channels, and no axis of the shape {shape} has as many.{hint}")
    pattern = "h w -> h w 1" if len(shape) == 2 else "h w c -> h w c" if last else "c h w -> h w c"
    return rearrange(_levels(image), pattern).expand(-1, -1, channels)


def _levels(image: Tensor) -> Tensor:
    """Grey levels from 0 to 255, as uint8. Floats within half a level of 0..1 pass."""
    if image.dtype == torch.uint8:
        return image
    if not image.is_floating_point():
        raise ImageError(f"A picture must be uint8, or float from 0 to 1, got {image.dtype}. Convert it, or scale it.")
    levels = image.float().mul(255).round()
    low, high = levels.min().item() / 255, levels.max().item() / 255
    if not math.isfinite(low + high):
        raise ImageError("The picture has values that are not finite (NaN or infinity).")
    if low < 0 or high > 1:
        reason = "normalised already: pass it to the model" if low < 0 else "0..255: divide by 255, or pass uint8"
        raise ImageError(f"A picture of floats has values in 0..1, got {low:.4g} to {high:.4g}. It looks {reason}.")
    if 0 < high <= 1 / 255:
        raise ImageError("The picture is almost black: no value is above 1/255. It looks divided by 255 twice.")
    return levels.to(torch.uint8)


@lru_cache(maxsize=64)
def _taps(old: int, new: int, start: int, count: int, interpolation: Interpolation) -> tuple[Tensor, Tensor]:
    """Which rows make row start + i when `old` rows become `new`, and how much of each: two times (taps, count).

    The filters and their rounding are Pillow's: src/libImaging/Resample.c.
    """
    scale = old / new
    stretch = max(scale, 1.0)  # a filter wider than a pixel: antialiasing
    reach = stretch * (2 if interpolation == "bicubic" else 1)
    centers = (torch.arange(start, start + count, dtype=torch.float64, device="cpu") + 0.5) * scale
    first = (centers - reach + 0.5).int().clamp(min=0)
    last = (centers + reach + 0.5).int().clamp(max=old)
    taps = first + torch.arange(int((last - first).max()), dtype=torch.int32, device="cpu")[:, None]
    x = ((taps - centers + 0.5) / stretch).abs()
    if interpolation == "bicubic":
        near, far = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
        weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    else:
        weights = (1 - x).clamp(min=0)
    weights = weights * (taps < last)
    weights = weights * (1 / weights.sum(0)) * 2**PRECISION
    return taps.clamp(max=old - 1), (weights + weights.sign() / 2).int()


def _resample(rows: Tensor, taps: Tensor, weights: Tensor) -> Tensor:
    """One pass: uint8 (old, m) -> uint8 (count, m)."""
    total = torch.full((taps.shape[1], rows.shape[1]), 2 ** (PRECISION - 1), dtype=torch.int32, device="cpu")
    for tap, weight in zip(taps, weights, strict=True):
        total += rows.index_select(0, tap) * weight[:, None]
    return (total >> PRECISION).clamp(0, 255).to(torch.uint8)


def _wanted(config: Mapping[str, Any], *names: str) -> list[Any]:
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise ConfigError(f"The preprocessing config has no {', '.join(missing)}. Write an images.Recipe by hand.")
    return [config[name] for name in names]
