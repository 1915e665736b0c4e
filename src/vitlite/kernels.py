"""Compute linear layers and matrix products of attention with oneDNN, which torch contains but does not always use.

For float32, torch uses MKL, which is far slower on some CPUs. `kernel_choice` decides where to use oneDNN by a fixed
rule for each CPU, so that all processes on a machine compute the same bits. The operators are private to torch. Before
the first use in a process, each one is compared with a public operator. VITLITE_KERNELS=torch disables all of them.

Importing this module also limits torch to one thread in forked processes.

Shapes: b images, n tokens, d inputs, k outputs.
"""

import os
import threading
from collections.abc import Callable
from functools import cache, partial
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.nn.modules import module as torch_module

from vitlite.errors import ConfigError

ACTIVATIONS = ("none", "tanh", "swish")  # exact GELU, approximate GELU, and x * sigmoid(x) for quick GELU
EXACT = 1e-5  # maximum error of float32 results, relative to the largest value
ROUNDED = 1e-2  # maximum error of bfloat16 results, relative to the largest value
SHAPES = ((37, 96), (80, 96), (80,))  # of input, weight and bias, to compare oneDNN with torch; any would do
LONG = 128  # tokens; for shorter sequences, the overhead of the faster attention kernels is too large
ONEDNN = "bf16"  # the setting of torch.backends.mkldnn with which oneDNN computes float32 products
# From a dtype to CPU features with fast products in this dtype, as Linux and torch name the features.
FAST_WITH = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "svebf16", "sve_bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "avx_ne_convert", "asimdhp", "fp16_arith"},
}
# The active torch.func transform, and the number of active dispatch modes. If torch has no such function, assume that
# there is a transform or a mode, and leave the kernels off.
functorch_interpreter: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: True)
dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)

_log = getLogger("vitlite")


# ---- forked processes


def _use_one_thread() -> None:
    """Limit torch to one thread in a forked process.

    The process does not have the OpenMP threads of its parent. Without the limit, torch would wait for them forever.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if threads > 1:
        _log.info("Process %d was forked. torch uses one thread here instead of %d.", os.getpid(), threads)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_use_one_thread)


# ---- the choice of kernels


class KernelChoice(NamedTuple):
    """The computations that do not use torch's default kernels on this CPU. By default, there are none."""

    linear: bool = False  # float32 linear layers of an eager model
    packed: tuple[torch.dtype, ...] = ()  # dtypes in which an optimized model uses `PackedLinear`
    powers: tuple[torch.dtype, ...] = ()  # dtypes in which an optimized model uses powers of two instead of a softmax
    products: bool = False  # float32 products of attention in an optimized model, and all float32 products in training


@cache
def kernel_choice() -> KernelChoice:
    """Return the kernels to use on this CPU, according to a fixed rule.

    Raises:
        ConfigError: VITLITE_KERNELS has an unknown value.
    """
    setting = os.environ.get("VITLITE_KERNELS", "")
    if setting not in ("", "torch"):
        raise ConfigError(f"The environment variable VITLITE_KERNELS must be 'torch' or unset, got {setting!r}.")
    capability = torch.backends.cpu.get_cpu_capability()
    if setting == "torch" or capability not in ("AVX2", "AVX512"):  # not measured on ARM and old CPUs
        return KernelChoice()
    # PROCESSOR_IDENTIFIER exists on Windows, for example "AMD64 Family 25 Model 33 Stepping 0, AuthenticAMD".
    vendor = first_core().get("vendor_id") or os.environ.get("PROCESSOR_IDENTIFIER", "")
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)()
    return KernelChoice(
        # MKL is slow on AMD: oneDNN takes 0.4 to 0.9 of its time (Zen 4 and 5). On Intel, both take the same time.
        linear=vendor.endswith(("AuthenticAMD", "HygonGenuine")),
        # With fused GELU and residual, oneDNN takes 0.95 of MKL's time on Intel, too. In bfloat16, torch always uses
        # oneDNN, and packed weights save a copy per call (0.9 of the time).
        packed=(torch.float32, torch.bfloat16),
        # A power and a sum take half the time of a softmax. In float16, the sum would overflow.
        powers=(torch.float32, torch.bfloat16),
        # oneDNN takes 0.85 of MKL's time on AMD and 0.75 on Intel. On CPUs with AMX, oneDNN may round to bfloat16. On
        # CPUs without AVX-512, torch ignores fp32_precision.
        products=capability == "AVX512" and not has_amx,
    )


