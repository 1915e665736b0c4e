"""What is trained on and what epochs are compared by: val/, or pictures that are held out."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_run import Killed, new_model, settings, small_cifar10, stop, stripes, stripes_in_folders

from vitlite.errors import TrainError
from vitlite.training import datasets, hold_out, train
from vitlite.training.datasets import Pictures
from vitlite.training.evaluate import check_data, read_to_measure
from vitlite.training.split import folder_of_split, read_to_train, training_classes, write_split

CLASSES = ("lying", "standing")


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A folder per class, 12 pictures in each, and no parts."""
    return (stripes_in_folders(tmp_path / "parts") / "train").rename(tmp_path / "flat")


def names(pictures: Pictures) -> list[str]:
    return [f"{path.parent.name}/{path.name}" for path in pictures.images.pictures]


def test_data_in_parts(tmp_path: Path, folders: Path) -> None:
    preprocess = new_model().preprocess
    assert training_classes(folders) == CLASSES
    parts = read_to_train(folders, preprocess, CLASSES[::-1])
    assert [len(part) for part in parts] == [24, 8, 0]
    assert parts.train.labels[:12].tolist() == [1] * 12  # those of the folder that comes first
    cifar = small_cifar10(tmp_path / "cifar")
    parts = read_to_train(cifar, preprocess, ("plane", "car"))
    assert [len(part) for part in parts] == [500, 1000, 0]
    assert parts.validation.fetch(torch.tensor([0])).shape == (1, 3, 16, 16)


def test_the_names_of_cifar10_are_known_without_its_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar = small_cifar10(tmp_path / "cifar")
    for path in cifar.glob("data_batch_*.bin"):
        path.unlink()
    monkeypatch.setattr(datasets, "_cifar10_batch", stop)
    assert training_classes(cifar) == ("plane", "car")


def test_one_class_is_nothing_to_learn(tmp_path: Path) -> None:
    (tmp_path / "train" / "lying").mkdir(parents=True)
    with pytest.raises(TrainError, match=r"train has one class only, lying\. Training needs at least two\."):
        training_classes(tmp_path)


@pytest.mark.parametrize("parts", [False, True], ids=["flat", "train alone"])
def test_without_val_a_fifth_of_each_class_is_held_out(flat: Path, tmp_path: Path, parts: bool) -> None:
    if parts:
        (tmp_path / "data").mkdir()
        flat = flat.rename(tmp_path / "data" / "train").parent
    assert training_classes(flat) == CLASSES
    split = read_to_train(flat, new_model().preprocess, CLASSES)
    assert sorted(split.held_out) == sorted(names(split.validation))
    assert Counter(Path(name).parent.name for name in split.held_out) == {"lying": 2, "standing": 2}
    assert len(split.train) == 20
    assert not set(names(split.train)) & set(split.held_out)
    for picture, label in zip(names(split.train), split.train.labels.tolist(), strict=True):
        assert picture.startswith(CLASSES[label])


def test_which_are_held_out_depends_on_the_seed_and_the_name_alone(flat: Path, tmp_path: Path) -> None:
    preprocess = new_model().preprocess

    def held(folder: Path, **options: float) -> list[str]:
        return read_to_train(folder, preprocess, CLASSES, **options).held_out

    before = held(flat)
    assert held(shutil.copytree(flat, tmp_path / "elsewhere")) == before
    assert held(flat, seed=1) != before
    assert len(held(flat, share=0.5)) == 12
    assert set(before) < set(held(flat, share=0.5))
    shutil.copy(flat / before[0], flat / "standing" / "new.png")
    assert set(before) - {"standing/new.png"} - set(held(flat)) <= {next(n for n in before if n.startswith("stand"))}
    in_memory = stripes(20)
    parts = hold_out(in_memory, 0.25, seed=3)
    assert [len(part) for part in parts] == [16, 4]
    assert parts[1].labels.sum() == 2
    assert torch.equal(hold_out(in_memory, 0.25, seed=3)[1].images, parts[1].images)


def test_what_cannot_be_split(flat: Path, folders: Path, tmp_path: Path) -> None:
    preprocess = new_model().preprocess
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(TrainError, match=r"val_share must be from 0.01 to 0.9, got") as caught:
            read_to_train(flat, preprocess, CLASSES, share=share)
        assert caught.value.field == "val_share"
    with pytest.raises(TrainError, match=r"val_share 0\.3 would be held out, and .* has pictures for that") as caught:
        read_to_train(folders, preprocess, CLASSES, share=0.3)
    assert f"Leave --val-share out, or move {folders / 'val'} away" in caught.value.for_command_line()
    pictures = sorted((flat / "lying").iterdir())
    for path in pictures[2:]:
        path.unlink()
    assert len(read_to_train(flat, preprocess, CLASSES).held_out) == 3  # one of two
    pictures[0].unlink()
    with pytest.raises(TrainError, match="lying has one picture only"):
        read_to_train(flat, preprocess, CLASSES)


