"""The measurements: fair turns, equal logits, and a table that says what was left out."""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlite import ViT, ViTConfig, bench, config, peers
from vitlite.cli import main as cli
from vitlite.errors import MissingExtraError, OptimizedError

TINY = ViTConfig(image_size=32, patch_size=8, dim=48, depth=2, heads=4, mlp_dim=96, num_classes=7)


@pytest.mark.parametrize("name", ["timm", "torchvision", "transformers", "ONNX Runtime", "OpenVINO"])
@pytest.mark.filterwarnings("ignore")  # theirs
def test_a_peer_computes_the_same(name: str) -> None:
    if name == "OpenVINO":
        pytest.importorskip("openvino")
    model, images = bench.random_model(TINY), torch.randn(2, 3, 32, 32)
    assert bench._difference(peers.PEERS[name](model, images)(), model(images)) < 1e-5


def test_a_peer_with_weights_of_its_own() -> None:
    assert peers.vit_pytorch(bench.random_model(TINY), torch.randn(2, 3, 32, 32))().shape == (2, 7)


def test_torch_compile_gets_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, options: model)  # compiling takes a minute
    model, images = bench.random_model(TINY), torch.randn(2, 3, 32, 32)
    assert torch.equal(peers.torch_compile(model, images)(), model(images))


class Clock:
    """Time that passes only in the calls that are measured."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def taking(self, *seconds: float) -> Callable[[], None]:
        rest = list(seconds)

        def run() -> None:
            self.now += rest.pop(0) if len(rest) > 1 else rest[0]
            self.calls = getattr(self, "calls", 0) + 1

        return run


def test_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(bench, "time", clock)
    quick = bench.Contestant("quick", torch.float32, clock.taking(0.001, 0.005, 0.010))  # the warm ones do not count
    bench.measure([quick], rounds=4)
    assert quick.best == pytest.approx(0.010)
    assert clock.calls == 1 + 4 * 3
    clock.calls = 0
    slow = bench.Contestant("slow", torch.float32, clock.taking(0.1))
    other = bench.Contestant("another dtype", torch.bfloat16, clock.taking(0.1))
    bench.measure([bench.Contestant("quick", torch.float32, lambda: None), slow, other], rounds=10)
    assert clock.calls == (1 + 2 * 3) + (1 + 10 * 3)  # far behind, it rests; alone in its dtype, it does not
    clock.calls = 0
    bench.measure([bench.Contestant("long", torch.float32, clock.taking(25.0))], rounds=10)
    assert clock.calls == 1 + 3


def quick(out: Path, *words: str) -> int:
    return cli.main(
        ["--debug", "bench", "--models", "tiny", "--batch", "2", "--rounds", "1", "--out", str(out), *words]
    )


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "preset", lambda name: TINY)
    monkeypatch.setattr(bench, "GROWING", TINY.replace(image_size=16))
    monkeypatch.setattr(bench, "CREATIONS", 1)
    monkeypatch.setattr(bench, "CELLS", [("tiny", 32, (1,))])
    monkeypatch.setattr(bench, "CREATION", {name: bench.CREATION[name] for name in ("one raw read", "vitlite")})


def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quick(tmp_path, "--sizes", "32,40", "--peers", "timm", "--quick") == 0
    report = json.loads((tmp_path / "speed.json").read_text())
    assert [(row["size"], row["batch"], row["dtype"]) for row in report["cells"]] == [
        (size, 2, dtype) for size in (32, 40) for dtype in ("float32", "bfloat16")
    ]
    row = report["cells"][0]
    assert set(row["seconds"]) == {"vitlite", "timm", "optimized", "all tokens", "products"}
    assert set(row["differences"]) == {"vitlite", "timm", "optimized"}
    assert max(row["differences"].values()) < 1e-5
    text = (tmp_path / "speed_table.md").read_text()
    assert f"{row['seconds']['timm'] / row['seconds']['optimized']:.2f}" in text
    assert "timm" in capsys.readouterr().out
    assert (tmp_path / "speed.svg").read_text().startswith("<?xml")


def test_a_whole_run(tmp_path: Path) -> None:
    assert cli.main(["--debug", "bench", "--peers", "none", "--rounds", "1", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "speed.json").read_text())
    assert set(report["creation"]) == {"one raw read", "vitlite"}
    assert all(seconds > 0 for seconds, _, _ in report["creation"].values())
    assert set(report["growth"]) == {"batch", "depth", "tokens"}
    for points in report["growth"].values():
        assert [macs for _, macs, _ in points] == sorted(macs for _, macs, _ in points)


def test_what_cannot_be_measured_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(model: ViT, images: torch.Tensor) -> Any:
        raise ModuleNotFoundError("No module named 'openvino'", name="openvino")

    def refused(model: ViT, dtype: torch.dtype) -> ViT:
        raise OptimizedError("slower here")

    monkeypatch.setitem(peers.PEERS, "OpenVINO", absent)
    monkeypatch.setattr(bench, "optimize", refused)
    assert quick(tmp_path, "--peers", "OpenVINO", "--quick") == 0
    text = (tmp_path / "speed_table.md").read_text()
    assert "Left out: OpenVINO: not installed (openvino); optimized: slower here." in text


def test_other_logits_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peers.PEERS, "timm", lambda model, images: lambda: model(images) * 1.2)
    assert quick(tmp_path, "--peers", "timm", "--quick") == 1
    assert "timm differs by 2.0e-01 of the largest logit" in capsys.readouterr().out
    monkeypatch.setitem(peers.PEERS, "timm", lambda model, images: lambda: model(images) * math.nan)
    assert quick(tmp_path, "--peers", "timm", "--quick") == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--sizes x", 2, "argument --sizes: a whole number of at least 1, not 'x'"),
        ("--batch 1,0", 2, "argument --batch: a whole number of at least 1, not '0'"),
        ("--rounds 0", 2, "argument --rounds: a whole number of at least 1, not '0'"),
        ("--models vit_tiny_16,vit_tinny_16", 1, "No preset 'vit_tinny_16'. Did you mean vit_tiny_16"),
        ("--models vit_tiny_16 --sizes 224,225", 1, "--size 225 does not divide into patches of 16"),
        ("--peers tim", 1, "No peer 'tim'. Did you mean timm"),
        ("--out file", 1, "File exists: 'file'"),
    ],
)
def test_wrong_options_are_one_line_before_anything_is_measured(
    words: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "preset", config.preset)
    monkeypatch.setattr(bench, "CELLS", [("vit_tiny_16", 224, (1,))])
    monkeypatch.setattr(bench, "cell", lambda *_: pytest.fail("it was measured"))
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert cli.main(["bench", *words.split()]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_a_missing_matplotlib_is_said_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "cell", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(MissingExtraError, match=r"vitlite\[plot\]"):
        bench.run(bench.Namespace(models=None, peers="none", out=str(tmp_path)))


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.machine()["cpu"]
    monkeypatch.setattr(bench, "_lines", lambda path: [])  # where there is no /proc
    assert bench.machine()["instructions"] == []
    assert len(bench.machine()["load"]) == 3
    monkeypatch.delattr(os, "getloadavg")  # as on Windows
    report = {"machine": bench.machine(), "cells": [], "left_out": {}, "creation": {}}
    assert "load" not in bench.table(report)
