"""`vitlite filters`: draw the filters of a model's patch embedding."""

from argparse import ArgumentParser, Namespace

from vitlite.cli.options import add_model_arguments, open_model
from vitlite.cli.plot_options import add_out, save_and_report
from vitlite.plots import check_target, draw_filters, patch_filters


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite filters`."""
    add_out(parser)
    add_model_arguments(parser, named=True)


def run(args: Namespace) -> int:
    """Draw the principal components of a model's patch filters, and print their share of the variance."""
    check_target(args.out)
    model = open_model(args)
    drawn = draw_filters(model)
    shares = patch_filters(model).shares
    print(f"{len(shares)} principal components, {shares.sum():.1%} of the variance of {model.config.dim} filters")
    save_and_report(drawn, args.out)
    return 0
