"""What a config costs, counted without building it: a row for each layer, and the sums.

Nothing here imports torch. A multiply-add counts as one (MAC); norms, biases and softmax count as none.
"""

import math
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
    c, d, a = config, config.dim, config.attention_dim
    patches, pixels = c.grid[0] * c.grid[1], c.channels * c.patch_size**2
    tokens = patches + c.prefix_tokens
    pooled = d * (2 if c.pool == "cls_and_mean" else 1)
    found: list[Layer] = []

    def tensor(name: str, *shape: int, repeats: int = 1) -> None:
        found.append(Layer(name, shape, shape[1:] if len(shape) == 3 else (tokens, d), math.prod(shape) * repeats, 0))

    def norm(name: str, *output: int, repeats: int = 1) -> None:
        found.append(Layer(name, output[-1:], output, 2 * output[-1] * repeats, 0))

    def linear(name: str, weight: tuple[int, ...], *rows: int, bias: bool = True, repeats: int = 1) -> None:
        size, macs = math.prod(weight), math.prod(rows) * math.prod(weight)
        found.append(Layer(name, weight, (*rows, weight[0]), (size + bias * weight[0]) * repeats, macs * repeats))

    if c.patch_norm:
        norm("patch_embed.norm_in", patches, pixels)
    linear("patch_embed.proj", (d, c.channels, c.patch_size, c.patch_size), patches, bias=not c.pre_norm)
    if c.patch_norm:
        norm("patch_embed.norm", patches, d)
    if c.class_token:
        tensor("cls_token", 1, 1, d)
    if c.registers:
        tensor("reg_token", 1, c.registers, d)
    if c.positions == "learned":
        tensor("pos_embed", 1, c.position_rows, d)
    if c.pre_norm:
        norm("norm_pre", tokens, d)

    norm("blocks.*.norm1", tokens, d, repeats=c.depth)
    linear("blocks.*.attn.qkv", (3 * a, d), tokens, bias=c.qkv_bias, repeats=c.depth)
    found.append(Layer("blocks.*.attn", (), (tokens, a), 0, 2 * tokens * tokens * a * c.depth))  # q k^T, and times v
    if c.inner_norm:
        norm("blocks.*.attn.norm", tokens, a, repeats=c.depth)
    linear("blocks.*.attn.proj", (d, a), tokens, repeats=c.depth)
    if c.layer_scale is not None:
        tensor("blocks.*.ls1.gamma", d, repeats=c.depth)
    norm("blocks.*.norm2", tokens, d, repeats=c.depth)
    linear("blocks.*.mlp.fc1", (c.mlp_dim, d), tokens, repeats=c.depth)
    if c.inner_norm:
        norm("blocks.*.mlp.norm", tokens, c.mlp_dim, repeats=c.depth)
    linear("blocks.*.mlp.fc2", (d, c.mlp_dim), tokens, repeats=c.depth)
    if c.layer_scale is not None:
        tensor("blocks.*.ls2.gamma", d, repeats=c.depth)

    if c.fc_norm:
        norm("fc_norm", pooled)
    else:
        norm("norm", tokens, d)
    if c.pre_logits:
        linear("pre_logits", (c.pre_logits, pooled))
    if c.num_classes:
        linear("head", (c.num_classes, c.embed_dim))
    return found


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
