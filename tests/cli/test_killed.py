"""embed and train, killed at many moments: what is there is whole, and the same command ends as if nothing had been."""

import json
from pathlib import Path

import pytest
import torch
from kills import program
from PIL import Image
from tiny_run import stripes_in_folders

COMMAND = """
import json, os, shutil, sys
from pathlib import Path
from kills import kills, small_files
from vitlite.cli.main import main

root, words = Path(sys.argv[1]), sys.argv[2:]
sys.stdout = open(os.devnull, "w")
out = root / "out"

def work():
    code = main([*words, "--out", str(target)])
    if code:
        raise SystemExit(code)
"""

EMBED = """
target = out / "vectors.npz"
out.mkdir()
work()
whole = target.read_bytes()
steps, old, new = 0, b"what was here before", 0
target.write_bytes(old)
for step in kills(work):
    assert target.read_bytes() in (old, whole)
    new += target.read_bytes() == whole
    work()
    assert target.read_bytes() == whole
    assert os.listdir(out) == [target.name], os.listdir(out)
    target.write_bytes(old)
    steps = step
print(json.dumps([steps, new]), file=sys.__stdout__)
"""

FULL = """
sys.stderr = sys.__stdout__
target = out / "vectors.npz"
out.mkdir()
target.write_bytes(b"old")
for size in small_files(work, [0, 100, 700]):
    assert target.read_bytes() == b"old"
    assert set(os.listdir(out)) <= {target.name, target.name + ".partial"}, os.listdir(out)
work()
assert os.listdir(out) == [target.name]
"""

TRAIN = """
from vitlite import load

def content(folder):
    files = [path for path in folder.rglob("*") if path.name not in ("log.jsonl", "curves.png", "state.safetensors")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}

target = root / "whole"
work()
whole, target = content(target), out
steps, loaded = 0, 0
for step in kills(work, every=int(os.environ["EVERY"])):
    for name in ("last", "best"):
        if (out / name / "model.safetensors").exists():
            load(out / name)
            loaded += 1
    work()
    assert content(out) == whole, (step, set(content(out)) ^ set(whole))
    shutil.rmtree(out)
    steps = step
print(json.dumps([steps, loaded]), file=sys.__stdout__)
"""


@pytest.fixture
def many(tmp_path: Path) -> Path:
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(6):
        pixels = torch.randint(0, 256, (20, 20, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
        Image.fromarray(pixels.numpy()).save(folder / f"{i}.bmp")
    return folder


@pytest.mark.usefixtures("uncovered")
def test_embed_killed_at_any_step(model: Path, many: Path, tmp_path: Path) -> None:
    said = program(COMMAND + EMBED, tmp_path, "embed", many, "--model", model, "--batch", 2)
    steps, new = json.loads(said)
    assert steps > 5
    assert new > 1


@pytest.mark.usefixtures("uncovered")
def test_embed_on_a_full_disk(model: Path, many: Path, tmp_path: Path) -> None:
    said = program(COMMAND + FULL, tmp_path, "embed", many, "--model", model, "--batch", 2)
    partial = tmp_path / "out/vectors.npz.partial"
    assert said.count(f"vitlite: error: Cannot write to {partial}: File too large.") == 3


@pytest.mark.usefixtures("uncovered")
def test_train_killed_at_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERY", "29")
    data = stripes_in_folders(tmp_path / "data")
    words = "--model vit_nano_4 --weights none --size 16 --epochs 2 --batch 12 --save-every 0 --dtype float32"
    steps, loaded = json.loads(program(COMMAND + TRAIN, tmp_path, "train", data, *words.split()))
    assert steps > 50
    assert loaded > 1
