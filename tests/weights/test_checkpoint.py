"""A file fits entirely, or it is refused with its path and what is wrong; reading is safe and exact."""

import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from vitlite import ViT, ViTConfig, create, load
from vitlite.weights.checkpoint import Claim, open_checkpoint, resolve
from vitlite.config import PRESETS
from vitlite.weights.sidecar import describe
from vitlite.errors import CheckpointError, ConfigError, ImageError, VitliteError
from vitlite.weights.layouts import LAYOUTS, facts, to_theirs, translate

TINY = ViTConfig(image_size=16, patch_size=8, dim=16, depth=2, heads=2, mlp_dim=24, num_classes=3)
ASK = ViTConfig(dim=16, heads=2, norm_eps=1e-6, gelu="exact", pool="cls")
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


def trained(config: ViTConfig = TINY, seed: int = 0) -> ViT:
    model = ViT(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator))
    return model


def written(
    path: Path, change: Callable[[dict[str, Tensor]], Any] = lambda state: None, config: ViTConfig = TINY
) -> Path:
    state = dict(trained(config).state_dict())
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return path


# ---- strict


@pytest.mark.parametrize("num_classes", [None, 0, 3, 5])
def test_any_missing_tensor_is_an_error(num_classes: int | None, tmp_path: Path) -> None:
    for name in trained().state_dict():
        path = written(tmp_path / "vit.safetensors", lambda state, name=name: state.pop(name))
        full = ViTConfig(**TINY.to_dict())
        with pytest.raises((CheckpointError, ConfigError), match=r"vit.safetensors"):
            load(path, config=full, num_classes=num_classes)


@pytest.mark.parametrize("config", [
    TINY.replace(registers=2, cls_position=False), TINY.replace(pre_norm=True), TINY.replace(layer_scale=1e-5),
    TINY.replace(fc_norm=True), TINY.replace(pre_logits=8), TINY.replace(inner_norm=True),
])  # fmt: skip
def test_options_that_vanish_whole_are_missed_by_who_knows_of_them(config: ViTConfig, tmp_path: Path) -> None:
    parts = ("reg_token", "norm_pre", "ls", "fc_norm", "pre_logits", "attn.norm")
    extra = [name for name in trained(config).state_dict() if any(part in name for part in parts)]
    assert extra
    path = written(tmp_path / "vit.safetensors", lambda state: [state.pop(name) for name in extra], config)
    with pytest.raises(CheckpointError, match=r"vit.safetensors"):
        load(path, config=ViTConfig(**config.to_dict()))


def test_the_difference_is_sorted_and_signed(tmp_path: Path) -> None:
    def change(state: dict[str, Tensor]) -> None:
        del state["blocks.1.norm1.weight"]
        state["blocks.1.attn.proj.weight"] = torch.zeros(16, 17)
        state["blocks.1.attn.gate"] = torch.zeros(2)

    path = written(tmp_path / "vit.safetensors", change)
    with pytest.raises(CheckpointError) as error:
        load(path, config=ASK)
    assert str(error.value) == (
        f"{path} (timm layout) does not fit its config: - is missing, + is there instead\n"
        "+ blocks.1.attn.gate (2,)\n"
        "- blocks.1.attn.proj.weight (16, 16)\n"
        "+ blocks.1.attn.proj.weight (16, 17)\n"
        "- blocks.1.norm1.weight (16,)"
    )


