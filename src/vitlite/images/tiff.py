"""TIFFs that Pillow takes for another picture, without an error: told by their tags, and refused."""

import math
import operator
from enum import IntEnum
from typing import Any, BinaryIO

from vitlite.errors import ImageError


class Tag(IntEnum):
    """What a TIFF says of its pixels, by the numbers of TIFF 6.0."""

    PURPOSE = 254
    OLD_PURPOSE = 255
    WIDTH = 256
    HEIGHT = 257
    BITS = 258
    COMPRESSION = 259
    MEANING = 262
    BIT_ORDER = 266
    STRIPS = 273  # where each begins
    SAMPLES = 277
    ROWS = 278  # of a strip
    STRIP_BYTES = 279  # of each
    PLANES = 284  # 1: the colours of a pixel stand together; 2: each colour is a plane
    PREDICTOR = 317
    PALETTE = 320
    TILE_WIDTH = 322
    TILE_HEIGHT = 323
    TILES = 324  # where each begins
    TILE_BYTES = 325  # of each
    INKS = 332
    INK_RANGE = 336
    NUMBERS = 339
    YCBCR_WEIGHTS = 529
    YCBCR_STEPS = 530
    YCBCR_RANGE = 532


BLACK_IS_0, RGB, PALETTE, CMYK, YCBCR, LAB = 1, 2, 3, 5, 6, 8  # what a TIFF's numbers mean
UNCOMPRESSED, PACKBITS, JPEGS = 1, 32773, (6, 7)  # of a TIFF
JPEG, END_OF_JPEG, PADDING = 7, b"\xff\xd9", 16  # and how many bytes of zeros may stand behind that
HEADER = 8  # bytes of every TIFF, which are no pixels
SIGNED = 2
SMALL_COPY = 2  # by the old tag for the purpose; the new one has bits
USUAL_YCBCR = {  # how Pillow reads it where no decoder does
    Tag.YCBCR_WEIGHTS: (0.299, 0.587, 0.114),
    Tag.YCBCR_STEPS: (1, 1),
    Tag.YCBCR_RANGE: (0, 255, 128, 255, 128, 255),
}


def refuse_misread(image: Any) -> None:
    """Makes sure that Pillow takes a TIFF for what it is, as far as its tags tell.

    Raises:
        ImageError: It would not, or nobody can know.
    """
    tags = getattr(image, "tag_v2", None)
    if not tags:
        return
    reason = _misread_numbers(tags, image.mode) or _misread_order(tags) or _misread_ycbcr(tags)
    if not reason and getattr(image, "tile", None):  # not decoded yet
        reason = _misread_bytes(tags, image.fp)
    if reason:
        raise ImageError(
            f"a TIFF {reason}, which Pillow may take for another picture.",
            python="Pass an array of what another library reads, such as tifffile.",
            command="Save it with 8 bits, or as PNG.",
        )


def _misread_numbers(tags: Any, mode: str) -> str:
    """What is special about what the numbers of a TIFF mean, where Pillow does not look; nothing where it does."""
    meaning = tags.get(Tag.MEANING)
    if meaning is None:
        return "that does not say whether 0 is black or white"
    if SIGNED in tags.get(Tag.NUMBERS, ()):
        return "of signed numbers"
    if mode.startswith("I;16") and (tags.get(Tag.BITS), meaning) != ((16,), BLACK_IS_0):
        return "of 12 bits, or of 16 with white as 0"
    if meaning == PALETTE and 0 < max(tags.get(Tag.PALETTE, (0,))) < 2**8:
        return "with a palette of 8 bits, where TIFF's have 16"
    if meaning == CMYK:
        first, last = tags.get(Tag.INK_RANGE, (0, 1))[:2]
        if tags.get(Tag.INKS, 1) != 1 or first > last:
            return "of other inks than CMYK, or with 0 for all of an ink"
    return ""


