"""What a job on Ray works through: pictures in a folder, a list or Parquet, on a disk or at a URL; and what is left."""

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
from vitlite.errors import ImageError, InputError, shown
from vitlite.images.decode import SUFFIXES
from vitlite.inference.embed import closed, listed
from vitlite.inference.find import by_ending, files_below

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem
    from ray.data import Dataset

TEXT = ("string", "large_string", "string_view")  # Arrow's types that paths have, encoded in dictionaries or not
CONTENT = ("binary", "large_binary", "binary_view")  # and pictures


class Source(NamedTuple):
    """Pictures to work through.

    Attributes:
        name: The folder, list or Parquet that they are in.
        paths: Theirs, each once; None for Parquet that holds their bytes, which is read where it is needed.
        skipped: How many files of which ending a folder has beside pictures.
    """

    name: str
    paths: "pa.Array | None"
    skipped: Counter[str]


def find_pictures(name: str) -> Source:
    """The pictures that a folder, a list or Parquet means, also one with a URL.

    Raises:
        ImageError: There is nothing of this name, or no picture in it.
        InputError: Parquet that cannot be read, or without a path for each row; a name that is no Unicode, or a URL of
            an unknown kind.
    """
    from pyarrow.fs import FileType

    name = name.rstrip("/") or name
    if not name or "\0" in name:  # the first would be the current folder, the second pyarrow refuses to look for
        raise ImageError(f"No such folder, list or Parquet file: {shown(name) or 'the name is empty'}")
    files, place = locate(name)
    kind = files.get_file_info(place).type
    if kind == FileType.NotFound:
        raise ImageError(f"No such folder, list or Parquet file: {name}")
    is_folder = kind == FileType.Directory
    inside = _files_below(files, place) if is_folder else [place]
    pictures, skipped = by_ending(inside, SUFFIXES)
    if pictures:
        return Source(name, _unique(_as_asked_for(pictures, name, place)), skipped)
    if any(file.endswith(".parquet") for file in inside):
        return _source_of_parquet(name, files, place)
    if is_folder:
        raise _no_pictures(name)
    return _source_of_list(name, files, place)


def _no_pictures(name: str) -> ImageError:
    return ImageError(f"No pictures in {name}. In folders, names end in {' '.join(sorted(SUFFIXES))}.")


def _source_of_parquet(name: str, files: "FileSystem", place: str) -> Source:
    """Paths in a column, or the pictures themselves in another beside it."""
    import pyarrow as pa
    from pyarrow import dataset

    try:
        rows = dataset.dataset(place, filesystem=files, format="parquet")
        _check_columns(name, rows)
        if "bytes" in rows.schema.names and rows.count_rows() > 0:
            return Source(name, None, Counter())
        paths = rows.to_table(columns=["path"])["path"].to_pylist()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{shown(name, 1000)} cannot be read as Parquet: {shown(str(error))}") from error
    if not paths:
        raise _no_pictures(name)
    return Source(name, _unique(paths), Counter())


def _check_columns(name: str, rows: "Dataset") -> None:
    """Makes sure that each row has a path, and that pictures, where there are some, are bytes.

    Raises:
        InputError: There are no such columns.
    """
    from pyarrow import dataset

    columns = rows.schema.names
    if "path" not in columns:
        raise InputError(f"{name} needs a column path, and bytes if it holds the pictures: {columns}.")
    for column, kinds in (("path", TEXT), ("bytes", CONTENT)):
        if column in columns:
            check_kind(column, rows.schema.field(column).type, kinds)
    nameless = rows.count_rows(filter=dataset.field("path").is_null())
    if nameless:
        raise InputError(
            f"{shown(name, 1000)} has rows without a path: {nameless} of {rows.count_rows()}.",
            python="Leave them out, and files without a column path.",
        )


def check_kind(column: str, kind: "pa.DataType", kinds: Sequence[str]) -> None:
    """Makes sure that a column is of one of these types.

    Raises:
        InputError: It is of another.
    """
    if str(getattr(kind, "value_type", kind)) not in kinds:  # a dictionary says what it is of
        raise InputError(f"The column {column} must be of the type {kinds[0]}, got {kind}.")


def _source_of_list(name: str, files: "FileSystem", place: str) -> Source:
    """A path a line, in UTF-8."""
    with files.open_input_stream(place, compression=None) as file:
        content = file.read()
    if b"\0" in content:
        raise ImageError(f"{name} is no list of pictures, a path a line, and no picture by its name.")
    with io.TextIOWrapper(io.BytesIO(content), "utf-8", "surrogateescape") as lines:
        paths = listed(lines)  # as from standard input: names may have in them what `str.splitlines` ends a line at
    if not paths:
        raise _no_pictures(name)
    return Source(name, _unique(paths), Counter())


