"""Images of folders and of CIFAR-10."""

import doctest
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import new_model, small_cifar10, stripes

from vitlite.errors import ImageError, TrainError
from vitlite.training import data, distributed
from vitlite.training.data import HOLDOUT, PreparedImages, class_indices, class_names, read_cifar10, read_folder

CLASSES = ("lying", "standing")


def test_examples() -> None:
    assert doctest.testmod(data).failed == 0
    assert doctest.testmod(data).attempted > 0


def test_folders_without_classes_or_images_are_errors(tmp_path: Path, folders: Path) -> None:
    with pytest.raises(
        TrainError, match=r"nowhere does not exist\. Pass a folder that contains one folder of images per class"
    ):
        class_names(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainError, match="contains no folders"):
        class_names(tmp_path / "empty")
    with pytest.raises(TrainError, match="has the folders standing, but the classes are lying, sitting"):
        read_folder(folders / "val", torch.tensor, ("lying", "sitting"))
    (folders / "val" / "asleep").mkdir()
    with pytest.raises(TrainError, match="asleep contains no images"):
        read_folder(folders / "val", torch.tensor, ("asleep", "lying", "standing"))


def test_linked_folders_are_followed(tmp_path: Path, folders: Path) -> None:
    for name in CLASSES:
        (tmp_path / "linked" / name / "part.png").mkdir(parents=True)  # a folder, whatever its name
        (tmp_path / "linked" / name / "part.png" / "here").symlink_to(folders / "train" / name)
    expected, found = (read_folder(place, torch.tensor, CLASSES) for place in (folders / "train", tmp_path / "linked"))
    assert found.labels.tolist() == expected.labels.tolist()
    assert [path.name for path in found.files()] == [path.name for path in expected.files()]


