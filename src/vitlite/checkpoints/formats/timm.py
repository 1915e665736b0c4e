"""timm's config.json: an architecture, whose name stands for a config; `model_args`, which change it; and a
`pretrained_cfg` with preprocessing and labels. Read first, then written.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlite.checkpoints.formats.record import (
    COLOURS,
    COUNT,
    LABEL,
    NAMES,
    SIDE,
    SIDES,
    SWITCH,
    WORD,
    Metadata,
    UnreadTransform,
    Words,
    as_json,
    crops_alike,
    in_whole_patches,
    labels_in_order,
    not_understood,
    one_or_two_sides,
    required,
)
from vitlite.config import Resample, ViTConfig
from vitlite.errors import CheckpointError, shown
from vitlite.images import TransformConfig
from vitlite.schema import by_name, number, one_of, optional, several, table, verify, whole
from vitlite.zoo.registry import REFUSED

ARGUMENTS = table(
    {
        "img_size": optional(SIDES),
        "patch_size": optional(SIDES),
        "num_heads": optional(whole(1, 10_000)),
        "act_layer": optional(WORD),
        "global_pool": optional(WORD),
        "init_values": optional(number(-1e6, 1e6)),
        "pos_embed": optional(one_of("learn", "none", "")),
        "no_embed_class": SWITCH,
        "dynamic_img_size": SWITCH,
    }
)
ABOUT_PICTURES = table(
    {
        "global_pool": optional(WORD),
        "num_classes": optional(COUNT),
        "fixed_input_size": SWITCH,
        "input_size": optional(several(COUNT, 3, 3)),
        "tag": optional(WORD),
        "label_names": NAMES,
        "label_descriptions": optional(by_name(LABEL)),
    }
)
CONFIG = table(
    {
        "architecture": WORD,
        "num_classes": optional(COUNT),
        "global_pool": optional(WORD),
        "label_names": NAMES,
        "labels": NAMES,
        "label_descriptions": optional(by_name(LABEL)),
        "model_args": optional(ARGUMENTS),
        "pretrained_cfg": optional(ABOUT_PICTURES),
    },
    required=("architecture",),
)
PICTURES = table(
    {
        "crop_pct": number(0.01, 100),
        "interpolation": WORD,
        "mean": COLOURS,
        "std": COLOURS,
        "input_size": several(SIDE, 3, 3),
        "crop_mode": optional(WORD),
    }
)

POOLS = {"token": "cls", "avg": "mean", "map": "map"}  # timm's -> ours
GELUS = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick"}
WRITTEN_POOLS = {ours: theirs for theirs, ours in POOLS.items()} | {"cls_and_distillation": "token"}
WRITTEN_GELUS = {ours: theirs for theirs, ours in GELUS.items()}

# How a picture gets in, what only training asks for, and what names and shapes of tensors tell. patch_size is read by
# `_patch_size`.
FREE = """
    img_size patch_size global_pool act_layer norm_layer no_embed_class init_values pos_embed mlp_ratio scale_attn_norm
    scale_mlp_norm fc_norm swiglu_mlp swiglu_align_to dynamic_img_size dynamic_img_pad strict_img_size drop_rate
    drop_path_rate drop_block_rate weight_init fix_init device dtype scriptable exportable no_jit pretrained_strict
