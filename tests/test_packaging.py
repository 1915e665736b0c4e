"""A small program that uses vitlite runs from a zip archive and as a folder made by PyInstaller, without a network."""

import os
import shutil
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

import vitlite

ROOT = Path(__file__).parents[1]
CLASSIFIER = '''\
"""Name what is in a photo."""

import sys

import vitlite


def main() -> None:
    model = vitlite.create("vit_nano_4.cifar10")
    for photo in sys.argv[1:]:
        try:
            best = model.predict(photo, top=1)[0]
        except vitlite.VitliteError as error:
            print(error)
        else:
            print(f"{best.label} {best.score:.2f}")


if __name__ == "__main__":
    main()
'''


def answer(*command: str | Path, folder: Path) -> str:
    """Return what a program says about a photo, where there is neither a network nor a checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "VITLITE_CACHE": str(folder / "cache")}
    photo = ROOT / "examples" / "photos" / "chelsea.png"
    done = subprocess.run([*command, photo], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_program_runs_from_a_zip_archive(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.mkdir()
    (program / "__main__.py").write_text(CLASSIFIER, encoding="utf-8")
    shutil.copytree(Path(vitlite.__file__).parent, program / "vitlite", ignore=shutil.ignore_patterns("__pycache__"))
    zipapp.create_archive(program, tmp_path / "classify.pyz")
    assert answer(sys.executable, tmp_path / "classify.pyz", folder=tmp_path) == "cat 0.81\n"


@pytest.mark.release
def test_a_program_runs_as_a_folder_of_pyinstaller(tmp_path: Path) -> None:
    pytest.importorskip("PyInstaller")
    program = tmp_path / "classify.py"
    program.write_text(CLASSIFIER, encoding="utf-8")
    options = ("--onedir", "--noconfirm", "--log-level", "WARN")
    command = [sys.executable, "-m", "PyInstaller", *options, program]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=1800)
    assert answer(tmp_path / "dist" / "classify" / "classify", folder=tmp_path) == "cat 0.81\n"
