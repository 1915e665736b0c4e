"""transformers' config.json. Read first, then written; what it has for the pictures is in `processors`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitlite.checkpoints.formats.record import (
    COUNT,
    NAMES,
    SIDES,
    SWITCH,
    WORD,
    Metadata,
    UnreadTransform,
    Words,
    in_whole_patches,
    labels_in_order,
    one_or_two_sides,
)
from vitlite.config import ViTConfig, stem_stride
from vitlite.errors import CheckpointError, shown
from vitlite.schema import number, optional, several, table, verify, whole

FIELDS = {
    "model_type": WORD,
    "architectures": optional(several(WORD, most=100)),
    "id2label": NAMES,
    "num_labels": optional(whole(0, 100_000)),
    "problem_type": optional(WORD),
    "image_size": optional(SIDES),
    "patch_size": optional(SIDES),
    "num_attention_heads": optional(whole(1, 10_000)),
    "layer_norm_eps": optional(number(0, 1)),
    "layerscale_value": optional(number(-1e6, 1e6)),
    "hidden_act": optional(WORD),
    "qkv_bias": SWITCH,
    "use_gated_mlp": SWITCH,
    "use_swiglu_ffn": SWITCH,
    **dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "intermediate_size", "num_channels", "num_register_tokens"),
        optional(COUNT),
    ),
}
TOWER = optional(table(FIELDS))
STEM = optional(table({"depths": several(whole(1, 1000), 1, 4), "out_features": optional(several(WORD, 1, 1))}))
CONFIG = table(
    {**FIELDS, "vision_config": TOWER, "vision_config_dict": TOWER, "backbone_config": STEM}, required=("model_type",)
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
    written_by vitlite_id vitlite_pair
    model_type architectures transformers_version id2label label2id problem_type num_labels
    _num_labels _name_or_path _commit_hash dtype torch_dtype torchscript use_bfloat16 return_dict use_return_dict
    output_attentions output_hidden_states is_encoder_decoder is_decoder use_cache add_cross_attention
    cross_attention_hidden_size tie_encoder_decoder tie_word_embeddings chunk_size_feed_forward tf_legacy_loss
    finetuning_task tokenizer_class prefix bos_token_id pad_token_id eos_token_id sep_token_id
    decoder_start_token_id task_specific_params attn_implementation _attn_implementation
    _attn_implementation_autoset _attn_implementation_internal gradient_checkpointing max_length min_length
    do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
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


def _words(free: str = "", only: Mapping[str, Sequence[Any]] = {}, **told: str) -> Words:
    """The words of a class: those of all, and its own."""
    return Words({**TOLD, **told}, {**OTHER_NETWORK, **only}, OF_ANY_MODEL + OF_TRAINING + free)


class Family(NamedTuple):
    """A model_type: the classes that vitlite computes, their words, and what they have where a config is silent."""

    classes: Sequence[str]
    words: Words
    norm_eps: float = 1e-12
    activation: str = "gelu"
    processor: str = "ViT"  # of `processors.CROPS`
    heads: int = 12
    gate: str | None = "silu"  # what hidden_act has to say of a gated MLP; None: such an MLP does not ask it
    resample: str | None = None  # how it stretches the position table, where tensors alone may tell otherwise


POOLER = "encoder_stride pooler_output_size pooler_act"
DECODER = """
    decoder_num_attention_heads decoder_hidden_size decoder_num_hidden_layers decoder_intermediate_size mask_ratio
    norm_pix_loss
