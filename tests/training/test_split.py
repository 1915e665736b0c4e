"""The parts of data, and images held out for validation."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_run import CONFIG, Killed, new_model, settings, small_cifar10, stop, stripes, stripes_in_folders

from vitlite.errors import ImageError, TrainError
from vitlite.nn.vit import ViT
from vitlite.training import data, hold_out, measure, read_cifar10, train
from vitlite.training.split import (
    Split,
    check_evaluation_data,
    read_class_list,
    read_evaluation_data,
    read_split,
    read_training_data,
    stand_for,
    training_classes,
    write_split,
)

CLASSES = ("lying", "standing")


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A folder per class, 12 images in each, without parts."""
    return (stripes_in_folders(tmp_path / "parts") / "train").rename(tmp_path / "flat")


def labelled(labels: tuple[str, ...] = CLASSES) -> ViT:
    model = new_model()
    model.labels = labels
    return model


def test_data_in_parts(tmp_path: Path, folders: Path) -> None:
    preprocess = new_model().preprocess
    assert training_classes(folders) == CLASSES
    split = read_training_data(folders, preprocess, CLASSES[::-1])
    assert [len(part) for part in split] == [24, 8, 0]
    assert split.train.labels[:12].tolist() == [1] * 12  # of the folder that comes first
    cifar = small_cifar10(tmp_path / "cifar")
    split = read_training_data(cifar, preprocess, ("plane", "car"))
    assert [len(part) for part in split] == [500, 1000, 0]
    assert split.validation.fetch(torch.tensor([0]))[0].shape == (1, 3, 16, 16)


def test_the_classes_of_cifar10_are_known_without_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar = small_cifar10(tmp_path / "cifar")
    monkeypatch.setattr(data, "_cifar10_batch", stop)
    assert training_classes(cifar) == ("plane", "car")


def test_a_single_class_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train" / "lying").mkdir(parents=True)
    with pytest.raises(TrainError, match=r"train contains only one class, lying, but training needs at least two"):
        training_classes(tmp_path)


@pytest.mark.parametrize("parts", [False, True], ids=["flat", "train alone"])
def test_without_val_a_fifth_of_each_class_is_held_out(flat: Path, tmp_path: Path, parts: bool) -> None:
    if parts:
        (tmp_path / "data").mkdir()
        flat = flat.rename(tmp_path / "data" / "train").parent
    assert training_classes(flat) == CLASSES
    split = read_training_data(flat, new_model().preprocess, CLASSES)
    assert split.held_out == split.validation.names()
    assert Counter(Path(name).parent.name for name in split.held_out) == {"lying": 2, "standing": 2}
    assert len(split.train) == 20
    assert not set(split.train.names()) & set(split.held_out)
    for name, label in zip(split.train.names(), split.train.labels.tolist(), strict=True):
        assert name.startswith(CLASSES[label])


def test_which_images_are_held_out_depends_on_seed_and_names_only(flat: Path, tmp_path: Path) -> None:
    preprocess = new_model().preprocess

    def held(folder: Path, **options: float) -> list[str]:
        return read_training_data(folder, preprocess, CLASSES, **options).held_out

    before = held(flat)
    assert held(shutil.copytree(flat, tmp_path / "elsewhere")) == before
    assert held(flat, seed=1) != before
    assert len(held(flat, share=0.5)) == 12
    assert set(before) < set(held(flat, share=0.5))
    in_memory = stripes(20)
    parts = hold_out(in_memory, 0.25, seed=3)
    assert [len(part) for part in parts] == [16, 4]
    assert parts[1].labels.sum() == 2
    assert torch.equal(hold_out(in_memory, 0.25, seed=3)[1].images, parts[1].images)


def test_what_cannot_be_split_is_an_error(flat: Path, folders: Path) -> None:
    preprocess = new_model().preprocess
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(TrainError, match=r"share to hold out \(--val-share\) must be from 0.01 to 0.9, got"):
            read_training_data(flat, preprocess, CLASSES, share=share)
    with pytest.raises(TrainError, match=r"already contains validation images\. Omit share= \(--val-share\)"):
        read_training_data(folders, preprocess, CLASSES, share=0.3)
    images = sorted((flat / "lying").iterdir())
    for path in images[2:]:
        path.unlink()
    assert len(read_training_data(flat, preprocess, CLASSES).held_out) == 3  # one of two
    images[0].unlink()
    with pytest.raises(TrainError, match="lying has only one image"):
        read_training_data(flat, preprocess, CLASSES)


