"""`--engine ray` of `embed` and `classify`: the same work on Ray, whose output is a folder of Parquet files."""

import sys
import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Protocol

from vitlite.cli.options import create_or_load, positive
from vitlite.cli.progress import say_skipped
from vitlite.errors import InputError, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from vitlite.bulk.jobs import Actors, Summary
    from vitlite.bulk.sources import Source
    from vitlite.model import ViT


class Work(Protocol):
    """`embed_pictures` of `vitlite.bulk.jobs`, or `classify_pictures` that knows how many labels it gives."""

    def __call__(
        self,
        model: "ViT",
        source: "Source",
        out: str,
        actors: "Actors",
        *,
        name: str,
        on_resume: "Callable[[int], None]",
    ) -> "Summary": ...


def add_engine_arguments(parser: ArgumentParser) -> None:
    """Where the work is done."""
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


def run_on_ray(args: Namespace, work: Work) -> int:
    """Does the work of a command on Ray, and says what its output holds then."""
    from vitlite.bulk.jobs import Actors, check_installed
    from vitlite.bulk.sources import find_pictures

    if len(args.paths) != 1 or not args.out:
        raise InputError("--engine ray takes one folder, list or Parquet file as PATH, and --out with a folder.")
    if args.dtype == "int8":
        raise InputError("--dtype int8 belongs to --engine local: on Ray, each process would choose scales of its own.")
    check_installed()

    def say_resumed(done: int) -> None:
        print(f"vitlite: continuing {shown(args.out, 1000)}: {done} pictures are done", file=sys.stderr)

    begun = time.monotonic()
    source = find_pictures(args.paths[0])  # before a model is fetched for nothing
    if source.skipped:
        say_skipped(source.skipped)
    model = create_or_load(args)  # each worker brings it to its device, precision and speed
    actors = Actors(args.batch, args.dtype, args.device, args.workers)
    held = work(model, source, args.out, actors, name=args.model, on_resume=say_resumed)
    seconds = time.monotonic() - begun
    print(
        f"{shown(args.out, 1000)}: {held.pictures} pictures, {held.broken} of them broken (column error); "
        f"{held.new} new in {seconds:.0f} s"
    )
    return int(held.broken > 0)
