"""`vitlite positions`: draw a model's position embeddings."""

from argparse import ArgumentParser, Namespace

from vitlite.cli import picture
from vitlite.cli.options import add_model_arguments, open_model
from vitlite.plots import check_target, picture_of_positions


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite positions`."""
    picture.add_out(parser)
    add_model_arguments(parser, named=True)


def run(args: Namespace) -> int:
    """Draws what a model knows of positions."""
    check_target(args.out)
    picture.write(picture_of_positions(open_model(args)), args.out)
    return 0