"""
BACKBONE = "apply_layernorm reshape_hidden_states stage_names out_features out_indices _out_features _out_indices"
DINOV2 = f"intermediate_size mlp_ratio use_mask_token {BACKBONE}"  # how wide its MLP is, tensors tell
DINOV2_TOLD = {"layerscale_value": "layer_scale", "use_swiglu_ffn": "mlp"}
DINOV3 = f"query_bias key_bias value_bias pos_embed_shift pos_embed_jitter pos_embed_rescale {BACKBONE}"
DINOV3_TOLD = {"layerscale_value": "layer_scale", "num_register_tokens": "registers", "use_gated_mlp": "mlp"}
DINOV3_ONLY: dict[str, Sequence[Any]] = {"rope_theta": (100.0, 100), "proj_bias": (True,), "mlp_bias": (True,)}
CLIP = Words({}, OTHER_NETWORK, OF_ANY_MODEL + BESIDE_THE_TOWER)  # of images and texts: the tower has its own words
HYBRID = f"backbone_config backbone_featmap_shape {POOLER}"
HYBRID_ONLY: dict[str, Sequence[Any]] = {
    "use_pretrained_backbone": (False,),
    "use_timm_backbone": (False,),
    "backbone": (),
    "backbone_kwargs": ({},),
}
BIT = Words(  # the ResNet of a hybrid
    {"depths": "stem", "num_channels": "channels"},
    {
        **OTHER_NETWORK,
        "model_type": ("bit",),
        "layer_type": ("bottleneck",),
        "global_padding": ("same", "SAME"),
        "embedding_dynamic_padding": (True,),
        "embedding_size": (64,),
        "hidden_sizes": ([256, 512, 1024, 2048],),
        "num_groups": (32,),
        "width_factor": (1,),
        "output_stride": (32,),
        "hidden_act": ("relu",),
    },
    OF_ANY_MODEL.replace(" model_type ", " ") + OF_TRAINING + BACKBONE,
)
TOWERS = {  # of those with a part for texts: what its part for images is where it does not say
    "clip": "clip_vision_model",
    "metaclip_2": "metaclip_2_vision_model",
    "siglip": "siglip_vision_model",
}
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
        _words(DINOV2, {}, **DINOV2_TOLD),
        1e-6,
        processor="Bit",
        gate=None,
    ),
    "dinov2_with_registers": Family(
        ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
        _words(DINOV2, {}, **DINOV2_TOLD, num_register_tokens="registers"),
        1e-6,
        processor="Bit",
        gate=None,
        resample="timm",
    ),
    "dinov3_vit": Family(
        ("DINOv3ViTModel",),
        _words(DINOV3, DINOV3_ONLY, **DINOV3_TOLD),
        1e-5,
        processor="DINOv3ViT",
        heads=6,
    ),
    "vit-hybrid": Family(("ViTHybridModel", "ViTHybridForImageClassification"), _words(HYBRID, HYBRID_ONLY)),
    "siglip": Family(("SiglipModel", "SiglipForImageClassification"), CLIP),
    "siglip_vision_model": Family(
        ("SiglipVisionModel",),
        _words(only={"vision_use_head": (True,)}),
        1e-6,
        "gelu_pytorch_tanh",
        "Siglip",
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
HEAD_WIDTH, DEPTH = 64, 12  # of a network whose config says nothing of them
USUAL_CLASSES = 2  # of a classifier whose config says nothing of them
DEFAULT_PROJECTION = 512  # numbers that CLIP's projection gives, where a config does not say
CLASSES = {  # what is written, by model_type
    "vit": "ViT",
    "deit": "DeiT",
    "ijepa": "IJepa",
    "dinov2": "Dinov2",
    "dinov2_with_registers": "Dinov2WithRegisters",
    "dinov3_vit": "DINOv3ViT",
    "siglip_vision_model": "SiglipVision",
}
COMPUTED: dict[str, Any] = {  # by ViT, of which its config has no word: fields of ours
    "pool": "cls",
    "class_token": True,
    "registers": 0,
    "positions": "learned",
    "mlp": "gelu",
    "final_norm": True,
    "stem": None,
    "head_dim": None,
}


def metadata_from_transformers(config: Mapping[str, Any], pictures: Mapping[str, Any]) -> Metadata:
    """What config.json and preprocessor_config.json say.

    Raises:
        CheckpointError: It is a model that vitlite does not run.
    """
    verify(config, CONFIG)
    vision, family = _tower(config)
    claims = family.words.claims(vision, "it")
    claims |= _mlp(claims, family)
    claims |= _sizes(config, claims)
    if family.resample is not None:
        claims["resample"] = family.resample
    if pictures and "feature_extractor_type" not in pictures:
        pictures = {"image_processor_type": family.processor, **pictures}
    class_names = _class_names(config)
    labels, unlabelled = labels_in_order(class_names)
    if class_names is not None:
        claims["num_classes"] = len(class_names)
    if _is_projected(config):
        claims["num_classes"] = config.get("projection_dim", DEFAULT_PROJECTION)
    if labels and config.get("problem_type") not in (None, "single_label_classification"):
        labels, unlabelled = None, f"problem_type is {config['problem_type']}, of which no softmax tells the scores"
    usual = {"image_size": 224, "heads": family.heads, "norm_eps": family.norm_eps, "gelu": GELUS[family.activation]}
    usual_sizes = {"dim": family.heads * HEAD_WIDTH, "depth": DEPTH}
    return Metadata(
        claims=claims,
        usual=usual,
        built={field: size for field, size in usual_sizes.items() if field not in claims},
        labels=labels,
        unlabelled=unlabelled,
        transform=UnreadTransform("transformers", pictures) if pictures else None,
        library="transformers",
    )


def _sizes(config: Mapping[str, Any], claims: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of images and patches, in our words.

    Raises:
        CheckpointError: It is said of a network that vitlite does not run.
    """
    sizes = {name: one_or_two_sides(claims[name]) for name in ("image_size", "patch_size") if name in claims}
    if config["model_type"].startswith("dinov2"):
        _refuse_oblong(sizes)
    if config["model_type"] == "vit-hybrid":
        sizes |= _stem(config, sizes)
    patch = sizes.get("patch_size")
    if "image_size" in sizes and isinstance(patch, int):
        sizes["image_size"] = in_whole_patches(sizes["image_size"], patch)
    return sizes


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


