"""`vitlite embed`: write a vector for each image."""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from vitlite.cli.engine import add_work_arguments, check_local_options, run_on_ray
from vitlite.cli.options import add_paths, check_not_an_input, expanded, open_model
from vitlite.cli.progress import ImageProgress, say_resumed, say_skipped
from vitlite.inference.embed import embed_into, identity_of
from vitlite.inference.find import find_images
from vitlite.inference.journal import WRITERS, ImageFile, check_names, check_target, open_journal


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite embed`."""
    add_paths(parser)
    parser.add_argument(
        "--out",
        type=expanded,
        required=True,
        metavar="FILE",
        help=f"the file to write ({', '.join(WRITERS)}), replaced if it exists; with --engine ray, a folder",
    )
    add_work_arguments(parser)


def run(args: Namespace) -> int:
    """Write a vector for each image, or resume an interrupted run."""
    if args.engine == "ray":
        from vitlite.cluster.jobs import embed_images

        return run_on_ray(args, embed_images)
    check_local_options(args)
    target = Path(args.out)
    check_target(target)
    check_not_an_input(target, args)
    paths = find_images(args.paths, sys.stdin, say_skipped)
    check_names(target, paths)

    from vitlite.fast.optimize import kernels_of  # here, because it imports torch, which `--help` does not need

    model = open_model(args)
    identity = asdict(identity_of(model, dtype=args.dtype, fast=args.fast))
    inputs = [source if source == "-" else os.path.abspath(source) for source in args.paths]
    run_identity = identity | {"kernels": kernels_of(model), "inputs": inputs}
    with open_journal(target, run_identity, model.config.embed_dim) as journal:
        images = [ImageFile.at(path) for path in paths]
        done = sum(image in journal.rows for image in images)
        if done:
            say_resumed(str(journal.folder), done)
        progress = ImageProgress(len(images) - done, bar=True, strict=args.strict)
        for _ in progress.outcomes(embed_into(journal, model, images, args.batch, progress.timings)):
            pass
        metadata = {
            "model": args.model,
            "sha256": model.source.sha256 if model.source else "",
            "identity": json.dumps(identity),  # `search` compares this identity with its model
        }
        count = journal.finish(images, metadata)
    print(f"wrote {target}: {count} vectors of {model.config.embed_dim}")
    return progress.exit_code()
