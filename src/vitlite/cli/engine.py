"""What `embed` and `classify` share: their options, and the same work on Ray, which gives a folder of Parquet files."""

import time
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from vitlite.cli.options import add_model_arguments, add_speed_arguments, create_or_load, positive
from vitlite.cli.progress import say_resumed, say_skipped
from vitlite.errors import InputError, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from vitlite.cluster.jobs import Actors, Summary
    from vitlite.cluster.sources import Source
    from vitlite.nn.vit import ViT


class Work(Protocol):
    """`embed_pictures` of `vitlite.cluster.jobs`, or `classify_pictures` that knows how many labels it gives."""

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


def add_work_arguments(parser: ArgumentParser) -> None:
    """Which model works through the pictures, how fast, and where."""
    add_model_arguments(parser)
    add_speed_arguments(parser)
    parser.add_argument(
        "--quick-decode",
        action="store_true",
        help="scale JPEGs while they are decoded, to no less than twice what the model needs: several times as "
        "quick on large photos, with answers that differ a little; files of other formats are decoded whole",
    )
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


def refuse_what_ray_takes(args: Namespace) -> None:
    """Makes sure that nothing is asked for which only `run_on_ray` does.

    Raises:
        InputError: Something is.
    """
    if args.workers is not None:
        raise InputError("--workers belongs to --engine ray. Without it, one model uses all cores.")


def run_on_ray(args: Namespace, work: Work) -> int:
    """Does the work of a command on Ray, and says what its output holds then."""
    from vitlite.cluster.jobs import Actors, check_installed
    from vitlite.cluster.sources import find_pictures

    if len(args.paths) != 1 or not args.out:
        raise InputError("--engine ray takes one folder, list or Parquet file as PATH, and --out with a folder.")
    if args.dtype == "int8":
        raise InputError("--dtype int8 belongs to --engine local: on Ray, each process would choose scales of its own.")
    check_installed()

    begun = time.monotonic()
    source = find_pictures(args.paths[0])  # before a model is fetched for nothing
    if source.skipped:
        say_skipped(source.skipped)
    model = create_or_load(args)  # each worker brings it to its device, precision and speed
    actors = Actors(args.batch, args.dtype, args.device, args.workers)
    held = work(model, source, args.out, actors, name=args.model, on_resume=partial(say_resumed, args.out))
    seconds = time.monotonic() - begun
    print(
        f"{shown(args.out, 1000)}: {held.pictures} pictures, {held.broken} of them broken (column error); "
        f"{held.new} new in {seconds:.0f} s"
    )
    return int(held.broken > 0)
