"""Measure the speed of models. Benchmarks take turns, and the best time of each benchmark counts.

On a shared machine, only compare times from the same run.
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
from torch import Tensor, nn

from vitlite.config import ViTConfig
from vitlite.fast.optimize import optimize
from vitlite.fast.slices import SLICE
from vitlite.kernels import LONG, fastest_linear, first_core, float32_products, float32_products_are_exact
from vitlite.nn import costs
from vitlite.nn.vit import ViT

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # largest correct difference, relative to the largest logit
GPU_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.1}  # torch's convolutions round to three digits on GPUs
CPU = torch.device("cpu")
LONG_CALL = 0.3  # seconds; longer calls are made only once per turn
TIME_LIMIT = 60  # seconds for all benchmarks together, after three turns
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile")  # CPU features for fast matrix products


@dataclass
class Benchmark:
    """A function to measure, and its best time so far."""

    name: str
    dtype: torch.dtype
    run: Callable[[], Any]
    best: float = math.inf  # seconds


def measure(benchmarks: Sequence[Benchmark], rounds: int) -> None:
    """Measure benchmarks in turn, and store the best time of each one in `best`.

    In each turn, a benchmark pauses so that the worker threads of the previous one become idle. Then it makes a warm-up
    call and two timed calls, or a single timed call if calls are long. After two turns, a benchmark is skipped if it
    takes more than 1.5 times as long as the fastest one with the same dtype. After three turns, measuring ends if a
    minute has passed.

    Args:
        benchmarks: The benchmarks.
        rounds: The maximum number of turns.
    """
    start = time.perf_counter()
    is_long = [_seconds(benchmark.run) > LONG_CALL for benchmark in benchmarks]  # this also warms up
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() - start > TIME_LIMIT:
            return
        for benchmark, one_call in zip(benchmarks, is_long, strict=True):
            fastest = min(other.best for other in benchmarks if other.dtype is benchmark.dtype)
            if turn < (1 if one_call else 2) or benchmark.best <= 1.5 * fastest:
                time.sleep(0.03)
                times = [_seconds(benchmark.run) for _ in range(1 if one_call else 3)]
                benchmark.best = min(benchmark.best, *times[-2:])


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def eager(model: ViT, images: Tensor, dtype: torch.dtype, name: str = "eager") -> Benchmark:
    """Return a benchmark of a copy of the model, converted to a dtype and not optimized."""
    converted, given = copy.deepcopy(model).to(dtype), images.to(dtype)
    return Benchmark(name, dtype, synchronized(lambda: converted(given), model.device))


def optimized(model: ViT, images: Tensor, dtype: torch.dtype) -> Benchmark:
    """Return a benchmark of an optimized copy of the model that computes in a dtype."""
    fast = optimize(copy.deepcopy(model), dtype=dtype)
    return Benchmark("optimized", dtype, synchronized(lambda: fast(images), model.device))


def synchronized(run: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return a function that calls `run` and waits for the device, because calls on a GPU are asynchronous."""
    synchronize = getattr(torch, device.type).synchronize

    def run_and_wait() -> Any:
        answer = run()
        synchronize()
        return answer

    return run_and_wait


def memory_of(run: Callable[[], Any], device: torch.device) -> int:
    """Return the peak GPU memory that a call allocates in bytes, or 0 if torch does not track memory on this device."""
    counts = getattr(torch, device.type)
    if not hasattr(counts, "max_memory_allocated"):
        return 0
    counts.reset_peak_memory_stats(device)
    before = counts.memory_allocated(device)
    run()
    return int(counts.max_memory_allocated(device) - before)


def products(config: ViTConfig, images: Tensor) -> Benchmark:
    """Return a benchmark of only the matrix products of a forward pass, a lower limit for the time of the model.

    Large batches are multiplied in slices, because `optimize` computes them in slices, too.
    """
    dtype, tokens, heads = images.dtype, config.tokens, config.heads
    batch = math.ceil(len(images) / math.ceil(len(images) / SLICE))
    repeats = config.depth * math.ceil(len(images) / batch)
    layers = []  # pairs of layer and input, for one block
    for layer in costs.layers(config):
        if layer.name.startswith("blocks.") and layer.macs and layer.weight:
            n, k = layer.weight
            linear = fastest_linear(dtype)(torch.randn(n, k), torch.randn(n), dtype)
            layers.append((linear, torch.randn(batch * tokens, k, dtype=dtype)))
    q, k, v = torch.randn(3, heads, tokens, config.head_width, dtype=dtype)
    scores, out = torch.empty(heads, tokens, tokens, dtype=dtype), torch.empty_like(q)
    context: AbstractContextManager[None] = nullcontext()
    if dtype is torch.float32 and tokens >= LONG and float32_products_are_exact():
        context = float32_products

    def run() -> None:
        with context:
            for _ in range(repeats):
                for linear, x in layers:
                    linear(x)
                for _ in range(batch):
                    torch.bmm(q, k.mT, out=scores)
                    torch.bmm(scores, v, out=out)

    return Benchmark("products", dtype, run)


def difference(answer: Any, expected: Tensor) -> float:
    """Return the largest difference from the expected logits, relative to the largest expected logit."""
    answer = torch.as_tensor(answer).float()
    return float((answer - expected).abs().max() / expected.abs().max())


def random_model(config: ViTConfig) -> ViT:
    """Return a model with random weights that are the same in each call. The weights of the head are not zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViT(config).eval()
        nn.init.normal_(cast(nn.Linear, model.head).weight, std=0.02)
    return model.requires_grad_(False)


def machine(device: torch.device = CPU) -> dict[str, Any]:
    """Return a description of this machine: the CPU, its load, the versions, the date, and the GPU if one is used."""
    core = first_core()
    described: dict[str, Any] = {
        "cpu": core.get("model name") or platform.processor() or platform.machine(),
        "instructions": [name for name in INSTRUCTIONS if name in core.get("flags", "").split()],
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
