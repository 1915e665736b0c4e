"""A command line in this process, a small model, and images for it."""

import shutil
from pathlib import Path

import pytest
from commands import Run
from models import small_model
from PIL import Image

from vitlite.cli import main as cli


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there

    def runner(*words: object) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in words])
        return code, *capsys.readouterr()

    return runner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model."""
    return small_model(tmp_path_factory.mktemp("model"), ("one", "two, or more", "three"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images and other files, on two levels."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "inner").mkdir()
    for i, name in enumerate(("a.png", "b.JPG", "inner/c.webp", "inner/d.png")):
        Image.new("RGB", (20 + i, 30), (60 * i, 10, 200 - 60 * i)).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.fixture
def broken(images: Path, tmp_path: Path) -> Path:
    """The same folder with an image cut short between the others."""
    folder = tmp_path / "images"
    shutil.copytree(images, folder)
    (folder / "aa.png").write_bytes((folder / "a.png").read_bytes()[:60])
    return folder
