"""Weights files made of a tiny model, for tests of what reads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from vitlite import ViT, ViTConfig
from vitlite.checkpoints.metadata import CONFIG_ARGUMENT, ID, Metadata, read_metadata
from vitlite.checkpoints.reader import metadata_folder, open_weights
from vitlite.checkpoints.resolve import map_and_resolve

TINY = ViTConfig(image_size=16, patch_size=8, dim=16, depth=2, heads=2, mlp_dim=24, num_classes=3)
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


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


def completed(path: Path, **fields: Any) -> ViTConfig:
    """Return the complete config of a file: these fields, and what its tensors, its metadata and its format state."""
    folder = metadata_folder(path)
    with open_weights(path) as file:
        own = Metadata() if folder is None else read_metadata(folder, weights_id=file.header.get(ID))
        return map_and_resolve(file, own, Metadata(source=CONFIG_ARGUMENT, fields=fields))[1].config
