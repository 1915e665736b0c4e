"""The network computes what timm, transformers, torchvision and vit-pytorch compute: logits, layers, gradients."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
from einops import rearrange
from peers import timm, torchvision, transformers
from references import REFERENCES, SIZES, Reference, distance, spread
from torch import Tensor

from vitlite.config import Resample, Rotation, ViTConfig
from vitlite.nn.layers import Attention, AttentionPool, SwiGLU
from vitlite.nn.positions import PositionTables, resample_positions, rotation_angles
from vitlite.nn.stem import StandardConv, Unit
from vitlite.nn.vit import ViT

LOGITS, LAYERS, GRADIENTS, TABLES = 1e-5, 1e-5, 5e-5, 1e-6


def pair(reference: Reference, **changes: object) -> tuple[ViT, torch.nn.Module]:
    theirs = spread(reference.build())
    ours = ViT(reference.config.replace(**changes)).eval()
    state = reference.to_ours(theirs.state_dict())
    if reference.config.input_norm == "tokens" and reference.config.num_classes and reference.library == "transformers":
        state["head.bias"] = torch.zeros(reference.config.num_classes)  # CLIP projects without
    ours.load_state_dict(state)
    return ours, theirs


def gradients(
    reference: Reference, ours: ViT, theirs: torch.nn.Module, images: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Our gradient and theirs, for every tensor that has one there."""
    for model, logits in ((theirs, reference.logits(theirs, images)), (ours, ours(images))):
        model.zero_grad()
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
        (logits * weight).sum().backward()
    found = {name: tensor.grad for name, tensor in theirs.named_parameters() if tensor.grad is not None}
    wanted = reference.to_ours(found, gradients=True)
    queries = [name for name in found if re.search(r"q_bias$|q_proj\.bias$", name)]
    if queries and not any(re.sub("q(?=_bias|_proj)", "k", name) in found for name in queries):
        for name, tensor in ours.named_parameters():  # keys have a fixed bias there, ours may learn one
            if name.endswith("qkv.bias"):
                tensor.grad.view(3, -1)[1] = 0
    return {name: (tensor.grad, wanted[name]) for name, tensor in ours.named_parameters() if name in wanted}


def pictures(reference: Reference, size: tuple[int, int] | None = None) -> Tensor:
    shape = (2, reference.config.channels, *(size or reference.config.size))
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("reference", REFERENCES, ids=str)
def test_logits_and_every_layer_at_the_native_size(reference: Reference) -> None:
    ours, theirs = pair(reference)
    images = pictures(reference)
    with torch.no_grad():
        logits, layers = reference.layers(theirs, images)
        features = ours.features(images, range(reference.config.depth))
        assert distance(ours(images), logits) < LOGITS
    assert len(layers) == len(features.layers) == reference.config.depth
    for mine, other in zip(features.layers, layers, strict=True):
        assert distance(mine, other) < LAYERS


OTHER_SIZES = [(reference, size) for reference in REFERENCES for size in reference.image_sizes]


@pytest.mark.parametrize(("reference", "size"), OTHER_SIZES, ids=lambda value: str(value).replace(", ", "x"))
def test_logits_at_other_sizes(reference: Reference, size: tuple[int, int]) -> None:
    ours, theirs = pair(reference)
    images = pictures(reference, size)
    with torch.no_grad():
        assert distance(ours(images), reference.logits(theirs, images)) < LOGITS


GRADIENT_SIZES = [(reference, None) for reference in REFERENCES] + [
    (reference, reference.image_sizes[0])
    for reference in REFERENCES
    if reference.image_sizes and reference.library != "torchvision"  # which makes a new model for another size
]


