"""Each family with rotary positions is fine-tuned, and embedded with --fast, on the command line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run
from models import FAMILIES, tiny_model
from safetensors.torch import load_file
from tiny_run import stripes_in_folders

from vitlite.retrieval import open_vectors

ROTARY = {name: changes for name, changes in FAMILIES.items() if "rope" in changes}


@pytest.mark.parametrize("changes", ROTARY.values(), ids=ROTARY)
def test_train_and_embed_fast(run: Run, changes: dict[str, Any], tmp_path: Path) -> None:
    data = stripes_in_folders(tmp_path / "data")
    tiny_model(**changes).save(tmp_path / "model")
    words = ("--model", tmp_path / "model", "--epochs", 1, "--batch", 8, "--out", tmp_path / "run")
    assert run("train", data, *words)[0] == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "run/last"))
    unchanged = [name for name in after if name in before and torch.equal(before[name], after[name])]
    assert unchanged == []
    vectors = []
    for name, options in (("fast", ["--fast"]), ("eager", [])):
        words = ("--model", tmp_path / "run" / "best", *options, "--out", tmp_path / f"{name}.safetensors")
        assert run("embed", data, *words)[0] == 0
        vectors += open_vectors(tmp_path / f"{name}.safetensors").parts()
    torch.testing.assert_close(*vectors, rtol=1e-4, atol=1e-5)
