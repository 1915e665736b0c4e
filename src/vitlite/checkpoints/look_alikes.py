"""Detect published networks that are not plain ViTs but have the tensor names and shapes of one."""

from collections.abc import Mapping
from typing import Any

from vitlite.checkpoints.key_mapping import KeyMapping

# Each text describes the tensors and the networks that have such tensors.
LOOK_ALIKES = {
    "scales": "DeiT III has scales named gamma_1 and a position table, but so do networks with rotary positions "
    "(RoPE-ViT, the Perception Encoder)",
    "biases": "EVA's giant models have biases named q_bias and v_bias and a position table, but so does EVA-02-CLIP "
    "enormous, a post-norm network",
    "gates": "a gated MLP, a position table and keys without a bias are also found in EVA-02, which has rotary "
    "positions",
    "norms": "a norm before the blocks, without a norm after them or with attention pooling, is also found in the "
    "Perception Encoder, which has rotary positions",
    "nothing": "without a class token, layer scale, and biases of queries, keys and values, the file may be timm's "
    "vit_base_patch16_rpn_224, a post-norm network",
    "pooled": "with a class token or registers, attention pooling reads only the patches in timm's plain ViTs, but "
    "all tokens in timm's test_vit3 and in DINOv3",
}


def look_alike(mapping: KeyMapping, geometry: Mapping[str, Any], *, rotary: bool, pools_all: bool) -> str:
    """Return a description of other networks with these tensor names and shapes, or "" if none are known.

    Args:
        mapping: The tensors of the file.
        geometry: The result of `infer_geometry`.
        rotary: True if the config has rotary positions, so that networks with rotary positions are not look-alikes.
        pools_all: True if the config says that attention pooling reads all tokens.
    """
    if mapping.format.name not in ("timm", "openai"):
        return ""
    pools_by_attention = geometry["attention_pool"]
    if geometry["position_rows"] and not rotary:
        scale, bias = mapping.tensors.get("blocks.0.ls1.gamma"), mapping.tensors.get("blocks.0.attn.qkv.bias")
        if geometry["gated"] and bias is not None and bias.op == "zeros_between":
            return LOOK_ALIKES["gates"]
        if scale is not None and scale.parts[0].endswith("gamma_1"):
            return LOOK_ALIKES["scales"]
        if scale is None and bias is not None and bias.op == "zeros_between":
            return LOOK_ALIKES["biases"]
        if (
            scale is None
            and geometry["input_norm"] == "tokens"
            and ("final_norm" not in geometry or pools_by_attention)
        ):
            return LOOK_ALIKES["norms"]
        if scale is None and bias is None and not geometry["class_token"] and geometry["norm"] == "layer":
            return LOOK_ALIKES["nothing"]
    if pools_by_attention and not pools_all and (geometry["class_token"] or geometry["registers"]):
        return LOOK_ALIKES["pooled"]
    return ""