def test_the_difference_speaks_the_file_s_language(tmp_path: Path) -> None:
    state = {"encoder.layers.encoder_layer_0.mlp.0.bias": torch.zeros(3)}
    import peers

    theirs = peers.torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 24, num_classes=3).state_dict()
    save_file(theirs | state, tmp_path / "vit.safetensors")
    with pytest.raises(CheckpointError, match=r"- encoder.layers.encoder_layer_0.mlp.0.bias \(24,\)"):
        load(tmp_path / "vit.safetensors", config=ViTConfig(heads=2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(value: float, tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", lambda state: state["blocks.1.mlp.fc2.bias"].view(-1)[3].fill_(value))
    for _ in range(2):  # the second time the file is known
        with pytest.raises(CheckpointError, match=r"vit.safetensors: blocks.1.mlp.fc2.bias has values .* not finite"):
            load(path, config=ASK)


def test_large_values_are_finite_unless_the_dtype_cannot_hold_them(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", lambda state: state["head.bias"].fill_(3e38))
    assert load(path, config=ASK).head.bias.isfinite().all()
    with pytest.raises(CheckpointError, match="too large for this dtype"):
        load(path, config=ASK, dtype=torch.float16)


@pytest.mark.parametrize("name", ["blocks.0.mlp.fc1.weight", "pos_embed"])
def test_a_scanned_file_is_scanned_again_for_a_narrower_type(name: str, tmp_path: Path) -> None:
    def widen(state: dict[str, Tensor]) -> None:
        state |= {key: tensor.double() for key, tensor in state.items()}
        state[name].view(-1)[-1] = 1e300

    path = written(tmp_path / "vit.safetensors", widen)
    for _ in range(2):
        assert load(path, config=ASK, dtype=torch.float64).state_dict()[name].max() == 1e300
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(CheckpointError, match=f"{name} has values that are not finite in {dtype}"):
            load(path, config=ASK, dtype=dtype)
    if name == "pos_embed":  # stretched in float32
        with pytest.raises(CheckpointError, match="pos_embed has values that are not finite"):
            load(path, config=ASK, dtype=torch.float64, image_size=32)
    largest = torch.finfo(torch.float32).max
    path = written(tmp_path / "full.safetensors", lambda state: state["pos_embed"].fill_(largest))
    load(path, config=ASK)
    with pytest.raises(CheckpointError, match=r"not finite in torch\.bfloat16"):
        load(path, config=ASK, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_quantised_and_whole_numbers_are_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    path = written(
        tmp_path / "vit.safetensors",
        lambda state: state.update({"blocks.0.attn.qkv.weight": torch.ones(48, 16).to(dtype)}),
    )
    with pytest.raises(CheckpointError, match=r"blocks.0.attn.qkv.weight is of type \w+, and vitlite reads F64, F32"):
        load(path, config=ASK)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", [None, torch.float32, torch.bfloat16])
def test_floating_types(stored: torch.dtype, wanted: torch.dtype | None, tmp_path: Path) -> None:
    state = {name: tensor.to(stored) for name, tensor in trained().state_dict().items()}
    save_file(state, tmp_path / "vit.safetensors")
    model = load(tmp_path / "vit.safetensors", config=ASK, dtype=wanted)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name].to(wanted or torch.float32))
        assert tensor.is_contiguous()


@pytest.mark.parametrize(("names", "reason"), [
    ({"dist_token": (1, 1, 16)}, "second head"), ({"blocks.0.attn.q_norm.weight": (8,)}, "norms of its own"),
    ({"blocks.0.mlp.w12.weight": (8,)}, "gated"), ({"attn_pool.latent": (8,)}, "pools by attention"),
    ({"blocks.0.attn.qkv.weight_scale": (1,)}, "quantised"),
])  # fmt: skip
def test_what_is_no_plain_vit_is_refused_with_its_reason(names: dict[str, Any], reason: str, tmp_path: Path) -> None:
    more = {name: torch.zeros(shape) for name, shape in names.items()}
    path = written(tmp_path / "vit.safetensors", lambda state: state.update(more))
    with pytest.raises(CheckpointError, match=f"no plain ViT: .*{reason}"):
        load(path, config=ASK)


def test_a_kernel_over_time_is_refused_by_its_name(tmp_path: Path) -> None:
    kernel = {"patch_embed.proj.weight": torch.ones(16, 3, 2, 8, 8)}
    path = written(tmp_path / "vit.safetensors", lambda state: state.update(kernel))
    with pytest.raises(
        CheckpointError, match=r"patch_embed.proj.weight: .* a ViT's patch_embed.proj.weight has 4 axes"
    ):
        load(path, config=ASK)


# ---- damaged files


def damage(path: Path) -> dict[str, bytes]:
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    return {
        "empty": b"",
        "cut short": whole[:-5],
        "longer": whole + b"12345",
        "a page of HTML": b"<!doctype html><html>Not found</html>",
        "an LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:aaaa\nsize 10\n",
        "a huge header": (1 << 62).to_bytes(8, "little") + whole[8:],
        "no JSON": whole[:8] + b"x" * (header % len(whole)) + whole[8 + header :],
        "zeros": bytes(len(whole)),
    }


@pytest.mark.parametrize("kind", ["empty", "cut short", "longer", "a page of HTML", "an LFS pointer", "a huge header",
                                  "no JSON", "zeros"])  # fmt: skip
@pytest.mark.parametrize("name", ["vit.safetensors", "vit.npz"])
def test_damaged_files(kind: str, name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors")
    if name == "vit.npz":
        np.savez(tmp_path / name, **{"embedding/kernel": np.zeros((8, 8, 3, 16), "f4")})
        path = tmp_path / name
    path.write_bytes(damage(path)[kind])
    with pytest.raises(CheckpointError, match=f"{name} (cannot be read as|is)|{name}: The names"):
        load(path, config=ASK)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_damage_raises_anything_else(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    chance = random.Random(seed)
    path = written(tmp_path_factory.mktemp("damage") / "vit.safetensors")
    whole = bytearray(path.read_bytes())
    header = int.from_bytes(whole[:8], "little")
    for _ in range(chance.randint(1, 3)):
        whole[chance.randrange(8 + header)] = chance.randrange(256)
    path.write_bytes(whole)
    raised = []
    try:
        model = load(path, config=ViTConfig(**TINY.to_dict()))
    except VitliteError as error:
        raised.append(error)
    if raised:
        assert str(path) in str(raised[0])
    else:
        assert {k: x.shape for k, x in model.state_dict().items()} == {
            k: x.shape for k, x in trained().state_dict().items()
        }


def test_npz_of_objects_and_of_no_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{f"Transformer/encoderblock_0/{n}": np.array([{}], dtype=object) for n in (
        "LayerNorm_0/scale", "LayerNorm_2/scale", "MlpBlock_3/Dense_0/kernel")})  # fmt: skip
    with pytest.raises(CheckpointError, match=r"a.npz"):
        load(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("readme.txt", "no array")
    with pytest.raises(CheckpointError, match=r"b.npz cannot be read as .npz: ValueError: a member is no .npy file"):
        load(tmp_path / "b.npz")


def test_a_flipped_byte_in_an_npz_is_noticed(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **flax())
    whole = bytearray((tmp_path / "vit.npz").read_bytes())
    whole[whole.index(flax()["head/kernel"].tobytes()) + 5] ^= 1
    (tmp_path / "vit.npz").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"vit.npz"):
        load(tmp_path / "vit.npz")


def flax() -> dict[str, Any]:
    chance = np.random.default_rng(0)
    block = {
        "LayerNorm_0/scale": (16,), "LayerNorm_0/bias": (16,), "LayerNorm_2/scale": (16,), "LayerNorm_2/bias": (16,),
        **{f"MultiHeadDotProductAttention_1/{n}/kernel": (16, 2, 8) for n in ("query", "key", "value")},
        **{f"MultiHeadDotProductAttention_1/{n}/bias": (2, 8) for n in ("query", "key", "value")},
        "MultiHeadDotProductAttention_1/out/kernel": (2, 8, 16), "MultiHeadDotProductAttention_1/out/bias": (16,),
        "MlpBlock_3/Dense_0/kernel": (16, 24), "MlpBlock_3/Dense_0/bias": (24,),
        "MlpBlock_3/Dense_1/kernel": (24, 16), "MlpBlock_3/Dense_1/bias": (16,),
    }  # fmt: skip
    shapes = {
        "embedding/kernel": (8, 8, 3, 16), "embedding/bias": (16,), "cls": (1, 1, 16),
        "Transformer/posembed_input/pos_embedding": (1, 5, 16), "Transformer/encoder_norm/scale": (16,),
        "Transformer/encoder_norm/bias": (16,), "pre_logits/kernel": (16, 8), "pre_logits/bias": (8,),
        "head/kernel": (8, 3), "head/bias": (3,), **{f"Transformer/encoderblock_0/{n}": s for n, s in block.items()},
    }  # fmt: skip
    return {name: chance.standard_normal(shape).astype("f4") for name, shape in shapes.items()}


def test_an_npz_tells_everything(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **flax())
    model = load(tmp_path / "vit.npz")
    assert (model.config.heads, model.config.pre_logits, model.config.norm_eps) == (2, 8, 1e-6)
    assert model.config.image_size == 16
    assert torch.equal(model.head.weight, torch.from_numpy(flax()["head/kernel"]).T)


# ---- folders, shards, pickles


def test_shards(tmp_path: Path) -> None:
    state = trained().state_dict()
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in shards.items():
        save_file({name: state[name] for name in inside}, tmp_path / file)
    index = {"weight_map": {name: file for file, inside in shards.items() for name in inside}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = load(tmp_path, config=ASK)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert len(model.source.sha256) == 64
    save_file(state, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="more than one shard has"):
        load(tmp_path, config=ASK)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b.safetensors cannot be read"):
        load(tmp_path, config=ASK)
    index["weight_map"] = dict.fromkeys(names, "../a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"no index of safetensors shards beside it"):
        load(tmp_path, config=ASK)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it has nothing"):
        load(tmp_path, config=ASK)
    torch.save(trained().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has pytorch_model.bin. vitlite unpickles nothing here; first: vitlite"):
        load(tmp_path, config=ASK)
    with pytest.raises(CheckpointError, match="is a pickle, which can run code"):
        load(tmp_path / "pytorch_model.bin", config=ASK)
    written(tmp_path / "any.safetensors")
    assert load(tmp_path, config=ASK).source.path == tmp_path / "any.safetensors"
    written(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"any.safetensors, cache, other.safetensors"):
        load(tmp_path, config=ASK)
    written(tmp_path / "model.safetensors")
    assert load(tmp_path, config=ASK).source.path == tmp_path / "model.safetensors"
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"notes.txt is no weights file that vitlite reads"):
        load(tmp_path / "notes.txt")


def test_a_config_beside_another_file_does_not_speak_for_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "num_attention_heads": 16}))
    with pytest.raises(ConfigError, match="do not tell heads"):
        load(written(tmp_path / "mine.safetensors"))


def test_broken_and_foreign_configs(tmp_path: Path) -> None:
    written(tmp_path / "model.safetensors")
    for text in ("{", '{"vitlite": {"config": [1]}}', '{"vitlite": {"config": {}, "preprocess": "none"}}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
            load(tmp_path, config=ASK)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_act": "relu"}))
    with pytest.raises(CheckpointError, match="hidden_act 'relu'; vitlite runs gelu"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit", "global_pool": "map"}))
    with pytest.raises(CheckpointError, match="global_pool 'map'"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 32}))
    with pytest.raises(CheckpointError, match=r"dim: the tensors say 16, its config.json says 32"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert load(tmp_path, config=ASK).config.heads == 2


@pytest.mark.parametrize("wrong", [{"mean": 5}, {"crop_pct": 0}, {"crop_pct": "a"}, {"std": None}])
def test_preprocessing_that_makes_no_sense(wrong: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path / "model.safetensors")
    right = {
        "input_size": [3, 16, 16],
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    }
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit", "pretrained_cfg": right}))
    assert load(tmp_path, config=ASK).preprocess.recipe.mean == (0.5,) * 3
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit", "pretrained_cfg": right | wrong}))
    model = load(tmp_path, config=ASK)
    for same in (model, pickle.loads(pickle.dumps(model))):
        with pytest.raises(ImageError, match=rf"{tmp_path}: .*(preprocessing|{next(iter(wrong))})"):
            same.preprocess(torch.zeros(16, 16, 3))


def test_a_block_with_a_huge_number_is_one_that_is_too_many(tmp_path: Path) -> None:
    extra = {"blocks.1000000000000.norm1.weight": torch.ones(16)}
    path = written(tmp_path / "vit.safetensors", lambda state: state.update(extra))
    with pytest.raises(CheckpointError, match="1000000000000"):
        load(path, config=ASK)


def test_transformers_configs_say_what_their_classes_assume(tmp_path: Path) -> None:
    for kind, eps, gelu in (("vit", 1e-12, "exact"), ("dinov2", 1e-6, "exact"), ("clip_vision_model", 1e-5, "quick")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        claims = describe(tmp_path).claims
        assert (claims["heads"], claims["norm_eps"], claims["gelu"]) == (12, eps, gelu)
    for kind, named in (("vit", "ViT"), ("clip", "CLIP")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        for pictures in ({"size": 16}, {"size": 16, "feature_extractor_type": "X"}):
            (tmp_path / "preprocessor_config.json").write_text(json.dumps(pictures))
            _, fields = describe(tmp_path).recipe or ("", {})
            assert fields.get("image_processor_type") == (None if "feature_extractor_type" in pictures else named)
    (tmp_path / "preprocessor_config.json").unlink()
    for sides, said in (([8, 8], 8), ([8, 16], [8, 16])):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "patch_size": sides}))
        assert describe(tmp_path).claims["patch_size"] == said
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "altclip", "vision_config": {"hidden_size": 8}}))
    assert describe(tmp_path).claims == {"dim": 8}, "nothing is guessed of classes that are not known here"


