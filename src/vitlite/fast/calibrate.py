"""Calibrate int8: record the inputs of every linear layer for a few images, and choose a quantisation for each layer.

Shapes: b images, n tokens, d inputs, k outputs.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitlite.errors import OptimizedError
from vitlite.fast.blocks import activation, layer_scale
from vitlite.fast.int8 import LARGEST, Quantization, quantize_weight
from vitlite.nn.layers import MLP, Block
from vitlite.nn.vit import ViT

BATCH = 8  # images at a time
TOKENS = 512  # maximum number of recorded tokens per layer, on which quantisations are compared
TOKENS_OF_IMAGE = 16
LARGEST_ERROR = 0.1  # relative to the deviation of the outputs; layers with larger errors are not quantised
BALANCES = (0.5, 0.75, 1.0)  # SmoothQuant's alpha: share of the channels' differences that moves into the weights
CLIPS = (0.9, 0.8, 0.65, 0.5)  # shares of the observed range that are kept; values outside are clipped


@torch.no_grad()
def calibrated(model: ViT, images: Iterable[Any]) -> list[dict[str, Quantization]]:
    """Choose a quantisation for each linear layer of a model.

    Args:
        model: An eager model.
        images: Typical images, in any form that `model.preprocess` accepts.

    Returns:
        A dictionary for each block, from the name of a layer to its quantisation. Layers for which int8 is not
        accurate enough are left out.

    Raises:
        OptimizedError: There are no images, an output is not finite, or int8 is not accurate enough for any layer.
    """
    with _recorded_inputs(model) as inputs:
        _run(model, images)
    quantizations = [_quantize_block(block, of_block) for block, of_block in zip(_blocks(model), inputs, strict=True)]
    if not any(quantizations):
        raise OptimizedError(
            "int8 is not accurate enough for any layer of this model. Use dtype=torch.bfloat16 (--dtype bfloat16) or "
            "float32."
        )
    return quantizations


def fingerprint(quantizations: Sequence[dict[str, Quantization]]) -> str:
    """Return a short hash of the quantisations of a model, which affect the outputs of the model."""
    digest = hashlib.sha256()
    for block in quantizations:
        for name, (scale, zero_point, smoothing) in block.items():
            channels = smoothing.tolist() if isinstance(smoothing, Tensor) else []
            digest.update(repr((name, scale, zero_point, channels)).encode())
    return digest.hexdigest()[:16]


class Inputs:
    """The range of the inputs that a linear layer received during calibration, and a sample of the tokens."""

    def __init__(self) -> None:
        self.low = self.high = torch.zeros(())  # (d,)
        self.tokens: list[Tensor] = []  # (n, d) of each image

    def add(self, x: Tensor) -> None:
        """Record a batch of inputs (b, n, d)."""
        x = x.detach().float()
        self.low = torch.minimum(self.low, x.amin((0, 1)))
        self.high = torch.maximum(self.high, x.amax((0, 1)))
        for image in x:
            if len(self.tokens) * TOKENS_OF_IMAGE < TOKENS:
                self.tokens.append(_some_tokens(image))

    def multiplied(self, factor: float) -> "Inputs":
        """Return a copy of the record in which the range and the tokens are multiplied by a factor."""
        inputs = Inputs()
        inputs.low, inputs.high = self.low * factor, self.high * factor
        inputs.tokens = [tokens * factor for tokens in self.tokens]
        return inputs


def _some_tokens(image: Tensor) -> Tensor:
    """Return the token with the largest absolute value, and evenly spaced tokens of the same image: (n, d)."""
    largest = int(image.abs().amax(1).argmax())
    spaced = torch.linspace(0, len(image) - 1, TOKENS_OF_IMAGE - 1, dtype=torch.float64).long()
    return image[[largest, *spaced.tolist()]].clone()


@contextmanager
def _recorded_inputs(model: ViT) -> Iterator[list[dict[str, Inputs]]]:
    """Return a context manager in which the model is in eval mode and the inputs of all linear layers are recorded.

    The recorded inputs are a dictionary for each block, from the name of a layer to its `Inputs`.
    """
    inputs: list[dict[str, Inputs]] = []
    hooks = []
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    for block in _blocks(model):
        inputs.append({})
        for name, layer in _layers(block).items():
            inputs[-1][name] = of_layer = Inputs()
            hooks.append(layer.register_forward_pre_hook(lambda _, x, of_layer=of_layer: of_layer.add(x[0])))
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
        for module in in_training:
            module.training = True


def _run(model: ViT, images: Iterable[Any]) -> None:
    """Run a model on the calibration images in batches.

    Raises:
        OptimizedError: There are no images, or an output is not finite.
    """
    remaining = iter(images)
    count = 0
    of_any_shape = hasattr(getattr(model.preprocess, "transform", None), "max_patches")  # NaFlex
    while batch := list(islice(remaining, 1 if of_any_shape else BATCH)):
        vectors = model.embed(model.preprocess(batch).to(model.device, model.dtype))
        if not vectors.isfinite().all():
            raise OptimizedError(
                f"The output for one of the calibration images {count + 1} to {count + len(batch)} is not finite. "
                "Call model.embed for each of these images to find it, and remove it from calibrate= (--calibrate)."
            )
        count += len(batch)
    if not count:
        raise OptimizedError(
            "There are no calibration images. Pass about 32 typical images as calibrate= (--calibrate)."
        )


def _blocks(model: ViT) -> Sequence[Block]:
    return cast("Sequence[Block]", model.blocks)


def _layers(block: Block) -> dict[str, nn.Linear]:
    return {"qkv": block.attn.qkv, "proj": block.attn.proj, "fc1": block.mlp.fc1, "fc2": block.mlp.fc2}


def _quantize_block(block: Block, inputs: dict[str, Inputs]) -> dict[str, Quantization]:
    """Return the quantisation of each linear layer of a block, except where int8 is not accurate enough."""
    scales_behind = {"proj": layer_scale(block.ls1), "fc2": layer_scale(block.ls2)}
    quantizations = {}
    for name, layer in _layers(block).items():
        weight = layer.weight.detach().float()
        behind = scales_behind.get(name, 1.0)  # measure the error in the residual stream, behind the layer scale
        weight = weight * (behind[:, None].float() if isinstance(behind, Tensor) else behind)
        if name == "fc2" and isinstance(block.mlp, MLP) and isinstance(block.mlp.norm, nn.Identity):
            _, _, after = activation(block.mlp)  # the activation keeps fc1 from dividing the channels
            best = _best_quantization(inputs[name].multiplied(1 / after), weight * after, smooth=False)
        else:  # the norm or layer before divides the channels
            best = _best_quantization(inputs[name], weight, smooth=True)
        if best is not None:
            quantizations[name] = best
    return quantizations


def _best_quantization(inputs: Inputs, weight: Tensor, smooth: bool) -> Quantization | None:
    """Return the quantisation of a linear layer with the smallest error, or None if even this error is too large.

    Args:
        inputs: The recorded inputs of the layer.
        weight: The weight of the layer (k, d).
        smooth: If True, also try to divide the input channels by different numbers; otherwise, only by the same number.
    """
    tokens = torch.cat(inputs.tokens)
    expected = tokens @ weight.T
    smoothings: list[Tensor | float] = [1.0]
    if smooth:
        largest = torch.maximum(-inputs.low, inputs.high)
        smoothings += [_smoothing(largest, weight.abs().amax(0), balance) for balance in BALANCES]

    def tried(smoothing: Tensor | float, clip: float) -> tuple[float, Quantization]:
        quantization = _quantization(inputs, smoothing, clip)
        return _error(tokens, weight, expected, quantization), quantization

    unclipped = [tried(smoothing, 1.0) for smoothing in smoothings]
    _, best = min(unclipped, key=itemgetter(0))
    error, best = min(unclipped + [tried(best.smoothing, clip) for clip in CLIPS], key=itemgetter(0))
    return best if error < LARGEST_ERROR else None


def _smoothing(largest: Tensor, largest_weight: Tensor, balance: float) -> Tensor:
    """Return a divisor for each input channel that balances the ranges of inputs and weights, as in SmoothQuant.

    Args:
        largest: The largest absolute input of each channel (d,).
        largest_weight: The largest absolute weight of each channel (d,).
        balance: The share of the differences between channels that moves from the inputs to the weights, from 0 to 1.
    """
    tiny = 1e-5
    smoothing = largest.clamp_min(tiny) ** balance / largest_weight.clamp_min(tiny) ** (1 - balance)
    return smoothing / smoothing.mean()


def _quantization(inputs: Inputs, smoothing: Tensor | float, clip: float) -> Quantization:
    """Return a quantisation of inputs for the fraction `clip` of their observed range. Values outside are clipped."""
    low = clip * min(0.0, float((inputs.low / smoothing).min()))
    high = clip * max(0.0, float((inputs.high / smoothing).max()))
    scale = max(high - low, torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    return Quantization(scale, round(-low / scale), smoothing)


def _error(tokens: Tensor, weight: Tensor, expected: Tensor, quantization: Quantization) -> float:
    """Return the error of the outputs of a linear layer in int8, relative to their standard deviation over the tokens.

    Args:
        tokens: Inputs of the layer (n, d).
        weight: The weight (k, d).
        expected: The exact outputs (n, k).
        quantization: The quantisation of the inputs.
    """
    integers, scales = quantize_weight(weight * quantization.smoothing)
    given = quantization.simulate(tokens) / quantization.smoothing
    found = given @ (integers * scales[:, None]).T
    return float((found - expected).norm() / (expected - expected.mean(0)).norm())
