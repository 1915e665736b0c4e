"""`vitlite bench`: what is fastest on this machine."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from vitlite import ViT, ViTConfig, presets
from vitlite.cli import bench as command
from vitlite.cli import main as cli
from vitlite.fast import bench
from vitlite.fast.bench import Timing, advice
from vitlite.fast.measure import Benchmark, random_model

TINY = ViTConfig(image_size=32, patch_size=8, dim=48, depth=2, heads=4, mlp_dim=96, num_classes=7)
ROW = r"tiny +32 +2 +{dtype} +[\d.]+ +{optimized} +[\d.]+ +[\d.]+ +[\d.]+"


def run(*words: str) -> int:
    fixed = ("--models", "tiny", "--sizes", "32", "--batch", "2", "--rounds", "1")
    return cli.main(["--debug", "bench", *fixed, *words])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "preset", lambda name: TINY)
    monkeypatch.chdir(tmp_path)


def test_a_table_and_what_to_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--sizes", "32,40") == 0
    out = capsys.readouterr().out
    for dtype in ("float32", "bfloat16"):
        assert re.search(ROW.format(dtype=dtype, optimized=r"[\d.]+"), out)
    assert max(map(len, out.split("\n\n")[1].splitlines())) <= 80
    assert re.search(r"^tiny at 32 px, batch 2: use (the eager model|vitlite\.)", out, re.MULTILINE)
    assert re.search(r"^  packed linear layers in bfloat16, by oneDNN: (yes|no)$", out, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_figures_are_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert run("--out", str(out)) == 0
    report = json.loads(out.read_text())
    assert report["machine"]["torch"] == torch.__version__
    assert [(row["model"], row["size"], row["batch"], row["dtype"]) for row in report["timings"]] == [
        ("tiny", 32, 2, "float32"),
        ("tiny", 32, 2, "bfloat16"),
    ]
    for row in report["timings"]:
        assert set(row["seconds"]) >= {"eager", "products"}
        assert all(seconds > 0 for seconds in row["seconds"].values())
    assert report["timings"][0]["differences"]["eager"] == 0
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("words", "models", "rounds"),
    [
        ([], ["vit_tiny_16", "vit_small_16", "vit_base_16", "vit_large_16"], 10),
        (["--quick"], ["vit_base_16"], 3),
        (["--quick", "--models", "vit_small_8", "--rounds", "4"], ["vit_small_8"], 4),
        (["--models", "vit_small_8,vit_tiny_16"], ["vit_small_8", "vit_tiny_16"], 10),
    ],
)
def test_models_and_rounds(
    words: list[str],
    models: list[str],
    rounds: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured: list[tuple[str, int]] = []

    def time_model(model: ViT, name: str, batch: int, rounds: int) -> list[Timing]:
        measured.append((name, rounds))
        return timings(1.0, 1.0)

    monkeypatch.setattr(command, "preset", lambda name: presets.preset(name).replace(depth=1))
    monkeypatch.setattr(command, "time_model", time_model)
    monkeypatch.setattr(command, "random_model", lambda config: ViT(TINY))
    assert cli.main(["bench", *words]) == 0
    assert list(dict.fromkeys(name for name, _ in measured)) == models
    assert {count for _, count in measured} == {rounds}


def test_an_autocast_around_does_not_make_bfloat16_of_float32() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        measured = bench.time_model(random_model(TINY), "tiny", batch=2, rounds=1)
    assert not [timing for timing in measured if timing.wrong()]


@pytest.mark.parametrize(("factor", "text"), [(1.2, "2.0e-01"), (math.nan, "nan")])
def test_other_logits_fail_the_run(
    factor: float, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(model: ViT, images: torch.Tensor, dtype: torch.dtype) -> Benchmark:
        return Benchmark("optimized", dtype, lambda: model(images) * factor)

    monkeypatch.setattr(bench, "optimized", wrong)
    assert run() == 1
    expected = f"Wrong: tiny at 32 px, batch 2, optimized in float32 differs by {text} of the largest logit"
    assert expected in capsys.readouterr().out


def test_a_busy_machine_is_noted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    described = {"cpu": "Fast 9000", "cores": 2, "threads": 2, "torch": "2.13.0"}
    for load, more in (({"load": [13.6, 0, 0]}, "; load 13.6: other programs are running"), ({}, "\n")):
        monkeypatch.setattr(command, "machine", lambda device, load=load: described | load)
        assert run() == 0
        assert capsys.readouterr().out.startswith(f"Fast 9000, 2 cores, 2 threads, torch 2.13.0{more}")


def timings(*seconds: float, batch: int = 1, difference: float = 0.01) -> list[Timing]:
    """Timings of an eager and an optimized model in float32, then in bfloat16 if there are more."""
    found = []
    for dtype, created, optimized in zip(("float32", "bfloat16"), seconds[::2], seconds[1::2], strict=False):
        measured = {"eager": created, "optimized": optimized, "products": 0.1}
        rounding = difference if dtype == "bfloat16" else 0.0
        found.append(Timing("vit", 224, batch, dtype, measured, {"eager": 0.0, "optimized": rounding}))
    return found


OPTIMIZED = "use vitlite.optimize(model), on the command line --fast; 2.0 times as fast as eager float32."
NARROW = "use vitlite.optimize(model, dtype=torch.bfloat16), on the command line --fast --dtype bfloat16; 4.0 times"
ROUNDING = "In bfloat16, logits differ from float32 by up to 1.0% of the largest logit."


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((4.0, 2.0, 2.5, 1.0), [NARROW, ROUNDING]),
        ((4.0, 2.0, 2.5, 1.95), [OPTIMIZED]),  # rounding gains too little
        ((4.0, 2.0), [OPTIMIZED]),
        ((2.0, 1.95, 2.5, 1.99), ["use the eager model; no other way is more than 5% faster."]),
    ],
)
def test_the_fastest_way_is_advised(seconds: tuple[float, ...], expected: list[str]) -> None:
    for sentence, part in zip(advice(timings(*seconds)), expected, strict=True):
        assert part in sentence


def test_advice_for_each_batch() -> None:
    first, second = advice([*timings(4.0, 2.0), *timings(4.0, 4.0, batch=8)])
    assert first == f"vit at 224 px, batch 1: {OPTIMIZED}"
    assert second.startswith("vit at 224 px, batch 8: use the eager model")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("--sizes x", 2, "argument --sizes: must be a positive integer, got 'x'"),
        ("--batch 1,0", 2, "argument --batch: must be a positive integer, got '0'"),
        ("--rounds 0", 2, "argument --rounds: must be a positive integer, got '0'"),
        ("--models vit_tiny_16,vit_tinny_16", 1, "There is no preset 'vit_tinny_16'. Did you mean vit_tiny_16"),
        ("--models vit_tiny_16 --sizes 224,225", 1, "image_size 225 is not a multiple of patch_size 16"),
        ("--device cuda:99", 1, "Cannot use the device 'cuda:99'"),
        ("--peers timm", 2, "unrecognized arguments: --peers timm"),
        (
            "--out .",
            1,
            "Cannot write the results to .. Choose a file in",
        ),
        ("--sizes 384", 1, "--sizes and --batch need --models"),
        ("--quick --batch 2", 1, "--sizes and --batch need --models"),
        ("--out none/f.json", 1, "Cannot write the results to none/f.json. Choose a file in"),
    ],
)
def test_wrong_options_are_errors_before_anything_is_measured(
    words: str, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "preset", presets.preset)
    monkeypatch.setattr(command, "time_model", lambda *_: pytest.fail("it was measured"))
    assert cli.main(["bench", *words.split()]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert err.count("\n") == 1
