"""What stands in JPEG, PNG and BMP files, where Pillow does not look before it decodes them.

jpeg2000 and tiff are kinds of files with modules of their own.
"""

import math
import os
import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from vitlite.errors import ImageError

MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd7]")  # of a JPEG, but for those that begin no segment
START_OF_IMAGE, END_OF_IMAGE, START_OF_SCAN = 0xD8, 0xD9, 0xDA
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a pixel, by its kind
ADAM7 = (  # which pixels the parts of an interlaced PNG have: the first column and row, and the steps
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2),
)  # fmt: skip


def scans(file: BinaryIO) -> int:
    """How often a JPEG begins to tell its pixels: once, or a progressive one several times."""
    file.seek(0)
    return sum(marker == START_OF_SCAN for marker in _markers(file))


def _markers(file: BinaryIO) -> Iterator[int]:
    """The markers of a JPEG up to its end, behind which a phone may put a film."""
    window, place = b"", 0
    while True:
        match = MARKER.search(window, place)
        if match is None:
            window, place = window[-1:] + (block := file.read(2**20)), 0
            if not block:
                return
            continue
        marker, place = window[match.end() - 1], match.end()
        yield marker
        if marker == END_OF_IMAGE:
            return
        if marker == START_OF_IMAGE:
            continue
        if place + 2 > len(window):
            window, place = window[place:] + file.read(2**20), 0
        place += int.from_bytes(window[place : place + 2], "big")  # of a segment, whose bytes are no markers
        if place > len(window):
            file.seek(place - len(window), os.SEEK_CUR)
            window, place = b"", 0


def refuse_damaged_png(file: BinaryIO) -> None:
    """Makes sure that the bytes of a PNG's pixels are those that were written, and all of them: Pillow does not.

    Raises:
        ImageError: They are others, as their checksum says; or fewer than its header says.
    """
    file.seek(len(PNG_SIGNATURE) + 8)
    missing, inflating = _bytes_of_png(file.read(13)), zlib.decompressobj()
    file.seek(len(PNG_SIGNATURE))
    while len(head := file.read(8)) == 8:
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        if kind != b"IDAT":
            file.seek(length + 4, os.SEEK_CUR)
            continue
        checksum = zlib.crc32(kind)
        while length and (block := file.read(min(length, 2**20))):
            checksum, length = zlib.crc32(block, checksum), length - len(block)
            missing -= _inflated(inflating, block, missing)
        written = file.read(4)
        if len(written) == 4 and int.from_bytes(written, "big") != checksum:  # one that is cut short, Pillow refuses
            raise ImageError("its pixels do not have the checksum that is written beside them.")
    if missing > 0 and inflating.eof:  # else the stream is cut short, which Pillow refuses
        raise ImageError("it has fewer rows of pixels than its header says.")


def _inflated(inflating: Any, block: bytes, most: int) -> int:
    """How many bytes a block of a stream becomes, of which no more than so many count."""
    count = 0
    try:
        while block and count < most:
            count += len(inflating.decompress(block, 2**20))
            block = inflating.unconsumed_tail
    except zlib.error:  # as Pillow will say, or the checksum
        return most
    return count


def _bytes_of_png(header: bytes) -> int:
    """How many bytes the rows of a PNG take, each with one before it."""
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    bits = depth * PNG_SAMPLES.get(kind, 1)
    total = 0
    for left, upper, across, down in ADAM7 if interlaced else ((0, 0, 1, 1),):
        columns, rows = math.ceil((width - left) / across), math.ceil((height - upper) / down)
        if columns > 0 and rows > 0:
            total += rows * (1 + math.ceil(columns * bits / 8))
    return total


def refuse_misread_bmp(file: BinaryIO, mode: str) -> None:
    """Makes sure that a BMP with a palette of greys has a pixel in as many bits as Pillow takes it to have.

    Raises:
        ImageError: It has not: Pillow looks at the number of colours alone.
    """
    file.seek(14)
    header = file.read(16)
    place = 10 if header[:4] == bytes([12, 0, 0, 0]) else 14  # a header of 12 bytes is OS/2's
    bits = int.from_bytes(header[place : place + 2], "little")
    taken_for = {"1": 1, "L": 8}.get(mode, bits)
    if bits != taken_for:
        raise ImageError(
            f"a BMP of {bits} bits with a palette of greys, which Pillow takes for one of {taken_for}.",
            python="Pass an array of what another library reads.",
            command="Save it as PNG.",
        )
