"""A file's tensor names <-> ours, and what its tensors say of the model. The tables are in data/layouts.txt."""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from einops import EinopsError, rearrange
from torch import Tensor

from vitlite.config import Pool, Resample
from vitlite.errors import CheckpointError

Shape = tuple[int, ...]


def _side(n: int, patch: int | None) -> int:
    """The side of the patch in a flattened one: what is known, else that of three colours, else of one."""
    side = patch or next((side for side in (math.isqrt(n // 3), math.isqrt(n)) if n in (3 * side**2, side**2)), 0)
    if side and n % side**2 == 0:
        return side
    raise ValueError(f"a flattened patch of {n} numbers has neither 3 channels nor 1; give its config patch_size")


def _patches(parts: Sequence[Tensor], patch: int | None) -> Tensor:
    """The patch projection -> (d, c, p, p): Flax's (p, p, c, d), and vit-pytorch's (d, p p c)."""
    x = parts[0]
    if x.ndim == 2:
        side = _side(x.shape[1], patch)
        return rearrange(x, "d (p q c) -> d c p q", p=side, q=side)
    return rearrange(x, "p q c d -> d c p q") if x.ndim == 4 else x  # a bias


def _patch_norm(parts: Sequence[Tensor], patch: int | None) -> Tensor:
    """The norm before vit-pytorch's patch projection, (p p c) -> (c p p)."""
    side = _side(len(parts[0]), patch)
    return rearrange(parts[0], "(p q c) -> (c p q)", p=side, q=side)


# How their tensors, one or more, become ours. Where patches are flattened, the size of a patch may have to be known.
OPS: dict[str, Callable[[Sequence[Tensor], int | None], Tensor]] = {
    "same": lambda parts, _: parts[0],
    "qkv": lambda parts, _: torch.cat(tuple(parts)),
    "table": lambda parts, _: parts[0].reshape(1, -1, parts[0].shape[-1]),
    "transposed": lambda parts, _: parts[0].t(),
    "heads_qkv": lambda parts, _: torch.cat([x.flatten(1).t() if x.ndim == 3 else x.flatten() for x in parts]),
    "heads_out": lambda parts, _: parts[0].flatten(0, 1).t() if parts[0].ndim == 3 else parts[0],
    "patches": _patches,
    "patch_norm": _patch_norm,
    "plus_row_0": lambda parts, _: parts[0] + parts[1][:, :1],
    "plus_row_1": lambda parts, _: parts[0] + parts[1][:, 1:2],
    "rows_from_1": lambda parts, _: parts[0][:, 1:],
    "rows_from_2": lambda parts, _: parts[0][:, 2:],
}
AXES = {  # of the tensors that a config is read from
    "cls_token": 3, "reg_token": 3, "pos_embed": 3, "patch_embed.proj.weight": 4, "blocks.#.attn.qkv.weight": 2,
    "blocks.#.mlp.fc1.weight": 2, "pre_logits.weight": 2, "head.weight": 2,
}  # fmt: skip
MARKS = [f"blocks.#.{part}.weight" for part in ("norm1", "norm2", "mlp.fc1")]  # by which a ViT is recognised
BACK: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {"same": lambda x: [x], "qkv": lambda x: x.chunk(3)}


class Rule(NamedTuple):
    """One tensor of a row of a table; '#' is the number of a block."""

    ours: str
    theirs: tuple[str, ...]
    op: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The names one library gives to the tensors of a ViT; its fields are explained in data/layouts.txt."""

    name: str
    rules: list[Rule] = field(default_factory=list)
    prefixes: Sequence[str] = ()
    dropped: str = "(?!)"
    outside: str = "(?!)"
    needs: str | None = None
    without: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    assumed: Sequence[str] = ()
    pools: Sequence[Pool] = get_args(Pool)
    cls_rows: Sequence[bool] = (True,)
    folds: Sequence[str] = ()
    resample: Sequence[Resample] = ("timm", "timm")
    bare_head: bool = False
    bare_proj: bool = False

    def full(self, prefix: str, theirs: str, block: str) -> str:
        """Their name as it stands in a file."""
        return (theirs[1:] if theirs[0] == "^" else prefix + theirs).replace("#", block)

    def spell(self, prefix: str, ours: str) -> tuple[str, ...]:
        """What one of our tensors is called in a file, in the first spelling; by our name where there is none."""
        block = "".join(re.findall(r"\.(\d+)\.", ours))
        for rule in self.rules:
            if rule.ours.replace("#", block) == ours:
                return tuple(self.full(prefix, name, block) for name in rule.theirs)
        return (ours,)


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
    found: dict[str, Found]
    dropped: list[str]
    extra: list[str]


def detect(names: Collection[str]) -> tuple[Layout, str]:
    """The one layout, and its prefix, that has a first block among these names.

    Raises:
        CheckpointError: none has, or more than one; what the names were.
    """
    fits = {}
    for layout in LAYOUTS.values():
        for prefix in sorted(("", *layout.prefixes), key=len, reverse=True):
            first = {layout.full(prefix, rule.theirs[0], "0"): rule.ours for rule in layout.rules if rule.ours in MARKS}
            marks = {ours for name, ours in first.items() if name in names or _stacked(name) in names}
            if len(marks) > 1 and layout.without not in names and (layout.needs is None or layout.needs in names):
                fits[layout.name] = layout, prefix
                break
    if len(fits) == 1:
        return next(iter(fits.values()))
    seen = ", ".join(sorted({re.sub(r"\d+", "#", name) for name in names})[:12])
    which = f"more than one ViT ({', '.join(fits)})" if fits else "no ViT that vitlite knows"
    raise CheckpointError(f"The names of its tensors are those of {which}: {seen}, ... Known: {', '.join(LAYOUTS)}.")


def translate(shapes: Mapping[str, Shape], patch: int | None = None) -> Translation:
    """Finds our tensors among a file's, from names and shapes alone; `patch`: the size of a patch, if it is known.

    Raises:
        CheckpointError: it is no ViT of a known layout, or its shapes are not of that layout.
    """
    layout, prefix = detect(shapes)
    found: dict[str, Found] = {}
    for rule, block in _rows(layout, prefix, shapes):
        parts, row = tuple(layout.full(prefix, name, str(block)) for name in rule.theirs), None
        if parts[0] not in shapes:
            parts, row = tuple(map(_stacked, parts)), block
        ours = rule.ours.replace("#", str(block))
        if ours not in found and all(part in shapes for part in parts):
            found[ours] = Found(parts, rule.op, _shape(rule, parts, shapes, row, patch), row)
    used = {part for tensor in found.values() for part in tensor.parts}
    if "cls_token" in found and 0 in found["cls_token"].shape:  # vit-pytorch keeps an empty one where it pools the mean
        del found["cls_token"]
    _fold(layout, found)
    if layout.bare_head and "head.weight" in found:
        found["head.bias"] = Found((), "zeros", found["head.weight"].shape[:1])
    if layout.bare_proj and not any(".attn.proj." in name for name in found):
        for name, tensor in list(found.items()):
            dim = tensor.shape[-1]
            if name.endswith(".attn.qkv.weight") and tensor.shape[0] == 3 * dim:
                found[name.replace("qkv", "proj")] = Found((), "identity", (dim, dim))
                found[name.replace("qkv.weight", "proj.bias")] = Found((), "zeros", (dim,))
    pattern = (
        re.escape(prefix) + f"({layout.dropped})" + (f"|(?!{re.escape(prefix)})({layout.outside})" if prefix else "")
    )
    rest = [name for name in shapes if name not in used]
    dropped = [name for name in rest if re.fullmatch(pattern, name)]
    return Translation(layout, prefix, found, dropped, [name for name in rest if name not in dropped])


def facts(translation: Translation, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """What the tensors alone say: fields of the config, and `attention_dim` and `position_rows`.

    Raises:
        CheckpointError: what every ViT has is missing, or something is found that no plain ViT has.
    """
    for name in translation.extra:
        for pattern, why in REFUSED.items():
            if re.fullmatch(pattern, name):
                raise CheckpointError(f"This is no plain ViT: {why} ({name}). vitlite runs plain ViTs only.")
    found = translation.found
    flax = ("pos_embed",) if translation.layout.name in ("google", "big_vision") else ()  # else by a formula of its own
    for name in ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight", *flax):
        if name not in found:
            theirs = ", ".join(translation.layout.spell(translation.prefix, name))
            raise CheckpointError(f"It has no {theirs}, which every file of the {translation.layout.name} layout has.")

    def has(start: str) -> bool:
        return any(name.startswith(start) for name in found)

    (dim, channels, patch, across), qkv = found["patch_embed.proj.weight"].shape, found["blocks.0.attn.qkv.weight"]
    if patch != across or patch == 0:
        raise CheckpointError(f"Its patches are {patch} x {across} pixels; vitlite's are square.")
    classes, width = found["head.weight"].shape if "head.weight" in found else (0, dim)
    known: dict[str, Any] = {
        "patch_size": patch,
        "channels": channels,
        "dim": dim,
        "depth": 1 + max(int(name.split(".")[1]) for name in found if name.startswith("blocks.")),
        "mlp_dim": found["blocks.0.mlp.fc1.weight"].shape[0],
        "class_token": "cls_token" in found,
        "registers": found["reg_token"].shape[1] if "reg_token" in found else 0,
        "qkv_bias": "blocks.0.attn.qkv.bias" in found,
        "pre_norm": has("norm_pre."),
        "patch_norm": has("patch_embed.norm"),
        "inner_norm": has("blocks.0.attn.norm."),
        "fc_norm": has("fc_norm."),
        "layer_scale": has("blocks.0.ls"),
        "pre_logits": found["pre_logits.weight"].shape[0] if "pre_logits.weight" in found else 0,
        "num_classes": classes,
        "attention_dim": qkv.shape[0] // 3,
        "position_rows": found["pos_embed"].shape[1] if "pos_embed" in found else None,
    }
    if not known["class_token"]:
        known["pool"] = "mean"
    elif width == 2 * dim and not known["pre_logits"]:
        known["pool"] = "cls_and_mean"
    elif translation.layout.bare_proj and len(shapes["cls_token"]) == 2:
        known["pool"] = "cls"  # vit-pytorch from 1.16.1 on has a class token only where it pools it
    if qkv.op == "heads_qkv":
        known["heads"] = shapes[qkv.parts[0]][-2]
    if found.get("blocks.0.attn.proj.weight", qkv).op == "identity":
        known["heads"] = 1
    return known


def to_theirs(layout: Layout, prefix: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Our tensors under another layout's names.

    Raises:
        CheckpointError: the layout has no name for some of them.
    """
    ops = {rule.ours: rule.op for rule in reversed(layout.rules)}
    named = {name: re.sub(r"\.\d+\.", ".#.", name) for name in tensors}
    if unknown := sorted(name for name, row in named.items() if row not in ops):
        raise CheckpointError(f"The {layout.name} layout has no place for: {', '.join(unknown)}.")
    for name, row in named.items():
        yield from zip(layout.spell(prefix, name), BACK[ops[row]](tensors[name]), strict=True)


def _rows(layout: Layout, prefix: str, shapes: Mapping[str, Shape]) -> Iterator[tuple[Rule, int]]:
    """Every row of the table, with every block there is."""
    stems = {re.escape(prefix + rule.theirs[0].partition("#")[0]) for rule in layout.rules if "#" in rule.ours}
    numbers = [re.match(f"(?:{'|'.join(stems)})(\\d+)", name) for name in shapes]
    depths = [min(1 + int(number[1]), len(shapes)) for number in numbers if number]  # beyond, some are missing
    depths += [shapes[name][0] for name in shapes if "/encoderblock/" in name and shapes[name]]
    for rule in layout.rules:
        for block in range(max(depths, default=0) if "#" in rule.ours else 1):
            yield rule, block


def _stacked(name: str) -> str:
    """What big_vision calls the tensor that holds all blocks, for that of one block."""
    return re.sub(r"/encoderblock_\d+/", "/encoderblock/", name)


def _fold(layout: Layout, found: dict[str, Found]) -> None:
    """Adds the rows that tokens have in the position table to the tokens: our table then covers the patches only."""
    if not layout.folds or not {"reg_token", "cls_token", "pos_embed"} <= found.keys():
        return
    table, rows = found["pos_embed"], len(layout.folds)
    for i, name in enumerate(layout.folds):
        found[name] = found[name]._replace(parts=found[name].parts + table.parts, op=f"plus_row_{i}")
    shape = (1, table.shape[1] - rows, table.shape[2])
    found["pos_embed"] = table._replace(op=f"rows_from_{rows}", shape=shape)


def _shape(rule: Rule, parts: Sequence[str], shapes: Mapping[str, Shape], row: int | None, patch: int | None) -> Shape:
    """The shape of what a rule makes, by doing it without data."""
    theirs = [shapes[part][0 if row is None else 1 :] for part in parts]
    try:
        same = rule.op == "same"
        made = theirs[0] if same else OPS[rule.op]([torch.empty(shape, device="meta") for shape in theirs], patch).shape
        if len(made) != AXES.get(rule.ours, len(made)):
            raise ValueError(f"a ViT's {rule.ours} has {AXES[rule.ours]} axes")
        return tuple(made)
    except (RuntimeError, IndexError, ValueError, EinopsError) as error:
        raise CheckpointError(f"{', '.join(parts)}: the shapes {theirs} are not of this layout: {error}") from error


def _rules(line: str, flax: bool) -> list[Rule]:
    """What a row of a table says: of one tensor, or of a weight and a bias."""
    ours, theirs, op = (*line.split(), "same")[:3]
    start, _, several = theirs.partition("{")
    endings = [(".weight", ".weight"), (".bias", ".bias")]  # theirs and ours
    if re.fullmatch(r".+_token|pos_embed|.+\.(gamma|weight|bias)", ours):
        endings = [("", "")]
    elif flax:
        endings = [("/kernel", ".weight"), ("/scale", ".weight"), ("/bias", ".bias")]
    names = [start + name for name in several.rstrip("}").split(",")]
    return [Rule(ours + our, tuple(name + their for name in names), op) for their, our in endings]


def _tables() -> tuple[dict[str, Layout], dict[str, str]]:
    """The layouts of data/layouts.txt by name, and its patterns of what is refused, with the reasons."""
    text = (Path(__file__).parent / "data" / "layouts.txt").read_text(encoding="utf-8")
    tables, _, refused = text.partition("[refused]\n")
    found: dict[str, Layout] = {}
    for section in re.split(r"(?m)^\[", tables)[1:]:
        name, _, body = section.partition("]")
        lines = [line for line in body.splitlines() if line and not line.startswith("#")]
        options = {key: json.loads(value) for key, value in re.findall(r"(?m)^(\w+) = (.+)$", body)}
        rules = found[options.pop("rows")].rules if "rows" in options else []
        flax = "Transformer/encoderblock" in body
        rules = [rule for line in lines if " = " not in line for rule in _rules(line, flax)] + rules
        found[name] = Layout(name=name, rules=rules, **options)
    return found, dict(re.split(" {2,}", line) for line in refused.splitlines())


LAYOUTS, REFUSED = _tables()
