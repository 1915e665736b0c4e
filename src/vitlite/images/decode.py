"""Read images: turn files, bytes, Pillow images, arrays and tensors into 8-bit pixels.

Pillow opens and converts files, and decides how to read unusual or damaged ones. If Pillow fails, an `ImageError` gives
the name of the file and the reason. Shapes: c channels, h and w pixels.
"""

import io
from contextlib import nullcontext
from os import PathLike
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from einops import rearrange
from torch import Tensor

from vitlite.errors import ImageError, missing_extra

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {  # the supported formats, by Pillow's name, with their file extensions
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "GIF": (".gif",),  # the first frame
    "BMP": (".bmp",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "JPEG2000": (".jp2",),
    "AVIF": (".avif",),  # Pillow 11.3 or newer; last, because older versions raise KeyError here
}
SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)
BYTES = (bytes, bytearray, memoryview)
ORIENTATION = 0x0112  # the EXIF tag
SIDEWAYS = 5  # from this EXIF orientation on, height and width are swapped
LARGE = 25_000_000  # pixels; larger images are decoded one at a time, because each takes 100 MB or more
_decoding_large_image = Lock()


def read_image(file: str | PathLike[str] | bytes | BinaryIO, channels: int = 3) -> Tensor:
    """Read an image file, its bytes, or an open binary file.

    Args:
        file: The image. An open file is read from its beginning.
        channels: 3 for RGB or 1 for grey.

    Returns:
        A uint8 tensor (h, w, channels), turned upright.

    Raises:
        ImageError: The file is missing, damaged, too large, or not in one of the `FORMATS`.
        MissingExtraError: Pillow is not installed.
    """
    image = decode(file, channels)
    pixels = image if isinstance(image, Tensor) else to_tensor(image)
    return rearrange(pixels, "c h w -> h w c").contiguous()


def decode(image: Any, channels: int, at_least: tuple[int, int] | None = None) -> "Image | Tensor":
    """Decode one image of any type that `Preprocess` accepts.

    Args:
        image: A path, bytes, open file, Pillow image, array or tensor.
        channels: The number of channels of the result.
        at_least: A height and width. A JPEG file may be decoded at 1/2, 1/4 or 1/8 of its size if neither side becomes
            shorter than `at_least`. None decodes the full size.

    Returns:
        An upright Pillow image in mode "RGB" or "L" or, for arrays and tensors, a uint8 tensor (c, h, w).

    Raises:
        ImageError: `image` is not an image, or cannot be read.
        MissingExtraError: Pillow is needed but not installed.
    """
    is_pillow = hasattr(image, "getexif")
    if isinstance(image, Tensor) or (hasattr(image, "__array_interface__") and not is_pillow):
        return _from_array(image, channels)
    try:
        from PIL import UnidentifiedImageError
    except ImportError as error:
        raise missing_extra(f"Reading {_name(image)}", "images") from error
    try:
        return _convert(image, channels) if is_pillow else _open(image, channels, at_least)
    except ImageError as error:
        raise error.within(f"Cannot read {_name(image)} as an image") from error
    except (UnidentifiedImageError, KeyError) as error:  # KeyError: an old Pillow without AVIF
        reason = f"it is damaged, or its format is not supported. Supported: {', '.join(FORMATS)}."
        raise ImageError(f"Cannot read {_name(image)} as an image: {reason}") from error
    except Exception as error:  # Pillow's decoders raise almost anything for a damaged file
        name = _name(image)
        if isinstance(error, OSError) and "://" in name:
            raise no_such_file(name) from error
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error) or type(error).__name__
        raise ImageError(f"Cannot read {name} as an image: {reason}") from error


def _name(image: Any) -> str:
    """Return the name of an image for error messages."""
    if isinstance(image, (str, PathLike)):
        return str(image)
    if isinstance(image, BYTES):
        return f"the {len(image)} bytes"
    if hasattr(image, "getexif"):
        return getattr(image, "filename", "") or f"the {image.mode} image"
    if hasattr(image, "read"):
        return str(getattr(image, "name", "the open file"))
    raise ImageError(
        "An image must be a path, bytes, an open file, a Pillow image, an array or a tensor, "
        f"got {type(image).__name__}. Pass several images as a list."
    )


def no_such_file(name: str) -> ImageError:
    """Return the error for an image file that does not exist, or for a URL instead of a file."""
    if "://" in name:
        return ImageError(f"{name} is a URL. Download it first, and pass the file or its bytes.")
    return ImageError(f"No such file: {name}")


