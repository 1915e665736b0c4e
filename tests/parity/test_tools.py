"""Tools that count or replace layers find the same in our network as in the same network of timm."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import FAMILIES_IN_TIMM, near, tiny_model, tiny_model_of_timm
from peers import timm
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitlite import ViT
from vitlite.checkpoints.convert import convert
from vitlite.errors import InputError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


def pair(changes: dict[str, Any], folder: Path) -> tuple[ViT, nn.Module]:
    """Our model, and timm's with the same weights."""
    ours = tiny_model_of_timm(**changes)
    ours.save(folder / "ours")
    convert(folder / "ours", folder / "theirs", "timm")
    return ours, timm.create_model(f"local-dir:{folder / 'theirs'}", pretrained=True).eval()


# The counter ends in an error in attention pooling, timm's and ours.
COUNTED = {name: changes for name, changes in FAMILIES_IN_TIMM.items() if changes.get("pool") not in ("map", "map_all")}


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("changes", COUNTED.values(), ids=COUNTED)
def test_flop_counter(
    changes: dict[str, Any], inference: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    counts = []
    ours, theirs = pair(changes, tmp_path)
    images = torch.randn(2, 3, *ours.config.size)
    for model in (ours, theirs):
        with inference(), FlopCounterMode(display=False) as counter:
            model(images)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# timm's DINOv3 ends in an error after it. In a distilled model, EVA-02 and AIMv2, timm has several layers where we have
# one, and each is rounded by itself. In NaFlex, its patch projection is a linear layer, which is rounded, too.
OTHERS = ("DINOv3", "distilled", "EVA-02", "AIMv2", "NaFlex")
QUANTIZED = {name: changes for name, changes in FAMILIES_IN_TIMM.items() if not name.startswith(OTHERS)}


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated", "ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("changes", QUANTIZED.values(), ids=QUANTIZED)
def test_quantize_dynamic(changes: dict[str, Any], tmp_path: Path) -> None:
    """It replaces the layers whose type is exactly nn.Linear."""
    from torch.ao.quantization import quantize_dynamic

    ours, theirs = pair(changes, tmp_path)
    images, sizes = torch.randn(2, 3, *ours.config.size), []
    models = [quantize_dynamic(model, {nn.Linear}, torch.qint8) for model in (ours, theirs)]
    for model in models:
        weights = [module.weight() for module in model.modules() if "dynamic" in type(module).__module__]
        sizes.append(sum(weight.nbytes for weight in weights))
    assert sizes[0] == sizes[1] > 0
    assert near(models[0](images), models[1](images))


def test_every_linear_layer_is_one_of_torch() -> None:
    """Tools ask for the exact type."""
    for changes in ({"pre_logits": 8}, *FAMILIES_IN_TIMM.values()):
        layers = [module for module in tiny_model(**changes).modules() if isinstance(module, nn.Linear)]
        assert {type(layer) for layer in layers} == {nn.Linear}


def test_pruned_channels() -> None:
    """torch-pruning removes channels from every layer, and leaves the config."""
    wide, narrow = tiny_model(heads=1), tiny_model(heads=1, dim=8)
    for name, parameter in narrow.named_parameters():
        module, _, kind = name.rpartition(".")
        setattr(wide.get_submodule(module), kind, parameter)
    for module in wide.modules():
        if isinstance(module, nn.LayerNorm):
            module.normalized_shape = tuple(module.weight.shape)
    images = torch.randn(2, 3, 32, 32)
    assert near(wide(images), narrow(images))


@pytest.mark.parametrize("changes", FAMILIES_IN_TIMM.values(), ids=FAMILIES_IN_TIMM)
def test_offloaded_weights(changes: dict[str, Any]) -> None:
    """accelerate leaves weights on the meta device, and loads those of a module for its `forward`."""
    offload = pytest.importorskip("accelerate").cpu_offload
    model = tiny_model(**changes)
    image = torch.randint(0, 256, (model.config.channels, 40, 40), dtype=torch.uint8)
    images = model.preprocess(image)
    expected = model(images)
    offload(model, "cpu")
    assert model.device.type == "meta"
    assert torch.equal(model.preprocess(image), images)
    assert near(model(images), expected)
    if model.config.num_classes:
        assert model.predict(image)[0].index == expected.argmax()
    with pytest.raises(InputError, match=r"reset_head\(0\)"):
        model.vectors([image])
