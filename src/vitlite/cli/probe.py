"""`vitlite probe`: how well the vectors of models tell classes apart."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitlite.cli.options import (
    add_model_arguments,
    add_speed_arguments,
    expanded,
    expanded_path,
    open_model,
    positives,
    refuse_inside,
    seed,
)
from vitlite.cli.progress import Watch
from vitlite.cli.tables import table, with_bold_header
from vitlite.errors import InputError, shown
from vitlite.plots import check_target, need_matplotlib, picture_of_few_shots, save_picture

if TYPE_CHECKING:
    from torch import Tensor

    from vitlite.retrieval.probe import Probed

SHOTS = "1,5,10,25"


class Labelled(NamedTuple):
    """Pictures whose classes are known."""

    paths: list[str]
    labels: "Tensor"  # (n,)
    aside: "Tensor"  # (n,) of bool: those to measure on
    classes: Sequence[str]


class Measured(NamedTuple):
    """What was found out about a model."""

    name: str
    width: int  # of its vectors
    fitted_to: int  # pictures
    measured_on: int
    found: "Probed"


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite probe`."""
    parser.add_argument(
        "data",
        type=expanded_path,
        metavar="FOLDER",
        help="a folder per class, a fifth of each to measure on; or train/ and val/ (or test/) with such folders",
    )
    parser.add_argument(
        "--shots",
        type=positives,
        default=SHOTS,
        metavar="N,...",
        help="how few pictures of each class to fit to, beside all; default: %(default)s",
    )
    parser.add_argument(
        "--beside",
        type=expanded,
        action="append",
        default=[],
        metavar="MODEL",
        help="another model for the same pictures; repeatable",
    )
    parser.add_argument(
        "--out", type=expanded, metavar="PNG", help="a curve for each model by --shots, replaced if it is there"
    )
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="which pictures are drawn; default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="the figures, a line for each model, for programs")
    add_model_arguments(parser)
    add_speed_arguments(parser)


def run(args: Namespace) -> int:
    """Embeds the pictures once with each model, and measures what classifiers make of the vectors."""
    if args.out:
        check_target(args.out)
        need_matplotlib()
        refuse_inside(Path(args.out), args.data)
    pictures = _labelled(args.data, args.seed)
    measured, code = [], 0
    for words in (args, *_other_models(args)):
        watch = Watch(len(pictures.paths), bar=True)
        measured.append(_measure(words, pictures, watch))
        code = max(code, watch.exit_code())
    if args.json:
        for one in measured:
            print(json.dumps(_fields(one, pictures.classes)))
    else:
        _print(measured, pictures, args.shots)
    if args.out:
        picture = picture_of_few_shots([(one.name, one.found.few) for one in measured])
        save_picture(picture, args.out)
    return code


def _other_models(args: Namespace) -> list[Namespace]:
    """The arguments for each model of --beside: --weights is the first one's."""
    return [Namespace(**{**vars(args), "model": name, "weights": None}) for name in args.beside]


def _labelled(data: Path, seed: int) -> Labelled:
    """The pictures of the folder, and which of them are to measure on."""
    import torch

    from vitlite.retrieval.probe import held_out
    from vitlite.training.data import class_names

    to_fit, to_measure = _parts(data)
    classes = class_names(to_fit)
    paths, labels = _listed(to_fit, classes)
    if to_measure is None:
        return Labelled([str(path) for path in paths], labels, held_out(labels, seed), classes)
    more_paths, more_labels = _listed(to_measure, classes)
    paths += more_paths
    labels = torch.cat([labels, more_labels])
    aside = torch.arange(len(paths), device="cpu") >= len(paths) - len(more_paths)
    return Labelled([str(path) for path in paths], labels, aside, classes)


def _parts(data: Path) -> tuple[Path, Path | None]:
    """Where the classes are that are fitted to, and those that are measured on, if they are apart."""
    from vitlite.training.split import data_parts

    parts = data_parts(data)
    if parts and "train" not in parts:
        names = ", ".join(shown(folder.name) for folder in parts.values())
        raise InputError(f"{shown(str(data))} has {names}, and no train to fit to. Call the folder to fit to train.")
    return parts.get("train", data), parts.get("val", parts.get("test"))


def _listed(folder: Path, classes: Sequence[str]) -> "tuple[list[Path], Tensor]":
    """The pictures below a folder per class, and their classes."""
    from vitlite.images.decode import read_image
    from vitlite.training.data import read_folder

    listed = read_folder(folder, read_image, classes)
    return listed.files(), listed.labels


def _measure(args: Namespace, pictures: Labelled, watch: Watch) -> Measured:
    """What classifiers make of a model's vectors of those pictures that can be read."""
    import torch

    from vitlite.errors import ImageError
    from vitlite.inference.predict import embed
    from vitlite.retrieval.probe import probe

    found, rows = [], []
    outcomes = embed(open_model(args), pictures.paths, args.batch, watch.timings)
    for row, (_, vector) in enumerate(watch.outcomes(outcomes)):
        if not isinstance(vector, ImageError):
            found.append(vector)
            rows.append(row)
    if not found:
        raise InputError("No picture could be read.")
    vectors, labels, aside = torch.stack(found), pictures.labels[rows], pictures.aside[rows]
    if aside.all() or not aside.any():
        raise InputError(
            f"Of {len(rows)} pictures that can be read, {int(aside.sum())} are to measure on, the others to fit to: "
            "it takes some of both. Give each class two pictures or more."
        )
    fitted, others = (vectors[~aside], labels[~aside]), (vectors[aside], labels[aside])
    probed = probe(*fitted, *others, shots=args.shots, seed=args.seed)
    return Measured(args.model, vectors.shape[1], len(fitted[1]), len(others[1]), probed)


def _fields(one: Measured, classes: Sequence[str]) -> dict[str, object]:
    return {
        "model": one.name,
        "classes": len(classes),
        "fitted_to": one.fitted_to,
        "measured_on": one.measured_on,
        "linear": one.found.linear,
        "penalty": one.found.penalty,
        "neighbours": one.found.neighbours,
        "commonest": one.found.commonest,
        "few": one.found.few,
    }


def _print(measured: Sequence[Measured], pictures: Labelled, shots: Sequence[int]) -> None:
    """A column for each model."""
    first = measured[0]
    print(
        f"{len(pictures.classes)} classes, fitted to {first.fitted_to} pictures, measured on {first.measured_on} others"
    )
    rows = [
        ["a linear classifier", *(_percent(one.found.linear) for one in measured)],
        ["the nearest neighbours", *(_percent(one.found.neighbours) for one in measured)],
        ["always the commonest class", *(_percent(one.found.commonest) for one in measured)],
    ]
    few = [one.found.few_in_words() for one in measured]
    for count in few[0]:
        cells = (f"{_percent(words[count][0])} ± {100 * words[count][1]:4.1f}" for words in few)
        rows.append([f"the linear one, with {count} a class", *cells])
    rows.append(["numbers in a vector", *(str(one.width) for one in measured)])
    print(with_bold_header(table(["right of those measured on", *(shown(one.name) for one in measured)], rows)))
    if few[0]:
        print("with few pictures a class: mean and deviation of five draws")
    too_many = [str(count) for count in shots if count not in few[0]]
    if too_many:
        print(f"not with {', '.join(too_many)} a class: the smallest class has fewer to fit to")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
