"""Record the image files of a run, which allows the run to resume if some files are missing or broken later.

The record is a file in the folder of the run. Images in memory are not recorded, because their pixels identify them.
"""

import json
from pathlib import Path
from typing import Any

import torch

from vitlite import storage
from vitlite.errors import TrainError
from vitlite.training import distributed
from vitlite.training.data import ImageData, file_size, listed
from vitlite.training.state import IMAGES, STATE, has_begun

Entry = dict[str, list[Any]]  # the names, labels and sizes of images


def write_images(out: Path, data: ImageData, validation: ImageData | None) -> None:
    """Write the names, labels and sizes of the image files of a new run."""
    parts = {"train": data, "validation": validation}
    if distributed.is_main():
        content = {name: _entry(images) for name, images in parts.items() if images and images.files()}
        storage.write_text(out / IMAGES, json.dumps(content) + "\n")


def _entry(data: ImageData) -> Entry:
    return {"names": data.names(), "labels": data.label_indices(), "sizes": [file_size(path) for path in data.files()]}


def images_of_run(
    out: Path, data: ImageData, validation: ImageData | None = None
) -> tuple[ImageData, ImageData | None]:
    """Return the images with which the run in `out` began. Images that were removed since then count as broken.

    Args:
        out: The folder of a run. If no run has begun in it, the images are returned unchanged.
        data: The training images that exist now.
        validation: The validation images that exist now.

    Raises:
        TrainError: Images were added or changed after the run began, or the record of the images is damaged.
        ImageError: An image is missing, and the images are `strict`.
    """
    now = {name: part for name, part in (("train", data), ("validation", validation)) if part and part.files()}
    if not has_begun(out / STATE) or not (out / IMAGES).exists():
        return data, validation
    record = _read(out / IMAGES)
    if now.keys() != record.keys() or any(not _fits(part, record[name]["labels"]) for name, part in now.items()):
        return data, validation  # `Run.resume` raises an error that explains the difference
    begun = dict(now)
    for name, part in now.items():
        names, labels = record[name]["names"], record[name]["labels"]
        if (part.names(), part.label_indices()) != (names, labels):
            begun[name] = part.with_files(names, labels)
    if _holds_out_others(now, begun):
        return data, validation  # `Run.resume` raises the error, as above
    _check_added(out, now, begun)
    for name, part in begun.items():
        _check_sizes(out, part, record[name]["sizes"])
        known = set(now[name].files())
        gone = [row for row, path in enumerate(part.files()) if path not in known]
        part.readable(torch.tensor(gone, dtype=torch.int64, device="cpu"))
    return begun.get("train", data), begun.get("validation", validation)


def _fits(data: ImageData, labels: list[Any]) -> bool:
    """Return True if the recorded labels have the same form as those of `data`, and indices of existing classes."""
    several = isinstance(labels[0], list)
    largest = max((max(label, default=0) for label in labels) if several else labels)
    return data.multi_label == several and largest < len(data.classes)


def _holds_out_others(now: dict[str, ImageData], begun: dict[str, ImageData]) -> bool:
    """Return True if the run has the same images, but a different choice of them is held out now."""
    return _classes(now).keys() == _classes(begun).keys() and any(
        set(now[name].files()) != set(begun[name].files()) for name in now
    )


def _check_added(out: Path, now: dict[str, ImageData], begun: dict[str, ImageData]) -> None:
    """Check that all images were in the run when it began, with the same class."""
    classes, recorded = _classes(now), _classes(begun)
    added = [str(path) for path, label in classes.items() if recorded.get(path) != label]
    if added:
        raise TrainError(
            f"{out} contains another run: {len(added)} images were added or moved to another class ({listed(added)}). "
            "Undo this to resume the run, or start a new run with another out= (--out)."
        )


def _check_sizes(out: Path, data: ImageData, sizes: list[int]) -> None:
    """Check that the files have the recorded sizes in bytes. Images that cannot be read now are not checked."""
    for row, path in enumerate(data.files()):
        size = file_size(path)
        if size != -1 and sizes[row] == -1:
            raise TrainError(
                f"{out} contains another run: {path} was missing when the run began. Remove it to resume the run, or "
                "start a new run with another out= (--out)."
            )
        if size not in (-1, sizes[row]) and data.readable(torch.tensor([row], device="cpu"))[0]:
            raise TrainError(
                f"{out} contains another run: {path} has changed from {sizes[row]:,} to {size:,} bytes. Restore it to "
                "resume the run, or start a new run with another out= (--out)."
            )


def _read(path: Path) -> dict[str, Entry]:
    try:
        record: dict[str, Entry] = json.loads(path.read_bytes())
        for entry in record.values():
            if not len(entry["names"]) == len(entry["labels"]) == len(entry["sizes"]):
                raise ValueError("the lists differ in length")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise TrainError(
            f"{path} is damaged ({type(error).__name__}: {error}). Start a new run with another out= (--out)."
        ) from error
    return record


def _classes(parts: dict[str, ImageData]) -> dict[Path, Any]:
    """Return the class index, or the list of class indices, of each file."""
    return {
        path: label for part in parts.values() for path, label in zip(part.files(), part.label_indices(), strict=True)
    }
