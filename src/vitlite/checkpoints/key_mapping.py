"""Map the tensor names of each library to vitlite's names, and infer the geometry of a ViT from the shapes.

data/formats.txt contains the names, with one section per checkpoint format. `map_keys` maps the names in a file to
vitlite's names, `rename_tensors` does the reverse, and `infer_geometry` infers fields of the config from the shapes.
`map_keys` and `infer_geometry` do not need the values of the tensors.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import EinopsError, rearrange
from torch import Tensor

from vitlite.checkpoints.reader import Shape
from vitlite.config import DINOV3_ROPE, Pool, Resample, Rotation, stem_stride
from vitlite.errors import CheckpointError

# A file has a format if at least two of these tensors have the names of the format.
FIRST_BLOCK = [f"blocks.#.{part}.weight" for part in ("norm1", "norm2", "mlp.fc1")]
STEM_UNIT = "patch_embed.backbone.stages.#.blocks.#.conv1.weight"  # one in each unit of a stem
MAY_LACK_POSITIONS = ("timm", "dinov3", "transformers-dinov3")  # formats of models with computed or rotary positions
AXES = {  # the number of axes of the tensors that determine the config
    "cls_token": 3, "reg_token": 3, "pos_embed": 3, "patch_embed.proj.weight": 4, "blocks.#.attn.qkv.weight": 2,
    "blocks.#.mlp.fc1.weight": 2, "blocks.#.mlp.fc2.weight": 2, "attn_pool.latent": 3, "pre_logits.weight": 2,
    "head.weight": 2,
}  # fmt: skip
INPUT_NORMS = {
    "norm_pre.weight": "tokens", "patch_embed.norm_in.weight": "patches", "patch_embed.norm.weight": "projected",
}  # fmt: skip
PARTS = {  # from a name in the geometry to the tensor whose existence makes it True
    "qkv_bias": "blocks.0.attn.qkv.bias",
    "layer_scale": "blocks.0.ls1.gamma",
}


# ---- Convert tensors of a file to vitlite's tensors


def _patch_side(length: int, patch_size: int | None) -> int:
    """Return the side of a flattened patch in pixels. If `patch_size` is None, assume 3 channels or otherwise 1."""
    if patch_size and length % patch_size**2 == 0:
        return patch_size
    if not patch_size:
        for side in (math.isqrt(length // 3), math.isqrt(length)):
            if side and length in (3 * side**2, side**2):
                return side
    raise ValueError(f"cannot tell the side of a flattened patch of {length} values. Pass its patch_size in config=")


def _patches(parts: Sequence[Tensor], patch_size: int | None) -> Tensor:
    """Convert the patch projection from Flax's (p, p, c, d) or vit-pytorch's (d, p p c) to (d, c, p, p)."""
    x = parts[0]
    if x.ndim == 2:
        side = _patch_side(x.shape[1], patch_size)
        return rearrange(x, "d (p q c) -> d c p q", p=side, q=side)
    if x.ndim == 4:
        return rearrange(x, "p q c d -> d c p q")
    return x  # a bias


def _patch_norm(parts: Sequence[Tensor], patch_size: int | None) -> Tensor:
    """Reorder the norm before vit-pytorch's patch projection: (p p c) -> (c p p)."""
    side = _patch_side(len(parts[0]), patch_size)
    return rearrange(parts[0], "(p q c) -> (c p q)", p=side, q=side)


