"""`vitlite eval`: what it prints and writes. `measure` is tested with training."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from models import small_model
from tiny_run import new_model, stripes_in_folders
from unwritable import refuse_new_files

from vitlite.cli import eval as eval_command
from vitlite.cli.main import main
from vitlite.plots import draw_confusion
from vitlite.training.split import write_split

PHOTOS = Path(__file__).parents[2] / "examples" / "photos"
NANO = ("--model", "vit_nano_4.cifar10")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two of CIFAR-10's ten classes, with an image each."""
    for name, photo in (("cat", "chelsea.png"), ("horse", "rocket.jpg")):
        (tmp_path / "data" / name).mkdir(parents=True)
        shutil.copy(PHOTOS / photo, tmp_path / "data" / name)
    return tmp_path / "data"


def test_the_output(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["eval", str(photos), *NANO, "--out", str(out)]) == 0
    header, cat, horse, _, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["class", "images", "recall", "precision"]
    assert cat.split() == ["cat", "1", "100.0%", "100.0%"]
    assert horse.split() == ["horse", "1", "0.0%", "-"]  # nothing was predicted as one
    figures = json.loads((out / "eval.json").read_text())
    assert re.fullmatch(rf"top-1 50.00%   top-5 \d+.00%   loss {figures['loss']:.4f}   2 images", last)
    assert (figures["top1"], len(figures["classes"])) == (0.5, 10)
    (wrong,) = figures["wrong"]
    assert (wrong["image"], wrong["class"]) == ("horse/rocket.jpg", "horse")
    assert wrong["predicted"] in set(figures["classes"]) - {"cat", "horse"}
    many = small_model(tmp_path / "many", ("cat", "horse", *(f"class {i}" for i in range(5000))))
    assert main(["eval", str(photos), "--model", str(many), "--out", str(out)]) == 0
    assert [path.name for path in out.iterdir()] == ["eval.json"]  # no matrix of so many classes, nor the old one


@pytest.mark.parametrize("name", ["eval.json", "confusion.png"])
def test_files_of_something_else_are_not_overwritten(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("{}")
    assert main(["eval", str(photos), *NANO, "--out", str(out)]) == 1
    assert f"contains {name}, which this command did not write. Choose another folder." in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [(name, "{}")]


def test_a_folder_that_cannot_be_written_is_an_error(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_new_files(monkeypatch, tmp_path / "out")
    assert main(["eval", str(photos), *NANO, "--out", str(tmp_path / "out/inner")]) == 1
    assert f"Cannot write to --out {tmp_path / 'out/inner'}: " in capsys.readouterr().err
    assert main(["eval", str(photos), *NANO, "--out", str(photos / "out")]) == 1
    assert "is inside the data" in capsys.readouterr().err
    assert main(["eval", str(photos), *NANO, "--out", str(photos)]) == 1
    assert "is the data folder" in capsys.readouterr().err


def test_mistakes_in_data_are_found_before_a_download(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_command, "open_model", lambda _: pytest.fail("the model was downloaded"))
    for words in (["none"], [str(photos), "--split", "none.json"], [str(photos), "--classes", "none.txt"]):
        assert main(["eval", *words, *NANO]) == 1
        assert "none" in capsys.readouterr().err


def test_folders_are_labels_indices_or_listed(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def figures(*words: str) -> tuple[list[str], list[list[int]]]:
        out = tmp_path / f"out {len(list(tmp_path.glob('out*')))}"
        assert main(["eval", str(photos), *NANO, "--out", str(out), *words]) == 0
        found = json.loads((out / "eval.json").read_text())
        return found["classes"], found["confusion"]

    by_name = figures()
    (photos / "cat").rename(photos / "3")
    (photos / "horse").rename(photos / "007")
    assert figures() == by_name
    (photos / "3").rename(photos / "n03")
    (photos / "007").rename(photos / "n07")
    assert main(["eval", str(photos), *NANO]) == 1
    assert "none named n03, n07. Rename the folders or labels to class names" in capsys.readouterr().err
    (tmp_path / "classes.txt").write_text("\n".join(f"n{i:02}" for i in range(10)))
    assert figures("--classes", str(tmp_path / "classes.txt")) == by_name


def test_many_classes_are_drawn_without_names(tmp_path: Path) -> None:
    draw_confusion(torch.eye(60, dtype=torch.int64), [str(i) for i in range(60)], tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").stat().st_size > 1000


def test_training_images_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = stripes_in_folders(tmp_path / "data"), tmp_path / "run"
    (data / "val").rename(data / "test")
    model = new_model()
    model.labels = ("lying", "standing")
    model.save(run / "best")
    write_split(run / "split.json", data, [f"{name}/{i}.png" for i, name in enumerate(model.labels)])
    (tmp_path / "link").symlink_to(run / "best")

    def warning(*words: Path | str) -> str:
        assert main(["eval", *map(str, words)]) == 0
        return capsys.readouterr().err

    assert warning(data, "--model", run / "best") == ""  # test/ is evaluated on
    assert warning(data / "train", "--split", run / "split.json", "--model", run / "best") == ""
    hint = f"--split {run / 'split.json'}\n"
    for name in (run / "best", run / "best" / "model.safetensors", tmp_path / "link"):
        found = warning(data / "train", "--model", name)
        assert found.startswith(f"vitlite: {name} was trained on most of these images.")
        assert found.endswith(hint)
