"""Read and write timm's config.json.

`architecture` names a default config. `model_args` override parts of this config. `pretrained_cfg` contains the
preprocessing and the labels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from math import floor
from typing import Any, NamedTuple, get_type_hints

from vitlite.checkpoints.formats.keys import (
    CHANNELS,
    COUNT,
    FLAG,
    LIST,
    NUMBER,
    SIZE,
    STRING,
    STRINGS,
    TABLE,
    Keys,
    as_json,
    check_types,
    crops_alike,
    in_whole_patches,
    labels_in_order,
    required,
)
from vitlite.checkpoints.metadata import Metadata
from vitlite.config import DINOV3_ROPE, Resample, Rotation, ViTConfig
from vitlite.errors import CheckpointError, ConfigError
from vitlite.images.naflex import NaFlexTransform
from vitlite.images.transform import MissingPreprocess, TransformConfig, naflex_like
from vitlite.zoo.registry import REFUSED

TYPES = {
    "architecture": STRING,
    "num_classes": COUNT,
    "global_pool": STRING,
    "label_names": STRINGS,
    "labels": STRINGS,
    "label_descriptions": STRINGS,
    "model_args": TABLE,
    "pretrained_cfg": TABLE,
}
ARGUMENT_TYPES = {
    "img_size": SIZE,
    "pos_embed_grid_size": SIZE,
    "patch_size": SIZE,
    "act_layer": STRING,
    "norm_layer": STRING,
    "global_pool": STRING,
    "init_values": NUMBER,
    "pos_embed": STRING,
    "no_embed_class": FLAG,
    "dynamic_img_size": FLAG,
    "swiglu_mlp": FLAG,
    "use_abs_pos_emb": FLAG,
    "use_rot_pos_emb": FLAG,
    "rope_type": STRING,
    "rope_temperature": NUMBER,
    "rope_grid_offset": NUMBER,
    "rope_grid_indexing": STRING,
    "rope_rotate_half": FLAG,
    "ref_feat_shape": SIZE,
    "use_post_transformer_norm": FLAG,
    "use_fc_norm": FLAG,
    "attn_pool_num_heads": COUNT,
}
PRETRAINED_TYPES = {
    "global_pool": STRING,
    "num_classes": COUNT,
    "fixed_input_size": FLAG,
    "input_size": LIST,
    "tag": STRING,
    "label_names": STRINGS,
    "label_descriptions": STRINGS,
}
TRANSFORM_TYPES = {
    "crop_pct": NUMBER,
    "interpolation": STRING,
    "mean": CHANNELS,
    "std": CHANNELS,
    "crop_mode": STRING,
}

POOLS = {"token": "cls", "avg": "mean", "map": "map"}  # timm's -> ours
GELUS = ("gelu", "gelu_tanh", "quick_gelu")  # timm's names are ours
WRITTEN_POOLS = {ours: theirs for theirs, ours in POOLS.items()} | {"cls_and_distillation": "token", "map_all": "map"}

USUAL_CLASSES = 1000  # timm's default if config.json has no num_classes
# Arguments that `MODEL_ARGS` need not check: read below, visible in the tensors, or used only in training.
IGNORED = """
    img_size patch_size global_pool act_layer no_embed_class init_values mlp_ratio scale_attn_norm scale_mlp_norm
    pre_norm fc_norm final_norm swiglu_mlp swiglu_align_to dynamic_img_size dynamic_img_pad strict_img_size drop_rate
    drop_path_rate drop_block_rate weight_init fix_init device dtype scriptable exportable no_jit pretrained_strict
    use_abs_pos_emb use_rot_pos_emb rope_type rope_temperature rope_grid_offset rope_grid_indexing rope_rotate_half
    ref_feat_shape qkv_fused scale_mlp scale_attn_inner use_pre_transformer_norm use_post_transformer_norm use_fc_norm
    attn_pool_num_heads attn_pool_mlp_ratio pos_embed_grid_size
