"""Read and write transformers' config.json. The `processors` module handles preprocessing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt, prod
from typing import Any, NamedTuple

from vitlite import __version__
from vitlite.checkpoints.formats.keys import (
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
    in_whole_patches,
    is_integer,
    labels_in_order,
)
from vitlite.checkpoints.formats.processors import transform_from_transformers, transform_to_transformers
from vitlite.checkpoints.metadata import CONFIG, PREPROCESSOR, Metadata, Scores
from vitlite.config import DINOV3_ROPE, ViTConfig, stem_stride
from vitlite.errors import CheckpointError, ConfigError
from vitlite.images.naflex import NaFlexTransform
from vitlite.images.transform import TransformConfig

TYPES = {
    "model_type": STRING,
    "architectures": LIST,
    "id2label": STRINGS,
    "num_labels": COUNT,
    "projection_dim": COUNT,
    "problem_type": STRING,
    "image_size": SIZE,
    "num_patches": COUNT,
    "patch_size": SIZE,
    "layer_norm_eps": NUMBER,
    "layerscale_value": NUMBER,
    "hidden_act": STRING,
    "qkv_bias": FLAG,
    "use_gated_mlp": FLAG,
    "use_swiglu_ffn": FLAG,
    "vision_config": TABLE,
    "vision_config_dict": TABLE,
    "backbone_config": TABLE,
    "depths": LIST,
    "out_features": LIST,
}
GELUS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
WRITTEN_GELUS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "quick_gelu": "quick_gelu", "swiglu": "gelu"}

WRITER = "written_by"  # the key with vitlite's version in a config.json that vitlite wrote for transformers
# Keys of any model that do not change the results of an image encoder.
OF_ANY_MODEL = """
    written_by vitlite_id model_type architectures transformers_version id2label label2id problem_type num_labels
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
# Keys used only in training.
OF_TRAINING = """
    hidden_dropout_prob attention_probs_dropout_prob attention_dropout dropout drop_path_rate initializer_range
    initializer_factor
"""
BESIDE_THE_TOWER = """
    text_config text_config_dict vision_config vision_config_dict projection_dim logit_scale_init_value
    initializer_factor image_text_hidden_size
"""
STATED = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp_dim",
    "num_channels": "channels",
    "layer_norm_eps": "norm_eps",
    "hidden_act": "mlp",
    "qkv_bias": "qkv_bias",
}
OTHER_NETWORK: dict[str, Sequence[Any]] = {"auto_map": ({},), "quantization_config": (), "pruned_heads": ({},)}


def _keys(ignored: str = "", only: Mapping[str, Sequence[Any]] = {}, **stated: str) -> Keys:
    """Return the keys in the config of a model class, including the keys that all classes share."""
    every = frozenset((OF_ANY_MODEL + OF_TRAINING + ignored).split())
    return Keys({**STATED, **stated}, {**OTHER_NETWORK, **only}, every)


class Family(NamedTuple):
    """A model_type: its supported classes, their keys, and the defaults for missing keys."""

    classes: Sequence[str]
    keys: Keys
    norm_eps: float = 1e-12
    activation: str = "gelu"
    processor: str = "ViT"  # of `processors.CROPS`
    heads: int = 12
    gate: str | None = "silu"  # the hidden_act that a gated MLP must have; None: any, because it has no effect
    resample: str | None = None  # value of `ViTConfig.resample`; None: the value of the checkpoint format


