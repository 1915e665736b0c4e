"""What a config costs, counted without building it: a row for each layer, and the sums.

Nothing here imports torch. A multiply-add counts as one (MAC); norms, biases and softmax count as none.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from vitlite.config import ViTConfig


class Layer(NamedTuple):
    """One layer of the network, or one tensor of tokens; `blocks.*` stands for all blocks together."""

    name: str
    weight: tuple[int, ...]  # shape of its weight; () where it has none
    output: tuple[int, ...]  # shape of what it gives for one image
    params: int  # in all blocks, biases included
    macs: int  # for one image, in all blocks


def layers(config: ViTConfig) -> list[Layer]:
    """The network's layers in the order in which they run.

    >>> from vitlite.config import preset
    >>> layers(preset("vit_base_16"))[0]
    Layer(name='patch_embed.proj', weight=(768, 3, 16, 16), output=(196, 768), params=590592, macs=115605504)
    """
    patches = math.prod(config.grid)
    tokens = config.prefix_tokens + patches
    blocks = []
    for layer in (*_attention(config, tokens), *_mlp(config, tokens)):
        blocks.append(layer._replace(params=layer.params * config.depth, macs=layer.macs * config.depth))
    return [*_patches(config, patches), *_tokens(config, tokens), *blocks, *_output(config, tokens)]


def params(config: ViTConfig) -> int:
    """How many numbers the model learns.

    >>> from vitlite.config import preset
    >>> params(preset("vit_base_16"))
    86567656
    """
    return sum(layer.params for layer in layers(config))


def gmacs(config: ViTConfig) -> float:
    """Billions of multiply-adds for one image.

    >>> from vitlite.config import preset
    >>> round(gmacs(preset("vit_base_16")), 3)
    17.564
    """
    return sum(layer.macs for layer in layers(config)) / 1e9


def _patches(c: ViTConfig, patches: int) -> Iterator[Layer]:
    if c.patch_norm:
        yield _norm("patch_embed.norm_in", (patches, c.channels * c.patch_size**2))
    kernel = (c.dim, c.channels, c.patch_size, c.patch_size)
    yield _linear("patch_embed.proj", kernel, (patches,), bias=not c.pre_norm)
    if c.patch_norm:
        yield _norm("patch_embed.norm", (patches, c.dim))


def _tokens(c: ViTConfig, tokens: int) -> Iterator[Layer]:
    if c.class_token:
        yield _tensor("cls_token", (1, 1, c.dim), (1, c.dim))
    if c.registers:
        yield _tensor("reg_token", (1, c.registers, c.dim), (c.registers, c.dim))
    if c.positions == "learned":
        yield _tensor("pos_embed", (1, c.position_rows, c.dim), (c.position_rows, c.dim))
    if c.pre_norm:
        yield _norm("norm_pre", (tokens, c.dim))


def _attention(c: ViTConfig, tokens: int) -> Iterator[Layer]:
    """The first half of one block."""
    width = c.attention_dim
    products = 2 * tokens * tokens * width  # q k^T, and times v
    yield _norm("blocks.*.norm1", (tokens, c.dim))
    yield _linear("blocks.*.attn.qkv", (3 * width, c.dim), (tokens,), bias=c.qkv_bias)
    yield Layer("blocks.*.attn", (), (tokens, width), 0, products)
    if c.inner_norm:
        yield _norm("blocks.*.attn.norm", (tokens, width))
    yield _linear("blocks.*.attn.proj", (c.dim, width), (tokens,))
    if c.layer_scale is not None:
        yield _tensor("blocks.*.ls1.gamma", (c.dim,), (tokens, c.dim))


def _mlp(c: ViTConfig, tokens: int) -> Iterator[Layer]:
    """The second half of one block."""
    yield _norm("blocks.*.norm2", (tokens, c.dim))
    yield _linear("blocks.*.mlp.fc1", (c.mlp_dim, c.dim), (tokens,))
    if c.inner_norm:
        yield _norm("blocks.*.mlp.norm", (tokens, c.mlp_dim))
    yield _linear("blocks.*.mlp.fc2", (c.dim, c.mlp_dim), (tokens,))
    if c.layer_scale is not None:
        yield _tensor("blocks.*.ls2.gamma", (c.dim,), (tokens, c.dim))


def _output(c: ViTConfig, tokens: int) -> Iterator[Layer]:
    pooled = 2 * c.dim if c.pool == "cls_and_mean" else c.dim
    if c.fc_norm:
        yield _norm("fc_norm", (pooled,))
    else:
        yield _norm("norm", (tokens, c.dim))
    if c.pre_logits:
        yield _linear("pre_logits", (c.pre_logits, pooled), ())
    if c.num_classes:
        yield _linear("head", (c.num_classes, c.embed_dim), ())


def _linear(name: str, weight: tuple[int, ...], rows: tuple[int, ...], *, bias: bool = True) -> Layer:
    """A product with a weight, of so many rows."""
    width, size = weight[0], math.prod(weight)
    learned = size + width if bias else size
    return Layer(name, weight, (*rows, width), learned, math.prod(rows) * size)


def _norm(name: str, output: tuple[int, ...]) -> Layer:
    """A scale and a shift for each channel."""
    width = output[-1]
    return Layer(name, (width,), output, 2 * width, 0)


def _tensor(name: str, weight: tuple[int, ...], output: tuple[int, ...]) -> Layer:
    """A learned tensor that is joined to tokens, added to them or multiplied with them."""
    return Layer(name, weight, output, math.prod(weight), 0)
