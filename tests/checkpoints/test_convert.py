"""Conversions keep the logits: timm, transformers and torchvision load them, and they come back as they were."""

import argparse
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files_made import flax
from models import (
    DINOV3,
    DISTILLED,
    FAMILIES_IN_TIMM,
    IMAGES,
    REGISTERS,
    TIMM_SIZES,
    TINY,
    TRANSFORM,
    near,
    tiny_model,
    tiny_model_of_timm,
)
from peers import timm, torchvision, transformers, vit_pytorch
from PIL import Image
from safetensors.torch import load_file, save_file

from vitlite import ViT, ViTConfig, load
from vitlite.checkpoints.convert import convert
from vitlite.errors import CheckpointError, ConfigError
from vitlite.images import Preprocess, TransformConfig


def model_for_transformers(**changes: Any) -> ViT:
    """A tiny model whose pictures are cut as transformers cuts them."""
    model = tiny_model(**changes)
    model.preprocess = Preprocess(replace(TRANSFORM, margin="down"), model)
    return model


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("changes", [
    {}, {"num_classes": 0}, {"norm_eps": 1e-12, "mlp": "gelu_tanh", "qkv_bias": False}, {"cls_position": False},
    {"class_token": False, "pool": "mean"}, {"layer_scale": 0.1, "pool": "cls_and_mean", "mlp_dim": 64},
    {"layer_scale": 0.1, "pool": "cls_and_mean", "mlp_dim": 64, **REGISTERS},
    {"layer_scale": 0.1, "pool": "cls_and_mean", "mlp_dim": 48, "mlp": "swiglu"},
    {"layer_scale": 0.1, "mlp_dim": 56, "mlp": "swiglu", "num_classes": 0, **REGISTERS},
    {"pool": "map", "class_token": False, "mlp": "gelu_tanh", "num_classes": 0},
    DINOV3, {**DINOV3, "mlp": "swiglu"}, {**DINOV3, "qkv_bias": False, "registers": 0, "mlp": "gelu_tanh"},
    {"registers": 1, "cls_position": False}, {"registers": 1, "cls_position": False, "num_classes": 0},
    {"registers": 1, "cls_position": False, "pool": "cls_and_distillation"},
])  # fmt: skip
def test_transformers_loads_what_was_converted_and_it_comes_back(changes: dict[str, Any], tmp_path: Path) -> None:
    model = model_for_transformers(**changes)
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "transformers")
    kind = transformers.AutoModelForImageClassification if model.config.num_classes else transformers.AutoModel
    theirs, report = kind.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert set(report["missing_keys"]) <= {"pooler.dense.weight", "pooler.dense.bias"} | {
        key
        for key in report["missing_keys"]
        if key.endswith(("mask_token", "register_tokens"))  # where there are none
    }
    assert not report["unexpected_keys"]
    if hasattr(type(theirs.config)(), "use_mask_token"):  # DINOv2's, in newer versions
        assert not any("mask_token" in key for key in report["missing_keys"])
    assert not model.config.registers or not any("register_tokens" in key for key in report["missing_keys"])
    with torch.no_grad():
        output = theirs(IMAGES)
        if model.config.num_classes:
            answer = output.logits
        else:
            answer = output.pooler_output if model.config.pool == "map" else output.last_hidden_state[:, 0]
        assert near(answer, model(IMAGES))
    again = load(tmp_path / "theirs")
    assert torch.equal(again(IMAGES), model(IMAGES))
    assert again.labels == model.labels
    assert again.preprocess.transform.resize == TRANSFORM.resize


