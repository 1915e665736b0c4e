"""`vitlite distances`: draw how far each head of a model looks."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from vitlite.cli import picture
from vitlite.cli.options import add_model_arguments, add_paths, open_model, refuse_among, refuse_inputs
from vitlite.cli.progress import say_skipped
from vitlite.inference.embed import gather
from vitlite.plots import attention_distances, check_target, need_matplotlib, picture_of_distances

if TYPE_CHECKING:
    from torch import Tensor


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite distances`."""
    add_paths(parser)
    picture.add_out(parser)
    add_model_arguments(parser)


def run(args: Namespace) -> int:
    """Draws the mean attention distance of each head over some pictures, and prints it."""
    import torch

    check_target(args.out)
    need_matplotlib()
    words, args.paths = args.paths, gather(args.paths, sys.stdin, say_skipped)
    refuse_inputs(Path(args.out), args)
    refuse_among(Path(args.out), words)
    model = open_model(args)
    by_picture = []
    for path in args.paths:
        images = model.preprocess(path)
        by_picture.append(attention_distances(model, images)[0])
    mean = torch.stack(by_picture).mean(0)  # (depth, heads)
    _print(mean, len(by_picture))
    picture.write(picture_of_distances(mean), args.out)
    return 0


def _print(distances: "Tensor", pictures: int) -> None:
    """A line for each block, with a number for each head."""
    print(f"mean attention distance in pixels over {pictures} picture{'s' * (pictures != 1)}, a column for each head")
    for block, heads in enumerate(distances.tolist()):
        numbers = "  ".join(f"{distance:5.1f}" for distance in heads)
        print(f"block {block:2}:  {numbers}")
