import copy
import gc
import io
import math
import pickle
import struct
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitlite import load
from vitlite.config import ViTConfig
from vitlite.errors import ConfigError, ImageError, InputError, MissingExtraError, TrainError, VitliteError
from vitlite.images import transform
from vitlite.images.decode import rows_of
from vitlite.images.transform import SUFFIXES, Preprocess, TransformConfig, normalise, read_image
from vitlite.inference.embed import identity_of
from vitlite.inference.predict import classify, embed
from vitlite.nn.vit import ViT
from vitlite.plots import _photo
from vitlite.training.datasets import cifar10_reader
from vitlite.training.evaluate import preprocess_of as training_preprocess_of

PHOTOS = Path(__file__).parents[2] / "examples" / "photos"
PLAIN = TransformConfig(size=(32, 32), resize=(36, 36), mode="center", interpolation="bicubic", mean=(0.5,), std=(0.5,))


@pytest.fixture
def vit() -> ViT:
    model = ViT(ViTConfig(image_size=32, patch_size=16, dim=16, depth=1, heads=1, mlp_dim=16, num_classes=3))
    model.preprocess = Preprocess(PLAIN, model)
    return model


def bound(transform=PLAIN, channels=3):
    """A Preprocess whose model is no more than what it reads of one."""
    config = SimpleNamespace(channels=channels)
    return Preprocess(transform, SimpleNamespace(config=config, device=torch.device("cpu"), dtype=torch.float32))


def picture(height, width, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def pillow_pixels(image, recipe):
    """What Pillow makes of a picture: across first, as it always did before version 13 and as the weights saw it."""
    code = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}[recipe.interpolation]
    height, width = recipe.resized(image.height, image.width)
    resized = image.resize((width, image.height), code).resize((width, height), code)
    top, left = round((height - recipe.size[0]) / 2), round((width - recipe.size[1]) / 2)
    box = (left, top, left + recipe.size[1], top + recipe.size[0])
    return torch.from_numpy(np.array(resized.crop(box))).permute(2, 0, 1)


def check_against_pillow(image, recipe):
    """By Pillow and by torch, the pixels are what Pillow alone makes of a picture."""
    expected = pillow_pixels(image, recipe)
    assert torch.equal(bound(recipe).pixels(image), expected)
    by_torch = replace(rows_of(image, 3), pillow=None)
    crop = recipe.crop(image.height, image.width)
    assert torch.equal(transform._resize(by_torch, crop, recipe.interpolation, 3), expected)


# recipes


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def test_a_list_of_numbers_is_a_tuple_of_them():
    assert replace(PLAIN, mean=[0, 0.5, 1], std=[1, 1, 1]) == replace(PLAIN, mean=(0, 0.5, 1), std=(1, 1, 1))


def test_a_recipe_with_a_share_for_each_side_keeps_both():
    assert replace(PLAIN, size=(32, 32), resize=(36, 64)).scaled((64, 64)).resize == (72, 128)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"interpolation": "lanczos"}, "interpolation must be one of"),
        ({"margin": "up"}, "margin must be one of"),
        ({"size": (0, 4)}, r"size must be \(height, width\)"),
        ({"resize": (16.0, 16.0)}, r"resize must be \(height, width\)"),
        ({"resize": (31, 32)}, r"a crop of \(32, 32\) does not fit"),
        ({"size": (32, 65_537)}, r"size must be .* each from 1 to 65536"),
        ({"resize": (10**9, 10**9)}, "each from 1 to 65536"),
        ({"size": (8192, 8192), "resize": (8192, 8192)}, r"size of \(8192, 8192\) has more than 16777216 pixels"),
        ({"size": (True, 4)}, r"size must be \(height, width\)"),
        ({"size": [32, 32]}, r"size must be \(height, width\)"),
        ({"size": 32}, r"size must be \(height, width\)"),
        ({"mode": ["center"]}, "mode must be one of"),
        ({"mode": None}, "mode must be one of"),
        ({"mean": ()}, "mean must be a tuple with a number per channel"),
        ({"mean": "0.5"}, "mean must be a tuple with a number per channel"),
        ({"mean": (1.0, 2.0)}, "one mean and std per channel, got 2 means and 1 stds"),
        ({"mean": (math.nan,)}, "mean must be made of numbers from -1e.06 to 1e.06, got nan"),
        ({"mean": (10**400,)}, "mean must be made of numbers .*, got 1000"),
        ({"mean": ("0.5",)}, "mean must be made of numbers"),
        ({"mean": (None,)}, "mean must be made of numbers"),
        ({"mean": (True,)}, "mean must be made of numbers"),
        ({"mean": (0.5,) * 3, "std": (1, 1, math.inf)}, "std must be made of numbers from 1e-06 to 1e.06, got inf"),
        ({"std": (0.0,)}, "std must be made of numbers from 1e-06"),
        ({"std": (1e-45,)}, "std must be made of numbers from 1e-06"),  # 0 in float32, or nearly
        ({"std": (-0.5,)}, "std must be made of numbers from 1e-06"),
        ({"scale": 0}, "scale must be made of numbers from 1e-09"),
        ({"scale": math.nan}, "scale must be made of numbers from 1e-09"),
        ({"scale": "1/255"}, "scale must be made of numbers from 1e-09"),
        ({"scale": 10**5000}, "got a int that cannot be written out"),
        ({"mode": "x" * 10**6}, r"got 'xxx.*\.\.\. \(1000002 letters\)\.$"),
        ({"mode": deep(10**5)}, "got a list that cannot be written out"),
    ],
)
def test_wrong_recipes(change, text):
    with pytest.raises(ConfigError, match=text):
        TransformConfig(**PLAIN.to_dict() | change)


