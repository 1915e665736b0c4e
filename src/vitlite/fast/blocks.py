"""The parts of a ViT rebuilt for inference: scales folded into weights, weights packed, norms as plain calls.

Shapes: b images, c channels, h and w patches down and across, p and q pixels of a patch, n tokens, d their width.
"""

import copy
import math
from collections.abc import Callable
from typing import NamedTuple, NoReturn, Protocol, cast

import torch
from einops import rearrange
from torch import Tensor, nn

from vitlite.errors import OptimizedError
from vitlite.fast.attention import ClassTokenAttention, attend_fused, attend_in_cache
from vitlite.fast.kernels import Layer, Linear, PackedLinear, PlainLinear, packing_pays, powers_pay
from vitlite.nn.layers import MLP, Attention, AttentionPool, Block, PatchEmbed, SwiGLU
from vitlite.nn.stem import StandardConv

POWERS = 128  # tokens from which powers and their sum are quicker than softmax
QUICK = 1.702  # quick GELU is x sigmoid(1.702 x), which is swish(1.702 x) / 1.702


class Kernels(NamedTuple):
    """What computes the two parts of a block that take the time."""

    linear: Linear
    attend: Callable[[Tensor, float], Tensor]  # (3, b, heads, n, head_dim) and the unit -> (b, n, heads, head_dim)
    unit: float  # of scores: 1, or ln 2, where attention takes powers of two in place of those of e


def fastest_kernels(device: torch.device, dtype: torch.dtype, tokens: int) -> Kernels:
    """What is fastest: measured once on a CPU; elsewhere torch's own, which is not measured here."""
    if device.type != "cpu":
        return Kernels(PlainLinear, attend_fused, 1.0)
    linear = PackedLinear if packing_pays(dtype) else PlainLinear
    by_powers = tokens >= POWERS and powers_pay(dtype)
    return Kernels(linear, attend_in_cache, math.log(2) if by_powers else 1.0)


class Arithmetic(Protocol):
    """How the products of a block are computed. They are "qkv", "proj", "fc1" and "fc2", in the order of their use."""

    dtype: torch.dtype  # of what they give, but for those that are added to the stream

    def linear(self, layer: str, weight: Tensor, bias: Tensor | None, then: str = "") -> Layer:
        """A layer. `then` is the one that takes what this one gives, where nothing but an activation is between."""

    def before(self, layer: str, norm: nn.Module, factor: float = 1.0) -> Callable[[Tensor], Tensor]:
        """What comes before a layer: the norm, which takes numbers that are `factor` times as large as its own."""

    def divisor(self, layer: str) -> Tensor | float:
        """By what the layers before divide the numbers that this one takes, where no norm is between."""


class Floats:
    """Every product in one dtype."""

    def __init__(self, dtype: torch.dtype, linear: Linear) -> None:
        self.dtype, self.kind = dtype, linear

    def linear(self, layer: str, weight: Tensor, bias: Tensor | None, then: str = "") -> Layer:
        """As `Arithmetic.linear`."""
        return self.kind(weight, bias, self.dtype)

    def before(self, layer: str, norm: nn.Module, factor: float = 1.0) -> Callable[[Tensor], Tensor]:
        """As `Arithmetic.before`: it takes the factor away again, but for its epsilon."""
        return plain_norm(norm, self.dtype, factor)

    def divisor(self, layer: str) -> Tensor | float:
        """None."""
        return 1.0


class Fused(nn.Module):
    """Gives other numbers than the part whose name it has, some of the work being done before it or after it."""

    def register_forward_hook(self, *_: object, **__: object) -> NoReturn:
        """Refused: what a hook would see is not what it was written for."""
        self._refuse_hooks()

    def register_forward_pre_hook(self, *_: object, **__: object) -> NoReturn:
        """Refused, as `register_forward_hook`."""
        self._refuse_hooks()

    def _refuse_hooks(self) -> NoReturn:
        raise OptimizedError(
            f"{type(self).__name__} takes no hooks: of an optimized model it gives other numbers than the part "
            "that it stands for.",
            python="Put the hook on a whole block (model.blocks[i]), call model.features or model.attention_maps, "
            "or use the model as it was created.",
            command="Leave --fast out.",
        )


