"""`vitlite search` and `vitlite probe`."""

import csv
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from commands import Run
from PIL import Image

import vitlite
from vitlite.retrieval.search import search
from vitlite.retrieval.store import open_vectors


@pytest.fixture
def vectors(run: Run, model: Path, images: Path, tmp_path: Path) -> Path:
    out = tmp_path / "v.safetensors"
    assert run("embed", images, "--model", model, "--out", out)[0] == 0
    return out


def test_search_finds_the_image_itself_first(run: Run, vectors: Path, images: Path) -> None:
    asked = (images / "a.png", images / "inner" / "d.png")
    code, out, err = run("search", vectors, *asked, "--top", 2, "--format", "jsonl")
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["path"] for row in rows] == [str(path) for path in asked]
    assert [row["matches"][0]["path"] for row in rows] == [str(path) for path in asked]
    assert [len(row["matches"]) for row in rows] == [2, 2]
    out = run("search", vectors, images / "a.png")[1]
    assert out.splitlines()[:2] == [str(images / "a.png"), f"  1.0000  {images / 'a.png'}"]


def test_search_decodes_as_embed_did(run: Run, model: Path, tmp_path: Path) -> None:
    folder, vectors = tmp_path / "large", tmp_path / "v.safetensors"
    folder.mkdir()
    for number in range(3):
        noise = Image.effect_noise((1033, 777), 100 + 50 * number)
        noise.convert("RGB").save(folder / f"{number}.jpg")
    assert run("embed", folder, "--model", model, "--quick-decode", "--out", vectors)[0] == 0
    for more in ((), ("--model", model)):
        code, out, err = run("search", vectors, folder / "1.jpg", "--top", 1, *more)
        assert (code, err, out.splitlines()[1]) == (0, "", f"  1.0000  {folder / '1.jpg'}")
    with pytest.raises(vitlite.VitliteError, match=r"this model differs in quick_decode"):
        search(open_vectors(vectors), vitlite.load(model), [folder / "1.jpg"])


def test_search_draws_a_contact_sheet(run: Run, vectors: Path, images: Path, tmp_path: Path) -> None:
    (images / "b.JPG").rename(images / "moved.JPG")  # since the vectors were made
    try:
        code, _, err = run("search", vectors, images / "a.png", images / "moved.JPG", "--out", tmp_path / "s.jpg")
    finally:
        (images / "moved.JPG").rename(images / "b.JPG")
    missing = f"vitlite: 2 of the images found do not exist, such as {images / 'b.JPG'}, and are shown in grey."
    assert (code, err.startswith(missing), err.endswith(f"\nwrote {tmp_path / 's.jpg'}\n")) == (0, True, True)
    with Image.open(tmp_path / "s.jpg") as sheet:
        assert sheet.width > 5 * 160  # the image asked for, and four found
        assert sheet.height > 2 * 160
    code, _, err = run("search", vectors, images / "a.png", "--out", tmp_path / "s.gif2")
    assert code == 1
    assert "Cannot write the image" in err
    many = [tmp_path / f"{row}.png" for row in range(300)]
    for path in many:
        shutil.copy(images / "a.png", path)
    code, out, err = run("search", vectors, *many, "--out", tmp_path / "s.png")
    assert (code, out) == (1, "")
    assert err.endswith("250 per row or column. Search for fewer images at a time, or reduce top= (--top).\n")