def test_no_class_is_made_of_a_transform():
    """Its methods would be used, and lost wherever the recipe is written down or compared."""
    with pytest.raises(
        ConfigError, match=r"^TopLeft cannot be made of TransformConfig.*make a class of vitlite\.images\.Prepro"
    ):

        class TopLeft(TransformConfig):
            def crop(self, height, width):
                return super().crop(height, width)._replace(top=0, left=0)


# pixels


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.tuples(st.integers(4, 60), st.integers(4, 60)),
    st.sampled_from(["bilinear", "bicubic"]),
    st.sampled_from(["center", "squash"]),
    st.sampled_from([0.8, 0.9, 1.0]),
    st.booleans(),
)
def test_pixels_are_pillows(height, width, size, interpolation, mode, crop_pct, harsh):
    resize = tuple(math.floor(side / crop_pct) for side in size)
    recipe = TransformConfig(size=size, resize=resize, mode=mode, interpolation=interpolation, mean=(0.0,), std=(1.0,))
    pixels = picture(height, width)
    image = Image.fromarray(np.where(pixels > 127, 255, 0).astype(np.uint8) if harsh else pixels)
    check_against_pillow(image, recipe)


@pytest.mark.parametrize("photo", ["chelsea.png", "coffee.png", "rocket.jpg", "astronaut.jpg"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("side", [56, 224, 518])
def test_photos_are_pillows(photo, interpolation, side):
    resize = math.floor(side / 0.9)
    recipe = TransformConfig(
        size=(side, side), resize=(resize, resize), mode="center", interpolation=interpolation, mean=(0.0,), std=(1.0,)
    )
    with Image.open(PHOTOS / photo) as image:
        check_against_pillow(image.convert("RGB"), recipe)
        assert torch.equal(bound(recipe).pixels(PHOTOS / photo), bound(recipe).pixels(image))


@pytest.mark.parametrize("shape", [(1, 1), (40, 5000), (5000, 40), (1, 100_000), (100_000, 1)])
def test_strips_take_no_more_than_their_crop(shape):
    assert bound().pixels(np.full(shape, 200, np.uint8)).eq(200).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "CMYK", "YCbCr"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("margin", ["nearest", "down"])
def test_pillow_resizes_to_the_bits_of_the_operators(mode, channels, margin):
    image = Image.fromarray(picture(613, 87)).convert(mode)  # several strips
    rows = rows_of(image, channels)
    assert rows.pillow
    for size, resize in (((16, 24), (21, 31)), ((64, 64), (201, 202)), ((300, 100), (700, 100))):
        recipe = replace(PLAIN, size=size, resize=resize, margin=margin)
        crop = recipe.crop(rows.height, rows.width)
        for interpolation in ("bilinear", "bicubic"):
            by_torch = transform._resize(replace(rows, pillow=None), crop, interpolation, channels)
            assert torch.equal(transform._resize(rows, crop, interpolation, channels), by_torch)


@pytest.mark.parametrize("shape", [(1, 100_000), (100_000, 1)])
def test_pillow_makes_no_more_columns_or_rows_than_it_has_memory_for(shape, monkeypatch):
    """It takes 48 bytes for the weights of each: a picture of 376 bytes took 1.3 GB."""
    made = []
    resize = Image.Image.resize

    def noted(self, size, resample):
        made.append(max(size))
        return resize(self, size, resample)

    monkeypatch.setattr(Image.Image, "resize", noted)
    recipe = replace(PLAIN, size=(224, 224), resize=(224, 224))
    assert bound(recipe).pixels(Image.new("RGB", shape, "white")).eq(255).all()
    assert max(made, default=0) * 48 < 2**27


def test_a_pillow_with_other_bits_is_not_asked(monkeypatch):
    image = Image.fromarray(picture(50, 70))
    expected = bound().pixels(image)
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, _, box: resize(self, size, Image.Resampling.HAMMING, box)
    )
    wrong = bound().pixels(image)
    assert not torch.equal(wrong, expected)  # it was proved before
    transform._pillow_agrees.cache_clear()
    assert torch.equal(bound().pixels(image), expected)
    transform._pillow_agrees.cache_clear()


def large_jpeg(**options):
    """A photo of 1600 x 1200 pixels."""
    file = io.BytesIO()
    with Image.open(PHOTOS / "coffee.png") as photo:
        photo.convert("RGB").resize((1600, 1200), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90, **options)
    return file.getvalue()


@pytest.mark.parametrize(("side", "decoded"), [(20, 160), (80, 160), (81, 320), (161, 640), (321, 1280)])
@pytest.mark.parametrize("turned", [1, 3, 6, 8])
def test_quick_decode_keeps_twice_what_is_wanted(side, decoded, turned):
    exif = Image.Exif()
    exif[0x0112] = turned
    file = io.BytesIO()
    Image.new("RGB", (1280, 1280)).resize((1280, 1920)).save(file, "JPEG", exif=exif)
    quick = Preprocess(replace(PLAIN, size=(side, side), resize=(side, side)), bound().model, quick_decode=True)
    rows = rows_of(file.getvalue(), 3, quick._enough)
    assert min(rows.height, rows.width) == decoded >= 2 * side
    assert (rows.height > rows.width) == (turned in (1, 3))


def test_quick_decode_differs_little_and_is_off_unless_asked_for():
    content, recipe = large_jpeg(), replace(PLAIN, size=(32, 32), resize=(36, 36))
    whole = bound(recipe)
    quick = whole.with_quick_decode()
    assert (whole.quick_decode, quick.quick_decode, quick.of(None).quick_decode) == (False, True, True)
    assert pickle.loads(pickle.dumps(quick)).quick_decode
    apart = (quick.pixels(content).float() - whole.pixels(content).float()).abs()
    assert 0 < apart.max() < 40
    assert apart.mean() < 4
    with Image.open(io.BytesIO(content)) as image:  # opened by others, it is theirs, and decoded as they will
        assert torch.equal(quick.pixels(image), whole.pixels(content))


def waves(height, width):
    """Without fine detail, so that all ways to make it smaller agree."""
    y, x = np.mgrid[:height, :width]
    colours = np.sin(x / 40), np.cos(y / 55), np.sin((x + y) / 70)
    return Image.fromarray(((np.dstack(colours) + 1) * 127).astype(np.uint8))


@pytest.mark.parametrize("turned", range(1, 9))
@pytest.mark.parametrize(("height", "width"), [(512, 512), (513, 519), (519, 713)])
@pytest.mark.parametrize("mode", ["center", "squash"])
def test_quick_decode_does_not_stretch(turned, height, width, mode):
    """An eighth of 513 pixels is 64 and a part of one, which may be on any side once it is upright."""
    exif = Image.Exif()
    exif[0x0112] = turned
    file = io.BytesIO()
    waves(height, width).save(file, "JPEG", quality=95, exif=exif)
    whole = bound(replace(PLAIN, size=(28, 28), resize=(32, 32), mode=mode))
    quick = whole.with_quick_decode()
    rows = rows_of(file.getvalue(), 3, quick._enough)
    assert rows.height * rows.width < height * width / 50
    apart = (quick.pixels(file.getvalue()).float() - whole.pixels(file.getvalue()).float()).abs()
    assert apart.mean() < 0.5
    assert apart.max() < 5
    left, top, right, bottom = rows.box
    crop = whole.transform.crop(bottom - top, right - left)
    assert crop == whole.transform.crop(*((height, width) if turned < 5 else (width, height)))
    assert torch.equal(quick.pixels(file.getvalue()), transform._resize(replace(rows, pillow=None), crop, "bicubic", 3))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "BMP"])
