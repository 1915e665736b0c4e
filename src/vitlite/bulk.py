"""`vitlite classify` and `vitlite embed`: one model over any number of picture files."""

import csv
import glob
import io
import json
import os
import struct
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vitlite.errors import ImageError, InputError, missing_extra
from vitlite.report import bold, terminal_width
from vitlite.vectors import WRITERS, Journal, Picture, alone, check_target
from vitlite.weights import add_model_arguments, add_speed_arguments, open_model, positive

if TYPE_CHECKING:
    from torch import Tensor

    from vitlite.model import ViT
    from vitlite.predict import Outcomes, Prediction

T = TypeVar("T")

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2"}


def gather(places: Sequence[str]) -> list[str]:
    """The picture files that the words of a command line mean, each once.

    Args:
        places: Files; folders, searched for names that end as pictures do; patterns such as 'photos/**/*.jpg'; or
            '-' for a list of files on standard input, one a line.

    Raises:
        ImageError: A folder or a pattern without pictures, or none of the files is there.
        MissingExtraError: Pillow, which opens them, is not installed.
    """
    found: list[str] = []
    for place in places:
        if place == "-":
            found += [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
        elif os.path.isdir(place):
            inside = sorted(str(path) for path in Path(place).rglob("*") if path.suffix.lower() in SUFFIXES)
            if not inside:
                raise ImageError(f"No pictures in the folder {place}. Looked for {' '.join(sorted(SUFFIXES))}.")
            found += inside
        elif glob.has_magic(place) and not os.path.exists(place):
            matching = sorted(path for path in glob.glob(place, recursive=True) if os.path.isfile(path))
            if not matching:
                raise ImageError(f"No file matches {place}.")
            found += matching
        else:
            found.append(place)
    found = list(dict.fromkeys(found))
    if not any(map(os.path.exists, found)):  # said before a model is fetched for nothing
        raise ImageError(f"No such file: {found[0]}" if found else "There are no pictures: the list is empty.")
    try:
        import PIL  # noqa: F401  # the same
    except ImportError as error:
        raise missing_extra("Opening pictures", "images") from error
    return found


def add_classify_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite classify`."""
    _add_paths(parser)
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="labels a picture; default: %(default)s")
    parser.add_argument("--format", choices=("table", "jsonl", "csv"), default="table", help="default: %(default)s")
    parser.add_argument("--out", metavar="FOLDER", help="where --engine ray writes")
    add_model_arguments(parser)
    add_speed_arguments(parser)
    _add_engine(parser)


def run_classify(args: Namespace) -> int:
    """Prints the best labels of each picture as soon as its batch is done."""
    from vitlite.predict import classify

    if args.engine == "ray":
        from vitlite.ray import run_classify as run_on_ray

        return run_on_ray(args)
    if args.out:
        raise InputError("--out belongs to --engine ray. Without it, the answers are printed.")
    paths = gather(args.paths)
    model = open_model(args)
    watch = Watch(len(paths), bar=not sys.stdout.isatty())  # on a terminal, the answers show how far it is
    show = {"table": _show_table, "jsonl": _show_jsonl, "csv": _show_csv}[args.format]
    show(watch.good(classify(model, paths, args.top, args.batch)))
    return watch.exit_code()


def add_embed_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite embed`."""
    _add_paths(parser)
    parser.add_argument(
        "--out", required=True, metavar="FILE", help=f"ends in {', '.join(WRITERS)}; with --engine ray a folder"
    )
    add_model_arguments(parser)
    add_speed_arguments(parser)
    _add_engine(parser)


def run_embed(args: Namespace) -> int:
    """Writes a vector for each picture, and continues where an interrupted run stopped."""
    from vitlite.predict import embed

    if args.engine == "ray":
        from vitlite.ray import run_embed as run_on_ray

        return run_on_ray(args)
    target = check_target(Path(args.out))
    paths = gather(args.paths)
    model = open_model(args)
    pictures = {path: Picture.at(path) for path in paths}
    run = {"working folder": os.getcwd()} | identity(model, args)
    with alone(target), Journal(target, run) as journal:
        done = journal.done
        tried = {picture.path for picture in done}.union(journal.broken)
        left = [path for path, picture in pictures.items() if picture not in done]
        if tried:
            print(f"vitlite: continuing {journal.path}: {len(paths) - len(left)} pictures are done", file=sys.stderr)
        watch = Watch(len(left), bar=True)
        new, again = [path for path in left if path not in tried], [path for path in left if path in tried]
        for part in (new, again):  # apart, so that the batches are those of a run without interruption
            outcomes = watch.all(embed(model, part, args.batch))
            while batch := list(islice(outcomes, args.batch)):
                good = [(path, vector) for path, vector in batch if not isinstance(vector, ImageError)]
                bad = [path for path, vector in batch if isinstance(vector, ImageError)]
                journal.add([pictures[path] for path, _ in good], b"".join(_bytes(vector) for _, vector in good), bad)
        about = {"model": args.model, "sha256": model.source.sha256 if model.source else ""}
        print(f"wrote {target}: {journal.finish(pictures.values(), about)} vectors of {model.config.embed_dim}")
    return watch.exit_code()


class Watch:
    """Says on stderr which pictures are broken, and how far a long run is."""

    def __init__(self, total: int, *, bar: bool) -> None:
        """With `bar`, a progress bar where stderr is a terminal and there is more than a batch or two to do."""
        from tqdm import tqdm  # type: ignore[import-untyped]  # comes with huggingface-hub

        self.broken = 0
        self.bar = tqdm(total=total, unit=" pictures", disable=not (bar and total > 50 and sys.stderr.isatty()))

    def all(self, outcomes: "Outcomes[T]") -> "Outcomes[T]":
        """Every outcome, as it came."""
        with closing(outcomes), self.bar:
            for path, outcome in outcomes:
                if isinstance(outcome, ImageError):
                    self.broken += 1
                    text = str(outcome)
                    self.bar.write(f"vitlite: {text if path in text else f'{path}: {text}'}", file=sys.stderr)
                self.bar.update()
                yield path, outcome

    def good(self, outcomes: "Outcomes[T]") -> Iterator[tuple[str, T]]:
        """The outcomes that are no errors."""
        for path, outcome in self.all(outcomes):
            if not isinstance(outcome, ImageError):
                yield path, outcome

    def exit_code(self) -> int:
        """1 where a picture was broken."""
        return int(self.broken > 0)


def identity(model: "ViT", args: Namespace) -> dict[str, Any]:
    """All that decides the numbers of a vector, as JSON takes it."""
    from vitlite.images import Preprocess

    return {
        "weights": model.source.sha256 if model.source else args.model,
        "config": model.config.to_dict(),
        "preprocessing": model.preprocess.recipe.to_dict() if isinstance(model.preprocess, Preprocess) else None,
        "dtype": args.dtype,
        "fast": args.fast,
    }


def _bytes(vector: "Tensor") -> bytes:
    return struct.pack(f"<{len(vector)}f", *vector.tolist())


def _show_table(answers: Iterable[tuple[str, list["Prediction"]]]) -> None:
    for path, predictions in answers:
        print(bold(path))
        for label, _, score in predictions:
            bar = f"{'█' * round(20 * score):<20}  " if terminal_width() else ""
            print(f"  {100 * score:5.1f} %  {bar}{label}")


def _show_jsonl(answers: Iterable[tuple[str, list["Prediction"]]]) -> None:
    for path, predictions in answers:
        rows = [{"label": label, "index": index, "score": round(score, 6)} for label, index, score in predictions]
        print(json.dumps({"path": path, "predictions": rows}))


def _show_csv(answers: Iterable[tuple[str, list["Prediction"]]]) -> None:
    print("path,rank,label,index,score")
    for path, predictions in answers:
        for rank, (label, index, score) in enumerate(predictions, 1):
            row = io.StringIO()
            # The writer of Python 3.10 to 3.12 quotes a carriage return only where lines end in one.
            csv.writer(row, lineterminator="\r\n").writerow([path, rank, label, index, f"{score:.6f}"])
            print(row.getvalue().removesuffix("\r\n"))


def _add_paths(parser: ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="files, folders with all below them, patterns such as '**/*.jpg', or - for a list on standard input",
    )


def _add_engine(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray: a Ray cluster (RAY_ADDRESS), or all cores of this machine; PATH is one folder, list or Parquet, "
        "also a URL, and --out a folder for Parquet; default: %(default)s",
    )
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="models at once on Ray; default: one a core or GPU"
    )