# ---- who says what


def facts_of(model: ViT, **changes: tuple[int, ...]) -> dict[str, Any]:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} | changes
    return facts(translate(shapes), shapes)


def test_what_is_unknown_is_asked_for_by_name() -> None:
    with pytest.raises(ConfigError) as error:
        resolve(LAYOUTS["timm"], facts_of(trained()), [])
    assert str(error.value) == (
        "The tensors do not tell heads, norm_eps, gelu, pool (timm files pool cls or mean or mean_with_cls or "
        "cls_and_mean). Say so: vitlite.load(..., config=ViTConfig(dim=16, heads=..., norm_eps=..., gelu=..., "
        "pool=...)), or vitlite.create(name, weights=...) with the name of a model like it."
    )
    with pytest.raises(ConfigError, match="do not tell image_size, heads"):
        resolve(LAYOUTS["timm"], facts_of(trained(TINY.replace(image_size=(16, 24)))), [])
    bare = facts_of(trained(TINY.replace(positions="none")))
    for facts_without in (bare, facts_of(trained(), pos_embed=(1, 0, 16))):
        with pytest.raises(ConfigError, match="do not tell image_size, positions, heads"):
            resolve(LAYOUTS["timm"], facts_without, [])


def test_the_first_to_know_decides_and_contradictions_are_errors() -> None:
    known = facts_of(trained())
    rest = Claim("a", {"norm_eps": 1e-6, "gelu": "exact", "pool": "cls"})
    config = resolve(LAYOUTS["timm"], known, [Claim("b", {"heads": 2, "norm_eps": 1e-3}), rest])
    assert config.norm_eps == 1e-3
    for fields, text in (
        ({"heads": 4, "depth": 3}, "depth: the tensors say 2, c says 3"),
        ({"heads": 3}, "16 wide, which is not 3 heads"),
        ({"heads": 0}, "16 wide, which is not 0 heads"),
        ({"heads": "2"}, "16 wide, which is not 2 heads"),
        ({"heads": 2, "image_size": 24}, "5 rows, which is not an image of"),
        ({"heads": 2, "head_dim": 4}, "not 2 heads of equal width"),
        ({"heads": 2, "layer_scale": 1e-5}, "layer_scale: the tensors have none, c says 1e-05"),
    ):
        with pytest.raises(CheckpointError, match=text.replace("(", r"\(")):
            resolve(LAYOUTS["timm"], known, [Claim("c says", fields), rest])
    with pytest.raises(ConfigError, match=r"image_size must be a whole number or \(height, width\), got '16'"):
        resolve(LAYOUTS["timm"], known, [Claim("c says", {"image_size": "16"}), rest])
    with pytest.raises(CheckpointError, match="heads: b says 2, c says 4"):
        resolve(LAYOUTS["timm"], known, [Claim("b says", {"heads": 2}), Claim("c says", {"heads": 4}), rest])


