"""`vitlite eval`: what it prints, writes and refuses; `measure` itself is tested with training."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from closed import refuse_new_files
from kills import program
from models import small_model
from tiny_run import CONFIG, new_model, small_cifar10, stripes_in_folders

from vitlite import ViT, ViTConfig
from vitlite.cli import eval as eval_command
from vitlite.cli.main import main
from vitlite.images import Preprocess, TransformConfig
from vitlite.plots import draw_confusion
from vitlite.training.split import write_split

PHOTOS = Path(__file__).parents[2] / "examples" / "photos"
NANO = ("--model", "vit_nano_4.cifar10")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two of CIFAR-10's ten classes, with a picture each."""
    for name, photo in (("cat", "chelsea.png"), ("horse", "rocket.jpg")):
        (tmp_path / "data" / name).mkdir(parents=True)
        shutil.copy(PHOTOS / photo, tmp_path / "data" / name)
    return tmp_path / "data"


def test_what_is_printed(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(photos), *NANO, "--out", str(tmp_path / "out")]) == 0
    header, cat, horse, _, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["class", "pictures", "recognised", "precision"]
    assert cat.split() == ["cat", "1", "100.0%", "100.0%"]
    assert horse.split() == ["horse", "1", "0.0%", "-"]  # nothing was taken for one
    figures = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert re.fullmatch(rf"top-1 50.00%   top-5 \d+.00%   loss {figures['loss']:.4f}   2 pictures", last)
    assert (figures["top1"], len(figures["classes"])) == (0.5, 10)
    assert "top5" in figures
    (wrong,) = figures["wrong"]
    assert (wrong["picture"], wrong["class"]) == ("horse/rocket.jpg", "horse")
    assert wrong["taken_for"] in set(figures["classes"]) - {"cat", "horse"}
    (photos / "cat").rename(tmp_path / "cat")
    assert main(["eval", str(photos), *NANO, "--out", str(tmp_path / "one")]) == 0
    (alone,) = json.loads((tmp_path / "one" / "eval.json").read_text())["wrong"]
    assert alone["picture"] == "horse/rocket.jpg"


def test_no_drawing_of_another_model_stands_beside_the_figures(photos: Path, tmp_path: Path) -> None:
    """Of so many classes none is drawn, and what was drawn of fewer is gone."""
    out = tmp_path / "out"
    assert main(["eval", str(photos), *NANO, "--out", str(out)]) == 0
    assert (out / "confusion.png").exists()
    many = small_model(tmp_path / "many", ("cat", "horse", *(f"class {i}" for i in range(5000))))
    assert main(["eval", str(photos), "--model", str(many), "--out", str(out)]) == 0
    assert [path.name for path in out.iterdir()] == ["eval.json"]


TWO_AT_ONCE = """
import subprocess, sys
from vitlite.cli.main import main
data, out, one, other = sys.argv[1:]
started = []
def watch(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("confusion.png") and not started:
        command = [sys.executable, "-u", "-m", "vitlite", "eval", data, "--model", other, "--out", out]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        while not started[0].stdout.readline().startswith("top-1"):  # which it prints before it writes
            assert started[0].poll() is None
        try:
            started[0].wait(3)
        except subprocess.TimeoutExpired:
            pass
sys.addaudithook(watch)
assert main(["eval", data, "--model", one, "--out", out]) == 0
started[0].communicate()
assert started[0].returncode == 0
"""


