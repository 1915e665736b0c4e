"""Every argument of other libraries' models, with values other than the default, and what becomes of such a model here.

The arguments are those of the libraries' own signatures: one without values here is a mistake, which a test finds. A
model with a value is small, filled with spread numbers, saved by its library, and loaded in three ways.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from files_made import completed
from peers import timm, transformers, vit_pytorch
from references import distance, spread
from safetensors.torch import save_file
from timm.models import vision_transformer as timm_vit
from torch import Tensor, nn

from vitlite import ViT, create, load
from vitlite.config import DINOV3_ROPE
from vitlite.errors import CheckpointError, ConfigError
from vitlite.zoo import registry

EQUAL = 1e-5
REFUSALS = (RuntimeError, ValueError)
CHECKPOINT = registry.find("vit_test_16")  # the smallest there is: all models are of its sizes
SIZES = CHECKPOINT.config


class Value(NamedTuple):
    """A value of an argument.

    Args:
        value: As the library takes it.
        ours: What somebody who knows the model answers, where a bare file leaves something open.
        unsayable: The field of ours that is asked for, and for whose truth there is no word.
        also: Other arguments that this one needs.
        assumed: Whether names tell nothing of it, and the report says that the default was assumed.
    """

    value: Any
    ours: Mapping[str, Any] = {}
    unsayable: str = ""
    also: Mapping[str, Any] = {}
    assumed: bool = False

    def __str__(self) -> str:
        also = ", ".join(f"{name} {_word(value)}" for name, value in self.also.items())
        return _word(self.value) + (f", with {also}" if also else "")


def _word(value: Any) -> str:
    """A value in a word or two."""
    if isinstance(value, partial):
        given = ", ".join(f"{name} {_word(each)}" for name, each in value.keywords.items())
        return f"{value.func.__name__} of {given}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    return getattr(value, "__name__", str(value)) or "''"


class Outcome(NamedTuple):
    """What became of a model: of its folder, of its bare file, and of its folder by the name of a checkpoint."""

    folder: str
    bare: str
    create: str


def told(value: Any, **ours: Any) -> Value:
    """A value that somebody would tell in other words of ours than the default."""
    return Value(value, ours)


def unsayable(value: Any, field: str, **also: Any) -> Value:
    """A value for which a field of ours has no word."""
    return Value(value, unsayable=field, also=also)


@dataclass(frozen=True)
class Kind:
    """A class of a library: its arguments with values, how a model is built and saved, and what it answers."""

    library: str
    name: str
    arguments: Callable[[], Iterable[str]]
    values: Mapping[str, Sequence[Value]]
    build: Callable[..., nn.Module]
    write: Callable[[nn.Module, Mapping[str, Any], Path], None]  # config.json and weights, where the library does
    logits: Callable[[nn.Module, Tensor], Tensor]
    ours: Mapping[str, Any]  # what somebody answers about a bare file of the defaults
    stretched: Callable[[nn.Module, Tensor], Tensor] | None = None  # the logits at another size, where it takes any

    def __str__(self) -> str:
        return f"{self.library} {self.name}"


def outcome(kind: Kind, name: str, value: Value, folder: Path) -> Outcome:
    """Builds, saves and loads a model with this value of this argument."""
    given = {name: value.value, **value.also} if name else {}
    model = spread(kind.build(**given))
    kind.write(model, given, folder)
    has_config = (folder / "config.json").exists()
    bare = folder / "bare.safetensors"
    (folder / "model.safetensors").rename(bare)
    bare_outcome = _bare(kind, value, model, bare)
    bare.rename(folder / "model.safetensors")
    if not has_config:
        return Outcome("", bare_outcome, "")
    whole = _compared(kind, model, lambda: load(folder), sizes=2)
    named = _compared(kind, model, lambda: create(CHECKPOINT.name, weights=folder), sizes=2)
    return Outcome(whole, bare_outcome, named)


def _compared(kind: Kind, model: nn.Module, open_it: Callable[[], ViT], sizes: int = 1) -> str:
    """What becomes of it at its own size, and at another: of a bare file, nothing tells how its table is stretched."""
    try:
        ours = open_it()
    except CheckpointError:
        return "refused"
    except ConfigError as error:
        return "asked" if "do not determine" in str(error) else "refused"
    (height, width), patch = ours.config.size, ours.config.patch_size
    ways = [(kind.logits, (height, width))]
    if sizes > 1 and kind.stretched is not None:
        ways.append((kind.stretched, (height + patch, width - patch)))
    for answer, size in ways:
        images = torch.randn(2, ours.config.channels, *size, generator=torch.Generator().manual_seed(0))
        try:
            with torch.no_grad():
                mine, theirs = ours(images), answer(model, images)
        except REFUSALS:
            if size == ours.config.size:
                raise
            continue  # the library takes no other size of this model: its table is of an oblong, say
        if mine.shape != theirs.shape or distance(mine, theirs) >= EQUAL:
            return "differs"
    return "equal"


def _bare(kind: Kind, value: Value, model: nn.Module, path: Path) -> str:
    """What becomes of a bare file; what is asked for is answered as somebody does who knows the model."""
    knows = {**kind.ours, **value.ours}
    said: dict[str, Any] = {}
    for _ in range(5):
        try:
            ours = load(path, config=completed(path, **said) if said else None)
            break
        except CheckpointError:
            return "refused"
        except ConfigError as error:
            asked = re.search(r"do not determine (\w+(?:, \w+)*)", str(error))
            if asked is None:
                return "refused"
            fields = asked[1].split(", ")
            if value.unsayable in fields or not set(fields) <= knows.keys():
                return "asked"
            said |= {field: knows[field] for field in fields}
    else:
        return "asked"
    result = _compared(kind, model, lambda: ours)
    if result == "differs" and value.assumed:
        assert ours.source is not None
        if ours.source.report.provenance.keys() & {"norms", "tokens", "rotation"}:
            result = "assumed"
    return result


def signature(function: Callable[..., Any]) -> list[str]:
    """The names of a function's arguments."""
    return [name for name in inspect.signature(function).parameters if name not in ("self", "kwargs")]


