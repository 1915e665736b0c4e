"""Linear layers in bytes, by scales that a few pictures gave: what `optimize(dtype=torch.int8)` computes.

A number x of a channel becomes the byte round(x / spread / step) + zero, between 0 and 255, and a weight one between
-127 and 127. The spread is the channel's own: what makes the numbers divides by it, and the weight of the layer that
takes them gives it back. So rounding is one pass, or none, where oneDNN's product writes bytes itself.

Shapes: b images, n tokens, d numbers taken, k numbers given.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlite.fast.blocks import Floats, plain_norm
from vitlite.fast.kernels import ACTIVATIONS, Layer, Packed, random_numbers

LARGEST = 255
LARGEST_WEIGHT = 127
EXACT = 1e-4  # of the largest number: what float32 around the exact sum of bytes may be off by


class Scale(NamedTuple):
    """How the numbers that a layer takes become bytes."""

    step: float
    zero: int
    spread: Tensor | float = 1.0  # (d,), or one for every channel

    @property
    def divisor(self) -> Tensor | float:
        """What numbers are divided by before they are rounded: (d,), or one for every channel."""
        return self.spread * self.step

    def rounded(self, x: Tensor) -> Tensor:
        """What is left of the numbers (n, d) when they were bytes."""
        steps = (x / self.spread / self.step + self.zero).round().clamp(0, LARGEST) - self.zero
        return steps * self.step * self.spread


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight (k, d) in steps from -127 to 127, still in float32, and the step of each row (k,)."""
    steps = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST_WEIGHT
    return (weight / steps[:, None]).round(), steps


class ByteLinear(Packed):
    """A linear layer from bytes, by oneDNN: (b, n, d) -> (b, n, k) in `gives`, a dtype or the scale of more bytes."""

    def __init__(self, weight: Tensor, bias: Tensor | None, takes: Scale, gives: torch.dtype | Scale) -> None:
        rounded, self.steps = round_weight(weight.float() * takes.spread)
        in_rows = rounded.to(torch.int8).contiguous()  # as oneDNN reads it, whatever its strides say
        self._weight = torch.ops.onednn.qlinear_prepack(in_rows, None)
        self.zeros = torch.zeros(len(self.steps), dtype=torch.int64)
        self._bias = None if bias is None else bias.float().contiguous()
        self.takes = takes.step, takes.zero
        self.gives = (gives.step, gives.zero, torch.uint8) if isinstance(gives, Scale) else (1.0, 0, gives)
        self.pointwise = torch.ops.onednn.qlinear_pointwise.default
        self.binary = torch.ops.onednn.qlinear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        """The product and the bias."""
        return self._run(x, "none", "")

    def activated(self, x: Tensor, kind: str) -> Tensor:
        """The same, through "swish", or GELU: "none" or "tanh"."""
        if kind == "swish":
            return self._run(x, "swish", "")
        return self._run(x, "gelu", kind)

    def added(self, x: Tensor, other: Tensor, spare: bool = False) -> Tensor:
        """The same in float32, added to `other`, which is quickest where that is spare and may be overwritten."""
        way = "sum" if spare else "add"
        weights = self._weight, self.steps, self.zeros
        gives = 1.0, 0, torch.float32
        in_a_row = other.contiguous()  # of strided numbers oneDNN has no quick way to add them
        return self.binary(x, *self.takes, *weights, in_a_row, self._bias, *gives, 1.0, 0, way, 1.0, "none", [], "")

    def _run(self, x: Tensor, name: str, algorithm: str) -> Tensor:
        weights = self._weight, self.steps, self.zeros
        return self.pointwise(x, *self.takes, *weights, self._bias, *self.gives, name, [], algorithm)


class OntoStream:
    """A layer that is left as it is, among others in bytes: it gives a narrow dtype, and is added to float32.

    `divisor` is by what the next one wants its numbers divided, after the activation.
    """

    def __init__(self, linear: Layer, divisor: Tensor | float) -> None:
        self.linear, self.divisor = linear, divisor

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def activated(self, x: Tensor, kind: str) -> Tensor:
        """The same, through "swish", or GELU: "none" or "tanh"."""
        y = self.linear.activated(x, kind)
        if isinstance(self.divisor, float) and self.divisor == 1.0:
            return y
        return y.float() / self.divisor

    def added(self, x: Tensor, other: Tensor, spare: bool = False) -> Tensor:
        """The same, added to `other`."""
        return other + self.linear(x)


