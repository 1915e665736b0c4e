"""Finding files below folders."""

import os
from pathlib import Path

import pytest

from vitlite.inference.find import by_ending, files_below, find_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", ".b.png", "c/d.JPG", ".e/f.png", "c/.g/h.png", "c/notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def found(folder: Path, **options: bool) -> list[str]:
    return sorted(os.path.relpath(path, folder).replace(os.sep, "/") for path in files_below(str(folder), **options))


def test_hidden_files_can_be_left_out(folder: Path) -> None:
    assert found(folder, hidden=False) == ["a.png", "c/d.JPG", "c/notes.md"]
    assert found(folder) == [".b.png", ".e/f.png", "a.png", "c/.g/h.png", "c/d.JPG", "c/notes.md"]


def test_links_are_followed_once(folder: Path) -> None:
    (folder / "c" / "parent").symlink_to(folder)
    (folder / "again").symlink_to(folder / "c")
    (folder / "missing.png").symlink_to("nothing")
    assert found(folder, hidden=False) == [
        "a.png",
        "again/d.JPG",
        "again/notes.md",
        "c/d.JPG",
        "c/notes.md",
        "missing.png",
    ]


def test_a_list_may_begin_with_a_byte_order_mark(folder: Path) -> None:
    lines = ["\ufeff" + f"{folder / 'a.png'}\r\n", "\r\n", f"{folder / 'c/d.JPG'}\r\n"]
    assert find_images(["-"], lines) == [str(folder / "a.png"), str(folder / "c/d.JPG")]


def test_files_are_grouped_by_ending(folder: Path) -> None:
    images, others = by_ending(files_below(str(folder), hidden=False), [".png", ".jpg"])
    assert sorted(map(os.path.basename, images)) == ["a.png", "d.JPG"]
    assert others == {".md": 1}


def test_files_of_macos_with_the_attributes_of_an_image_are_skipped(tmp_path: Path) -> None:
    for name in ("IMG.jpg", "._IMG.jpg", ".hidden.jpg"):
        (tmp_path / name).write_bytes(b"")
    skipped: list[object] = []
    found = find_images([str(tmp_path)], on_skip=skipped.append)
    assert [Path(path).name for path in found] == [".hidden.jpg", "IMG.jpg"]
    assert not skipped
    assert find_images([str(tmp_path / "._IMG.jpg")])  # named by the user
