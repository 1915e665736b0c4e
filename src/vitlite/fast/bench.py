"""What is fastest on this machine: a model as created, and optimized, in float32 and in bfloat16."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from vitlite.errors import check_count
from vitlite.fast.measure import ON_A_GPU, TOLERANCE, as_created, as_optimized, difference, measure, memory_of, products
from vitlite.nn.vit import ViT

MARGIN = 0.95  # of the time before: a gain below that is noise, and no reason to round, or to call `optimize`


class Way(NamedTuple):
    """A way to run a model: what to write for it in Python, and at the command line."""

    python: str
    command: str


# By what is run and in which dtype; who comes later must be faster than who comes before.
WAYS = {
    ("vitlite", "float32"): Way("the model as created", ""),
    ("optimized", "float32"): Way("vitlite.optimize(model)", "--fast"),
    ("vitlite", "bfloat16"): Way("vitlite.create(..., dtype=torch.bfloat16)", "--dtype bfloat16"),
    ("optimized", "bfloat16"): Way("vitlite.optimize(model, dtype=torch.bfloat16)", "--fast --dtype bfloat16"),
}
AS_CREATED = ("vitlite", "float32")


@dataclass
class Timing:
    """What one model takes for one batch in one dtype."""

    model: str
    size: int
    batch: int
    dtype: str
    # By "vitlite", which is as created, "optimized", "products".
    seconds: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)  # from float32 as created, of the largest logit
    memory: dict[str, int] = field(default_factory=dict)  # bytes of a GPU, beside the weights
    device: str = "cpu"

    def wrong(self) -> dict[str, float]:
        """The differences that are more than rounding."""
        limit = (TOLERANCE if self.device == "cpu" else ON_A_GPU)[getattr(torch, self.dtype)]
        return {name: value for name, value in self.differences.items() if not value <= limit}  # nor what is no number


def time_model(model: ViT, name: str, batch: int, rounds: int) -> list[Timing]:
    """Measures one model on one batch, in float32 and in bfloat16, interleaved; where the model is.

    Raises:
        InputError: `batch` or `rounds` is no positive number.
    """
    check_count(batch, "batch")
    check_count(rounds, "rounds")
    device = model.device
    images = torch.randn(batch, model.config.channels, *model.config.size).to(device)
    timings, contestants = {}, []
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        right = model(images)
        for dtype in TOLERANCE:
            timing = Timing(name, model.config.size[0], batch, str(dtype).removeprefix("torch."), device=device.type)
            timings[dtype] = timing
            contestants.append(as_created(model, images, dtype))
            contestants.append(as_optimized(model, images, dtype))
            if device.type == "cpu":
                contestants.append(products(model.config, images.to(dtype)))
        measure(contestants, rounds)
        for contestant in contestants:
            timing = timings[contestant.dtype]
            timing.seconds[contestant.name] = contestant.best
            if contestant.name != "products":
                timing.differences[contestant.name] = difference(contestant.run(), right)
                timing.memory[contestant.name] = memory_of(contestant.run, device)
    return list(timings.values())


class Choice(NamedTuple):
    """What is fastest for one model and batch, and how many times as fast as created each way is there."""

    place: str  # "vit_base_16 at 224 px, batch 8"
    way: tuple[str, str]
    gains: dict[tuple[str, str], float]


def choose(timings: Sequence[Timing]) -> list[Choice]:
    """The fastest way for each model and batch."""
    seconds: dict[str, dict[tuple[str, str], float]] = {}
    for timing in timings:
        place = f"{timing.model} at {timing.size} px, batch {timing.batch}"
        ways = seconds.setdefault(place, {})
        for name, value in timing.seconds.items():
            if (name, timing.dtype) in WAYS:
                ways[name, timing.dtype] = value
    choices = []
    for place, ways in seconds.items():
        gains = {way: ways[AS_CREATED] / value for way, value in ways.items()}
        choices.append(Choice(place, _fastest(ways), gains))
    return choices


def _fastest(seconds: dict[tuple[str, str], float]) -> tuple[str, str]:
    best = AS_CREATED
    for way in WAYS:
        if way in seconds and seconds[way] < MARGIN * seconds[best]:
            best = way
    return best


def advice(timings: Sequence[Timing]) -> list[str]:
    """What to use on this machine, in sentences."""
    by_way: dict[tuple[str, str], list[Choice]] = {}
    for choice in choose(timings):
        by_way.setdefault(choice.way, []).append(choice)
    sentences = []
    for way, choices in by_way.items():
        verb = "Use"
        if len(by_way) > 1:
            verb = f"For {'; '.join(choice.place for choice in choices)}: use"
        sentences.append(f"{verb} {_advice(way, choices)}")
    rounded = [choice for choice in choose(timings) if choice.way[1] == "bfloat16"]
    if rounded:
        sentences.append(_on_rounding(timings, rounded))
    return sentences


def _advice(way: tuple[str, str], choices: Sequence[Choice]) -> str:
    python, command = WAYS[way]
    if way == AS_CREATED:
        return f"{python}: nothing else is faster by {1 - MARGIN:.0%}."
    gain = _range(choice.gains[way] for choice in choices)
    return f"{python}: {gain} times as fast as created. At the command line: {command}."


def _on_rounding(timings: Sequence[Timing], rounded: Sequence[Choice]) -> str:
    """How far bfloat16 is off, and what there is without it."""
    farthest = max(max(timing.differences.values()) for timing in timings if timing.dtype == "bfloat16")
    text = f"bfloat16 rounds: here its logits are within {farthest:.1%} of the largest."
    optimized = ("optimized", "float32")
    gains = [choice.gains[optimized] for choice in rounded if optimized in choice.gains]
    if gains:
        text += f" Without rounding, {WAYS[optimized].python}: {_range(gains)} times as fast as created."
    return text


def _range(values: Iterable[float]) -> str:
    """The least and the largest, or what both are.

    >>> _range([1.31, 2.46, 1.9]), _range([1.31, 1.34])
    ('1.3 to 2.5', '1.3')
    """
    numbers = sorted(values)
    low, high = f"{numbers[0]:.1f}", f"{numbers[-1]:.1f}"
    return low if low == high else f"{low} to {high}"
