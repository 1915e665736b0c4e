"""Which pictures the words of a command line mean, and what decides the numbers of a vector."""

import glob
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlite.errors import ImageError, missing_extra

if TYPE_CHECKING:
    from vitlite.model import ViT

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2"}


def gather(places: Sequence[str]) -> list[str]:
    """The picture files that the words of a command line mean, each once.

    Args:
        places: Files; folders, searched for names that end as pictures do; patterns such as 'photos/**/*.jpg'; or
            '-' for a list of files on standard input, one a line.

    Raises:
        ImageError: A folder or a pattern without pictures, or none of the files is there.
        MissingExtraError: Pillow, which opens them, is not installed.
    """
    found: list[str] = []
    for place in places:
        if place == "-":
            found += [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
        elif os.path.isdir(place):
            inside = sorted(str(path) for path in Path(place).rglob("*") if path.suffix.lower() in SUFFIXES)
            if not inside:
                raise ImageError(f"No pictures in the folder {place}. Looked for {' '.join(sorted(SUFFIXES))}.")
            found += inside
        elif glob.has_magic(place) and not os.path.exists(place):
            matching = sorted(path for path in glob.glob(place, recursive=True) if os.path.isfile(path))
            if not matching:
                raise ImageError(f"No file matches {place}.")
            found += matching
        else:
            found.append(place)
    found = list(dict.fromkeys(found))
    if not any(map(os.path.exists, found)):  # said before a model is fetched for nothing
        raise ImageError(f"No such file: {found[0]}" if found else "There are no pictures: the list is empty.")
    try:
        import PIL  # noqa: F401  # the same
    except ImportError as error:
        raise missing_extra("Opening pictures", "images") from error
    return found


def identity(model: "ViT", args: Namespace) -> dict[str, Any]:
    """All that decides the numbers of a vector, as JSON takes it."""
    from vitlite.images import Preprocess

    return {
        "weights": model.source.sha256 if model.source else args.model,
        "config": model.config.to_dict(),
        "preprocessing": model.preprocess.recipe.to_dict() if isinstance(model.preprocess, Preprocess) else None,
        "dtype": args.dtype,
        "fast": args.fast,
    }
