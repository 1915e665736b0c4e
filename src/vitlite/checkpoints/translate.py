"""A file's tensor names and shapes, understood: whose they are, which of ours they make, what they say of the model.

Nothing here reads a value: shapes are followed without data.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from einops import EinopsError

from vitlite.checkpoints.layouts import LAYOUTS, OPS, REFUSED, Layout, Rule, numbered, row_of
from vitlite.checkpoints.reader import Shape
from vitlite.config import stem_stride
from vitlite.errors import CheckpointError

UNIT_MARK = "patch_embed.backbone.stages.#.blocks.#.conv1.weight"  # by which a unit of a stem is
MARKS = [f"blocks.#.{part}.weight" for part in ("norm1", "norm2", "mlp.fc1")]  # by which a ViT is recognised
MAY_LACK_TABLE = ("timm", "dinov3", "transformers-dinov3")  # a table of positions, which files of others always have
AXES = {  # of the tensors that a config is read from
    "cls_token": 3, "reg_token": 3, "pos_embed": 3, "patch_embed.proj.weight": 4, "blocks.#.attn.qkv.weight": 2,
    "blocks.#.mlp.fc1.weight": 2, "blocks.#.mlp.fc2.weight": 2, "attn_pool.latent": 3, "pre_logits.weight": 2,
    "head.weight": 2,
}  # fmt: skip
PARTS = {  # fields of the config that are True where a ViT has such a tensor
    "qkv_bias": "blocks.0.attn.qkv.bias",
    "pre_norm": "norm_pre.weight",
    "patch_norm": "patch_embed.norm.weight",
    "inner_norm": "blocks.0.attn.norm.weight",
    "fc_norm": "fc_norm.weight",
    "layer_scale": "blocks.0.ls1.gamma",
}


class Found(NamedTuple):
    """One of our tensors in a file: of which of the file's, and how. No parts: the layout's code defines it."""

    parts: tuple[str, ...]
    op: str
    shape: Shape
    row: int | None = None  # where big_vision stacks the blocks: which one


class Translation(NamedTuple):
    """A file's names, understood: where our tensors are, what is no part of the ViT, and what nobody knows."""

    layout: Layout
    prefix: str
    patch: int | None  # the size of a patch, where somebody said it
    found: dict[str, Found]
    dropped: list[str]
    unknown: list[str]

    @property
    def parts(self) -> list[str]:
        """The file's tensors that ours are made of."""
        return sorted({part for tensor in self.found.values() for part in tensor.parts})


def detect(names: Collection[str]) -> tuple[Layout, str]:
    """The one layout, and its prefix, that has a first block among these names.

    Raises:
        CheckpointError: None has, or more than one; what the names were.
    """
    fits: dict[str, tuple[Layout, str]] = {}
    known = [layout for layout in LAYOUTS.values() if not layout.written_only]
    for layout in known:
        prefix = _fitting_prefix(layout, names)
        if prefix is not None:
            fits[layout.name] = layout, prefix
    if len(fits) == 1:
        return next(iter(fits.values()))
    without_numbers = {re.sub(r"\d+", "#", name) for name in names}
    seen = ", ".join(sorted(without_numbers)[:12])
    which = f"more than one ViT ({', '.join(fits)})" if fits else "no ViT that vitlite knows"
    listed = ", ".join(layout.name for layout in known)
    raise CheckpointError(f"The names of its tensors are those of {which}: {seen}, ... Known: {listed}.")


def _fitting_prefix(layout: Layout, names: Collection[str]) -> str | None:
    """The prefix with which at least two tensors of a layout's first block are there; the longest, if several."""
    for prefix in sorted(("", *layout.prefixes), key=len, reverse=True):
        marks = set()
        for rule in layout.rules:
            name = layout.full_name(prefix, rule.theirs[0], (0, 0))
            if rule.ours in MARKS and (name in names or _stacked(name) in names):
                marks.add(rule.ours)
        if len(marks) > 1 and layout.may_have(prefix, names):
            return prefix
    return None


def translate(shapes: Mapping[str, Shape], patch: int | None = None) -> Translation:
    """Finds our tensors among a file's, from names and shapes alone; `patch`: the size of a patch, if it is known.

    Raises:
        CheckpointError: It is no ViT of a known layout, or its shapes are not of that layout.
    """
    layout, prefix = detect(shapes)
    found = _find_tensors(layout, prefix, shapes, patch)
    used = {part for tensor in found.values() for part in tensor.parts}
    for token in ("cls_token", "reg_token"):  # vit-pytorch and transformers keep an empty one where there is none
        if token in found and 0 in found[token].shape:
            del found[token]
    if not layout.may_fold:
        _fold_token_rows(layout, found)
    _supply_head_bias(layout, found)
    _supply_single_head(layout, found)
    dropped: list[str] = []
    unknown: list[str] = []
    for name in shapes:
        if name not in used:
            (dropped if layout.drops(prefix, name) else unknown).append(name)
    return Translation(layout, prefix, patch, found, dropped, unknown)