# ---- timm


SMALL_EVA = {"img_size": 160, "embed_dim": 64, "depth": 2, "num_heads": 2}


def _build_timm(**given: Any) -> nn.Module:
    return timm.create_model("test_vit", **given).float()


def _build_eva(**given: Any) -> nn.Module:
    """DINOv3's network."""
    return timm.create_model("vit_small_patch16_dinov3", **SMALL_EVA | given).float()


def _stretched_timm(model: nn.Module, images: Tensor) -> Tensor:
    other: Any = deepcopy(model)
    other.set_input_size(images.shape[-2:])
    answer: Tensor = other(images)
    return answer


def _write_eva(model: nn.Module, given: Mapping[str, Any], folder: Path) -> None:
    _write_timm(model, SMALL_EVA | given, folder)


def _write_timm(model: nn.Module, given: Mapping[str, Any], folder: Path) -> None:
    as_text = {name: _as_json(value) for name, value in given.items()}
    timm.models.save_for_hf(model, folder, model_config={"model_args": as_text}, safe_serialization=True)


def _as_json(value: Any) -> Any:
    """What somebody writes for a class, of which JSON knows nothing."""
    try:
        json.dumps(value)
    except TypeError:
        return getattr(value, "__name__", str(value))
    return value


ROOT_ALONE = partial(timm.layers.HybridEmbed, backbone=timm.models.vision_transformer_hybrid._resnetv2(()))
DROPS = ("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")
AVERAGE = {"global_pool": "avg", "fc_norm": False}
RPN = {"class_token": False, "global_pool": "avg", "qkv_bias": False}  # of which weights are published
TIMM_VALUES: dict[str, list[Value]] = {
    "img_size": [told(96, image_size=96), told((160, 96), image_size=(160, 96))],
    "patch_size": [told(32, patch_size=32), Value((16, 32))],
    "in_chans": [Value(1)],
    "num_classes": [Value(7), Value(0)],
    "global_pool": [
        told("avg", pool="mean"),
        Value("map", also={"class_token": False}),
        Value("map", {"pool": "map"}, also={"reg_tokens": 2}),
        *(unsayable(pool, "pool") for pool in ("avgmax", "max", "prr", "")),
    ],
    "embed_dim": [told(32, dim=32)],
    "depth": [Value(2)],
    "num_heads": [told(4, heads=4)],
    "mlp_ratio": [Value(2.0)],
    "qkv_bias": [Value(False)],
    "qk_norm": [Value(True)],
    "scale_attn_norm": [Value(True), Value(True, also={"scale_mlp_norm": True})],
    "scale_mlp_norm": [Value(True)],
    "proj_bias": [Value(False)],
    "init_values": [Value(0.1)],
    "class_token": [Value(False, {"pool": "mean"}, also=AVERAGE)],
    "pos_embed": [told("none", positions="none"), unsayable("", "positions")],
    "no_embed_class": [told(True, cls_position=False)],
    "reg_tokens": [Value(2), Value(2, also={"no_embed_class": True})],
    "pre_norm": [Value(True)],
    "final_norm": [told(False, final_norm="none"), Value(False, {"final_norm": "none"}, also={"pre_norm": True})],
    "fc_norm": [Value(True)],
    "pool_include_prefix": [
        Value(True, {"pool": "mean_with_cls"}, also=AVERAGE),
        Value(True, unsayable="pool", also={"global_pool": "map"}),
    ],
    "dynamic_img_size": [Value(True)],
    "dynamic_img_pad": [Value(True)],
    **{name: [Value(0.5)] for name in DROPS},
    "weight_init": [Value("jax")],
    "fix_init": [Value(True)],
    "embed_layer": [Value(ROOT_ALONE, also={"patch_size": 4})],
    "embed_norm_layer": [Value("layernorm")],
    "norm_layer": [
        Value("rmsnorm"), Value("layernorm"), told(partial(nn.LayerNorm, eps=1e-3), norm_eps=1e-3)
    ],
    "act_layer": [
        told("gelu_tanh", mlp="gelu_tanh"), told("quick_gelu", mlp="quick_gelu"), unsayable("relu", "mlp"),
        unsayable("silu", "mlp"),
    ],
    "block_fn": [
        Value(timm_vit.ResPostBlock, assumed=True), Value(timm_vit.ResPostBlock, {"pool": "mean"}, also=RPN),
        Value(timm_vit.ParallelScalingBlock), Value(timm_vit.ParallelThingsBlock),
        Value(timm_vit.DiffParallelScalingBlock),
    ],
    "mlp_layer": [
        Value(timm.layers.SwiGLU), Value(timm.layers.SwiGLUPacked), Value(timm.layers.GluMlp),
        Value(timm.layers.GatedMlp),
    ],
    "attn_layer": [Value("diff")],
    "device": [Value("cpu")],
    "dtype": [Value(torch.float64)],
}  # fmt: skip
BARE = {"image_size": 160, "patch_size": 16, "dim": 64, "heads": 2, "positions": "learned", "final_norm": "tokens"}
TIMM = Kind(
    "timm",
    "VisionTransformer",
    partial(signature, timm.models.VisionTransformer.__init__),
    TIMM_VALUES,
    _build_timm,
    _write_timm,
    lambda model, images: model(images),
    {**BARE, "norm_eps": 1e-6, "mlp": "gelu", "pool": "cls"},
    _stretched_timm,
)