def test_of_two_at_once_the_figures_and_the_drawing_of_one_are_there(photos: Path, tmp_path: Path) -> None:
    """The other ends when the first has written its figures, and is about to put its drawing beside them."""
    other, both, alone = small_model(tmp_path / "other", ("cat", "horse")), tmp_path / "both", tmp_path / "alone"
    program(TWO_AT_ONCE, photos, both, NANO[1], other)
    assert main(["eval", str(photos), "--model", str(other), "--out", str(alone)]) == 0
    assert sorted(path.name for path in both.iterdir()) == ["confusion.png", "eval.json"]
    for name in ("confusion.png", "eval.json"):
        assert (both / name).read_bytes() == (alone / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("eval.json", '{"mine": "six weeks of human annotation"}'),
        ("confusion.png", "my picture"),
        ("notes.txt", "mine"),
        ("eval.json.backup00.partial", "mine"),
        ("eval.lock", "mine"),
    ],
)
def test_what_others_wrote_stays(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    command, out = ["eval", str(photos), *NANO, "--out", str(tmp_path / "out")], tmp_path / "out"
    out.mkdir()
    (out / "eval.json.0123abcd.partial").touch()  # what a killed eval may leave
    (out / "eval.json.0123abcd.partial.lock").touch()
    (out / "eval.lock").touch()
    assert main(command) == 0
    assert sorted(path.name for path in out.iterdir()) == ["confusion.png", "eval.json"]
    assert main(command) == 0  # what it wrote itself is replaced
    capsys.readouterr()
    (out / name).write_text(content)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main(command) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f"holds {name}, which this command did not write: it stays. Name a folder that is new or empty." in said.err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_full_disk_is_said(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_new_files(monkeypatch, tmp_path / "out")
    monkeypatch.setattr(eval_command, "_check_out", lambda _: None)
    assert main(["eval", str(photos), *NANO, "--out", str(tmp_path / "out/inner")]) == 1
    said = f"Cannot write to --out {tmp_path / 'out/inner'}: Permission denied. Make room, or name another folder.\n"
    assert capsys.readouterr().err == f"vitlite: error: {said}"


def test_what_is_refused(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ViTConfig(image_size=16, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=32, num_classes=2)
    ViT(config).save(tmp_path / "bare")
    assert main(["eval", str(photos), "--model", str(tmp_path / "bare")]) == 1
    assert "has no preprocessing, so pictures cannot be prepared for it. Name a checkpoint" in capsys.readouterr().err
    monkeypatch.setattr(eval_command, "open_model", lambda _: pytest.fail("the model was fetched"))
    assert main(["eval", str(tmp_path / "none"), *NANO]) == 1
    assert "There is no folder" in capsys.readouterr().err


def test_folders_in_the_order_of_the_labels(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "horse").rename(photos / "n02")
    (photos / "cat").rename(photos / "n01")
    model = ViT(ViTConfig(image_size=16, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=32, num_classes=2))
    recipe = TransformConfig(
        size=(16, 16), resize=(16, 16), mode="squash", interpolation="bicubic", mean=(0.5,), std=(0.5,)
    )
    model.labels, model.preprocess = ("tabby", "missile"), Preprocess(recipe, model)
    model.save(tmp_path / "model")
    command = ["eval", str(photos), "--model", str(tmp_path / "model")]
    assert main([*command, "--out", str(tmp_path / "by_order")]) == 0
    printed = capsys.readouterr()
    assert [line.split()[:2] for line in printed.out.splitlines()[1:3]] == [["n01", "1"], ["n02", "1"]]
    assert "taken in order: n01 for tabby, n02 for missile" in printed.err
    found = json.loads((tmp_path / "by_order" / "eval.json").read_text())
    assert (found["classes"], found["labels"], found["paired by"]) == (["n01", "n02"], ["tabby", "missile"], "order")
    (photos / "n01").rename(photos / "tabby")
    (photos / "n02").rename(photos / "missile")
    assert main([*command, "--out", str(tmp_path / "by_name")]) == 0
    assert capsys.readouterr().err == ""
    found = json.loads((tmp_path / "by_name" / "eval.json").read_text())
    assert (found["classes"], found["labels"], found["paired by"]) == (
        ["tabby", "missile"],
        ["tabby", "missile"],
        "name",
    )


def test_what_folders_are_taken_for_where_the_model_has_no_labels(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new_model().save(tmp_path / "model")
    assert main(["eval", str(photos), "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]) == 0
    (said,) = caplog.messages
    assert said.endswith("no labels, so the folders are taken in order: cat for class 0, horse for class 1")
    found = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert (found["classes"], found["labels"], found["paired by"]) == (["cat", "horse"], None, "order")


def test_a_label_that_two_classes_share(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A crane lifts, and another wades."""
    (photos / "cat").rename(photos / "crane")
    model = new_model(CONFIG.replace(num_classes=3))
    model.labels = ("crane", "horse", "crane")
    model.save(tmp_path / "model")
    (photos / "horse" / "more.heic").touch()
    assert main(["eval", str(photos), "--model", str(tmp_path / "model")]) == 1
    said = "vitlite: error: crane is the label of 2 classes (0, 2), so it does not tell which is meant. Give one folder"
    assert capsys.readouterr().err.startswith(said)
    for name in ("crane", "horse"):
        (photos / name).rename(photos / f"n{name}")
    (photos / "nthird").mkdir()
    shutil.copy(PHOTOS / "rocket.jpg", photos / "nthird")
    assert main(["eval", str(photos), "--model", str(tmp_path / "model")]) == 0
    lines = capsys.readouterr().out.splitlines()[1:4]
    assert [line.split()[0] for line in lines] == ["ncrane", "nhorse", "nthird"]
    assert "skipped 1 .heic (what is read ends in" in caplog.text
    assert main(["classify", str(PHOTOS / "rocket.jpg"), "--model", str(tmp_path / "model")]) == 0
    shown = {line.split("%")[1].strip() for line in capsys.readouterr().out.splitlines()[1:]}
    assert shown == {"crane (class 0)", "horse", "crane (class 2)"}


def test_what_to_do_about_other_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = small_cifar10(tmp_path / "data")
    new_model(CONFIG.replace(num_classes=5)).save(tmp_path / "five")
    assert main(f"eval {data} --model {tmp_path / 'five'}".split()) == 1
    said = f"The data have 2 classes, and {tmp_path / 'five'} 5. Fine-tune it first: vitlite train.\n"
    assert capsys.readouterr().err == f"vitlite: error: {said}"


def test_many_classes_are_drawn_without_names(tmp_path: Path) -> None:
    draw_confusion(torch.eye(60, dtype=torch.int64), [str(i) for i in range(60)], tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").stat().st_size > 1000


def test_whether_the_model_was_trained_on_these_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = stripes_in_folders(tmp_path / "data"), tmp_path / "run"
    (data / "val").rename(data / "test")
    model = new_model()
    model.labels = ("lying", "standing")
    model.save(run / "best")
    held_out = [f"{name}/{i}.png" for i, name in enumerate(model.labels)]
    write_split(run / "split.json", data, held_out)
    (tmp_path / "link").symlink_to(run / "best")

    def said(*words: Path | str) -> str:
        assert main(["eval", *map(str, words)]) == 0
        return capsys.readouterr().err

    assert said(data, "--model", run / "best") == ""  # test/ is measured, of which it has seen nothing
    assert said(data / "test", "--model", run / "best") == ""
    hint = f"was trained on most of these pictures. Those that it has not seen: --split {run / 'split.json'}\n"
    for model_named in (run / "best", run / "best" / "model.safetensors", tmp_path / "link"):
        assert said(data / "train", "--model", model_named) == f"vitlite: {model_named} {hint}"
    split = ("--split", str(run / "split.json"), "--model", str(run / "best"))
    assert said(data, *split) == ""
    shutil.copytree(data / "train", tmp_path / "other")
    assert said(tmp_path / "other", *split) == (
        f"vitlite: {run / 'split.json'} is of a run on {data / 'train'}. Unless these are the same data, moved or "
        "copied, the pictures measured are none that it held out: they have their names alone.\n"
    )
