"""Options that several commands share."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from commands import Run

from vitlite.cli import options
from vitlite.cli.options import is_place
from vitlite.fast.int8 import int8_is_right


def test_options_reach_the_model(run: Run, model: Path, images: Path) -> None:
    words = ("classify", images / "a.png", "--format", "jsonl", "--model", model)
    plain = run(*words)[1]
    assert run(*words, "--device", "cpu", "--dtype", "float32", "--batch", 1)[1] == plain
    assert run(*words, "--dtype", "bfloat16")[1] != plain
    assert run(*words, "--size", "32x48")[1] != plain
    assert run(*words, "--size", "17")[0] == 1
    [row], [fast] = ([json.loads(line) for line in text.splitlines()] for text in (plain, run(*words, "--fast")[1]))
    assert [p["score"] for p in fast["predictions"]] == pytest.approx(
        [p["score"] for p in row["predictions"]], abs=1e-5
    )


@pytest.mark.skipif(not int8_is_right(torch.float32), reason="int8 is not available on this CPU")
def test_int8_is_close_to_float32(run: Run, model: Path, images: Path) -> None:
    words = ("classify", images / "a.png", "--format", "jsonl", "--model", model)
    plain, int8 = run(*words), run(*words, "--fast", "--dtype", "int8", "--calibrate", images)
    assert int8[0] == 0
    assert int8[1] != plain[1]
    right, found = (json.loads(out)["predictions"] for _, out, _ in (plain, int8))
    assert [row["score"] for row in found] == pytest.approx([row["score"] for row in right], abs=0.02)


@pytest.mark.parametrize(("there", "last"), [(1, 0), (32, 31), (40, 38), (100, 96)])
def test_calibration_images_are_spread_over_the_folder(tmp_path: Path, there: int, last: int) -> None:
    for number in range(there):
        (tmp_path / f"{number:03}.png").touch()
    numbers = [int(Path(path).stem) for path in options._calibration_images(str(tmp_path))]
    assert (len(numbers), numbers[0], numbers[-1]) == (min(there, 32), 0, last)
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--dtype", "int8"], "--dtype int8 needs --fast and --calibrate. Add --fast --calibrate FOLDER"),
        (["--dtype", "int8", "--fast"], "--dtype int8 needs --fast and --calibrate. Add --fast --calibrate FOLDER"),
        (["--fast", "--calibrate", "images"], "--calibrate is only used with --fast --dtype int8"),
        (["--device", "tpu"], "Cannot use the device"),
        (["--model", "./nothing"], "There is no file or folder nothing"),
    ],
)
def test_options_that_do_not_fit(run: Run, model: Path, images: Path, words: list[str], text: str) -> None:
    code, out, err = run("classify", images / "a.png", "--model", model, *words)
    assert (code, out) == (1, "")
    assert text in err


def test_a_missing_pillow_is_reported_before_the_model_is_downloaded(
    run: Run, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    for words in (("classify", images), ("embed", images, "--out", tmp_path / "out.npz")):
        assert run(*words)[2].endswith("needs an optional package. Install it: pip install 'vitlite[images]'\n")


def test_names_paths_and_repositories() -> None:
    assert not is_place("vit_base_16")
    assert not is_place("timm/deit_tiny_patch16_224.fb_in1k")  # an alias of the zoo
    assert not is_place("vit_bas_16")  # neither: create suggests a name
    assert is_place("google/vit-base-patch16-224")
    assert is_place("./vit_base_16")
    assert is_place(".")


def test_a_home_folder_is_expanded(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    assert run("info", f"~/{model.name}")[0] == 0


def test_an_empty_path_is_not_the_current_folder(run: Run, images: Path) -> None:
    for words in (("train", images, "--model", "vit_nano_4", "--out", ""), ("eval", "")):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert "the path is empty (is a variable unset?)" in err


def test_an_output_is_not_an_input(model: Path, images: Path, tmp_path: Path) -> None:
    args = Namespace(paths=[str(images / "a.png")], model=str(model), weights=None)
    link = tmp_path / "link.png"
    link.symlink_to(images / "a.png")
    for out in (images / "a.png", link, model / "model.safetensors"):
        with pytest.raises(options.InputError, match="is also an input"):
            options.check_not_an_input(out, args)
    options.check_not_an_input(tmp_path / "new.png", args)
    options.check_not_an_input(model / "config.json", Namespace(paths=[], model="vit_nano_4", weights=None))