def test_quick_decode_leaves_other_formats_whole(kind):
    file = io.BytesIO()
    Image.fromarray(picture(400, 400)).save(file, kind)
    assert torch.equal(bound().with_quick_decode().pixels(file.getvalue()), bound().pixels(file.getvalue()))


def test_normalisation():
    recipe = replace(PLAIN, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.2))
    batch = bound(recipe)(np.full((32, 32, 3), 51, np.uint8))
    assert batch.shape == (1, 3, 32, 32)
    assert batch.dtype == torch.float32
    assert torch.allclose(batch[0, :, 0, 0], torch.tensor([0.2, 0.0, -0.5]), atol=1e-6)


def test_floats_are_normalised_as_bytes_are_and_both_are_left_as_they_were():
    recipe = replace(PLAIN, resize=(32, 32), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.2))
    pixels = torch.from_numpy(picture(32, 32)).permute(2, 0, 1)[None]
    before, values = pixels.clone(), pixels.float()
    assert torch.equal(normalise(values, recipe, 3), normalise(pixels, recipe, 3))
    assert torch.equal(normalise(pixels, recipe, 3), bound(recipe)(pixels))
    assert torch.equal(pixels, before)
    assert torch.equal(values, before.float())
    assert normalise(values.double(), recipe, 3).dtype == torch.float32


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_equal_values_serve_any_number_of_channels(channels):
    values = torch.full((2, channels, 4, 4), 255.0)
    assert normalise(values, replace(PLAIN, mean=(0.5,) * 3, std=(0.25,) * 3), channels).eq(2).all()


def test_other_values_are_for_as_many_channels():
    recipe = replace(PLAIN, mean=(0.1, 0.2, 0.3), std=(0.5,) * 3)
    with pytest.raises(ImageError, match=r"mean and std for 3 channels, the model takes 1\. Attach another") as error:
        normalise(torch.zeros(1, 1, 4, 4), recipe, 1)
    assert error.value.for_command_line().endswith("the model takes 1. Give as many in its config.json.")


