"""Files as other libraries write them, for the lines of docs/coming_from.md: each library's own model, made small."""

from collections.abc import Callable
from pathlib import Path

import torch
from parity.references import spread
from peers import timm, torchvision, transformers, vit_pytorch
from safetensors.torch import save_file
from torch import Tensor

Answer = Callable[[Tensor], Tensor]


def write_files(folder: Path) -> dict[str, Answer]:
    """Writes a file of each library, and returns what its model answers, by what the page calls ours."""
    return {
        "from_timm": _timm(folder),
        "from_transformers": _transformers(folder),
        "from_torchvision": _torchvision(folder),
        "from_vit_pytorch": _vit_pytorch(folder),
    }


def _timm(folder: Path) -> Answer:
    model = spread(timm.create_model("vit_tiny_patch16_224", num_classes=3)).eval()
    save_file(model.state_dict(), folder / "fine_tuned.safetensors")
    return model


def _transformers(folder: Path) -> Answer:
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, num_labels=3
    )
    model = spread(transformers.ViTForImageClassification(config)).eval()
    model.save_pretrained(folder / "my-vit")
    transformers.ViTImageProcessor().save_pretrained(folder / "my-vit")
    return lambda images: model(images).logits


def _torchvision(folder: Path) -> Answer:
    model = spread(torchvision.models.vit_b_16()).eval()
    torch.save(model.state_dict(), folder / "vit_b_16-c867db91.pth")
    return model


def _vit_pytorch(folder: Path) -> Answer:
    model = vit_pytorch.ViT(image_size=256, patch_size=32, num_classes=1000, dim=128, depth=2, heads=16, mlp_dim=256)
    torch.save(spread(model).state_dict(), folder / "theirs.pth")
    return model.eval()
