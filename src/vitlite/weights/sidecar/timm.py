"""timm's config.json: an architecture, whose name stands for a config; `model_args`, which change it; and a
`pretrained_cfg` with preprocessing and labels. Read first, then written.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vitlite.config import ViTConfig
from vitlite.errors import CheckpointError
from vitlite.images import Recipe
from vitlite.weights.sidecar.record import ACTIVATIONS, Sidecar, UnreadRecipe, labels_in_order, required

POOLS = {"token": "cls", "avg": "mean"}  # timm's -> ours
WRITTEN_POOLS = {ours: theirs for theirs, ours in POOLS.items()}
WRITTEN_ACTIVATIONS = {"exact": "gelu", "tanh": "gelu_tanh", "quick": "quick_gelu"}
OTHER_ARITHMETIC = {  # in names of architectures whose tensors are called as those of a plain ViT
    "rope": "its attention turns by position.",
    "rpn": "its norms stand after the layers.",
}


def sidecar_from_timm(config: Mapping[str, Any]) -> Sidecar:
    """What timm's config.json says.

    Raises:
        CheckpointError: It is a model that vitlite does not run.
    """
    architecture = config["architecture"]
    args = config.get("model_args", {})
    pretrained = config.get("pretrained_cfg", {})
    num_classes = config.get("num_classes")
    image_size = args.get("img_size")
    claims = {
        "pool": _pool(config, args, pretrained, num_classes),
        "num_classes": num_classes,
        "heads": args.get("num_heads"),
        "image_size": image_size,
        "gelu": _gelu(args),
    }
    if "no_embed_class" in args:
        claims["cls_position"] = not args["no_embed_class"]
    _refuse_other_arithmetic(architecture, args)

    if image_size and not args.get("dynamic_img_size"):  # then timm's model takes no other
        height, width = image_size if isinstance(image_size, list) else (image_size, image_size)
        pretrained = {**pretrained, "input_size": [0, height, width]}
    tag = pretrained.get("tag")
    other_norm = args.get("norm_layer")  # whose epsilon is not always that of the architecture
    return Sidecar(
        claims={name: value for name, value in claims.items() if value is not None},
        labels=_labels(config, pretrained),
        recipe=UnreadRecipe("timm", pretrained) if "mean" in pretrained else None,
        architecture=f"{architecture}.{tag}" if tag else architecture,
        not_claimed=("norm_eps",) if other_norm else (),
    )


def _pool(
    config: Mapping[str, Any], args: Mapping[str, Any], pretrained: Mapping[str, Any], num_classes: int | None
) -> str | None:
    """How the model pools, in our words; None where it says nothing."""
    pool = None
    for place in (args, config, pretrained):
        if pool is None:
            pool = place.get("global_pool")
    if pool is None or (pool == "" and num_classes == 0):  # then there is nothing to pool for
        return None
    if pool not in POOLS:
        raise CheckpointError(f"config.json has global_pool {pool!r}; vitlite runs {', '.join(POOLS)}.")
    return POOLS[pool]


def _gelu(args: Mapping[str, Any]) -> str | None:
    """Which GELU, in our words; None where it says nothing."""
    activation = args.get("act_layer")
    if not activation:
        return None
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"config.json has act_layer {activation!r}; vitlite runs {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[activation]


def _refuse_other_arithmetic(architecture: str, args: Mapping[str, Any]) -> None:
    """Makes sure that vitlite computes what this model does.

    Raises:
        CheckpointError: It does not, though the tensors have the same names and shapes.
    """
    if args.get("pool_include_prefix"):
        raise CheckpointError("config.json has pool_include_prefix; vitlite's mean is that of the patches.")
    for part, reason in OTHER_ARITHMETIC.items():
        if part in architecture:
            raise CheckpointError(
                f"config.json says {architecture}, which is no plain ViT though its tensors have the same names: "
                f"{reason}"
            )


def _labels(config: Mapping[str, Any], pretrained: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The descriptions of the labels, or where there are none their names, such as WordNet's numbers."""
    names = labels_in_order(config.get("label_names") or pretrained.get("label_names"))
    if names is None:
        return None
    descriptions = config.get("label_descriptions") or pretrained.get("label_descriptions") or {}
    return tuple(descriptions.get(name, name) for name in names)


