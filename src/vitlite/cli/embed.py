"""`vitlite embed`: write a vector for each picture."""

import os
import struct
import sys
from argparse import ArgumentParser, Namespace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from vitlite.bulk.journal import WRITERS, Journal, Picture, alone, check_target
from vitlite.bulk.local import gather, identity
from vitlite.cli.options import add_engine, add_model_arguments, add_paths, add_speed_arguments, open_model
from vitlite.cli.progress import Watch
from vitlite.errors import ImageError

if TYPE_CHECKING:
    from torch import Tensor


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite embed`."""
    add_paths(parser)
    parser.add_argument(
        "--out", required=True, metavar="FILE", help=f"ends in {', '.join(WRITERS)}; with --engine ray a folder"
    )
    add_model_arguments(parser)
    add_speed_arguments(parser)
    add_engine(parser)


def run(args: Namespace) -> int:
    """Writes a vector for each picture, and continues where an interrupted run stopped."""
    from vitlite.predict import embed

    if args.engine == "ray":
        from vitlite.bulk.ray import run_embed as run_on_ray

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


def _bytes(vector: "Tensor") -> bytes:
    return struct.pack(f"<{len(vector)}f", *vector.tolist())
