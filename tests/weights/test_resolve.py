"""Who says what of a model, and what nobody says is asked for."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files_made import ASK, IMAGES, TINY, flax, trained, written
from safetensors.torch import save_file

from vitlite import ViT, ViTConfig, create, load
from vitlite.config import PRESETS
from vitlite.errors import CheckpointError, ConfigError
from vitlite.weights.layouts import LAYOUTS, to_their_names
from vitlite.weights.resolve import Claim, resolve
from vitlite.weights.translate import facts_of, translate


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


def tensor_facts(model: ViT, **changes: tuple[int, ...]) -> dict[str, Any]:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} | changes
    return facts_of(translate(shapes), shapes)


def test_what_is_unknown_is_asked_for_by_name() -> None:
    with pytest.raises(ConfigError) as error:
        resolve(LAYOUTS["timm"], tensor_facts(trained()), [])
    assert str(error.value) == (
        "The tensors do not tell heads, norm_eps, gelu, pool (timm files pool cls or mean or mean_with_cls or "
        "cls_and_mean). Say so: vitlite.load(..., config=ViTConfig(dim=16, heads=..., norm_eps=..., gelu=..., "
        "pool=...)), or vitlite.create(name, weights=...) with the name of a model like it."
    )
    with pytest.raises(ConfigError, match="do not tell image_size, heads"):
        resolve(LAYOUTS["timm"], tensor_facts(trained(TINY.replace(image_size=(16, 24)))), [])
    bare = tensor_facts(trained(TINY.replace(positions="none")))
    for facts_without in (bare, tensor_facts(trained(), pos_embed=(1, 0, 16))):
        with pytest.raises(ConfigError, match="do not tell image_size, positions, heads"):
            resolve(LAYOUTS["timm"], facts_without, [])


def test_the_first_to_know_decides_and_contradictions_are_errors() -> None:
    known = tensor_facts(trained())
    rest = Claim("a", {"norm_eps": 1e-6, "gelu": "exact", "pool": "cls"})
    resolved = resolve(LAYOUTS["timm"], known, [Claim("b", {"heads": 2, "norm_eps": 1e-3}), rest])
    assert resolved.config.norm_eps == 1e-3
    assert resolved.said_by["norm_eps"] == "b"
    assert resolved.said_by["gelu"] == "a"
    assert resolved.said_by["depth"] == "the tensors say"
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
    state = dict(to_their_names(LAYOUTS["torchvision"], "", trained(TINY.replace(image_size=(16, 32))).state_dict()))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "vit.safetensors")
    with pytest.raises(ConfigError, match="do not tell image_size"):
        load(tmp_path / "vit.safetensors", config=ViTConfig(heads=2))
    with pytest.raises(CheckpointError, match=r"9 rows, which is not an image of \(24, 24\) in patches of 8"):
        load(tmp_path / "vit.safetensors", config=ViTConfig(heads=2, image_size=24, patch_size=8))
    assert load(tmp_path / "vit.safetensors", config=ViTConfig(heads=2, image_size=(16, 32))).config.cls_position
