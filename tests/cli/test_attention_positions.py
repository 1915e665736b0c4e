"""`vitlite attention`, `distances`, `positions` and `filters`."""

from pathlib import Path

from commands import Run
from PIL import Image

import vitlite
from vitlite.plots import attention_distances, patch_filters


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def test_attention_and_positions(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "map.png"
    code, shown, _ = run("attention", images / "a.png", "--model", model, "--out", out)
    assert code == 0
    width, height = size_of(out)
    assert shown == f"wrote {out}, {width} x {height} pixels\n"
    assert run("attention", images / "a.png", "--model", model, "--rollout", "--size", 32, "--out", out)[0] == 0
    assert size_of(out)[0] < width
    for layer in (-1, 0):  # also where it is the usual one
        words = ("--rollout", "--layer", layer, "--out", out)
        assert "not allowed with argument" in run("attention", images / "a.png", "--model", model, *words)[2]
    assert "got 7" in run("attention", images / "a.png", "--model", model, "--layer", 7, "--out", out)[2]
    assert run("positions", model, "--out", out)[0] == 0
    code, _, err = run("positions", model, "--out", tmp_path / "none" / "map.png")
    assert code == 1
    assert "Pass the path of a .png file in an existing folder" in err
    (tmp_path / "folder.png").mkdir()
    assert "Cannot write the image" in run("positions", model, "--out", tmp_path / "folder.png")[2]
    for name in ("map", "map.txt"):  # said before a model is fetched
        assert "Pass the path of a .png file" in run("attention", images / "a.png", "--out", tmp_path / name)[2]
    assert run("attention", "none.png", "--out", out)[2] == "vitlite: error: No such file: none.png\n"


def test_distances(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "distances.png"
    files = images / "a.png", images / "b.JPG"
    code, shown, _ = run("distances", *files, "--model", model, "--out", out)
    assert code == 0
    first, *blocks, last = shown.splitlines()
    assert first == "mean attention distance in pixels over 2 images, one column per head"
    assert last == f"wrote {out}"
    assert size_of(out) == (840, 560)
    vit = vitlite.load(model)
    expected = sum(attention_distances(vit, vit.preprocess(file))[0] for file in files) / 2
    for i, (line, heads) in enumerate(zip(blocks, expected, strict=True)):
        name, numbers = line.split(":")
        assert name.split() == ["block", str(i)]
        assert numbers.split() == [f"{head:.1f}" for head in heads]
    assert "over 1 image," in run("distances", files[0], "--model", model, "--out", out)[1]
    assert "No such file" in run("distances", "none.png", "--model", model, "--out", out)[2]
    code, _, err = run("distances", images, "--model", model, "--out", out)
    assert code == 0
    assert "1 .txt" in err
    kept = files[0].read_bytes()
    assert str(files[0]) in run("distances", images, "--model", model, "--out", files[0])[2]
    assert files[0].read_bytes() == kept


def test_filters(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "filters.png"
    code, shown, _ = run("filters", model, "--out", out)
    assert code == 0
    width, height = size_of(out)
    vit = vitlite.load(model)
    shares = patch_filters(vit).shares
    said = f"{len(shares)} principal components, {shares.sum():.1%} of the variance of {vit.config.dim} filters"
    assert shown == f"{said}\nwrote {out}, {width} x {height} pixels\n"
    assert "Pass the path of a .png file" in run("filters", model, "--out", tmp_path / "filters.txt")[2]


def test_pca_and_the_similarity_to_a_patch(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "pca.png"
    code, shown, _ = run("pca", images, "--model", model, "--size", 32, "--out", out)
    with Image.open(out) as drawn:
        assert (code, shown) == (0, f"wrote {out}, {drawn.width} x {drawn.height} pixels\n")
        assert drawn.width > 2 * 256
    first = ("pca", images / "a.png", "--model", model, "--size", 32, "--out", out)
    assert run(*first, "--patch", ".5,.5")[0] == 0
    shallow = out.read_bytes()
    assert run(*first, "--patch", ".5,.5", "--layer", 0)[0] == 0
    assert out.read_bytes() != shallow
    assert "must be two fractions, such as 0.5,0.25, got '3'" in run(*first, "--patch", "3")[2]
    assert "must be two fractions from 0 to 1, got 3.0,2.0" in run(*first, "--patch", "3,2")[2]
    assert "Pass exactly one image with --patch" in run(*first[:1], images, *first[2:], "--patch", ".5,.5")[2]
