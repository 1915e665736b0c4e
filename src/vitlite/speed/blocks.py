"""The parts of a ViT rebuilt for inference: scales folded into weights, weights packed, norms as plain calls.

Shapes: b images, c channels, h and w patches down and across, p and q pixels of a patch, n tokens, d their width.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from einops import rearrange
from torch import Tensor, nn

from vitlite.model import MLP, Attention, Block, PatchEmbed
from vitlite.speed.attention import ClassTokenAttention, attend_fused, attend_in_cache
from vitlite.speed.onednn import Linear, PackedLinear, PlainLinear, packing_pays, powers_pay

POWERS = 128  # tokens from which powers and their sum are quicker than softmax
QUICK = 1.702  # quick GELU is x sigmoid(1.702 x), which is swish(1.702 x) / 1.702


class Kernels(NamedTuple):
    """What computes the two parts of a block that take the time."""

    linear: Linear
    attend: Callable[[Tensor, float], Tensor]  # (3, b, heads, n, head_dim) and the unit -> (b, n, heads, head_dim)
    unit: float  # of scores: 1, or ln 2, where attention takes powers of two in place of those of e


def fastest_kernels(device: torch.device, dtype: torch.dtype, tokens: int) -> Kernels:
    """What is fastest: measured on a CPU; elsewhere torch's own, which is not measured here."""
    if device.type != "cpu":
        return Kernels(PlainLinear, attend_fused, 1.0)
    linear = PackedLinear if packing_pays(dtype) else PlainLinear
    by_powers = tokens >= POWERS and powers_pay(dtype)
    return Kernels(linear, attend_in_cache, math.log(2) if by_powers else 1.0)


class FastPatches(nn.Module):
    """Cuts images into patches and projects each, with everything that is added to them: (b, c, h, w) -> (b, n, d)."""

    def __init__(self, embed: PatchEmbed, prefix_tokens: int, dtype: torch.dtype, linear: Linear) -> None:
        super().__init__()
        kernel, bias = embed.proj.weight, embed.proj.bias
        self.patch_size, self.prefix_tokens, self.dtype = embed.patch_size, prefix_tokens, dtype
        self.norm = embed.norm.to(dtype)
        if embed.norm_in is None:  # then the bias is added with the positions
            self.norm_in = None
            self.proj = linear(kernel.flatten(1), None, dtype)
        else:  # then it comes before a norm
            self.norm_in = embed.norm_in.to(dtype)
            self.proj = linear(kernel.flatten(1), bias, dtype)
            bias = None
        self.bias = kernel.new_zeros(len(kernel)) if bias is None else bias.detach()

    def forward(self, images: Tensor, added: Tensor) -> Tensor:
        """`added` is (1, n, d): the prefix tokens, then positions and bias."""
        b, c, p, n = len(images), images.shape[1], self.patch_size, added.shape[1]
        x = images.new_empty((b, n, c * p * p), dtype=self.dtype)
        x[:, : self.prefix_tokens] = 0  # projects to nothing: the prefix is in what is added
        patches = rearrange(images, "b c (h p) (w q) -> b h w c p q", p=p, q=p)
        x[:, self.prefix_tokens :].view(patches.shape).copy_(patches)
        if self.norm_in is None:
            return self.proj.added(x, added.expand(b, -1, -1).contiguous())
        x = self.norm(self.proj(self.norm_in(x)))  # (b, n, d)
        x[:, : self.prefix_tokens] = 0
        return x + added


