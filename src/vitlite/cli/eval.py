"""`vitlite eval`: measure accuracy on labelled pictures."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlite import storage
from vitlite.cli.options import add_model_arguments, add_speed_arguments, expanded_path, open_model, refuse_inside
from vitlite.cli.progress import Progress
from vitlite.cli.tables import table, with_bold_header
from vitlite.errors import InputError, fit_to_print, shown
from vitlite.nn.vit import ViT
from vitlite.plots import draw_confusion, is_plot_of_ours, need_matplotlib
from vitlite.training import distributed
from vitlite.training.datasets import Pictures, listed
from vitlite.training.evaluate import Measured, check_data, measure, read_to_measure
from vitlite.training.split import SPLIT, folder_of_classes, folder_of_split, folder_to_measure, is_split

FIGURES, CONFUSION = "eval.json", "confusion.png"  # in the folder that --out names
LOCK = "eval.lock"  # there while they are written
WRITER, WRITTEN = "written by", "vitlite eval"
BEGINNING = f'{{\n  "{WRITER}": "{WRITTEN}",\n'.encode()  # of our `FIGURES`, which may be large


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite eval`."""
    parser.add_argument(
        "data",
        type=expanded_path,
        metavar="DATA",
        help="a folder per class (or one with such a val/ or test/), or CIFAR-10's .bin files, of which the test set",
    )
    parser.add_argument(
        "--split", type=expanded_path, metavar="FILE", help="the pictures that a run of train held out: its split.json"
    )
    parser.add_argument(
        "--out",
        type=expanded_path,
        metavar="DIR",
        help="write eval.json (figures, and which pictures it is wrong on) and confusion.png there",
    )
    add_model_arguments(parser)
    add_speed_arguments(parser)


def run(args: Namespace) -> int:
    """Prints the accuracy, and for each class what was recognised."""
    with distributed.process_group(args.device):
        return _evaluate(args)


def _evaluate(args: Namespace) -> int:
    if args.out:
        refuse_inside(args.out, args.data)
        _check_out(args.out)
        need_matplotlib()  # says at once if it is missing
    check_data(args.data, args.split)  # a wrong DATA is said before the model is fetched
    model = open_model(args)
    pictures = read_to_measure(args.data, model, args.weights or args.model, args.split)
    classes = tuple(model.labels or pictures.classes)  # other names of folders are in the labels' order
    if distributed.is_main() and classes != pictures.classes:
        _say_what_stands_for_what(pictures.classes, classes)
    progress = Progress(len(distributed.shard(len(pictures))), visible=distributed.is_main())
    with progress.bar:
        measured = measure(model, replace(pictures, classes=classes), batch=args.batch, after_batch=progress.add)
    if distributed.is_main():
        _say_what_was_trained_on(args)
        _print(measured, pictures)
        if args.out:
            _write(args.out, _figures(args.model, model, measured, pictures), measured, pictures)
    return 0


def _check_out(out: Path) -> None:
    """Makes sure that what is written goes to a folder that is new, empty, or as this command left it.

    Raises:
        InputError: There is something else, which stays; or nothing can be written there.
    """
    in_the_way = storage.folder_obstacle(out)
    if in_the_way:
        raise InputError(f"Cannot write to --out {shown(str(out))}: {in_the_way}. Name another folder.")
    for file in sorted(out.iterdir()) if out.exists() else []:
        if not _is_ours(file):
            raise InputError(
                f"--out {shown(str(out))} holds {shown(file.name)}, which this command did not write: it stays. Name a "
                "folder that is new or empty."
            )


def _is_ours(file: Path) -> bool:
    """Whether this command wrote a file, or was killed while it did."""
    if file.name == FIGURES:
        with open(file, "rb") as content:
            return content.read(len(BEGINNING)) == BEGINNING
    if file.name == CONFUSION:
        return is_plot_of_ours(file)
    return file.name == LOCK or (file.name.startswith((FIGURES, CONFUSION)) and file.suffix == storage.PARTIAL)


