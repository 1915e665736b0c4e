"""`vitlite eval`: measure accuracy on labelled pictures."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vitlite.cli.options import add_model_arguments, add_speed_arguments, open_model
from vitlite.cli.tables import table, with_bold_header
from vitlite.draw import draw_confusion, need_matplotlib
from vitlite.errors import TrainError
from vitlite.model import ViT
from vitlite.training import distributed as ranks
from vitlite.training.datasets import class_names, is_cifar10, listed, read_cifar10, read_folder
from vitlite.training.evaluate import cifar10_reader, measure, preprocess_of


def add_arguments(parser: ArgumentParser) -> None:
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


def run(args: Namespace) -> int:
    """Prints the accuracy, and for each class what was recognised."""
    with ranks.together(args.device):
        return _run(args)


def _run(args: Namespace) -> int:
    if args.out:
        need_matplotlib()  # says at once if it is missing

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
