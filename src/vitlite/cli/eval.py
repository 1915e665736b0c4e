"""`vitlite eval`: measure accuracy on labelled images."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
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
from vitlite.plots import draw_confusion, need_matplotlib
from vitlite.training import distributed
from vitlite.training.data import ImageData
from vitlite.training.evaluate import Measured, MeasuredLabels, measure, measure_labels
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
        help="folder with a folder per class, or val/ or test/, or a table",
    )
    parser.add_argument("--classes", type=expanded_path, metavar="FILE", help=CLASSES)
    parser.add_argument(
        "--split",
        type=expanded_path,
        metavar="FILE",
        help="split.json of train or probe --save, to use only the held-out images",
    )
    parser.add_argument(
        "--out",
        type=expanded_path,
        metavar="DIR",
        help="folder for eval.json and confusion.png",
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
    measured: Measured | MeasuredLabels
    with progress.bar:
        if data.multi_label:
            measured = measure_labels(model, data, batch=args.batch, after_batch=progress.add)
        else:
            measured = measure(model, data, batch=args.batch, after_batch=progress.add)
    broken = data.broken()
    if distributed.is_main():
        _warn_of_training_images(args, source)
        origin = {
            WRITER: COMMAND,
            "model": args.model,
            "sha256": model.source and model.source.sha256,
            "classes": data.classes,
            "broken": broken,
        }
        if isinstance(measured, Measured):
            _print(measured, data)
            figures, confusion = _figures(measured, data), measured.confusion
        else:
            thresholds = model.thresholds or (0.5,) * len(data.classes)
            _print_labels(measured, data, thresholds)
            figures, confusion = _label_figures(measured, data, thresholds), None
        if args.out:
            _write(args.out, origin | figures, confusion)
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


def _write(out: Path, figures: dict[str, Any], confusion: Tensor | None) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        storage.write_json(out / FIGURES, figures)
        (out / CONFUSION).unlink(missing_ok=True)
        if confusion is not None:
            draw_confusion(confusion, figures["classes"], out / CONFUSION)
    except OSError as error:
        raise InputError(f"Cannot write to --out {out}: {error}. Choose another folder.") from error


def _warn_of_training_images(args: Namespace, data: Data) -> None:
    """Warn if the split.json of a run or a probe shows that the model was trained on these images."""
    run_folder = Path(args.weights or args.model).resolve()
    if args.split is not None or not run_folder.exists():
        return
    for folder in (run_folder, run_folder.parent, run_folder.parent.parent):
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


def _print_labels(measured: MeasuredLabels, data: ImageData, thresholds: Sequence[float]) -> None:
    """Print a table of the labels that have images, and a line with the totals."""
    recall, precision = measured.recall_and_precision(thresholds)
    rows = []
    for k, count in enumerate(measured.labels.sum(0).tolist()):
        if count:
            figures = [_percent(share[k]) for share in (measured.average_precisions, recall, precision)]
            rows.append([printable(data.classes[k]), str(count), *figures, f"{thresholds[k]:.3f}"])
    header = ["label", "images", "average precision", "recall", "precision", "threshold"]
    print(with_bold_header(table(header, rows)))
    total = f"mAP {measured.mean_average_precision:.2%}   loss {measured.loss:.4f}   {len(measured.rows)} images"
    print(f"\n{total}")


def _label_figures(measured: MeasuredLabels, data: ImageData, thresholds: Sequence[float]) -> dict[str, Any]:
    """Return the figures of eval.json for images that may have several labels."""
    names = data.names()
    predicted = measured.scores >= torch.tensor(thresholds, device="cpu")
    wrong = [
        {"image": names[row], "missed": _chosen(labels & ~found, data), "predicted": _chosen(found & ~labels, data)}
        for row, labels, found in zip(measured.rows.tolist(), measured.labels, predicted, strict=True)
        if not labels.equal(found)
    ]
    shares = (measured.average_precisions, *measured.recall_and_precision(thresholds))
    ap, recall, precision = ([None if share.isnan() else share.item() for share in each] for each in shares)
    return {
        "images": len(measured.rows),
        "map": measured.mean_average_precision,
        "loss": measured.loss,
        "average_precision": ap,
        "recall": recall,
        "precision": precision,
        "thresholds": thresholds,
        "wrong": wrong,
    }


def _chosen(mask: Tensor, data: ImageData) -> list[str]:
    return [data.classes[k] for k in mask.nonzero()[:, 0].tolist()]


def _figures(measured: Measured, data: ImageData) -> dict[str, Any]:
    """Return the figures of eval.json."""
    predictions, labels, names = measured.predictions.tolist(), data.labels.tolist(), data.names()
    wrong = [
        {"image": name, "class": data.classes[label], "predicted": data.classes[prediction]}
        for name, label, prediction in zip(names, labels, predictions, strict=True)
        if prediction not in (label, -1)  # -1: it could not be read
    ]
    return {
        "images": int(measured.images.sum()),
        **_accuracies(measured),
        "loss": measured.loss,
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
