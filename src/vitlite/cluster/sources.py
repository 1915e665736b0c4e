"""Find the input images of a Ray job in a folder, a text file of paths, or Parquet files, on disk or at a URL."""

import io
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from vitlite.cluster.folder import READERS
from vitlite.errors import ImageError, InputError
from vitlite.images.decode import SUFFIXES
from vitlite.inference.find import by_ending, files_below, read_listing

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem
    from ray.data import Dataset


class Source(NamedTuple):
    """The input images of a job.

    Attributes:
        name: The path or URL in which the images were found.
        paths: The paths of the images, without duplicates. None if the images themselves are in Parquet files.
        skipped: The number of files in the folder that are not images, by extension.
    """

    name: str
    paths: "pa.Array | None"
    skipped: Counter[str]


def find_source(name: str) -> Source:
    """Find the input images of a job.

    Args:
        name: The path or URL of a folder of images, an image, a text file with one path per line, a Parquet file, or a
            folder of Parquet files.

    Raises:
        ImageError: The file or folder does not exist, or contains no images.
        InputError: The Parquet files cannot be read or have rows without a path, or the URL scheme is not supported.
    """
    from pyarrow.fs import FileType

    name = name.rstrip("/") or name
    files, place = locate(name)
    kind = files.get_file_info(place).type
    if kind == FileType.NotFound:
        raise ImageError(f"There is no file or folder {name}. Check the path or URL.")
    is_folder = kind == FileType.Directory
    inside = _files_below(files, place) if is_folder else [place]
    images, skipped = by_ending(inside, SUFFIXES)
    if images:
        root = name if "://" in name else place
        return Source(name, _unique([root + path.removeprefix(place) for path in images]), skipped)
    if any(path.endswith(".parquet") for path in inside):
        return _parquet_source(name, files, place)
    if is_folder:
        raise _no_images(name)
    with files.open_input_stream(place, compression=None) as file:
        content = file.read()
    if b"\0" in content:
        raise ImageError(
            f"{name} is not a list of images, because it contains binary data. Pass a text file with one path per "
            "line. If the file is an image or a Parquet file, add the extension to its name."
        )
    lines = io.StringIO(content.decode(errors="surrogateescape"), newline=None)
    paths = read_listing(lines)
    if not paths:
        raise _no_images(name)
    return Source(name, _unique(paths), Counter())


def _no_images(name: str) -> ImageError:
    return ImageError(
        f"No images found in {name}. Pass a folder of images ({' '.join(sorted(SUFFIXES))}), a text file with one path "
        "per line, or Parquet files."
    )


def _parquet_source(name: str, files: "FileSystem", place: str) -> Source:
    """Return the images in Parquet files with a column `path` and, optionally, a column `bytes` with the image files.

    Raises:
        ImageError: The files have no rows.
        InputError: The files cannot be read, have no column `path`, or have rows without a path.
    """
    import pyarrow as pa
    from pyarrow import dataset

    try:
        rows = dataset.dataset(place, filesystem=files, format="parquet")
        columns = rows.schema.names
        if "path" not in columns:
            raise InputError(
                f"{name} has the columns {', '.join(columns)}, but none named path. Rename the column of image "
                "paths to path. A column with the contents of the image files must be named bytes."
            )
        without_path = rows.count_rows(filter=dataset.field("path").is_null())
        if without_path:
            raise InputError(
                f"{name} has {without_path} row{'s' * (without_path != 1)} without a path. Remove all rows in "
                "which the column path is null."
            )
        if rows.count_rows() == 0:
            raise _no_images(name)
        if "bytes" in columns:
            return Source(name, None, Counter())
        paths = rows.to_table(columns=["path"])["path"].cast(pa.string()).to_pylist()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(
            f"Cannot read {name} as Parquet: {error}. Check its permissions, and create it again if it is damaged."
        ) from error
    return Source(name, _unique(paths), Counter())


def _files_below(files: "FileSystem", folder: str) -> list[str]:
    from pyarrow.fs import FileSelector, LocalFileSystem

    if not isinstance(files, LocalFileSystem):
        below = files.get_file_info(FileSelector(folder, recursive=True))
        return sorted(file.path for file in below if file.is_file)
    try:
        return sorted(files_below(folder))
    except OSError as error:
        raise ImageError(
            f"Cannot read the folder {error.filename}: {error.strerror}. Check its path and permissions."
        ) from error