class FastBlock(nn.Module):
    """A `Block` for inference, its scales folded into the weights: (b, n, d) -> (b, n, d)."""

    def __init__(self, block: Block, dtype: torch.dtype, kernels: Kernels, class_token_only: bool) -> None:
        super().__init__()
        attn, mlp, linear = block.attn, cast(MLP, block.mlp), kernels.linear  # `optimize` refuses other kinds
        self.heads, self.attend, self.unit = attn.heads, kernels.attend, kernels.unit

        qkv = _with_scaled_queries(attn, kernels.unit)
        self.norm1, self.attn_norm = _plain_norm(block.norm1, dtype), _plain_norm(attn.norm, dtype)
        self.qkv = linear(*qkv, dtype)
        self.proj = linear(*_folded(attn.proj, outputs=_layer_scale(block.ls1)), dtype)
        self.class_attend = None
        if class_token_only:
            self.class_attend = ClassTokenAttention(*qkv, attn.heads, dtype, kernels.unit)

        self.activation, before, after = _activation(mlp)
        if isinstance(mlp.norm, nn.LayerNorm):  # which undoes the factor, but for its eps
            mlp.norm.eps *= before**2
            after = 1.0
        self.norm2, self.mlp_norm = _plain_norm(block.norm2, dtype), _plain_norm(mlp.norm, dtype)
        self.fc1 = linear(*_folded(mlp.fc1, outputs=before), dtype)
        self.fc2 = linear(*_folded(mlp.fc2, inputs=after, outputs=_layer_scale(block.ls2)), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Every token."""
        attended = self.attend(self.split(x), self.unit).flatten(2)  # (b, n, heads head_dim)
        return self.after_attention(attended, x)

    def as_last(self, x: Tensor) -> Tensor:
        """What is read from the last block: every token, or the class token alone, (b, n, d) -> (b, n or 1, d)."""
        if self.class_attend is None:
            return self(x)
        return self.after_attention(self.class_attend(self.norm1(x)), x[:, :1])

    def map(self, x: Tensor) -> Tensor:
        """The attention map, (b, n, d) -> (b, heads, n, n)."""
        q, k, _ = self.split(x)
        return (q @ k.mT).mul_(self.unit).softmax(-1)

    def split(self, x: Tensor) -> Tensor:
        """Queries, already scaled, keys and values: (3, b, heads, n, head_dim)."""
        return self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)

    def after_attention(self, attended: Tensor, x: Tensor) -> Tensor:
        """Projection and MLP, each added to the stream."""
        x = self.proj.added(self.attn_norm(attended), x)
        hidden = self.fc1.activated(self.norm2(x), self.activation)  # (b, n, mlp_dim)
        return self.fc2.added(self.mlp_norm(hidden), x)


WeightAndBias = tuple[Tensor, Tensor | None]


def _with_scaled_queries(attn: Attention, unit: float) -> WeightAndBias:
    """Weight and bias of q, k and v, such that q k^T are scores in that unit."""
    width = attn.proj.in_features
    weight = attn.qkv.weight
    scale = weight.new_ones(3, width, dtype=torch.promote_types(weight.dtype, torch.float32))
    scale[0] = (width // attn.heads) ** -0.5 / unit
    return _folded(attn.qkv, outputs=scale.flatten())


def _activation(mlp: MLP) -> tuple[str, float, float]:
    """The activation that oneDNN has for an MLP's, and the factors to multiply with before it and after it."""
    if isinstance(mlp.act, nn.GELU):
        return mlp.act.approximate, 1.0, 1.0
    return "swish", QUICK, 1 / QUICK


def _layer_scale(scale: nn.Module) -> Tensor | float:
    """The numbers of a `LayerScale`, or 1 where there is none."""
    return getattr(scale, "gamma", 1.0)


def _folded(linear: nn.Linear, *, inputs: float = 1.0, outputs: Tensor | float = 1.0) -> WeightAndBias:
    """Weight and bias of a layer that multiplies what it takes by `inputs`, and what it gives by `outputs`."""
    weight, bias = linear.weight.detach(), linear.bias
    if isinstance(outputs, float) and outputs == inputs == 1:
        return weight, bias
    wide = torch.promote_types(weight.dtype, torch.float32)  # so that a narrow dtype rounds once
    rows = outputs[:, None] if isinstance(outputs, Tensor) else outputs
    folded_bias = None if bias is None else bias.detach().to(wide) * outputs
    return (weight.to(wide) * rows).mul_(inputs), folded_bias


def _plain_norm(norm: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A LayerNorm as a plain call, which skips what a module's call looks up."""
    if not isinstance(norm, nn.LayerNorm):
        return lambda x: x
    norm.to(dtype)
    shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