AS_EVA = (  # arguments that it shares with the other class, and their values
    "img_size", "in_chans", "num_classes", "embed_dim", "num_heads", "mlp_ratio", "qk_norm", *DROPS,
    "dynamic_img_size", "dynamic_img_pad", "device", "dtype",
)  # fmt: skip
GATED = {"swiglu_mlp": True}
EVA_VALUES: dict[str, list[Value]] = {
    **{name: TIMM_VALUES[name] for name in AS_EVA},
    "patch_size": [told(32, patch_size=32)],
    "depth": [Value(3)],
    "global_pool": [
        told("token", pool="cls"),
        unsayable("map", "pool"),
        unsayable("map", "pool", class_token=False, num_reg_tokens=0),
        *(unsayable(pool, "pool") for pool in ("avgmax", "max", "")),
    ],
    "num_kv_heads": [Value(1, also={"attn_type": "rope", "qkv_fused": False})],
    "qkv_bias": [Value(True)],
    "qkv_fused": [Value(False)],
    "swiglu_mlp": [Value(True, {"mlp": "swiglu"})],
    "swiglu_align_to": [Value(8, {"mlp": "swiglu"}, also=GATED)],
    "scale_mlp": [Value(True), Value(True, {"mlp": "swiglu"}, also=GATED)],
    "scale_attn_inner": [Value(True)],
    "attn_type": [Value("rope")],
    "init_values": [Value(None), Value(0.1)],
    "norm_layer": [told(partial(nn.LayerNorm, eps=1e-3), norm_eps=1e-3)],
    "attn_only_layer_scale": [Value(True)],
    "class_token": [Value(False)],
    "num_reg_tokens": [Value(0), Value(2)],
    "no_embed_class": [Value(True), Value(True, {"cls_position": False}, also={"use_abs_pos_emb": True})],
    "use_abs_pos_emb": [Value(True)],
    "use_rot_pos_emb": [
        told(False, rope=None), Value(False, {"positions": "learned", "rope": None}, also={"use_abs_pos_emb": True}),
    ],
    "rope_type": [Value("cat", assumed=True), Value("mixed", also={"rope_rotate_half": False})],
    "rope_grid_offset": [Value(0.5, assumed=True)],
    "rope_grid_indexing": [Value("xy", assumed=True)],
    "rope_temperature": [Value(50.0, assumed=True)],
    "rope_rotate_half": [Value(False, assumed=True)],
    "rope_shift_coords": [Value(0.1)],
    "rope_jitter_coords": [Value(2.0)],
    "rope_rescale_coords": [Value(2.0)],
    "rope_mrope_section": [Value((2, 3, 3))],
    "use_post_norm": [Value(True, assumed=True)],
    "use_pre_transformer_norm": [Value(True)],
    "use_post_transformer_norm": [told(False, final_norm="none")],
    "use_fc_norm": [Value(True)],
    "attn_pool_num_heads": [unsayable(4, "pool", global_pool="map")],
    "attn_pool_mlp_ratio": [unsayable(2.0, "pool", global_pool="map")],
    "ref_feat_shape": [Value(8, assumed=True)],
    "head_init_scale": [Value(0.1)],
}  # fmt: skip
EVA = Kind(
    "timm",
    "Eva",
    partial(signature, timm.models.Eva.__init__),
    EVA_VALUES,
    _build_eva,
    _write_eva,
    lambda model, images: model(images),
    {**BARE, "norm_eps": 1e-5, "mlp": "gelu", "pool": "mean", "positions": "none", "rope": DINOV3_ROPE},
    _stretched_timm,
)