"""
MODEL_ARGS = Keys(
    fields={
        "in_chans": "channels",
        "num_classes": "num_classes",
        "embed_dim": "dim",
        "depth": "depth",
        "num_heads": "heads",
        "qkv_bias": "qkv_bias",
        "class_token": "class_token",
        "reg_tokens": "registers",
        "num_reg_tokens": "registers",
    },
    only={
        "qk_norm": (False,),
        "proj_bias": (True,),
        "pool_include_prefix": (False,),
        "norm_layer": ("layernorm",),
        "pos_embed": ("learn", "none", ""),
        "embed_layer": (),
        "embed_norm_layer": (),
        "block_fn": (),
        "mlp_layer": (),
        "attn_layer": (),
        "attn_type": ("eva", "rope"),
        "use_naflex": (False,),
        "features_only": (False,),
        "pruned": (False,),
    },
    ignored=frozenset(IGNORED.split()),
    ignored_endings=("_drop_rate",),
)  # fmt: skip
CHANGED_BY = {  # the model_args that override each field of the architecture
    "dim": ("embed_dim",),
    "depth": ("depth",),
    "mlp_dim": ("embed_dim", "mlp_ratio", "swiglu_mlp", "swiglu_align_to"),
    "mlp": ("act_layer", "swiglu_mlp"),
    "inner_norm": ("scale_attn_norm", "scale_mlp_norm", "scale_mlp", "scale_attn_inner"),
    "class_token": ("class_token",),
    "registers": ("reg_tokens", "num_reg_tokens"),
    "qkv_bias": ("qkv_bias",),
    "input_norm": ("pre_norm", "use_pre_transformer_norm"),
    "layer_scale": ("init_values",),
    "positions": ("pos_embed", "use_abs_pos_emb"),
    "heads": ("num_heads",),
    "norm": ("norm_layer",),
    "norm_eps": ("norm_layer",),  # each norm layer has its own default epsilon
    "cls_position": ("no_embed_class",),
    "final_norm": ("final_norm", "fc_norm", "use_post_transformer_norm", "use_fc_norm"),
    "resample": (),
    "rope": ("use_rot_pos_emb",),
}
ROPE_ARGS: dict[
    str, tuple[str, Callable[[Any], Any]]
] = {  # for each field of `Rotation`, the argument and the translation of its values
    "temperature": ("rope_temperature", float),
    "offset": ("rope_grid_offset", float),
    "order": ("rope_grid_indexing", {"ij": "yx", "xy": "xy"}.__getitem__),
    "pairs": ("rope_rotate_half", {True: "halves", False: "adjacent"}.__getitem__),
    "reference": ("ref_feat_shape", lambda shape: shape if isinstance(shape, int) else max(shape)),
    "learned": ("rope_type", {"mixed": True, "cat": False}.__getitem__),
}


class Architecture(NamedTuple):
    """The default config of one of timm's architectures, from a row of data/timm.txt."""

    image_size: int
    heads: int
    norm_eps: float
    pool: str
    norm: str
    cls_position: bool
    positions: str
    rope: Rotation | None
    resample: Resample
    final_norm: str
    kernel_size: int  # of the patch projection, in pixels or, with a ResNet stem, in cells of its feature map
    stem_stride: int  # pixels per cell of the stem's feature map; 1 without a stem
    dynamic: bool  # True: accepts images of any size; False: only img_size
    map_of_patches: bool  # True: attention pooling reads only the patches; False: all tokens
    dim: int
    depth: int
    mlp_dim: int
    mlp: str
    class_token: bool
    registers: int
    qkv_bias: bool
    input_norm: str
    inner_norm: str
    layer_scale: bool  # True: has a layer scale, whose initial value is unknown


