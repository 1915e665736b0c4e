"""Linear layers in int8 for `optimize(dtype=torch.int8)`.

An input x is stored as the byte round(x / smoothing / scale) + zero_point, from 0 to 255. A weight is stored as a byte
from -127 to 127. Each input channel has a smoothing factor: the layer before divides the channel by it, and the weight
is multiplied by it. Quantisation therefore takes a single pass over the inputs, or none if the layer before writes
bytes.

Shapes: b images, n tokens, d inputs, k outputs.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlite.fast.blocks import FloatLayers, plain_norm
from vitlite.kernels import ACTIVATIONS, ROUNDED, Layer, agrees, random_numbers

LARGEST = 255
LARGEST_WEIGHT = 127
EXACT = 1e-4  # largest rounding error of float32, relative to the largest value


class Quantization(NamedTuple):
    """The numbers that convert the inputs of a linear layer to bytes: round(x / smoothing / scale) + zero_point."""

    scale: float
    zero_point: int
    smoothing: Tensor | float = 1.0  # (d,), or one number for all channels

    @property
    def divisor(self) -> Tensor | float:
        """The number by which inputs are divided before rounding: (d,), or one number for all channels."""
        return self.smoothing * self.scale

    def simulate(self, x: Tensor) -> Tensor:
        """Convert inputs (n, d) to bytes and back to floats, which then contain the rounding errors of int8."""
        steps = (x / self.smoothing / self.scale + self.zero_point).round().clamp(0, LARGEST) - self.zero_point
        return steps * self.scale * self.smoothing


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight (k, d) to integers from -127 to 127. Return them in float32, with the scale of each row (k,)."""
    scales = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST_WEIGHT
    return (weight / scales[:, None]).round(), scales


class Int8Linear:
    """A linear layer in int8, computed by oneDNN: (b, n, d) -> (b, n, k).

    Args:
        weight: The weight in floating point (k, d).
        bias: The bias (k,), if there is one.
        takes: The quantisation of the inputs.
        gives: The dtype of the outputs, or their quantisation if the layer writes bytes.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, takes: Quantization, gives: torch.dtype | Quantization
    ) -> None:
        integers, scales = quantize_weight(weight.float() * takes.smoothing)
        packed = torch.ops.onednn.qlinear_prepack(
            integers.to(torch.int8).contiguous(), None
        )  # contiguous, because oneDNN ignores strides
        self._weight = packed, scales, torch.zeros(len(scales), dtype=torch.int64)
        self._bias = None if bias is None else bias.float().contiguous()
        self._takes = takes.scale, takes.zero_point
        self._gives = (
            (gives.scale, gives.zero_point, torch.uint8) if isinstance(gives, Quantization) else (1.0, 0, gives)
        )
        self._pointwise = torch.ops.onednn.qlinear_pointwise.default
        self._binary = torch.ops.onednn.qlinear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer: (b, n, d) -> (b, n, k)."""
        return self._pointwise(x, *self._takes, *self._weight, self._bias, *self._gives, "none", [], "")

    def activated(self, x: Tensor, kind: str) -> Tensor:
        """Apply the linear layer and then an activation: "swish", exact GELU ("none") or tanh GELU ("tanh")."""
        name, algorithm = ("swish", "") if kind == "swish" else ("gelu", kind)
        return self._pointwise(x, *self._takes, *self._weight, self._bias, *self._gives, name, [], algorithm)

    def added(self, x: Tensor, other: Tensor, overwrite: bool = False) -> Tensor:
        """Apply the linear layer and add `other`, in float32: (b, n, d) -> (b, n, k).

        If `overwrite` is True, `other` may be overwritten, which is faster; otherwise, it is not changed.
        """
        way = "sum" if overwrite else "add"
        other = other.contiguous()  # oneDNN adds strided tensors slowly
        gives = 1.0, 0, torch.float32
        return self._binary(
            x, *self._takes, *self._weight, other, self._bias, *gives, 1.0, 0, way, 1.0, "none", [], ""
        )  # fmt: skip


