"""JPEG 2000s that Pillow takes for another picture, without an error: told by their headers, and refused.

Such a file is a codestream (ISO/IEC 15444-1, annex A), which .jp2 has in a box among boxes (annex I). Pillow reads its
numbers, and leaves aside most of what the boxes say of them.
"""

import math
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from vitlite.errors import ImageError

CODESTREAM = b"\xff\x4f\xff\x51"  # how it begins: with its sizes
START_OF_TILE, START_OF_DATA, END = b"\xff\x90", b"\xff\x93", b"\xff\xd9"
CODING, CODING_OF_COMPONENT = b"\xff\x52", b"\xff\x53"  # in how many layers, sizes, precincts and blocks
LAST_PART = 2**28  # bytes of it that are looked through, where it does not say its length
TILE, COMPONENT = 2100, 260  # pixels' worth of memory that is taken for a tile, however small, and for its colours
PRECINCT, BLOCK, PACKET = 140, 60, 1  # and for each of these, however empty
COLOURS = {"L": 1, "I;16": 1, "LA": 1, "RGB": 3, "RGBA": 3, "CMYK": 4}  # components by Pillow's mode; alpha is dropped
SPACES = (12, 16, 17, 18)  # CMYK, sRGB, grey and sYCC, by their numbers in annex I and in JPX
ENUMERATED, PROFILES = 1, (2, 3)  # how a colour space is said


class Box(NamedTuple):
    """A part of a file, by where it begins and ends."""

    kind: bytes
    first: float
    last: float  # infinity: with the file


class Sizes(NamedTuple):
    """What a codestream says of itself first."""

    width: int
    height: int
    tiles: int
    bits: tuple[int, ...]  # of each component


class Coding(NamedTuple):
    """How the numbers of a component are packed."""

    layers: int
    block: int  # pixels of one, as a power of two
    precincts: bytes  # for each size that the picture can be read at: powers of two of height and width


def refuse_misread(image: Any) -> None:
    """Makes sure that a JPEG 2000 is whole, and that Pillow takes it for what it is.

    Raises:
        ImageError: It is not, or would not.
    """
    file = image.fp
    header, codestream = _parts(file)
    _refuse_cut(file, codestream)
    reason = _misread_colours(file, header, image.mode) or _misread_sizes(_sizes(file, codestream), image)
    if reason:
        raise ImageError(
            f"a JPEG 2000 {reason}, which Pillow may take for another picture.",
            python="Pass an array of what another library reads, such as imagecodecs.",
            command="Save it as PNG.",
        )


def memory(file: BinaryIO) -> int:
    """How many pixels' worth of memory the tiles of a file take beside its pixels: all are set up before one is read.

    Raises:
        ImageError: It has none, or says of single tiles how they are coded.
    """
    codestream = _parts(file)[1]
    sizes = _sizes(file, codestream)
    codings = _codings(file, codestream)
    work = sizes.tiles * (TILE + COMPONENT * len(sizes.bits))
    return work + len(sizes.bits) * max((_work_of(coding, sizes) for coding in codings), default=0)


def _work_of(coding: Coding, sizes: Sizes) -> int:
    """What precincts, blocks and packets of one component take, if it is coded so, beside a precinct of each tile."""
    precincts = 0
    for size, sides in enumerate(coding.precincts):
        step = 2 ** (len(coding.precincts) - 1 - size)  # each size has twice the pixels of the one before, across
        across = math.ceil(sizes.width / (step << (sides & 15)))
        down = math.ceil(sizes.height / (step << (sides >> 4)))
        precincts += max(across * down - sizes.tiles, 0)
    blocks = precincts + (sizes.width * sizes.height >> coding.block)
    packets = (coding.layers - 1) * (precincts + sizes.tiles * len(coding.precincts))  # of each precinct and layer
    return precincts * PRECINCT + blocks * BLOCK + packets * PACKET


def _codings(file: BinaryIO, codestream: Box) -> list[Coding]:
    """How all components are coded, and those that are coded otherwise.

    Raises:
        ImageError: A tile is coded in a way of its own, of which there may be as many as tiles.
    """
    found: list[Coding] = []
    layers, in_tile = 1, False
    for kind, body in _segments(file, codestream):
        in_tile = in_tile or kind == START_OF_TILE
        if kind not in (CODING, CODING_OF_COMPONENT):
            continue
        if in_tile:
            raise ImageError("the tiles of this JPEG 2000 are coded in several ways.")
        if kind == CODING:
            layers = _number(body[2:4])
        first = 5 if kind == CODING else _width_of_number(file, codestream) + 1
        has_precincts = body[0 if kind == CODING else first - 1] & 1
        count = body[first] + 1
        usual = b"\xff" * count  # as large as can be
        precincts = body[first + 5 : first + 5 + count] if has_precincts else usual
        found.append(Coding(layers, body[first + 1] + body[first + 2] + 4, precincts))
    return found


def _width_of_number(file: BinaryIO, codestream: Box) -> int:
    """In how many bytes a component is numbered."""
    return 1 if len(_sizes(file, codestream).bits) < 257 else 2


