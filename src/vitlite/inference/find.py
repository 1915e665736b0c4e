"""Find image files below folders."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator


def folders_below(folder: str, *, hidden: bool = True) -> Iterator[str]:
    """Yield a folder and all folders below it. Links are followed, except those that lead back to a parent.

    Args:
        folder: Where to begin.
        hidden: If True, include folders whose names begin with a dot.

    Raises:
        OSError: A folder cannot be read.
    """
    waiting: list[tuple[str, tuple[str, ...]]] = [(folder, ())]  # each with the real paths of its parents
    while waiting:
        path, parents = waiting.pop()
        here = os.path.realpath(path)
        if here in parents:
            continue
        yield path
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if entry.is_dir() and (hidden or not entry.name.startswith("."))]
        waiting += [(os.path.join(path, name), (*parents, here)) for name in reversed(names)]


def files_below(folder: str, *, hidden: bool = True) -> Iterator[str]:
    """Yield the paths of all files below a folder, in the order of `folders_below`.

    Args:
        folder: Where to begin.
        hidden: If True, include files and folders whose names begin with a dot.

    Raises:
        OSError: A folder cannot be read.
    """
    for each in folders_below(folder, hidden=hidden):
        with os.scandir(each) as entries:
            found = [entry for entry in entries if entry.is_file() or _is_broken_link(entry)]
        yield from (entry.path for entry in found if hidden or not entry.name.startswith("."))


def by_ending(files: Iterable[str], endings: Collection[str]) -> tuple[list[str], Counter[str]]:
    """Return the files with one of these endings in any case, and the number of other files for each other ending.

    Hidden files with another ending are not counted.
    """
    found, others = [], Counter[str]()
    for path in files:
        name = os.path.basename(path)
        ending = os.path.splitext(name)[1].lower()
        if ending in endings:
            found.append(path)
        elif not name.startswith("."):
            others[ending] += 1
    return found, others


def _is_broken_link(entry: "os.DirEntry[str]") -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)