class Bytes:
    """How the products of one block are computed: in bytes where there is a scale, in `rest` where there is none."""

    def __init__(self, scales: Mapping[str, Scale], rest: Floats) -> None:
        self.scales, self.rest = scales, rest
        self.dtype = rest.dtype

    def before(self, layer: str, norm: nn.Module, factor: float = 1.0) -> Callable[[Tensor], Tensor]:
        """The norm before a layer, if any, that gives what the layer takes. See `Floats.before` for `factor`."""
        scale = self.scales.get(layer)
        if scale is None:
            return _plainly(norm, self.dtype, factor)
        if isinstance(norm, nn.LayerNorm):
            return _norm_to_bytes(norm, scale, factor)
        return _to_bytes(scale.zero)

    def divisor(self, layer: str) -> Tensor | float:
        """What the layers before are to divide the numbers by that this one takes without a norm between."""
        return self.scales[layer].divisor if layer in self.scales else 1.0

    def linear(self, layer: str, weight: Tensor, bias: Tensor | None, then: str = "") -> Layer:
        """The layer. `then` is the one that takes what this one gives, when nothing but an activation is between."""
        if layer not in self.scales:
            return OntoStream(self.rest.linear(layer, weight, bias), self.divisor(then))
        return ByteLinear(weight, bias, self.scales[layer], self.scales.get(then, self.dtype))


def _plainly(norm: nn.Module, dtype: torch.dtype, factor: float) -> Callable[[Tensor], Tensor]:
    """A norm of numbers in any dtype, which gives `dtype`."""
    plain = plain_norm(norm, torch.float32, factor)
    return lambda x: plain(x.float()).to(dtype)


def _norm_to_bytes(norm: nn.LayerNorm, scale: Scale, factor: float) -> Callable[[Tensor], Tensor]:
    """A LayerNorm into whose weight and bias everything went that makes its numbers bytes."""
    weight = norm.weight.detach().float() / scale.divisor
    bias = norm.bias.detach().float() / scale.divisor + (scale.zero + 0.5)
    shape, eps = norm.normalized_shape, norm.eps * factor**2
    return lambda x: _cut_off(torch.layer_norm(x.float(), shape, weight, bias, eps))


def _to_bytes(zero: int) -> Callable[[Tensor], Tensor]:
    """Numbers that come in steps already become bytes; those that are bytes stay."""

    def round_to_bytes(x: Tensor) -> Tensor:
        if x.dtype is torch.uint8:
            return x
        return _cut_off(x.to(torch.float32, copy=True).add_(zero + 0.5))

    return round_to_bytes


def _cut_off(x: Tensor) -> Tensor:
    """The bytes below these numbers, which are overwritten: with .5 added before, the nearest."""
    return torch.empty_like(x, dtype=torch.uint8).copy_(x.clamp_(0, LARGEST))


@lru_cache
def bytes_are_right(gives: torch.dtype) -> bool:
    """Whether oneDNN's products of bytes exist here and are exact, also where every byte is the largest.

    CPUs without instructions for products of bytes add them up in 16 bits, which is too few for the largest.
    """
    weight, bias = random_numbers(64, 48).mul_(30).round_().clamp_(-127, 127), random_numbers(64)
    weight[:2] = torch.tensor([LARGEST_WEIGHT, -LARGEST_WEIGHT])[:, None]
    weight[2:, 0] = LARGEST_WEIGHT  # so that each row's step is 1
    x = random_numbers(3, 17, 48).mul_(60).add_(128).round_().clamp_(0, LARGEST)
    x[0] = LARGEST
    scale, other = Scale(0.01, 128), random_numbers(3, 17, 64)
    product = F.linear((x.double() - scale.zero) * scale.step, weight.double(), bias.double())
    try:
        layer = ByteLinear(weight, bias, scale, gives)
        given = x.to(torch.uint8)
        tolerance = EXACT if gives is torch.float32 else 1e-2
        right = _close(layer(given), product, tolerance)
        for spare in (False, True):
            right = right and _close(layer.added(given, other.clone(), spare), product + other, EXACT)
        return right and all(_activates(weight, bias, scale, kind, given, product) for kind in ACTIVATIONS)
    except (AttributeError, RuntimeError):  # not in this build of torch, or not on this CPU
        return False


def _activates(weight: Tensor, bias: Tensor, scale: Scale, kind: str, given: Tensor, product: Tensor) -> bool:
    """Whether a product writes the bytes of what its activation gives."""
    right = F.silu(product) if kind == "swish" else F.gelu(product, approximate=kind)
    written = Scale(float(right.max() - right.min()) / LARGEST, 20)
    found = ByteLinear(weight, bias, scale, written).activated(given, kind)
    expected = (right / written.step + written.zero).round().clamp(0, LARGEST)
    return found.dtype is torch.uint8 and bool((found.double() - expected).abs().max() <= 1)


def _close(found: Tensor, right: Tensor, tolerance: float) -> bool:
    return bool((found.double() - right).abs().max() <= tolerance * right.abs().max())