@pytest.mark.parametrize("changes", FAMILIES_IN_TIMM.values(), ids=FAMILIES_IN_TIMM)
def test_timm_opens_what_was_converted_and_it_comes_back(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model_of_timm(**changes)
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'theirs'}", pretrained=True).eval()
    images = torch.randn(2, 3, *model.config.size, generator=torch.Generator().manual_seed(0))
    assert near(theirs(images), model(images))
    again = load(tmp_path / "theirs")
    assert torch.equal(again(images), model(images))
    assert again.config == model.config
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    del config["vitlite"]  # timm's words alone say it too
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    assert near(load(tmp_path / "theirs")(images), model(images))
    convert(tmp_path / "ours", tmp_path / "timm.safetensors", "timm")
    theirs.load_state_dict(load_file(tmp_path / "timm.safetensors"))
    convert(tmp_path / "timm.safetensors", tmp_path / "back.safetensors", "vitlite", config=model.config)
    state = load_file(tmp_path / "back.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["EVA-02", "Perception Encoder", "learned rotation"])
def test_transformers_opens_by_timm_what_was_converted_for_timm(name: str, tmp_path: Path) -> None:
    model = tiny_model_of_timm(**FAMILIES_IN_TIMM[name])
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "timm")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "theirs").eval()
    assert type(theirs) is transformers.TimmWrapperForImageClassification
    with torch.no_grad():
        assert near(theirs(IMAGES).logits, model(IMAGES))


def test_only_tensors_that_timm_reads_stand_beside_its_words(tmp_path: Path) -> None:
    """`save` writes our names: of models whose tensors timm calls otherwise, vitlite alone is told what they are."""
    for name, opened in (("hybrid, root alone", True), ("gated", True), ("distilled", False), ("DINOv3", False)):
        tiny_model(**FAMILIES_IN_TIMM[name]).save(tmp_path / name)
        assert ("architecture" in json.loads((tmp_path / name / "config.json").read_text())) == opened


@pytest.mark.parametrize("changes", [
    {**DINOV3, "norm_eps": 1e-6}, {**DINOV3, "layer_scale": None}, {**DINOV3, "class_token": False, "pool": "mean"},
    {**DINOV3, "final_norm": "pooled"}, {**DINOV3, "pool": "map"}, {**DISTILLED, "num_classes": 0},
    {**DISTILLED, "mlp": "swiglu"}, {**DISTILLED, "input_norm": "tokens"}, {"stem": (1,), "patch_size": 4},
    {"mlp": "swiglu", "pool": "map", "class_token": False}, {"mlp": "swiglu", "inner_norm": "both"},
    {"mlp": "swiglu", "stem": ()}, {**DINOV3, "mlp": "gelu_tanh"}, {"registers": 2, "positions": "sincos2d",
    "cls_position": False},
], ids=str)  # fmt: skip
def test_what_timm_computes_otherwise_is_not_written_for_it(changes: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(**changes).save(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="cannot describe a model with"):
        convert(tmp_path / "ours", tmp_path / "theirs", "timm")
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("changes", [
    {**DINOV3, "pool": "map"}, {**DISTILLED, "num_classes": 0}, {"mlp": "swiglu", "pool": "map", "class_token": False},
], ids=str)  # fmt: skip
def test_no_tensors_are_written_for_what_timm_pools_otherwise(changes: dict[str, Any], tmp_path: Path) -> None:
    """It would take them, and answer with what it pools: of its Eva, by attention, all tokens."""
    tiny_model(**changes).save(tmp_path / "ours")
    pool = changes.get("pool", DISTILLED["pool"])
    said = f"timm has no model with pool='{pool}', so the results would differ."
    with pytest.raises(CheckpointError, match=re.escape(said)):
        convert(tmp_path / "ours", tmp_path / "vit.safetensors", "timm")
    assert not (tmp_path / "vit.safetensors").exists()


def test_a_bias_for_keys_is_not_lost_on_the_way_to_timm(tmp_path: Path) -> None:
    tiny_model(**DINOV3).save(tmp_path / "ours")
    for target in ("theirs", "timm.safetensors"):
        with pytest.raises(CheckpointError, match="timm's Eva has no bias for keys, but this model has one"):
            convert(tmp_path / "ours", tmp_path / target, "timm")
        assert not (tmp_path / target).exists()


@pytest.mark.parametrize(("changes", "recipe", "text"), [
    ({"norm_eps": 1e-12}, {}, "cannot describe a model with"),
    ({"pool": "mean_with_cls"}, {}, "cannot describe a model with"),
    ({}, {"margin": "down"}, "cannot describe the preprocessing of this model"),
    ({}, {"resize": (36, 50)}, "cannot describe the preprocessing of this model"),
])  # fmt: skip
def test_a_folder_that_timm_could_not_open_is_not_made_for_it(
    changes: dict[str, Any], recipe: dict[str, Any], text: str, tmp_path: Path
) -> None:
    model = tiny_model(**changes)
    model.preprocess = Preprocess(replace(TRANSFORM, **recipe), model)
    model.save(tmp_path / "ours")
    with pytest.raises(CheckpointError, match=f"timm's config.json {text}"):
        convert(tmp_path / "ours", tmp_path / "theirs", "timm")
    assert not (tmp_path / "theirs").exists()
    convert(tmp_path / "ours", tmp_path / "theirs", "vitlite")
    assert load(tmp_path / "theirs").preprocess.transform == model.preprocess.transform


def test_squashed_pictures_stay_squashed(tmp_path: Path) -> None:
    model = tiny_model()
    model.preprocess = Preprocess(TransformConfig(**TRANSFORM.to_dict() | {"mode": "squash", "margin": "down"}), model)
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "transformers")
    assert load(tmp_path / "theirs").preprocess.transform == model.preprocess.transform