def _find_tensors(layout: Layout, prefix: str, shapes: Mapping[str, Shape], patch: int | None) -> dict[str, Found]:
    """Our tensors by the rows of a layout's table; of two spellings, the first that is there."""
    found: dict[str, Found] = {}
    for rule, numbers in _rules_for_all_blocks(layout, prefix, shapes):
        ours = numbered(rule.ours, numbers)
        parts = tuple(layout.full_name(prefix, name, numbers) for name in rule.theirs)
        row = None
        if parts[0] not in shapes:
            parts, row = tuple(_stacked(part) for part in parts), numbers[0]
        if ours not in found and all(part in shapes for part in parts):
            found[ours] = Found(parts, rule.op, _shape_made(rule, parts, shapes, row, patch), row)
    return found


def _rules_for_all_blocks(
    layout: Layout, prefix: str, names: Mapping[str, Shape]
) -> Iterator[tuple[Rule, tuple[int, int]]]:
    """Each rule with the numbers of every block, or of every stage and unit of a stem; as many as there may be."""
    depth = _depth(layout, prefix, names)
    units = _units(layout, prefix, names)
    for rule in layout.rules:
        marks = rule.ours.count("#")
        for numbers in units if marks == 2 else ((block, 0) for block in range(depth if marks else 1)):
            yield rule, numbers


def _units(layout: Layout, prefix: str, names: Iterable[str]) -> list[tuple[int, int]]:
    """The numbers of stages, and of their units, of a stem, by the names of what each unit has."""
    found = []
    for rule in layout.rules:
        if rule.ours == UNIT_MARK:
            theirs = rule.theirs[0]
            first = int("#+" in theirs)  # what they count from
            pattern = re.sub(r"\\#(?:\\\+)?", r"(\\d+)", re.escape(prefix + theirs))
            matches = [re.fullmatch(pattern, name) for name in names]
            found += [(int(match[1]) - first, int(match[2]) - first) for match in matches if match]
    return sorted(found)


def _depth(layout: Layout, prefix: str, shapes: Mapping[str, Shape]) -> int:
    """How many blocks a file has, by the highest number in its names, or by the axis along which they are stacked."""
    stems = {prefix + rule.theirs[0].partition("#")[0] for rule in layout.rules if rule.ours.count("#") == 1}
    number = re.compile(f"(?:{'|'.join(re.escape(stem) for stem in stems)})(\\d+)")
    depth = 0
    for name, shape in shapes.items():
        match = number.match(name)
        if match:
            depth = max(depth, min(1 + int(match[1]), len(shapes)))  # with more blocks than tensors, some are missing
        elif "/encoderblock/" in name and shape:
            depth = max(depth, shape[0])
    return depth


def _stacked(name: str) -> str:
    """What big_vision calls the tensor that holds all blocks, for that of one block."""
    return re.sub(r"/encoderblock_\d+/", "/encoderblock/", name)


def _shape_made(
    rule: Rule, parts: Sequence[str], shapes: Mapping[str, Shape], row: int | None, patch: int | None
) -> Shape:
    """The shape of what a rule makes, by doing it without data."""
    theirs = [shapes[part] if row is None else shapes[part][1:] for part in parts]
    try:
        made = theirs[0]
        if rule.op != "same":
            made = tuple(OPS[rule.op]([torch.empty(shape, device="meta") for shape in theirs], patch).shape)
        if len(made) != AXES.get(rule.ours, len(made)):
            raise ValueError(f"a ViT's {rule.ours} has {AXES[rule.ours]} axes")
    except (RuntimeError, IndexError, ValueError, EinopsError) as error:
        raise CheckpointError(f"{', '.join(parts)}: the shapes {theirs} are not of this layout: {error}") from None
    return made


def _tokens_with_rows(layout: Layout, found: Mapping[str, Found]) -> list[str]:
    """Beside registers: the tokens that have rows in the position table, or may have."""
    if not {"reg_token", "pos_embed"} <= found.keys():
        return []
    return [name for name in layout.folds if name in found]


