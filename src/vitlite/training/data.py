"""Read labelled images for training and evaluation, from one folder per class or from CIFAR-10's binary version.

Shapes: n images in total, b images in a batch, c channels, h and w pixels.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from logging import getLogger
from pathlib import Path
from typing import Any, Literal, TypeGuard
from unicodedata import normalize

import torch
from torch import Tensor

from vitlite.checkpoints.fingerprint import bytes_of
from vitlite.errors import ImageError, TrainError, counted
from vitlite.images.decode import SUFFIXES
from vitlite.images.transform import Preprocess
from vitlite.inference.find import by_ending, files_below
from vitlite.inference.predict import readers
from vitlite.training import distributed

_log = getLogger("vitlite")
CACHE = 2**31  # bytes of prepared images kept in memory
RECORD = 1 + 3 * 32 * 32  # bytes of a CIFAR-10 image: its label, then the red, green and blue planes
CIFAR10_NAMES = "batches.meta.txt"
HOLDOUT = 1000  # CIFAR-10 training images used for validation, because the test images must stay unseen
PARTS = {  # names of the parts that Hugging Face's datasets library accepts, in upper or lower case
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip

Read = Callable[[Any], Tensor]  # turns a file or a tensor into uint8 (c, h, w) of the model's image size


class PreparedImages:
    """Images that are prepared on first use and then cached. Each is uint8 (c, h, w).

    Attributes:
        sources: The files or tensors.
        read: The function that turns a source into an image.
        folder: The folder to which the paths from `names` are relative.
        strict: If True, the first image that cannot be read raises an error.
        broken: The errors of images that could not be read, by row. These images are not read again.
    """

    def __init__(
        self, sources: Sequence[Path] | Tensor, read: Read, folder: Path | None = None, *, strict: bool = False
    ) -> None:
        self.sources, self.read, self.folder, self.strict = sources, read, folder, strict
        self.broken: dict[int, str] = {}
        self._cache: dict[int, Tensor] = {}
        self._free = CACHE

    def __len__(self) -> int:
        return len(self.sources)

    def try_rows(self, rows: Sequence[int]) -> list[Tensor | None]:
        """Return the images of these rows, with None for an image that cannot be read. Each such image is logged once.

        Raises:
            ImageError: An image cannot be read, and `strict` is True.
        """
        with readers() as pool:
            images = list(pool.map(self._image, rows))
        for row, image in zip(rows, images, strict=True):
            if isinstance(image, ImageError):
                if self.strict:
                    raise image
                self.broken[row] = str(image)
                _log.warning("vitlite: %s", image)
        return [image if isinstance(image, Tensor) else None for image in images]

    def _image(self, row: int) -> Tensor | ImageError | None:
        if row in self.broken:
            return None
        image = self._cache.get(row)
        if image is None:
            try:
                image = self.read(self.sources[row])
            except ImageError as error:
                return error
            if image.dtype != torch.uint8:
                raise TrainError(f"read= must return uint8 images, got {image.dtype}. Pass model.preprocess.pixels.")
            if self._free >= image.nbytes:
                self._free -= image.nbytes
                self._cache[row] = image
        return image

    def subset(self, rows: Sequence[int]) -> "PreparedImages":
        """Return the images of these rows, in this order."""
        if isinstance(self.sources, Tensor):
            return PreparedImages(self.sources[rows], self.read, strict=self.strict)
        return PreparedImages([self.sources[row] for row in rows], self.read, self.folder, strict=self.strict)

    def names(self) -> list[str]:
        """Return the path of each image relative to the folder, such as "cat/1.jpg", or its row if it is in memory."""
        if isinstance(self.sources, Tensor):
            return [str(row) for row in range(len(self))]
        folder = self.folder or Path()
        return [(path.relative_to(folder) if path.is_relative_to(folder) else path).as_posix() for path in self.sources]

    def origin(self) -> list[Tensor | str]:
        """Return the values that identify the images, which are pixels or file names."""
        if isinstance(self.sources, Tensor):
            return [self.sources]
        return list(self.names())


@dataclass(frozen=True)
class ImageData:
    """Labelled images and the names of their classes.

    Raises:
        TrainError: There are no images, they are not uint8, or a label is missing or out of range.
    """

    images: Tensor | PreparedImages  # (n, c, h, w) uint8
    labels: Tensor  # (n,) int64, one class per image; or (n, k) bool, if an image may have several labels or none
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        images, labels, k = self.images, self.labels, len(self.classes)
        if isinstance(images, Tensor) and (images.dtype != torch.uint8 or images.ndim != 4):
            raise TrainError(
                f"ImageData needs uint8 images (n, c, h, w), got {tuple(images.shape)} of {images.dtype}. If the "
                "values are between 0 and 1, convert them with (255 * images).round().to(torch.uint8)."
            )
        if self.multi_label and labels.shape == (len(images), k) and len(images):
            return
        if labels.shape != (len(images),) or labels.dtype != torch.int64 or not len(images):
            raise TrainError(
                f"ImageData needs at least one image and an int64 label for each, got {len(images)} images and labels "
                f"{tuple(labels.shape)} of {labels.dtype}. Pass an int64 tensor with one class index per image, or a "
                "bool tensor (n, k) for several labels per image."
            )
        lowest, highest = labels.min().item(), labels.max().item()
        if lowest < 0 or highest >= k:
            raise TrainError(
                f"ImageData has {k} classes, so labels must be from 0 to {k - 1}, got {lowest} to {highest}. List "
                "every class in classes=, in the order of the labels."
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def multi_label(self) -> bool:
        """True if an image may have several labels, or none."""
        return self.labels.ndim == 2 and self.labels.dtype == torch.bool

    def readable(self, rows: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the readable images among these rows (b,), each as uint8 (c, h, w), and their rows (r,)."""
        if isinstance(self.images, Tensor):
            return list(self.images[rows]), rows
        images = self.images.try_rows(rows.tolist())
        found = torch.tensor([image is not None for image in images], dtype=torch.bool, device="cpu")
        return [image for image in images if image is not None], rows[found]

    def fetch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images of these rows, with values from 0 to 1: (b, c, h, w), and their labels: (b,) or (b, k).

        An image that cannot be read is replaced by the next readable image of the same class. If images may have
        several labels, it is replaced by the next readable image and its labels.

        Raises:
            TrainError: No image of a class can be read.
        """
        if isinstance(self.images, Tensor):
            return self.images[rows].float().div_(255), self.labels[rows]
        images, rows = self.images.try_rows(rows.tolist()), rows.clone()
        for i, row in enumerate(rows.tolist()):
            if images[i] is None:
                images[i], rows[i] = self._substitute(self.images, row)
        return torch.stack(images).float().div_(255), self.labels[rows]  # type: ignore[arg-type]  # no image is None

    def _substitute(self, images: PreparedImages, row: int) -> tuple[Tensor, int]:
        """Return the next readable image and its row. If images have one label, the class is the same."""
        others = torch.arange(len(self), device="cpu")
        if not self.multi_label:
            others = others[self.labels == self.labels[row]]
        for other in torch.cat([others[others > row], others[others < row]]).tolist():
            image = images.try_rows([other])[0]
            if image is not None:
                return image, other
        of_class = "" if self.multi_label else f" of the class {self.classes[int(self.labels[row])]}"
        raise TrainError(f"Cannot read any image{of_class}. {images.broken[row]}")

    def broken(self) -> list[str]:
        """Return the names of the images that any process of torchrun has failed to read."""
        if isinstance(self.images, Tensor):
            return []
        is_broken = torch.zeros(len(self), dtype=torch.int32, device="cpu")
        is_broken[list(self.images.broken)] = 1
        distributed.all_reduce(is_broken)
        names = self.names() if is_broken.any() else []
        return [names[row] for row in is_broken.nonzero()[:, 0].tolist()]

    def subset(self, chosen: Tensor) -> "ImageData":
        """Return the images where the boolean mask `chosen` (n,) is True."""
        rows = chosen.nonzero()[:, 0]
        images = self.images.subset(rows.tolist()) if isinstance(self.images, PreparedImages) else self.images[rows]
        return ImageData(images, self.labels[rows], self.classes)

    def with_classes(self, classes: Sequence[str]) -> "ImageData":
        """Return the same images, with label indices for these classes.

        Raises:
            TrainError: A class of the images is not one of `classes`.
        """
        indices = torch.tensor(class_indices(self.classes, classes), device="cpu")
        if not self.multi_label:
            return ImageData(self.images, indices[self.labels], tuple(classes))
        labels = torch.zeros(len(self), len(classes), dtype=torch.bool, device="cpu")
        labels[:, indices] = self.labels
        return ImageData(self.images, labels, tuple(classes))

    def with_multi_label(self) -> "ImageData":
        """Return the same images with boolean labels (n, k), which allow several labels per image."""
        if self.multi_label:
            return self
        labels = torch.arange(len(self.classes), device="cpu") == self.labels[:, None]  # (n, k)
        return ImageData(self.images, labels, self.classes)

    def label_indices(self) -> list[Any]:
        """Return the class index of each image, or a list of class indices per image if `multi_label` is True."""
        if not self.multi_label:
            return self.labels.tolist()
        return [row.nonzero()[:, 0].tolist() for row in self.labels]

    def with_files(self, names: Sequence[str], labels: Sequence[Any]) -> "ImageData":
        """Return other images of the same folder and classes. The files need not exist.

        Args:
            names: Paths relative to the folder.
            labels: The labels of each image, in the form of `label_indices`.
        """
        images = self.images
        assert isinstance(images, PreparedImages), "images in memory have no files"
        paths = [(images.folder or Path()) / name for name in names]
        chosen = PreparedImages(paths, images.read, images.folder, strict=images.strict)
        return ImageData(chosen, label_tensor(labels, self.classes, multi_label=self.multi_label), self.classes)

    def names(self) -> list[str]:
        """Return the path of each image relative to the folder, such as "cat/1.jpg", or its row if it is in memory."""
        if isinstance(self.images, PreparedImages):
            return self.images.names()
        return [str(row) for row in range(len(self))]

    def files(self) -> list[Path]:
        """Return the image files, or an empty list for images in memory."""
        if isinstance(self.images, Tensor) or isinstance(self.images.sources, Tensor):
            return []
        return list(self.images.sources)

    def digest(self) -> str:
        """Return a hash of the labels and the images. For files, the hash covers the names but not the pixels."""
        origin = self.images.origin() if isinstance(self.images, PreparedImages) else [self.images]
        return digest([self.labels, *origin])


def label_tensor(indices: Sequence[Any], classes: Sequence[str], *, multi_label: bool) -> Tensor:
    """Return the labels of `ImageData` from one class index, or one list of class indices, per image."""
    if not multi_label:
        return torch.tensor(indices, dtype=torch.int64, device="cpu")
    labels = torch.zeros(len(indices), len(classes), dtype=torch.bool, device="cpu")
    for row, of_image in enumerate(indices):
        labels[row, of_image] = True
    return labels


def digest(values: Iterable[Tensor | str]) -> str:
    """Return a hash of tensors and strings."""
    found = sha256()
    for value in values:
        if isinstance(value, str):
            found.update(value.encode(errors="surrogateescape") + b"\0")
        else:
            found.update(bytes_of(value))
    return f"sha256 {found.hexdigest()[:16]}"


def file_size(path: Path) -> int:
    """Return the size of a file in bytes, or -1 if it does not exist."""
    return path.stat().st_size if path.exists() else -1


def class_indices(names: Sequence[str], classes: Sequence[str]) -> list[int]:
    """Return the class index of each folder name. Either all names are class names, or all are class indices.

    >>> class_indices(["cat", "ship"], ["ship", "cat", "dog"]), class_indices(["000", "002"], ["ship", "cat", "dog"])
    ([1, 0], [0, 2])

    Raises:
        TrainError: A folder name is neither a class name nor a class index, or is the name of several classes.
    """
    names, classes = list(map(composed, names)), list(map(composed, classes))
    count = Counter(classes)
    unknown = [name for name in names if not count[name]]
    if len(unknown) == len(names) and all(name.isdecimal() and int(name) < len(classes) for name in names):
        return [int(name) for name in names]
    if unknown:
        raise TrainError(
            f"The model has {len(classes)} classes ({listed(classes)}), but none named {listed(unknown)}. Rename the "
            "folders or labels to class names or class indices. Alternatively, pass a file that lists the folders or "
            "labels in the order of the model's classes (--classes FILE)."
        )
    shared = [name for name in names if count[name] > 1]
    if shared:
        raise TrainError(
            f"The model has {count[shared[0]]} classes named {shared[0]}. Rename the folders to class indices, or list "
            "the folders in a file, in the order of the classes (--classes FILE)."
        )
    return [classes.index(name) for name in names]


def class_names(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the class folders in a folder.

    Raises:
        TrainError: The folder does not exist or contains no folders.
    """
    names = folders_in(folder)
    if not names:
        problem = "contains no folders" if folder.is_dir() else "does not exist"
        raise TrainError(f"{folder} {problem}. Pass a folder that contains one folder of images per class.")
    return tuple(sorted(set(map(composed, names))))


