"""`vitlite classify`: print the most probable labels of images."""

import csv
import io
import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from vitlite.cli.engine import add_work_arguments, check_local_options, run_on_ray
from vitlite.cli.options import TEMPLATE, add_paths, expanded, label_list, open_model, positive, share
from vitlite.cli.progress import ImageProgress, say_skipped
from vitlite.cli.tables import bold, terminal_width
from vitlite.errors import InputError, printable
from vitlite.inference.find import find_images

if TYPE_CHECKING:
    from vitlite.inference.predict import Prediction

TOP = 5
Answers: TypeAlias = Iterable[tuple[str, list["Prediction"]]]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite classify`."""
    add_paths(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--top",
        type=positive,
        metavar="N",
        help=f"maximum number of labels per image; default: {TOP}, or all (multi-label)",
    )
    output.add_argument(
        "--min-score", type=share, metavar="X", help="minimum score of a label; default: the model's thresholds, or 0"
    )
    output.add_argument("--format", choices=("table", "jsonl", "csv"), help="format of the output; default: table")
    output.add_argument("--out", type=expanded, metavar="FOLDER", help="output folder, only with --engine ray")
    labels = parser.add_argument_group("labels of your own", "These options need a CLIP or SigLIP model.")
    labels.add_argument(
        "--labels",
        type=label_list,
        metavar="LABELS",
        help="labels such as 'cat,dog,rusty bolt', or a file with one per line",
    )
    labels.add_argument(
        "--template", metavar="TEXT", help=f"sentence per label, or imagenet (80); default: {TEMPLATE!r}"
    )
    add_work_arguments(parser)


def run(args: Namespace) -> int:
    """Print the most probable labels of the images, batch by batch."""
    if args.template and not args.labels:
        raise InputError("--template needs --labels. Add --labels, or omit --template.")
    if args.engine == "ray":
        from vitlite.cluster.jobs import classify_images

        if args.format is not None:
            raise InputError("--format cannot be used with --engine ray, which writes Parquet. Omit --format.")
        if args.min_score is not None:
            raise InputError("--min-score cannot be used with --engine ray. Filter the Parquet files by their scores.")
        return run_on_ray(args, partial(classify_images, top=args.top or TOP))
    check_local_options(args)
    if args.out:
        raise InputError(
            "--out needs --engine ray. Add --engine ray, or omit --out and redirect the output: vitlite classify ... > "
            "FILE."
        )
    paths = find_images(args.paths, sys.stdin, say_skipped)

    from vitlite.inference.predict import labels_to_show, work_through  # imports torch, which `--help` does not need

    model = open_model(args)
    progress = ImageProgress(
        len(paths),
        bar=not sys.stdout.isatty(),  # on a terminal, the results show progress
        strict=args.strict,
        verb="classified" if len(paths) > 1 else "",
    )
    work = labels_to_show(model, args.top, args.min_score)
    answers: Answers = progress.answers(work_through(model, paths, work, args.batch, progress.timings))
    if args.format == "jsonl":
        _print_jsonl(answers)
    elif args.format == "csv":
        _print_csv(answers)
    else:
        _print_table(answers, [label for label, count in Counter(model.labels or ()).items() if count > 1])
    return progress.exit_code()


def _print_table(answers: Answers, ambiguous: Sequence[str]) -> None:
    """Print the labels of each image. Labels that several classes share are printed with the class index."""
    for path, predictions in answers:
        print(bold(printable(path)))
        for label, index, score in predictions:
            name = f"{printable(label)} (class {index})" if label in ambiguous else printable(label)
            bar = f"{'█' * round(20 * score):<20}  " if terminal_width() else ""
            print(f"  {100 * score:5.1f} %  {bar}{name}")
        if not predictions:
            print("  none of these")


def _print_jsonl(answers: Answers) -> None:
    for path, predictions in answers:
        rows = [{"label": label, "index": index, "score": round(score, 6)} for label, index, score in predictions]
        print(json.dumps({"path": path, "predictions": rows}))


def _print_csv(answers: Answers) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            encoding="utf-8", errors="surrogateescape"
        )  # the terminal's encoding may lack characters
    print("path,rank,label,index,score")
    for path, predictions in answers:
        cells: list[list[object]] = [[rank, *each[:2], f"{each.score:.6f}"] for rank, each in enumerate(predictions, 1)]
        for each in cells or [[""] * 4]:  # none of these
            row = io.StringIO()
            # Python 3.10 to 3.12 quote a carriage return only if lines end in one.
            csv.writer(row, lineterminator="\r\n").writerow([path, *each])
            print(row.getvalue().removesuffix("\r\n"))
