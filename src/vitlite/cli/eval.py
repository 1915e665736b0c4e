"""`vitlite eval`: measure accuracy on labelled images."""

import json
import sys
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlite import storage
from vitlite.cli.options import (
    add_model_arguments,
    add_speed_arguments,
    add_strict,
    add_table_arguments,
    check_outside,
    expanded_path,
    open_data,
    open_model,
)
from vitlite.cli.progress import Progress, say_broken
from vitlite.cli.tables import table, with_bold_header
from vitlite.cli.train import CLASSES
from vitlite.errors import InputError, TrainError, printable
from vitlite.nn.vit import ViT
from vitlite.plots import draw_confusion, need_matplotlib
from vitlite.training import distributed
from vitlite.training.data import ImageData
from vitlite.training.evaluate import Measured, measure
from vitlite.training.split import (
    SPLIT,
    Data,
    check_evaluation_data,
    evaluation_part,
    location,
    read_class_list,
    read_evaluation_data,
    read_split,
)

FIGURES, CONFUSION = "eval.json", "confusion.png"  # the files in the folder --out
WRITER, COMMAND = "written by", "vitlite eval"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite eval`."""
    parser.add_argument(
        "data",
        type=expanded_path,
        metavar="DATA",
        help="a folder with one subfolder per class, or with val/ or test/ that contains these subfolders, or with "
        "CIFAR-10's .bin files (the test set is used); or a table of paths and labels",
    )
    parser.add_argument("--classes", type=expanded_path, metavar="FILE", help=CLASSES)
    parser.add_argument(
        "--split",
        type=expanded_path,
        metavar="FILE",
        help="split.json of a training run; only the images held out in that run are used",
    )
    parser.add_argument(
        "--out",
        type=expanded_path,
        metavar="DIR",
        help="write eval.json (figures and misclassified images) and confusion.png to this folder",
    )
    add_model_arguments(parser)
    add_speed_arguments(parser)
    add_strict(parser)
    add_table_arguments(parser)


def run(args: Namespace) -> int:
    """Print the accuracy, and the recall and precision of each class."""
    with distributed.process_group(args.device):
        return _evaluate(args)


def _evaluate(args: Namespace) -> int:
    if args.out:
        check_outside(args.out, args.data)
        _check_out(args.out)
        need_matplotlib()  # if it is missing, fail before the evaluation
    source = open_data(args)
    check_evaluation_data(source, args.split)  # before the model is downloaded
    folders = read_class_list(args.classes) if args.classes else None
    model = open_model(args)
    data = read_evaluation_data(source, model, args.split, folders, strict=args.strict)
    progress = Progress(len(distributed.shard(len(data))), visible=distributed.is_main())
    with progress.bar:
        measured = measure(model, data, batch=args.batch, after_batch=progress.add)
    broken = data.broken()
    if distributed.is_main():
        _warn_of_training_images(args, source)
        _print(measured, data)
        if args.out:
            _write(args.out, _figures(args.model, model, measured, data) | {"broken": broken}, measured, data)
        say_broken(broken)
    return int(len(broken) > 0)


def _check_out(out: Path) -> None:
    """Check that writing to --out would not overwrite a file that this command did not write.

    Raises:
        InputError: The folder contains an eval.json or a confusion.png from another program.
    """
    found = [name for name in (FIGURES, CONFUSION) if (out / name).exists()]
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        if json.loads((out / FIGURES).read_bytes())[WRITER] == COMMAND:
            return
    if found:
        raise InputError(f"--out {out} contains {found[0]}, which this command did not write. Choose another folder.")


def _write(out: Path, figures: dict[str, Any], measured: Measured, data: ImageData) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        storage.write_json(out / FIGURES, figures)
        (out / CONFUSION).unlink(missing_ok=True)
        if measured.confusion is not None:
            draw_confusion(measured.confusion, data.classes, out / CONFUSION)
    except OSError as error:
        raise InputError(f"Cannot write to --out {out}: {error}. Choose another folder.") from error


def _warn_of_training_images(args: Namespace, data: Data) -> None:
    """Warn if a split.json beside the model shows that the model was trained on these images."""
    run_folder = Path(args.weights or args.model).resolve()
    if args.split is not None or not run_folder.exists():
        return
    for folder in (run_folder.parent, run_folder.parent.parent):
        with suppress(TrainError):
            if read_split(folder / SPLIT)[0] == location(evaluation_part(data)):
                print(
                    f"vitlite: {args.model} was trained on most of these images. To evaluate it on the held-out "
                    f"images only, pass --split {folder / SPLIT}",
                    file=sys.stderr,
                )
                return


def _print(measured: Measured, data: ImageData) -> None:
    """Print a table of the classes that have images, and a line with the totals."""
    counts = measured.images.tolist()
    rows = []
    for name, count, recall, precision in zip(data.classes, counts, measured.recall, measured.precision, strict=True):
        if count:
            rows.append([printable(name), str(count), _percent(recall), _percent(precision)])
    print(with_bold_header(table(["class", "images", "recall", "precision"], rows)))
    accuracies = [f"{name.replace('top', 'top-')} {share:.2%}" for name, share in _accuracies(measured).items()]
    print("\n" + "   ".join([*accuracies, f"loss {measured.loss:.4f}", f"{measured.images.sum()} images"]))


def _figures(name: str, model: ViT, measured: Measured, data: ImageData) -> dict[str, Any]:
    """Return the content of eval.json."""
    predictions, labels, names = measured.predictions.tolist(), data.labels.tolist(), data.names()
    wrong = [
        {"image": name, "class": data.classes[label], "predicted": data.classes[prediction]}
        for name, label, prediction in zip(names, labels, predictions, strict=True)
        if prediction not in (label, -1)  # -1: it could not be read
    ]
    return {
        WRITER: COMMAND,
        "model": name,
        "sha256": model.source and model.source.sha256,
        "images": int(measured.images.sum()),
        **_accuracies(measured),
        "loss": measured.loss,
        "classes": data.classes,
        "confusion": None if measured.confusion is None else measured.confusion.tolist(),
        "wrong": wrong,
    }


def _accuracies(measured: Measured) -> dict[str, float]:
    """Return the top-1 accuracy, and the top-5 accuracy if there are more than five classes."""
    if len(measured.correct) > 5:
        return {"top1": measured.top1, "top5": measured.top5}
    return {"top1": measured.top1}


def _percent(share: Tensor) -> str:
    return "-" if share.isnan() else f"{share:.1%}"