def test_hidden_files_are_left_out(folders: Path) -> None:
    """Jupyter leaves copies in .ipynb_checkpoints, which would be held out beside their originals."""
    place = folders / "train" / "lying"
    for name in (".ipynb_checkpoints/0.png", "deeper/.cache/1.png", "._2.png"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(place / "0.png", place / name)
    assert len(read_folder(folders / "train", torch.tensor, CLASSES)) == 24


def test_skipped_files_are_counted(
    folders: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    val, read = folders / "val", new_model().preprocess.pixels
    for name in ("a.NEF", "b.nef", "c.dng", "bare", ".hidden"):
        (val / "lying" / name).touch()
    (val / "standing" / "d.nef").touch()
    assert len(read_folder(val, read, CLASSES)) == 8
    (message,) = caplog.messages
    assert message.startswith(f"vitlite: {val}: skipped files that are not images: 3 .nef, 1 .dng, 1 ")
    for image in (val / "standing").glob("*.png"):
        image.unlink()
    with pytest.raises(TrainError, match=r"standing contains no images \(.*\), only 1 \.nef\. .*convert"):
        read_folder(val, read, CLASSES)
    caplog.clear()
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    read_folder(val.parent / "train", read, CLASSES)
    assert not caplog.messages


def test_images_beside_the_class_folders_are_counted(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    val, read = folders / "val", new_model().preprocess.pixels
    for name in ("loose.png", ".hidden.png", "labels.csv"):
        shutil.copy(val / "lying" / "0.png", val / name)
    assert len(read_folder(val, read, CLASSES)) == 8
    assert caplog.messages == [f"vitlite: {val}: skipped 1 image beside the class folders"]
    (val / "standing" / "d.nef").touch()
    shutil.copy(val / "loose.png", val / "other.png")
    read_folder(val, read, CLASSES)
    assert caplog.messages[-2:] == [
        f"vitlite: {val}: skipped files that are not images: 1 .nef",
        f"vitlite: {val}: skipped 2 images beside the class folders",
    ]


def test_folders_of_a_mac_are_the_same_class(folders: Path) -> None:
    """macOS writes letters and accents separately, as other programs do not."""
    train, composed, decomposed = folders / "train", "K\u00e4tzchen", "Ka\u0308tzchen"
    shutil.copytree(train / "lying", train / composed)
    (train / "lying").rename(train / decomposed)
    assert class_names(train) == (composed, "standing")
    for name in (composed, decomposed):
        images = read_folder(train, torch.tensor, (name, "standing"))
        assert images.classes == (composed, "standing")
        assert images.labels.bincount().tolist() == [24, 12]
        assert class_indices([composed, "standing"], ["standing", name]) == [1, 0]


INVALID = {
    "floats": (lambda data: {"images": data.images / 255}, r"needs uint8 images .* of torch.float32\. If the values"),
    "one": (lambda data: {"images": data.images[0]}, r"needs uint8 images \(n, c, h, w\), got \(3, 16, 16\)"),
    "fewer labels": (lambda data: {"labels": data.labels[:5]}, r"got 8 images and labels \(5,\)"),
    "other labels": (lambda data: {"labels": data.labels.float()}, r"labels \(8,\) of torch.float32"),
    "none": (lambda data: {"images": data.images[:0], "labels": data.labels[:0]}, "at least one image.* got 0"),
    "fewer classes": (lambda data: {"classes": ("lying",)}, "labels must be from 0 to 0, got 0 to 1"),
    "from -1": (lambda data: {"labels": data.labels - 1}, "must be from 0 to 1, got -1 to 0. List every class"),
}


@pytest.mark.parametrize("kind", INVALID)
def test_invalid_image_data_is_an_error(kind: str) -> None:
    change, text = INVALID[kind]
    valid = stripes(8)
    with pytest.raises(TrainError, match=text):
        replace(valid, **change(valid))


def test_folders_are_named_after_classes_or_indices() -> None:
    classes = ("dog", "cat", "1", "crane", "crane")
    assert class_indices(["cat", "dog"], classes) == [1, 0]
    assert class_indices(["000", "04"], classes) == [0, 4]
    assert class_indices(["1"], classes) == [2]  # the name of a class comes first
    for names in (["dogs", "cat"], ["Dog"], ["n01", "n02"], ["0", "5"], ["0", "1"]):
        with pytest.raises(TrainError, match=r"The model has 5 classes .*none named .* \(--classes FILE\)"):
            class_indices(names, classes)
    with pytest.raises(TrainError, match=r"has 2 classes named crane\. Rename the folders to class indices"):
        class_indices(["crane", "dog"], classes)
    turned = stripes(8).with_classes(("standing", "lying", "sitting"))
    assert torch.equal(turned.labels, 1 - stripes(8).labels)
    assert turned.classes == ("standing", "lying", "sitting")


def test_cifar10_binary_version(tmp_path: Path) -> None:
    folder = small_cifar10(tmp_path / "data")
    parts = [read_cifar10(folder, split) for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [1500 - HOLDOUT, HOLDOUT, 300]
    first = (folder / "data_batch_1.bin").read_bytes()[1:3073]
    assert bytes(parts[0].images[0].flatten().tolist()) == first
    assert parts[0].labels[:4].tolist() == [0, 1, 0, 1]
    assert parts[0].classes == ("plane", "car")
    resized = read_cifar10(folder, "test", new_model().preprocess.pixels).fetch(torch.tensor([0, 7]))[0]
    assert resized.shape == (2, 3, 16, 16)


def test_damaged_cifar10_is_an_error(tmp_path: Path) -> None:
    folder = small_cifar10(tmp_path / "data", b"plane\n")
    with pytest.raises(TrainError, match=r"contains the label 1, but batches.meta.txt lists only 1 classes"):
        read_cifar10(folder, "train")
    (folder / "batches.meta.txt").unlink()
    with pytest.raises(TrainError, match=r"batches.meta.txt, which lists the classes of CIFAR-10, is missing"):
        read_cifar10(folder, "train")
    (folder / "data_batch_2.bin").write_bytes(b"short")
    with pytest.raises(
        TrainError, match=r"data_batch_2.bin is damaged\. It has 5 bytes, which is not a multiple of 3,073"
    ):
        read_cifar10(folder, "train")
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(TrainError, match=r"data_batch_2.bin, one of the six .bin files of CIFAR-10, is missing"):
        read_cifar10(folder, "train")


def test_long_lists_of_names_are_shortened() -> None:
    names = [f"n{i}" for i in range(9)]
    assert data.listed(names[:8]) == "n0, n1, n2, n3, n4, n5, n6, n7"
    assert data.listed(names) == "n0, n1, n2, n3, n4, n5, n6, n7, … (9 in all)"


def test_prepared_images_are_cached_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr(data, "CACHE", 2 * 3 * 16 * 16)  # two images
    prepared = PreparedImages(stripes(3).images, lambda image: (read.append(image), image)[1])
    for _ in range(2):
        for row in range(3):
            (image,) = prepared.try_rows([row])
            assert torch.equal(image, prepared.sources[row])
    assert len(read) == 4


def test_a_read_function_that_gives_floats_is_an_error(folders: Path) -> None:
    images = read_folder(folders / "train", lambda path: torch.zeros(3, 16, 16), CLASSES)
    with pytest.raises(TrainError, match=r"must return uint8 images, got torch\.float32"):
        images.fetch(torch.arange(24))


def test_the_digest_tells_data_apart(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(folder: Path) -> str:
        return read_folder(folder, new_model().preprocess.pixels, CLASSES).digest()

    before, lying = digest(folders / "train"), folders / "train" / "lying"
    monkeypatch.chdir(folders)
    assert digest(Path("train")) == before  # wherever the folder is
    (lying / "0.png").rename(lying / "00.png")
    renamed = digest(folders / "train")
    (lying / "00.png").unlink()
    assert len({before, renamed, digest(folders / "train")}) == 3
    memory = stripes(24)
    others = (memory, replace(memory, labels=1 - memory.labels), replace(memory, images=memory.images.flip(0)))
    assert len({other.digest() for other in others}) == 3


def test_another_image_of_the_class_takes_the_place_of_a_broken_one(folders: Path) -> None:
    train = folders / "train"
    for name in ("lying/0.png", "lying/22.png"):  # the first and, of those in order, one in the middle
        (train / name).write_bytes((train / name).read_bytes()[:50])
    (train / "standing" / "1.png").unlink()
    (train / "standing" / "1.png").symlink_to("nowhere")
    data = read_folder(train, new_model().preprocess.pixels, CLASSES)
    names = data.names()
    images, rows = data.readable(torch.arange(24))
    assert len(images) == 21
    assert data.broken() == ["lying/0.png", "lying/22.png", "standing/1.png"]
    assert sorted(set(range(24)) - set(rows.tolist())) == [names.index(name) for name in data.broken()]
    fetched, labels = data.fetch(torch.arange(24))
    assert torch.equal(labels, data.labels)
    for name in data.broken():
        row = names.index(name)
        assert torch.equal(fetched[row], fetched[row + 1])
        assert data.labels[row] == data.labels[row + 1]
    again = read_folder(train, new_model().preprocess.pixels, CLASSES)
    order = torch.arange(24).flip(0)
    assert torch.equal(again.fetch(order)[0].flip(0), fetched)  # in whatever order they are met
    strict = read_folder(train, new_model().preprocess.pixels, CLASSES, strict=True)
    with pytest.raises(ImageError, match=r"0\.png"):
        strict.fetch(torch.tensor([0]))


def test_a_class_without_readable_images_is_an_error(folders: Path) -> None:
    for path in (folders / "train" / "lying").iterdir():
        path.write_bytes(b"")
    data = read_folder(folders / "train", new_model().preprocess.pixels, CLASSES)
    with pytest.raises(TrainError, match=r"Cannot read any image of the class lying\. Cannot read .*png"):
        data.fetch(torch.arange(3))
