"""Which files are opened, and at what cost; what errors say of the others. How pixels look is in test_images.py."""

import io
import os
import re
import struct
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps

from vitlite.errors import ImageError
from vitlite.images.decode import FORMATS, SIDE, SUFFIXES, read_image, rows_of

PHOTO = Path(__file__).parents[2] / "examples" / "photos" / "chelsea.png"


def noise(height, width, channels=3):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def skip_unknown(kind):
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow knows no {kind}")


def encoded(kind, image=None, **options):
    buffer = io.BytesIO()
    skip_unknown(kind)
    (image or Image.fromarray(noise(20, 30))).save(buffer, kind, **options)
    return buffer.getvalue()


# which


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_that_is_named_is_opened(kind):
    assert read_image(encoded(kind)).shape == (20, 30, 3)


@pytest.mark.parametrize(
    ("suffix", "kind"), [(suffix, kind) for kind, suffixes in FORMATS.items() for suffix in suffixes]
)
def test_folders_are_searched_by_the_endings_that_pillow_knows(suffix, kind):
    skip_unknown(kind)
    assert Image.EXTENSION[suffix] == kind
    assert suffix in SUFFIXES


def test_no_other_format_is_opened():
    Image.init()
    for kind in ("TGA", "ICO", "PCX", "SGI", "DDS", "SPIDER", "PDF", "ICNS", "MSP"):
        image = Image.fromarray(noise(16, 16))
        content = encoded(kind, {"SPIDER": image.convert("F"), "MSP": image.convert("1")}.get(kind, image))
        with pytest.raises(ImageError, match="vitlite opens JPEG, PNG"):
            read_image(content)


