"""Configs: what they derive, what they refuse and how they say so, and that any they accept is a model that runs."""

import dataclasses
import json
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitlite.config import (
    DINOV3_ROPE,
    FinalNorm,
    InnerNorm,
    InputNorm,
    Mlp,
    Norm,
    Pool,
    Positions,
    Resample,
    Rotation,
    ViTConfig,
    fitting,
    stem_stride,
)
from vitlite.errors import ConfigError, UnknownNameError
from vitlite.nn.vit import ViT
from vitlite.presets import PRESETS, preset


def test_at_most_thirty_fields() -> None:
    assert len(dataclasses.fields(ViTConfig)) <= 30


def test_presets_are_the_papers_table() -> None:
    rows = {
        name: (config.patch_size, config.depth, config.dim, config.mlp_dim, config.heads)
        for name, config in PRESETS.items()
    }
    assert rows["vit_base_16"] == (16, 12, 768, 3072, 12)  # Dosovitskiy et al., table 1
    assert rows["vit_large_32"] == (32, 24, 1024, 4096, 16)
    assert rows["vit_huge_14"] == (14, 32, 1280, 5120, 16)
    for name, config in PRESETS.items():
        size, _, patch = name.rpartition("_")
        assert config.patch_size == int(patch)
        assert config.dim % config.heads == 0
        shape = (config.depth, config.dim, config.mlp_dim, config.heads, config.mlp, config.stem)
        for other_name, other in PRESETS.items():
            other_shape = (other.depth, other.dim, other.mlp_dim, other.heads, other.mlp, other.stem)
            assert (other_shape == shape) == (other_name.rpartition("_")[0] == size), (name, other_name)


def test_a_preset_by_name() -> None:
    assert preset("vit_large_16") is PRESETS["vit_large_16"]
    with pytest.raises(
        UnknownNameError, match=r"There is no preset 'vit_bas_16'\. Did you mean vit_base_16, .*Presets: "
    ):
        preset("vit_bas_16")


def test_what_a_config_derives() -> None:
    config = ViTConfig(image_size=(32, 48), patch_size=8, dim=64, heads=4, registers=2, cls_position=False)
    assert (config.size, config.grid) == ((32, 48), (4, 6))
    assert (config.prefix_tokens, config.position_rows) == (3, 24)
    assert (config.attention_dim, config.embed_dim) == (64, 64)
    assert config.replace(head_dim=20).attention_dim == 80
    assert config.replace(pre_logits=10).embed_dim == 10
    assert ViTConfig(pool="cls_and_mean").embed_dim == 1536
    assert ViTConfig(pool="cls_and_distillation", registers=1, cls_position=False).embed_dim == 1536
    assert ViTConfig(pool="map", class_token=False).embed_dim == 768
    assert ViTConfig().position_rows == 197
    assert ViTConfig(class_token=False, pool="mean").position_rows == 196


def test_a_token_of_a_hybrid_is_the_stem_s_stride_times_the_kernel() -> None:
    def shape(patch_size: int, stem: tuple[int, ...] | None) -> tuple[int, int, int]:
        config = ViTConfig(patch_size=patch_size, stem=stem)
        return stem_stride(stem), config.stem_dim, config.kernel_size

    assert shape(16, None) == (1, 3, 16)
    assert shape(32, ()) == (4, 64, 8)  # R+Ti/16: 7 x 7 tokens at 224 pixels
    assert shape(16, (3, 4, 9)) == (16, 1024, 1)
    assert shape(32, (2, 2, 2, 2)) == (32, 2048, 1)


def test_equal_sides_are_one_number() -> None:
    assert ViTConfig(image_size=(32, 32)) == ViTConfig(image_size=32)
    assert ViTConfig(image_size=[32, 48]).replace(image_size=[32, 32]).image_size == 32


def test_a_config_survives_json() -> None:
    config = ViTConfig(image_size=(32, 48), patch_size=8, layer_scale=1e-5, norm_eps=1e-12)
    assert ViTConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert ViTConfig(image_size=[32, 48]).image_size == (32, 48)
    hybrid = ViTConfig(stem=(3, 4, 9))
    assert ViTConfig(**json.loads(json.dumps(hybrid.to_dict()))) == hybrid


def test_a_config_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ViTConfig().depth = 3
    with pytest.raises(TypeError):
        ViTConfig(224)


