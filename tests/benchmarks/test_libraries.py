"""The comparison with other libraries: equal logits, and a table that says what was left out."""

import json
import math
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import creation
import growth
import libraries
import peer_models
import pytest
import speed_pages
import torch

from vitlite import ViT, ViTConfig, presets
from vitlite.errors import OptimizedError
from vitlite.fast.measure import machine

TINY = ViTConfig(image_size=32, patch_size=8, dim=48, depth=2, heads=4, mlp_dim=96, num_classes=7)
BENCHMARKS = Path(libraries.__file__).parent


def quick(out: Path, *words: str) -> int:
    return libraries.main(["--models", "tiny", "--batch", "2", "--rounds", "1", "--quick", "--out", str(out), *words])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "preset", lambda name: TINY)
    monkeypatch.setattr(libraries, "CELLS", [("tiny", 32, (1,))])
    monkeypatch.setattr(libraries, "creation", lambda: creation.creation(runs=1))
    monkeypatch.setattr(creation, "LIBRARIES", {name: creation.LIBRARIES[name] for name in ("one raw read", "vitlite")})
    monkeypatch.setattr(growth, "MODEL", TINY.replace(image_size=16))


def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quick(tmp_path, "--sizes", "32,40", "--peers", "timm") == 0
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
    plot = (tmp_path / "speed.svg").read_text()
    assert plot.startswith("<?xml")
    assert 'width="378pt"' in plot  # letters of 10 points can be read also where it is as wide as a phone
    assert {file.name for file in tmp_path.iterdir()} == {"speed.json", "speed_table.md", "speed.svg"}


def test_a_whole_run(tmp_path: Path) -> None:
    assert libraries.main(["--peers", "none", "--rounds", "1", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "speed.json").read_text())
    assert set(report["creation"]) == {"one raw read", "vitlite"}
    assert all(seconds > 0 for seconds, _, _ in report["creation"].values())
    assert "| vitlite | " in (tmp_path / "speed_table.md").read_text()
    assert set(report["growth"]) == {"batch", "depth", "tokens"}
    for points in report["growth"].values():
        assert [gmacs for _, gmacs, _ in points] == sorted(gmacs for _, gmacs, _ in points)


def test_it_is_written_into_the_docs_of_the_repository() -> None:
    assert libraries._parser().parse_args([]).out.samefile(BENCHMARKS.parent / "docs" / "lab_notes")


def test_what_cannot_be_measured_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(model: ViT, images: torch.Tensor) -> Any:
        raise ModuleNotFoundError("No module named 'openvino'", name="openvino")

    def refused(model: ViT, dtype: torch.dtype) -> ViT:
        raise OptimizedError("slower here")

    monkeypatch.setitem(peer_models.PEERS, "OpenVINO", absent)
    monkeypatch.setattr(libraries, "optimize", refused)
    assert quick(tmp_path, "--peers", "OpenVINO") == 0
    text = (tmp_path / "speed_table.md").read_text()
    assert "Left out: OpenVINO: not installed (openvino); optimized: slower here." in text


def test_other_logits_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peer_models.PEERS, "timm", lambda model, images: lambda: model(images) * 1.2)
    assert quick(tmp_path, "--peers", "timm") == 1
    assert "timm differs by 2.0e-01 of the largest logit" in capsys.readouterr().out
    monkeypatch.setitem(peer_models.PEERS, "timm", lambda model, images: lambda: model(images) * math.nan)
    assert quick(tmp_path, "--peers", "timm") == 1


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("--sizes x", 2, "argument --sizes: must be a positive integer, got 'x'"),
        ("--batch 1,0", 2, "argument --batch: must be a positive integer, got '0'"),
        ("--rounds 0", 2, "argument --rounds: must be a positive integer, got '0'"),
        ("--models vit_tiny_16,vit_tinny_16", 1, "There is no preset 'vit_tinny_16'. Did you mean vit_tiny_16"),
        ("--models vit_tiny_16 --sizes 224,225", 1, "image_size 225 is not a multiple of patch_size 16"),
        ("--peers tim", 1, "No peer 'tim'. Did you mean timm"),
        ("--out file", 1, "File exists: 'file'"),
    ],
)
def test_wrong_options_end_before_anything_is_measured(
    words: str,
    code: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(libraries, "preset", presets.preset)
    monkeypatch.setattr(libraries, "CELLS", [("vit_tiny_16", 224, (1,))])
    monkeypatch.setattr(libraries, "cell", lambda *_: pytest.fail("it was measured"))
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    if code == 2:
        with pytest.raises(SystemExit) as stop:
            libraries.main(words.split())
        assert stop.value.code == 2
    else:
        assert libraries.main(words.split()) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err.splitlines()[-1]


def test_a_missing_matplotlib_is_said_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(libraries, "cell", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        quick(tmp_path)


def test_a_machine_without_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"machine": machine(), "cells": [], "left_out": {}, "creation": {}}
    assert ", load " in speed_pages.table(report)
    monkeypatch.delattr(os, "getloadavg")  # as on Windows
    assert ", load " not in speed_pages.table(report | {"machine": machine()})


@pytest.mark.filterwarnings("ignore")  # of the libraries that are compared with
@pytest.mark.parametrize("script", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_every_script_finds_what_it_imports(script: str) -> None:
    if script in (packages := {"scaling": "ray", "litserve_timm": "litserve"}):
        pytest.importorskip(packages[script])
    runpy.run_path(str(BENCHMARKS / f"{script}.py"), run_name="imported")
