"""The output folder of a Ray job, with Parquet files of results and a file `_vitlite.json` that identifies the job."""

import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitlite.errors import InputError
from vitlite.storage import lock

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem

MARK = "_vitlite.json"  # readers of Parquet folders skip names that begin with an underscore
MARK_BEGUN = "_vitlite.json.partial"
LOCK = "_vitlite.lock"
READERS = 16  # number of files read in parallel, because network storage has a high latency


class Output(NamedTuple):
    """The output folder of one job.

    Attributes:
        files: The file system of the folder.
        folder: The path of the folder in that file system.
        prefix: The random prefix of the names of the job's files.
        schema: The names and types of the columns, with the identity of the job as metadata.
        done: The paths of the images whose results are already in the folder.
    """

    files: "FileSystem"
    folder: str
    prefix: str
    schema: "pa.Schema"
    done: "pa.Array"


@contextmanager
def open_output(files: "FileSystem", folder: str, columns: "pa.Schema", identity: dict[str, Any]) -> Iterator[Output]:
    """Open a new output folder, or the folder of an earlier run of the same job.

    On a local disk, the folder is locked against other processes, and incomplete files of a killed run are deleted.

    Args:
        files: The file system of the folder.
        folder: The path of the folder in that file system.
        columns: The names and types of the columns of the output.
        identity: The model and the options that determine the results, as values that can be written as JSON.

    Raises:
        InputError: The folder contains files of other programs or results of another job, another process is writing
            to the folder, or the folder cannot be created.
    """
    from pyarrow.fs import LocalFileSystem

    identity = json.loads(json.dumps(identity))
    local = isinstance(files, LocalFileSystem)
    _is_marked(files, folder)  # before the lock file is created
    try:
        files.create_dir(folder, recursive=True)
    except OSError as error:
        raise InputError(f"Cannot create the folder {folder}: {error}. Choose another out= (--out).") from error
    with _locked(folder) if local else nullcontext():  # network storage has no locks
        prefix = _prefix(files, folder, identity)
        schema = columns.with_metadata({"vitlite": json.dumps(identity, sort_keys=True)})
        done = _paths_done(files, own_files(files, folder, prefix), local)
        yield Output(files, folder, prefix, schema, done)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    try:
        with lock(Path(folder, LOCK), timeout=0):
            yield
    except TimeoutError as error:
        raise InputError(
            f"Another process is writing to {folder}. Wait until it finishes, or choose another out= (--out)."
        ) from error


def _names(files: "FileSystem", folder: str) -> list[str]:
    from pyarrow.fs import FileSelector, FileType

    if files.get_file_info(folder).type == FileType.File:
        raise InputError(f"The output folder {folder} is a file. Choose another out= (--out).")
    return sorted(info.base_name for info in files.get_file_info(FileSelector(folder, allow_not_found=True)))


def _is_marked(files: "FileSystem", folder: str) -> bool:
    """Return True if the folder is the output folder of a job, and False if it is new or empty.

    Raises:
        InputError: The folder contains files, but no file `_vitlite.json` of a job.
    """
    names = [name for name in _names(files, folder) if name not in (LOCK, MARK_BEGUN)]
    if names and MARK not in names:
        raise InputError(
            f"The output folder {folder} contains files that vitlite did not write, such as {names[0]}. Choose a new "
            "or empty folder as out= (--out)."
        )
    return bool(names)


def _prefix(files: "FileSystem", folder: str, identity: dict[str, Any]) -> str:
    """Return the prefix of a job's file names. In a new folder, create `_vitlite.json` with a new prefix.

    Raises:
        InputError: `_vitlite.json` is damaged or belongs to another job.
    """
    path = f"{folder}/{MARK}"
    if not _is_marked(files, folder):
        prefix = f"vitlite-{secrets.token_hex(8)}"
        with files.open_output_stream(f"{folder}/{MARK_BEGUN}", compression=None) as file:
            file.write(json.dumps({"prefix": prefix, "identity": identity}, indent=2).encode())
        files.move(f"{folder}/{MARK_BEGUN}", path)
        return prefix
    with files.open_input_stream(path, compression=None) as file:
        content = file.read()
    try:
        mark = json.loads(content)
        prefix, found = str(mark["prefix"]), mark["identity"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"Cannot resume the job, because {path} is damaged. Choose another out= (--out).") from error
    if found != identity:
        raise InputError(
            f"Cannot resume the job in {folder}, because it was started with another model or other options. Use the "
            "same model and options, or choose another out= (--out)."
        )
    return prefix


def own_files(files: "FileSystem", folder: str, prefix: str) -> list[str]:
    """Return the paths of the Parquet files that a job has written to a folder, by the prefix of their names."""
    return [f"{folder}/{name}" for name in _names(files, folder) if name.startswith(f"{prefix}_")]


def _paths_done(files: "FileSystem", paths: list[str], local: bool) -> "pa.Array":
    """Return the values of the column `path` in all Parquet files of a job."""
    import pyarrow as pa

    with ThreadPoolExecutor(READERS) as readers:
        columns = list(readers.map(partial(_paths_in, files, local), paths))
    chunks = [chunk for column in columns for chunk in column.chunks]
    return pa.chunked_array(chunks, pa.string()).combine_chunks()


def _paths_in(files: "FileSystem", local: bool, path: str) -> "pa.ChunkedArray":
    """Return the column `path` of a Parquet file.

    If the file is incomplete and on a local disk, delete it and return no paths.

    Raises:
        InputError: The file is incomplete and not on a local disk, so another job may still be writing it.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with files.open_input_file(path) as file:
            return parquet.read_table(file, columns=["path"])["path"]
    except pa.ArrowInvalid as error:  # raised for a truncated file, which has no footer
        if not local:
            raise InputError(
                f"{path} is incomplete, because a job is still writing it or was killed. Wait until that job "
                "finishes, or delete the file."
            ) from error
    files.delete_file(path)
    return pa.chunked_array([], pa.string())