def _read_architectures() -> dict[str, Architecture]:
    """Read the architectures in data/timm.txt. The comment at the top of the file explains the columns."""
    kinds: dict[Any, Callable[[str], Any]] = {
        bool: lambda cell: cell == "True", int: int, float: float, int | None: _number_or_none,
        Rotation | None: _rotation,
    }  # fmt: skip
    types = get_type_hints(Architecture).values()
    architectures = {}
    for line in (files("vitlite.checkpoints") / "data" / "timm.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, *cells = line.split()
            values = [kinds.get(kind, str)(cell) for cell, kind in zip(cells, types, strict=True)]
            architectures[name] = Architecture(*values)
    return architectures


def _number_or_none(cell: str) -> int | None:
    return None if cell == "-" else int(cell)


def _rotation(cell: str) -> Rotation | None:
    """Read a rotation, such as "reference=16,order=xy", or "default", or "-" for none.

    >>> _rotation("reference=16,order=xy").order
    'xy'
    """
    if cell == "-":
        return None
    values: dict[str, Any] = {}
    for part in cell.split(",") if cell != "default" else ():
        name, _, text = part.partition("=")
        usual = getattr(Rotation(), name)
        kind: Any = int if usual is None else type(usual)
        values[name] = text == "True" if kind is bool else kind(text)
    return Rotation(**values)


ARCHITECTURES = _read_architectures()


def metadata_from_timm(config: Mapping[str, Any]) -> Metadata:
    """Read timm's config.json.

    Raises:
        CheckpointError: The file describes a model that vitlite does not support.
    """
    check_types(config, TYPES)
    name = config["architecture"]
    if name not in ARCHITECTURES:
        reason = next((f": {refusal.reason}" for refusal in REFUSED if refusal.fits(str(name))), "")
        raise CheckpointError(
            f"timm's architecture {name} is not supported{reason}. If the weights are a plain ViT, move config.json "
            "to another folder and pass like= (--model NAME --weights PATH)."
        )
    architecture = ARCHITECTURES[name]
    args = {key: value for key, value in (config.get("model_args") or {}).items() if value is not None}
    check_types(args, ARGUMENT_TYPES, "model_args.")
    pretrained = config.get("pretrained_cfg") or config  # before 2024, all keys were at the top level
    check_types(pretrained, PRETRAINED_TYPES, "pretrained_cfg.")
    fields = _fields_of(architecture, args, _pool(config, args, pretrained, architecture))
    fields["patch_size"] = _patch_size(architecture, args)
    fields |= MODEL_ARGS.read(args, "model_args.")
    fields |= _num_classes(config, args, pretrained)
    if fields.get("pool") == "cls_and_distillation" and fields.get("num_classes") == 0:
        del fields["pool"]  # without heads, timm returns the mean of the two tokens
    seen = _image_size(_native_size(architecture, args, pretrained, fields["patch_size"]), fields["patch_size"], args)
    if "img_size" in args:
        fields["image_size"] = seen
    transform, transform_error = _transform(architecture, args, pretrained, seen)
    labels, labels_error = _labels(config, pretrained)
    tag = pretrained.get("tag")
    return Metadata(
        source="config.json",
        fields=fields,
        names_network=True,
        usual_image_size=seen,
        transform=transform,
        transform_error=transform_error,
        labels=labels,
        labels_error=labels_error,
        architecture=f"{name}.{tag}" if tag else name,
    )


def _fields_of(architecture: Architecture, args: Mapping[str, Any], pool: str | None) -> dict[str, Any]:
    """Return the fields of an architecture after applying timm's `model_args`."""
    fields: dict[str, Any] = {}
    for field, arguments in CHANGED_BY.items():
        if not any(argument in args for argument in arguments):
            fields[field] = getattr(architecture, field)
    if fields.pop("layer_scale", None) is False:  # True does not determine the initial value
        fields["layer_scale"] = None
    if pool != architecture.pool and architecture.final_norm != "none":  # timm places it according to the pooling
        fields.pop("final_norm", None)
    if pool is not None:
        fields["pool"] = pool
    if any(argument in args for argument, _ in ROPE_ARGS.values()):
        fields["rope"] = _rope_of_args(architecture.rope or Rotation(), args)
    return fields | _fields_of_args(args)


def _rope_of_args(rope: Rotation, args: Mapping[str, Any]) -> Rotation | None:
    """Return the rotary positions of an architecture after applying timm's `model_args`."""
    changes: dict[str, Any] = {}
    try:
        for field, (argument, translated) in ROPE_ARGS.items():
            if argument in args:
                changes[field] = translated(args[argument])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"model_args.{argument} is {args[argument]!r}, which is not supported.") from None
    if rope.unit == "image":
        names = ", ".join(argument for argument, _ in ROPE_ARGS.values() if argument in args)
        raise CheckpointError(f"vitlite does not support {names} in the model_args of a DINOv3 architecture.")
    return replace(rope, **changes) if args.get("use_rot_pos_emb", True) else None


def _fields_of_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config fields that timm's `model_args` set, except those that `MODEL_ARGS` reads."""
    fields: dict[str, Any] = {}
    if args.get("final_norm") is False or args.get("use_post_transformer_norm") is args.get("use_fc_norm") is False:
        fields["final_norm"] = "none"
    if "use_abs_pos_emb" in args:
        fields["positions"] = "learned" if args["use_abs_pos_emb"] else "none"
    if "act_layer" in args:
        fields["mlp"] = _activation(args["act_layer"])
    if "swiglu_mlp" in args:
        fields["mlp"] = "swiglu" if args["swiglu_mlp"] else "gelu"
    if "no_embed_class" in args:
        fields["cls_position"] = not args["no_embed_class"]
    if "init_values" in args:
        fields["layer_scale"] = args["init_values"] or None  # timm builds no layer scale for 0
    if args.get("pos_embed") in ("none", ""):
        fields["positions"] = "none"
    return fields