def _fold_token_rows(layout: Layout, found: dict[str, Found]) -> None:
    """Adds the rows that tokens have in the position table to the tokens: our table then covers the patches only."""
    tokens = _tokens_with_rows(layout, found)
    if not tokens:
        return
    table = found["pos_embed"]
    parts = [found[name].parts[0] for name in tokens]
    for i, name in enumerate(tokens):
        found[name] = found[name]._replace(parts=(parts[i], *table.parts, *parts[:i]), op="rows_of")
    rows = table.shape[1] - sum(found[name].shape[1] for name in tokens)
    found["pos_embed"] = Found((*table.parts, *parts), "rows_after", (table.shape[0], rows, table.shape[2]))


def with_folded_rows(translation: Translation) -> Translation:
    """The same file, read so that its tokens have rows in the position table, where they may have or not."""
    found = dict(translation.found)
    _fold_token_rows(translation.layout, found)
    return translation._replace(found=found)


def _supply_head_bias(layout: Layout, found: dict[str, Found]) -> None:
    if layout.bare_head and "head.weight" in found:
        found["head.bias"] = Found((), "zeros", found["head.weight"].shape[:1])


def _supply_single_head(layout: Layout, found: dict[str, Found]) -> None:
    """vit-pytorch projects nothing after attention where a single head is as wide as the model."""
    if not layout.bare_proj or any(".attn.proj." in name for name in found):
        return
    for name, tensor in list(found.items()):
        dim = tensor.shape[-1]
        if name.endswith(".attn.qkv.weight") and tensor.shape[0] == 3 * dim:
            found[name.replace("qkv", "proj")] = Found((), "identity", (dim, dim))
            found[name.replace("qkv.weight", "proj.bias")] = Found((), "zeros", (dim,))


