"""What a run over many pictures says while it works."""

import re
from pathlib import Path

import pytest
from commands import on_a_terminal
from PIL import Image

from vitlite.cli.progress import Watch
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
    assert "5.png as a picture" in shown
    few = on_a_terminal(monkeypatch, "embed", folder / "1.png", *words[2:])
    assert few.startswith("wrote ")


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