def _mlp(claims: dict[str, Any], family: Family) -> dict[str, Any]:
    """What is said of the MLPs, in our words; of one with a gate, hidden_act names no GELU.

    Raises:
        CheckpointError: The activation is another than vitlite computes.
    """
    said: dict[str, Any] = {}
    gated = claims.get("mlp")
    if gated is not None:
        said["mlp"] = "swiglu" if gated else "gelu"
    activation = claims.pop("gelu", None)
    if gated and family.gate not in (None, activation):
        raise CheckpointError(f"hidden_act is {shown(repr(activation))}; vitlite computes gates by {family.gate}.")
    if activation is not None and not gated:
        said["gelu"] = _gelu(activation)
    return said


def _refuse_oblong(claims: Mapping[str, Any]) -> None:
    """Makes sure that the position table is read as transformers reads DINOv2's: as a square's, whatever is said of it.

    Raises:
        CheckpointError: The config says that it is another's.
    """
    size = claims.get("image_size")
    if isinstance(size, tuple):
        raise CheckpointError(
            f"its image_size is {size[0]} x {size[1]}, and transformers' DINOv2 takes its position table for a "
            "square's all the same, and stretches it.",
            python="If it is one, write that square's side there; if not, load the file without its config.json.",
        )


def _stem(config: Mapping[str, Any], claims: Mapping[str, Any]) -> dict[str, Any]:
    """What a hybrid says of the ResNet before its patches; its patch_size is in cells of what that gives.

    Raises:
        CheckpointError: It is another ResNet than vitlite computes.
    """
    backbone = config.get("backbone_config") or {}
    said = BIT.claims(backbone, "its backbone_config")
    needed = ("depths", "layer_type", "global_padding", "embedding_dynamic_padding", "out_features")
    missing = [name for name in needed if backbone.get(name) is None]
    if missing:
        raise CheckpointError(f"its backbone_config has no {', '.join(missing)}: what stands for that, changed.")
    stages = len(said["stem"])
    if backbone["out_features"] != [f"stage{stages}"]:
        raise CheckpointError(f"its tokens are made of {shown(str(backbone['out_features']))}, not of the last stage.")
    said["stem"] = tuple(said["stem"])
    said["patch_size"] = claims.get("patch_size", 1) * stem_stride(said["stem"])
    return said


def _gelu(activation: str) -> str:
    if activation not in GELUS:
        raise CheckpointError(f"hidden_act is {shown(repr(activation))}; vitlite computes {', '.join(GELUS)}.")
    return GELUS[activation]


def _class_names(config: Mapping[str, Any]) -> Mapping[str, str] | None:
    """The names of the classes by number; None for a model without a head."""
    architectures = config.get("architectures") or [""]
    if not architectures[0].endswith(("ForImageClassification", "ForImageClassificationWithTeacher")):
        return None
    if config.get("id2label") is not None:
        return config["id2label"]
    count = config.get("num_labels")
    return {str(number): f"LABEL_{number}" for number in range(USUAL_CLASSES if count is None else count)}


def _is_projected(config: Mapping[str, Any]) -> bool:
    """Whether CLIP's projection is part of the model, whose width takes the place of a number of classes."""
    architectures = config.get("architectures") or [""]
    return architectures[0].endswith(("VisionModelWithProjection", "CLIPModel", "MetaClip2Model"))


def model_type(config: ViTConfig) -> str:
    """Which of transformers' models computes what this one does, if any; `computed_by` says whether it does."""
    if config.pool == "map":
        return "siglip_vision_model"
    if config.positions == "rope":
        return "dinov3_vit"
    if config.layer_scale is not None:
        return "dinov2_with_registers" if config.registers else "dinov2"
    if config.registers:
        return "deit"
    return "vit" if config.class_token else "ijepa"


