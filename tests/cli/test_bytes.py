"""--dtype int8: what it needs, and that its answers are nearly those of float32."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from commands import Run

from vitlite.cli import options
from vitlite.fast.int8 import bytes_are_right


@pytest.mark.skipif(not bytes_are_right(torch.float32), reason="no products of bytes on this CPU")
def test_answers_in_bytes_are_nearly_those_of_float32(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    words = ("classify", pictures / "a.png", "--format", "jsonl", "--model", model)
    bytes_of = ("--fast", "--dtype", "int8", "--calibrate", pictures)
    right, found = (run(*words, *more) for more in ((), bytes_of))
    [plain], [fast] = ([json.loads(line)["predictions"] for line in said.splitlines()] for _, said, _ in (right, found))
    assert found[0] == 0
    assert found[1] != right[1]
    assert [row["score"] for row in fast] == pytest.approx([row["score"] for row in plain], abs=0.02)
    assert run("embed", pictures / "a.png", "--model", model, "--out", tmp_path / "v.safetensors", *bytes_of)[0] == 0


@pytest.mark.parametrize(("there", "last"), [(1, 0), (32, 31), (40, 38), (100, 96)])
def test_pictures_to_calibrate_by_are_of_the_whole_folder(tmp_path: Path, there: int, last: int) -> None:
    """The first of them might be all of one class."""
    for number in range(there):
        (tmp_path / f"{number:03}.png").touch()
    asked = Namespace(calibrate=str(tmp_path), dtype="int8", fast=True)
    chosen = options._calibration_pictures(asked)
    assert chosen is not None
    numbers = [int(Path(path).stem) for path in chosen]
    assert (len(numbers), numbers[0], numbers[-1]) == (min(there, 32), 0, last)
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--dtype", "int8"], "--dtype int8 needs --fast"),
        (["--dtype", "int8", "--fast"], "--dtype int8 needs --calibrate FOLDER"),
        (["--fast", "--calibrate", "pictures"], "--calibrate belongs to --fast --dtype int8"),
        (["--dtype", "int8", "--fast", "--calibrate", "nowhere"], "No such file: nowhere"),
        (
            ["--dtype", "int8", "--fast", "--engine", "ray", "--out", "o", "--calibrate", "p"],
            "--dtype int8 belongs to --engine local",
        ),
    ],
)
def test_what_is_missing_is_said(run: Run, model: Path, pictures: Path, words: list[str], text: str) -> None:
    code, _, said = run("classify", pictures / "a.png", "--model", model, *words)
    assert code == 1
    assert text in said
