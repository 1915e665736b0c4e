"""What is saved is read back whole by vitlite, timm, transformers and torchvision; conversions keep the logits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers import timm, torchvision, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitlite import ViT, ViTConfig, load
from vitlite.errors import CheckpointError, ConfigError
from vitlite.images import Preprocess, Recipe
from vitlite.weights.save import card, convert, push_to_hub

TINY = ViTConfig(image_size=32, patch_size=8, dim=16, depth=2, heads=2, mlp_dim=24, num_classes=3)
EXACT = ViTConfig(norm_eps=1e-6, gelu="exact", pool="cls")  # what tensors do not tell
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
RECIPE = Recipe(size=(32, 32), resize=(36, 36), mode="center", interpolation="bicubic", mean=(0.5,) * 3, std=(0.4,) * 3)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


def trained(**changes: Any) -> ViT:
    model = ViT(TINY.replace(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    model.labels = ("ant", "bee", "cow") if model.config.num_classes else None
    model.preprocess = Preprocess(RECIPE, model)
    return model


def near(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max())


@pytest.mark.parametrize("changes", [
    {}, {"registers": 2, "cls_position": False, "layer_scale": 0.1}, {"pool": "mean_with_cls"}, {"pre_logits": 8},
    {"pool": "cls_and_mean", "norm_eps": 1e-5}, {"class_token": False, "pool": "mean", "fc_norm": True},
    {"patch_norm": True, "head_dim": 4, "qkv_bias": False}, {"positions": "sincos2d", "gelu": "tanh"},
    {"image_size": (32, 16), "pre_norm": True, "gelu": "quick", "num_classes": 0}, {"channels": 1, "inner_norm": True},
])  # fmt: skip
def test_a_folder_gives_the_model_back(changes: dict[str, Any], tmp_path: Path) -> None:
    model = trained(**changes)
    model.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    images = torch.randn(1, model.config.channels, *model.config.size)
    assert torch.equal(again(images), model(images))
    assert again.config.to_dict() == model.config.to_dict()
    assert again.labels == model.labels
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]


def test_preprocessing_is_saved_and_follows_the_size(tmp_path: Path) -> None:
    trained().save(tmp_path)
    assert load(tmp_path).preprocess.recipe == RECIPE
    larger = load(tmp_path, image_size=64).preprocess.recipe
    assert (larger.size, larger.resize) == ((64, 64), (72, 72))


@pytest.mark.parametrize("changes", [
    {}, {"pool": "mean", "gelu": "quick", "pre_norm": True}, {"qkv_bias": False, "image_size": (32, 48)},
    {"registers": 1, "cls_position": False, "layer_scale": 0.1},
    {"class_token": False, "pool": "mean", "fc_norm": True, "num_classes": 0},
])  # fmt: skip
def test_timm_loads_the_folder(changes: dict[str, Any], tmp_path: Path) -> None:
    model = trained(**changes)
    model.save(tmp_path)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(1, 3, *model.config.size)
    assert near(theirs(images), model(images))
    data = timm.data.resolve_model_data_config(theirs)
    assert (data["mean"], data["interpolation"], int(32 / data["crop_pct"])) == ([0.5] * 3, "bicubic", 36)


def test_timm_gets_a_mean_of_its_own_scale(tmp_path: Path) -> None:
    model = trained()
    model.preprocess = Preprocess(replace(RECIPE, scale=1 / 127.5, mean=(1.0,) * 3, std=(1.0,) * 3), model)
    model.save(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    assert data["mean"] == data["std"] == [0.5] * 3


def test_a_picture_of_two_shares_is_not_told_to_timm(tmp_path: Path) -> None:
    model = trained(image_size=(32, 24))
    for resize, known in (((36, 27), True), ((35, 26), True), ((36, 36), False)):  # timm has one share for both sides
        model.preprocess = Preprocess(replace(RECIPE, size=(32, 24), resize=resize), model)
        model.save(tmp_path)
        about = json.loads((tmp_path / "config.json").read_text())
        assert ("pretrained_cfg" in about) == known
        assert not known or Recipe.from_timm(about).resize == resize
        assert load(tmp_path).preprocess.recipe == model.preprocess.recipe
    convert(tmp_path, tmp_path / "theirs", "transformers")  # which crops 36 x 36
    assert load(tmp_path / "theirs").preprocess.recipe.resize == (36, 36)
    model.preprocess = Preprocess(replace(RECIPE, size=(32, 24), resize=(36, 27)), model)
    model.save(tmp_path)
    with pytest.raises(CheckpointError, match="no preprocessing that resizes pictures to cover 36 x 27 pixels"):
        convert(tmp_path, tmp_path / "others", "transformers")


def test_transformers_takes_no_mean_over_a_class_token(tmp_path: Path) -> None:
    trained(pool="mean", num_classes=0).save(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="no model that computes what this one does: pool='mean'"):
        convert(tmp_path / "ours", tmp_path / "theirs", "transformers")


def test_timm_loads_the_file_strictly(tmp_path: Path) -> None:
    model = trained()
    model.save(tmp_path)
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, mlp_ratio=1.5,
        num_classes=3,
    ).eval()  # fmt: skip
    theirs.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert near(theirs(IMAGES), model(IMAGES))


def test_types_are_kept_in_the_file_and_halves_are_float32_again(tmp_path: Path) -> None:
    trained().bfloat16().save(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["head.bias"].dtype == torch.bfloat16
    assert load(tmp_path).dtype == torch.float32
    assert load(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_file_of_several_types_loses_no_digit(tmp_path: Path) -> None:
    model = trained()
    state = model.state_dict()
    state = {name: tensor.bfloat16() if name < "head" else tensor for name, tensor in state.items()}
    save_file(state, tmp_path / "mixed.safetensors")
    convert(tmp_path / "mixed.safetensors", tmp_path / "torchvision.safetensors", "torchvision", config=EXACT)
    assert torch.equal(load_file(tmp_path / "torchvision.safetensors")["heads.head.weight"], state["head.weight"])


def test_tied_and_strided_tensors_are_written_whole(tmp_path: Path) -> None:
    model = trained()
    model.blocks[1].norm1.weight = model.blocks[0].norm1.weight
    model.head.weight = torch.nn.Parameter(torch.randn(16, 3).T)
    model.save(tmp_path)
    again = load(tmp_path)
    assert near(again(IMAGES), model(IMAGES))
    assert again.blocks[1].norm1.weight is not again.blocks[0].norm1.weight


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    model = trained()
    model.save(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    broken = trained().to("meta")
    with pytest.raises(NotImplementedError):
        broken.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


# ---- conversions


@pytest.mark.parametrize("changes", [
    {}, {"num_classes": 0}, {"norm_eps": 1e-12, "gelu": "tanh", "qkv_bias": False}, {"cls_position": False},
    {"class_token": False, "pool": "mean"}, {"layer_scale": 0.1, "pool": "cls_and_mean", "mlp_dim": 64},
])  # fmt: skip
def test_transformers_loads_what_was_converted_and_it_comes_back(changes: dict[str, Any], tmp_path: Path) -> None:
    model = trained(**changes)
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "transformers")
    kind = transformers.AutoModelForImageClassification if model.config.num_classes else transformers.AutoModel
    theirs, report = kind.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert set(report["missing_keys"]) <= {"pooler.dense.weight", "pooler.dense.bias"} | {
        key for key in report["missing_keys"] if key.endswith("mask_token")
    }
    assert not report["unexpected_keys"]
    with torch.no_grad():
        output = theirs(IMAGES)
        logits = output.logits if model.config.num_classes else output.last_hidden_state[:, 0]
        assert near(logits, model(IMAGES))
    again = load(tmp_path / "theirs")
    assert torch.equal(again(IMAGES), model(IMAGES))
    assert again.labels == model.labels
    assert again.preprocess.recipe.resize == RECIPE.resize


def test_squashed_pictures_stay_squashed(tmp_path: Path) -> None:
    model = trained()
    model.preprocess = Preprocess(Recipe(**RECIPE.to_dict() | {"mode": "squash", "margin": "down"}), model)
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "transformers")
    assert load(tmp_path / "theirs").preprocess.recipe == model.preprocess.recipe


@pytest.mark.parametrize("changes", [{}, {"pre_logits": 8}, {"qkv_bias": False}])
def test_torchvision_loads_what_was_converted_and_it_comes_back(changes: dict[str, Any], tmp_path: Path) -> None:
    model = trained(**changes)
    model.save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "tv.safetensors", "torchvision")
    theirs = torchvision.models.VisionTransformer(
        32, 8, 2, 2, 16, 24, num_classes=3, representation_size=model.config.pre_logits or None
    ).eval()
    theirs.load_state_dict(load_file(tmp_path / "tv.safetensors"))
    assert near(theirs(IMAGES), model(IMAGES))
    again = load(tmp_path / "tv.safetensors", config=ViTConfig(heads=2))
    assert near(again(IMAGES), model(IMAGES))
    convert(tmp_path / "tv.safetensors", tmp_path / "timm.safetensors", "timm")  # heads are not needed for names
    state = load_file(tmp_path / "timm.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("to", "changes", "what"), [
    ("torchvision", {"norm_eps": 1e-12}, "norm_eps=1e-12"), ("torchvision", {"gelu": "quick"}, "gelu='quick'"),
    ("torchvision", {"pool": "mean"}, "pool='mean'"), ("transformers", {"pool": "mean"}, "pool='mean'"),
    ("transformers", {"head_dim": 4}, "head_dim=4"), ("torchvision", {"positions": "none"}, "positions='none'"),
    ("transformers", {"registers": 1, "cls_position": False}, "registers=1"),
    ("torchvision", {"class_token": False, "pool": "mean"}, "class_token=False"),
    ("transformers", {"fc_norm": True}, "no place for: fc_norm.bias"),
    ("transformers", {"pre_norm": True}, "no place for: norm_pre.bias"),
    ("transformers", {"layer_scale": 0.1, "num_classes": 0}, "mlp_dim=24"),
])  # fmt: skip
def test_models_that_others_cannot_compute_are_refused(
    to: Any, changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    trained(**changes).save(tmp_path / "ours")
    with pytest.raises(CheckpointError, match=what):
        convert(tmp_path / "ours", tmp_path / "theirs", to)


def test_what_the_target_s_code_decides_must_be_known(tmp_path: Path) -> None:
    save_file(trained().state_dict(), tmp_path / "vit.safetensors")
    with pytest.raises(ConfigError, match="do not tell norm_eps, gelu, pool"):
        convert(tmp_path / "vit.safetensors", tmp_path / "tv.safetensors", "torchvision")
    with pytest.raises(ConfigError, match="do not tell heads, norm_eps, gelu, pool"):
        convert(tmp_path / "vit.safetensors", tmp_path / "folder", "vitlite")
    said = ViTConfig(dim=16, heads=2, norm_eps=1e-6, gelu="exact", pool="cls")
    convert(tmp_path / "vit.safetensors", tmp_path / "tv.safetensors", "torchvision", config=said)
    convert(tmp_path / "vit.safetensors", tmp_path / "folder", "vitlite", config=said)
    assert torch.equal(load(tmp_path / "folder")(IMAGES), trained()(IMAGES))
    with pytest.raises(ConfigError, match=r"Cannot convert to 'jax'. Valid: timm, transformers, torchvision, vitlite"):
        convert(tmp_path / "vit.safetensors", tmp_path / "out", "jax")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [
    lambda state: state, lambda state: {"model": state, "epoch": 3}, lambda state: {"state_dict": {"model": state}},
    lambda state: {"encoder": {f"module.{name}": tensor for name, tensor in state.items()}},
])  # fmt: skip
def test_pickles_are_converted(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    torch.save(wrap(trained().half().state_dict()), tmp_path / "vit.pth")
    convert(tmp_path / "vit.pth", tmp_path / "vit.safetensors", "timm")
    state = load_file(tmp_path / "vit.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in trained().half().state_dict().items())


def test_of_averaged_weights_and_others_none_is_taken_by_itself(tmp_path: Path) -> None:
    state = trained().state_dict()
    torch.save({"epoch": 3, "state_dict": state, "state_dict_ema": state}, tmp_path / "vit.pth")
    with pytest.raises(CheckpointError, match=r"averaged weights, state_dict_ema, beside others. Choose: torch.save"):
        convert(tmp_path / "vit.pth", tmp_path / "vit.safetensors", "timm")


def test_what_the_target_held_before_says_nothing_of_the_new_model(tmp_path: Path) -> None:
    trained().save(tmp_path / "one")
    other = ViT(TINY)
    other.save(tmp_path / "two")
    convert(tmp_path / "one", tmp_path / "theirs", "transformers")
    convert(tmp_path / "two", tmp_path / "theirs", "transformers")
    assert not (tmp_path / "theirs" / "preprocessor_config.json").exists()
    assert load(tmp_path / "theirs").labels == ("LABEL_0", "LABEL_1", "LABEL_2")  # as transformers calls them


def test_a_folder_with_a_pickle_keeps_its_config(tmp_path: Path) -> None:
    trained().save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "old", "transformers")
    torch.save(load_file(tmp_path / "old" / "model.safetensors"), tmp_path / "old" / "pytorch_model.bin")
    (tmp_path / "old" / "model.safetensors").unlink()
    convert(tmp_path / "old", tmp_path / "new", "vitlite")
    again = load(tmp_path / "new")
    assert torch.equal(again(IMAGES), trained()(IMAGES))
    assert again.labels == ("ant", "bee", "cow")


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_pickles_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(CheckpointError, match=r"evil.pth cannot be opened with weights_only=True"):
        convert(tmp_path / "evil.pth", tmp_path / "out.safetensors", "timm")
    assert not (tmp_path / "evil").exists()
    torch.save({"step": 3}, tmp_path / "none.pth")
    with pytest.raises(CheckpointError, match=r"none.pth has no tensors, but: step"):
        convert(tmp_path / "none.pth", tmp_path / "out.safetensors", "timm")
    torch.save({"model": trained().state_dict() | {"more": torch.ones(1)}}, tmp_path / "more.pth")
    with pytest.raises(CheckpointError, match=r"more.pth .*\n\+ more \(1,\)"):
        convert(tmp_path / "more.pth", tmp_path / "out.safetensors", "timm")


def test_an_npz_is_converted(tmp_path: Path) -> None:
    from test_checkpoint import flax

    np.savez(tmp_path / "vit.npz", **flax())
    convert(tmp_path / "vit.npz", tmp_path / "ours", "vitlite")
    images = torch.randn(1, 3, 16, 16)
    assert torch.equal(load(tmp_path / "ours")(images), load(tmp_path / "vit.npz")(images))


# ---- the Hub


def test_push_uploads_a_folder_with_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server of the tests takes no uploads: what huggingface_hub would be given is looked at instead."""
    import huggingface_hub

    calls: list[Any] = []

    def upload(self: Any, *, repo_id: str, folder_path: str, commit_message: str) -> Any:
        files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        calls.append((repo_id, files))
        return type("Commit", (), {"commit_url": "https://hub/commit/1"})

    monkeypatch.setattr(
        huggingface_hub.HfApi, "create_repo", lambda self, repo, **options: calls.append((repo, options))
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    assert push_to_hub(trained(), "me/vit", private=True) == "https://hub/commit/1"
    assert calls[0] == ("me/vit", {"private": True, "exist_ok": True})
    repo, files = calls[1]
    assert repo == "me/vit"
    assert set(files) == {"README.md", "config.json", "model.safetensors"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert torch.equal(load(tmp_path)(IMAGES), trained()(IMAGES))
    assert json.loads(files["config.json"])["vitlite"]["labels"] == ["ant", "bee", "cow"]


def test_the_card_says_how_to_use_the_model_and_where_it_came_from(tmp_path: Path) -> None:
    text = card(trained(), "me/vit")
    assert text.startswith("---\nlibrary_name: vitlite\npipeline_tag: image-classification\n")
    assert 'vitlite.load("me/vit")' in text
    assert "It was trained from random weights." in text
    trained(num_classes=0).save(tmp_path)
    again = load(tmp_path)
    assert f"sha256 `{again.source.sha256}`" in card(again, "me/vit")
    assert "image-feature-extraction" in card(again, "me/vit")
