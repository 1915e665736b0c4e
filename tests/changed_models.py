"""Models that are not what their config says: loading would refuse them, or give back others."""

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


class HalvedCall(ViT):
    def __call__(self, *images: Any, **options: Any) -> Any:
        return super().__call__(*images, **options) / 2


QKV, ACT = "blocks.1.attn.qkv", "blocks.0.mlp.act"
CHANGED: dict[str, tuple[Callable[[Any], Any], str]] = {  # models that loading would refuse, or give back as others
    "another head": (
        lambda m: put(m, "head", nn.Linear(16, 5)),
        r"head is Linear\(.*out_features=5.*, and not Linear",
    ),
    "a head without bias": (lambda m: put(m, "head", nn.Linear(16, 3, bias=False)), r"head is Linear\(.*bias=False"),
    "two layers": (lambda m: put(m, "head", nn.Sequential(nn.Dropout(), nn.Linear(16, 3))), r"head is Sequential\("),
    "no head": (lambda m: put(m, "head", nn.Identity()), r"head is Identity\(\), and not Linear\("),
    "LoRA": (lambda m: put(m, QKV, LoRA(m.get_submodule(QKV))), r"blocks.1.attn.qkv is LoRA\(\), and not Linear"),
    "another activation": (lambda m: put(m, ACT, nn.ReLU()), r"blocks.0.mlp.act is ReLU\(\), and not GELU"),
    "another GELU": (lambda m: put(m, ACT, nn.GELU("tanh")), r"act is GELU\(approximate='tanh'\), and not GELU"),
    "another eps": (lambda m: setattr(m.norm, "eps", 1e-3), r"norm is LayerNorm\(\(16,\), eps=0.001"),
    "no norm": (lambda m: put(m, "norm", nn.Identity()), r"norm is Identity\(\), and not LayerNorm"),
    "a block less": (
        lambda m: put(m, "blocks", nn.ModuleList(list(m.blocks)[:1])),
        r"blocks.1 is missing, and not Block",
    ),
    "a layer more": (lambda m: m.blocks.append(nn.Tanh()), r"blocks\.2 is Tanh\(\), and not to be there"),
    "a layer twice": (
        lambda m: m.blocks.append(m.get_submodule(ACT)),
        r"blocks\.2 is GELU\(approximate='none'\), and not to be there",
    ),
    "a part where there is none": (
        lambda m: put(m, "patch_embed.norm_in", nn.Tanh()),
        r"patch_embed\.norm_in is Tanh\(\), and not to be there",
    ),
    "another order": (
        lambda m: m.blocks._modules.update({"0": m.blocks._modules.pop("0")}),
        "blocks is made of 1, 0, and not of 0, 1",
    ),
    "a tensor more": (lambda m: m.register_parameter("gate", nn.Parameter(torch.ones(3))), r"\+ gate \(3,\)"),
    "a table of another size": (
        lambda m: setattr(m, "pos_embed", nn.Parameter(torch.ones(1, 26, 16))),
        r"pos_embed is \(1, 26, 16\), and not \(1, 17, 16\)",
    ),
    "a table without a row for the class token": (
        lambda m: setattr(m, "pos_embed", nn.Parameter(torch.ones(1, 16, 16))),
        r"pos_embed is \(1, 16, 16\), and not \(1, 17, 16\)",
    ),
    "too few labels": (lambda m: setattr(m, "labels", ("ant", "bee")), "has 2 labels and 3 classes"),
    "a label of no letters": (
        lambda m: setattr(m, "labels", ("a", "b", "\ud800")),
        r"labels\[2\] must be a text of at most 1000",
    ),
    "no numbers": (lambda m: m.norm.bias.data.fill_(float("nan")), r"norm\.bias has values that are not finite"),
    "eight bits": (lambda m: m.norm.to(torch.float8_e4m3fn), r"norm\.\w+ is of type .*float8_e4m3fn"),
    "a class of its own": (lambda m: setattr(m, "__class__", Halved), "is a Halved with its own forward"),
    "a call of its own": (lambda m: setattr(m, "__class__", HalvedCall), "is a HalvedCall with its own __call__"),
    "a forward of its own": (lambda m: setattr(m, "forward", m.embed), "forward is set on this model"),
    "a layer's own forward": (
        lambda m: setattr(m.blocks[0].attn, "forward", m.blocks[0].attn.proj.forward),
        r"blocks\.0\.attn\.forward is set on it",
    ),
    "a block's own way": (
        lambda m: setattr(m.blocks[0], "residuals", lambda x: x),
        r"blocks\.0\.residuals is set on it",
    ),
    "quantised weights": (
        lambda m: quantise(m.get_submodule(QKV)),
        r"blocks\.1\.attn\.qkv\.weight is a Quantised, and no plain tensor",
    ),
    "other heads": (lambda m: setattr(m.blocks[1].attn, "heads", 4), r"blocks\.1\.attn\.heads is 4, and not 2"),
}