def _heads_qkv(parts: Sequence[Tensor], patch_size: int | None) -> Tensor:
    """Join the query, key and value layers of Flax: weights (d, heads, head_dim), or biases (heads, head_dim)."""
    return _joined([x.flatten(1).t() if x.ndim == 3 else x.flatten() for x in parts])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the weights of layers, such as queries, keys and values. All must have the same shape."""
    if len({part.shape for part in parts}) > 1:
        raise ValueError(f"these tensors must have the same shape, got {', '.join(str(tuple(x.shape)) for x in parts)}")
    return torch.cat(tuple(parts))


def _rows_of(parts: Sequence[Tensor], patch_size: int | None) -> Tensor:
    """Add the rows of the position table that belong to a token to this token.

    `parts` contains the token, the table, and the tokens whose rows come first in the table.
    """
    token, table, *before = parts
    first = sum(other.shape[1] for other in before)
    return token + table[:, first : first + token.shape[1]]


def _rows_after(parts: Sequence[Tensor], patch_size: int | None) -> Tensor:
    """Return the rows of the position table that belong to patches.

    `parts` contains the table, and the tokens whose rows come first in the table.
    """
    table, *tokens = parts
    return table[:, sum(token.shape[1] for token in tokens) :]


# The operations in the last column of data/formats.txt. Each function takes tensors of the file and the patch size
# (None if unknown), and returns a tensor of vitlite.
OPS: dict[str, Callable[[Sequence[Tensor], int | None], Tensor]] = {
    "same": lambda parts, _: parts[0],
    "joined": lambda parts, _: _joined(parts),
    "zeros_between": lambda parts, _: _joined([parts[0], torch.zeros_like(parts[0]), parts[1]]),
    "two_heads": lambda parts, _: torch.cat(tuple(parts), dim=1) / 2,
    "two_biases": lambda parts, _: (parts[0] + parts[1]) / 2,
    "masked": lambda parts, _: parts[0] * parts[1].to(parts[0].dtype),
    "first": lambda parts, _: parts[0].tensor_split(3)[0],  # of queries, keys and values
    "others": lambda parts, _: parts[0][parts[0].shape[0] // 3 :],
    "kernel": lambda parts, size: _patches(parts, size) if parts[0].ndim == 2 else parts[0],
    "grid": lambda parts, _: parts[0].flatten(1, 2),
    "flat": lambda parts, _: parts[0].flatten(),
    "table": lambda parts, _: parts[0].reshape(1, -1, parts[0].shape[-1]),
    "transposed": lambda parts, _: parts[0].t(),
    "heads_qkv": _heads_qkv,
    "heads_out": lambda parts, _: parts[0].flatten(0, 1).t() if parts[0].ndim == 3 else parts[0],
    "patches": _patches,
    "patch_norm": _patch_norm,
    "rows_of": _rows_of,
    "rows_after": _rows_after,
}


def _without_keys(bias: Tensor, count: int) -> Sequence[Tensor]:
    """Return the biases of queries and values, for a format in which keys have no bias.

    Raises:
        CheckpointError: The bias of the keys is not zero.
    """
    queries, keys, values = bias.chunk(3)
    if keys.any():
        raise CheckpointError(
            "Cannot convert to timm: timm's Eva has no bias for keys, but this model has one. Convert to vitlite "
            "instead (--to vitlite)."
        )
    return queries, values


# The inverse operations, for formats that vitlite writes. Each function takes a tensor of vitlite and the number of
# tensors to return.
INVERSE_OPS: dict[str, Callable[[Tensor, int], Sequence[Tensor]]] = {
    "same": lambda x, _: [x],
    "joined": lambda x, count: x.chunk(count),
    "zeros_between": _without_keys,
    "two_heads": lambda x, _: (2 * x).chunk(2, dim=1),
    "two_biases": lambda x, _: [x, x.clone()],
    "table": lambda x, _: [x.squeeze(0)],
    "kernel": lambda x, _: [x],
    "patches": lambda x, _: [rearrange(x, "d c p q -> d (p q c)") if x.ndim == 4 else x],
    "grid": lambda x, _: [rearrange(x, "1 (h w) d -> 1 h w d", h=math.isqrt(x.shape[1]))],  # a square
    "first": lambda x, _: [x],
    "others": lambda x, _: [x],
}


# ---- The table of formats


class Rule(NamedTuple):
    """The names of one tensor in vitlite and in a checkpoint format. '#' is the index of a block, stage or unit."""

    ours: str
    theirs: tuple[str, ...]
    op: str


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """A checkpoint format: the tensor names of one library, and what its code implies about the config.

    data/formats.txt explains the fields.
    """

    name: str
    rules: list[Rule] = field(default_factory=list)
    prefixes: Sequence[str] = ()
    dropped: str = "(?!)"
    outside: str = "(?!)"
    needs: str | None = None
    without: Sequence[str] = ()
    written_only: bool = False
    # Values that the library's code implies. Tensors overrule these values, because one format covers several models: a
    # file without a class token has pool="mean", not the usual "cls". Metadata that contradicts a `fixed` value is an
    # error, except for the fields in `assumed`, whose values are only defaults.
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
        """Return the name of a tensor in a file, with prefix and block numbers. A name with a '^' gets no prefix."""
        name = theirs[1:] if theirs.startswith("^") else prefix + theirs
        return _numbered(name, numbers) if numbers else name

    def spell(self, prefix: str, ours: str) -> tuple[str, ...]:
        """Return the names in a file for one of vitlite's tensors, or vitlite's name if the format has none."""
        row, numbers = _row_and_numbers(ours)
        for rule in self.rules:
            if rule.ours == row:
                return tuple(self.full_name(prefix, name, numbers) for name in rule.theirs)
        return (ours,)

    def find_prefix(self, names: Container[str]) -> str | None:
        """Return the longest prefix under which `names` contains the first block of a ViT, or None if there is none."""
        for prefix in sorted(("", *self.prefixes), key=len, reverse=True):
            if self.needs is not None and self.full_name(prefix, self.needs, ()) not in names:
                continue
            if any(self.full_name(prefix, name, ()) in names for name in self.without):
                continue
            found = set()
            for rule in self.rules:
                if rule.ours in FIRST_BLOCK:
                    name = self.full_name(prefix, rule.theirs[0], (0,))
                    if name in names or _stacked(name) in names:
                        found.add(rule.ours)
            if len(found) > 1:
                return prefix
        return None

    def drops(self, prefix: str, name: str) -> bool:
        """Return whether the format marks a tensor as one that is not part of the ViT and can be left out."""
        if name.startswith(prefix):
            return re.fullmatch(self.dropped, name.removeprefix(prefix)) is not None
        return re.fullmatch(self.outside, name) is not None


def _numbered(name: str, numbers: Sequence[int]) -> str:
    """Replace each '#' in a name with the next number, and each '#+' with the next number plus one."""
    for number in numbers:
        before, mark, after = name.partition("#")
        if mark:
            name = f"{before}{number + 1}{after[1:]}" if after.startswith("+") else f"{before}{number}{after}"
    return name


def _row_and_numbers(ours: str) -> tuple[str, list[int]]:
    """Replace the numbers in a name with '#', and return both: "blocks.3.norm1" -> ("blocks.#.norm1", [3])."""
    return re.sub(r"\.\d+\.", ".#.", ours), [int(number) for number in re.findall(r"\.(\d+)\.", ours)]


def _stacked(name: str) -> str:
    """Return the name of the tensor in which big_vision stacks the tensors of all blocks."""
    return re.sub(r"/encoderblock_\d+/", "/encoderblock/", name)


def _parse_row(line: str, flax: bool) -> list[Rule]:
    """Parse a row of data/formats.txt. A name without an ending stands for both a weight and a bias."""
    ours, theirs, op = (*line.split(), "same")[:3]
    stem, _, several = theirs.partition("{")
    names = [stem + name for name in several.rstrip("}").split(",")]
    endings = [(".weight", ".weight"), (".bias", ".bias")]  # theirs and ours
    if re.fullmatch(r".+_token|pos_embed|.+\.(gamma|latent|freqs|weight|bias)", ours):
        endings = [("", "")]
    elif flax:
        endings = [("/kernel", ".weight"), ("/scale", ".weight"), ("/bias", ".bias")]
    return [Rule(ours + our_end, tuple(name + their_end for name in names), op) for their_end, our_end in endings]


def _parse_format(name: str, section: str, earlier: Mapping[str, CheckpointFormat]) -> CheckpointFormat:
    """Parse a section of data/formats.txt, which consists of settings (`name = JSON`) and rows of tensor names."""
    settings: dict[str, Any] = {}
    rules: list[Rule] = []
    for line in section.splitlines():
        setting = re.fullmatch(r"(\w+) = (.+)", line)
        if setting:
            settings[setting[1]] = json.loads(setting[2])
        elif line and not line.startswith("#"):
            rules += _parse_row(line, settings.get("flax", False))
    settings.pop("flax", None)
    fixed = settings.setdefault("fixed", {})
    if fixed.get("rope"):
        fixed["rope"] = Rotation(**fixed["rope"])
    elif not name.startswith("timm"):  # only timm's models may have rotary positions of any kind
        fixed["rope"] = None
    if "rows" in settings:
        rules += earlier[settings.pop("rows")].rules
    return CheckpointFormat(name=name, rules=rules, **settings)


def read_formats(table: str) -> tuple[dict[str, CheckpointFormat], dict[str, str]]:
    """Read checkpoint formats from a file in the data folder.

    Returns:
        The formats by name, and a dictionary from patterns of unsupported tensor names to the reasons.
    """
    text = (files("vitlite.checkpoints") / "data" / table).read_text(encoding="utf-8")
    sections, _, unsupported = text.partition("[unsupported]\n")
    formats: dict[str, CheckpointFormat] = {}
    for part in re.split(r"(?m)^\[", sections)[1:]:
        name, _, section = part.partition("]")
        formats[name] = _parse_format(name, section, formats)
    reasons = {}
    for line in unsupported.splitlines():
        pattern, reason = re.split(" {2,}", line)
        reasons[pattern] = reason
    return formats, reasons


FORMATS, UNSUPPORTED = read_formats("formats.txt")


# ---- From the names in a file to vitlite's names


class MappedTensor(NamedTuple):
    """A tensor of the model, to be computed from the tensors `parts` of a file.

    If `parts` is empty, the tensor is not in the file, because the checkpoint format implies its values.
    """

    parts: tuple[str, ...]
    op: str
    shape: Shape
    row: int | None = None  # the block, for a tensor that stacks all blocks (big_vision)


class KeyMapping(NamedTuple):
    """The mapping from vitlite's tensor names to the tensors of a file.

    `dropped` contains the names of tensors in the file that are known not to be part of the ViT. `unknown` contains the
    names of all other tensors that have no place in the model.
    """

    format: CheckpointFormat
    prefix: str
    patch_size: int | None  # from the metadata; None: unknown
    tensors: dict[str, MappedTensor]
    dropped: list[str]
    unknown: list[str]

    @property
    def parts(self) -> list[str]:
        """The names of all tensors of the file that the model uses."""
        return sorted({part for tensor in self.tensors.values() for part in tensor.parts})


def detect_format(names: Collection[str]) -> tuple[CheckpointFormat, str]:
    """Return the format that fits the tensor names, and the prefix of the names.

    Raises:
        CheckpointError: No format fits, or more than one format fits.
    """
    readable = [each for each in FORMATS.values() if not each.written_only]
    fitting = []
    for candidate in readable:
        prefix = candidate.find_prefix(names)
        if prefix is not None:
            fitting.append((candidate, prefix))
    if len(fitting) == 1:
        return fitting[0]
    seen = ", ".join(sorted({re.sub(r"\d+", "#", name) for name in names})[:12])
    if fitting:
        problem = f"fit more than one checkpoint format ({', '.join(each.name for each, _ in fitting)})"
    else:
        problem = "do not fit any known checkpoint format"
    known = ", ".join(each.name for each in readable)
    raise CheckpointError(f"The tensor names {problem}: {seen}, ... Known formats: {known}.")


def map_own_names(shapes: Mapping[str, Shape]) -> KeyMapping:
    """Return the mapping for a file whose tensors all have vitlite's names."""
    tensors = {name: MappedTensor((name,), "same", shape) for name, shape in shapes.items()}
    return KeyMapping(FORMATS["timm"], "", None, tensors, [], [])