def test_a_picture_s_name_starts_no_program(tmp_path, monkeypatch):
    """Pillow hands PostScript to `gs`, whatever the file is called."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    picture = tmp_path / "photo.jpg"
    picture.write_bytes(encoded("EPS"))
    code = f"from vitlite.images.transform import read_image; read_image({str(picture)!r})"
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert f"Cannot read {picture} as a picture: its content is PostScript; vitlite opens JPEG" in done.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "its content is nothing at all"),
        (b"%PDF-1.7", "its content is PDF"),
        (b"\n<!DOCTYPE html><p>404", "its content is a web page"),
        (b"<html>", "its content is a web page"),
        (b"<svg xmlns=''/>", "its content is XML, perhaps SVG"),
        (b"8BPS\0\1", "its content is Photoshop"),
        (b"\0\0\0\x18ftypheic", "its content is HEIC"),
        (b"\0\0\0\x18ftypisom", "its content is a video"),
        (b"\xff\x0a\0", "its content is JPEG XL"),
        (b"\0\0\1\0\1", "its content is an icon"),
        (b"\1\0\0\0" + bytes(36) + b" EMF", "its content is a Windows metafile"),
        (b"PK\3\4", "its content is a ZIP archive"),
        (b"\x1f\x8b\x08", "its content is compressed by gzip"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS, which `git lfs pull` replaces"),
        (b"\xff\xd8\xff", "its content is JPEG, and damaged"),
        (b"\x89PNG", "its content is PNG, and damaged"),
        (b"hello", "it is damaged, or in another format; vitlite opens JPEG, PNG"),
    ],
)
def test_what_the_content_is_where_its_first_bytes_tell(content, text, tmp_path):
    (tmp_path / "x.jpg").write_bytes(content)
    for file in (tmp_path / "x.jpg", content, io.BytesIO(content)):
        with pytest.raises(ImageError, match=re.escape(text)):
            read_image(file)


# from where


class WithoutSeek:
    """As what a web server answers."""

    def __init__(self, content):
        self.read = io.BytesIO(content).read


def test_bytes_and_open_files_are_pictures():
    content = PHOTO.read_bytes()
    wanted = read_image(PHOTO)
    for file in (content, bytearray(content), memoryview(content), io.BytesIO(content), WithoutSeek(content)):
        assert torch.equal(read_image(file), wanted)
    with subprocess.Popen(["cat", PHOTO], stdout=subprocess.PIPE) as pipe:
        assert torch.equal(read_image(pipe.stdout), wanted)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_open_file_stays_where_it_is(kind, tmp_path):
    """At its beginning, or at its end if it has just been written; so that it can be read again."""
    content = encoded(kind)
    wanted = read_image(content)
    (tmp_path / "picture").write_bytes(content)
    with open(tmp_path / "picture", "rb") as file:
        for opened in (file, io.BytesIO(content)):
            for place in (0, 0, len(content), len(content)):
                opened.seek(place)
                assert torch.equal(read_image(opened), wanted)
                assert opened.tell() == place


@pytest.mark.parametrize("content", [PHOTO.read_bytes() * 2, b"no picture" * 50])
def test_where_a_picture_in_an_open_file_begins_is_not_guessed(content):
    """As of frames that stand one after the other."""
    opened = io.BytesIO(content)
    opened.seek(len(content) // 2)
    for _ in range(2):
        with pytest.raises(ImageError, match=rf"it is open at byte {len(content) // 2}, and .*Say file\.seek\(0\)"):
            read_image(opened)
    opened.seek(0)
    if content.startswith(b"no"):
        for _ in range(2):
            with pytest.raises(ImageError, match="it is damaged, or in another format"):
                read_image(opened)
    else:
        assert torch.equal(read_image(opened), read_image(PHOTO))


def test_a_file_open_as_text_is_refused(tmp_path):
    with open(__file__) as opened, pytest.raises(ImageError, match=r'it is open as text\. Say open\(\.\.\., "rb"\)'):
        read_image(opened)


@pytest.mark.parametrize(
    ("url", "python", "command"),
    [
        ("https://a.b/c.jpg?d=1&e=2", "urlopen('https://a.b/c.jpg?d=1&e=2')", "'https://a.b/c.jpg?d=1&e=2'"),
        (Path("http://a.b/c.jpg"), "urlopen('http://a.b/c.jpg')", "curl --location --output picture.jpg http://a.b/c"),
        ("data:image/png;base64,AAAA", "urlopen('data:image/png;base64,AAAA')", "curl"),
        ("file:///a/b.jpg", "urlopen('file:///a/b.jpg')", "curl"),
        ("s3://a/b.jpg", "vitlite opens files; fetch it first", "vitlite opens files; fetch it first"),
    ],
)
def test_a_url_is_answered_with_what_fetches_it(url, python, command):
    with pytest.raises(ImageError, match="it is a URL, and vitlite opens files") as error:
        read_image(url)
    assert python in str(error.value)
    assert command in error.value.for_command_line()


def test_the_lines_that_fetch_a_url_do(tmp_path):
    url = PHOTO.as_uri()
    with pytest.raises(ImageError) as error:
        read_image(url)
    lines = str(error.value).partition("Fetch it: ")[2]
    names = {}
    exec(lines, names)
    assert torch.equal(read_image(names["picture"]), read_image(PHOTO))


def test_a_windows_drive_is_no_url():
    with pytest.raises(ImageError, match="no such file"):
        read_image("C:/x.jpg")


def test_names_are_shown_short_and_visible():
    with pytest.raises(ImageError, match=r"Cannot read a\\n\\x1b\[31m\.jpg as a picture: no such file"):
        read_image("a\n\x1b[31m.jpg")
    with pytest.raises(ImageError) as error:
        read_image("x" * 10**6)
    assert len(str(error.value)) < 3000


# TIFFs


SHADES = np.add.outer(np.arange(8) * 24, np.arange(12) * 5).astype(np.uint8)
COLOURS = np.dstack([SHADES, 255 - SHADES, SHADES // 2])
WITHOUT_COLOUR = np.dstack([SHADES, SHADES * 0 + 128, SHADES * 0 + 128])  # in YCbCr
GREY = {258: [8], 262: [1], 277: [1]}
RGB = {258: [8, 8, 8], 262: [2], 277: [3]}
RGB16 = RGB | {258: [16, 16, 16]}
CMYK = {258: [8] * 4, 262: [5], 277: [4]}
YCBCR = RGB | {262: [6]}
PALETTE = {258: [8], 262: [3], 277: [1]}
MAP = [shade * 257 for _ in range(3) for shade in range(256)]


def tiff_of(strips, tags):
    """A TIFF of 12 x 8 pixels in strips of bytes; each tag has a list of 16-bit numbers, or None to leave it out."""
    usual = {256: [12], 257: [8], 259: [1], 273: [0] * len(strips), 278: [8], 279: [len(strip) for strip in strips]}
    tags = {tag: values for tag, values in (usual | tags).items() if values}
    place = 8 + 2 + 12 * len(tags) + 4
    lists = {tag: place for tag, values in tags.items() if len(values) > 2}
    for tag in lists:
        lists[tag], place = place, place + 2 * len(tags[tag])
    tags[273] = [place + sum(map(len, strips[:i])) for i in range(len(strips))]
    content = struct.pack("<4sIH", b"II*\0", 8, len(tags))
    for tag, values in sorted(tags.items()):
        inside = struct.pack(f"<{len(values)}H", *values)[:4].ljust(4, b"\0")
        content += struct.pack("<HHI", tag, 3, len(values)) + (
            struct.pack("<I", lists[tag]) if tag in lists else inside
        )
    content += bytes(4) + b"".join(struct.pack(f"<{len(tags[tag])}H", *tags[tag]) for tag in lists)
    return content + b"".join(strips)


def planes_of(pixels):
    return [np.ascontiguousarray(pixels[..., i]).tobytes() for i in range(pixels.shape[2])]


def wide(pixels):
    return pixels.astype("<u2") * 257


def in_strips(pixels, rows):
    return [pixels[row : row + rows].tobytes() for row in range(0, len(pixels), rows)]


@pytest.mark.parametrize(
    ("strips", "tags", "pixels"),
    [
        ([SHADES.tobytes()], GREY, SHADES),
        ([(255 - SHADES).tobytes()], GREY | {262: [0]}, SHADES),
        (in_strips(SHADES, 3), GREY | {278: [3]}, SHADES),
        ([wide(SHADES).tobytes()], GREY | {258: [16]}, SHADES),
        ([COLOURS.tobytes()], RGB, COLOURS),
        (planes_of(COLOURS), RGB | {284: [2]}, COLOURS),
        ([wide(COLOURS).tobytes()], RGB16, COLOURS),
        ([zlib.compress(plane) for plane in planes_of(wide(COLOURS))], RGB16 | {259: [8], 284: [2]}, COLOURS),
        ([SHADES.tobytes()], PALETTE | {320: MAP}, SHADES),
        ([SHADES.tobytes()], PALETTE | {320: [0] * 768}, SHADES * 0),
        ([np.dstack([255 - COLOURS, SHADES * 0]).tobytes()], CMYK | {332: [1], 336: [0, 255]}, COLOURS),
        ([zlib.compress(WITHOUT_COLOUR.tobytes())], YCBCR | {259: [8], 530: [1, 1]}, SHADES),
    ],
)
def test_a_tiff_s_pixels_are_those_that_its_specification_says(strips, tags, pixels):
    pixels = pixels if pixels.ndim == 3 else np.dstack([pixels] * 3)
    assert torch.equal(read_image(tiff_of(strips, tags)), torch.from_numpy(pixels))


BIT_ORDER = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
DIFFERENCES = np.diff(SHADES, axis=1, prepend=0).astype(np.uint8)


@pytest.mark.parametrize(
    ("strips", "tags", "text"),
    [
        ([SHADES.tobytes()], GREY | {262: None}, "does not say whether 0 is black or white"),
        ([(SHADES ^ 128).tobytes()], GREY | {339: [2]}, "of signed numbers"),
        ([zlib.compress((SHADES ^ 128).tobytes())], GREY | {259: [8], 339: [2]}, "of signed numbers"),
        ([SHADES.tobytes()], PALETTE | {320: [value // 257 for value in MAP]}, "with a palette of 8 bits"),
        ([np.dstack([COLOURS, SHADES]).tobytes()], CMYK | {332: [2]}, "of other inks than CMYK"),
        ([np.dstack([COLOURS, SHADES]).tobytes()], CMYK | {336: [255, 0]}, "or with 0 for all of an ink"),
        (planes_of(wide(COLOURS)), RGB16 | {284: [2]}, "with a plane for each colour"),
        (
            planes_of(np.dstack([COLOURS, SHADES]).astype("<u2")),
            CMYK | {258: [16] * 4, 284: [2]},
            "with a plane for each",
        ),
        (planes_of(COLOURS), RGB | {262: [8], 284: [2]}, "with a plane for each"),
        (
            [zlib.compress(plane) for plane in planes_of(COLOURS)],
            RGB | {259: [8], 262: [8], 284: [2]},
            "with a plane for",
        ),
        ([(255 - SHADES).tobytes()], GREY | {262: [0], 284: [2]}, "with a plane for each"),
        ([SHADES.tobytes().translate(BIT_ORDER)], GREY | {266: [2], 284: [2]}, "with a plane for each"),
        ([b"".join(planes_of(COLOURS))], RGB | {284: [2]}, "whose strips or tiles do not add up"),
        ([SHADES[:3].tobytes()], GREY | {278: [3]}, "whose strips or tiles do not add up"),
        ([*in_strips(SHADES, 4), bytes(48)], GREY | {278: [4]}, "whose strips or tiles do not add up"),
        ([DIFFERENCES.tobytes()], GREY | {317: [2]}, "of differences"),
        ([b"\x5f" + DIFFERENCES.tobytes()], GREY | {259: [32773], 317: [2]}, "of differences"),
        ([COLOURS.tobytes()], YCBCR, "in YCbCr that does not say how coarse"),
        ([zlib.compress(COLOURS.tobytes())], YCBCR | {259: [8]}, "in YCbCr that does not say how coarse"),
        ([COLOURS.tobytes()], YCBCR | {530: [2, 2]}, "in YCbCr with coarse colours"),
        ([COLOURS.tobytes()], YCBCR | {530: [1, 1], 532: [16, 235, 128, 240, 128, 240]}, "or of another range"),
        (
            [zlib.compress(b"".join(planes_of(COLOURS)))],
            YCBCR | {259: [8], 284: [2], 530: [1, 1]},
            "whose strips or tiles",
        ),
    ],
)
def test_a_tiff_that_pillow_takes_for_another_picture_is_refused(strips, tags, text):
    content = tiff_of(strips, tags)
    for picture in (content, Image.open(io.BytesIO(content))):
        with pytest.raises(ImageError, match=rf"as a picture: a TIFF .*{text}.*which Pillow may take for another"):
            rows_of(picture, 3)


def test_tiles_that_do_not_add_up_are_refused():
    tile = np.zeros((16, 16), np.uint8)
    tile[:8, :12] = SHADES
    assert torch.equal(read_image(tiled(tile.tobytes(), 12)), torch.from_numpy(np.dstack([SHADES] * 3)))
    with pytest.raises(ImageError, match="a TIFF whose strips or tiles do not add up to it"):
        read_image(tiled(tile.tobytes(), 24))


def tiled(tile, width):
    """A TIFF of 8 rows of one tile of 16 x 16 bytes, which may be wider than it."""
    tags = {256: width, 257: 8, 258: 8, 259: 1, 262: 1, 277: 1, 322: 16, 323: 16, 324: 8, 325: len(tile)}
    return tiff(tags, tile)


# how large


def png_of(width, height):
    """A file that says it has so many pixels, and has none."""
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b"")):
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return content


def tiled_tiff(side, tile):
    """Of side x side pixels, in one tile of zeros."""
    data = zlib.compress(bytes(tile * tile), 1)
    tags = {256: side, 257: side, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile, 324: 8, 325: len(data)}
    return tiff(tags, data)


def tiff(tags, data):
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return struct.pack("<4sI", b"II*\0", 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


def many_scans(side, scans):
    """A progressive JPEG whose last scan stands there again and again."""
    content = encoded("JPEG", Image.new("L", (side, side), 100), progressive=True)
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + last * scans + b"\xff\xd9"


def run_lengths(width, height):
    """A BMP in runs of one pixel, which Pillow decodes in Python."""
    data = (b"\1\3" * width + b"\0\0") * height + b"\0\1"
    offset = 14 + 40 + 1024
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(data), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", offset + len(data), 0, 0, offset) + header + bytes(1024) + data


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (lambda: png_of(10_000, 10_000), "100000000 pixels, allowed are 89478485"),
        (lambda: png_of(SIDE + 1, 1), "sides of 1 to 100000 pixels, got 100001 x 1"),
        (lambda: png_of(1, SIDE + 1), "sides of 1 to 100000 pixels, got 1 x 100001"),
        (lambda: tiled_tiff(10, 10_000), "100 pixels, allowed are 89"),
        (lambda: many_scans(2000, 500), "4000000 pixels, allowed are 35"),
        (lambda: run_lengths(2500, 2000), "5000000 pixels, allowed are 4473924"),
        (lambda: b"P3 2500 2000 255\n" + b"1 " * 10, "5000000 pixels, allowed are 4473924"),
        (lambda: b"P6 2500 2000 100\n" + b"1" * 10, "5000000 pixels, allowed are 4473924"),
    ],
)
def test_what_would_take_long_or_much_is_refused_before_it_is_decoded(content, text):
    with pytest.raises(ImageError, match=text):
        read_image(content())


def test_what_stands_behind_a_jpeg_is_none_of_its_scans():
    """Phones put a film there."""
    photo = encoded("JPEG", Image.new("RGB", (2000, 2000), "teal"))
    film = b"\xff\xda" * 1000
    assert torch.equal(read_image(photo + film), read_image(photo))
    with_preview = photo[:2] + b"\xff\xe2\xff\xff" + (b"\xff\xd9" + film)[:0xFFFD].ljust(0xFFFD) + photo[2:]
    assert torch.equal(read_image(with_preview), read_image(photo))
    huge_header = many_scans(2000, 500).replace(
        b"\xff\xd8", b"\xff\xd8" + (b"\xff\xe2\xff\xff" + bytes(0xFFFD)) * 40, 1
    )
    with pytest.raises(ImageError, match="4000000 pixels, allowed are 35"):
        read_image(huge_header)


def test_the_same_kinds_are_read_where_they_are_small():
    wanted = read_image(encoded("PNG", Image.new("L", (50, 50), 100)))
    assert torch.equal(read_image(many_scans(50, 5)), wanted)
    assert read_image(tiled_tiff(10, 16)).shape == (10, 10, 3)
    assert read_image(run_lengths(20, 10)).shape == (10, 20, 3)
    assert read_image(b"P3 1 2 255\n1 2 3 4 5 6\n").tolist() == [[[1, 2, 3]], [[4, 5, 6]]]


@pytest.mark.parametrize("kind", ["WEBP", "AVIF", "JPEG2000"])
def test_decoders_that_take_much_memory_get_fewer_pixels(kind, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match=r"600 pixels, allowed are (500|208)"):
        read_image(encoded(kind))
    assert read_image(encoded("PNG")).shape == (20, 30, 3)


def test_a_raw_photo_s_thumbnail_is_not_taken_for_it():
    tags = {254: 1, 256: 4, 257: 4, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 4, 279: 16}
    with pytest.raises(ImageError, match="a TIFF that begins with a small copy, as raw photos do"):
        read_image(tiff(tags, bytes(16)))
    whole = tags | {254: 0}
    with pytest.raises(ImageError, match="a TIFF that begins with a small copy"):
        read_image(tiff(whole | {255: 2}, bytes(16)))
    for right in (whole, whole | {255: 1}):
        assert read_image(tiff(right, bytes(16))).shape == (4, 4, 3)


def test_arrays_have_sides_too():
    with pytest.raises(ImageError, match="sides of 1 to 100000 pixels, got 100001 x 1"):
        rows_of(np.zeros((1, SIDE + 1), np.uint8), 3)
    with pytest.raises(ImageError, match="sides of 1 to 100000 pixels, got 0 x 5"):
        rows_of(Image.new("RGB", (0, 5)), 3)


MEASURE = """
import pathlib, sys, time
from types import SimpleNamespace
import torch
from vitlite.images import Preprocess, TransformConfig
gray = {"mean": (0.5,), "std": (0.5,)}
recipe = TransformConfig(size=(224, 224), resize=(256, 256), mode="center", interpolation="bicubic", **gray)
model = SimpleNamespace(config=SimpleNamespace(channels=3), device=torch.device("cpu"), dtype=torch.float32)
def megabytes(line):
    status = pathlib.Path("/proc/self/status").read_text()  # of this program alone, which getrusage is not
    return int(status.split(line)[1].split()[0]) / 1024