def _activation(name: str) -> str:
    if name not in GELUS:
        raise CheckpointError(f"model_args.act_layer is {name!r}, but vitlite supports only {', '.join(GELUS)}.")
    return name  # timm's gated MLPs would use this activation for the gate


def _patch_size(architecture: Architecture, args: Mapping[str, Any]) -> int:
    kernel = args.get("patch_size", architecture.kernel_size)
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    if height != width:
        raise CheckpointError(f"patch_size is {height} x {width}, but vitlite supports only square patches.")
    return int(height * architecture.stem_stride)


def _pool(
    config: Mapping[str, Any], args: Mapping[str, Any], pretrained: Mapping[str, Any], architecture: Architecture
) -> str | None:
    """Return the pooling of the model, or None if the config does not determine it.

    The pooling of the saved model is in `model_args` and, since 2024, also at the top level. `pretrained_cfg` has only
    the default of the architecture, which some architectures ignore.
    """
    stated = [each["global_pool"] for each in (args, config) if each.get("global_pool") is not None]
    if not stated:
        usual = pretrained.get("global_pool") or WRITTEN_POOLS[architecture.pool]
        return architecture.pool if usual == WRITTEN_POOLS[architecture.pool] else None
    pool = stated[0]
    if pool == "":
        raise CheckpointError(
            "global_pool is '', with which timm returns all tokens. Set global_pool to 'token' or 'avg'."
        )
    if len(set(stated)) > 1 or pool not in POOLS:
        raise CheckpointError(
            f"global_pool must be {' or '.join(POOLS)}, and the same in model_args and at the top level of the file, "
            f"got {' and '.join(stated)}."
        )
    if pool == "map" and not architecture.map_of_patches:
        usual_heads = 8 if architecture.pool == "map_all" else args.get("num_heads", architecture.heads)
        heads = args.get("attn_pool_num_heads", usual_heads)
        if heads != 8:
            raise CheckpointError(
                f"vitlite supports attention pooling of all tokens only with 8 heads, got {heads}. Use timm for this "
                "model."
            )
        return "map_all"
    if pool == "token" and architecture.pool == "cls_and_distillation":
        return architecture.pool
    return POOLS[pool]


