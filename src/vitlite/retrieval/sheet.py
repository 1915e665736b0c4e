"""Draw a contact sheet of search results, in which each row shows a query image and its matches."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vitlite.errors import ImageError, InputError, printable
from vitlite.images.decode import read_image
from vitlite.plots import arrange
from vitlite.retrieval.search import Match

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 160  # pixels of an image on the sheet
HEIGHT = 14  # font size of a caption in pixels
LETTERS = 22  # number of characters per line of a caption
MAX_ACROSS, MAX_IMAGES = 250, 4000  # a JPEG has at most 65,500 pixels per side, and 4000 images take 1 GB
PAPER, MISSING = 255.0, 225.0  # grey levels around an image, and in place of an unreadable image


def check_size(queries: int, matches: int) -> None:
    """Check that a contact sheet would not be too large.

    Args:
        queries: The number of query images, each of which has its own row.
        matches: The number of matches per query.

    Raises:
        InputError: The sheet would be too large.
    """
    if max(queries, matches + 1) > MAX_ACROSS or queries * (matches + 1) > MAX_IMAGES:
        raise InputError(
            f"A contact sheet with {queries} rows of {matches + 1} images is too large. The limit is {MAX_IMAGES} "
            f"images in total and {MAX_ACROSS} per row or column. Search for fewer images at a time, or reduce top= "
            "(--top)."
        )


def contact_sheet(queries: Sequence[str], found: Sequence[Sequence[Match]]) -> "Image":
    """Draw a contact sheet with one row per query: the query image, followed by its matches with their scores.

    Args:
        queries: The paths of the query images.
        found: The matches of each query.
    """
    rows = []
    for query, matches in zip(queries, found, strict=True):
        panels = {_caption("?", query): _thumbnail(query)}
        for rank, match in enumerate(matches, 1):
            panels[_caption(f"{rank}. {match.score:.3f}", match.path)] = _thumbnail(match.path)
        rows.append(arrange(panels, len(panels), HEIGHT))
    sheet = rows[0].resize((max(row.width for row in rows), sum(row.height for row in rows)))
    sheet.paste("white", (0, 0, *sheet.size))
    top = 0
    for row in rows:
        sheet.paste(row, (0, top))
        top += row.height
    return sheet


def _caption(prefix: str, image: str) -> str:
    """Return a caption of two lines, with the folder (often the class) and the file name of an image."""
    path = Path(image)
    folder = shortened(printable(path.parent.name), LETTERS - len(prefix) - 1)
    return f"{prefix} {folder}\n{shortened(printable(path.name), LETTERS)}"


def shortened(name: str, most: int) -> str:
    """Shorten a name to at most `most` characters by replacing the middle with three dots.

    >>> shortened("IMG_20240131_0777_17.jpg", 16)
    'IMG_202...17.jpg'
    """
    if len(name) <= most:
        return name
    end = (most - 3) // 2
    return f"{name[: most - 3 - end]}...{name[len(name) - end :]}"


def _thumbnail(path: str) -> Tensor:
    """Read an image and scale it to fit a square: (SIDE, SIDE, 3), values from 0 to 255.

    If the image cannot be read, return a grey square.
    """
    try:
        pixels = rearrange(read_image(path).float(), "h w c -> 1 c h w")
    except ImageError:
        return torch.full((SIDE, SIDE, 3), MISSING, device="cpu")
    height, width = pixels.shape[2:]
    shrink = SIDE / max(height, width)
    small = F.interpolate(pixels, (max(1, round(height * shrink)), max(1, round(width * shrink))), mode="area")[0]
    square = torch.full((SIDE, SIDE, 3), PAPER, device="cpu")
    top, left = (SIDE - small.shape[1]) // 2, (SIDE - small.shape[2]) // 2
    square[top : top + small.shape[1], left : left + small.shape[2]] = rearrange(small, "c h w -> h w c")
    return square
