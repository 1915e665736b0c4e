"""The layers of a ViT, rebuilt for fast inference. Constant factors are multiplied into the weights.

Shapes: b images, c channels, h and w patches down and across, p and q pixels of a patch, n tokens, d width of a token.
"""

import copy
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitlite.fast.attention import ClassTokenAttention, attend_fused, attend_in_cache
from vitlite.kernels import LONG, Layer, Linear, PlainLinear, fastest_linear, kernel_choice
from vitlite.nn.layers import MLP, Attention, AttentionPool, Block, PatchEmbed, SwiGLU
from vitlite.nn.stem import StandardConv

QUICK = 1.702  # quick GELU is x sigmoid(1.702 x), which is swish(1.702 x) / 1.702


class Kernels(NamedTuple):
    """The implementations of linear layers and attention that an optimized model uses."""

    linear: Linear
    attend: Callable[[Tensor, float], Tensor]  # (3, b, heads, n, head_dim) and the unit -> (b, n, heads, head_dim)
    unit: float  # of scores: 1, or ln 2 if attention uses powers of two instead of powers of e


def fastest_kernels(device: torch.device, dtype: torch.dtype, tokens: int) -> Kernels:
    """Return the fastest implementations of linear layers and attention for a device, a dtype and a number of tokens.

    On devices other than the CPU, these are torch's own.
    """
    if device.type != "cpu":
        return Kernels(PlainLinear, attend_fused, 1.0)
    powers = tokens >= LONG and dtype in kernel_choice().powers
    return Kernels(fastest_linear(dtype), attend_in_cache, math.log(2) if powers else 1.0)


class Layers(Protocol):
    """A protocol for builders of the linear layers of a block, which are named "qkv", "proj", "fc1" and "fc2"."""

    dtype: torch.dtype  # of the layers' results, except results added to the residual stream

    def linear(self, name: str, weight: Tensor, bias: Tensor | None, then: str = "") -> Layer:
        """Return a linear layer.

        Args:
            name: The name of the layer, such as "fc1".
            weight: The weight.
            bias: The bias, if there is one.
            then: The name of the next linear layer if only an activation lies in between, otherwise "".
        """

    def norm(self, name: str, norm: nn.Module, factor: float = 1.0) -> Callable[[Tensor], Tensor]:
        """Return a function that computes the norm before a linear layer.

        Args:
            name: The name of the linear layer, such as "fc1".
            norm: A LayerNorm or an RMSNorm, or an identity if there is no norm.
            factor: The factor by which the inputs of the norm are too large, because the layer before scales them.
        """

    def divisor(self, name: str) -> Tensor | float:
        """Return the number by which the inputs of a linear layer must be divided.

        The caller uses it if there is no norm directly before the layer. Otherwise, the norm divides.
        """


class FloatLayers:
    """A builder of the linear layers of a block that compute in one floating-point dtype."""

    def __init__(self, dtype: torch.dtype, linear: Linear) -> None:
        self.dtype, self.kind = dtype, linear

    def linear(self, name: str, weight: Tensor, bias: Tensor | None, then: str = "") -> Layer:
        """Return a linear layer in the dtype of this builder."""
        return self.kind(weight, bias, self.dtype)

    def norm(self, name: str, norm: nn.Module, factor: float = 1.0) -> Callable[[Tensor], Tensor]:
        """Return a function that computes the norm before a linear layer in the dtype of this builder."""
        return plain_norm(norm, self.dtype, factor)

    def divisor(self, name: str) -> float:
        """Return 1, because the inputs of a floating-point layer need not be divided by anything."""
        return 1.0


