"""What a run over many pictures says while it works."""

import re
from pathlib import Path

import pytest
from commands import Run, on_a_terminal
from PIL import Image

from vitlite.cli import progress
from vitlite.cli.progress import Lines, Watch
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
    assert "pictures/s" in shown
    assert re.search(
        r"vitlite: \d+\.\d pictures a second; .* what takes long.* waited for pictures \d+ % of the time", shown
    )
    assert "5.png as an image" in shown
    few = on_a_terminal(monkeypatch, "embed", folder / "1.png", *words[2:])
    assert few.startswith("wrote ")


def test_without_a_terminal_a_long_run_says_now_and_then_how_far_it_is(
    run: Run, model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("embed", pictures, "--model", model, "--out", tmp_path / "out.npz")
    assert "are done" not in run(*words)[2]
    monkeypatch.setattr(progress, "EVERY", 0.0)
    lines = [line for line in run(*words)[2].splitlines() if "are done" in line]
    assert lines == [f"vitlite: {done} of 4 pictures are done" for done in (1, 2, 3, 4)]
    shown = on_a_terminal(monkeypatch, *words)
    assert "are done" not in shown


def test_a_line_comes_no_sooner_than_after_its_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 129.0, 131.0, 160.0, 162.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    lines = Lines()
    for text in ("after 29 seconds", "after 31", "29 later", "31 later"):
        lines.say(text)
    assert capsys.readouterr().err == "vitlite: after 31\nvitlite: 31 later\n"


def test_a_reason_without_the_name_gets_it(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [("x.png", ImageError("is broken")), ("y.png", ImageError("y.png is broken"))]
    watch = Watch(2, bar=False)
    assert list(watch.answers(item for item in outcomes)) == []
    assert watch.exit_code() == 1
    assert capsys.readouterr().err.splitlines() == ["vitlite: x.png: is broken", "vitlite: y.png is broken"]


def test_a_reason_speaks_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = ImageError("x.png is large.", python="resize(...) it.", command="Make it smaller.")
    assert list(Watch(1, bar=False).outcomes(item for item in [("x.png", error)])) == [("x.png", error)]
    assert capsys.readouterr().err == "vitlite: x.png is large. Make it smaller.\n"
