"""transformers' config.json, and preprocessor_config.json for the pictures. Read first, then written."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitlite.config import ViTConfig
from vitlite.errors import CheckpointError
from vitlite.images import Interpolation, Mode, Recipe
from vitlite.weights.sidecar.record import (
    ACTIVATIONS,
    Sidecar,
    UnreadRecipe,
    labels_in_order,
    not_understood,
    required,
)


class Assumed(NamedTuple):
    """What a class of transformers has where its config is silent."""

    norm_eps: float
    activation: str
    processor: str  # of `CROPS`
    heads: int = 12


ASSUMED = {  # by model_type
    "vit": Assumed(1e-12, "gelu", "ViT"),
    "deit": Assumed(1e-12, "gelu", "DeiT"),
    "vit_mae": Assumed(1e-12, "gelu", "ViT"),
    "ijepa": Assumed(1e-12, "gelu", "ViT"),
    "vit_msn": Assumed(1e-6, "gelu", "ViT"),
    "dinov2": Assumed(1e-6, "gelu", "Bit"),
    "dinov2_with_registers": Assumed(1e-6, "gelu", "Bit"),
    "clip": Assumed(1e-5, "quick_gelu", "CLIP"),
    "clip_vision_model": Assumed(1e-5, "quick_gelu", "CLIP"),
    "metaclip_2": Assumed(1e-5, "quick_gelu", "CLIP"),
    "metaclip_2_vision_model": Assumed(1e-5, "quick_gelu", "CLIP"),
}
FIELDS = {  # of config.json -> of ViTConfig, with the same value
    "image_size": "image_size",
    "patch_size": "patch_size",
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "num_channels": "channels",
    "layer_norm_eps": "norm_eps",
}
DEFAULT_LABELS = {"0": "LABEL_0", "1": "LABEL_1"}  # of a classifier whose config has none
CROPS = {  # the processors that do what a recipe says, and the crop of each where its config is silent; None: no crop
    "ViT": None,
    "DeiT": 224,
    "CLIP": 224,
    "Bit": 224,  # DINOv2's
    "Beit": None,
    "Siglip": None,
}
BEYOND_RECIPES = (  # switches of processors that change the pixels in ways of which a recipe knows nothing
    "rescale_offset",
    "do_flip_channel_order",
    "crop_pct",
    "keep_aspect_ratio",
    "do_pad",
    "do_thumbnail",
    "include_top",
)
INTERPOLATIONS: dict[int, Interpolation] = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
WRITTEN_INTERPOLATIONS = {name: number for number, name in INTERPOLATIONS.items()}
WRITTEN_ACTIVATIONS = {"exact": "gelu", "tanh": "gelu_new", "quick": "quick_gelu"}
CLASSES = {"vit": "ViT", "ijepa": "IJepa", "dinov2": "Dinov2"}  # what is written, by model_type


def sidecar_from_transformers(config: Mapping[str, Any], pictures: Mapping[str, Any]) -> Sidecar:
    """What config.json and preprocessor_config.json say.

    Raises:
        CheckpointError: It is a model that vitlite does not run.
    """
    vision = config.get("vision_config", config)  # CLIP has another for texts
    assumed = ASSUMED.get(vision.get("model_type", config["model_type"]))
    if assumed is not None:  # of other classes, what their config does not say is asked for
        silent = {
            "num_attention_heads": assumed.heads,
            "layer_norm_eps": assumed.norm_eps,
            "hidden_act": assumed.activation,
        }
        vision = {**silent, **vision}
        if pictures and "feature_extractor_type" not in pictures:
            pictures = {"image_processor_type": assumed.processor, **pictures}
    claims = _claims(vision)
    class_names = _class_names(config)
    labels = None
    if class_names is not None:
        claims["num_classes"] = len(class_names)
        if config.get("problem_type") in (None, "single_label_classification"):  # no softmax over others
            labels = labels_in_order(class_names)
    return Sidecar(
        claims=claims,
        labels=labels,
        recipe=UnreadRecipe("transformers", pictures) if pictures else None,
    )


def _claims(vision: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of the network's shape."""
    claims = {}
    for name, ours in FIELDS.items():
        value = vision.get(name)
        if value is not None:
            claims[ours] = value
    activation = vision.get("hidden_act")
    if activation is not None:
        if activation not in ACTIVATIONS:
            raise CheckpointError(f"config.json has hidden_act {activation!r}; vitlite runs {', '.join(ACTIVATIONS)}.")
        claims["gelu"] = ACTIVATIONS[activation]
    if "intermediate_size" in vision and "mlp_ratio" not in vision:  # DINOv2 has both and uses the ratio
        claims["mlp_dim"] = vision["intermediate_size"]
    patch_size = claims.get("patch_size")
    if isinstance(patch_size, list) and len(set(patch_size)) == 1:
        claims["patch_size"] = patch_size[0]
    return claims


def _class_names(config: Mapping[str, Any]) -> Mapping[str, str] | None:
    """The names of the classes by number; None for a model without a head."""
    architectures = config.get("architectures") or [""]
    if not str(architectures[0]).endswith("ForImageClassification"):
        return None
    return config.get("id2label", DEFAULT_LABELS)