def test_a_contact_sheet_does_not_replace_an_input(run: Run, vectors: Path, images: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked.png"
    shutil.copy(images / "a.png", asked)
    os.link(asked, tmp_path / "linked.png")
    for out in (asked, tmp_path / "linked.png", images / "inner" / "d.png"):
        before = out.read_bytes()
        code, printed, err = run("search", vectors, asked, "--out", out)
        assert (code, printed) == (1, "")
        assert str(out) in err
        assert out.read_bytes() == before


def test_search_does_not_compare_two_models(run: Run, vectors: Path, images: Path, tmp_path: Path) -> None:
    code, out, err = run("search", vectors, images / "a.png", "--model", "vit_nano_4.cifar10")
    assert (code, out) == (1, "")
    assert "this model differs in weights, config, preprocessing" in err
    assert "differs in" in run("search", vectors, images / "a.png", "--size", 32)[2]
    assert "is not a valid file of vectors" in run("search", _without_identity(vectors), images / "a.png")[2]


def test_a_model_that_was_moved_needs_model(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    vectors, here, asked = tmp_path / "v.safetensors", tmp_path / "here", images / "a.png"
    shutil.copytree(model, here)
    assert run("embed", images, "--model", here, "--out", vectors)[0] == 0
    here.rename(tmp_path / "there")
    code, out, err = run("search", vectors, asked)
    assert (code, out) == (1, "")
    assert f"Cannot open the model of {vectors}, {here}: " in err
    assert "If the model has moved, pass --model MODEL. If embed was run with --weights, pass --weights PATH." in err
    assert run("search", vectors, asked, "--model", tmp_path / "there")[0] == 0


def test_vectors_made_with_weights_are_searched_with_them(run: Run, images: Path, tmp_path: Path) -> None:
    weights, vectors, asked = tmp_path / "mine.safetensors", tmp_path / "v.safetensors", images / "a.png"
    vitlite.create("vit_tiny_16", weights=None).save(tmp_path / "saved")
    shutil.copy(tmp_path / "saved" / "model.safetensors", weights)
    named = ("--model", "vit_tiny_16.deit_fb_in1k", "--weights", weights)
    assert run("embed", images, *named, "--out", vectors)[0] == 0
    assert "If embed was run with --weights, pass --weights PATH." in run("search", vectors, asked)[2]
    assert run("search", vectors, asked, "--weights", weights)[0] == 0


def _without_identity(vectors: Path) -> Path:
    from safetensors.torch import load_file, save_file

    other = vectors.with_name("other.safetensors")
    save_file(load_file(vectors), other, {"paths": "[]", "model": "x"})
    return other


def test_duplicates(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    folder, vectors = tmp_path / "images", tmp_path / "v.safetensors"
    shutil.copytree(images, folder)
    for name in ("a copy.png", "b.png"):
        shutil.copy(folder / "a.png", folder / name)
    assert run("embed", folder, "--model", model, "--out", vectors)[0] == 0
    words = ("duplicates", vectors, "--threshold", 0.9999)
    first, *others = sorted(str(folder / name) for name in ("a copy.png", "a.png", "b.png"))
    code, out, err = run(*words, "--out", tmp_path / "sheet.jpg")
    assert (code, out.splitlines()) == (0, [first, *(f"  1.0000  {path}" for path in others)])
    assert err == f"vitlite: 1 groups of 3 images, of 6\nwrote {tmp_path / 'sheet.jpg'}, 1 of 1 groups\n"
    with Image.open(tmp_path / "sheet.jpg") as sheet:
        assert sheet.width > 3 * 160
    rows = list(csv.DictReader(run(*words, "--format", "csv")[1].splitlines()))
    assert [(row["group"], row["representative"], row["path"]) for row in rows] == [
        ("0", first, path) for path in others
    ]
    pairs = [json.loads(line) for line in run(*words, "--pairs", "--format", "jsonl")[1].splitlines()]
    assert {(pair["first"], pair["second"]) for pair in pairs} == {(first, path) for path in others} | {tuple(others)}
    assert run(*words, "--pairs")[1].count("1.0000  ") == 3
    assert "Omit --out or --pairs" in run(*words, "--pairs", "--out", tmp_path / "sheet.jpg")[2]
    folder.rename(tmp_path / "moved")
    code, out, err = run(*words, "--out", tmp_path / "sheet.jpg")
    assert (code, len(out.splitlines())) == (1, 3)
    assert "vitlite: 3 of 3 images could not be opened. Run the command in the folder where embed ran.\n" in err
    (tmp_path / "moved").rename(folder)
    before = (folder / "a.png").read_bytes()
    assert "is one of the images" in run(*words, "--out", folder / "a.png")[2]
    assert (folder / "a.png").read_bytes() == before


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """Two classes of images that differ in colour."""
    for name, colour in (("red", (200, 40, 30)), ("blue", (30, 40, 200))):
        (tmp_path / "colours" / name).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (20, 24), (colour[0] + 4 * i, colour[1] + 3 * i, colour[2] + 2 * i)).save(
                tmp_path / "colours" / name / f"{i}.png"
            )
    return tmp_path / "colours"


def test_probe_tells_colours_apart(run: Run, model: Path, colours: Path) -> None:
    code, out, err = run("probe", colours, "--model", model, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["classes"], found["fitted_to"], found["measured_on"], found["commonest"]) == (2, 16, 4, 0.5)
    assert found["linear"] == 1
    assert list(found["few"]) == ["1", "5"]
    out = run("probe", colours, "--model", model)[1]
    assert re.search(r"(?m)^linear classifier +100\.0 %$", out)
    assert re.search(r"(?m)^most frequent class +50\.0 %$", out)
    assert "skipped: 10, 25 per class, because the smallest class has fewer images" in out


def test_probe_of_few_images_draws_a_curve_for_each_model(run: Run, model: Path, colours: Path, tmp_path: Path) -> None:
    out = tmp_path / "few.png"
    words = ("probe", colours, "--model", model, "--beside", "vit_nano_4.cifar10", "--shots", "1,2,8")
    code, printed, err = run(*words, "--out", out)
    assert (code, err) == (0, "")
    header, *rows = printed.splitlines()[1:]
    assert header.split()[-2:] == [str(model), "vit_nano_4.cifar10"]
    table = {row[:26].strip(): re.findall(r"[\d.]+ % ± +[\d.]+|[\d.]+", row[26:]) for row in rows}
    for shots in (1, 2, 8):
        assert len(table[f"linear, {shots} per class"]) == 2
    assert table["vector width"] == ["32", "192"]
    with Image.open(out) as drawn:
        assert drawn.size == (840, 560)
    both = [json.loads(line) for line in run(*words, "--json")[1].splitlines()]
    assert [one["model"] for one in both] == [str(model), "vit_nano_4.cifar10"]
    alone = json.loads(run("probe", colours, "--model", "vit_nano_4.cifar10", "--shots", "1,2,8", "--json")[1])
    assert alone == both[1]  # of the same images
    assert list(alone["few"]) == ["1", "2", "8"]


def test_probe_does_not_replace_an_input(run: Run, model: Path, colours: Path, tmp_path: Path) -> None:
    before = (colours / "red" / "0.png").read_bytes()
    (tmp_path / "link").symlink_to(colours / "red")
    for out in (colours / "red" / "0.png", colours / "few.png", tmp_path / "link" / "0.png"):
        code, printed, err = run("probe", colours, "--model", model, "--out", out)
        assert (code, printed) == (1, "")
        assert f"--out {out} is inside the data" in err
    assert (colours / "red" / "0.png").read_bytes() == before
    assert "Cannot write the image" in run("probe", colours, "--model", model, "--out", tmp_path / "few.safe")[2]
    code, _, err = run("probe", colours, "--model", model, "--shots", 50, "--out", tmp_path / "few.png")
    assert code == 1
    assert "no curve to draw" in err
    assert "must be a positive integer" in run("probe", colours, "--model", model, "--shots", "1,0")[2]


def test_probe_fits_to_train_and_measures_on_val(run: Run, model: Path, colours: Path, tmp_path: Path) -> None:
    shutil.copytree(colours, tmp_path / "data" / "train")
    (tmp_path / "data" / "val" / "red").mkdir(parents=True)
    shutil.copy(colours / "red" / "1.png", tmp_path / "data" / "val" / "red")
    found = json.loads(run("probe", tmp_path / "data", "--model", model, "--json")[1])
    assert (found["fitted_to"], found["measured_on"]) == (20, 1)
    (tmp_path / "data" / "train").rename(tmp_path / "data" / "testing")
    code, _, err = run("probe", tmp_path / "data", "--model", model)
    assert code == 1
    assert "contains testing, val, but no train part. Rename the folder of training images to train," in err


@pytest.mark.parametrize("parts", [False, True])
def test_probe_warns_of_copies(
    parts: bool, run: Run, model: Path, colours: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = colours
    if parts:
        data = tmp_path / "data"
        shutil.copytree(colours, data / "train")
        shutil.copytree(colours, data / "val")
    else:
        for i in range(1, 10):
            shutil.copy(colours / "red" / "0.png", colours / "red" / f"{i}.png")
    assert run("probe", data, "--model", model)[0] == 0
    assert f"{20 if parts else 8} training images are exact copies of held-out images" in caplog.text


def test_probe_leaves_out_broken_images(run: Run, model: Path, colours: Path) -> None:
    (colours / "red" / "0.png").write_bytes(b"no image")
    code, out, err = run("probe", colours, "--model", model, "--json")
    assert code == 1
    assert "0.png" in err
    assert json.loads(out)["fitted_to"] + json.loads(out)["measured_on"] == 19


def test_probe_saves_a_classifier(run: Run, model: Path, colours: Path, tmp_path: Path) -> None:
    """All commands open it, and `eval` measures what `probe` measured."""
    data, saved = tmp_path / "data", tmp_path / "saved"
    for name, first in (("red", 0), ("blue", 0)):
        (data / "train" / name).mkdir(parents=True)
        (data / "val" / name).mkdir(parents=True)
        for i in range(first, 10):
            shutil.copy(colours / name / f"{i}.png", data / ("val" if i % 2 else "train") / name)
    shutil.copy(colours / "red" / "1.png", data / "val" / "blue" / "wrong.png")
    code, out, err = run("probe", data, "--model", model, "--json", "--save", saved)
    assert (code, err) == (0, f"wrote {saved}\n")
    linear = json.loads(out)["linear"]
    assert linear == pytest.approx(10 / 11)
    assert run("eval", data, "--model", saved, "--out", tmp_path / "eval")[0] == 0
    assert json.loads((tmp_path / "eval" / "eval.json").read_text())["top1"] == pytest.approx(linear)
    code, out, _ = run("classify", colours / "blue" / "3.png", "--model", saved, "--fast", "--format", "jsonl")
    assert json.loads(out)["predictions"][0]["label"] == "blue"
    assert vitlite.load(saved).preprocess.transform == vitlite.load(model).preprocess.transform
    assert run("export", saved, "--to", "torch", "--out", tmp_path / "saved.pt2")[0] == 0
    again = run("probe", data, "--model", model, "--fast", "--save", saved)
    assert again[0] == 0
    assert vitlite.load(saved).predict(colours / "red" / "3.png")[0].label == "red"


def test_the_split_of_a_saved_probe_evaluates_its_test_images(
    run: Run, model: Path, colours: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    _, out, _ = run("probe", colours, "--model", model, "--json", "--save", saved)
    code, _, err = run("eval", colours, "--model", saved)
    assert code == 0
    assert f"pass --split {saved / 'split.json'}" in err
    code, _, err = run("eval", colours, "--model", saved, "--split", saved / "split.json", "--out", tmp_path / "eval")
    assert (code, err) == (0, "")
    measured = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert measured["images"] == json.loads(out)["measured_on"]
    assert measured["top1"] == pytest.approx(json.loads(out)["linear"])


def test_probe_does_not_save_where_it_should_not(run: Run, model: Path, colours: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    for more, reason in (
        (("--save", colours / "saved"), "is inside the data"),
        (("--save", tmp_path / "other"), "contains config.json, which vitlite did not write"),
        (("--save", tmp_path / "saved", "--dtype", "bfloat16"), "--save needs vectors in float32, got --dtype"),
    ):
        code, out, err = run("probe", colours, "--model", model, *more)
        assert (code, out, reason in err) == (1, "", True)


def test_probe_of_one_image_per_class(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "1.png").write_bytes((images / "a.png").read_bytes())
    code, _, err = run("probe", tmp_path / "data", "--model", model)
    assert code == 1
    assert "The 2 readable images include 0 test images and 2 training images" in err


def test_the_background_and_a_moved_model_of_vectors(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "run/best")
    Path("photos").mkdir()
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        Image.new("RGBA", (30, 30), (*colour, 0)).save(f"photos/{name}.png")
    words = ("photos", "--model", "run/best", "--background", "white", "--out", "vectors.safetensors")
    assert run("embed", *words)[0] == 0
    code, out, _ = run("search", "vectors.safetensors", "photos/red.png", "--format", "jsonl")
    assert code == 0
    assert [match["score"] for match in json.loads(out)["matches"]] == pytest.approx([1, 1])  # both are white
    Path("run").rename("moved")
    code, _, err = run("search", "vectors.safetensors", "photos/red.png")
    assert code == 1
    assert "There is no file or folder run/best. Check the path. If the model has moved, pass --model MODEL." in err
    assert "127.0.0.1" not in err