class FloatLinear:
    """A floating-point linear layer in a block in which other layers use int8: (b, n, d) -> (b, n, k).

    After an activation, the output is divided by `divisor`, because the next layer needs divided inputs.
    """

    def __init__(self, linear: Layer, divisor: Tensor | float) -> None:
        self._linear, self._divisor = linear, divisor

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer: (b, n, d) -> (b, n, k)."""
        return self._linear(x)

    def activated(self, x: Tensor, kind: str) -> Tensor:
        """Apply the linear layer, then an activation, and divide the result by `divisor`.

        Args:
            x: The inputs (b, n, d).
            kind: The activation: "swish", "none" for exact GELU, or "tanh" for tanh GELU.
        """
        y = self._linear.activated(x, kind)
        if isinstance(self._divisor, float) and self._divisor == 1.0:
            return y
        return y.float() / self._divisor

    def added(self, x: Tensor, other: Tensor, overwrite: bool = False) -> Tensor:
        """Apply the linear layer and add `other`, which is not changed: (b, n, d) -> (b, n, k)."""
        return other + self._linear(x)


class Int8Layers:
    """A builder of the linear layers of a block: in int8 if they have a quantisation, otherwise in floating point."""

    def __init__(self, quantizations: Mapping[str, Quantization], floats: FloatLayers) -> None:
        self.quantizations, self.floats = quantizations, floats
        self.dtype = floats.dtype

    def linear(self, name: str, weight: Tensor, bias: Tensor | None, then: str = "") -> Layer:
        """Return a linear layer. An int8 layer writes bytes if the next layer, `then`, also uses int8."""
        if name not in self.quantizations:
            return FloatLinear(self.floats.linear(name, weight, bias), self.divisor(then))
        return Int8Linear(weight, bias, self.quantizations[name], self.quantizations.get(then, self.dtype))

    def norm(self, name: str, norm: nn.Module, factor: float = 1.0) -> Callable[[Tensor], Tensor]:
        """Return a function that computes the norm before a linear layer.

        If the linear layer uses int8, the function also quantises the result.
        """
        quantization = self.quantizations.get(name)
        if quantization is None:
            plain = plain_norm(norm, torch.float32, factor)
            return lambda x: plain(x.float()).to(self.dtype)
        half = quantization.zero_point + 0.5
        if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
            weight = norm.weight.detach().float() / quantization.divisor
            shape, eps = norm.normalized_shape, cast(float, norm.eps) * factor**2
            if isinstance(norm, nn.RMSNorm):
                return lambda x: _to_bytes(F.rms_norm(x.float(), shape, weight, eps).add_(half))
            bias = norm.bias.detach().float() / quantization.divisor + half
            return lambda x: _to_bytes(torch.layer_norm(x.float(), shape, weight, bias, eps))

        def quantize(x: Tensor) -> Tensor:
            if x.dtype is torch.uint8:  # the previous layer has quantised already
                return x
            return _to_bytes(x.to(torch.float32, copy=True).add_(half))

        return quantize

    def divisor(self, name: str) -> Tensor | float:
        """Return the number by which the inputs of a linear layer must be divided: 1 unless the layer uses int8.

        The caller uses it if there is no norm directly before the layer. Otherwise, the norm divides.
        """
        return self.quantizations[name].divisor if name in self.quantizations else 1.0


def _to_bytes(x: Tensor) -> Tensor:
    """Convert floats to bytes by truncation, overwriting `x`.

    The caller has added 0.5, so that truncation rounds to the nearest integer.
    """
    return torch.empty_like(x, dtype=torch.uint8).copy_(x.clamp_(0, LARGEST))  # twice as fast as `to`


@cache
def int8_is_right(gives: torch.dtype) -> bool:
    """Return True if oneDNN computes correct int8 products on this CPU, even for the largest values.

    CPUs without instructions for int8 products add them in 16 bits, which can overflow.

    Args:
        gives: The dtype of the outputs.
    """
    weight, bias = random_numbers(64, 48).mul_(30).round_().clamp_(-127, 127), random_numbers(64)
    weight[:2] = torch.tensor([LARGEST_WEIGHT, -LARGEST_WEIGHT])[:, None]
    weight[2:, 0] = LARGEST_WEIGHT  # so that each row's scale is 1
    x = random_numbers(3, 17, 48).mul_(60).add_(128).round_().clamp_(0, LARGEST)
    x[0] = LARGEST
    takes, other, given = Quantization(0.01, 128), random_numbers(3, 17, 64), x.to(torch.uint8)
    product = F.linear((x.double() - takes.zero_point) * takes.scale, weight.double(), bias.double())

    def added(overwrite: bool) -> Tensor:
        return Int8Linear(weight, bias, takes, gives).added(given, other.clone(), overwrite)

    tolerance = EXACT if gives is torch.float32 else ROUNDED
    return (
        agrees(lambda: Int8Linear(weight, bias, takes, gives)(given), product, tolerance)
        and agrees(lambda: added(overwrite=False), product + other, EXACT)
        and agrees(lambda: added(overwrite=True), product + other, EXACT)
        and all(_writes_bytes(weight, bias, takes, kind, given, product) for kind in ACTIVATIONS)
    )


def _writes_bytes(weight: Tensor, bias: Tensor, takes: Quantization, kind: str, given: Tensor, product: Tensor) -> bool:
    """Return True if an int8 layer with an activation and quantised outputs computes the correct bytes."""
    activated = F.silu(product) if kind == "swish" else F.gelu(product, approximate=kind)
    gives = Quantization(float(activated.max() - activated.min()) / LARGEST, 20)
    expected = (activated / gives.scale + gives.zero_point).round().clamp(0, LARGEST)
    one_step = 1.01 / float(expected.max())
    return agrees(lambda: Int8Linear(weight, bias, takes, gives).activated(given, kind), expected, one_step)
