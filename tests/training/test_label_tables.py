"""Tables of labels: CSV and Parquet, one label or several, with and without a split."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import CONFIG, Killed, new_model, settings, stop, stripes_in_folders

from vitlite.cli.main import main
from vitlite.errors import TrainError
from vitlite.training import ImageData, train
from vitlite.training.split import read_training_data, training_classes
from vitlite.training.tables import Columns, open_data, read_table

TRAIN = "--model vit_nano_4 --weights none --size 16 --batch 8 --epochs 2"


def write(file: Path, *rows: tuple[Any, ...]) -> Path:
    """Write a CSV file of these rows, of which the first has the names of the columns."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(rows)
    return file


def rows_of(folder: Path) -> list[tuple[str, str]]:
    """Return the path below a folder and the class of each image, in an order other than the folder's."""
    files = sorted(folder.rglob("*.png"), key=lambda path: path.name, reverse=True)
    return [(file.relative_to(folder).as_posix(), file.parent.name) for file in files]


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A folder per class, without train/ and val/."""
    return stripes_in_folders(tmp_path / "data") / "train"


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "last" / "model.safetensors")


def test_folder_and_table_give_the_same_run(flat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(flat / "labels.csv", ("path", "label"), *rows_of(flat))
    for name, data in (("folder", flat), ("table", table)):
        assert main(f"train {data} {TRAIN} --out {tmp_path / name}".split()) == 0
    folder, from_table = weights(tmp_path / "folder"), weights(tmp_path / "table")
    assert folder.keys() == from_table.keys()
    assert all(torch.equal(folder[name], from_table[name]) for name in folder)
    held_out = [json.loads((tmp_path / name / "split.json").read_text())["held out"] for name in ("folder", "table")]
    assert held_out[0] == held_out[1] != []
    capsys.readouterr()
    printed = []
    for name, data in (("folder", flat), ("table", table)):
        split = tmp_path / name / "split.json"
        assert main(f"eval {data} --split {split} --model {tmp_path / name / 'best'}".split()) == 0
        printed.append(capsys.readouterr())
    assert printed[0] == printed[1]
    assert main(f"eval {table} --model {tmp_path / 'table' / 'best'}".split()) == 0
    assert "was trained on most of these images" in capsys.readouterr().err
    assert main(f"train {table} {TRAIN} --out {tmp_path / 'table'}".split()) == 0  # resumed
    assert "this run already finished" in capsys.readouterr().err


def test_a_split_column_is_the_same_as_folders_of_parts(tmp_path: Path) -> None:
    data = stripes_in_folders(tmp_path / "data")
    rows = [(path, path.split("/")[0].replace("val", "Valid"), name) for path, name in rows_of(data)]
    table = write(
        tmp_path / "labels.csv", ("image", "subset", "class"), *((f"data/{path}", *row) for path, *row in rows)
    )
    for name, source in (("folder", data), ("table", table)):
        assert main(f"train {source} {TRAIN} --out {tmp_path / name}".split()) == 0
        assert not (tmp_path / name / "split.json").exists()
    folder, from_table = weights(tmp_path / "folder"), weights(tmp_path / "table")
    assert all(torch.equal(folder[name], from_table[name]) for name in folder)
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("folder", "table")]
    logs = [[{**json.loads(line), "seconds": 0} for line in lines] for lines in logs]
    assert logs[0] == logs[1]


def test_probe_reads_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = stripes_in_folders(tmp_path / "data")
    rows = [(path, path.split("/")[0], name) for path, name in rows_of(data)]
    table = write(data / "labels.csv", ("path", "split", "label"), *rows)
    options = "--model vit_nano_4.cifar10 --shots 1 --json"
    printed = []
    for source in (data, table):
        assert main(f"probe {source} {options}".split()) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0] == printed[1]


def test_probe_refuses_several_labels(tmp_path: Path, flat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(path, f"{name}|image") for path, name in rows_of(flat)]
    table = write(flat / "labels.csv", ("path", "label"), *rows)
    assert main(f"probe {table} --model vit_nano_4.cifar10".split()) == 1
    assert "probe needs one label per image, but this table has several. Use train." in capsys.readouterr().err


def test_the_order_of_rows_does_not_matter(flat: Path) -> None:
    rows = rows_of(flat)
    one = read_table(write(flat / "one.csv", ("path", "label"), *rows))
    other = read_table(write(flat / "other.csv", ("label", "path"), *(row[::-1] for row in sorted(rows))))
    assert (one.paths, one.labels, one.classes) == (other.paths, other.labels, other.classes)


def test_parquet(flat: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = rows_of(flat)
    table = read_table(write(flat / "labels.csv", ("path", "label"), *rows))
    paths, labels = map(list, zip(*rows, strict=True))
    parquet.write_table(pyarrow.table({"path": paths, "label": labels}), flat / "labels.parquet")
    same = read_table(flat / "labels.parquet")
    assert (table.paths, table.labels, same.multi_label) == (same.paths, same.labels, False)
    lists = pyarrow.table({"path": paths, "label": [[label, "image"] for label in labels]})
    parquet.write_table(lists, flat / "lists.parquet")
    several = read_table(flat / "lists.parquet")
    assert several.multi_label
    assert set(several.labels) == {("lying", "image"), ("standing", "image")}
    (flat / "lists.parquet").write_bytes(b"PAR1")
    with pytest.raises(TrainError, match=r"Cannot read .*lists\.parquet"):
        read_table(flat / "lists.parquet")


def test_files_of_excel_and_pandas(tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    file.write_bytes("\ufeffFile;Label\r\na.png;Bär\r\n\r\nb.png;Käfer\r\n".encode())
    assert read_table(file).labels == [("Bär",), ("Käfer",)]
    file.write_text("path;label\nb.png;cat\n;\n;;;\na.png;dog\n")  # Excel keeps rows whose cells were cleared
    assert read_table(file).labels == [("dog",), ("cat",)]
    file.write_text(",path,cat,dog\n0,a.png,1.0,0.0\n1,b.png,True,True\n2,c.png,0,0\n")  # df.to_csv writes its index
    assert read_table(file).labels == [("cat",), ("cat", "dog"), ()]
    (tmp_path / "labels.tsv").write_text("path\tlabel\na.png\ttench, Tinca tinca\n")
    assert read_table(tmp_path / "labels.tsv").classes == ("tench, Tinca tinca",)


def test_several_labels(tmp_path: Path) -> None:
    """The same labels with a separator, with another one, and as columns."""
    expected = [("cat", "dog"), ("dog",), ()]
    for mark in "|;":
        table = read_table(
            write(tmp_path / "1.csv", ("path", "tags"), ("a", f"cat{mark} dog"), ("b", "dog"), ("c", ""))
        )
        assert (table.labels, table.multi_label) == (expected, True)
    rows = (("path", "cat", "source", "dog"), ("a", 1, "x", 1), ("b", 0, "x", 1), ("c", 0, "y", 0))
    columns = read_table(write(tmp_path / "2.csv", *rows), Columns(labels=("dog", "cat")))
    assert [tuple(sorted(labels)) for labels in columns.labels] == expected
    assert columns.classes == table.classes == ("cat", "dog")
    planet = write(tmp_path / "3.csv", ("image", "tags"), ("a", "haze primary"), ("b", "clear"))
    assert not read_table(planet).multi_label
    assert read_table(planet, Columns(separator=" ")).classes == ("clear", "haze", "primary")
    one = write(tmp_path / "4.csv", ("path", "label"), ("a", "cat|dog"), ("b", "cat"))
    assert read_table(one, Columns(separator="")).classes == ("cat", "cat|dog")


def test_absolute_paths(flat: Path, tmp_path: Path) -> None:
    rows = [(flat / path, label) for path, label in rows_of(flat)]
    (tmp_path / "elsewhere").mkdir()
    table = open_data(write(tmp_path / "elsewhere" / "labels.csv", ("path", "label"), *rows))
    images = table.read(torch.tensor, ("lying", "standing"))
    assert images.names() == [str(path) for path in sorted(path for path, _ in rows)]
    rows = [(f"../data/train/{path}", label) for path, label in rows_of(flat)]
    table = open_data(write(tmp_path / "elsewhere" / "labels.csv", ("path", "label"), *rows))
    assert table.read(torch.tensor, ("lying", "standing")).names()[0].startswith("../data/train/")


@pytest.mark.parametrize("given", [0, 1])
def test_tables_of_a_mac(given: int, flat: Path) -> None:
    """Labels and paths may be in either form of Unicode, whatever the form of the files."""
    composed, decomposed = "K\u00e4tzchen", "Ka\u0308tzchen"
    forms = (composed, decomposed)
    (flat / "lying").rename(flat / forms[1 - given])
    rows = [(f"{forms[given]}/{2 * i}.png", forms[i % 2]) for i in range(4)]
    table = read_table(write(flat / "labels.csv", ("path", "label"), *rows))
    assert all(path.exists() for path in table.paths)
    images = table.read(torch.tensor, (decomposed, "dog"))
    assert (table.classes, images.classes, images.labels.tolist()) == ((composed,), (composed, "dog"), [0] * 4)
    bits = write(flat / "bits.csv", ("path", decomposed, "dog"), ("x", 1, 0), ("y", 1, 1))
    assert (read_table(bits).labels, read_table(bits).classes) == ([(composed,), (composed, "dog")], (composed, "dog"))


INVALID = {
    "path": ("a,label\nx,y\n", {}, r"no column of paths \(path, .*\)\. Its columns are a, label\. Pass path= \(--p"),
    "label": ("path,fold\nx,y\n", {}, r"no column of labels \(label, .*\)\. Its columns are path, fold\. Pass labels="),
    "given": ("path,label\nx,y\n", {"labels": ("tag",)}, r"no column tag\. Its columns are path, label\. Pass labels="),
    "split": ("path,label\nx,y\n", {"split": "fold"}, r"no column fold\. Its columns are path, label\. Pass split="),
    "part": ("path,label,split\nx,y,fold1\n", {}, "the split 'fold1' for x. Use train, val or test"),
    "bit": ("path,cat,dog\nx,1,-1\n", {}, "'-1' in the column dog for x, but the column of a label must contain 0"),
    "none": ("path,label\nx,y\nz,\n", {}, r"no label for z\. Add one\. If .*, pass separator= \(--separator"),
    "twice": ("path,label\nx,y\nx,z\n", {}, r"lists .*x 2 times\. Write one row per image"),
    "an open quote": ("path,label\na.png,\"x\nb.png,y\n", {}, r"Cannot read .*unexpected end of data"),
    "both": ("path,label\nx,a|b\nz,a;b\n", {}, r"labels that contain \| and ;\. Pass the character"),
    "cells": ("path,label\nx,a,b\n", {}, "3 cells in a row that begins with 'x', but 2 columns"),
    "empty": ("path,label\n", {}, "has no rows"),
    "no path": ("path,label\nx,a\n\n,a\n", {}, r"'' instead of a path in row 4\. Correct or remove the row"),
    "no columns": ("", {}, r"labels\.csv is empty\. Write"),
    "neither": ("a,b\nx,y\n", {}, r"no column of paths .*no column of labels .*a, b\. Pass path= .* and labels= \(-"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "columns", "error"), INVALID.values(), ids=INVALID)
def test_errors(tmp_path: Path, text: str, columns: dict[str, Any], error: str) -> None:
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(TrainError, match=error):
        read_table(tmp_path / "labels.csv", Columns(**columns))


def test_errors_of_files(tmp_path: Path, flat: Path) -> None:
    with pytest.raises(TrainError, match=r"Cannot read .*missing\.csv"):
        open_data(tmp_path / "missing.csv")
    (tmp_path / "labels.csv").write_bytes(b"path,label\na,b\xe4r\n")
    with pytest.raises(TrainError, match=r"Cannot read .*'utf-8' codec"):
        open_data(tmp_path / "labels.csv")
    (tmp_path / "labels.xlsx").touch()
    with pytest.raises(TrainError, match=r"labels\.xlsx is not a folder of images"):
        open_data(tmp_path / "labels.xlsx")
    with pytest.raises(TrainError, match=r"is not a table \(\.csv, \.tsv, \.parquet\)\. Omit"):
        open_data(flat, Columns(path="file"))
    table = open_data(write(tmp_path / "labels.csv", ("path", "label"), ("x.png", "a"), ("y.png", "b")))
    with pytest.raises(TrainError, match=r"None of the 2 images of .* exist, for example .*x\.png"):
        table.read(torch.tensor, ("a", "b"))
    with pytest.raises(TrainError, match="has the labels b, but the classes are a"):
        table.read(torch.tensor, ("a",))


def test_parts_of_a_table(tmp_path: Path, flat: Path) -> None:
    only_test = [(path, label, "test") for path, label in rows_of(flat)]
    table = open_data(write(flat / "labels.csv", ("path", "label", "split"), *only_test))
    with pytest.raises(TrainError, match=r"labels\.csv contains test, but no train part"):
        training_classes(table)


@pytest.mark.parametrize("several", [False, True])
def test_a_messy_table(several: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Broken images are skipped, a run goes on if images have gone, and copies in both parts are reported."""
    data = stripes_in_folders(tmp_path / "data")
    rows = [(path, f"{name}|image" if several else name, path.split("/")[0]) for path, name in rows_of(data)]
    table = write(data / "labels.csv", ("path", "label", "split"), *rows)
    (data / "train/lying/0.png").write_bytes(b"no image")
    (data / "train/lying/2.png").unlink()
    shutil.copy(data / "train/lying/4.png", data / "val/standing/1.png")

    def source() -> tuple[Any, ImageData, ImageData]:
        model = new_model(CONFIG.replace(num_classes=2 + several))
        opened = open_data(table)
        split = read_training_data(opened, model.preprocess, training_classes(opened))
        return model, split.train, split.validation

    model, images, validation = source()
    assert images.multi_label == several
    assert any("1 training images are exact copies of held-out images" in message for message in caplog.messages)
    with pytest.raises(Killed):
        train(model, images, tmp_path / "run", settings(), validation=validation, after_epoch=stop)
    assert images.broken() == ["train/lying/0.png", "train/lying/2.png"]
    (data / "train/standing/3.png").unlink()
    model, images, validation = source()
    history = train(model, images, tmp_path / "run", settings(), validation=validation)
    assert len(history) == 2
    options = f"--model vit_nano_4 --weights none --size 16 --batch 8 --epochs 1 --out {tmp_path / 'other'}"
    assert main(f"train {table} {options} --strict".split()) == 1
    assert main(f"train {table} {options}".split()) == 1
    assert (tmp_path / "other" / "best").is_dir()
    write(table, ("path", "label", "split"), *rows[1:])  # a row has gone, not only its image
    model, images, validation = source()
    assert len(train(model, images, tmp_path / "run", settings(), validation=validation)) == 2
    write(table, ("path", "label", "split"), ("train/lying/4.png", "standing", "train"), *rows_without(rows, "lying/4"))
    model, images, validation = source()
    with pytest.raises(TrainError, match=r"1 images were added or moved to another class \(.*4\.png\)"):
        train(model, images, tmp_path / "run", settings(), validation=validation)


def rows_without(rows: list[tuple[str, str, str]], name: str) -> list[tuple[str, str, str]]:
    return [row for row in rows if name not in row[0]]
