"""The config of a file: sizes from its tensors, the rest from what is stated, and what is not stated is asked for."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files_made import IMAGES, TINY, flax, trained, written
from models import TIMM_SIZES, near
from peers import timm, vit_pytorch
from safetensors.torch import save_file

from vitlite import ViT, ViTConfig, create, load
from vitlite.checkpoints.key_mapping import FORMATS, rename_tensors
from vitlite.config import DINOV3_ROPE
from vitlite.errors import CheckpointError, ConfigError, VitliteError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


def bare(model: torch.nn.Module, path: Path) -> str:
    """Return the error for a file with the tensors of a model and no metadata."""
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    with pytest.raises(ConfigError) as error:
        load(path)
    return str(error.value)


def test_unknown_fields_are_listed(tmp_path: Path) -> None:
    ask = "Pass the name of the original checkpoint as like= (--model NAME --weights PATH), or pass a "
    ask += "complete ViTConfig as config=."
    path = tmp_path / "vit.safetensors"
    text = bare(trained(), path)
    assert text == f"{path}: The tensors do not determine image_size, heads, norm_eps, mlp, pool. {ask}"
    without_table = bare(trained(TINY.replace(positions="none")), path)
    assert "do not determine image_size, positions, heads" in without_table


def test_checkpoints_with_the_same_tensors_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "bare.safetensors"
    same = "Checkpoints with the same tensor names and shapes:"
    text = bare(timm.create_model("deit_tiny_patch16_224"), path)
    assert text.endswith(f"{same} vit_tiny_16.augreg_in21k_ft_in1k, vit_tiny_16.deit_fb_in1k.")
    for name in ("vit_tiny_16.augreg_in21k_ft_in1k", "vit_tiny_16.deit_fb_in1k"):
        assert load(path, like=name).source.report.loaded
    with pytest.raises(CheckpointError, match="registers is 0 in the tensors and 1 in the record of"):
        load(path, like="vit_tiny_16.deit_distilled_fb_in1k")
    large = bare(timm.create_model("vit_tiny_patch16_384"), path)
    assert large.endswith(f"{same} vit_tiny_16.augreg_in21k_ft_in1k_384.")
    distilled = bare(timm.create_model("deit_tiny_distilled_patch16_224"), path)
    assert distilled.endswith(f"{same} vit_tiny_16.deit_distilled_fb_in1k.")
    assert same not in bare(timm.create_model("deit_tiny_patch16_224", num_classes=37), path)
    text = bare(timm.create_model("vit_base_patch16_224"), path)
    assert re.search(rf"{same} vit_base_16\S+(, \S+){{3}} and \d+ more\.$", text)


def test_config_is_complete(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors")
    model = load(path, config=TINY)
    assert model.config == TINY
    provenance = model.source.report.provenance
    assert (provenance["dim"], provenance["mlp"]) == ("the tensors", "config=")
    for changes, text in (
        ({"depth": 3}, "depth is 2 in the tensors and 3 in config="),
        ({"dim": 32, "heads": 4}, "dim is 16 in the tensors and 32 in config="),
        (
            {"image_size": 24},
            r"image_size is 24 in config=, but the position table in the file has 5 rows, .* and patch_size 8\.",
        ),
        (
            {"heads": 2, "head_dim": 4},
            "heads is 2 in config= and head_dim is 4 in config=, but .* have 16 channels, not 8",
        ),
        ({"layer_scale": 1e-5}, "layer_scale is absent in the tensors and 1e-05 in config="),
        ({"cls_position": False}, "cls_position is False in config=, but the position table in the file has a row"),
        ({"positions": "none"}, "positions is learned in the tensors and none in config="),
        ({"final_norm": "none"}, "final_norm is tokens in the tensors and none in config="),
    ):
        with pytest.raises(CheckpointError, match=f"vit.safetensors: Checkpoint and config disagree: .*{text}"):
            load(path, config=TINY.replace(**changes))


def test_heads_of_a_config_json_must_divide_attention(tmp_path: Path) -> None:
    written(tmp_path / "model.safetensors")
    for heads in (3, 0, "2"):
        about = {"architecture": "vit_tiny_patch16_224", "model_args": {"num_heads": heads, **TIMM_SIZES}}
        about["model_args"] |= {"img_size": 16, "patch_size": 8}
        (tmp_path / "config.json").write_text(json.dumps(about))
        with pytest.raises(CheckpointError, match=rf"heads is {heads} in config.json, but .* have 16 channels"):
            load(tmp_path)


@pytest.mark.parametrize("scale", [1.0, 1, 0.0, 1e-6])
def test_initial_layer_scale_is_what_the_config_states(scale: float, tmp_path: Path) -> None:
    config = TINY.replace(layer_scale=scale)
    path = written(tmp_path / "vit.safetensors", config=config)
    assert load(path, config=config).config.layer_scale == scale
    with pytest.raises(CheckpointError, match="layer_scale is present in the tensors and None in config="):
        load(path, config=TINY)


def test_config_must_agree_with_the_format(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **flax())
    config = load(tmp_path / "vit.npz").config
    with pytest.raises(CheckpointError, match=r"norm_eps is 1e-06 in the google format and 0.1 in config="):
        load(tmp_path / "vit.npz", config=config.replace(norm_eps=0.1))
    assert load(tmp_path / "vit.npz", config=config.replace(resample="timm")).config.resample == "timm"


def test_open_clip_may_pool_the_mean(tmp_path: Path) -> None:
    path = tmp_path / "clip.safetensors"
    ours = trained(TINY.replace(input_norm="tokens", pool="mean", norm_eps=1e-5))
    ours.head.bias.data.zero_()
    state = {name: tensor for name, tensor in ours.state_dict().items() if name != "head.bias"}
    theirs = {"visual.proj": state.pop("head.weight").t().contiguous()}
    for name, tensor in rename_tensors(FORMATS["openai"], "visual.", state).items():
        theirs[name] = tensor.flatten() if "class_embedding" in name else tensor.contiguous()
    save_file(theirs, path)
    with pytest.raises(ConfigError, match=r"pool: open_clip models use the class token or a mean"):
        load(path)
    assert load(path, config=ours.config.replace(pool="cls")).config.pool == "cls"
    assert torch.allclose(load(path, config=ours.config)(IMAGES), ours(IMAGES), atol=1e-5)
    with pytest.raises(CheckpointError, match="final_norm is tokens in the tensors and pooled in config="):
        load(path, config=ours.config.replace(final_norm="pooled"))
    with pytest.raises(CheckpointError, match="pool is mean_with_cls in config=, but a file in the openai"):
        load(path, config=ours.config.replace(pool="mean_with_cls"))
    with pytest.raises(ConfigError, match="trained with pool='cls' and does not fit pool='mean'"):
        load(path, config=ours.config.replace(pool="cls"), pool="mean")


@pytest.mark.parametrize("size", [(16, 72), (16, 64), (64, 16)])
def test_images_that_are_not_square(size: tuple[int, int], tmp_path: Path) -> None:
    wide = TINY.replace(image_size=size)
    path = written(tmp_path / "vit.safetensors", config=wide)
    images = torch.randn(1, 3, *size)
    assert torch.equal(load(path, config=wide)(images), trained(wide)(images))


def test_a_table_may_have_a_row_for_the_class_token_or_not(tmp_path: Path) -> None:
    square = TINY.replace(image_size=24, cls_position=False)  # 3 * 3 rows; also 2 * 4 and one for the class token
    path = tmp_path / "model.safetensors"
    assert "do not determine image_size" in bare(trained(square), path)
    assert load(path, config=square).config.grid == (3, 3)
    wide = square.replace(image_size=(16, 32), cls_position=True)
    assert load(path, config=wide).config.cls_position
    for config in (square, wide):
        wrong = config.replace(cls_position=not config.cls_position)
        with pytest.raises(CheckpointError, match=f"cls_position is {wrong.cls_position} in config=, but"):
            load(path, config=wrong)


@pytest.mark.parametrize(
    ("args", "fixed", "known"),
    [
        ({"img_size": [24, 24]}, True, True),
        ({"img_size": 24, "dynamic_img_size": True}, True, True),
        ({}, True, True),
        ({}, False, False),
    ],
)
def test_timm_s_config_states_the_image_size(args: dict[str, Any], fixed: bool, known: bool, tmp_path: Path) -> None:
    written(tmp_path / "model.safetensors", config=TINY.replace(image_size=24, cls_position=False))
    args = {"num_heads": 2, "patch_size": 8, "no_embed_class": True, **TIMM_SIZES} | args
    about = {"architecture": "vit_base_patch16_224", "model_args": args}
    about["pretrained_cfg"] = {"input_size": [3, 24, 24], "fixed_input_size": fixed}
    (tmp_path / "config.json").write_text(json.dumps(about))
    if known:
        assert load(tmp_path).config.grid == (3, 3)
    else:
        with pytest.raises(
            ConfigError, match=r"do not determine image_size\. Pass the name of the original checkpoint as like="
        ):
            load(tmp_path)


def test_registers_with_rows_in_the_table_are_not_taken_for_patches(tmp_path: Path) -> None:
    kind = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=7)
    theirs = timm.models.VisionTransformer(**kind, reg_tokens=8)  # 16 patches and 9 rows more: 25 is a square, too
    assert "do not determine image_size" in bare(theirs, tmp_path / "vit.safetensors")
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        dim=48,
        depth=2,
        heads=4,
        mlp_dim=192,
        num_classes=7,
        registers=8,
        cls_position=False,
    )
    images = torch.randn(1, 3, 32, 32)
    assert near(load(tmp_path / "vit.safetensors", config=config)(images), theirs.eval()(images))


@pytest.mark.parametrize("pool", ["avg", "avgmax", "max", "prr"])
def test_pool_without_a_class_token_is_asked_for(pool: Any, tmp_path: Path) -> None:
    kind = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=7, class_token=False)
    theirs = timm.models.VisionTransformer(**kind, global_pool=pool, fc_norm=False)
    assert "pool: models without a class token use the mean, the maximum" in bare(theirs, tmp_path / "vit.safetensors")


ROTARY = ("vit_small_patch16_rope_224", "vit_small_patch16_rope_ape_224", "vit_small_patch16_dinov3")


@pytest.mark.parametrize("name", ROTARY)
def test_a_rotary_network_is_not_loaded_as_a_plain_one(name: str, tmp_path: Path) -> None:
    theirs = timm.create_model(name, img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=7)
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    with pytest.raises(VitliteError, match=r"positions|networks with rotary positions"):
        load(tmp_path / "vit.safetensors")
    sizes = dict(image_size=32, patch_size=8, dim=48, depth=2, heads=4, mlp_dim=192, num_classes=7, layer_scale=1e-5)
    for positions in ("none", "sincos2d", "learned"):
        registers = 4 * ("dinov3" in name)
        config = ViTConfig(
            **sizes, positions=positions, registers=registers, cls_position=False, qkv_bias=not registers
        )
        with pytest.raises(VitliteError, match=r"positions|no position table"):
            load(tmp_path / "vit.safetensors", config=config)


NOT_TOLD = r"do not determine the network: "


def renamed(state: dict[str, Any], words: dict[str, str]) -> dict[str, Any]:
    """Return tensors under other names."""
    for ours, theirs in words.items():
        state = {name.replace(ours, theirs): tensor for name, tensor in state.items()}
    return state


def test_meta_s_deit_iii_has_the_names_of_rotary_networks(tmp_path: Path) -> None:
    config = TINY.replace(layer_scale=0.1, cls_position=False)
    state = trained(config).state_dict()
    save_file(renamed(state, {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}), tmp_path / "vit.safetensors")
    with pytest.raises(ConfigError, match=NOT_TOLD + "DeiT III has scales named gamma_1 and a position table, but"):
        load(tmp_path / "vit.safetensors", config=config)
    save_file(state, tmp_path / "vit.safetensors")  # as timm calls them in a plain ViT, and nowhere else
    assert torch.equal(load(tmp_path / "vit.safetensors", config=config)(IMAGES), trained(config)(IMAGES))


def test_a_deit_iii_of_meta_s_is_known_by_its_name(tmp_path: Path) -> None:
    theirs = timm.create_model("deit3_small_patch16_224").eval()
    save_file(renamed(theirs.state_dict(), {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}), tmp_path / "vit.st")
    path = (tmp_path / "vit.st").rename(tmp_path / "vit.safetensors")
    with pytest.raises(ConfigError) as error:
        load(path)
    assert "vit_small_16.deit3_fb_in1k, vit_small_16.deit3_fb_in22k_ft_in1k" in str(error.value)
    with pytest.raises(ConfigError, match=NOT_TOLD):  # which gives only the shape
        create("vit_small_16", weights=path)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert near(create("vit_small_16.deit3_fb_in1k", weights=path)(images), theirs(images))


PUBLISHED = {  # networks with the names of plain ViTs, and what is said of them
    "vit_base_patch16_rope_ape_224": "DeiT III has scales .*RoPE-ViT",
    "vit_pe_lang_large_patch14_448": "DeiT III has scales .* the Perception Encoder",
    "vit_pe_spatial_gigantic_patch14_448": "DeiT III has scales .* the Perception Encoder",
    "vit_pe_core_base_patch16_224": "a norm before the blocks, without .* Perception Encoder",
    "vit_pe_core_gigantic_patch14_448": "a norm before the blocks, without .* Perception Encoder",
    "vit_pe_spatial_base_patch16_512": "a norm before the blocks, without .* Perception Encoder",
    "eva02_enormous_patch14_clip_224": ".*biases named q_bias and v_bias .* a post-norm network",
    "vit_base_patch16_rpn_224": "without a class token, .* a post-norm network",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_answer_makes_a_published_look_alike_a_plain_one(name: str, tmp_path: Path) -> None:
    patch = int(name.split("patch")[1].split("_")[0])
    theirs = timm.create_model(name, img_size=4 * patch, embed_dim=48, depth=2, num_heads=2, num_classes=7)
    path = tmp_path / "vit.safetensors"
    save_file(theirs.state_dict(), path)
    sizes = {"image_size": 4 * patch, "patch_size": patch, "dim": 48, "depth": 2, "heads": 2, "num_classes": 7}
    for pool in ("cls", "mean", "map"):
        with pytest.raises(VitliteError):
            load(path, config=ViTConfig(**sizes, pool=pool))
    with pytest.raises(ConfigError, match=NOT_TOLD + PUBLISHED[name]):
        load(path)


def test_meta_s_own_perception_encoder_is_asked_about(tmp_path: Path) -> None:
    """It has the names of OpenAI's CLIP, but for a norm after the blocks."""
    config = TINY.replace(input_norm="tokens", num_classes=0, norm_eps=1e-5)
    state = dict(rename_tensors(FORMATS["openai"], "", dict(trained(config).state_dict())))
    save_file({name: x.contiguous() for name, x in state.items()}, tmp_path / "vit.safetensors")
    assert torch.equal(load(tmp_path / "vit.safetensors", config=config)(IMAGES), trained(config)(IMAGES))
    without = {name: x.contiguous() for name, x in state.items() if not name.startswith("ln_post")}
    save_file(without, tmp_path / "vit.safetensors")
    with pytest.raises(ConfigError, match=NOT_TOLD + "a norm before the blocks, without .* Perception Encoder"):
        load(tmp_path / "vit.safetensors", config=config.replace(final_norm="none"))


