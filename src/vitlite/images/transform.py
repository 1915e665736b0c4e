"""Preprocess images in the same way as when the weights were trained.

A `TransformConfig` describes the transform, and a `Preprocess` applies it for one model. Every image is first converted
to 8-bit pixels, and Pillow resizes it, so that a file, an array and a tensor of the same image give the same bits.
Shapes: b images, c channels, h and w pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from vitlite.errors import ConfigError, ImageError, missing_extra
from vitlite.images.decode import decode, to_tensor

if TYPE_CHECKING:
    from PIL.Image import Image

Mode = Literal["center", "squash"]
Interpolation = Literal["bilinear", "bicubic"]
Margin = Literal["nearest", "down"]
P = TypeVar("P", bound="Preprocess")

SIDE = 2**16  # pixels; the longest side in a TransformConfig
RESIZED = 2**26  # pixels; the largest result of resizing, 256 MB
NUMBERS = {  # accepted ranges, finite in float32
    "mean": (-1e6, 1e6),
    "std": (1e-6, 1e6),
    "scale": (1e-9, 1e6),
    "share": (1e-6, 1.0),
}
DRAFT = 2  # quick_decode keeps both sides at least this many times as long as the resized ones


@dataclass(frozen=True, kw_only=True)
class TransformConfig:
    """The preprocessing that the weights were trained with: resize, crop the centre, scale, normalise.

    >>> torchvision = TransformConfig(size=(224, 224), resize=(256, 256), mode="center", interpolation="bilinear",
    ...                               mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    >>> torchvision.resized(300, 451)
    (256, 384)
    """

    size: tuple[int, int]  # height and width of the model's input
    resize: tuple[int, int]  # height and width before the crop
    mode: Mode  # "center" keeps the aspect ratio and covers `resize`; "squash" stretches to it
    interpolation: Interpolation
    mean: tuple[float, ...]  # one number per channel, or one for all
    std: tuple[float, ...]
    scale: float = 1 / 255  # multiplies the pixels, 0..255, before mean and std
    margin: Margin = (
        "nearest"  # rounding of half an odd margin: nearest even (torchvision, timm) or down (transformers)
    )
    cut: tuple[int, int] | None = None  # size of the crop if the model gets only its upper left part, `size`
    share: float | None = field(default=None, compare=False)  # share of each side that the crop keeps, if known

    def __post_init__(self) -> None:
        for name in ("mean", "std", "cut"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_sizes(self)
        _check_values(self)
        if self.share is not None and _before_crop(self.cropped, self.share) != self.resize:
            object.__setattr__(self, "share", None)  # dataclasses.replace changed the sizes

    @property
    def cropped(self) -> tuple[int, int]:
        """The height and width of the crop."""
        return self.cut or self.size

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except `share`, which does not affect the pixels, for JSON."""
        fields = asdict(self)
        del fields["share"]
        if self.cut is None:
            del fields["cut"]
        return fields

    def in_whole_patches(self, patch: int) -> "TransformConfig":
        """Return the transform with `size` reduced to the upper left part of the crop that whole patches cover.

        In timm and transformers, the patch convolution ignores the same pixels at the right and the bottom.

        >>> TransformConfig(size=(384, 384), resize=(384, 384), mode="squash", interpolation="bicubic",
        ...                 mean=(0.5,), std=(0.5,)).in_whole_patches(14).size
        (378, 378)
        """
        height, width = self.size
        size = height - height % patch, width - width % patch
        if size == self.size or not all(size):
            return self
        return replace(self, size=size, cut=self.cropped)

    def scaled(self, size: tuple[int, int]) -> "TransformConfig":
        """Return the transform for another input size. The crop keeps the same share of the image.

        >>> TransformConfig(size=(224, 224), resize=(248, 248), mode="center", interpolation="bicubic",
        ...                 mean=(0.5,), std=(0.5,)).scaled((384, 384)).resize  # as timm computes it with 0.9
        (426, 426)
        """
        if self.cut is not None and size == self.size:
            return self
        share = self.crop_share()
        if share:
            return replace(self, size=size, cut=None, resize=_before_crop(size, share), share=share)
        (crop_height, crop_width), (height, width) = self.cropped, self.resize
        resize = height * size[0] // crop_height, width * size[1] // crop_width  # each side has its own share
        return replace(self, size=size, cut=None, resize=resize)

    def crop_share(self) -> float | None:
        """Return the share of each side that the crop keeps, or None if the two shares differ.

        The result is `share` if known, otherwise the number with the fewest digits that gives `resize` from `size`.
        """
        if self.share:
            return self.share
        for digits in range(1, 9):
            sides = (crop * 10**digits // before for crop, before in zip(self.cropped, self.resize, strict=True))
            share = min(sides) / 10**digits
            if share and _before_crop(self.cropped, share) == self.resize:
                return share
        return None

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image of the given size has after resizing and before the crop."""
        rows, columns = self.resize
        if self.mode == "squash":
            return rows, columns
        if rows == columns:  # torchvision's Resize truncates the longer side
            if height <= width:
                return rows, int(rows * width / height)
            return int(rows * height / width), rows
        ratio = min(height / rows, width / columns)  # timm's ResizeKeepRatio rounds it
        return round(height / ratio), round(width / ratio)

    def crop_box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return (left, top, right, bottom) of the part of a resized image that is passed to the model."""
        half = round if self.margin == "nearest" else int  # of an odd margin
        top, left = half((height - self.cropped[0]) / 2), half((width - self.cropped[1]) / 2)
        return left, top, left + self.size[1], top + self.size[0]


def _before_crop(size: tuple[int, int], share: float) -> tuple[int, int]:
    """Return the size before a crop that keeps `share` of each side, computed as in timm."""
    return math.floor(size[0] / share), math.floor(size[1] / share)


def _check_sizes(transform: TransformConfig) -> None:
    for name in ("size", "resize", "cut"):
        value = getattr(transform, name)
        if name == "cut" and value is None:
            continue
        is_pair = isinstance(value, tuple) and len(value) == 2
        if not is_pair or not all(type(side) is int and 0 < side <= SIDE for side in value):
            raise ConfigError(
                f"TransformConfig: {name} must be (height, width) in pixels, each from 1 to {SIDE}, got {value!r}."
            )
    size, cropped, resize = transform.size, transform.cropped, transform.resize
    if cropped[0] > resize[0] or cropped[1] > resize[1]:
        raise ConfigError(f"TransformConfig: a crop of {cropped} does not fit in an image resized to {resize}.")
    if size[0] > cropped[0] or size[1] > cropped[1]:
        raise ConfigError(f"TransformConfig: a size of {size} does not fit in a crop of {cropped}.")


def _check_values(transform: TransformConfig) -> None:
    for name, choices in (("mode", Mode), ("interpolation", Interpolation), ("margin", Margin)):
        value = getattr(transform, name)
        if value not in get_args(choices):
            raise ConfigError(f"TransformConfig: {name} must be one of {get_args(choices)}, got {value!r}.")
    numbers = {"mean": transform.mean, "std": transform.std, "scale": (transform.scale,)}
    if transform.share is not None:
        numbers["share"] = (transform.share,)
    for name, values in numbers.items():
        low, high = NUMBERS[name]
        are_numbers = isinstance(values, tuple) and all(isinstance(value, (int, float)) for value in values)
        if not are_numbers or not values or not all(low <= value <= high for value in values):  # nan is in no range
            raise ConfigError(f"TransformConfig: {name} must be from {low:g} to {high:g}, got {values!r}.")
    if len(transform.mean) != len(transform.std):
        raise ConfigError(
            f"TransformConfig: mean and std must have the same length, got {len(transform.mean)} and "
            f"{len(transform.std)} numbers."
        )


class Target(NamedTuple):
    """The properties of a model that a `Preprocess` needs. A pickled `Preprocess` contains them, not the model."""

    config: Any
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Preprocess:
    """Turn an image or a list of images into a batch (b, c, h, w) on the device and in the dtype of a model.

    An image is a path, the bytes of a file, an open file, a Pillow image, or an array or tensor of shape
    (h, w, c), (c, h, w) or (h, w) with uint8 or floats from 0 to 1. A 4-D array or tensor is a list of images.

    A subclass may override `pixels` and `batch`. Pickling keeps only the config, device and dtype of the model.
    """

    transform: TransformConfig
    model: Any  # a ViT; its config, device and dtype are read at each call
    quick_decode: bool = False  # decode large JPEG files at a reduced size, at least twice the size after resizing

    def __call__(self, images: Any) -> Tensor:
        """Return a batch for the model.

        Raises:
            ImageError: An image cannot be read. The text names the image and the reason.
        """
        several = image_list(images)
        if several is None:
            return self.batch([self.pixels(images)])
        prepared = []
        for i, image in enumerate(several):
            try:
                prepared.append(self.pixels(image))
            except ImageError as error:
                raise error.within(f"Image {i} of {len(several)}") from error
        return self.batch(prepared)

    def one(self, image: Any) -> Tensor:
        """Turn one image into a tensor (c, h, w) in the dtype of the model, always on the CPU.

        Use this method as a transform of torchvision's datasets, also in the workers of a `DataLoader`:
        `ImageFolder("photos", transform=model.preprocess.one)`.
        """
        target = Target(self.model.config, torch.device("cpu"), self.model.dtype)
        return self.replace(model=target).batch([self.pixels(image)])[0]

    def pixels(self, image: Any) -> Tensor:
        """Decode, resize and crop one image. Return a uint8 tensor (c, h, w) on the CPU."""
        rows, columns = self.transform.resize
        at_least = (DRAFT * rows, DRAFT * columns) if self.quick_decode else None
        return resize_and_crop(decode(image, self.model.config.channels, at_least), self.transform)

    def batch(self, pixels: Sequence[Tensor]) -> Tensor:
        """Stack and normalise results of `pixels`: a list of (c, h, w) -> (b, c, h, w) on the device of the model."""
        if not pixels:
            raise ImageError("There are no images in this batch. Pass at least one.")
        images = torch.stack(list(pixels)).to(self.model.device)
        return normalise(images, self.transform, self.model.config.channels).to(self.model.dtype)

    def with_quick_decode(self: P) -> P:
        """Return a copy that reads large JPEG files several times faster, but with slightly different pixels."""
        return self.replace(quick_decode=True)

    def replace(self: P, **fields: Any) -> P:
        """Return a copy with some fields changed. Attributes that a subclass has added are kept."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__ | fields)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        model = self.model and Target(self.model.config, self.model.device, self.model.dtype)
        return self.__dict__ | {"model": model}


@dataclass(frozen=True)
class MissingPreprocess:
    """The `preprocess` of a model without known preprocessing. Calling it raises an error with the reason."""

    reason: str = "These weights came without preprocessing"

    def __call__(self, images: Any) -> Tensor:
        raise self.error()

    def error(self) -> ImageError:
        """Return the error that says why there is no preprocessing, and what to do."""
        return ImageError(
            f"{self.reason}. Set model.preprocess = vitlite.images.TransformConfig(...), or load the weights with the "
            "name of a checkpoint that has the same preprocessing: like= (--model NAME --weights PATH)."
        )


def as_preprocess(value: Any) -> Any:
    """Return the value to store as `model.preprocess`. For a `Preprocess`, this does not include the model.

    Raises:
        ImageError: The value is not of an accepted type.
    """
    if value is None:
        return MissingPreprocess()
    if isinstance(value, TransformConfig):
        return Preprocess(value, None)
    if isinstance(value, Preprocess):
        return value.replace(model=None)
    if isinstance(value, type) or not callable(value):
        raise ImageError(
            f"model.preprocess must be a Preprocess, a TransformConfig, a function or None, got {value!r}."
        )
    return value


def preprocess_of(model: Any) -> Preprocess:
    """Return the preprocessing of a model, for callers that use `pixels` and `batch`.

    Raises:
        ImageError: The model has no preprocessing, or the preprocessing is a function.
    """
    preprocess = model.preprocess
    if isinstance(preprocess, MissingPreprocess):
        raise preprocess.error()
    if not isinstance(preprocess, Preprocess):
        raise ImageError(
            f"model.preprocess is a {type(preprocess).__name__}, but a vitlite.images.Preprocess is needed. "
            "Call model(model.preprocess(...)) instead, or write a subclass of Preprocess."
        )
    return preprocess


def transform_to_save(model: Any) -> TransformConfig | None:
    """Return the transform that is saved with a model's weights, or None if the model has no preprocessing.

    Raises:
        ImageError: The preprocessing is a function, which cannot be saved.
    """
    if isinstance(model.preprocess, MissingPreprocess):
        return None
    if not isinstance(model.preprocess, Preprocess):
        raise ImageError(
            f"model.preprocess is a {type(model.preprocess).__name__}, which cannot be saved. Set it to a "
            "TransformConfig, or to None to save the model without preprocessing."
        )
    return model.preprocess.transform


def image_list(images: Any) -> list[Any] | None:
    """Return the images in a list, a tuple or a 4-D batch as a list, or None for a single image."""
    if isinstance(images, (list, tuple)) or getattr(images, "ndim", None) == 4:
        return list(images)
    return None


def resize_and_crop(image: "Image | Tensor", transform: TransformConfig) -> Tensor:
    """Resize and crop a Pillow image or a uint8 tensor (c, h, w) as `transform` specifies.

    Return a uint8 tensor (c, rows, columns).

    Raises:
        ImageError: The image is so long and narrow that the resized image would be too large.
        MissingExtraError: A tensor has to be resized, and Pillow is not installed.
    """
    if isinstance(image, Tensor):
        height, width = image.shape[1:]
        if transform.resized(height, width) == (height, width):
            left, top, right, bottom = transform.crop_box(height, width)
            return image[:, top:bottom, left:right].clone()
        try:
            from PIL import Image
        except ImportError as error:
            raise missing_extra(f"Resizing an image of {height} x {width} pixels", "images") from error
        if len(image) == 3:
            return resize_and_crop(Image.fromarray(image.permute(1, 2, 0).numpy()), transform)
        return torch.cat([resize_and_crop(Image.fromarray(channel.numpy()), transform) for channel in image])
    from PIL.Image import Resampling

    height, width = transform.resized(image.height, image.width)
    rows = max(height, image.height)  # of the image that is resized horizontally, or of the result
    if rows * width > RESIZED:
        raise ImageError(
            f"An image of {image.height} x {image.width} pixels is too long and narrow: resizing would make it "
            f"{rows} x {width} pixels. Crop it first."
        )
    left, top, right, bottom = transform.crop_box(height, width)
    resample = Resampling[transform.interpolation.upper()]
    # Two calls, because Pillow 13 may resize vertically first, which rounds differently than in training.
    across = image.resize((width, image.height), resample).crop((left, 0, right, image.height))
    down = across.resize((right - left, height), resample).crop((0, top, right - left, bottom))
    return to_tensor(down)


def normalise(pixels: Tensor, transform: TransformConfig, channels: int) -> Tensor:
    """Return images (b, c, h, w), uint8 or floats from 0 to 255, with scale, mean and std applied, in float32.

    Args:
        pixels: The resized and cropped images.
        transform: The transform with scale, mean and std.
        channels: The number of channels of the model.

    Raises:
        ImageError: The transform is for another number of channels.
    """
    per_channel = []
    for values in (transform.mean, transform.std):
        if len(set(values)) == 1:  # the same for every channel, however many there are
            values = values[:1]
        elif len(values) != channels:
            raise ImageError(
                f"The transform has mean and std for {len(values)} channels, but the model needs {channels}. "
                f"Set model.preprocess to a TransformConfig for {channels}, or correct its config.json."
            )
        per_channel.append(torch.tensor(values, dtype=torch.float32, device=pixels.device)[:, None, None])
    mean, std = per_channel
    return pixels.to(torch.float32, copy=True).mul_(transform.scale).sub_(mean).div_(std)
