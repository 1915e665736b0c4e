"""JPEG 2000s that Pillow takes for another picture: each is refused, and those beside it are read as they are."""

import io
import re
import struct

import numpy as np
import pytest
import torch
from PIL import Image, features

from vitlite.errors import ImageError
from vitlite.images.decode import pixels_in, read_image, rows_of

pytestmark = pytest.mark.skipif(not features.check("jpg_2000"), reason="this Pillow knows no JPEG 2000")

COLOURS = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
GREY = COLOURS[..., 0]
SRGB = struct.pack(">BBBI", 1, 0, 0, 16)


def codestream(pixels, bits=(), **options):
    """Lossless; each component is said to have so many bits, and has 8."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG2000", no_jp2=True, mct=0, **options)
    content = bytearray(buffer.getvalue())
    for component, depth in enumerate(bits):
        content[42 + 3 * component] = depth - 1
    return bytes(content)


def box(kind, content):
    return struct.pack(">I4s", 8 + len(content), kind) + content


def jp2(pixels, *more, colr=SRGB):
    """A file with the header that its pixels have, and more boxes in it."""
    height, width, channels = np.atleast_3d(pixels).shape
    header = box(b"ihdr", struct.pack(">IIHBBBB", height, width, channels, 7, 7, 0, 0))
    header += box(b"colr", colr) + b"".join(more)
    begin = box(b"jP  ", b"\r\n\x87\n") + box(b"ftyp", b"jp2 \0\0\0\0jp2 ")
    return begin + box(b"jp2h", header) + box(b"jp2c", codestream(pixels))


def refused(content, text):
    for picture in (content, Image.open(io.BytesIO(content))):
        with pytest.raises(ImageError, match=rf"Cannot read .* as a picture: .*{text}"):
            rows_of(picture, 3)


@pytest.mark.parametrize("options", [{"tile_size": (64, 64)}, {"tile_size": (64, 64), "no_jp2": True}, {}])
def test_one_that_ends_where_a_tile_begins(options):
    """Pillow leaves the missing tiles black, without a word."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (150, 200, 3), dtype=np.uint8)).save(
        buffer, "JPEG2000", **options
    )
    content = buffer.getvalue()
    whole = read_image(content)
    tiles = [match.start() for match in re.finditer(rb"\xff\x90\x00\x0a", content)]
    assert len(tiles) == (12 if options else 1)
    for tile in tiles:
        for end in (tile, tile + 2, tile + 12):
            refused(content[:end], "cut short")
    assert torch.equal(read_image(content + b"behind it"), whole)


def test_a_last_part_that_does_not_say_its_length():
    content = bytearray(codestream(COLOURS))
    place = content.index(b"\xff\x90") + 6
    content[place : place + 4] = bytes(4)
    assert torch.equal(read_image(bytes(content)), torch.from_numpy(COLOURS))
    refused(bytes(content[:-2]), "cut short")


@pytest.mark.parametrize("bits", [1, 2, 4, 7])
def test_white_of_fewer_bits_would_be_grey(bits):
    assert torch.equal(read_image(codestream(GREY, [8]), 1)[..., 0], torch.from_numpy(GREY))
    refused(codestream(GREY, [bits]), f"a JPEG 2000 with a colour of {bits} bits, which Pillow may take for another")
    refused(codestream(COLOURS, [8, 8, bits]), f"a colour of {bits} bits")


@pytest.mark.parametrize("bits", [9, 12, 16])
def test_white_of_more_bits_would_be_black(bits):
    """Pillow rounds it up to 256, which is 0 in eight bits; of grey alone it has sixteen."""
    square = np.zeros((64, 64, 3), np.uint8)
    square[16:48, 16:48] = 255
    content = codestream(square, [bits] * 3, irreversible=True, quality_layers=[10])
    assert (np.asarray(Image.open(io.BytesIO(content)))[20:44, 20:44] == 0).any()
    refused(content, f"a colour of {bits} bits")
    grey = read_image(codestream(square[..., 0], [bits], irreversible=True), 1)[..., 0].numpy()
    assert np.abs(grey.astype(int) - square[..., 0]).max() <= 2


def test_alpha_of_any_depth_is_dropped():
    with_alpha = np.dstack([COLOURS, GREY])
    for alpha in (1, 8, 16):
        read = read_image(codestream(with_alpha, [8, 8, 8, alpha]))
        assert torch.equal(read, torch.from_numpy(COLOURS))


@pytest.mark.parametrize("twice", [False, True])
def test_a_palette(twice):
    """Where a colour comes twice, Pillow moves all behind it."""
    palette = COLOURS[0, :16].copy()
    if twice:
        palette[1] = palette[0]
    columns = box(b"pclr", struct.pack(">HBBBB", 16, 3, 7, 7, 7) + palette.tobytes())
    mapping = box(b"cmap", b"".join(struct.pack(">HBB", 0, 1, column) for column in range(3)))
    refused(jp2(GREY % 16, columns, mapping), "a JPEG 2000 with a palette")


@pytest.mark.parametrize("space", [0, 1, 3, 4, 14, 20, 21, 1000])
def test_colours_that_are_no_rgb(space):
    refused(jp2(COLOURS, colr=struct.pack(">BBBI", 1, 0, 0, space)), "a JPEG 2000 in an unusual colour space")