def test_every_kind_of_input_gives_the_same(tmp_path):
    pixels = picture(37, 53)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    backwards = np.asfortranarray(pixels[::-1, ::-1])[::-1, ::-1]
    frozen = pixels.copy()
    frozen.setflags(write=False)
    kinds = [
        str(tmp_path / "x.png"),
        tmp_path / "x.png",
        io.BytesIO((tmp_path / "x.png").read_bytes()),
        Image.fromarray(pixels),
        Image.open(tmp_path / "x.png"),
        frozen,
        backwards,
        pixels.transpose(2, 0, 1),
        pixels / 255,
        (pixels / 255).astype(np.float16),
        torch.from_numpy(pixels),
        torch.from_numpy(pixels).permute(2, 0, 1),
        (torch.from_numpy(pixels).permute(2, 0, 1) / 255).requires_grad_(),
        torch.from_numpy(pixels).double() / 255,
    ]
    preprocess = bound()
    together = preprocess(kinds)
    assert together.shape == (len(kinds), 3, 32, 32)
    assert not together.requires_grad
    assert all(torch.equal(one, together[0]) for one in together)
    assert torch.equal(preprocess(kinds[0])[0], together[0])
    assert torch.equal(preprocess(np.stack([pixels, pixels])), together[:2])
    assert torch.equal(preprocess(torch.from_numpy(np.stack([pixels, pixels])).permute(0, 3, 1, 2)), together[:2])
    assert torch.equal(preprocess(tuple(kinds[:2])), together[:2])


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(["1", "L", "P", "LA", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"]),
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from([1, 3]),
)
def test_every_mode(mode, height, width, channels):
    bands = len(Image.new(mode, (1, 1)).getbands())
    size = (width, height)
    if mode == "1":
        image = Image.fromarray(picture(height, width, 1)).convert("1")
    else:
        image = Image.frombytes(mode, size, picture(height, width * bands, 1).tobytes())
    pixels = bound(channels=channels).pixels(image)
    assert pixels.shape == (channels, 32, 32)
    assert pixels.dtype == torch.uint8


def save(image, path, **options):
    image.save(path, **options)
    return path


def test_alpha_is_dropped_as_the_reference_pipelines_do(tmp_path):
    pixels = picture(40, 40, 4)
    colours = bound().pixels(pixels[..., :3])
    assert torch.equal(bound().pixels(save(Image.fromarray(pixels), tmp_path / "a.png")), colours)
    grey = Image.merge("LA", Image.fromarray(pixels).split()[:2])
    assert torch.equal(bound().pixels(save(grey, tmp_path / "b.png")), bound().pixels(pixels[..., 0]))


def test_palette_with_transparency(tmp_path):
    image = Image.fromarray(picture(40, 40)).convert("P")
    path = save(image, tmp_path / "p.png", transparency=bytes(range(256)))
    assert torch.equal(bound().pixels(path), bound().pixels(image.convert("RGB")))


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    values = np.random.default_rng(0).integers(0, 2**16, (40, 40), dtype=np.uint16)
    expected = np.round(values / 257).astype(np.uint8)
    files = [save(Image.fromarray(values), tmp_path / name) for name in ("a.png", "a.tif")]
    files.append(tmp_path / "a.pgm")  # which Pillow 10.1 reads and does not write
    files[-1].write_bytes(b"P5 40 40 65535\n" + values.astype(">u2").tobytes())
    for file in files:
        read = read_image(file)
        assert read.shape == (40, 40, 3)
        assert torch.equal(read[..., 1], torch.from_numpy(expected))


def grey_tiff(bits, photometric, content):
    """4x4 pixels in a file that Pillow reads and does not write."""
    tags = {256: 4, 257: 4, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 4, 279: len(content)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return struct.pack("<4sI", b"II*\0", 8 + len(content)) + content + struct.pack("<H", 9) + entries + bytes(4)


def test_grey_tiffs_that_pillow_does_not_scale(tmp_path):
    content = bytes(range(32))
    corner = {}
    for bits, photometric in ((8, 0), (8, 1), (16, 1)):
        (tmp_path / "x.tif").write_bytes(grey_tiff(bits, photometric, content[: 2 * bits]))
        corner[bits, photometric] = read_image(tmp_path / "x.tif")[0, 0, 0].item()
    assert corner == {(8, 0): 255, (8, 1): 0, (16, 1): 1}
    for bits, photometric in ((12, 1), (16, 0)):
        (tmp_path / "x.tif").write_bytes(grey_tiff(bits, photometric, content[: 2 * bits]))
        with pytest.raises(
            ImageError, match=r"x\.tif as a picture: a TIFF of 12 bits, or of 16 with white as 0, which"
        ):
            read_image(tmp_path / "x.tif")


CHANGES = [Image.Image.copy, lambda image: image.rotate(0), lambda image: image.crop((0, 0, 4, 4))]


@pytest.mark.parametrize("change", CHANGES)
def test_of_sixteen_bits_without_a_file_nobody_knows_the_white(change, tmp_path):
    """A copy of a TIFF in which 0 is white is no other image than a copy of a PNG."""
    tiff = io.BytesIO(grey_tiff(16, 0, bytes(range(32))))
    png = save(Image.fromarray(np.arange(16, dtype=np.uint16).reshape(4, 4)), tmp_path / "x.png")
    for file in (tiff, png):
        with Image.open(file) as opened, pytest.raises(ImageError, match=r"no value for white, where it is of no file"):
            read_of(change(opened))
    with Image.open(png) as opened:
        opened.load()
        assert torch.equal(read_of(opened), read_image(png))


def read_of(image):
    """The pixels of any single picture: (h, w, 3)."""
    rows = rows_of(image, 3)
    return rows.between(0, rows.height)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_modes_without_a_white_are_refused(mode, tmp_path):
    image = Image.fromarray(picture(40, 40, 1)).convert(mode)
    with pytest.raises(ImageError, match=f"the {mode} image as a picture: mode '{mode}' has no value for white"):
        bound()(image)
    path = save(image, tmp_path / "x.tif")
    with pytest.raises(ImageError, match=r"x\.tif"):
        bound()(path)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation, tmp_path):
    upright = Image.fromarray(np.kron(picture(4, 4), np.ones((8, 8, 1), np.uint8)))
    turn = Image.Transpose  # what undoes each orientation, applied backwards
    undo = [None, None, 0, 3, 1, 5, 4, 6, 2][orientation]
    inverse = {2: 4, 4: 2}.get(undo, undo)
    stored = upright if undo is None else upright.transpose(turn(inverse))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(stored, tmp_path / "x.png", exif=exif)
    assert torch.equal(read_image(path), torch.from_numpy(np.array(upright)))
    with Image.open(path) as image:
        assert torch.equal(bound().pixels(image), bound().pixels(upright))


def test_first_frame_of_an_animation(tmp_path):
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    path = save(frames[0], tmp_path / "x.gif", save_all=True, append_images=frames[1:])
    assert torch.equal(bound().pixels(path), bound().pixels(frames[0]))


def test_grey_models_and_other_channels():
    colours = picture(40, 40)
    grey = np.array(Image.fromarray(colours).convert("L"))
    one = bound(channels=1)
    assert torch.equal(one(Image.fromarray(colours)), one(grey))
    assert one(grey).shape == one(grey[None]).shape == one(grey[..., None]).shape == (1, 1, 32, 32)
    five = bound(channels=5)
    assert five(picture(40, 40, 5)).shape == five(picture(40, 40, 5).transpose(2, 0, 1)).shape == (1, 5, 32, 32)
    with pytest.raises(ImageError, match="the model takes 5 channels, a picture gives 1 or 3"):
        five(Image.fromarray(colours))
    with pytest.raises(ImageError, match="takes 5 channels, and no axis of the shape"):
        five(grey)
    with pytest.raises(ImageError, match="takes 1 channels, and no axis of the shape"):
        one(colours)
    colourful = replace(PLAIN, mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0))
    with pytest.raises(ImageError, match=r"mean and std for 3 channels, the model takes 1\. Attach another"):
        bound(colourful, channels=1)(grey)