WRONG = [
    ({"dim": 0}, r"dim must be an integer from 1 to 2147483647, got 0\."),
    ({"depth": 2.0}, r"depth must be an integer from 1 to 2147483647, got 2\.0\."),
    ({"heads": True}, r"heads must be an integer from 1 to 2147483647, got True\."),
    ({"patch_size": (16, 16)}, r"patch_size must be an integer from 1 to 2147483647, got \(16, 16\)\."),
    ({"dim": 10**400}, r"dim must be an integer from 1 to 2147483647, got 10+\."),
    ({"image_size": 10**400}, r"image_size must be a positive integer or \(height, width\), got 10+\."),
    ({"image_size": (224, 10**400)}, r"image_size must be a positive integer or \(height, width\), got \(224, 10+\)\."),
    ({"layer_scale": 10**400}, r"layer_scale must be None or a number such as 1e-5, got 10+\."),
    ({"head_dim": 10**400}, r"head_dim must be an integer from 1 to 2147483647, got 10+\."),
    (
        {"stem": (10**400,)},
        r"stem must be None or a tuple .* of up to 4 stages, .* got \(10+,\)\.",
    ),
    ({"num_classes": -1}, r"num_classes must be an integer from 0 to 2147483647, got -1\."),
    (
        {"pool": "mean_cls"},
        r"pool must be one of cls, mean, .*, cls_and_distillation, map, map_all, got 'mean_cls'\. Did you mean",
    ),
    ({"pool": None}, r"pool must be one of .*, got None\."),
    ({"positions": "rotary"}, r"positions must be one of learned, sincos2d, none, got 'rotary'\."),
    ({"mlp": "glu"}, r"mlp must be one of gelu, gelu_tanh, quick_gelu, swiglu, got 'glu'\. Did you mean"),
    ({"final_norm": None}, r"final_norm must be one of tokens, pooled, pooled_plain, none, got None\."),
    (
        {"stem": 3},
        r"stem must be None or a tuple .* of up to 4 stages, such as \(3, 4, 9\) or \(\), got 3\.",
    ),
    (
        {"stem": (3, 0)},
        r"stem must be None or a tuple .* of up to 4 stages, .* got \(3, 0\)\.",
    ),
    (
        {"stem": (1, 1, 1, 1, 1)},
        r"stem must be None or a tuple .* of up to 4 stages, .* got \(1, 1, 1, 1, 1\)\.",
    ),
    ({"resample": "timms"}, r"resample must be one of timm, .* got 'timms'\. Did you mean timm\?"),
    ({"rope": "dinov3"}, r"rope must be None or a Rotation, got 'dinov3'\."),
    ({"rope": {"base": 100}}, r"rope has unknown fields: base\. Valid fields: temperature, "),
    ({"rope": {"temperature": 0}}, r"rope.temperature must be greater than 0, got 0\."),
    ({"rope": {"offset": "1"}}, r"rope.offset must be a number from 0 to 2147483647, got '1'\."),
    ({"rope": {"reference": 1.5}}, r"rope.reference must be None or a positive integer, got 1\.5\."),
    ({"rope": {"order": "ij"}}, r"rope.order must be yx or xy, got 'ij'\."),
    ({"rope": {"learned": 1}}, r"rope.learned must be True or False, got 1\."),
    ({"class_token": 1}, r"class_token must be True or False, got 1\."),
    ({"checkpointing": "yes"}, r"checkpointing must be True or False, got 'yes'\."),
    ({"dropout": 1.0}, r"dropout must be at least 0 and below 1, got 1\.0\."),
    ({"drop_path": -0.1}, r"drop_path must be at least 0 and below 1, got -0\.1\."),
    ({"dropout": float("nan")}, r"dropout must be at least 0 and below 1, got nan\."),
    ({"dropout": "0.1"}, r"dropout must be at least 0 and below 1, got '0\.1'\."),
    ({"norm_eps": 0}, r"norm_eps must be a float between 0 and 1, such as 1e-6, got 0\."),
    ({"norm_eps": 1e6}, r"norm_eps must be a float between 0 and 1, such as 1e-6, got 1000000\.0\."),
    ({"layer_scale": "1e-5"}, r"layer_scale must be None or a number such as 1e-5, got '1e-5'\."),
    ({"layer_scale": float("inf")}, r"layer_scale must be None or a number such as 1e-5, got inf\."),
    ({"head_dim": 0}, r"head_dim must be an integer from 1 to 2147483647, got 0\."),
    (
        {"image_size": 225},
        r"image_size 225 is not a multiple of patch_size 16\..*height 224 or 240, width 224 or 240\.",
    ),
    ({"image_size": (224, 230)}, r"\(224, 230\) is not a multiple of patch_size 16\..*fit: width 224 or 240\."),
    ({"image_size": 8}, r"image_size 8 is not a multiple .*fit: height 16, width 16\."),
    ({"image_size": 0}, r"image_size must be a positive integer or .*, got 0\."),
    ({"image_size": True, "patch_size": 1}, r"image_size must be a positive integer or \(height, width\), got True"),
    ({"image_size": 224.0}, r"image_size must be a positive integer or \(height, width\), got 224\.0\."),
    ({"image_size": (224,)}, r"image_size must be a positive integer or \(height, width\), got \(224,\)\."),
    ({"image_size": "224"}, r"image_size must be a positive integer or \(height, width\), got '224'\."),
    ({"heads": 7}, r"dim=768 is not divisible by heads=7\. Change heads, or set head_dim\."),
    ({"class_token": False}, r"pool='cls' reads the class token, but class_token is False. Use pool='mean'\."),
    ({"registers": 4}, r"only the patches of a model with registers have positions\. Set cls_position=False"),
    ({"registers": 4, "cls_position": False, "pool": "mean_with_cls"}, r"does not support registers"),
    ({"positions": "sincos2d", "dim": 30, "heads": 3}, r"dim must be a multiple of 4, got 30\."),
    ({"rope": DINOV3_ROPE, "dim": 36, "heads": 6}, r"the width of a head must be a multiple of 4, got 6\."),
    ({"rope": DINOV3_ROPE, "head_dim": 66}, r"the width of a head must be a multiple of 4, got 66\."),
    ({"pool": "cls_and_distillation"}, r"needs exactly one register, .*, got registers=0\. Set registers=1\."),
    ({"pool": "cls_and_distillation", "registers": 2, "cls_position": False}, r"Set registers=1\."),
    ({"pool": "cls_and_distillation", "class_token": False}, r"'cls_and_distillation' reads the class token"),
    ({"pool": "map", "heads": 7, "head_dim": 64}, r"divisible by the number of pooling heads, got dim=768 and 7 heads"),
    (
        {"stem": (3, 4, 6, 3)},
        r"patch_size must be a multiple of 32, which is the stride of stem=\(.*\), got 16\.",
    ),
    ({"stem": (), "patch_size": 2}, r"patch_size must be a multiple of 4, which is the stride .* got 2\."),
    (
        {"stem": (), "input_norm": "patches"},
        r"input_norm='patches' normalises pixels and cannot be combined with stem=\(\)",
    ),
]


