"""What a run over many images prints while it works."""

import re
from pathlib import Path

import pytest
from commands import Run, on_a_terminal
from PIL import Image

from vitlite.cli import progress
from vitlite.cli.progress import ImageProgress, Lines
from vitlite.errors import ImageError


def test_a_long_run_has_a_progress_bar(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(60):
        Image.new("RGB", (8, 8), (i, i, i)).save(folder / f"{i}.png")
    (folder / "5.png").write_bytes(b"")
    words = ("embed", folder, "--model", model, "--out", tmp_path / "out.npz")
    shown = on_a_terminal(monkeypatch, *words, columns=100, code=1)
    assert "60/60" in shown
    assert "images/s" in shown
    assert re.search(r"vitlite: \d+\.\d images/s; the model waited for images \d+ % of the time", shown)
    assert "5.png" in shown
    few = on_a_terminal(monkeypatch, "embed", folder / "1.png", *words[2:])
    assert few.startswith("wrote ")


def test_without_a_terminal_progress_is_printed_in_lines(
    run: Run, model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("embed", images, "--model", model, "--out", tmp_path / "out.npz")
    assert "are done" not in run(*words)[2]
    monkeypatch.setattr(progress, "EVERY", 0.0)
    lines = [line for line in run(*words)[2].splitlines() if "are done" in line]
    assert lines == [f"vitlite: {done} of 4 images are done" for done in (1, 2, 3, 4)]
    shown = on_a_terminal(monkeypatch, *words)
    assert "are done" not in shown


def test_lines_are_half_a_minute_apart(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 129.0, 131.0, 160.0, 162.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    lines = Lines()
    for text in ("after 29 seconds", "after 31", "29 later", "31 later"):
        lines.say(text)
    assert capsys.readouterr().err == "vitlite: after 31\nvitlite: 31 later\n"


def test_a_broken_image_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [("x.png", ImageError("is broken")), ("y.png", ImageError("y.png is broken"))]
    shown = ImageProgress(2, bar=False)
    assert list(shown.answers(item for item in outcomes)) == []
    assert shown.exit_code() == 1
    assert capsys.readouterr().err.splitlines() == [
        "vitlite: x.png: is broken",
        "vitlite: y.png is broken",
        "vitlite: 2 images could not be read: x.png, y.png",
    ]


def test_broken_images_are_counted_and_the_first_eight_named(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [(f"{i}.png", ImageError("is broken") if i else "a cat") for i in range(10)]
    shown = ImageProgress(10, bar=False, verb="classified")
    assert list(shown.answers(item for item in outcomes)) == [("0.png", "a cat")]
    names = ", ".join(f"{i}.png" for i in range(1, 9))
    last = ["vitlite: 1 image classified", f"vitlite: 9 images could not be read: {names}, …"]
    assert capsys.readouterr().err.splitlines()[9:] == last
    with pytest.raises(ImageError, match=r"^1\.png: is broken$"):
        list(ImageProgress(10, bar=False, strict=True).answers(item for item in outcomes))
