"""Labelled pictures to train and to measure on: a folder per class, or CIFAR-10's binary version.

Shapes: n pictures in all, b of them in a batch, c channels, h and w pixels.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from logging import getLogger
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from vitlite.checkpoints.fingerprint import bytes_of
from vitlite.errors import TrainError, counted, shown
from vitlite.images.decode import SUFFIXES
from vitlite.images.transform import Preprocess
from vitlite.inference.find import by_ending, files_below
from vitlite.inference.predict import readers
from vitlite.training import distributed

P = TypeVar("P", bound=PurePath)
_log = getLogger("vitlite")
CACHE = 2**31  # bytes of prepared pictures kept in memory
RECORD = 1 + 3 * 32 * 32  # bytes of a CIFAR-10 picture: its label, then the red, green and blue planes
CIFAR10_NAMES = "batches.meta.txt"
AGAIN = "repeated by a link"  # in place of an ending
HOLDOUT = 1000  # of CIFAR-10's training pictures, for validation: its test pictures are for the end

State = list[int]  # of a file: size, times and inode
FileNumber = tuple[int, int, int, int]  # of the disk, of the file on it, its size, and when it was written
Read = Callable[[Any], Tensor]  # a file or a tensor -> uint8 (c, h, w) of the size of the model


class Prepared:
    """Pictures that are indexed as a tensor (n, c, h, w) of uint8 would be: prepared when asked for, and kept.

    A file that was changed is prepared again.
    """

    def __init__(self, pictures: Sequence[Path] | Tensor, read: Read, folder: Path | None = None) -> None:
        self.pictures, self.read = pictures, read
        self.folder = folder  # from which files are named
        self._kept: dict[int, tuple[State, Tensor]] = {}
        self._left = CACHE
        self._shape: tuple[int, ...] = ()  # of them all, as soon as one was prepared

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, rows: Tensor) -> Tensor:
        with readers() as pool:
            return torch.stack(list(pool.map(self._picture, rows.tolist())))  # (b, c, h, w)

    def _picture(self, row: int) -> Tensor:
        state = _state_of(self.pictures[row])  # before it is read: what is written meanwhile shows the next time
        before, picture = self._kept.get(row, (None, None))
        if picture is None or before != state:
            picture = self.read(self.pictures[row])
            self._refuse_unlike(row, picture)
            self._keep(row, state, picture)
        return picture

    def _refuse_unlike(self, row: int, picture: Any) -> None:
        """Makes sure that what was read, perhaps by one's own function, goes into a batch with the others.

        Raises:
            TrainError: It is no picture of uint8, or of another shape than one before.
        """
        if not isinstance(picture, Tensor):
            raise self._unlike(row, "a tensor (c, h, w) of uint8", f"a {type(picture).__name__}")
        if picture.dtype != torch.uint8 or picture.ndim != 3:
            raise self._unlike(row, "a tensor (c, h, w) of uint8", f"{tuple(picture.shape)} of {picture.dtype}")
        self._shape = self._shape or tuple(picture.shape)
        if tuple(picture.shape) != self._shape:
            raise self._unlike(row, f"{self._shape}, as another was", f"{tuple(picture.shape)}")

    def _unlike(self, row: int, wanted: str, found: str) -> TrainError:
        picture = self.pictures[row]
        name = f"Picture {row}" if isinstance(picture, Tensor) else shown(str(picture))
        return TrainError(
            f"{name} is to be read as {wanted}, and what reads it gives {found}.",
            python="The function that reads gives all pictures alike; those from 0 to 1: "
            "(255 * image).round().to(torch.uint8).",
            command="",
        )

    def _keep(self, row: int, state: State | None, picture: Tensor) -> None:
        """While there is room, in place of what a file held before; none of which the next change might not show."""
        _, old = self._kept.pop(row, (None, None))
        if old is not None:
            self._left += old.nbytes
        if state is not None and self._left >= picture.nbytes:
            self._left -= picture.nbytes
            self._kept[row] = (state, picture)

    def part(self, rows: Sequence[int]) -> "Prepared":
        """Some of them, in the order of the rows."""
        if isinstance(self.pictures, Tensor):
            return Prepared(self.pictures[rows], self.read)
        return Prepared([self.pictures[row] for row in rows], self.read, self.folder)

    def names(self) -> list[str]:
        """What each picture is called, wherever its folder is: "cat/1.jpg"; those in memory by their number."""
        if isinstance(self.pictures, Tensor):
            return [str(row) for row in range(len(self))]
        if self.folder is None:
            return [name.removeprefix("/") for name in names_below(self.pictures)]
        return [path.relative_to(self.folder).as_posix() for path in self.pictures]

    def origin(self) -> list[Tensor | str]:
        """What tells these pictures from others: the pixels; or of files names and sizes, wherever the folder is."""
        if isinstance(self.pictures, Tensor):
            return [self.pictures]
        files: list[Tensor | str] = []
        for path, name in zip(self.pictures, names_below(self.pictures), strict=True):
            size = os.path.getsize(path) if os.path.exists(path) else -1  # a missing one is an error when it is read
            files.append(f"{size} {name}")
        return files


def _state_of(picture: Path | Tensor) -> State | None:
    """Return the size, times and inode of a file; None if it is gone."""
    if isinstance(picture, Tensor):
        return []
    try:
        stat = os.stat(picture)
    except OSError:  # whoever reads it says so
        return None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def names_below(paths: Sequence[PurePath]) -> list[str]:
    """What files are called below the folder that they have in common, by the same separator on every system.

    >>> from pathlib import PureWindowsPath
    >>> names_below([PureWindowsPath("D:/data/cat/1.png"), PureWindowsPath("D:/data/dog/1.png")])
    ['/cat/1.png', '/dog/1.png']
    """
    parts = [path.parts for path in paths]
    shared = 0
    for one, other in zip(min(parts), max(parts), strict=False):  # what these two begin with, all do
        if one != other:
            break
        shared += 1
    return ["".join(f"/{part}" for part in names[shared:]) for names in parts]


@dataclass(frozen=True)
class Pictures:
    """Pictures with their labels, and the names of the classes.

    Raises:
        TrainError: There are none, they are not of uint8, or the labels are not one for each, from the first class to
            the last.
    """

    images: Tensor | Prepared  # (n, c, h, w) uint8
    labels: Tensor  # (n,) int64
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        images, labels, k = self.images, self.labels, len(self.classes)
        if isinstance(images, Tensor) and (images.dtype != torch.uint8 or images.ndim != 4):
            raise TrainError(
                f"Pictures takes images (n, c, h, w) of uint8, got {tuple(images.shape)} of {images.dtype}.",
                python="Those from 0 to 1: (255 * images).round().to(torch.uint8).",
            )
        if labels.shape != (len(images),) or labels.dtype != torch.int64 or not len(images):
            raise TrainError(
                f"Pictures takes at least one image, and a label of int64 for each, got {len(images)} images and "
                f"labels {tuple(labels.shape)} of {labels.dtype}.",
                python="Give as many of both.",
            )
        least, most = labels.min().item(), labels.max().item()
        if least < 0 or most >= k:
            raise TrainError(
                f"Pictures has {k} classes, whose labels are 0 to {k - 1}, got {least} to {most}.",
                python="Name every class in classes=, in the order of the labels.",
            )

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, rows: Tensor) -> Tensor:
        """Some of the pictures, with values from 0 to 1: (b,) -> (b, c, h, w)."""
        return self.images[rows].float().div_(255)

    def part(self, chosen: Tensor) -> "Pictures":
        """Those for which `chosen` is true: (n,) bool."""
        rows = chosen.nonzero()[:, 0]
        images = self.images.part(rows.tolist()) if isinstance(self.images, Prepared) else self.images[rows]
        return Pictures(images, self.labels[rows], self.classes)

    def names(self) -> list[str]:
        """What each picture is called, wherever its folder is: "cat/1.jpg"; those in memory by their number."""
        if isinstance(self.images, Prepared):
            return self.images.names()
        return [str(row) for row in range(len(self))]

    def digest(self) -> str:
        """A hash of labels and pixels; of files, names and sizes are taken, wherever the folder is."""
        origin = self.images.origin() if isinstance(self.images, Prepared) else [self.images]
        return digest([self.labels, *origin])


def digest(values: Iterable[Tensor | str]) -> str:
    """A hash of what the tensors and texts hold, to tell them from others."""
    found = sha256()
    for value in values:
        if isinstance(value, str):
            found.update(value.encode(errors="surrogateescape") + b"\0")
        else:
            found.update(bytes_of(value))
    return f"sha256 {found.hexdigest()[:16]}"


def class_names(folder: Path) -> tuple[str, ...]:
    """The classes of a folder per class, sorted.

    Raises:
        TrainError: There is no such folder, or none in it.
    """
    remedy = "It should hold a folder per class, with the pictures in it."
    if not folder.is_dir():
        raise TrainError(f"There is no folder {folder}.", python=remedy)
    names = folders_in(folder)
    if not names:
        raise TrainError(f"{folder} holds no folders.", python=remedy)
    return tuple(names)


def folders_in(folder: Path) -> list[str]:
    """The names of the folders in a folder, but for what is hidden, sorted; none where there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def read_folder(folder: Path, read: Read, classes: Sequence[str]) -> Pictures:
    """Lists the pictures of a folder per class, each file once, whatever links lead to it, and nothing that is hidden.

    Args:
        folder: Holds folders named after classes, with pictures anywhere below.
        read: `Preprocess.pixels` of the model; it is called from several threads.
        classes: Those that the model knows, in order.

    Raises:
        TrainError: A folder that is none of the classes or could be several, or has no pictures; or a file is in two.
    """
    names = class_names(folder)
    strange = [name for name in names if name not in classes]
    if strange:
        raise TrainError(
            f"{folder} has the classes {listed(strange)}, and those of the model are {listed(classes)}.",
            python="Rename or remove these folders.",
        )
    refuse_shared_labels(names, classes)
    paths: list[Path] = []
    labels: list[int] = []
    skipped: Counter[str] = Counter()
    first_names: dict[FileNumber, Path] = {}
    for name in names:
        found, others = _pictures_below(folder / name)
        once, again = _parted_by_file(found, first_names)
        _refuse_files_of_two_classes(again, folder)
        paths += once
        labels += [classes.index(name)] * len(once)
        skipped += others
        if again:
            skipped[AGAIN] += len(again)
    if skipped and distributed.is_main():
        _log.warning(
            "vitlite: %s: skipped %s (what is read ends in %s)",
            *(shown(str(folder)), counted(skipped), " ".join(sorted(SUFFIXES))),
        )
    return Pictures(Prepared(paths, read, folder), torch.tensor(labels, device="cpu"), tuple(classes))


