"""What is counted from a config is what the network has and does."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitlite import ViT, ViTConfig
from vitlite.config import DINOV3_ROPE
from vitlite.nn.costs import gmacs, layers, params
from vitlite.presets import PRESETS

TINY = ViTConfig(image_size=(64, 32), patch_size=32, dim=48, depth=3, heads=4, mlp_dim=80, num_classes=5)
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "CLIP's": {"input_norm": "tokens", "head_dim": 20},
    "vit-pytorch's": {"input_norm": "patches", "qkv_bias": False, "pool": "mean"},
    "inner norms": {"inner_norm": "both", "layer_scale": 0.1, "final_norm": "pooled", "pre_logits": 24},
    "two tokens": {"pool": "cls_and_mean", "registers": 2, "cls_position": False},
    "distilled": {"pool": "cls_and_distillation", "registers": 1, "cls_position": False, "final_norm": "pooled"},
    "attention pooling": {"pool": "map", "class_token": False, "inner_norm": "both"},
    "attention pooling beside registers": {"pool": "map", "registers": 3, "cls_position": False},
    "rotation": {
        "positions": "none",
        "rope": DINOV3_ROPE,
        "registers": 4,
        "cls_position": False,
        "layer_scale": 1e-5,
        "head_dim": 8,
    },
    "gated": {"mlp": "swiglu", "inner_norm": "both"},
    "attention pooling of gated blocks": {"mlp": "swiglu", "pool": "map"},
    "no final norm": {"final_norm": "none", "num_classes": 0},
    "hybrid, root alone": {"stem": (), "channels": 1},
    "hybrid": {"stem": (2, 3)},
    "hybrid of four stages": {"stem": (1, 2, 1, 2), "num_classes": 0},
}
MODELS = {name: TINY.replace(**options) for name, options in CONFIGS.items()} | PRESETS


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_parameters_are_those_of_the_model(config: ViTConfig) -> None:
    with torch.device("meta"):
        model = ViT(config)
    assert params(config) == sum(tensor.numel() for tensor in model.parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    for layer in layers(config):
        name = layer.name.replace("blocks.*", "blocks.0")
        if layer.weight:
            assert layer.weight == shapes.get(f"{name}.weight", shapes.get(name)), layer


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_products_are_those_that_torch_counts(config: ViTConfig) -> None:
    with torch.device("meta"):
        model = ViT(config).eval()
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.empty(1, config.channels, *config.size, device="meta"))
    assert round(gmacs(config) * 1e9) == counted.get_total_flops() / 2