before = megabytes("VmRSS:")  # of torch itself, which is twice as much where it is made for CUDA
start = time.process_time()
Preprocess(recipe, model)(sys.argv[1])
print(megabytes("VmHWM:") - before, time.process_time() - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory in other units")
@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize("turned", [1, 6])
def test_the_largest_photo_takes_less_than_a_gigabyte_and_ten_seconds(turned, tmp_path):
    large = Image.new("RGB", (9459, 9459), "teal")  # 89.5 million pixels
    exif = Image.Exif()
    exif[0x0112] = turned
    large.save(tmp_path / "large.jpg", exif=exif)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "large.jpg")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    megabytes, seconds = map(float, done.stdout.split())
    assert megabytes < 750
    assert seconds < 10


def test_a_png_whose_pixels_are_not_those_that_were_written():
    """As of a download that left zeros; Pillow finishes when it has pixels enough, right or not."""
    content = encoded("PNG", Image.fromarray(noise(8, 40)).convert("L"))
    place = content.index(b"IDAT") + 4
    damaged = content[: place + 100] + bytes(60) + content[place + 160 :]
    for picture in (damaged, Image.open(io.BytesIO(damaged))):
        with pytest.raises(ImageError, match=r"Cannot read .*: its pixels do not have the checksum"):
            rows_of(picture, 3)
    opened = Image.open(io.BytesIO(content))
    assert torch.equal(rows_of(opened, 3).between(0, 8), read_image(content))


