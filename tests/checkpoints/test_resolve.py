"""Who says what of a model, and what nobody says is asked for."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files_made import ASK, IMAGES, TINY, flax, trained, written
from models import TIMM_SIZES, near
from peers import timm, vit_pytorch
from safetensors.torch import save_file

from vitlite import ViT, ViTConfig, create, load
from vitlite.checkpoints.key_mapping import FORMATS, infer_geometry, map_keys, rename_tensors
from vitlite.checkpoints.resolve import Claim, Evidence, candidates, resolve
from vitlite.errors import CheckpointError, ConfigError, VitliteError
from vitlite.zoo import registry


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


def tensor_facts(model: ViT, **changes: tuple[int, ...]) -> dict[str, Any]:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} | changes
    return infer_geometry(map_keys(shapes), shapes)


def test_what_is_unknown_is_asked_for_by_name() -> None:
    with pytest.raises(ConfigError) as error:
        resolve(Evidence(FORMATS["timm"], tensor_facts(trained()), []))
    assert str(error.value) == (
        "The tensors do not tell image_size, heads, norm_eps, gelu, pool (timm files pool cls or mean or mean_with_cls "
        "or cls_and_mean). Say so: vitlite.load(..., config=ViTConfig(image_size=..., patch_size=8, dim=16, heads=..., "
        "norm_eps=..., gelu=..., pool=...)), or vitlite.create(name, weights=...) with the name of a checkpoint like "
        "it."
    )
    bare = tensor_facts(trained(TINY.replace(positions="none")))
    for facts_without in (bare, tensor_facts(trained(), pos_embed=(1, 0, 16))):
        with pytest.raises(ConfigError, match="do not tell image_size, positions, heads"):
            resolve(Evidence(FORMATS["timm"], facts_without, []))


def bare(model: torch.nn.Module, path: Path) -> str:
    """What is said of a file with the tensors of a model, and nothing else."""
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    with pytest.raises(ConfigError) as error:
        load(path)
    return str(error.value)


def test_of_a_bare_file_the_checkpoints_of_such_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bare.safetensors"
    both = "vit_tiny_16.augreg_in21k_ft_in1k, vit_tiny_16.deit_fb_in1k"
    tell = "Which of them it is, if any, they do not tell: look where the file was fetched from. Say so: vitlite.load("
    text = bare(timm.create_model("deit_tiny_patch16_224"), path)
    assert f"In the zoo, tensors of these names and shapes are those of {both}. {tell}" in text
    for name in both.split(", "):
        assert create(name, weights=path).source.report.loaded
    with pytest.raises(ConfigError, match=f"the preset vit_tiny_16 is a shape alone.*of {both}. Which"):
        create("vit_tiny_16", weights=path)
    with pytest.raises(ConfigError) as error:  # what the caller says is believed
        load(path, config=ViTConfig(heads=6, dim=192))
    assert "In the zoo" not in str(error.value)
    large = bare(timm.create_model("vit_tiny_patch16_384"), path)
    assert "those of vit_tiny_16.augreg_in21k_ft_in1k_384. Which" in large
    distilled = bare(timm.create_model("deit_tiny_distilled_patch16_224"), path)
    assert "those of vit_tiny_16.deit_distilled_fb_in1k. Which" in distilled
    other_head = bare(timm.create_model("deit_tiny_patch16_224", num_classes=37), path)
    assert "In the zoo" not in other_head


def test_of_many_checkpoints_of_such_tensors_a_few_are_named() -> None:
    config = registry.find("vit_base_16").config
    with torch.device("meta"):
        known = tensor_facts(ViT(config))
    alike = candidates(Evidence(FORMATS["timm"], known, []))
    assert len(alike) > 5
    assert {record.config.num_classes for record in alike} == {1000}
    first = ", ".join(record.name for record in alike[:4])
    with pytest.raises(ConfigError, match=f"those of {first} and {len(alike) - 4} others. Which"):
        resolve(Evidence(FORMATS["timm"], known, []))


def test_a_distillation_token_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "bare.safetensors"
    bare(timm.create_model("deit_tiny_patch16_224"), path)
    with pytest.raises(CheckpointError, match=r"registers \(tokens beside .* DeiT is one\): the tensors say 0, "):
        create("vit_tiny_16.deit_distilled_fb_in1k", weights=path)


def test_the_first_to_know_decides_and_contradictions_are_errors() -> None:
    known = tensor_facts(trained())
    rest = Claim("a", {"image_size": 16, "norm_eps": 1e-6, "gelu": "exact", "pool": "cls"})
    resolved = resolve(Evidence(FORMATS["timm"], known, [Claim("b", {"heads": 2, "norm_eps": 1e-3}), rest]))
    assert resolved.config.norm_eps == 1e-3
    assert resolved.provenance["norm_eps"] == "b"
    assert resolved.provenance["gelu"] == "a"
    assert resolved.provenance["depth"] == "the tensors say"
    without_size = Claim("a", {name: value for name, value in rest.fields.items() if name != "image_size"})
    with pytest.raises(CheckpointError, match="5 rows, which is not an image of"):
        resolve(Evidence(FORMATS["timm"], known, [Claim("c says", {"heads": 2, "image_size": 24}), without_size]))
    for fields, text in (
        ({"heads": 4, "depth": 3}, "depth: the tensors say 2, c says 3"),
        ({"heads": 3}, "16 wide, which is not 3 heads"),
        ({"heads": 0}, "16 wide, which is not 0 heads"),
        ({"heads": "2"}, "16 wide, which is not 2 heads"),
        ({"heads": 2, "image_size": 24}, "image_size: c says (24, 24), a (16, 16)"),
        ({"heads": 2, "head_dim": 4}, "not 2 heads of equal width"),
        ({"heads": 2, "layer_scale": 1e-5}, "layer_scale: the tensors have none, c says 1e-05"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(text)):
            resolve(Evidence(FORMATS["timm"], known, [Claim("c says", fields), rest]))
    with pytest.raises(ConfigError, match=r"image_size must be a whole number or \(height, width\), got '16'"):
        resolve(Evidence(FORMATS["timm"], known, [Claim("c says", {"image_size": "16"}), rest]))
    with pytest.raises(CheckpointError, match="heads: b says 2, c says 4"):
        resolve(Evidence(FORMATS["timm"], known, [Claim("b says", {"heads": 2}), Claim("c says", {"heads": 4}), rest]))


@pytest.mark.parametrize("scale", [1.0, 1, 0.0, 1e-6])
def test_the_initial_layer_scale_is_what_is_said_of_it(scale: float, tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=TINY.replace(layer_scale=scale))
    assert load(path, config=ASK.replace(layer_scale=scale)).config.layer_scale == scale
    assert load(path, config=ASK).config.layer_scale == 1e-5


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
    names = {rule.ours: rule for rule in FORMATS["openai"].rules}
    for name, tensor in state.items():
        rule = names[re.sub(r"\.\d+\.", ".#.", name)]
        theirs = rule.theirs[0].replace("#", "".join(re.findall(r"\.(\d+)\.", name)))
        proj["visual." + theirs] = tensor[0, 0] if name == "cls_token" else tensor[0] if name == "pos_embed" else tensor
    save_file(proj, path)
    ask = ViTConfig(image_size=16, dim=16, heads=2, gelu="exact")
    with pytest.raises(ConfigError, match=r"do not tell pool \(pool: open_clip's may be the class token or a"):
        load(path, config=ask)
    assert load(path, config=ask.replace(pool="cls")).config.pool == "cls"
    mean = load(path, config=ask.replace(pool="mean", fc_norm=False))
    assert torch.allclose(mean(IMAGES), ours(IMAGES), atol=1e-5)
    with pytest.raises(ConfigError, match=r"do not tell fc_norm: open_clip's ln_post stands before the mean, or with"):
        load(path, config=ask.replace(pool="mean"))
    with pytest.raises(CheckpointError, match="fc_norm: the tensors say False, config= says True"):
        load(path, config=ask.replace(pool="mean", fc_norm=True))
    with pytest.raises(CheckpointError, match="openai files pool cls or mean, not 'mean_with_cls'"):
        load(path, config=ask.replace(pool="mean_with_cls"))
    with pytest.raises(ConfigError, match="pool 'cls', and their head means nothing after 'mean'"):
        load(path, config=ask.replace(pool="cls"), pool="mean")


def test_images_that_are_not_square(tmp_path: Path) -> None:
    wide = TINY.replace(image_size=(16, 72))
    path = written(tmp_path / "vit.safetensors", config=wide)
    model = load(path, config=ASK.replace(image_size=(16, 72), patch_size=8))
    images = torch.randn(1, 3, 16, 72)
    assert torch.equal(model(images), trained(wide)(images))
    path = written(tmp_path / "vit.safetensors", config=TINY.replace(image_size=(16, 64)))
    assert load(path, config=ASK.replace(image_size=(16, 64), patch_size=8)).config.grid == (2, 8)


SQUARE = TINY.replace(image_size=24, cls_position=False)  # 3 * 3 rows; also 2 * 4 and one for the class token


def test_a_square_table_with_a_class_token_may_have_a_row_for_it_or_not(tmp_path: Path) -> None:
    path = written(tmp_path / "model.safetensors", config=SQUARE)
    for said in ({}, {"cls_position": False}, {"cls_position": True}):
        with pytest.raises(ConfigError, match=r"do not tell image_size\. Say so"):
            load(path, config=UNSIZED.replace(**said))
    assert load(path, config=UNSIZED.replace(image_size=24, patch_size=8)).config.grid == (3, 3)
    assert load(path, config=UNSIZED.replace(image_size=(16, 32))).config.cls_position
    wide = load(path, config=UNSIZED.replace(image_size=(24, 24), patch_size=8, cls_position=False))
    assert not wide.config.cls_position
    for size, wrong in (((24, 24), True), ((16, 32), False)):
        said = UNSIZED.replace(image_size=size, patch_size=8, cls_position=wrong)
        with pytest.raises(
            CheckpointError, match=rf"cls_position: the position table says {not wrong}, config= says {wrong}\."
        ):
            load(path, config=said)


def test_timm_s_sizes_are_told_by_its_config(tmp_path: Path) -> None:
    written(tmp_path / "model.safetensors", config=SQUARE)
    for args, fixed, told in (
        ({"img_size": [24, 24]}, True, True),
        ({"img_size": 24, "dynamic_img_size": True}, True, True),
        ({}, True, True),
        ({}, False, False),
    ):
        about = {
            "architecture": "vit_base_patch16_224",
            "model_args": {"num_heads": 2, "patch_size": 8, "no_embed_class": True, **TIMM_SIZES} | args,
        }
        about["pretrained_cfg"] = {"input_size": [3, 24, 24], "fixed_input_size": fixed}
        (tmp_path / "config.json").write_text(json.dumps(about))
        if told:
            assert load(tmp_path).config.grid == (3, 3)
        else:
            with pytest.raises(ConfigError, match=r"do not tell image_size\. Say so"):
                load(tmp_path)


UNSIZED = ViTConfig(dim=16, heads=2, norm_eps=1e-6, gelu="exact", pool="cls")


def test_as_many_patches_may_stand_in_another_shape(tmp_path: Path) -> None:
    wide = TINY.replace(image_size=(16, 64))
    path = written(tmp_path / "vit.safetensors", config=wide)
    for wanted in (None, 32, (16, 64)):  # what is wanted does not tell what is there
        with pytest.raises(ConfigError, match=r"do not tell image_size\. Say so: .*image_size=\.\.\., patch_size=8"):
            load(path, config=UNSIZED, image_size=wanted)
    images = torch.randn(1, 3, 16, 64)
    assert torch.equal(load(path, config=UNSIZED.replace(image_size=(16, 64)))(images), trained(wide)(images))


def test_registers_with_rows_in_the_table_are_not_taken_for_patches(tmp_path: Path) -> None:
    kind = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=7)
    theirs = timm.models.VisionTransformer(**kind, reg_tokens=8)  # 16 patches and 9 rows more: 25 is a square, too
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    ask = ViTConfig(dim=48, heads=4, norm_eps=1e-6, gelu="exact", pool="cls")
    with pytest.raises(ConfigError, match="do not tell image_size"):
        load(tmp_path / "vit.safetensors", config=ask)
    images = torch.randn(1, 3, 32, 32)
    assert near(load(tmp_path / "vit.safetensors", config=ask.replace(image_size=32))(images), theirs.eval()(images))


@pytest.mark.parametrize("pool", ["avg", "avgmax", "max", "prr"])
def test_what_is_pooled_without_a_class_token_is_asked_for(pool: Any, tmp_path: Path) -> None:
    kind = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=7, class_token=False)
    theirs = timm.models.VisionTransformer(**kind, global_pool=pool, fc_norm=False)
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    ask = ViTConfig(image_size=32, dim=48, heads=4, norm_eps=1e-6, gelu="exact")
    with pytest.raises(ConfigError, match=r"do not tell pool \(pool: without a class token it may be the"):
        load(tmp_path / "vit.safetensors", config=ask)
    assert load(tmp_path / "vit.safetensors", config=ask, pool="mean").config.pool == "mean"


ROTARY = ("vit_small_patch16_rope_224", "vit_small_patch16_rope_ape_224", "vit_small_patch16_dinov3")


@pytest.mark.parametrize("name", ROTARY)
def test_no_answer_makes_a_rotary_network_a_plain_one(name: str, tmp_path: Path) -> None:
    theirs = timm.create_model(name, img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=7)
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    ask = ViTConfig(image_size=32, dim=48, heads=4, norm_eps=1e-6, gelu="exact", pool="cls")
    with pytest.raises(VitliteError, match=r"positions|networks that turn queries and keys as well"):
        load(tmp_path / "vit.safetensors", config=ask)
    for positions in ("none", "sincos2d"):
        for cls_position in (True, False):
            said = ask.replace(positions=positions, cls_position=cls_position)
            with pytest.raises(CheckpointError, match=r"positions: |no position table"):
                load(tmp_path / "vit.safetensors", config=said)


WITHOUT_TELLING = r"do not tell which network it is, and no config says it: "


def renamed(state: dict[str, Any], words: dict[str, str]) -> dict[str, Any]:
    """Tensors under other names."""
    for ours, theirs in words.items():
        state = {name.replace(ours, theirs): tensor for name, tensor in state.items()}
    return state


def test_meta_s_deit_iii_has_the_names_of_rotary_networks(tmp_path: Path) -> None:
    config = TINY.replace(layer_scale=0.1, cls_position=False)
    state = trained(config).state_dict()
    save_file(renamed(state, {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}), tmp_path / "vit.safetensors")
    for said in (ASK, ASK.replace(positions="learned"), ASK.replace(positions="learned", cls_position=False)):
        with pytest.raises(ConfigError, match=WITHOUT_TELLING + "scales called gamma_1 beside a position table are"):
            load(tmp_path / "vit.safetensors", config=said)
    save_file(state, tmp_path / "vit.safetensors")  # as timm calls them in a plain ViT, and nowhere else
    assert torch.equal(load(tmp_path / "vit.safetensors", config=ASK)(IMAGES), trained(config)(IMAGES))


def test_a_deit_iii_of_meta_s_is_known_by_its_name(tmp_path: Path) -> None:
    theirs = timm.create_model("deit3_small_patch16_224").eval()
    save_file(renamed(theirs.state_dict(), {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}), tmp_path / "vit.st")
    path = (tmp_path / "vit.st").rename(tmp_path / "vit.safetensors")
    with pytest.raises(ConfigError) as error:
        load(path)
    assert "those of vit_small_16.deit3_fb_in1k" in str(error.value)
    with pytest.raises(ConfigError, match=WITHOUT_TELLING):  # the name of a shape tells nothing of it
        create("vit_small_16", weights=path)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert near(create("vit_small_16.deit3_fb_in1k", weights=path)(images), theirs(images))


PUBLISHED = {  # networks with the names of plain ViTs, and what is said of them
    "vit_base_patch16_rope_ape_224": "scales called gamma_1 .*RoPE-ViT",
    "vit_pe_lang_large_patch14_448": "scales called gamma_1 .* the Perception Encoder",
    "vit_pe_spatial_gigantic_patch14_448": "scales called gamma_1 .* the Perception Encoder",
    "vit_pe_core_base_patch16_224": "a norm before the blocks, .* Perception Encoder has, which turns queries and keys",
    "vit_pe_core_gigantic_patch14_448": "a norm before the blocks, ",
    "vit_pe_spatial_base_patch16_512": "a norm before the blocks, ",
    "eva02_enormous_patch14_clip_224": "biases called q_bias and v_bias .* whose norms stand after attention and MLP",
    "vit_base_patch16_rpn_224": "a ViT without class token, .* whose norms stand after attention and MLP",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_answer_makes_a_published_look_alike_a_plain_one(name: str, tmp_path: Path) -> None:
    patch = int(name.split("patch")[1].split("_")[0])
    theirs = timm.create_model(name, img_size=4 * patch, embed_dim=48, depth=2, num_heads=2, num_classes=7)
    path = tmp_path / "vit.safetensors"
    save_file(theirs.state_dict(), path)
    rest = {"image_size": 4 * patch, "patch_size": patch, "dim": 48, "heads": 2, "norm_eps": 1e-5, "gelu": "exact"}
    final_norm = any(word.startswith(("norm.", "fc_norm.")) for word in theirs.state_dict())
    for pool in ("cls", "mean", "map"):
        said = ViTConfig(**rest, pool=pool, positions="learned", final_norm=final_norm, mlp="gelu")
        with pytest.raises(VitliteError):
            load(path, config=said)
    with pytest.raises(ConfigError, match=WITHOUT_TELLING + PUBLISHED[name]):
        load(path)


def test_meta_s_own_perception_encoder_is_asked_about(tmp_path: Path) -> None:
    """It has the names of OpenAI's CLIP, but for a norm after the blocks."""
    config = TINY.replace(pre_norm=True, num_classes=0, norm_eps=1e-5)
    state = dict(rename_tensors(FORMATS["openai"], "", dict(trained(config).state_dict())))
    ask = ASK.replace(norm_eps=1e-5, gelu="quick", pool="cls")
    save_file({name: x.contiguous() for name, x in state.items()}, tmp_path / "vit.safetensors")
    assert torch.equal(
        load(tmp_path / "vit.safetensors", config=ask)(IMAGES), trained(config.replace(gelu="quick"))(IMAGES)
    )
    without = {name: x.contiguous() for name, x in state.items() if not name.startswith("ln_post")}
    save_file(without, tmp_path / "vit.safetensors")
    with pytest.raises(ConfigError, match=WITHOUT_TELLING + "a norm before the blocks, and after them none"):
        load(tmp_path / "vit.safetensors", config=ask.replace(final_norm=False))


