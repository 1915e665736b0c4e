"""Names from outside reach the terminal with what does not show made visible."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from commands import Run
from models import small_model
from PIL import Image

from vitlite.training.state import STATE

RED = "\x1b[31m"
SEEN = r"\x1b[31m"
VECTORS = f"v{RED}.safetensors"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, pictures of two classes, and one that is broken: all names have a control character."""
    here = tmp_path / f"here{RED}"
    for name in (f"one{RED}", f"two{RED}"):
        (here / f"data{RED}" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (20, 30), (60 * i, 10, 200)).save(here / f"data{RED}" / name / f"{i}{RED}.png")
    (here / "broken").mkdir()
    (here / "broken" / f"{RED}.png").write_bytes(b"no picture")
    shutil.move(small_model(tmp_path / "m", (f"one{RED}", f"two{RED}", "three")), here / f"model{RED}")
    monkeypatch.chdir(here)
    return here


DATA, MODEL, ONE = f"data{RED}", f"model{RED}", f"data{RED}/one{RED}/0{RED}.png"
COMMANDS: dict[str, tuple[str, ...]] = {
    "classify": (ONE, "--model", MODEL),
    "embed": (DATA, "--model", MODEL, "--out", VECTORS),
    "search": (VECTORS, ONE, "--model", MODEL, "--out", f"sheet{RED}.png"),
    "probe": (DATA, "--model", MODEL),
    "attention": (ONE, "--model", MODEL, "--out", f"a{RED}.png"),
    "distances": (ONE, "--model", MODEL, "--out", f"a{RED}.png"),
    "positions": (MODEL, "--out", f"a{RED}.png"),
    "filters": (MODEL, "--out", f"a{RED}.png"),
    "info": (MODEL,),
    "verify": (f"{MODEL}/model.safetensors", f"none{RED}"),
    "convert": (MODEL, f"converted{RED}", "--to", "timm"),
    "train": (DATA, "--model", MODEL, "--out", f"../run{RED}", "--epochs", "1", "--batch", "2"),
    "eval": (DATA, "--model", MODEL),
    "export": (MODEL, "--to", "onnx", "--out", f"e{RED}.onnx"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_control_characters_are_made_visible(run: Run, place: Path, command: str) -> None:
    if command == "export":
        pytest.importorskip("onnxscript")
    if command == "search":
        run("embed", DATA, "--model", MODEL, "--out", VECTORS)
    code, out, err = run(command, *COMMANDS[command])
    assert code == (command == "verify"), err
    assert (out + err).replace("\n", "").isprintable()
    assert SEEN in out + err


WRONG: dict[str, tuple[str, ...]] = {
    "nothing there": ("classify", f"none{RED}.png", "--model", MODEL),
    "no pattern": ("classify", f"none{RED}*.png", "--model", MODEL),
    "no model": ("classify", ONE, "--model", f"./none{RED}"),
    "broken": ("classify", "broken", "--model", MODEL),
    "an option": ("classify", ONE, "--top", RED),
    "no option": ("classify", ONE, f"--{RED}"),
    "no command": (RED,),
    "no folder": ("train", f"none{RED}", "--model", MODEL, "--out", "../run"),
    "one class": ("train", f"{DATA}/one{RED}", "--model", MODEL, "--out", "../run"),
    "no vectors": ("search", f"none{RED}.safetensors", ONE),
    "no place": ("filters", MODEL, "--out", f"none{RED}/a.png"),
}


@pytest.mark.parametrize("words", WRONG.values(), ids=WRONG)
def test_so_they_are_in_errors(run: Run, place: Path, words: tuple[str, ...]) -> None:
    code, out, err = run(*words)
    assert code in (1, 2)
    assert out == ""
    assert err.replace("\n", "").isprintable()
    assert SEEN in err


def test_a_command_to_paste_names_a_picture_that_can_be_named(run: Run, place: Path) -> None:
    words = COMMANDS["train"]
    assert " classify PHOTO.jpg --model " in run("train", *words)[1]
    for name in os.listdir(place / DATA):
        for file in (place / DATA / name).iterdir():
            file.rename(file.with_name(file.name.replace(RED, "")))
    shutil.rmtree(place.parent / f"run{RED}")
    plain = place.rename(place.parent / "plain")
    for folder in sorted(plain.rglob("*")):
        if folder.is_dir() and RED in folder.name and folder.parent.name == DATA:
            folder.rename(folder.with_name(folder.name.replace(RED, "")))
    (plain / DATA).rename(plain / "data")
    out = run("train", plain / "data", "--model", plain / MODEL, "--out", plain.parent / "again", "--epochs", "1")[1]
    assert re.search(rf" classify {plain}/data/(one|two)/\d\.png --model ", out)
    assert (plain.parent / "again" / STATE).exists()
    assert json.loads((plain.parent / "again" / "log.jsonl").read_text())["epoch"] == 1