def file_number(path: Path) -> FileNumber | None:
    """What a file has in common under all its names; None of one that is not there."""
    try:
        stat = os.stat(path)
    except OSError:  # whoever reads it says so
        return None
    # Size and time too, since not every storage over a network has numbers of its own for files.
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _parted_by_file(
    paths: Iterable[Path], first_names: dict[FileNumber, Path]
) -> tuple[list[Path], list[tuple[Path, Path]]]:
    """The paths that are no file's second name; and those that are, each with the first, which `first_names` keeps."""
    once, again = [], []
    for path in paths:
        number = file_number(path)
        first = path if number is None else first_names.setdefault(number, path)
        if first is path:
            once.append(path)
        else:
            again.append((path, first))
    return once, again


def _refuse_files_of_two_classes(repeats: Iterable[tuple[Path, Path]], folder: Path) -> None:
    for path, first in repeats:
        name, other = path.relative_to(folder), first.relative_to(folder)
        if name.parts[0] != other.parts[0]:
            raise TrainError(
                f"In {shown(str(folder))}, {shown(str(other))} and {shown(str(name))} are one file, by a link, and of "
                "two classes.",
                python="Remove the link from the class that the picture does not show.",
            )


def files_of(pictures: Pictures) -> list[Path]:
    """The files that pictures are read from; none of those in memory."""
    if isinstance(pictures.images, Tensor) or isinstance(pictures.images.pictures, Tensor):
        return []
    return list(pictures.images.pictures)


