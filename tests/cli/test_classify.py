"""`vitlite classify`."""

import csv
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from commands import Run, paths_of

import vitlite


def test_classify_equals_predict(run: Run, model: Path, images: Path) -> None:
    expected = vitlite.load(model).predict([images / "a.png", images / "b.JPG"], top=2)
    code, out, err = run("classify", images / "a.png", images / "b.JPG", "--model", model, "--top", 2)
    assert (code, err) == (0, "vitlite: 2 images classified\n")
    first, *answers = out.splitlines()[:3]
    assert first == str(images / "a.png")
    assert answers == [f"  {100 * score:5.1f} %  {label}" for label, _, score in expected[0]]

    words = ("classify", images / "a.png", images / "b.JPG", "--model", model, "--top", 2, "--format")
    rows = [json.loads(line) for line in run(*words, "jsonl")[1].splitlines()]
    assert [row["path"] for row in rows] == [str(images / "a.png"), str(images / "b.JPG")]
    for row, answer in zip(rows, expected, strict=True):
        assert [(p["label"], p["index"]) for p in row["predictions"]] == [(p.label, p.index) for p in answer]
        assert [p["score"] for p in row["predictions"]] == pytest.approx([p.score for p in answer], abs=1e-6)

    table = list(csv.DictReader(io.StringIO(run(*words, "csv")[1])))
    assert [(row["path"], row["rank"]) for row in table][:2] == [
        (str(images / "a.png"), "1"),
        (str(images / "a.png"), "2"),
    ]
    assert table[0]["label"] == expected[0][0].label


