"""Whose names a file's tensors have, and what they are called here: one table for each layout, read both ways.

A row is our name, theirs, and how the tensor changes. `#` is the number of a block, `{a,b,c}` are tensors that
become one, and a name stands for its weight and its bias. Two rows for one name of ours are two spellings; we write
the first. Layouts are recognised by the keys of the first block, never by the name of a file.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import EinopsError, rearrange
from torch import Tensor

from vitlite.config import Pool, Resample
from vitlite.errors import CheckpointError

Shape = tuple[int, ...]

_TIMM = """
    cls_token            cls_token
    reg_token            reg_token
    pos_embed            pos_embed
    patch_embed.norm_in  patch_embed.norm_in
    patch_embed.proj     patch_embed.proj
    patch_embed.norm     patch_embed.norm
    norm_pre             norm_pre
    blocks.#.norm1       blocks.#.norm1
    blocks.#.attn.qkv    blocks.#.attn.qkv
    blocks.#.attn.norm   blocks.#.attn.norm
    blocks.#.attn.proj   blocks.#.attn.proj
    blocks.#.ls1.gamma   blocks.#.ls1.gamma
    blocks.#.ls1.gamma   blocks.#.gamma_1
    blocks.#.norm2       blocks.#.norm2
    blocks.#.mlp.fc1     blocks.#.mlp.fc1
    blocks.#.mlp.norm    blocks.#.mlp.norm
    blocks.#.mlp.fc2     blocks.#.mlp.fc2
    blocks.#.ls2.gamma   blocks.#.ls2.gamma
    blocks.#.ls2.gamma   blocks.#.gamma_2
    norm                 norm
    fc_norm              fc_norm
    pre_logits           pre_logits
    pre_logits           pre_logits.fc
    head                 head
"""
_TRANSFORMERS = """
    cls_token            embeddings.cls_token
    pos_embed            embeddings.position_embeddings
    patch_embed.proj     embeddings.patch_embeddings.projection
    blocks.#.norm1       encoder.layer.#.layernorm_before
    blocks.#.attn.qkv    encoder.layer.#.attention.attention.{query,key,value}  qkv
    blocks.#.attn.proj   encoder.layer.#.attention.output.dense
    blocks.#.norm2       encoder.layer.#.layernorm_after
    blocks.#.mlp.fc1     encoder.layer.#.intermediate.dense
    blocks.#.mlp.fc2     encoder.layer.#.output.dense
    blocks.#.norm1       layers.#.layernorm_before
    blocks.#.attn.qkv    layers.#.attention.{q_proj,k_proj,v_proj}              qkv
    blocks.#.attn.proj   layers.#.attention.o_proj
    blocks.#.norm2       layers.#.layernorm_after
    blocks.#.mlp.fc1     layers.#.mlp.fc1
    blocks.#.mlp.fc2     layers.#.mlp.fc2
    norm                 layernorm
    head                 ^classifier
"""
_DINOV2 = """
    cls_token            embeddings.cls_token
    reg_token            embeddings.register_tokens
    pos_embed            embeddings.position_embeddings
    patch_embed.proj     embeddings.patch_embeddings.projection
    blocks.#.norm1       encoder.layer.#.norm1
    blocks.#.attn.qkv    encoder.layer.#.attention.attention.{query,key,value}  qkv
    blocks.#.attn.proj   encoder.layer.#.attention.output.dense
    blocks.#.attn.qkv    encoder.layer.#.attention.{q_proj,k_proj,v_proj}       qkv
    blocks.#.attn.proj   encoder.layer.#.attention.o_proj
    blocks.#.ls1.gamma   encoder.layer.#.layer_scale1.lambda1
    blocks.#.norm2       encoder.layer.#.norm2
    blocks.#.mlp.fc1     encoder.layer.#.mlp.fc1
    blocks.#.mlp.fc2     encoder.layer.#.mlp.fc2
    blocks.#.ls2.gamma   encoder.layer.#.layer_scale2.lambda1
    norm                 layernorm
    head                 ^classifier
