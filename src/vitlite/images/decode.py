"""Convert files, bytes, Pillow images, arrays and tensors to 8-bit pixels.

Pillow opens and decodes all files, including unusual and damaged ones. If it fails, an `ImageError` gives the name of
the file and the reason. Shapes: c channels, h and w pixels.
"""

import io
from contextlib import nullcontext
from os import PathLike
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import torch
from einops import rearrange
from torch import Tensor

from vitlite.errors import ImageError, missing_extra

if TYPE_CHECKING:
    from PIL.Image import Image

    ImageFile: TypeAlias = str | PathLike[str] | bytes | bytearray | memoryview | BinaryIO | Image  # one image

FORMATS = {  # from Pillow's name of each supported format to its file extensions
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "GIF": (".gif",),  # only the first frame is read
    "BMP": (".bmp",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "JPEG2000": (".jp2",),
    "HEIF": (".heic", ".heif"),  # with pillow-heif
    "AVIF": (".avif",),  # needs Pillow 11.3; last, because older versions raise a KeyError here
}
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")  # in bytes 8 to 12 of a file
OF_PILLOW = tuple(name for name in FORMATS if name != "HEIF")
SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)
BYTES = (bytes, bytearray, memoryview)
ORIENTATION = 0x0112  # the EXIF tag
SIDEWAYS = 5  # EXIF orientations from 5 to 8 swap height and width
LARGE = 25_000_000  # pixels; larger images are decoded one at a time, because each takes 100 MB or more
_decoding_large_image = Lock()


def read_image(file: str | PathLike[str] | bytes | BinaryIO, channels: int = 3) -> Tensor:
    """Read an image from a file, from bytes, or from an open binary file.

    Args:
        file: The path, the bytes or the open file. An open file is read from its beginning.
        channels: 3 for RGB or 1 for grey.

    Returns:
        A uint8 tensor (h, w, channels), rotated according to the EXIF orientation.

    Raises:
        ImageError: The file is missing, damaged or too large, or the format is not supported.
        MissingExtraError: Pillow is not installed.
    """
    image = decode(file, channels)
    pixels = image if isinstance(image, Tensor) else to_tensor(image)
    return rearrange(pixels, "c h w -> h w c").contiguous()


def decode(
    image: Any,
    channels: int,
    at_least: tuple[int, int] | None = None,
    background: str | None = None,
    heif: bool = False,
) -> "Image | Tensor":
    """Decode one image of any type that `Preprocess` accepts.

    Args:
        image: A path, bytes, open file, Pillow image, array or tensor, or a dictionary with the key "bytes" or "path".
        channels: The number of channels of the result.
        at_least: The smallest acceptable height and width. A JPEG file is then decoded at 1/2, 1/4 or 1/8 of its size
            if both sides stay at least this long. If None, the image is decoded at full size.
        background: The colour behind transparent pixels, such as "#ffffff". If None, alpha is dropped, and these
            pixels keep the colour that is stored in the file.
        heif: If True, open the file with pillow-heif; otherwise, do so only if Pillow does not recognise a HEIC file.

    Returns:
        A Pillow image in mode "RGB" or "L", rotated according to the EXIF orientation. For arrays and tensors, a uint8
        tensor (c, h, w).

    Raises:
        ImageError: The type of `image` is not supported, or the image cannot be read.
        MissingExtraError: Pillow is needed but not installed.
    """
    if isinstance(image, dict):
        image = image["bytes"] if image.get("bytes") is not None else image.get("path", image)
    is_pillow = hasattr(image, "getexif")
    # numpy.str_, which may be a path, also has an array interface, with the shape ().
    if isinstance(image, Tensor) or (not is_pillow and getattr(image, "__array_interface__", {}).get("shape")):
        return _from_array(image, channels)
    try:
        from PIL import UnidentifiedImageError
    except ImportError as error:
        raise missing_extra(f"Reading {_name(image)}", "images") from error
    try:
        return (
            _convert(image, channels, background) if is_pillow else _open(image, channels, at_least, background, heif)
        )
    except ImageError as error:
        raise error.within(f"Cannot read {_name(image)} as an image") from error
    except (UnidentifiedImageError, KeyError) as error:  # KeyError: an old Pillow without AVIF
        if not heif and _is_heif(image):
            _register_heif(_name(image))
            return decode(image, channels, at_least, background, heif=True)
        reason = f"the file is damaged, or the format is not supported. Supported: {', '.join(FORMATS)}."
        if isinstance(image, BYTES) and image:
            reason += f" The bytes start with {bytes(image[:15])!r}."
        raise ImageError(f"Cannot read {_name(image)} as an image: {reason}") from error
    except Exception as error:  # for damaged files, Pillow's decoders raise errors of many types
        name = _name(image)
        if isinstance(error, OSError) and "://" in name:
            raise missing_image_error(name) from error
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error) or type(error).__name__
        raise ImageError(f"Cannot read {name} as an image: {reason}") from error


