"""The tables of tensor names: each layout is recognised by its keys alone, and what is written is read back."""

import re

import pytest
import torch

from vitlite import ViT, ViTConfig
from vitlite.checkpoints.layouts import LAYOUTS, OPS, REVERSED_OPS, Layout, to_their_names
from vitlite.checkpoints.translate import AXES, detect, facts_of, translate
from vitlite.errors import CheckpointError

READ = {name: layout for name, layout in LAYOUTS.items() if not layout.written_only}
TINY = ViTConfig(image_size=16, patch_size=8, dim=16, depth=2, heads=2, mlp_dim=24, num_classes=3)


HAS_NONE = {"transformers-dinov3": {"pos_embed", "head"}, "transformers-siglip": {"cls_token"}}
TAKES_A_ROW_TWICE = ("vit-pytorch", "timm-distilled")  # a layout that has its rows beside those of another


def first_block(layout: Layout, prefix: str = "") -> set[str]:
    """The names of a file of this layout, with one block."""
    names = {layout.full_name(prefix, theirs, (0, 0)) for rule in layout.rules for theirs in rule.theirs}
    return names - {layout.full_name(prefix, name, ()) for name in layout.without}


@pytest.mark.parametrize("layout", READ.values(), ids=READ)
def test_each_layout_is_recognised_by_its_keys_with_every_prefix(layout: Layout) -> None:
    for prefix in ("", *layout.prefixes):
        assert detect(first_block(layout, prefix)) == (layout, prefix)


def test_no_layout_or_two_is_an_error_that_lists_what_was_seen() -> None:
    with pytest.raises(
        CheckpointError,
        match=r"no ViT that vitlite knows: conv#.weight, fc.bias, ... Known: timm, timm-",
    ):
        detect(["conv1.weight", "conv2.weight", "fc.bias"])
    both = first_block(LAYOUTS["timm"]) | first_block(LAYOUTS["torchvision"])
    with pytest.raises(CheckpointError, match=r"more than one ViT \(timm, torchvision\): attn_pool"):
        detect(both)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_tables_are_whole(layout: Layout) -> None:
    ours = {rule.ours.removesuffix(".weight").removesuffix(".bias") for rule in layout.rules}
    needed = {"cls_token", "pos_embed", "patch_embed.proj", "norm", "head"}
    needed |= {f"blocks.#.{part}" for part in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")}
    assert needed - HAS_NONE.get(re.sub("-(classifier|plain)", "", layout.name), set()) <= ours
    assert {rule.op for rule in layout.rules} <= OPS.keys()
    theirs = [(rule.theirs, rule.op) for rule in layout.rules]
    if not (layout.written_only or layout.name in TAKES_A_ROW_TWICE):
        assert len(theirs) == len(set(theirs)), "two rows read the same tensor in the same way"


WRITTEN = {
    "timm": TINY,
    "transformers": TINY,
    "transformers-dinov2": TINY.replace(layer_scale=0.1),
    "transformers-dinov3": TINY.replace(layer_scale=0.1, positions="rope", registers=2, num_classes=0, mlp="swiglu"),
    "transformers-siglip": TINY.replace(pool="map", class_token=False, num_classes=0),
    "torchvision": TINY,
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("prefixed", [False, True])
def test_what_is_written_is_read_back(name: str, prefixed: bool) -> None:
    layout = LAYOUTS[name]
    prefix = layout.prefixes[0] if prefixed and layout.prefixes else ""
    state = {key: torch.randn(tensor.shape) for key, tensor in ViT(WRITTEN[name]).state_dict().items()}
    backwards = dict(reversed(state.items()))
    theirs = to_their_names(layout, prefix, backwards)
    translation = translate({key: tuple(tensor.shape) for key, tensor in theirs.items()})
    assert (translation.layout, translation.prefix) == (layout, prefix)
    assert not translation.unknown
    assert translation.found.keys() == state.keys()
    for key, found in translation.found.items():
        assert torch.equal(OPS[found.op]([theirs[part] for part in found.parts], None), state[key])
        assert found.parts == layout.spell(prefix, key)


def test_a_layout_without_a_place_for_a_tensor_says_so() -> None:
    state = ViT(TINY.replace(pre_norm=True, layer_scale=1e-5)).state_dict()
    with pytest.raises(
        CheckpointError, match=r"torchvision layout has no place for: blocks.0.ls1.gamma, .*norm_pre.bias"
    ):
        to_their_names(LAYOUTS["torchvision"], "", state)


def test_only_declared_names_are_dropped() -> None:
    """In a CLIP the text tower's names look like the image tower's: inside the prefix nothing may be lost."""
    names = first_block(LAYOUTS["openai"], "visual.")
    shapes = dict.fromkeys(names, (4, 4)) | {"visual.conv1.weight": (4, 3, 2, 2)}
    text = {"transformer.resblocks.0.ln_1.weight": (4,), "text_projection": (4, 4)}
    inside = {"visual.transformer.resblocks.0.gate": (4,), "visual.text_projection": (4,)}
    translation = translate(shapes | text | inside)
    assert set(translation.dropped) == set(text)
    assert set(translation.unknown) == set(inside)
    bare = translate({name.removeprefix("visual."): shape for name, shape in (shapes | inside).items()})
    assert set(bare.unknown) == {"transformer.resblocks.0.gate", "text_projection"}


def test_shapes_of_no_layout_and_files_without_a_first_block() -> None:
    shapes = {key: tuple(tensor.shape) for key, tensor in ViT(TINY).state_dict().items()}
    theirs = to_their_names(LAYOUTS["transformers"], "", ViT(TINY).state_dict())
    odd = {key: tuple(tensor.shape) for key, tensor in theirs.items()}
    odd["encoder.layer.0.attention.attention.query.weight"] = (16, 17)
    with pytest.raises(CheckpointError, match=r"query.weight, .*key.weight, .* are not of this layout"):
        translate(odd)
    for name in AXES:
        key = name.replace("#", "0")
        with pytest.raises(CheckpointError, match=rf"^{key}: the shapes .* are not of this layout: a ViT's {name} has"):
            translate(shapes | {key: (4,)})
    del shapes["patch_embed.proj.weight"]
    with pytest.raises(
        CheckpointError, match=r"has no patch_embed.proj.weight, which every file of the timm layout has"
    ):
        facts_of(translate(shapes), shapes)
    for patch in ((8, 4), (0, 0)):
        shapes["patch_embed.proj.weight"] = (16, 3, *patch)
        with pytest.raises(CheckpointError, match=f"{patch[0]} x {patch[1]} pixels; vitlite's are square"):
            facts_of(translate(shapes), shapes)


def test_the_way_back_undoes_the_way_in() -> None:
    in_pieces = ("first", "others")  # of one of theirs: see what is written, and read back
    for op, back in REVERSED_OPS.items():
        for parts in (1, 2, 3) if op not in in_pieces else ():
            tensor = torch.randn((1, 12, 6) if op == "table" else (12, 6))
            if op == "zeros_between":
                tensor[4:8] = 0
            assert torch.equal(OPS[op](back(tensor, parts), None), tensor)
    with pytest.raises(CheckpointError, match="no bias for keys, and this model's are not zero"):
        REVERSED_OPS["zeros_between"](torch.ones(12), 2)