def map_keys(shapes: Mapping[str, Shape], patch_size: int | None = None) -> KeyMapping:
    """Map the tensor names of a file to vitlite's names.

    Args:
        shapes: The shapes of the tensors in the file by name.
        patch_size: The patch size, if it is known. Required only for vit-pytorch weights whose images do not have 1 or
            3 channels, because vit-pytorch flattens patches.

    Raises:
        CheckpointError: The file is not a ViT in a known format, or its shapes do not fit the format.
    """
    checkpoint_format, prefix = detect_format(shapes)
    numbers_by_marks = _numbers(checkpoint_format, prefix, shapes)
    tensors: dict[str, MappedTensor] = {}
    for rule in checkpoint_format.rules:
        for numbers in numbers_by_marks[rule.ours.count("#")]:
            ours = _numbered(rule.ours, numbers)
            parts = tuple(checkpoint_format.full_name(prefix, name, numbers) for name in rule.theirs)
            row = None
            if parts[0] not in shapes:  # a stack of all blocks (big_vision)
                parts = tuple(_stacked(part) for part in parts)
                row = numbers[0] if numbers else None
            if ours not in tensors and all(part in shapes for part in parts):
                tensors[ours] = MappedTensor(
                    parts, rule.op, _resulting_shape(rule, parts, shapes, row, patch_size), row
                )
    used = {part for tensor in tensors.values() for part in tensor.parts}  # includes empty tokens
    for token in ("cls_token", "reg_token"):  # vit-pytorch and transformers store an empty tensor for no token
        if token in tensors and 0 in tensors[token].shape:
            del tensors[token]
    _add_implied_tensors(checkpoint_format, tensors)
    unused = [name for name in shapes if name not in used]
    dropped = [name for name in unused if checkpoint_format.drops(prefix, name)]
    unknown = [name for name in unused if not checkpoint_format.drops(prefix, name)]
    mapping = KeyMapping(checkpoint_format, prefix, patch_size, tensors, dropped, unknown)
    # With `may_fold`, the image size determines whether tokens have rows in the table, so `map_and_resolve` decides.
    return mapping if checkpoint_format.may_fold else fold_token_rows(mapping)