@pytest.mark.parametrize(
    ("image", "text"),
    [
        (np.full((9, 9, 3), 200.0), "0..1, got 200 to 200. It looks 0..255: divide by 255, or pass uint8"),
        (np.linspace(-2, 1, 243).reshape(9, 9, 3), "got -2 to 1. It looks normalised already: pass it to the model"),
        (np.linspace(0.6, 1.01, 243).reshape(9, 9, 3), r"got 0\.6 to 1\.01.*clip it, image\.clip\(0, 1\)"),
        (np.linspace(-0.1, 0.9, 243).reshape(9, 9, 3), r"got -0\.1 to 0\.9.*clip it, image\.clip\(0, 1\)"),
        (np.full((9, 9, 3), np.nan), "not finite"),
        (torch.full((3, 9, 9), math.inf), "not finite"),
        (np.full((9, 9, 3), 1 / 255**2 * 200), "almost black.*divided by 255 twice"),
        (np.zeros((9, 9, 3), np.int64), "must be uint8, or float from 0 to 1, got torch.int64"),
        (np.zeros((9, 9, 3), bool), "got torch.bool"),
        (np.zeros((9, 9, 3), ">u2"), r"got torch\.uint16\. Convert it, or scale it"),
        (np.zeros((9, 9, 3), object), "got object"),
        (np.zeros((3, 9, 3), np.uint8), r"\(3, 9, 3\) can be read as \(c, h, w\) and as \(h, w, c\)"),
        (np.zeros((9, 9, 4), np.uint8), r"no axis of the shape \(9, 9, 4\).*alpha channel: image\[..., :3\]"),
        (np.zeros((9, 9, 2), np.uint8), r"no axis of the shape \(9, 9, 2\) has as many\.$"),
        (np.zeros((0, 9, 3), np.uint8), r"got \(0, 9, 3\)"),
        (np.zeros(9, np.uint8), r"shape \(h, w, c\), \(c, h, w\) or \(h, w\), got \(9,\)"),
        (torch.zeros(3, 9, 9, device="meta"), "dense tensor with data, got one of torch.strided on meta"),
        (torch.zeros(3, 9, 9).to_sparse(), "dense tensor with data, got one of torch.sparse_coo on cpu"),
        (torch.zeros(2, 3, 9, 9, device="meta"), "dense tensor with data, got one of torch.strided on meta"),
        (torch.zeros(2, 3, 9, 9).to_sparse(), "dense tensor with data, got one of torch.sparse_coo on cpu"),
        (torch.zeros(1, 1, 3, 9, 9), r"got \(1, 1, 3, 9, 9\)"),
        (np.float64(0.5), r"got \(\)"),
        (
            b"bytes",
            "Cannot read the 5 bytes as a picture: it is damaged, or in another format; vitlite opens JPEG, PNG",
        ),
        (None, "A picture is a path, bytes, .* a Pillow image, an array or a tensor, got NoneType"),
        (7, "got int"),
        ([], "no pictures in this batch"),
        (torch.zeros(0, 3, 9, 9), "no pictures in this batch"),
        ([np.zeros((9, 9, 3), np.uint8), [1, 2]], "Picture 1 of 2: .* got list"),
        (Image.new("La", (9, 9)), "Cannot read the La image as a picture: conversion from La"),
        ("no/such/file.jpg", "Cannot read no/such/file.jpg as a picture: no such file"),
        (PHOTOS, "Cannot read .*photos as a picture: .*directory"),
        ("null\0byte", "Cannot read null"),
    ],
)
def test_what_is_no_picture(image, text):
    with pytest.raises(ImageError, match=text):
        bound()(image)