@cache
def first_core(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return the properties of the first CPU core on Linux, or an empty dictionary on other systems."""
    if not path.exists():
        return {}
    first, _, _ = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def is_fast_in(dtype: torch.dtype) -> bool | None:
    """Return True if this CPU has fast products in a dtype, False if not, or None if its features are unknown."""
    if dtype not in FAST_WITH:
        return True
    core = first_core()
    known = set((core.get("flags") or core.get("Features", "")).split())
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    known.update(name for name, has_it in capabilities.items() if has_it is True)
    return bool(known & FAST_WITH[dtype]) if known else None


# ---- linear layers of an eager model


def should_use_onednn(layer: nn.Linear, x: Tensor) -> bool:
    """Return True if `onednn_linear` should be called instead of a layer.

    This is the case for inference in float32 with a plain layer, on CPUs where oneDNN is faster.
    """
    return (
        type(layer) is nn.Linear  # neither another module nor a subclass, such as an adapter
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__)
        and not (torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
        and x.dtype is layer.weight.dtype is torch.float32
        and x.is_cpu
        and {type(x), type(layer.weight)} <= {Tensor, Parameter}  # no fake, sharded or quantised tensors
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]
        and not is_transforming()
        and not dispatch_modes()  # such as a FLOP counter, which does not know private operators
        and onednn_linear_is_better()
    )


def is_transforming() -> bool:
    """Return True if torch.func or forward-mode AD is active. Private operators would silently drop the derivatives."""
    level = getattr(forward_ad, "_current_level", 0)  # -1: inactive; if torch has no such attribute, assume active
    return functorch_interpreter() is not None or level >= 0


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer with oneDNN, without packing the weight: (b, n, d) -> (b, n, k)."""
    if bias is not None:
        bias = bias.contiguous()  # oneDNN ignores its strides
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "none")


@cache
def onednn_linear_is_better() -> bool:
    """Return True if `onednn_linear` is both correct and faster than `F.linear` on this CPU."""
    if not kernel_choice().linear:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in SHAPES)
    expected = F.linear(x.double(), weight.double(), bias.double())
    return agrees(partial(onednn_linear, x, weight, bias), expected, EXACT)


# ---- linear layers of an optimized model