class FastPatches(Fused):
    """Cuts images into patches and projects each, with everything that is added to them: (b, c, h, w) -> (b, n, d)."""

    def __init__(self, embed: PatchEmbed, prefix_tokens: int, dtype: torch.dtype, linear: Linear) -> None:
        super().__init__()
        kernel, bias = embed.proj.weight, embed.proj.bias
        self.patch_size, self.prefix_tokens, self.dtype = embed.patch_size, prefix_tokens, dtype
        self.backbone = _standardised_once(copy.deepcopy(embed.backbone)).to(dtype)
        if embed.norm_in is None:  # then the bias is added with the positions
            self.norm_in = None
            self.proj = linear(kernel.flatten(1), None, dtype)
        else:  # then it comes before a norm
            self.norm_in = copy.deepcopy(embed.norm_in).to(dtype)
            self.norm = copy.deepcopy(embed.norm).to(dtype)
            self.proj = linear(kernel.flatten(1), bias, dtype)
            bias = None
        self.bias = kernel.new_zeros(len(kernel)) if bias is None else bias.detach()

    def forward(self, images: Tensor, added: Tensor) -> Tensor:
        """`added` is (1, n, d): the prefix tokens, then positions and bias."""
        images = self.backbone(images.to(self.dtype))
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


class FastAttention(Fused):
    """`Attention` with its queries scaled beforehand: (b, n, d), normed, -> (b, n, heads head_dim)."""

    def __init__(self, attn: Attention, arithmetic: Arithmetic, kernels: Kernels, class_token_only: bool) -> None:
        super().__init__()
        self.heads, self.attend, self.unit = attn.heads, kernels.attend, kernels.unit
        divisor = 1.0 if _is_norm(attn.norm) else arithmetic.divisor("proj")
        weight_and_bias = _with_scaled_rows(attn, kernels.unit, divisor)
        self.rotates = attn.rotary
        if self.rotates:
            weight_and_bias = _with_pairs_together(*weight_and_bias, attn.heads)
        self.qkv = arithmetic.linear("qkv", *weight_and_bias)
        self.norm = arithmetic.before("proj", attn.norm)
        self.class_attend = None
        if class_token_only and not self.rotates:  # a key that is turned has to be computed
            self.class_attend = ClassTokenAttention(*weight_and_bias, attn.heads, arithmetic.dtype, kernels.unit)

    def forward(self, x: Tensor, *rotation: Tensor) -> Tensor:
        return self.norm(self.attend(self.split(x, *rotation), self.unit).flatten(2))

    def of_class_token(self, x: Tensor) -> Tensor:
        """What the class token alone reads, (b, n, d) -> (b, 1, heads head_dim), where `class_attend` is there."""
        assert self.class_attend is not None
        return self.norm(self.class_attend(x))

    def split(self, x: Tensor, *rotation: Tensor) -> Tensor:
        """Queries, already scaled, keys and values: (3, b, heads, n, head_dim)."""
        qkv = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1)  # (b, n, 3, heads, head_dim)
        if self.rotates:
            _rotate_in_place(qkv[:, :, :2], *rotation)
        return qkv.permute(2, 0, 3, 1, 4)

    def map(self, x: Tensor, *rotation: Tensor) -> Tensor:
        """Who looks at whom, (b, n, d) -> (b, heads, n, n)."""
        q, k, _ = self.split(x, *rotation)
        return (q @ k.mT).mul_(self.unit).softmax(-1)


class FastMLP(Fused):
    """`MLP` with what follows fused: (b, n, d), normed, -> (b, n, mlp_dim) of what its last layer takes."""

    def __init__(self, mlp: MLP, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.activation, before, after = activation(mlp)
        has_norm = _is_norm(mlp.norm)
        self.fc1 = arithmetic.linear("fc1", *_folded(mlp.fc1, outputs=before), then="" if has_norm else "fc2")
        self.norm = arithmetic.before("fc2", mlp.norm, factor=before)
        self.factor = 1.0 if has_norm else after  # which the last layer has to take: a norm takes it away again

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc1.activated(x, self.activation))


class FastSwiGLU(Fused):
    """`SwiGLU` with its gate and its value in layers of their own: (b, n, d), normed, -> (b, n, mlp_dim)."""

    factor = 1.0

    def __init__(self, mlp: SwiGLU, arithmetic: Arithmetic) -> None:
        super().__init__()
        divisor = 1.0 if _is_norm(mlp.norm) else arithmetic.divisor("fc2")
        gate, value = mlp.fc1.weight.detach().chunk(2)
        gate_bias, value_bias = mlp.fc1.bias.detach().chunk(2)
        self.gate = arithmetic.linear("fc1", gate, gate_bias)
        self.value = arithmetic.linear("fc1", *_multiplied(value, value_bias, outputs=1 / divisor))
        self.norm = arithmetic.before("fc2", mlp.norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.gate.activated(x, "swish").mul_(self.value(x)))


