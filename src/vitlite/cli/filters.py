"""`vitlite filters`: draw what a model's patch embedding looks for."""

from argparse import ArgumentParser, Namespace

from vitlite.cli import picture
from vitlite.cli.options import add_model_arguments, open_model
from vitlite.plots import check_target, patch_filters, picture_of_filters


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite filters`."""
    picture.add_out(parser)
    add_model_arguments(parser, named=True)


def run(args: Namespace) -> int:
    """Draws the principal components of a model's patch embedding."""
    check_target(args.out)
    model = open_model(args)
    drawn = picture_of_filters(model)
    shares = patch_filters(model).shares
    print(f"{len(shares)} principal components, {shares.sum():.1%} of the variance of {model.config.dim} filters")
    picture.write(drawn, args.out)
    return 0