"""
_TRANSFORMERS_CLIP = """
    cls_token            embeddings.class_embedding                             table
    pos_embed            embeddings.position_embedding.weight                   table
    patch_embed.proj     embeddings.patch_embedding
    norm_pre             pre_layrnorm
    blocks.#.norm1       encoder.layers.#.layer_norm1
    blocks.#.attn.qkv    encoder.layers.#.self_attn.{q_proj,k_proj,v_proj}      qkv
    blocks.#.attn.proj   encoder.layers.#.self_attn.out_proj
    blocks.#.norm2       encoder.layers.#.layer_norm2
    blocks.#.mlp.fc1     encoder.layers.#.mlp.fc1
    blocks.#.mlp.fc2     encoder.layers.#.mlp.fc2
    norm                 post_layernorm
    head                 ^visual_projection
"""
_OPENAI = """
    cls_token                 class_embedding                                   table
    pos_embed                 positional_embedding                              table
    patch_embed.proj          conv1
    norm_pre                  ln_pre
    blocks.#.norm1            transformer.resblocks.#.ln_1
    blocks.#.attn.qkv.weight  transformer.resblocks.#.attn.in_proj_weight
    blocks.#.attn.qkv.bias    transformer.resblocks.#.attn.in_proj_bias
    blocks.#.attn.proj        transformer.resblocks.#.attn.out_proj
    blocks.#.norm2            transformer.resblocks.#.ln_2
    blocks.#.mlp.fc1          transformer.resblocks.#.mlp.c_fc
    blocks.#.mlp.fc2          transformer.resblocks.#.mlp.c_proj
    norm                      ln_post
    head.weight               proj                                              transposed
"""
_TORCHVISION = """
    cls_token                 class_token
    pos_embed                 encoder.pos_embedding
    patch_embed.proj          conv_proj
    blocks.#.norm1            encoder.layers.encoder_layer_#.ln_1
    blocks.#.attn.qkv.weight  encoder.layers.encoder_layer_#.self_attention.in_proj_weight
    blocks.#.attn.qkv.bias    encoder.layers.encoder_layer_#.self_attention.in_proj_bias
    blocks.#.attn.proj        encoder.layers.encoder_layer_#.self_attention.out_proj
    blocks.#.norm2            encoder.layers.encoder_layer_#.ln_2
    blocks.#.mlp.fc1          encoder.layers.encoder_layer_#.mlp.0
    blocks.#.mlp.fc2          encoder.layers.encoder_layer_#.mlp.3
    blocks.#.mlp.fc1          encoder.layers.encoder_layer_#.mlp.linear_1
    blocks.#.mlp.fc2          encoder.layers.encoder_layer_#.mlp.linear_2
    norm                      encoder.ln
    pre_logits                heads.pre_logits
    head                      heads.head
"""
_VIT_PYTORCH = """
    cls_token            cls_token                                              table
    pos_embed            pos_embedding                                          table
    blocks.#.norm1       transformer.layers.#.0.norm
    blocks.#.attn.qkv    transformer.layers.#.0.to_qkv
    blocks.#.attn.proj   transformer.layers.#.0.to_out.0
    blocks.#.norm2       transformer.layers.#.1.net.0
    blocks.#.mlp.fc1     transformer.layers.#.1.net.1
    blocks.#.mlp.fc2     transformer.layers.#.1.net.4
    norm                 transformer.norm
    head                 mlp_head
    blocks.#.attn.qkv    transformer.layers.#.0.fn.to_qkv
    blocks.#.attn.proj   transformer.layers.#.0.fn.to_out.0
    blocks.#.norm2       transformer.layers.#.1.norm
    blocks.#.mlp.fc1     transformer.layers.#.1.fn.net.0
    blocks.#.mlp.fc2     transformer.layers.#.1.fn.net.3
    blocks.#.norm1       transformer.layers.#.0.fn.norm
    blocks.#.attn.qkv    transformer.layers.#.0.fn.fn.to_qkv
    blocks.#.attn.proj   transformer.layers.#.0.fn.fn.to_out.0
    blocks.#.norm2       transformer.layers.#.1.fn.norm
    blocks.#.mlp.fc1     transformer.layers.#.1.fn.fn.net.0
    blocks.#.mlp.fc2     transformer.layers.#.1.fn.fn.net.3
    fc_norm              mlp_head.0
    head                 mlp_head.1