def _segments(file: BinaryIO, codestream: Box) -> Iterator[tuple[bytes, bytes]]:
    """The markers with what follows them: of the main header and of each tile's, whose data is passed over."""
    place, end_of_part = codestream.first + 2, math.inf
    while place < codestream.last and (head := _at(file, place, 10))[:1] == b"\xff" and head[:2] != END:
        kind, length = head[:2], _number(head[2:4]) + 2
        if kind == START_OF_DATA:
            place = end_of_part
            continue
        if kind == START_OF_TILE:
            end_of_part = place + (_number(head[6:]) or math.inf)
        yield kind, _at(file, place + 4, length - 4)
        place += max(length, 2)


def _parts(file: BinaryIO) -> tuple[Box, Box]:
    """The header of a file, which is nothing where it is a codestream alone, and its codestream."""
    boxes = {b"jp2h": Box(b"jp2h", 0, 0), b"jp2c": Box(b"jp2c", 0, math.inf)}
    if _at(file, 0, 4) != CODESTREAM:
        for box in _boxes(file, Box(b"", 0, math.inf)):
            boxes[box.kind] = box
            if box.kind == b"jp2c":
                break
    codestream = boxes[b"jp2c"]
    if _at(file, codestream.first, 4) != CODESTREAM:
        raise ImageError("it is cut short, or damaged: this JPEG 2000 has no pixels.")
    return boxes[b"jp2h"], codestream


def _boxes(file: BinaryIO, within: Box) -> Iterator[Box]:
    """The boxes that stand one after the other in another."""
    place = within.first
    while place < within.last and len(head := _at(file, place, 16)) >= 8:
        length, first = _number(head[:4]), place + 8
        if length == 1:  # too long for four bytes
            length, first = _number(head[8:]), place + 16
        last = place + length if length else within.last
        if last < first:
            return
        yield Box(head[4:8], first, last)
        place = last


def _at(file: BinaryIO, place: float, length: int) -> bytes:
    file.seek(int(place))
    return file.read(length)


def _number(content: bytes) -> int:
    return int.from_bytes(content, "big")


def _refuse_cut(file: BinaryIO, codestream: Box) -> None:
    """Makes sure that the parts of a codestream follow each other up to its end: Pillow leaves missing tiles black.

    Raises:
        ImageError: The next part, or the end, is not where it should be.
    """
    place = codestream.first + 2  # behind the first marker
    while place < codestream.last and (head := _at(file, place, 10))[:1] == b"\xff":  # as every marker begins
        if head[:2] == END:
            return
        length = _number(head[2:4]) + 2
        if head[:2] == START_OF_TILE:
            length = _number(head[6:])  # of a part with all that is in it
            if length == 0 and END in _at(file, place, LAST_PART):
                return
        place += max(length, 2)
    raise ImageError("it is cut short: the parts of this JPEG 2000 have no end.")


def _sizes(file: BinaryIO, codestream: Box) -> Sizes:
    segment = _at(file, codestream.first, 2**16)
    right, lower, left, upper, tile_width, tile_height, tile_left, tile_upper = (
        _number(segment[place : place + 4]) for place in range(8, 40, 4)
    )
    across = math.ceil((right - tile_left) / max(tile_width, 1))
    down = math.ceil((lower - tile_upper) / max(tile_height, 1))
    components = _number(segment[40:42])
    bits = tuple((number & 127) + 1 for number in segment[42 : 42 + 3 * components : 3])  # the highest bit: signed
    return Sizes(right - left, lower - upper, across * down, bits)


def _misread_sizes(sizes: Sizes, image: Any) -> str:
    """What is special about the numbers of a file, where Pillow takes them for others; nothing where it does not."""
    if (sizes.width, sizes.height) != image.size:
        return "whose header says another size than its pixels"
    usual = range(9, 17) if image.mode.startswith("I") else (8,)  # of fewer, white is grey; of more, it may be black
    for bits in sizes.bits[: COLOURS.get(image.mode)]:
        if bits not in usual:
            return f"with a colour of {bits} bits"
    return ""


def _misread_colours(file: BinaryIO, header: Box, mode: str) -> str:
    """What is special about what the numbers stand for, where Pillow does not look; nothing where it does."""
    for box in _boxes(file, header):
        if box.kind == b"pclr":
            return "with a palette"
        if box.kind == b"colr" and not _is_usual_space(_at(file, box.first, 23), mode):
            return "in an unusual colour space"
        if box.kind == b"cdef" and not _are_in_order(_at(file, box.first, 2**19), COLOURS.get(mode, 0)):
            return "whose colours are in an unusual order"
    return ""


def _is_usual_space(said: bytes, mode: str) -> bool:
    """Whether a colour space is one that Pillow knows; of a profile, its kind alone counts."""
    way = said[:1]
    if way == bytes([ENUMERATED]):
        return _number(said[3:7]) in SPACES
    known = (b"CMYK",) if mode == "CMYK" else (b"RGB ", b"GRAY")
    return _number(way) in PROFILES and said[19:23] in known


def _are_in_order(said: bytes, colours: int) -> bool:
    """Whether the first component is said to be the first colour, and so on."""
    for place in range(2, 2 + 6 * _number(said[:2]), 6):
        component, kind, colour = (_number(said[place + i : place + i + 2]) for i in (0, 2, 4))
        if component < colours and (kind, colour) != (0, component + 1):
            return False
    return True
