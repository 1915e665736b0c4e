"""Pictures on this machine: which files are meant, and their vectors, batch by batch into a journal."""

import glob
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlite.errors import ImageError, counted, missing_extra, shown
from vitlite.inference.find import by_ending, files_below
from vitlite.inference.journal import Journal, Picture

if TYPE_CHECKING:
    from torch import Tensor

    from vitlite.inference.predict import Outcomes, Timings
    from vitlite.nn.vit import ViT


def gather(
    sources: Sequence[str], listing: Iterable[str] = (), on_skip: Callable[[Counter[str]], None] = lambda skipped: None
) -> list[str]:
    """The picture files that words mean, each file once.

    Args:
        sources: Files; folders, searched for names that end as pictures do; patterns such as 'photos/**/*.jpg'; or
            '-' for the files of `listing`.
        listing: A file a line, such as standard input.
        on_skip: Called with how many files of which ending the folders have beside pictures, and how many pipes were
            found, if there are any.

    Raises:
        ImageError: A folder or a pattern without pictures, or none of the files is there.
        MissingExtraError: Pillow, which opens them, is not installed.
    """
    found: list[str] = []
    skipped: Counter[str] = Counter()
    for source in sources:
        if source == "-":
            found += listed(listing)
        elif os.path.isdir(source):
            found += _in_folder(source, skipped)
        elif glob.has_magic(source) and not os.path.exists(source):
            found += _matching(source, skipped)
        else:
            found.append(source)
    found = list(dict.fromkeys(found))
    _check_found(found)
    if skipped:
        on_skip(skipped)
    return found


def listed(listing: Iterable[str]) -> list[str]:
    """The files that the lines of a list name."""
    return [line.rstrip("\r\n") for line in listing if line.strip()]


def _in_folder(folder: str, skipped: Counter[str]) -> list[str]:
    """The pictures below a folder; what else is there is counted by its ending, but for what is hidden.

    Raises:
        ImageError: There are none, or a folder cannot be looked into.
    """
    from vitlite.images.decode import SUFFIXES  # here, because it imports torch, which `classify --help` does not need

    try:
        found, others = by_ending(files_below(folder), SUFFIXES)
    except OSError as error:
        raise closed(error) from error
    skipped.update(others)
    if not found:
        raise ImageError(
            f"No pictures in the folder {folder}. Looked for {' '.join(sorted(SUFFIXES))}."
            + (f" There are {counted(others)}." if others else "")
        )
    return sorted(str(Path(path)) for path in found)


def closed(error: OSError) -> ImageError:
    """The error for a folder that cannot be looked into."""
    return ImageError(f"Cannot look into the folder {shown(str(error.filename))}: {error.strerror}.")


def _matching(pattern: str, skipped: Counter[str]) -> list[str]:
    """The files that a pattern matches, and links to nothing, which are said to be broken; pipes are counted."""
    found = []
    try:
        for path in glob.iglob(pattern, recursive=True):
            if os.path.isfile(path) or not os.path.exists(path):
                found.append(path)
    except OSError as error:
        raise closed(error) from error
    if not found:
        raise ImageError(f"No file matches {pattern}.")
    return sorted(found)


def _check_found(paths: Sequence[str]) -> None:
    """Says what is missing before a model is fetched for nothing."""
    if not paths:
        raise ImageError("There are no pictures: the list is empty.")
    if not any(os.path.exists(path) for path in paths):
        from vitlite.images.decode import no_such_file  # here, as SUFFIXES above

        raise no_such_file(paths[0])
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise missing_extra("Opening pictures", "images") from error


def identity_of(model: "ViT", *, dtype: str | None, fast: bool) -> dict[str, Any]:
    """All that decides the numbers of a vector, as JSON takes it.

    Args:
        model: What the vectors come from.
        dtype: What it computes in, if not what it is stored in.
        fast: Whether it is optimized.
    """
    from vitlite.checkpoints.fingerprint import hash_of_weights
    from vitlite.images.transform import transform_to_save

    transform = transform_to_save(model)
    own = str(model.dtype).removeprefix("torch.")
    identity = {
        "weights": hash_of_weights(model),
        "config": model.config.to_dict(),
        "preprocessing": transform.to_dict() if transform else None,
        "dtype": dtype or (None if own == "float32" else own),
        "fast": fast,
    }
    if getattr(model.preprocess, "quick_decode", False):
        identity["quick_decode"] = True
    return identity


def embed_into(
    journal: Journal, model: "ViT", pictures: Sequence[Picture], batch: int, timings: "Timings | None" = None
) -> "Outcomes[Tensor]":
    """Puts the vectors of pictures into a journal, batch by batch.

    Args:
        journal: Where they go, and the paths that give none.
        model: What makes them.
        pictures: Those that the journal does not have yet: `journal.missing(...)`.
        batch: Pictures at a time.
        timings: Where to count what takes how long.

    Returns:
        A generator of each path with its vector or its error; what is not asked for is not done.
    """
    tried = journal.tried
    new = [picture for picture in pictures if picture.path not in tried]
    again = [picture for picture in pictures if picture.path in tried]
    yield from _embed_part(journal, model, new, batch, timings)  # apart, so that the batches are those of one run
    yield from _embed_part(journal, model, again, batch, timings)


def _embed_part(
    journal: Journal, model: "ViT", pictures: Sequence[Picture], batch: int, timings: "Timings | None"
) -> "Outcomes[Tensor]":
    from vitlite.inference.predict import embed

    by_path = {picture.path: picture for picture in pictures}
    with closing(embed(model, list(by_path), batch, timings)) as outcomes:
        while found := list(islice(outcomes, batch)):
            yield from found
            _add(journal, by_path, found)


def _add(journal: Journal, by_path: dict[str, Picture], found: "Sequence[tuple[str, Tensor | ImageError]]") -> None:
    """Adds a batch to the journal: the vectors, and the paths that gave an error."""
    good, vectors, broken = [], [], []
    for path, outcome in found:
        if isinstance(outcome, ImageError):
            broken.append(path)
        else:
            good.append(by_path[path])
            vectors.append(struct.pack(f"<{len(outcome)}f", *outcome.tolist()))
    journal.add(good, b"".join(vectors), broken)
