"""Pictures of folders and of CIFAR-10: what they are, and what they must not be."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_run import TRANSFORM, new_model, settings, small_cifar10, stripes

from vitlite.errors import ImageError, TrainError
from vitlite.images import Preprocess
from vitlite.inference import predict
from vitlite.training import datasets, distributed, train
from vitlite.training.datasets import (
    HOLDOUT,
    Prepared,
    class_names,
    in_one_order,
    names_below,
    read_cifar10,
    read_folder,
)


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


def test_a_pipe_among_the_pictures_is_left_out_and_said(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To read it would take for ever."""
    os.mkfifo(folders / "train" / "lying" / "pipe.png")
    assert len(read_folder(folders / "train", torch.tensor, ("lying", "standing"))) == 24
    (said,) = caplog.messages
    assert "skipped 1 pipe or device (what is read ends in" in said


def test_links_to_folders_of_pictures_are_followed(tmp_path, folders):
    names = class_names(folders / "train")
    (tmp_path / "linked").mkdir()
    for name in names:
        (tmp_path / "linked" / name / "part.png").mkdir(parents=True)  # a folder, whatever its name
        (tmp_path / "linked" / name / "part.png" / "here").symlink_to(folders / "train" / name)
    expected, found = (read_folder(place, torch.tensor, names) for place in (folders / "train", tmp_path / "linked"))
    assert found.labels.tolist() == expected.labels.tolist()
    assert [path.name for path in found.images.pictures] == [path.name for path in expected.images.pictures]


