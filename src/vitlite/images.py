"""Pictures to tensors, as the weights were trained: a `Recipe` says how, a `Preprocess` does it for one model.

Every picture becomes 8-bit pixels first and is resampled in Pillow's own arithmetic, bit for bit as the weights
saw it, so that a file, its array and its tensor give the same result. Torch only; Pillow is needed to open files.
Shapes: b images, c channels, h and w pixels.
"""

import math
import sys
from collections.abc import Sequence
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

SUFFIXES = frozenset(  # of files that are taken for pictures where a folder is searched
    (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2")
)
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
        for name, valid in (
            ("mode", get_args(Mode)),
            ("interpolation", get_args(Interpolation)),
            ("margin", get_args(Margin)),
        ):
            value = getattr(self, name)
            if value not in valid:
                raise ConfigError(f"Recipe: {name} must be one of {valid}, got {value!r}.")
        for name in ("size", "resize"):
            value = getattr(self, name)
            if not _is_size(value):
                raise ConfigError(f"Recipe: {name} must be (height, width) in pixels, got {value!r}.")
        if self.resize[0] < self.size[0] or self.resize[1] < self.size[1]:
            raise ConfigError(f"Recipe: a crop of {self.size} does not fit in a picture resized to {self.resize}.")
        if not self.mean or len(self.mean) != len(self.std) or not all(self.std):
            raise ConfigError(f"Recipe: need one mean and std per channel, no std 0, got {self.mean}, {self.std}.")

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return asdict(self)

    def scaled(self, size: tuple[int, int]) -> "Recipe":
        """The recipe for images of another size: the roundest crop share that gives this one gives that one too.

        >>> Recipe(size=(224, 224), resize=(248, 248), mode="center", interpolation="bicubic",
        ...        mean=(0.5,), std=(0.5,)).scaled((384, 384)).resize  # as timm counts with its .9
        (426, 426)
        """
        (crop_height, crop_width), (height, width) = self.size, self.resize
        for digits in range(1, 9):
            share = min(crop_height * 10**digits // height, crop_width * 10**digits // width) / 10**digits
            if share and (math.floor(crop_height / share), math.floor(crop_width / share)) == self.resize:
                return replace(self, size=size, resize=(math.floor(size[0] / share), math.floor(size[1] / share)))
        resize = height * size[0] // crop_height, width * size[1] // crop_width  # each side has a share of its own
        return replace(self, size=size, resize=resize)

    def resized(self, height: int, width: int) -> tuple[int, int]:
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


def _is_size(value: Any) -> bool:
    """Whether this is (height, width) in pixels."""
    return isinstance(value, tuple) and len(value) == 2 and all(type(side) is int and side > 0 for side in value)


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
                raise error.within(f"Picture {i} of {len(several)}") from error
        return self.batch(prepared)

    def pixels(self, image: Any) -> Tensor:
        """Resizes and crops one picture: anything -> uint8 (c, h, w) on the CPU."""
        recipe = self.recipe
        picture = _read(image, self.model.config.channels)  # (h, w, c)
        old_height, old_width, channels = picture.shape
        height, width = recipe.resized(old_height, old_width)
        half = round if recipe.margin == "nearest" else int  # of an odd margin
        top, left = half((height - recipe.size[0]) / 2), half((width - recipe.size[1]) / 2)
        rows, row_weights = _taps(old_height, height, top, recipe.size[0], recipe.interpolation)
        columns, column_weights = _taps(old_width, width, left, recipe.size[1], recipe.interpolation)

        first, last = int(rows.min()), int(rows.max())  # of the rows that the crop is made of
        narrowed = []
        for strip in torch.split(picture[first : last + 1], 512):  # which stay in the processor's cache
            narrowed.append(_resample(rearrange(strip, "h w c -> w (h c)"), columns, column_weights))
        across = torch.cat(narrowed, dim=1)  # (w, h c)
        down = rearrange(across, "w (h c) -> h (w c)", c=channels)
        crop = _resample(down, rows - first, row_weights)  # (h, w c)
        return rearrange(crop, "h (w c) -> c h w", c=channels).contiguous()

    def batch(self, pixels: Sequence[Tensor]) -> Tensor:
        """Normalises what `pixels` made: a list of uint8 (c, h, w) -> (b, c, h, w) on the model's device."""
        if not pixels:
            raise ImageError("There are no pictures in this batch.", python="Pass at least one.")
        images = torch.stack(list(pixels)).to(self.model.device)
        return normalise(images, self.recipe, self.model.config.channels).to(self.model.dtype)


def normalise(pixels: Tensor, recipe: Recipe, channels: int) -> Tensor:
    """Pixels as a network wants them: (b, c, h, w), uint8 or floats from 0 to 255 -> the same shape in float32.

    Args:
        pixels: Prepared up to here; they are left as they are.
        recipe: Its scale, mean and std are what happens to them.
        channels: How many the network takes.

    Raises:
        ImageError: The recipe is for another number of channels.
    """
    mean = _per_channel(recipe.mean, channels, pixels.device)
    std = _per_channel(recipe.std, channels, pixels.device)
    return pixels.to(torch.float32, copy=True).mul_(recipe.scale).sub_(mean).div_(std)


def _per_channel(values: tuple[float, ...], channels: int, device: torch.device) -> Tensor:
    """A mean or std to compute with: (channels or 1, 1, 1)."""
    if len(set(values)) == 1:  # the same for every channel, however many there are
        values = values[:1]
    elif len(values) != channels:
        raise ImageError(
            f"The recipe has mean and std for {len(values)} channels, the model takes {channels}.",
            python="Attach another: model.preprocess = "
            "Preprocess(dataclasses.replace(model.preprocess.recipe, mean=..., std=...), model).",
            command="Give as many in its config.json.",
        )
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


def pictures(images: Any) -> list[Any] | None:
    """The pictures of a list, a tuple or a 4-D batch; None where `images` is a single picture."""
    if isinstance(images, (list, tuple)) or getattr(images, "ndim", None) == 4:
        return list(images)
    return None


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
                raise ImageError(
                    f"{pixels} pixels, allowed are {most}.",
                    python="Trusted: raise PIL.Image.MAX_IMAGE_PIXELS.",
                    command="Make it smaller.",
                )
            return _from_pillow(image, channels)
    except Exception as error:  # a broken file makes Pillow's decoders raise nearly anything
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> ImageError:
    context = f"Cannot read {name} as a picture"
    if isinstance(error, ImageError):
        return error.within(context)
    if isinstance(error, FileNotFoundError):
        return ImageError(f"{context}: no such file")
    return ImageError(f"{context}: {str(error) or type(error).__name__}")


def _read(image: Any, channels: int) -> Tensor:
    """Any single picture: uint8 (h, w, channels)."""
    if isinstance(image, (str, PathLike)) or hasattr(image, "read"):
        return read_image(image, channels)
    if _is_pillow(image):
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
        return _from_tensor(image, channels)
    raise ImageError(
        f"A picture is a path, an open file, a Pillow image, an array or a tensor, got {type(image).__name__}.",
        python="Several come in a list; model.predict also takes an iterator.",
    )


def _is_pillow(image: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # a Pillow image exists only where this is loaded
    return pillow is not None and isinstance(image, pillow.Image)


def _from_pillow(image: Any, channels: int) -> Tensor:
    """A Pillow image of any mode, turned as its EXIF says: uint8 (h, w, channels). Alpha is dropped."""
    from PIL import ExifTags, ImageOps

    if channels not in (1, 3):
        raise ImageError(
            f"the model takes {channels} channels, a picture gives 1 or 3.",
            python="Pass an array or a tensor.",
            command="",
        )
    sixteen_bits = _has_sixteen_bits(image)  # of which its format tells: a turned copy has none
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if sixteen_bits:
        return _high_bytes(image).expand(-1, -1, channels)
    if image.mode in ("I", "F"):
        raise ImageError(
            f"mode {image.mode!r} has no value for white.",
            python="Scale it to 0..1 and pass an array.",
            command="Save it with 8 or 16 bits.",
        )
    if image.mode == "P" and "transparency" in image.info:  # the same colours, without Pillow's warning
        image = image.convert("RGBA")
    mode = "RGB" if channels == 3 else "L"
    if image.mode != mode:
        image = image.convert(mode)
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, channels)


def _high_bytes(image: Any) -> Tensor:
    """Grey levels from 0 to 65535, rounded to 0 to 255, where Pillow's convert() would clip: uint8 (h, w, 1)."""
    values = torch.frombuffer(bytearray(image.convert("I").tobytes()), dtype=torch.int32)
    levels = (values * 255 + 32767) // 65535
    return levels.to(torch.uint8).view(image.height, image.width, 1)


def _has_sixteen_bits(image: Any) -> bool:
    """Whether a Pillow image has grey levels from 0 to 65535.

    Raises:
        ImageError: A TIFF has others, which Pillow does not scale.
    """
    widened = image.mode == "I" and image.format in ("PNG", "PPM")  # Pillow keeps 16 bits of these in 32
    if not widened and not image.mode.startswith("I;16"):
        return False
    tags = getattr(image, "tag_v2", {})  # of a TIFF: 258 is its bits, 262 what zero means, 0 white and 1 black
    if tags and (tags[258], tags.get(262)) != ((16,), 1):
        raise ImageError("a TIFF of 12 bits, or with white as 0; save it with 8 or 16 bits and black as 0")
    return True


def _from_tensor(image: Tensor, channels: int) -> Tensor:
    """(h, w), (h, w, c) or (c, h, w), uint8 or float in 0..1: uint8 (h, w, channels)."""
    if image.is_meta or image.layout != torch.strided:
        raise ImageError(
            f"A picture must be a dense tensor with data, got one of {image.layout} on {image.device}.",
            python="Of a sparse one, pass image.to_dense().",
        )
    image = image.detach().cpu()
    axes = _axes(tuple(image.shape), channels)
    if axes == "h w":
        image, axes = image[:, :, None], "h w c"
    return rearrange(_levels(image), f"{axes} -> h w c").expand(-1, -1, channels)


def _axes(shape: tuple[int, ...], channels: int) -> str:
    """Which axis of a picture is which, as einops writes it; one channel stands for three equal ones.

    Raises:
        ImageError: A picture for this number of channels has no such shape, or it can be read in two ways.
    """
    if len(shape) not in (2, 3) or 0 in shape:
        raise ImageError(f"A picture has the shape (h, w, c), (c, h, w) or (h, w), got {shape}.")
    readings = {"h w": 1} if len(shape) == 2 else {"c h w": shape[0], "h w c": shape[2]}  # and their channels
    wanted = (1, 3) if channels == 3 else (channels,)
    found = [axes for axes, there in readings.items() if there in wanted]
    if len(found) == 2:
        raise ImageError(
            f"The shape {shape} can be read as (c, h, w) and as (h, w, c).", python="Pass a Pillow image instead."
        )
    if not found:
        raise ImageError(
            f"The model takes {channels} channels, and no axis of the shape {shape} has as many.",
            python="To drop an alpha channel: image[..., :3]." if 4 in shape else "",
        )
    return found[0]


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
    centers = (torch.arange(start, start + count, dtype=torch.float64, device="cpu") + 0.5) * scale  # (count)
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
    for tap, weight in zip(taps, weights, strict=True):
        total += rows.index_select(0, tap) * weight[:, None]
    return (total >> PRECISION).clamp(0, 255).to(torch.uint8)