def _is_heif(file: Any) -> bool:
    """Return True if a file, bytes or an open file begins like a HEIC image."""
    if isinstance(file, (str, PathLike)):
        with open(file, "rb") as opened:
            return _is_heif(opened)
    if not isinstance(file, BYTES):
        try:
            file.seek(0)
            file = file.read(12)
        except (AttributeError, OSError):  # a Pillow image, or a stream that cannot be read again
            return False
    start = bytes(file[:12])
    return start[4:8] == b"ftyp" and start[8:] in HEIF_BRANDS


def _register_heif(name: str) -> None:
    """Register pillow-heif, so that Pillow can open HEIC images.

    Args:
        name: The name of the image, for the error message.

    Raises:
        ImageError: pillow-heif is not installed. An `ImageError` affects only this image, so other images of the same
            folder can still be read.
    """
    try:
        import pillow_heif  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ImageError(str(missing_extra(f"Reading the HEIC image {name}", "heic"))) from error
    pillow_heif.register_heif_opener()


def _name(image: Any) -> str:
    """Return the name or a description of an image for error messages.

    Raises:
        ImageError: The type of the image is not supported.
    """
    if isinstance(image, (str, PathLike)):
        return str(image)
    if isinstance(image, BYTES):
        return f"the {len(image)} bytes"
    if hasattr(image, "getexif"):
        return getattr(image, "filename", "") or f"the {image.mode} image"
    if hasattr(image, "read"):
        name = getattr(image, "name", None)  # of a SpooledTemporaryFile, such as an upload: None
        return name if name and isinstance(name, str) else "the open file"
    raise ImageError(
        "An image must be a path, bytes, an open file, a Pillow image, an array or a tensor, "
        f"got {type(image).__name__}. Pass several images as a list."
    )


def missing_image_error(path: str) -> ImageError:
    """Return the error for an image path that does not exist, with a hint if the path is a URL."""
    if "://" in path:
        return ImageError(f"{path} is a URL. Download the image first, and pass the path of the file or its bytes.")
    return ImageError(f"No such file: {path}")


def to_tensor(image: "Image") -> Tensor:
    """Convert a Pillow image in mode "RGB" or "L" to a uint8 tensor (c, h, w)."""
    try:
        import numpy
    except ImportError as error:
        raise missing_extra("Reading images", "images") from error

    return rearrange(torch.from_numpy(numpy.atleast_3d(numpy.array(image))), "h w c -> c h w").contiguous()


def _open(file: Any, channels: int, at_least: tuple[int, int] | None, background: str | None, heif: bool) -> "Image":
    from PIL import Image

    file = io.BytesIO(file) if isinstance(file, BYTES) else file
    formats = ["HEIF"] if heif else OF_PILLOW
    with Image.open(file, formats=formats) as image:  # closes only the file; the pixels stay valid
        pixels = image.width * image.height
        if Image.MAX_IMAGE_PIXELS and pixels > Image.MAX_IMAGE_PIXELS:  # Pillow only warns below twice the limit
            raise ImageError(
                f"the image has {pixels} pixels, more than the limit of {Image.MAX_IMAGE_PIXELS}. "
                "If you trust the file, increase PIL.Image.MAX_IMAGE_PIXELS."
            )
        if at_least:
            sideways = image.getexif().get(ORIENTATION, 1) >= SIDEWAYS
            image.draft(None, at_least if sideways else at_least[::-1])
        with _decoding_large_image if image.width * image.height > LARGE else nullcontext():
            image.load()
            return _convert(image, channels, background)


