"""`vitlite attention`: draw where the model looked."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from vitlite.cli import picture
from vitlite.cli.options import add_model_arguments, expanded, open_model
from vitlite.errors import ImageError
from vitlite.images.decode import no_such_file
from vitlite.plots import check_target, picture_of_attention


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite attention`."""
    parser.add_argument("image", type=expanded, metavar="IMAGE", help="the photo to draw on")
    picture.add_out(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--layer", type=int, metavar="N", help="the block, from 0; default: -1, the last")
    which.add_argument("--rollout", action="store_true", help="follow attention through all blocks")
    add_model_arguments(parser)


def run(args: Namespace) -> int:
    """Draws where a model looked in one picture."""
    check_target(args.out)
    if not Path(args.image).exists():
        raise no_such_file(args.image)
    if Path(args.out).exists() and Path(args.out).samefile(args.image):
        raise ImageError(f"--out {args.out} is the photo itself. Name another file.")
    model = open_model(args)
    drawn = picture_of_attention(model, args.image, layer=args.layer, rolled_out=args.rollout)
    picture.write(drawn, args.out)
    return 0