"""
_VIT_PYTORCH_0 = "patch_embed.proj     to_patch_embedding.1  patches" + _VIT_PYTORCH
_VIT_PYTORCH_1 = (
    """
    patch_embed.norm_in  to_patch_embedding.1  patch_norm
    patch_embed.proj     to_patch_embedding.2  patches
    patch_embed.norm     to_patch_embedding.3
"""
    + _VIT_PYTORCH
)
_GOOGLE = """
    cls_token            cls
    pos_embed            Transformer/posembed_input/pos_embedding
    patch_embed.proj     embedding                                                                          patches
    blocks.#.norm1       Transformer/encoderblock_#/LayerNorm_0
    blocks.#.attn.qkv    Transformer/encoderblock_#/MultiHeadDotProductAttention_1/{query,key,value}        heads_qkv
    blocks.#.attn.proj   Transformer/encoderblock_#/MultiHeadDotProductAttention_1/out                      heads_out
    blocks.#.norm2       Transformer/encoderblock_#/LayerNorm_2
    blocks.#.mlp.fc1     Transformer/encoderblock_#/MlpBlock_3/Dense_0                                      transposed
    blocks.#.mlp.fc2     Transformer/encoderblock_#/MlpBlock_3/Dense_1                                      transposed
    norm                 Transformer/encoder_norm
    pre_logits           pre_logits                                                                         transposed
    head                 head                                                                               transposed
"""
_BIG_VISION = (
    _GOOGLE.replace("Transformer/posembed_input/", "")
    .replace("DotProductAttention_1", "DotProductAttention_0")
    .replace("MlpBlock_3", "MlpBlock_0")
    .replace("LayerNorm_2", "LayerNorm_1")
)


def _side(n: int, patch: int | None) -> int:
    """The side of the patch in a flattened one: what is known, else that of three colours, else of one."""
    sides = [patch] if patch else [math.isqrt(n // colors) for colors in (3, 1) if n % colors == 0]
    for side in sides:
        if n % side**2 == 0 and (patch or n // side**2 in (1, 3)):
            return side
    raise ValueError(f"a flattened patch of {n} numbers has neither 3 channels nor 1; give its config patch_size")


def _patches(parts: Sequence[Tensor], patch: int | None) -> Tensor:
    """The patch projection -> (d, c, p, p): Flax's (p, p, c, d), and vit-pytorch's (d, p p c)."""
    x = parts[0]
    if x.ndim == 4:
        return rearrange(x, "p q c d -> d c p q")
    side = _side(x.shape[-1], patch) if x.ndim == 2 else 1
    return rearrange(x, "d (p q c) -> d c p q", p=side, q=side) if x.ndim == 2 else x


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
    "plus_first_row": lambda parts, _: parts[0] + parts[1][:, :1],
    "rows_after_first": lambda parts, _: parts[0][:, 1:],
}
BACK: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {"same": lambda x: [x], "qkv": lambda x: x.chunk(3)}


class Rule(NamedTuple):
    """One row of a table."""

    ours: str
    theirs: tuple[str, ...]
    op: str
    leaves: Mapping[str, str]  # their ending -> ours


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The names one library gives to the tensors of a ViT, and what its code fixes and its files leave out."""

    name: str
    rules: Sequence[Rule]
    prefixes: Sequence[str] = ("",)  # the longest that fits is the one; `^` in a table marks names outside of it
    dropped: str = "(?!)"  # a pattern: names that are no part of the ViT, besides all names outside the prefix if any
    without: str = ""  # a name that rules this layout out
    fixed: Mapping[str, Any]
    pools: Sequence[Pool] = ("cls", "mean", "cls_and_mean")  # what its code can pool where there is a class token
    resample: Resample = "timm"
    folds: bool = False  # with registers, the table's first row still belongs to the class token
    no_head_bias: bool = False
    no_proj: bool = False  # a single head as wide as the model goes without attn.proj

    def full(self, prefix: str, theirs: str, block: int) -> str:
        """Their name as it stands in a file."""
        return (theirs[1:] if theirs[0] == "^" else prefix + theirs).replace("#", str(block))


