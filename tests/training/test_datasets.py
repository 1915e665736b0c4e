"""Pictures of folders and of CIFAR-10: what they are, and what they must not be."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_run import new_model, small_cifar10, stripes

from vitlite.errors import TrainError
from vitlite.training.datasets import HOLDOUT, class_names, read_cifar10, read_folder

ROOT = Path(__file__).parents[2]


def test_folders_that_are_no_data(tmp_path, folders):
    with pytest.raises(TrainError, match=r"no folder .*nowhere.*a folder per class"):
        class_names(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainError, match="holds no folders"):
        class_names(tmp_path / "empty")
    with pytest.raises(TrainError, match="has the classes standing, and those of the model are lying, sitting"):
        read_folder(folders / "val", torch.tensor, ("lying", "sitting"))
    (folders / "val" / "asleep").mkdir()
    with pytest.raises(TrainError, match="asleep holds no pictures"):
        read_folder(folders / "val", torch.tensor, ("asleep", "lying", "standing"))


WRONG = {
    "floats": (lambda data: {"images": data.images / 255}, r"of uint8, got \(8, 3, 16, 16\) of torch.float32\. Those"),
    "one": (lambda data: {"images": data.images[0]}, r"\(n, c, h, w\) of uint8, got \(3, 16, 16\)"),
    "fewer labels": (lambda data: {"labels": data.labels[:5]}, r"got 8 images and labels \(5,\)"),
    "other labels": (lambda data: {"labels": data.labels.float()}, r"labels \(8,\) of torch.float32"),
    "none": (lambda data: {"images": data.images[:0], "labels": data.labels[:0]}, "at least one image.* got 0"),
    "fewer classes": (lambda data: {"classes": ("lying",)}, "has 1 classes, whose labels are 0 to 0, got 0 to 1"),
    "from -1": (lambda data: {"labels": data.labels - 1}, "labels are 0 to 1, got -1 to 0. Name every class"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_pictures_that_make_no_sense(kind):
    change, text = WRONG[kind]
    data = stripes(8)
    with pytest.raises(TrainError, match=text):
        replace(data, **change(data))


def test_cifar10_binary_version(tmp_path):
    folder = small_cifar10(tmp_path / "data")
    parts = [read_cifar10(folder, split) for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [1500 - HOLDOUT, HOLDOUT, 300]
    first = (folder / "data_batch_1.bin").read_bytes()[1:3073]
    assert bytes(parts[0].images[0].flatten().tolist()) == first
    assert parts[0].labels[:4].tolist() == [0, 1, 0, 1]
    assert parts[0].classes == ("plane", "car")
    model = new_model()
    resized = read_cifar10(folder, "test", model.preprocess.pixels).fetch(torch.tensor([0, 7]))
    assert resized.shape == (2, 3, 16, 16)


def test_damaged_small_cifar10(tmp_path):
    folder = small_cifar10(tmp_path / "data", b"plane\n")
    with pytest.raises(TrainError, match=r"has the label 1, and batches.meta.txt names 1 classes"):
        read_cifar10(folder, "train")
    (folder / "batches.meta.txt").unlink()
    with pytest.raises(TrainError, match=r"no batches.meta.txt"):
        read_cifar10(folder, "train")
    (folder / "data_batch_2.bin").write_bytes(b"short")
    with pytest.raises(TrainError, match=r"data_batch_2.bin has 5 bytes, which is no multiple of 3,073"):
        read_cifar10(folder, "train")
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(TrainError, match=r"data_batch_2.bin is missing"):
        read_cifar10(folder, "train")


def prepare():
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "examples" / "cifar10" / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prepare_builds_the_binary_version_from_pngs(tmp_path, monkeypatch, capsys):
    source, generator = tmp_path / "package", torch.Generator().manual_seed(0)
    source.mkdir()
    pixels = torch.randint(0, 256, (6, 2, 1024, 3), generator=generator, dtype=torch.uint8)
    for i, rows in enumerate(pixels, 1):
        Image.fromarray(rows.numpy()).save(source / (f"data_batch_{i}.png" if i < 6 else "test_batch.png"))
    (source / "train_lables.json").write_text(json.dumps(list(range(10))))
    (source / "test_lables.json").write_text("[7, 8]")
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(source), str(tmp_path / "bin")])
    prepare().main()
    test = read_cifar10(tmp_path / "bin", "test")
    assert test.labels.tolist() == [7, 8]
    assert torch.equal(test.images[1, 2].flatten(), pixels[5, 1, :, 2])
    assert (tmp_path / "bin" / "data_batch_5.bin").read_bytes()[3073] == 9
    assert "data_batch_1.bin  2 images" in capsys.readouterr().out


def test_prepare_opens_no_pickle_that_is_not_the_published_one(tmp_path, monkeypatch):
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path), str(tmp_path / "bin")])
    with pytest.raises(SystemExit, match=r"data_batch_1 has md5 .* It was not opened"):
        prepare().main()
    assert not (tmp_path / "bin").exists()
