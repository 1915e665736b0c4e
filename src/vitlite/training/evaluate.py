"""How good a model is on labelled pictures.

Shapes: b pictures at once, k classes.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from logging import getLogger
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlite.errors import TrainError, check_count, not_finite, shown
from vitlite.images.transform import Preprocess, normalise
from vitlite.nn.vit import ViT
from vitlite.training import distributed
from vitlite.training.datasets import (
    Pictures,
    Prepared,
    cifar10_reader,
    class_names,
    digest,
    is_cifar10,
    listed,
    read_cifar10,
    read_folder,
    refuse_shared_labels,
)
from vitlite.training.names import better_place, letters_of
from vitlite.training.split import folder_of_classes, folder_to_measure, read_held_out

_log = getLogger("vitlite")
DECIDES = ("size", "resize", "mode", "interpolation", "margin", "cut")  # of a transform, what its pixels depend on
MOST_CONFUSED = 4096  # classes of which each is counted with each: a table of 134 MB; ImageNet-21k's would take 3.8 GB


@dataclass(frozen=True)
class Measured:
    """What a model made of some pictures."""

    loss: float  # cross entropy, mean
    top1: float  # share of pictures whose best class is right
    top5: float  # whose five best are, which says nothing of five classes or fewer
    pictures: Tensor  # (k,) int64: of each class
    taken: Tensor  # (k,) int64: taken for each class
    right: Tensor  # (k,) int64: of each class and taken for it
    confusion: Tensor | None  # (k, k) int64: pictures of each class, by the one they were taken for; None of many
    answers: Tensor  # (n,) int64: the class that each picture was taken for

    def confused(self, most: int = 3) -> list[tuple[int, int, int]]:
        """What is taken for what most often: the class, the other that it was taken for, and of how many pictures."""
        check_count(most, "most")
        if self.confusion is None:
            return []
        k = len(self.right)
        wrong = self.confusion.clone().fill_diagonal_(0).flatten()
        count, place = wrong.sort(descending=True, stable=True)
        pairs = []
        for times, where in zip(count[:most].tolist(), place[:most].tolist(), strict=True):
            if times:
                pairs.append((where // k, where % k, times))
        return pairs

    @property
    def recall(self) -> Tensor:
        """Of the pictures of each class, the share that was recognised: (k,), NaN where there are none."""
        return self.right.float() / self.pictures

    @property
    def precision(self) -> Tensor:
        """Of the pictures taken for each class, the share that was of it: (k,), NaN where there are none."""
        return self.right.float() / self.taken


def measure(
    model: ViT,
    pictures: Pictures,
    *,
    batch: int = 256,
    bfloat16: bool = False,
    after_batch: Callable[[int], None] = lambda pictures: None,
) -> Measured:
    """Runs a model, in eval mode from then on, over labelled pictures.

    Args:
        model: Its preprocessing says how pictures are normalised.
        pictures: Of the size in the model's preprocessing, and of its classes, in the same order.
        batch: Pictures at once.
        bfloat16: Compute in it (autocast), as in training.
        after_batch: Called with how many pictures that were.

    Raises:
        TrainError: The pictures do not fit the model; or the processes of a run have others, or another model.
        InputError: Answers are not finite numbers, or `batch` is no positive number.
    """
    if distributed.world_size() > 1:
        distributed.assert_equal_on_all_ranks(
            {
                "pictures": pictures.digest(),
                "classes": pictures.classes,
                "preprocessing": preprocess_of(model).transform,
                "config": model.config,
                "weights": (model.source and model.source.sha256, digest(model.parameters())),
            }
        )
    return measure_together(model, pictures, batch=batch, bfloat16=bfloat16, after_batch=after_batch)


def measure_together(
    model: ViT,
    pictures: Pictures,
    *,
    batch: int = 256,
    bfloat16: bool = False,
    after_batch: Callable[[int], None] = lambda pictures: None,
) -> Measured:
    """The same, by processes that were compared before."""
    check_count(batch, "batch")
    check_fit(model, pictures)
    model.eval()
    transform, channels = preprocess_of(model).transform, model.config.channels
    k, total = model.config.num_classes, len(pictures)
    loss = torch.zeros((), dtype=torch.float64, device="cpu")
    top5 = torch.zeros((), dtype=torch.int64, device="cpu")
    counts = torch.zeros(3, k, dtype=torch.int64, device="cpu")  # of each class, taken for it, and both
    meaningless = torch.zeros((), dtype=torch.int64, device="cpu")  # answers
    confusion = torch.zeros(k * k if k <= MOST_CONFUSED else 0, dtype=torch.int64, device="cpu")
    answers = torch.zeros(total, dtype=torch.int64, device="cpu")
    mine = distributed.shard(total)
    with torch.inference_mode(), torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
        for first in range(0, len(mine), batch):
            rows = mine[first : first + batch]
            images, labels = normalise(pictures.images[rows], transform, channels), pictures.labels[rows]
            logits = model(images.to(model.device, model.dtype)).float().cpu()  # (b, k)
            meaningless += (~logits.isfinite()).any(1).sum()
            best = logits.topk(min(5, k)).indices
            loss += F.cross_entropy(logits, labels, reduction="sum")
            top5 += (best == labels[:, None]).sum()
            answers[rows] = taken = best[:, 0]
            for row, found in zip(counts, (labels, taken, labels[labels == taken]), strict=True):
                row += torch.bincount(found, minlength=k)
            if len(confusion):
                confusion.index_add_(0, labels * k + taken, torch.ones_like(labels))  # in place: it may be large
            after_batch(len(rows))
    distributed.all_reduce(
        *(tensor for tensor in (loss, top5, counts, meaningless, confusion, answers) if tensor.numel())
    )
    if meaningless:  # on any rank, and so on all
        raise not_finite(torch.bfloat16 if bfloat16 else model.dtype)
    return Measured(
        loss=loss.item() / total,
        top1=counts[2].sum().item() / total,
        top5=top5.item() / total,
        pictures=counts[0],
        taken=counts[1],
        right=counts[2],
        confusion=confusion.view(k, k) if len(confusion) else None,
        answers=answers,
    )


def check_fit(model: ViT, pictures: Pictures) -> None:
    """Whether these are pictures for this model.

    Raises:
        TrainError: They are of other classes, or of the same in another order; of another size or number of channels;
            or prepared in another way.
    """
    _check_classes(model, pictures.classes)
    way = preprocess_of(model)
    if isinstance(pictures.images, Prepared):
        _check_way(way, pictures.images.read)
    channels, height, width = pictures.fetch(torch.tensor([0], device="cpu")).shape[1:]
    if (height, width) != way.transform.size:
        wanted = way.transform.size
        raise TrainError(
            f"The pictures are of {height} x {width} pixels, and the model's preprocessing makes them "
            f"{wanted[0]} x {wanted[1]}.",
            python="Prepare them with model.preprocess.pixels.",
        )
    if channels != model.config.channels:
        raise TrainError(
            f"The pictures are of {channels} channels, and the model takes {model.config.channels}.",
            python="Prepare them with model.preprocess.pixels, and say channels=1 to read_cifar10 for grey ones.",
        )


def _check_way(way: Preprocess, read: Callable[..., Tensor]) -> None:
    """Makes sure that pictures which are prepared when asked for are prepared as by the model, as far as that is known.

    Raises:
        TrainError: Another transform, another way to decode, or a class with other `pixels` prepares them.
    """
    theirs = getattr(read, "__self__", None)
    if not isinstance(theirs, Preprocess):
        return
    ours = way.transform
    differing = [name for name in DECIDES if getattr(theirs.transform, name) != getattr(ours, name)]
    if theirs.quick_decode != way.quick_decode:
        differing.append("quick_decode")
    if getattr(read, "__func__", None) is not getattr(way.pixels, "__func__", None):
        differing.append("pixels")
    if differing:
        raise TrainError(
            f"The pictures are prepared in another way than the model's: it differs in {', '.join(differing)}.",
            python="Prepare them with model.preprocess.pixels, or give the model that preprocessing.",
            command="",
        )


def _check_classes(model: ViT, classes: Sequence[str]) -> None:
    k = model.config.num_classes
    if len(classes) != k:
        raise TrainError(
            f"The pictures have {len(classes)} classes and the model {k}.", python="Give the model's, all of them."
        )
    labels = model.labels or classes
    moved = [f"{name} for {label}" for name, label in zip_longest(classes, labels) if name != label]
    if moved:
        raise TrainError(
            f"The pictures' classes are not the model's: {listed(moved)}.",
            python="Give them its names (model.labels), in its order, and labels to match.",
        )


def preprocess_of(model: ViT, name: str = "The model") -> Preprocess:
    """How pictures are prepared for a model.

    Args:
        model: Any.
        name: What the error calls it, such as the name that it came by.

    Raises:
        TrainError: The weights came without it.
    """
    way = model.preprocess
    if not isinstance(way, Preprocess):
        raise TrainError(
            f"{name} has no preprocessing, so pictures cannot be prepared for it.",
            python="Set it: model.preprocess = vitlite.images.Preprocess(transform, model).",
            command="Name a checkpoint like it: --model NAME --weights PATH; or give it its own in Python "
            "(model.preprocess = ...), and name the folder that model.save writes.",
        )
    return way


def check_data(data: Path, split: Path | None = None) -> None:
    """Whether there is something to measure on, for those who would not fetch a model in vain.

    Raises:
        TrainError: It is neither CIFAR-10 nor a folder per class, or there is no such split.
    """
    if split is not None and (is_cifar10(data) or not split.is_file()):
        problem = "has a part to test on already" if split.is_file() else f"cannot be measured by {split}: no such file"
        raise TrainError(f"{data} {problem}.", python="Give the split.json that a run left, or none.")
    if not is_cifar10(data):
        class_names(_folder_per_class(data, split))


def read_to_measure(data: Path, model: ViT, name: str, split: Path | None = None) -> Pictures:
    """The test pictures of CIFAR-10, or those of a folder per class, or of its val/ or test/, labelled as by the model.

    Args:
        data: The folder.
        model: Its preprocessing makes the pictures, and its classes give the order.
        name: What errors call the model.
        split: A run's list of what it held out of a folder per class: those alone.

    Returns:
        The pictures, with the classes named as in the data.

    Raises:
        TrainError: The data are damaged, or of other classes than the model's.
    """
    preprocess = preprocess_of(model, name)
    if not is_cifar10(data):
        folder = _folder_per_class(data, split)
        names = class_names(folder)
        _say_if_unlabelled(model, names)
        pictures = read_folder(folder, preprocess.pixels, classes_in_order(model, names))
        return read_held_out(split, data, pictures) if split else pictures
    pictures = read_cifar10(data, "test", cifar10_reader(preprocess), model.config.channels)
    if len(pictures.classes) != model.config.num_classes:
        raise TrainError(
            f"The data have {len(pictures.classes)} classes, and {name} {model.config.num_classes}.",
            python="Fine-tune it first: vitlite.training.train.",
            command="Fine-tune it first: vitlite train.",
        )
    classes = classes_in_order(model, pictures.classes)
    moved_to = torch.tensor([classes.index(name) for name in pictures.classes], device="cpu")
    return replace(pictures, labels=moved_to[pictures.labels], classes=classes)


def _say_if_unlabelled(model: ViT, names: Sequence[str]) -> None:
    """Says which class each folder is taken for, where the model has no labels that could."""
    if model.labels is None and len(names) == model.config.num_classes and distributed.is_main():
        pairs = [f"{shown(name)} for class {number}" for number, name in enumerate(names)]
        _log.warning("vitlite: the model has no labels, so the folders are taken in order: %s", listed(pairs))


def _folder_per_class(data: Path, split: Path | None) -> Path:
    return folder_to_measure(data) if split is None else folder_of_classes(data)


def classes_in_order(model: ViT, names: Sequence[str]) -> tuple[str, ...]:
    """The names of the model's classes: its labels, if these names are among them; else the names, one for each class.

    Raises:
        TrainError: Only some of the names are labels, or none is and they are not as many as the classes, or their
            order is not certain; or one is the label of several.
    """
    labels, k = tuple(model.labels or ()), model.config.num_classes
    refuse_shared_labels(names, labels)
    strange = [name for name in names if name not in labels]
    if not strange:
        return labels
    nearly_labels = set(map(letters_of, labels)) & set(map(letters_of, names))
    if len(names) == k and not nearly_labels:  # such as ImageNet's n01440764, which are in the labels' order
        _refuse_two_orders(names)
        _refuse_better_places(names, labels)
        return tuple(names)
    known = f" ({listed(labels)})" if labels else ""
    raise TrainError(
        f"Of the model's {k} classes{known}, none is named {listed(strange)}.",
        python="Name the folders after its labels; or give one folder for each class, none of them named after a "
        "label, sorted in the model's order.",
    )


def _refuse_two_orders(names: Sequence[str]) -> None:
    """Makes sure that names stand for classes by their order, whichever library sorted them.

    Raises:
        TrainError: torchvision's order, by letters, is another than timm's, by numbers and without capitals.
    """
    by_letters, by_numbers = sorted(names), sorted(names, key=_numbers_in)
    for one, other in zip(by_letters, by_numbers, strict=True):
        if one != other:
            raise TrainError(
                "None of these folders is named after a label, so their order would tell which class each is, and "
                f"there are two: by letters {shown(one)} stands where by numbers {shown(other)} does.",
                python="Name the folders after the model's labels; or rename them so that both orders are one, such as "
                "007 for 7.",
            )


def _refuse_better_places(names: Sequence[str], labels: Sequence[str]) -> None:
    """Makes sure that no name says itself that its class is another than that in its place.

    Raises:
        TrainError: One does, such as "dogs", which is no label, where the label in its place is "cat, puss".
    """
    found = better_place(names, labels)
    if found is not None:
        place, other = found
        name, label, nearer = shown(names[place]), shown(labels[place]), shown(labels[other])
        raise TrainError(
            "None of these folders is named after a label, so their order would tell which class each is, and by that "
            f"{name} would be {label}, while its name is more like {nearer}.",
            python="Name the folders after the model's labels.",
        )


def _numbers_in(name: str) -> list[tuple[int, str]]:
    """What a name is sorted by where 10 comes after 9, and capitals are no other letters."""
    parts = re.split(r"([0-9]+)", name.lower())
    return [(int(part), "") if place % 2 else (0, part) for place, part in enumerate(parts)]