@pytest.mark.parametrize("changes", [{}, {"pre_logits": 8}, {"qkv_bias": False}, {"image_size": (32, 32)}])
def test_torchvision_loads_what_was_converted_and_it_comes_back(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(**changes)
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "tv.safetensors", "torchvision")
    theirs = torchvision.models.VisionTransformer(
        32, 8, 2, 2, 16, 24, num_classes=3, representation_size=model.config.pre_logits or None
    ).eval()
    theirs.load_state_dict(load_file(tmp_path / "tv.safetensors"))
    assert near(theirs(IMAGES), model(IMAGES))
    again = load(tmp_path / "tv.safetensors", config=model.config.replace(qkv_bias=True))
    assert near(again(IMAGES), model(IMAGES))
    convert(tmp_path / "tv.safetensors", tmp_path / "timm.safetensors", "timm")  # heads are not needed for names
    state = load_file(tmp_path / "timm.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("to", "changes", "what"), [
    ("torchvision", {"norm_eps": 1e-12}, "norm_eps=1e-12"), ("torchvision", {"mlp": "quick_gelu"}, "mlp='quick_gelu'"),
    ("torchvision", {"pool": "mean"}, "pool='mean'"), ("transformers", {"pool": "mean"}, "pool='mean'"),
    ("transformers", {"head_dim": 4}, "head_dim=4"), ("torchvision", {"positions": "none"}, "positions='none'"),
    ("transformers", {"registers": 2, "cls_position": False}, "registers=2"),
    ("transformers", {"registers": 2, "class_token": False, "pool": "mean", "cls_position": False}, "class_token=Fal"),
    ("transformers", {"registers": 1, "cls_position": False, "pool": "mean"}, "pool='mean'"),
    ("transformers", {"pool": "map", "class_token": False}, "num_classes=3"),
    ("transformers", {"pool": "map", "class_token": False, "num_classes": 0, "qkv_bias": False}, "qkv_bias=False"),
    ("transformers", {"pool": "map", "num_classes": 0}, "class_token=True"),
    ("transformers", {"pool": "map", "class_token": False, "num_classes": 0, "image_size": (32, 48)}, "image_size="),
    ("transformers", {"pool": "map", "class_token": False, "num_classes": 0, "mlp": "swiglu"}, "mlp='swiglu'"),
    ("transformers", {**DINOV3, "num_classes": 3}, "num_classes=3"),
    ("transformers", {**DINOV3, "pool": "mean"}, "pool='mean'"),
    ("transformers", {**DINOV3, "layer_scale": None}, "layer_scale=None"),
    ("transformers", {"mlp": "swiglu"}, "mlp='swiglu'"),
    ("transformers", {"stem": ()}, r"stem=\(\)"), ("transformers", {"final_norm": "none"}, "final_norm='none'"),
    ("transformers", {"layer_scale": 0.1, "mlp": "swiglu", "mlp_dim": 20, "num_classes": 0}, "mlp_dim=20"),
    ("torchvision", {"mlp": "swiglu"}, "mlp='swiglu'"), ("torchvision", {"final_norm": "none"}, "final_norm='none'"),
    ("torchvision", {"class_token": False, "pool": "mean"}, "class_token=False"),
    ("torchvision", {"image_size": (16, 64)}, r"image_size=\(16, 64\)"), ("torchvision", {"channels": 4}, "channels=4"),
    ("transformers", {"final_norm": "pooled"}, "final_norm='pooled'"),
    ("transformers", {"input_norm": "tokens"}, "no names for the tensors norm_pre.bias"),
    ("transformers", {"layer_scale": 0.1, "num_classes": 0}, "mlp_dim=24"),
    ("transformers", {"layer_scale": 0.1, "num_classes": 0, "mlp_dim": 64, "image_size": (16, 64)}, "image_size="),
    ("torchvision", {"layer_scale": 0.1}, "torchvision format has no names for the tensors blocks.0.ls1.gamma"),
])  # fmt: skip
def test_models_that_others_cannot_compute_are_refused(
    to: Any, changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    tiny_model(**changes).save(tmp_path / "ours")
    with pytest.raises(CheckpointError, match=what):
        convert(tmp_path / "ours", tmp_path / "theirs", to)


def test_what_the_target_s_code_decides_must_be_known(tmp_path: Path) -> None:
    save_file(tiny_model().state_dict(), tmp_path / "vit.safetensors")
    with pytest.raises(ConfigError, match="do not determine image_size, norm_eps, mlp, pool"):
        convert(tmp_path / "vit.safetensors", tmp_path / "tv.safetensors", "torchvision")
    with pytest.raises(ConfigError, match="do not determine image_size, heads, norm_eps, mlp, pool"):
        convert(tmp_path / "vit.safetensors", tmp_path / "folder", "vitlite")
    said = TINY
    convert(tmp_path / "vit.safetensors", tmp_path / "tv.safetensors", "torchvision", config=said)
    convert(tmp_path / "vit.safetensors", tmp_path / "folder", "vitlite", config=said)
    assert torch.equal(load(tmp_path / "folder")(IMAGES), tiny_model()(IMAGES))
    with pytest.raises(
        ConfigError, match=r"Cannot convert to 'jax'. Pass one of timm, transformers, torchvision, vitlite"
    ):
        convert(tmp_path / "vit.safetensors", tmp_path / "out", "jax")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [
    lambda state: state, lambda state: {"model": state, "epoch": 3}, lambda state: {"state_dict": {"model": state}},
    lambda state: {"encoder": {f"module.{name}": tensor for name, tensor in state.items()}},
])  # fmt: skip
def test_pickles_are_converted(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    torch.save(wrap(tiny_model().half().state_dict()), tmp_path / "vit.pth")
    convert(tmp_path / "vit.pth", tmp_path / "vit.safetensors", "timm")
    state = load_file(tmp_path / "vit.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in tiny_model().half().state_dict().items())


@pytest.mark.parametrize("changes", [
    {"class_token": False, "pool": "mean"}, {"cls_position": False}, {"image_size": (16, 64)},
    {"registers": 2, "cls_position": False}, {"num_classes": 0}, {"final_norm": "pooled", "pool": "mean"},
])  # fmt: skip
def test_the_same_names_need_nothing_to_be_known(changes: dict[str, Any], tmp_path: Path) -> None:
    state = tiny_model(**changes).state_dict()
    torch.save(state, tmp_path / "vit.pth")
    convert(tmp_path / "vit.pth", tmp_path / "vit.safetensors", "timm")
    written = load_file(tmp_path / "vit.safetensors")
    assert written.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in written.items())


def test_names_that_rotary_networks_share_are_not_lost_in_other_names(tmp_path: Path) -> None:
    state = tiny_model(layer_scale=0.1, cls_position=False).state_dict()
    old = {name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): x for name, x in state.items()}
    torch.save(old, tmp_path / "deit.pth")
    for config in (None, TINY.replace(layer_scale=0.1, cls_position=False)):
        with pytest.raises(ConfigError, match=r"do not determine the network: DeiT III has scales"):
            convert(tmp_path / "deit.pth", tmp_path / "out.safetensors", "timm", config=config)
    args = {"img_size": 32, "patch_size": 8, "num_heads": 4, **TIMM_SIZES}
    named = {"architecture": "deit3_small_patch16_224", "model_args": args}
    (tmp_path / "config.json").write_text(json.dumps(named))
    convert(tmp_path, tmp_path / "out.safetensors", "timm")
    assert load_file(tmp_path / "out.safetensors").keys() == state.keys()


