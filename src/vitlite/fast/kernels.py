"""Products by oneDNN, which torch carries but often does not use for float32: what there is, and whether it pays.

The operators are private to torch, so each is compared with public ones in float64, and timed, before its first use on
a machine; `verdicts` keeps what came out. Nothing is decided by the name of a CPU. First comes what computes, then
whether it may and whether it pays, last how that is found out.
Shapes: b images, n tokens, d numbers taken, k numbers given.
"""

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from vitlite.errors import OptimizedError
from vitlite.fast.verdicts import Contest, only_torch, verdict

# Private to torch: should they go, torch.func counts as at work, every tensor as wrapped by it, and no CPU as exact.
_is_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda x: _is_transforming())
_transforms = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: True)
_has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)

ACTIVATIONS = ("none", "tanh", "swish")  # GELU by its two formulas, and x sigmoid(x), which serves quick GELU
PACKABLE = (torch.float32, torch.bfloat16)
EXACT = 1e-5  # of the largest number: what float32 may be off by
ROUNDED = 1e-2  # the same for bfloat16
BY_ONEDNN = "bf16"  # the setting of float32 products under which torch leaves them to oneDNN


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` should compute this product: in plain float32 inference, where it is faster."""
    return (
        not torch.is_grad_enabled()
        and x.dtype is weight.dtype is torch.float32
        and x.is_cpu
        and {type(x), type(weight)} <= {Tensor, Parameter}  # not traced, faked, sharded or quantised
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not (torch.is_autocast_enabled("cpu") or _is_wrapped(x) or _is_transforming())
        and unpacked_pays()
    )


def _is_transforming() -> bool:
    """Whether torch.func or forward-mode AD is at work. A private operator would lose what they follow, in silence."""
    return _transforms() is not None or _in_forward_mode()


def _in_forward_mode() -> bool:
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)


def is_followed(x: Tensor) -> bool:
    """Whether torch.func or forward-mode AD wants to know what becomes of this tensor."""
    if torch.compiler.is_compiling():
        return False
    if _is_wrapped(x):
        return True
    dual: Any = forward_ad.unpack_dual(x) if _in_forward_mode() else None  # type: ignore[no-untyped-call]
    return dual is not None and dual.tangent is not None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer by oneDNN, from a weight as it is: (b, n, d) -> (b, n, k)."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, in_a_row(bias), "none", [], "none")


def in_a_row(bias: Tensor | None) -> Tensor | None:
    """A bias as oneDNN reads it, which takes its numbers to stand one after the other, whatever its strides say."""
    return None if bias is None else bias.contiguous()


class Packed:
    """Weights that were packed, narrowed or scaled: nobody reads the layer's own from them, or changes them."""

    @property
    def weight(self) -> NoReturn:
        """Refused."""
        raise OptimizedError(
            "An optimized model cannot give the weights of a layer: they are packed for this machine.",
            python="Do that first and optimize last, or create the model again.",
            command="Leave --fast out.",
        )

    bias = weight


class PlainLinear(Packed):
    """A linear layer by torch's public operators: (b, n, d) -> (b, n, k)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight = weight.to(dtype).contiguous()
        self._bias = None if bias is None else bias.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """The product and the bias."""
        return F.linear(x, self._weight, self._bias)

    def activated(self, x: Tensor, kind: str) -> Tensor:
        """The same, through "swish", or GELU: "none" or "tanh"."""
        y = self(x)
        return F.silu(y) if kind == "swish" else F.gelu(y, approximate=kind)

    def added(self, x: Tensor, other: Tensor, spare: bool = False) -> Tensor:
        """The same, added to `other`."""
        return self(x).add_(other)


class PackedLinear(Packed):
    """A linear layer by oneDNN, from weights in its own order, with what follows fused: (b, n, d) -> (b, n, k)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), None)
        self._bias = None if bias is None else in_a_row(bias.to(dtype))
        self.linear = torch.ops.mkldnn._linear_pointwise.default
        self.binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        """The product and the bias."""
        return self.linear(x, self._weight, self._bias, "none", [], "none")

    def activated(self, x: Tensor, kind: str) -> Tensor:
        """The same, through "swish", or GELU: "none" or "tanh"."""
        if kind == "swish":
            return self.linear(x, self._weight, self._bias, "swish", [], "none")
        return self.linear(x, self._weight, self._bias, "gelu", [], kind)

    def added(self, x: Tensor, other: Tensor, spare: bool = False) -> Tensor:
        """The same, added to `other`."""
        return self.binary(x, other, self._weight, self._bias, "add")


class Layer(Protocol):
    """What these have in common: a linear layer, alone, and with what often follows."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def activated(self, x: Tensor, kind: str) -> Tensor: ...
    def added(self, x: Tensor, other: Tensor, spare: bool = False) -> Tensor: ...  # spare: `other` may be overwritten


Linear = type[PlainLinear] | type[PackedLinear]


class _Float32Products:
    """float32 products by oneDNN while any thread is inside; the process's own setting comes back with the last.

    What another thread multiplies meanwhile is true float32, too, summed in oneDNN's order; what it sets, stays.
    """

    def __init__(self) -> None:
        self.matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)  # not in older torch
        self.lock = threading.Lock()
        self.inside = 0  # threads
        self.before = ""  # the process's own setting

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before = self.matmul.fp32_precision
                self.matmul.fp32_precision = BY_ONEDNN
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0 and self.matmul.fp32_precision == BY_ONEDNN:  # else somebody has set another meanwhile
                self.matmul.fp32_precision = self.before


float32_products = _Float32Products()


@lru_cache(maxsize=64)
def float32_products_are_exact(tokens: int, head_dim: int) -> bool:
    """Whether oneDNN computes attention of this length in true float32.

    The setting permits bfloat16 by name, for the whole process; where the CPU has no instructions that would gain by
    it, oneDNN stays in float32. That makes it harmless to other threads, and is what is tested here.
    """
    if float32_products.matmul is None or _has_amx():
        return False
    q, k, v = random_numbers(3, 2, tokens, head_dim)
    right = torch.bmm(torch.bmm(q.double(), k.double().mT), v.double())
    with float32_products, torch.autocast("cpu", enabled=False):  # what is found now, counts for later calls outside
        found = torch.bmm(torch.bmm(q, k.mT), v)
    return _distance(found, right) < EXACT


def float32_products_pay(tokens: int, head_dim: int) -> bool:
    """Whether they also take it less time than the default."""
    if not float32_products_are_exact(tokens, head_dim):
        return False
    about = 1 << (tokens - 1).bit_length()  # one verdict for sizes that are alike, of which there may be thousands
    question = f"float32 attention of up to {about} tokens, {head_dim} wide"
    return verdict(question, lambda: _contest_of_float32_products(about, head_dim)).pays


def _contest_of_float32_products(tokens: int, head_dim: int) -> Contest:
    q, k, v = random_numbers(3, 2, tokens, head_dim)

    def by_default() -> Tensor:
        return torch.bmm(torch.bmm(q, k.mT), v)

    def by_onednn() -> Tensor:
        with float32_products:
            return by_default()

    return Contest(by_onednn, by_default)


def unpacked_pays() -> bool:
    """Whether `linear` exists here, is right, and is faster than torch's own."""
    return verdict("float32 linear layers", _contest_of_unpacked).pays


def _contest_of_unpacked() -> Contest | None:
    x, weight, bias = random_numbers(197, 768), random_numbers(768, 768), random_numbers(768)
    right = F.linear(x.double(), weight.double(), bias.double())
    try:
        error = _distance(linear(x, weight, bias), right)
    except (AttributeError, RuntimeError):  # not in this build of torch, or not on this CPU
        return None
    if not error < EXACT:
        return None
    return Contest(lambda: linear(x, weight, bias), lambda: F.linear(x, weight, bias))


def packing_pays(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed linear layers exist here, are right, and are faster than torch's own."""
    question = f"{_short(dtype)} packed linear layers"
    return dtype in PACKABLE and verdict(question, lambda: _contest_of_packing(dtype)).pays


def _contest_of_packing(dtype: torch.dtype) -> Contest | None:
    if not _packing_is_right(dtype):
        return None
    return Contest(_layer(PackedLinear, dtype), _layer(PlainLinear, dtype))


def _packing_is_right(dtype: torch.dtype) -> bool:
    """Compares each operator with torch's own in float64."""
    x, other = random_numbers(3, 17, 48).to(dtype), random_numbers(3, 17, 64).to(dtype)
    weight, bias = random_numbers(64, 48).to(dtype), random_numbers(64).to(dtype)
    right = PlainLinear(weight, bias, torch.float64)
    try:
        packed = PackedLinear(weight, bias, dtype)
        errors = [_distance(packed(x), right(x.double()))]
        for kind in ACTIVATIONS:
            errors.append(_distance(packed.activated(x, kind), right.activated(x.double(), kind)))
        errors.append(_distance(packed.added(x, other), right.added(x.double(), other.double())))
    except (AttributeError, RuntimeError):  # not in this build of torch, or not on this CPU
        return False
    return max(errors) < (EXACT if dtype is torch.float32 else ROUNDED)


def is_allowed() -> bool:
    """Whether operators private to torch may be used at all."""
    return not only_torch()


def bfloat16_pays() -> bool:
    """Whether linear layers are faster in bfloat16 than in float32."""
    kinds = {dtype: PackedLinear if packing_pays(dtype) else PlainLinear for dtype in PACKABLE}  # before, not within
    contest = partial(_contest_of_dtypes, kinds)
    return verdict("bfloat16 rather than float32", contest).pays


def _contest_of_dtypes(kinds: dict[torch.dtype, Linear]) -> Contest:
    narrow, wide = (_layer(kinds[dtype], dtype) for dtype in (torch.bfloat16, torch.float32))
    return Contest(narrow, wide)


def powers_pay(dtype: torch.dtype) -> bool:
    """Whether powers of two and their sum are quicker than a softmax; float16 has no range for sums."""
    question = f"{_short(dtype)} powers of two"
    return dtype in PACKABLE and verdict(question, lambda: _contest_of_powers(dtype)).pays


def _contest_of_powers(dtype: torch.dtype) -> Contest:
    scores = random_numbers(12, 197, 197).to(dtype)
    weights, sums = torch.empty_like(scores), scores[..., :1].clone()

    def powers() -> None:
        torch.sum(torch.exp2(scores, out=weights), -1, keepdim=True, out=sums)

    def softmax() -> None:
        torch.softmax(scores, -1, out=weights)

    return Contest(powers, softmax)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kernels_as_created(device: torch.device, dtype: torch.dtype) -> str:
    """What computes a model as created, in words: a run that goes on must have the same."""
    by_onednn = device.type == "cpu" and dtype is torch.float32 and unpacked_pays()
    return f"linear layers by {'oneDNN' if by_onednn else 'torch'}"


def _layer(linear: Linear, dtype: torch.dtype) -> Callable[[], Tensor]:
    """The first half of ViT-Base's MLP, for one image."""
    layer = linear(random_numbers(3072, 768), random_numbers(3072), dtype)
    x = random_numbers(197, 768).to(dtype)
    return lambda: layer.activated(x, "none")


def random_numbers(*shape: int) -> Tensor:
    """Normal numbers on the CPU, leaving torch's own generator alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")


def _distance(found: Tensor, right: Tensor) -> float:
    """The largest difference, of the largest number."""
    return float((found.double() - right).abs().max() / right.abs().max())
