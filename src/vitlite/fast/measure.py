"""How long models take, fairly: contestants take turns in one run, and the best of many turns counts.

Absolute times on a shared machine mean little, so what counts are ratios within one run. Before each turn comes a
pause, in which the workers of the contestant before fall asleep.
"""

import copy
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from vitlite.config import ViTConfig
from vitlite.fast import cpu
from vitlite.fast.kernels import PackedLinear, PlainLinear, float32_products, float32_products_pay, packing_pays
from vitlite.fast.optimize import optimize
from vitlite.fast.slices import SLICE
from vitlite.nn import costs
from vitlite.nn.vit import ViT

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # of the largest logit: beyond it, not the same network
ON_A_GPU = {torch.float32: 1e-2, torch.bfloat16: 0.1}  # whose convolutions round to three digits, as torch sets them
CPU = torch.device("cpu")
LONG = 0.3  # seconds of a call of which one a turn is enough
ENOUGH = 60  # seconds for all contestants together, after three turns
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile")  # that make products fast


@dataclass
class Contestant:
    """One way to compute the logits, and the best time it had so far."""

    name: str
    dtype: torch.dtype
    run: Callable[[], Any]
    best: float = math.inf  # seconds


def measure(contestants: Sequence[Contestant], rounds: int) -> None:
    """Lets the contestants take turns, and keeps the best time of each.

    A turn is a pause, a call that is left out, and two that count; where a call takes long, it is one that counts.
    Who is far behind the quickest of its dtype after two turns has had enough of them, and so has everybody after
    three turns and a minute.
    """
    start = time.perf_counter()
    long = [_seconds(contestant.run) > LONG for contestant in contestants]  # which also warms up
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() - start > ENOUGH:
            return
        for contestant, takes_long in zip(contestants, long, strict=True):
            turns_at_least = 1 if takes_long else 2
            if turn < turns_at_least or not _is_far_behind(contestant, contestants):
                _take_turn(contestant, calls=1 if takes_long else 3)


def _take_turn(contestant: Contestant, calls: int) -> None:
    time.sleep(0.03)
    times = [_seconds(contestant.run) for _ in range(calls)]
    contestant.best = min(contestant.best, *times[-2:])


def _is_far_behind(contestant: Contestant, contestants: Sequence[Contestant]) -> bool:
    quickest = min(rival.best for rival in contestants if rival.dtype is contestant.dtype)
    return contestant.best > 1.5 * quickest


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def as_created(model: ViT, images: Tensor, dtype: torch.dtype) -> Contestant:
    """The model as `create` gives it in a dtype; with a copy, so that other contestants keep theirs."""
    created, given = copy.deepcopy(model).to(dtype), images.to(dtype)
    return Contestant("vitlite", dtype, to_the_end(lambda: created(given), model.device))


def as_optimized(model: ViT, images: Tensor, dtype: torch.dtype) -> Contestant:
    """The same through `optimize`."""
    optimized = optimize(copy.deepcopy(model), dtype=dtype)
    return Contestant("optimized", dtype, to_the_end(lambda: optimized(images), model.device))


def to_the_end(run: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The same, until the device is done: a GPU is given work, and the call returns before it has begun."""
    synchronize = getattr(torch, device.type).synchronize

    def run_and_wait() -> Any:
        answer = run()
        synchronize()
        return answer

    return run_and_wait


def memory_of(run: Callable[[], Any], device: torch.device) -> int:
    """How many bytes of a GPU a call takes at most, beside the weights that are there; 0 where torch does not count."""
    counts = getattr(torch, device.type)
    if not hasattr(counts, "max_memory_allocated"):
        return 0
    counts.reset_peak_memory_stats(device)
    before = counts.memory_allocated(device)
    run()
    return int(counts.max_memory_allocated(device) - before)


def products(config: ViTConfig, images: Tensor) -> Contestant:
    """The matrix products of a forward pass and nothing else, as fast as this machine does them: the limit.

    Rows of many images are multiplied some images at a time, as `optimize` does at most.
    """
    dtype = images.dtype
    at_once = math.ceil(len(images) / math.ceil(len(images) / SLICE))  # rounds of the same number of images
    times = config.depth * math.ceil(len(images) / at_once)
    linear_layers = _linear_products(config, at_once, dtype)
    attention = _attention_products(config, dtype)
    around: AbstractContextManager[None] = nullcontext()
    if dtype is torch.float32 and float32_products_pay(config.tokens, config.head_width):
        around = float32_products

    def run() -> None:
        with around:
            for _ in range(times):
                for layer in linear_layers:
                    layer()
                for _ in range(at_once):
                    attention()

    return Contestant("products", dtype, run)


def _linear_products(config: ViTConfig, images: int, dtype: torch.dtype) -> list[Callable[[], Tensor]]:
    """The linear layers of one block, ready to run on the tokens of so many images."""
    linear = PackedLinear if packing_pays(dtype) else PlainLinear
    tokens = config.tokens
    ready: list[Callable[[], Tensor]] = []
    for layer in costs.layers(config):
        if layer.name.startswith("blocks.") and layer.macs and layer.weight:
            n, k = layer.weight
            ready.append(_on_noise(linear(torch.randn(n, k), torch.randn(n), dtype), images * tokens, k, dtype))
    return ready


def _on_noise(product: PackedLinear | PlainLinear, rows: int, width: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    x = torch.randn(rows, width, dtype=dtype)
    return lambda: product(x)


def _attention_products(config: ViTConfig, dtype: torch.dtype) -> Callable[[], None]:
    """The two products of attention of one image."""
    heads, tokens = config.heads, config.tokens
    q, k, v = torch.randn(3, heads, tokens, config.head_width, dtype=dtype)
    scores, out = torch.empty(heads, tokens, tokens, dtype=dtype), torch.empty_like(q)

    def run() -> None:
        torch.bmm(q, k.mT, out=scores)
        torch.bmm(scores, v, out=out)

    return run


def difference(answer: Any, right: Tensor) -> float:
    """The largest difference between logits, of the largest of those that are right."""
    answer = torch.as_tensor(answer).float()
    return float((answer - right).abs().max() / right.abs().max())


def random_model(config: ViTConfig) -> ViT:
    """A model whose logits depend on every weight, the same on each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViT(config).eval()
        torch.nn.init.normal_(cast(torch.nn.Linear, model.head).weight, std=0.02)
    return model.requires_grad_(False)


def machine(device: torch.device = CPU) -> dict[str, Any]:
    """What the figures belong to."""
    core = cpu.first_core()
    flags = cpu.flags_of(core)
    described: dict[str, Any] = {
        "cpu": cpu.name_of(core),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if hasattr(os, "getloadavg"):  # not on Windows
        described["load"] = [round(load, 2) for load in os.getloadavg()]
    if device.type != "cpu":
        name = getattr(getattr(torch, device.type), "get_device_name", None)
        described |= {"device": name(device) if name else device.type, "cuda": torch.version.cuda}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    return described | versions