@pytest.mark.parametrize(
    "keys", [("student", "teacher"), ("state_dict", "state_dict_ema"), ("encoder", "target_encoder")]
)
def test_pickle_with_several_networks_needs_a_key(keys: tuple[str, str], tmp_path: Path) -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(IMAGES).sum().backward()
    optimizer.step()
    states = {
        key: {f"module.{name}": x.detach() + i for name, x in model.named_parameters()} for i, key in enumerate(keys)
    }
    rest = {"optimizer": optimizer.state_dict(), "epoch": 3, "dino_loss": {"center": torch.zeros(1, 5)}}
    torch.save(states | rest, tmp_path / "vit.pth")
    with pytest.raises(CheckpointError, match=rf"contains several ViTs: {keys[0]}, {keys[1]}\. Choose one with key="):
        convert(tmp_path / "vit.pth", tmp_path / "vit.safetensors", "timm")
    with pytest.raises(
        CheckpointError, match=rf"no ViT in a known format under the key 'other'. It contains: {keys[0]}, "
    ):
        convert(tmp_path / "vit.pth", tmp_path / "vit.safetensors", "timm", key="other")
    convert(tmp_path / "vit.pth", tmp_path / "vit.safetensors", "timm", key=keys[1])
    written = load_file(tmp_path / "vit.safetensors")
    assert torch.equal(written["head.bias"], states[keys[1]]["module.head.bias"])
    with pytest.raises(ConfigError, match=r"is not a pickle\. Leave out key="):
        convert(tmp_path / "vit.safetensors", tmp_path / "again.safetensors", "timm", key=keys[1])