@pytest.mark.parametrize("kind", [">f2", ">f4", ">f8", "<f8", np.longdouble])
def test_floats_of_any_byte_order_and_width(kind):
    """As readers of FITS, netCDF and TIFF give them."""
    image = (picture(40, 40) / np.float32(255)).astype(np.float16)
    assert torch.equal(bound().pixels(image.astype(kind)), bound().pixels(image))
    assert torch.equal(bound().pixels(image.astype(kind)[::-1, :, ::-1]), bound().pixels(image[::-1, :, ::-1].copy()))


def test_floats_within_half_a_level_pass():
    image = np.full((40, 40, 3), 1.001)
    image[0] = -0.001
    assert bound().pixels(image).max() == 255


# files


def encoded():
    photo = Image.fromarray(picture(48, 40)).resize((120, 144))
    files = {}
    for kind in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM"):
        buffer = io.BytesIO()
        photo.save(buffer, kind)
        files[kind] = buffer.getvalue()
    return files


FILES = encoded()


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_broken_files_give_clear_errors(kind, data):
    """Cut, and with bytes changed: a picture or an ImageError that names the file, never anything else."""
    content = bytearray(FILES[kind])
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4)):
        content[place % len(content)] = value
    content = content[: data.draw(st.integers(0, len(content)))]
    file = io.BytesIO(bytes(content))
    file.name = "broken"
    try:
        assert read_image(file).shape[2] == 3
    except ImageError as error:
        assert str(error).startswith("Cannot read broken as a picture: ")  # noqa: PT017