@pytest.mark.parametrize("scale", [1.0, 1, 0.0, 1e-6])
def test_the_initial_layer_scale_is_what_is_said_of_it(scale: float, tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=TINY.replace(layer_scale=scale))
    assert load(path, config=ASK.replace(layer_scale=scale)).config.layer_scale == scale
    assert load(path, config=ASK).config.layer_scale == 1e-5


def test_a_preset_does_not_say_that_its_models_have_no_layer_scale(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=PRESETS["vit_nano_4"].replace(layer_scale=0.1))
    assert create("vit_nano_4", weights=path).config.layer_scale == 1e-5


def test_the_caller_may_not_contradict_the_layout_s_code(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **flax())
    with pytest.raises(CheckpointError, match=r"norm_eps: the google layout says 1e-06, config= says 0.1"):
        load(tmp_path / "vit.npz", config=ViTConfig(norm_eps=0.1))
    assert load(tmp_path / "vit.npz", config=ViTConfig(resample="timm")).config.resample == "timm"


def test_open_clip_may_pool_the_mean_but_only_config_says_so(tmp_path: Path) -> None:
    path = tmp_path / "clip.safetensors"
    ours = trained(TINY.replace(pre_norm=True, pool="mean", norm_eps=1e-5))
    state = {name: tensor for name, tensor in ours.state_dict().items() if name != "head.bias"}
    ours.head.bias.data.zero_()
    proj = {"visual.proj": state.pop("head.weight").t().contiguous()}
    names = {rule.ours: rule for rule in LAYOUTS["openai"].rules}
    for name, tensor in state.items():
        rule = names[re.sub(r"\.\d+\.", ".#.", name)]
        theirs = rule.theirs[0].replace("#", "".join(re.findall(r"\.(\d+)\.", name)))
        proj["visual." + theirs] = tensor[0, 0] if name == "cls_token" else tensor[0] if name == "pos_embed" else tensor
    save_file(proj, path)
    ask = ViTConfig(dim=16, heads=2, gelu="exact")
    assert load(path, config=ask).config.pool == "cls"
    mean = load(path, config=ask.replace(pool="mean"))
    assert torch.allclose(mean(IMAGES), ours(IMAGES), atol=1e-5)
    with pytest.raises(CheckpointError, match="openai files pool cls or mean, not 'mean_with_cls'"):
        load(path, config=ask.replace(pool="mean_with_cls"))
    with pytest.raises(ConfigError, match="pool 'cls', and their head means nothing after 'mean'"):
        load(path, config=ask, pool="mean")


