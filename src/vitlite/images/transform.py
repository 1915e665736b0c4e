"""Preprocess images in the same way as when the model was trained.

A `TransformConfig` describes the preprocessing, and a `Preprocess` applies it for one model. All images are converted
to 8-bit pixels and resized by Pillow. A file, an array and a tensor of the same image therefore give the same bits.
Shapes: b images, c channels, h and w pixels.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from vitlite.errors import ConfigError, ImageError, missing_extra
from vitlite.images.decode import BYTES, decode, to_tensor

if TYPE_CHECKING:
    from PIL.Image import Image

Mode = Literal["center", "squash"]
Interpolation = Literal["bilinear", "bicubic"]
Margin = Literal["nearest", "down"]
P = TypeVar("P", bound="Preprocess")

SIDE = 2**16  # pixels; the maximum height or width in a TransformConfig
RESIZED = 2**26  # pixels; the maximum size of a resized image, 256 MB
NUMBERS = {  # the valid range of each field; all results are finite in float32
    "mean": (-1e6, 1e6),
    "std": (1e-6, 1e6),
    "scale": (1e-9, 1e6),
    "crop_pct": (1e-6, 1.0),
}
COLOUR = re.compile("white|black|#[0-9a-fA-F]{6}")
DRAFT = 2  # quick_decode decodes at this many times the resized height and width, or more


@dataclass(frozen=True, kw_only=True)
class TransformConfig:
    """The preprocessing of a model: resize, crop the centre, scale, normalise.

    >>> torchvision = TransformConfig(size=(224, 224), resize=(256, 256), mode="center", interpolation="bilinear",
    ...                               mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    >>> torchvision.resized(300, 451)
    (256, 384)

    Args:
        size: Height and width of the model's input.
        resize: Height and width before the crop.
        mode: "center" keeps the aspect ratio and covers `resize`. "squash" does not keep it.
        interpolation: "bilinear" or "bicubic".
        mean: One number per channel, or one number for all channels.
        std: One number per channel, or one number for all channels.
        scale: Factor for the pixels (0 to 255) before mean and std.
        margin: How half of an odd margin is rounded: "nearest" even number (torchvision, timm) or "down"
            (transformers).
        background: Colour behind transparent pixels: "white", "black" or "#rrggbb". None drops alpha.
        cut: Height and width of the crop if the model uses only its upper left part.
        crop_pct: Crop size / resized size, if known.
    """

    size: tuple[int, int]
    resize: tuple[int, int]
    mode: Mode
    interpolation: Interpolation
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255
    margin: Margin = "nearest"
    background: str | None = None
    cut: tuple[int, int] | None = None
    crop_pct: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("mean", "std", "cut"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_sizes(self)
        _check_values(self)
        if self.crop_pct is not None and before_crop(self.cropped, self.crop_pct) != self.resize:
            object.__setattr__(self, "crop_pct", None)  # outdated, because dataclasses.replace changed the sizes

    @property
    def cropped(self) -> tuple[int, int]:
        """The height and width of the crop, of which the model may use only the upper left part."""
        return self.cut or self.size

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that affect the pixels as a dictionary that can be written as JSON."""
        fields = asdict(self)
        del fields["crop_pct"]
        return {name: value for name, value in fields.items() if value is not None}

    def in_whole_patches(self, patch: int) -> "TransformConfig":
        """Return the transform with `size` rounded down to multiples of the patch size.

        The model then uses the upper left part of the crop. timm and transformers ignore the same pixels.

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
        """Return the transform for another input size, with the same ratio of crop size to resized size.

        >>> TransformConfig(size=(224, 224), resize=(248, 248), mode="center", interpolation="bicubic",
        ...                 mean=(0.5,), std=(0.5,)).scaled((384, 384)).resize  # in timm: crop_pct=0.9
        (426, 426)
        """
        if self.cut is not None and size == self.size:  # otherwise, the cut would be lost
            return self
        crop_pct = self.find_crop_pct()
        if crop_pct:
            return replace(self, size=size, cut=None, resize=before_crop(size, crop_pct), crop_pct=crop_pct)
        (crop_height, crop_width), (height, width) = self.cropped, self.resize
        resize = height * size[0] // crop_height, width * size[1] // crop_width  # the ratios of the sides differ
        return replace(self, size=size, cut=None, resize=resize)

    def find_crop_pct(self) -> float | None:
        """Return the ratio of crop size to resized size, or None if no single ratio fits height and width.

        The ratio is `crop_pct` if it is known. Otherwise, it is the number with the fewest digits that fits.
        """
        if self.crop_pct:
            return self.crop_pct
        for digits in range(1, 9):
            sides = (crop * 10**digits // before for crop, before in zip(self.cropped, self.resize, strict=True))
            crop_pct = min(sides) / 10**digits
            if crop_pct and before_crop(self.cropped, crop_pct) == self.resize:
                return crop_pct
        return None

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which an image of the given height and width is resized."""
        rows, columns = self.resize
        if self.mode == "squash":
            return rows, columns
        if rows == columns:  # torchvision's Resize truncates the longer side
            if height <= width:
                return rows, int(rows * width / height)
            return int(rows * height / width), rows
        ratio = min(height / rows, width / columns)  # timm's ResizeKeepRatio rounds
        return round(height / ratio), round(width / ratio)

    def crop_box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the part of a resized image that the model sees, as (left, top, right, bottom) in pixels.

        Args:
            height: The height of the resized image.
            width: The width of the resized image.
        """
        rounded = round if self.margin == "nearest" else int  # int rounds down
        top, left = rounded((height - self.cropped[0]) / 2), rounded((width - self.cropped[1]) / 2)
        return left, top, left + self.size[1], top + self.size[0]


def before_crop(size: tuple[int, int], crop_pct: float) -> tuple[int, int]:
    """Return the height and width of a resized image from its crop and their ratio, rounded down as in timm."""
    return math.floor(size[0] / crop_pct), math.floor(size[1] / crop_pct)


def _check_sizes(transform: TransformConfig) -> None:
    sizes = {"size": transform.size, "resize": transform.resize, "cut": transform.cropped}
    for name, value in sizes.items():
        is_pair = isinstance(value, tuple) and len(value) == 2
        if not is_pair or not all(type(side) is int and 0 < side <= SIDE for side in value):
            raise ConfigError(
                f"TransformConfig: {name} must be (height, width) in pixels, each from 1 to {SIDE}, got {value!r}."
            )
    size, resize, cropped = sizes.values()
    if cropped[0] > resize[0] or cropped[1] > resize[1]:
        raise ConfigError(
            f"TransformConfig: a crop of {cropped} does not fit in an image resized to {resize}. Choose a smaller crop."
        )
    if size[0] > cropped[0] or size[1] > cropped[1]:
        raise ConfigError(
            f"TransformConfig: a size of {size} does not fit in a crop of {cropped}. Choose a smaller size."
        )


def _check_values(transform: TransformConfig) -> None:
    for name, choices in (("mode", Mode), ("interpolation", Interpolation), ("margin", Margin)):
        value = getattr(transform, name)
        if value not in get_args(choices):
            raise ConfigError(f"TransformConfig: {name} must be one of {get_args(choices)}, got {value!r}.")
    crop_pct = 1.0 if transform.crop_pct is None else transform.crop_pct
    numbers = {"mean": transform.mean, "std": transform.std, "scale": (transform.scale,), "crop_pct": (crop_pct,)}
    for name, values in numbers.items():
        low, high = NUMBERS[name]
        are_numbers = isinstance(values, tuple) and all(isinstance(value, (int, float)) for value in values)
        if not are_numbers or not values or not all(low <= value <= high for value in values):  # nan is in no range
            raise ConfigError(f"TransformConfig: {name} must be from {low:g} to {high:g}, got {values!r}.")
    if transform.background is not None and not COLOUR.fullmatch(str(transform.background)):
        raise ConfigError(
            "TransformConfig: background (--background) must be white, black, #rrggbb or None, got "
            f"{transform.background!r}."
        )
    if len(transform.mean) != len(transform.std):
        raise ConfigError(
            f"TransformConfig: mean and std must have the same length, got {len(transform.mean)} and "
            f"{len(transform.std)} numbers."
        )


def naflex_like(transform: TransformConfig, size: tuple[int, int], patch_size: int) -> TransformConfig:
    """Return a `NaFlexTransform` with the interpolation, mean, std and scale of another transform.

    Args:
        transform: The other transform.
        size: The height and width of an image with the maximum number of patches.
        patch_size: The patch size of the model.
    """
    from vitlite.images.naflex import NaFlexTransform

    return NaFlexTransform(
        size=size,
        interpolation=transform.interpolation,
        mean=transform.mean,
        std=transform.std,
        scale=transform.scale,
        max_patches=math.prod(side // patch_size for side in size),
        patch_size=patch_size,
    )


class Target(NamedTuple):
    """The config, device and dtype of a model, which are all that a `Preprocess` needs.

    A pickled `Preprocess` contains a `Target` instead of the model.
    """

    config: Any
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Preprocess:
    """Turn an image or a list of images into a batch (b, c, h, w) on the device and in the dtype of a model.

    An image is a path, the bytes of a file, an open file, a Pillow image, an array or a tensor. Arrays and tensors have
    the shape (h, w, c), (c, h, w) or (h, w) and contain uint8 or floats from 0 to 1. With four dimensions, they are
    batches of images. A dictionary with the key "bytes" or "path", as in datasets with `decode=False`, is also an
    image, and a pandas Series is a list.

    A subclass may override `pixels` and `batch`. A pickled `Preprocess` keeps only the config, device and dtype of the
    model.
    """

    transform: TransformConfig
    model: Any = field(repr=False)  # a ViT, a `Target`, or None while a model stores this object
    quick_decode: bool = False  # decode large JPEG files at a reduced size, at least twice the size after resizing

    def __call__(self, images: Any) -> Tensor:
        """Preprocess an image or a list of images, and return a batch (b, c, h, w) for the model.

        Raises:
            ImageError: An image cannot be read.
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
        if len(by_shape(prepared)) > 1:
            raise ImageError(
                "The preprocessed images have different shapes, which do not fit in one batch. Preprocess them one by "
                "one, or call model.predict or model.vectors, which sort images by shape."
            )
        return self.batch(prepared)

    def one(self, image: Any) -> Tensor:
        """Turn one image into a tensor (c, h, w) on the CPU, in the dtype of the model.

        This method can be the transform of a torchvision dataset, even if a `DataLoader` has several workers:
        `ImageFolder("photos", transform=model.preprocess.one)`.
        """
        target = Target(self.model.config, torch.device("cpu"), self.model.dtype)
        return self.replace(model=target).batch([self.pixels(image)])[0]

    def pixels(self, image: Any) -> Tensor:
        """Decode, resize and crop one image, and return a uint8 tensor (c, h, w) on the CPU."""
        transform, (rows, columns) = self.transform, self.transform.resize
        at_least = (DRAFT * rows, DRAFT * columns) if self.quick_decode else None
        image = decode(image, self.model.config.channels, at_least, transform.background)
        return resize_and_crop(image, transform)

    def batch(self, pixels: Sequence[Tensor]) -> Tensor:
        """Stack and normalise tensors (c, h, w) from `pixels`, and return a batch (b, c, h, w) for the model."""
        if not pixels:
            raise ImageError("The batch is empty. Pass at least one image.")
        device = self.model.device
        # accelerate leaves offloaded weights on the meta device, and moves images to where it computes.
        images = torch.stack(list(pixels)).to("cpu" if device.type == "meta" else device)
        return normalise(images, self.transform, self.model.config.channels).to(self.model.dtype)

    def with_quick_decode(self: P) -> P:
        """Return a copy that decodes large JPEG files several times faster, with slightly different pixels."""
        return self.replace(quick_decode=True)

    def with_background(self: P, background: str | None) -> P:
        """Return a copy that puts a colour behind transparent pixels: "white", "black" or "#rrggbb"."""
        return self.replace(transform=replace(self.transform, background=background))

    def with_max_patches(self: P, max_patches: int) -> P:
        """Return a copy that resizes each image to at most this many patches. Only NaFlex models support it.

        Raises:
            ConfigError: The model needs images of one size, or `max_patches` is not a positive integer.
        """
        transform: Any = self.transform
        if not hasattr(transform, "max_patches"):
            raise ConfigError(
                "max_patches (--max-patches) needs a NaFlex model. For another image size, pass image_size= (--size)."
            )
        return self.replace(transform=replace(transform, max_patches=max_patches))

    def replace(self: P, **fields: Any) -> P:
        """Return a copy with some fields changed. Additional attributes of a subclass are copied, too."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__ | fields)
        return copy

    def __getstate__(self) -> dict[str, Any]:
        model = self.model and Target(self.model.config, self.model.device, self.model.dtype)
        return self.__dict__ | {"model": model}


@dataclass(frozen=True)
class MissingPreprocess:
    """The value of `model.preprocess` if the preprocessing is unknown. Calling it raises an error with the reason."""

    reason: str = ""  # why the preprocessing beside the weights cannot be used; "": there is none

    def __call__(self, images: Any) -> Tensor:
        raise self.error()

    def error(self) -> ImageError:
        """Return the error for images that cannot be preprocessed, which gives the reason and the remedy."""
        if self.reason:  # like= would not help, because the files beside the weights take priority
            return ImageError(
                f"{self.reason}. Set model.preprocess = vitlite.images.TransformConfig(...), or change the "
                "preprocessing in this folder."
            )
        return ImageError(
            "These weights came without preprocessing. Set model.preprocess = vitlite.images.TransformConfig(...), or "
            "pass the name of a checkpoint with the same preprocessing: like= (--model NAME --weights PATH)."
        )


def as_preprocess(value: Any) -> Any:
    """Return the object to store in a model when `model.preprocess` is set.

    A stored `Preprocess` does not refer to the model, so that there is no reference cycle.

    Args:
        value: A `Preprocess`, a `TransformConfig`, a function, or None for unknown preprocessing.

    Raises:
        ImageError: The type of the value is not supported.
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
    """Return the `Preprocess` of a model.

    Raises:
        ImageError: The model has no preprocessing, or `model.preprocess` is not a `Preprocess`.
    """
    preprocess = model.preprocess
    if isinstance(preprocess, MissingPreprocess):
        raise preprocess.error()
    if not isinstance(preprocess, Preprocess):
        raise ImageError(
            f"Expected model.preprocess to be a vitlite.images.Preprocess, got {type(preprocess).__name__}. Set it "
            "to a subclass of Preprocess, or call model(model.preprocess(images)) instead."
        )
    return preprocess


def transform_to_save(model: Any) -> TransformConfig | None:
    """Return the `TransformConfig` to save with the weights of a model, or None if the model has no preprocessing.

    Raises:
        ImageError: `model.preprocess` is another function, which cannot be saved.
    """
    if isinstance(model.preprocess, MissingPreprocess):
        return None
    if not isinstance(model.preprocess, Preprocess):
        raise ImageError(
            f"model.preprocess is a {type(model.preprocess).__name__}, which cannot be saved. Set model.preprocess to "
            "a TransformConfig, or to None to save the model without preprocessing."
        )
    return model.preprocess.transform


def image_list(images: Any) -> list[Any] | None:
    """Return several images as a list, or None if `images` is a single image.

    A list, a tuple or another sequence contains several images. So does an array or a pandas Series of file names, and
    an array or tensor with four dimensions.
    """
    several = isinstance(images, Sequence) or getattr(images, "ndim", None) in (1, 4)
    return list(images) if several and not isinstance(images, (str, *BYTES)) else None


def by_shape(images: Sequence[Tensor]) -> list[list[int]]:
    """Group images by shape, and return the indices of the images in each group.

    Only images of the same shape can be in one batch.
    """
    indices: dict[torch.Size, list[int]] = {}
    for i, image in enumerate(images):
        indices.setdefault(image.shape, []).append(i)
    return list(indices.values())


def resize_and_crop(image: "Image | Tensor", transform: TransformConfig) -> Tensor:
    """Resize and crop a Pillow image or a uint8 tensor (c, h, w), and return a uint8 tensor (c, *transform.size).

    Raises:
        ImageError: The image is so long and narrow that the resized image would be too large.
        MissingExtraError: Pillow is needed to resize a tensor, but it is not installed.
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
    rows = max(height, image.height)  # of the larger image, before or after vertical resizing
    if rows * width > RESIZED:
        raise ImageError(
            f"An image of {image.height} x {image.width} pixels is too long and narrow: it would be resized to "
            f"{rows} x {width} pixels. Crop the image first."
        )
    left, top, right, bottom = transform.crop_box(height, width)
    resample = Resampling[transform.interpolation.upper()]
    # Resize the width first. Pillow 13 begins with the height of some tall images, and rounds differently than in
    # training. Columns outside the crop do not affect the others, so leave them out before the height is resized.
    across = image.resize((width, image.height), resample).crop((left, 0, right, image.height))
    down = across.resize((right - left, height), resample).crop((0, top, right - left, bottom))
    return to_tensor(down)


def normalise(pixels: Tensor, transform: TransformConfig, channels: int) -> Tensor:
    """Multiply pixels by the scale, subtract the mean, divide by the standard deviation, and return them in float32.

    Args:
        pixels: Resized and cropped images (b, c, h, w), in uint8 or in floats from 0 to 255.
        transform: The transform with scale, mean and standard deviation.
        channels: The number of channels of the model.

    Raises:
        ImageError: The transform is for a different number of channels.
    """
    per_channel = []
    for values in (transform.mean, transform.std):
        if len(set(values)) == 1:  # fits any number of channels
            values = values[:1]
        elif len(values) != channels:
            raise ImageError(
                f"model.preprocess has mean and std for {len(values)} channels, but the model has {channels}. "
                f"Set model.preprocess to a TransformConfig for {channels} channels."
            )
        per_channel.append(torch.tensor(values, dtype=torch.float32, device=pixels.device)[:, None, None])
    mean, std = per_channel
    return pixels.to(torch.float32, copy=True).mul_(transform.scale).sub_(mean).div_(std)