@pytest.mark.parametrize(("fields", "text"), WRONG, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_wrong_configs(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ViTConfig(**fields)
    with pytest.raises(ConfigError, match=text):
        ViTConfig().replace(**fields)


def test_unknown_fields() -> None:
    with pytest.raises(TypeError, match="deph"):
        ViTConfig(deph=3)


def test_the_nearest_sizes_that_fit() -> None:
    assert fitting((230, 224), 16) == "The nearest sizes that fit: height 224 or 240."
    assert fitting((30, 5), 8) == "The nearest sizes that fit: height 24 or 32, width 8."


CONFIGS = st.fixed_dictionaries(
    {
        "image_size": st.sampled_from([8, 16, (8, 24), 12]),
        "patch_size": st.sampled_from([4, 8]),
        "dim": st.sampled_from([8, 12, 18]),
        "depth": st.integers(1, 2),
        "heads": st.integers(1, 3),
        "mlp_dim": st.just(10),
        "num_classes": st.integers(0, 3),
        "pool": st.sampled_from(get_args(Pool)),
        "channels": st.integers(1, 3),
        "class_token": st.booleans(),
        "registers": st.integers(0, 2),
        "positions": st.sampled_from(get_args(Positions)),
        "cls_position": st.booleans(),
        "resample": st.sampled_from(get_args(Resample)),
        "head_dim": st.sampled_from([None, 5, 8]),
        "qkv_bias": st.booleans(),
        "mlp": st.sampled_from(get_args(Mlp)),
        "input_norm": st.sampled_from(get_args(InputNorm)),
        "inner_norm": st.sampled_from(get_args(InnerNorm)),
        "final_norm": st.sampled_from(get_args(FinalNorm)),
        "rope": st.sampled_from(
            [None, DINOV3_ROPE, Rotation(order="xy", offset=1, reference=2), Rotation(learned=True)]
        ),
        "norm": st.sampled_from(get_args(Norm)),
        "layer_scale": st.sampled_from([None, 0.1]),
        "pre_logits": st.sampled_from([0, 7]),
        "dropout": st.sampled_from([0.0, 0.1]),
        "drop_path": st.sampled_from([0.0, 0.1]),
        "checkpointing": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(CONFIGS)
def test_every_config_that_is_accepted_runs_and_learns(fields: dict[str, Any]) -> None:
    try:
        config = ViTConfig(**fields)
    except ConfigError:
        return
    model = ViT(config)
    for size in (config.size, (16, 24)):
        images = torch.randn(2, config.channels, *size)
        logits = model(images)
        assert logits.shape == (2, config.num_classes or config.embed_dim)
        logits.sum().backward()
        with torch.no_grad():
            maps = model.attention_maps(images, layers=(0,))
            features = model.features(images, layers=(0,))
        tokens = config.prefix_tokens + features.patches.shape[1]
        assert maps.shape == (1, 2, config.heads, tokens, tokens)
        assert features.layers[0].shape == (2, tokens, config.dim)
        assert features.patches.shape[1] == features.grid[0] * features.grid[1]