def test_an_eva_giant_is_known_by_its_name_and_by_a_config(tmp_path: Path) -> None:
    small = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    theirs = timm.create_model("eva_giant_patch14_224", **small, mlp_ratio=2).eval()
    timm.models.save_for_hf(theirs, tmp_path, model_config={"model_args": small}, safe_serialization=True)
    with torch.no_grad():
        assert near(load(tmp_path)(IMAGES), theirs(IMAGES))
    bare = (tmp_path / "model.safetensors").rename(tmp_path / "bare.safetensors")
    with pytest.raises(ConfigError, match=NOT_TOLD + ".*biases named q_bias"):
        load(bare, config=TINY.replace(pool="mean", final_norm="pooled", mlp_dim=32))


POOLED = NOT_TOLD + "with a class token or registers, attention pooling reads only the patches in timm.s"


def test_no_answer_tells_whether_attention_pools_all_tokens(tmp_path: Path) -> None:
    config = TINY.replace(pool="map", registers=2, cls_position=False)
    for own in (config, config.replace(class_token=False), config.replace(positions="none", rope=DINOV3_ROPE, heads=1)):
        path = written(tmp_path / "vit.safetensors", config=own)
        with pytest.raises(ConfigError, match=POOLED):
            load(path, config=own)
        with pytest.raises(CheckpointError, match=r"pool is map in the tensors and mean in config="):
            load(path, config=own.replace(pool="mean"))
    config = TINY.replace(pool="map", class_token=False)
    assert load(written(tmp_path / "vit.safetensors", config=config), config=config).config.pool == "map"


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("test_vit3", {"img_size": 32}),
        ("vit_small_patch16_dinov3", {"img_size": 32, "embed_dim": 64, "depth": 2, "num_heads": 8, "num_classes": 3}),
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2, "pool_include_prefix": True}),
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2, "reg_tokens": 4}),
    ],
)
def test_a_config_tells_whether_attention_pools_all_tokens(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    theirs = timm.create_model(name, global_pool="map", **sizes).eval()
    timm.models.save_for_hf(theirs, tmp_path, model_config={"model_args": sizes}, safe_serialization=True)
    images = torch.randn(1, 3, 32, 32)
    if "reg_tokens" in sizes or "dinov3" in name:
        with torch.no_grad():
            assert near(load(tmp_path)(images), theirs(images))
    else:
        pooled = r"pool_include_prefix|attention pooling reads the register"
        with pytest.raises(VitliteError, match=pooled):
            load(tmp_path)
    bare = (tmp_path / "model.safetensors").rename(tmp_path / "bare.safetensors")
    with pytest.raises(ConfigError, match=POOLED):
        load(bare)


def test_flattened_patches_do_not_tell_their_sides(tmp_path: Path) -> None:
    sizes = dict(image_size=32, num_classes=7, dim=48, depth=2, heads=4, mlp_dim=80, dim_head=12)
    for patch, channels in ((8, 3), ((16, 4), 3), (4, 12)):
        theirs = vit_pytorch.ViT(patch_size=patch, channels=channels, **sizes).eval()
        save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
        with pytest.raises(ConfigError, match=r"do not determine .*\(patch_size: a flattened patch does not"):
            load(tmp_path / "vit.safetensors")
        if not isinstance(patch, tuple):
            config = ViTConfig(
                image_size=32, patch_size=patch, dim=48, depth=2, heads=4, mlp_dim=80, num_classes=7, channels=channels,
                norm_eps=1e-5, input_norm="patches", qkv_bias=False,
            )  # fmt: skip
            ours = load(tmp_path / "vit.safetensors", config=config)
            images = torch.randn(1, channels, 32, 32)
            assert near(ours(images), theirs(images))


def test_what_is_assumed_is_in_the_report(tmp_path: Path) -> None:
    report = load(written(tmp_path / "vit.safetensors"), config=TINY).source.report
    assert "In timm's ResPostBlock" in report.provenance["norms"]
    ViT(TINY).save(tmp_path / "saved")
    assert "norms" not in load(tmp_path / "saved").source.report.provenance, "its config.json names the network"


def test_the_class_token_of_most_formats_always_has_a_row(tmp_path: Path) -> None:
    config = TINY.replace(image_size=(16, 32))
    state = dict(rename_tensors(FORMATS["torchvision"], "", trained(config).state_dict()))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "vit.safetensors")
    with pytest.raises(ConfigError, match="do not determine image_size"):
        load(tmp_path / "vit.safetensors")
    with pytest.raises(CheckpointError, match=r"image_size is 24 in config=, but .* has 9 rows"):
        load(tmp_path / "vit.safetensors", config=config.replace(image_size=24))
    assert load(tmp_path / "vit.safetensors", config=config).config.cls_position