class FastPatches(nn.Module):
    """Split images into patches and project each to a token: (b, c, h, w) -> (b, n, d).

    Positions are added to the tokens, and prefix tokens, such as the class token, are put before them.
    """

    def __init__(self, embed: PatchEmbed, prefix_tokens: int, dtype: torch.dtype, linear: Linear) -> None:
        super().__init__()
        kernel, bias = embed.proj.weight.detach(), embed.proj.bias
        self.patch_size, self.prefix_tokens, self.dtype = embed.patch_size, prefix_tokens, dtype
        self.backbone = _with_plain_convolutions(copy.deepcopy(embed.backbone)).to(dtype)
        self.norm_in, self.norm = (plain_norm(norm, dtype) for norm in (embed.norm_in, embed.norm))
        self.normed = _is_norm(embed.norm)
        self.proj = linear(kernel.flatten(1), bias if self.normed else None, dtype)
        if self.normed:  # otherwise, the bias is added with the positions
            bias = None
        self.bias = kernel.new_zeros(len(kernel)) if bias is None else bias.detach()

    def forward(self, images: Tensor, added: Tensor) -> Tensor:
        """Return the tokens of a batch of images: (b, n, d).

        Args:
            images: The images (b, c, h, w).
            added: The prefix tokens, followed by the sum of position and bias for each patch (1, n, d).
        """
        images = self.backbone(images.to(self.dtype))
        b, c, p, n = len(images), images.shape[1], self.patch_size, added.shape[1]
        x = images.new_empty((b, n, c * p * p), dtype=self.dtype)
        x[:, : self.prefix_tokens] = 0  # zeros are projected to zeros, to which `added` adds the prefix tokens
        patches = rearrange(images, "b c (h p) (w q) -> b h w c p q", p=p, q=p)
        x[:, self.prefix_tokens :].view(patches.shape).copy_(patches)
        if not self.normed:
            return self.proj.added(x, added.expand(b, -1, -1).contiguous())
        x = self.norm(self.proj(self.norm_in(x)))  # (b, n, d)
        x[:, : self.prefix_tokens] = 0
        return x + added


class FastAttention(nn.Module):
    """`Attention` for inference, without the output projection: (b, n, d) -> (b, n, heads head_dim).

    The scale of the queries is multiplied into the weights.
    """

    def __init__(self, attn: Attention, layers: Layers, kernels: Kernels, class_token_only: bool) -> None:
        super().__init__()
        width = attn.proj.in_features
        self.heads, self.head_dim, self.rotary = attn.heads, width // attn.heads, attn.rotary
        self.attend, self.unit = kernels.attend, kernels.unit
        scale = torch.ones(3, width, dtype=_at_least_float32(attn.qkv.weight.dtype), device=attn.qkv.weight.device)
        scale[0] = self.head_dim**-0.5 / kernels.unit
        if not _is_norm(attn.norm):
            scale[2].div_(layers.divisor("proj"))
        weight, bias = scaled(attn.qkv, outputs=scale.flatten())
        if self.rotary and not attn.adjacent:
            weight = _pairs_side_by_side(weight, attn.heads)
            bias = None if bias is None else _pairs_side_by_side(bias, attn.heads)
        self.qkv = layers.linear("qkv", weight, bias)
        self.norm = layers.norm("proj", attn.norm)
        self.class_attend = None
        if class_token_only and not attn.rotary:  # rotary positions need the keys
            self.class_attend = ClassTokenAttention(weight, bias, attn.heads, layers.dtype, kernels.unit)

    def forward(self, x: Tensor, *rotation: Tensor) -> Tensor:
        return self.norm(self.attend(self.split(x, *rotation), self.unit).flatten(2))

    def split(self, x: Tensor, *rotation: Tensor) -> Tensor:
        """Return queries, keys and values, with scaled queries: (b, n, d) -> (3, b, heads, n, head_dim)."""
        qkv = self.qkv(x).view(*x.shape[:2], 3, self.heads, self.head_dim)  # (b, n, 3, heads, head_dim)
        if self.rotary:
            _rotate_in_place(qkv[:, :, :2], *rotation)
        return qkv.permute(2, 0, 3, 1, 4)

    def map(self, x: Tensor, *rotation: Tensor) -> Tensor:
        """Return the attention maps of all heads: (b, n, d) -> (b, heads, n, n)."""
        q, k, _ = self.split(x, *rotation)
        return (q @ k.mT).mul_(self.unit).softmax(-1)


class FastMLP(nn.Module):
    """`MLP` for inference, without the second linear layer: (b, n, d) -> (b, n, mlp_dim)."""

    def __init__(self, mlp: MLP, layers: Layers) -> None:
        super().__init__()
        self.activation, before, after = activation(mlp)
        has_norm = _is_norm(mlp.norm)
        self.fc1 = layers.linear("fc1", *scaled(mlp.fc1, outputs=before), then="" if has_norm else "fc2")
        self.norm = layers.norm("fc2", mlp.norm, factor=before)
        self.factor = 1.0 if has_norm else after  # folded into the last layer

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc1.activated(x, self.activation))


