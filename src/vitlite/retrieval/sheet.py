"""A contact sheet of what a search found: in each row a picture, and those that look like it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vitlite.errors import ImageError, InputError, shown
from vitlite.images.decode import read_image
from vitlite.plots import arrange
from vitlite.retrieval.search import Match

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 160  # pixels of a picture on the sheet
HEIGHT = 14  # pixels of a caption's letters
LETTERS = 22  # of a caption, as many as fit below a picture
MOST_ACROSS, MOST = 250, 4000  # pictures: a JPEG has 65,500 pixels a side at most, and a sheet of so many takes 1 GB
PAPER, EMPTY = 255.0, 225.0  # grey levels: around a picture, and in the place of one that cannot be read


def check_size(asked: int, found: int) -> None:
    """Refuses, before any work is done, a sheet that could not be written at its end.

    Args:
        asked: How many rows it would have.
        found: How many pictures there are to the right of each that was asked for.

    Raises:
        InputError: It would be too large.
    """
    if max(asked, found + 1) > MOST_ACROSS or asked * (found + 1) > MOST:
        raise InputError(
            f"A contact sheet of {asked} pictures with {found} beside each is too large: it has {MOST} at most, and "
            f"{MOST_ACROSS} across or down.",
            python="Draw fewer at a time.",
            command="Ask for fewer at a time, with a smaller --top, or without --out.",
        )


def contact_sheet(asked: Sequence[str], found: Sequence[Sequence[Match]]) -> "Image":
    """Each picture that was asked for, and to its right what was found, with the scores."""
    rows = []
    for picture, matches in zip(asked, found, strict=True):
        panels = {_caption("?", picture): _thumbnail(picture)}
        for rank, match in enumerate(matches, 1):
            panels[_caption(f"{rank}. {match.score:.3f}", match.picture)] = _thumbnail(match.picture)
        rows.append(arrange(panels, len(panels), HEIGHT))
    sheet = rows[0].resize((max(row.width for row in rows), sum(row.height for row in rows)))
    sheet.paste("white", (0, 0, *sheet.size))
    top = 0
    for row in rows:
        sheet.paste(row, (0, top))
        top += row.height
    return sheet


def _caption(before: str, picture: str) -> str:
    """Two lines: this and the picture's folder, which often is its class; and the picture's name."""
    path = Path(picture)
    folder = shortened(shown(path.parent.name), LETTERS - len(before) - 1)
    return f"{before} {folder}\n{shortened(shown(path.name), LETTERS)}"


def shortened(name: str, most: int) -> str:
    """A name without its middle, where it is longer: its beginning and its end tell it from others.

    >>> shortened("IMG_20240131_0777_17.jpg", 16)
    'IMG_202...17.jpg'
    """
    if len(name) <= most:
        return name
    end = (most - 3) // 2
    return f"{name[: most - 3 - end]}...{name[len(name) - end :]}"


def _thumbnail(picture: str) -> Tensor:
    """The whole picture in the middle of a square: (SIDE, SIDE, 3), 0..255."""
    try:
        pixels = rearrange(read_image(picture).float(), "h w c -> 1 c h w")
    except ImageError:  # it was moved since
        return torch.full((SIDE, SIDE, 3), EMPTY, device="cpu")
    height, width = pixels.shape[2:]
    shrink = SIDE / max(height, width)
    small = F.interpolate(pixels, (max(1, round(height * shrink)), max(1, round(width * shrink))), mode="area")[0]
    square = torch.full((SIDE, SIDE, 3), PAPER, device="cpu")
    top, left = (SIDE - small.shape[1]) // 2, (SIDE - small.shape[2]) // 2
    square[top : top + small.shape[1], left : left + small.shape[2]] = rearrange(small, "c h w -> h w c")
    return square