@pytest.mark.parametrize(("train", "val"), [
    ("train", "valid"), ("train", "validation"), ("train", "dev"), ("Training", "Val"),
])  # fmt: skip
def test_other_names_of_parts(folders: Path, train: str, val: str) -> None:
    (folders / "train").rename(folders / train)
    (folders / "val").rename(folders / val)
    assert training_classes(folders) == CLASSES
    split = read_training_data(folders, new_model().preprocess, CLASSES)
    assert [len(part) for part in split] == [24, 8, 0]
    assert split.validation.files()[0].is_relative_to(folders / val)
    assert read_evaluation_data(folders, labelled()).digest() == split.validation.digest()


def test_test_images_are_evaluated_on_without_val(folders: Path) -> None:
    (folders / "val").rename(folders / "test")
    split = read_training_data(folders, new_model().preprocess, CLASSES)
    assert [len(part) for part in split] == [20, 4, 4]
    assert not any(path.is_relative_to(folders / "test") for path in split.validation.files())
    assert len(read_evaluation_data(folders, labelled())) == 8
    (folders / "test").rename(folders.parent / "away")
    with pytest.raises(TrainError, match=r"contains train, but no val or test part for evaluation\. Add one\. To"):
        read_evaluation_data(folders, labelled())


def test_ambiguous_parts_are_errors(folders: Path) -> None:
    (folders / "bus").mkdir()
    for call in (training_classes, check_evaluation_data):
        with pytest.raises(TrainError, match=r"contains train, val, but also other folders: bus\. If they"):
            call(folders)
    (folders / "bus").rename(folders / "valid")
    with pytest.raises(TrainError, match=r"contains val and valid, which both mean val\. Remove one of"):
        training_classes(folders)
    (folders / "valid").rmdir()
    (folders / "train").rename(folders / "test")
    with pytest.raises(
        TrainError, match=r"contains test, val, but no train part\. Rename the folder of training images to train"
    ):
        training_classes(folders)


@pytest.mark.parametrize("name", ["test", "train"])
def test_a_class_may_have_the_name_of_a_part(flat: Path, name: str) -> None:
    (flat / "lying").rename(flat / name)
    assert training_classes(flat) == ("standing", name)
    assert len(read_training_data(flat, new_model().preprocess, ("standing", name)).train) == 20


def test_a_changed_folder_is_another_run(flat: Path, tmp_path: Path) -> None:
    def run(after_epoch=lambda history: None):
        model = new_model()
        split = read_training_data(flat, model.preprocess, CLASSES)
        out, how = tmp_path / "run", settings()
        return train(model, split.train, out, how, validation=split.validation, after_epoch=after_epoch)

    with pytest.raises(Killed):
        run(stop)
    assert len(run()) == 2
    shutil.copy(flat / "lying" / "0.png", flat / "lying" / "new.png")
    with pytest.raises(TrainError, match=r"another run: 1 images were added"):
        run()


