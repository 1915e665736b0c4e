"""Find the fastest way to run a model on this machine: eager or optimized, in float32 or bfloat16."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vitlite.errors import check_count
from vitlite.fast.measure import (
    GPU_TOLERANCE,
    TOLERANCE,
    Benchmark,
    difference,
    eager,
    measure,
    memory_of,
    optimized,
    products,
)
from vitlite.nn.vit import ViT

MARGIN = 0.95  # a faster way must take less than this share of the time; smaller gains may be noise
EAGER = ("eager", "float32")
# The call for each way, in Python and on the command line. A later way is advised only if it is faster than all earlier
# ways.
WAYS = {
    EAGER: "the eager model",
    ("optimized", "float32"): "vitlite.optimize(model), on the command line --fast",
    ("eager", "bfloat16"): "vitlite.create(..., dtype=torch.bfloat16), on the command line --dtype bfloat16",
    (
        "optimized",
        "bfloat16",
    ): "vitlite.optimize(model, dtype=torch.bfloat16), on the command line --fast --dtype bfloat16",
}


@dataclass
class Timing:
    """The measurements of one model with one batch size and one dtype.

    `seconds`, `differences` and `memory` are dictionaries, whose keys are the benchmarks "eager", "optimized" and
    "products".
    """

    model: str
    size: int
    batch: int
    dtype: str
    seconds: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)  # from eager float32, relative to the largest logit
    memory: dict[str, int] = field(default_factory=dict)  # bytes on a GPU, besides the weights
    device: str = "cpu"

    def wrong(self) -> dict[str, float]:
        """Return the differences from eager float32 that are too large for rounding errors, by benchmark name."""
        limit = (TOLERANCE if self.device == "cpu" else GPU_TOLERANCE)[getattr(torch, self.dtype)]
        return {name: value for name, value in self.differences.items() if not value <= limit}  # also catches NaN


def time_model(model: ViT, name: str, batch: int, rounds: int) -> list[Timing]:
    """Measure the speed of a model with one batch size: eager and optimized, in float32 and bfloat16.

    Args:
        model: An eager model.
        name: The name of the model, for the results.
        batch: The number of images per batch.
        rounds: The number of times that every benchmark is measured.

    Returns:
        One `Timing` for each dtype.

    Raises:
        InputError: `batch` or `rounds` is not a positive integer.
    """
    check_count(batch, "batch")
    check_count(rounds, "rounds")
    device = model.device
    images = torch.randn(batch, model.config.channels, *model.config.size).to(device)
    timings: dict[torch.dtype, Timing] = {}
    benchmarks: list[Benchmark] = []
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        expected = model(images)
        for dtype in TOLERANCE:
            short = str(dtype).removeprefix("torch.")
            timings[dtype] = Timing(name, model.config.size[0], batch, short, device=device.type)
            benchmarks += [eager(model, images, dtype), optimized(model, images, dtype)]
            if device.type == "cpu":
                benchmarks.append(products(model.config, images.to(dtype)))
        measure(benchmarks, rounds)
        for benchmark in benchmarks:
            timing = timings[benchmark.dtype]
            timing.seconds[benchmark.name] = benchmark.best
            if benchmark.name != "products":
                timing.differences[benchmark.name] = difference(benchmark.run(), expected)
                timing.memory[benchmark.name] = memory_of(benchmark.run, device)
    return list(timings.values())


def advice(timings: Sequence[Timing]) -> list[str]:
    """Return one sentence for each model and batch size, which says which way to run the model is the fastest.

    If any sentence recommends bfloat16, a last sentence gives the largest difference of the logits from float32.
    """
    seconds: dict[str, dict[tuple[str, str], float]] = {}
    for timing in timings:
        case = f"{timing.model} at {timing.size} px, batch {timing.batch}"
        for name, value in timing.seconds.items():
            seconds.setdefault(case, {})[name, timing.dtype] = value
    sentences = []
    rounds = False
    for case, of_case in seconds.items():
        best = EAGER
        for way in WAYS:
            if way in of_case and of_case[way] < MARGIN * of_case[best]:
                best = way
        gain = f"{of_case[EAGER] / of_case[best]:.1f} times as fast as eager float32"
        if best == EAGER:
            gain = f"no other way is more than {1 - MARGIN:.0%} faster"
        sentences.append(f"{case}: use {WAYS[best]}; {gain}.")
        rounds = rounds or best[1] == "bfloat16"
    if rounds:
        largest = max(max(timing.differences.values()) for timing in timings if timing.dtype == "bfloat16")
        sentences.append(f"In bfloat16, logits differ from float32 by up to {largest:.1%} of the largest logit.")
    return sentences