def _numbers(
    checkpoint_format: CheckpointFormat, prefix: str, shapes: Mapping[str, Shape]
) -> dict[int, list[tuple[int, ...]]]:
    """Return the numbers that can replace the '#' marks in a name, by the number of marks.

    A single mark stands for a block, and two marks stand for a stage of the stem and a unit in this stage.
    """
    block_rules = [rule for rule in checkpoint_format.rules if rule.ours.count("#") == 1]
    stems = {prefix + rule.theirs[0].partition("#")[0] for rule in block_rules}
    number = re.compile(f"(?:{'|'.join(re.escape(stem) for stem in stems)})(\\d+)")
    depth = 0
    for name, shape in shapes.items():
        match = number.match(name)
        if match:
            depth = max(depth, min(1 + int(match[1]), len(shapes)))  # a block has at least one tensor
        elif "/encoderblock/" in name and shape:  # all blocks, stacked
            depth = max(depth, shape[0])
    units = []
    for rule in checkpoint_format.rules:
        if rule.ours == STEM_UNIT:
            theirs = rule.theirs[0]
            first = int("#+" in theirs)
            unit = re.compile(re.sub(r"\\#(?:\\\+)?", r"(\\d+)", re.escape(prefix + theirs)))
            matches = [unit.fullmatch(name) for name in shapes]
            units += [(int(match[1]) - first, int(match[2]) - first) for match in matches if match]
    return {0: [()], 1: [(block,) for block in range(depth)], 2: sorted(units)}