_PARAMETER = re.compile(r"(.+_token|pos_embed|.+\.gamma|.+\.weight|.+\.bias)$")


def _rules(table: str) -> list[Rule]:
    leaves = {".weight": ".weight", ".bias": ".bias"}
    if table in (_GOOGLE, _BIG_VISION):
        leaves = {"/kernel": ".weight", "/scale": ".weight", "/bias": ".bias"}
    rules = []
    for ours, theirs, *op in filter(None, map(str.split, table.splitlines())):
        before, _, several = theirs.partition("{")
        names = tuple(before + name for name in several.rstrip("}").split(",")) if several else (theirs,)
        rules.append(Rule(ours, names, op[0] if op else "same", {"": ""} if _PARAMETER.match(ours) else leaves))
    return rules


_EXACT = {"gelu": "exact"}
_FLAX = ("", "opt/target/", "params/", "params/img/")
LAYOUTS = (
    Layout(name="timm", rules=_rules(_TIMM), dropped=r"mask_token|decoder_.+", fixed={}),
    Layout(
        name="transformers",
        rules=_rules(_TRANSFORMERS),
        prefixes=("", "vit.", "deit.", "ijepa."),
        dropped=r"pooler\.dense\..+|decoder\..+|embeddings\.mask_token",
        fixed={"pool": "cls"},
        resample="transformers",
    ),
    Layout(
        name="transformers-dinov2",
        rules=_rules(_DINOV2),
        prefixes=("", "dinov2.", "dinov2_with_registers."),
        dropped=r"embeddings\.mask_token",
        fixed={"pool": "cls"},
        resample="transformers",
        folds=True,
    ),
    Layout(
        name="transformers-clip",
        rules=_rules(_TRANSFORMERS_CLIP),
        prefixes=("", "vision_model."),
        dropped=r"embeddings\.position_ids|text_model\..+|text_projection\.weight|logit_scale",
        fixed={"pool": "cls"},
        resample="transformers",
        no_head_bias=True,
    ),
    Layout(
        name="openai",
        rules=_rules(_OPENAI),
        prefixes=("", "visual."),
        dropped=r"transformer\..+|token_embedding\..+|ln_final\..+|positional_embedding|text_projection"
        r"|logit_scale|logit_bias|attn_mask|text\..+|input_resolution|context_length|vocab_size",
        fixed={"pool": "cls", "norm_eps": 1e-5},
        no_head_bias=True,
    ),
    Layout(
        name="torchvision",
        rules=_rules(_TORCHVISION),
        fixed={"pool": "cls", "norm_eps": 1e-6, **_EXACT},
        resample="torchvision",
    ),
    Layout(
        name="vit-pytorch 1",
        rules=_rules(_VIT_PYTORCH_1),
        fixed={"norm_eps": 1e-5, **_EXACT},
        pools=("cls", "mean_with_cls"),
        no_proj=True,
    ),
    Layout(
        name="vit-pytorch 0",
        rules=_rules(_VIT_PYTORCH_0),
        without="to_patch_embedding.2.weight",
        fixed={"norm_eps": 1e-5, **_EXACT},
        pools=("cls", "mean_with_cls"),
        no_proj=True,
    ),
    Layout(
        name="google",
        rules=_rules(_GOOGLE),
        prefixes=_FLAX,
        dropped=r"opt/state/.+|.*/?step",
        fixed={"pool": "cls", "norm_eps": 1e-6, **_EXACT},  # Flax's gelu is tanh; timm and transformers run erf
        resample="jax",
    ),
    Layout(
        name="big_vision",
        rules=_rules(_BIG_VISION),
        prefixes=_FLAX,
        dropped=r"opt/.+|params/txt/.+|params/[tb]|txt/.+|[tb]|.*/?step",
        fixed={"pool": "cls", "norm_eps": 1e-6, **_EXACT},
        resample="jax",
    ),
)
REFUSED = (
    (r"(.*\.)?(dist_token|head_dist\..+|distillation_token|distillation_classifier\..+|cls_classifier\..+)",
     "a distilled DeiT has a second class token and a second head, and averages two answers"),
    (r"(.*[./])?(MAPHead_0|attn_pool|head\.probe|head\.attention)[./].+|.*head\.probe",
     "it pools by attention, with a query of its own (MAP head)"),
    (r".*(\.w12\.|\.weights_in\.|\.fc1_g\.).+", "its MLPs are gated (SwiGLU)"),
    (r".*(relative_position_bias|rel_pos|\.rope\.|q_norm|k_norm).*",
     "its attention has relative or rotary positions, or norms of queries and keys"),
    (r".*(\.SCB|weight_scale|qweight|qzeros|absmax|weight_format)$", "its weights are quantised"),
)  # fmt: skip


