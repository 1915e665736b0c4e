"""--dtype int8: what it needs, and that its answers are nearly those of float32."""

import json
from pathlib import Path

import pytest
import torch
from commands import Run

from vitlite.speed.int8 import bytes_are_right


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