class FastSwiGLU(nn.Module):
    """`SwiGLU` for inference, without the second linear layer: (b, n, d) -> (b, n, mlp_dim).

    Gate and value are computed by separate layers.
    """

    factor = 1.0

    def __init__(self, mlp: SwiGLU, layers: Layers) -> None:
        super().__init__()
        divisor = 1.0 if _is_norm(mlp.norm) else layers.divisor("fc2")
        scale = torch.ones(2, mlp.fc2.in_features, device=mlp.fc1.weight.device)
        scale[1].div_(divisor)
        weight, bias = scaled(mlp.fc1, outputs=scale.flatten())
        gate_bias, value_bias = (None, None) if bias is None else bias.chunk(2)
        gate, value = weight.chunk(2)
        self.gate = layers.linear("fc1", gate, gate_bias)
        self.value = layers.linear("fc1", value, value_bias)
        self.norm = layers.norm("fc2", mlp.norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.gate.activated(x, "swish").mul_(self.value(x)))


class FastBlock(nn.Module):
    """A `Block` for inference, with layer scale multiplied into the weights: (b, n, d) -> (b, n, d)."""

    def __init__(self, block: Block, layers: Layers, kernels: Kernels, class_token_only: bool) -> None:
        super().__init__()
        mlp = block.mlp
        self.norm1 = layers.norm("qkv", block.norm1)
        self.class_norm = self.norm1
        if class_token_only:
            self.class_norm = layers.norm("", block.norm1)  # returns floats, also for int8
        self.attn = FastAttention(block.attn, layers, kernels, class_token_only)
        self.proj = layers.linear("proj", *scaled(block.attn.proj, outputs=layer_scale(block.ls1)))
        self.norm2 = layers.norm("fc1", block.norm2)
        self.mlp = FastSwiGLU(mlp, layers) if isinstance(mlp, SwiGLU) else FastMLP(mlp, layers)
        fc2 = scaled(mlp.fc2, inputs=self.mlp.factor, outputs=layer_scale(block.ls2))
        self.fc2 = layers.linear("fc2", *fc2)

    def forward(self, x: Tensor, *rotation: Tensor) -> Tensor:
        return self._after_attention(self.attn(self.norm1(x), *rotation), x)

    def pooled_tokens(self, x: Tensor, *rotation: Tensor) -> Tensor:
        """Compute the block only for the tokens that are pooled: the class token if possible, otherwise all tokens."""
        if self.attn.class_attend is None:
            return self(x, *rotation)
        attended = self.attn.norm(self.attn.class_attend(self.class_norm(x)))
        return self._after_attention(attended, x[:, :1])

    def _after_attention(self, attended: Tensor, x: Tensor) -> Tensor:
        x = self.proj.added(attended, x)
        return self.fc2.added(self.mlp(self.norm2(x)), x, overwrite=True)

    def map(self, x: Tensor, *rotation: Tensor) -> Tensor:
        """Return the attention maps of this block: (b, n, d) -> (b, heads, n, n)."""
        return self.attn.map(self.norm1(x), *rotation)


class FastAttentionPool(nn.Module):
    """`AttentionPool` for inference, without computing keys and values: (b, n, d) -> (b, d).

    The query is the same for all images, so it is multiplied by the weights of the keys in advance. Only the weighted
    mean of the tokens is multiplied by the weights of the values. The bias of the keys is omitted, because it shifts
    all scores equally.
    """

    def __init__(self, pool: AttentionPool, dtype: torch.dtype, linear: Linear) -> None:
        super().__init__()
        heads, mlp = pool.heads, pool.mlp
        keys, values = (rearrange(w, "(h d) c -> h d c", h=heads) for w in pool.kv.weight.detach().chunk(2))
        query = rearrange(pool.q(pool.latent), "1 1 (h d) -> h 1 d", h=heads)
        scale = query.shape[-1] ** -0.5
        self.score_weight = (query @ keys).squeeze(1).mul(scale).to(dtype)  # (h, c)
        self.values = values.mT.contiguous().to(dtype)  # (h, c, d)
        self.value_bias = pool.kv.bias.detach().chunk(2)[1].to(dtype)
        layers = FloatLayers(dtype, linear)
        self.proj = layers.linear("proj", *scaled(pool.proj))
        self.norm = layers.norm("fc1", pool.norm)
        self.mlp = FastMLP(mlp, layers)
        self.fc2 = layers.linear("fc2", *scaled(mlp.fc2, inputs=self.mlp.factor))

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ self.score_weight.T).softmax(1)  # (b, n, h)
        means = rearrange(weights.mT @ x, "b h c -> h b c")
        read = rearrange(torch.bmm(means, self.values), "h b d -> b 1 (h d)") + self.value_bias
        y = self.proj(read)
        return self.fc2.added(self.mlp(self.norm(y)), y)[:, 0]


