"""`vitlite positions`: draw a model's position embeddings."""

from argparse import ArgumentParser, Namespace

from vitlite.cli.options import add_model_arguments, open_model
from vitlite.draw import check_target, picture_of_positions, save_picture
from vitlite.errors import shown


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite positions`."""
    parser.add_argument("--out", required=True, metavar="PNG", help="the picture to write, replaced if it is there")
    add_model_arguments(parser, named=True)


def run(args: Namespace) -> int:
    """Draws what a model knows of positions."""
    check_target(args.out)
    picture = picture_of_positions(open_model(args))
    save_picture(picture, args.out)
    print(f"wrote {shown(args.out, 1000)}, {picture.width} x {picture.height} pixels")
    return 0
