"""`vitlite filters`: draw what a model's patch embedding looks for."""

from argparse import ArgumentParser, Namespace

from vitlite.cli.options import add_model_arguments, open_model
from vitlite.draw import check_target, patch_filters, picture_of_filters, save_picture
from vitlite.errors import shown


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite filters`."""
    parser.add_argument("--out", required=True, metavar="PNG", help="the picture to write, replaced if it is there")
    add_model_arguments(parser, named=True)


def run(args: Namespace) -> int:
    """Draws the principal components of a model's patch embedding."""
    check_target(args.out)
    model = open_model(args)
    picture = picture_of_filters(model)
    save_picture(picture, args.out)
    shares = patch_filters(model).shares
    print(f"{len(shares)} principal components, {shares.sum():.1%} of the variance of {model.config.dim} filters")
    print(f"wrote {shown(args.out, 1000)}, {picture.width} x {picture.height} pixels")
    return 0