def _rotate_in_place(x: Tensor, rotation: Tensor) -> None:
    """Rotate queries and keys in place by the rotary positions of their tokens.

    Two adjacent channels are treated as a complex number, which is multiplied by the rotation.

    Args:
        x: Queries and keys (b, n, 2, heads, head_dim).
        rotation: The rotations as complex numbers, (n, 1, 1, head_dim / 2), or (n, 1, heads, head_dim / 2) if each head
            has its own.
    """
    pairs = x.view(*x.shape[:-1], -1, 2)
    wide = pairs.to(rotation.dtype.to_real())  # torch has no complex bfloat16
    torch.view_as_complex(wide).mul_(rotation)
    if wide is not pairs:
        pairs.copy_(wide)


def _pairs_side_by_side(rows: Tensor, heads: int) -> Tensor:
    """Reorder the channels of queries and keys so that channels that are rotated together are adjacent.

    The scores of attention do not change, because queries and keys are reordered in the same way.

    Args:
        rows: The weight or the bias of the layer that computes queries, keys and values.
        heads: The number of heads.
    """
    queries_and_keys, values = rows.tensor_split([len(rows) // 3 * 2])
    paired = rearrange(queries_and_keys, "(qk h part d) ... -> (qk h d part) ...", qk=2, h=heads, part=2)
    return torch.cat([paired, values])


def _with_plain_convolutions(backbone: nn.Module) -> nn.Module:
    """Replace the weight-standardised convolutions in a ResNet stem with plain convolutions, and return the stem.

    The weights of the plain convolutions are the standardised weights, so the results are the same.
    """
    for module in list(backbone.modules()):
        for name, conv in module.named_children():
            if isinstance(conv, StandardConv):
                kernel, stride, padding = conv.kernel_size[0], conv.stride[0], cast(int, conv.padding[0])
                shape = conv.in_channels, conv.out_channels, kernel, stride, padding
                plain = nn.Conv2d(*shape, bias=False, device="meta")
                plain.weight = nn.Parameter(conv.standardised().detach(), requires_grad=False)
                setattr(module, name, nn.Sequential(conv.border, plain))
    return backbone


def activation(mlp: MLP) -> tuple[str, float, float]:
    """Return oneDNN's name for the activation of an MLP, and two factors.

    The inputs of the activation must be multiplied by the first factor, and the outputs by the second.
    """
    if isinstance(mlp.act, nn.GELU):
        return mlp.act.approximate, 1.0, 1.0
    return "swish", QUICK, 1 / QUICK


def layer_scale(scale: nn.Module) -> Tensor | float:
    """Return the factor of each channel in a `LayerScale` module, or 1 if the module is an identity."""
    return getattr(scale, "gamma", 1.0)


def scaled(linear: nn.Linear, inputs: float = 1.0, outputs: Tensor | float = 1.0) -> tuple[Tensor, Tensor | None]:
    """Multiply factors into the weight and the bias of a linear layer, and return both.

    Args:
        linear: The layer.
        inputs: The factor by which all inputs of the layer are multiplied.
        outputs: The factor by which all outputs are multiplied, or one factor for each output.
    """
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if isinstance(outputs, float) and outputs == inputs == 1:
        return weight, bias
    wide = _at_least_float32(weight.dtype)  # so that a narrow dtype rounds only once
    rows = outputs[:, None] if isinstance(outputs, Tensor) else outputs
    return (weight.to(wide) * rows).mul_(inputs), None if bias is None else bias.to(wide) * outputs


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, (nn.LayerNorm, nn.RMSNorm))


def plain_norm(norm: nn.Module | None, dtype: torch.dtype, factor: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Return a function that computes a LayerNorm or an RMSNorm faster than calling the module.

    Args:
        norm: A LayerNorm or an RMSNorm. For anything else, the function returns its input unchanged.
        dtype: The dtype of the weights of the norm.
        factor: The factor by which the input is too large. The norm removes it, because epsilon is scaled accordingly.
    """
    if not isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
        return lambda x: x
    weight = None if norm.weight is None else norm.weight.detach().to(dtype)
    shape, eps = norm.normalized_shape, cast(float, norm.eps) * factor**2
    if isinstance(norm, nn.RMSNorm):
        return lambda x: F.rms_norm(x, shape, weight, eps)
    bias = None if norm.bias is None else norm.bias.detach().to(dtype)
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
