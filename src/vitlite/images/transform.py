"""Pictures to tensors, as the weights were trained: a `TransformConfig` says how, a `Preprocess` does it for one model.

Every picture becomes 8-bit pixels first and is resampled in Pillow's own arithmetic, bit for bit as the weights
saw it, so that a file, its array and its tensor give the same result.
Shapes: b images, c channels, h and w pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from einops import rearrange
from torch import Tensor

from vitlite.errors import ConfigError, ImageError, UnknownMethodError, check_count, shown
from vitlite.images.decode import SUFFIXES as SUFFIXES
from vitlite.images.decode import Box, Rows, bytes_of, rows_of
from vitlite.images.decode import fetch_first as fetch_first
from vitlite.images.decode import is_one as is_one
from vitlite.images.decode import is_read_once as is_read_once
from vitlite.images.decode import pixels_in as pixels_in
from vitlite.images.decode import read_image as read_image

Mode = Literal["center", "squash"]
Interpolation = Literal["bilinear", "bicubic"]
Margin = Literal["nearest", "down"]
P = TypeVar("P", bound="Preprocess")

PIXELS = 2**24  # of the crop at most, which is 4096 x 4096
SIDE = 2**16  # of the picture before the crop, at most
NUMBERS = {  # what each is between; but for the share, exact in float32
    "mean": (-1e6, 1e6),
    "std": (1e-6, 1e6),
    "scale": (1e-9, 1e6),
    "share": (1e-6, 1.0),
}
PRECISION = 22  # bits behind the point in Pillow's 8-bit resampling
TAPS = 4096  # of a pixel, that are looked at together
ENOUGH = 2  # times what a picture is resized to: no less is decoded where JPEGs are decoded quickly
NARROWED = 2**25  # pixels between the two passes, that Pillow is given at most: 134 MB
WEIGHTS = 12  # pixels' worth of memory that Pillow takes for the weights of each column or row that it makes


@dataclass(frozen=True, kw_only=True)
class TransformConfig:
    """How pictures were prepared when the weights were trained: resize, crop the centre, scale, normalise.

    >>> torchvision = TransformConfig(size=(224, 224), resize=(256, 256), mode="center", interpolation="bilinear",
    ...                      mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    >>> torchvision.resized(300, 451)
    (256, 384)
    """

    size: tuple[int, int]  # height and width of what the model gets
    resize: tuple[int, int]  # height and width before the crop
    mode: Mode  # "center" keeps the proportions and covers `resize`; "squash" stretches to it
    interpolation: Interpolation
    mean: tuple[float, ...]  # one per channel, or one for all
    std: tuple[float, ...]
    scale: float = 1 / 255  # multiplies the pixels, 0..255, before mean and std
    margin: Margin = "nearest"  # half of an odd margin: to the nearest even (torchvision, timm) or down (transformers)
    cut: tuple[int, int] | None = None  # of the crop, where the model gets its upper left part; None: it gets all of it
    share: float | None = field(default=None, compare=False)  # what the crop keeps of each side, for `scaled`, if known

    def __init_subclass__(cls) -> None:
        """Refuses classes made of this one: what they do otherwise, no file of a model or of vectors would say."""
        raise ConfigError(
            f"{cls.__name__} cannot be made of TransformConfig, whose fields alone say what is done to images.",
            python="For a way of your own, make a class of vitlite.images.Preprocess, and change pixels or batch.",
            command="",
        )

    def __post_init__(self) -> None:
        for name in ("mean", "std", "cut"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_choices(self)
        _check_sizes(self)
        _check_numbers(self)
        if self.share is not None and _before_crop(self.cropped, self.share) != self.resize:
            object.__setattr__(self, "share", None)  # of other sizes, from which dataclasses.replace made this one

    @property
    def cropped(self) -> tuple[int, int]:
        """Height and width of the crop."""
        return self.cut or self.size

    def to_dict(self) -> dict[str, Any]:
        """What decides the pixels, as JSON takes it: all fields but the share, which counts for other sizes."""
        fields = asdict(self)
        del fields["share"]
        if self.cut is None:
            del fields["cut"]
        return fields

    def in_whole_patches(self, patch: int) -> "TransformConfig":
        """The transform for patches of so many pixels: where they do not cover the crop, they begin at its upper left.

        So do the convolutions of timm and transformers, which leave out what remains on the right and below.

        >>> TransformConfig(size=(384, 384), resize=(384, 384), mode="squash", interpolation="bicubic",
        ...        mean=(0.5,), std=(0.5,)).in_whole_patches(14).size
        (378, 378)
        """
        check_count(patch, "patch")
        height, width = self.size
        size = height - height % patch, width - width % patch
        if size == self.size or not all(size):
            return self
        return replace(self, size=size, cut=self.cropped)

    def scaled(self, size: tuple[int, int]) -> "TransformConfig":
        """The transform for images of another size, of which the crop keeps the same share.

        >>> TransformConfig(size=(224, 224), resize=(248, 248), mode="center", interpolation="bicubic",
        ...        mean=(0.5,), std=(0.5,)).scaled((384, 384)).resize  # as timm counts with its .9
        (426, 426)
        """
        if self.cut is not None and size == self.size:
            return self
        share = self.crop_share()
        if share:
            return replace(self, size=size, cut=None, resize=_before_crop(size, share), share=share)
        (crop_height, crop_width), (height, width) = self.cropped, self.resize
        resize = height * size[0] // crop_height, width * size[1] // crop_width  # each side has a share of its own
        return replace(self, size=size, cut=None, resize=resize)

    def crop_share(self) -> float | None:
        """What the crop keeps of each side: as it was read, or the roundest number that gives both; None: none does."""
        return self.share or _roundest_share(self.cropped, self.resize)

    def crop(self, height: float, width: float) -> "Crop":
        """What is cut out of a picture of this size once it is resized."""
        height, width = self.resized(height, width)
        half = round if self.margin == "nearest" else int  # of an odd margin
        top, left = half((height - self.cropped[0]) / 2), half((width - self.cropped[1]) / 2)
        return Crop(height, width, top, left, *self.size)

    def resized(self, height: float, width: float) -> tuple[int, int]:
        """What a picture of this size is resized to before the crop."""
        rows, columns = self.resize
        if self.mode == "squash":
            return rows, columns
        if rows == columns:  # torchvision's Resize cuts the longer side's fraction off
            if height <= width:
                return rows, int(rows * width / height)
            return int(rows * height / width), rows
        ratio = min(height / rows, width / columns)  # timm's ResizeKeepRatio rounds it
        return round(height / ratio), round(width / ratio)


def _before_crop(size: tuple[int, int], share: float) -> tuple[int, int]:
    """What is resized to where a crop of this size is to be such a share of it, as timm counts."""
    return math.floor(size[0] / share), math.floor(size[1] / share)


def _roundest_share(size: tuple[int, int], resize: tuple[int, int]) -> float | None:
    """The share with the fewest digits that leads from a crop to what is resized to; None where none does."""
    for digits in range(1, 9):
        sides = (crop * 10**digits // before for crop, before in zip(size, resize, strict=True))
        share = min(sides) / 10**digits
        if share and _before_crop(size, share) == resize:
            return share
    return None


def _check_choices(transform: TransformConfig) -> None:
    for name, of in (("mode", Mode), ("interpolation", Interpolation), ("margin", Margin)):
        value, valid = getattr(transform, name), get_args(of)
        if not isinstance(value, str) or value not in valid:
            raise ConfigError(f"TransformConfig: {name} must be one of {valid}, got {_written(value)}.")


def _check_sizes(transform: TransformConfig) -> None:
    for name in ("size", "resize", "cropped"):
        value = getattr(transform, name)
        if not _is_size(value):
            raise ConfigError(
                f"TransformConfig: {'cut' if name == 'cropped' else name} must be (height, width) in pixels, each from "
                f"1 to {SIDE}, got {_written(value)}."
            )
    if transform.size[0] * transform.size[1] > PIXELS:
        raise ConfigError(f"TransformConfig: a size of {transform.size} has more than {PIXELS} pixels.")
    _check_fit(transform.cropped, transform.resize, "a picture resized to")
    _check_fit(transform.size, transform.cropped, "a cut of")


def _check_fit(inner: tuple[int, int], outer: tuple[int, int], what: str) -> None:
    if outer[0] < inner[0] or outer[1] < inner[1]:
        raise ConfigError(f"TransformConfig: a crop of {inner} does not fit in {what} {outer}.")


def _is_size(value: Any) -> bool:
    """Whether this is (height, width) in pixels."""
    return (
        isinstance(value, tuple) and len(value) == 2 and all(type(side) is int and 0 < side <= SIDE for side in value)
    )


def _check_numbers(transform: TransformConfig) -> None:
    for name in ("mean", "std"):
        values = getattr(transform, name)
        if not isinstance(values, tuple) or not values:
            raise ConfigError(
                f"TransformConfig: {name} must be a tuple with a number per channel, got {_written(values)}."
            )
        for value in values:
            _check_number(name, value)
    _check_number("scale", transform.scale)
    if transform.share is not None:
        _check_number("share", transform.share)
    if len(transform.mean) != len(transform.std):
        raise ConfigError(
            f"TransformConfig: need one mean and std per channel, got {len(transform.mean)} means and "
            f"{len(transform.std)} stds."
        )


def _check_number(name: str, value: Any) -> None:
    low, high = NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # as NaN is not
        raise ConfigError(
            f"TransformConfig: {name} must be made of numbers from {low:g} to {high:g}, got {_written(value)}."
        )


def _written(value: Any) -> str:
    """A value as an error shows it."""
    try:
        return shown(repr(value))
    except (ValueError, RecursionError):  # a number of thousands of digits; lists within lists
        return f"a {type(value).__name__} that cannot be written out"


class Crop(NamedTuple):
    """A part of a picture, which is resized first."""

    height: int  # of the whole picture, resized
    width: int
    top: int
    left: int
    rows: int  # of the part
    columns: int


class Target(NamedTuple):
    """What a `Preprocess` knows of its model where the model itself is not: in another process."""

    config: Any
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Preprocess:
    """Prepares pictures for one model: a picture, or a list of them -> (b, c, h, w) on its device, in its dtype.

    A picture is a path, the bytes of a file, an open file, a Pillow image, or an array or tensor, (h, w, c) or
    (c, h, w) or (h, w), of uint8 or of floats from 0 to 1. A 4-D array or tensor is a list of pictures.

    Pickled, it leaves its model behind and takes along what it has to know of it. A class made of this one may do
    otherwise in `pixels` and in `batch`.
    """

    transform: TransformConfig
    model: Any  # a ViT; its config, device and dtype are read when called
    quick_decode: bool = False  # JPEG files are scaled while they are decoded, to at least twice what they become

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
                raise error.within(f"Picture {i} of {len(several)}") from error
        return self.batch(prepared)

    def one(self, image: Any) -> Tensor:
        """One picture -> (c, h, w) in the model's dtype and on the CPU, wherever the model is.

        As torchvision's datasets want it: `ImageFolder("photos", transform=model.preprocess.one)`, also in a
        `DataLoader` with workers.
        """
        images = self.of(Target(self.model.config, torch.device("cpu"), self.model.dtype)).batch([self.pixels(image)])
        return images[0]

    def of(self: P, model: Any) -> P:
        """The same for another model."""
        return self._changed(model=model)

    def by(self: P, transform: TransformConfig) -> P:
        """The same by another transform."""
        return self._changed(transform=transform)

    def with_quick_decode(self: P) -> P:
        """The same, several times as quick on large JPEG files, with pixels that differ a little."""
        return self._changed(quick_decode=True)

    def _changed(self: P, **fields: Any) -> P:
        """A copy that keeps what a class made of this one has beside."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__ | fields)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        model = self.model
        return self.__dict__ | {"model": model and Target(model.config, model.device, model.dtype)}

    def pixels(self, image: Any) -> Tensor:
        """Resizes and crops one picture: anything -> uint8 (c, h, w) on the CPU."""
        transform, channels = self.transform, self.model.config.channels
        picture = rows_of(image, channels, self._enough if self.quick_decode else None)
        left, top, right, bottom = picture.box
        crop = transform.crop(bottom - top, right - left)
        return _resize(picture, crop, transform.interpolation, channels)

    def _enough(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that a picture of this size must keep, so that resizing it still says what it becomes."""
        rows, columns = self.transform.resized(height, width)
        return ENOUGH * rows, ENOUGH * columns

    def batch(self, pixels: Sequence[Tensor]) -> Tensor:
        """Normalises what `pixels` made: a list of uint8 (c, h, w) -> (b, c, h, w) on the model's device."""
        if not pixels:
            raise ImageError("There are no pictures in this batch.", python="Pass at least one.")
        images = torch.stack(list(pixels)).to(self.model.device)
        return normalise(images, self.transform, self.model.config.channels).to(self.model.dtype)


def normalise(pixels: Tensor, transform: TransformConfig, channels: int) -> Tensor:
    """Pixels as a network wants them: (b, c, h, w), uint8 or floats from 0 to 255 -> the same shape in float32.

    Args:
        pixels: Prepared up to here; they are left as they are.
        transform: Its scale, mean and std are what happens to them.
        channels: How many the network takes.

    Raises:
        ImageError: The transform is for another number of channels.
    """
    mean = _per_channel(transform.mean, channels, pixels.device)
    std = _per_channel(transform.std, channels, pixels.device)
    return pixels.to(torch.float32, copy=True).mul_(transform.scale).sub_(mean).div_(std)


def _per_channel(values: tuple[float, ...], channels: int, device: torch.device) -> Tensor:
    """A mean or std to compute with: (channels or 1, 1, 1)."""
    if len(set(values)) == 1:  # the same for every channel, however many there are
        values = values[:1]
    elif len(values) != channels:
        raise ImageError(
            f"The transform has mean and std for {len(values)} channels, the model takes {channels}.",
            python="Attach another: model.preprocess = "
            "Preprocess(dataclasses.replace(model.preprocess.transform, mean=..., std=...), model).",
            command="Give as many in its config.json.",
        )
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


def pictures(images: Any) -> list[Any] | None:
    """The pictures of a list, a tuple or a 4-D batch; None where `images` is a single picture."""
    if isinstance(images, (list, tuple)) or getattr(images, "ndim", None) == 4:
        return list(images)
    return None


@dataclass(frozen=True)
class Unprepared:
    """Stands for the preprocessing of a model that has none, and says why."""

    text: str = "These weights came without their preprocessing: the model does not know how to prepare pictures."
    python: str = "Set it: model.preprocess = vitlite.images.Preprocess(vitlite.images.TransformConfig(...), model)."
    command: str | None = "Name a checkpoint like it: --model NAME --weights PATH."

    def __call__(self, images: Any) -> Tensor:
        raise ImageError(self.text, python=self.python, command=self.command)

    def __getattr__(self, name: str) -> Any:
        """Whatever else a `Preprocess` has."""
        raise UnknownMethodError(self.text, python=self.python, command=self.command)


def without_model(way: Any) -> Any:
    """What a model keeps of what is set as its `preprocess`: with the model in it, it would never be freed at once.

    Raises:
        ImageError: It is nothing that prepares pictures.
    """
    if way is None:
        return Unprepared()
    if isinstance(way, TransformConfig):
        way = Preprocess(way, None)
    if isinstance(way, Preprocess):
        return way.of(None)
    if isinstance(way, type) or not callable(way):
        kind = way if isinstance(way, type) else type(way)
        raise ImageError(
            f"model.preprocess is a vitlite.images.Preprocess, a TransformConfig, a function of pictures, or None, "
            f"got {kind.__name__}."
        )
    return way


def preprocess_of(model: Any) -> Preprocess:
    """How a model prepares pictures, for those who call `pixels` and `batch` apart.

    Raises:
        ImageError: It has no preprocessing, or has it in another form.
    """
    way = model.preprocess
    if isinstance(way, Unprepared):
        way(())
    if not isinstance(way, Preprocess):
        raise ImageError(
            f"model.preprocess is a {type(way).__name__}, and to predict takes a vitlite.images.Preprocess.",
            python="Call one after the other, model(model.preprocess(...)), or write a class made of Preprocess.",
        )
    if own_methods(way, "__call__"):
        raise ImageError(
            f"model.preprocess is a {type(way).__name__} with its own __call__, and to predict takes its pixels and "
            "its batch.",
            python="Do there what is done in __call__, or call model(model.preprocess(...)).",
        )
    return way


def transform_alone(way: Any, task: str) -> TransformConfig | None:
    """The transform of what a model has as `preprocess`, for who uses or writes no more of it; None where it has none.

    Args:
        way: `model.preprocess`.
        task: What the transform is for, as errors say it: "A saved file".

    Raises:
        ImageError: It prepares pictures in a way of its own, which would be lost.
    """
    if isinstance(way, Unprepared):
        return None
    if not isinstance(way, Preprocess):
        raise ImageError(
            f"{task} takes a transform, and model.preprocess is a {type(way).__name__}, which has none.",
            python="To go on without: model.preprocess = None.",
        )
    own = own_methods(way, "__call__", "pixels", "batch")
    if own:
        raise ImageError(
            f"{task} takes the transform alone, and model.preprocess is a {type(way).__name__} with its own {own[0]}.",
            python="To go on by the transform: model.preprocess = model.preprocess.transform.",
        )
    return way.transform


def own_methods(way: Preprocess, *names: str) -> list[str]:
    """Which of these methods a class made of `Preprocess` has in its own way."""
    return [name for name in names if getattr(getattr(way, name), "__func__", None) is not getattr(Preprocess, name)]


# ---- resizing: in Pillow's arithmetic, by Pillow where it opened the picture, else by torch


def _resize(picture: Rows, crop: Crop, interpolation: Interpolation, channels: int) -> Tensor:
    """Resizes a picture, across and then down, and cuts: uint8 (c, rows, columns)."""
    box = picture.box
    rows, row_weights = _taps(picture.height, box.top, box.bottom, crop.height, crop.top, crop.rows, interpolation)
    first, last = int(rows.min()), int(rows.max()) + 1  # of the rows that the crop is made of
    between = (picture.height + WEIGHTS) * max(crop.width, crop.columns)
    after = crop.height * (crop.columns + WEIGHTS)
    if picture.pillow and max(between, after) <= NARROWED and _pillow_agrees():
        return _resize_by_pillow(picture, crop, interpolation, first, last)

    columns, column_weights = _taps(
        picture.width, box.left, box.right, crop.width, crop.left, crop.columns, interpolation
    )
    narrowed = []
    for strip in picture.strips(first, last):
        pixels = rearrange(picture.between(*strip), "h w c -> w (h c)")
        narrowed.append(_resample(pixels, columns, column_weights))
    across = torch.cat(narrowed, dim=1)  # (w, h c)
    down = rearrange(across, "w (h c) -> h (w c)", c=channels)
    resized = _resample(down, rows - first, row_weights)  # (h, w c)
    return rearrange(resized, "h (w c) -> c h w", c=channels).contiguous()


def _resize_by_pillow(picture: Rows, crop: Crop, interpolation: Interpolation, first: int, last: int) -> Tensor:
    """The same by Pillow: uint8 (c, rows, columns).

    Each pass is a call of its own, since Pillow 13 may otherwise go down before across. Only rows `first` to `last` - 1
    go across; the others stay black, and no row of the crop is made of them.
    """
    from PIL import Image

    assert picture.pillow is not None
    code, box = Image.Resampling[interpolation.upper()], picture.box
    right = crop.left + crop.columns
    narrow = None
    for start, end in picture.strips(first, last):
        across = picture.pillow(start, end).resize(
            (crop.width, end - start), code, (box.left, 0, box.right, end - start)
        )
        if narrow is None:
            narrow = Image.new(across.mode, (crop.columns, picture.height))
        narrow.paste(across.crop((crop.left, 0, right, end - start)), (0, start))
    assert narrow is not None
    down = narrow.resize((crop.columns, crop.height), code, (0, box.top, crop.columns, box.bottom))
    pixels = bytes_of(down.crop((0, crop.top, crop.columns, crop.top + crop.rows)))
    return rearrange(pixels, "h w c -> c h w").contiguous()


@cache
def _pillow_agrees() -> bool:
    """Whether this Pillow resizes to the same bits as the operators here: there are others, built for speed."""
    from PIL import Image

    height, width = 61, 47
    pixels = torch.arange(height * width * 3, device="cpu").mul(2654435761).div(2**13, rounding_mode="floor") % 256
    pixels = pixels.to(torch.uint8).view(height, width, 3)
    image = Image.frombytes("RGB", (width, height), bytes(pixels.flatten().tolist()))

    def part(first: int, last: int) -> Any:
        return image.crop((0, first, width, last))

    by_torch = Rows(height, width, lambda first, last: pixels[first:last], scaled=Box(0.25, 0, width, height - 0.625))
    by_pillow = replace(by_torch, pillow=part)
    for interpolation in get_args(Interpolation):
        for crop in (Crop(20, 15, 2, 1, 16, 13), Crop(90, 80, 5, 6, 64, 64)):
            theirs = _resize_by_pillow(by_pillow, crop, interpolation, 0, height)
            if not torch.equal(theirs, _resize(by_torch, crop, interpolation, 3)):
                return False
    return True


@lru_cache(maxsize=32)
def _taps(
    old: int, begin: float, end: float, new: int, start: int, count: int, interpolation: Interpolation
) -> tuple[Tensor, Tensor]:
    """Which rows make row start + i when those from `begin` to `end` become `new`, and how much of each.

    The filters and their rounding are Pillow's: src/libImaging/Resample.c.

    Args:
        old: How many rows there are.
        begin: Where the picture begins in them, perhaps within a row.
        end: Where it ends.
        new: How many rows it becomes.
        start: The first of these that is wanted.
        count: How many are.
        interpolation: The filter.

    Returns:
        Two times (taps, count).
    """
    scale = (end - begin) / new
    stretch = max(scale, 1.0)  # a filter wider than a pixel: antialiasing
    reach = stretch * (2 if interpolation == "bicubic" else 1)
    centers = begin + (torch.arange(start, start + count, dtype=torch.float64, device="cpu") + 0.5) * scale  # (count)
    first = (centers - reach + 0.5).int().clamp(min=0)
    last = (centers + reach + 0.5).int().clamp(max=old)
    most = int((last - first).max())
    taps = first + torch.arange(most, dtype=torch.int32, device="cpu")[:, None]  # (taps, count)
    distances = ((taps - centers + 0.5) / stretch).abs()
    weights = _cubic(distances) if interpolation == "bicubic" else (1 - distances).clamp(min=0)
    weights = weights * (taps < last)
    weights = weights * (1 / weights.sum(0)) * 2**PRECISION
    return taps.clamp(max=old - 1), (weights + weights.sign() / 2).int()


def _cubic(x: Tensor) -> Tensor:
    """The bicubic filter, with Pillow's a = -0.5, at distances of up to two pixels."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _resample(rows: Tensor, taps: Tensor, weights: Tensor) -> Tensor:
    """One pass: uint8 (old, m) -> uint8 (count, m)."""
    total = torch.full((taps.shape[1], rows.shape[1]), 2 ** (PRECISION - 1), dtype=torch.int32, device="cpu")
    if taps.shape[0] > taps.shape[1]:  # much becomes little
        for i, first in enumerate(taps[0].tolist()):
            _add_weighed(total[i], rows[first:], weights[:, i])
    else:
        for tap, weight in zip(taps, weights, strict=True):
            total += rows.index_select(0, tap) * weight[:, None]
    return (total >> PRECISION).clamp(0, 255).to(torch.uint8)


def _add_weighed(total: Tensor, rows: Tensor, weights: Tensor) -> None:
    """Adds the first rows, each times its weight, part by part: (m)."""
    rows = rows[: len(weights)]  # near the end there are fewer, and the other weights are 0
    for first in range(0, len(rows), TAPS):
        part = rows[first : first + TAPS]
        total += (part * weights[first : first + len(part), None]).sum(0, dtype=torch.int32)
