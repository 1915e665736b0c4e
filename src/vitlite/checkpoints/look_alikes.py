"""Published networks that are no plain ViTs, and whose tensors have the names and shapes of one."""

from collections.abc import Mapping
from typing import Any

from vitlite.checkpoints.key_mapping import KeyMapping

# No field of a config tells these apart. Each text says what the tensors have in common, and who else has them.
LOOK_ALIKES = {
    "scales": "scales called gamma_1 beside a position table are those of DeiT III, and of networks that turn queries "
    "and keys as well (RoPE-ViT, the Perception Encoder)",
    "biases": "biases called q_bias and v_bias beside a position table are those of EVA's giants, and of EVA-02-CLIP's "
    "enormous one, whose norms stand after attention and MLP",
    "norms": "a norm before the blocks, and after them none, or a pool by attention, is what the Perception Encoder "
    "has, which turns queries and keys as well",
    "nothing": "a ViT without class token, without scales and without biases of queries, keys and values may be timm's "
    "vit_base_patch16_rpn_224, whose norms stand after attention and MLP",
    "pooled": "a pool by attention beside a class token or registers looks at the patches alone in timm's plain ViTs, "
    "and at all tokens in its test_vit3 and its Evas, DINOv3 among them",
}


def look_alike(mapping: KeyMapping, geometry: Mapping[str, Any]) -> str:
    """Return which published networks look like this file without being plain ViTs, or "" if there are none."""
    if mapping.format.name not in ("timm", "openai"):
        return ""
    pools_by_attention = geometry.get("pool") == "map"
    if geometry["position_rows"]:
        scale, bias = mapping.tensors.get("blocks.0.ls1.gamma"), mapping.tensors.get("blocks.0.attn.qkv.bias")
        if scale is not None and scale.parts[0].endswith("gamma_1"):
            return LOOK_ALIKES["scales"]
        if scale is None and bias is not None and bias.op == "zeros_between":
            return LOOK_ALIKES["biases"]
        if scale is None and geometry["pre_norm"] and ("final_norm" not in geometry or pools_by_attention):
            return LOOK_ALIKES["norms"]
        if scale is None and bias is None and not geometry["class_token"]:
            return LOOK_ALIKES["nothing"]
    if pools_by_attention and (geometry["class_token"] or geometry["registers"]):
        return LOOK_ALIKES["pooled"]
    return ""