def recipe_from_transformers(config: Mapping[str, Any], size: tuple[int, int] | None = None) -> Recipe:
    """The recipe in preprocessor_config.json; `size` scales the file's own numbers."""
    config = {name: value for name, value in config.items() if value is not None}
    processor = _processor(config)
    resize, resample = required(config, "size", "resample")
    crop, before, mode = _crop_and_size_before(config, processor, resize)
    mean, std = [0.0], [1.0]
    if config.get("do_normalize", True):
        mean, std = required(config, "image_mean", "image_std")
    scale = 1.0
    if config.get("do_rescale", True):
        scale = config.get("rescale_factor", 1 / 255)
    recipe = Recipe(
        size=crop,
        resize=before,
        mode=mode,
        interpolation=INTERPOLATIONS.get(resample, resample),
        mean=tuple(mean),
        std=tuple(std),
        scale=scale,
        margin="down",
    )
    return recipe.scaled(size) if size else recipe


def _processor(config: Mapping[str, Any]) -> str:
    """Which of `CROPS` prepares the pictures.

    Raises:
        ConfigError: Another does, or this one in a way that no recipe has a word for.
    """
    name = config.get("image_processor_type", config.get("feature_extractor_type", "no image_processor_type"))
    processor = re.sub("(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", name)
    beyond = [switch for switch in BEYOND_RECIPES if config.get(switch)]
    if processor not in CROPS:
        beyond = [name]
    if beyond:
        raise not_understood(
            f"The preprocessing config has {beyond[0]}, which is not understood.",
            f"Known are the processors {', '.join(CROPS)}.",
        )
    return processor


def _crop_and_size_before(
    config: Mapping[str, Any], processor: str, resize: Any
) -> tuple[tuple[int, int], tuple[int, int], Mode]:
    """What is cut out, as (height, width); of a picture of which size; and how it was resized to that.

    Raises:
        ConfigError: The sizes depend on the picture.
    """
    crop = resize
    if config.get("do_center_crop", CROPS[processor] is not None):
        (crop,) = required({"crop_size": CROPS[processor], **config}, "crop_size")
    if isinstance(crop, int):
        crop = {"height": crop, "width": crop}
    if isinstance(resize, int):  # as written before 2023
        shorter_edge = processor in ("CLIP", "Bit")
        resize = {"shortest_edge": resize} if shorter_edge else {"height": resize, "width": resize}

    keeps_proportions = set(resize) == {"shortest_edge"}
    known = keeps_proportions or set(resize) == {"height", "width"}
    if not known or set(crop) != {"height", "width"} or not config.get("do_resize", True):
        raise not_understood(f"The config fixes no image size: size {resize}, crop {crop}.")
    size = crop["height"], crop["width"]
    if keeps_proportions:
        return size, (resize["shortest_edge"], resize["shortest_edge"]), "center"
    return size, (resize["height"], resize["width"]), "squash"


def model_type(config: ViTConfig) -> str:
    """Which of transformers' models computes what this one does, if any."""
    if config.layer_scale is not None:
        return "dinov2"
    return "vit" if config.class_token else "ijepa"


def config_to_transformers(config: ViTConfig, labels: Sequence[str] | None) -> dict[str, Any]:
    """The config.json of a model that transformers has."""
    kind = model_type(config)
    width = {"mlp_ratio": config.mlp_dim // config.dim} if kind == "dinov2" else {"intermediate_size": config.mlp_dim}
    labels = labels or [f"LABEL_{number}" for number in range(config.num_classes)]
    classes: dict[str, Any] = {}
    if labels:
        classes["id2label"] = dict(enumerate(labels))
        classes["label2id"] = {label: number for number, label in enumerate(labels)}
    task = "ForImageClassification" if config.num_classes else "Model"
    return {
        "architectures": [CLASSES[kind] + task],
        "model_type": kind,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        **width,
        "num_channels": config.channels,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": WRITTEN_ACTIVATIONS[config.gelu],
        "qkv_bias": config.qkv_bias,
        **classes,
    }


def recipe_to_transformers(recipe: Recipe) -> dict[str, Any]:
    """The preprocessor_config.json of a recipe.

    Raises:
        CheckpointError: transformers has no processor that does the same.
    """
    height, width = recipe.resize
    resize, processor = {"height": height, "width": width}, "DeiTImageProcessor"
    if recipe.mode == "center":
        if height != width:
            raise CheckpointError(
                f"transformers has no preprocessing that resizes pictures to cover {height} x {width} pixels.",
                python="Convert to a .safetensors file, which has the tensors alone.",
            )
        resize, processor = {"shortest_edge": height}, "CLIPImageProcessor"
    return {
        "image_processor_type": processor,
        "do_resize": True,
        "size": resize,
        "resample": WRITTEN_INTERPOLATIONS[recipe.interpolation],
        "do_center_crop": True,
        "crop_size": {"height": recipe.size[0], "width": recipe.size[1]},
        "do_rescale": True,
        "rescale_factor": recipe.scale,
        "do_normalize": True,
        "image_mean": recipe.mean,
        "image_std": recipe.std,
    }
