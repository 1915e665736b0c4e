"""transformers' config.json, and preprocessor_config.json for the pictures. Read first, then written."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitlite.config import ViTConfig
from vitlite.errors import CheckpointError, shown
from vitlite.images import Interpolation, Mode, Recipe
from vitlite.schema import either, number, optional, several, table, text, verify, whole
from vitlite.weights.sidecar.record import (
    COLOURS,
    COUNT,
    NAMES,
    SIDE,
    SWITCH,
    Sidecar,
    UnreadRecipe,
    Words,
    as_json,
    crops_alike,
    labels_in_order,
    not_understood,
    pair,
    required,
)

WORD = text(200)
SIDES = either(SIDE, several(SIDE, 2, 2))
FIELDS = {
    "model_type": WORD,
    "architectures": optional(several(WORD, most=100)),
    "id2label": NAMES,
    "problem_type": optional(WORD),
    "image_size": optional(SIDES),
    "patch_size": optional(SIDES),
    "num_attention_heads": optional(whole(1, 10_000)),
    "layer_norm_eps": optional(number(0, 1)),
    "layerscale_value": optional(number(-1e6, 1e6)),
    "hidden_act": optional(WORD),
    "qkv_bias": SWITCH,
    **dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "intermediate_size", "num_channels", "num_register_tokens"),
        optional(COUNT),
    ),
}
TOWER = optional(table(FIELDS))
CONFIG = table({**FIELDS, "vision_config": TOWER, "vision_config_dict": TOWER}, required=("model_type",))
EDGES = ("height", "width", "shortest_edge", "longest_edge", "max_height", "max_width")
SIZE = optional(either(SIDE, table(dict.fromkeys(EDGES, optional(SIDE)))))
PICTURES = table(
    {
        "image_processor_type": optional(WORD),
        "feature_extractor_type": optional(WORD),
        "size": SIZE,
        "crop_size": SIZE,
        "resample": optional(whole(0, 10)),
        "image_mean": optional(COLOURS),
        "image_std": optional(COLOURS),
        "rescale_factor": optional(number(1e-9, 1e9)),
        **dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize"), SWITCH),
    }
)

GELUS = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_accurate": "tanh",
    "gelu_python_tanh": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "quick_gelu": "quick",
}
WRITTEN_GELUS = {"exact": "gelu", "tanh": "gelu_new", "quick": "quick_gelu"}

WRITER = "written_by"  # vitlite's mark in a config.json that is another library's
# What every config may have, in any version, and what does not change the numbers of an image model.
OF_ANY_MODEL = """
    written_by model_type architectures transformers_version id2label label2id problem_type num_labels _num_labels
    _name_or_path _commit_hash dtype torch_dtype torchscript use_bfloat16 return_dict use_return_dict output_attentions
    output_hidden_states is_encoder_decoder is_decoder use_cache add_cross_attention cross_attention_hidden_size
    tie_encoder_decoder tie_word_embeddings chunk_size_feed_forward tf_legacy_loss finetuning_task tokenizer_class
    prefix bos_token_id pad_token_id eos_token_id sep_token_id decoder_start_token_id task_specific_params
    attn_implementation
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal gradient_checkpointing max_length
    min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores output_past return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
# Only training asks for these, or tensors tell.
OF_TRAINING = """
    hidden_dropout_prob attention_probs_dropout_prob attention_dropout dropout drop_path_rate initializer_range
    initializer_factor
"""
BESIDE_THE_TOWER = """
    text_config text_config_dict vision_config vision_config_dict projection_dim logit_scale_init_value
    initializer_factor image_text_hidden_size
"""
TOLD = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp_dim",
    "num_channels": "channels",
    "layer_norm_eps": "norm_eps",
    "hidden_act": "gelu",
    "qkv_bias": "qkv_bias",
}
OTHER_NETWORK: dict[str, Sequence[Any]] = {"auto_map": ({},), "quantization_config": (), "pruned_heads": ({},)}


def _words(free: str = "", **told: str) -> Words:
    """The words of a class: those of all, and its own."""
    return Words({**TOLD, **told}, OTHER_NETWORK, OF_ANY_MODEL + OF_TRAINING + free)


class Family(NamedTuple):
    """A model_type: the classes that vitlite computes, their words, and what they have where a config is silent."""

    classes: Sequence[str]
    words: Words
    norm_eps: float = 1e-12
    activation: str = "gelu"
    processor: str = "ViT"  # of `CROPS`


