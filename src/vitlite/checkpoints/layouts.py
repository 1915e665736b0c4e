"""What each library calls the tensors of a ViT. The tables are in data/formats.txt; here they are read.

`translate` reads a file by them, `to_their_names` writes one.
"""

import json
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vitlite.config import Pool, Resample
from vitlite.errors import CheckpointError


def _patch_side(length: int, patch: int | None) -> int:
    """The side of the patch in a flattened one: what is known, else that of three colours, else of one."""
    if patch and length % patch**2 == 0:
        return patch
    if not patch:
        for side in (math.isqrt(length // 3), math.isqrt(length)):
            if side and length in (3 * side**2, side**2):
                return side
    raise ValueError(f"a flattened patch of {length} numbers has neither 3 channels nor 1; give its config patch_size")


def _patches(parts: Sequence[Tensor], patch: int | None) -> Tensor:
    """The patch projection -> (d, c, p, p): Flax's (p, p, c, d), and vit-pytorch's (d, p p c)."""
    x = parts[0]
    if x.ndim == 2:
        side = _patch_side(x.shape[1], patch)
        return rearrange(x, "d (p q c) -> d c p q", p=side, q=side)
    if x.ndim == 4:
        return rearrange(x, "p q c d -> d c p q")
    return x  # a bias


def _patch_norm(parts: Sequence[Tensor], patch: int | None) -> Tensor:
    """The norm before vit-pytorch's patch projection, (p p c) -> (c p p)."""
    side = _patch_side(len(parts[0]), patch)
    return rearrange(parts[0], "(p q c) -> (c p q)", p=side, q=side)


def _heads_qkv(parts: Sequence[Tensor], patch: int | None) -> Tensor:
    """Flax's queries, keys and values: kernels (d, heads, head_dim), or biases (heads, head_dim)."""
    flat = [x.flatten(1).t() if x.ndim == 3 else x.flatten() for x in parts]
    return _joined(flat)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Queries, keys and values in one, or gate and value, of which ours are cut out in equal parts."""
    if len({part.shape for part in parts}) > 1:
        raise ValueError(f"parts that are to be equally large are {', '.join(str(tuple(x.shape)) for x in parts)}")
    return torch.cat(tuple(parts))


def _heads_out(parts: Sequence[Tensor], patch: int | None) -> Tensor:
    """Flax's projection after attention: a kernel (heads, head_dim, d), or a bias (d)."""
    return parts[0].flatten(0, 1).t() if parts[0].ndim == 3 else parts[0]


def _rows_of(parts: Sequence[Tensor], patch: int | None) -> Tensor:
    """A token with its rows of the position table: (1, r, d), the table, and the tokens that have rows before it."""
    token, table, *before = parts
    first = sum(other.shape[1] for other in before)
    return token + table[:, first : first + token.shape[1]]


def _rows_after(parts: Sequence[Tensor], patch: int | None) -> Tensor:
    """The rows of a position table after those of tokens, which follow it."""
    table, *tokens = parts
    return table[:, sum(token.shape[1] for token in tokens) :]


# How their tensors, one or more, become ours. Where patches are flattened, the size of a patch may have to be known.
OPS: dict[str, Callable[[Sequence[Tensor], int | None], Tensor]] = {
    "same": lambda parts, _: parts[0],
    "joined": lambda parts, _: _joined(parts),
    "zeros_between": lambda parts, _: _joined([parts[0], torch.zeros_like(parts[0]), parts[1]]),
    "two_heads": lambda parts, _: torch.cat(tuple(parts), dim=1) / 2,
    "two_biases": lambda parts, _: (parts[0] + parts[1]) / 2,
    "masked": lambda parts, _: parts[0] * parts[1].to(parts[0].dtype),
    "first": lambda parts, _: parts[0].tensor_split(3)[0],  # of queries, keys and values
    "others": lambda parts, _: parts[0][parts[0].shape[0] // 3 :],
    "flat": lambda parts, _: parts[0].flatten(),
    "table": lambda parts, _: parts[0].reshape(1, -1, parts[0].shape[-1]),
    "transposed": lambda parts, _: parts[0].t(),
    "heads_qkv": _heads_qkv,
    "heads_out": _heads_out,
    "patches": _patches,
    "patch_norm": _patch_norm,
    "rows_of": _rows_of,
    "rows_after": _rows_after,
}


def _without_keys(bias: Tensor, parts: int) -> Sequence[Tensor]:
    """The biases of queries and values, where the library has none for keys.

    Raises:
        CheckpointError: There is one for keys.
    """
    queries, keys, values = bias.chunk(3)
    if keys.any():
        raise CheckpointError("timm's Eva has no bias for keys, and this model's are not zero.")
    return queries, values


# How ours become theirs, so many, for the layouts that are written.
REVERSED_OPS: dict[str, Callable[[Tensor, int], Sequence[Tensor]]] = {
    "same": lambda x, _: [x],
    "joined": lambda x, parts: x.chunk(parts),
    "zeros_between": _without_keys,
    "two_heads": lambda x, _: (2 * x).chunk(2, dim=1),
    "two_biases": lambda x, _: [x, x.clone()],
    "table": lambda x, _: [x.squeeze(0)],
    "first": lambda x, _: [x],
    "others": lambda x, _: [x],
}


class Rule(NamedTuple):
    """One tensor of a row of a table; '#' is the number of a block, or of a stage and then of a unit of the stem."""

    ours: str
    theirs: tuple[str, ...]
    op: str


def numbered(name: str, numbers: Sequence[int]) -> str:
    """A name of a table with its numbers in place of '#', and of '#+', which counts from one."""
    rest = iter(numbers)
    return re.sub(r"#\+?", lambda mark: str(next(rest) + len(mark[0]) - 1), name)


def row_of(ours: str) -> tuple[str, list[int]]:
    """In which row of a table one of our tensors is, and its numbers."""
    return re.sub(r"\.\d+\.", ".#.", ours), [int(number) for number in re.findall(r"\.(\d+)\.", ours)]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The names one library gives to the tensors of a ViT; its fields are explained in data/formats.txt."""

    name: str
    rules: list[Rule] = field(default_factory=list)
    prefixes: Sequence[str] = ()
    dropped: str = "(?!)"
    outside: str = "(?!)"
    needs: str | None = None
    without: Sequence[str] = ()
    written_only: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    assumed: Sequence[str] = ()
    pools: Sequence[Pool] = ("cls", "mean", "mean_with_cls", "cls_and_mean")
    cls_rows: Sequence[bool] = (True,)
    folds: Sequence[str] = ()
    may_fold: bool = False
    resample: Sequence[Resample] = ("timm", "timm")
    bare_head: bool = False
    bare_proj: bool = False

    def full_name(self, prefix: str, theirs: str, numbers: Sequence[int]) -> str:
        """Their name as it stands in a file; '^' marks one that never has the prefix."""
        return numbered(theirs[1:] if theirs.startswith("^") else prefix + theirs, numbers)

    def spell(self, prefix: str, ours: str) -> tuple[str, ...]:
        """What one of our tensors is called in a file, in the first spelling; by our name where there is none."""
        row, numbers = row_of(ours)
        for rule in self.rules:
            if rule.ours == row:
                return tuple(self.full_name(prefix, name, numbers) for name in rule.theirs)
        return (ours,)

    def may_have(self, prefix: str, names: Container[str]) -> bool:
        """Whether a file with these names and this prefix has what the layout always has, and nothing it never has."""
        if self.needs is not None and self.full_name(prefix, self.needs, ()) not in names:
            return False
        return not any(self.full_name(prefix, name, ()) in names for name in self.without)

    def drops(self, prefix: str, name: str) -> bool:
        """Whether a tensor of a file is known to be no part of the ViT."""
        if name.startswith(prefix):
            return re.fullmatch(self.dropped, name.removeprefix(prefix)) is not None
        return re.fullmatch(self.outside, name) is not None


def to_their_names(layout: Layout, prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under another layout's names.

    Raises:
        CheckpointError: The layout has no name for some of them.
    """
    rule_of = {rule.ours: rule for rule in reversed(layout.rules)}
    unknown = sorted(name for name in tensors if row_of(name)[0] not in rule_of)
    if unknown:
        raise CheckpointError(f"The {layout.name} layout has no place for: {', '.join(unknown)}.")
    tensors = _with_token_rows(layout, tensors)
    renamed: dict[str, Tensor] = {}
    for name in tensors:
        rule = rule_of[row_of(name)[0]]
        parts = REVERSED_OPS[rule.op](tensors[name], len(rule.theirs))
        for theirs, part in zip(layout.spell(prefix, name), parts, strict=True):
            renamed[theirs] = part if theirs not in renamed else _together(renamed[theirs], part, rule.op)
    return renamed


def _together(there: Tensor, part: Tensor, op: str) -> Tensor:
    """One tensor of theirs, of two of ours, whichever comes first."""
    return torch.cat([part, there] if op == "first" else [there, part])


def _with_token_rows(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The position table with zeros for tokens that have rows there in a layout: they keep what was added to them."""
    changed = dict(tensors)
    if layout.folds and not layout.may_fold and {"reg_token", "pos_embed"} <= tensors.keys():
        rows = sum(tensors[name].shape[1] for name in layout.folds)
        changed["pos_embed"] = F.pad(tensors["pos_embed"], (0, 0, rows, 0))
    return changed


def _rules(line: str, flax: bool) -> list[Rule]:
    """What a row of a table says: of one tensor, or of a weight and a bias."""
    ours, theirs, op = (*line.split(), "same")[:3]
    stem, _, several = theirs.partition("{")
    names = [stem + name for name in several.rstrip("}").split(",")]
    endings = [(".weight", ".weight"), (".bias", ".bias")]  # theirs and ours
    if re.fullmatch(r".+_token|pos_embed|.+\.(gamma|latent|weight|bias)", ours):
        endings = [("", "")]
    elif flax:
        endings = [("/kernel", ".weight"), ("/scale", ".weight"), ("/bias", ".bias")]
    rules = []
    for their_ending, our_ending in endings:
        their_names = tuple(name + their_ending for name in names)
        rules.append(Rule(ours + our_ending, their_names, op))
    return rules


def _layout(name: str, section: str, before: Mapping[str, Layout]) -> Layout:
    """A section of data/formats.txt: settings, `name = JSON`, and rows."""
    options: dict[str, Any] = {}
    rules: list[Rule] = []
    for line in section.splitlines():
        setting = re.fullmatch(r"(\w+) = (.+)", line)
        if setting:
            options[setting[1]] = json.loads(setting[2])
        elif line and not line.startswith("#"):
            rules += _rules(line, options.get("flax", False))
    options.pop("flax", None)
    if "rows" in options:
        rules += before[options.pop("rows")].rules
    return Layout(name=name, rules=rules, **options)


def _read_tables() -> tuple[dict[str, Layout], dict[str, str]]:
    """The layouts of data/formats.txt by name, and its patterns of what is refused, with the reasons."""
    text = (Path(__file__).parent / "data" / "formats.txt").read_text(encoding="utf-8")
    tables, _, refused = text.partition("[refused]\n")
    layouts: dict[str, Layout] = {}
    for part in re.split(r"(?m)^\[", tables)[1:]:
        name, _, section = part.partition("]")
        layouts[name] = _layout(name, section, layouts)
    reasons = {}
    for line in refused.splitlines():
        pattern, reason = re.split(" {2,}", line)
        reasons[pattern] = reason
    return layouts, reasons


LAYOUTS, REFUSED = _read_tables()
