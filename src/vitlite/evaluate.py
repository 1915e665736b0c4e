"""How good a model is on labelled pictures: `measure`, and `vitlite eval`."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlite import ranks
from vitlite.datasets import Pictures, Read, class_names, is_cifar10, listed, read_cifar10, read_folder
from vitlite.errors import TrainError
from vitlite.images import Preprocess, Recipe
from vitlite.model import ViT
from vitlite.report import table, with_bold_header
from vitlite.weights import add_model_arguments, add_speed_arguments, open_model


@dataclass(frozen=True)
class Measured:
    """What a model made of some pictures."""

    loss: float  # cross entropy, mean
    top1: float  # share of pictures whose best class is right
    top5: float  # whose five best are, which says nothing of five classes or fewer
    confusion: Tensor  # (k, k) int64: pictures of each class, by the class they were taken for

    @property
    def recall(self) -> Tensor:
        """Of the pictures of each class, the share that was recognised: (k,), NaN where there are none."""
        return self.confusion.diagonal() / self.confusion.sum(1)

    @property
    def precision(self) -> Tensor:
        """Of the pictures taken for each class, the share that was of it: (k,), NaN where there are none."""
        return self.confusion.diagonal() / self.confusion.sum(0)


def measure(model: ViT, pictures: Pictures, *, batch: int = 256, bfloat16: bool = False) -> Measured:
    """Runs a model, in eval mode from then on, over labelled pictures.

    Args:
        model: Its preprocessing says how pictures are normalised.
        pictures: Of the size in the model's preprocessing, and of its classes, in the same order.
        batch: Pictures at once.
        bfloat16: Compute in it (autocast), as in training.

    Raises:
        TrainError: The pictures do not fit the model.
    """
    check_fit(model, pictures)
    model.eval()
    recipe = cast(Preprocess, model.preprocess).recipe
    k, total = model.config.num_classes, len(pictures)
    loss, right = torch.zeros(2, dtype=torch.float64)
    confusion = torch.zeros(k * k, dtype=torch.int64)
    mine = ranks.part(total)
    with torch.inference_mode(), torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
        for first in range(0, len(mine), batch):
            rows = mine[first : first + batch]
            images, labels = normalise(pictures.fetch(rows), recipe), pictures.labels[rows]
            logits = model(images.to(model.device, model.dtype)).float().cpu()
            best = logits.topk(min(5, k)).indices
            loss += F.cross_entropy(logits, labels, reduction="sum")
            right += (best == labels[:, None]).sum()
            confusion += torch.bincount(labels * k + best[:, 0], minlength=k * k)
    ranks.add(loss, right, confusion)
    confusion = confusion.view(k, k)
    top1 = confusion.diagonal().sum().item() / total
    return Measured(loss.item() / total, top1, right.item() / total, confusion)


def check_fit(model: ViT, pictures: Pictures) -> None:
    """Whether these are pictures for this model.

    Raises:
        TrainError: They are of other classes, or of the same in another order; or of another size.
    """
    classes, labels, k = pictures.classes, model.labels or pictures.classes, model.config.num_classes
    if len(classes) != k:
        raise TrainError(f"The pictures have {len(classes)} classes and the model {k}. Give the model's, all of them.")
    if moved := [f"{name} for {label}" for name, label in zip_longest(classes, labels) if name != label]:
        raise TrainError(
            f"The pictures' classes are not the model's: {listed(moved)}. Give them its names (model.labels), in its "
            "order, and labels to match."
        )
    size, wanted = tuple(pictures.fetch(torch.tensor([0])).shape[2:]), cast(Preprocess, model.preprocess).recipe.size
    if size != wanted:
        raise TrainError(
            f"The pictures are of {size[0]} x {size[1]} pixels, and the model's preprocessing makes them "
            f"{wanted[0]} x {wanted[1]}. Prepare them with model.preprocess.pixels."
        )


def normalise(images: Tensor, recipe: Recipe) -> Tensor:
    """Values from 0 to 1 as the model wants them: (b, c, h, w) as given."""
    white = 255 * recipe.scale  # what 1 stands for there
    mean, std = (torch.tensor(x, device=images.device)[:, None, None] / white for x in (recipe.mean, recipe.std))
    return (images - mean) / std


def preprocess_of(model: ViT, name: str) -> Preprocess:
    """How pictures are prepared for a model, which came by that name.

    Raises:
        TrainError: The weights came without it.
    """
    if not isinstance(model.preprocess, Preprocess):
        raise TrainError(
            f"{name} has no preprocessing, so pictures cannot be prepared for it. Name a checkpoint like it: --model "
            "NAME --weights PATH; or give it its own in Python (model.preprocess = ...), and name the folder that "
            "model.save writes."
        )
    return model.preprocess


def cifar10_reader(preprocess: Preprocess) -> Read | None:
    """How CIFAR-10's pictures are prepared; None where that would leave them as they are."""
    recipe = preprocess.recipe
    return None if recipe.size == recipe.resize == (32, 32) else preprocess.pixels


