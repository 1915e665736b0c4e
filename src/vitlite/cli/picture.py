"""What the commands that draw share: where the picture goes."""

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from vitlite.cli.options import expanded
from vitlite.errors import shown
from vitlite.plots import save_picture

if TYPE_CHECKING:
    from PIL.Image import Image


def add_out(parser: ArgumentParser) -> None:
    """The file for the picture; `vitlite.plots.check_target` says at once whether it can be written."""
    parser.add_argument(
        "--out", type=expanded, required=True, metavar="PNG", help="the picture to write, replaced if it is there"
    )


def write(picture: "Image", out: str) -> None:
    """Writes the picture, and says so."""
    save_picture(picture, out)
    print(f"wrote {shown(out, 1000)}, {picture.width} x {picture.height} pixels")
