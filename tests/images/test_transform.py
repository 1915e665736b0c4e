"""`TransformConfig` and `Preprocess`. tests/parity compares the pixels with other libraries' pipelines."""

import copy
import gc
import io
import json
import math
import pickle
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import vitlite
from vitlite.checkpoints.convert import convert
from vitlite.config import ViTConfig
from vitlite.errors import CheckpointError, ConfigError, ImageError, MissingExtraError
from vitlite.images import Preprocess, TransformConfig
from vitlite.images.decode import decode
from vitlite.images.transform import normalise
from vitlite.inference.predict import classify, embed
from vitlite.nn.vit import ViT

PHOTOS = Path(__file__).parents[2] / "examples" / "photos"
PLAIN = TransformConfig(size=(32, 32), resize=(36, 36), mode="center", interpolation="bicubic", mean=(0.5,), std=(0.5,))


@pytest.fixture
def vit() -> ViT:
    model = ViT(ViTConfig(image_size=32, patch_size=16, dim=16, depth=1, heads=1, mlp_dim=16, num_classes=3))
    model.preprocess = Preprocess(PLAIN, model)
    return model


def bound(transform=PLAIN, channels=3):
    """A Preprocess with no more of a model than it reads."""
    config = SimpleNamespace(channels=channels)
    return Preprocess(transform, SimpleNamespace(config=config, device=torch.device("cpu"), dtype=torch.float32))


def noise(height, width, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# TransformConfig


def test_lists_of_numbers_become_tuples():
    assert replace(PLAIN, mean=[0, 0.5, 1], std=[1, 1, 1]) == replace(PLAIN, mean=(0, 0.5, 1), std=(1, 1, 1))


def test_a_share_for_each_side_is_kept_by_scaled():
    assert replace(PLAIN, size=(32, 32), resize=(36, 64)).scaled((64, 64)).resize == (72, 128)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"interpolation": "lanczos"}, "interpolation must be one of .*, got 'lanczos'"),
        ({"margin": "up"}, "margin must be one of"),
        ({"mode": ["center"]}, "mode must be one of"),
        ({"size": (0, 4)}, r"size must be \(height, width\) in pixels, each from 1 to 65536, got \(0, 4\)"),
        ({"size": (32, 65_537)}, r"size must be"),
        ({"size": (True, 4)}, r"size must be"),
        ({"size": 32}, r"size must be"),
        ({"resize": (16.0, 16.0)}, r"resize must be"),
        ({"cut": (33, -1)}, r"cut must be"),
        ({"resize": (31, 32)}, r"a crop of \(32, 32\) does not fit in an image resized to \(31, 32\)"),
        ({"cut": (31, 32)}, r"a size of \(32, 32\) does not fit in a crop of \(31, 32\)"),
        ({"mean": ()}, "mean must be from"),
        ({"mean": "0.5"}, "mean must be from"),
        ({"mean": (1.0, 2.0)}, "mean and std must have the same length, got 2 and 1 numbers"),
        ({"mean": (math.nan,)}, "mean must be from -1e.06 to 1e.06, got"),
        ({"mean": ("0.5",)}, "mean must be from"),
        ({"mean": (0.5,) * 3, "std": (1, 1, math.inf)}, "std must be from 1e-06 to 1e.06, got"),
        ({"std": (0.0,)}, "std must be from 1e-06"),
        ({"scale": 0}, "scale must be from 1e-09"),
    ],
)
def test_wrong_configs(change, text):
    with pytest.raises(ConfigError, match=f"^TransformConfig: {text}"):
        TransformConfig(**PLAIN.to_dict() | change)


# pixels


def resized_by_pillow(image, transform):
    """Resize across first, as Pillow always did before version 13, then crop."""
    code = Image.Resampling[transform.interpolation.upper()]
    height, width = transform.resized(image.height, image.width)
    resized = image.resize((width, image.height), code).resize((width, height), code)
    top, left = round((height - transform.size[0]) / 2), round((width - transform.size[1]) / 2)
    box = (left, top, left + transform.size[1], top + transform.size[0])
    return torch.from_numpy(np.array(resized.crop(box))).permute(2, 0, 1)


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.tuples(st.integers(4, 60), st.integers(4, 60)),
    st.sampled_from(["bilinear", "bicubic"]),
    st.sampled_from(["center", "squash"]),
    st.sampled_from([0.8, 0.9, 1.0]),
)
def test_images_and_arrays_are_resized_to_the_same_bits(shape, size, interpolation, mode, crop_pct):
    resize = tuple(math.floor(side / crop_pct) for side in size)
    transform = replace(PLAIN, size=size, resize=resize, mode=mode, interpolation=interpolation)
    array = noise(*shape)
    expected = resized_by_pillow(Image.fromarray(array), transform)
    assert torch.equal(bound(transform).pixels(Image.fromarray(array)), expected)
    if shape[0] not in (1, 3):
        assert torch.equal(bound(transform).pixels(array), expected)


