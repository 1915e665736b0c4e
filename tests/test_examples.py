"""Every example runs, is short, and says what it should."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

import vitlite

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "attention": "head 2 looks most at patch (",
    "classify": "examples/photos/chelsea.png\n",
    "demo": "\n$ vitlite attention ",
    "embed_in_your_project": "not read: {'examples/photos/missing.png': ",
    "features": "patches: (3, 64, 192), of a grid of (8, 8)",
    "finetune": "examples/photos/coffee.png: coffee",
}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a checkout, where examples may leave files; without a network."""
    shutil.copytree(ROOT / "examples" / "photos", tmp_path / "examples" / "photos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    return tmp_path


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_is_short_and_runs(
    example: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 40
    monkeypatch.setattr(sys, "argv", [str(example)])
    state = torch.get_rng_state()
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        torch.set_rng_state(state)
    assert SAYS[example.stem] in capsys.readouterr().out


def test_what_they_leave(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attention", "demo", "finetune"):
        monkeypatch.setattr(sys, "argv", [name])
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    pictures = ("attention.png", "rollout.png", "demo/attention.png")
    assert all((workplace / name).stat().st_size > 10_000 for name in pictures)
    assert vitlite.load(workplace / "finetuned").predict("examples/photos/chelsea.png", top=1)[0].label == "cat"