@pytest.mark.parametrize(("reference", "size"), GRADIENT_SIZES, ids=lambda value: str(value).replace(", ", "x"))
def test_gradients(reference: Reference, size: tuple[int, int] | None) -> None:
    ours, theirs = pair(reference)
    pairs = gradients(reference, ours, theirs, pictures(reference, size))
    absent = {name for name, _ in ours.named_parameters()} - set(pairs)
    assert absent <= {"head.bias", "pos_embed"}, "only CLIP's head has no bias, and MAE's positions are fixed"
    for name, (mine, other) in pairs.items():
        assert distance(mine, other) < GRADIENTS, name


def test_the_final_tokens_and_what_the_head_sees() -> None:
    for reference in REFERENCES:
        if reference.library == "timm":
            ours, theirs = pair(reference)
            images = pictures(reference)
            with torch.no_grad():
                tokens = theirs.forward_features(images)
                features = ours.features(images)
                parts = [None if features.cls is None else features.cls[:, None], features.registers, features.patches]
                joined = torch.cat([part for part in parts if part is not None], dim=1)
                assert distance(joined, tokens.flatten(1, -2)) < LAYERS
                seen = ours.embed(images)
                if reference.config.pool == "cls_and_distillation":  # theirs is their mean, which neither head sees
                    seen = sum(seen.chunk(2, dim=1)) / 2
                assert distance(seen, theirs.forward_head(tokens, pre_logits=True)) < LOGITS


def test_attention_maps_are_those_of_transformers() -> None:
    reference = next(reference for reference in REFERENCES if str(reference) == "transformers: ViT")
    ours, theirs = pair(reference)
    images = pictures(reference)
    with torch.no_grad():
        attentions = torch.stack(theirs(images, output_attentions=True).attentions)
        assert distance(ours.attention_maps(images, range(3)), attentions) < LAYERS


# Mistakes that loose tests let through. Each must put the logits further off than the comparisons above allow.


def swap_q_and_k(model: ViT) -> None:
    for block in model.blocks:
        for tensor in block.attn.qkv.parameters():
            q, k, v = tensor.data.chunk(3)
            tensor.data = torch.cat([k, q, v])


def transpose_patch_pixels(model: ViT) -> None:
    model.patch_embed.proj.weight.data = model.patch_embed.proj.weight.data.mT.contiguous()


def transpose_positions(model: ViT) -> None:
    first = model.pos_embed.shape[1] - 16
    table = model.pos_embed.data[:, first:].unflatten(1, (4, 4)).transpose(1, 2).flatten(1, 2)
    model.pos_embed.data = torch.cat([model.pos_embed.data[:, :first], table], dim=1)


MISTAKES: dict[str, Any] = {
    "q and k swapped": swap_q_and_k,
    "patch pixels in columns": transpose_patch_pixels,
    "positions in columns": transpose_positions,
    "another GELU": {"mlp": ("gelu", "gelu_tanh")},  # whichever is not theirs
    "another eps": {"norm_eps": (1e-5, 1e-4)},
}
CAUGHT = [
    (reference, mistake)
    for reference in REFERENCES
    for mistake in MISTAKES
    if reference.config.size == (32, 32)
    and not (reference.config.positions != "learned" and "positions" in mistake)
    and not (reference.config.mlp == "swiglu" and "GELU" in mistake)
    and not (reference.config.kernel_size == 1 and "pixels" in mistake)
]


def mistaken(reference: Reference, mistake: str) -> float:
    """How far a model with that mistake is from the reference."""
    change = MISTAKES[mistake]
    if callable(change):
        ours, theirs = pair(reference)
        change(ours)
    else:
        [(field, values)] = change.items()
        ours, theirs = pair(reference, **{field: next(x for x in values if x != getattr(reference.config, field))})
    images = pictures(reference)
    with torch.no_grad():
        return distance(ours(images), reference.logits(theirs, images))


# Mistakes that only models of one family can have. Each is made in a model that has the reference's weights.