POOLER = "encoder_stride pooler_output_size pooler_act"
DECODER = """
    decoder_num_attention_heads decoder_hidden_size decoder_num_hidden_layers decoder_intermediate_size mask_ratio
    norm_pix_loss
"""
BACKBONE = "apply_layernorm reshape_hidden_states stage_names out_features out_indices _out_features _out_indices"
DINOV2 = f"intermediate_size mlp_ratio use_swiglu_ffn use_mask_token {BACKBONE}"  # its MLP is what tensors tell
CLIP = Words({}, OTHER_NETWORK, OF_ANY_MODEL + BESIDE_THE_TOWER)  # of images and texts: the tower has its own words
TOWERS = {"clip": "clip_vision_model", "metaclip_2": "metaclip_2_vision_model"}  # their towers, where they do not say
FAMILIES = {
    "vit": Family(("ViTModel", "ViTForImageClassification"), _words(POOLER)),
    "deit": Family(
        ("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
        _words(POOLER),
        processor="DeiT",
    ),
    "vit_mae": Family(("ViTMAEModel", "ViTMAEForPreTraining"), _words(DECODER)),
    "ijepa": Family(("IJepaModel", "IJepaForImageClassification"), _words(POOLER)),
    "vit_msn": Family(("ViTMSNModel", "ViTMSNForImageClassification"), _words(), 1e-6),
    "dinov2": Family(
        ("Dinov2Model", "Dinov2ForImageClassification"),
        _words(DINOV2, layerscale_value="layer_scale"),
        1e-6,
        processor="Bit",
    ),
    "dinov2_with_registers": Family(
        ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
        _words(DINOV2, layerscale_value="layer_scale", num_register_tokens="registers"),
        1e-6,
        processor="Bit",
    ),
    "clip": Family(("CLIPModel",), CLIP),
    "metaclip_2": Family(("MetaClip2Model",), CLIP),
    "clip_vision_model": Family(
        ("CLIPVisionModel", "CLIPVisionModelWithProjection"), _words("projection_dim"), 1e-5, "quick_gelu", "CLIP"
    ),
    "metaclip_2_vision_model": Family(
        ("MetaClip2VisionModel", "MetaClip2VisionModelWithProjection"),
        _words("projection_dim"),
        1e-5,
        "quick_gelu",
        "CLIP",
    ),
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
CLASSES = {"vit": "ViT", "ijepa": "IJepa", "dinov2": "Dinov2"}  # what is written, by model_type


def sidecar_from_transformers(config: Mapping[str, Any], pictures: Mapping[str, Any]) -> Sidecar:
    """What config.json and preprocessor_config.json say.

    Raises:
        CheckpointError: It is a model that vitlite does not run.
    """
    verify(config, CONFIG)
    vision, family = _tower(config)
    claims = family.words.claims(vision, "it")
    for size in {"image_size", "patch_size"} & claims.keys():
        claims[size] = pair(claims[size])
    if "gelu" in claims:
        claims["gelu"] = _gelu(claims["gelu"])
    if pictures and "feature_extractor_type" not in pictures:
        pictures = {"image_processor_type": family.processor, **pictures}
    class_names = _class_names(config)
    labels = None
    if class_names is not None:
        claims["num_classes"] = len(class_names)
        if config.get("problem_type") in (None, "single_label_classification"):  # no softmax over others
            labels = labels_in_order(class_names)
    usual = {"image_size": 224, "heads": 12, "norm_eps": family.norm_eps, "gelu": GELUS[family.activation]}
    return Sidecar(
        claims=claims,
        usual=usual,
        labels=labels,
        recipe=UnreadRecipe("transformers", pictures) if pictures else None,
        library="transformers",
    )


def _tower(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Family]:
    """The part of a config that is about images, and its family.

    Raises:
        CheckpointError: It is of a class that vitlite does not run.
    """
    family = _family(config)
    inner = TOWERS.get(config["model_type"])
    if inner is None:
        return config, family
    family.words.claims(config, "it")
    vision = {**(config.get("vision_config") or {}), **(config.get("vision_config_dict") or {})}
    if vision.setdefault("model_type", inner) not in (inner, config["model_type"]):
        raise CheckpointError(f"its vision_config is of model_type {shown(vision['model_type'])}, not {inner}.")
    return vision, FAMILIES[inner]


def _family(config: Mapping[str, Any]) -> Family:
    """What is known of a class.

    Raises:
        CheckpointError: Nothing: tensors of the same names may be computed otherwise.
    """
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise CheckpointError(
            f"its model_type, {shown(kind)}, is none of transformers' that vitlite computes: {', '.join(FAMILIES)}."
        )
    for name in config.get("architectures") or ():
        if name not in FAMILIES[kind].classes:
            raise CheckpointError(
                f"its architectures name {shown(name)}; of model_type {kind}, vitlite computes "
                f"{', '.join(FAMILIES[kind].classes)}."
            )
    return FAMILIES[kind]


def _gelu(activation: str) -> str:
    if activation not in GELUS:
        raise CheckpointError(f"hidden_act is {shown(repr(activation))}; vitlite computes {', '.join(GELUS)}.")
    return GELUS[activation]


def _class_names(config: Mapping[str, Any]) -> Mapping[str, str] | None:
    """The names of the classes by number; None for a model without a head."""
    architectures = config.get("architectures") or [""]
    if not architectures[0].endswith(("ForImageClassification", "ForImageClassificationWithTeacher")):
        return None
    return config.get("id2label", DEFAULT_LABELS)


def recipe_from_transformers(config: Mapping[str, Any], size: tuple[int, int] | None = None) -> Recipe:
    """The recipe in preprocessor_config.json; `size` scales the file's own numbers."""
    config = as_json(config)
    try:
        verify(config, PICTURES)
    except CheckpointError as error:
        raise not_understood(f"The preprocessing config: {error.text}") from None
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
        "hidden_act": WRITTEN_GELUS[config.gelu],
        "qkv_bias": config.qkv_bias,
        **classes,
    }


def recipe_to_transformers(recipe: Recipe, channels: int = 1) -> dict[str, Any]:
    """The preprocessor_config.json of a recipe, for pictures of so many channels.

    Raises:
        CheckpointError: transformers has no processor that does the same.
    """
    if not crops_alike(recipe, "down"):
        raise CheckpointError(
            "transformers rounds half of an odd margin down, and these pictures are cut at the nearest even number: a "
            "pixel further right or down.",
            python="If a pixel may be lost: model.preprocess = dataclasses.replace(model.preprocess.recipe, "
            "margin='down'), then save. For the tensors alone: convert to a .safetensors file.",
            command="Convert to a .safetensors file, which has the tensors alone.",
        )
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
        "image_mean": _for_each(recipe.mean, channels),
        "image_std": _for_each(recipe.std, channels),
    }


def _for_each(values: Sequence[float], channels: int) -> list[float]:
    """A number for each channel, where one may stand for all."""
    return [values[0]] * channels if len(values) == 1 else list(values)
