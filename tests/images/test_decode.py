"""Which files and arrays are read, how they are converted, and what the errors of the others say."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from vitlite.errors import ImageError, MissingExtraError
from vitlite.images.decode import FORMATS, LARGE, SUFFIXES, decode, read_image, to_tensor

PHOTO = Path(__file__).parents[2] / "examples" / "photos" / "chelsea.png"


def noise(height, width, channels=3):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def skip_unknown(kind):
    Image.init()
    if kind == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow knows no {kind}")


def encoded(kind, image=None, **options):
    buffer = io.BytesIO()
    skip_unknown(kind)
    (image or Image.fromarray(noise(20, 30))).save(buffer, kind, **options)
    return buffer.getvalue()


def pixels_of(image, channels=3):
    """A Pillow image as `read_image` returns a file's."""
    return torch.from_numpy(np.array(decode(image, channels))).reshape(image.height, image.width, channels)


# formats


@pytest.mark.parametrize("kind", FORMATS)
def test_every_listed_format_is_read(kind):
    content = encoded(kind)
    with Image.open(io.BytesIO(content)) as image:
        wanted = np.array(image.convert("RGB"))
    assert torch.equal(read_image(content), torch.from_numpy(wanted))


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_suffixes_are_those_of_pillow(suffix):
    kind = next(kind for kind, suffixes in FORMATS.items() if suffix in suffixes)
    skip_unknown(kind)
    assert Image.EXTENSION[suffix] == kind


@pytest.mark.parametrize("kind", ["TGA", "ICO", "PCX", "SGI", "DDS", "PDF", "ICNS"])
def test_other_formats_are_refused(kind):
    with pytest.raises(ImageError, match=r"the file is damaged, or the format is not supported\. Supported: JPEG, PNG"):
        read_image(encoded(kind, Image.fromarray(noise(16, 16))))


def test_a_file_name_starts_no_program(tmp_path):
    """Pillow runs `gs` for PostScript, whatever the file is called."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    file = tmp_path / "photo.jpg"
    file.write_bytes(encoded("EPS"))
    code = f"from vitlite.images.decode import read_image; read_image({str(file)!r})"
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert f"Cannot read {file} as an image: the file is damaged, or the format is not supported" in done.stderr
    assert not (tmp_path / "started").exists()


# sources


class WithoutSeek:
    """Like the response of a web server."""

    def __init__(self, content):
        self.read = io.BytesIO(content).read


def test_bytes_and_open_files():
    content = PHOTO.read_bytes()
    wanted = read_image(PHOTO)
    for file in (str(PHOTO), content, bytearray(content), memoryview(content), io.BytesIO(content)):
        assert torch.equal(read_image(file), wanted)
    assert torch.equal(read_image(WithoutSeek(content)), wanted)


def test_an_open_file_is_read_from_its_beginning_and_stays_open():
    with open(PHOTO, "rb") as file:
        for place in (0, 100):
            file.seek(place)
            assert torch.equal(read_image(file), read_image(PHOTO))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("no/such/file.jpg", "Cannot read no/such/file.jpg as an image: no such file"),
        (PHOTO.parent, "Cannot read .*photos as an image: .*directory"),
        ("null\0byte", "Cannot read null.*byte as an image: "),
        (
            b"bytes",
            "Cannot read the 5 bytes as an image: the file is damaged, or the format is not supported. Supported",
        ),
        (b"", "Cannot read the 0 bytes as an image: the file is damaged"),
        (io.StringIO("text"), "Cannot read .* as an image: "),
        ("https://a.b/c.jpg?d=1", "https://a.b/c.jpg.d=1 is a URL. Download the image first"),
        (None, "An image must be a path, bytes, .* a Pillow image, an array or a tensor, got NoneType. Pass several"),
        (Image.new("La", (9, 9)), "Cannot read the La image as an image: conversion from La"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:40],
)
def test_errors(file, text):
    with pytest.raises(ImageError, match=text):
        read_image(file)


def test_without_pillow(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"Reading x.jpg needs .* pip install 'vitlite\[images\]'"):
        read_image("x.jpg")


def test_a_damaged_stream_that_cannot_be_read_again_is_an_image_error():
    reading, writing = os.pipe()
    os.write(writing, b"no image")
    os.close(writing)
    with open(reading, "rb") as stream, pytest.raises(ImageError, match="the file is damaged, or the format is not"):
        decode(stream, 3)


def test_heic_is_read_as_pillow_heif_reads_it(tmp_path):
    """In a new process, because pillow-heif is imported only when it is needed."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for name, options in (("photo.heic", {"quality": 90}), ("turned.heic", {"exif": exif})):
        (tmp_path / name).write_bytes(encoded("HEIF", Image.open(PHOTO), **options))
    (tmp_path / "cut.heic").write_bytes((tmp_path / "photo.heic").read_bytes()[:5000])
    program = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy
from vitlite.errors import ImageError
from vitlite.images.decode import read_image

read_image({str(PHOTO)!r})
assert "pillow_heif" not in sys.modules
photo, turned = Path("photo.heic"), Path("turned.heic")
with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(read_image, [photo, turned, photo.read_bytes(), open(photo, "rb")] * 4))
from PIL import Image
for i, path in enumerate([photo, turned, photo, photo] * 4):
    assert (found[i].numpy() == numpy.array(Image.open(path).convert("RGB"))).all()
try:
    read_image(Path("cut.heic"))
except ImageError as error:
    assert str(error).startswith("Cannot read cut.heic as an image: "), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


def test_heic_without_pillow_heif(tmp_path):
    (tmp_path / "photo.heic").write_bytes(encoded("HEIF"))
    (tmp_path / "a.png").write_bytes(encoded("PNG"))
    program = "import sys; sys.modules['pillow_heif'] = None; from vitlite.cli.main import main; sys.exit(main())"
    words = ["classify", str(tmp_path), "--model", "vit_nano_4.cifar10", "--top", "1"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, str(tmp_path / "a.png"))
    assert done.stderr.splitlines()[0] == (
        f"vitlite: Reading the HEIC image {tmp_path / 'photo.heic'} needs an optional package. "
        "Install it: pip install 'vitlite[heic]'"
    )


# transparency


def cut_outs():
    """A disc whose surroundings are transparent, with another colour under them, in every mode that has alpha."""
    rows, columns = np.mgrid[:20, :20]
    alpha = np.where((rows - 10) ** 2 + (columns - 10) ** 2 < 64, 255, 0).astype(np.uint8)
    alpha[10, 10] = 128
    picture = Image.fromarray(np.dstack([noise(20, 20), alpha]))
    palette = Image.fromarray((rows % 4).astype(np.uint8), "P")
    palette.putpalette([10, 20, 30, 200, 0, 0, 0, 200, 0, 0, 0, 200])
    return {
        "RGBA": (picture, {}),
        "LA": (picture.convert("LA"), {}),
        "P": (palette, {"transparency": 0}),
        "RGB": (picture.convert("RGB"), {"transparency": tuple(noise(20, 20)[3, 4].tolist())}),
        "L": (picture.convert("L"), {"transparency": 100}),
    }


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
@pytest.mark.parametrize(("background", "colour"), [("white", 255), ("#102030", None), (None, None)])
def test_the_background_of_transparent_images(mode, background, colour):
    image, options = cut_outs()[mode]
    content = encoded("PNG", image, **options)
    seen = Image.open(io.BytesIO(content)).convert("RGBA")
    pixels, alpha = np.array(seen)[..., :3].astype(float), np.array(seen)[..., 3:] / 255
    wanted = (
        pixels
        if background is None
        else pixels * alpha + np.array([colour] * 3 if colour else [16, 32, 48]) * (1 - alpha)
    )
    found = to_tensor(decode(content, 3, background=background)).permute(1, 2, 0).numpy()
    assert np.abs(found - wanted).max() <= 1
    assert (alpha < 1).any()
    assert np.abs(found - pixels).max() > 1 or background is None
    opaque = encoded("PNG", image.convert("RGB"))
    assert np.array_equal(np.array(decode(opaque, 3, background=background)), np.array(decode(opaque, 3)))


# damage and size