def recipe_from_record(record: Any, size: tuple[int, int]) -> Recipe:
    """The recipe of a zoo record, whose fields have timm's names, for images of `size`."""
    return recipe_from_timm(vars(record), size)


def recipe_from_timm(config: Mapping[str, Any], size: tuple[int, int] | None = None) -> Recipe:
    """The recipe in timm's config.json or pretrained_cfg; `size` replaces the file's own.

    >>> recipe_from_timm({"input_size": [3, 224, 224], "crop_pct": 0.9, "interpolation": "bicubic",
    ...                   "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}).resize
    (248, 248)
    """
    config = config.get("pretrained_cfg", config)
    crop_pct, interpolation, mean, std = required(config, "crop_pct", "interpolation", "mean", "std")
    if size is None:
        (input_size,) = required(config, "input_size")  # channels, height, width
        height, width = input_size[1:]
    else:
        height, width = size
    return Recipe(
        size=(height, width),
        resize=(math.floor(height / crop_pct), math.floor(width / crop_pct)),
        mode=config.get("crop_mode") or "center",
        interpolation=interpolation,
        mean=tuple(mean),
        std=tuple(std),
    )


def config_to_timm(config: ViTConfig, labels: Sequence[str] | None, recipe: Recipe | None) -> dict[str, Any]:
    """What timm needs to build a model; nothing where it can build none such, or cannot prepare its pictures so."""
    pictures = recipe_to_timm(recipe) if recipe else {}
    mlp_ratio = config.mlp_dim / config.dim
    if pictures is None or not _can_build(config) or int(config.dim * mlp_ratio) != config.mlp_dim:
        return {}
    pretrained: dict[str, Any] = {"input_size": [config.channels, *config.size], "num_classes": config.num_classes}
    if labels:
        pretrained["label_names"] = list(labels)
    return {
        "architecture": "vit_tiny_patch16_224",  # any name of a plain ViT: model_args says all of it
        "num_classes": config.num_classes,
        "global_pool": WRITTEN_POOLS[config.pool],
        "model_args": {
            "img_size": list(config.size),
            "patch_size": config.patch_size,
            "in_chans": config.channels,
            "embed_dim": config.dim,
            "depth": config.depth,
            "num_heads": config.heads,
            "mlp_ratio": mlp_ratio,
            "qkv_bias": config.qkv_bias,
            "init_values": config.layer_scale,
            "class_token": config.class_token,
            "no_embed_class": not config.cls_position,
            "reg_tokens": config.registers,
            "pos_embed": "learn" if config.positions == "learned" else "none",
            "pre_norm": config.pre_norm,
            "fc_norm": config.fc_norm,
            "scale_attn_norm": config.inner_norm,
            "scale_mlp_norm": config.inner_norm,
            "act_layer": WRITTEN_ACTIVATIONS[config.gelu],
            "global_pool": WRITTEN_POOLS[config.pool],
        },
        "pretrained_cfg": pretrained | pictures,
    }


def _can_build(config: ViTConfig) -> bool:
    """Whether timm's VisionTransformer computes what ours does, when it is given the same sizes."""
    if config.norm_eps != 1e-6 or config.positions == "sincos2d" or config.pool not in WRITTEN_POOLS:
        return False
    if config.positions == "rope" or config.mlp != "gelu" or config.stem is not None or not config.final_norm:
        return False
    return not (config.patch_norm or config.pre_logits or config.head_dim)


def recipe_to_timm(recipe: Recipe) -> dict[str, Any] | None:
    """timm's words for the preprocessing; None where it has none."""
    crop_pct = _crop_pct(recipe)
    if crop_pct is None:
        return None
    white = 255 * recipe.scale  # timm's pixels are 0..1 before mean and std
    return {
        "mean": [value / white for value in recipe.mean],
        "std": [value / white for value in recipe.std],
        "interpolation": recipe.interpolation,
        "crop_mode": recipe.mode,
        "crop_pct": crop_pct,
    }


def _crop_pct(recipe: Recipe) -> float | None:
    """The one share of the resized picture that the crop keeps; None where none gives both sides, rounded down."""
    sides = list(zip(recipe.size, recipe.resize, strict=True))
    most = min(size / resize for size, resize in sides)
    least = max(size / (resize + 1) for size, resize in sides)
    for share in (most, (most + least) / 2):
        if all(int(size / share) == resize for size, resize in sides):
            return share
    return None
