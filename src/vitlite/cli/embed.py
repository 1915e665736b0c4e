"""`vitlite embed`: write a vector for each picture."""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection
from pathlib import Path

from vitlite.cli.engine import add_work_arguments, refuse_what_ray_takes, run_on_ray
from vitlite.cli.options import add_paths, expanded, open_model, refuse_inputs
from vitlite.cli.progress import Watch, say_resumed, say_skipped
from vitlite.errors import shown
from vitlite.inference.embed import embed_into, gather, identity_of
from vitlite.inference.journal import KERNELS, WRITERS, Journal, Picture, check_names, check_target, open_journal


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite embed`."""
    add_paths(parser)
    suffixes = ", ".join(WRITERS)
    parser.add_argument(
        "--out",
        type=expanded,
        required=True,
        metavar="FILE",
        help=f"ends in {suffixes}; replaced if it is there; with --engine ray a folder",
    )
    add_work_arguments(parser)


def run(args: Namespace) -> int:
    """Writes a vector for each picture, and continues where an interrupted run stopped."""
    if args.engine == "ray":
        from vitlite.cluster.jobs import embed_pictures

        return run_on_ray(args, embed_pictures)
    refuse_what_ray_takes(args)
    return _run_here(args)


def _run_here(args: Namespace) -> int:
    from vitlite.fast.optimize import kernels_of  # here, since it imports torch, and `--help` is to be quick

    target = check_target(Path(args.out))
    refuse_inputs(target, args)
    paths = gather(args.paths, sys.stdin, say_skipped)
    check_names(target, paths)
    model = open_model(args)
    pictures = [Picture.at(path) for path in paths]
    identity = identity_of(model, dtype=args.dtype, fast=args.fast)
    of_this_run = {"working folder": os.getcwd(), KERNELS: kernels_of(model)} | identity
    with open_journal(target, of_this_run) as journal:
        missing = journal.missing(pictures)
        if journal.tried:
            say_resumed(str(journal.path), len(pictures) - len(missing))
        watch = Watch(len(missing), bar=True)
        for _ in watch.outcomes(embed_into(journal, model, missing, args.batch, watch.timings)):
            pass  # each stands in the journal, or was said to be broken
        metadata = {
            "model": args.model,
            "sha256": model.source.sha256 if model.source else "",
            "identity": json.dumps(identity),  # by which `search` knows whether another vector may be compared
        }
        count = journal.finish(pictures, metadata)
        others = journal.others(paths)
    if others:
        _say_what_stays(journal, others)
    print(f"wrote {shown(str(target), 1000)}: {count} vectors of {model.config.embed_dim}")
    return watch.exit_code()


def _say_what_stays(journal: Journal, others: Collection[str]) -> None:
    """Says that an earlier run embedded pictures of which this one has not been told."""
    print(
        f"vitlite: {shown(str(journal.path), 1000)} stays: it has the vectors of {len(others)} other pictures, such as "
        f"{shown(min(others))}. The command that began them goes on from there; if none shall, delete it.",
        file=sys.stderr,
    )