def _resulting_shape(
    rule: Rule, parts: Sequence[str], shapes: Mapping[str, Shape], row: int | None, patch_size: int | None
) -> Shape:
    """Return the shape of the tensor that a rule computes from tensors of a file. No values are computed."""
    theirs = [shapes[part] if row is None else shapes[part][1:] for part in parts]
    try:
        shape = theirs[0]
        if rule.op != "same":
            shape = tuple(OPS[rule.op]([torch.empty(each, device="meta") for each in theirs], patch_size).shape)
        if len(shape) != AXES.get(rule.ours, len(shape)):
            raise ValueError(f"{rule.ours} must have {AXES[rule.ours]} axes")
    except (RuntimeError, IndexError, TypeError, ValueError, EinopsError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{', '.join(parts)}: the shapes {theirs} do not fit the checkpoint format: {reason}."
        ) from None
    return shape


def _add_implied_tensors(checkpoint_format: CheckpointFormat, tensors: dict[str, MappedTensor]) -> None:
    """Add the tensors that are not in a file because its format implies their values, such as zero biases."""
    if checkpoint_format.bare_head and "head.weight" in tensors:
        tensors["head.bias"] = MappedTensor((), "zeros", tensors["head.weight"].shape[:1])
    if checkpoint_format.bare_proj and not any(".attn.proj." in name for name in tensors):
        for name, tensor in list(tensors.items()):
            dim = tensor.shape[-1]
            if name.endswith(".attn.qkv.weight") and tensor.shape[0] == 3 * dim:  # a single head of full width
                tensors[name.replace("qkv", "proj")] = MappedTensor((), "identity", (dim, dim))
                tensors[name.replace("qkv.weight", "proj.bias")] = MappedTensor((), "zeros", (dim,))