class Found(NamedTuple):
    """One of our tensors in a file: whose parts, and how they become it. No parts: the layout leaves it out."""

    parts: tuple[str, ...]
    op: str
    shape: Shape
    block: int | None = None  # for big_vision's scanned blocks: the row of the stacked tensor


class Translation(NamedTuple):
    """What a layout makes of a file's names."""

    found: dict[str, Found]
    dropped: list[str]
    extra: list[str]


def detect(names: Collection[str]) -> tuple[Layout, str]:
    """The one layout, with its prefix, that the names of a file have.

    Raises:
        CheckpointError: none fits, or more than one; what the names were.
    """
    fits = {}
    for layout in LAYOUTS:
        for prefix in sorted(layout.prefixes, key=len, reverse=True):
            marks = 0
            for ours in ("blocks.#.norm1", "blocks.#.norm2", "blocks.#.mlp.fc1"):
                rules = [rule for rule in layout.rules if rule.ours == ours]
                block = [layout.full(prefix, rule.theirs[0], 0) + leaf for rule in rules for leaf in rule.leaves]
                marks += any(name in names or name.replace("encoderblock_0", "encoderblock") in names for name in block)
            if marks >= 2 and prefix + layout.without not in names:
                fits[layout.name] = layout, prefix
                break
    if len(fits) == 1:
        return next(iter(fits.values()))
    seen = ", ".join(sorted({re.sub(r"\d+", "#", name) for name in names})[:12])
    which = f"more than one ViT ({', '.join(fits)})" if fits else "no ViT that vitlite knows"
    known = ", ".join(layout.name for layout in LAYOUTS)
    raise CheckpointError(f"The names of its tensors are those of {which}: {seen}, ... Layouts read: {known}.")


def translate(layout: Layout, prefix: str, shapes: Mapping[str, Shape], patch: int | None = None) -> Translation:
    """Finds our tensors among a file's; reads nothing but names and shapes."""
    found: dict[str, Found] = {}
    used: set[str] = set()
    for rule, block in _blocks(layout, prefix, shapes):
        for leaf, our_leaf in rule.leaves.items():
            ours = rule.ours.replace("#", str(block)) + our_leaf
            parts = tuple(layout.full(prefix, name, block) + leaf for name in rule.theirs)
            row = None
            if "encoderblock_#" in rule.theirs[0] and parts[0] not in shapes:
                parts, row = tuple(part.replace(f"encoderblock_{block}/", "encoderblock/") for part in parts), block
            if ours not in found and all(part in shapes for part in parts):
                found[ours] = Found(parts, rule.op, _shape(parts, rule.op, shapes, row, patch), row)
                used.update(parts)
    if 0 in found.get("cls_token", Found((), "", (1,))).shape:  # vit-pytorch keeps an empty one where it pools the mean
        del found["cls_token"]
    if layout.folds and {"reg_token", "cls_token", "pos_embed"} <= found.keys():
        cls, table = found["cls_token"], found["pos_embed"]
        found["cls_token"] = cls._replace(parts=cls.parts + table.parts, op="plus_first_row")
        found["pos_embed"] = table._replace(op="rows_after_first", shape=(1, table.shape[1] - 1, table.shape[2]))
    if layout.no_head_bias and "head.weight" in found:
        found["head.bias"] = Found((), "zeros", found["head.weight"].shape[:1])
    if layout.no_proj and "blocks.0.attn.qkv.weight" in found and not any(".attn.proj." in name for name in found):
        inner, dim = found["blocks.0.attn.qkv.weight"].shape
        for name in [name for name in found if name.endswith(".attn.qkv.weight") and inner == 3 * dim]:
            found[name.replace("qkv", "proj")] = Found((), "identity", (dim, dim))
            found[name.replace("qkv.weight", "proj.bias")] = Found((), "zeros", (dim,))
    rest = [name for name in shapes if name not in used]
    dropped = [name for name in rest if re.fullmatch(f"({re.escape(prefix)})?({layout.dropped})", name)]
    return Translation(found, dropped, [name for name in rest if name not in dropped])


