"""Published networks that are no plain ViTs, and have tensors of the same names and shapes as some."""

from collections.abc import Mapping
from typing import Any

from vitlite.checkpoints.key_mapping import KeyMapping, MappedTensor

# What names cannot tell, and no field of a config says: networks of the same names whose weights are published. What
# the tensors have in common, and in what the others differ from a plain ViT.
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


def look_alike(mapping: KeyMapping, facts: Mapping[str, Any]) -> str:
    """Which published networks, that are no plain ViTs, have tensors of these names and shapes; mostly none."""
    if mapping.format.name not in ("timm", "openai"):
        return ""
    alike = _alike_with_a_table(mapping.tensors, facts) if facts["position_rows"] else ""
    if not alike and facts.get("pool") == "map" and (facts["class_token"] or facts["registers"]):
        alike = "pooled"
    return LOOK_ALIKES.get(alike, "")


def _alike_with_a_table(found: Mapping[str, MappedTensor], facts: Mapping[str, Any]) -> str:
    """Which of the `LOOK_ALIKES` have a position table and such tensors."""
    scale, bias = found.get("blocks.0.ls1.gamma"), found.get("blocks.0.attn.qkv.bias")
    if scale is not None:
        return "scales" if scale.parts[0].endswith("gamma_1") else ""
    if bias is not None and bias.op == "zeros_between":
        return "biases"
    if facts["pre_norm"] and ("final_norm" not in facts or facts.get("pool") == "map"):
        return "norms"
    if bias is None and not facts["class_token"]:
        return "nothing"
    return ""
