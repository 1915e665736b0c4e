"""The --out option of the commands that draw, and the report at the end of these commands."""

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from vitlite.cli.options import expanded
from vitlite.errors import printable
from vitlite.plots import save_image

if TYPE_CHECKING:
    from PIL.Image import Image


def add_out(parser: ArgumentParser) -> None:
    """Add --out. Commands should pass the file to `vitlite.plots.check_target` before any work is done."""
    parser.add_argument(
        "--out",
        type=expanded,
        required=True,
        metavar="PNG",
        help="image to write (or .pdf, .svg, .jpg), replaced if it exists",
    )


def save_and_report(image: "Image", out: str) -> None:
    """Write an image, and print the path and size of the file."""
    save_image(image, out)
    print(f"wrote {printable(out)}, {image.width} x {image.height} pixels")
