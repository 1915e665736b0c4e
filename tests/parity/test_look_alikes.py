"""Every network of timm's whose tensors have the names of a plain ViT is equal, refused, or asked about."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from files_made import completed
from peers import timm
from references import distance, final_norm_of, rotation_of, spread
from safetensors.torch import save_file
from torch import nn

from vitlite import ViT, load
from vitlite.checkpoints.formats.timm import ARCHITECTURES
from vitlite.errors import CheckpointError, ConfigError

# Of all modules of timm those in which a network has such names; beside the hybrids', whose stems tell them apart.
MODULES = ("beit", "deit", "eva", "vision_transformer", "vision_transformer_relpos")
SMALL = {"embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 5, "mlp_ratio": 4}
GELUS = {"tanh": "gelu_tanh", "quick": "quick_gelu"}
NAMES = [name for module in MODULES for name in timm.list_models(module=module)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


def small(name: str) -> nn.Module:
    """A network of this architecture, with few and narrow blocks, and images of 4 x 4 patches."""
    patch = int(found[1]) if (found := re.search(r"patch(\d+)", name)) else 16
    options = {**SMALL, "img_size": 4 * patch}
    if "sapiens2" in name:  # whose blocks differ in how many heads they have
        options["num_kv_heads"] = 2
    return spread(timm.create_model(name, **options))


def known(model: Any) -> dict[str, Any]:
    """What somebody answers who knows timm's model, in the nearest words of ours."""
    mlp = model.blocks[0].mlp
    activation, plain = str(getattr(mlp, "act", "")).lower(), type(mlp).__name__ == "Mlp"
    answers = {
        "image_size": model.patch_embed.img_size[0],
        "patch_size": model.patch_embed.patch_size[0],
        "heads": 2,
        "norm_eps": model.blocks[0].norm1.eps,
        "mlp": next((ours for word, ours in GELUS.items() if word in activation), "gelu") if plain else "swiglu",
        "pool": {"token": "cls", "avg": "mean"}.get(model.global_pool, model.global_pool),
        "positions": "learned" if model.pos_embed is not None else "none",
        "rope": rotation_of(model),
        "final_norm": final_norm_of(model),
    }
    if getattr(model, "pool_include_prefix", False):  # for which there is no word, and the question says so
        del answers["pool"]
    return answers


def outcome(model: nn.Module, path: Path) -> str:
    """What becomes of a bare file, with what is asked for answered: refused, asked about, or a model."""
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    said: dict[str, Any] = {}
    for _ in range(3):
        try:
            return compared(model, load(path, config=completed(path, **said) if said else None))
        except CheckpointError:
            return "refused"
        except ConfigError as error:
            asked = re.search(r"do not determine (\w+(?:, \w+)*)", str(error))
            answers = known(model)
            fields = asked[1].split(", ") if asked else []
            if not fields or not set(fields) <= answers.keys():
                return "asked"
            said |= {field: answers[field] for field in fields}
    return "asked"


def compared(model: nn.Module, ours: ViT) -> str:
    images = torch.randn(2, 3, *ours.config.size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mine, theirs = ours(images), model(images)
    return "equal" if mine.shape == theirs.shape and distance(mine, theirs) < 1e-5 else "differs"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_taken_for_a_plain_vit(name: str, tmp_path: Path) -> None:
    became = outcome(small(name), tmp_path / "bare.safetensors")
    assert became in ("equal", "refused", "asked")
    if became == "equal":
        assert name in ARCHITECTURES