def _misread_order(tags: Any) -> str:
    """What is special about where a TIFF has its numbers, where Pillow looks elsewhere; nothing where it does not."""
    compression, meaning = tags.get(Tag.COMPRESSION, UNCOMPRESSED), tags.get(Tag.MEANING)
    if tags.get(Tag.PREDICTOR, 1) != 1 and compression in (UNCOMPRESSED, PACKBITS):
        return "of differences, without a compression that undoes them"
    in_planes = tags.get(Tag.PLANES, 1) != 1
    if in_planes and (meaning == LAB or (compression == UNCOMPRESSED and not _are_plain_bytes(tags))):
        return "with a plane for each colour, which are not of 8 bits or not RGB"
    if compression == UNCOMPRESSED or meaning == YCBCR:
        starts = tags.get(Tag.STRIPS) or tags.get(Tag.TILES, ())
        planes = tags.get(Tag.SAMPLES, 1) if in_planes else 1
        if len(starts) != planes * _parts(tags):
            return "whose strips or tiles do not add up to it"
    return ""


def _misread_bytes(tags: Any, file: BinaryIO) -> str:
    """What is special about the bytes of a TIFF, where Pillow takes others for them, or makes some up."""
    compression = tags.get(Tag.COMPRESSION, UNCOMPRESSED)
    starts = tags.get(Tag.STRIPS) or tags.get(Tag.TILES, ())
    counts = tags.get(Tag.STRIP_BYTES if Tag.STRIPS in tags else Tag.TILE_BYTES, ())
    if compression == UNCOMPRESSED:
        least = _bytes_of_parts(tags) if tags.get(Tag.MEANING) != YCBCR else [0] * len(starts)
        if any(start < HEADER for start in starts) or any(map(operator.lt, counts, least)):
            return "of which strips or tiles are left out, or cut"
    if compression == JPEG:
        place = file.tell()
        for start, count in zip(starts, counts, strict=False):
            file.seek(start + max(count - PADDING, 0))
            if not file.read(min(count, PADDING)).rstrip(b"\0").endswith(END_OF_JPEG):
                return "with a strip or tile that is cut"
        file.seek(place)
    return ""


def _bytes_of_parts(tags: Any) -> list[int]:
    """How many bytes the pixels of each strip or tile of an uncompressed TIFF take."""
    width, rows = tags[Tag.WIDTH], tags.get(Tag.ROWS, tags[Tag.HEIGHT])
    if Tag.STRIPS not in tags:
        width, rows = tags[Tag.TILE_WIDTH], tags[Tag.TILE_HEIGHT]
    planes = tags.get(Tag.SAMPLES, 1) if tags.get(Tag.PLANES, 1) != 1 else 1
    bits = (tags.get(Tag.BITS) or (1,))[0] * tags.get(Tag.SAMPLES, 1) // planes  # of a pixel
    parts = [rows] * _parts(tags)
    if Tag.STRIPS in tags:
        parts[-1] = tags[Tag.HEIGHT] - rows * (len(parts) - 1)  # the last has the rows that remain
    return [height * math.ceil(width * bits / 8) for height in parts] * planes


def _are_plain_bytes(tags: Any) -> bool:
    """Whether each number of a TIFF is a byte that is used as it is."""
    as_they_are = tags.get(Tag.MEANING) in (BLACK_IS_0, RGB, PALETTE, CMYK) and tags.get(Tag.BIT_ORDER, 1) == 1
    return as_they_are and set(tags.get(Tag.BITS, ())) == {8}


def _parts(tags: Any) -> int:
    """In how many strips or tiles each plane of a TIFF is cut."""
    width, height = tags[Tag.WIDTH], tags[Tag.HEIGHT]
    if Tag.STRIPS in tags:
        return math.ceil(height / max(1, tags.get(Tag.ROWS, height)))
    return math.ceil(height / tags[Tag.TILE_HEIGHT]) * math.ceil(width / tags[Tag.TILE_WIDTH])


def _misread_ycbcr(tags: Any) -> str:
    """What is special about a TIFF in YCbCr, where Pillow takes it for the usual kind; nothing where it is that."""
    compression = tags.get(Tag.COMPRESSION, UNCOMPRESSED)
    if tags.get(Tag.MEANING) != YCBCR or compression in JPEGS:  # which say it themselves
        return ""
    if Tag.YCBCR_STEPS not in tags:
        return "in YCbCr that does not say how coarse its colours are"
    for tag, usual in USUAL_YCBCR.items():
        there = tuple(round(float(number), 3) for number in tags.get(tag, usual))
        if compression == UNCOMPRESSED and there != usual:
            return "in YCbCr with coarse colours, or of another range"
    return ""