def test_csv_keeps_any_name_in_one_row(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    names = ["a\rb.png", "a\nb.png", 'a "b", c.png', "plain.png"]
    for name in names:
        shutil.copy(images / "a.png", tmp_path / name)
    out = run("classify", *(tmp_path / name for name in names), "--model", model, "--top", 1, "--format", "csv")[1]
    rows = list(csv.DictReader(io.StringIO(out, newline="")))
    assert [row["path"] for row in rows] == [str(tmp_path / name) for name in names]
    assert out.endswith("\n")
    assert f"\n{tmp_path / 'plain.png'},1," in out  # quoted only where it must be
    assert out.count("\r") == 1


def test_where_images_are_found(
    run: Run, model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", model, "--format", "jsonl")
    all_four = [str(images / name) for name in ("a.png", "b.JPG", "inner/c.webp", "inner/d.png")]
    assert paths_of(run("classify", images, *words)[1]) == all_four
    assert paths_of(run("classify", f"{images}/**/*.png", *words)[1]) == [all_four[0], all_four[3]]
    assert paths_of(run("classify", images, images / "a.png", *words)[1]) == all_four  # each once
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{all_four[1]}\n\n{all_four[2]}\r\n"))
    assert paths_of(run("classify", "-", *words)[1]) == all_four[1:3]
    odd = tmp_path / "[1] odd.png"  # brackets in a name that exists are no pattern
    shutil.copy(images / "a.png", odd)
    assert paths_of(run("classify", odd, *words)[1]) == [str(odd)]
    (tmp_path / "empty").mkdir()
    assert "No images found in the folder" in run("classify", tmp_path / "empty", *words)[2]
    assert "No file matches" in run("classify", tmp_path / "*.bmp", *words)[2]
    assert "No such file: none.png" in run("classify", "none.png", *words)[2]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "The list of images is empty" in run("classify", "-", *words)[2]


def test_skipped_files_are_reported(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    shutil.copytree(images, folder)
    for name in ("1.NEF", "2.nef", "inner/3.nef", "IMG_0001", "inner/.hidden"):
        shutil.copy(images / "a.png", folder / name)
    words = ("--model", model)
    for command in (("classify", folder, *words), ("embed", folder, *words, "--out", tmp_path / "out.npz")):
        code, _, err = run(*command)
        assert code == 0
        assert "3 .nef, 1 " in err.splitlines()[0]
        assert err.count("\n") == 1 + (command[0] == "classify")
    assert run("classify", folder / "IMG_0001", *words)[::2] == (0, "")  # a named file is opened
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "1.nef").touch()
    code, _, err = run("classify", alone, *words)
    assert code == 1
    assert ", only 1 .nef. Choose another folder" in err


def test_a_broken_image_does_not_stop_the_others(run: Run, model: Path, broken: Path) -> None:
    code, out, err = run("classify", broken, broken / "missing.png", "--model", model, "--format", "jsonl")
    assert code == 1
    assert [Path(path).name for path in paths_of(out)] == ["a.png", "b.JPG", "c.webp", "d.png"]
    _, first, second, *counts = err.splitlines()  # before them, what was skipped
    assert first.startswith(f"vitlite: Cannot read {broken / 'aa.png'} as an image: ")
    assert second == f"vitlite: Cannot read {broken / 'missing.png'} as an image: no such file"
    names = f"{broken / 'aa.png'}, {broken / 'missing.png'}"
    assert counts == ["vitlite: 4 images classified", f"vitlite: 2 images could not be read: {names}"]
    assert (
        run("classify", broken, "--model", model, "--strict")[2].splitlines()[-1].startswith("vitlite: error: Cannot")
    )


def test_real_weights(run: Run, shared: Path) -> None:
    weights = shared / "weights" / "deit_tiny_16.timm.safetensors"
    photos = [shared / "photos" / "chelsea.png", shared / "photos" / "coffee.png"]
    words = ("classify", *photos, "--model", "vit_tiny_16.deit_fb_in1k", "--weights", weights, "--format", "jsonl")
    cat, coffee = (
        [(p["label"], p["score"]) for p in json.loads(line)["predictions"]] for line in run(*words)[1].splitlines()
    )
    assert [label for label, _ in cat[:2]] == ["Egyptian cat", "tabby"]
    assert cat[0][1] == pytest.approx(0.44, abs=0.01)
    assert coffee[0][0] == "espresso"
    assert coffee[0][1] == pytest.approx(0.82, abs=0.01)


def test_none_of_these(run: Run, model: Path, images: Path) -> None:
    """Labels with lower scores are left out, in every format."""
    command = ("classify", images / "a.png", "--model", model, "--min-score")
    (scores,) = [json.loads(run(*command, 0, "--format", "jsonl")[1])["predictions"]]
    second = scores[1]["score"] - 1e-6
    assert json.loads(run(*command, second, "--format", "jsonl")[1])["predictions"] == scores[:2]
    assert json.loads(run(*command, second, "--top", 1, "--format", "jsonl")[1])["predictions"] == scores[:1]
    assert json.loads(run(*command, 1, "--format", "jsonl")[1])["predictions"] == []
    assert run(*command, 1, "--format", "csv")[1] == f"path,rank,label,index,score\n{images / 'a.png'},,,,\n"
    assert run(*command, 1)[1] == f"{images / 'a.png'}\n  none of these\n"
    assert "must be a number from 0 to 1, got '2'" in run(*command, 2)[2]
    assert "cannot be used with --engine ray" in run(*command, 0.5, "--engine", "ray", "--out", "x")[2]


def test_thresholds_of_a_model_with_several_labels(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    several = vitlite.load(model)
    several.scores = "sigmoid"
    several.save(tmp_path / "model")
    command = ("classify", images / "a.png", "--model", tmp_path / "model", "--format", "jsonl")
    all_of_them = json.loads(run(*command)[1])["predictions"]  # without thresholds, the best five
    assert len(all_of_them) == 3
    scores = {each["index"]: each["score"] for each in all_of_them}
    several.thresholds = tuple(scores[i] + (1e-4 if i == all_of_them[0]["index"] else -1e-4) for i in range(3))
    several.save(tmp_path / "model")
    assert json.loads(run(*command)[1])["predictions"] == all_of_them[1:]
    assert json.loads(run(*command, "--min-score", 0)[1])["predictions"] == all_of_them
