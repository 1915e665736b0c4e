"""A script that cannot load a model ends with one short traceback, whose last line says what is wrong."""

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import TINY, tiny_model
from safetensors.torch import save_file

from vitlite import ViTConfig, VitliteError, create, load
from vitlite.checkpoints.convert import convert

LONGEST = 30  # lines
LABELS = ["a\x1b[31m", "b" * 5000, "c"]


def index(names: object) -> str:
    return json.dumps({"weight_map": names})


def saved(folder: Path, **changes: Any) -> Path:
    """A model's folder with other fields of vitlite's own in its config.json."""
    tiny_model().save(folder)
    content = json.loads((folder / "config.json").read_text())
    content["vitlite"] |= changes
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


FAILURES: dict[str, Callable[[Path], object]] = {
    "nothing there": lambda here: load(here / "none"),
    "nothing said": lambda here: load(""),
    "no path": lambda here: load(5),  # type: ignore[arg-type]
    "an empty folder": lambda here: load(here),
    "garbage": lambda here: load(written(here / "a.safetensors", b"garbage" * 9)),
    "cut short": lambda here: load(written(here / "a.safetensors", b"\x10" + bytes(7) + b"{}")),
    "no file of numpy": lambda here: load(written(here / "a.npz", b"PK\3\4 and no more")),
    "a pickle": lambda here: load(written(here / "a.pth", b"")),
    "a pickle converted": lambda here: convert(written(here / "a.pth", b"x"), here / "out", "timm"),
    "another suffix": lambda here: load(written(here / "a.txt", b"")),
    "an index of nothing": lambda here: load(written(here / "a.index.json", index({}))),
    "an index elsewhere": lambda here: load(written(here / "a.index.json", index({"x": "../b.safetensors"}))),
    "an index of numbers": lambda here: load(written(here / "a.index.json", index({"x": 5}))),
    "an index of lists": lambda here: load(written(here / "a.index.json", index(["x"]))),
    "an index too deep": lambda here: load(written(here / "a.index.json", "[" * 100_000)),
    "an index that shouts": lambda here: load(written(here / "a.index.json", index({"x": "\x1b" * 10**5}))),
    "an index without shards": lambda here: load(written(here / "a.index.json", index({"x": "b.safetensors"}))),
    "labels that are long": lambda here: load(saved(here / "a", labels=LABELS)),
    "fields of a config": lambda here: load(saved(here / "a", config={"dim": "x"})),
    "a config of others": lambda here: load(saved(here / "a", config=ViTConfig(depth=3).to_dict())),
    "no JSON": lambda here: load(written(saved(here / "a") / "config.json", "{").parent),
    "another shape": lambda here: create("vit_nano_4", weights=saved(here / "a")),
    "an option": lambda here: load(saved(here / "a"), image_size=17),
    "an unknown option": lambda here: load(saved(here / "a"), img_size=17),  # type: ignore[call-arg]
    "a name": lambda here: create("vit_bass_16"),
    "no ViT": lambda here: load(save_file({"a": torch.ones(1)}, here / "a.safetensors") or here / "a.safetensors"),
    "what the tensors do not tell": lambda here: load(
        save_file(tiny_model().state_dict(), here / "a.safetensors") or here / "a.safetensors"
    ),
    "not finite": lambda here: load(
        save_file(tiny_model().state_dict() | {"norm.bias": torch.full((TINY.dim,), torch.nan)}, here / "a.safetensors")
        or here / "a.safetensors",
        config=TINY,
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_of_loading_is_one_short_traceback(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    here = tmp_path / "here"
    here.mkdir()
    with pytest.raises(VitliteError) as caught:
        FAILURES[kind](here)
    text = "".join(traceback.format_exception(caught.value))
    frames = [line for line in text.splitlines() if line.startswith("  File ")]
    assert text.count("Traceback") == 1, text
    assert len(frames) * 2 < LONGEST, text
    said = str(caught.value)
    assert len(said) < 3000
    assert said.replace("\n", "").isprintable()
