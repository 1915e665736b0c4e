"""The options that `embed` and `classify` share, and how both run on Ray."""

import time
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING

from vitlite.cli.options import add_model_arguments, add_speed_arguments, add_strict, create_or_load, positive
from vitlite.cli.progress import say_resumed, say_skipped
from vitlite.errors import InputError, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from vitlite.cluster.jobs import Summary


def add_work_arguments(parser: ArgumentParser) -> None:
    """Add the options for the model, its speed, and the engine."""
    add_model_arguments(parser)
    add_speed_arguments(parser)
    add_strict(parser)
    parser.add_argument(
        "--quick-decode",
        action="store_true",
        help="decode large JPEGs at a reduced size, at least twice the size that the model needs: several times "
        "faster on large photos, with slightly different results",
    )
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray: use a Ray cluster (RAY_ADDRESS), or all cores of this machine; PATH is one folder, list or "
        "Parquet, or a URL, and --out is a folder for Parquet; default: %(default)s",
    )
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="number of models on Ray; default: one per core or GPU"
    )


def check_local_options(args: Namespace) -> None:
    """Check that no option needs --engine ray.

    Raises:
        InputError: An option needs --engine ray.
    """
    if args.workers is not None:
        raise InputError("--workers needs --engine ray. Without it, one model uses all cores.")


def run_on_ray(args: Namespace, work: "Callable[..., Summary]") -> int:
    """Run a command on Ray, and print a summary of its output.

    Args:
        args: The arguments of the command.
        work: `embed_images` or `classify_images` of `vitlite.cluster.jobs`.
    """
    from vitlite.cluster.jobs import Actors, check_installed
    from vitlite.cluster.sources import find_source

    if len(args.paths) != 1 or not args.out:
        raise InputError("--engine ray needs one folder, list or Parquet file as PATH, and a folder as --out.")
    if args.strict:
        raise InputError("--strict needs --engine local. On Ray, errors are in the column error.")
    if args.dtype == "int8":
        raise InputError("--dtype int8 needs --engine local. On Ray, each process would choose its own scales.")
    check_installed()

    begun = time.monotonic()
    source = find_source(args.paths[0])
    if source.skipped:
        say_skipped(source.skipped)
    model = create_or_load(args)  # each actor moves it to its device and optimizes it
    actors = Actors(args.batch, args.dtype, args.device, args.workers)
    result = work(model, source, args.out, actors, on_resume=partial(say_resumed, args.out))
    seconds = time.monotonic() - begun
    print(
        f"{printable(args.out)}: {result.images} images, {result.broken} of them broken (column error); "
        f"{result.new} new in {seconds:.0f} s"
    )
    return int(result.broken > 0)