def _files_below(files: "FileSystem", folder: str) -> list[str]:
    """The files below a folder, sorted. On this disk, links are followed as always.

    Raises:
        ImageError: A folder cannot be looked into.
    """
    from pyarrow.fs import FileSelector, LocalFileSystem

    if not isinstance(files, LocalFileSystem):
        below = files.get_file_info(FileSelector(folder, recursive=True))
        return sorted(file.path for file in below if file.is_file)
    try:
        return sorted(files_below(folder))
    except OSError as error:
        raise closed(error) from error


def _as_asked_for(paths: Sequence[str], name: str, place: str) -> list[str]:
    """Paths under the name of the place that was asked for: a URL stays one."""
    root = name if "://" in name else place
    return [root + path.removeprefix(place) for path in paths]


def _unique(paths: Sequence[str]) -> "pa.Array":
    """Each path once, and absolute, since the cluster works elsewhere.

    Raises:
        InputError: A name is no Unicode.
    """
    import pyarrow as pa

    absolute = [path if "://" in path else os.path.abspath(path) for path in paths]
    try:
        return pa.chunked_array([absolute], pa.string()).unique()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{shown(error.object, 1000)} is a name that is no Unicode, and paths go to Ray and into Parquet as text.",
            python="Rename it.",
            command="Rename it, or leave out --engine ray.",
        ) from error


def remaining(source: Source, done: "pa.Array", unit: int) -> "tuple[Dataset | None, int]":
    """What is left to do as a dataset, if anything; and at most how many units, of so many pictures, that is."""
    import pyarrow as pa
    import ray.data

    if source.paths is None:
        return _remaining_stored(source.name, done, unit)
    table = _without(pa.table({"path": source.paths}), done)
    units = [table.slice(start, unit) for start in range(0, len(table), unit)]
    return ray.data.from_arrow(units) if units else None, len(units)


def _without(table: "pa.Table", done: "pa.Array") -> "pa.Table":
    """The rows whose paths are not done."""
    import pyarrow.compute as pc

    return table.filter(pc.invert(pc.is_in(table["path"], value_set=done)))


def _remaining_stored(name: str, done: "pa.Array", unit: int) -> "tuple[Dataset, int]":
    """The same of Parquet that holds the pictures, read a row group a task.

    The tasks need no core, since the actors have all of them; `ray.data.read_parquet` lists its files in one that does.
    """
    import pyarrow as pa
    import ray.data

    files, place = locate(name)
    groups = _row_groups(files, place)
    held = ray.put(done)

    def read(tasks: pa.Table) -> Iterator[pa.Table]:
        for task in tasks.to_pylist():
            for rows in _read_row_group(files, task["file"], task["number"], unit):
                yield _without(rows, ray.get(held))

    tasks = [pa.table({"file": [group.file], "number": [group.number]}) for group in groups]
    pictures = sum(group.rows for group in groups)
    rows = ray.data.from_arrow(tasks).map_batches(read, batch_format="pyarrow", batch_size=None, num_cpus=0)
    return rows, math.ceil(pictures / unit)


class _RowGroup(NamedTuple):
    """A part of a Parquet file that can be read alone."""

    file: str
    number: int
    rows: int


def _row_groups(files: "FileSystem", place: str) -> list[_RowGroup]:
    """Those of all files there. The files' ends, which say so, are read at the same time."""
    from pyarrow import dataset

    fragments = dataset.dataset(place, filesystem=files, format="parquet").get_fragments()
    with ThreadPoolExecutor(READERS) as readers:
        return list(chain.from_iterable(readers.map(_row_groups_of, fragments)))


def _row_groups_of(fragment: Any) -> list[_RowGroup]:
    return [_RowGroup(fragment.path, number, group.num_rows) for number, group in enumerate(fragment.row_groups)]


def _read_row_group(files: "FileSystem", path: str, number: int, unit: int) -> "Iterator[pa.Table]":
    """Paths and pictures, a unit of work at a time."""
    import pyarrow as pa
    from pyarrow import parquet

    with files.open_input_file(path) as file:
        for rows in parquet.ParquetFile(file).iter_batches(unit, row_groups=[number], columns=["path", "bytes"]):
            table = pa.Table.from_batches([rows])
            yield table.set_column(0, "path", table["path"].cast(pa.string()))  # to compare with what is done


def locate(path: str) -> tuple["FileSystem", str]:
    """The file system of a path or URL, and what it calls the place.

    Raises:
        InputError: A URL of a kind that pyarrow does not know.
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
            f"{shown(url, 1000)} cannot be opened: {shown(str(error))}. URLs begin with file, s3, gs, abfs or hdfs.",
            python="Fetch what is elsewhere, and name the folder that it is in.",
        ) from error