"""
USUAL_CLASSES = 1000  # what timm takes weights to have where nothing is said of them
MODEL_ARGS = Words(
    told={
        "in_chans": "channels",
        "num_classes": "num_classes",
        "embed_dim": "dim",
        "depth": "depth",
        "num_heads": "heads",
        "qkv_bias": "qkv_bias",
        "class_token": "class_token",
        "reg_tokens": "registers",
        "num_reg_tokens": "registers",
        "pre_norm": "pre_norm",
        "final_norm": "final_norm",
    },
    only={
        "qk_norm": (False,),
        "proj_bias": (True,),
        "pool_include_prefix": (False,),
        "embed_layer": (),
        "embed_norm_layer": (),
        "block_fn": (),
        "mlp_layer": (),
        "attn_layer": (),
        "use_naflex": (False,),
        "features_only": (False,),
        "pruned": (False,),
    },
    free=FREE,
    endings=("_drop_rate",),
)


NO_FIELDS = ("kernel_size", "stem_stride", "dynamic", "map_of_patches")  # of an Architecture: a config has none of them
BUILT = {  # what tensors tell of an architecture too, and the arguments by which it is built otherwise
    "dim": ("embed_dim",),
    "depth": ("depth",),
    "mlp_dim": ("embed_dim", "mlp_ratio", "swiglu_mlp", "swiglu_align_to"),
    "mlp": ("act_layer", "swiglu_mlp"),
    "class_token": ("class_token",),
    "registers": ("reg_tokens", "num_reg_tokens"),
    "qkv_bias": ("qkv_bias",),
    "pre_norm": ("pre_norm",),
    "fc_norm": ("fc_norm", "final_norm"),
    "layer_scale": ("init_values",),
    "positions": ("pos_embed",),
}


class Architecture(NamedTuple):
    """What one of timm's names stands for: fields of a config, how it cuts patches, and what tensors must confirm."""

    image_size: int
    heads: int
    norm_eps: float
    gelu: str
    pool: str
    cls_position: bool
    positions: str
    resample: Resample
    final_norm: bool
    kernel_size: int  # no field: of the patches, which are pixels, or cells of a ResNet before them
    stem_stride: int  # no field: pixels to a side of such a cell; 1 where there is no ResNet
    dynamic: bool  # no field: whether it takes images of any size, not img_size alone
    map_of_patches: bool  # no field: whether attention would pool the patches alone, as ours does, or all tokens
    dim: int
    depth: int
    mlp_dim: int
    mlp: str
    class_token: bool
    registers: int
    qkv_bias: bool
    pre_norm: bool
    fc_norm: bool
    layer_scale: bool  # whether there is one; a number that it began with is no tensor's

    def fields(self) -> dict[str, Any]:
        """Those of a config that no tensor tells."""
        return {name: value for name, value in self._asdict().items() if name not in (*NO_FIELDS, *BUILT)}

    def cells(self) -> tuple[str, ...]:
        """As a row of data/timm.txt has them."""
        return tuple(map(str, self))