def test_images_that_are_not_square(tmp_path: Path) -> None:
    wide = TINY.replace(image_size=(16, 72))  # 2 x 9 patches are no square, 1 x 16 and 2 x 8 could be one
    path = written(tmp_path / "vit.safetensors", config=wide)
    model = load(path, config=ASK.replace(image_size=(16, 72), patch_size=8))
    images = torch.randn(1, 3, 16, 72)
    assert torch.equal(model(images), trained(wide)(images))
    path = written(tmp_path / "vit.safetensors", config=TINY.replace(image_size=(16, 64)))
    assert load(path, config=ASK.replace(image_size=(16, 64), patch_size=8)).config.grid == (2, 8)


SQUARE = TINY.replace(image_size=24, cls_position=False)  # 3 * 3 rows; also 2 * 4 and one for the class token


def test_a_square_table_with_a_class_token_may_have_a_row_for_it_or_not(tmp_path: Path) -> None:
    path = written(tmp_path / "model.safetensors", config=SQUARE)
    with pytest.raises(ConfigError, match=r"do not tell image_size\. Say so"):
        load(path, config=ASK)
    for said in ({"cls_position": False}, {"image_size": 24, "patch_size": 8}):
        assert load(path, config=ASK.replace(**said)).config.grid == (3, 3)
    assert load(path, config=ASK.replace(image_size=(16, 32))).config.cls_position
    with pytest.raises(ConfigError, match="do not tell image_size"):
        load(path, config=ASK.replace(cls_position=True))
    for args in ({"no_embed_class": True}, {"img_size": [24, 24]}):
        about = {"architecture": "vit", "model_args": args}
        (tmp_path / "config.json").write_text(json.dumps(about))
        assert load(tmp_path, config=ASK).config.grid == (3, 3)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "deit3_small_patch16_224"}))
    written(tmp_path / "model.safetensors", config=SQUARE.replace(dim=24, heads=6, layer_scale=0.1))
    assert load(tmp_path).config.grid == (3, 3)