def test_a_checkpoint_of_a_training_script_is_converted(tmp_path: Path) -> None:
    state = tiny_model().state_dict()
    compiled = {f"_orig_mod.{name}".replace("blocks.0.", "blocks.0._orig_mod."): x for name, x in state.items()}
    script = {"epoch": 3, "arch": "vit", "state_dict": compiled, "args": argparse.Namespace(lr=0.1, model="vit")}
    torch.save(script, tmp_path / "model_best.pth.tar")
    convert(tmp_path / "model_best.pth.tar", tmp_path / "vit.safetensors", "timm")
    written = load_file(tmp_path / "vit.safetensors")
    assert written.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in written.items())
    with pytest.raises(CheckpointError, match=r"is a pickle, .*vitlite convert .*model_best.pth.tar"):
        load(tmp_path / "model_best.pth.tar")


def test_simple_vit_opens_with_its_positions_written_into_it(tmp_path: Path) -> None:
    """As the page coming_from.md has it."""
    torch.manual_seed(0)
    shape = {"image_size": 64, "patch_size": 16, "num_classes": 3, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48}
    simple = vit_pytorch.SimpleViT(**shape).eval()
    save_file(simple.state_dict(), tmp_path / "bare.safetensors")
    said = ViTConfig(
        **shape, pool="mean", class_token=False, head_dim=64, qkv_bias=False, input_norm="patches", norm_eps=1e-5
    )
    with pytest.raises(CheckpointError, match=r"by a formula of vit-pytorch's SimpleViT, .*coming_from\.md shows"):
        load(tmp_path / "bare.safetensors", config=said)
    state = {"pos_embedding": simple.pos_embedding[None]}
    for theirs, tensor in simple.state_dict().items():
        name = theirs.replace("to_out.weight", "to_out.0.weight").replace("net.3.", "net.4.")
        state[name.replace("linear_head", "mlp_head")] = tensor.contiguous()
        if name.endswith("to_out.0.weight"):
            state[name.replace("weight", "bias")] = torch.zeros(len(tensor))
    save_file(state, tmp_path / "simple.safetensors")
    images = torch.randn(2, 3, 64, 64)
    assert near(load(tmp_path / "simple.safetensors", config=said)(images), simple(images))


def test_a_whole_model_in_a_pickle_is_named(tmp_path: Path) -> None:
    torch.save(tiny_model(), tmp_path / "whole.pth")
    with pytest.raises(
        CheckpointError, match=r"contains an object of the type vitlite\.\S+, .* in Python: torch\.save"
    ):
        convert(tmp_path / "whole.pth", tmp_path / "out.safetensors", "timm")


