"""`vitlite probe`: how well a model's vectors tell classes apart."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from vitlite.cli.options import add_model_arguments, add_speed_arguments, open_model
from vitlite.cli.progress import Watch
from vitlite.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from vitlite.model import ViT
    from vitlite.training.datasets import Prepared
    from vitlite.vectors.probe import Probed

TO_FIT, TO_MEASURE = "train", ("val", "test")  # folders of folders of classes


class Labelled(NamedTuple):
    """Vectors of pictures whose classes are known."""

    vectors: "Tensor"
    labels: "Tensor"


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite probe`."""
    parser.add_argument(
        "data",
        type=Path,
        metavar="FOLDER",
        help="a folder per class, a fifth of each to measure on; or train/ and val/ (or test/) with such folders",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="which pictures are drawn; default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="the figures, for programs")
    add_model_arguments(parser)
    add_speed_arguments(parser)


def run(args: Namespace) -> int:
    """Embeds the pictures once, and measures what classifiers make of the vectors."""
    from vitlite.training.datasets import class_names
    from vitlite.vectors.probe import held_out, probe

    to_fit, to_measure = _parts(args.data)
    classes = class_names(to_fit)
    listed = [_listed(folder, classes) for folder in (to_fit, to_measure) if folder]
    model = open_model(args)
    watch = Watch(sum(len(paths) for paths, _ in listed), bar=True)
    known = [_embedded(model, paths, labels, args.batch, watch) for paths, labels in listed]
    if to_measure is None:
        aside = held_out(known[0].labels, args.seed)
        known = [Labelled(known[0].vectors[rows], known[0].labels[rows]) for rows in (~aside, aside)]
    fitted, measured = known
    found = probe(*fitted, *measured, seed=args.seed)
    if args.json:
        print(json.dumps(_fields(found, fitted, measured, classes)))
    else:
        _print(found, fitted, measured, classes)
    return watch.exit_code()


def _parts(data: Path) -> tuple[Path, Path | None]:
    """Where the classes are that are fitted to, and those that are measured on, if they are apart."""
    from vitlite.training.split import PARTS

    names = {path.name for path in data.iterdir() if path.is_dir()} if data.is_dir() else set()
    if TO_FIT in names:
        return data / TO_FIT, next((data / name for name in TO_MEASURE if name in names), None)
    strange = sorted(name for name in names if name.lower() in PARTS)
    if strange:
        raise InputError(f"{data} has the folders {', '.join(strange)}, and no {TO_FIT} beside them. Name it so.")
    return data, None


def _listed(folder: Path, classes: Sequence[str]) -> tuple[list[str], "Tensor"]:
    """The pictures below a folder per class, and their classes."""
    from vitlite.images import read_image
    from vitlite.training.datasets import read_folder

    listed = read_folder(folder, read_image, classes)
    files = cast("Prepared", listed.images).pictures
    return [str(path) for path in files], listed.labels


def _embedded(model: "ViT", paths: list[str], labels: "Tensor", batch: int, watch: Watch) -> Labelled:
    """The vectors of the pictures that can be read."""
    import torch

    from vitlite.errors import ImageError
    from vitlite.predict import embed

    vectors, rows = [], []
    for row, (_, vector) in enumerate(watch.outcomes(embed(model, paths, batch))):
        if not isinstance(vector, ImageError):
            vectors.append(vector)
            rows.append(row)
    if not vectors:
        raise InputError("No picture could be read.")
    return Labelled(torch.stack(vectors), labels[rows])


def _fields(found: "Probed", fitted: Labelled, measured: Labelled, classes: Sequence[str]) -> dict[str, object]:
    return {
        "classes": len(classes),
        "fitted_to": len(fitted.labels),
        "measured_on": len(measured.labels),
        "linear": found.linear,
        "penalty": found.penalty,
        "neighbours": found.neighbours,
        "commonest": found.commonest,
        "few": found.few,
    }


def _print(found: "Probed", fitted: Labelled, measured: Labelled, classes: Sequence[str]) -> None:
    numbers = fitted.vectors.shape[1]
    print(f"{len(classes)} classes, fitted to {len(fitted.labels)} pictures, measured on {len(measured.labels)} others")
    print(f"vectors of {numbers} numbers; right of those measured on:")
    print(f"  {100 * found.linear:5.1f} %  a linear classifier")
    print(f"  {100 * found.neighbours:5.1f} %  the nearest neighbours")
    print(f"  {100 * found.commonest:5.1f} %  always the commonest class")
    if found.few:
        print("the linear classifier with few pictures a class, mean and deviation of five draws:")
    for shots, (share, spread) in found.few_in_words().items():
        print(f"  {100 * share:5.1f} %  ± {100 * spread:4.1f}  {shots}")
