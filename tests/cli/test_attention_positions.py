"""`vitlite attention` and `vitlite positions`."""

from pathlib import Path

from commands import Run
from PIL import Image


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def test_attention_and_positions(run: Run, model: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "map.png"
    code, shown, _ = run("attention", pictures / "a.png", "--model", model, "--out", out)
    assert code == 0
    width, height = size_of(out)
    assert shown == f"wrote {out}, {width} x {height} pixels\n"
    assert run("attention", pictures / "a.png", "--model", model, "--rollout", "--size", 32, "--out", out)[0] == 0
    assert size_of(out)[0] < width
    assert "--layer has 7;" in run("attention", pictures / "a.png", "--model", model, "--layer", 7, "--out", out)[2]
    assert run("positions", model, "--out", out)[0] == 0
    code, _, err = run("positions", model, "--out", tmp_path / "none" / "map.png")
    assert code == 1
    assert "Name a .png file in a folder that exists" in err
    (tmp_path / "folder.png").mkdir()
    assert "Cannot write the picture" in run("positions", model, "--out", tmp_path / "folder.png")[2]
    for name in ("map", "map.txt"):  # said before a model is fetched
        assert "Name a .png file" in run("attention", pictures / "a.png", "--out", tmp_path / name)[2]
    assert run("attention", "none.png", "--out", out)[2] == "vitlite: error: No such file: none.png\n"