def facts_of(translation: Translation, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """What the tensors alone say: fields of the config, and beside them four facts that a config is worked out from.

    `attention_dim` is the width of all heads together, `position_rows` how many rows the position table has,
    `token_rows` how many of these may be of tokens before the patches, and `rotary` whether the absence of a table
    tells of attention that turns by position.

    Raises:
        CheckpointError: What every ViT has is missing, or something is found that no plain ViT has.
    """
    _refuse_other_networks(translation.unknown)
    _refuse_missing_parts(translation)
    found = translation.found
    blocks = [int(name.split(".")[1]) for name in found if name.startswith("blocks.")]
    facts: dict[str, Any] = {
        "depth": 1 + max(blocks),
        "class_token": "cls_token" in found,
        "registers": found["reg_token"].shape[1] if "reg_token" in found else 0,
        "pre_logits": found["pre_logits.weight"].shape[0] if "pre_logits.weight" in found else 0,
        "num_classes": found["head.weight"].shape[0] if "head.weight" in found else 0,
        "attention_dim": found["blocks.0.attn.qkv.weight"].shape[0] // 3,
    }
    for field, tensor in PARTS.items():
        facts[field] = tensor in found
    if "norm.weight" in found or "fc_norm.weight" in found:  # without one it may be lost: somebody has to say so
        facts["final_norm"] = True
    facts |= patch_facts(found) | _mlp_facts(found) | _table_facts(translation)
    _refuse_eva02(found, facts)
    facts |= _pool_facts(translation, shapes, facts) | _head_facts(translation, shapes)
    return facts | _rotation_facts(translation, shapes, facts)


def patch_facts(found: Mapping[str, Found]) -> dict[str, Any]:
    """What becomes a token, and how wide that is."""
    dim, channels, patch, across = found["patch_embed.proj.weight"].shape
    if patch != across or patch == 0:
        raise CheckpointError(f"Its patches are {patch} x {across} pixels; vitlite's are square.")
    stem = _stem_of(found)
    if stem is not None:
        channels = found[root_of(stem)].shape[1]
    return {"stem": stem, "patch_size": patch * stem_stride(stem), "channels": channels, "dim": dim}


def _mlp_facts(found: Mapping[str, Found]) -> dict[str, Any]:
    """How wide an MLP is, and whether its first layer is twice that: a gate, and what goes through it."""
    width = found["blocks.0.mlp.fc2.weight"].shape[1]
    gated = found["blocks.0.mlp.fc1.weight"].shape[0] == 2 * width
    return {"mlp_dim": width, "mlp": "swiglu" if gated else "gelu"}


def _table_facts(translation: Translation) -> dict[str, Any]:
    """How many rows the position table has, and how many of them are not of patches, or may not be."""
    layout, found = translation.layout, translation.found
    if "pos_embed" not in found:
        return {"position_rows": None, "token_rows": 0}
    rows = found["pos_embed"].shape[1]
    facts: dict[str, Any] = {"position_rows": rows, "token_rows": 0}
    if rows:
        facts["positions"] = "learned"
    if layout.may_fold:
        facts["token_rows"] = sum(found[name].shape[1] for name in _tokens_with_rows(layout, found))
    return facts


def _refuse_other_networks(unknown: Sequence[str]) -> None:
    for name in unknown:
        for pattern, reason in REFUSED.items():
            if re.fullmatch(pattern, name):
                raise CheckpointError(f"This is no plain ViT: {reason} ({name}). vitlite runs plain ViTs only.")


def _refuse_missing_parts(translation: Translation) -> None:
    layout = translation.layout
    needed = ["patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"]
    if layout.name not in MAY_LACK_TABLE:  # without it, positions are by a formula of their own, or turn
        needed.append("pos_embed")
    needed.append("blocks.0.mlp.fc2.weight")
    for name in needed:
        if name not in translation.found:
            theirs = ", ".join(layout.spell(translation.prefix, name))
            raise CheckpointError(f"It has no {theirs}, which every file of the {layout.name} layout has.")


def _pool_facts(translation: Translation, shapes: Mapping[str, Shape], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What is pooled, where the tensors tell."""
    if "attn_pool.latent" in translation.found:
        return {"pool": "map"}
    if not facts["class_token"]:
        return {"pool": "mean"}
    head = translation.found.get("head.weight")
    if head and head.op == "two_heads":
        return {"pool": "cls_and_distillation"}
    if head and head.shape[1] == 2 * facts["dim"] and not facts["pre_logits"] and not _may_be_distilled(translation):
        return {"pool": "cls_and_mean"}
    if translation.layout.bare_proj and len(shapes["cls_token"]) == 2:
        return {"pool": "cls"}  # vit-pytorch from 1.16.1 on has a class token only where it pools it
    return {}


def _stem_of(found: Mapping[str, Found]) -> tuple[int, ...] | None:
    """How many units each stage of a hybrid's stem has; None of a plain ViT.

    Raises:
        CheckpointError: It has other stages or units than 0, 1, 2, ..., or no root.
    """
    names = [name.split(".") for name in found if row_of(name)[0] == UNIT_MARK]
    if not names and root_of(()) not in found:
        return None
    units = Counter(int(name[3]) for name in names)
    stem = tuple(units[stage] for stage in range(len(units)))
    if root_of(stem) not in found or not all(stem) or len(stem) > 4:
        raise CheckpointError(f"Its stem is not that of a hybrid of the paper: it has units {stem} in its stages.")
    return stem


def root_of(stem: tuple[int, ...]) -> str:
    """The kernel that sees the pixels, of a hybrid with such a stem."""
    return f"patch_embed.backbone.{'stem.' if stem else ''}conv.weight"


def _may_be_distilled(translation: Translation) -> bool:
    """Whether a head on two tokens may be one on a class token and a register: vitlite saves a distilled DeiT so."""
    registers = translation.found.get("reg_token")
    return translation.layout.name == "timm" and registers is not None and registers.shape[1] == 1


def _rotation_facts(translation: Translation, shapes: Mapping[str, Shape], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What tells of rotary positions, which have no weights: DINOv3's periods, or a position table that is missing.

    `rotary` is "dinov3" or "other" where such a table is missed, and nobody may say that there is none.
    """
    periods = [name for name in translation.dropped if name.endswith(".periods")]
    if periods:
        width = 4 * shapes[periods[0]][0]  # of a head: a period for every four channels
        heads = facts["attention_dim"] // max(width, 1)
        return {"positions": "rope", "heads": heads, "rotary": None}
    if facts["position_rows"] or not facts["layer_scale"]:
        return {"rotary": None}
    return {"rotary": "dinov3" if facts["class_token"] and facts["registers"] else "other"}


def _refuse_eva02(found: Mapping[str, Found], facts: Mapping[str, Any]) -> None:
    bias = found.get("blocks.0.attn.qkv.bias")
    if facts["mlp"] == "swiglu" and facts["position_rows"] and bias and bias.op == "zeros_between":
        raise CheckpointError(
            "This is no plain ViT: a gated MLP, a position table, and no bias for keys are EVA-02's, whose attention "
            "has rotary positions of its own. vitlite runs plain ViTs only."
        )


def _head_facts(translation: Translation, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """How many heads there are, where the tensors tell."""
    qkv = translation.found["blocks.0.attn.qkv.weight"]
    proj = translation.found.get("blocks.0.attn.proj.weight")
    if proj and proj.op == "identity":
        return {"heads": 1}
    if qkv.op == "heads_qkv":
        return {"heads": shapes[qkv.parts[0]][-2]}
    return {}