def add_eval_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite eval`."""
    parser.add_argument(
        "data",
        type=Path,
        metavar="DATA",
        help="a folder per class (or a folder with such a val/ in it), or CIFAR-10's .bin files, of which the test set",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write figures (eval.json) and confusion.png there")
    add_model_arguments(parser)
    add_speed_arguments(parser)


def run_eval(args: Namespace) -> int:
    """Prints the accuracy, and for each class what was recognised."""
    with ranks.together(args.device):
        return _run_eval(args)


def _run_eval(args: Namespace) -> int:
    if args.out:
        from vitlite.plots import draw_confusion  # says at once if matplotlib is missing

    cifar, folder = is_cifar10(args.data), args.data / "val" if (args.data / "val").is_dir() else args.data
    folders = () if cifar else class_names(folder)  # a wrong DATA is said before the model is fetched
    model = open_model(args)
    prepare = preprocess_of(model, args.weights or args.model)
    if cifar:
        pictures = read_cifar10(args.data, "test", cifar10_reader(prepare))
        if len(pictures.classes) != model.config.num_classes:
            raise TrainError(
                f"The data have {len(pictures.classes)} classes, and {args.model} {model.config.num_classes}. "
                "Fine-tune it first: vitlite train."
            )
        classes = _classes(model, pictures.classes)  # in the order that the model knows them in
        places = torch.tensor([classes.index(name) for name in pictures.classes])
        pictures = replace(pictures, labels=places[pictures.labels], classes=classes)
    else:
        pictures = read_folder(folder, prepare.pixels, _classes(model, folders))
    known = replace(pictures, classes=tuple(model.labels or pictures.classes))  # folders stand in the labels' order
    measured = measure(model, known, batch=args.batch)
    if ranks.rank():
        return 0
    counts, shares = measured.confusion.sum(1).tolist(), zip(measured.recall, measured.precision, strict=True)
    figures = zip(pictures.classes, counts, shares, strict=True)
    rows = [[name, str(n), *map(_percent, both)] for name, n, both in figures if n]
    print(with_bold_header(table(["class", "pictures", "recognised", "precision"], rows)))
    right = {"top1": measured.top1} | ({"top5": measured.top5} if len(pictures.classes) > 5 else {})
    print("\n" + "   ".join([*(f"top-{name[3:]} {x:.2%}" for name, x in right.items()), f"{len(pictures)} pictures"]))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        about = {"model": args.model, "sha256": model.source and model.source.sha256, "pictures": len(pictures)}
        about |= right | {"loss": measured.loss, "classes": pictures.classes}
        text = json.dumps(about | {"confusion": measured.confusion.tolist()}, indent=1)
        (args.out / "eval.json").write_text(text + "\n", encoding="utf-8")
        draw_confusion(measured.confusion, pictures.classes, args.out / "confusion.png")
    return 0


def _percent(share: Tensor) -> str:
    return "-" if share.isnan() else f"{share:.1%}"


def _classes(model: ViT, folders: Sequence[str]) -> tuple[str, ...]:
    """The names of the model's classes: its labels, if they name the folders; else the folders, one for each class."""
    labels = tuple(model.labels or ())
    if set(folders) <= set(labels):
        return labels
    alike = {label.casefold() for label in labels} & {name.casefold() for name in folders}
    if len(folders) == model.config.num_classes and not alike:  # such as ImageNet's n01440764, in the labels' order
        return tuple(folders)
    strange = [name for name in folders if name not in labels]
    raise TrainError(
        f"Of the model's {model.config.num_classes} classes{f' ({listed(labels)})' if labels else ''}, none is named "
        f"{listed(strange)}. Name the folders after its labels; or give one folder for each class, none of them named "
        "after a label, sorted in the model's order."
    )