def names_of(layout: Layout, prefix: str, ours: str) -> tuple[str, ...]:
    """What the layout calls one of our tensors, in its first spelling; our own name where it has none."""
    for rule in layout.rules:
        for leaf, our_leaf in rule.leaves.items():
            match = re.fullmatch(re.escape(rule.ours + our_leaf).replace(r"\#", r"(\d+)"), ours)
            if match:
                block = int(match.group(1)) if match.groups() else 0
                return tuple(layout.full(prefix, name, block) + leaf for name in rule.theirs)
    return (ours,)


def facts(translation: Translation, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """What the tensors alone say of the config; of the position table, how many rows it has."""
    found = translation.found
    for name in ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"):
        if name not in found:
            raise CheckpointError(f"It has no {name}, nor another name for it, so it is no ViT or damaged.")

    def has(start: str) -> bool:
        return any(name.startswith(start) for name in found)

    (dim, channels, patch, across), qkv = found["patch_embed.proj.weight"].shape, found["blocks.0.attn.qkv.weight"]
    if patch != across:
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
    elif found["cls_token"].op == "table" and len(shapes[found["cls_token"].parts[0]]) == 2:
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
    ops = {rule.ours + leaf: rule.op for rule in reversed(layout.rules) for leaf in rule.leaves.values()}
    unknown = [name for name in tensors if re.sub(r"\.\d+\.", ".#.", name) not in ops]
    if unknown:
        raise CheckpointError(f"The {layout.name} layout has no place for: {', '.join(sorted(unknown))}.")
    for name, tensor in tensors.items():
        op = ops[re.sub(r"\.\d+\.", ".#.", name)]
        yield from zip(names_of(layout, prefix, name), BACK[op](tensor), strict=True)


def _blocks(layout: Layout, prefix: str, shapes: Mapping[str, Shape]) -> Iterable[tuple[Rule, int]]:
    """Every row with every block it may stand for."""
    stems = {(prefix + rule.theirs[0]).split("#")[0] for rule in layout.rules if "#" in rule.ours}
    numbers = [re.match(r"\d+", name[len(stem) :]) for stem in stems for name in shapes if name.startswith(stem)]
    depth = 1 + max((int(number.group()) for number in numbers if number), default=-1)
    stacked = [shapes[name][0] for name in shapes if "/encoderblock/" in name and shapes[name]]
    for rule in layout.rules:
        for block in range(max([depth, *stacked]) if "#" in rule.ours else 1):
            yield rule, block


def _shape(parts: Sequence[str], op: str, shapes: Mapping[str, Shape], row: int | None, patch: int | None) -> Shape:
    """The shape that a tensor of ours will have, by doing the thing on tensors without data."""
    theirs = [shapes[part][0 if row is None else 1 :] for part in parts]
    if op == "same":
        return theirs[0]
    try:
        return tuple(OPS[op]([torch.empty(shape, device="meta") for shape in theirs], patch).shape)
    except (RuntimeError, IndexError, ValueError, EinopsError) as error:
        raise CheckpointError(f"{', '.join(parts)}: the shapes {theirs} are not of this layout: {error}") from error
