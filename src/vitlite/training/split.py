"""Which pictures of some data are trained on, and which the epochs are compared by: those of val/, or a share held out.

What the folders train/, val/ and test/ may be called stands in `PARTS`.

Whether a picture is held out depends on its name and the seed alone, so a run that goes on holds out the same ones.
The list of them is kept with the run.
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitlite import storage
from vitlite.errors import TrainError, shown
from vitlite.images import Preprocess
from vitlite.schema import Check, read_json, several, table
from vitlite.training.datasets import (
    Pictures,
    cifar10_classes,
    cifar10_reader,
    class_names,
    files_of,
    folders_in,
    is_cifar10,
    listed,
    read_cifar10,
    read_folder,
    refuse_shared_files,
)

SHARE = 0.2  # of the pictures of each class
SHARES = (0.01, 0.9)  # what a share is between
MOST_BYTES = 2**28  # of a `SPLIT`: the names of a million pictures
SPLIT = "split.json"  # in the folder of a run
PARTS = {  # what folders of parts of data are called, in capitals or not: the words that Hugging Face's datasets knows
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
NAME = Check("a text", lambda value: isinstance(value, str))  # of a file, whose letters need not be Unicode
LISTED = table({"classes in": NAME, "held out": several(NAME, least=1)}, ("classes in", "held out"))  # in a `SPLIT`


class Split(NamedTuple):
    """What a run trains on, and what it measures after each epoch."""

    train: Pictures
    validation: Pictures
    held_out: list[str]  # where there was no val/: the pictures of the validation, below `folder_of_classes`


def parts_of(data: Path) -> dict[str, Path]:
    """The folders of parts of data as "train", "val" and "test"; none where the folders of classes are right there.

    Beside other classes, a folder that is called like a part and has no folders in it is a class, too.

    Raises:
        TrainError: Other folders stand beside parts, or two folders are the same part.
    """
    part_called = {word: part for part, words in PARTS.items() for word in words}
    parts: list[str] = []
    others: list[str] = []
    for name in folders_in(data):
        (parts if name.lower() in part_called else others).append(name)
    if others:
        if any(folders_in(data / name) for name in parts):
            raise TrainError(
                f"{shown(str(data))} has {_named(parts)}, with folders inside, beside {_named(others)}: parts of the "
                "data, or classes?",
                python="Parts (train, val, test) stand alone, so move the others away; or put the folders of all "
                "classes into train.",
            )
        return {}
    found: dict[str, Path] = {}
    for name in parts:
        part = part_called[name.lower()]
        if part in found:
            raise TrainError(
                f"{shown(str(data))} has {found[part].name} and {name}, which both mean {part}.",
                python="Move one of them away, or put their pictures together.",
            )
        found[part] = data / name
    return found


def _named(folders: Sequence[str]) -> str:
    return listed([shown(name) for name in folders])


def folder_of_classes(data: Path) -> Path:
    """Where the folders of the classes are that are trained on: in train/; or where there are no parts, right there."""
    return parts_of(data).get("train", data)


def folder_to_measure(data: Path) -> Path:
    """Where the folders of the classes are that are measured on: in val/, else in test/, else right there.

    Raises:
        TrainError: There is train/ alone.
    """
    parts = parts_of(data)
    if list(parts) == ["train"]:
        raise TrainError(
            f"{shown(str(data))} has {parts['train'].name}, and no val or test to measure on.",
            python=f"To measure on what was trained on, name {shown(str(parts['train']))}.",
        )
    return parts.get("val", parts.get("test", data))


def training_classes(data: Path) -> tuple[str, ...]:
    """The classes of data to train on: of CIFAR-10, or of a folder with a folder for each.

    Raises:
        TrainError: There are no such data, or only one class.
    """
    if is_cifar10(data):
        return cifar10_classes(data)
    parts = parts_of(data)
    if parts and "train" not in parts:
        raise TrainError(
            f"{shown(str(data))} has {_named([folder.name for folder in parts.values()])}, and no train.",
            python="Call the folder to train on train, and the one to compare epochs with val.",
        )
    folder = folder_of_classes(data)
    classes = class_names(folder)
    if len(classes) < 2:
        raise TrainError(f"{folder} has one class only, {classes[0]}.", python="Training needs at least two.")
    return classes


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
        TrainError: A share is wanted of data that have a part to compare epochs with, or a picture is in both parts;
            and as `hold_out`, `read_cifar10` and `read_folder` do.
    """
    val = parts_of(data).get("val")
    if share is not None and (val or is_cifar10(data)):
        raise TrainError(
            f"val_share {share:g} would be held out, and {data} has pictures for that already.",
            python="Leave the share out.",
            command=f"Leave --val-share out{f', or move {val} away' if val else ''}.",
            field="val_share",
        )
    if is_cifar10(data):
        read, channels = cifar10_reader(preprocess), preprocess.model.config.channels
        return Split(read_cifar10(data, "train", read, channels), read_cifar10(data, "val", read, channels), [])
    pictures = read_folder(folder_of_classes(data), preprocess.pixels, classes)
    if val:
        validation = read_folder(val, preprocess.pixels, classes)
        refuse_shared_files(files_of(pictures), files_of(validation))
        return Split(pictures, validation, [])
    train, validation = hold_out(pictures, SHARE if share is None else share, seed)
    return Split(train, validation, validation.names())


def hold_out(pictures: Pictures, share: float = SHARE, seed: int = 0) -> tuple[Pictures, Pictures]:
    """Parts pictures in two: to train on, and a share of each class to compare epochs with, one picture at least.

    Raises:
        TrainError: A class has only one picture, or the share is none.
    """
    least, most = SHARES
    if not least <= share <= most:
        raise TrainError(f"val_share must be from {least:g} to {most:g}, got {share:g}.", field="val_share")
    names = pictures.names()
    held = torch.zeros(len(pictures), dtype=torch.bool, device="cpu")
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


def write_split(path: Path, data: Path, held_out: Sequence[str]) -> None:
    """Keeps which pictures were held out; `read_held_out` reads them."""
    content = {"classes in": str(folder_of_classes(data).resolve()), "held out": list(held_out)}
    storage.write_text(path, json.dumps(content, indent=1) + "\n")  # in ASCII, as names need not be Unicode


def _read_list(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_json(path, LISTED, most_bytes=MOST_BYTES, error=TrainError)
    return content


def is_split(path: Path) -> bool:
    """Whether a file is what `write_split` writes, with nothing else in it."""
    try:
        content = _read_list(path)
    except TrainError:
        return False
    return set(content) == {"classes in", "held out"}


def folder_of_split(path: Path) -> Path:
    """The folder of classes that a run held pictures out of.

    Raises:
        TrainError: The list is damaged.
    """
    return Path(_read_list(path)["classes in"])


def read_held_out(path: Path, data: Path, pictures: Pictures) -> Pictures:
    """Of all pictures of some data, those that a run on them held out.

    Args:
        path: A run's `SPLIT`.
        data: The data.
        pictures: Read from `folder_of_classes`.

    Raises:
        TrainError: The list is damaged, or names pictures that are not there.
    """
    wanted = _read_list(path)["held out"]
    names = pictures.names()
    missing = [shown(name) for name in sorted(set(wanted) - set(names))]
    if missing:
        raise TrainError(
            f"{shown(str(path))} names {len(missing)} pictures that {data} does not have ({listed(missing)}).",
            python="Give the data that this run was trained on.",
        )
    chosen = set(wanted)
    return pictures.part(torch.tensor([name in chosen for name in names], device="cpu"))
