"""Sizes and pixels of images for NaFlex models, compared with timm and transformers; folders of SigLIP 2."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peers import timm, transformers
from PIL import Image
from references import REFERENCES, distance, spread
from torch import Tensor

from vitlite import ViT, load
from vitlite.checkpoints.convert import convert
from vitlite.errors import CheckpointError
from vitlite.images import NaFlexTransform, Preprocess, TransformConfig

PHOTOS = sorted((Path(__file__).parents[2] / "examples" / "photos").glob("*.[jp][pn]g"))
SIDES = (1, 2, 15, 16, 17, 100, 255, 256, 300, 451, 640, 1001, 4032)
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
timm_size = __import__("timm.data.naflex_transforms", fromlist=["x"]).get_image_size_for_seq
pil_processor = __import__(
    "transformers.models.siglip2.image_processing_pil_siglip2", fromlist=["x"]
).Siglip2ImageProcessorPil
transformers_size = __import__(
    "transformers.models.siglip2.image_processing_siglip2", fromlist=["x"]
).get_image_size_for_max_num_patches


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


def naflex(**changes: Any) -> NaFlexTransform:
    return NaFlexTransform(**{"size": (256, 256), "interpolation": "bilinear", **HALF, **changes})


def prepared(transform: TransformConfig, path: Path) -> Tensor:
    model: Any = SimpleNamespace(config=SimpleNamespace(channels=3), device=torch.device("cpu"), dtype=torch.float32)
    return Preprocess(transform, model)(path)[0]


@pytest.mark.parametrize(("patches", "patch"), [(256, 16), (1, 16), (7, 16), (576, 16), (1024, 14), (4096, 16)])
def test_sizes_are_those_of_timm_and_transformers(patches: int, patch: int) -> None:
    transform = naflex(max_patches=patches, patch_size=patch)
    for height in SIDES:
        for width in SIDES:
            size = transform.resized(height, width)
            assert size == transformers_size(height, width, patch, patches)
            assert size == timm_size((height, width), patch, patches)[1]
            assert size[0] * size[1] <= patches * patch**2


@pytest.mark.parametrize("patches", [64, 256, 900])
def test_pixels_are_those_of_timm(patches: int) -> None:
    for interpolation in ("bicubic", "bilinear"):
        theirs = timm.data.create_transform(
            input_size=(3, 384, 384), crop_pct=1.0, interpolation=interpolation, naflex=True, patch_size=16,
            max_seq_len=patches, patchify=False, **HALF,
        )  # fmt: skip
        for path in PHOTOS:
            with Image.open(path) as photo:
                expected = theirs(photo.convert("RGB"))
            ours = prepared(naflex(max_patches=patches, interpolation=interpolation), path)
            assert ours.shape == expected.shape
            assert (ours - expected).abs().max() < 1e-6


@pytest.mark.parametrize("patches", [64, 256, 900])
def test_pixels_are_those_of_transformers(patches: int) -> None:
    """Of the processor that uses Pillow; that of torchvision is coarser."""
    for path in PHOTOS:
        with Image.open(path) as photo:
            batch = pil_processor(max_num_patches=patches)(photo.convert("RGB"), return_tensors="pt")
        rows, columns = batch["spatial_shapes"][0].tolist()
        expected = batch["pixel_values"][0][: rows * columns]
        expected = expected.view(rows, columns, 16, 16, 3).permute(4, 0, 2, 1, 3).reshape(3, 16 * rows, 16 * columns)
        ours = prepared(naflex(max_patches=patches), path)
        assert ours.shape == expected.shape
        assert (ours - expected).abs().max() < 1e-6


def siglip2(folder: Path, **changes: Any) -> torch.nn.Module:
    """A folder of the Hub: both towers, and the processor of images."""
    images = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80}
    texts = images | {"vocab_size": 50, "max_position_embeddings": 8}
    images |= {"patch_size": 8, "num_patches": 16}
    theirs = spread(transformers.Siglip2Model(transformers.Siglip2Config(vision_config=images, text_config=texts)))
    theirs.save_pretrained(folder)
    pil_processor(patch_size=8, max_num_patches=24).save_pretrained(folder)
    return theirs


def vectors_of(theirs: torch.nn.Module, path: Path) -> Tensor:
    with Image.open(path) as photo:
        batch = pil_processor(patch_size=8, max_num_patches=24)(photo.convert("RGB"), return_tensors="pt")
    return theirs.get_image_features(**batch).pooler_output[0]


def test_a_folder_of_siglip_2(tmp_path: Path) -> None:
    """Files to vectors: sorted by shape in batches, they are those of transformers one by one; and after a save."""
    theirs = siglip2(tmp_path / "hub")
    ours = load(tmp_path / "hub")
    assert ours.config.image_size == 32
    transform = ours.preprocess.transform
    assert (transform.max_patches, transform.patch_size, transform.interpolation) == (24, 8, "bilinear")
    paths = [*PHOTOS, PHOTOS[0]]
    assert len({tuple(ours.preprocess(path).shape) for path in paths}) > 1
    with torch.no_grad():
        expected = torch.stack([vectors_of(theirs, path) for path in paths])
    ours.save(tmp_path / "saved")
    convert(tmp_path / "hub", tmp_path / "converted", "transformers")
    for model in (ours, load(tmp_path / "saved"), load(tmp_path / "converted")):
        assert distance(torch.from_numpy(model.vectors(paths)), expected) < 1e-5
        assert model.preprocess.transform.to_dict() == transform.to_dict()
    again = transformers.AutoModel.from_pretrained(tmp_path / "converted").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "converted", backend="pil")
    with torch.no_grad(), Image.open(paths[0]) as photo:
        output = again(**processor(photo.convert("RGB"), return_tensors="pt")).pooler_output
    assert distance(output, expected[:1]) < 1e-5


def test_another_patch_size_reaches_the_preprocessing(tmp_path: Path) -> None:
    siglip2(tmp_path / "hub")
    model = load(tmp_path / "hub", patch_size=16)
    assert model.preprocess.transform.patch_size == 16
    for photo in PHOTOS:
        images = model.preprocess(photo)
        assert model.features(images).patches.shape[1] <= model.preprocess.transform.max_patches


def test_timm_is_told_the_number_of_patches_by_the_caller_alone(tmp_path: Path) -> None:
    """So that a model with another number than its table has cannot be written for it."""
    siglip2(tmp_path / "hub")
    with pytest.raises(CheckpointError, match="cannot describe the preprocessing"):
        convert(tmp_path / "hub", tmp_path / "timm", "timm")
    model = load(tmp_path / "hub")
    model.preprocess = model.preprocess.with_max_patches(16)
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "timm", "timm")
    content = json.loads((tmp_path / "timm" / "config.json").read_text())
    del content["vitlite"]
    (tmp_path / "timm" / "config.json").write_text(json.dumps(content))
    again = load(tmp_path / "timm")
    assert again.preprocess.transform.max_patches == 16
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    images = again.preprocess(PHOTOS[0])
    with torch.no_grad():
        assert distance(again(images), theirs(images)) < 1e-5


def test_a_batch_of_timm_s_loader_is_what_each_image_alone_is() -> None:
    """timm pads and masks images of different shapes; the vectors are those of each image by itself."""
    reference = next(each for each in REFERENCES if (each.library, each.option) == ("timm", "NaFlex"))
    theirs = spread(reference.build())
    ours = ViT(reference.config).eval()
    ours.load_state_dict(reference.to_ours(theirs.state_dict()))
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(3, *size, generator=generator) for size in ((32, 40), (16, 24), (48, 8))]
    patchify = timm.data.naflex_transforms.Patchify(patch_size=8)
    batch = timm.data.naflex_dataset.NaFlexCollator(max_seq_len=24)([(patchify(image), 0) for image in images])[0]
    with torch.no_grad():
        expected = theirs(batch)
        for image, logits in zip(images, expected, strict=True):
            assert distance(ours(image[None])[0], logits) < 1e-5