def _write(out: Path, figures: dict[str, Any], measured: Measured, pictures: Pictures) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _alone(out):
            (out / CONFUSION).unlink(missing_ok=True)  # of an earlier run: whenever this one is killed, none stands
            storage.write_json(out / FIGURES, figures)  # beside figures that are not its own
            if measured.confusion is not None:
                draw_confusion(measured.confusion, pictures.classes, out / CONFUSION)
    except OSError as error:
        raise InputError(
            f"Cannot write to --out {shown(str(out))}: {error.strerror}. Make room, or name another folder."
        ) from error


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Waits until no other run writes there, or the drawing of one could stand beside the figures of the other."""
    with storage.lock(out / LOCK):
        yield


def _are_labels(names: Sequence[str], model: ViT) -> bool:
    """Whether the classes of the data are the model's by their names, and not by their order alone."""
    return model.labels is not None and tuple(names) == tuple(model.labels)


def _say_what_stands_for_what(names: Sequence[str], labels: Sequence[str]) -> None:
    """Says which label each folder is taken for, where none is named after one."""
    pairs = [f"{name} for {label}" for name, label in zip(names, labels, strict=True)]
    _say(f"no folder is named after a label, so they are taken in order: {listed(pairs)}")


def _say_what_was_trained_on(args: Namespace) -> None:
    """Says so, where a run trained on these pictures, or may have: in other data, names tell nothing."""
    if args.split is not None:
        made_of = folder_of_split(args.split)
        if made_of != folder_of_classes(args.data).resolve():
            _say(
                f"{args.split} is of a run on {made_of}. Unless these are the same data, moved or copied, the pictures "
                "measured are none that it held out: they have their names alone."
            )
        return
    split = _split_beside(args.weights or args.model)
    if split is not None and folder_of_split(split) == folder_to_measure(args.data).resolve():
        _say(f"{args.model} was trained on most of these pictures. Those that it has not seen: --split {split}")


def _split_beside(model: str) -> Path | None:
    """What the run of a model held out; it is named by its folder, by the file in it, or by a link to one of them."""
    if not Path(model).exists():
        return None
    for place in (Path(model), Path(model).resolve()):
        for folder in (place.parent, place.parent.parent):
            if is_split(folder / SPLIT):
                return folder / SPLIT
    return None


def _say(text: str) -> None:
    print(f"vitlite: {fit_to_print(text)}", file=sys.stderr)


def _print(measured: Measured, pictures: Pictures) -> None:
    """A table of the classes that have pictures, and a line about all of them."""
    counts = measured.pictures.tolist()
    rows = []
    for name, count, recall, precision in zip(
        pictures.classes, counts, measured.recall, measured.precision, strict=True
    ):
        if count:
            rows.append([shown(name), str(count), _percent(recall), _percent(precision)])
    print(with_bold_header(table(["class", "pictures", "recognised", "precision"], rows)))
    accuracies = [f"{name.replace('top', 'top-')} {share:.2%}" for name, share in _accuracies(measured).items()]
    print("\n" + "   ".join([*accuracies, f"loss {measured.loss:.4f}", f"{len(pictures)} pictures"]))


def _figures(name: str, model: ViT, measured: Measured, pictures: Pictures) -> dict[str, Any]:
    """What eval.json holds; null for the confusion of very many classes."""
    return {
        WRITER: WRITTEN,
        "model": name,
        "sha256": model.source and model.source.sha256,
        "pictures": len(pictures),
        **_accuracies(measured),
        "loss": measured.loss,
        "classes": pictures.classes,
        "labels": model.labels,  # what the model calls them
        "paired by": "name" if _are_labels(pictures.classes, model) else "order",
        "confusion": None if measured.confusion is None else measured.confusion.tolist(),
        "wrong": _wrong(measured, pictures),
    }


def _wrong(measured: Measured, pictures: Pictures) -> list[dict[str, str]]:
    """The pictures that were taken for another class than theirs, and for which."""
    answers, labels, names = measured.answers.tolist(), pictures.labels.tolist(), pictures.names()
    return [
        {"picture": name, "class": pictures.classes[label], "taken_for": pictures.classes[answer]}
        for name, label, answer in zip(names, labels, answers, strict=True)
        if label != answer
    ]


def _accuracies(measured: Measured) -> dict[str, float]:
    """The shares that mean something: of five classes or fewer, all are among the best five."""
    if len(measured.right) > 5:
        return {"top1": measured.top1, "top5": measured.top5}
    return {"top1": measured.top1}


def _percent(share: Tensor) -> str:
    return "-" if share.isnan() else f"{share:.1%}"
