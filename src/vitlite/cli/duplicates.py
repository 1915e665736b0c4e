"""`vitlite duplicates`: find images that are nearly the same."""

import csv
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlite.cli.options import expanded
from vitlite.cli.progress import Progress
from vitlite.cli.tables import bold
from vitlite.errors import InputError, printable

if TYPE_CHECKING:
    from vitlite.retrieval.search import Match

SHEET_GROUPS, SHEET_MEMBERS = 100, 9  # on a contact sheet


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite duplicates`."""
    parser.add_argument(
        "vectors", type=expanded, metavar="VECTORS", help=".safetensors file written by `vitlite embed`"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.95,
        metavar="COSINE",
        help="minimum cosine similarity; default: %(default)s",
    )
    parser.add_argument("--pairs", action="store_true", help="print every pair instead of groups")
    parser.add_argument(
        "--format",
        choices=("table", "csv", "jsonl"),
        default="table",
        help="format of the output; default: %(default)s",
    )
    parser.add_argument(
        "--out", type=expanded, metavar="JPG", help="file for a contact sheet of the groups, replaced if it exists"
    )


def run(args: Namespace) -> int:
    """Print near-duplicates, as groups or as pairs."""
    from vitlite.plots import check_target, save_image
    from vitlite.retrieval.duplicates import comparisons, duplicate_groups, duplicate_pairs
    from vitlite.retrieval.sheet import contact_sheet
    from vitlite.retrieval.store import open_vectors

    vectors = open_vectors(args.vectors)
    if args.out:
        if args.pairs:
            raise InputError("--out draws groups and cannot be used with --pairs. Omit --out or --pairs.")
        check_target(args.out)
        out = Path(args.out)
        if out.exists() and any(os.path.exists(path) and out.samefile(path) for path in vectors.paths):
            raise InputError(f"--out {out} is one of the images, which would be overwritten. Choose another file.")
    progress = Progress(comparisons(vectors), unit="comparisons")
    with progress.bar:
        if args.pairs:
            rows = (pair._asdict() for pair in duplicate_pairs(vectors, args.threshold, progress.add))
            _print_rows(rows, ("first", "second", "score"), args.format)
            return 0
        groups = duplicate_groups(vectors, args.threshold, progress.add)
    _print_groups(groups, args.format)
    others = sum(map(len, groups.values()))
    print(f"vitlite: {len(groups)} groups of {len(groups) + others} images, of {len(vectors)}", file=sys.stderr)
    if args.out and groups:
        drawn = dict(list(groups.items())[:SHEET_GROUPS])
        save_image(contact_sheet(list(drawn), [members[:SHEET_MEMBERS] for members in drawn.values()]), args.out)
        print(f"wrote {printable(args.out)}, {len(drawn)} of {len(groups)} groups", file=sys.stderr)
        shown = [path for first, members in drawn.items() for path in (first, *(match.path for match in members))]
        missing = [path for path in shown if not os.path.exists(path)]
        if missing:
            print(
                f"vitlite: {len(missing)} of {len(shown)} images could not be opened. Run the command in the folder "
                "where embed ran.",
                file=sys.stderr,
            )
            return 1
    return 0


def _print_groups(groups: "Mapping[str, list[Match]]", form: str) -> None:
    if form == "table":
        for path, members in groups.items():
            print(bold(printable(path)))
            for match in members:
                print(f"  {match.score:.4f}  {printable(match.path)}")
        return
    rows = (
        {"group": number, "representative": path, "path": match.path, "score": match.score}
        for number, (path, members) in enumerate(groups.items())
        for match in members
    )
    _print_rows(rows, ("group", "representative", "path", "score"), form)


def _print_rows(rows: Iterable[dict[str, Any]], names: tuple[str, ...], form: str) -> None:
    """Print each row as soon as it is available, as CSV, as JSON, or as a score and two paths."""
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    if form == "csv":
        writer.writeheader()
    for row in rows:
        if form == "csv":
            writer.writerow(row | {"score": f"{row['score']:.6f}"})
        elif form == "jsonl":
            print(json.dumps(row))
        else:
            print(f"{row['score']:.4f}  {printable(row['first'])}  {printable(row['second'])}")
