"""Any index of shards: the model that the shards hold, or one error that names it."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from attempts import CASES, Content, attempt, json_values, kept, spoilt, spoilt_bytes
from files_made import TINY, trained
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
STATE = dict(trained().state_dict())
NAMES = sorted(STATE)
SHARDS = {"a.safetensors": NAMES[::2], "b.safetensors": NAMES[1::2]}
GOOD = {
    "metadata": {"total_size": 12345},
    "weight_map": {name: shard for shard, names in SHARDS.items() for name in names},
}
OTHERS = [
    "missing.safetensors", "../a.safetensors", "/etc/passwd", "a.safetensors/", "./a.safetensors", "", ".", "..",
    "a\0b", "a" * 5000, "A.SAFETENSORS", "a.bin", INDEX, "c.npz", "~/a.safetensors",
    "\x1b[31m.safetensors", "c\\a.safetensors",
]  # fmt: skip
values = json_values | st.sampled_from([*SHARDS, *OTHERS])


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


def check(content: bytes) -> None:
    with kept(content, ".json"), TemporaryDirectory() as name:
        folder = Path(name, "model")
        folder.mkdir()
        for shard, names in SHARDS.items():
            save_file({each: STATE[each] for each in names}, folder / shard)
        save_file(STATE, folder.parent / "a.safetensors")  # which only a path would reach
        (folder / INDEX).write_bytes(content)
        model = attempt(folder, config=TINY)
        if model is not None:
            assert model.source.path == folder / INDEX
            assert all(torch.equal(tensor, STATE[name]) for name, tensor in model.state_dict().items())
            assert set(json.loads(content)["weight_map"].values()) == set(SHARDS)


@CASES
@given(spoilt(GOOD, values))
@example(GOOD)
@example({"weight_map": dict.fromkeys(NAMES, "model.safetensors.index.json")})
@example({"weight_map": {f"a{i}": f"{i}.safetensors" for i in range(100_000)}})
def test_any_index(index: Any) -> None:
    check(json.dumps(index).encode())


@st.composite
def damaged(draw: st.DrawFn) -> Content:
    return spoilt_bytes(draw, json.dumps(GOOD).encode())


@CASES
@given(damaged() | st.binary(max_size=100))
@example(b"[" * 100_000 + b"]" * 100_000)
@example(b'{"weight_map": ' + b"9" * 5000 + b"}")
@example(b'{"weight_map": {"a": "' + b"a" * 3_000_000 + b'"}}')
def test_any_bytes(content: bytes) -> None:
    check(content)
