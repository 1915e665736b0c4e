"""Our pixels against timm's, transformers' and torchvision's own pipelines, on photos: at most one grey level apart.

Before normalisation, and against pipelines that use Pillow not even that. Only the order of Pillow's two passes is
pinned here: since version 13 it may go down before across, which the weights never saw.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peers import timm, torchvision, transformers
from PIL import Image

from vitlite import ViT
from vitlite.checkpoints.formats.processors import transform_from_transformers
from vitlite.checkpoints.formats.timm import transform_from_timm
from vitlite.checkpoints.metadata import transform_from_record
from vitlite.errors import ConfigError, ImageError
from vitlite.images import Preprocess, TransformConfig
from vitlite.presets import preset
from vitlite.zoo import registry

PHOTOS = sorted((Path(__file__).parents[2] / "examples" / "photos").glob("*.[jp][pn]g"))
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def levels_apart(transform, theirs):
    """The largest difference on any photo, in grey levels."""
    assert len(PHOTOS) == 4
    worst = 0.0
    std = torch.tensor(transform.std)[:, None, None]
    model = SimpleNamespace(config=SimpleNamespace(channels=3), device=torch.device("cpu"), dtype=torch.float32)
    prepare = Preprocess(transform, model)
    for path in PHOTOS:
        with Image.open(path) as image:
            expected = theirs(image.convert("RGB"))
        apart = ((prepare(path)[0] - expected) * std / transform.scale).abs().max().item()
        worst = max(worst, apart)
    return round(worst, 3)


@pytest.mark.parametrize("size", [(224, 224), (384, 384), (224, 320), (320, 224)])
@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("crop_mode", ["center", "squash"])
def test_timm(size, crop_pct, crop_mode):
    for interpolation in ("bicubic", "bilinear"):
        config = {"crop_pct": crop_pct, "crop_mode": crop_mode, "interpolation": interpolation, **IMAGENET}
        theirs = timm.data.create_transform(input_size=(3, *size), **config)
        assert levels_apart(transform_from_timm(config, size), theirs) == 0


@pytest.mark.parametrize(("crop", "resize"), [(224, 256), (224, 242), (224, 224), (384, 384), (512, 512), (518, 518)])
def test_torchvision(crop, resize):
    for name in ("bilinear", "bicubic"):
        interpolation = torchvision.transforms.InterpolationMode(name)
        theirs = torchvision.transforms._presets.ImageClassification(
            crop_size=crop, resize_size=resize, interpolation=interpolation
        )
        transform = TransformConfig(
            size=(crop,) * 2, resize=(resize,) * 2, mode="center", interpolation=name, **IMAGENET
        )
        assert levels_apart(transform, theirs) == 0


PROCESSORS = {
    "ViTImageProcessor": "vit",
    "DeiTImageProcessor": "deit",
    "CLIPImageProcessor": "clip",
    "BeitImageProcessor": "beit",
    "BitImageProcessor": "bit",
    "SiglipImageProcessor": "siglip",
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_normalize": False},
        {"do_rescale": False},
        {"resample": 2},
        {"do_rescale": None},
        {"do_normalize": None},
    ],
)
def test_transformers(name, options):
    """Pillow's backend exactly, and torchvision's, whose weights are rounded to 16 bits, to one grey level."""
    family = PROCESSORS[name]
    pillow = getattr(transformers.models, family)
    pillow = getattr(__import__(f"{pillow.__name__}.image_processing_pil_{family}", fromlist=["x"]), f"{name}Pil")
    for kind, most in ((pillow, 0), (getattr(transformers, name), 1)):
        processor = kind(**options)
        transform = transform_from_transformers(processor.to_dict())

        def theirs(image, processor=processor):
            return torch.as_tensor(np.asarray(processor(image, return_tensors="pt")["pixel_values"][0]))

        assert levels_apart(transform, theirs) <= most


@pytest.mark.parametrize("square", [False, True, None])
@pytest.mark.parametrize("name", ["ViT", "CLIP", "Siglip", "DeiT"])
def test_a_size_of_one_number_is_what_the_config_says_of_it(name, square):
    """A square, or the shorter edge, whatever is usual for the processor; in files that write both."""
    family = f"transformers.models.{name.lower()}.image_processing_pil_{name.lower()}"
    kind = getattr(__import__(family, fromlist=["x"]), f"{name}ImageProcessorPil")
    config = {
        "image_processor_type": f"{name}ImageProcessor", "size": 32, "default_to_square": square,
        "do_center_crop": True, "crop_size": 24, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.25] * 3,
    }  # fmt: skip
    processor = kind.from_dict(config)
    transform = transform_from_transformers(config)
    assert transform.mode == ("squash" if square else "center")
    assert levels_apart(transform, lambda image: torch.as_tensor(processor(image)["pixel_values"][0])) == 0
    with pytest.raises(ConfigError, match="use_square_size"):
        transform_from_transformers(config | {"use_square_size": True})


@pytest.mark.parametrize("options", [{}, {"do_normalize": False}, {"size": {"height": 96, "width": 160}}])
def test_dinov3_s_processor(options):
    """It resizes numbers that are not rounded: with weights that are never negative, less than a grey level apart."""
    processor = transformers.DINOv3ViTImageProcessor(**options)
    transform = transform_from_transformers(processor.to_dict())
    assert levels_apart(transform, lambda image: processor(image, return_tensors="pt")["pixel_values"][0]) <= 1


@pytest.mark.parametrize(("option", "value"), [("resample", 3), ("do_rescale", False)])
def test_what_dinov3_s_processor_does_otherwise_than_the_others_is_refused(option, value):
    config = transformers.DINOv3ViTImageProcessor(**{option: value}).to_dict()
    with pytest.raises(ConfigError, match=f"has {option}={value}, which vitlite does not support"):
        transform_from_transformers(config)


def test_answers(shared):
    """From photo to probabilities: DeiT-Tiny in timm's pipeline, and in ours."""
    from safetensors.torch import load_file

    weights = load_file(shared / "weights" / "deit_tiny_16.timm.safetensors")
    record = registry.find("deit_tiny_patch16_224.fb_in1k")
    ours, theirs = ViT(preset("vit_tiny_16")).eval(), timm.create_model("deit_tiny_patch16_224").eval()
    ours.load_state_dict(weights)
    theirs.load_state_dict(weights)
    ours.labels = record.labels
    ours.preprocess = Preprocess(transform_from_record(record), ours)
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model=theirs))
    for path in sorted((shared / "photos").iterdir()):
        with Image.open(path) as image, torch.no_grad():
            scores, places = theirs(transform(image.convert("RGB"))[None]).softmax(-1)[0].topk(5)
        answer = ours.predict(path)
        assert [p.index for p in answer] == places.tolist()
        assert [p.score for p in answer] == pytest.approx(scores.tolist(), abs=1e-5)


