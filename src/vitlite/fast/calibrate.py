"""The scales of bytes: what every layer takes, seen on a few pictures, and which layers bytes serve well.

Shapes: b images, n tokens, d numbers taken, k numbers given.
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
from vitlite.fast.int8 import LARGEST, Scale, round_weight
from vitlite.nn.layers import MLP, Block
from vitlite.nn.vit import ViT

PICTURES_AT_ONCE = 8
TOKENS = 512  # of each layer at most, on which scales are compared
TOKENS_OF_PICTURE = 16
WORST = 0.1  # of how much the numbers of a layer differ: what bytes may be off by, or the layer stays as it is
BALANCES = (0.5, 0.75, 1.0)  # how much of the difference between channels goes into the weights
CUTS = (0.9, 0.8, 0.65, 0.5)  # of the range that was seen: what lies beyond is cut off


@torch.no_grad()
def calibrated(model: ViT, pictures: Iterable[Any]) -> list[dict[str, Scale]]:
    """For each block of a model, the scale of every layer that bytes serve well, by its name.

    Args:
        model: As created or loaded.
        pictures: What `model.preprocess` takes, one after the other.

    Raises:
        OptimizedError: There is no picture, or the model's numbers for one are not finite, or bytes serve no layer.
    """
    with _watched(model) as watched:
        _look_at(model, pictures)
    scales = [_scales_of_block(block, seen) for block, seen in zip(_blocks(model), watched, strict=True)]
    if not any(scales):
        raise OptimizedError(
            "Bytes are too coarse for every layer of this model.",
            python="Compute in bfloat16 or float32: vitlite.optimize(model, dtype=torch.bfloat16).",
            command="Use --dtype bfloat16, or none.",
        )
    return scales


def fingerprint(scales: Sequence[dict[str, Scale]]) -> str:
    """The same for the same scales: what decides an answer, besides the weights."""
    digest = hashlib.sha256()
    for block in scales:
        for layer, scale in block.items():
            spread = scale.spread.tolist() if isinstance(scale.spread, Tensor) else []
            digest.update(repr((layer, scale.step, scale.zero, spread)).encode())
    return digest.hexdigest()[:16]


class Seen:
    """What a layer was seen to take."""

    def __init__(self) -> None:
        self.low = self.high = torch.zeros(())  # (d,), the smallest and the largest number of each channel
        self.tokens: list[Tensor] = []  # (n, d) of each picture: some of its tokens

    def look(self, x: Tensor) -> None:
        """Takes note of (b, n, d)."""
        x = x.detach().float()
        self.low = torch.minimum(self.low, x.amin((0, 1)))
        self.high = torch.maximum(self.high, x.amax((0, 1)))
        for image in x:
            if len(self.tokens) * TOKENS_OF_PICTURE < TOKENS:
                self.tokens.append(_some_tokens(image))

    def multiplied(self, factor: float) -> "Seen":
        """The same, had all numbers been so many times as large."""
        seen = Seen()
        seen.low, seen.high = self.low * factor, self.high * factor
        seen.tokens = [tokens * factor for tokens in self.tokens]
        return seen


def _some_tokens(image: Tensor) -> Tensor:
    """The first token of an image (n, d), the one with the largest number, and others evenly spaced."""
    largest = int(image.abs().amax(1).argmax())
    spaced = torch.linspace(0, len(image) - 1, TOKENS_OF_PICTURE - 1, dtype=torch.float64).long()
    return image[[largest, *spaced.tolist()]].clone()


@contextmanager
def _watched(model: ViT) -> Iterator[list[dict[str, Seen]]]:
    """What the layers of each block take, by name, while inside; in eval mode, and afterwards as it was."""
    seen: list[dict[str, Seen]] = []
    hooks = []
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    for block in _blocks(model):
        seen.append({})
        for name, layer in _layers(block).items():
            seen[-1][name] = noted = Seen()
            hooks.append(layer.register_forward_pre_hook(lambda _, given, noted=noted: noted.look(given[0])))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        for module in in_training:
            module.training = True


def _look_at(model: ViT, pictures: Iterable[Any]) -> None:
    """Puts the pictures through the model."""
    remaining = iter(pictures)
    looked = 0
    while batch := list(islice(remaining, PICTURES_AT_ONCE)):
        answers = model.embed(model.preprocess(batch).to(model.device, model.dtype))
        if not answers.isfinite().all():
            raise OptimizedError(
                f"The numbers for one of the calibration pictures {looked + 1} to {looked + len(batch)} are not "
                "finite.",
                python="Look whether its weights are; calibrate with pictures that it can answer.",
            )
        looked += len(batch)
    if not looked:
        raise OptimizedError(
            "There is no picture to calibrate with.",
            python="Pass some 32 that are like those to come: calibrate=[...].",
            command="Say --calibrate and a folder with some 32 pictures.",
        )


def _blocks(model: ViT) -> Sequence[Block]:
    return cast("Sequence[Block]", model.blocks)


def _layers(block: Block) -> dict[str, nn.Linear]:
    """The products of a block that take the time."""
    return {"qkv": block.attn.qkv, "proj": block.attn.proj, "fc1": block.mlp.fc1, "fc2": block.mlp.fc2}


def _scales_of_block(block: Block, seen: dict[str, Seen]) -> dict[str, Scale]:
    """The scale of each layer that bytes serve well."""
    scales = {}
    for name, layer in _layers(block).items():
        weight = _weight_as_added(block, name, layer)
        if name == "fc2" and isinstance(block.mlp, MLP) and isinstance(block.mlp.norm, nn.Identity):
            _, _, after = activation(block.mlp)  # which stands between, and divides no channel by a number of its own
            scale = _best_scale(seen[name].multiplied(1 / after), weight * after, spreads=False)
        else:  # as a norm, or the rows of the layer before, can
            scale = _best_scale(seen[name], weight, spreads=True)
        if scale is not None:
            scales[name] = scale
    return scales


def _weight_as_added(block: Block, name: str, layer: nn.Linear) -> Tensor:
    """The weight of a layer (k, d), times the layer scale behind it, if any: so do its errors count in the stream."""
    weight = layer.weight.detach().float()
    behind = {"proj": block.ls1, "fc2": block.ls2}
    factor = layer_scale(behind[name]) if name in behind else 1.0
    return weight * (factor[:, None].float() if isinstance(factor, Tensor) else factor)


def _best_scale(seen: Seen, weight: Tensor, spreads: bool) -> Scale | None:
    """The scale with which bytes are off by least; None where even that is too much."""
    tokens = torch.cat(seen.tokens)
    right = tokens @ weight.T
    largest = torch.maximum(-seen.low, seen.high)
    choice: list[Tensor | float] = [1.0]
    if spreads:
        choice += [_spread(largest, weight.abs().amax(0), balance) for balance in BALANCES]

    def tried(spread: Tensor | float, cut: float) -> tuple[float, Scale]:
        scale = _scale(seen, spread, cut)
        return _error(tokens, weight, right, scale), scale

    uncut = [tried(spread, 1.0) for spread in choice]
    _, best = min(uncut, key=itemgetter(0))
    error, best = min(uncut + [tried(best.spread, cut) for cut in CUTS], key=itemgetter(0))
    return best if error < WORST else None


def _spread(largest: Tensor, largest_weight: Tensor, balance: float) -> Tensor:
    """What each channel is divided by, so that neither its numbers nor its weights stand out: SmoothQuant's rule."""
    tiny = 1e-5
    spread = largest.clamp_min(tiny) ** balance / largest_weight.clamp_min(tiny) ** (1 - balance)
    return spread / spread.mean()


def _scale(seen: Seen, spread: Tensor | float, cut: float) -> Scale:
    """The scale whose bytes reach over so much of the range that was seen."""
    low = cut * min(0.0, float((seen.low / spread).min()))
    high = cut * max(0.0, float((seen.high / spread).max()))
    step = max(high - low, torch.finfo(torch.float32).tiny * LARGEST) / LARGEST
    return Scale(step, round(-low / step), spread)


def _error(tokens: Tensor, weight: Tensor, right: Tensor, scale: Scale) -> float:
    """What bytes put wrong in a product, beside how much its numbers differ from token to token."""
    rounded, steps = round_weight(weight * scale.spread)
    given = scale.rounded(tokens) / scale.spread
    found = given @ (rounded * steps[:, None]).T
    return float((found - right).norm() / (right - right.mean(0)).norm())
