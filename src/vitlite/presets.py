"""Presets: named configurations of Vision Transformers from papers and from timm. This module does not import torch."""

from typing import Any

from vitlite.config import ViTConfig
from vitlite.errors import UnknownNameError, closest


def _preset(
    image_size: int, patch_size: int, dim: int, depth: int, heads: int, mlp_dim: int, **other: Any
) -> ViTConfig:
    return ViTConfig(
        image_size=image_size, patch_size=patch_size, dim=dim, depth=depth, heads=heads, mlp_dim=mlp_dim, **other
    )


# Base, Large and Huge are from Table 1 of Dosovitskiy et al. 2021. The hybrids r, r26 and r50 are those of Steiner et
# al. 2022. The others are from DeiT, DINOv2, DINOv3, SigLIP, EVA-02 (swiglu), the Perception Encoder (gigantic2) and
# timm (wee, little, mediumd, so150m).
PRESETS = {
    #                               image patch  dim depth heads    mlp
    "vit_base_16": _preset(           224,   16,  768,   12,   12,  3072),
    "vit_base_32": _preset(           224,   32,  768,   12,   12,  3072),
    "vit_large_16": _preset(          224,   16, 1024,   24,   16,  4096),
    "vit_large_32": _preset(          224,   32, 1024,   24,   16,  4096),
    "vit_huge_16": _preset(           224,   16, 1280,   32,   16,  5120),
    "vit_huge_32": _preset(           224,   32, 1280,   32,   16,  5120),
    "vit_nano_4": _preset(             32,    4,  192,    6,    3,   768, num_classes=10),
    "vit_test_16": _preset(           160,   16,   64,    6,    2,   192),
    "vit_test2_16": _preset(          160,   16,   64,    8,    2,   192),
    "vit_tiny_16": _preset(           224,   16,  192,   12,    3,   768),
    "vit_xsmall_16": _preset(         224,   16,  256,   10,    4,  1024),
    "vit_wee_16": _preset(            224,   16,  256,   14,    4,  1280),
    "vit_little_16": _preset(         224,   16,  320,   14,    5,  1792),
    "vit_small_8": _preset(           224,    8,  384,   12,    6,  1536),
    "vit_small_14": _preset(          224,   14,  384,   12,    6,  1536),
    "vit_small_16": _preset(          224,   16,  384,   12,    6,  1536),
    "vit_small_32": _preset(          224,   32,  384,   12,    6,  1536),
    "vit_small_plus_16": _preset(     224,   16,  384,   12,    6,  1536, mlp="swiglu"),
    "vit_medium_16": _preset(         224,   16,  512,   12,    8,  2048),
    "vit_medium_32": _preset(         224,   32,  512,   12,    8,  2048),
    "vit_mediumd_16": _preset(        224,   16,  512,   20,    8,  2048),
    "vit_betwixt_16": _preset(        224,   16,  640,   12,   10,  2560),
    "vit_betwixt_32": _preset(        224,   32,  640,   12,   10,  2560),
    "vit_base_8": _preset(            224,    8,  768,   12,   12,  3072),
    "vit_base_14": _preset(           224,   14,  768,   12,   12,  3072),
    "vit_base_plus_16": _preset(      224,   16,  896,   12,   14,  3584),
    "vit_so150m_16": _preset(         224,   16,  896,   18,   14,  2304),
    "vit_so150m2_16": _preset(        224,   16,  832,   21,   13,  2176),
    "vit_large_14": _preset(          224,   14, 1024,   24,   16,  4096),
    "vit_so400m_14": _preset(         224,   14, 1152,   27,   16,  4304),
    "vit_so400m_16": _preset(         224,   16, 1152,   27,   16,  4304),
    "vit_huge_14": _preset(           224,   14, 1280,   32,   16,  5120),
    "vit_huge_plus_16": _preset(      224,   16, 1280,   32,   20,  5120, mlp="swiglu"),
    "vit_giant_14": _preset(          224,   14, 1408,   40,   16,  6144),
    "vit_giant_16": _preset(          224,   16, 1408,   40,   16,  6144),
    "vit_giant2_16": _preset(         224,   16, 1536,   40,   24,  6144),
    "vit_giant2_swiglu_14": _preset(  224,   14, 1536,   40,   24,  4096, mlp="swiglu"),
    "vit_giant2_swiglu_16": _preset(  224,   16, 1536,   40,   24,  4096, mlp="swiglu"),
    "vit_giantopt_16": _preset(       224,   16, 1536,   40,   16,  6144),
    "vit_gigantic_14": _preset(       224,   14, 1664,   48,   16,  8192),
    "vit_tiny_swiglu_14": _preset(    224,   14,  192,   12,    3,   512, mlp="swiglu"),
    "vit_small_swiglu_14": _preset(   224,   14,  384,   12,    6,  1024, mlp="swiglu"),
    "vit_base_swiglu_14": _preset(    224,   14,  768,   12,   12,  2048, mlp="swiglu"),
    "vit_base_swiglu_16": _preset(    224,   16,  768,   12,   12,  2048, mlp="swiglu"),
    "vit_large_swiglu_14": _preset(   224,   14, 1024,   24,   16,  2730, mlp="swiglu"),
    "vit_large2_swiglu_14": _preset(  224,   14, 1024,   24,    8,  2816, mlp="swiglu"),
    "vit_huge2_swiglu_14": _preset(   224,   14, 1536,   24,   12,  4096, mlp="swiglu"),
    "vit_1b_swiglu_14": _preset(      224,   14, 2048,   24,   16,  5632, mlp="swiglu"),
    "vit_3b_swiglu_14": _preset(      224,   14, 3072,   24,   24,  8192, mlp="swiglu"),
    "vit_gigantic2_14": _preset(      224,   14, 1536,   50,   16,  8960),
    "vit_7b_16": _preset(             224,   16, 4096,   40,   32,  8192, mlp="swiglu"),
    "vit_tiny_r_32": _preset(         224,   32,  192,   12,    3,   768, stem=()),
    "vit_small_r26_32": _preset(      224,   32,  384,   12,    6,  1536, stem=(2, 2, 2, 2)),
    "vit_base_r50_16": _preset(       224,   16,  768,   12,   12,  3072, stem=(3, 4, 9)),
    "vit_large_r50_32": _preset(      224,   32, 1024,   24,   16,  4096, stem=(3, 4, 6, 3)),
}  # fmt: skip


def preset(name: str) -> ViTConfig:
    """Return the config of a named preset.

    >>> preset("vit_base_16").depth
    12
    """
    if name not in PRESETS:
        raise UnknownNameError(f"There is no preset {name!r}.{closest(name, PRESETS)} Presets: {', '.join(PRESETS)}.")
    return PRESETS[name]
