"""What this CPU is, and which instructions it has: asked of the CPU, by way of torch and of Linux."""

import os
import platform
from functools import lru_cache
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")
# Instructions that make products in a narrow dtype quick, by the names of Linux and of torch.
NARROW = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "svebf16", "sve_bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "avx_ne_convert", "asimdhp", "fp16_arith"},
}
# Variables that keep oneDNN, MKL or torch from instructions that the CPU has, or name others.
LIMITS = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_CPU_ISA_HINTS",
    "DNNL_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "ATEN_CPU_CAPABILITY",
)


def first_core(path: Path = CPUINFO) -> dict[str, str]:
    """What Linux says of the first core; nothing elsewhere."""
    said: dict[str, str] = {}
    if not path.exists():
        return said
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if said and not name.strip():  # the next core begins, and there may be hundreds
                break
            said[name.strip()] = value.strip()
    return said


def name_of(core: dict[str, str]) -> str:
    """What the CPU is called: by itself, or on ARM by numbers."""
    numbers = [core[name] for name in ("CPU implementer", "CPU part", "CPU revision") if name in core]
    return core.get("model name") or " ".join(numbers) or platform.processor() or platform.machine()


def flags_of(core: dict[str, str]) -> set[str]:
    """Its instructions, by the names of Linux."""
    return set((core.get("flags") or core.get("Features", "")).split())


def limits() -> dict[str, str]:
    """What the environment says about instructions."""
    return {name: os.environ[name] for name in LIMITS if os.environ.get(name)}


@lru_cache
def instructions() -> frozenset[str]:
    """The instructions of this CPU, by the names of Linux and of torch; none where nobody can be asked."""
    found = flags_of(first_core())
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    found.update(name for name, there in capabilities.items() if there is True)
    if getattr(torch.cpu, "_is_avx512_bf16_supported", bool)():
        found.add("avx512_bf16")
    if getattr(torch.cpu, "_is_amx_tile_supported", bool)():
        found.add("amx_bf16")
    return frozenset(found)


def is_quick_with(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products in that dtype; True, too, where nobody can be asked."""
    known = instructions()
    return dtype not in NARROW or not known or bool(known & NARROW[dtype])