class FastBlock(nn.Module):
    """A `Block` for inference, its scales folded into the weights: (b, n, d) -> (b, n, d)."""

    def __init__(self, block: Block, arithmetic: Arithmetic, kernels: Kernels, class_token_only: bool) -> None:
        super().__init__()
        mlp = block.mlp
        self.norm1, self.norm2 = arithmetic.before("qkv", block.norm1), arithmetic.before("fc1", block.norm2)
        self.attn = FastAttention(block.attn, arithmetic, kernels, class_token_only)
        self.class_norm = self.norm1
        if class_token_only:  # what the class token reads is no product of bytes
            self.class_norm = arithmetic.before("", block.norm1)
        self.proj = arithmetic.linear("proj", *_folded(block.attn.proj, outputs=layer_scale(block.ls1)))
        self.mlp: FastMLP | FastSwiGLU
        if isinstance(mlp, SwiGLU):
            self.mlp = FastSwiGLU(mlp, arithmetic)
        else:
            self.mlp = FastMLP(mlp, arithmetic)
        fc2 = _folded(mlp.fc2, inputs=self.mlp.factor, outputs=layer_scale(block.ls2))
        self.fc2 = arithmetic.linear("fc2", *fc2)

    def forward(self, x: Tensor, *rotation: Tensor, last: bool = False) -> Tensor:
        """Every token; or of the last block what is read of it, which may be the class token alone: (b, n or 1, d)."""
        if last and self.attn.class_attend is not None:
            return self.after_attention(self.attn.of_class_token(self.class_norm(x)), x[:, :1])
        return self.after_attention(self.attn(self.norm1(x), *rotation), x)

    def after_attention(self, attended: Tensor, x: Tensor) -> Tensor:
        """Projection and MLP, each added to the stream."""
        x = self.proj.added(attended, x)
        return self.fc2.added(self.mlp(self.norm2(x)), x, spare=True)

    def map(self, x: Tensor, *rotation: Tensor) -> Tensor:
        """The attention map, (b, n, d) -> (b, heads, n, n)."""
        return self.attn.map(self.norm1(x), *rotation)


class FastAttentionPool(nn.Module):
    """`AttentionPool`, whose query is always the same, without a key or a value of any token: (b, n, d) -> (b, d).

    q (W x) = (q W) x, and the weighted mean of W x is W times that of x. A bias of the keys shifts all scores alike.
    """

    def __init__(self, pool: AttentionPool, dtype: torch.dtype, linear: Linear) -> None:
        super().__init__()
        heads, mlp = pool.heads, pool.mlp
        keys, values = (rearrange(w, "(h d) c -> h d c", h=heads) for w in pool.kv.weight.detach().chunk(2))
        query = rearrange(pool.q(pool.latent), "1 1 (h d) -> h 1 d", h=heads)
        scale = query.shape[-1] ** -0.5
        self.looks = (query @ keys).squeeze(1).mul(scale).to(dtype)  # (h, c): the score of a token, by head
        self.values = values.mT.contiguous().to(dtype)  # (h, c, d)
        self.value_bias = pool.kv.bias.detach().chunk(2)[1].to(dtype)
        floats = Floats(dtype, linear)
        self.norm = floats.before("fc1", pool.norm)
        self.proj = floats.linear("proj", *_folded(pool.proj))
        self.mlp = FastMLP(mlp, floats)
        self.fc2 = floats.linear("fc2", *_folded(mlp.fc2, inputs=self.mlp.factor))

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ self.looks.T).softmax(1)  # (b, n, h)
        means = rearrange(weights.mT @ x, "b h c -> h b c")
        seen = rearrange(torch.bmm(means, self.values), "h b d -> b 1 (h d)") + self.value_bias
        y = self.proj(seen)
        return self.fc2.added(self.mlp(self.norm(y)), y)[:, 0]


