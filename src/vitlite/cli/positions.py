"""`vitlite positions`: draw a model's position embeddings."""

from argparse import ArgumentParser, Namespace

from vitlite.cli.options import add_model_arguments, open_model
from vitlite.cli.plot_options import add_out, save_and_report
from vitlite.plots import check_target, draw_positions


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite positions`."""
    add_out(parser)
    add_model_arguments(parser, named=True)


def run(args: Namespace) -> int:
    """Draw the similarity of a model's position embeddings."""
    check_target(args.out)
    save_and_report(draw_positions(open_model(args)), args.out)
    return 0