# ---- vit-pytorch

VIT_PYTORCH_VALUES = {
    "image_size": [told(96, image_size=96), told((160, 96), image_size=(160, 96))],
    "patch_size": [told(32, patch_size=32), unsayable((16, 32), "patch_size"), unsayable((8, 32), "patch_size")],
    "num_classes": [Value(7)],
    "dim": [told(32, dim=32)],
    "depth": [Value(2)],
    "heads": [told(4, heads=4), Value(1, {"heads": 1}, also={"dim_head": 64})],
    "mlp_dim": [Value(128)],
    "pool": [told("mean", pool="mean")],
    "channels": [Value(1), Value(12)],
    "dim_head": [Value(16)],
    "dropout": [Value(0.5)],
    "emb_dropout": [Value(0.5)],
}


def _build_vit_pytorch(**given: Any) -> nn.Module:
    usual = dict(image_size=160, patch_size=16, num_classes=10, dim=64, depth=6, heads=2, mlp_dim=192, dim_head=32)
    return vit_pytorch.ViT(**usual | given)


def _write_tensors(model: nn.Module, given: Mapping[str, Any], folder: Path) -> None:
    save_file(model.state_dict(), folder / "model.safetensors")


VIT_PYTORCH = Kind(
    "vit-pytorch",
    "ViT",
    partial(signature, vit_pytorch.ViT.__init__),
    VIT_PYTORCH_VALUES,
    _build_vit_pytorch,
    _write_tensors,
    lambda model, images: model(images),
    {**BARE, "pool": "cls"},
)