def test_held_out_images_can_be_evaluated_on(flat: Path, tmp_path: Path) -> None:
    model, file = labelled(), tmp_path / "split.json"
    (flat / "lying" / "0.png").rename(flat / "lying" / "0\udcff\n.png")  # not Unicode, with a line break
    split = read_training_data(flat, model.preprocess, CLASSES, share=0.9)
    assert "lying/0\udcff\n.png" in split.held_out
    write_split(file, flat, split.held_out)
    assert read_split(file) == (flat.resolve(), split.held_out)
    check_evaluation_data(flat, file)
    found = read_evaluation_data(flat, model, file)
    assert sorted(found.names()) == sorted(split.held_out)
    assert found.digest() == split.validation.digest()
    (flat / split.held_out[0]).unlink()
    found = read_evaluation_data(flat, model, file)  # the one that is gone counts as broken
    assert (measure(model, found).images.sum(), found.broken()) == (len(found) - 1, split.held_out[:1])
    write_split(file, flat, ["lying/a.png", "standing/b.png"])
    with pytest.raises(TrainError, match=r"lists 2 images that are not in .*\. Pass the folder that"):
        read_evaluation_data(flat, model, file)
    with pytest.raises(TrainError, match="has its own test images"):
        check_evaluation_data(small_cifar10(tmp_path / "cifar"), file)


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"[]", b'{"held out": 3}', json.dumps({"classes in": 1})])
def test_a_file_that_is_not_a_split_is_an_error(tmp_path: Path, flat: Path, content: bytes | str | None) -> None:
    file = tmp_path / "split.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TrainError, match=r"split.json is not a list of held-out images \(.*Pass the split.json of"):
        check_evaluation_data(flat, file)


def test_a_class_list_gives_the_order_of_folders(folders: Path, tmp_path: Path) -> None:
    model, file = labelled(("tench", "goldfish")), tmp_path / "classes.txt"
    with pytest.raises(TrainError, match=r"has 2 classes \(tench, goldfish\), but none named lying, standing"):
        read_evaluation_data(folders, model)
    file.write_text("standing\nlying\n\n")
    found = read_evaluation_data(folders, model, folders=read_class_list(file))
    assert found.classes == model.labels
    assert [name.split("/")[0] for name in found.names()] == [("standing", "lying")[k] for k in found.labels]
    with pytest.raises(TrainError, match="The data have 3 classes, but the model has 2"):
        read_evaluation_data(folders, model, folders=("standing", "lying", "sitting"))
    file.write_text("\n")
    for wrong in (file, tmp_path / "none.txt"):
        with pytest.raises(TrainError, match="--classes"):
            read_class_list(wrong)


def test_folders_stand_for_a_head_if_they_name_all_its_classes() -> None:
    assert stand_for(["cat", "dog"], ["dog", "cat"])
    assert stand_for(["0", "1"], ["dog", "cat"])
    assert not stand_for(["cat"], ["dog", "cat"])
    assert not stand_for(["n1", "n2"], ["dog", "cat"])


def test_evaluation_data_have_the_classes_of_the_model(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"has 2 classes \(0, 1\), but none named lying, standing"):
        read_evaluation_data(folders, new_model())  # without labels
    inside, itself = (read_evaluation_data(data, labelled()) for data in (folders, folders / "val"))
    assert inside.files() == itself.files()
    with pytest.raises(TrainError, match="nowhere does not exist"):
        check_evaluation_data(tmp_path / "nowhere")
    with pytest.raises(ImageError, match="preprocess"):
        read_evaluation_data(folders, ViT(CONFIG))


def test_cifar10_in_the_order_of_the_labels(tmp_path: Path) -> None:
    cifar = small_cifar10(tmp_path / "data")
    plain = read_evaluation_data(cifar, new_model())
    turned = read_evaluation_data(cifar, labelled(("car", "plane")))
    assert (plain.classes, turned.classes) == (("plane", "car"), ("car", "plane"))
    assert torch.equal(plain.labels, 1 - turned.labels)
    assert torch.equal(plain.fetch(torch.tensor([0]))[0], turned.fetch(torch.tensor([0]))[0])
    assert len(read_cifar10(cifar, "test")) == len(plain)
    with pytest.raises(
        TrainError, match=r"The data have 2 classes, but the model has 5\. Fine-tune the model on these classes first"
    ):
        read_evaluation_data(cifar, new_model(CONFIG.replace(num_classes=5)))


def test_copies_in_both_parts_are_named(folders: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def read(data: Path) -> Split:
        return read_training_data(data, new_model().preprocess, ("lying", "standing"))

    read(folders)
    assert not caplog.records
    shutil.copy(folders / "val" / "lying" / "0.png", folders / "train" / "standing" / "copy.png")
    read(folders)
    assert "1 training images are exact copies of held-out images, such as" in caplog.text
    assert "copy.png of " in caplog.text
    caplog.clear()
    split = read(folders / "train")  # which holds out some itself
    shutil.copy(folders / "train" / split.held_out[0], folders / "train" / split.train.names()[0])
    split = read(folders / "train")
    assert "1 training images are exact copies" in caplog.text
    caplog.clear()
    write_split(tmp_path / "split.json", folders / "train", split.held_out)
    read_evaluation_data(folders / "train", labelled(), tmp_path / "split.json")
    assert "1 training images are exact copies" in caplog.text
