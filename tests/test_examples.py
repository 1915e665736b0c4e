"""Every example runs and is short."""

import os
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import vitlite

ROOT = Path(__file__).parents[1]
WITH_LIGHTNING = ROOT / "examples" / "with_lightning.py"
SERVE = ROOT / "examples" / "serve.py"  # tests/test_serving.py
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {WITH_LIGHTNING, SERVE})
OUTPUT = {  # a line that each prints, and the files it writes
    "attention": ("head 2 looks most at patch (", ["attention.png", "rollout.png"]),
    "classify": ("examples/photos/chelsea.png\n", []),
    "demo": ("\n$ vitlite attention ", ["demo/attention.png"]),
    "embed_in_your_project": ("not read: {'examples/photos/missing.png': ", []),
    "features": ("patches: (3, 64, 192), of a grid of (8, 8)", []),
    "finetune": ("examples/photos/coffee.png: coffee", ["finetuned/model.safetensors", "finetuned/config.json"]),
}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the photos, where examples may write files; there is no network."""
    shutil.copytree(ROOT / "examples" / "photos", tmp_path / "examples" / "photos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # no server
    return tmp_path


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_runs(
    example: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 40
    monkeypatch.setattr(sys, "argv", [str(example)])
    state = torch.get_rng_state()
    try:
        runpy.run_path(str(example), run_name="__main__")
    finally:
        torch.set_rng_state(state)
    line, files = OUTPUT[example.stem]
    assert line in capsys.readouterr().out
    assert sorted(files) == sorted(
        str(path.relative_to(workplace))
        for path in workplace.rglob("*")
        if path.is_file() and path.relative_to(workplace).parts[0] not in ("examples", "cache")
    )
    if example.stem == "finetune":
        assert vitlite.load("finetuned").predict("examples/photos/chelsea.png", top=1)[0].label == "cat"


@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
def test_with_lightning(workplace: Path) -> None:
    paths = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    # Lightning imports torchvision, which not every torch can load without what peers does.
    code = f"import peers, runpy; runpy.run_path({str(WITH_LIGHTNING)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.stdout.endswith("coffee\n"), done.stderr
    assert vitlite.load("finetuned").predict("examples/photos/chelsea.png", top=1)[0].label == "cat"