def _num_classes(config: Mapping[str, Any], args: Mapping[str, Any], pretrained: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of classes that the weights were trained for, as a field of the config.

    Raises:
        CheckpointError: `model_args` contain another number, for which timm would create a new head.
    """
    built, trained = args.get("num_classes"), config.get("num_classes")
    if trained is None:
        trained = pretrained.get("num_classes")
    if trained is None and built is not None:
        trained = USUAL_CLASSES
    if built not in (None, trained):
        raise CheckpointError(
            f"num_classes is {built} in model_args, but the weights were trained with {trained} classes. Set "
            "num_classes to the number of classes of the weights."
        )
    return {} if trained is None else {"num_classes": trained}


def _native_size(
    architecture: Architecture, args: Mapping[str, Any], pretrained: Mapping[str, Any], patch: int
) -> int | Sequence[int]:
    """Return the image size for which the position table was learned."""
    if architecture.resample == "naflex":
        grid = args.get("pos_embed_grid_size", architecture.image_size // architecture.kernel_size)
        rows, columns = (grid, grid) if isinstance(grid, int) else grid
        return [rows * patch, columns * patch]
    size: int | Sequence[int] | None = args.get("img_size")
    if size is None and pretrained.get("fixed_input_size") and pretrained.get("input_size"):
        size = pretrained["input_size"][1:]
    return size or architecture.image_size


def _image_size(size: int | Sequence[int], patch: int, args: Mapping[str, Any]) -> int | tuple[int, int]:
    """Return the size of the part of an image that timm divides into patches.

    Raises:
        CheckpointError: timm would pad the image.
    """
    check_types({"input_size": size if isinstance(size, int) else list(size)}, {"input_size": SIZE})
    seen = in_whole_patches(size, patch)
    if seen != in_whole_patches(size, 1) and args.get("dynamic_img_pad"):
        raise CheckpointError(
            f"With dynamic_img_pad, timm would pad images of size {size} to a multiple of patch_size {patch}. vitlite "
            "does not support padding. Use timm for this model."
        )
    return seen


def _labels(config: Mapping[str, Any], pretrained: Mapping[str, Any]) -> tuple[tuple[str, ...] | None, str]:
    """Return the labels and "", or None and the reason why there are no labels.

    The labels are the descriptions of the classes if there are any, otherwise the names, which may be WordNet IDs.
    """
    former = config.get("labels") if pretrained is config else None  # the key was renamed in 2024
    names, error = labels_in_order(former or config.get("label_names") or pretrained.get("label_names"))
    if names is None:
        return None, error
    descriptions = config.get("label_descriptions") or pretrained.get("label_descriptions") or {}
    if not isinstance(descriptions, Mapping):
        raise CheckpointError(f"label_descriptions must be a JSON object, got {descriptions!r}.")
    return tuple(descriptions.get(name, name) for name in names), ""


def _transform(
    architecture: Architecture, args: Mapping[str, Any], pretrained: Mapping[str, Any], native: int | tuple[int, int]
) -> tuple[TransformConfig | None, str]:
    """Return the preprocessing and "", or None and the reason why there is none."""
    if "mean" not in pretrained:
        return None, ""
    size, naflex = args.get("img_size"), architecture.resample == "naflex"
    if naflex:  # the number of patches is an argument of timm's loader, and not in the file
        size = native
    if size is not None and (naflex or not args.get("dynamic_img_size", architecture.dynamic)):  # accepts no other size
        sides = [size, size] if isinstance(size, int) else size
        pretrained = {**pretrained, "input_size": [1, *sides]}
    try:
        transform = transform_from_timm(pretrained)
        if naflex:
            transform = naflex_like(transform, transform.size, _patch_size(architecture, args))
        return transform, ""
    except ConfigError as error:
        return None, str(error)


def transform_from_timm(config: Mapping[str, Any], size: tuple[int, int] | None = None) -> TransformConfig:
    """Return the transform that timm's config.json or pretrained_cfg describes. `size` overrides `input_size`.

    Raises:
        ConfigError: The config is invalid or not supported.

    >>> transform_from_timm({"input_size": [3, 224, 224], "crop_pct": 0.9, "interpolation": "bicubic",
    ...                   "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}).resize
    (248, 248)
    """
    inner = config.get("pretrained_cfg")
    config = as_json(inner if isinstance(inner, Mapping) else config)
    crop_pct, interpolation, mean, std = required(config, "crop_pct", "interpolation", "mean", "std")
    if size is None:
        (input_size,) = required(config, "input_size")  # channels, height, width
        size = tuple(input_size[1:])
    try:
        check_types(config, TRANSFORM_TYPES)
        check_types({"input_size": list(size)}, {"input_size": SIZE})
    except CheckpointError as error:
        raise ConfigError(f"Invalid preprocessing config: {error}") from None
    if not crop_pct > 0:
        raise ConfigError(f"Invalid preprocessing config: crop_pct must be positive, got {crop_pct!r}.")
    height, width = size
    return TransformConfig(
        size=(height, width),
        resize=(floor(height / crop_pct), floor(width / crop_pct)),
        mode=config.get("crop_mode") or "center",
        interpolation=interpolation,
        mean=tuple(mean),
        std=tuple(std),
        crop_pct=crop_pct,
    )


# The architectures that config_to_timm writes. model_args can turn PLAIN and CLIP into any plain ViT, except for the
# epsilon of the norms, in which the two differ.
PLAIN, CLIP = "vit_tiny_patch16_224", "vit_base_patch16_clip_224"
GATED, DISTILLED = "vit_giant_patch14_dinov2", "deit_tiny_distilled_patch16_224"
DINOV3 = "vit_small_patch16_dinov3"
ROTARY = {1e-6: "eva_giant_patch14_224", 1e-5: "vit_pe_core_base_patch16_224"}  # by the epsilon of the norms
QWEN3 = "qwen3_vit_88m"
NAFLEX = "naflexvit_base_patch16_siglip"
AIMV2 = "aimv2_large_patch14_224"
HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
WRITTEN_NORMS = {DISTILLED: ("tokens", "none"), QWEN3: ("pooled_plain",)}  # others have any with weights
COMPUTED: dict[str, dict[str, Any]] = {  # the field values that model_args cannot change, by architecture
    DINOV3: {
        "norm_eps": 1e-5, "class_token": True, "stem": None, "input_norm": "none", "inner_norm": "none",
        "final_norm": "tokens", "positions": "none",
    },
    **{name: {"norm_eps": eps, "stem": None} for eps, name in ROTARY.items()},
    QWEN3: {
        "norm_eps": 1e-6, "mlp": "gelu_tanh", "stem": None, "class_token": False, "registers": 0, "pool": "mean",
        "input_norm": "none", "inner_norm": "none", "positions": "learned", "qkv_bias": True, "layer_scale": None,
        "rope": Rotation(pairs="halves"), "resample": "jax",
    },
    NAFLEX: {
        "norm_eps": 1e-6, "class_token": False, "registers": 0, "positions": "learned", "stem": None,
        "input_norm": "none", "inner_norm": "none",
    },
    AIMV2: {
        "norm": "rms", "norm_eps": 1e-5, "mlp": "swiglu", "stem": None, "input_norm": "projected", "inner_norm": "none",
    },
    DISTILLED: {"norm_eps": 1e-6, "registers": 1, "stem": None, "input_norm": "none"},
    GATED: {"norm_eps": 1e-6, "stem": None, "inner_norm": "none"},
    CLIP: {"norm_eps": 1e-5},
    PLAIN: {"norm_eps": 1e-6},
}  # fmt: skip


def format_for_timm(config: ViTConfig) -> str:
    """Return the checkpoint format that timm uses for a model with this config."""
    if config.resample == "naflex":
        return "timm-naflex"
    if config.norm == "rms":
        return "timm-aimv2"
    if config.rope is None:
        return "timm-distilled" if config.pool == "cls_and_distillation" else "timm"
    if config.final_norm == "pooled_plain":
        return "timm-qwen3"
    if config.inner_norm != "none" and config.mlp == "swiglu":
        return "timm-eva02"
    if config.rope.order == "xy" or config.rope.learned:
        return "timm-rope"
    return "timm-eva-gated" if config.mlp == "swiglu" and config.rope.unit == "image" else "timm-eva"


def config_to_timm(
    config: ViTConfig, labels: Sequence[str] | None, transform: TransformConfig | None
) -> dict[str, Any]:
    """Return the content of timm's config.json. `timm_cannot_read` must return "" for the model."""
    # Without names, transformers would label 1,000 classes with the names of ImageNet.
    names = list(labels or [f"LABEL_{number}" for number in range(config.num_classes)])
    return {
        "architecture": _architecture_for(config),
        "num_classes": config.num_classes,
        **({"label_names": names} if names else {}),
        "global_pool": WRITTEN_POOLS[config.pool],
        "model_args": _model_args(config),
        "pretrained_cfg": pretrained_cfg(config, transform),
    }


def pretrained_cfg(config: ViTConfig, transform: TransformConfig | None) -> dict[str, Any]:
    """Return timm's pretrained_cfg, which timm needs to prepare images and to change the number of classes or channels.

    timm adapts the layer `first_conv` to `in_chans`, and drops `classifier` if `num_classes` differs.
    """
    prefix = {QWEN3: "encoder.patch_embed.", NAFLEX: "embeds."}.get(_architecture_for(config), "patch_embed.")
    first_conv = f"{prefix}proj"
    if config.stem is not None:
        first_conv = "patch_embed.backbone.stem.conv" if config.stem else "patch_embed.backbone.conv"
    return {
        "input_size": [config.channels, *config.size],
        "fixed_input_size": True,
        "num_classes": config.num_classes,
        "pool_size": None,
        "first_conv": first_conv,
        "classifier": ["head", "head_dist"] if config.pool == "cls_and_distillation" else "head",
        **((transform and transform_to_timm(transform)) or {}),
    }


def pretrained_cfg_of(model: Any) -> dict[str, Any]:
    """Return timm's pretrained_cfg for a model.

    A randomly initialised model without preprocessing gets no preprocessing entries, so that timm uses its defaults. If
    a model has preprocessing that timm cannot describe, an entry is invalid, so that timm raises an error. Raising an
    error here would break tools that call hasattr for all members, such as torch.jit.trace.
    """
    transform: TransformConfig | None = getattr(model.preprocess, "transform", None)
    config = pretrained_cfg(model.config, transform)
    if "mean" not in config and not (model.source is None and isinstance(model.preprocess, MissingPreprocess)):
        config["interpolation"] = "timm cannot describe how the images are prepared; use model.preprocess"
    return config


def _architecture_for(config: ViTConfig) -> str:
    """Return the timm architecture that `_model_args` can turn into this model, or "" if there is none."""
    if config.rope is not None:
        return _rotary_architecture(config)
    if config.resample == "naflex":
        return NAFLEX
    if config.norm == "rms":
        return AIMV2
    if config.pool == "cls_and_distillation":
        return DISTILLED
    if config.mlp == "swiglu":
        return GATED
    if config.stem is not None:
        return HYBRIDS.get(config.stem, "")
    return CLIP if config.norm_eps == 1e-5 else PLAIN


def _rotary_architecture(config: ViTConfig) -> str:
    if config.rope == DINOV3_ROPE:
        return DINOV3
    return QWEN3 if config.final_norm == "pooled_plain" else ROTARY.get(config.norm_eps, "")


def _model_args(config: ViTConfig) -> dict[str, Any]:
    """Return the model_args with which timm builds this model. timm ignores arguments that are null."""
    architecture = _architecture_for(config)
    args = {
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
        gate = {"swiglu_mlp": config.mlp == "swiglu", "swiglu_align_to": 1}  # for 0, timm uses a different MLP class
        return args | gate | {"num_reg_tokens": config.registers}
    if architecture == QWEN3:
        sizes = {name: args[name] for name in ("img_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads")}
        return sizes | {"mlp_ratio": args["mlp_ratio"], "pos_embed_grid_size": config.grid[0]}
    if config.rope is not None:
        return args | _rotary_args(config, config.rope)
    args |= {"scale_attn_norm": config.inner_norm == "both", "scale_mlp_norm": config.inner_norm != "none"}
    if config.mlp != "swiglu":
        args["act_layer"] = config.mlp
    if config.final_norm == "none":
        args["final_norm"] = False
    if architecture == DISTILLED:
        return args
    if architecture == NAFLEX:
        del args["scale_attn_norm"]  # which has another name there
        return args | {"pos_embed_grid_size": list(config.grid), "fc_norm": config.final_norm == "pooled"}
    return args | {
        "no_embed_class": not config.cls_position,
        "reg_tokens": config.registers,
        "pos_embed": "learn" if config.positions == "learned" else "none",
        "pre_norm": config.input_norm == "tokens",
        "fc_norm": config.final_norm == "pooled",
    }


def _rotary_args(config: ViTConfig, rope: Rotation) -> dict[str, Any]:
    """Return the additional model_args for models with rotary positions, which timm builds with its class Eva."""
    return {
        "init_values": config.layer_scale,
        "num_reg_tokens": config.registers,
        "no_embed_class": not config.cls_position,
        "use_abs_pos_emb": config.positions == "learned",
        "use_rot_pos_emb": True,
        "rope_type": "mixed" if rope.learned else "cat",
        "rope_temperature": rope.temperature,
        "rope_grid_offset": rope.offset,
        "rope_grid_indexing": "ij" if rope.order == "yx" else "xy",
        "rope_rotate_half": rope.pairs == "halves",
        "ref_feat_shape": rope.reference,
        "attn_type": "rope" if format_for_timm(config) == "timm-rope" else "eva",
        "qkv_fused": format_for_timm(config) != "timm-eva02",
        "swiglu_mlp": config.mlp == "swiglu",
        "scale_mlp": config.inner_norm != "none",
        "scale_attn_inner": config.inner_norm == "both",
        "use_pre_transformer_norm": config.input_norm == "tokens",
        "use_post_transformer_norm": config.final_norm == "tokens",
        "use_fc_norm": config.final_norm == "pooled",
        "attn_pool_num_heads": config.pool_heads,
        "attn_pool_mlp_ratio": config.pool_mlp_dim / config.dim,
    }


def _mlp_ratio(config: ViTConfig) -> float:
    """Return timm's mlp_ratio, the hidden width of an MLP divided by the token width."""
    packed = (
        config.mlp == "swiglu" and config.rope is None and config.norm == "layer"
    )  # here, the hidden width includes the gate
    return (2 if packed else 1) * config.mlp_dim / config.dim


def timm_cannot_read(config: ViTConfig, transform: TransformConfig | None, format: str = "timm") -> str:
    """Return a sentence that says why timm cannot open a folder with tensors in this format, or "" if it can."""
    differing = _unsupported_fields(config)
    if differing:
        values = ", ".join(f"{field}={getattr(config, field)!r}" for field in differing)
        return f"timm's config.json cannot describe a model with {values}."
    if transform is not None and (
        transform_to_timm(transform) is None
        or transform.size != config.size
        or not _prepares_as_timm(transform, config)
    ):
        return "timm's config.json cannot describe the preprocessing of this model."
    if format != format_for_timm(config):
        return "timm uses other tensor names for this model. `vitlite convert --to timm` writes these names."
    return ""


def _unsupported_fields(config: ViTConfig) -> list[str]:
    """Return the names of the fields whose values timm does not support."""
    architecture = _architecture_for(config)
    if not architecture:
        return ["stem" if config.rope is None else "norm_eps"]
    computed = COMPUTED.get(architecture, COMPUTED[PLAIN])
    ratio = _mlp_ratio(config)
    eva = config.rope is not None and architecture != QWEN3
    gated = {GATED, DINOV3, AIMV2, *ROTARY.values()}
    supported = {
        "mlp": architecture in gated if config.mlp == "swiglu" else config.mlp == "gelu" or not eva,
        "final_norm": config.final_norm in WRITTEN_NORMS.get(architecture, ("tokens", "pooled", "none")),
        "inner_norm": config.inner_norm != "mlp" or eva,
        "rope": config.rope is None or _rotates_as_timm(config, config.rope),
        "image_size": architecture != NAFLEX or config.grid[0] == config.grid[1],
        "mlp_dim": int(config.dim * ratio) == round(config.dim * ratio),  # timm rounds down
        "positions": config.positions != "sincos2d",
        "pool": config.pool in WRITTEN_POOLS and pools_as_timm(config),
        "layer_scale": config.layer_scale != 0 and (architecture != DINOV3 or config.layer_scale is not None),
        "norm": config.norm == "layer" or architecture == AIMV2,
        "input_norm": config.input_norm in ("none", "tokens") or architecture == AIMV2,
        "pre_logits": not config.pre_logits,
        "head_dim": not config.head_dim,
        "cosine_head": config.cosine_head is None,
    }
    differing = [field for field, value in computed.items() if getattr(config, field) != value]
    return differing + [field for field, right in supported.items() if not right and field not in differing]


def _prepares_as_timm(transform: TransformConfig, config: ViTConfig) -> bool:
    """Return whether timm prepares images for this config by the same kind of transform: NaFlex or a fixed size."""
    if isinstance(transform, NaFlexTransform):
        usual = transform.max_patches == config.grid[0] * config.grid[1] and transform.patch_size == config.patch_size
        return config.resample == "naflex" and usual
    return config.resample != "naflex"


def _rotates_as_timm(config: ViTConfig, rope: Rotation) -> bool:
    """Return whether timm has an architecture with these rotary positions."""
    if rope == DINOV3_ROPE or config.final_norm == "pooled_plain":
        return True
    if rope.unit == "image" or (rope.reference is None and config.norm_eps == 1e-5):  # which cannot be unset there
        return False
    return not rope.learned or (rope.offset == 0 and rope.reference is None and rope.pairs == "adjacent")


def pools_as_timm(config: ViTConfig) -> bool:
    """Return whether timm pools exactly like vitlite for this config."""
    if config.pool in ("map", "map_all"):
        if config.rope is not None:  # timm's Eva reads all tokens
            return config.rope != DINOV3_ROPE and config.pool == "map_all"
        # in timm, the MLP of the pooling has the same activation as the blocks
        return config.pool == "map" and config.mlp != "swiglu"
    if config.pool == "cls_and_distillation":  # without heads, timm returns the mean of the two tokens
        return config.num_classes > 0 and config.positions == "learned"
    return True


def transform_to_timm(transform: TransformConfig) -> dict[str, Any] | None:
    """Return the transform in the form of timm's pretrained_cfg, or None if timm cannot describe it."""
    crop_pct = 1.0 if isinstance(transform, NaFlexTransform) else _crop_pct(transform)
    if crop_pct is None or transform.background or not crops_alike(transform, "nearest"):
        return None
    white = 255 * transform.scale  # timm scales pixels to 0..1 before it applies mean and std
    return {
        "mean": [value / white for value in transform.mean],
        "std": [value / white for value in transform.std],
        "interpolation": transform.interpolation,
        "crop_mode": transform.mode,
        "crop_pct": crop_pct,
    }


def _crop_pct(transform: TransformConfig) -> float | None:
    """Return the ratio of the crop size to the resized size, or None if no single ratio fits both height and width."""
    crop_pct = transform.find_crop_pct()
    if crop_pct:
        return crop_pct
    sides = list(zip(transform.size, transform.resize, strict=True))
    most = min(size / resize for size, resize in sides)
    least = max(size / (resize + 1) for size, resize in sides)
    for share in (most, (most + least) / 2):
        if all(int(size / share) == resize for size, resize in sides):
            return share
    return None