def test_a_preset_does_not_say_whether_the_class_token_has_a_row(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=PRESETS["vit_nano_4"].replace(cls_position=False))
    with pytest.raises(ConfigError, match="do not tell image_size"):
        create("vit_nano_4", weights=path)


def test_the_class_token_of_most_layouts_always_has_a_row(tmp_path: Path) -> None:
    state = dict(to_theirs(LAYOUTS["torchvision"], "", trained(TINY.replace(image_size=(16, 32))).state_dict()))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "vit.safetensors")
    with pytest.raises(ConfigError, match="do not tell image_size"):
        load(tmp_path / "vit.safetensors", config=ViTConfig(heads=2))
    with pytest.raises(CheckpointError, match=r"9 rows, which is not an image of \(24, 24\) in patches of 8"):
        load(tmp_path / "vit.safetensors", config=ViTConfig(heads=2, image_size=24, patch_size=8))
    assert load(tmp_path / "vit.safetensors", config=ViTConfig(heads=2, image_size=(16, 32))).config.cls_position


# ---- read safely


def test_the_file_may_be_overwritten_and_deleted(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors")
    model = load(path, config=ASK)
    before = model(IMAGES)
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(model(IMAGES), before)
    path.unlink()
    assert torch.equal(model(IMAGES), before)
    if sys.platform == "linux":
        assert "vit.safetensors" not in Path("/proc/self/maps").read_text()
        open_files = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert not any("vit.safetensors" in name for name in open_files)


def test_tensors_own_their_memory_and_learn(tmp_path: Path) -> None:
    model = load(written(tmp_path / "vit.safetensors"), config=ASK)
    for tensor in model.parameters():
        assert tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    model(IMAGES).sum().backward()
    assert model.cls_token.grad is not None


def test_a_known_file_is_not_scanned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "vit.safetensors")
    os.utime(path, (1, 1))
    load(path, config=ASK)
    scans: list[Tensor] = []
    monkeypatch.setattr("vitlite.checkpoint._finite", lambda values: not scans.append(values))
    load(path, config=ASK)
    assert not scans
    monkeypatch.setenv("VITLITE_VERIFY", "always")
    load(path, config=ASK)
    assert scans