# ---- transformers

OF_ANY_CONFIG = {  # arguments of every config; what is no part of the network stays as it is
    "transformers_version": [Value("4.1.0")],
    "architectures": [],  # the class itself, which other tests change
    "output_hidden_states": [Value(True)],
    "return_dict": [Value(False)],
    "dtype": [Value("float64")],
    "chunk_size_feed_forward": [Value(4)],
    "is_encoder_decoder": [Value(True)],
    "id2label": [Value({0: "ant", 1: "bee"})],
    "label2id": [Value({"ant": 0})],
    "problem_type": [Value("multi_label_classification")],
}
OF_ANY_VIT = {
    "hidden_size": [told(32, dim=32)],
    "num_hidden_layers": [Value(2)],
    "num_attention_heads": [told(4, heads=4)],
    "intermediate_size": [Value(128)],
    "hidden_act": [
        told("gelu_new", mlp="gelu_tanh"), told("quick_gelu", mlp="quick_gelu"), unsayable("relu", "mlp"),
        unsayable("gelu_10", "mlp"),
    ],
    "hidden_dropout_prob": [Value(0.5)],
    "attention_probs_dropout_prob": [Value(0.5)],
    "initializer_range": [Value(0.1)],
    "layer_norm_eps": [told(1e-3, norm_eps=1e-3)],
    "image_size": [told(96, image_size=96), told([160, 96], image_size=(160, 96))],
    "patch_size": [told(32, patch_size=32), Value([16, 32])],
    "num_channels": [Value(1)],
    "qkv_bias": [Value(False)],
}  # fmt: skip
SQUARE = {"image_size": [told(96, image_size=96)], "patch_size": [told(32, patch_size=32)]}  # what two classes can
POOLER = {"pooler_output_size": [Value(32)], "pooler_act": [Value("relu")]}
DECODER = {
    "decoder_num_attention_heads": [Value(4)],
    "decoder_hidden_size": [Value(64)],
    "decoder_num_hidden_layers": [Value(1)],
    "decoder_intermediate_size": [Value(64)],
    "mask_ratio": [Value(0.0)],
    "norm_pix_loss": [Value(True)],
}
DINOV2 = {
    **{name: values for name, values in OF_ANY_VIT.items() if name != "intermediate_size"},
    **SQUARE,
    "mlp_ratio": [Value(2)],
    "layerscale_value": [Value(0.1)],
    "drop_path_rate": [Value(0.5)],
    "use_swiglu_ffn": [Value(True)],
    "_out_features": [],  # of a backbone, which is another class
    "_out_indices": [],
    "apply_layernorm": [Value(False)],
    "reshape_hidden_states": [Value(False)],
}
CLIP = {
    **{name: values for name, values in OF_ANY_VIT.items() if "dropout" not in name and name != "qkv_bias"},
    **SQUARE,
    "projection_dim": [Value(7)],
    "attention_dropout": [Value(0.5)],
    "initializer_factor": [Value(2.0)],
}
SMALL = dict(
    hidden_size=64, num_hidden_layers=6, num_attention_heads=2, intermediate_size=192, mlp_ratio=3, image_size=160,
    patch_size=16, attn_implementation="eager", id2label=dict(enumerate(CHECKPOINT.labels or ())),
)  # fmt: skip


