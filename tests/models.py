"""Small models with all that belongs to them, for tests of what is done with one."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlite import ViT, ViTConfig
from vitlite.config import DINOV3_ROPE, Rotation
from vitlite.images import Preprocess, TransformConfig
from vitlite.images.transform import naflex_like

TINY = ViTConfig(image_size=32, patch_size=8, dim=16, depth=2, heads=2, mlp_dim=24, num_classes=3)
TIMM_SIZES = {"embed_dim": 16, "depth": 2, "mlp_ratio": 1.5}  # in timm's words, and in transformers'
TRANSFORMERS_SIZES = {"hidden_size": 16, "num_hidden_layers": 2}
TRANSFORM = TransformConfig(
    size=(32, 32), resize=(36, 36), mode="center", interpolation="bicubic", mean=(0.5,) * 3, std=(0.4,) * 3
)
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
FAMILIES: dict[str, dict[str, Any]] = {
    "attention pooling": {"pool": "map", "class_token": False, "mlp": "gelu_tanh"},
    "rotation": {"positions": "none", "rope": DINOV3_ROPE, "registers": 4, "cls_position": False, "layer_scale": 0.5,
                 "norm_eps": 1e-5},
    "gated": {"mlp": "swiglu", "inner_norm": "both"},
    "EVA-02": {"rope": Rotation(reference=3), "mlp": "swiglu", "inner_norm": "mlp", "pool": "mean",
               "final_norm": "pooled"},
    "Perception Encoder": {"rope": Rotation(reference=4, offset=1, order="xy"), "input_norm": "tokens",
                           "pool": "map_all", "norm_eps": 1e-5},
    "learned rotation": {"positions": "none", "rope": Rotation(order="xy", learned=True), "layer_scale": 0.5},
    "Qwen3": {"rope": Rotation(pairs="halves"), "class_token": False, "pool": "mean", "final_norm": "pooled_plain",
              "mlp": "gelu_tanh", "resample": "jax"},
    "AIMv2": {"norm": "rms", "norm_eps": 1e-5, "input_norm": "projected", "mlp": "swiglu", "qkv_bias": False,
              "class_token": False, "pool": "mean"},
    "NaFlex": {"pool": "map", "class_token": False, "mlp": "gelu_tanh", "resample": "naflex"},
    "distilled": {"pool": "cls_and_distillation", "registers": 1, "cls_position": False},
    "no final norm": {"final_norm": "none", "layer_scale": 0.1},
    "labels from text": {"cosine_head": 12},
    "hybrid": {"stem": (1, 1)},
    "hybrid, root alone": {"stem": ()},
}  # options that only some checkpoints have  # fmt: skip
REGISTERS = {"registers": 2, "cls_position": False}
DINOV3 = {"positions": "none", "rope": DINOV3_ROPE, "layer_scale": 0.1, "norm_eps": 1e-5, "num_classes": 0, **REGISTERS}
CLIP = {"norm_eps": 1e-5, "input_norm": "tokens"}
DISTILLED = {"pool": "cls_and_distillation", "registers": 1, "cls_position": False}
FAMILIES_IN_TIMM: dict[str, dict[str, Any]] = {
    "plain": {}, "CLIP": CLIP, "CLIP, quick GELU": {**CLIP, "mlp": "quick_gelu", "num_classes": 0},
    "BEiT-3": {"norm_eps": 1e-5, "inner_norm": "both", "pool": "mean", "final_norm": "pooled"},
    "no final norm": {"final_norm": "none"}, "registers": REGISTERS,
    "gated": {"mlp": "swiglu"}, "gated, scaled": {"mlp": "swiglu", "layer_scale": 0.1, "pool": "mean"},
    "attention pooling": {"pool": "map", "class_token": False, "mlp": "gelu_tanh"},
    "distilled": DISTILLED, "distilled, no biases, scaled": {**DISTILLED, "qkv_bias": False, "layer_scale": 0.1},
    "DINOv3": DINOV3, "DINOv3, gated, with a head": {**DINOV3, "num_classes": 3, "mlp": "swiglu", "pool": "mean"},
    "DINOv3, no biases": {**DINOV3, "qkv_bias": False, "image_size": (32, 48)},
    "hybrid, root alone": {"stem": ()}, "hybrid": {"stem": (2, 2, 2, 2), "patch_size": 32, "image_size": 64},
    **{name: FAMILIES[name] for name in ("EVA-02", "Perception Encoder", "learned rotation", "Qwen3")},
    **{name: FAMILIES[name] for name in ("AIMv2", "NaFlex")},
}  # fmt: skip
ROTATIONS = (None, *(changes["rope"] for changes in FAMILIES.values() if "rope" in changes))


def tiny_model(**changes: Any) -> ViT:
    """A model of `TINY` with these changes, in which every number matters; with labels and preprocessing."""
    model = ViT(TINY.replace(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    model.labels = ("ant", "bee", "cow") if model.config.num_classes else None
    size = model.config.size
    transform = TRANSFORM if size == TRANSFORM.size else TRANSFORM.scaled(size)
    if model.config.resample == "naflex":
        transform = naflex_like(transform, size, model.config.patch_size)
    model.preprocess = Preprocess(transform, model)
    return model


def tiny_model_of_timm(**changes: Any) -> ViT:
    """A tiny model whose weights timm can hold: with rotary positions, it has no bias for keys."""
    model = tiny_model(**changes)
    if model.config.rope is not None and model.config.qkv_bias:
        for block in model.blocks:
            block.attn.qkv.bias.data.view(3, -1)[1] = 0
    return model


def near(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max())


def small_model(folder: Path, labels: tuple[str, ...]) -> Path:
    """Saves a model that tells pictures apart only by chance, but has labels and preprocessing."""
    torch.manual_seed(0)
    config = ViTConfig(image_size=16, patch_size=8, dim=32, depth=2, heads=2, mlp_dim=64, num_classes=len(labels))
    model = ViT(config).eval()
    torch.nn.init.normal_(model.head.weight)
    model.labels = labels
    half = (0.5, 0.5, 0.5)
    recipe = TransformConfig(
        size=(16, 16), resize=(16, 16), mode="squash", interpolation="bilinear", mean=half, std=half
    )
    model.preprocess = Preprocess(recipe, model)
    model.save(folder)
    return folder
