"""Models that were modified so that their config does not describe them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitlite import ViT


class LoRA(nn.Module):
    """A layer that is not merged yet."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down, self.up = nn.Linear(inner.in_features, 2), nn.Linear(2, inner.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


class Halved(ViT):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) / 2


def put(model: ViT, name: str, layer: Any) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


class Quantised(Tensor):
    """A tensor whose numbers are not where its address says, as torchao's, and the sharded ones of FSDP."""


def quantise(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantised))


QKV, ACT = "blocks.1.attn.qkv", "blocks.0.mlp.act"
CHANGED: dict[str, tuple[Callable[[Any], Any], str]] = {  # modified models, and what errors say about them
    "another head": (
        lambda m: put(m, "head", nn.Linear(16, 5)),
        r"head is Linear\(.*out_features=5.*, expected Linear\(",
    ),
    "a head without bias": (lambda m: put(m, "head", nn.Linear(16, 3, bias=False)), r"head is Linear\(.*bias=False"),
    "two layers": (lambda m: put(m, "head", nn.Sequential(nn.Dropout(), nn.Linear(16, 3))), r"head is Sequential\("),
    "no head": (lambda m: put(m, "head", nn.Identity()), r"head is Identity\(\), expected Linear\("),
    "LoRA": (lambda m: put(m, QKV, LoRA(m.get_submodule(QKV))), r"blocks.1.attn.qkv is LoRA\(\), expected Linear\("),
    "another activation": (lambda m: put(m, ACT, nn.ReLU()), r"blocks.0.mlp.act is ReLU\(\), expected GELU\("),
    "another GELU": (lambda m: put(m, ACT, nn.GELU("tanh")), r"act is GELU\(approximate='tanh'\), expected GELU\("),
    "another eps": (lambda m: setattr(m.norm, "eps", 1e-3), r"norm is LayerNorm\(\(16,\), eps=0.001"),
    "no norm": (lambda m: put(m, "norm", nn.Identity()), r"norm is Identity\(\), expected LayerNorm\("),
    "a block less": (
        lambda m: put(m, "blocks", nn.ModuleList(list(m.blocks)[:1])),
        r"blocks.1 is missing, expected Block\(",
    ),
    "a layer more": (lambda m: m.blocks.append(nn.Tanh()), r"blocks\.2 is Tanh\(\), expected no such module"),
    "a tensor more": (
        lambda m: m.register_parameter("gate", nn.Parameter(torch.ones(3))),
        r"gate is \(3,\), expected no such tensor",
    ),
    "a table of another size": (
        lambda m: setattr(m, "pos_embed", nn.Parameter(torch.ones(1, 26, 16))),
        r"pos_embed is \(1, 26, 16\), expected \(1, 17, 16\)",
    ),
    "too few labels": (lambda m: setattr(m, "labels", ("ant", "bee")), "the number of classes, 3, got 2"),
    "NaN": (lambda m: m.norm.bias.data.fill_(float("nan")), r"norm\.bias contains NaN or infinity"),
    "eight bits": (lambda m: m.norm.to(torch.float8_e4m3fn), r"norm\.\w+ has the dtype .*float8_e4m3fn"),
    "a subclass": (lambda m: setattr(m, "__class__", Halved), "it is a Halved, not a ViT"),
    "quantised weights": (
        lambda m: quantise(m.get_submodule(QKV)),
        r"blocks\.1\.attn\.qkv\.weight is a Quantised, but only plain tensors",
    ),
}
