"""`vitlite distances`: draw the mean attention distance of each head."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from vitlite.cli.options import add_model_arguments, add_paths, check_not_an_input, open_model, positive
from vitlite.cli.plot_options import add_out
from vitlite.cli.progress import say_skipped
from vitlite.errors import printable
from vitlite.inference.find import find_images
from vitlite.plots import PLOT_DPI, attention_distances, check_target, need_matplotlib, plot_distances, save_image


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite distances`."""
    add_paths(parser)
    add_out(parser)
    parser.add_argument(
        "--dpi", type=positive, default=PLOT_DPI, metavar="N", help="pixels per inch; default: %(default)s"
    )
    add_model_arguments(parser)


def run(args: Namespace) -> int:
    """Draw and print the mean attention distance of each head over some images."""
    import torch

    check_target(args.out)
    need_matplotlib()
    paths = find_images(args.paths, sys.stdin, say_skipped)
    check_not_an_input(Path(args.out), args, paths)
    model = open_model(args)
    mean = torch.stack([attention_distances(model, model.preprocess(path))[0] for path in paths]).mean(0)
    images = f"{len(paths)} image{'s' * (len(paths) != 1)}"
    print(f"mean attention distance in pixels over {images}, one column per head")
    for block, heads in enumerate(mean.tolist()):  # mean: (depth, heads)
        numbers = "  ".join(f"{distance:5.1f}" for distance in heads)
        print(f"block {block:2}:  {numbers}")
    save_image(plot_distances(mean), args.out, args.dpi)
    print(f"wrote {printable(args.out)}")
    return 0