def computed_by(kind: str, config: ViTConfig) -> dict[str, Any]:
    """What transformers' model of this type computes, of which its config has no word: fields of ours."""
    return COMPUTED | _computed_otherwise(kind, config)


def _computed_otherwise(kind: str, config: ViTConfig) -> dict[str, Any]:
    """What it computes otherwise than ViT, or tells after all: then as our config says."""
    if kind == "deit":
        return {"registers": 1, "pool": "cls_and_distillation" if _has_two_heads(config) else "cls"}
    if kind == "ijepa":
        return {"class_token": False, "pool": "mean"}
    if kind == "siglip_vision_model":
        return {"class_token": False, "pool": "map", "num_classes": 0, "qkv_bias": True, "image_size": config.size[0]}
    told = {"registers": config.registers, "mlp": config.mlp}
    if kind == "dinov3_vit":
        return told | {"positions": "rope", "num_classes": 0, "layer_scale": config.layer_scale or 1.0}
    if kind.startswith("dinov2"):
        return told | {
            "pool": "cls_and_mean" if config.num_classes else "cls",
            "mlp_dim": _dinov2_mlp_dim(config, _dinov2_mlp_ratio(config)),
            "image_size": config.size[0],  # it takes the position table for a square's
        }
    return {}


def _has_two_heads(config: ViTConfig) -> bool:
    return config.pool == "cls_and_distillation" and config.num_classes > 0


def _dinov2_mlp_dim(config: ViTConfig, ratio: int) -> int:
    """How wide DINOv2's MLPs are; those with a gate two thirds of that, and a multiple of 8."""
    width = config.dim * ratio
    return (int(width * 2 / 3) + 7) // 8 * 8 if config.mlp == "swiglu" else width


def _dinov2_mlp_ratio(config: ViTConfig) -> int:
    """The ratio in DINOv2's config that comes nearest to a width, from below."""
    ratio = 1
    while _dinov2_mlp_dim(config, ratio + 1) <= config.mlp_dim:
        ratio += 1
    return ratio


def layout_of(config: ViTConfig) -> str:
    """The layout of layouts.txt that transformers' model has."""
    kind = model_type(config)
    if kind == "deit":
        return "transformers-distilled" if _has_two_heads(config) else "transformers"
    if kind.startswith("dinov2"):
        return "transformers-dinov2-gated" if config.mlp == "swiglu" else "transformers-dinov2"
    if kind == "dinov3_vit":
        return "transformers-dinov3" if config.mlp == "swiglu" else "transformers-dinov3-plain"
    return "transformers-siglip" if kind == "siglip_vision_model" else "transformers"


def config_to_transformers(config: ViTConfig, labels: Sequence[str] | None) -> dict[str, Any]:
    """The config.json of a model that transformers has."""
    kind = model_type(config)
    task = "ForImageClassification" if config.num_classes else "Model"
    if _has_two_heads(config):
        task = "ForImageClassificationWithTeacher"
    return {
        "architectures": [CLASSES[kind] + task],
        "model_type": kind,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_channels": config.channels,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": WRITTEN_GELUS[config.gelu],
        **_words_of_kind(kind, config),
        **_words_of_classes(config, labels),
    }


def _words_of_kind(kind: str, config: ViTConfig) -> dict[str, Any]:
    """The words of a config that not every model has."""
    gated = config.mlp == "swiglu"
    if kind.startswith("dinov2"):
        words = {"mlp_ratio": _dinov2_mlp_ratio(config), "use_swiglu_ffn": gated, "qkv_bias": config.qkv_bias}
        if config.registers:
            return words | {"num_register_tokens": config.registers}
        return words | {"use_mask_token": False}  # which our weights have not; with registers there always is one
    words = {"intermediate_size": config.mlp_dim}
    if kind == "dinov3_vit":
        biases = dict.fromkeys(("query_bias", "key_bias", "value_bias"), config.qkv_bias)
        activation = {"use_gated_mlp": True, "hidden_act": "silu"} if gated else {}
        return words | biases | activation | {"num_register_tokens": config.registers}
    return words if kind == "siglip_vision_model" else words | {"qkv_bias": config.qkv_bias}


def _words_of_classes(config: ViTConfig, labels: Sequence[str] | None) -> dict[str, Any]:
    """The names of the classes, both ways round."""
    labels = labels or [f"LABEL_{number}" for number in range(config.num_classes)]
    if not labels:
        return {}
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
    }