def other_angles(change: Callable[[Tensor, tuple[int, int], int], Tensor]) -> Callable[[ViT], None]:
    """A mistake in the angles of a rotation: what `change` makes of them, the grid and the width of a head."""

    def make(model: ViT) -> None:
        def rotation(
            like: Tensor, grid: tuple[int, int], prefix: int, width: int, rope: Rotation
        ) -> tuple[Tensor, Tensor]:
            angles = change(rotation_angles(grid, width, rope), grid, width)
            angles = torch.cat([torch.zeros(prefix, width // 2), angles.float()])
            return angles.cos(), angles.sin()

        model.tables.rotation = rotation  # type: ignore[method-assign]

    return make


def rows_for_columns(angles: Tensor, grid: tuple[int, int], width: int) -> Tensor:
    return torch.cat(angles.chunk(2, dim=-1)[::-1], dim=-1)


def period_of_language_models(angles: Tensor, grid: tuple[int, int], width: int) -> Tensor:
    return angles * (100 / 10000) ** (4 * torch.arange(width // 4) / width).repeat(2)


def corners_for_centres(angles: Tensor, grid: tuple[int, int], width: int) -> Tensor:
    return angles * torch.tensor([side / (side - 1) for side in grid]).repeat_interleave(width // 4)


def turn_every_token(model: ViT) -> None:
    right = PositionTables.rotation

    def rotation(like: Tensor, grid: tuple[int, int], prefix: int, width: int, rope: Rotation) -> tuple[Tensor, ...]:
        tables = right(model.tables, like, grid, 0, width, rope)
        return tuple(torch.cat([table[-prefix:], table]) for table in tables)  # the first patch may be at angle 0

    model.tables.rotation = rotation  # type: ignore[method-assign]


def turn_neighbours(model: ViT) -> None:
    """Pairs of neighbouring channels, as the first rotary models had them, in place of one of either half."""
    for block in model.blocks:
        for tensor in block.attn.qkv.parameters():
            q, k, v = tensor.data.unflatten(0, (3, 4, 12))
            mixed = [rearrange(part, "heads (half d) ... -> heads (d half) ...", half=2) for part in (q, k)]
            tensor.data = torch.stack([*mixed, v]).flatten(0, 2)


def swap_halves(*names: str) -> Callable[[ViT], None]:
    """The first half of these tensors' rows for the second."""

    def make(model: ViT) -> None:
        for name, tensor in model.named_parameters():
            if name.endswith(names):
                tensor.data = torch.cat(tensor.data.chunk(2)[::-1])

    return make


def swap_columns(model: ViT) -> None:
    model.head.weight.data = torch.cat(model.head.weight.data.chunk(2, dim=1)[::-1], dim=1)


def gate_by(activation: Callable[[Tensor], Tensor]) -> Callable[[ViT], None]:
    def make(model: ViT) -> None:
        for block in model.blocks:

            def forward(x: Tensor, mlp: Any = block.mlp) -> Tensor:
                gate, value = mlp.fc1(x).chunk(2, dim=-1)
                return mlp.fc2(activation(gate) * value)

            block.mlp.forward = forward

    return make


def pool_with(change: Callable[[Any, ViT, Tensor], Tensor]) -> Callable[[ViT], None]:
    def make(model: ViT) -> None:
        model._pool = lambda x: change(model.attn_pool, model, x)  # type: ignore[method-assign]

    return make


def query_of_the_patches(pool: Any, model: ViT, x: Tensor) -> Tensor:
    patches = model.norm(x)[:, model.config.prefix_tokens :]
    pool.latent.data = patches[:1].mean(1, keepdim=True)
    return pool(patches)


def without_the_mlp(pool: Any, model: ViT, x: Tensor) -> Tensor:
    pool.mlp = torch.nn.Identity()
    return pool(model.norm(x)[:, model.config.prefix_tokens :])


def of_every_token(pool: Any, model: ViT, x: Tensor) -> Tensor:
    return pool(model.norm(x))


def before_the_norm(pool: Any, model: ViT, x: Tensor) -> Tensor:
    return pool(x[:, model.config.prefix_tokens :])


def by_another_gelu(pool: Any, model: ViT, x: Tensor) -> Tensor:
    pool.mlp.act = torch.nn.GELU("tanh")
    return pool(model.norm(x)[:, model.config.prefix_tokens :])


def centring(norm: torch.nn.RMSNorm) -> None:
    norm.forward = lambda x: torch.nn.functional.layer_norm(x, norm.normalized_shape, norm.weight, None, norm.eps)


def norm_after_the_positions(model: ViT) -> None:
    model.norm_pre, model.patch_embed.norm = model.patch_embed.norm, torch.nn.Identity()


def norm_after_pooling(model: ViT) -> None:
    model.norm, model.fc_norm = torch.nn.Identity(), model.norm


def norm_of_the_patches(model: ViT) -> None:
    model.norm, model.fc_norm = model.fc_norm, torch.nn.Identity()


def normed(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def swap_parts(name: str, order: tuple[int, ...]) -> Callable[[ViT], None]:
    """Queries, keys and values in another order."""

    def make(model: ViT) -> None:
        for found, tensor in model.named_parameters():
            if found.endswith(name):
                tensor.data = tensor.data.unflatten(0, (3, -1))[list(order)].flatten(0, 1)

    return make


def change_by(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[ViT], None]:
    def make(model: ViT) -> None:
        tensor = model.get_parameter(name)
        tensor.data = change(tensor.data)

    return make


def swap_the_two_tokens(model: ViT) -> None:
    model.cls_token.data, model.reg_token.data = model.reg_token.data, model.cls_token.data


def change_each(kind: type[torch.nn.Module], change: Callable[[Any], None]) -> Callable[[ViT], None]:
    """A mistake in every module of a kind."""

    def make(model: ViT) -> None:
        for module in list(model.modules()):
            if isinstance(module, kind):
                change(module)

    return make


def filters_as_they_are(conv: StandardConv) -> None:
    conv.standardised = lambda: conv.weight  # type: ignore[method-assign]


def border_before(conv: StandardConv) -> None:
    if isinstance(conv.border, torch.nn.ZeroPad2d):
        conv.border = torch.nn.ZeroPad2d(conv.border.padding[::-1])


def stride_first(unit: Unit) -> None:
    if unit.conv2.stride == (2, 2):
        unit.conv1.stride = (2, 2)
        unit.conv2.stride, unit.conv2.padding, unit.conv2.border = (1, 1), (1, 1), torch.nn.Identity()


def pool_border_before(pad: torch.nn.ConstantPad2d) -> None:
    if pad.value < 0:
        pad.padding = (1, 0, 1, 0)


def sixteen_groups(norm: torch.nn.GroupNorm) -> None:
    norm.num_groups = 16


def plain_shortcut(unit: Unit) -> None:
    if isinstance(unit.downsample, torch.nn.Sequential):
        unit.downsample.norm = torch.nn.Identity()


def standardise_channels(conv: StandardConv) -> None:
    def standardised() -> Tensor:
        variance, mean = torch.var_mean(conv.weight, dim=(2, 3), correction=0, keepdim=True)
        return (conv.weight - mean) * torch.rsqrt(variance + 1e-8)

    if conv.kernel_size == (7, 7):
        conv.standardised = standardised  # type: ignore[method-assign]


def with_rope(**changes: Any) -> Callable[[ViT], None]:
    """A mistake in the constants of the rotation."""

    def make(model: ViT) -> None:
        model.config = model.config.replace(rope=replace(model.config.rope, **changes))
        if model.rope is not None:
            model.rope.config = model.config

    return make


def halves_for_neighbours(attn: Attention) -> None:
    attn.adjacent = not attn.adjacent


def norm_before_the_gate(model: ViT) -> None:
    """The MLP's norm on the value, before it is multiplied by the gate."""
    for block in model.blocks:

        def forward(x: Tensor, mlp: Any = block.mlp) -> Tensor:
            gate, value = mlp.fc1(x).chunk(2, dim=-1)
            return mlp.fc2(torch.nn.functional.silu(gate) * mlp.norm(value))

        block.mlp.forward = forward


def norm_after_the_projection(attn: Attention) -> None:
    norm, proj = attn.norm, attn.proj
    attn.norm, attn.proj = torch.nn.Identity(), torch.nn.Sequential(proj, norm)


def twice_turned(model: ViT) -> None:
    model.rope.freqs.data = model.rope.freqs.data.flip(0)


def other_pool_heads(pool: AttentionPool) -> None:
    pool.heads = 4


def blocks_in_reverse(model: ViT) -> None:
    model.rope.freqs.data = model.rope.freqs.data.flip(1)


def resampled_as(method: Resample) -> Callable[[ViT], None]:
    """The position table stretched as another library does."""
    return lambda model: setattr(model, "config", model.config.replace(resample=method))


def with_table(resample: Callable[[Tensor, tuple[int, int]], Tensor]) -> Callable[[ViT], None]:
    """The position table stretched in another way."""

    def make(model: ViT) -> None:
        model._positions = lambda grid, tokens: resample(model.pos_embed, grid)  # type: ignore[method-assign]

    return make


def square_and_cut(table: Tensor, new: tuple[int, int]) -> Tensor:
    """C-RADIO's way: as large as the longer side, of which a part is taken."""
    side = max(new) + (new[0] == new[1])
    square = resample_positions(table, (4, 4), (side, side), "naflex").unflatten(1, (side, side))
    return square[:, : new[0], : new[1]].flatten(1, 2)


def columns_first(table: Tensor, new: tuple[int, int]) -> Tensor:
    return resample_positions(table, (4, 4), new[::-1], "naflex")


def channels_first(kernel: Tensor) -> Tensor:
    return rearrange(rearrange(kernel, "d c p q -> d (p q c)"), "d (c p q) -> d c p q", c=3, p=8)


ROTATED = {
    "axes swapped": with_rope(order="xy"),
    "no rotation": other_angles(lambda angles, *_: 0 * angles),
    "another temperature": with_rope(temperature=1000.0),
    "halves for neighbours": change_each(Attention, halves_for_neighbours),
}
FAMILY_MISTAKES: dict[str, dict[str, Callable[[ViT], None]]] = {
    "DINOv3, class token, biases": {
        "another period": other_angles(period_of_language_models),
        "x and y swapped": other_angles(rows_for_columns),
        "corners aligned": other_angles(corners_for_centres),
        "turned the other way": other_angles(lambda angles, *_: -angles),
        "no rotation": other_angles(lambda angles, *_: 0 * angles),
        "class token and registers turned": turn_every_token,
        "neighbours turned": turn_neighbours,
        "a bias for keys": change_by("blocks.0.attn.qkv.bias", lambda bias: bias + 0.1),
    },
    "EVA-02 small": ROTATED
    | {
        "the reference grid ignored": with_rope(reference=None),
        "an offset": with_rope(offset=1.0),
        "the class token turned": turn_every_token,
        "gate and value swapped": swap_halves("fc1.weight", "fc1.bias"),
        "the norm before pooling": norm_of_the_patches,
    },
    "EVA-02 base": {
        "gate and value swapped": swap_halves("fc1.weight", "fc1.bias"),
        "no norm inside": change_each(SwiGLU, lambda mlp: setattr(mlp, "norm", torch.nn.Identity())),
        "the norm before the gate": norm_before_the_gate,
        "the reference grid ignored": with_rope(reference=None),
        "the class token turned": turn_every_token,
    },
    "EVA-02 CLIP": {
        "no norm in attention": change_each(Attention, lambda attn: setattr(attn, "norm", torch.nn.Identity())),
        "the norm after the projection": change_each(Attention, norm_after_the_projection),
        "no norm in the MLP": change_each(SwiGLU, lambda mlp: setattr(mlp, "norm", torch.nn.Identity())),
        "the biases of queries for keys": swap_parts("qkv.bias", (1, 0, 2)),
        "the class token turned": turn_every_token,
    },
    "PE core": ROTATED
    | {
        "axes swapped": with_rope(order="yx"),
        "the offset forgotten": with_rope(offset=0.0),
        "the reference grid ignored": with_rope(reference=None),
        "the class token turned": turn_every_token,
        "the heads of the blocks in the pool": change_each(AttentionPool, other_pool_heads),
        "the patches alone pooled": pool_with(lambda pool, model, x: pool(model.norm(x)[:, 1:])),
        "no norm before the pool": pool_with(lambda pool, _, x: pool(x)),
    },
    "PE lang": ROTATED
    | {
        "axes swapped": with_rope(order="yx"),
        "the offset forgotten": with_rope(offset=0.0),
        "a norm": pool_with(lambda _, model, x: normed(x)[:, 1:].mean(1)),
        "the class token in the mean": pool_with(lambda _, model, x: x.mean(1)),
        "the class token turned": turn_every_token,
    },
    "RoPE-ViT": ROTATED
    | {
        "axes swapped": with_rope(order="yx"),
        "a reference grid": with_rope(reference=3),
        "an offset": with_rope(offset=1.0),
        "the class token turned": turn_every_token,
    },
    "RoPE-ViT, mixed": {
        "axes swapped": with_rope(order="yx"),
        "the frequencies of the axes swapped": twice_turned,
        "the frequencies of other blocks": blocks_in_reverse,
        "an offset": with_rope(offset=1.0),
        "halves for neighbours": change_each(Attention, halves_for_neighbours),
    },
    "ViT with rotation and registers": ROTATED
    | {
        "the reference grid ignored": with_rope(reference=None),
        "the registers turned": turn_every_token,
        "the registers in the mean": pool_with(lambda _, model, x: x.mean(1)),
    },
    "Qwen3": ROTATED
    | {
        "a reference grid": with_rope(reference=3),
        "the norm before pooling": pool_with(lambda _, model, x: normed(x).mean(1)),
        "no norm": lambda model: setattr(model, "fc_norm", torch.nn.Identity()),
    },
    "AIMv2": {
        "norms that centre": change_each(torch.nn.RMSNorm, centring),
        "gate and value swapped": swap_halves("fc1.weight"),
        "gate by GELU": gate_by(torch.nn.functional.gelu),
        "no norm of the patches": lambda model: setattr(model.patch_embed, "norm", torch.nn.Identity()),
        "the norm of the patches after the positions": norm_after_the_positions,
        "the norm after pooling": norm_after_pooling,
    },
    "NaFlex": {
        "a bicubic table": resampled_as("timm"),
        "no antialias": resampled_as("tensorflow"),
        "corners aligned": resampled_as("jax"),
        "the table of the other aspect": with_table(columns_first),
        "a square table, cut": with_table(square_and_cut),
        "channels before pixels": change_by("patch_embed.proj.weight", channels_first),
        "no norm before its pool": pool_with(before_the_norm),
    },
    "attention pooling beside a class token and registers": {
        "query not of the latent": pool_with(query_of_the_patches),
        "no MLP": pool_with(without_the_mlp),
        "prefix tokens seen": pool_with(of_every_token),
        "no norm before": pool_with(before_the_norm),
        "keys and values swapped": swap_halves("attn_pool.kv.weight", "attn_pool.kv.bias"),
        "another GELU in its MLP": pool_with(by_another_gelu),
    },
    "EVA": {
        "biases of queries and values swapped": swap_parts("qkv.bias", (2, 1, 0)),
        "the bias of values for keys": swap_parts("qkv.bias", (0, 2, 1)),
        "no biases": change_each(Attention, lambda attn: attn.qkv.bias.data.zero_()),
        "the norm before pooling": norm_of_the_patches,
        "the class token in the mean": pool_with(lambda _, model, x: x.mean(1)),
    },
    "no final norm": {
        "a norm": pool_with(lambda _, model, x: normed(x[:, 0])),
        "the last block's norm": pool_with(lambda _, model, x: model.blocks[-1].norm2(x[:, 0])),
        "centred": pool_with(lambda _, model, x: x[:, 0] - x[:, 0].mean(-1, keepdim=True)),
        "of length one": pool_with(lambda _, model, x: torch.nn.functional.normalize(x[:, 0], dim=-1)),
        "the mean of the patches": pool_with(lambda _, model, x: x[:, 1:].mean(1)),
    },
    "gated MLP": {
        "gate and value swapped": swap_halves("fc1.weight", "fc1.bias"),
        "gate by GELU": gate_by(torch.nn.functional.gelu),
        "gate by sigmoid": gate_by(torch.sigmoid),
        "no gate": gate_by(torch.ones_like),
        "gate not activated": gate_by(lambda gate: gate),
    },
    "hybrid": {
        "filters not standardised": change_each(StandardConv, filters_as_they_are),
        "a filter standardised by channels": change_each(StandardConv, standardise_channels),
        "the border of a convolution before": change_each(StandardConv, border_before),
        "the border of the pool before": change_each(torch.nn.ConstantPad2d, pool_border_before),
        "the stride in the first convolution": change_each(Unit, stride_first),
        "sixteen groups": change_each(torch.nn.GroupNorm, sixteen_groups),
        "no norm of the projection": change_each(Unit, plain_shortcut),
    },
    "DeiT, distilled": {
        "heads swapped": swap_columns,
        "tokens swapped": swap_the_two_tokens,
        "the sum of two heads": change_by("head.weight", lambda weight: 2 * weight),
        "the sum of two biases": change_by("head.bias", lambda bias: 2 * bias),
        "one head": change_by("head.weight", lambda weight: torch.cat([2 * weight[:, :48], 0 * weight[:, 48:]], 1)),
    },
}
WRONG_ROWS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "none for the class token": lambda cls, reg, table: (cls, reg + table[:, 1:4], table[:, 4:]),
    "none for registers": lambda cls, reg, table: (cls + table[:, :1], reg, table[:, 4:]),
    "registers backwards": lambda cls, reg, table: (cls + table[:, :1], reg + table[:, [3, 2, 1]], table[:, 4:]),
    "registers first": lambda cls, reg, table: (cls + table[:, 3:4], reg + table[:, :3], table[:, 4:]),
    "registers last": lambda cls, reg, table: (cls + table[:, :1], reg + table[:, 17:], table[:, 1:17]),
    "patches first": lambda cls, reg, table: (cls + table[:, 16:17], reg + table[:, 17:], table[:, :16]),
}  # of a table that has rows for a class token, three registers, and 16 patches


@pytest.mark.parametrize("rows", WRONG_ROWS)
def test_the_comparison_notices_wrong_rows_of_the_position_table(rows: str) -> None:
    reference = next(each for each in REFERENCES if each.option == "registers with positions")
    ours, theirs = pair(reference)
    wrong = WRONG_ROWS[rows](theirs.cls_token.data, theirs.reg_token.data, theirs.pos_embed.data)
    ours.cls_token.data, ours.reg_token.data, ours.pos_embed.data = wrong
    images = pictures(reference)
    with torch.no_grad():
        assert distance(ours(images), reference.logits(theirs, images)) > 10 * LOGITS


FAMILY_CAUGHT = [(option, mistake) for option, mistakes in FAMILY_MISTAKES.items() for mistake in mistakes]


def mistaken_in_a_family(option: str, mistake: str) -> float:
    """How far a model with that mistake is from timm's, at the size where it is nearest."""
    reference = next(each for each in REFERENCES if (each.library, each.option) == ("timm", option))
    ours, theirs = pair(reference)
    FAMILY_MISTAKES[option][mistake](ours)
    found = []
    for size in ((16, 24), (24, 40)) if option == "NaFlex" else (None, (24, 40)):
        images = pictures(reference, size)
        with torch.no_grad():
            found.append(distance(ours(images), reference.logits(theirs, images)))
    return min(found)


@pytest.mark.parametrize(("option", "mistake"), FAMILY_CAUGHT, ids=str)
def test_the_comparison_notices_mistakes_of_a_family(option: str, mistake: str) -> None:
    assert mistaken_in_a_family(option, mistake) > 10 * LOGITS


@pytest.mark.parametrize(("reference", "mistake"), CAUGHT, ids=str)
def test_the_comparison_notices(reference: Reference, mistake: str) -> None:
    assert mistaken(reference, mistake) > 2 * LOGITS


# Position tables at other sizes, computed by each library's own function.


def timm_table(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    return timm.layers.resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=0)


def transformers_table(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    config = transformers.ViTConfig(hidden_size=table.shape[2], image_size=old[0], patch_size=1)
    embeddings = transformers.models.vit.modeling_vit.ViTEmbeddings(config)
    embeddings.position_embeddings.data = torch.cat([torch.zeros(1, 1, table.shape[2]), table], dim=1)
    return embeddings.interpolate_pos_encoding(torch.zeros(1, new[0] * new[1] + 1, table.shape[2]), *new)[:, 1:]


def torchvision_table(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    state = {"encoder.pos_embedding": torch.cat([torch.zeros(1, 1, table.shape[2]), table], dim=1)}
    resized = torchvision.models.vision_transformer.interpolate_embeddings(new[0], 1, state)
    return resized["encoder.pos_embedding"][:, 1:]


def jax_table(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """google-research/vision_transformer and big_vision: scipy.ndimage.zoom(order=1)."""
    grid = table.reshape(*old, -1).double().numpy()
    zoomed = scipy.ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1)
    return torch.from_numpy(np.ascontiguousarray(zoomed)).flatten(0, 1)[None].float()


def tensorflow_table(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """tf.image.resize, as timm computes it for the checkpoints of those who resize with it."""
    bilinear = {"interpolation": "bilinear", "antialias": False}
    return timm.layers.resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=0, **bilinear)


TABLE_OF = {
    "timm": timm_table,
    "transformers": transformers_table,
    "torchvision": torchvision_table,
    "jax": jax_table,
    "tensorflow": tensorflow_table,
}
GRIDS = [(10, 10), (24, 24), (5, 5), (14, 14), (5, 9)]
TABLES_OF = [(method, new) for method in TABLE_OF for new in GRIDS if method != "torchvision" or new[0] == new[1]]


@pytest.mark.parametrize(("method", "new"), TABLES_OF, ids=str)
def test_tables_are_resampled_as_each_library_does(method: str, new: tuple[int, int]) -> None:
    table = torch.randn(1, 49, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = TABLE_OF[method](table, (7, 7), new)
    assert distance(resample_positions(table, (7, 7), new, method), wanted) < TABLES
    for other in TABLE_OF:
        if other != method:
            assert distance(resample_positions(table, (7, 7), new, other), wanted) > 100 * TABLES


def test_tables_of_grids_that_are_not_square() -> None:
    table = torch.randn(1, 5 * 9, 6, generator=torch.Generator().manual_seed(0))
    for method in ("timm", "jax", "tensorflow"):  # the others take every table for a square one
        wanted = TABLE_OF[method](table, (5, 9), (7, 4))
        assert distance(resample_positions(table, (5, 9), (7, 4), method), wanted) < TABLES


def test_sincos_positions_are_those_of_mae() -> None:
    ours = ViT(ViTConfig(**SIZES, positions="sincos2d"))
    assert "pos_embed" not in ours.state_dict()
    config = transformers.ViTMAEConfig(hidden_size=48, image_size=32, patch_size=8)
    theirs = transformers.models.vit_mae.modeling_vit_mae.ViTMAEEmbeddings(config)
    theirs.initialize_weights()
    assert distance(ours._positions((4, 4), torch.zeros(())), theirs.position_embeddings.data) < TABLES