def _read_architectures() -> dict[str, Architecture]:
    """The table data/timm.txt, whose head explains its columns."""
    kinds = Architecture.__annotations__.values()
    found = {}
    for line in (Path(__file__).parents[1] / "data" / "timm.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, *cells = line.split()
            found[name] = Architecture(*(_value(cell, kind) for cell, kind in zip(cells, kinds, strict=True)))
    return found


def _value(cell: str, kind: Any) -> Any:
    """What a cell of the table says, by the type of its column."""
    if kind is bool:
        return cell == "True"
    return kind(cell) if kind in (int, float) else cell


ARCHITECTURES = _read_architectures()


def metadata_from_timm(config: Mapping[str, Any]) -> Metadata:
    """What timm's config.json says.

    Raises:
        CheckpointError: It is a model that vitlite does not run.
    """
    verify(config, CONFIG)
    name = config["architecture"]
    architecture = _architecture(name)
    args = {word: value for word, value in (config.get("model_args") or {}).items() if value is not None}
    pretrained = config.get("pretrained_cfg") or config  # in one, as it was written before 2024
    patch = _patch_size(architecture, args)
    claims = _claims(config, args, pretrained)
    usual = _usual(architecture, args, pretrained)
    for said in (claims, usual):
        if "image_size" in said:
            said["image_size"] = _seen(said["image_size"], patch, args)
    pool = _pool(config, args, pretrained, architecture)
    if pool == "cls_and_distillation" and claims.get("num_classes") == 0:
        pool = None  # without heads, timm gives the mean of the two tokens
    claims["pool"] = pool  # None: somebody has to say
    claims["patch_size"] = patch
    if "img_size" in args and not args.get("dynamic_img_size", architecture.dynamic):  # then it takes no other
        pretrained = {**pretrained, "input_size": [1, *_sides(args["img_size"])]}
    tag = pretrained.get("tag")
    labels, unlabelled = _labels(config, pretrained)
    return Metadata(
        claims=claims,
        usual=usual,
        built=_built(architecture, args, pool),
        labels=labels,
        unlabelled=unlabelled,
        transform=UnreadTransform("timm", pretrained) if "mean" in pretrained else None,
        architecture=f"{name}.{tag}" if tag else name,
        library="timm",
    )


def _claims(config: Mapping[str, Any], args: Mapping[str, Any], pretrained: Mapping[str, Any]) -> dict[str, Any]:
    """What the config itself says of the network, but for how it pools."""
    claims = MODEL_ARGS.claims(args, "model_args")
    claims |= _number_of_classes(config, claims, pretrained)
    if "act_layer" in args:
        claims |= {"gelu": _gelu(args["act_layer"]), "mlp": "gelu"}  # a gate would be of that GELU, too
    if "no_embed_class" in args:
        claims["cls_position"] = not args["no_embed_class"]
    if "init_values" in args:
        claims["layer_scale"] = args["init_values"] or None  # timm has none for 0 either
    if args.get("pos_embed") in ("none", ""):
        claims["positions"] = "none"
    if "img_size" in args:
        claims["image_size"] = one_or_two_sides(args["img_size"])
    return claims


def _built(architecture: Architecture, args: Mapping[str, Any], pool: str | None) -> dict[str, Any]:
    """What timm builds by the name of the architecture, where no argument says otherwise."""
    built = {}
    for field, arguments in BUILT.items():
        if not any(argument in args for argument in arguments):
            built[field] = getattr(architecture, field)
    if built.pop("layer_scale", None) is False:  # of one that is there, nobody says with which number it began
        built["layer_scale"] = None
    if pool != architecture.pool:  # which decides where the last norm is, but where it was changed afterwards
        built.pop("fc_norm", None)
    return built


def _number_of_classes(
    config: Mapping[str, Any], claims: Mapping[str, Any], pretrained: Mapping[str, Any]
) -> dict[str, int]:
    """How many the weights have, which timm is told beside how many it is to build.

    Raises:
        CheckpointError: The two differ: timm would make a new head, and load none.
    """
    built, trained = claims.get("num_classes"), config.get("num_classes")
    if trained is None:
        trained = pretrained.get("num_classes", USUAL_CLASSES if built is not None else None)
    if trained is None:
        return {}
    if built not in (None, trained):
        raise CheckpointError(f"num_classes is {trained}, and in model_args {built}.")
    return {"num_classes": trained}


def _patch_size(architecture: Architecture, args: Mapping[str, Any]) -> int:
    """The pixels of a patch. timm resizes a kernel that is of another size without a word, so it is no free choice.

    Raises:
        CheckpointError: Its sides differ.
    """
    height, width = _sides(args.get("patch_size", architecture.kernel_size))
    if height != width:
        raise CheckpointError(f"patch_size is {height} x {width}; vitlite's patches are square.")
    return height * architecture.stem_stride


def _seen(size: int | tuple[int, ...], patch: int, args: Mapping[str, Any]) -> int | tuple[int, ...]:
    """What timm's patches see of an image.

    Raises:
        CheckpointError: They see more, since what they do not cover is padded.
    """
    seen = in_whole_patches(size, patch)
    if seen != size and args.get("dynamic_img_pad"):
        raise CheckpointError(
            f"dynamic_img_pad fills images of {size} up to whole patches of {patch}; vitlite does not."
        )
    return seen


def _usual(architecture: Architecture, args: Mapping[str, Any], pretrained: Mapping[str, Any]) -> dict[str, Any]:
    """What the name of the architecture stands for, where nothing else is said."""
    usual = architecture.fields()
    del usual["pool"]  # which is said in several places
    if "no_embed_class" in args:
        del usual["cls_position"]
    if "norm_layer" in args:  # whose epsilon is not always that of the architecture
        _refuse_norm(args["norm_layer"])
        del usual["norm_eps"]
    if pretrained.get("fixed_input_size") and pretrained.get("input_size"):
        usual["image_size"] = one_or_two_sides(pretrained["input_size"][1:])
    return usual


def _architecture(name: str) -> Architecture:
    """What a name stands for.

    Raises:
        CheckpointError: Nothing that is known here: tensors of the same names may be computed otherwise.
    """
    if name not in ARCHITECTURES:
        reason = next((f": {refusal.reason}" for refusal in REFUSED if refusal.fits(name)), "")
        raise CheckpointError(
            f"its architecture, {shown(name)}, is none of timm's that vitlite computes{reason}. If these weights are a "
            "plain ViT all the same, load them from a folder without that file, and say what their tensors do not tell."
        )
    return ARCHITECTURES[name]


def _sides(size: int | Sequence[int]) -> Sequence[int]:
    return (size, size) if isinstance(size, int) else size


def _pool(
    config: Mapping[str, Any], args: Mapping[str, Any], pretrained: Mapping[str, Any], architecture: Architecture
) -> str | None:
    """How the model pools, in our words; None where it says nothing, or is said to be different things.

    What timm built is in `model_args`, and since 2024 at the top; `pretrained_cfg` says what the architecture does
    unless its code says otherwise.
    """
    said = [place["global_pool"] for place in (args, config) if place.get("global_pool") is not None]
    if not said:
        usual = pretrained.get("global_pool", WRITTEN_POOLS[architecture.pool])
        return architecture.pool if POOLS.get(usual) == architecture.pool else None
    if said[0] == "":
        return None
    if len(set(said)) > 1 or said[0] not in POOLS:
        raise CheckpointError(f"global_pool is {shown(' and '.join(said))}; vitlite computes {' or '.join(POOLS)}.")
    if said[0] == "map" and not architecture.map_of_patches:
        raise CheckpointError(
            "global_pool is map, and in such a model of timm attention pools all tokens; in vitlite, the patches alone."
        )
    if said[0] == "token" and architecture.pool == "cls_and_distillation":  # of which timm says so, too
        return architecture.pool
    return POOLS[said[0]]


def _gelu(activation: str) -> str:
    if activation not in GELUS:
        raise CheckpointError(f"act_layer is {shown(repr(activation))}; vitlite computes {', '.join(GELUS)}.")
    return GELUS[activation]


def _refuse_norm(name: Any) -> None:
    if name != "layernorm":
        raise CheckpointError(f"norm_layer is {shown(repr(name))}; vitlite computes layernorm.")


def _labels(config: Mapping[str, Any], pretrained: Mapping[str, Any]) -> tuple[tuple[str, ...] | None, str]:
    """The descriptions of the labels, or where there are none their names, such as WordNet's numbers; or why not."""
    former = config.get("labels") if pretrained is config else None  # as they were called before 2024
    names, unlabelled = labels_in_order(former or config.get("label_names") or pretrained.get("label_names"))
    if names is None:
        return None, unlabelled
    descriptions = config.get("label_descriptions") or pretrained.get("label_descriptions") or {}
    return tuple(descriptions.get(name, name) for name in names), ""


def transform_from_record(record: Any, size: tuple[int, int]) -> TransformConfig:
    """The transform of a zoo record, whose fields have timm's names, for images of `size`."""
    if size != record.config.size:
        return _transform(vars(record), size)
    return _transform(vars(record), (record.pixels, record.pixels)).in_whole_patches(record.config.patch_size)


def transform_from_timm(config: Mapping[str, Any], size: tuple[int, int] | None = None) -> TransformConfig:
    """The transform in timm's config.json or pretrained_cfg; `size` replaces the file's own.

    Raises:
        ConfigError: It is not understood.

    >>> transform_from_timm({"input_size": [3, 224, 224], "crop_pct": 0.9, "interpolation": "bicubic",
    ...                   "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}).resize
    (248, 248)
    """
    inner = config.get("pretrained_cfg")
    config = as_json(inner if isinstance(inner, Mapping) else config)
    required(config, "crop_pct", "interpolation", "mean", "std")
    try:
        verify(config, PICTURES)
    except CheckpointError as error:
        raise not_understood(f"The preprocessing config: {error.text}") from None
    return _transform(config, size)


def _transform(config: Mapping[str, Any], size: tuple[int, int] | None) -> TransformConfig:
    crop_pct = config["crop_pct"]
    if size is None:
        (input_size,) = required(config, "input_size")  # channels, height, width
        height, width = input_size[1:]
    else:
        height, width = size
    return TransformConfig(
        size=(height, width),
        resize=(math.floor(height / crop_pct), math.floor(width / crop_pct)),
        mode=config.get("crop_mode") or "center",
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        share=crop_pct,
    )


# The architecture that model_args change into each of ours: of a plain ViT any, else one that has what no words say.
PLAIN, GATED, DISTILLED = "vit_tiny_patch16_224", "vit_giant_patch14_dinov2", "deit_tiny_distilled_patch16_224"
DINOV3 = "vit_small_patch16_dinov3"
HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
COMPUTED: dict[str, dict[str, Any]] = {  # what each of them computes, of which model_args have no word: fields of ours
    DINOV3: {
        "norm_eps": 1e-5, "gelu": "exact", "class_token": True, "stem": None, "pre_norm": False, "inner_norm": False,
        "fc_norm": False, "final_norm": True,
    },
    DISTILLED: {"norm_eps": 1e-6, "registers": 1, "mlp": "gelu", "stem": None, "pre_norm": False, "fc_norm": False},
    GATED: {"norm_eps": 1e-6, "stem": None, "inner_norm": False},
    PLAIN: {"norm_eps": 1e-6, "mlp": "gelu"},
}  # fmt: skip


def layout_for_timm(config: ViTConfig) -> str:
    """The layout of layouts.txt that timm's model has."""
    if config.positions == "rope":
        return "timm-eva-gated" if config.mlp == "swiglu" else "timm-eva"
    return "timm-distilled" if config.pool == "cls_and_distillation" else "timm"


def config_to_timm(
    config: ViTConfig, labels: Sequence[str] | None, transform: TransformConfig | None
) -> dict[str, Any]:
    """What timm needs to build a model; nothing where it can build none such, or cannot prepare its pictures so."""
    if unlike_timm(config, transform):
        return {}
    pictures = transform_to_timm(transform) if transform else None
    pretrained: dict[str, Any] = {"input_size": [config.channels, *config.size], "num_classes": config.num_classes}
    return {
        "architecture": _architecture_for(config),
        "num_classes": config.num_classes,
        **_class_names(config, labels),
        "global_pool": WRITTEN_POOLS[config.pool],
        "model_args": _model_args(config),
        "pretrained_cfg": pretrained | (pictures or {}),
    }


def _class_names(config: ViTConfig, labels: Sequence[str] | None) -> dict[str, Any]:
    """A name for each class, which timm and transformers both look for at the top of the file.

    Also where there are no labels: transformers would take 1,000 classes without names for those of ImageNet.
    """
    names = list(labels or [f"LABEL_{number}" for number in range(config.num_classes)])
    return {"label_names": names} if names else {}


def _architecture_for(config: ViTConfig) -> str:
    """The architecture that is changed into this one."""
    if config.positions == "rope":
        return DINOV3
    if config.pool == "cls_and_distillation":
        return DISTILLED
    if config.mlp == "swiglu":
        return GATED
    return PLAIN if config.stem is None else HYBRIDS.get(config.stem, "")


def _model_args(config: ViTConfig) -> dict[str, Any]:
    """The words that change an architecture into this one; timm takes those that are null for not said."""
    architecture = _architecture_for(config)
    words = {
        "img_size": list(config.size),
        "patch_size": config.kernel_size,
        "in_chans": config.channels,
        "embed_dim": config.dim,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": _mlp_ratio(config),
        "qkv_bias": config.qkv_bias,
        "init_values": config.layer_scale or 0,
        "class_token": config.class_token,
        "global_pool": WRITTEN_POOLS[config.pool],
    }
    if architecture == DINOV3:
        gate = {"swiglu_mlp": config.mlp == "swiglu", "swiglu_align_to": 1}  # 0 is another class
        return words | gate | {"num_reg_tokens": config.registers}
    words |= {"scale_attn_norm": config.inner_norm, "scale_mlp_norm": config.inner_norm}
    if config.mlp == "gelu":
        words["act_layer"] = WRITTEN_GELUS[config.gelu]
    if not config.final_norm:
        words["final_norm"] = False
    if architecture == DISTILLED:
        return words
    return words | {
        "no_embed_class": not config.cls_position,
        "reg_tokens": config.registers,
        "pos_embed": "learn" if config.positions == "learned" else "none",
        "pre_norm": config.pre_norm,
        "fc_norm": config.fc_norm,
    }


def _mlp_ratio(config: ViTConfig) -> float:
    """How much wider than a token the first layer of an MLP is in timm's words."""
    packed = config.mlp == "swiglu" and config.positions != "rope"  # there a gate counts
    return (2 if packed else 1) * config.mlp_dim / config.dim


def unlike_timm(config: ViTConfig, transform: TransformConfig | None) -> str:
    """What timm has no words for: "a model that computes this: norm_eps=1e-12"; nothing where it builds the same."""
    differing = _unlike_fields(config)
    if differing:
        values = [f"{field}={getattr(config, field)!r}" for field in differing]
        return f"a model that computes this: {', '.join(values)}"
    if transform is not None and (transform_to_timm(transform) is None or transform.size != config.size):
        return "a model that prepares pictures so"
    return ""


def _unlike_fields(config: ViTConfig) -> list[str]:
    """The fields with which none of timm's architectures computes what ours does, when it is given the same sizes."""
    architecture = _architecture_for(config)
    if not architecture:
        return ["stem"]
    computed = COMPUTED.get(architecture, COMPUTED[PLAIN])
    ratio = _mlp_ratio(config)
    alike = {
        **{field: getattr(config, field) == value for field, value in computed.items()},
        "mlp_dim": int(config.dim * ratio) == round(config.dim * ratio),  # timm rounds down
        "positions": config.positions != "sincos2d",
        "pool": config.pool in WRITTEN_POOLS and is_pooled_alike(config),
        "layer_scale": config.layer_scale != 0 and (config.positions != "rope" or config.layer_scale is not None),
        "patch_norm": not config.patch_norm,
        "pre_logits": not config.pre_logits,
        "head_dim": not config.head_dim,
    }
    return [field for field, same in alike.items() if not same]


def is_pooled_alike(config: ViTConfig) -> bool:
    """Whether what is special about some ways to pool is so in timm too."""
    if config.pool == "map":  # whose MLP has the activation of the others there
        return config.mlp == "gelu" and config.positions != "rope"
    if config.pool == "cls_and_distillation":  # which without heads gives the mean of two tokens there
        return config.num_classes > 0 and config.positions == "learned"
    return True


def transform_to_timm(transform: TransformConfig) -> dict[str, Any] | None:
    """timm's words for the preprocessing; None where it has none."""
    crop_pct = _crop_pct(transform)
    if crop_pct is None or not crops_alike(transform, "nearest"):
        return None
    white = 255 * transform.scale  # timm's pixels are 0..1 before mean and std
    return {
        "mean": [value / white for value in transform.mean],
        "std": [value / white for value in transform.std],
        "interpolation": transform.interpolation,
        "crop_mode": transform.mode,
        "crop_pct": crop_pct,
    }


def _crop_pct(transform: TransformConfig) -> float | None:
    """The one share of the resized picture that the crop keeps; None where none gives both sides, rounded down."""
    share = transform.crop_share()
    if share:
        return share
    sides = list(zip(transform.size, transform.resize, strict=True))
    most = min(size / resize for size, resize in sides)
    least = max(size / (resize + 1) for size, resize in sides)
    for share in (most, (most + least) / 2):
        if all(int(size / share) == resize for size, resize in sides):
            return share
    return None