def _transformers(
    name: str, values: Mapping[str, Sequence[Value]], eps: float = 1e-12, pool: str = "cls", mlp: str = "gelu"
) -> Kind:
    kind = getattr(transformers, name)
    config = kind.config_class
    usual = {
        key: value for key, value in SMALL.items() if key != "mlp_ratio" or "mlp_ratio" in signature(config.__init__)
    }
    if "mlp_ratio" in usual:
        del usual["intermediate_size"]
    common = OF_ANY_CONFIG if name.startswith("ViTFor") else dict.fromkeys(OF_ANY_CONFIG, ())  # once will do

    def build(**given: Any) -> nn.Module:
        torch.manual_seed(0)
        return kind(config(**usual | given)).float()

    def logits(model: nn.Module, images: Tensor, **options: Any) -> Tensor:
        if "MAE" in name:  # masks nothing and shuffles nothing
            model.config.mask_ratio = 0.0
            patches = (images.shape[-2] // model.config.patch_size) * (images.shape[-1] // model.config.patch_size)
            options["noise"] = torch.arange(float(patches)).expand(2, -1)
        model.config.return_dict = True
        output = model(images, **options)
        for answer in ("logits", "image_embeds", "pooler_output")[: 3 if "Siglip" in name else 2]:
            if answer in output:
                return output[answer]
        return output.last_hidden_state[:, 0]

    def stretched(model: nn.Module, images: Tensor) -> Tensor:
        return logits(model, images, **dict.fromkeys({"interpolate_pos_encoding"} & {*signature(model.forward)}, True))

    def write(model: nn.Module, given: Mapping[str, Any], folder: Path) -> None:
        model.save_pretrained(folder)

    return Kind(
        "transformers", name, partial(signature, config.__init__), {**common, **values}, build, write, logits,
        {**BARE, "norm_eps": eps, "mlp": mlp, "pool": pool,
         **({"positions": "none", "rope": DINOV3_ROPE} if "DINOv3" in name else {})},
        stretched,
    )  # fmt: skip


STRIDE = {"encoder_stride": [Value(8)]}
REGISTERS = {"num_register_tokens": [Value(2)]}
SIGLIP = {
    name: values
    for name, values in CLIP.items()
    if name not in ("projection_dim", "initializer_range", "initializer_factor")
}
DINOV3 = {
    **{name: values for name, values in DINOV2.items() if name not in ("mlp_ratio", "use_swiglu_ffn", "qkv_bias")},
    "intermediate_size": [Value(128)],
    "attention_dropout": [Value(0.5)],
    "rope_theta": [Value(50.0, assumed=True)],
    "query_bias": [Value(False)],
    "key_bias": [Value(True)],
    "value_bias": [Value(False)],
    "proj_bias": [Value(False)],
    "mlp_bias": [Value(False)],
    "use_gated_mlp": [Value(True), Value(True, {"mlp": "swiglu"}, also={"hidden_act": "silu"})],
    "num_register_tokens": [Value(2)],
    "pos_embed_shift": [Value(0.1)],
    "pos_embed_jitter": [Value(2.0)],
    "pos_embed_rescale": [Value(None)],
}
for unused in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
    del DINOV3[unused]
KINDS = [
    TIMM,
    EVA,
    _transformers("ViTForImageClassification", OF_ANY_VIT | POOLER | STRIDE),
    _transformers("DeiTForImageClassification", OF_ANY_VIT | POOLER | STRIDE),
    _transformers("ViTMAEModel", OF_ANY_VIT | DECODER),
    _transformers("ViTMSNModel", OF_ANY_VIT, 1e-6),
    _transformers("IJepaForImageClassification", OF_ANY_VIT | POOLER, pool="mean"),
    _transformers("Dinov2ForImageClassification", DINOV2 | {"use_mask_token": [Value(False)]}, 1e-6),
    _transformers("Dinov2WithRegistersForImageClassification", DINOV2 | REGISTERS, 1e-6),
    _transformers("SiglipVisionModel", SIGLIP | {"vision_use_head": [Value(False)]}, 1e-6, pool="map", mlp="gelu_tanh"),
    _transformers("DINOv3ViTModel", DINOV3, 1e-5),
    _transformers("CLIPVisionModelWithProjection", CLIP, 1e-5, mlp="quick_gelu"),
    VIT_PYTORCH,
]
CASES = [(kind, name, value) for kind in KINDS for name, values in kind.values.items() for value in values]


def label(kind: Kind, name: str, value: Value) -> str:
    """The first cells of a case's row in docs/parity.md."""
    return f"| {kind} | `{name}` | {value} |"


def row(kind: Kind, name: str, value: Value, got: Outcome) -> str:
    """A case's row in docs/parity.md."""
    return f"{label(kind, name, value)} {got.folder} | {got.bare} | {got.create} |"