@pytest.mark.parametrize("kind", sorted(FILES))
def test_truncated_and_empty_files(kind, tmp_path):
    for name, content in (("half", FILES[kind][: len(FILES[kind]) // 2]), ("empty", b""), ("text", b"not a picture")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ImageError, match=f"Cannot read .*{name} as a picture: ."):
            read_image(tmp_path / name)
    (tmp_path / "whole").write_bytes(FILES[kind])
    assert read_image(tmp_path / "whole").shape == (144, 120, 3)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bombs(tmp_path, monkeypatch):
    path = save(Image.new("1", (400, 300)), tmp_path / "bomb.png")
    for most in (100_000, 1_000):  # of the first Pillow only warns
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with pytest.raises(ImageError, match=r"bomb.png as a picture: .*(MAX_IMAGE_PIXELS|decompression bomb)"):
            read_image(path)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_errors_on_the_command_line_name_nothing_of_python(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    bomb = save(Image.new("1", (40, 30)), tmp_path / "bomb.png")
    nameless = save(Image.fromarray(picture(9, 9, 1)).convert("F"), tmp_path / "x.tif")
    for path, channels, words in (
        (bomb, 3, "1200 pixels, allowed are 1000. Make it smaller."),
        (nameless, 3, "mode 'F' has no value for white. Save it with 8 or 16 bits."),
        (nameless, 5, "the model takes 5 channels, a picture gives 1 or 3."),
    ):
        with pytest.raises(ImageError) as error:
            read_image(path, channels)
        assert error.value.for_command_line() == f"Cannot read {path} as a picture: {words}"
        assert str(error.value) != error.value.for_command_line()


@pytest.mark.parametrize("kind", sorted(FILES))
def test_files_are_found_by_their_usual_names(kind):
    assert {f".{kind.lower()}", f".{kind[:3].lower()}"} & SUFFIXES


def test_without_pillow(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"Opening x.jpg needs .* pip install 'vitlite\[images\]'"):
        bound()("x.jpg")
    assert bound()(picture(40, 40)).shape == (1, 3, 32, 32)


# the model it belongs to


def test_follows_its_model(vit):
    assert vit.preprocess(picture(40, 40)).dtype == torch.float32
    vit.bfloat16()
    assert vit.preprocess(picture(40, 40)).dtype == torch.bfloat16
    twin = copy.deepcopy(vit).double()
    assert twin.preprocess.model is twin
    assert twin.preprocess(picture(40, 40)).dtype == torch.float64
    assert vit.preprocess(picture(40, 40)).dtype == torch.bfloat16
    assert "preprocess" not in "".join(vit.state_dict())


def test_other_default_types_and_devices(vit):
    expected = vit.preprocess(picture(41, 40))
    from vitlite.images import transform

    transform._taps.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert torch.equal(vit.preprocess(picture(41, 40)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# what is set is what runs


class Doubled(torch.nn.Module):
    """A way to prepare pictures that is a module, as torchvision's transforms are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 2.0))

    def forward(self, images):
        return self.weight * images


class Inverted(Preprocess):
    """Prepares negatives, by a strength of its own."""

    def __init__(self, recipe, model, strength):
        super().__init__(recipe, model)
        object.__setattr__(self, "strength", strength)

    def pixels(self, image):
        return (255 - super().pixels(image)) * self.strength


class Brightened(Preprocess):
    def batch(self, pixels):
        return super().batch(pixels) + 1


class Whole(Preprocess):
    def __call__(self, images):
        return super().__call__(transform) * 0


class TenCrops(Preprocess):
    def batch(self, pixels):
        return super().batch(pixels).repeat(10, 1, 1, 1)


def test_a_module_set_as_preprocess_runs_and_is_no_part_of_the_network(vit, tmp_path):
    names, parts = list(vit.state_dict()), len(list(vit.modules()))
    way = Doubled()
    vit.preprocess = way
    assert vit.preprocess is way
    assert vit.preprocess(torch.ones(1)).item() == 2
    assert list(vit.state_dict()) == names
    assert len(list(vit.modules())) == parts
    assert way.weight not in set(vit.parameters())
    with pytest.raises(ImageError, match=r"A saved model takes a recipe, and .* is a Doubled, which has none"):
        vit.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    vit.labels = ["a", "b", "c"]
    with pytest.raises(ImageError, match=r"model.preprocess is a Doubled, and to predict takes a vitlite"):
        classify(vit, [picture(40, 40)])
    with pytest.raises(TrainError, match="has no preprocessing"):
        training_preprocess_of(vit)


def test_a_class_of_one_s_own_keeps_its_methods_and_what_it_has(vit):
    image = picture(40, 40)
    plain = vit.preprocess.pixels(image)
    vit.preprocess = Inverted(PLAIN, vit, 1)
    assert type(vit.preprocess) is Inverted
    assert vit.preprocess.model is vit
    assert torch.equal(vit.preprocess.pixels(image), 255 - plain)
    assert torch.equal(vit.preprocess(image), vit.preprocess.batch([255 - plain]))
    [(_, vector)] = embed(vit, [image])
    with torch.no_grad():
        assert torch.allclose(vector, vit.eval().embed(vit.preprocess(image))[0], atol=1e-6)
    twin = copy.deepcopy(vit)
    assert twin.preprocess.model is twin
    assert torch.equal(twin.preprocess.pixels(image), 255 - plain)
    again = pickle.loads(pickle.dumps(vit))
    assert again.preprocess.model is again
    assert torch.equal(again.preprocess(image), vit.preprocess(image))


def test_a_picture_is_drawn_as_the_model_saw_it(vit):
    image = np.full((40, 40, 3), 55, np.uint8)
    vit.preprocess = Inverted(PLAIN, vit, 1)
    assert _photo(vit, image).eq(200).all()


def test_only_what_predict_would_run_is_taken_by_it(vit):
    image = picture(40, 40)
    vit.preprocess = Brightened(PLAIN, vit)
    [(_, vector)] = embed(vit, [image])
    with torch.no_grad():
        assert torch.allclose(vector, vit.eval().embed(bound()(image) + 1)[0], atol=1e-6)
    vit.preprocess = Whole(PLAIN, vit)
    assert not vit.preprocess(image).any()
    with pytest.raises(ImageError, match=r"is a Whole with its own __call__, and to predict takes its pixels and its"):
        embed(vit, [image])
    vit.preprocess = TenCrops(PLAIN, vit)
    with pytest.raises(InputError, match="Of 2 pictures, 20 images or results were made: it must be one of each"):
        list(embed(vit, [image, image]))


@pytest.mark.parametrize("own", [Brightened, Whole, lambda recipe, model: Inverted(recipe, model, 1)])
def test_a_class_of_one_s_own_is_never_lost_on_the_way(vit, own, tmp_path):
    vit.preprocess = own(PLAIN, vit)
    kind = type(vit.preprocess).__name__
    with pytest.raises(ImageError, match=f"A saved model takes the recipe alone, and model.preprocess is a {kind}"):
        vit.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(ImageError, match="A file of vectors takes the recipe alone"):
        identity_of(vit, dtype=None, fast=False)
    if kind == "Inverted":
        assert training_preprocess_of(vit).pixels(picture(40, 40)).shape == (3, 32, 32)
    else:
        with pytest.raises(TrainError, match=f"is a {kind} with its own .*: this takes its pixels, and normalises"):
            training_preprocess_of(vit)
    vit.preprocess = vit.preprocess.transform  # as the errors say
    vit.save(tmp_path / "model")
    assert load(tmp_path / "model").preprocess.transform == PLAIN


def test_cifar_s_pictures_are_not_taken_as_they_are_where_a_class_does_otherwise(vit):
    as_they_are = replace(PLAIN, resize=(32, 32))
    assert cifar10_reader(Preprocess(as_they_are, vit)) is None
    assert cifar10_reader(Inverted(as_they_are, vit, 1)) is not None


def test_the_preprocess_of_another_model_becomes_this_one_s(vit):
    other = copy.deepcopy(vit).double()
    vit.preprocess = other.preprocess
    assert vit.preprocess.model is vit
    assert vit.preprocess(picture(40, 40)).dtype == torch.float32
    assert other.preprocess.model is other


def test_a_recipe_or_nothing_may_be_set(vit):
    vit.preprocess = PLAIN
    assert vit.preprocess.transform == PLAIN
    vit.preprocess = None
    with pytest.raises(ImageError, match="came without their preprocessing"):
        vit.preprocess(picture(40, 40))
    for name in ("one", "pixels", "recipe", "with_quick_decode"):
        with pytest.raises(VitliteError, match=r"came without their preprocessing.*Set it: model\.preprocess = "):
            getattr(vit.preprocess, name)
        assert getattr(vit.preprocess, name, None) is None
    assert copy.deepcopy(vit.preprocess) == pickle.loads(pickle.dumps(vit.preprocess)) == vit.preprocess


@pytest.mark.parametrize(("way", "kind"), [(Preprocess, "Preprocess"), ({"size": 32}, "dict"), ("center", "str")])
def test_what_prepares_no_pictures_is_refused_where_it_is_set(vit, way, kind):
    with pytest.raises(ImageError, match=rf"a function of pictures, or None, got {kind}\."):
        vit.preprocess = way
    assert vit.preprocess.transform == PLAIN


@pytest.mark.parametrize("own", [Preprocess, Brightened])
def test_the_model_is_freed_at_once(vit, own):
    model = ViT(vit.config)
    model.preprocess = own(PLAIN, model)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


# without its model, and one by one


def test_pickled_by_itself_it_leaves_the_model_behind(vit):
    content = pickle.dumps(vit.bfloat16().preprocess)
    assert len(content) < 5_000
    assert b"torch._utils" not in content  # how its weights would come along
    alone = pickle.loads(content)
    image = picture(40, 40)
    assert torch.equal(alone(image), vit.preprocess(image))
    assert alone(image).dtype == torch.bfloat16
    with pytest.raises(ImageError, match="it is damaged"):
        alone(b"no picture")


def test_one_picture_is_a_row_of_the_batch(vit):
    images = [picture(40, 40, seed=seed) for seed in range(3)]
    one = pickle.loads(pickle.dumps(vit.preprocess.one))
    assert torch.equal(torch.stack([one(image) for image in images]), vit.preprocess(images))
    vit.preprocess = Brightened(PLAIN, vit)
    assert torch.equal(vit.preprocess.one(images[0]), vit.preprocess(images)[0])
    elsewhere = Preprocess(PLAIN, SimpleNamespace(config=vit.config, device=torch.device("meta"), dtype=torch.float32))
    assert elsewhere.one(images[0]).device.type == "cpu"


class Photos(torch.utils.data.Dataset):
    """As torchvision's: a transform for each picture."""

    def __init__(self, paths, transform):
        self.paths, self.transform = paths, transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        return self.transform(self.paths[i])


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_in_the_workers_of_a_data_loader(vit, start):
    paths = sorted(PHOTOS.glob("*.png"))
    data = Photos(paths, vit.preprocess.one)
    loader = torch.utils.data.DataLoader(data, batch_size=len(paths), num_workers=1, multiprocessing_context=start)
    [batch] = loader
    assert torch.equal(batch, vit.preprocess(paths))


# much that becomes little


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize("shape", [(5000, 30), (30, 5000), (9000, 3), (3, 9000)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_tall_and_wide_pictures_are_pillows(shape, mode, interpolation):
    recipe = replace(PLAIN, size=(5, 7), resize=(8, 8), mode=mode, interpolation=interpolation)
    image = Image.fromarray(picture(*shape))
    check_against_pillow(image, recipe)


def test_the_longest_sides_take_little_time():
    recipe = replace(PLAIN, mode="squash", size=(1, 1), resize=(1, 1))
    start = time.process_time()
    assert bound(recipe).pixels(np.full((100_000, 500), 200, np.uint8)).eq(200).all()
    assert bound(recipe).pixels(np.full((500, 100_000), 200, np.uint8)).eq(200).all()
    assert time.process_time() - start < 20
