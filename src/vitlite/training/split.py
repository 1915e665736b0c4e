"""Which pictures of some data are trained on, and which the epochs are compared by: those of val/, or a share held out.

Whether a picture is held out depends on its name and the seed alone, so a run that goes on holds out the same ones.
The list of them is kept with the run.
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch

from vitlite import disk
from vitlite.errors import TrainError, shown
from vitlite.images import Preprocess
from vitlite.schema import Check, read_json, several, table
from vitlite.training.datasets import (
    Pictures,
    Prepared,
    cifar10_classes,
    cifar10_reader,
    class_names,
    is_cifar10,
    listed,
    read_cifar10,
    read_folder,
)

SHARE = 0.2  # of the pictures of each class
SHARES = (0.01, 0.9)  # what a share is between
SPLIT = "split.json"  # in the folder of a run
# What folders of parts of data are called.
PARTS = ("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing")


class Split(NamedTuple):
    """What a run trains on, and what it measures after each epoch."""

    train: Pictures
    validation: Pictures
    held_out: list[str]  # where there was no val/: the pictures of the validation, below `folder_of_classes`


def folder_of_classes(data: Path) -> Path:
    """Where the folders of the classes are that are trained on: in train/; or where there are no parts, right there."""
    in_parts = (data / "train").is_dir() or (data / "val").is_dir()
    return data / "train" if in_parts else data


def training_classes(data: Path) -> tuple[str, ...]:
    """The classes of data to train on: of CIFAR-10, or of a folder with a folder for each.

    Raises:
        TrainError: There are no such data, or only one class.
    """
    if is_cifar10(data):
        return cifar10_classes(data)
    folder = folder_of_classes(data)
    classes = class_names(folder)
    if folder == data:
        _refuse_parts(data, classes)
    if len(classes) < 2:
        raise TrainError(f"{folder} has one class only, {classes[0]}.", python="Training needs at least two.")
    return classes


def _refuse_parts(data: Path, names: Sequence[str]) -> None:
    """Makes sure that folders which would be classes are not parts of the data, called otherwise than train and val.

    Raises:
        TrainError: One has such a name, and folders in it.
    """
    parts = [name for name in names if name.lower() in PARTS and any(path.is_dir() for path in (data / name).iterdir())]
    if parts:
        raise TrainError(
            f"{data} has the folders {listed(parts)}, with folders in them, which do not look like classes.",
            python="Call the one to train on train, and the one to compare epochs with val.",
        )


def read_to_train(
    data: Path, preprocess: Preprocess, classes: Sequence[str], *, share: float | None = None, seed: int = 0
) -> Split:
    """What to train on and what to compare epochs with.

    Args:
        data: train/ and val/; or train/ alone or the classes themselves, of which a share is held out; or CIFAR-10.
        preprocess: Of the model.
        classes: Those that the model knows, in order.
        share: Of each class, what is held out where there is no val/; None: `SHARE`.
        seed: Other ones with another seed.

    Raises:
        TrainError: A share is wanted of data that have a part to compare epochs with; and as `hold_out`,
            `read_cifar10` and `read_folder` do.
    """
    has_parts = is_cifar10(data) or (data / "val").is_dir()
    if has_parts and share is not None:
        raise TrainError(
            f"val_share {share:g} would be held out, and {data} has pictures for that already.",
            python="Leave the share out.",
            command=f"Leave --val-share out, or move {data / 'val'} away.",
            field="val_share",
        )
    if is_cifar10(data):
        read = cifar10_reader(preprocess)
        return Split(read_cifar10(data, "train", read), read_cifar10(data, "val", read), [])
    pictures = read_folder(folder_of_classes(data), preprocess.pixels, classes)
    if has_parts:
        return Split(pictures, read_folder(data / "val", preprocess.pixels, classes), [])
    train, validation = hold_out(pictures, SHARE if share is None else share, seed)
    return Split(train, validation, _names_from(folder_of_classes(data), validation))


def hold_out(pictures: Pictures, share: float = SHARE, seed: int = 0) -> tuple[Pictures, Pictures]:
    """Parts pictures in two: to train on, and a share of each class to compare epochs with, one picture at least.

    Raises:
        TrainError: A class has only one picture, or the share is none.
    """
    least, most = SHARES
    if not least <= share <= most:
        raise TrainError(f"val_share must be from {least:g} to {most:g}, got {share:g}.", field="val_share")
    names = pictures.names()
    held = torch.zeros(len(pictures), dtype=torch.bool)
    for k, name in enumerate(pictures.classes):
        rows = (pictures.labels == k).nonzero()[:, 0].tolist()
        if len(rows) == 1:
            raise TrainError(
                f"{shown(name)} has one picture only, and of each class at least one is trained on and one held out.",
                python="Add some, or remove the class.",
            )
        count = min(max(round(share * len(rows)), 1), len(rows) - 1)
        rows.sort(key=lambda row: _lot(seed, names[row]))
        held[rows[: max(count, 0)]] = True
    return pictures.part(~held), pictures.part(held)


def _lot(seed: int, name: str) -> bytes:
    """A picture's place in a random order that other pictures do not change."""
    return sha256(f"{seed} {name}".encode(errors="surrogateescape")).digest()


def _names_from(folder: Path, pictures: Pictures) -> list[str]:
    """The names of the files of pictures, as they are seen from a folder: "cat/1.jpg"."""
    assert isinstance(pictures.images, Prepared)
    return [Path(path).relative_to(folder).as_posix() for path in pictures.images.pictures]


def write_split(path: Path, data: Path, held_out: Sequence[str]) -> None:
    """Keeps which pictures were held out; `read_held_out` reads them."""
    content = {"classes in": str(folder_of_classes(data).resolve()), "held out": list(held_out)}
    disk.write_text(path, json.dumps(content, indent=1) + "\n")  # in ASCII, as names need not be Unicode


_name = Check("a text", lambda value: isinstance(value, str))
_split = table({"classes in": _name, "held out": several(_name, least=1)}, ("classes in", "held out"))


def folder_of_split(path: Path) -> Path:
    """The folder of classes that a run held pictures out of.

    Raises:
        TrainError: The list is damaged.
    """
    return Path(read_json(path, _split, error=TrainError)["classes in"])


def read_held_out(path: Path, data: Path, pictures: Pictures) -> Pictures:
    """Of all pictures of some data, those that a run on them held out.

    Args:
        path: A run's `SPLIT`.
        data: The data.
        pictures: Read from `folder_of_classes`.

    Raises:
        TrainError: The list is damaged, or names pictures that are not there.
    """
    wanted = read_json(path, _split, error=TrainError)["held out"]
    names = _names_from(folder_of_classes(data), pictures)
    missing = [shown(name) for name in sorted(set(wanted) - set(names))]
    if missing:
        raise TrainError(
            f"{shown(str(path))} names {len(missing)} pictures that {data} does not have ({listed(missing)}).",
            python="Give the data that this run was trained on.",
        )
    chosen = set(wanted)
    return pictures.part(torch.tensor([name in chosen for name in names]))