def test_every_kind_of_input_gives_the_same(tmp_path):
    pixels = noise(37, 53)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    frozen = pixels.copy()
    frozen.setflags(write=False)
    kinds = [
        str(tmp_path / "x.png"),
        tmp_path / "x.png",
        io.BytesIO((tmp_path / "x.png").read_bytes()),
        Image.fromarray(pixels),
        Image.open(tmp_path / "x.png"),
        frozen,
        np.asfortranarray(pixels[::-1, ::-1])[::-1, ::-1],
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


@pytest.mark.parametrize("channels", [1, 2, 4, 5])
def test_unusual_channel_counts_are_resized_channel_by_channel(channels):
    array = noise(40, 50, channels).reshape(40, 50, channels)
    pixels = bound(channels=channels).pixels(array)
    one_by_one = [bound(channels=1).pixels(array[..., i]) for i in range(channels)]
    assert torch.equal(pixels, torch.cat(one_by_one))


def test_arrays_of_the_right_size_need_no_pillow(monkeypatch):
    array = noise(36, 36)
    expected = bound().pixels(array)
    for name in [name for name in sys.modules if name.split(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert torch.equal(bound().pixels(torch.from_numpy(array)), expected)
    assert torch.equal(expected, torch.from_numpy(array).permute(2, 0, 1)[:, 2:34, 2:34])
    with pytest.raises(MissingExtraError, match=r"Resizing an image of 40 x 40 .*pip install 'vitlite\[images\]'"):
        bound().pixels(noise(40, 40))


@pytest.mark.parametrize("shape", [(1, 100_000), (100_000, 1), (40, 1_000_000)])
def test_an_image_too_narrow_to_resize_is_refused(shape):
    with pytest.raises(ImageError, match=r"too long and narrow: it would be resized to .*Crop the image first"):
        bound(replace(PLAIN, size=(224, 224), resize=(224, 224))).pixels(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("shape", [(40, 5000), (5000, 40), (5000, 30)])
def test_panoramas(shape):
    assert bound().pixels(np.full(shape, 200, np.uint8)).eq(200).all()


def test_other_default_types_and_devices(vit):
    expected = vit.preprocess(noise(41, 40))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert torch.equal(vit.preprocess(noise(41, 40)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# quick decode


@pytest.mark.parametrize(("side", "decoded"), [(20, 160), (80, 160), (81, 320), (161, 640), (321, 1280)])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_quick_decode_keeps_twice_the_resized_size(side, decoded, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.new("RGB", (1280, 1920)).save(file, "JPEG", exif=exif)
    image = decode(file.getvalue(), 3, (2 * side, 2 * side))
    assert min(image.size) == decoded >= 2 * side
    assert (image.height > image.width) == (orientation in (1, 3))


@pytest.mark.parametrize(("orientation", "size"), [(1, (320, 480)), (6, (640, 480))])
def test_quick_decode_of_an_oblong_size(orientation, size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.new("RGB", (1280, 1920)).save(file, "JPEG", exif=exif)
    image = decode(file.getvalue(), 3, (400, 300))
    assert (image.width, image.height) == size if orientation == 1 else image.height >= 400


def waves(height, width):
    """An image without fine detail, on which all ways to make it smaller agree."""
    y, x = np.mgrid[:height, :width]
    colours = np.sin(x / 40), np.cos(y / 55), np.sin((x + y) / 70)
    return Image.fromarray(((np.dstack(colours) + 1) * 127).astype(np.uint8))


@pytest.mark.parametrize("orientation", [1, 2, 5, 8])
@pytest.mark.parametrize(("height", "width"), [(512, 512), (512, 768)])
@pytest.mark.parametrize("mode", ["center", "squash"])
def test_quick_decode_gives_nearly_the_same_pixels(orientation, height, width, mode):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    waves(height, width).save(file, "JPEG", quality=95, exif=exif)
    whole = bound(replace(PLAIN, size=(28, 28), resize=(32, 32), mode=mode))
    quick = whole.with_quick_decode()
    assert (whole.quick_decode, quick.quick_decode, pickle.loads(pickle.dumps(quick)).quick_decode) == (0, 1, 1)
    apart = (quick.pixels(file.getvalue()).float() - whole.pixels(file.getvalue()).float()).abs()
    assert apart.mean() < 1
    assert apart.max() < 8


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "BMP", "Pillow"])
def test_quick_decode_changes_no_other_format(kind):
    file = io.BytesIO()
    image = Image.fromarray(noise(400, 400))
    if kind == "Pillow":  # opened by the caller
        image.save(file, "JPEG")
        content = Image.open(file)
    else:
        image.save(file, kind)
        content = file.getvalue()
    assert torch.equal(bound().with_quick_decode().pixels(content), bound().pixels(content))


# batches


def test_normalisation():
    transform = replace(PLAIN, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.2))
    batch = bound(transform)(np.full((32, 32, 3), 51, np.uint8))
    assert batch.shape == (1, 3, 32, 32)
    assert batch.dtype == torch.float32
    assert torch.allclose(batch[0, :, 0, 0], torch.tensor([0.2, 0.0, -0.5]), atol=1e-6)


def test_normalise_takes_floats_too_and_leaves_its_input_as_it_was():
    transform = replace(PLAIN, resize=(32, 32), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.2))
    pixels = torch.from_numpy(noise(32, 32)).permute(2, 0, 1)[None]
    before, values = pixels.clone(), pixels.float()
    assert torch.equal(normalise(values, transform, 3), normalise(pixels, transform, 3))
    assert torch.equal(normalise(pixels, transform, 3), bound(transform)(pixels))
    assert torch.equal(pixels, before)
    assert torch.equal(values, before.float())
    assert normalise(values.double(), transform, 3).dtype == torch.float32


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_equal_values_serve_any_number_of_channels(channels):
    values = torch.full((2, channels, 4, 4), 255.0)
    assert normalise(values, replace(PLAIN, mean=(0.5,) * 3, std=(0.25,) * 3), channels).eq(2).all()
    colourful = replace(PLAIN, mean=(0.1, 0.2, 0.3), std=(0.5,) * 3)
    if channels != 3:
        with pytest.raises(ImageError, match=rf"mean and std for 3 channels, but the model has {channels}\. Set mod"):
            normalise(values, colourful, channels)


@pytest.mark.parametrize(
    ("images", "text"),
    [
        ([], "The batch is empty"),
        (torch.zeros(0, 3, 9, 9), "The batch is empty"),
        ([noise(9, 9), [1, 2]], "Image 1 of 2: .* got list"),
        (["missing.jpg"], "Image 0 of 1: Cannot read missing.jpg as an image: no such file"),
    ],
)
def test_errors_of_a_batch(images, text):
    with pytest.raises(ImageError, match=text):
        bound()(images)


# the model it belongs to


class Inverted(Preprocess):
    """A subclass with a constructor and an attribute of its own."""

    def __init__(self, transform, model, strength):
        super().__init__(transform, model)
        object.__setattr__(self, "strength", strength)

    def pixels(self, image):
        return (255 - super().pixels(image)) * self.strength


class Brightened(Preprocess):
    def batch(self, pixels):
        return super().batch(pixels) + 1


def test_it_follows_its_model(vit):
    assert vit.preprocess(noise(40, 40)).dtype == torch.float32
    vit.bfloat16()
    assert vit.preprocess(noise(40, 40)).dtype == torch.bfloat16
    twin = copy.deepcopy(vit).double()
    assert twin.preprocess.model is twin
    assert twin.preprocess(noise(40, 40)).dtype == torch.float64
    assert vit.preprocess(noise(40, 40)).dtype == torch.bfloat16
    assert "preprocess" not in "".join(vit.state_dict())


def test_subclasses_keep_their_methods_and_attributes(vit):
    image = noise(40, 40)
    plain = vit.preprocess.pixels(image)
    vit.preprocess = Inverted(PLAIN, vit, 1)
    assert type(vit.preprocess) is Inverted
    assert vit.preprocess.model is vit
    assert torch.equal(vit.preprocess.pixels(image), 255 - plain)
    for again in (copy.deepcopy(vit), pickle.loads(pickle.dumps(vit))):
        assert again.preprocess.model is again
        assert torch.equal(again.preprocess(image), vit.preprocess(image))
    vit.preprocess = Brightened(PLAIN, vit)
    [(_, vector)] = embed(vit, [image])
    with torch.no_grad():
        assert torch.allclose(vector, vit.eval().embed(bound()(image) + 1)[0], atol=1e-6)


def test_a_preprocess_of_another_model_becomes_this_one_s(vit):
    other = copy.deepcopy(vit).double()
    vit.preprocess = other.preprocess
    assert vit.preprocess.model is vit
    assert vit.preprocess(noise(40, 40)).dtype == torch.float32
    assert other.preprocess.model is other


def test_a_transform_config_or_none_may_be_set(vit, tmp_path):
    vit.preprocess = PLAIN
    assert vit.preprocess.transform == PLAIN
    vit.preprocess = None
    with pytest.raises(ImageError, match=r"weights came without preprocessing\. Set model\.preprocess = .*like= \(--"):
        vit.preprocess(noise(40, 40))
    with pytest.raises(ImageError, match="weights came without preprocessing"):
        embed(vit, [noise(40, 40)])
    vit.save(tmp_path / "model")
    assert pickle.loads(pickle.dumps(vit.preprocess)).reason == vit.preprocess.reason


class Doubled(torch.nn.Module):
    """A function of images that is a module, as torchvision's transforms are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 2.0))

    def forward(self, images):
        return self.weight * images


def test_a_function_may_be_set_and_is_no_part_of_the_network(vit, tmp_path):
    names = list(vit.state_dict())
    function = Doubled()
    vit.preprocess = function
    assert vit.preprocess is function
    assert vit.preprocess(torch.ones(1)).item() == 2
    assert list(vit.state_dict()) == names
    assert function.weight not in set(vit.parameters())
    with pytest.raises(ImageError, match=r"model.preprocess is a Doubled, which cannot be saved"):
        vit.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    vit.labels = ["a", "b", "c"]
    with pytest.raises(ImageError, match=r"model.preprocess to be a vitlite.images.Preprocess, got Doubled"):
        classify(vit, [noise(40, 40)])


@pytest.mark.parametrize("value", [Preprocess, {"size": 32}, "center"])
def test_other_values_are_refused(vit, value):
    with pytest.raises(ImageError, match=r"must be a Preprocess, a TransformConfig, a function or None, got "):
        vit.preprocess = value
    assert vit.preprocess.transform == PLAIN


@pytest.mark.parametrize("kind", [Preprocess, Brightened])
def test_the_model_is_freed_at_once(vit, kind):
    model = ViT(vit.config)
    model.preprocess = kind(PLAIN, model)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


# in other processes


def test_pickling_leaves_the_model_behind(vit):
    content = pickle.dumps(vit.bfloat16().preprocess)
    assert len(content) < 5_000
    assert b"torch._utils" not in content  # which loads tensors
    alone = pickle.loads(content)
    image = noise(40, 40)
    assert torch.equal(alone(image), vit.preprocess(image))
    assert alone(image).dtype == torch.bfloat16
    with pytest.raises(ImageError, match="the file is damaged"):
        alone(b"no image")


def test_one_is_a_row_of_the_batch(vit):
    images = [noise(40, 40, seed=seed) for seed in range(3)]
    one = pickle.loads(pickle.dumps(vit.preprocess.one))
    assert torch.equal(torch.stack([one(image) for image in images]), vit.preprocess(images))
    vit.preprocess = Brightened(PLAIN, vit)
    assert torch.equal(vit.preprocess.one(images[0]), vit.preprocess(images)[0])
    elsewhere = Preprocess(PLAIN, SimpleNamespace(config=vit.config, device=torch.device("meta"), dtype=torch.float32))
    assert elsewhere.one(images[0]).device.type == "cpu"


class Photos(torch.utils.data.Dataset):
    """A dataset with a transform, like torchvision's."""

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


def test_the_background_is_saved_with_the_model(tmp_path: Path) -> None:
    """And by nothing that would forget it."""
    image = Image.new("RGBA", (40, 40), (200, 0, 0, 0))
    model = vitlite.create("vit_nano_4.cifar10")
    plain = model.preprocess(image)
    model.save(tmp_path / "plain")
    assert "background" not in (tmp_path / "plain" / "config.json").read_text()
    model.preprocess = model.preprocess.with_background("white")
    white = model.preprocess(Image.new("RGB", (40, 40), "white"))
    assert torch.equal(model.preprocess(image), white)
    assert not torch.equal(plain, white)
    model.save(tmp_path / "white")
    assert torch.equal(vitlite.load(tmp_path / "white").preprocess(image), white)
    assert torch.equal(vitlite.load(tmp_path / "white", image_size=32).preprocess(image), white)
    assert "pretrained_cfg" not in json.loads((tmp_path / "white" / "config.json").read_text())  # timm cannot say it
    convert(tmp_path / "white", tmp_path / "vitlite", to="vitlite")
    assert torch.equal(vitlite.load(tmp_path / "vitlite").preprocess(image), white)
    with pytest.raises(CheckpointError, match=r"transformers cannot put the background white behind"):
        convert(tmp_path / "white", tmp_path / "transformers", to="transformers")
    with pytest.raises(CheckpointError, match=r"timm's config\.json cannot describe the preprocessing"):
        convert(tmp_path / "white", tmp_path / "timm", to="timm")


@pytest.mark.parametrize("background", ["red", "#fff", "", 3, "#ffffff00", ("white",)])
def test_other_backgrounds_are_errors(background: Any) -> None:
    with pytest.raises(ConfigError, match=r"background \(--background\) must be white, black, #rrggbb or None, got"):
        replace(vitlite.create("vit_nano_4.cifar10").preprocess.transform, background=background)
