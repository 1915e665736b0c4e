"""`vitlite attention`: draw where a model looks in an image."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from vitlite.cli.options import add_model_arguments, image_path, open_model, positive
from vitlite.cli.plot_options import add_out, save_and_report
from vitlite.errors import InputError
from vitlite.images.decode import missing_image_error
from vitlite.plots import DPI, check_target, draw_attention


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite attention`."""
    parser.add_argument(
        "image", type=image_path, metavar="IMAGE", help="image file, or sample for one that comes with vitlite"
    )
    add_out(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--layer", type=int, metavar="N", help="block, counted from 0; default: -1 (the last)")
    which.add_argument("--rollout", action="store_true", help="combine all blocks (attention rollout)")
    parser.add_argument("--head", type=int, metavar="N", help="head, counted from 0; default: all heads")
    parser.add_argument("--no-labels", action="store_true", help="omit the captions")
    parser.add_argument("--dpi", type=positive, default=DPI, metavar="N", help="pixels per inch; default: %(default)s")
    add_model_arguments(parser)


def run(args: Namespace) -> int:
    """Draw the attention of a model on an image."""
    check_target(args.out)
    if not Path(args.image).exists():
        raise missing_image_error(args.image)
    if Path(args.out).exists() and Path(args.out).samefile(args.image):
        raise InputError(f"--out {args.out} is the input image, which would be overwritten. Choose another file.")
    drawn = draw_attention(
        open_model(args),
        args.image,
        layer=args.layer,
        rolled_out=args.rollout,
        head=args.head,
        labels=not args.no_labels,
        dpi=args.dpi,
    )
    save_and_report(drawn, args.out)
    return 0