def test_what_is_hidden_is_no_picture(folders: Path) -> None:
    """Jupyter leaves copies in .ipynb_checkpoints: one side of a split would hold what is on the other."""
    place = folders / "train" / "lying"
    for name in (".ipynb_checkpoints/0.png", "deeper/.cache/1.png", "._2.png"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(place / "0.png", place / name)
    assert len(read_folder(folders / "train", torch.tensor, ("lying", "standing"))) == 24


def test_a_file_counts_once_under_all_its_names(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = folders / "train"
    before = [str(path) for path in read_folder(train, torch.tensor, ("lying", "standing")).images.pictures]
    (train / "standing" / "zz.png").hardlink_to(train / "standing" / "1.png")
    (train / "standing" / "nowhere.png").symlink_to("gone.png")  # whoever reads it says so
    found = read_folder(train, torch.tensor, ("lying", "standing"))
    assert [str(path) for path in found.images.pictures if path.name != "nowhere.png"] == before
    assert len(found) == 25
    (said,) = caplog.messages
    assert said.startswith(f"vitlite: {train}: skipped 1 repeated by a link (what is read")


def test_a_file_of_two_classes_is_refused(folders: Path) -> None:
    train = folders / "train"
    (train / "standing" / "more").symlink_to(train / "lying")
    with pytest.raises(TrainError, match=r"lying/0\.png and standing/more/0\.png are one file, by a link, and of two"):
        read_folder(train, torch.tensor, ("lying", "standing"))


def test_a_picture_is_taken_once_whatever_stands_beside_it(tmp_path, folders, caplog):
    """Else one of its names would be held out, and another trained on."""
    names = class_names(folders / "train")
    expected = read_folder(folders / "train", torch.tensor, names).images.pictures
    lying = folders / "train" / "lying"
    shutil.copytree(lying, tmp_path / "copies")
    (tmp_path / "copies").rename(lying / ".ipynb_checkpoints")
    (lying / "linked").symlink_to(folders / "train" / "lying")  # back to where it is, and so no folder more
    (lying / "z.png").symlink_to(expected[0])
    os.link(expected[1], lying / "z1.png")
    (folders / "train" / "standing" / "more").symlink_to(folders / "train" / "standing")
    (tmp_path / "elsewhere").symlink_to(folders / "train" / "standing")
    (folders / "train" / "standing" / "zz").symlink_to(tmp_path / "elsewhere")
    assert read_folder(folders / "train", torch.tensor, names).images.pictures == expected
    (said,) = caplog.messages
    assert "skipped 2 repeated by a link (what is read ends in" in said


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


def test_a_label_of_two_classes_is_no_name_for_a_folder(folders, tmp_path):
    read = new_model().preprocess.pixels
    with pytest.raises(TrainError, match=r"standing is the label of 2 classes \(0, 2\), so it does not tell") as caught:
        read_folder(folders / "val", read, ("standing", "lying", "standing"))
    assert "one folder for each class" in caught.value.for_command_line()
    (folders / "val" / "standing").rename(folders / "val" / "sitting")
    assert len(read_folder(folders / "val", read, ("standing", "lying", "standing", "sitting"))) == 8
    twins = replace(stripes(8), classes=("crane", "crane"))
    with pytest.raises(TrainError, match="crane is the label of 2 classes"):
        train(new_model(), twins, tmp_path / "out", settings())
    assert not (tmp_path / "out").exists()


def test_files_that_are_skipped_are_counted(folders, caplog, monkeypatch):
    val, read = folders / "val", new_model().preprocess.pixels
    for name in ("a.HEIC", "b.heic", "c.dng", "bare", ".hidden"):
        (val / "lying" / name).touch()
    (val / "lying" / "deeper").mkdir()
    (val / "standing" / "d.heic").touch()
    assert len(read_folder(val, read, ("lying", "standing"))) == 8
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        f"vitlite: {val}: skipped 3 .heic, 1 .dng, 1 without an extension (what is read ends in ."
    )
    for picture in (val / "standing").glob("*.png"):
        picture.unlink()
    with pytest.raises(TrainError, match=r"standing holds no pictures \(.*\), and 1 \.heic\. .*convert"):
        read_folder(val, read, ("lying", "standing"))
    caplog.clear()
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    assert len(read_folder(folders / "train", read, ("lying", "standing"))) == 24
    assert not caplog.records


def test_of_many_names_the_first_are_shown():
    names = [f"n{i}" for i in range(9)]
    assert datasets.listed(names[:8]) == "n0, n1, n2, n3, n4, n5, n6, n7"
    assert datasets.listed(names) == "n0, n1, n2, n3, n4, n5, n6, n7, … (9 in all)"


def test_prepared_pictures_are_read_once_while_there_is_room(monkeypatch):
    read = []
    monkeypatch.setattr(datasets, "CACHE", 2 * 3 * 16 * 16)  # two pictures
    prepared = Prepared(stripes(3).images, lambda picture: (read.append(picture), picture)[1])
    for _ in range(2):
        assert torch.equal(prepared[torch.tensor([0])][0], prepared.pictures[0])
        prepared[torch.tensor([1])]
        prepared[torch.tensor([2])]
    assert len(read) == 4


@pytest.mark.parametrize("in_place", [True, False])
def test_a_picture_whose_file_was_changed_is_prepared_again(folders: Path, in_place: bool) -> None:
    """What is kept is of the file that was there: figures would be of pictures which are gone."""
    model = new_model()
    pictures = read_folder(folders / "train", model.preprocess.pixels, ("lying", "standing"))
    first, second = pictures.images.pictures[:2]
    time.sleep(0.04)
    rows = torch.arange(len(pictures))
    before = pictures.images[rows]
    assert torch.equal(pictures.images[rows], before)
    changed = Image.new("RGB", (32, 32), "red")
    changed.save(first if in_place else folders / "new.png")
    if not in_place:
        (folders / "new.png").replace(first)
    after = pictures.images[rows]
    assert torch.equal(after[0], model.preprocess.pixels(changed))
    assert torch.equal(after[1:], before[1:])
    second.unlink()
    with pytest.raises(ImageError, match=second.name):
        pictures.images[rows]


class Counting(Preprocess):
    """Prepares pictures in a way of its own, and notes how many threads are in it."""

    def pixels(self, image: Any) -> torch.Tensor:
        self.inside.append(image)
        time.sleep(0.001)
        self.most.append(len(self.inside))
        self.inside.remove(image)
        return super().pixels(image)


WAYS: dict[str, tuple[Callable[[Path], Any], str]] = {  # of one's own to read a picture
    "floats": (
        lambda path: torch.zeros(3, 16, 16),
        r"a tensor \(c, h, w\) of uint8, .* \(3, 16, 16\) of torch.float32",
    ),
    "an array": (lambda path: torch.zeros(3, 16, 16).numpy(), "a tensor .* gives a ndarray"),
    "grey": (lambda path: torch.zeros(16, 16).byte(), r"a tensor .* gives \(16, 16\) of torch.uint8"),
    "of many sizes": (
        lambda path: torch.zeros(3, 16, 16 + (path.name == "3.png")).byte(),
        r"3.png is to be read as \(3, 16, 16\), as another was, and what reads it gives \(3, 16, 17\)",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_way_of_ones_own_gives_is_a_picture_as_the_others_are(way: str, folders: Path) -> None:
    read, what = WAYS[way]
    pictures = read_folder(folders / "train", read, ("lying", "standing"))
    with pytest.raises(TrainError, match=what):
        pictures.fetch(torch.arange(24))


def test_a_way_of_ones_own_is_called_for_one_picture_after_the_other(folders: Path) -> None:
    """As `predict` does: a class of one's own need not be made for threads."""
    model = new_model()
    way = Counting(TRANSFORM, model)
    way.__dict__.update(inside=[], most=[])
    model.preprocess = way
    way = model.preprocess
    pictures = read_folder(folders / "train", way.pixels, ("lying", "standing"))
    assert pictures.images[torch.arange(24)].shape == (24, 3, 16, 16)
    assert way.most == [1] * 24


def test_pixels_as_they_are_come_from_several_threads(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def seen(*_: Any, **__: Any) -> torch.Tensor:
        threads.add(threading.current_thread())
        return torch.zeros(1)

    monkeypatch.setattr(Prepared, "_picture", seen)
    Prepared([folders] * 9, new_model().preprocess.pixels)[torch.arange(9)]
    assert threading.current_thread() not in threads


def test_files_are_decoded_within_a_room(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `predict` does it: by as many threads as torch computes with, and no more than so many pixels at once."""
    inside: list[Path] = []
    most = []

    def counted(way: Preprocess, image: Path) -> torch.Tensor:
        inside.append(image)
        time.sleep(0.01)
        most.append(len(inside))
        inside.remove(image)
        return torch.zeros(3, 16, 16, dtype=torch.uint8)

    monkeypatch.setattr(Preprocess, "pixels", counted)
    torch.set_num_threads(2)
    for pixels, at_once in ((predict.ROOM, 2), (16 * 16, 1)):
        monkeypatch.setattr(predict, "ROOM", pixels)
        most.clear()
        pictures = read_folder(folders / "train", new_model().preprocess.pixels, ("lying", "standing"))
        assert pictures.images[torch.arange(24)].shape == (24, 3, 16, 16)
        assert max(most) == at_once


def test_the_digest_is_the_same_on_every_system() -> None:
    names = ["cat/2.png", "cat/10/1.png", "dog/1.png"]
    here = names_below([PurePosixPath("/data", name) for name in names])
    assert here == names_below([PureWindowsPath("C:/other/data", name) for name in names])
    assert here == [f"/{name}" for name in names]


def test_pictures_are_listed_in_one_order_on_every_system(tmp_path: Path) -> None:
    names = ["B.png", "a/c.png", "a.png"]
    for name in reversed(names):
        (tmp_path / "one" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "one" / name).write_bytes(b"")
    found, _ = datasets._pictures_below(tmp_path / "one")
    assert [path.relative_to(tmp_path / "one").as_posix() for path in found] == names
    for order in (names, names[::-1]):
        assert [path.as_posix() for path in in_one_order([PureWindowsPath("D:/one", name) for name in order])] == [
            f"D:/one/{name}" for name in names
        ]


def test_a_class_of_one_s_own_is_asked_for_one_picture_after_the_other(folders):
    inside, model = [], new_model()

    class Own(Preprocess):
        def pixels(self, image):
            inside.append(image)
            time.sleep(0.002)
            return super().pixels(inside.pop())

    expected = read_folder(folders / "train", model.preprocess.pixels, ("lying", "standing"))
    own = Own(model.preprocess.transform, model)
    found = read_folder(folders / "train", own.pixels, ("lying", "standing"))
    every = torch.arange(24)
    assert torch.equal(found.fetch(every), expected.fetch(every))