# Any transform and any image, by the libraries themselves.


def noise(height, width, seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixels_of(transform, image):
    model = SimpleNamespace(config=SimpleNamespace(channels=3), device=torch.device("cpu"), dtype=torch.float32)
    return Preprocess(transform, model).pixels(image)


SIDES, SHARES = st.integers(1, 300), st.sampled_from([0.5, 0.7, 0.8, 0.875, 0.9, 0.95, 0.96, 0.965, 1.0])
CROPS = st.tuples(st.integers(4, 60), st.integers(4, 60)) | st.integers(4, 60).map(lambda side: (side, side))
ANY = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ANY
@given(SIDES, SIDES, CROPS, SHARES, st.sampled_from(["bilinear", "bicubic"]), st.sampled_from(["center", "squash"]))
def test_timm_with_any_transform_and_image(across_first, height, width, size, share, interpolation, mode):
    config = {"crop_pct": share, "crop_mode": mode, "interpolation": interpolation, **IMAGENET}
    image = noise(height, width, height * 301 + width)
    theirs = timm.data.create_transform(input_size=(3, *size), **config, normalize=False)(image)
    assert torch.equal(pixels_of(transform_from_timm(config, size), image), theirs)


@ANY
@given(SIDES, SIDES, st.integers(4, 60), st.integers(0, 40), st.sampled_from(["bilinear", "bicubic"]))
def test_torchvision_with_any_transform_and_image(across_first, height, width, crop, more, interpolation):
    transforms = torchvision.transforms
    kind = transforms.InterpolationMode(interpolation)
    theirs = transforms.Compose(
        [transforms.Resize(crop + more, interpolation=kind), transforms.CenterCrop(crop), transforms.PILToTensor()]
    )
    transform = TransformConfig(
        size=(crop,) * 2, resize=(crop + more,) * 2, mode="center", interpolation=interpolation, **IMAGENET
    )
    image = noise(height, width, height * 301 + width)
    assert torch.equal(pixels_of(transform, image), theirs(image))


@ANY
@given(SIDES, SIDES, CROPS, st.tuples(st.integers(0, 40), st.integers(0, 40)), st.sampled_from([2, 3]), st.booleans())
def test_transformers_with_any_transform_and_image(across_first, height, width, crop, more, resample, stretched):
    """Which crops odd margins a pixel further up and left than timm does."""
    resize = {"height": crop[0] + more[0], "width": crop[1] + more[1]}
    if not stretched:
        resize = {"shortest_edge": max(crop) + more[0]}
    family = "deit" if stretched else "clip"
    module = __import__(f"transformers.models.{family}.image_processing_pil_{family}", fromlist=["x"])
    processor = getattr(module, "DeiTImageProcessorPil" if stretched else "CLIPImageProcessorPil")(
        size=resize,
        crop_size={"height": crop[0], "width": crop[1]},
        resample=resample,
        do_center_crop=True,
        do_rescale=False,
        do_normalize=False,
        do_convert_rgb=True,
    )
    image = noise(height, width, height * 301 + width)
    theirs = torch.as_tensor(np.asarray(processor(image, return_tensors="np")["pixel_values"][0]))
    transform = transform_from_transformers(processor.to_dict())
    assert torch.equal(pixels_of(transform, image), theirs.to(torch.uint8))


def test_a_crop_larger_than_the_image_before_it_is_refused():
    """timm and transformers fill what is missing with black."""
    with pytest.raises(ConfigError, match=r"a crop of \(32, 32\) does not fit in an image resized to \(29, 29\)"):
        transform_from_timm({"crop_pct": 1.1, "interpolation": "bicubic", **IMAGENET}, (32, 32))
    config = {"image_processor_type": "CLIPImageProcessor", "resample": 3, "image_mean": [0.5], "image_std": [0.5]}
    with pytest.raises(ConfigError, match=r"a crop of \(32, 32\) does not fit in an image resized to \(24, 24\)"):
        transform_from_transformers(config | {"size": {"shortest_edge": 24}, "crop_size": {"height": 32, "width": 32}})


def test_torchvision_s_transforms_run_where_they_are_set():
    model = ViT(preset("vit_tiny_16"))
    names = list(model.state_dict())
    transforms = torchvision.models.ViT_B_16_Weights.IMAGENET1K_V1.transforms()
    model.preprocess = transforms
    with Image.open(PHOTOS[0]) as image:
        image = image.convert("RGB")
    assert torch.equal(model.preprocess(image), transforms(image))
    assert list(model.state_dict()) == names
    model.labels = [str(i) for i in range(1000)]
    with pytest.raises(ImageError, match=r"Expected model\.preprocess to be a vitlite\.images\.Preprocess, got Image"):
        model.predict(image)
