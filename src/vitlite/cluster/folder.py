"""The folder that a job on Ray writes: Parquet files that bear its mark, and nothing else.

The mark is a file that is written first. It says what decides the numbers, and how all other files are named, so that
what another program put there is never taken for a torn file of ours. In a folder with anything else, nothing is done.
"""

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitlite import schema
from vitlite.errors import InputError, shown
from vitlite.storage import lock

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem

MARK = "_vitlite.json"  # what begins so is no data to those who read a folder of Parquet
MARK_BEGUN = "_vitlite.json.partial"  # the same before it was whole
LOCK = "_vitlite.lock"
READERS = 16  # files that are read at once, since storage over a network answers late rather than slowly
MARKED = schema.table(
    {
        "written by": schema.one_of("vitlite"),
        "files": schema.text(80),
        "identity": schema.by_name(schema.anything, most=100),
    },
    required=("written by", "files", "identity"),
)
FILES = re.compile(r"vitlite-[0-9a-f]{16}")  # how the names of files begin


class Output(NamedTuple):
    """A folder that belongs to one command.

    Attributes:
        files: Where it is.
        folder: What they call it.
        prefix: How the names of its files begin; no two folders have the same.
        schema: Their columns, and what decided the numbers.
        done: The paths of pictures that are in there.
    """

    files: "FileSystem"
    folder: str
    prefix: str
    schema: "pa.Schema"
    done: "pa.Array"


@contextmanager
def claimed(files: "FileSystem", folder: str, columns: "pa.Schema", identity: dict[str, Any]) -> Iterator[Output]:
    """The folder, new or as an earlier run of the same command left it, and the right to write there.

    A file that a killed job left unfinished is removed, where no other process can be writing it.

    Args:
        files: Where the folder is.
        folder: What they call it.
        columns: Of every file in it.
        identity: What decides the numbers: the weights' hash, config, preprocessing, precision.

    Raises:
        InputError: There is something else in it, it was written with other weights or options, or another process is
            writing it.
    """
    from pyarrow.fs import LocalFileSystem

    identity = json.loads(json.dumps(identity))  # as it is read again
    found = _found(files, folder)
    _refuse_others(folder, found)  # before a lock is put there
    local = isinstance(files, LocalFileSystem)
    try:
        files.create_dir(folder, recursive=True)
    except OSError as error:
        raise _refused(f"{shown(folder)} cannot be made: {shown(str(error))}.") from error
    with _one_process(folder) if local else _nothing():
        prefix = _mark(files, folder, identity)
        written = columns.with_metadata({"vitlite": json.dumps(identity, sort_keys=True)})
        yield Output(files, folder, prefix, written, _done(files, folder, prefix, written, local))


@contextmanager
def _one_process(folder: str) -> Iterator[None]:
    lock_file = Path(folder, LOCK)
    with ExitStack() as held:
        try:
            held.enter_context(lock(lock_file, timeout=0))
        except TimeoutError as error:
            raise _refused(
                f"{shown(folder)}: another process is writing it. Wait for it. If there is none, delete "
                f"{shown(str(lock_file))}."
            ) from error
        except OSError as error:
            raise _refused(f"{shown(str(lock_file))} cannot be used as a lock: {error.strerror}.") from error
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    """Storage over a network has no locks."""
    yield


def _found(files: "FileSystem", folder: str) -> list[str]:
    """The names of all that is in the folder, hidden or not; nothing where there is no such folder yet."""
    from pyarrow.fs import FileSelector, FileType

    if files.get_file_info(folder).type == FileType.File:
        raise _refused(f"{shown(folder)} is a file.")
    return sorted(info.base_name for info in files.get_file_info(FileSelector(folder, allow_not_found=True)))


def _refuse_others(folder: str, found: Sequence[str]) -> None:
    """Makes sure that a folder is new, empty, or marked.

    Raises:
        InputError: It has no mark, and something in it.
    """
    others = [name for name in found if name not in (LOCK, MARK_BEGUN)]
    if others and MARK not in others:
        raise _refused(f"{shown(folder)} holds {shown(others[0])}, which this command did not write.")


def _refused(text: str) -> InputError:
    return InputError(text, python="Choose a folder that is new.", command="Choose an --out that is new.")