@pytest.mark.parametrize(
    ("way", "kind", "usual"), [(2, b"RGB ", True), (3, b"RGB ", True), (2, b"Lab ", False), (4, b"RGB ", False)]
)
def test_a_profile_of_colours(way, kind, usual):
    content = jp2(COLOURS, colr=bytes([way, 0, 0]) + bytes(16) + kind + bytes(108))
    if usual:
        assert torch.equal(read_image(content), torch.from_numpy(COLOURS))
    else:
        refused(content, "in an unusual colour space")


def test_ycc_becomes_rgb():
    ycc = np.asarray(Image.fromarray(COLOURS).convert("YCbCr"))
    read = read_image(jp2(ycc, colr=struct.pack(">BBBI", 1, 0, 0, 18)))
    assert np.abs(read.numpy().astype(int) - COLOURS).mean() < 2


@pytest.mark.parametrize(
    ("order", "usual"),
    [
        ([(0, 1), (0, 2), (0, 3)], True),
        ([(0, 1), (0, 2), (0, 3), (1, 0)], True),
        ([(0, 3), (0, 2), (0, 1)], False),
        ([(1, 0), (0, 1), (0, 2), (0, 3)], False),
    ],
)
def test_the_order_of_colours(order, usual):
    """For each component, whether it is a colour or opacity, and which colour."""
    entries = [struct.pack(">HHH", component, *meaning) for component, meaning in enumerate(order)]
    pixels = np.dstack([COLOURS, GREY])[..., : len(order)]
    content = jp2(np.ascontiguousarray(pixels), box(b"cdef", struct.pack(">H", len(order)) + b"".join(entries)))
    if usual:
        assert torch.equal(read_image(content), torch.from_numpy(COLOURS))
    else:
        refused(content, "whose colours are in an unusual order")


def test_a_header_of_another_size():
    content = jp2(COLOURS)
    place = content.index(b"ihdr") + 4
    refused(content[:place] + struct.pack(">I", 25) + content[place + 4 :], "whose header says another size")


def test_boxes_of_other_lengths():
    """In eight bytes, and up to the end of the file."""
    content = jp2(COLOURS)
    place = content.index(b"jp2c") - 4
    endless = content[:place] + bytes(4) + content[place + 4 :]
    long = content[:place] + struct.pack(">I4sQ", 1, b"jp2c", len(content) - place + 8) + content[place + 8 :]
    for other in (endless, long):
        assert torch.equal(read_image(other), torch.from_numpy(COLOURS))
    refused(content[: place + 8], "this JPEG 2000 has no pixels")


def test_many_tiles_take_memory_however_small():
    content = bytearray(codestream(np.zeros((257, 255, 4), np.uint8)))
    content[24:32] = struct.pack(">II", 1, 1)
    refused(bytes(content), "65535 pixels, allowed are 28495")
    content[24:32] = struct.pack(">II", 255, 257)
    assert pixels_in(bytes(content)) == 65535 * 4
    content[24:32] = struct.pack(">II", 8, 8)
    assert pixels_in(bytes(content)) == 32 * 33 * (2100 + 4 * 260) + 4 * (255 * 257 >> 12) * 60


def coded(side, layers=1, block=4, precinct=0, of_component=False, in_tile=False):
    """A grey picture whose packets are all empty, with precincts and blocks of such sizes: powers of two."""

    def segment(marker, body):
        return marker + struct.pack(">H", len(body) + 2) + body

    sizes = struct.pack(">HIIIIIIIIH", 0, side, side, 0, 0, side, side, 0, 0, 1) + b"\x07\x01\x01"
    own = bytes([0, block, block, 0, 1, precinct | precinct << 4])
    usual = bytes([0, 4, 4, 0, 1, 0xFF])
    coding = segment(b"\xff\x52", bytes([1]) + struct.pack(">BHB", 0, layers, 0) + (usual if of_component else own))
    if of_component:
        coding += segment(b"\xff\x53", b"\0\x01" + own)
    step = segment(b"\xff\x5c", b"\x40\x40")
    header = coding if in_tile else b""
    start = struct.pack(">HHIBB", 10, 0, 12 + len(header) + 2 + 4, 0, 1)
    tile = b"\xff\x90" + start + header + b"\xff\x93" + bytes(4)
    return b"\xff\x4f" + segment(b"\xff\x51", sizes) + coding + step + tile + b"\xff\xd9"


@pytest.mark.parametrize(
    "options",
    [
        {"side": 1500},  # a precinct a pixel: 550 bytes each
        {"side": 128, "layers": 65535},  # a minute, and two gigabytes
        {"side": 1500, "of_component": True},
        {"side": 4000, "block": 0, "precinct": 2},
    ],
)
def test_a_short_file_of_many_precincts_or_packets_is_too_large(options):
    """They are set up before a byte of them is read, however empty they are."""
    assert len(coded(**options)) < 120
    with pytest.raises(ImageError, match="pixels, allowed are"):
        read_image(coded(**options))
    small = options | {"side": 64, "layers": min(options.get("layers", 1), 20)}
    assert read_image(coded(**small)).shape == (64, 64, 3)


def test_a_tile_with_a_coding_of_its_own_is_refused():
    with pytest.raises(ImageError, match="the tiles of this JPEG 2000 are coded in several ways"):
        read_image(coded(64, in_tile=True))
