"""Read the training, validation and test images from folders or a table, and hold out images for validation.

The choice of held-out images depends only on the file names and the seed. A resumed run therefore holds out the same
images. The file split.json in the folder of the run lists them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from logging import getLogger
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from vitlite import storage
from vitlite.errors import TrainError
from vitlite.images.transform import Preprocess, preprocess_of
from vitlite.nn.vit import ViT
from vitlite.training import distributed
from vitlite.training.data import (
    PARTS,
    ImageData,
    Read,
    cifar10_classes,
    cifar10_reader,
    class_indices,
    class_names,
    composed,
    file_size,
    folders_in,
    is_cifar10,
    listed,
    read_cifar10,
    read_folder,
)
from vitlite.training.record import images_of_run
from vitlite.training.tables import Table

_log = getLogger("vitlite")
MOST_COMPARED = 100_000  # maximum number of files to search for copies
SHARE = 0.2  # default share of the images of each class to hold out
SPLIT = "split.json"  # in the folder of a run
Data: TypeAlias = Path | Table  # a folder with class folders or train/ and val/, CIFAR-10, or a table of labels


class Split(NamedTuple):
    """The training and validation images of a run."""

    train: ImageData
    validation: ImageData
    held_out: list[str]  # names of the held-out images; empty if the data have a part for validation

    def with_classes(self, classes: Sequence[str]) -> "Split":
        """Return the same images, with label indices for these classes."""
        return Split(self.train.with_classes(classes), self.validation.with_classes(classes), self.held_out)

    def renamed(self, classes: Sequence[str]) -> "Split":
        """Return the same images and labels with other class names."""
        classes = tuple(classes)
        return Split(replace(self.train, classes=classes), replace(self.validation, classes=classes), self.held_out)

    def of_run(self, out: Path) -> "Split":
        """Return the images with which the run in a folder began. See `images_of_run`."""
        train, validation = images_of_run(out, self.train, self.validation)
        assert validation is not None
        return Split(train, validation, validation.names() if self.held_out else [])


def data_parts(data: Data) -> Mapping[str, Data]:
    """Return the train, val and test parts of the data, or an empty dict if the data have no parts.

    Raises:
        TrainError: There are other folders beside train, val and test, or two folders for the same part.
    """
    if isinstance(data, Table):
        return data.parts
    names = folders_in(data)
    parts = [name for name in names if name.lower() in PARTS]
    others = [name for name in names if name.lower() not in PARTS]
    if others:
        if any(folders_in(data / name) for name in parts):
            raise TrainError(
                f"{data} contains {listed(parts)}, but also other folders: {listed(others)}. If they are classes, move "
                "them into train. Otherwise, move them out of the data."
            )
        return {}  # all folders are classes, one of which may be called test
    found: dict[str, Path] = {}
    for name in parts:
        part = PARTS[name.lower()]
        if part in found:
            raise TrainError(
                f"{data} contains {found[part].name} and {name}, which both mean {part}. Remove one of them."
            )
        found[part] = data / name
    return found


def training_part(data: Data) -> Data:
    """Return the part of the data for training, or all data if there are no parts.

    Raises:
        TrainError: There is a val or test part, but no train part.
    """
    parts = data_parts(data)
    if parts and "train" not in parts:
        raise TrainError(
            f"{data} contains {_names_of(parts)}, but no train part. Rename the folder of training images to train, "
            "and the folder of validation images to val."
        )
    return parts.get("train", data)


def evaluation_part(data: Data) -> Data:
    """Return the val part of the data, otherwise the test part, or all data if there are no parts.

    Raises:
        TrainError: There is a train part, but no val or test part.
    """
    parts = data_parts(data)
    if list(parts) == ["train"]:
        raise TrainError(
            f"{data} contains {_names_of(parts)}, but no val or test part for evaluation. Add one. To evaluate on the "
            "training images, pass them as data without parts."
        )
    return parts.get("val", parts.get("test", data))


def _names_of(parts: Mapping[str, Data]) -> str:
    return listed([part.name if isinstance(part, Path) else name for name, part in parts.items()])


def label_names(part: Data) -> tuple[str, ...]:
    """Return the sorted names of the class folders in a folder, or of the labels in a table.

    Raises:
        TrainError: The folder does not exist or contains no folders.
    """
    return part.classes if isinstance(part, Table) else class_names(part)


def read_part(part: Data, read: Read, classes: Sequence[str], *, strict: bool = False) -> ImageData:
    """Return the images of a folder with class folders, or of a table. See `read_folder`."""
    if isinstance(part, Table):
        return part.read(read, classes, strict=strict)
    return read_folder(part, read, classes, strict=strict)


def location(part: Data) -> Path:
    """Return the absolute path of a folder or of the file of a table."""
    return (part.file if isinstance(part, Table) else part).resolve()


def training_classes(data: Data) -> tuple[str, ...]:
    """Return the class names for training.

    Raises:
        TrainError: There are fewer than two classes.
    """
    if is_cifar10(data):
        return cifar10_classes(data)
    part = training_part(data)
    classes = label_names(part)
    if len(classes) < 2 and not (isinstance(part, Table) and part.multi_label and classes):
        raise TrainError(
            f"{part} contains only one class, {listed(classes)}, but training needs at least two. Add images of "
            "another class."
        )
    return classes


def read_class_list(file: Path) -> tuple[str, ...]:
    """Read the names of class folders from a file with one name per line, in the order of the model's classes.

    Raises:
        TrainError: The file cannot be read, or is empty.
    """
    try:
        names = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError(
            f"Cannot read --classes {file}: {error}. Pass a UTF-8 text file with the name of one class folder per line."
        ) from error
    classes = tuple(name.strip() for name in names if name.strip())
    if not classes:
        raise TrainError(f"--classes {file} is empty. Write the name of one class folder per line.")
    return classes


def stand_for(folders: Sequence[str], labels: Sequence[str]) -> bool:
    """Return True if the folders are named after all labels of a model, or after all its class indices."""
    try:
        return sorted(class_indices(folders, labels)) == list(range(len(labels)))
    except TrainError:
        return False


def read_training_data(
    data: Data,
    preprocess: Preprocess,
    classes: Sequence[str],
    *,
    share: float | None = None,
    seed: int = 0,
    strict: bool = False,
) -> Split:
    """Read the training images and the validation images.

    Args:
        data: A folder that contains train/ and val/, only train/, only class folders, or CIFAR-10's .bin files.
            Alternatively, a table of labels. Without a part for validation, a share of the images is held out.
        preprocess: The preprocessing of the model.
        classes: The names of the class folders or labels, in the order of the classes.
        share: The share of each class to hold out if there is no part for validation (default: 0.2).
        seed: The seed for the choice of held-out images.
        strict: If True, an image that cannot be read raises an error.

    Raises:
        TrainError: The data cannot be read or split, or `share` is passed although there is a part for validation.
    """
    val = None if is_cifar10(data) else data_parts(data).get("val")
    if share is not None and (val is not None or is_cifar10(data)):
        raise TrainError(f"{data} already contains validation images. Omit share= (--val-share).")
    if is_cifar10(data):
        read, channels = cifar10_reader(preprocess), preprocess.model.config.channels
        return Split(read_cifar10(data, "train", read, channels), read_cifar10(data, "val", read, channels), [])
    train, held_out = read_part(training_part(data), preprocess.pixels, classes, strict=strict), []
    if val is not None:
        validation = read_part(val, preprocess.pixels, classes, strict=strict)
    else:
        train, validation = hold_out(train, SHARE if share is None else share, seed)
        held_out = validation.names()
    warn_of_copies(train.files(), validation.files())
    return Split(train, validation, held_out)


def warn_of_copies(train: Sequence[Path], held_out: Sequence[Path]) -> None:
    """Log a warning if a training file and a held-out file have the same bytes.

    Only files of equal size are read. If there are more than `MOST_COMPARED` files, none are compared.
    """
    if len(train) + len(held_out) > MOST_COMPARED or not distributed.is_main():
        return
    sizes = {path: file_size(path) for path in (*train, *held_out)}
    shared = {sizes[path] for path in train} & {sizes[path] for path in held_out if sizes[path] > 0}
    hashes = {_hash(path): path for path in held_out if sizes[path] in shared}
    hashed = ((path, _hash(path)) for path in train if sizes[path] in shared)
    copies = [(path, hashes[found]) for path, found in hashed if found in hashes]
    if copies:
        _log.warning(
            "vitlite: %d training images are exact copies of held-out images, such as %s of %s. The measured accuracy "
            "will be too high. Remove one image of each pair.",
            len(copies),
            *copies[0],
        )


def _hash(path: Path) -> str:
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError:
        return str(path)  # differs from every hash


def hold_out(data: ImageData, share: float = SHARE, seed: int = 0) -> tuple[ImageData, ImageData]:
    """Split images into training and validation images.

    A share of each class, and at least one image of it, is used for validation. If an image may have several labels,
    the rarest of them counts as its class.

    Raises:
        TrainError: A class has only one image, or `share` is not from 0.01 to 0.9.
    """
    if not 0.01 <= share <= 0.9:
        raise TrainError(f"The share to hold out (--val-share) must be from 0.01 to 0.9, got {share:g}.")
    names = data.names()
    held = torch.zeros(len(data), dtype=torch.bool, device="cpu")
    strata = _rarest_labels(data) if data.multi_label else data.labels
    for k, name in enumerate((*data.classes, "")):
        rows = (strata == k).nonzero()[:, 0].tolist()
        if len(rows) == 1 and not data.multi_label:
            raise TrainError(
                f"The class {name} has only one image, but training and validation need at least one each. Add images."
            )
        if rows:
            # Sorting by hash shuffles the images. If images are added, most of the choice stays the same.
            rows.sort(key=lambda row: sha256(f"{seed} {names[row]}".encode(errors="surrogateescape")).digest())
            held[rows[: min(max(round(share * len(rows)), 1), len(rows) - 1)]] = True
    return data.subset(~held), data.subset(held)


def _rarest_labels(data: ImageData) -> Tensor:
    """Return the rarest label of each image: (n,).

    It is k for an image without labels, and for an image that is the only one with its rarest label.
    """
    rarest = torch.where(data.labels, data.labels.sum(0), len(data) + 1).argmin(1)
    alone = torch.bincount(rarest)[rarest] == 1
    return torch.where(data.labels.any(1) & ~alone, rarest, len(data.classes))


def write_split(path: Path, data: Data, held_out: Sequence[str]) -> None:
    """Write the list of held-out images for `read_split`."""
    content = {"classes in": str(location(training_part(data))), "held out": list(held_out)}
    storage.write_text(path, json.dumps(content, indent=1) + "\n")


def read_split(path: Path) -> tuple[Path, list[str]]:
    """Read a file from `write_split`. Return the folder or table that it names, and the names of the held-out images.

    Raises:
        TrainError: The file cannot be read, or is not a list of held-out images.
    """
    try:
        content = json.loads(path.read_bytes())
        return Path(content["classes in"]), [str(name) for name in content["held out"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainError(
            f"{path} is not a list of held-out images ({type(error).__name__}: {error}). Pass the split.json of a "
            "training run or of probe --save."
        ) from error


def check_evaluation_data(data: Data, split: Path | None = None) -> None:
    """Check the data for an evaluation before a model is downloaded.

    Raises:
        TrainError: The data are neither CIFAR-10 nor class folders, or `split` does not fit the data.
    """
    if split is not None:
        read_split(split)
        if is_cifar10(data):
            raise TrainError(f"{data} is CIFAR-10, which has its own test images. Omit split= (--split).")
    if not is_cifar10(data):
        label_names(evaluation_part(data) if split is None else training_part(data))


def read_evaluation_data(
    data: Data,
    model: ViT,
    split: Path | None = None,
    folders: Sequence[str] | None = None,
    *,
    strict: bool = False,
) -> ImageData:
    """Read images for evaluation: CIFAR-10's test images, or the images of `evaluation_part`.

    Args:
        data: The folder or the table.
        model: The model whose preprocessing and labels are used.
        split: The split.json of a run. If it is passed, only the images that this run held out are read.
        folders: The names of the class folders or labels, in the order of the model's classes. They are only needed if
            the names are neither labels of the model nor class indices.
        strict: If True, an image that cannot be read raises an error.

    Raises:
        TrainError: The data are damaged, or their classes are not the classes of the model.
    """
    preprocess, k = preprocess_of(model), model.config.num_classes
    classes = tuple(model.labels or map(str, range(k)))
    if is_cifar10(data):
        images = read_cifar10(data, "test", cifar10_reader(preprocess), model.config.channels)
        return images.with_classes(classes) if model.labels else _in_order(images, images.classes, k)
    part = evaluation_part(data) if split is None else training_part(data)
    names = folders or label_names(part)
    images = read_part(part, preprocess.pixels, names, strict=strict)
    if split is not None:
        images = _held_out(images, split)
    if model.scores == "sigmoid" and model.thresholds is not None:  # trained for several labels per image
        images = images.with_multi_label()
    return images.with_classes(classes) if folders is None else _in_order(images, classes, k)


def _held_out(data: ImageData, split: Path) -> ImageData:
    """Return the images that a run held out. Images that were removed since then count as broken."""
    wanted = read_split(split)[1]
    labels = dict(zip(data.names(), data.label_indices(), strict=True))
    missing = [name for name in wanted if name not in labels]
    folders = {name: composed(Path(name).parts[0]) for name in missing}
    labels |= {name: data.classes.index(folder) for name, folder in folders.items() if folder in data.classes}
    if len(missing) == len(wanted) or not labels.keys() >= set(wanted):
        raise TrainError(
            f"{split} lists {len(missing)} images that are not in the data ({listed(missing)}). Pass the folder that "
            "was used for training."
        )
    held_out = data.with_files(wanted, [labels[name] for name in wanted])
    used = set(held_out.files())
    warn_of_copies([path for path in data.files() if path not in used], held_out.files())
    return held_out


def _in_order(data: ImageData, classes: Sequence[str], k: int) -> ImageData:
    """Replace the class names of the data with `classes`, which must be in the same order."""
    if len(data.classes) != k:
        raise TrainError(
            f"The data have {len(data.classes)} classes, but the model has {k}. Fine-tune the model on these classes "
            "first (vitlite train)."
        )
    return replace(data, classes=tuple(classes))
