"""timm opens folders that vitlite wrote with the options that it has for its own checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import DISTILLED, FAMILIES_IN_TIMM, near, tiny_model_of_timm
from peers import timm
from PIL import Image
from torch import Tensor, nn

from vitlite import ViT, load
from vitlite.checkpoints.convert import convert

CASES = pytest.mark.parametrize("changes", FAMILIES_IN_TIMM.values(), ids=FAMILIES_IN_TIMM)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def ours(changes: dict[str, Any], tmp_path: Path) -> ViT:
    """A model with three blocks, of which timm takes the features, in a folder that `convert` wrote for timm."""
    model = tiny_model_of_timm(**{"depth": 3, **changes})
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "timm")
    return model


def opened(folder: Path, **options: Any) -> nn.Module:
    return timm.create_model(f"local-dir:{folder / 'theirs'}", pretrained=True, **options).eval()


def images(*size: int, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(1))


@CASES
def test_every_usual_call(ours: ViT, changes: dict[str, Any], tmp_path: Path) -> None:
    x, distilled = images(*ours.config.size), changes.get("pool") == DISTILLED["pool"]
    with torch.no_grad():
        expected = ours.embed(x)
        if distilled:  # without heads, timm returns the mean of the two tokens
            expected = expected.unflatten(1, (2, -1)).mean(1)
        assert near(opened(tmp_path)(x), ours(x))
        assert near(opened(tmp_path, num_classes=0)(x), expected)
        new = opened(tmp_path, num_classes=5)
        assert new(x).shape == (2, 5)
        if not distilled:
            assert near(new.forward_head(new.forward_features(x), pre_logits=True), expected)
        if ours.config.resample == "naflex":  # timm cannot sum the channels of flattened patches, and begins anew
            return
        grey = images(*ours.config.size, channels=1)
        assert near(opened(tmp_path, in_chans=1)(grey), load(tmp_path / "ours", channels=1)(grey))


@CASES
def test_features_of_three_blocks(ours: ViT, tmp_path: Path) -> None:
    x = images(*ours.config.size)
    with torch.no_grad():
        maps = opened(tmp_path, features_only=True)(x)
        tokens = ours.features(x, layers=(-3, -2, -1)).layers
    for theirs, expected in zip(maps, tokens, strict=True):
        assert near(theirs.flatten(2).mT, expected[:, ours.config.prefix_tokens :])


@CASES
def test_another_image_size(ours: ViT, tmp_path: Path) -> None:
    size = tuple(2 * side for side in ours.config.size)
    with torch.no_grad():
        expected = load(tmp_path / "ours", image_size=size)(images(*size))
        assert near(opened(tmp_path, img_size=size)(images(*size)), expected)


@CASES
def test_the_images_are_prepared_alike(ours: ViT, tmp_path: Path) -> None:
    image = Image.fromarray(torch.randint(256, (50, 70, 3), dtype=torch.uint8).numpy())
    config = timm.data.resolve_model_data_config(opened(tmp_path))
    if ours.config.resample == "naflex":  # the number of patches is an argument, there
        config |= {"naflex": True, "patch_size": 8, "max_seq_len": 16, "patchify": False}
    transform = timm.data.create_transform(**config)
    assert near(ours.preprocess(image)[0], transform(image))
