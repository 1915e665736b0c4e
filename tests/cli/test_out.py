"""What is there already stays: a file that is named is replaced, and nothing else."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from closed import refuse_new_files
from commands import Run
from PIL import Image

from vitlite import load
from vitlite.errors import ExportError
from vitlite.export import export


def test_the_photo_itself_is_not_drawn_over(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    photo, link = tmp_path / "a.png", tmp_path / "link.png"
    shutil.copy(pictures / "a.png", photo)
    link.symlink_to(photo)
    before = photo.read_bytes()
    code, _, err = run("attention", photo, "--model", model, "--out", photo)
    assert (code, err) == (1, f"vitlite: error: --out {photo} is the photo itself. Name another file.\n")
    code, _, err = run("attention", photo, "--model", model, "--out", link)
    assert (code, f"it is a link to {photo}" in err) == (1, True)
    assert photo.read_bytes() == before


COMMANDS = ["attention", "distances", "positions", "filters", "bench", "embed", "export", "convert"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["pipe", "link", "link to nowhere"])
def test_what_is_no_file_is_not_replaced(
    run: Run, model: Path, pictures: Path, tmp_path: Path, command: str, kind: str
) -> None:
    """A pipe, as a device would be; or a link, since what it leads to would stay as it is."""
    here = tmp_path / "here"
    here.mkdir()
    there = tmp_path / "there"
    if kind != "link to nowhere":
        there.write_text("mine")
    words = {
        "attention": ("attention", pictures / "a.png", "--model", model, "--out", here / "pipe.png"),
        "distances": ("distances", pictures, "--model", model, "--out", here / "pipe.png"),
        "positions": ("positions", model, "--out", here / "pipe.png"),
        "filters": ("filters", model, "--out", here / "pipe.png"),
        "bench": ("bench", "--quick", "--out", here / "pipe.json"),
        "embed": ("embed", pictures, "--model", model, "--out", here / "pipe.npz"),
        "export": ("export", model, "--to", "torch", "--out", here / "pipe.pt2"),
        "convert": ("convert", model, "--to", "timm", here / "pipe.safetensors"),
    }[command]
    pipe = Path(words[-1])
    if kind == "pipe":
        os.mkfifo(pipe)
    else:
        pipe.symlink_to(there)
    code, out, err = run(*words)
    assert (code, out) == (1, "")
    assert str(pipe) in err
    assert pipe.is_fifo() if kind == "pipe" else pipe.is_symlink()
    assert there.exists() == (kind != "link to nowhere")
    assert kind == "link to nowhere" or there.read_text() == "mine"
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


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_read_is_not_written_over(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    """By whatever name: a folder's weights, a link, or a way there over another folder."""
    mine, data = tmp_path / "mine", tmp_path / "data"
    shutil.copytree(model, mine)
    for split in ("train", "val"):
        for name in ("one", "two"):
            shutil.copytree(pictures, data / split / name)
    os.link(mine / "model.safetensors", tmp_path / "link.safetensors")
    (tmp_path / "run/last").parent.mkdir()
    shutil.copytree(model, tmp_path / "run/last")
    weights = mine / "model.safetensors"
    train = ("train", data, "--epochs", 1, "--size", 16)
    before = everything(tmp_path)
    for words, out, said in (
        (("embed", pictures, "--model", mine), weights, "is to be read, too. Name another file."),
        (("embed", pictures, "--model", weights), tmp_path / "link.safetensors", "is to be read, too."),
        (
            ("embed", pictures, "--model", "vit_nano_4", "--weights", weights),
            mine / "../mine/model.safetensors",
            "read",
        ),
        (("embed", pictures / "a.png", weights, "--model", "vit_nano_4"), weights, "is to be read, too."),
        ((*train, "--model", mine), mine, "would write over the model to begin with"),
        ((*train, "--model", tmp_path / "run/last"), tmp_path / "run", "would write over the model to begin with"),
        ((*train, "--model", "vit_nano_4"), data, "is in the data"),
        ((*train, "--model", "vit_nano_4"), data / "train", "is in the data"),
        (("eval", data, "--model", mine), data / "val/one", "is in the data"),
        (("export", weights, "--to", "torch"), weights, "the name must end in .pt2"),
    ):
        code, _, err = run(*words, "--out", out)
        assert (code, said in err) == (1, True), (words, err)
        assert everything(tmp_path) == before
    code, _, err = run("convert", mine, weights, "--to", "timm")
    assert (code, "is to be read and to be written" in err) == (1, True)
    assert everything(tmp_path) == before
    assert run("embed", pictures, "--model", mine, "--out", mine / "vectors.npz")[0] == 0
    assert run("embed", pictures, "--model", mine, "--out", mine / "vectors.npz")[0] == 0


