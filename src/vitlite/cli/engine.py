"""Shared options of `embed` and `classify`, and a function that runs these commands on Ray."""

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
        help="decode large JPEGs at a reduced size; results change slightly",
    )
    ray = parser.add_argument_group(
        "several machines",
        "With --engine ray, PATH is one folder, list or Parquet file, or its URL.\n--out is a folder of Parquet files.",
    )
    ray.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray: the cluster at RAY_ADDRESS, or all cores; default: %(default)s",
    )
    ray.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="processes with --engine ray; default: one per core or GPU",
    )


def check_local_options(args: Namespace) -> None:
    """Check that no option is given that only --engine ray supports.

    Raises:
        InputError: --workers is given.
    """
    if args.workers is not None:
        raise InputError("--workers needs --engine ray. Add --engine ray, or omit --workers.")


def run_on_ray(args: Namespace, work: "Callable[..., Summary]") -> int:
    """Run a command on Ray, and print a summary of the output.

    Args:
        args: The arguments of the command.
        work: `embed_images` or `classify_images` of `vitlite.cluster.jobs`.
    """
    from vitlite.cluster.jobs import Actors, check_installed
    from vitlite.cluster.sources import find_source

    if len(args.paths) != 1 or not args.out:
        raise InputError(
            "--engine ray needs exactly one PATH and a folder for the results. Pass one folder, list or Parquet file, "
            "and add --out FOLDER."
        )
    if args.strict:
        raise InputError(
            "--strict cannot be used with --engine ray, which writes errors to the column error. Omit --strict."
        )
    if args.dtype == "int8":
        raise InputError("--dtype int8 cannot be used with --engine ray. Use --dtype bfloat16, or --engine local.")
    check_installed()

    begun = time.monotonic()
    source = find_source(args.paths[0])
    if source.skipped:
        say_skipped(source.skipped)
    model = create_or_load(args)  # each actor makes an optimized copy on its device
    actors = Actors(args.batch, args.dtype, args.device, args.workers)
    result = work(model, source, args.out, actors, on_resume=partial(say_resumed, args.out))
    seconds = time.monotonic() - begun
    print(
        f"{printable(args.out)}: {result.images} images, {result.new} of them new in {seconds:.0f} s; "
        f"{result.broken} could not be read (see the column error)"
    )
    return int(result.broken > 0)