def test_what_is_held_out_is_not_trained_on_under_another_name(flat: Path) -> None:
    for name in CLASSES:
        (flat / name / "a").mkdir()
        for path in sorted(flat.glob(f"{name}/*.png")):
            path.rename(path.parent / "a" / path.name)
        (flat / name / "b").symlink_to("a")
        shutil.copytree(flat / name / "a", flat / name / ".ipynb_checkpoints")
    split = read_to_train(flat, new_model().preprocess, CLASSES)
    assert (len(split.train), len(split.validation)) == (20, 4)
    contents = [{path.read_bytes() for path in datasets.files_of(part)} for part in (split.train, split.validation)]
    assert not contents[0] & contents[1]


def test_a_picture_of_val_that_is_trained_on_is_refused(folders: Path) -> None:
    (folders / "val" / "lying" / "more").symlink_to(folders / "train" / "lying")
    with pytest.raises(TrainError, match=r"^12 of the pictures to measure on are files that are trained on, by a link"):
        read_to_train(folders, new_model().preprocess, CLASSES)


@pytest.mark.parametrize(("train", "val"), [
    ("train", "valid"), ("train", "validation"), ("train", "dev"), ("Training", "Val"),
])  # fmt: skip
def test_parts_have_the_names_that_others_give_them(folders: Path, train: str, val: str) -> None:
    (folders / "train").rename(folders / train)
    (folders / "val").rename(folders / val)
    assert training_classes(folders) == CLASSES
    parts = read_to_train(folders, new_model().preprocess, CLASSES)
    assert [len(part) for part in parts] == [24, 8, 0]
    assert parts.validation.images.pictures[0].is_relative_to(folders / val)
    assert read_to_measure(folders, new_model(), "it").digest() == parts.validation.digest()


def test_without_val_the_test_pictures_are_measured_on_and_not_trained_on(folders: Path) -> None:
    (folders / "val").rename(folders / "test")
    parts = read_to_train(folders, new_model().preprocess, CLASSES)
    assert [len(part) for part in parts] == [20, 4, 4]
    assert not any(path.is_relative_to(folders / "test") for path in parts.validation.images.pictures)
    assert len(read_to_measure(folders, new_model(), "it")) == 8
    (folders / "test").rename(folders.parent / "away")
    with pytest.raises(TrainError, match=r"has train, and no val or test to measure on\. .* name .*data/train\."):
        read_to_measure(folders, new_model(), "it")


def test_parts_that_could_be_something_else_are_refused(folders: Path) -> None:
    (folders / "bus").mkdir()
    for call in (training_classes, check_data):
        with pytest.raises(
            TrainError, match=r"has train, val, with folders inside, beside bus: parts of .* move the others away"
        ):
            call(folders)
    (folders / "bus").rename(folders / "valid")
    with pytest.raises(TrainError, match=r"has val and valid, which both mean val\. Move one of them away"):
        training_classes(folders)
    (folders / "valid").rmdir()
    (folders / "train").rename(folders / "test")
    with pytest.raises(TrainError, match=r"has test, val, and no train\. Call the folder to train on train"):
        training_classes(folders)


@pytest.mark.parametrize("name", ["test", "train"])
def test_a_class_may_be_called_like_a_part(flat: Path, name: str) -> None:
    (flat / "lying").rename(flat / name)
    assert training_classes(flat) == ("standing", name)
    split = read_to_train(flat, new_model().preprocess, ("standing", name))
    assert len(split.train) == 20
    assert training_classes(flat) == ("standing", name)


def test_a_changed_folder_is_another_run(flat: Path, tmp_path: Path) -> None:
    def run(after_epoch=lambda history: None):
        model = new_model()
        split = read_to_train(flat, model.preprocess, CLASSES)
        return train(
            model, split.train, tmp_path / "run", settings(), validation=split.validation, after_epoch=after_epoch
        )

    with pytest.raises(Killed):
        run(stop)
    assert len(run()) == 2
    shutil.copy(flat / "lying" / "0.png", flat / "lying" / "new.png")
    with pytest.raises(TrainError, match=r"another run: (pictures|validation) was '"):
        run()


def test_what_was_held_out_can_be_measured(flat: Path, tmp_path: Path) -> None:
    model, file = new_model(), tmp_path / "split.json"
    (flat / "lying" / "0.png").rename(flat / "lying" / "0\udcff\n.png")  # a name that is no Unicode, of two lines
    split = read_to_train(flat, model.preprocess, CLASSES, share=0.9)
    assert "lying/0\udcff\n.png" in split.held_out
    write_split(file, flat, split.held_out)
    assert folder_of_split(file) == flat.resolve()
    check_data(flat, file)
    found = read_to_measure(flat, model, "it", file)
    assert sorted(names(found)) == sorted(split.held_out)
    assert found.digest() == split.validation.digest()
    (flat / split.held_out[0]).unlink()
    with pytest.raises(
        TrainError,
        match=r"split.json names 1 pictures that .* does not have \(lying/0\\udcff\\n\.png\)\. Give the data",
    ):
        read_to_measure(flat, model, "it", file)
    with pytest.raises(TrainError, match="no such file"):
        check_data(flat, tmp_path / "nowhere.json")
    with pytest.raises(TrainError, match="has a part to test on already"):
        check_data(small_cifar10(tmp_path / "cifar"), file)
    file.write_text(json.dumps({"held out": 3}))
    with pytest.raises(TrainError, match=r"split.json: it must be a table with classes in, held out"):
        read_to_measure(flat, model, "it", file)
