"""`vitlite pca`: draw the patch features of images as colours."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from vitlite.cli.options import add_layer, add_model_arguments, add_paths, check_not_an_input, open_model
from vitlite.cli.plot_options import add_out, save_and_report
from vitlite.cli.progress import say_skipped
from vitlite.errors import InputError
from vitlite.inference.find import find_images
from vitlite.plots import check_target, draw_pca, draw_similarity

MOST = 100  # images on one sheet


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite pca`."""
    add_paths(parser)
    add_out(parser)
    parser.add_argument(
        "--patch",
        type=point,
        metavar="X,Y",
        help="draw the similarity to the patch at these fractions of the image",
    )
    add_layer(parser)
    add_model_arguments(parser)


def run(args: Namespace) -> int:
    """Draw principal components of patch features, or the similarity to one patch."""
    check_target(args.out)
    paths = find_images(args.paths, sys.stdin, say_skipped)
    check_not_an_input(Path(args.out), args, paths)
    if len(paths) > MOST or (args.patch and len(paths) != 1):
        allowed = "exactly one image with --patch" if args.patch else f"at most {MOST} images"
        raise InputError(f"Cannot draw {len(paths)} images. Pass {allowed}.")
    model = open_model(args)
    drawn = draw_similarity(model, paths[0], args.patch) if args.patch else draw_pca(model, paths)
    save_and_report(drawn, args.out)
    return 0


def point(text: str) -> tuple[float, float]:
    """Parse two fractions, such as "0.5,0.25"."""
    try:
        x, y = map(float, text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"must be two fractions, such as 0.5,0.25, got {text!r}") from None
    return x, y
