"""timm's names: every one that is known answers as timm's own model, saved by timm; every other one is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import timm
from references import distance
from torch import nn

from vitlite import load
from vitlite.checkpoints.formats.timm import ARCHITECTURES
from vitlite.checkpoints.metadata import read_metadata
from vitlite.errors import CheckpointError

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples" / "maintain"))

import timm_architectures  # noqa: E402

VISION_TRANSFORMERS = [name for module in timm_architectures.MODULES for name in timm.list_models(module=module)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_folder_of_timm_answers_as_timm(name: str, tmp_path: Path) -> None:
    """A small model, all of whose sizes but the depth differ from what the name stands for."""
    theirs = timm_architectures.small_model(name)
    timm.models.save_for_hf(theirs, tmp_path, safe_serialization=True)
    compare(load(tmp_path), theirs)
    # Qwen3 and NaFlex stretch their tables at every call, which test_equal.py compares; the others on loading.
    if ARCHITECTURES[name].positions == "learned" and not name.startswith(("qwen3", "naflex")):
        compare_at_another_size(theirs, tmp_path)


def compare(ours: nn.Module, theirs: nn.Module) -> None:
    images = torch.randn(2, ours.config.channels, *ours.config.size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert distance(ours(images), theirs(images)) < timm_architectures.EQUAL


def compare_at_another_size(small: nn.Module, tmp_path: Path) -> None:
    """timm stretches the table of some in a way of their own, and of all but hybrids the kernel for other patches."""
    timm.models.save_for_hf(small, tmp_path, model_args=timm_architectures.SMALL, safe_serialization=True)
    embed = getattr(small, "encoder", small).patch_embed
    changes: dict[str, Any] = {"image_size": 2 * embed.img_size[0]}
    if not hasattr(embed, "backbone"):
        changes["patch_size"] = embed.patch_size[0] // 2
    ours = load(tmp_path, **changes)
    given = {"img_size" if field == "image_size" else field: value for field, value in changes.items()}
    compare(ours, timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **given).eval())


@pytest.mark.parametrize("name", [name for name in VISION_TRANSFORMERS if name not in ARCHITECTURES])
def test_every_other_name_is_refused_and_computed_otherwise(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"architecture": "{name}"}}')
    with pytest.raises(CheckpointError, match=rf"timm's architecture {name} is not supported"):
        read_metadata(tmp_path)
    assert timm_architectures.architecture_of(name) is None, "it is computed: write the table anew"
