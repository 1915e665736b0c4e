"""Any bytes as an image, and any values as a TransformConfig: the right pixels, or one clear error.

`make fuzz` runs many cases, `make test` a few; files that were ever a find stay in corpus/images.
"""

import io
import os
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attempts import bounded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from vitlite.errors import ConfigError, ImageError
from vitlite.images import Preprocess, TransformConfig
from vitlite.images.decode import FORMATS, read_image

CASES = settings(
    max_examples=int(os.environ.get("VITLITE_FUZZ", "50")),
    deadline=None,  # by the clock: see `attempts.bounded`
    suppress_health_check=list(HealthCheck),
)
with suppress(ImportError):
    import pillow_heif

    pillow_heif.register_heif_opener()
CORPUS = sorted((Path(__file__).parent / "corpus" / "images").iterdir())
MODES = {"JPEG": ["L", "RGB", "CMYK"], "PNG": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"], "WEBP": ["RGB", "RGBA"],
         "GIF": ["L", "P"], "BMP": ["1", "L", "P", "RGB"], "TIFF": ["1", "L", "P", "RGB", "RGBA", "CMYK", "I;16", "F"],
         "PPM": ["1", "L", "RGB"], "AVIF": ["RGB", "RGBA"], "JPEG2000": ["L", "RGB", "RGBA"],
         "HEIF": ["L", "RGB", "RGBA"]}  # fmt: skip


def seeds() -> dict[str, bytes]:
    """A small real file of every format, in every mode that it is written in."""
    noise = np.random.default_rng(0)
    photo = Image.fromarray(noise.integers(0, 256, (12, 10, 3), dtype=np.uint8)).resize((30, 36))
    deep = Image.fromarray(noise.integers(0, 2**16, (36, 30), dtype=np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6
    found = {}
    Image.init()
    for kind, modes in MODES.items():
        for mode in modes if kind in Image.SAVE else ():  # older Pillows have no AVIF
            buffer = io.BytesIO()
            options = {"exif": exif} if kind in ("JPEG", "PNG", "WEBP", "TIFF") else {}
            (deep if mode == "I;16" else photo.convert(mode)).save(buffer, kind, **options)
            found[f"{kind} {mode}"] = buffer.getvalue()
    for name, options in (("progressive", {"progressive": True}), ("LZW", {"compression": "tiff_lzw"})):
        buffer = io.BytesIO()
        photo.save(buffer, "TIFF" if name == "LZW" else "JPEG", **options)
        found[name] = buffer.getvalue()
    frames = io.BytesIO()
    photo.save(frames, "GIF", save_all=True, append_images=[photo.rotate(90)])
    return found | {"animation": frames.getvalue()}


SEEDS = seeds()
assert set(MODES) == set(FORMATS)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A real file with some bytes changed, left out, put in, or moved, and perhaps cut short."""
    content = bytearray(SEEDS[draw(st.sampled_from(sorted(SEEDS)))])
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, min(len(content) - 1, draw(st.sampled_from([40, 400, 10**6])))))
        what = draw(st.sampled_from(["set", "large", "insert", "delete", "copy"]))
        if what == "set":
            content[place] = draw(st.integers(0, 255))
        elif what == "large":  # sizes and offsets
            content[place : place + 4] = draw(st.sampled_from([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"]))
        elif what == "insert":
            content[place:place] = draw(st.binary(max_size=8))
        elif what == "delete":
            del content[place : place + draw(st.integers(1, 8))]
        else:
            content += content[place : place + 64]
        content = content or bytearray(1)
    return bytes(content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content)


def pillows(content: bytes) -> np.ndarray | None:
    """Return what Pillow reads from a file, upright and in RGB; None for 16 bits, which it does not scale."""
    with Image.open(io.BytesIO(content), formats=[kind for kind in FORMATS if kind in Image.OPEN]) as image:
        upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        return None
    return np.array(upright.convert("RGB"))


def check(content: bytes) -> None:
    """The right pixels, or an error that names the file."""
    file = io.BytesIO(content)
    file.name = "a file"
    with bounded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of damaged files
        try:
            pixels = read_image(file)
        except ImageError as error:
            assert str(error).startswith("Cannot read a file as an image: ")  # noqa: PT017
            assert len(str(error)) < 1000  # noqa: PT017
            pixels = None
        wanted = pillows(content) if pixels is not None else None
    if pixels is not None and wanted is not None:
        assert np.array_equal(pixels.numpy(), wanted)


@CASES
@given(mutated())
def test_mutated_files(content: bytes) -> None:
    check(content)


@CASES
@given(st.sampled_from(sorted(SEEDS)), st.binary(max_size=200))
def test_a_real_header_and_then_anything(name: str, rest: bytes) -> None:
    check(SEEDS[name][:16] + rest)


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_real_files_are_read(name: str) -> None:
    if name == "TIFF F":
        with pytest.raises(ImageError, match="does not define the range of the pixel values"):
            read_image(SEEDS[name])
    else:
        assert read_image(SEEDS[name]).ndim == 3
        check(SEEDS[name])


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.name)
def test_corpus(file: Path) -> None:
    check(file.read_bytes())


# transform configs

json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(float("nan")),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
sides = st.tuples(st.integers(-1, 80), st.integers(0, 80)) | st.tuples(st.integers(), st.integers())
numbers = st.lists(st.floats(-300, 300) | st.integers(-3, 300), max_size=4).map(tuple)
configs = st.fixed_dictionaries(
    {
        "size": sides | json_like,
        "resize": sides | json_like,
        "mode": st.sampled_from(["center", "squash"]) | json_like,
        "interpolation": st.sampled_from(["bilinear", "bicubic"]) | json_like,
        "mean": numbers | json_like,
        "std": numbers | json_like,
    },
    optional={"scale": st.floats(0, 1) | json_like, "margin": st.sampled_from(["nearest", "down"]) | json_like},
)
good = {"size": (8, 8), "resize": (9, 9), "mode": "center", "interpolation": "bilinear", "mean": (0.5,), "std": (0.5,)}
ARRAY = np.random.default_rng(0).integers(0, 256, (13, 21, 3), dtype=np.uint8)


@CASES
@given(configs, st.sets(st.sampled_from(sorted(good)), max_size=6))
def test_any_values_as_a_transform(fields: dict[str, object], kept: set[str]) -> None:
    fields = fields | {name: good[name] for name in kept}
    try:
        transform = TransformConfig(**fields)  # type: ignore[arg-type]
    except ConfigError as error:
        assert str(error).startswith("TransformConfig: ")  # noqa: PT017
        assert len(str(error)) < 5000  # noqa: PT017
        return
    hash(transform)
    if transform.size[0] * transform.size[1] <= 10_000:
        model = SimpleNamespace(config=SimpleNamespace(channels=3), device=torch.device("cpu"), dtype=torch.float32)
        try:
            images = Preprocess(transform, model)(ARRAY)
        except ImageError as error:
            assert "mean and std for" in str(error) or "too long and narrow" in str(error)  # noqa: PT017
            return
        assert images.shape == (1, 3, *transform.size)
        assert images.isfinite().all()
