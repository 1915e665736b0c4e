"""What only some families of checkpoints have: what their tensors tell, what they do not, and what is never guessed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from files_made import IMAGES, TINY, trained, written
from peers import timm, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitlite import ViT, ViTConfig, create, load
from vitlite.checkpoints.build import resample_kernel
from vitlite.checkpoints.key_mapping import FORMATS, rename_tensors
from vitlite.config import DINOV3_ROPE, Rotation
from vitlite.errors import CheckpointError, ConfigError
from vitlite.nn.positions import resample_positions
from vitlite.presets import PRESETS

DINOV3 = TINY.replace(
    positions="none", rope=DINOV3_ROPE, registers=4, cls_position=False, layer_scale=1e-5, norm_eps=1e-5
)
NANO = PRESETS["vit_nano_4"]
FAMILIES = {
    "attention pooling": TINY.replace(pool="map", class_token=False, mlp="gelu_tanh"),
    "rotation": DINOV3,
    "gated": TINY.replace(mlp="swiglu"),
    "rotation, gated": DINOV3.replace(mlp="swiglu", pool="mean"),
    "distilled": TINY.replace(pool="cls_and_distillation", registers=1, cls_position=False),
    "no final norm": TINY.replace(final_norm="none"),
    "hybrid": TINY.replace(stem=(2, 1)),
    "hybrid, root alone": TINY.replace(stem=()),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


def bare(path: Path, state: dict[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return path


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_what_is_saved_is_loaded_whole(config: ViTConfig, tmp_path: Path) -> None:
    ours = trained(config)
    ours.save(tmp_path)
    again = load(tmp_path)
    assert again.config == config
    assert torch.equal(again(IMAGES), ours(IMAGES))


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_any_missing_tensor_is_an_error(config: ViTConfig, tmp_path: Path) -> None:
    for name in trained(config).state_dict():
        path = written(tmp_path / "vit.safetensors", lambda state, name=name: state.pop(name), config)
        with pytest.raises((CheckpointError, ConfigError), match=r"vit.safetensors"):
            load(path, config=config)


# Rotary positions, which have no weights.


@pytest.mark.parametrize("positions", ["none", "sincos2d", "learned"])
def test_a_dinov3_is_not_loaded_as_a_plain_vit(positions: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=DINOV3)
    with pytest.raises(ConfigError, match=r"indicate rotary positions"):
        load(path, config=DINOV3.replace(positions=positions, rope=None))
    with pytest.raises(ConfigError, match=r"do not determine image_size, positions, rope"):
        load(path)
    assert torch.equal(load(path, config=DINOV3)(IMAGES), trained(DINOV3)(IMAGES))


@pytest.mark.parametrize("name", ["vit_small_16", "vit_small_16.dino"])
def test_another_name_is_an_error(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=DINOV3)
    with pytest.raises(CheckpointError, match=r"vit.safetensors"):
        create(name, weights=path, image_size=16)


@pytest.mark.parametrize("positions", ["none", "sincos2d", "learned"])
@pytest.mark.parametrize("without", [("cls_token",), ("reg_token",), ("cls_token", "reg_token")], ids=str)
def test_a_rotation_has_to_be_stated(without: tuple[str, ...], positions: Any, tmp_path: Path) -> None:
    """RoPE-ViT's files are a DINOv3's without registers, timm's own without a class token."""
    path = written(tmp_path / "vit.safetensors", lambda state: [state.pop(name) for name in without], DINOV3)
    sizes = {"positions": positions, "class_token": "cls_token" not in without}
    sizes |= {"registers": 0 if "reg_token" in without else 4, "pool": "mean" if "cls_token" in without else "cls"}
    with pytest.raises(
        ConfigError, match=r"indicate rotary positions\. Pass the name of the original checkpoint as like="
    ):
        load(path, config=DINOV3.replace(**sizes, rope=None))
    with pytest.raises(ConfigError, match=r"do not determine .*rope"):
        load(path)
    stated = DINOV3.replace(**sizes | {"positions": "none", "rope": Rotation(order="xy")})
    assert load(path, config=stated).config.rope == Rotation(order="xy")