def refuse_shared_files(trained_on: Iterable[Path], measured_on: Iterable[Path]) -> None:
    """Makes sure that no file is among both, by a link. Among one of them, none is there twice, says `read_folder`.

    Raises:
        TrainError: One is, so the measurement would flatter.
    """
    first_names: dict[FileNumber, Path] = {}
    _parted_by_file(trained_on, first_names)
    _, shared = _parted_by_file(measured_on, first_names)
    if shared:
        path, first = shared[0]
        raise TrainError(
            f"{len(shared)} of the pictures to measure on are files that are trained on, by a link, such as "
            f"{shown(str(path))}, which is {shown(str(first))}.",
            python="Put each picture on one side.",
        )


def refuse_shared_labels(names: Iterable[str], labels: Sequence[str]) -> None:
    """Makes sure that each of the names is the label of one class: what several share names none of them.

    Raises:
        TrainError: A name is shared.
    """
    count = Counter(labels)
    for name in names:
        if count[name] > 1:
            which = [str(i) for i, label in enumerate(labels) if label == name]
            raise TrainError(
                f"{shown(name)} is the label of {len(which)} classes ({listed(which)}), so it does not tell which is "
                "meant.",
                python="Give them labels of their own (model.labels or Pictures.classes); or give one folder for each "
                "class, none of them named after a label, sorted in the model's order.",
                command="Give one folder for each class, none of them named after a label, sorted in the model's "
                "order; or give the classes names of their own.",
            )