def composed(name: str) -> str:
    """Return a name in Unicode's composed form. File names from a Mac have letters and accents separately."""
    return normalize("NFC", name)


def folders_in(folder: Path) -> list[str]:
    """Return the sorted names of the visible folders in a folder, or an empty list if it does not exist."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def read_folder(folder: Path, read: Read, classes: Sequence[str], *, strict: bool = False) -> ImageData:
    """List the images in a folder that contains one folder per class. Hidden files and folders are skipped.

    Args:
        folder: The folder of the class folders, which contain images at any depth.
        read: A function that returns the pixels of a file, such as `model.preprocess.pixels`. It is called from
            several threads.
        classes: The folder names, in the order of the classes. A class may have no folder.
        strict: If True, an image that cannot be read raises an error.

    Raises:
        TrainError: A folder is not named after one of the classes, or contains no images.
    """
    names, classes = class_names(folder), tuple(map(composed, classes))
    unknown = [name for name in names if name not in classes]
    if unknown:
        raise TrainError(
            f"{folder} has the folders {listed(unknown)}, but the classes are {listed(classes)}. Rename or remove "
            "each folder that is not a class."
        )
    paths: list[Path] = []
    labels: list[int] = []
    skipped: Counter[str] = Counter()
    for name in folders_in(folder):
        found, others = _images_below(folder / name)
        paths += found
        labels += [classes.index(composed(name))] * len(found)
        skipped += others
    if skipped and distributed.is_main():
        _log.warning("vitlite: %s: skipped files that are not images: %s", folder, counted(skipped))
    beside = by_ending((str(path) for path in folder.glob("[!.]*") if path.is_file()), SUFFIXES)[0]
    if beside and distributed.is_main():
        count = "1 image" if len(beside) == 1 else f"{len(beside)} images"
        _log.warning("vitlite: %s: skipped %s beside the class folders", folder, count)
    images = PreparedImages(paths, read, folder, strict=strict)
    return ImageData(images, torch.tensor(labels, device="cpu"), classes)


def _images_below(folder: Path) -> tuple[list[Path], Counter[str]]:
    """Return the sorted images below a folder, and the number of other files by extension."""
    try:
        # Hidden folders such as .ipynb_checkpoints contain copies. A copy must not be held out for validation while
        # the original is used for training.
        found, others = by_ending(files_below(str(folder), hidden=False), SUFFIXES)
    except OSError as error:
        raise TrainError(f"Cannot read the folder {folder}: {error}. Check its path and permissions.") from error
    if not found:
        there = f", only {counted(others)}" if others else ""
        raise TrainError(
            f"{folder} contains no images ({' '.join(sorted(SUFFIXES))}){there}. Add images, convert the files to JPEG "
            "or PNG, or remove the folder."
        )
    return sorted(map(Path, found), key=lambda path: path.parts), others  # in the same order on Windows


def listed(names: Sequence[str]) -> str:
    """Join up to eight names with commas, and append the total number if there are more."""
    first = ", ".join(names[:8])
    return first if len(names) <= 8 else f"{first}, … ({len(names)} in all)"


def is_cifar10(data: object) -> TypeGuard[Path]:
    """Return True for a folder that contains the binary version of CIFAR-10."""
    return isinstance(data, Path) and (data / "test_batch.bin").exists()


def read_cifar10(
    folder: Path, split: Literal["train", "val", "test"], read: Read | None = None, channels: int = 3
) -> ImageData:
    """Read one part of the binary version of CIFAR-10.

    Args:
        folder: The folder of the .bin files and batches.meta.txt.
        split: "train" for the first 49,000 training images, "val" for the last 1,000, or "test" for the test images.
        read: A function such as `model.preprocess.pixels`. With None, the images keep their 32 x 32 pixels.
        channels: 3 for RGB, 1 for greyscale.

    Raises:
        TrainError: A file is missing or damaged.
    """
    names = ["test_batch"] if split == "test" else [f"data_batch_{i}" for i in range(1, 6)]
    rows = torch.cat([_cifar10_batch(folder / f"{name}.bin") for name in names])  # (n, RECORD)
    classes, highest = cifar10_classes(folder), int(rows[:, 0].max())
    if highest >= len(classes):
        raise TrainError(
            f"{folder} is damaged. It contains the label {highest}, but {CIFAR10_NAMES} lists only {len(classes)} "
            "classes. Unpack the data again."
        )
    part = {"train": slice(-HOLDOUT), "val": slice(-HOLDOUT, None), "test": slice(None)}[split]
    images = rows[:, 1:].reshape(-1, 3, 32, 32).contiguous()[part]
    if channels == 1:
        images = torch.cat([_grey(images[first : first + 5000]) for first in range(0, len(images), 5000)])
    return ImageData(PreparedImages(images, read) if read else images, rows[part, 0].long(), classes)


def _grey(images: Tensor) -> Tensor:
    """Convert RGB to greyscale with the same integer formula as Pillow: (n, 3, h, w) -> (n, 1, h, w) uint8."""
    red, green, blue = images.int().unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16).to(torch.uint8)[:, None]


def cifar10_reader(preprocess: Preprocess) -> Read | None:
    """Return the function that prepares CIFAR-10's images for a model, or None if the images need no resizing."""
    transform = preprocess.transform
    return None if transform.size == transform.resized(32, 32) == (32, 32) else preprocess.pixels


def _cifar10_batch(path: Path) -> Tensor:
    """Read the records of one file: (n, RECORD)."""
    if not path.exists():
        raise TrainError(f"{path}, one of the six .bin files of CIFAR-10, is missing. Unpack the data again.")
    data = path.read_bytes()
    if not data or len(data) % RECORD:
        raise TrainError(
            f"{path} is damaged. It has {len(data):,} bytes, which is not a multiple of {RECORD:,}. Unpack the data "
            "again."
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, RECORD)


def cifar10_classes(folder: Path) -> tuple[str, ...]:
    """Return the names of CIFAR-10's classes.

    Raises:
        TrainError: The file with the names is missing.
    """
    file = folder / CIFAR10_NAMES
    if not file.exists():
        raise TrainError(f"{file}, which lists the classes of CIFAR-10, is missing. Unpack the data again.")
    return tuple(file.read_text(encoding="utf-8").split())