def test_what_links_in_the_data_lead_to_is_in_the_data(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    """As it is when it is read: curves.png would be a class the next time, and confusion.png a picture."""
    real, data, owls = tmp_path / "real", tmp_path / "data", tmp_path / "owls"
    for folder in (real / "one", real / "two/deep", data / "val/one", data / "val/two", owls):
        shutil.copytree(pictures, folder)
    (data / "train").symlink_to(real)
    (tmp_path / "labelled").mkdir()
    (tmp_path / "labelled/one").symlink_to(pictures)
    (tmp_path / "labelled/two").symlink_to(owls)
    before = everything(tmp_path)
    train = ("train", data, "--epochs", 1, "--size", 16, "--model", "vit_nano_4")
    for words, out, within in (
        (train, real / "run", data / "train"),
        (train, real / "two/deep/run", data / "train"),
        (("eval", tmp_path / "labelled", "--model", model), owls / "ev", tmp_path / "labelled/two"),
        (("probe", data, "--model", model), real / "two/few.png", data / "train"),
        (("distances", tmp_path / "labelled", "--model", model), owls / "d.png", tmp_path / "labelled/two"),
    ):
        code, _, err = run(*words, "--out", out)
        assert code == 1
        assert err.endswith(f"vitlite: error: --out {out} is in the data, {within}. Name another folder.\n")
        assert everything(tmp_path) == before
    assert run(*train, "--out", tmp_path / "run")[0] == 0


def test_a_drawing_of_a_folder_is_no_picture_in_it(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    vectors, folder = tmp_path / "vectors.safetensors", tmp_path / "pictures"
    shutil.copytree(pictures, folder)
    (folder / ".hidden").mkdir()
    assert run("embed", folder, "--model", model, "--out", vectors)[0] == 0
    for words in (("distances", folder, "--model", model), ("search", vectors, folder, "--model", model)):
        for out in (folder / "new.png", folder / "inner/new.png", folder / ".hidden/new.png"):
            code, _, err = run(*words, "--out", out)
            assert (code, f"--out {out} is in the data, {folder}. Name another folder." in err) == (1, True)
            assert not out.exists()
    assert run("distances", folder / "a.png", "--model", model, "--out", folder / "new.png")[0] == 0


def test_an_exported_file_does_not_take_the_place_of_the_weights(model: Path, tmp_path: Path) -> None:
    shutil.copy(model / "model.safetensors", tmp_path)
    shutil.copy(model / "config.json", tmp_path)
    weights = tmp_path / "model.safetensors"
    with pytest.raises(ExportError, match="is the file that this model was loaded from"):
        export(load(tmp_path), weights, to="torch")
    assert weights.read_bytes() == (model / "model.safetensors").read_bytes()


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


def writing(command: str, out: Path, model: Path, pictures: Path) -> tuple[object, ...]:
    """A command line that writes, and where."""
    words = {
        "attention": (pictures / "a.png", "--model", model, "--out", out.with_suffix(".png")),
        "positions": (model, "--out", out.with_suffix(".png")),
        "bench": ("--quick", "--out", out.with_suffix(".json")),
        "embed": (pictures, "--model", model, "--out", out.with_suffix(".npz")),
        "export": (model, "--to", "torch", "--out", out.with_suffix(".pt2")),
        "convert": (model, out.with_suffix(".safetensors"), "--to", "timm"),
        "convert to a folder": (model, out, "--to", "timm"),
        "train": (pictures, "--model", model, "--out", out),
        "eval": (pictures, "--model", model, "--out", out),
    }[command]
    return command.partition(" ")[0], *words


WRITING = ["attention", "positions", "bench", "embed", "export", "convert", "convert to a folder", "train", "eval"]


def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "vitlite.cli.options.create_or_load",
        "vitlite.checkpoints.convert.convert",
        "vitlite.cli.bench._measure",
    ):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("work was done"))


@pytest.mark.parametrize("command", WRITING)
def test_a_folder_that_cannot_be_written_is_said_before_any_work(
    run: Run, model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    no_work(monkeypatch)
    refuse_new_files(monkeypatch, closed)
    code, out, err = run(*writing(command, closed / "new", model, pictures))
    assert (code, out) == (1, "")
    assert f"no file can be made in the folder {closed} (Permission denied). Name a" in err
    assert "Errno" not in err
    assert os.listdir(closed) == []


@pytest.mark.parametrize("command", ["attention", "positions", "bench", "embed", "export", "convert"])
def test_a_name_that_is_too_long_to_be_begun_is_said_before_any_work(
    run: Run, model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    no_work(monkeypatch)
    code, out, err = run(*writing(command, here / ("x" * 236), model, pictures))
    assert (code, out) == (1, "")
    assert "its name is too long: it is begun under one with 22 letters more. Name a" in err
    assert os.listdir(here) == []


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("ending", [".lock", ".partial"])
def test_what_stands_where_a_journal_or_its_lock_is_to_be(
    run: Run, model: Path, pictures: Path, tmp_path: Path, make: Callable[[Path], None], ending: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    make(here / f"a.npz{ending}")
    code, _, err = run("embed", pictures, "--model", model, "--out", here / "a.npz")
    assert code == 1
    assert f"a.npz{ending} is no file, and stands where one is to be written. Move it away, or name another" in err
    assert os.listdir(here) == [f"a.npz{ending}"]


@pytest.mark.parametrize("ending", [".lock", ".partial"])
def test_a_journal_or_a_lock_that_cannot_be_opened(
    run: Run, model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    (tmp_path / "here").mkdir()
    refuse_new_files(monkeypatch, tmp_path / "here", f"a.npz{ending}")
    code, _, err = run("embed", pictures, "--model", model, "--out", tmp_path / "here/a.npz")
    assert code == 1
    assert f"a.npz{ending} cannot be used: Permission denied. Name another file, or see to it that it can." in err
    assert "Errno" not in err
    assert os.listdir(tmp_path / "here") == []