class Layer(Protocol):
    """A protocol for linear layers that can be followed by an activation or an addition."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def activated(self, x: Tensor, kind: str) -> Tensor: ...
    def added(self, x: Tensor, other: Tensor, overwrite: bool = False) -> Tensor: ...


class PlainLinear:
    """A linear layer that uses torch's public operators: (b, n, d) -> (b, n, k)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight = weight.to(dtype).contiguous()
        self._bias = None if bias is None else bias.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer: (b, n, d) -> (b, n, k)."""
        return F.linear(x, self._weight, self._bias)

    def activated(self, x: Tensor, kind: str) -> Tensor:
        """Apply the linear layer and then an activation: "swish", exact GELU ("none") or tanh GELU ("tanh")."""
        y = self(x)
        return F.silu(y) if kind == "swish" else F.gelu(y, approximate=kind)

    def added(self, x: Tensor, other: Tensor, overwrite: bool = False) -> Tensor:
        """Apply the linear layer and add `other`. `overwrite` is ignored: the result is always a new tensor."""
        return self(x).add_(other)


class PackedLinear:
    """A linear layer that uses oneDNN, with the weight in oneDNN's memory layout: (b, n, d) -> (b, n, k)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), None)
        self._bias = None if bias is None else bias.to(dtype).contiguous()  # oneDNN ignores its strides
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer: (b, n, d) -> (b, n, k)."""
        return self._linear(x, self._weight, self._bias, "none", [], "none")

    def activated(self, x: Tensor, kind: str) -> Tensor:
        """Apply the linear layer and then an activation: "swish", exact GELU ("none") or tanh GELU ("tanh")."""
        if kind == "swish":
            return self._linear(x, self._weight, self._bias, "swish", [], "none")
        return self._linear(x, self._weight, self._bias, "gelu", [], kind)

    def added(self, x: Tensor, other: Tensor, overwrite: bool = False) -> Tensor:
        """Apply the linear layer and add `other`. `overwrite` is ignored: the result is always a new tensor."""
        return self._binary(x, other, self._weight, self._bias, "add")


Linear = type[PlainLinear] | type[PackedLinear]


def fastest_linear(dtype: torch.dtype) -> Linear:
    """Return the class of linear layers that is the fastest for inference in a dtype on this CPU."""
    return PackedLinear if dtype in kernel_choice().packed and packing_is_right(dtype) else PlainLinear


@cache
def packing_is_right(dtype: torch.dtype) -> bool:
    """Return True if the operators of `PackedLinear` exist in this version of torch and are correct for a dtype."""
    x, other = random_numbers(3, 17, 48).to(dtype), random_numbers(3, 17, 64).to(dtype)
    weight, bias = random_numbers(64, 48).to(dtype), random_numbers(64).to(dtype)
    tolerance = EXACT if dtype is torch.float32 else ROUNDED
    exact = PlainLinear(weight, bias, torch.float64)

    def activated(kind: str) -> Tensor:
        return PackedLinear(weight, bias, dtype).activated(x, kind)

    return (
        agrees(lambda: PackedLinear(weight, bias, dtype)(x), exact(x.double()), tolerance)
        and agrees(lambda: PackedLinear(weight, bias, dtype).added(x, other), exact.added(x.double(), other), tolerance)
        and all(agrees(partial(activated, kind), exact.activated(x.double(), kind), tolerance) for kind in ACTIVATIONS)
    )


# ---- float32 products of an optimized model and of training


class _Float32Products:
    """A context manager in which torch computes float32 matrix products with oneDNN.

    torch's setting applies to all threads. It changes when the first thread enters the context, and is restored
    when the last thread leaves it. Meanwhile, products in other threads also use oneDNN, and are still true float32.
    """

    def __init__(self) -> None:
        self.matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)  # None in older versions of torch
        self.lock = threading.Lock()
        self.threads = 0  # number of threads inside the context
        self.before = ""

    def __enter__(self) -> None:
        with self.lock:
            if self.threads == 0:
                self.before = self.matmul.fp32_precision
                self.matmul.fp32_precision = ONEDNN
            self.threads += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.threads -= 1
            if self.threads == 0 and self.matmul.fp32_precision == ONEDNN:  # otherwise, the caller changed it
                self.matmul.fp32_precision = self.before


float32_products = _Float32Products()


@cache
def float32_products_are_exact() -> bool:
    """Return True if oneDNN should compute the products of attention on this CPU, and does so in true float32.

    The setting `ONEDNN` permits rounding to bfloat16, but oneDNN only rounds on CPUs with AMX.
    """
    if float32_products.matmul is None or not kernel_choice().products:
        return False
    q, k, v = random_numbers(3, 2, 257, 64)

    def attend() -> Tensor:
        with float32_products:
            return torch.bmm(torch.bmm(q, k.mT), v)

    return agrees(attend, torch.bmm(torch.bmm(q.double(), k.double().mT), v.double()), EXACT)


# ---- checks


def agrees(compute: Callable[[], Tensor], expected: Tensor, tolerance: float) -> bool:
    """Return True if a private operator exists in this version of torch and computes the expected result.

    Args:
        compute: A function that uses the operator.
        expected: The expected result, in float64.
        tolerance: The maximum error, relative to the largest value of the result.
    """
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = compute()
    except (AttributeError, RuntimeError):  # this build of torch or this CPU does not have the operator
        return False
    return bool((found.double() - expected).abs().max() < tolerance * expected.abs().max())


def random_numbers(*shape: int) -> Tensor:
    """Return the same normally distributed numbers on each call, without changing torch's global generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