def _unique(paths: Sequence[str]) -> "pa.Array":
    """Return absolute paths without duplicates. Actors run in other folders, where relative paths would be wrong.

    Raises:
        InputError: A path is not valid Unicode.
    """
    import pyarrow as pa

    absolute = [path if "://" in path else os.path.abspath(path) for path in paths]
    try:
        return pa.chunked_array([absolute], pa.string()).unique()
    except UnicodeEncodeError as error:
        raise InputError(
            f"The path {error.object} is not valid Unicode, which Ray and Parquet need. Rename the file, or use "
            "--engine local."
        ) from error


def remaining(source: Source, done: "pa.Array", unit: int) -> "tuple[Dataset | None, int]":
    """Return a Ray dataset of the images that are not done yet, and the maximum number of units of work.

    Args:
        source: All input images of the job.
        done: The paths of the images that are done.
        unit: The number of images in a unit of work.

    Returns:
        The dataset, or None if all images are done, and the number of units.
    """
    import pyarrow as pa
    import ray.data

    if source.paths is None:
        return _remaining_in_parquet(source.name, done, unit)
    table = _without(pa.table({"path": source.paths}), done)
    units = [table.slice(start, unit) for start in range(0, len(table), unit)]
    return ray.data.from_arrow(units) if units else None, len(units)


def _without(table: "pa.Table", done: "pa.Array") -> "pa.Table":
    import pyarrow.compute as pc

    return table.filter(pc.invert(pc.is_in(table["path"], value_set=done)))


def _remaining_in_parquet(name: str, done: "pa.Array", unit: int) -> "tuple[Dataset, int]":
    """Return a Ray dataset of the images in Parquet files that are not done yet, and the maximum number of units.

    The files contain the images themselves. Each task reads one row group. The tasks reserve no core, because the
    actors occupy all cores. `ray.data.read_parquet` is not used, because it would need a core to list the files.
    """
    import pyarrow as pa
    import ray.data

    files, place = locate(name)
    groups = _row_groups(files, place)
    done_ref = ray.put(done)

    def read(tasks: pa.Table) -> Iterator[pa.Table]:
        for task in tasks.to_pylist():
            for rows in read_row_group(files, task["file"], task["number"], unit):
                yield _without(rows, ray.get(done_ref))

    tasks = [pa.table({"file": [group.file], "number": [group.number]}) for group in groups]
    images = sum(group.rows for group in groups)
    rows = ray.data.from_arrow(tasks).map_batches(read, batch_format="pyarrow", batch_size=None, num_cpus=0)
    return rows, math.ceil(images / unit)


class _RowGroup(NamedTuple):
    """A row group of a Parquet file, which can be read separately, and the number of its rows."""

    file: str
    number: int
    rows: int


def _row_groups(files: "FileSystem", place: str) -> list[_RowGroup]:
    from pyarrow import dataset

    def row_groups_of(fragment: Any) -> list[_RowGroup]:
        return [_RowGroup(fragment.path, number, group.num_rows) for number, group in enumerate(fragment.row_groups)]

    fragments = dataset.dataset(place, filesystem=files, format="parquet").get_fragments()
    with ThreadPoolExecutor(READERS) as readers:
        return list(chain.from_iterable(readers.map(row_groups_of, fragments)))


def read_row_group(files: "FileSystem", path: str, number: int, unit: int) -> "Iterator[pa.Table]":
    """Yield the columns `path` and `bytes` of a row group of a Parquet file, at most `unit` rows at a time."""
    import pyarrow as pa
    from pyarrow import parquet

    with files.open_input_file(path) as file:
        for rows in parquet.ParquetFile(file).iter_batches(unit, row_groups=[number], columns=["path", "bytes"]):
            table = pa.Table.from_batches([rows])
            yield table.set_column(0, "path", table["path"].cast(pa.string()))  # the type of the paths in `done`


def locate(path: str) -> tuple["FileSystem", str]:
    """Return the file system of a path or URL, and the location in this file system.

    Raises:
        InputError: pyarrow does not support the scheme of the URL.
    """
    from pyarrow.fs import LocalFileSystem

    scheme, separator, location = path.partition("://")
    if not separator:
        return LocalFileSystem(), os.path.abspath(path)
    host, _, inside = location.partition("/")
    files, root = _file_system(f"{scheme}://{host}/")
    return files, f"{root.rstrip('/')}/{inside}"


@lru_cache(maxsize=64)
def _file_system(url: str) -> tuple["FileSystem", str]:
    import pyarrow as pa
    from pyarrow.fs import FileSystem

    try:
        return FileSystem.from_uri(url)
    except pa.ArrowException as error:
        raise InputError(
            f"Cannot open {url}: {error}. Use a path, or a URL that begins with file, s3, gs, abfs or hdfs."
        ) from error
