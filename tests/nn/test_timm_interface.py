"""timm's utilities treat our models as timm's own."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import FAMILIES_IN_TIMM, TRANSFORM, near, tiny_model, tiny_model_of_timm
from peers import timm
from PIL import Image
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import nn

from vitlite.checkpoints.convert import convert


def groups(model: nn.Module, **options: Any) -> dict[str, tuple[float, float]]:
    """The factor of the learning rate and the weight decay of each parameter."""
    names = {parameter: name.removeprefix("encoder.") for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group.get("lr_scale", 1.0), group["weight_decay"])
        for group in create_optimizer_v2(model, "adamw", lr=1e-3, **options).param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("family", FAMILIES_IN_TIMM)
def test_optimizers_group_the_parameters_alike(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    ours = tiny_model_of_timm(**FAMILIES_IN_TIMM[family])
    ours.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'theirs'}", pretrained=True)
    for decay in (1.0, 0.5):
        options = {"weight_decay": 0.05, "layer_decay": decay}
        found, expected = groups(ours, **options), groups(theirs, **options)
        common = found.keys() & expected.keys()
        assert {"blocks.0.norm1.weight", "blocks.1.attn.proj.weight"} <= common
        if family == "Qwen3":  # in timm, the head belongs to the last block
            common -= {"head.weight", "head.bias"}
            expected = {name: (decay * scale, weight_decay) for name, (scale, weight_decay) in expected.items()}
        assert {name: found[name] for name in common} == {name: expected[name] for name in common}
    assert len({scale for scale, _ in found.values()}) == ours.config.depth + (2 if ours.config.num_classes else 1)


def test_data_config_and_transform() -> None:
    model = tiny_model(image_size=(32, 48), channels=3)
    assert model.default_cfg == model.pretrained_cfg
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    image = Image.fromarray(torch.randint(256, (50, 70, 3), dtype=torch.uint8).numpy())
    assert near(model.preprocess(image)[0], transform(image))


@pytest.mark.parametrize("preprocess", [replace(TRANSFORM, margin="down"), torch.relu])
def test_no_other_preprocessing_takes_the_place_of_one_that_timm_cannot_describe(preprocess: Any) -> None:
    model = tiny_model()
    model.preprocess = preprocess
    with pytest.raises(KeyError, match=r"use model\.preprocess"):
        timm.data.create_transform(**timm.data.resolve_model_data_config(model))


def test_a_random_model_takes_the_preprocessing_that_timm_s_would() -> None:
    model = tiny_model()
    model.preprocess = None
    found, expected = (timm.data.resolve_model_data_config(each) for each in (model, nn.Module()))
    assert found == expected | {"input_size": [3, 32, 32]}


def test_sizes_and_averaged_weights() -> None:
    model = tiny_model(registers=2, cls_position=False, pool="cls_and_mean", num_classes=0)
    images = torch.randn(1, 3, 32, 32)
    assert model(images).shape == (1, model.num_features)
    assert model.features(images, layers=0).layers[0].shape[1] == model.num_prefix_tokens + 16
    average = ModelEmaV3(model, decay=0.5)
    changed = copy.deepcopy(model)
    nn.init.zeros_(changed.pos_embed)
    average.update(changed)
    assert torch.allclose(average.module.pos_embed, model.pos_embed / 2)