def _convert(image: "Image", channels: int, background: str | None) -> "Image":
    """Rotate a Pillow image according to its EXIF orientation, and convert it to mode "RGB" or "L".

    Without a background colour, alpha is dropped.

    Raises:
        ImageError: The image cannot be converted to this number of channels, or the range of its pixel values is
            unknown.
    """
    from PIL import Image, ImageOps

    if channels not in (1, 3):
        raise ImageError(
            f"files and Pillow images can only have 1 or 3 channels, but the model needs {channels}. Pass an array or "
            "a tensor."
        )
    mode = "RGB" if channels == 3 else "L"
    # Some versions of Pillow open 16-bit grey images in mode "I". exif_transpose drops the format, so check it first.
    in_32_bits = image.mode == "I" and image.format in ("PNG", "PPM")
    if image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or in_32_bits:  # scale to 0..255; Pillow's convert() would clip
        import numpy

        levels = numpy.array(image, dtype=numpy.uint32)
        levels += 128
        levels //= 257
        image = Image.fromarray(levels.astype(numpy.uint8))
    elif image.mode in ("I", "F"):
        raise ImageError(
            f"Pillow's mode {image.mode!r} does not define the range of the pixel values. Scale the values to the "
            "range from 0 to 1, and pass them as an array of floats."
        )
    elif background and image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, background), image.convert("RGBA"))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # gives the same colours, but no warning
    return image if image.mode == mode else image.convert(mode)


def _from_array(image: Any, channels: int) -> Tensor:
    """Convert an array or tensor (h, w), (h, w, c) or (c, h, w) to a uint8 tensor (c, h, w).

    Raises:
        ImageError: The shape or dtype is not supported, or floats are outside 0..1.
    """
    if not isinstance(image, Tensor):
        import numpy

        array = numpy.asarray(image)
        if array.dtype.kind == "f":
            array = array.astype(numpy.float32)  # torch has no big-endian or long double
        try:
            image = torch.from_numpy(array.copy())  # torch needs a writable array with positive strides
        except (TypeError, ValueError) as error:
            raise ImageError(f"An image array must be uint8, or floats from 0 to 1, got {array.dtype}.") from error
    pixels = _channels_first(image.detach().cpu(), channels)
    if pixels.is_floating_point():
        low, high = (value.item() for value in pixels.float().aminmax())
        if not (low >= -0.5 / 255 and high <= 1 + 0.5 / 255):  # tolerates rounding; fails for NaN
            raise ImageError(
                f"An image of floats must have values from 0 to 1, got {low:.4g} to {high:.4g}. Divide by 255 or pass "
                "uint8. If the image is already normalised, pass it to the model directly."
            )
        pixels = (pixels.float() * 255).round().clamp(0, 255).to(torch.uint8)
    elif pixels.dtype != torch.uint8:
        raise ImageError(f"An image array must be uint8, or floats from 0 to 1, got {pixels.dtype}.")
    return pixels.expand(channels, -1, -1)


def _channels_first(image: Tensor, channels: int) -> Tensor:
    """Return an image (h, w), (h, w, c) or (c, h, w) as a tensor (c, h, w).

    Raises:
        ImageError: The shape is not supported or ambiguous, or does not fit the number of channels of the model.
    """
    shape = tuple(image.shape)
    if len(shape) not in (2, 3) or 0 in shape:
        raise ImageError(f"An image must have the shape (h, w, c), (c, h, w) or (h, w), got {shape}.")
    if len(shape) == 2:
        image = image[None]
    accepted = (1, 3) if channels == 3 else (channels,)
    first, last = image.shape[0] in accepted, len(shape) == 3 and shape[2] in accepted
    if first and last:
        raise ImageError(f"The shape {shape} is ambiguous: (c, h, w) or (h, w, c). Pass a Pillow image instead.")
    if not first and not last:
        hint = " Drop an alpha channel with image[..., :3]." if 4 in shape else ""
        raise ImageError(f"The model needs {channels} channels, but the image has the shape {shape}.{hint}")
    return rearrange(image, "h w c -> c h w") if last else image
