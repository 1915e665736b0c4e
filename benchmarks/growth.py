"""How the time of an optimized model grows with the batch, the tokens and the depth, beside its multiply-adds.

python benchmarks/growth.py [rounds]
"""

import math
import sys
from functools import partial
from typing import NamedTuple

import torch

from vitlite.config import ViTConfig
from vitlite.fast.measure import Benchmark, measure, random_model
from vitlite.fast.optimize import optimize
from vitlite.nn import costs
from vitlite.presets import PRESETS

MODEL = PRESETS["vit_tiny_16"]
BATCHES = (1, 2, 4, 8, 16, 32)
DEPTHS = (3, 6, 12, 24)
SIDES = (1, 2, 3, 4, 6)  # of the image, in halves of the model's own
BATCH = 4  # where it does not vary


class Step(NamedTuple):
    """One point of a curve: what varies, and the model and batch that it stands for."""

    value: int
    config: ViTConfig
    batch: int


def growth(rounds: int) -> dict[str, list[tuple[int, float, float]]]:
    """For batch, depth and tokens: how many, billions of multiply-adds, and seconds."""
    by_batch = [Step(batch, MODEL, batch) for batch in BATCHES]
    by_depth = [Step(depth, MODEL.replace(depth=depth), BATCH) for depth in DEPTHS]
    by_tokens = []
    for halves in SIDES:
        config = MODEL.replace(image_size=MODEL.size[0] // 2 * halves)
        by_tokens.append(Step(config.prefix_tokens + math.prod(config.grid), config, BATCH))
    curves = {"batch": by_batch, "depth": by_depth, "tokens": by_tokens}
    return {axis: [_measured(step, rounds) for step in steps] for axis, steps in curves.items()}


def _measured(step: Step, rounds: int) -> tuple[int, float, float]:
    model = optimize(random_model(step.config))
    images = torch.randn(step.batch, step.config.channels, *step.config.size)
    benchmark = Benchmark("optimized", torch.float32, partial(model, images))
    measure([benchmark], rounds)
    return step.value, costs.gmacs(step.config) * step.batch, benchmark.best


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    for axis, points in growth(rounds).items():
        for value, gmacs, seconds in points:
            print(f"{axis:6} {value:4}: {gmacs:7.2f} GMACs {seconds * 1e3:8.1f} ms {gmacs / seconds:6.0f} GMACs/s")