@pytest.mark.parametrize("kind", FORMATS)
def test_a_truncated_file_is_an_error(kind):
    content = encoded(kind, Image.fromarray(noise(300, 300)))
    for share in (0.1, 0.5, 0.9):
        with pytest.raises(ImageError, match=r"Cannot read the .* bytes as an image: "):
            read_image(content[: int(len(content) * share)])


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("most", [100_000, 1_000])  # Pillow only warns up to twice its limit
def test_too_many_pixels(tmp_path, monkeypatch, most):
    Image.new("1", (400, 300)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
    with pytest.raises(ImageError, match=r"bomb.png as an image: .*(MAX_IMAGE_PIXELS|decompression bomb)"):
        read_image(tmp_path / "bomb.png")


def test_large_images_are_decoded(tmp_path):
    Image.new("L", (LARGE // 1000 + 1, 1000), 7).save(tmp_path / "large.png")
    assert read_image(tmp_path / "large.png", 1).eq(7).all()


MEASURE = """
import pathlib, sys, time
from types import SimpleNamespace
import torch
from vitlite.images import Preprocess, TransformConfig
transform = TransformConfig(
    size=(224, 224), resize=(256, 256), mode="center", interpolation="bicubic", mean=(0.5,), std=(0.5,)
)
model = SimpleNamespace(config=SimpleNamespace(channels=3), device=torch.device("cpu"), dtype=torch.float32)
def megabytes(line):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split(line)[1].split()[0]) / 1024
before = megabytes("VmRSS:")
start = time.process_time()
Preprocess(transform, model)(sys.argv[1])
print(megabytes("VmHWM:") - before, time.process_time() - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize("orientation", [1, 6])
def test_the_largest_photo_takes_less_than_a_gigabyte_and_ten_seconds(orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (9459, 9459), "teal").save(tmp_path / "large.jpg", exif=exif)  # 89.5 million pixels
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "large.jpg")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    megabytes, seconds = map(float, done.stdout.split())
    assert megabytes < 850
    assert seconds < 10


# conversion


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(["1", "L", "P", "LA", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"]),
    st.sampled_from([1, 3]),
)
def test_every_mode(mode, channels):
    bands = len(Image.new(mode, (1, 1)).getbands())
    if mode == "1":
        image = Image.fromarray(noise(20, 30, 1)).convert("1")
    else:
        image = Image.frombytes(mode, (30, 20), noise(20, 30 * bands, 1).tobytes())
    wanted = np.array(image.convert("RGB" if channels == 3 else "L")).reshape(20, 30, channels)
    assert torch.equal(pixels_of(image, channels), torch.from_numpy(wanted))


def test_alpha_is_dropped():
    image = Image.fromarray(noise(40, 40, 4))
    assert torch.equal(read_image(encoded("PNG", image)), torch.from_numpy(noise(40, 40, 4)[..., :3]))
    grey = Image.merge("LA", image.split()[:2])
    assert torch.equal(pixels_of(grey, 1), torch.from_numpy(noise(40, 40, 4)[..., :1]))


def test_palette_with_transparency():
    image = Image.fromarray(noise(40, 40)).convert("P")
    content = encoded("PNG", image, transparency=bytes(range(256)))
    assert torch.equal(read_image(content), pixels_of(image))


def test_sixteen_bits_are_scaled(tmp_path):
    values = np.random.default_rng(0).integers(0, 2**16, (40, 40), dtype=np.uint16)
    expected = torch.from_numpy(np.round(values / 257).astype(np.uint8))
    files = [encoded(kind, Image.fromarray(values)) for kind in ("PNG", "TIFF")]
    files.append(b"P5 40 40 65535\n" + values.astype(">u2").tobytes())
    for file in files:
        read = read_image(file)
        assert read.shape == (40, 40, 3)
        assert torch.equal(read[..., 1], expected)
    assert torch.equal(pixels_of(Image.fromarray(values), 1)[..., 0], expected)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_modes_in_which_white_is_not_known(mode):
    image = Image.fromarray(noise(40, 40, 1)).convert(mode)
    with pytest.raises(
        ImageError,
        match=f"the {mode} image as an image: Pillow's mode '{mode}' does not define the range of the pixel values",
    ):
        decode(image, 3)
    with pytest.raises(ImageError, match="does not define the range of the pixel values"):
        read_image(encoded("TIFF", image))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation_is_applied(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(kind, exif=exif)
    with Image.open(io.BytesIO(content)) as opened:
        wanted = torch.from_numpy(np.array(ImageOps.exif_transpose(opened)))
        assert wanted.shape == ((20, 30, 3) if orientation < 5 else (30, 20, 3))
        assert torch.equal(torch.from_numpy(np.array(decode(opened, 3))), wanted)
    assert torch.equal(read_image(content), wanted)


def test_the_first_frame_of_an_animation():
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    content = encoded("GIF", frames[0], save_all=True, append_images=frames[1:])
    assert torch.equal(read_image(content), pixels_of(frames[0]))


# arrays and tensors


@pytest.mark.parametrize("kind", [">f2", ">f4", ">f8", "<f8", np.float16, np.longdouble])
def test_floats_of_any_byte_order_and_width(kind):
    array = (noise(9, 8) / 255).astype(kind)
    assert torch.equal(decode(array, 3), torch.from_numpy(noise(9, 8)).permute(2, 0, 1))
    assert torch.equal(decode(array[::-1], 3), torch.from_numpy(noise(9, 8)).permute(2, 0, 1).flip(1))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float64])
def test_float_tensors_of_every_width(kind):
    image = torch.tensor([0.0, 0.5, 1.0])[:, None].expand(3, 5).to(kind)
    assert decode(image, 3)[0, :, 0].tolist() == [0, 128, 255]


def test_channels():
    for channels in (1, 2, 4, 5):
        array = noise(9, 8, channels)
        wanted = torch.from_numpy(array.reshape(9, 8, channels)).permute(2, 0, 1)
        for image in (array, torch.from_numpy(array), wanted):
            assert torch.equal(decode(image, channels), wanted)
    grey = torch.from_numpy(noise(9, 8, 1))
    for image in (grey, grey[None], grey[..., None]):  # one channel stands for three
        assert torch.equal(decode(image, 3), grey.expand(3, 9, 8))
    with pytest.raises(ImageError, match=r"can only have 1 or 3 channels, but the model needs 5\. Pass an array"):
        decode(Image.fromarray(noise(9, 8)), 5)


@pytest.mark.parametrize(
    ("image", "text"),
    [
        (
            np.full((9, 9, 3), 200.0),
            r"values from 0 to 1, got 200 to 200\. Divide by 255 or pass uint8\. .* normalised",
        ),
        (np.linspace(-2, 1, 243).reshape(9, 9, 3), "got -2 to 1"),
        (np.full((9, 9, 3), np.nan), "got nan to nan"),
        (torch.full((3, 9, 9), torch.inf), "got inf to inf"),
        (np.zeros((9, 9, 3), np.int64), r"must be uint8, or floats from 0 to 1, got torch.int64"),
        (np.zeros((9, 9, 3), bool), "got torch.bool"),
        (np.zeros((9, 9, 3), ">u2"), "got >u2"),
        (np.zeros((9, 9, 3), object), "got object"),
        (np.zeros((3, 9, 3), np.uint8), r"\(3, 9, 3\) is ambiguous: \(c, h, w\) or \(h, w, c\)"),
        (np.zeros((9, 9, 4), np.uint8), r"needs 3 channels, .* shape \(9, 9, 4\).*alpha channel with image\[..., :3\]"),
        (np.zeros((9, 9, 2), np.uint8), r"needs 3 channels, but the image has the shape \(9, 9, 2\)\.$"),
        (np.zeros((0, 9, 3), np.uint8), r"got \(0, 9, 3\)"),
        (np.zeros(9, np.uint8), r"shape \(h, w, c\), \(c, h, w\) or \(h, w\), got \(9,\)"),
        (torch.zeros(1, 1, 3, 9, 9), r"got \(1, 1, 3, 9, 9\)"),
        (np.float64(0.5), "got float64"),
    ],
)
def test_wrong_arrays(image, text):
    with pytest.raises(ImageError, match=text):
        decode(image, 3)


def test_floats_may_be_half_a_level_out_of_range():
    image = np.full((9, 9, 3), 1.001)
    image[0] = -0.001
    assert decode(image, 3).unique().tolist() == [0, 255]
