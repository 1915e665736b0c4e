"""Whatever is a picture becomes rows of 8-bit pixels: files, bytes, Pillow images, arrays and tensors.

A file's content decides what it is, and only the formats named here are opened, up to a size that bounds time and
memory. Torch only; Pillow is needed for files. Shapes: c channels, h and w pixels.
"""

import io
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike, fspath
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from vitlite.errors import ImageError, missing_extra, shown
from vitlite.images import headers, jpeg2000, tiff
from vitlite.images.tiff import SMALL_COPY, Tag

FORMATS = {  # what is opened, by Pillow's name, with the endings by which folders are searched
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "AVIF": (".avif",),
    "JPEG2000": (".jp2",),
}
SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)
SIDE = 100_000  # pixels, of a picture at most
# How many times the time or the memory of others a picture takes, by its format or by Pillow's decoder for it.
WORK: dict[str | None, float] = {
    "WEBP": 2,
    "AVIF": 2,
    "JPEG2000": 4,
    "progressive": 1.4,  # JPEG
    "ppm": 20,  # a highest value that is not 255: written in Python, as the next two
    "ppm_plain": 20,
    "bmp_rle": 20,
}
LYING = range(5, 9)  # orientations of EXIF that exchange height and width
FROM_THE_RIGHT, FROM_BELOW = (2, 3, 6, 7), (3, 4, 7, 8)  # those in which, upright, the file ends on the left, or above
SCANS = 20  # of a progressive JPEG, in the time of others; each scan may go over the whole picture again
OVERSHOT = 0.5  # of 0..1, beyond which no filter goes
STRIP = 2**22  # pixels that are looked at together, so that little more than a picture is in memory
CONTENTS = {  # patterns of how other files begin, and what they are called
    rb"%!PS|\xc5\xd0\xd3\xc6": "PostScript",
    rb"%PDF": "PDF",
    rb"8BPS": "Photoshop (PSD)",
    rb"\s*<svg|\s*<\?xml": "XML, perhaps SVG",
    rb"(?i:\s*<!doctype html|\s*<html)": "a web page",
    rb"version https://git-lfs": "a pointer of Git LFS, which `git lfs pull` replaces",
    rb"(?s:....ftyp(?:hei|hev|mif|msf))": "HEIC",
    rb"(?s:....ftypavi)": "AVIF, damaged or unknown to this Pillow",
    rb"(?s:....ftyp)|\x1aE\xdf\xa3": "a video",
    rb"\xff\x0a|\x00\x00\x00\x0cJXL ": "JPEG XL",
    rb"\x00\x00[\x01\x02]\x00": "an icon (ICO)",
    rb"\xd7\xcd\xc6\x9a|(?s:\x01\x00\x00\x00.{36} EMF)": "a Windows metafile",
    rb"\x93NUMPY": "a NumPy array; numpy.load reads it",
    rb"PK\x03\x04": "a ZIP archive",
    rb"\x1f\x8b": "compressed by gzip",
    rb"\xff\xd8\xff": "JPEG, and damaged",
    rb"\x89PNG": "PNG, and damaged",
    rb"(?s:RIFF....WEBP)": "WebP, and damaged",
    rb"\Z": "nothing at all",
}
BYTES = (bytes, bytearray, memoryview)
LOCATOR = re.compile(r"([a-z][a-z0-9+.-]+):/|(data):", re.IGNORECASE)  # of a URL, and not a Windows drive


Enough = Callable[[int, int], tuple[int, int]]


SIXTEEN_BITS = {  # the formats of which white is 65535, by Pillow's mode; of "I", some keep 16 bits in 32
    "I": ("PNG", "PPM"),
    "I;16": ("PNG", "PPM", "TIFF", "JPEG2000"),
}


