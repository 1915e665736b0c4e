"""Count the parameters and multiply-adds of a model from its config, without building the model.

This module does not import torch. Norms, biases and softmax are not counted as multiply-adds (MACs).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from vitlite.config import ViTConfig


class Layer(NamedTuple):
    """The size and cost of one layer or learned tensor.

    A layer such as `blocks.*.norm1` occurs in every block. Its parameters and multiply-adds are summed over all blocks.
    """

    name: str
    weight: tuple[int, ...]  # shape of the weight; () for a layer without one
    output: tuple[int, ...]  # shape of the output for one image
    params: int  # weights and biases
    macs: int  # multiply-adds for one image


def layers(config: ViTConfig) -> list[Layer]:
    """Return the size and cost of each layer of a model, in the order in which the layers run.

    >>> from vitlite.presets import preset
    >>> layers(preset("vit_base_16"))[0]
    Layer(name='patch_embed.proj', weight=(768, 3, 16, 16), output=(196, 768), params=590592, macs=115605504)
    """
    patches = math.prod(config.grid)
    tokens = config.tokens
    blocks = []
    for layer in (*_attention(config, tokens), *_mlp(config, tokens)):
        blocks.append(layer._replace(params=layer.params * config.depth, macs=layer.macs * config.depth))
    return [*_patches(config, patches), *_tokens(config, tokens), *blocks, *_output(config, tokens)]


def params(config: ViTConfig) -> int:
    """Return the number of parameters of a model.

    >>> from vitlite.presets import preset
    >>> params(preset("vit_base_16"))
    86567656
    """
    return sum(layer.params for layer in layers(config))


def gmacs(config: ViTConfig) -> float:
    """Return the number of multiply-adds of a model for one image, in billions.

    >>> from vitlite.presets import preset
    >>> round(gmacs(preset("vit_base_16")), 3)
    17.564
    """
    return sum(layer.macs for layer in layers(config)) / 1e9


def _patches(c: ViTConfig, patches: int) -> Iterator[Layer]:
    if c.input_norm == "patches":
        yield _norm("patch_embed.norm_in", (patches, c.channels * c.patch_size**2), bias=c.norm == "layer")
    kernel = (c.dim, c.stem_dim, c.kernel_size, c.kernel_size)
    yield from _stem(c)
    yield _linear("patch_embed.proj", kernel, (patches,), bias=c.input_norm != "tokens")
    if c.input_norm in ("patches", "projected"):
        yield _norm("patch_embed.norm", (patches, c.dim), bias=c.norm == "layer")


def _stem(c: ViTConfig) -> Iterator[Layer]:
    """Yield the costs of the ResNet before the patch projection of a hybrid model.

    The layers are the first convolution, its norm, and one layer for each stage.
    """
    if c.stem is None:
        return
    height, width = c.size[0] // 2, c.size[1] // 2
    root = "patch_embed.backbone.stem" if c.stem else "patch_embed.backbone"
    yield _linear(f"{root}.conv", (64, c.channels, 7, 7), (height * width,), bias=False)
    yield _norm(f"{root}.norm", (height * width, 64))
    cells, before = height * width // 4, 64
    for stage, units in enumerate(c.stem):
        out, stride = 256 * 2**stage, 1 if stage == 0 else 2
        inner = out // 4
        after = cells // stride**2
        first = cells * before * inner + after * (9 * inner**2 + inner * out + before * out)  # with projection
        other = after * (2 * inner * out + 9 * inner**2)
        weights = before * inner + before * out + units * (9 * inner**2 + inner * out) + (units - 1) * out * inner
        norms = 2 * (units * (2 * inner + out) + out)
        name = f"patch_embed.backbone.stages.{stage}.*"
        yield Layer(name, (), (after, out), weights + norms, first + (units - 1) * other)
        cells, before = after, out


def _tokens(c: ViTConfig, tokens: int) -> Iterator[Layer]:
    if c.class_token:
        yield _tensor("cls_token", (1, 1, c.dim), (1, c.dim))
    if c.registers:
        yield _tensor("reg_token", (1, c.registers, c.dim), (c.registers, c.dim))
    if c.positions == "learned":
        yield _tensor("pos_embed", (1, c.position_rows, c.dim), (c.position_rows, c.dim))
    if c.rope is not None and c.rope.learned:
        frequencies = (2, c.depth, c.heads, c.head_width // 2)
        yield _tensor("rope.freqs", frequencies, (2, tokens, c.head_width // 2))
    if c.input_norm == "tokens":
        yield _norm("norm_pre", (tokens, c.dim), bias=c.norm == "layer")


def _attention(c: ViTConfig, tokens: int) -> Iterator[Layer]:
    """Yield the costs of the first half of a block: attention, its norms and its layer scale."""
    width = c.attention_dim
    products = 2 * tokens * tokens * width  # q k^T, and times v
    yield _norm("blocks.*.norm1", (tokens, c.dim), bias=c.norm == "layer")
    yield _linear("blocks.*.attn.qkv", (3 * width, c.dim), (tokens,), bias=c.qkv_bias)
    yield Layer("blocks.*.attn", (), (tokens, width), 0, products)
    if c.inner_norm == "both":
        yield _norm("blocks.*.attn.norm", (tokens, width), bias=c.norm == "layer")
    yield _linear("blocks.*.attn.proj", (c.dim, width), (tokens,), bias=c.norm == "layer")
    if c.layer_scale is not None:
        yield _tensor("blocks.*.ls1.gamma", (c.dim,), (tokens, c.dim))


def _mlp(c: ViTConfig, tokens: int) -> Iterator[Layer]:
    """Yield the costs of the second half of a block: the MLP, its norms and its layer scale."""
    yield _norm("blocks.*.norm2", (tokens, c.dim), bias=c.norm == "layer")
    rows = c.mlp_dim * (2 if c.mlp == "swiglu" else 1)  # gate and value
    yield _linear("blocks.*.mlp.fc1", (rows, c.dim), (tokens,), bias=c.norm == "layer")
    if c.inner_norm != "none":
        yield _norm("blocks.*.mlp.norm", (tokens, c.mlp_dim), bias=c.norm == "layer")
    yield _linear("blocks.*.mlp.fc2", (c.dim, c.mlp_dim), (tokens,), bias=c.norm == "layer")
    if c.layer_scale is not None:
        yield _tensor("blocks.*.ls2.gamma", (c.dim,), (tokens, c.dim))


def _output(c: ViTConfig, tokens: int) -> Iterator[Layer]:
    if c.final_norm == "tokens":
        yield _norm("norm", (tokens, c.dim), bias=c.norm == "layer")
    if c.pool in ("map", "map_all"):
        yield from _attention_pool(c, tokens if c.pool == "map_all" else tokens - c.prefix_tokens)
    if c.final_norm == "pooled":
        yield _norm("fc_norm", (c.pooled_dim,), bias=c.norm == "layer")
    if c.pre_logits:
        yield _linear("pre_logits", (c.pre_logits, c.pooled_dim), ())
    if c.num_classes:
        if c.cosine_head:
            yield _linear("head.proj", (c.cosine_head, c.embed_dim), ())
        yield _linear("head", (c.num_classes, c.cosine_head or c.embed_dim), ())


def _attention_pool(c: ViTConfig, tokens: int) -> Iterator[Layer]:
    """Yield the costs of attention pooling, in which one query attends to all tokens and an MLP follows."""
    d, mlp_dim = c.dim, c.pool_mlp_dim
    yield _tensor("attn_pool.latent", (1, 1, d), (1, d))
    yield _linear("attn_pool.q", (d, d), (1,))
    yield _linear("attn_pool.kv", (2 * d, d), (tokens,))
    yield Layer("attn_pool", (), (1, d), 0, 2 * tokens * d)
    yield _linear("attn_pool.proj", (d, d), (1,))
    yield _norm("attn_pool.norm", (1, d))
    yield _linear("attn_pool.mlp.fc1", (mlp_dim, d), (1,))
    yield _linear("attn_pool.mlp.fc2", (d, mlp_dim), (1,))


def _linear(name: str, weight: tuple[int, ...], rows: tuple[int, ...], *, bias: bool = True) -> Layer:
    """Return the cost of a linear layer or a convolution.

    Args:
        name: The name of the layer.
        weight: The shape of the weight.
        rows: The shape of the positions to which the layer is applied, such as (197,) for 197 tokens.
        bias: True if the layer has a bias.
    """
    width, size = weight[0], math.prod(weight)
    learned = size + width if bias else size
    return Layer(name, weight, (*rows, width), learned, math.prod(rows) * size)


def _norm(name: str, output: tuple[int, ...], *, bias: bool = True) -> Layer:
    """Return the cost of a norm, which has a scale and, if `bias` is True, a shift for each channel."""
    width = output[-1]
    return Layer(name, (width,), output, 2 * width if bias else width, 0)


def _tensor(name: str, weight: tuple[int, ...], output: tuple[int, ...]) -> Layer:
    """Return the cost of a learned tensor without a matrix product, such as a token or a position table."""
    return Layer(name, weight, output, math.prod(weight), 0)