POOLER = "encoder_stride pooler_output_size pooler_act"
DECODER = """
    decoder_num_attention_heads decoder_hidden_size decoder_num_hidden_layers decoder_intermediate_size mask_ratio
    norm_pix_loss
"""
BACKBONE = "apply_layernorm reshape_hidden_states stage_names out_features out_indices _out_features _out_indices"
DINOV2 = f"intermediate_size mlp_ratio use_mask_token {BACKBONE}"  # the tensors determine the MLP width
DINOV2_STATED = {"layerscale_value": "layer_scale", "use_swiglu_ffn": "gated"}
DINOV3 = f"query_bias key_bias value_bias pos_embed_shift pos_embed_jitter pos_embed_rescale {BACKBONE}"
DINOV3_STATED = {"layerscale_value": "layer_scale", "num_register_tokens": "registers", "use_gated_mlp": "gated"}
DINOV3_ONLY: dict[str, Sequence[Any]] = {"rope_theta": (100.0, 100), "proj_bias": (True,), "mlp_bias": (True,)}
CLIP = Keys({}, OTHER_NETWORK, frozenset((OF_ANY_MODEL + BESIDE_THE_TOWER).split()))  # see TOWERS
HYBRID = f"backbone_config backbone_featmap_shape {POOLER}"
HYBRID_ONLY: dict[str, Sequence[Any]] = {
    "use_pretrained_backbone": (False,),
    "use_timm_backbone": (False,),
    "backbone": (),
    "backbone_kwargs": ({},),
}
BIT = Keys(  # the ResNet of a hybrid
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
    frozenset((OF_ANY_MODEL.replace(" model_type ", " ") + OF_TRAINING + BACKBONE).split()),
)
TOWERS = {  # from the model_type of a model with a text and an image tower to the model_type of its image tower
    "clip": "clip_vision_model",
    "metaclip_2": "metaclip_2_vision_model",
    "siglip": "siglip_vision_model",
    "siglip2": "siglip2_vision_model",
}
FAMILIES = {
    "vit": Family(("ViTModel", "ViTForImageClassification"), _keys(POOLER)),
    "deit": Family(
        ("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
        _keys(POOLER),
        processor="DeiT",
    ),
    "vit_mae": Family(("ViTMAEModel", "ViTMAEForPreTraining"), _keys(DECODER)),
    "ijepa": Family(("IJepaModel", "IJepaForImageClassification"), _keys(POOLER)),
    "vit_msn": Family(("ViTMSNModel", "ViTMSNForImageClassification"), _keys(), 1e-6),
    "dinov2": Family(
        ("Dinov2Model", "Dinov2ForImageClassification"),
        _keys(DINOV2, {}, **DINOV2_STATED),
        1e-6,
        processor="Bit",
        gate=None,
    ),
    "dinov2_with_registers": Family(
        ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
        _keys(DINOV2, {}, **DINOV2_STATED, num_register_tokens="registers"),
        1e-6,
        processor="Bit",
        gate=None,
        resample="timm",
    ),
    "dinov3_vit": Family(
        ("DINOv3ViTModel",),
        _keys(DINOV3, DINOV3_ONLY, **DINOV3_STATED),
        1e-5,
        processor="DINOv3ViT",
        heads=6,
    ),
    "vit-hybrid": Family(("ViTHybridModel", "ViTHybridForImageClassification"), _keys(HYBRID, HYBRID_ONLY)),
    "siglip": Family(("SiglipModel", "SiglipForImageClassification"), CLIP),
    "siglip_vision_model": Family(
        ("SiglipVisionModel",),
        _keys(only={"vision_use_head": (True,)}),
        1e-6,
        "gelu_pytorch_tanh",
        "Siglip",
    ),
    "siglip2": Family(("Siglip2Model", "Siglip2ForImageClassification"), CLIP),
    "siglip2_vision_model": Family(
        ("Siglip2VisionModel",),
        _keys("num_patches", {"vision_use_head": (True,)}),
        1e-6,
        "gelu_pytorch_tanh",
        "Siglip2",
        resample="naflex",
    ),
    "clip": Family(("CLIPModel",), CLIP),
    "metaclip_2": Family(("MetaClip2Model",), CLIP),
    "clip_vision_model": Family(
        ("CLIPVisionModel", "CLIPVisionModelWithProjection"), _keys("projection_dim"), 1e-5, "quick_gelu", "CLIP"
    ),
    "metaclip_2_vision_model": Family(
        ("MetaClip2VisionModel", "MetaClip2VisionModelWithProjection"),
        _keys("projection_dim"),
        1e-5,
        "quick_gelu",
        "CLIP",
    ),
}
HEAD_WIDTH, DEPTH = 64, 12  # defaults of transformers
NAFLEX, NAFLEX_PATCH, NAFLEX_PATCHES = "siglip2_vision_model", 16, 256  # with transformers' defaults
USUAL_CLASSES = 2  # default of transformers
SEVERAL = "multi_label_classification"  # the problem_type of several labels per image
USUAL_PROJECTION = 512  # transformers' default for the width of CLIP's projection
CLASSES = {  # from a model_type to the prefix of the class names in `architectures`
    "vit": "ViT",
    "deit": "DeiT",
    "ijepa": "IJepa",
    "dinov2": "Dinov2",
    "dinov2_with_registers": "Dinov2WithRegisters",
    "dinov3_vit": "DINOv3ViT",
    "siglip_vision_model": "SiglipVision",
    "siglip2_vision_model": "Siglip2Vision",
}
COMPUTED: dict[str, Any] = {  # the field values that the config.json of transformers' ViT cannot change
    "pool": "cls",
    "class_token": True,
    "registers": 0,
    "positions": "learned",
    "rope": None,
    "final_norm": "tokens",
    "stem": None,
    "head_dim": None,
    "cosine_head": None,
}


def metadata_from_transformers(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Metadata:
    """Read transformers' config.json and preprocessor_config.json.

    Raises:
        CheckpointError: The files describe a model that vitlite does not support.
    """
    check_types(config, TYPES)
    vision, family = _image_part(config)
    stated = family.keys.read(vision)
    stated |= _activation(stated, family)
    sizes = _sizes(vision, stated)
    fields = {
        "heads": family.heads,
        "norm_eps": family.norm_eps,
        "mlp": GELUS[family.activation],
        "dim": family.heads * HEAD_WIDTH,
        "depth": DEPTH,
    }
    if family.resample is not None:
        fields["resample"] = family.resample
    labels, labels_error, num_classes = _classes(config)
    if num_classes is not None:
        fields["num_classes"] = num_classes
    transform, transform_error = None, ""
    if preprocessor:
        if "feature_extractor_type" not in preprocessor:
            preprocessor = {"image_processor_type": family.processor, **preprocessor}
        try:
            transform = transform_from_transformers(preprocessor)
            if isinstance(transform, NaFlexTransform) and "image_size" in sizes:
                transform = replace(transform, size=(sizes["image_size"], sizes["image_size"]))
        except ConfigError as error:
            transform_error = str(error)
    return Metadata(
        source="config.json",
        fields=fields | stated | sizes,
        names_network=True,
        usual_image_size=224,
        transform=transform,
        transform_error=transform_error,
        labels=labels,
        labels_error=labels_error,
        scores="sigmoid" if config.get("problem_type") == SEVERAL else "softmax",
    )


def _image_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Family]:
    """Return the part of a config that describes the image encoder, and the family of the image encoder.

    Raises:
        CheckpointError: The model class is not supported.
    """
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise CheckpointError(f"transformers' model_type {kind} is not supported. Supported: {', '.join(FAMILIES)}.")
    family = FAMILIES[kind]
    for name in config.get("architectures") or ():
        if name not in family.classes:
            raise CheckpointError(
                f"architectures contains {name}, which is not supported for model_type {kind}. "
                f"Supported: {', '.join(family.classes)}."
            )
    inner = TOWERS.get(kind)
    if inner is None:
        return config, family
    family.keys.read(config)
    vision = {**(config.get("vision_config") or {}), **(config.get("vision_config_dict") or {})}
    check_types(vision, TYPES, "vision_config.")
    if vision.setdefault("model_type", inner) not in (inner, kind):
        raise CheckpointError(f"vision_config.model_type must be {inner}, got {vision['model_type']}.")
    return vision, FAMILIES[inner]


def _activation(stated: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the field `mlp`, if the activation is known. The entries "gated" and "mlp" of `stated` are removed.

    Raises:
        CheckpointError: The activation is not supported.
    """
    gated, activation = stated.pop("gated", None), stated.pop("mlp", None)
    if gated and family.gate not in (None, activation):
        raise CheckpointError(
            f"hidden_act is {activation!r}, but vitlite supports only {family.gate} in models with a gated MLP. Use "
            "transformers for this model."
        )
    if gated:
        return {"mlp": "swiglu"}
    if activation is None:
        return {}
    if activation not in GELUS:
        raise CheckpointError(f"hidden_act is {activation!r}, but vitlite supports only {', '.join(GELUS)}.")
    return {"mlp": GELUS[activation]}


def _sizes(config: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the image size, the patch size and, for a hybrid, the stem.

    Raises:
        CheckpointError: vitlite does not support these sizes or this stem.
    """
    sizes: dict[str, Any] = {}
    for name in ("image_size", "patch_size"):
        if name in stated:
            sizes[name] = in_whole_patches(stated[name], 1)
    if config["model_type"] == NAFLEX:
        return _naflex_sizes(config, sizes.get("patch_size", NAFLEX_PATCH))
    size = sizes.get("image_size")
    if config["model_type"].startswith("dinov2") and isinstance(size, tuple):
        raise CheckpointError(
            f"image_size is {size[0]} x {size[1]}, but the position table of transformers' DINOv2 is square. Set "
            "image_size to a single number."
        )
    if config["model_type"] == "vit-hybrid":
        sizes |= _stem(config.get("backbone_config") or {}, sizes.get("patch_size", 1))
    patch = sizes.get("patch_size")
    if size is not None and isinstance(patch, int):
        sizes["image_size"] = in_whole_patches(size, patch)
    return sizes


def _naflex_sizes(config: Mapping[str, Any], patch: Any) -> dict[str, Any]:
    """Return the patch size of a NaFlex model, and the image size for which its position table was learned."""
    patches = config.get("num_patches")
    side = isqrt(NAFLEX_PATCHES if patches is None else patches)
    return {"patch_size": patch, "image_size": side * patch} if isinstance(patch, int) else {"patch_size": patch}


def _stem(backbone: Mapping[str, Any], kernel: Any) -> dict[str, Any]:
    """Return the fields that describe the stem of a hybrid.

    Args:
        backbone: The config of the ResNet.
        kernel: patch_size in the config of the ViT, which counts cells of the ResNet's feature map.

    Raises:
        CheckpointError: vitlite does not support the ResNet.
    """
    check_types(backbone, TYPES, "backbone_config.")
    stated = BIT.read(backbone, "backbone_config.")
    # transformers' defaults for these keys describe a ResNet that vitlite does not support.
    needed = ("depths", "layer_type", "global_padding", "embedding_dynamic_padding", "out_features")
    missing = [name for name in needed if backbone.get(name) is None]
    if missing:
        raise CheckpointError(f"backbone_config has no {', '.join(missing)}. Add the missing values to the file.")
    stem = tuple(stated["stem"])
    if not 1 <= len(stem) <= 4 or not all(is_integer(units, 1) for units in stem):
        raise CheckpointError(
            f"backbone_config.depths must contain the number of units in each stage, for 1 to 4 stages, got "
            f"{list(stem)}."
        )
    if backbone["out_features"] != [f"stage{len(stem)}"]:
        raise CheckpointError(
            f"backbone_config.out_features must contain only the last stage, stage{len(stem)}, got "
            f"{backbone['out_features']}."
        )
    if not isinstance(kernel, int):
        raise CheckpointError(f"patch_size is {kernel}, but vitlite supports only square patches.")
    return {**stated, "stem": stem, "patch_size": kernel * stem_stride(stem)}


def _classes(config: Mapping[str, Any]) -> tuple[tuple[str, ...] | None, str, int | None]:
    """Return the labels or None, the reason why there are none or "", and the number of classes or None."""
    architecture = (config.get("architectures") or [""])[0]
    if architecture.endswith(("VisionModelWithProjection", "CLIPModel", "MetaClip2Model")):
        projection = config.get("projection_dim")  # the projection is loaded as a head
        return None, "", USUAL_PROJECTION if projection is None else projection
    if not architecture.endswith(("ForImageClassification", "ForImageClassificationWithTeacher")):
        return None, "", None
    names = config.get("id2label")
    if names is None:
        count = config.get("num_labels")
        names = [f"LABEL_{number}" for number in range(USUAL_CLASSES if count is None else count)]
    labels, error = labels_in_order(names)
    if labels and config.get("problem_type") == "regression":
        labels, error = None, "problem_type is regression, so outputs are not scores of classes"
    return labels, error, len(names)


def contents_for_transformers(
    config: ViTConfig, labels: Sequence[str] | None, transform: TransformConfig | None, scores: Scores = "softmax"
) -> dict[str, dict[str, Any]]:
    """Return the content of config.json and, if there is a transform, of preprocessor_config.json, by file name.

    Raises:
        CheckpointError: transformers has no processor for this transform.
    """
    contents = {CONFIG: config_to_transformers(config, labels) | {WRITER: f"vitlite {__version__}"}}
    if scores == "sigmoid":
        contents[CONFIG]["problem_type"] = SEVERAL
    if transform is not None and isinstance(transform, NaFlexTransform) != (model_type(config) == NAFLEX):
        raise CheckpointError(
            "transformers prepares images for this model in another way. Set model.preprocess to a TransformConfig, or "
            "to a NaFlexTransform for SigLIP 2 NaFlex."
        )
    if transform is not None:
        contents[PREPROCESSOR] = transform_to_transformers(transform, config.channels)
    metadata_from_transformers(as_json(contents[CONFIG]), as_json(contents.get(PREPROCESSOR, {})))
    return contents


def model_type(config: ViTConfig) -> str:
    """Return transformers' model_type for the models that are most similar to a config.

    The config may still differ from models of this type. `computed_by` returns what these models compute.
    """
    if config.pool == "map":
        return NAFLEX if config.resample == "naflex" else "siglip_vision_model"
    if config.rope is not None:
        return "dinov3_vit"
    if config.layer_scale is not None:
        return "dinov2_with_registers" if config.registers else "dinov2"
    if config.registers:
        return "deit"
    return "vit" if config.class_token else "ijepa"


def computed_by(kind: str, config: ViTConfig) -> dict[str, Any]:
    """Return the values of config fields in the model that transformers would build with this model_type.

    Fields that the keys of config.json can set to any value are left out, or have their value in `config`.
    """
    gates = kind.startswith("dinov") or config.mlp != "swiglu"
    return COMPUTED | {"mlp": config.mlp if gates else "gelu"} | _fixed_by_kind(kind, config)


def _fixed_by_kind(kind: str, config: ViTConfig) -> dict[str, Any]:
    """Return the values that differ from `COMPUTED` for a model_type. Fields that it can set are as in `config`."""
    if kind == "deit":
        return {"registers": 1, "pool": "cls_and_distillation" if _has_two_heads(config) else "cls"}
    if kind == "ijepa":
        return {"class_token": False, "pool": "mean"}
    if kind in ("siglip_vision_model", NAFLEX):
        return {
            "class_token": False,
            "pool": "map",
            "num_classes": 0,
            "qkv_bias": True,
            "image_size": config.size[0],
        }
    stated = {"registers": config.registers}
    if kind == "dinov3_vit":
        return stated | {
            "positions": "none",
            "rope": DINOV3_ROPE,
            "num_classes": 0,
            "layer_scale": config.layer_scale or 1.0,
        }
    if kind.startswith("dinov2"):
        return stated | {
            "pool": "cls_and_mean" if config.num_classes else "cls",
            "mlp_dim": _dinov2_mlp_dim(config, _dinov2_mlp_ratio(config)),
            "image_size": config.size[0],  # the position table is square
        }
    return {}


def _has_two_heads(config: ViTConfig) -> bool:
    return config.pool == "cls_and_distillation" and config.num_classes > 0


def _dinov2_mlp_dim(config: ViTConfig, ratio: int) -> int:
    """Return the MLP width of DINOv2: dim * ratio or, with a gate, two thirds of it rounded up to a multiple of 8."""
    width = config.dim * ratio
    return (int(width * 2 / 3) + 7) // 8 * 8 if config.mlp == "swiglu" else width


def _dinov2_mlp_ratio(config: ViTConfig) -> int:
    """Return the largest mlp_ratio for which `_dinov2_mlp_dim` is at most the MLP width of the model."""
    ratio = 1
    while _dinov2_mlp_dim(config, ratio + 1) <= config.mlp_dim:
        ratio += 1
    return ratio


def format_for_transformers(config: ViTConfig) -> str:
    """Return the checkpoint format that transformers uses for a model with this config."""
    kind = model_type(config)
    if kind == "deit":
        return "transformers-distilled" if _has_two_heads(config) else "transformers"
    if kind.startswith("dinov2"):
        return "transformers-dinov2-gated" if config.mlp == "swiglu" else "transformers-dinov2"
    if kind == "dinov3_vit":
        return "transformers-dinov3" if config.mlp == "swiglu" else "transformers-dinov3-plain"
    return {"siglip_vision_model": "transformers-siglip", NAFLEX: "transformers-siglip2"}.get(kind, "transformers")


def config_to_transformers(config: ViTConfig, labels: Sequence[str] | None) -> dict[str, Any]:
    """Return the config.json of a model that transformers supports."""
    kind = model_type(config)
    task = "ForImageClassification" if config.num_classes else "Model"
    if _has_two_heads(config):
        task = "ForImageClassificationWithTeacher"
    return {
        "architectures": [CLASSES[kind] + task],
        "model_type": kind,
        **({"num_patches": prod(config.grid)} if kind == NAFLEX else {"image_size": config.image_size}),
        "patch_size": config.patch_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_channels": config.channels,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": WRITTEN_GELUS[config.mlp],
        **_keys_of_kind(kind, config),
        **_classes_to_transformers(config, labels),
    }


def _keys_of_kind(kind: str, config: ViTConfig) -> dict[str, Any]:
    """Return the config entries that are specific to a model_type."""
    gated = config.mlp == "swiglu"
    if kind.startswith("dinov2"):
        entries = {"mlp_ratio": _dinov2_mlp_ratio(config), "use_swiglu_ffn": gated, "qkv_bias": config.qkv_bias}
        if config.registers:
            return entries | {"num_register_tokens": config.registers}
        return entries | {"use_mask_token": False}  # vitlite has no mask token
    entries = {"intermediate_size": config.mlp_dim}
    if kind == "dinov3_vit":
        biases = dict.fromkeys(("query_bias", "key_bias", "value_bias"), config.qkv_bias)
        activation = {"use_gated_mlp": True, "hidden_act": "silu"} if gated else {}
        return entries | biases | activation | {"num_register_tokens": config.registers}
    return entries if kind in ("siglip_vision_model", NAFLEX) else entries | {"qkv_bias": config.qkv_bias}


def _classes_to_transformers(config: ViTConfig, labels: Sequence[str] | None) -> dict[str, Any]:
    """Return the config entries id2label and label2id."""
    labels = labels or [f"LABEL_{number}" for number in range(config.num_classes)]
    if not labels:
        return {}
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
    }