def _rotate_in_place(x: Tensor, turns: Tensor) -> None:
    """Turns queries and keys, (b, n, 2, heads, head_dim), by their token's `turns`, complex, (n, head_dim / 2).

    A pair of channels is a complex number here, its two parts side by side, and to turn it is one product.
    """
    pairs = x.view(*x.shape[:-1], -1, 2)
    wide = pairs.to(turns.dtype.to_real())  # there are no complex numbers of bfloat16
    torch.view_as_complex(wide).mul_(turns[:, None, None])
    if wide is not pairs:
        pairs.copy_(wide)


def _standardised_once(backbone: nn.Module) -> nn.Module:
    """A stem whose filters are standardised now, and not at each call."""
    for module in list(backbone.modules()):
        for name, child in module.named_children():
            if isinstance(child, StandardConv):
                setattr(module, name, _plain_convolution(child))
    return backbone


def _plain_convolution(conv: StandardConv) -> nn.Module:
    """The same, of filters that stay as they are."""
    kernel, stride, padding = conv.kernel_size[0], conv.stride[0], cast(int, conv.padding[0])
    plain = nn.Conv2d(conv.in_channels, conv.out_channels, kernel, stride, padding, bias=False, device="meta")
    plain.weight = nn.Parameter(conv.standardised().detach(), requires_grad=False)
    return nn.Sequential(conv.border, plain)


WeightAndBias = tuple[Tensor, Tensor | None]


def _with_scaled_rows(attn: Attention, unit: float, divisor: Tensor | float) -> WeightAndBias:
    """Weight and bias of q, k and v, such that q k^T are scores in that unit, and values are divided."""
    width = attn.proj.in_features
    weight = attn.qkv.weight
    scale = weight.new_ones(3, width, dtype=torch.promote_types(weight.dtype, torch.float32))
    scale[0] = (width // attn.heads) ** -0.5 / unit
    scale[2].div_(divisor)
    return _folded(attn.qkv, outputs=scale.flatten())


def _with_pairs_together(weight: Tensor, bias: Tensor | None, heads: int) -> WeightAndBias:
    """With the channels of queries and keys in another order: the two that are turned together side by side.

    Scores stay as they are, since queries and keys change alike.
    """

    def reordered(rows: Tensor) -> Tensor:
        queries_and_keys, values = rows.tensor_split([len(rows) // 3 * 2])
        paired = rearrange(queries_and_keys, "(qk h part d) ... -> (qk h d part) ...", qk=2, h=heads, part=2)
        return torch.cat([paired, values])

    return reordered(weight), None if bias is None else reordered(bias)


def activation(mlp: MLP) -> tuple[str, float, float]:
    """The activation that oneDNN has for an MLP's, and the factors to multiply with before it and after it."""
    if isinstance(mlp.act, nn.GELU):
        return mlp.act.approximate, 1.0, 1.0
    return "swish", QUICK, 1 / QUICK


def layer_scale(scale: nn.Module) -> Tensor | float:
    """The numbers of a `LayerScale`, or 1 where there is none."""
    return getattr(scale, "gamma", 1.0)


def _folded(linear: nn.Linear, *, inputs: float = 1.0, outputs: Tensor | float = 1.0) -> WeightAndBias:
    """Weight and bias of a layer that multiplies what it takes by `inputs`, and what it gives by `outputs`."""
    bias = None if linear.bias is None else linear.bias.detach()
    return _multiplied(linear.weight.detach(), bias, inputs, outputs)


def _multiplied(
    weight: Tensor, bias: Tensor | None, inputs: float = 1.0, outputs: Tensor | float = 1.0
) -> WeightAndBias:
    if isinstance(outputs, float) and outputs == inputs == 1:
        return weight, bias
    wide = torch.promote_types(weight.dtype, torch.float32)  # so that a narrow dtype rounds once
    rows = outputs[:, None] if isinstance(outputs, Tensor) else outputs
    return (weight.to(wide) * rows).mul_(inputs), None if bias is None else bias.to(wide) * outputs


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm)


def plain_norm(norm: nn.Module, dtype: torch.dtype, factor: float = 1.0) -> Callable[[Tensor], Tensor]:
    """A LayerNorm as a plain call, which skips what a module's call looks up.

    `factor` is by how much what it takes was multiplied: it takes that away again, but for its epsilon.
    """
    if not isinstance(norm, nn.LayerNorm):
        return lambda x: x
    weight, bias = (None if values is None else values.detach().to(dtype) for values in (norm.weight, norm.bias))
    shape, eps = norm.normalized_shape, norm.eps * factor**2
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