@pytest.mark.parametrize("positions", ["none", "sincos2d"])
def test_a_siglip_without_a_table_turns_by_position(positions: Any, tmp_path: Path) -> None:
    """VideoLLaMA3's, which has SigLIP's names: no answer leaves the rotation out."""
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, patch_size=8)
    theirs = transformers.VideoLlama3VisionModel(transformers.VideoLlama3VisionConfig(**sizes))
    path = bare(tmp_path / "vit.safetensors", theirs.state_dict())
    with pytest.raises(
        CheckpointError,
        match=r"does not contain .*embeddings\.position_embedding\.weight, which the .* format requires",
    ):
        load(path, config=TINY.replace(positions=positions, class_token=False, pool="mean", mlp="gelu_tanh"))


def with_periods(periods: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.update({"rope.periods": periods})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_periods_in_a_file_tell_that_it_turns_and_how_wide_a_head_is(dtype: torch.dtype, tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", with_periods(torch.tensor([1.0, 10.0]).to(dtype)), DINOV3)
    model = load(path, config=DINOV3)
    assert torch.equal(model(IMAGES), trained(DINOV3)(IMAGES))
    assert set(model.source.report.dropped) == {"rope.periods"}
    with pytest.raises(CheckpointError, match=r"rope is Rotation.+ in the tensors and None in config="):
        load(path, config=DINOV3.replace(rope=None))
    with pytest.raises(CheckpointError, match="heads is 2 in the tensors and 4 in config="):
        load(path, config=DINOV3.replace(heads=4))


def test_periods_are_compared_whatever_torch_s_default_type_is(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", with_periods(torch.tensor([1.0, 10.0])), DINOV3)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert load(path, config=DINOV3).dtype == torch.float64
    finally:
        torch.set_default_dtype(usual)


def test_other_periods_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", with_periods(torch.tensor([1.0, 100.0])), DINOV3)
    with pytest.raises(CheckpointError, match=r"rope.periods must be DINOv3's, \[1.0, 10.0\], ..., got \[1.0, 100.0\]"):
        load(path, config=DINOV3)


def test_periods_are_compared_whatever_the_default_device_is(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", with_periods(torch.tensor([1.0, 10.0])), DINOV3)
    with torch.device("meta"):  # stands for cuda
        load(path, config=DINOV3, device="cpu")


def test_a_gated_mlp_with_a_table_and_no_bias_for_keys_is_eva02_s(tmp_path: Path) -> None:
    state = dict(trained(TINY.replace(mlp="swiglu")).state_dict())
    state["blocks.0.attn.qkv.bias"][16:32] = state["blocks.1.attn.qkv.bias"][16:32] = 0
    for gated in ("timm-eva", "timm-eva-gated"):
        path = bare(tmp_path / "vit.safetensors", dict(rename_tensors(FORMATS[gated], "", state)))
        with pytest.raises(ConfigError, match=r"keys without a bias are also found in EVA-02"):
            load(path, config=TINY.replace(mlp="swiglu"))
        assert load(path, config=TINY.replace(mlp="swiglu", rope=Rotation(reference=2))).config.rope is not None


def test_eva_s_names_of_a_dinov3(tmp_path: Path) -> None:
    ours = trained(DINOV3.replace(mlp="swiglu"))
    with pytest.raises(CheckpointError, match="no bias for keys"):
        dict(rename_tensors(FORMATS["timm-eva-gated"], "", ours.state_dict()))
    for block in ours.blocks:
        block.attn.qkv.bias.data[16:32] = 0
    theirs = dict(rename_tensors(FORMATS["timm-eva-gated"], "", ours.state_dict()))
    assert {"blocks.0.attn.q_bias", "blocks.0.gamma_1", "blocks.0.mlp.fc1_g.weight"} <= theirs.keys()
    model = load(bare(tmp_path / "vit.safetensors", theirs), config=ours.config)
    assert torch.equal(model(IMAGES), ours(IMAGES))
    theirs |= {f"blocks.{i}.attn.k_bias": torch.full((16,), 0.5) for i in range(2)}  # which timm itself never saves
    model = load(bare(tmp_path / "vit.safetensors", theirs), config=ours.config)
    assert model.blocks[1].attn.qkv.bias[16:32].eq(0.5).all()


# Gated MLPs.


def test_a_gated_mlp_needs_no_gelu_and_is_told_from_a_plain_one(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=FAMILIES["gated"])
    with pytest.raises(
        ConfigError, match=r"do not determine .*mlp, pool \(mlp: the activation of the gate is unknown; vitlite"
    ):
        load(path)
    assert load(path, config=FAMILIES["gated"]).config == FAMILIES["gated"]
    with pytest.raises(CheckpointError, match="mlp is swiglu in the tensors and gelu in config="):
        load(path, config=TINY)
    with pytest.raises(ConfigError, match=r"do not determine .*mlp"):
        load(written(tmp_path / "plain.safetensors"))


def test_meta_s_names_of_a_gated_dinov2(tmp_path: Path) -> None:
    ours = trained(TINY.replace(mlp="swiglu", layer_scale=0.1))
    state = {}
    for name, tensor in ours.state_dict().items():
        state[name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3")] = tensor
    model = load(bare(tmp_path / "vit.safetensors", state | {"mask_token": torch.zeros(1, 16)}), config=ours.config)
    assert torch.equal(model(IMAGES), ours(IMAGES))


# Two tokens and two heads.


def distilled_file(path: Path, *without: str) -> Path:
    state = trained(FAMILIES["distilled"]).state_dict()
    theirs = dict(rename_tensors(FORMATS["timm-distilled"], "", state))
    return bare(path, {name: tensor for name, tensor in theirs.items() if not name.startswith(without)})


def test_two_heads_become_one_and_back(tmp_path: Path) -> None:
    ours = trained(FAMILIES["distilled"])
    path = distilled_file(tmp_path / "vit.safetensors", "nothing")
    theirs = load_file(path)
    assert theirs["head_dist.weight"].shape == (3, 16)
    assert theirs["pos_embed"].shape == (1, 6, 16)
    model = load(path, config=FAMILIES["distilled"])
    assert model.config == FAMILIES["distilled"]
    assert torch.equal(model(IMAGES), ours(IMAGES))


def test_what_a_distilled_deit_without_heads_pools_is_asked_for(tmp_path: Path) -> None:
    path = distilled_file(tmp_path / "vit.safetensors", "head")
    with pytest.raises(ConfigError, match=r"do not determine .*pool"):
        load(path)
    assert load(path, config=FAMILIES["distilled"].replace(num_classes=0))(IMAGES).shape == (2, 32)


def test_a_head_on_two_tokens_may_be_of_two_kinds_beside_one_register(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=FAMILIES["distilled"])
    with pytest.raises(ConfigError, match=r"do not determine .*pool"):
        load(path)
    answers = []
    for pool in ("cls_and_distillation", "cls_and_mean"):
        answers.append(load(path, config=FAMILIES["distilled"].replace(pool=pool))(IMAGES))
    assert torch.equal(answers[0], trained(FAMILIES["distilled"])(IMAGES))
    assert not torch.allclose(*answers)


# No norm at the end, attention that pools.


def test_a_missing_final_norm_is_missed_unless_somebody_says_so(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=FAMILIES["no final norm"])
    with pytest.raises(
        ConfigError, match=r"do not determine .*final_norm\. Pass the name of the original checkpoint as like="
    ):
        load(path)
    with pytest.raises(CheckpointError, match=r"- norm.weight \(16,\)"):
        load(path, config=TINY)
    with pytest.raises(ConfigError, match=r"do not determine norm_eps, mlp, pool, final_norm .*only the shape"):
        create("vit_nano_4", weights=written(tmp_path / "nano.safetensors", config=NANO.replace(final_norm="none")))
    assert load(path, config=FAMILIES["no final norm"]).config.final_norm == "none"
    path = written(tmp_path / "normed.safetensors")
    with pytest.raises(CheckpointError, match="final_norm is tokens in the tensors and none in config="):
        load(path, config=FAMILIES["no final norm"])


def test_pooling_that_needs_weights_is_not_made_up(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=TINY.replace(class_token=False, pool="mean"))
    with pytest.raises(ConfigError, match=r"pool='map' needs a trained pooling layer"):
        load(path, config=TINY.replace(class_token=False, pool="mean"), pool="map", num_classes=5)
    config = FAMILIES["attention pooling"]
    path = written(tmp_path / "map.safetensors", config=config)
    with pytest.raises(CheckpointError, match="pool is map in the tensors and mean in config="):
        load(path, config=config.replace(pool="mean"))
    model = load(path, config=config, pool="mean", num_classes=5)
    assert {name.split(".")[0] for name in model.source.report.dropped} == {"attn_pool", "head"}
    assert model.config.pool == "mean"


# Other patches.


@pytest.mark.parametrize("patch", [2, 4, 16])
def test_a_kernel_is_resized_as_timm_does(patch: int, tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors")
    model = load(path, config=TINY, patch_size=patch)
    kernel = trained().patch_embed.proj.weight.data
    wanted = timm.layers.resample_patch_embed(kernel, [patch, patch])
    ours = model.patch_embed.proj.weight.data
    assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    grid = (16 // patch, 16 // patch)
    assert model.config.grid == grid
    assert torch.equal(model.pos_embed, resample_positions(trained().pos_embed.data, (2, 2), grid, "timm"))
    assert model.source.report.resampled == {
        "patch_embed.proj.weight": ((16, 3, 8, 8), (16, 3, patch, patch)),
        "pos_embed": ((1, 5, 16), (1, 1 + grid[0] ** 2, 16)),
    }
    assert model(IMAGES).shape == (2, 3)


def test_a_larger_kernel_gives_a_resized_patch_what_the_old_one_gave() -> None:
    kernel = trained().patch_embed.proj.weight.data
    resized = torch.nn.functional.interpolate(IMAGES[:, :, :8, :8], size=(16, 16), mode="bicubic", antialias=True)
    ours = (resample_kernel(kernel, 16) * resized[:, None]).sum((2, 3, 4))
    torch.testing.assert_close(ours, (kernel * IMAGES[:, None, :, :8, :8]).sum((2, 3, 4)), rtol=1e-4, atol=1e-4)


def test_patches_and_channels_and_the_size_of_images_change_together(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors")
    model = load(path, config=TINY, patch_size=4, image_size=(16, 24), channels=1)
    assert model.config.grid == (4, 6)
    assert model.patch_embed.proj.weight.shape == (16, 1, 4, 4)
    model.save(tmp_path / "saved")
    assert torch.equal(load(tmp_path / "saved")(IMAGES[:, :1]), model(IMAGES[:, :1]))
    assert create("vit_nano_4", weights=None, patch_size=8).config.grid == (4, 4)


@pytest.mark.parametrize(
    ("changes", "patch_size", "text"),
    [
        ({"stem": ()}, 4, r"in a model with a stem\. Leave out patch_size="),
        ({"input_norm": "patches"}, 4, "in a model with a norm of the pixels of each patch"),
        ({}, 5, r"image_size 16 is not a multiple of patch_size 5\..*height 15 or 20"),
    ],
)
def test_patches_that_cannot_change(changes: dict[str, Any], patch_size: int, text: str, tmp_path: Path) -> None:
    config = TINY.replace(**changes)
    path = written(tmp_path / "vit.safetensors", config=config)
    with pytest.raises(ConfigError, match=text):
        load(path, config=config, patch_size=patch_size)


# Stems.


@pytest.mark.parametrize("stem", [(), (2, 1)], ids=str)
def test_other_channels_go_into_the_root_of_a_stem(stem: tuple[int, ...], tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=TINY.replace(stem=stem))
    model = load(path, config=TINY.replace(stem=stem), channels=1)
    root = f"patch_embed.backbone.{'stem.' if stem else ''}conv.weight"
    assert model.source.report.resampled == {root: ((64, 3, 7, 7), (64, 1, 7, 7))}
    assert torch.equal(model.get_parameter(root), trained(TINY.replace(stem=stem)).get_parameter(root).sum(1, True))
    assert model(IMAGES[:, :1]).shape == (2, 3)


def test_stems_that_are_no_hybrid_s_are_refused(tmp_path: Path) -> None:
    def without(*names: str) -> Callable[[dict[str, Tensor]], Any]:
        return lambda state: [state.pop(name) for name in list(state) if name.startswith(names)]

    stem = "patch_embed.backbone"
    hybrid = TINY.replace(stem=(1, 1, 1), patch_size=16)
    for names in ((f"{stem}.stages.1",), (f"{stem}.stages.0",), (f"{stem}.stem.conv",)):
        path = written(tmp_path / "vit.safetensors", without(*names), hybrid)
        with pytest.raises(CheckpointError, match=r"The ResNet stem has \("):
            load(path, config=hybrid)
    path = written(tmp_path / "vit.safetensors", without(f"{stem}.stages.1.blocks.0.norm2"), hybrid)
    with pytest.raises(CheckpointError, match=rf"- {stem}.stages.1.blocks.0.norm2.bias"):
        load(path, config=hybrid.replace(image_size=16))
    path = written(tmp_path / "vit.safetensors", config=hybrid)
    with pytest.raises(CheckpointError, match=r"stem is \(1, 1, 1\) in the tensors and None in config="):
        load(path, config=hybrid.replace(stem=None))


# Registers with rows in the position table.


def registers_file(path: Path, rows: int, registers: int, class_token: bool = False) -> tuple[Path, dict[str, Tensor]]:
    """A file as timm writes it: a table of that many rows beside registers."""
    generator = torch.Generator().manual_seed(3)
    config = TINY.replace(class_token=class_token, pool="cls" if class_token else "mean")
    state = dict(trained(config).state_dict())
    state["reg_token"] = torch.randn(1, registers, 16, generator=generator)
    state["pos_embed"] = torch.randn(1, rows, 16, generator=generator)
    return bare(path, state), state


def with_registers(registers: int, class_token: bool = False, image_size: int = 16) -> ViTConfig:
    return TINY.replace(
        image_size=image_size,
        registers=registers,
        class_token=class_token,
        pool="cls" if class_token else "mean",
        cls_position=False,
    )


@pytest.mark.parametrize("class_token", [False, True])
def test_rows_of_registers_are_folded_into_them(class_token: bool, tmp_path: Path) -> None:
    path, state = registers_file(tmp_path / "vit.safetensors", 4 + 3 + class_token, 3, class_token)
    model = load(path, config=with_registers(3, class_token))
    table = state["pos_embed"]
    assert (model.config.image_size, model.config.cls_position) == (16, False)
    assert torch.equal(model.pos_embed, table[:, 3 + class_token :])
    assert torch.equal(model.reg_token, state["reg_token"] + table[:, class_token : 3 + class_token])
    if class_token:
        assert torch.equal(model.cls_token, state["cls_token"] + table[:, :1])


def test_rows_of_patches_alone_stay_as_they_are(tmp_path: Path) -> None:
    path, state = registers_file(tmp_path / "vit.safetensors", 4, 2)
    model = load(path, config=with_registers(2))
    assert torch.equal(model.pos_embed, state["pos_embed"])
    assert torch.equal(model.reg_token, state["reg_token"])


def test_where_both_readings_fit_the_size_tells_or_is_asked_for(tmp_path: Path) -> None:
    path, state = registers_file(tmp_path / "both.safetensors", 25, 9)  # 5 x 5 patches, or 4 x 4 and 9 registers
    with pytest.raises(ConfigError, match=r"do not determine image_size, "):
        load(path)
    for size, rows in ((40, 25), (32, 16)):
        model = load(path, config=with_registers(9, image_size=size))
        assert torch.equal(model.pos_embed, state["pos_embed"][:, -rows:])
    with pytest.raises(CheckpointError, match=r"image_size is 24 in config=, but .* has 25 rows"):
        load(path, config=with_registers(9, image_size=24))


def test_a_folded_table_is_stretched_and_reported(tmp_path: Path) -> None:
    path, _ = registers_file(tmp_path / "vit.safetensors", 7, 3)
    model = load(path, config=with_registers(3), image_size=(16, 32))
    assert model.source.report.resampled == {"pos_embed": ((1, 4, 16), (1, 8, 16))}
    assert isinstance(model, ViT)