class Box(NamedTuple):
    """A part of what was decoded, which may begin and end within a pixel."""

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, eq=False)
class Rows:
    """A picture, turned upright. Its rows become pixels where they are asked for: `between(2, 5)` is (3, w, c)."""

    height: int
    width: int
    between: Callable[[int, int], Tensor]  # uint8
    pillow: Callable[[int, int], Any] | None = None  # the same rows as a Pillow image, "RGB" or "L", where it has them
    scaled: Box | None = None  # what the picture is of them, where it was scaled while it was decoded; None: all

    @property
    def box(self) -> Box:
        """What the picture is of its rows: of 513 pixels that were scaled to an eighth, 64.125 of 65."""
        return self.scaled or Box(0, 0, self.width, self.height)

    def strips(self, first: int, last: int) -> list[tuple[int, int]]:
        """Where to cut rows `first` to `last` - 1, so that each part is small."""
        step = max(1, min(512, STRIP // self.width))  # few rows stay in the processor's cache
        return [(row, min(row + step, last)) for row in range(first, last, step)]


def read_image(file: str | PathLike[str] | bytes | BinaryIO, channels: int = 3) -> Tensor:
    """Reads a picture file, its bytes, or an open one, turned upright: uint8 (h, w, channels); 3 are RGB, 1 is grey.

    Raises:
        ImageError: the file is missing, damaged, too large, or no picture in one of the `FORMATS`.
        MissingExtraError: Pillow is not installed.
    """
    rows = _from_file(file, channels)
    pixels = torch.empty(rows.height, rows.width, channels, dtype=torch.uint8, device="cpu")
    for first, last in rows.strips(0, rows.height):
        pixels[first:last] = rows.between(first, last)
    return pixels


def rows_of(image: Any, channels: int, enough: Enough | None = None) -> Rows:
    """Any single picture, in rows of (w, channels).

    Args:
        image: What `Preprocess` takes.
        channels: 3 are RGB, 1 is grey.
        enough: Of a picture's height and width upright, those that will do: a JPEG file is scaled to a half, a
            quarter or an eighth while it is decoded, and keeps as many. None: as it is.

    Raises:
        ImageError: It is none, or one that cannot be read.
        MissingExtraError: Pillow is needed, and not installed.
    """
    if isinstance(image, (str, PathLike, *BYTES)) or hasattr(image, "read"):
        return _from_file(image, channels, enough)
    if _is_pillow(image):
        with ONE_AT_A_TIME.has(image):
            return _from_opened(image, channels)
    if hasattr(image, "__array_interface__"):
        image = _as_tensor(image)
    if isinstance(image, Tensor):
        return _from_tensor(image, channels)
    raise ImageError(
        f"A picture is a path, bytes, an open file, a Pillow image, an array or a tensor, got {type(image).__name__}.",
        python="Several come in a list; model.predict also takes an iterator.",
    )


# ---- files


def is_read_once(file: str | PathLike[str] | bytes) -> bool:
    """Whether this is a pipe or the like: what is read of it is gone, and the next reader gets the next picture."""
    return not isinstance(file, bytes) and os.path.exists(file) and not os.path.isfile(file)


def pixels_in(file: str | PathLike[str] | bytes) -> int:
    """How many pixels' worth of memory a picture file takes, by its header; 0 where it cannot be read, or only once."""
    if is_read_once(file):
        return 0
    try:
        from PIL import Image

        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=_known()) as image:
            return int(image.width * image.height * _work(image))
    except Exception:  # whatever it is, it will be said when the picture is read
        return 0


def _known() -> list[str]:
    """Those of the `FORMATS` that this Pillow opens."""
    from PIL import Image

    Image.init()  # before, it does not know all that it can open
    return [kind for kind in FORMATS if kind in Image.OPEN]


def _from_file(file: Any, channels: int, enough: Enough | None = None) -> Rows:
    name = _name_of(file)
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise missing_extra(f"Opening {name}", "images") from error
    known = _known()
    try:
        if isinstance(file, BYTES):
            file = io.BytesIO(file)
        if isinstance(file, io.TextIOBase):
            raise ImageError("it is open as text.", python='Say open(..., "rb").')
        with ONE_AT_A_TIME.has(file), _at_its_place(file), WHOLE_FILES, Image.open(file, formats=known) as image:
            return _from_pillow(image, channels, enough)
    except UnidentifiedImageError as error:
        raise _unreadable(name, _unknown(_first_bytes(file))) from error
    except Exception as error:  # a broken file makes Pillow's decoders raise nearly anything
        raise _unreadable(name, error) from error


@contextmanager
def _at_its_place(file: Any) -> Iterator[None]:
    """Leaves an open file where it stands, so that it can be read again: at its beginning, or at its end when written.

    Raises:
        ImageError: It stands between them, and the picture may begin there, or with the file.
    """
    try:
        place = file.tell()
    except (AttributeError, OSError):  # a path; or a pipe or the like, which is read from where it is
        yield
        return
    if place:
        at_its_end = not file.read(1)
        file.seek(place)
        if not at_its_end:
            raise ImageError(
                f"it is open at byte {place}, and the picture may begin there, or with the file.",
                python="Say file.seek(0) before, or pass file.read().",
                command="",
            )
    try:
        yield
    finally:
        file.seek(place)


class _WholeFiles:
    """While any thread is in it, Pillow refuses files that are cut short.

    Also where somebody told it for the whole process to fill them up, in grey: ImageFile.LOAD_TRUNCATED_IMAGES.
    """

    def __init__(self) -> None:
        self._lock, self._readers, self._wish = Lock(), 0, False

    def __enter__(self) -> None:
        from PIL import ImageFile

        with self._lock:
            if self._readers == 0:
                self._wish, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
            self._readers += 1

    def __exit__(self, *_: object) -> None:
        from PIL import ImageFile

        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES = self._wish


WHOLE_FILES = _WholeFiles()


class _OneAtATime:
    """Of threads that are given the same object, such as an open file, which stands at one place, only one has it."""

    def __init__(self) -> None:
        self._changing = Lock()
        self._had: dict[int, tuple[Lock, int]] = {}  # and how many threads have it, or wait

    @contextmanager
    def has(self, thing: Any) -> Iterator[None]:
        """Waits until no other thread has it."""
        with self._changing:
            mine, threads = self._had.get(id(thing), (Lock(), 0))
            self._had[id(thing)] = mine, threads + 1
        try:
            with mine:
                yield
        finally:
            with self._changing:
                _, threads = self._had.pop(id(thing))
                if threads > 1:
                    self._had[id(thing)] = mine, threads - 1


ONE_AT_A_TIME = _OneAtATime()


def _name_of(file: Any) -> str:
    """What errors call a file."""
    if isinstance(file, (str, PathLike)):
        return shown(str(fspath(file)), 1000)
    if isinstance(file, BYTES):
        return f"the {len(file)} bytes"
    return shown(str(getattr(file, "name", "the open file")), 1000)


def _first_bytes(file: Any) -> bytes:
    """Of a file, or an open one; nothing known of one that cannot go back."""
    try:
        if not isinstance(file, (str, PathLike)):
            with _at_its_place(file):
                file.seek(0)
                return bytes(memoryview(file.read(64)))
        if not os.path.isfile(file):  # a pipe may give nothing more, and keep us waiting
            return b"?"
        with open(file, "rb") as opened:
            return opened.read(64)
    except (AttributeError, TypeError, OSError):
        return b"?"


def _unknown(head: bytes) -> ImageError:
    """What a file is that is in none of the formats, as far as its first bytes tell."""
    formats = f"vitlite opens {', '.join(FORMATS)}"
    for pattern, content in CONTENTS.items():
        if re.match(pattern, head):
            return ImageError(
                f"its content is {content}; {formats}.",
                python="Pass what another library reads from it: a Pillow image, or an array.",
                command="Save it in one of these.",
            )
    return ImageError(f"it is damaged, or in another format; {formats}.")


def _unreadable(name: str, error: Exception) -> ImageError:
    context = f"Cannot read {name} as a picture"
    if isinstance(error, ImageError):
        return error.within(context)
    elsewhere = fetch_first(name)
    if elsewhere and isinstance(error, OSError):
        return elsewhere.within(context)
    if isinstance(error, FileNotFoundError):
        return ImageError(f"{context}: no such file")
    return ImageError(f"{context}: {shown(str(error)) or type(error).__name__}")


def fetch_first(url: str) -> ImageError | None:
    """The error for a URL that is given in the place of a file, with what fetches it; None for what is no URL."""
    match = LOCATOR.match(url)
    if match is None:
        return None
    scheme = (match[1] or match[2]).lower()
    if scheme not in ("http", "https", "ftp", "file", "data"):
        return ImageError("it is a URL, and vitlite opens files; fetch it first")
    if scheme not in ("file", "data"):
        url = re.sub(":/(?!/)", "://", url, count=1)  # a path that was made of one has lost a slash
    return ImageError(
        "it is a URL, and vitlite opens files.",
        python=f"Fetch it: import urllib.request; picture = urllib.request.urlopen({url!r}).read()",
        command=f"Fetch it, and name the file: curl --location --output picture.jpg {shlex.quote(url)}",
    )


# ---- Pillow


def is_one(image: Any) -> bool:
    """Whether this is a picture by its kind, and not several: rows of an array would pass for pictures, too."""
    if isinstance(image, (str, PathLike, *BYTES)) or hasattr(image, "read") or _is_pillow(image):
        return True
    return getattr(image, "ndim", 0) in (2, 3)


def _is_pillow(image: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # a Pillow image exists only where this is loaded
    return pillow is not None and isinstance(image, pillow.Image)


def _from_opened(image: Any, channels: int) -> Rows:
    """A Pillow image that somebody else opened or made."""
    not_decoded = getattr(image, "tile", None)
    try:
        with WHOLE_FILES:
            return _from_pillow(image, channels)
    except Exception as error:  # opened lazily, it may be found broken only now
        if not_decoded:
            image.tile = not_decoded  # else Pillow would give it next time, in black where it broke
        raise _unreadable(getattr(image, "filename", "") or f"the {image.mode} image", error) from error


def _from_pillow(image: Any, channels: int, enough: Enough | None = None) -> Rows:
    """A Pillow image of any mode, turned as its EXIF says. Alpha is dropped."""
    if channels not in (1, 3):
        raise ImageError(
            f"the model takes {channels} channels, a picture gives 1 or 3.",
            python="Pass an array or a tensor.",
            command="",
        )
    if getattr(image, "tile", None) and image.fp is None:
        raise ImageError("it could not be decoded, and its file is closed.", python="Open the file again.")
    _check_size(image)
    not_decoded = getattr(image, "tile", None)
    if not_decoded:
        _refuse_what_pillow_would_not(image)
    tiff.refuse_misread(image)
    if not_decoded and image.mode == "P":
        _refuse_missing_colours(image)
    sixteen_bits = image.format in SIXTEEN_BITS.get(image.mode[:4], ())  # asked now: a turned copy has no format
    image, box = _upright(image, enough)
    if image.mode.startswith(("I", "F")) and not sixteen_bits:
        no_file = "" if image.format else ", where it is of no file"
        raise ImageError(
            f"mode {image.mode!r} has no value for white{no_file}.",
            python="Scale it to 0..1 and pass an array.",
            command="Save it with 8 or 16 bits.",
        )
    return replace(_rows_of_pillow(image, channels, sixteen_bits), scaled=box)


def _upright(image: Any, enough: Enough | None) -> tuple[Any, Box | None]:
    """A Pillow image turned as its EXIF says, of which no more is decoded than is enough; and what of it is picture."""
    from PIL import ExifTags, ImageFile, ImageOps

    turned = image.getexif().get(ExifTags.Base.Orientation, 1)
    if turned in LYING and not isinstance(image, ImageFile.ImageFile):
        _refuse_turned_by_hand(image)
    drafted = _decode_less(image, enough, lying=turned in LYING) if enough else None
    upright = image if turned == 1 else ImageOps.exif_transpose(image)
    if drafted is None:
        return upright, None
    _, _, right, bottom = drafted
    if turned in LYING:
        right, bottom = bottom, right
    left = upright.width - right if turned in FROM_THE_RIGHT else 0
    top = upright.height - bottom if turned in FROM_BELOW else 0
    return upright, Box(left, top, left + right, top + bottom)


def _refuse_turned_by_hand(image: Any) -> None:
    """Makes sure that a copy of a picture lies as the EXIF says that Pillow gave it too, whatever was done to it.

    Raises:
        ImageError: It has been turned since.
    """
    from PIL import ExifTags

    camera = image.getexif().get_ifd(ExifTags.IFD.Exif)
    width, height = (camera.get(tag) for tag in (ExifTags.Base.ExifImageWidth, ExifTags.Base.ExifImageHeight))
    if not isinstance(width, int) or not isinstance(height, int):
        return
    if (width - height) * (image.width - image.height) < 0:
        raise ImageError(
            f"its EXIF says that it is to be turned and was of {width} x {height} pixels, and it is of {image.width} x "
            f"{image.height}: turned already?",
            python="Turn them by ImageOps.exif_transpose, or say that it is upright: image.getexif()[274] = 1.",
            command="",
        )


def _rows_of_pillow(image: Any, channels: int, sixteen_bits: bool) -> Rows:
    """The rows of an upright Pillow image. The first is asked for at once: it shows whether the others can be had."""

    def part(first: int, last: int) -> Any:
        return image.crop((0, first, image.width, last))

    def eight_bits(first: int, last: int) -> Any:
        return _eight_bits(part(first, last), channels)

    part(0, 1)  # loads it
    if sixteen_bits:
        return Rows(image.height, image.width, lambda first, last: _high_bytes(part(first, last), channels))
    eight_bits(0, 1)  # converts it
    return Rows(image.height, image.width, lambda first, last: bytes_of(eight_bits(first, last)), eight_bits)


def _decode_less(image: Any, enough: Enough, *, lying: bool) -> Box | None:
    """Has Pillow scale a file while it decodes it, where its format can: JPEG alone. What the picture is of it then.

    Args:
        image: Opened, and not decoded yet.
        enough: As `rows_of` takes it.
        lying: Whether height and width are exchanged when it is turned upright.
    """
    if lying:
        width, height = enough(image.width, image.height)
    else:
        height, width = enough(image.height, image.width)
    drafted = image.draft(None, (width, height))
    return Box(*drafted[1]) if drafted else None


def _eight_bits(image: Any, channels: int) -> Any:
    """The same in mode "RGB" or "L"."""
    if image.mode == "P" and "transparency" in image.info:  # the same colours, without Pillow's warning
        image = image.convert("RGBA")
    mode = "RGB" if channels == 3 else "L"
    return image if image.mode == mode else image.convert(mode)


def bytes_of(image: Any) -> Tensor:
    """A Pillow image of mode "RGB" or "L" as uint8 (h, w, 3 or 1)."""
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, -1)


def _high_bytes(image: Any, channels: int) -> Tensor:
    """Grey levels from 0 to 65535, rounded to 0 to 255, where Pillow's convert() would clip: uint8 (h, w, channels)."""
    values = torch.frombuffer(bytearray(image.convert("I").tobytes()), dtype=torch.int32)
    levels = (values * 255 + 32767) // 65535
    return levels.to(torch.uint8).view(image.height, image.width, 1).expand(-1, -1, channels)


def _check_size(image: Any) -> None:
    """Makes sure that a picture is read in bounded time and memory, before it is.

    Raises:
        ImageError: It is too large, or a reduced copy beside a larger picture.
    """
    from PIL import Image

    _check_sides(image.height, image.width)
    pixels, work = image.width * image.height, max(_work(image), _scans(image) / SCANS)
    most = Image.MAX_IMAGE_PIXELS
    if most and pixels * work > most:  # of some of which Pillow itself only warns
        raise ImageError(
            f"{pixels} pixels, allowed are {int(most / work)}.",
            python="Trusted: raise PIL.Image.MAX_IMAGE_PIXELS.",
            command="Make it smaller.",
        )
    tags = getattr(image, "tag_v2", {})
    if tags.get(Tag.PURPOSE, 0) & 1 or tags.get(Tag.OLD_PURPOSE) == SMALL_COPY:
        raise ImageError("a TIFF that begins with a small copy, as raw photos do; save the photo itself")


def _check_sides(height: int, width: int) -> None:
    if max(height, width) > SIDE or min(height, width) < 1:
        raise ImageError(f"a picture has sides of 1 to {SIDE} pixels, got {width} x {height}")


def _work(image: Any) -> float:
    """How many times the time or the memory of others a file takes that Pillow has opened, as its header says."""
    decoders = {tile[0] for tile in getattr(image, "tile", ())}
    work = max(WORK.get(kind, 1) for kind in (image.format, *decoders))
    if "jpeg" in decoders and image.info.get("progressive"):
        work = max(work, WORK["progressive"])
    tags = getattr(image, "tag_v2", {})
    least = tags.get(Tag.TILE_WIDTH, 0) * tags.get(Tag.TILE_HEIGHT, 0)  # of a TIFF, each decoded as a whole
    if "jpeg2k" in decoders:
        least = jpeg2000.memory(image.fp)
    return max(work, least / (image.width * image.height))


def _scans(image: Any) -> int:
    """How often a JPEG begins to tell its pixels: once, or a progressive one several times; of other kinds, never."""
    if not any(tile[0] == "jpeg" for tile in getattr(image, "tile", ())):
        return 0
    return headers.scans(image.fp)


def _refuse_what_pillow_would_not(image: Any) -> None:
    """Makes sure that Pillow sees what is wrong with a file, and takes it for what it is; the file stays where it was.

    Raises:
        ImageError: It would read another picture.
    """
    place = image.fp.tell()
    if image.format == "PNG":
        headers.refuse_damaged_png(image.fp)
    elif image.format == "JPEG2000":
        jpeg2000.refuse_misread(image)
    elif image.format == "BMP":
        headers.refuse_misread_bmp(image.fp, image.mode)
    image.fp.seek(place)


def _refuse_missing_colours(image: Any) -> None:
    """Makes sure that a file has the colours that its pixels name: for those that it has not, Pillow takes black.

    Raises:
        ImageError: Its palette is missing, cut short, or of fewer colours.
    """
    palette = image.palette  # looked at before it is decoded, when Pillow fills it up
    numbers = len((palette.rawmode or palette.mode).partition(";")[0]) if palette else 3  # of a colour
    colours, rest = divmod(len(palette.palette) if palette else 0, numbers)
    _, highest = image.getextrema()  # decodes it
    if rest or highest >= colours:
        raise ImageError(
            f"its palette has {colours} colours{' and a part of one' if rest else ''}, and its pixels name number "
            f"{highest}, from 0."
        )


# ---- arrays and tensors


def _as_tensor(array: Any) -> Tensor:
    """An array, copied, since torch minds read-only ones and odd strides, and of types that torch has."""
    masked = getattr(array, "mask", None)
    if masked is not None and masked.any():
        raise ImageError("A picture has all its pixels, got a masked array.", python="Fill it: image.filled(...).")
    try:
        wide = array.dtype.kind == "f" and array.dtype.itemsize > 8  # numpy's longdouble
        native = "float64" if wide else array.dtype.newbyteorder("=")  # such as of FITS, netCDF and some TIFFs
        return torch.as_tensor(array.astype(native, order="C"), device="cpu")
    except (AttributeError, TypeError, ValueError) as error:
        kind = getattr(array, "dtype", type(array).__name__)
        raise ImageError(f"A picture must be uint8, or float from 0 to 1, got {kind}.") from error


def _from_tensor(image: Tensor, channels: int) -> Rows:
    """(h, w), (h, w, c) or (c, h, w), uint8 or float in 0..1."""
    if image.is_meta or image.is_nested or image.layout != torch.strided:
        raise ImageError(
            f"A picture must be a dense tensor with data, got one of {image.layout} on {image.device}.",
            python="Of a sparse one, pass image.to_dense().",
        )
    image = image.detach().cpu()
    axes = _axes(tuple(image.shape), channels)
    if axes == "h w":
        image, axes = image[:, :, None], "h w c"
    image = rearrange(image, f"{axes} -> h w c")
    height, width, _ = image.shape
    _check_sides(height, width)
    _check_levels(image)

    def between(first: int, last: int) -> Tensor:
        return _levels(image[first:last]).expand(-1, -1, channels)

    return Rows(height, width, between)


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


def _check_levels(image: Tensor) -> None:
    """Makes sure that these are grey levels: uint8, or floats within half a level of 0..1.

    Where uint8 has 0 and 1 alone, a picture may have been divided by 255; but so are the darkest frames of a film.
    """
    if image.dtype == torch.uint8:
        return
    if not image.is_floating_point():
        raise ImageError(f"A picture must be uint8, or float from 0 to 1, got {image.dtype}. Convert it, or scale it.")
    low, high = (value.item() for value in image.float().aminmax())
    if not math.isfinite(low + high):
        raise ImageError("The picture has values that are not finite (NaN or infinity).")
    half = 0.5 / 255
    if low < -half or high > 1 + half:
        raise ImageError(
            f"A picture of floats has values in 0..1, got {low:.4g} to {high:.4g}. It looks {_taken_for(low, high)}."
        )
    if 0 < high < 1.5 / 255:
        raise ImageError(
            f"The picture is almost black: of 0..1, no value is above {high:.2g}. It looks divided by 255 twice.",
            python="If it is as dark as that, pass it as uint8.",
        )


def _taken_for(low: float, high: float) -> str:
    """What a picture with values outside of 0..1 may be, and what to do about it."""
    if low < -OVERSHOT:
        return "normalised already: pass it to the model"
    if high < 1 + OVERSHOT:
        return "resized by a filter that goes beyond what it is given, as bicubic ones do: clip it, image.clip(0, 1)"
    return "0..255: divide by 255, or pass uint8"


def _levels(image: Tensor) -> Tensor:
    """Grey levels from 0 to 255, as uint8."""
    if image.dtype == torch.uint8:
        return image
    return image.float().mul(255).round().clamp(0, 255).to(torch.uint8)
