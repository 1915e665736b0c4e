"""What is there already stays: a file that is named is replaced, and nothing else."""

import os
import shutil
from pathlib import Path

import pytest
from commands import Run
from PIL import Image


def test_the_photo_itself_is_not_drawn_over(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    photo, link = tmp_path / "a.png", tmp_path / "link.png"
    shutil.copy(pictures / "a.png", photo)
    link.symlink_to(photo)
    before = photo.read_bytes()
    for out in (photo, link):
        code, _, err = run("attention", photo, "--model", model, "--out", out)
        assert (code, err) == (1, f"vitlite: error: --out {out} is the photo itself. Name another file.\n")
    assert photo.read_bytes() == before


@pytest.mark.parametrize("command", ["attention", "positions", "bench", "embed", "export"])
def test_a_pipe_is_not_replaced(run: Run, model: Path, pictures: Path, tmp_path: Path, command: str) -> None:
    """As a device would be."""
    here = tmp_path / "here"
    here.mkdir()
    words = {
        "attention": ("attention", pictures / "a.png", "--model", model, "--out", here / "pipe.png"),
        "positions": ("positions", model, "--out", here / "pipe.png"),
        "bench": ("bench", "--quick", "--out", here / "pipe.json"),
        "embed": ("embed", pictures, "--model", model, "--out", here / "pipe.npz"),
        "export": ("export", model, "--to", "torch", "--out", here / "pipe.pt2"),
    }[command]
    pipe = Path(words[-1])
    os.mkfifo(pipe)
    code, out, err = run(*words)
    assert (code, out) == (1, "")
    assert str(pipe) in err
    assert pipe.is_fifo()
    assert os.listdir(here) == [pipe.name]


def test_convert_keeps_what_is_there(run: Run, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("mine")
    code, _, err = run("convert", model, folder, "--to", "transformers")
    assert (code, err) == (
        1, f"vitlite: error: The folder {folder} is not empty, and what is in it stays. Name one that is new.\n"
    )  # fmt: skip
    assert {file.name: file.read_text() for file in folder.iterdir()} == {"config.json": "mine"}
    (folder / "config.json").unlink()
    assert run("convert", model, folder, "--to", "transformers")[0] == 0
    weights = tmp_path / "weights.safetensors"
    shutil.copy(model / "model.safetensors", weights)
    before = weights.read_bytes()
    code, _, err = run("convert", weights, weights, "--to", "timm")
    assert (code, err) == (1, f"vitlite: error: {weights} is to be read and to be written. Name another file.\n")
    assert weights.read_bytes() == before


def test_a_lock_of_somebody_else_stays(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "poetry.npz.lock").write_text("[[package]]")
    code, _, err = run("embed", pictures, "--model", model, "--out", here / "poetry.npz")
    assert code == 1
    assert "Is no lock of vitlite's; move it away" in err
    assert {file.name: file.read_text() for file in here.iterdir()} == {"poetry.npz.lock": "[[package]]"}


def test_a_named_picture_is_replaced(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "map.png").write_text("old")
    assert run("positions", model, "--out", tmp_path / "map.png")[0] == 0
    with Image.open(tmp_path / "map.png") as picture:
        assert picture.width > 0
