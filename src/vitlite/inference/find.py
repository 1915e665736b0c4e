"""Find image files from paths, folders, patterns and lists of file names."""

import glob
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from vitlite.errors import ImageError, counted, missing_extra


def find_images(
    sources: Sequence[str], listing: Iterable[str] = (), on_skip: Callable[[Counter[str]], None] = lambda skipped: None
) -> list[str]:
    """Return the paths of image files, without duplicates.

    Args:
        sources: Where to look. Each source is a file, a folder that is searched for image files, a pattern such as
            'photos/**/*.jpg', or '-' for the files in `listing`.
        listing: Lines with one file name each, such as standard input.
        on_skip: A function that is called with the number of files in the folders that are not images, by extension, if
            there are any.

    Raises:
        ImageError: There are no images, none of the files exists, or a folder cannot be read.
        MissingExtraError: Pillow is not installed.
    """
    found: list[str] = []
    skipped: Counter[str] = Counter()
    for source in sources:
        if source == "-":
            found += read_listing(listing)
        elif os.path.isdir(source):
            found += _in_folder(source, skipped)
        elif glob.has_magic(source) and not os.path.exists(source):
            matches = sorted(path for path in glob.glob(source, recursive=True) if not os.path.isdir(path))
            if not matches:
                raise ImageError(f"No file matches {source}. Check the pattern and the current folder.")
            found += matches
        else:
            found.append(source)
    found = list(dict.fromkeys(found))
    if not found:
        raise ImageError(
            "The list of images is empty. Pass at least one file or folder, or a list with one file name per line."
        )
    if not any(map(os.path.exists, found)):
        from vitlite.images.decode import missing_image_error  # imports torch, which `--help` does not need

        raise missing_image_error(found[0])
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise missing_extra("Opening image files", "images") from error
    if skipped:
        on_skip(skipped)
    return found


def read_listing(lines: Iterable[str]) -> list[str]:
    """Return the file names from lines with one name each. Blank lines and a byte order mark are skipped."""
    return [line.rstrip("\r\n").removeprefix("\ufeff") for line in lines if line.strip()]


def _in_folder(folder: str, skipped: Counter[str]) -> list[str]:
    """Return the image files below a folder. Add the other visible files to the counts in `skipped`, by extension."""
    from vitlite.images.decode import SUFFIXES  # here, because it imports torch

    try:
        found, others = by_ending(files_below(folder), SUFFIXES)
    except OSError as error:
        raise ImageError(
            f"Cannot read the folder {error.filename}: {error.strerror}. Check its path and permissions."
        ) from error
    if not found:
        there = f", only {counted(others)}" if others else ""
        raise ImageError(
            f"No images found in the folder {folder}{there}. Choose another folder, or convert the files to one of "
            f"these formats: {' '.join(sorted(SUFFIXES))}."
        )
    skipped.update(others)
    return sorted(map(os.path.normpath, found))


def folders_below(folder: str, *, hidden: bool = True) -> Iterator[str]:
    """Yield a folder and all folders below it. Symbolic links are followed, except links to a parent folder.

    Args:
        folder: The folder to start from.
        hidden: If True, include folders whose names begin with a dot; otherwise, skip them.

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
        folder: The folder to start from.
        hidden: If True, include files and folders whose names begin with a dot; otherwise, skip them.

    Raises:
        OSError: A folder cannot be read.
    """
    for each in folders_below(folder, hidden=hidden):
        with os.scandir(each) as entries:
            found = [entry for entry in entries if entry.is_file() or _is_broken_link(entry)]
        yield from (entry.path for entry in found if hidden or not entry.name.startswith("."))


def by_ending(files: Iterable[str], endings: Collection[str]) -> tuple[list[str], Counter[str]]:
    """Return the files with the given extensions, and the number of other files by extension.

    Extensions are compared without regard to case. Other files are not counted if they are hidden. Files such as
    ._IMG.jpg, in which macOS keeps the attributes of IMG.jpg, are ignored.

    Args:
        files: The paths of the files.
        endings: The extensions in lower case, such as ".jpg".
    """
    found, others = [], Counter[str]()
    for path in files:
        name = os.path.basename(path)
        if name.startswith("._"):
            continue
        ending = os.path.splitext(name)[1].lower()
        if ending in endings:
            found.append(path)
        elif not name.startswith("."):
            others[ending] += 1
    return found, others


def _is_broken_link(entry: "os.DirEntry[str]") -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)
