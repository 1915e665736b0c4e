"""The tables of tensor names: each format is recognised by its keys alone, and what is written is read back."""

import re

import pytest
import torch

from vitlite import ViT, ViTConfig
from vitlite.checkpoints.key_mapping import (
    AXES,
    FORMATS,
    INVERSE_OPS,
    OPS,
    CheckpointFormat,
    detect_format,
    infer_geometry,
    map_keys,
    rename_tensors,
)
from vitlite.config import DINOV3_ROPE
from vitlite.errors import CheckpointError

READ = {name: each for name, each in FORMATS.items() if not each.written_only}
TINY = ViTConfig(image_size=16, patch_size=8, dim=16, depth=2, heads=2, mlp_dim=24, num_classes=3)


HAS_NONE = {
    "transformers-dinov3": {"pos_embed", "head"},
    "transformers-siglip": {"cls_token"},
    "transformers-siglip2": {"cls_token"},
}
TAKES_A_ROW_TWICE = ("vit-pytorch", "timm-distilled")  # a format that has its rows beside those of another


def first_block(each: CheckpointFormat, prefix: str = "") -> set[str]:
    """The names of a file of this format, with one block."""
    names = {each.full_name(prefix, theirs, (0, 0)) for rule in each.rules for theirs in rule.theirs}
    return names - {each.full_name(prefix, name, ()) for name in each.without}


@pytest.mark.parametrize("each", READ.values(), ids=READ)
def test_each_format_is_detected_with_every_prefix(each: CheckpointFormat) -> None:
    for prefix in each.prefixes if each.name == "timm-qwen3" else ("", *each.prefixes):
        assert detect_format(first_block(each, prefix)) == (each, prefix)


def test_no_format_or_two_is_an_error_that_lists_names() -> None:
    with pytest.raises(
        CheckpointError,
        match=r"do not fit any known checkpoint format: conv#.weight, fc.bias, ... Known formats: timm, timm-",
    ):
        detect_format(["conv1.weight", "conv2.weight", "fc.bias"])
    both = first_block(FORMATS["timm"]) | first_block(FORMATS["torchvision"])
    with pytest.raises(CheckpointError, match=r"fit more than one checkpoint format \(timm, torchvision\): attn_pool"):
        detect_format(both)