def to_tensor(image: "Image") -> Tensor:
    """Convert a Pillow image in mode "RGB" or "L" to uint8 (c, h, w)."""
    try:
        import numpy
    except ImportError as error:
        raise missing_extra("Reading images", "images") from error

    pixels = torch.from_numpy(numpy.array(image)).view(image.height, image.width, -1)
    return rearrange(pixels, "h w c -> c h w").contiguous()


def _open(file: Any, channels: int, at_least: tuple[int, int] | None) -> "Image":
    from PIL import Image

    source = io.BytesIO(file) if isinstance(file, BYTES) else file
    with Image.open(source, formats=list(FORMATS)) as image:
        pixels = image.width * image.height
        if Image.MAX_IMAGE_PIXELS and pixels > Image.MAX_IMAGE_PIXELS:  # Pillow itself only warns up to twice this
            raise ImageError(
                f"it has {pixels} pixels, but at most {Image.MAX_IMAGE_PIXELS} are allowed. "
                "For trusted files, increase PIL.Image.MAX_IMAGE_PIXELS."
            )
        if at_least:
            sideways = image.getexif().get(ORIENTATION, 1) >= SIDEWAYS
            image.draft(None, at_least if sideways else at_least[::-1])
        with _decoding_large_image if image.width * image.height > LARGE else nullcontext():
            image.load()
            return _convert(image, channels)


def _convert(image: "Image", channels: int) -> "Image":
    """Turn a Pillow image upright and convert it to mode "RGB" or "L". Alpha is dropped, as in timm."""
    from PIL import Image, ImageOps

    if channels not in (1, 3):
        raise ImageError(f"the model needs {channels} channels, but images have 1 or 3. Pass an array or a tensor.")
    mode = "RGB" if channels == 3 else "L"
    # Asked before exif_transpose, which drops the format.
    in_32_bits = image.mode == "I" and image.format in ("PNG", "PPM")  # 16-bit grey, as some versions of Pillow open it
    if image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or in_32_bits:  # scale the levels; Pillow's convert() would clip them at 255
        import numpy

        levels = numpy.array(image, dtype=numpy.uint32)
        levels += 128
        levels //= 257
        image = Image.fromarray(levels.astype(numpy.uint8))
    elif image.mode in ("I", "F"):
        raise ImageError(f"mode {image.mode!r} has no defined white level. Scale the pixels to 0..1 and pass an array.")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours, without a warning from Pillow
    return image if image.mode == mode else image.convert(mode)


def _from_array(image: Any, channels: int) -> Tensor:
    """Convert an array or tensor, (h, w), (h, w, c) or (c, h, w), uint8 or floats in 0..1, to uint8 (c, h, w)."""
    if not isinstance(image, Tensor):
        import numpy

        array = numpy.asarray(image)
        if array.dtype.kind == "f":
            array = array.astype(numpy.float32)  # torch does not support big-endian and long double
        try:
            image = torch.from_numpy(array.copy())  # torch does not support read-only arrays and negative strides
        except (TypeError, ValueError) as error:
            raise ImageError(f"An image array must be uint8, or float from 0 to 1, got {array.dtype}.") from error
    pixels = _channels_first(image.detach().cpu(), channels)
    if pixels.is_floating_point():
        low, high = (value.item() for value in pixels.float().aminmax())
        if not (low >= -0.5 / 255 and high <= 1 + 0.5 / 255):  # half a level of tolerance; NaN is an error, too
            raise ImageError(
                f"A float image must have values from 0 to 1, got {low:.4g} to {high:.4g}. Divide by 255 or pass "
                "uint8. If the image is already normalised, pass it to the model directly."
            )
        pixels = (pixels.float() * 255).round().clamp(0, 255).to(torch.uint8)
    elif pixels.dtype != torch.uint8:
        raise ImageError(f"An image array must be uint8, or float from 0 to 1, got {pixels.dtype}.")
    return pixels.expand(channels, -1, -1)


def _channels_first(image: Tensor, channels: int) -> Tensor:
    """Return the image as (c, h, w). If 3 channels are needed, a single channel is repeated."""
    shape = tuple(image.shape)
    if len(shape) not in (2, 3) or 0 in shape:
        raise ImageError(f"An image must have the shape (h, w, c), (c, h, w) or (h, w), got {shape}.")
    if len(shape) == 2:
        image = image[None]
    accepted = (1, 3) if channels == 3 else (channels,)
    first, last = image.shape[0] in accepted, len(shape) == 3 and shape[2] in accepted
    if first and last:
        raise ImageError(f"The shape {shape} may mean (c, h, w) or (h, w, c). Pass a Pillow image instead.")
    if not first and not last:
        hint = " To drop an alpha channel: image[..., :3]." if 4 in shape else ""
        raise ImageError(f"The model needs {channels} channels, but the image has the shape {shape}.{hint}")
    return rearrange(image, "h w c -> c h w") if last else image
