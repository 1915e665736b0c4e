"""The --out option of all commands that draw, and the line that these commands print at the end."""

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from vitlite.cli.options import expanded
from vitlite.errors import printable
from vitlite.plots import save_image

if TYPE_CHECKING:
    from PIL.Image import Image


def add_out(parser: ArgumentParser) -> None:
    """Add --out. `vitlite.plots.check_target` checks at the start whether the file can be written."""
    parser.add_argument(
        "--out", type=expanded, required=True, metavar="PNG", help="the image to write; an existing file is replaced"
    )


def save_and_report(image: "Image", out: str) -> None:
    """Write an image, and print the path and the size."""
    save_image(image, out)
    print(f"wrote {printable(out)}, {image.width} x {image.height} pixels")
