"""Options that several commands share."""

import argparse
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from commands import Run

from vitlite.cli.main import COMMANDS, Parser, command
from vitlite.cli.options import is_place

NO_PATHS = {  # options with a text that is no place on the disk
    "list": {"words"}, "download": {"names"}, "convert": {"--like"}, "bench": {"--models", "--device"},
}  # fmt: skip


def test_options_reach_the_model(run: Run, model: Path, pictures: Path) -> None:
    words = ("classify", pictures / "a.png", "--format", "jsonl", "--model", model)
    plain = run(*words)[1]
    assert run(*words, "--device", "cpu", "--dtype", "float32", "--batch", 1)[1] == plain
    assert run(*words, "--dtype", "bfloat16")[1] != plain
    assert run(*words, "--size", "32x48")[1] != plain
    assert run(*words, "--size", "17")[0] == 1
    assert "--device tpu cannot be used here. This machine has: cpu" in run(*words, "--device", "tpu")[2]
    [row], [fast] = ([json.loads(line) for line in text.splitlines()] for text in (plain, run(*words, "--fast")[1]))
    assert [p["score"] for p in fast["predictions"]] == pytest.approx(
        [p["score"] for p in row["predictions"]], abs=1e-5
    )


def test_a_wrong_device_is_answered_with_those_that_are_there(
    run: Run, model: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("classify", pictures / "a.png", "--model", model, "--device", "tpu")
    for backend in (torch.cuda, torch.backends.mps):
        monkeypatch.setattr(backend, "is_available", lambda: True)
    assert run(*words)[2] == "vitlite: error: --device tpu cannot be used here. This machine has: cpu, cuda, mps.\n"


def test_without_a_network_the_error_names_what_needs_none(run: Run, pictures: Path) -> None:
    code, out, err = run("classify", pictures / "a.png")
    assert (code, out) == (1, "")
    assert "--model vit_nano_4.cifar10" in err
    assert "There is no file or folder nothing" in run("classify", pictures / "a.png", "--model", "./nothing")[2]
    assert run("classify", pictures / "a.png", "--model", "vit_nano_4", "--weights", "")[0] == 1


def test_a_missing_pillow_is_said_before_the_model_is_fetched(
    run: Run, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    for words in (("classify", pictures), ("embed", pictures, "--out", tmp_path / "out.npz")):
        assert run(*words)[2].endswith("needs an optional package. Install it: pip install 'vitlite[images]'\n")


def test_names_paths_and_repositories() -> None:
    assert not is_place("vit_base_16")
    assert not is_place("timm/deit_tiny_patch16_224.fb_in1k")  # an alias of the zoo
    assert not is_place("vit_bas_16")  # neither: create says what is near
    assert is_place("google/vit-base-patch16-224")
    assert is_place("./vit_base_16")
    assert is_place(".")


@pytest.mark.parametrize("line", ["classify {}", "embed {} --out x.npz", "attention {} --out x.png"])
@pytest.mark.parametrize("url", ["https://example.com/cat.jpg", "https://example.com/a.jpg?width=3&height=[4]"])
def test_a_url_is_answered_with_what_fetches_it(run: Run, line: str, url: str) -> None:
    code, _, err = run(*line.format(url).split())
    assert code == 1
    assert f"vitlite: error: {url}: it is a URL, and vitlite opens files. Fetch it, and name the file: curl" in err


def takes_text(action: argparse.Action) -> bool:
    """Whether any text will do: no number, and no choice of some words."""
    if action.nargs == 0 or action.choices:
        return False
    try:
        (action.type or str)("~/x")  # type: ignore[operator]
    except (argparse.ArgumentTypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("name", COMMANDS)
def test_every_path_on_the_command_line_has_its_home_spelt_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in --out=~/run, where no shell does it. Of a new option that takes a text, NO_PATHS says if it is none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    parser = Parser()
    command(name).add_arguments(parser)
    for action in parser._actions:
        option = action.option_strings[0] if action.option_strings else action.dest
        if takes_text(action) and option not in NO_PATHS.get(name, {"--device"}):
            assert action.type, option
            assert str(action.type("~/x")) == os.path.join(tmp_path, "x"), option  # type: ignore[operator]


def test_an_empty_path_is_not_the_current_folder(run: Run, pictures: Path) -> None:
    for words in (("train", pictures, "--model", "vit_nano_4", "--out", ""), ("eval", ""), ("bench", "--out", " ")):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert "' is no path (was a variable not set?). The current folder is '.'" in err