def _tokens_with_rows(mapping: KeyMapping) -> list[str]:
    """Return the names of the tokens that may have rows in the position table, or [] if there are no registers."""
    if not {"reg_token", "pos_embed"} <= mapping.tensors.keys():
        return []
    return [name for name in mapping.format.folds if name in mapping.tensors]


def fold_token_rows(mapping: KeyMapping) -> KeyMapping:
    """Change a mapping so that the position rows of the class token and the registers are added to these tokens.

    The position table then covers only the patches.
    """
    tokens = _tokens_with_rows(mapping)
    if not tokens:
        return mapping
    tensors = dict(mapping.tensors)
    table = tensors["pos_embed"]
    parts = [tensors[name].parts[0] for name in tokens]
    for i, name in enumerate(tokens):
        tensors[name] = tensors[name]._replace(parts=(parts[i], *table.parts, *parts[:i]), op="rows_of")
    rows = table.shape[1] - sum(tensors[name].shape[1] for name in tokens)
    tensors["pos_embed"] = MappedTensor((*table.parts, *parts), "rows_after", (table.shape[0], rows, table.shape[2]))
    return mapping._replace(tensors=tensors)


# ---- From shapes to fields of the config


def infer_geometry(mapping: KeyMapping, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Infer fields of the config, and six other values, from the names and shapes of the tensors.

    The others are `attention_dim`, the width of all heads together; `position_rows`, the number of rows of the position
    table; `token_rows`, the number of rows that may belong to tokens before the patches; `gated`, whether the MLPs are
    gated; `attention_pool`, whether the file has attention pooling; and `rotary`, whether it probably has rotary
    positions of an unknown kind.

    Raises:
        CheckpointError: The file lacks a tensor that every ViT has, or contains a tensor of another network.
    """
    _check_supported(mapping)
    tensors = mapping.tensors
    mlp_dim = tensors["blocks.0.mlp.fc2.weight"].shape[1]
    table = tensors.get("pos_embed")
    geometry: dict[str, Any] = {
        "depth": 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")),
        "class_token": "cls_token" in tensors,
        "registers": tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        "pre_logits": tensors["pre_logits.weight"].shape[0] if "pre_logits.weight" in tensors else 0,
        "num_classes": tensors["head.weight"].shape[0] if "head.weight" in tensors else 0,
        "attention_dim": tensors["blocks.0.attn.qkv.weight"].shape[0] // 3,
        "mlp_dim": mlp_dim,
        "gated": tensors["blocks.0.mlp.fc1.weight"].shape[0] == 2 * mlp_dim,
        "attention_pool": "attn_pool.latent" in tensors,
        "norm": "layer" if any(name.endswith(".norm1.bias") for name in tensors) else "rms",
        "input_norm": _which_norm(tensors, INPUT_NORMS),
        "inner_norm": _which_norm(tensors, {"blocks.0.attn.norm.weight": "both", "blocks.0.mlp.norm.weight": "mlp"}),
        "position_rows": table.shape[1] if table else None,
        "token_rows": 0,
    }
    for name, part in PARTS.items():
        geometry[name] = part in tensors
    if geometry["gated"]:
        geometry["mlp"] = "swiglu"
    final_norm = _which_norm(tensors, {"fc_norm.weight": "pooled", "norm.weight": "tokens"})
    if final_norm != "none":  # otherwise it is unknown
        geometry["final_norm"] = final_norm
    if geometry["position_rows"]:
        geometry["positions"] = "learned"
    if table and mapping.format.may_fold:
        geometry["token_rows"] = sum(tensors[name].shape[1] for name in _tokens_with_rows(mapping))
    geometry |= patch_geometry(tensors)
    kernel = tensors["patch_embed.proj.weight"]
    if kernel.op == "kernel" and len(shapes[kernel.parts[0]]) == 2:
        geometry["resample"] = "naflex"
    geometry |= _infer_pool(mapping, shapes, geometry)
    proj, qkv = tensors.get("blocks.0.attn.proj.weight"), tensors["blocks.0.attn.qkv.weight"]
    if proj and proj.op == "identity":
        geometry["heads"] = 1
    elif qkv.op == "heads_qkv":
        geometry["heads"] = shapes[qkv.parts[0]][-2]
    return geometry | _infer_rotation(mapping, shapes, geometry)


def _which_norm(tensors: Container[str], values: Mapping[str, str]) -> str:
    """Return the value of the first key in `values` that is the name of a tensor, or "none"."""
    return next((value for name, value in values.items() if name in tensors), "none")


def _check_supported(mapping: KeyMapping) -> None:
    """Check that the file has the tensors of every ViT and none of another network.

    Raises:
        CheckpointError: A tensor is missing, or belongs to another network.
    """
    for name in mapping.unknown:
        for pattern, reason in UNSUPPORTED.items():
            if re.fullmatch(pattern, name):
                raise CheckpointError(
                    f"The network in the file is not a plain ViT: {reason} ({name}). vitlite supports plain ViTs only."
                )
    needed = ["patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"]
    if mapping.format.name not in MAY_LACK_POSITIONS:
        needed.append("pos_embed")
    for name in (*needed, "blocks.0.mlp.fc2.weight"):
        if name not in mapping.tensors:
            theirs = ", ".join(mapping.format.spell(mapping.prefix, name))
            raise CheckpointError(
                f"The file does not contain {theirs}, which the {mapping.format.name} format requires. Check that the "
                "file contains a complete ViT."
            )


def patch_geometry(tensors: Mapping[str, MappedTensor]) -> dict[str, Any]:
    """Return the fields stem, patch_size, channels and dim, inferred from the shapes."""
    dim, channels, patch, across = tensors["patch_embed.proj.weight"].shape
    if patch != across or patch == 0:
        raise CheckpointError(
            f"The patch projection has a kernel of {patch} x {across} pixels. vitlite supports only square patches."
        )
    before, after = STEM_UNIT.split("#.blocks.#")
    names = [name for name in tensors if name.startswith(before) and name.endswith(after)]
    stem: tuple[int, ...] | None = None  # the number of units in each stage of a hybrid's stem
    if names or first_kernel(()) in tensors:
        units = Counter(int(name.split(".")[3]) for name in names)
        stem = tuple(units[stage] for stage in range(len(units)))
        if first_kernel(stem) not in tensors or not all(stem) or len(stem) > 4:
            raise CheckpointError(
                f"The ResNet stem has {stem} units in its stages. vitlite supports only the stems of hybrid ViTs, "
                "which have at most 4 stages."
            )
        channels = tensors[first_kernel(stem)].shape[1]
    return {"stem": stem, "patch_size": patch * stem_stride(stem), "channels": channels, "dim": dim}


def first_kernel(stem: tuple[int, ...] | None) -> str:
    """Return the name of the convolution kernel that is applied to the pixels."""
    if stem is None:
        return "patch_embed.proj.weight"
    return f"patch_embed.backbone.{'stem.' if stem else ''}conv.weight"


def _infer_pool(mapping: KeyMapping, shapes: Mapping[str, Shape], geometry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `pool`, or an empty dictionary if the tensors do not determine the pooling."""
    if geometry["attention_pool"]:
        if geometry["class_token"] or geometry["registers"]:  # the pooling may or may not read them
            return {}
        layer = mapping.tensors.get("attn_pool.mlp.fc1.weight")
        return {} if layer is None or layer.shape[0] == geometry["mlp_dim"] else {"pool": "map_all"}
    if not geometry["class_token"]:
        return {"pool": "mean"}
    head = mapping.tensors.get("head.weight")
    if head and head.op == "two_heads":
        return {"pool": "cls_and_distillation"}
    # In a distilled DeiT that vitlite saved, the head also reads two tokens: the class token and the only register.
    may_be_distilled = mapping.format.name == "timm" and geometry["registers"] == 1
    reads_two = head and head.shape[1] == 2 * geometry["dim"] and not geometry["pre_logits"]
    if reads_two and "cls_and_mean" in mapping.format.pools and not may_be_distilled:
        return {"pool": "cls_and_mean"}
    if mapping.format.bare_proj and len(shapes["cls_token"]) == 2:
        return {"pool": "cls"}  # since 1.16.1, vit-pytorch has a class token only with pool="cls"
    return {}


def _infer_rotation(mapping: KeyMapping, shapes: Mapping[str, Shape], geometry: Mapping[str, Any]) -> dict[str, Any]:
    """Infer whether the file probably has rotary positions of an unknown kind.

    If it contains DINOv3's periods, the kind is known, and the fields rope, heads and positions are returned as well.
    """
    periods = [name for name in mapping.dropped if name.endswith(".periods")]
    if periods:
        head_width = 4 * math.prod(shapes[periods[0]])  # a period for every four channels
        heads = geometry["attention_dim"] // max(head_width, 1)
        found = {"rope": DINOV3_ROPE, "heads": heads, "rotary": False}
        return found if geometry["position_rows"] else found | {"positions": "none"}
    without_table = not geometry["position_rows"] and geometry["layer_scale"]
    return {"rotary": without_table or "rope.freqs" in mapping.tensors}


# ---- From vitlite's names to the names of a library


def rename_tensors(
    checkpoint_format: CheckpointFormat, prefix: str, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a model under the names of a checkpoint format.

    Raises:
        CheckpointError: The format has no name for one of the tensors.
    """
    rule_of = {rule.ours: rule for rule in reversed(checkpoint_format.rules)}
    unknown = sorted(name for name in tensors if _row_and_numbers(name)[0] not in rule_of)
    if unknown:
        raise CheckpointError(
            f"The {checkpoint_format.name} format has no names for the tensors {', '.join(unknown)}. Convert to "
            "vitlite instead (--to vitlite)."
        )
    tensors = dict(tensors)
    if checkpoint_format.folds and not checkpoint_format.may_fold and {"reg_token", "pos_embed"} <= tensors.keys():
        rows = sum(tensors[name].shape[1] for name in checkpoint_format.folds)
        tensors["pos_embed"] = F.pad(tensors["pos_embed"], (0, 0, rows, 0))  # their positions are already in the tokens
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        rule = rule_of[_row_and_numbers(name)[0]]
        parts = INVERSE_OPS[rule.op](tensor, len(rule.theirs))
        for theirs, part in zip(checkpoint_format.spell(prefix, name), parts, strict=True):
            if theirs not in renamed:
                renamed[theirs] = part
            else:  # queries, and keys and values, are two tensors of ours and one of theirs
                renamed[theirs] = torch.cat([part, renamed[theirs]] if rule.op == "first" else [renamed[theirs], part])
    return renamed
