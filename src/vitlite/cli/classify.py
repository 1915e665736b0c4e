"""`vitlite classify`: say what is in pictures."""

import csv
import io
import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from vitlite.cli.engine import add_work_arguments, refuse_what_ray_takes, run_on_ray
from vitlite.cli.options import add_paths, expanded, open_model, positive
from vitlite.cli.progress import Watch, say_skipped
from vitlite.cli.tables import bold, terminal_width
from vitlite.errors import InputError, shown
from vitlite.inference.embed import gather

if TYPE_CHECKING:
    from vitlite.inference.predict import Prediction

Answers: TypeAlias = Iterable[tuple[str, list["Prediction"]]]


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite classify`."""
    add_paths(parser)
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="labels a picture; default: %(default)s")
    parser.add_argument("--format", choices=("table", "jsonl", "csv"), help="default: table")
    parser.add_argument("--out", type=expanded, metavar="FOLDER", help="where --engine ray writes")
    add_work_arguments(parser)


def run(args: Namespace) -> int:
    """Prints the best labels of each picture as soon as its batch is done."""
    if args.engine == "ray":
        from vitlite.cluster.jobs import classify_pictures

        if args.format is not None:
            raise InputError("--format is of what is printed, and --engine ray writes Parquet. Leave it out.")
        return run_on_ray(args, partial(classify_pictures, top=args.top))
    refuse_what_ray_takes(args)
    if args.out:
        raise InputError("--out belongs to --engine ray. Without it, the answers are printed.")
    return _run_here(args)


def _run_here(args: Namespace) -> int:
    from vitlite.inference.predict import classify

    paths = gather(args.paths, sys.stdin, say_skipped)
    model = open_model(args)
    watch = Watch(len(paths), bar=not sys.stdout.isatty())  # on a terminal, the answers show how far it is
    shared = [label for label, count in Counter(model.labels or ()).items() if count > 1]
    ways: dict[str, Callable[[Answers], None]] = {
        "table": partial(_show_table, shared=shared),
        "jsonl": _show_jsonl,
        "csv": _show_csv,
    }
    ways[args.format or "table"](watch.answers(classify(model, paths, args.top, args.batch, watch.timings)))
    return watch.exit_code()


def _show_table(answers: Answers, shared: Sequence[str]) -> None:
    """A label that several classes share is told from its likes by the number of its class."""
    for path, predictions in answers:
        print(bold(shown(path, 1000)))
        for label, index, score in predictions:
            name = f"{shown(label)} (class {index})" if label in shared else shown(label)
            bar = f"{'█' * round(20 * score):<20}  " if terminal_width() else ""
            print(f"  {100 * score:5.1f} %  {bar}{name}")


def _show_jsonl(answers: Answers) -> None:
    for path, predictions in answers:
        rows = [{"label": label, "index": index, "score": round(score, 6)} for label, index, score in predictions]
        print(json.dumps({"path": path, "predictions": rows}))


def _show_csv(answers: Answers) -> None:
    """In UTF-8, whatever the terminal has: where an encoding lacks letters, two names would become one."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    print("path,rank,label,index,score")
    for path, predictions in answers:
        for rank, (label, index, score) in enumerate(predictions, 1):
            row = io.StringIO()
            # The writer of Python 3.10 to 3.12 quotes a carriage return only where lines end in one.
            csv.writer(row, lineterminator="\r\n").writerow([path, rank, label, index, f"{score:.6f}"])
            print(row.getvalue().removesuffix("\r\n"))