def test_an_eva_giant_is_known_by_its_name_and_by_a_config(tmp_path: Path) -> None:
    small = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    theirs = timm.create_model("eva_giant_patch14_224", **small, mlp_ratio=2).eval()
    timm.models.save_for_hf(theirs, tmp_path, model_config={"model_args": small}, safe_serialization=True)
    with torch.no_grad():
        assert near(load(tmp_path)(IMAGES), theirs(IMAGES))
    bare = (tmp_path / "model.safetensors").rename(tmp_path / "bare.safetensors")
    with pytest.raises(ConfigError, match=WITHOUT_TELLING + "biases called q_bias"):
        load(bare, config=ASK.replace(pool="mean"))


POOLED = WITHOUT_TELLING + "a pool by attention beside a class token or registers looks at the patches alone in timm's"


def test_no_answer_tells_whether_attention_pools_all_tokens(tmp_path: Path) -> None:
    config = TINY.replace(pool="map", registers=2, cls_position=False)
    ask = ViTConfig(image_size=16, dim=16, heads=2, norm_eps=1e-6, gelu="exact")
    for own in (config, config.replace(class_token=False), config.replace(positions="rope", heads=1)):
        path = written(tmp_path / "vit.safetensors", config=own)
        for said in (ask, ask.replace(pool="map"), ask.replace(pool="map", positions=own.positions, heads=own.heads)):
            with pytest.raises(ConfigError, match=POOLED):
                load(path, config=said)
        with pytest.raises(CheckpointError, match=r"pool: the tensors say map, config= says mean"):
            load(path, config=ask.replace(pool="mean"))
    path = written(tmp_path / "vit.safetensors", config=TINY.replace(pool="map", class_token=False))
    assert load(path, config=ask).config.pool == "map"  # there are patches alone


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("test_vit3", {"img_size": 32}),
        ("vit_small_patch16_dinov3", {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}),
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2, "pool_include_prefix": True}),
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2, "reg_tokens": 4}),
    ],
)
def test_a_config_tells_whether_attention_pools_all_tokens(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    theirs = timm.create_model(name, global_pool="map", **sizes).eval()
    timm.models.save_for_hf(theirs, tmp_path, model_config={"model_args": sizes}, safe_serialization=True)
    images = torch.randn(1, 3, 32, 32)
    if "reg_tokens" in sizes:
        with torch.no_grad():
            assert near(load(tmp_path)(images), theirs(images))
    else:
        pooled = r"pool_include_prefix|attention pools all tokens|attention pooling sees the register"
        with pytest.raises(VitliteError, match=pooled):
            load(tmp_path)
    bare = (tmp_path / "model.safetensors").rename(tmp_path / "bare.safetensors")
    said = ViTConfig(image_size=32, dim=theirs.embed_dim, heads=2, norm_eps=1e-6, gelu="exact", pool="map")
    if "dinov3" in name:
        said = said.replace(positions="rope")
    with pytest.raises(ConfigError, match=POOLED):
        load(bare, config=said)


def test_a_table_is_not_overlooked_because_somebody_says_so(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors")
    with pytest.raises(CheckpointError, match="positions: the tensors say learned, config= says none"):
        load(path, config=ASK.replace(positions="none"))


def test_flattened_patches_do_not_tell_their_sides(tmp_path: Path) -> None:
    sizes = dict(image_size=32, num_classes=7, dim=48, depth=2, heads=4, mlp_dim=80, dim_head=12)
    for patch, channels in ((8, 3), ((16, 4), 3), (4, 12)):
        theirs = vit_pytorch.ViT(patch_size=patch, channels=channels, **sizes).eval()
        save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
        said = ViTConfig(image_size=32, heads=4)
        with pytest.raises(ConfigError, match=r"do not tell patch_size \(patch_size: pixels are flattened: patches of"):
            load(tmp_path / "vit.safetensors", config=said)
        if not isinstance(patch, tuple):
            ours = load(tmp_path / "vit.safetensors", config=said.replace(patch_size=patch))
            images = torch.randn(1, channels, 32, 32)
            assert near(ours(images), theirs(images))


def test_what_names_cannot_tell_is_in_the_report(tmp_path: Path) -> None:
    report = load(written(tmp_path / "model.safetensors"), config=ASK).source.report
    assert report.provenance["norms"].startswith("assumed, because timm's ResPostBlock has the same names")
    ViT(TINY).save(tmp_path / "saved")
    assert "norms" not in load(tmp_path / "saved").source.report.provenance, "the file names its network"


def test_the_class_token_of_most_layouts_always_has_a_row(tmp_path: Path) -> None:
    state = dict(rename_tensors(FORMATS["torchvision"], "", trained(TINY.replace(image_size=(16, 32))).state_dict()))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "vit.safetensors")
    with pytest.raises(ConfigError, match="do not tell image_size"):
        load(tmp_path / "vit.safetensors", config=ViTConfig(heads=2))
    with pytest.raises(CheckpointError, match=r"9 rows, which is not an image of \(24, 24\) in patches of 8"):
        load(tmp_path / "vit.safetensors", config=ViTConfig(heads=2, image_size=24, patch_size=8))
    assert load(tmp_path / "vit.safetensors", config=ViTConfig(heads=2, image_size=(16, 32))).config.cls_position
