"""The wheel, installed outside the checkout, imports, creates, saves and loads."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_docs import blocks_of

ROOT = Path(__file__).parents[1]


WRONG = """\
import vitlite
from PIL import Image

model = vitlite.create("vit_nano_4.cifar10")
model.predict("cat.jpg")[0].label.upper()
model.predict(Image.open("cat.jpg"))[0].label.upper()
model.predict(["cat.jpg"])[0][0].score + 1
next(model.predict(iter(["cat.jpg"])))[0].to_dict()["label"]
model(model.preprocess("cat.jpg")).softmax(-1).argmax()
model.preprocess.one("cat.jpg").shape
model.vectors(["cat.jpg"]).shape
vitlite.images.TransformConfig
model.predict(["cat.jpg"])[0].label  # wrong: one list for each image
model.predict("cat.jpg", top="5")  # wrong
model("cat.jpg")  # wrong
model.vectors(["cat.jpg"], size=3)  # wrong
vitlite.create_model("vit_base_16")  # wrong
"""
OF_UNTYPED_LIBRARIES = re.compile(r'\(has type "Any"\)|\[(import-untyped|import-not-found|no-untyped-call)\]$')


def run(*command: str | Path, folder: Path, path: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    (built,) = folder.glob("vitlite-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    options = ("--quiet", "--no-deps", "--no-index", "--target", target)
    run(sys.executable, "-m", "pip", "install", *options, wheel, folder=target)
    return target


def test_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    assert wheel.stat().st_size <= 8e6
    package = ROOT / "src"
    files = {
        path.relative_to(package).as_posix()
        for path in (package / "vitlite").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    beside = {name for name in names if name.startswith("vitlite-")}
    assert names - beside == files
    assert {"vitlite/py.typed", "vitlite/zoo/data/zoo.txt", "vitlite/zoo/data/labels/imagenet-1k.txt"} <= names
    assert {Path(name).name for name in beside} == {"METADATA", "WHEEL", "entry_points.txt", "LICENSE", "RECORD"}


def test_wheel_requires_four_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
    base = [line for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert sorted(line.split()[1].split(">")[0] for line in base) == [
        "einops",
        "huggingface-hub",
        "safetensors",
        "torch",
    ]
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Dist: onnxruntime; extra == 'onnx'" in lines


USE = """
import torch, vitlite
from pathlib import Path
assert Path(vitlite.__file__).is_relative_to(Path.cwd()), vitlite.__file__
model = vitlite.create("vit_tiny_16", weights=None, image_size=32, num_classes=5).eval()
images = torch.randn(2, 3, 32, 48)
model.save("model")
again = vitlite.load("model")
assert torch.equal(again.embed(images), model.embed(images))
print(len(vitlite.list_models()))
"""


def test_installed_package_creates_saves_and_loads(installed: Path) -> None:
    assert int(run(sys.executable, "-c", USE, folder=installed, path=str(installed))) > 200


def test_installed_command_runs(installed: Path) -> None:
    assert "vit_base_16" in run(installed / "bin" / "vitlite", "list", folder=installed, path=str(installed))


def test_pages_are_clean_for_a_type_checker(tmp_path: Path) -> None:
    """The code of the pages and examples, with the options of `make test`, so that its cache serves here too."""
    for page in ("README.md", "docs/quickstart.md"):
        blocks = [block.text for block in blocks_of(ROOT / page) if block.language == "python"]
        (tmp_path / f"{Path(page).stem.lower()}.py").write_text("\n".join(blocks), encoding="utf-8")
    for example in (ROOT / "examples").glob("*.py"):
        shutil.copy(example, tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(tmp_path)]
    environment = os.environ | {"MYPYPATH": "src"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if ": error: " in line and not OF_UNTYPED_LIBRARIES.search(line)]
    errors = [Path(line.split(": error: ")[0]).name for line in found]
    wrong = [f"wrong.py:{i}" for i, line in enumerate(WRONG.splitlines(), 1) if "# wrong" in line]
    assert errors == wrong, done.stdout + done.stderr


def test_embedded_model_works_offline(installed: Path) -> None:
    code = (
        "import socket, torch, vitlite; socket.socket.connect = None\n"
        "model = vitlite.create('vit_nano_4.cifar10')\n"
        "print(len(model.labels), *model(torch.zeros(1, 3, 32, 32)).shape)"
    )
    assert run(sys.executable, "-c", code, folder=installed, path=str(installed)) == "10 1 10\n"
