"""The network computes what timm, transformers, torchvision and vit-pytorch compute: logits, layers, gradients."""

from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
from peers import timm, torchvision, transformers
from references import REFERENCES, SIZES, Reference, distance, spread
from torch import Tensor

from vitlite.config import ViTConfig
from vitlite.model import ViT
from vitlite.positions import resample_positions

LOGITS, LAYERS, GRADIENTS, TABLES = 1e-5, 1e-5, 5e-5, 1e-6


def pair(reference: Reference, **changes: object) -> tuple[ViT, torch.nn.Module]:
    theirs = spread(reference.build())
    ours = ViT(reference.config.replace(**changes)).eval()
    state = reference.to_ours(theirs.state_dict())
    if reference.config.pre_norm and reference.config.num_classes and reference.library == "transformers":
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
                assert distance(torch.cat([part for part in parts if part is not None], dim=1), tokens) < LAYERS
                assert distance(ours.embed(images), theirs.forward_head(tokens, pre_logits=True)) < LOGITS


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
    "another GELU": {"gelu": ("exact", "tanh")},  # whichever is not theirs
    "another eps": {"norm_eps": (1e-5, 1e-4)},
}
CAUGHT = [
    (reference, mistake)
    for reference in REFERENCES
    for mistake in MISTAKES
    if reference.config.size == (32, 32) and not (reference.config.positions == "none" and "positions" in mistake)
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


TABLE_OF = {
    "timm": timm_table,
    "transformers": transformers_table,
    "torchvision": torchvision_table,
    "jax": jax_table,
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
    for method in ("timm", "jax"):  # the others take every table for a square one
        wanted = TABLE_OF[method](table, (5, 9), (7, 4))
        assert distance(resample_positions(table, (5, 9), (7, 4), method), wanted) < TABLES


def test_sincos_positions_are_those_of_mae() -> None:
    ours = ViT(ViTConfig(**SIZES, positions="sincos2d"))
    assert "pos_embed" not in ours.state_dict()
    config = transformers.ViTMAEConfig(hidden_size=48, image_size=32, patch_size=8)
    theirs = transformers.models.vit_mae.modeling_vit_mae.ViTMAEEmbeddings(config)
    theirs.initialize_weights()
    assert distance(ours._positions((4, 4)), theirs.position_embeddings.data) < TABLES