@pytest.mark.parametrize("each", FORMATS.values(), ids=FORMATS)
def test_tables_are_whole(each: CheckpointFormat) -> None:
    ours = {rule.ours.removesuffix(".weight").removesuffix(".bias") for rule in each.rules}
    needed = {"cls_token", "pos_embed", "patch_embed.proj", "norm", "head"}
    needed |= {f"blocks.#.{part}" for part in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")}
    assert needed - HAS_NONE.get(re.sub("-(classifier|plain)", "", each.name), set()) <= ours
    assert {rule.op for rule in each.rules} <= OPS.keys()
    theirs = [(rule.theirs, rule.op) for rule in each.rules]
    if not (each.written_only or each.name in TAKES_A_ROW_TWICE):
        assert len(theirs) == len(set(theirs)), "two rows read the same tensor in the same way"


WRITTEN = {
    "timm": TINY,
    "transformers": TINY,
    "transformers-dinov2": TINY.replace(layer_scale=0.1),
    "transformers-dinov3": TINY.replace(
        layer_scale=0.1, positions="none", rope=DINOV3_ROPE, registers=2, num_classes=0, mlp="swiglu"
    ),
    "transformers-siglip": TINY.replace(pool="map", class_token=False, num_classes=0),
    "torchvision": TINY,
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("prefixed", [False, True])
def test_what_is_written_is_read_back(name: str, prefixed: bool) -> None:
    each = FORMATS[name]
    prefix = each.prefixes[0] if prefixed and each.prefixes else ""
    state = {key: torch.randn(tensor.shape) for key, tensor in ViT(WRITTEN[name]).state_dict().items()}
    backwards = dict(reversed(state.items()))
    theirs = rename_tensors(each, prefix, backwards)
    mapping = map_keys({key: tuple(tensor.shape) for key, tensor in theirs.items()})
    assert (mapping.format, mapping.prefix) == (each, prefix)
    assert not mapping.unknown
    assert mapping.tensors.keys() == state.keys()
    for key, found in mapping.tensors.items():
        assert torch.equal(OPS[found.op]([theirs[part] for part in found.parts], None), state[key])
        assert found.parts == each.spell(prefix, key)


def test_tensor_without_a_name_in_the_format_is_an_error() -> None:
    state = ViT(TINY.replace(input_norm="tokens", layer_scale=1e-5)).state_dict()
    with pytest.raises(
        CheckpointError, match=r"torchvision format has no names for the tensors blocks.0.ls1.gamma, .*norm_pre.bias"
    ):
        rename_tensors(FORMATS["torchvision"], "", state)


def test_only_declared_names_are_dropped() -> None:
    """In a CLIP the text tower's names look like the image tower's: inside the prefix nothing may be lost."""
    names = first_block(FORMATS["openai"], "visual.")
    shapes = dict.fromkeys(names, (4, 4)) | {"visual.conv1.weight": (4, 3, 2, 2)}
    text = {"transformer.resblocks.0.ln_1.weight": (4,), "text_projection": (4, 4)}
    inside = {"visual.transformer.resblocks.0.gate": (4,), "visual.text_projection": (4,)}
    mapping = map_keys(shapes | text | inside)
    assert set(mapping.dropped) == set(text)
    assert set(mapping.unknown) == set(inside)
    bare = map_keys({name.removeprefix("visual."): shape for name, shape in (shapes | inside).items()})
    assert set(bare.unknown) == {"transformer.resblocks.0.gate", "text_projection"}


def test_shapes_of_no_format_and_files_without_a_first_block() -> None:
    shapes = {key: tuple(tensor.shape) for key, tensor in ViT(TINY).state_dict().items()}
    theirs = rename_tensors(FORMATS["transformers"], "", ViT(TINY).state_dict())
    odd = {key: tuple(tensor.shape) for key, tensor in theirs.items()}
    odd["encoder.layer.0.attention.attention.query.weight"] = (16, 17)
    with pytest.raises(CheckpointError, match=r"query.weight, .*key.weight, .* do not fit the checkpoint format"):
        map_keys(odd)
    for name in AXES:
        key = name.replace("#", "0")
        with pytest.raises(CheckpointError, match=rf"^{key}: the shapes .* do not fit .* format: {name} must have"):
            map_keys(shapes | {key: (4,)})
    del shapes["patch_embed.proj.weight"]
    with pytest.raises(
        CheckpointError, match=r"does not contain patch_embed.proj.weight, which the timm format requires"
    ):
        infer_geometry(map_keys(shapes), shapes)
    for patch in ((8, 4), (0, 0)):
        shapes["patch_embed.proj.weight"] = (16, 3, *patch)
        with pytest.raises(
            CheckpointError, match=f"{patch[0]} x {patch[1]} pixels. vitlite supports only square patches"
        ):
            infer_geometry(map_keys(shapes), shapes)


def test_the_way_back_undoes_the_way_in() -> None:
    in_pieces = ("first", "others")  # of one of theirs: see what is written, and read back
    for op, back in INVERSE_OPS.items():
        for parts in (1, 2, 3) if op not in in_pieces else ():
            shape = {"table": (1, 12, 6), "grid": (1, 9, 6), "kernel": (6, 3, 4, 4), "patches": (6, 3, 4, 4)}
            tensor = torch.randn(shape.get(op, (12, 6)))
            if op == "zeros_between":
                tensor[4:8] = 0
            assert torch.equal(OPS[op](back(tensor, parts), None), tensor)
    with pytest.raises(CheckpointError, match="no bias for keys, but this model has one"):
        INVERSE_OPS["zeros_between"](torch.ones(12), 2)