def _pictures_below(folder: Path) -> tuple[list[Path], Counter[str]]:
    """The pictures, and how many other files there are of each ending.

    What is hidden is left out: programs put copies of what is beside it there, of which one would be held out of
    training, and the other trained on.
    """
    try:
        found, others = by_ending(files_below(str(folder), hidden=False), SUFFIXES)
    except OSError as error:
        raise TrainError(f"Cannot look into the folder {shown(str(error.filename))}: {error.strerror}.") from error
    if not found:
        there = f", and {counted(others)}" if others else ""
        raise TrainError(
            f"{folder} holds no pictures ({' '.join(sorted(SUFFIXES))}){there}.",
            python="Add some, or convert those that are there to JPEG or PNG, or remove the folder.",
        )
    return in_one_order(map(Path, found)), others


def in_one_order(paths: Iterable[P]) -> list[P]:
    """Sorted by letters on every system: Windows' own comparison has no upper and lower case.

    >>> from pathlib import PureWindowsPath
    >>> [path.name for path in in_one_order([PureWindowsPath("a.png"), PureWindowsPath("B.png")])]
    ['B.png', 'a.png']
    """
    return sorted(paths, key=lambda path: path.parts)


def listed(names: Sequence[str]) -> str:
    """The names, or the first few of many."""
    first = ", ".join(names[:8])
    return first if len(names) <= 8 else f"{first}, … ({len(names)} in all)"


def is_cifar10(folder: Path) -> bool:
    """Whether this is CIFAR-10's binary version."""
    return (folder / "test_batch.bin").exists()


def read_cifar10(
    folder: Path, split: Literal["train", "val", "test"], read: Read | None = None, channels: int = 3
) -> Pictures:
    """Reads one part of the binary version.

    Args:
        folder: Holds the .bin files and batches.meta.txt.
        split: The 49,000 to train on, 1,000 held out of the training pictures, or the 10,000 test pictures.
        read: `Preprocess.pixels` of the model; None: the pictures are taken as they are, 32 x 32.
        channels: Of the model; for one, they become grey, as files do; for any other they stay as they are.

    Raises:
        TrainError: A file is missing or damaged.
    """
    names = ["test_batch"] if split == "test" else [f"data_batch_{i}" for i in range(1, 6)]
    rows = torch.cat([_cifar10_batch(folder / f"{name}.bin") for name in names])  # (n, RECORD)
    classes, highest = cifar10_classes(folder), int(rows[:, 0].max())
    if highest >= len(classes):
        raise TrainError(f"{folder} has the label {highest}, and {CIFAR10_NAMES} names {len(classes)} classes.")
    part = {"train": slice(-HOLDOUT), "val": slice(-HOLDOUT, None), "test": slice(None)}[split]
    images = rows[:, 1:].reshape(-1, 3, 32, 32).contiguous()[part]
    if channels == 1:
        images = torch.cat([_grey(images[first : first + 5000]) for first in range(0, len(images), 5000)])
    return Pictures(Prepared(images, read) if read else images, rows[part, 0].long(), classes)


def _grey(images: Tensor) -> Tensor:
    """RGB in grey, by Pillow's arithmetic: (n, 3, h, w) -> (n, 1, h, w) uint8."""
    red, green, blue = images.int().unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16).to(torch.uint8)[:, None]


def cifar10_reader(preprocess: Preprocess) -> Read | None:
    """How CIFAR-10's pictures are prepared for a model; None where that would leave them as they are."""
    transform = preprocess.transform
    as_they_are = transform.size == transform.resize == (32, 32)
    return None if as_they_are else preprocess.pixels


def _cifar10_batch(path: Path) -> Tensor:
    """The records of one file: (n, RECORD)."""
    if not path.exists():
        raise TrainError(f"{path} is missing; CIFAR-10's binary version has six files.", python="Unpack it again.")
    data = path.read_bytes()
    if not data or len(data) % RECORD:
        raise TrainError(
            f"{path} has {len(data):,} bytes, which is no multiple of {RECORD:,}.", python="Unpack the data again."
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, RECORD)


def cifar10_classes(folder: Path) -> tuple[str, ...]:
    """The names of its classes, without a look at the pictures.

    Raises:
        TrainError: The file with the names is missing.
    """
    file = folder / CIFAR10_NAMES
    if not file.exists():
        raise TrainError(
            f"{folder} has no {file.name}, which names CIFAR-10's classes.", python="Unpack the data again."
        )
    return tuple(file.read_text(encoding="utf-8").split())