def test_what_the_target_held_before_says_nothing_of_the_new_model(tmp_path: Path) -> None:
    model_for_transformers().save(tmp_path / "one")
    ViT(TINY).save(tmp_path / "two")
    convert(tmp_path / "one", tmp_path / "theirs", "transformers")
    convert(tmp_path / "two", tmp_path / "theirs", "transformers")
    assert not (tmp_path / "theirs" / "preprocessor_config.json").exists()
    assert load(tmp_path / "theirs").labels == ("LABEL_0", "LABEL_1", "LABEL_2")  # as transformers calls them


def test_a_folder_with_a_pickle_keeps_its_config(tmp_path: Path) -> None:
    model_for_transformers().save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "old", "transformers")
    torch.save(load_file(tmp_path / "old" / "model.safetensors"), tmp_path / "old" / "pytorch_model.bin")
    (tmp_path / "old" / "model.safetensors").unlink()
    convert(tmp_path / "old", tmp_path / "new", "vitlite")
    again = load(tmp_path / "new")
    assert torch.equal(again(IMAGES), tiny_model()(IMAGES))
    assert again.labels == ("ant", "bee", "cow")


def test_a_folder_for_torchvision_has_the_tensors_alone(tmp_path: Path) -> None:
    tiny_model().save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "torchvision")
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["model.safetensors"]
    assert near(load(tmp_path / "theirs", config=TINY)(IMAGES), tiny_model()(IMAGES))


def test_config_json_describes_the_usual_pickle_and_the_only_one_of_a_folder(tmp_path: Path) -> None:
    tiny_model().save(tmp_path / "base")
    state = load_file(tmp_path / "base" / "model.safetensors")
    torch.save(state, tmp_path / "base" / "pytorch_model.bin")
    convert(tmp_path / "base" / "pytorch_model.bin", tmp_path / "usual", "vitlite")
    torch.save(state, tmp_path / "base" / "mine.pth")
    with pytest.raises(ConfigError, match=r"mine\.pth: The tensors do not determine"):
        convert(tmp_path / "base" / "mine.pth", tmp_path / "mine", "vitlite")
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / "base" / name).unlink()
    convert(tmp_path / "base", tmp_path / "only", "vitlite")
    for name in ("usual", "only"):
        assert load(tmp_path / name).labels == ("ant", "bee", "cow")


def test_tensor_larger_than_its_pickle_is_an_error(tmp_path: Path) -> None:
    large = torch.zeros(1).expand(10**12)
    torch.save(dict(tiny_model().state_dict()) | {"head.weight": large}, tmp_path / "vit.pth")
    with pytest.raises(CheckpointError, match=r"vit\.pth is damaged: its tensors would take \d+ bytes"):
        convert(tmp_path / "vit.pth", tmp_path / "out.safetensors", "timm")


def test_pickles_are_neither_made_nor_guessed(tmp_path: Path) -> None:
    tiny_model().save(tmp_path / "ours")
    with pytest.raises(ConfigError, match=r"Cannot write .*out.pth: vitlite does not write pickles\. Pass a folder"):
        convert(tmp_path / "ours", tmp_path / "out.pth", "timm")
    with pytest.raises(CheckpointError, match=r"There is no file or folder .*none.pth"):
        convert(tmp_path / "none.pth", tmp_path / "out", "timm")
    (tmp_path / "two").mkdir()
    for name in ("a.pth", "b.pth"):
        torch.save(tiny_model().state_dict(), tmp_path / "two" / name)
    with pytest.raises(CheckpointError, match=r"Pass one of a.pth, b.pth"):
        convert(tmp_path / "two", tmp_path / "out", "timm")


def test_an_adapter_beside_a_pickle_is_not_left_out(tmp_path: Path) -> None:
    torch.save(dict(tiny_model().state_dict()), tmp_path / "pytorch_model.bin")
    (tmp_path / "adapter_config.json").write_text("{}")
    for place in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match=r"contains an adapter"):
            convert(place, tmp_path / "out.safetensors", "timm")


def test_tied_and_strided_weights_of_a_pickle_are_converted(tmp_path: Path) -> None:
    state = dict(tiny_model().state_dict())
    state["blocks.1.norm1.weight"] = state["blocks.0.norm1.weight"]
    state["head.weight"] = state["head.weight"].T.contiguous().T
    state["norm.bias"] = state["norm.bias"][:1].expand(len(state["norm.bias"]))
    torch.save(state, tmp_path / "vit.pth")
    convert(tmp_path / "vit.pth", tmp_path / "out.safetensors", "timm")
    written = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(tensor, written[name]) for name, tensor in state.items())


