"""Published networks that are not plain ViTs, although their tensors have the names and shapes of one."""

from collections.abc import Mapping
from typing import Any

from vitlite.checkpoints.key_mapping import KeyMapping

# No config field distinguishes these. Each text says what was found and which other networks have it.
LOOK_ALIKES = {
    "scales": "DeiT III has scales called gamma_1 and a position table, but so do networks with rotary positions "
    "(RoPE-ViT, the Perception Encoder)",
    "biases": "EVA's giant models have biases called q_bias and v_bias and a position table, but so does EVA-02-CLIP "
    "enormous, which is a post-norm network",
    "norms": "the Perception Encoder has a norm before the blocks, and no norm or attention pooling after them; its "
    "positions are rotary, too",
    "nothing": "without a class token, scales and biases of queries, keys and values, it may be timm's "
    "vit_base_patch16_rpn_224, which is a post-norm network",
    "pooled": "attention pooling beside a class token or registers reads only the patches in timm's plain ViTs, but "
    "all tokens in its test_vit3 and in its Eva models, such as DINOv3",
}


def look_alike(mapping: KeyMapping, geometry: Mapping[str, Any]) -> str:
    """Describe networks with such tensor names and shapes that are not plain ViTs, or return "" if there are none."""
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