def test_a_copy_that_was_turned_by_hand():
    """It has the EXIF still, and would be turned again."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif.get_ifd(0x8769).update({0xA002: 60, 0xA003: 40})
    photo = Image.open(io.BytesIO(encoded("JPEG", Image.fromarray(noise(40, 60)), exif=exif)))
    upright = ImageOps.exif_transpose(photo)
    wanted = torch.from_numpy(np.array(upright))
    if not photo.getexif().get_ifd(0x8769):
        pytest.skip("this Pillow writes less of EXIF")
    for right in (photo, photo.convert("RGB"), upright):
        assert torch.equal(rows_of(right, 3).between(0, 60), wanted)
    by_hand = photo.rotate(270, expand=True)
    with pytest.raises(ImageError, match=r"was of 60 x 40 pixels, and it is of 40 x 60: turned already"):
        rows_of(by_hand, 3)
    by_hand.getexif()[274] = 1
    assert torch.equal(rows_of(by_hand, 3).between(0, 60), wanted)


# in rows


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "I;16", "1", "RGBA"])
@pytest.mark.parametrize("turned", [1, 3, 5, 8])
def test_rows_are_those_of_the_whole_upright_picture(mode, turned):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 2**16, (700, 40), dtype=np.uint16))
    if mode != "I;16":
        image = Image.fromarray(noise(700, 40)).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = turned
    content = encoded("TIFF", image, exif=exif)
    with Image.open(io.BytesIO(content)) as opened:
        upright = ImageOps.exif_transpose(opened)
    if mode == "I;16":
        grey = torch.from_numpy(np.round(np.array(upright) / 257).astype(np.uint8))
        wanted = grey[:, :, None].expand(-1, -1, 3)
    else:
        wanted = torch.from_numpy(np.array(upright.convert("RGB")))
    rows = rows_of(content, 3)
    assert torch.equal(read_image(content), wanted)
    assert torch.equal(rows.between(3, 17), wanted[3:17])


# arrays that are not quite pictures


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors():
    with pytest.raises(ImageError, match="must be a dense tensor with data"):
        rows_of(torch.nested.nested_tensor([torch.zeros(9, 9, 3)]), 3)


def test_masked_arrays():
    array = np.ma.masked_array(noise(9, 9), mask=False)
    assert torch.equal(rows_of(array, 3).between(0, 9), torch.from_numpy(noise(9, 9)))
    array.mask[0, 0, 0] = True
    with pytest.raises(ImageError, match=r"got a masked array\. Fill it: image\.filled"):
        rows_of(array, 3)


@pytest.mark.parametrize(
    ("brightest", "said"), [(300, "0.0046"), (255, "0.0039"), (200, "0.0031"), (100, "0.0015"), (3, "4.6e-05")]
)
def test_dim_pictures_divided_by_255_twice_are_not_taken_for_black_ones(brightest, said):
    with pytest.raises(
        ImageError, match=rf"almost black: of 0\.\.1, no value is above {said}\. .*divided by 255 twice"
    ):
        rows_of(np.full((9, 9, 3), brightest / 255**2), 3)
    assert not rows_of(np.zeros((9, 9, 3)), 3).between(0, 9).any()


def test_a_picture_may_be_as_dark_as_one_of_256_levels():
    """As frames are in which a film begins or ends, whatever form they have; of floats, an error says which to take."""
    dark = (noise(9, 9) > 200).astype(np.uint8)
    for image in (dark, torch.from_numpy(dark), Image.fromarray(dark), encoded("PNG", Image.fromarray(dark))):
        assert torch.equal(rows_of(image, 3).between(0, 9), torch.from_numpy(dark))
    with pytest.raises(ImageError, match=r"If it is as dark as that, pass it as uint8\."):
        rows_of(dark / 255, 3)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float64])
def test_floats_of_every_width(kind):
    picture = torch.tensor([0.0, 0.5, 1.0])[:, None].expand(3, 5).to(kind)
    assert rows_of(picture, 3).between(0, 3)[:, 0, 0].tolist() == [0, 128, 255]


# damage


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "GIF", "PPM", "JPEG", "WEBP", "AVIF", "JPEG2000"])
def test_a_file_cut_short_is_never_a_picture(kind):
    content = encoded(kind, Image.fromarray(noise(300, 300)))
    for share in (0.1, 0.5, 0.9):
        with pytest.raises(ImageError, match=r"Cannot read the .* bytes as a picture: "):
            read_image(content[: int(len(content) * share)])


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "PNG", "JPEG", "JPEG2000"])
def test_a_pillow_image_that_broke_is_broken_the_next_time_too(kind):
    """Pillow takes what it has tried to decode for decoded, and what is missing is black."""
    options = {"TIFF": {"compression": "tiff_adobe_deflate"}}.get(kind, {})
    content = bytearray(encoded(kind, Image.fromarray(noise(300, 300)), **options))
    middle = len(content) // 2
    if kind.startswith("JPEG"):
        del content[middle:]
    else:
        content[middle : middle + 200] = bytes(200)
    image = Image.open(io.BytesIO(content))
    for _ in range(3):
        with pytest.raises(ImageError, match=r"Cannot read the (RGB|P) image as a picture: "):
            rows_of(image, 3)


class Slow(io.BytesIO):
    """Lets other threads in between."""

    def read(self, length=-1):
        time.sleep(0.001)
        return super().read(length)


@pytest.mark.parametrize("kind", ["JPEG", "GIF", "WEBP", "PNG", "BMP"])
@pytest.mark.parametrize("opened_by", [Image.open, lambda file: file])
def test_several_threads_may_have_one_picture(kind, opened_by):
    """Pillow decodes it when it is asked for, from a file that stands at one place."""
    content = encoded(kind, Image.fromarray(noise(300, 300)))
    wanted = read_image(content)
    for _ in range(5):
        picture = opened_by(Slow(content))
        with ThreadPoolExecutor(4) as pool:
            for rows in pool.map(rows_of, [picture] * 4, [3] * 4):
                assert torch.equal(rows.between(0, 300), wanted)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "JPEG"])
def test_a_cut_file_is_none_wherever_pillow_fills_them_up(kind, monkeypatch):
    """As scripts tell it to, and libraries, for the whole process; it is told so again afterwards."""
    content = encoded(kind, Image.fromarray(noise(300, 300)))
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    Image.open(io.BytesIO(content[: len(content) // 2])).load()
    with pytest.raises(ImageError, match=r"Cannot read the .* bytes as a picture: "):
        read_image(content[: len(content) // 2])
    for _ in range(2):  # one that was opened, and is not decoded yet
        with pytest.raises(ImageError, match=r"Cannot read the .* image as a picture: "):
            rows_of(Image.open(io.BytesIO(content[: len(content) // 2])), 3)
    assert read_image(content).shape == (300, 300, 3)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def bmp(levels, palette, bits):
    """An uncompressed BMP of 4 or 8 bits, whose palette has these greys alone."""
    height, width = levels.shape
    rows = b""
    for row in levels[::-1]:
        packed = row if bits == 8 else row[::2] << 4 | row[1::2]
        rows += bytes(packed.tolist()) + bytes(-len(packed) % 4)
    colours = b"".join(bytes([grey, grey, grey, 0]) for grey in palette)
    start = 54 + len(colours)
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, 0, len(rows), 0, 0, len(palette), 0)
    return b"BM" + struct.pack("<IHHI", start + len(rows), 0, 0, start) + header + colours + rows


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("palette", [(0, 255), (0, 254), (255, 0), tuple(range(16)), tuple(range(1, 17))])
def test_a_bmp_of_few_greys_is_read_rightly_or_refused(bits, palette):
    """Pillow takes a palette of black and white for one bit a pixel, and one of greys in order for eight."""
    levels = np.random.default_rng(0).integers(0, len(palette), (20, 32), dtype=np.uint8)
    file = bmp(levels, palette, bits)
    if palette == (0, 255) or (bits, palette[:2]) == (4, (0, 1)):
        with pytest.raises(ImageError, match=f"a BMP of {bits} bits with a palette of greys"):
            read_image(file)
    else:
        assert np.array_equal(read_image(file, 1)[..., 0].numpy(), np.array(palette, dtype=np.uint8)[levels])


def png(levels, rows, interlaced=False, passes=7):
    """A PNG of a grey picture with these rows of it, or passes; every checksum is right, and the stream has its end."""
    height, width = levels.shape
    data = b"".join(b"\0" + row.tobytes() for row in levels[:rows])
    if interlaced:
        steps = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
        parts = [levels[upper::down, left::across] for left, upper, across, down in steps[:passes]]
        data = b"".join(b"\0" + row.tobytes() for part in parts for row in part if row.size)

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, int(interlaced)))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("height", "width"), [(40, 30), (41, 29), (3, 2), (1, 1)])
def test_a_png_with_fewer_rows_than_its_header_says(height, width):
    """As of a program that stopped early; Pillow leaves the others black."""
    levels = np.random.default_rng(0).integers(1, 256, (height, width), dtype=np.uint8)
    for whole in (png(levels, height), png(levels, height, interlaced=True)):
        assert np.array_equal(read_image(whole, 1)[..., 0].numpy(), levels)
    for short in (png(levels, height // 2), png(levels, 0), png(levels, height, interlaced=True, passes=0)):
        with pytest.raises(ImageError, match="fewer rows of pixels than its header says"):
            read_image(short)
    if height > 1:
        with pytest.raises(ImageError, match="fewer rows of pixels"):
            read_image(png(levels, height, interlaced=True, passes=6))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "P", "I;16"])
def test_a_png_of_any_kind_has_all_its_rows(mode):
    image = Image.fromarray(noise(37, 41)).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(noise(37, 41, 1).astype(np.uint16) * 257)
    for bits in (1, 2, 4, 8) if mode == "P" else (None,):
        options = {} if bits is None else {"bits": bits}
        assert read_image(encoded("PNG", image, **options)).shape == (37, 41, 3)


PALETTE = bytes([250, 0, 0, 0, 240, 0, 0, 0, 230, 220, 220, 210])


def with_palette(kind, colours, cut=0, after=False):
    """The bytes of a file in four colours, of which its palette has the first so many, or a byte less of them."""
    image = Image.new("P", (4, 3))
    image.putdata([0, 1, 2, 3] * 3)
    image.putpalette(PALETTE)
    data = encoded(kind, image)
    if kind == "GIF":  # has 2, 4, 8 and so on, as its header says
        return data[:10] + bytes([data[10] & 0xF8 | colours.bit_length() - 2]) + data[11 : 13 + 3 * colours] + data[25:]
    if kind == "BMP":
        start = int.from_bytes(data[10:14], "little")
        header = data[:10] + struct.pack("<I", 54 + 4 * colours) + data[14:46] + struct.pack("<I", colours)
        return header + data[50 : 54 + 4 * colours] + data[start:]
    place = data.index(b"PLTE") - 4
    rest = data[place + 12 + int.from_bytes(data[place : place + 4], "big") :]
    body = b"PLTE" + PALETTE[: 3 * colours - cut]
    palette = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) if colours else b""
    end = rest.index(b"IEND") - 4
    return data[:place] + (rest[:end] + palette + rest[end:] if after else palette + rest)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP"])
def test_pixels_have_the_colours_of_the_palette(kind):
    whole = with_palette(kind, 4)
    assert bytes(read_image(whole)[0].flatten().tolist()) == PALETTE
    for picture in (with_palette(kind, 2), Image.open(io.BytesIO(with_palette(kind, 2)))):
        with pytest.raises(ImageError, match=r": its palette has 2 colours, and its pixels name number 3, from 0\."):
            rows_of(picture, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colours": 0}, "its palette has 0 colours, and"),
        ({"colours": 4, "after": True}, "its palette has 0 colours, and"),
        ({"colours": 4, "cut": 1}, "its palette has 3 colours and a part of one, and"),
    ],
)
def test_a_png_whose_palette_is_missing_or_damaged(change, said):
    """Its checksums are right, and Pillow reads it in black."""
    with pytest.raises(ImageError, match=said):
        read_image(with_palette("PNG", **change))


@pytest.mark.parametrize("in_tiles", [False, True])
def test_a_tiff_without_some_of_its_bytes(in_tiles):
    """Parts that are left out stand for zeros, and Pillow reads what stands there in the file: its header, say."""
    levels = np.random.default_rng(0).integers(1, 256, (48, 32), dtype=np.uint8)
    parts = [part.tobytes() for part in np.split(levels, 3)]
    if in_tiles:
        parts = [levels[16 * i : 16 * i + 16, 16 * j : 16 * j + 16].tobytes() for i in range(3) for j in range(2)]
    starts, place = [], 8
    for part in parts:
        starts.append(place)
        place += len(part)
    counts = [len(part) for part in parts]
    tags = {256: 32, 257: 48, 258: 8, 259: 1, 262: 1, 277: 1}

    def written(starts, counts):
        where = {322: 16, 323: 16, 324: starts, 325: counts} if in_tiles else {273: starts, 278: 16, 279: counts}
        return tiff_of_parts(tags | where, b"".join(parts))

    assert np.array_equal(read_image(written(starts, counts), 1)[..., 0].numpy(), levels)
    for wrong_starts, wrong_counts in (
        ([*starts[:-1], 0], [*counts[:-1], 0]),
        (starts, [*counts[:-1], counts[-1] - 1]),
    ):
        with pytest.raises(ImageError, match="a TIFF of which strips or tiles are left out, or cut"):
            read_image(written(wrong_starts, wrong_counts))


def tiff_of_parts(tags, content):
    """A TIFF with its pixels first; a list is written behind its tags."""
    place = 8 + len(content)
    behind = place + 2 + 12 * len(tags) + 4
    entries, lists = b"", b""
    for tag, value in sorted(tags.items()):
        numbers = value if isinstance(value, list) else [value]
        packed = struct.pack(f"<{len(numbers)}I", *numbers)
        if len(numbers) > 1:
            packed, lists = struct.pack("<I", behind + len(lists)), lists + packed
        entries += struct.pack("<HHI", tag, 4, len(numbers)) + packed
    return b"II*\0" + struct.pack("<I", place) + content + struct.pack("<H", len(tags)) + entries + bytes(4) + lists


def test_a_tiff_of_jpegs_of_which_one_is_cut():
    content = bytearray(encoded("TIFF", Image.fromarray(noise(48, 48)), compression="jpeg"))
    assert read_image(bytes(content)).shape == (48, 48, 3)
    directory = struct.unpack("<I", content[4:8])[0]
    for i in range(struct.unpack("<H", content[directory : directory + 2])[0]):
        entry = directory + 2 + 12 * i
        tag, _, _, value = struct.unpack("<HHII", content[entry : entry + 12])
        if tag == 279:
            content[entry + 8 : entry + 12] = struct.pack("<I", value // 2)
    with pytest.raises(ImageError, match="a TIFF with a strip or tile that is cut"):
        read_image(bytes(content))