def _mark(files: "FileSystem", folder: str, identity: dict[str, Any]) -> str:
    """Marks a new folder, or reads the mark of an old one; how the names of files begin there.

    Raises:
        InputError: The mark is another command's, or there is something in the folder that it does not name.
    """
    found = _found(files, folder)
    _refuse_others(folder, found)
    if MARK not in found:
        prefix = f"vitlite-{secrets.token_hex(8)}"
        content = {"written by": "vitlite", "files": prefix, "identity": identity}
        with files.open_output_stream(f"{folder}/{MARK_BEGUN}", compression=None) as file:
            file.write(json.dumps(content, indent=2).encode())
        files.move(f"{folder}/{MARK_BEGUN}", f"{folder}/{MARK}")
        return prefix
    prefix = _prefix_in_mark(files, f"{folder}/{MARK}", identity)
    for name in found:
        ours = name in (MARK, MARK_BEGUN, LOCK) or (name.startswith(f"{prefix}_") and name.endswith(".parquet"))
        if not ours:
            raise _refused(f"{shown(folder)} holds {shown(name)}, which this command did not write.")
    return prefix


def _prefix_in_mark(files: "FileSystem", path: str, identity: dict[str, Any]) -> str:
    with files.open_input_stream(path, compression=None) as file:
        content = file.read(schema.MOST_BYTES + 1)
    mark = schema.parse_json(content, MARKED, path, error=InputError)
    if not FILES.fullmatch(mark["files"]):
        raise InputError(f"{shown(path)}: files must be vitlite- and 16 digits, got {shown(mark['files'])}.")
    if mark["identity"] != identity:
        raise _other_command(path)
    return str(mark["files"])


def _other_command(path: str) -> InputError:
    return InputError(
        f"{shown(path)} was not written by this command with these weights and options.",
        python="Choose another folder.",
        command="Choose another --out.",
    )


def _done(files: "FileSystem", folder: str, prefix: str, written: "pa.Schema", local: bool) -> "pa.Array":
    """The paths in the folder's whole files."""
    import pyarrow as pa

    ours = [f"{folder}/{name}" for name in _found(files, folder) if name.startswith(f"{prefix}_")]
    with ThreadPoolExecutor(READERS) as readers:
        columns = list(readers.map(partial(_paths_written, files, written, local), ours))
    chunks = []
    for column in columns:
        chunks += column.chunks
    return pa.chunked_array(chunks, pa.string()).combine_chunks()


def _paths_written(files: "FileSystem", written: "pa.Schema", local: bool, path: str) -> "pa.ChunkedArray":
    """The column `path` of a file of ours; empty where it was not finished, and then it is removed."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with files.open_input_file(path) as file:
            opened = parquet.ParquetFile(file)
            if not opened.schema_arrow.equals(written, check_metadata=False) or _identity(opened) != _identity(written):
                raise _other_command(path)
            return opened.read(columns=["path"])["path"]
    except pa.ArrowInvalid as error:  # Parquet is complete only with its last bytes
        if not local:
            raise InputError(
                f"{shown(path)} is cut short: its job was killed, or still writes it. Wait for it, or delete it."
            ) from error
    files.delete_file(path)  # our name, in our folder, and nobody else has the lock
    return pa.chunked_array([], pa.string())


def _identity(of: Any) -> bytes | None:
    """What decided the numbers of a Parquet file or schema."""
    columns = getattr(of, "schema_arrow", of)
    return (columns.metadata or {}).get(b"vitlite")


def count(output: Output, *, distinct: bool) -> tuple[int, int]:
    """How many pictures the folder has, and how many of them have an error; `distinct` if each was wanted once.

    Raises:
        InputError: It has some of them twice.
    """
    import pyarrow.compute as pc
    from pyarrow import dataset

    rows = dataset.dataset(output.folder, filesystem=output.files, format="parquet")
    pictures = rows.count_rows()
    if distinct and pc.count_distinct(rows.to_table(columns=["path"])["path"]).as_py() != pictures:
        raise _refused(f"{shown(output.folder)} has some pictures twice: two processes wrote it at once.")
    return pictures, rows.count_rows(filter=~dataset.field("error").is_null())
