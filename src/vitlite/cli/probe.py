"""`vitlite probe`: measure how well the vectors of models separate classes."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitlite.cli.options import (
    add_layer,
    add_model_arguments,
    add_speed_arguments,
    add_strict,
    add_table_arguments,
    check_outside,
    create_or_load,
    expanded,
    expanded_path,
    open_data,
    open_model,
    positives,
)
from vitlite.cli.progress import ImageProgress
from vitlite.cli.tables import table, with_bold_header
from vitlite.errors import ImageError, InputError, printable
from vitlite.plots import check_target, need_matplotlib, plot_few_shots, save_image

if TYPE_CHECKING:
    from torch import Tensor

    from vitlite.retrieval.probe import ProbeResult
    from vitlite.training.split import Data


class LabelledImages(NamedTuple):
    """Images with their classes, split into training and test images.

    Attributes:
        paths: The paths of the images.
        labels: The class index of each image (n,).
        is_test: A mask that is True for test images (n,).
        classes: The class names.
        held_out: The names of the test images, if they were drawn at random.
    """

    paths: list[str]
    labels: "Tensor"
    is_test: "Tensor"
    classes: Sequence[str]
    held_out: Sequence[str]


class Measurement(NamedTuple):
    """The probe result of one model."""

    name: str
    dim: int
    train_images: int
    test_images: int
    result: "ProbeResult"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite probe`."""
    parser.add_argument(
        "data",
        type=expanded_path,
        metavar="DATA",
        help="folder with a folder per class, or train/ and val/, or a table",
    )
    parser.add_argument(
        "--shots",
        type=positives,
        default="1,5,10,25",
        metavar="N,...",
        help="images per class for few-shot classifiers; default: %(default)s",
    )
    parser.add_argument(
        "--beside",
        type=expanded,
        action="append",
        default=[],
        metavar="MODEL",
        help="model to compare on the same images; repeatable",
    )
    parser.add_argument(
        "--out",
        type=expanded,
        metavar="PNG",
        help="file for a plot of accuracy against --shots, replaced if it exists",
    )
    parser.add_argument(
        "--save",
        type=expanded_path,
        metavar="FOLDER",
        help="folder for the model with the linear classifier as its head",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the choice of images; default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON per model")
    add_layer(parser)
    add_model_arguments(parser)
    add_speed_arguments(parser)
    add_strict(parser)
    add_table_arguments(parser)


def run(args: Namespace) -> int:
    """Embed the images with each model, and measure how well the vectors separate the classes."""
    if args.out:
        check_target(args.out)
        need_matplotlib()
        check_outside(Path(args.out), args.data)
    if args.save:
        _check_save(args)
    data = open_data(args)
    images = _find_labelled(data, args.seed)
    models = [args, *(Namespace(**{**vars(args), "model": name, "weights": None}) for name in args.beside)]
    measured, code = [], 0
    for model_args in models:
        progress = ImageProgress(len(images.paths), bar=True, strict=args.strict)
        measured.append(_measure(model_args, images, progress))
        code = max(code, progress.exit_code())
    if args.json:
        for one in measured:
            print(json.dumps(_fields(one, images.classes)))
    else:
        _print_table(measured, images.classes, args.shots)
    if args.out:
        save_image(plot_few_shots([(one.name, one.result.few) for one in measured]), args.out)
    if args.save:
        from vitlite.training.split import SPLIT, write_split

        model = create_or_load(args)
        classifier = measured[0].result.classifier
        classifier.put_on(model, images.classes[: len(classifier.bias)])  # the last classes may have no readable image
        model.save(args.save)
        if images.held_out:
            write_split(args.save / SPLIT, data, images.held_out)
        print(f"wrote {printable(str(args.save))}", file=sys.stderr)
    return code


def _check_save(args: Namespace) -> None:
    """Check that the folder of --save can be written, before any work is done."""
    from vitlite.checkpoints.save import check_overwrite

    check_outside(args.save, args.data, "--save")
    check_overwrite(args.save)
    if args.dtype not in (None, "float32"):
        raise InputError(f"--save needs vectors in float32, got --dtype {args.dtype}. Omit --dtype.")


def _find_labelled(data: "Data", seed: int) -> LabelledImages:
    """Return the images with their classes, split into training and test images."""
    import torch

    from vitlite.images.decode import read_image
    from vitlite.retrieval.probe import held_out
    from vitlite.training.split import data_parts, label_names, read_part, training_part, warn_of_copies
    from vitlite.training.tables import Table

    if isinstance(data, Table) and data.multi_label:
        raise InputError("probe needs one label per image, but this table has several. Use train.")
    parts, train = data_parts(data), training_part(data)
    classes = label_names(train)
    images = read_part(train, read_image, classes)
    files, labels, test = images.files(), images.labels, parts.get("val", parts.get("test"))
    if test is None:
        is_test = held_out(labels, seed)
        test_names = list(compress(images.names(), is_test))
    else:
        tests = read_part(test, read_image, classes)
        files, labels = files + tests.files(), torch.cat([labels, tests.labels])
        is_test = torch.arange(len(files), device="cpu") >= len(images)
        test_names = []
    warn_of_copies(list(compress(files, ~is_test)), list(compress(files, is_test)))
    return LabelledImages([str(file) for file in files], labels, is_test, classes, test_names)


def _measure(args: Namespace, images: LabelledImages, progress: ImageProgress) -> Measurement:
    """Embed the readable images with one model, and measure how well the vectors separate the classes."""
    import torch

    from vitlite.inference.predict import embed
    from vitlite.retrieval.probe import probe

    found, rows = [], []
    outcomes = embed(open_model(args), images.paths, args.batch, progress.timings)
    for row, (_, vector) in enumerate(progress.outcomes(outcomes)):
        if not isinstance(vector, ImageError):
            found.append(vector)
            rows.append(row)
    if not found:
        raise InputError("No image could be read. Check the files named above.")
    vectors, labels, is_test = torch.stack(found), images.labels[rows], images.is_test[rows]
    tests = int(is_test.sum())
    if tests in (0, len(rows)):
        raise InputError(
            f"The {len(rows)} readable images include {tests} test images and {len(rows) - tests} training images, but "
            "both are needed. Provide at least two readable images per class."
        )
    result = probe(
        vectors[~is_test], labels[~is_test], vectors[is_test], labels[is_test], shots=args.shots, seed=args.seed
    )
    return Measurement(args.model, vectors.shape[1], len(rows) - tests, tests, result)


def _fields(one: Measurement, classes: Sequence[str]) -> dict[str, object]:
    return {
        "model": one.name,
        "classes": len(classes),
        "fitted_to": one.train_images,
        "measured_on": one.test_images,
        "linear": one.result.linear,
        "penalty": one.result.penalty,
        "neighbours": one.result.neighbours,
        "commonest": one.result.commonest,
        "few": one.result.few,
    }


def _print_table(measured: Sequence[Measurement], classes: Sequence[str], shots: Sequence[int]) -> None:
    """Print a table with one column per model."""
    first = measured[0]
    print(f"{len(classes)} classes, fitted to {first.train_images} images, tested on {first.test_images} others")
    rows = [
        ["linear classifier", *(_percent(one.result.linear) for one in measured)],
        ["nearest neighbours", *(_percent(one.result.neighbours) for one in measured)],
        ["most frequent class", *(_percent(one.result.commonest) for one in measured)],
    ]
    few = [one.result.mean_and_deviation() for one in measured]
    for count in few[0]:
        cells = [f"{_percent(by_count[count][0])} ± {100 * by_count[count][1]:4.1f}" for by_count in few]
        rows.append([f"linear, {count} per class", *cells])
    rows.append(["vector width", *(str(one.dim) for one in measured)])
    print(with_bold_header(table(["accuracy", *(printable(one.name) for one in measured)], rows)))
    if few[0]:
        print("rows with images per class show the mean and standard deviation of five random draws")
    too_many = [str(count) for count in shots if count not in few[0]]
    if too_many:
        print(f"skipped: {', '.join(too_many)} per class, because the smallest class has fewer images")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