def test_everything_works_without_numpy(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **flax())
    program = f"""
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")  # torch says once that it found no numpy
import torch, vitlite
model = vitlite.load({str(tmp_path / "vit.npz")!r})
before = model.embed(torch.ones(1, 3, 16, 16))
model.save({str(tmp_path / "saved")!r})
again = vitlite.load({str(tmp_path / "saved")!r}, num_classes=2, image_size=32)
assert torch.equal(vitlite.load({str(tmp_path / "saved")!r}).embed(torch.ones(1, 3, 16, 16)), before)
print(again(torch.ones(1, 3, 32, 32)).shape)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert "torch.Size([1, 2])" in out.stdout


def test_open_checkpoint_reads_nothing_but_headers(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors")
    with open_checkpoint(path) as file:
        assert file.shapes["head.weight"] == (3, 16)
        assert torch.equal(file.entries["head.weight"].read(), trained().head.weight)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


@pytest.mark.parametrize("text", [
    "[]", '{"model_type": "vit", "layer_norm_eps": "small"}', '{"model_type": "vit", "image_size": [1, 2, 3]}',
    '{"model_type": 3}', '{"vitlite": {}}', '{"architecture": null}', '{"model_type": "vit", "hidden_act": []}',
])  # fmt: skip
def test_configs_of_no_sense(text: str, tmp_path: Path) -> None:
    written(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((CheckpointError, ConfigError)) as error:
        load(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_the_same_number_of_patches_in_another_order_is_resampled_and_reported(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=TINY.replace(image_size=32))
    model = load(path, config=ASK, image_size=(16, 64))
    assert model.source.report.resampled == {"pos_embed": ((1, 17, 16), (1, 17, 16))}
    assert "pos_embed" not in model.source.report.loaded