def save_shards(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Two files, and an index that names both."""
    names = sorted(state)
    file_of = {name: f"model-{int(place >= len(names) // 2)}.safetensors" for place, name in enumerate(names)}
    for file in set(file_of.values()):
        save_file({name: state[name] for name in names if file_of[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    """By whatever name, from Python too."""
    model = model_for_transformers()
    model.save(tmp_path / "run")
    weights = tmp_path / "run" / "model.safetensors"
    (tmp_path / "shards").mkdir()
    save_shards(model.state_dict(), tmp_path / "shards")
    save_file(model.state_dict(), tmp_path / "mine.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "mine.safetensors")
    os.link(tmp_path / "mine.safetensors", tmp_path / "hard.safetensors")
    torch.save(model.state_dict(), tmp_path / "run" / "pytorch_model.bin")
    (tmp_path / "linked").symlink_to(tmp_path / "run")
    before = everything(tmp_path)
    for source, target in (
        ("mine.safetensors", "mine.safetensors"),
        ("mine.safetensors", "link.safetensors"),
        ("link.safetensors", "mine.safetensors"),
        ("mine.safetensors", "hard.safetensors"),
        ("shards", "shards/model-1.safetensors"),
        ("shards/model.safetensors.index.json", "shards/model-0.safetensors"),
        ("run", "run"),
        ("run", "linked"),
        (weights, "run"),
        (weights, "linked/../run"),
        ("run/pytorch_model.bin", "run"),  # whose config.json is read
    ):
        with pytest.raises(CheckpointError, match=r"would overwrite its input"):
            convert(tmp_path / source, tmp_path / target, "timm")
        assert everything(tmp_path) == before


def test_what_is_wrong_beside_a_pickle_is_named_where_it_is(tmp_path: Path) -> None:
    torch.save(tiny_model().state_dict(), tmp_path / "vit.pth")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=str(tmp_path / "config.json")):
        convert(tmp_path, tmp_path / "out.safetensors", "timm")


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    save_file(tiny_model().state_dict() | {"steps": torch.ones(1, dtype=torch.int64)}, tmp_path / "vit.safetensors")
    with pytest.raises(CheckpointError, match=r"\+ steps \(1,\)"):
        convert(tmp_path / "vit.safetensors", tmp_path / "out.safetensors", "timm")


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_pickles_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(
        CheckpointError, match=r"evil.pth contains an object of the type .*, and loading it could run code"
    ):
        convert(tmp_path / "evil.pth", tmp_path / "out.safetensors", "timm")
    assert not (tmp_path / "evil").exists()
    torch.save({"step": 3}, tmp_path / "none.pth")
    with pytest.raises(CheckpointError, match=r"none.pth contains no ViT in a known format. It contains: step"):
        convert(tmp_path / "none.pth", tmp_path / "out.safetensors", "timm")
    torch.save([torch.ones(1)], tmp_path / "list.pth")
    with pytest.raises(CheckpointError, match=r"list.pth contains no ViT in a known format. It contains: list"):
        convert(tmp_path / "list.pth", tmp_path / "out.safetensors", "timm")
    torch.save({"model": tiny_model().state_dict() | {"more": torch.ones(1)}}, tmp_path / "more.pth")
    with pytest.raises(CheckpointError, match=r"more.pth .*\n\+ more \(1,\)"):
        convert(tmp_path / "more.pth", tmp_path / "out.safetensors", "timm")


def test_an_npz_is_converted(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **flax())
    convert(tmp_path / "vit.npz", tmp_path / "ours", "vitlite")
    images = torch.randn(1, 3, 16, 16)
    assert torch.equal(load(tmp_path / "ours")(images), load(tmp_path / "vit.npz")(images))


def test_transformers_covers_squares_only(tmp_path: Path) -> None:
    model = tiny_model(image_size=(32, 24))
    model.preprocess = Preprocess(replace(TRANSFORM, size=(32, 24), resize=(36, 36), margin="down"), model)
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "transformers")
    assert load(tmp_path / "theirs").preprocess.transform.resize == (36, 36)
    model.preprocess = Preprocess(replace(TRANSFORM, size=(32, 24), resize=(36, 27), margin="down"), model)
    model.save(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="cannot resize images to cover 36 x 27 pixels"):
        convert(tmp_path / "ours", tmp_path / "others", "transformers")


@pytest.mark.parametrize("kind", ["Dinov2", "Dinov2WithRegisters"])
def test_transformers_stretches_the_oblong_table_of_a_dinov2_as_if_it_were_a_squares(kind: str, tmp_path: Path) -> None:
    sizes = {"image_size": (16, 64), "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1}
    config = getattr(transformers, f"{kind}Config")(**sizes, num_attention_heads=2, mlp_ratio=2)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="image_size is 16 x 64, but the position table of"):
        load(tmp_path)
    config.image_size = 32
    config.save_pretrained(tmp_path)
    assert load(tmp_path).config.grid == (4, 4)


def test_transformers_takes_no_mean_over_a_class_token(tmp_path: Path) -> None:
    tiny_model(pool="mean", num_classes=0).save(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="no model with pool='mean'"):
        convert(tmp_path / "ours", tmp_path / "theirs", "transformers")


def test_a_file_of_several_types_loses_no_digit(tmp_path: Path) -> None:
    model = tiny_model()
    state = model.state_dict()
    state = {name: tensor.bfloat16() if name < "head" else tensor for name, tensor in state.items()}
    save_file(state, tmp_path / "mixed.safetensors")
    convert(tmp_path / "mixed.safetensors", tmp_path / "torchvision.safetensors", "torchvision", config=TINY)
    assert torch.equal(load_file(tmp_path / "torchvision.safetensors")["heads.head.weight"], state["head.weight"])


@pytest.mark.parametrize("to", ["transformers", "torchvision"])
@pytest.mark.parametrize("options", [{"mlp": "swiglu"}, {"final_norm": "none"}], ids=str)
def test_parts_that_the_library_lacks_are_refused(options: dict[str, Any], to: Any, tmp_path: Path) -> None:
    model = ViT(ViTConfig(image_size=16, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=64, num_classes=2, **options))
    model.save(tmp_path / "ours")
    with pytest.raises(
        CheckpointError,
        match=f"{to} has no model with .*{next(iter(options))}=",
    ):
        convert(tmp_path / "ours", tmp_path / "theirs", to)


@pytest.mark.parametrize("to", ["timm", "transformers"])
def test_names_that_vitlite_cannot_use_are_not_replaced_by_others(to: str, tmp_path: Path) -> None:
    """The outputs of a regression are not scores: nor are those of what would be written."""
    labels = {0: "cat", 1: "dog", 2: "grass"}
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**small, image_size=16, patch_size=8, id2label=labels, problem_type="regression")
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"class names .* cannot be used: .*problem_type is regression"):
        convert(tmp_path / "theirs", tmp_path / "out", to)
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "theirs", tmp_path / "alone.safetensors", to)
    convert(tmp_path / "theirs", tmp_path / "ours", "vitlite")
    assert load(tmp_path / "ours").labels is None


def test_several_labels_per_image_go_to_transformers_and_come_back(tmp_path: Path) -> None:
    """transformers' pipeline then gives the same scores, each by itself."""
    labels = {0: "cat", 1: "dog", 2: "grass"}
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(
        **small, image_size=16, patch_size=8, id2label=labels, problem_type="multi_label_classification"
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "theirs")
    transform = TransformConfig(
        size=(16, 16), resize=(16, 16), mode="squash", interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3
    )
    model = load(tmp_path / "theirs")
    assert (model.labels, model.scores) == (("cat", "dog", "grass"), "sigmoid")
    model.preprocess = Preprocess(transform, model)
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", "transformers")
    image = Image.effect_noise((16, 16), 90).convert("RGB")
    predicted = {each.label: each.score for each in load(tmp_path / "again").predict(image)}
    pipeline = transformers.pipeline("image-classification", str(tmp_path / "again"), top_k=None)
    theirs = {each["label"]: each["score"] for each in pipeline(image)}
    assert predicted == pytest.approx(theirs, abs=1e-5)
    assert abs(sum(theirs.values()) - 1) > 0.01
