"""Benchmarks in turns, and the description of the machine."""

import os
from collections.abc import Callable

import pytest
import torch

from vitlite import ViTConfig
from vitlite.fast import measure as module
from vitlite.fast.measure import Benchmark, difference, eager, machine, optimized, products, random_model
from vitlite.kernels import PlainLinear, float32_products

TINY = ViTConfig(image_size=32, patch_size=8, dim=48, depth=2, heads=4, mlp_dim=96, num_classes=7)


class Clock:
    """A clock that stands still outside the measured calls."""

    now = 0.0
    calls = 0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def taking(self, *seconds: float) -> Callable[[], None]:
        """Return a call that takes these times, one after the other, and then always the last."""
        left = list(seconds)

        def run() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]
            self.calls += 1

        return run


def test_benchmarks_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    quick = Benchmark("quick", torch.float32, clock.taking(0.001, 0.005, 0.010))  # first calls do not count
    module.measure([quick], rounds=4)
    assert quick.best == pytest.approx(0.010)
    assert clock.calls == 1 + 4 * 3
    clock.calls = 0
    slow = Benchmark("slow", torch.float32, clock.taking(0.1))
    other = Benchmark("another dtype", torch.bfloat16, clock.taking(0.1))
    module.measure([Benchmark("quick", torch.float32, lambda: None), slow, other], rounds=10)
    assert clock.calls == (1 + 2 * 3) + (1 + 10 * 3)  # far behind, it rests; alone in its dtype, it does not
    clock.calls = 0
    module.measure([Benchmark("long", torch.float32, clock.taking(25.0))], rounds=10)
    assert clock.calls == 1 + 3


def test_a_model_is_left_as_it_is() -> None:
    model, images = random_model(TINY), torch.randn(2, 3, 32, 32)
    right = model(images)
    assert torch.equal(random_model(TINY)(images), right)
    narrow = eager(model, images, torch.bfloat16)
    assert narrow.run().dtype is torch.bfloat16
    assert difference(narrow.run(), right) < 0.1
    assert difference(optimized(model, images, torch.float32).run(), right) < 1e-5
    assert torch.equal(model(images), right)


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("changes", [{}, {"class_token": False, "pool": "mean"}])
def test_products_are_those_of_the_blocks(changes: dict, onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    class Counted(PlainLinear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((*x.shape, len(self._weight)))
            return super().__call__(x)

    monkeypatch.setattr(module, "fastest_linear", lambda dtype: Counted)
    monkeypatch.setattr(module, "LONG", 1)
    monkeypatch.setattr(module, "float32_products_are_exact", lambda: onednn and float32_products.matmul is not None)
    benchmark = products(TINY.replace(**changes), torch.randn(9, 3, 32, 32))
    benchmark.run()
    rows = 5 * (17 - bool(changes))  # tokens of nine images in two rounds
    assert seen == [(rows, 48, 144), (rows, 48, 48), (rows, 48, 96), (rows, 96, 48)] * TINY.depth * 2


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine()["cpu"]
    assert len(machine()["load"]) == 3
    core = {"model name": "Fast: 9000", "flags": "fpu avx2 amx_tile"}
    monkeypatch.setattr(module, "first_core", lambda: core)
    assert (machine()["cpu"], machine()["instructions"]) == ("Fast: 9000", ["avx2", "amx_tile"])
    monkeypatch.setattr(module, "first_core", dict)  # not on Linux
    assert machine()["instructions"] == []
    monkeypatch.delattr(os, "getloadavg")  # as on Windows
    assert "load" not in machine()
