"""Vectors of many pictures as one file, of whatever kind, and the journal that an interrupted run leaves.

The journal holds one line for each batch, so that a killed run continues at a batch's edge and ends with the same
numbers. The files are written in one pass, whatever their size, and all but Parquet with the standard library.
"""

import base64
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from vitlite import schema
from vitlite.errors import InputError, missing_extra, shown
from vitlite.storage import PARTIAL, atomic_write, lock, obstacle, remove_leftovers

MOST_LINE = 2**28  # bytes of a line of the journal: 50,000 vectors of 1,024 numbers
MOST_NAMES = 99_000_000  # bytes in a .safetensors file: its whole header may have 100 million, says its library
ROW_GROUP = 2**14  # vectors of a Parquet file that are in memory together
ANY_NUMBER = schema.whole(-(2**63), 2**128)


def _is_path(value: Any) -> bool:
    """A name as the system gives it: of bytes that are no text, too, which Python keeps as lone surrogates."""
    return isinstance(value, str) and 0 < len(value) <= schema.LONGEST_TEXT and "\0" not in value


def _picture_parts(value: list[Any]) -> Iterator[schema.Part]:
    return zip(("[0]", "[1]", "[2]", "[3]", "[4]"), value, (PATH, *[ANY_NUMBER] * 4), strict=True)


PATH = schema.Check("the path of a picture", _is_path)
PICTURE = schema.Check(
    "a picture: its path, size, two times and number",
    lambda value: isinstance(value, list) and len(value) == 5,
    _picture_parts,
)
BATCH = schema.table(
    {"pictures": schema.several(PICTURE), "vectors": schema.text(MOST_LINE), "broken": schema.several(PATH)},
    required=("pictures", "vectors", "broken"),
)
IDENTITY = schema.by_name(schema.anything, most=100)
KERNELS = "choice of kernels"  # in an identity: what computes, in words
BEGINNING, CHECKSUM = b'{"pictures": ', b', "crc32": '  # of every line but the first; the second before its last number


def check_target(target: Path) -> Path:
    """Refuses, before any work is done, a file that could not be written at its end."""
    if target.suffix not in WRITERS:
        raise _refused(target, f": the name must end in one of {', '.join(WRITERS)}.")
    if target.suffix == ".parquet":
        need_pyarrow()
    in_the_way = obstacle(target)
    if in_the_way:
        raise _refused(target, f": {in_the_way}. Name a file in a folder that exists and can be written.")
    return target


def _journal_of(target: Path) -> Path:
    return target.with_name(target.name + PARTIAL)


def _lock_of(target: Path) -> Path:
    return target.with_name(target.name + ".lock")


def check_names(target: Path, paths: Sequence[str]) -> None:
    """Refuses, before any work is done, names that cannot be read again from the kind of file.

    Raises:
        InputError: They are too many for a .safetensors file, or one is no Unicode, and Parquet has text alone.
    """
    if target.suffix == ".parquet":
        _refuse_other_than_text(target, paths)
    if target.suffix == ".safetensors":
        _refuse_too_many(target, paths)


def _refuse_other_than_text(target: Path, paths: Sequence[str]) -> None:
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise _refused(
                target,
                f": {shown(path, 1000)} is a name that is no Unicode, and paths go into Parquet as text. Rename it, or "
                "name a file that ends in .safetensors, .npz, .npy or .jsonl.",
            ) from error


def _refuse_too_many(target: Path, paths: Sequence[str]) -> None:
    size = len(json.dumps(json.dumps(paths)))  # as `_write_safetensors` writes them
    if size > MOST_NAMES:
        raise _refused(
            target,
            f": the names of {len(paths)} pictures take {size} bytes, and may take {MOST_NAMES} there. Name a file "
            "that ends in .npz, .npy, .jsonl or .parquet; or embed some of the pictures at a time.",
        )


def _refused(target: Path, reason: str) -> InputError:
    return InputError(f"target {target}{reason}", field="target")


class Picture(NamedTuple):
    """A file as it was before it was read. Changed or replaced, also by a link to another, it is another picture."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def at(cls, path: str) -> "Picture":
        """The file as it is now; -1 for all that is not known of one that is not there."""
        try:
            stat = os.stat(path)
        except (OSError, ValueError):  # the latter for a name that cannot be
            return cls(path, -1, -1, -1, -1)
        return cls(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


class Batch(NamedTuple):
    """Where a line of the journal begins, and the pictures whose vectors it holds."""

    offset: int
    pictures: list[Picture]


class Row(NamedTuple):
    """Where a picture's vector stands: where its line of the journal begins, and how many vectors there precede it."""

    offset: int
    position: int


class Journal:
    """Batches of (pictures, float32 bytes) beside the file that they will become."""

    def __init__(self, target: Path, identity: dict[str, Any]) -> None:
        """Opens the journal of `target`, new or left by an interrupted run.

        Args:
            target: The file to be written.
            identity: What decides the numbers: the weights' hash, config, preprocessing, precision, where names begin.

        Raises:
            InputError: The journal was left by a run with other weights or options, or elsewhere.
        """
        self.target = target
        self.path = _journal_of(target)
        self.batches: list[Batch] = []
        self.broken: list[str] = []  # paths that gave no vector
        self._width = 0  # bytes of a vector, once one is known
        end = self._read(identity) if self.path.exists() else 0
        self._file = self.path.open("a+b")
        self._file.truncate(end)  # cuts off a line that was not finished
        if end == 0:
            self._append(json.dumps(identity).encode() + b"\n")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves an unfinished journal where it is, for another run, if there is any vector in it."""
        self._file.close()
        if not self.done:
            self.path.unlink()

    def _read(self, identity: dict[str, Any]) -> int:
        """Notes the batches of an earlier run, and returns where the last whole line ends."""
        first = json.dumps(identity).encode()
        end, number = 0, 1
        with self.path.open("rb") as file:
            while line := file.readline(MOST_LINE + 1):
                place = f"{self.path}, line {number}"
                if not line.endswith(b"\n") and len(line) <= MOST_LINE:
                    self._check_torn(line, BEGINNING if end else first, place)
                    break
                if end == 0:
                    self._check_identity(self._parsed(line, IDENTITY, place), json.loads(first))
                else:
                    record, _ = self._batch(line, place)
                    self.batches.append(Batch(end, [Picture(*fields) for fields in record["pictures"]]))
                    self.broken += record["broken"]
                end += len(line)
                number += 1
        return end

    def _parsed(self, line: bytes, check: schema.Check, place: str) -> dict[str, Any]:
        try:
            record: dict[str, Any] = schema.parse_json(line, check, place, most_bytes=MOST_LINE, error=InputError)
        except InputError as error:
            raise self._no_journal(error.text) from error
        return record

    def _batch(self, line: bytes, place: str) -> tuple[dict[str, Any], bytes]:
        """A line of the journal, and the vectors in it."""
        content, mark, end = line.rpartition(CHECKSUM)
        if mark and end != _checksum(content):  # an older vitlite wrote none
            raise self._no_journal(f"{shown(place)}: its checksum is that of other content.")
        record = self._parsed(line, BATCH, place)
        try:
            vectors = base64.b64decode(record["vectors"], validate=True)
        except ValueError as error:
            raise self._no_journal(f"{shown(place)}: vectors must be base64.") from error
        pictures = len(record["pictures"])
        width = self._width or (len(vectors) // pictures if pictures else 0)
        if len(vectors) != pictures * width or width % 4 or (pictures and not width):
            raise self._no_journal(f"{shown(place)}: {len(vectors)} bytes of vectors for {pictures} pictures.")
        self._width = width
        return record, vectors

    def _check_torn(self, line: bytes, beginning: bytes, place: str) -> None:
        """Makes sure that a line without its end is one that a killed run was writing, before it is cut off."""
        ours = line.startswith(beginning) or beginning.startswith(line)
        if not ours and line.strip(b"\0"):  # zeros are what some file systems leave where the power went
            raise self._no_journal(f"{shown(place)}: it has no end, and is none that vitlite began.")

    def _no_journal(self, reason: str) -> InputError:
        return InputError(
            f"{reason} {shown(str(self.path))} is not the journal of an interrupted run, or damaged. Move it away."
        )

    def _check_identity(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        def written(identity: dict[str, Any], key: str) -> str:
            return json.dumps(identity.get(key), sort_keys=True)  # in Python, 1 is True, and 1.0 too

        changed = sorted(key for key in {*found, *wanted} if written(found, key) != written(wanted, key))
        if changed or not wanted.keys() == found.keys():
            raise InputError(
                f"{shown(str(self.path))} was left by a run with another {shown(', '.join(changed))}. "
                f"{_on_kernels(found, wanted)}"
                "Repeat that command to continue it, or delete the file to start afresh."
            )

    @property
    def done(self) -> set[Picture]:
        """The pictures whose vectors are in the journal."""
        return {picture for batch in self.batches for picture in batch.pictures}

    @property
    def tried(self) -> set[str]:
        """The paths that this run or an earlier one came to, whether they gave a vector or not."""
        return {picture.path for picture in self.done}.union(self.broken)

    def missing(self, wanted: Iterable[Picture]) -> list[Picture]:
        """Those of `wanted` whose vectors are not in the journal yet."""
        done = self.done
        return [picture for picture in wanted if picture not in done]

    def add(self, pictures: Sequence[Picture], vectors: bytes, broken: Sequence[str] = ()) -> None:
        """Keeps one batch: pictures, as many rows of little-endian float32 numbers, and the paths that gave none."""
        end = self._file.seek(0, os.SEEK_END)
        self._width = self._width or len(vectors) // max(1, len(pictures))
        encoded = base64.b64encode(vectors).decode()
        record = {"pictures": list(pictures), "vectors": encoded, "broken": list(broken)}
        content = json.dumps(record).encode().removesuffix(b"}")
        self._append(content + CHECKSUM + _checksum(content))
        self.batches.append(Batch(end, list(pictures)))
        self.broken += broken

    def _append(self, line: bytes) -> None:
        if len(line) > MOST_LINE:
            raise InputError(f"A batch takes {len(line)} bytes, and may take {MOST_LINE}. Choose a smaller one.")
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):  # it tries once more
                self._file.close()
            raise InputError(
                f"Cannot write {shown(str(self.path))}: {error.strerror}. The vectors in it so far are kept: make "
                "room, and start the same command."
            ) from error

    def finish(self, wanted: Iterable[Picture], metadata: dict[str, str]) -> int:
        """Writes the target with the vectors of `wanted`, in that order, and says how many.

        The journal is removed, but where it has other pictures, too: a later run may ask for them.
        """
        rows = self._rows(wanted)
        if not rows:
            raise InputError(f"There is nothing to write to {self.target}: no picture could be read.")
        paths = [picture.path for picture in rows]
        write = WRITERS[self.target.suffix]
        try:
            with atomic_write(self.target) as temporary, temporary.open("wb") as file:
                write(file, paths, self._vectors(rows), metadata)
        except OSError as error:
            raise InputError(
                f"Cannot write {self.target}: {error.strerror}. The vectors stay in {self.path}: make room, and start "
                "the same command."
            ) from error
        self._file.close()
        if not self.others(paths):
            self.path.unlink()
        return len(paths)

    def others(self, paths: Iterable[str]) -> set[str]:
        """The paths of the pictures whose vectors are here, but for these."""
        return {picture.path for picture in self.done}.difference(paths)

    def _rows(self, wanted: Iterable[Picture]) -> dict[Picture, Row]:
        """Where the vectors of `wanted` stand, as far as there are any."""
        rows = {}
        for batch in self.batches:
            for position, picture in enumerate(batch.pictures):
                rows[picture] = Row(batch.offset, position)
        return {picture: rows[picture] for picture in wanted if picture in rows}

    def _vectors(self, rows: dict[Picture, Row]) -> Iterator[bytes]:
        """The vectors one after the other; a line is read once for all that follow each other in it."""
        offset = -1
        for picture, row in rows.items():
            if row.offset != offset:
                offset = row.offset
                pictures, vectors = self._read_batch(offset)
                width = self._width
            if pictures[row.position : row.position + 1] != [picture]:
                raise InputError(f"{self.path} was changed while it was in use. Delete it, and start afresh.")
            yield vectors[row.position * width : (row.position + 1) * width]

    def _read_batch(self, offset: int) -> tuple[list[tuple[Any, ...]], bytes]:
        """The pictures and the vectors of the line that begins here."""
        self._file.seek(offset)
        record, vectors = self._batch(self._file.readline(MOST_LINE + 1), str(self.path))
        return [tuple(fields) for fields in record["pictures"]], vectors


def _on_kernels(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What to say where other kernels computed the vectors of a journal: the command alone does not name them."""
    then, now = found.get(KERNELS), wanted.get(KERNELS)
    if then is None or then == now:
        return ""
    return (
        f"It had {shown(str(then))}, and this machine now takes {shown(str(now))}: vectors would differ in the last "
        "digits. Kernels are chosen once for a machine, torch and number of threads, and by VITLITE_KERNELS. "
    )


def _checksum(content: bytes) -> bytes:
    """How a line ends whose beginning this is."""
    return b"%d}\n" % zlib.crc32(content)


@contextmanager
def open_journal(target: Path, identity: dict[str, Any]) -> Iterator[Journal]:
    """The journal of `target`, and the right to write it: every other process that asks for it is refused.

    Raises:
        InputError: Another process is writing `target`; the journal there is one of other weights or options; or it, or
            its lock, cannot be opened.
    """
    check_target(target)  # again: what is there may be another's by now
    lock_file = _lock_of(target)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(lock_file, timeout=0))
            remove_leftovers(target)
        except TimeoutError as error:
            raise _refused(
                target,
                f": another process is writing it. Wait for it, or name another file. If there is none, delete "
                f"{lock_file}.",
            ) from error
        except OSError as error:
            raise _closed(target, lock_file, error) from error
        try:
            journal = Journal(target, identity)
        except OSError as error:
            raise _closed(target, _journal_of(target), error) from error
        yield stack.enter_context(journal)


def _closed(target: Path, beside: Path, error: OSError) -> InputError:
    """The error for a journal or a lock that cannot be opened."""
    return _refused(
        target, f": {shown(str(beside))} cannot be used: {error.strerror}. Name another file, or see to it that it can."
    )


def _write_safetensors(file: BinaryIO, paths: list[str], vectors: Iterator[bytes], metadata: dict[str, str]) -> None:
    """One tensor, `vectors` (n, d); the paths are a JSON list in the metadata."""
    first = next(vectors)
    shape = [len(paths), len(first) // 4]
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, len(paths) * len(first)]}
    header = json.dumps({"__metadata__": metadata | {"paths": json.dumps(paths)}, "vectors": tensor}).encode()
    header += b" " * (-len(header) % 8)
    file.write(struct.pack("<Q", len(header)) + header + first)
    file.writelines(vectors)


def _write_npz(file: BinaryIO, paths: list[str], vectors: Iterator[bytes], metadata: dict[str, str]) -> None:
    """Two arrays, `paths` (n) and `vectors` (n, d)."""
    first = next(vectors)
    longest = max(len(path) for path in paths)
    names = (path.encode("utf-32-le", "surrogatepass").ljust(4 * longest, b"\0") for path in paths)
    with zipfile.ZipFile(file, "w") as archive:
        _write_array(archive, "paths", f"<U{longest}", f"({len(paths)},)", names)
        _write_array(archive, "vectors", "<f4", f"({len(paths)}, {len(first) // 4})", chain([first], vectors))


def _write_array(archive: zipfile.ZipFile, name: str, dtype: str, shape: str, rows: Iterable[bytes]) -> None:
    """One array as `numpy.save` writes it."""
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
        member.write(_array_header(repr(dtype), shape))
        for row in rows:
            member.write(row)


def _array_header(dtype: str, shape: str) -> bytes:
    """What stands before an array's numbers, as `numpy.save` writes it."""
    header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}"
    size = max(128, -(-(len(header) + 11) // 64) * 64)  # with the ten bytes before: a multiple of 64
    header = header.ljust(size - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


def _write_jsonl(file: BinaryIO, paths: list[str], vectors: Iterator[bytes], metadata: dict[str, str]) -> None:
    """A line for each picture: its path, and its vector with the nine digits that float32 has."""
    for path, vector in zip(paths, vectors, strict=True):
        numbers = [float(f"{number:.9g}") for (number,) in struct.iter_unpack("<f", vector)]
        file.write(json.dumps({"path": path, "vector": numbers}).encode() + b"\n")


def _write_npy(file: BinaryIO, paths: list[str], vectors: Iterator[bytes], metadata: dict[str, str]) -> None:
    """One array with two fields, `path` and `vector` (d)."""
    first = next(vectors)
    longest = max(len(path) for path in paths)
    fields = [("path", f"<U{longest}"), ("vector", "<f4", (len(first) // 4,))]
    file.write(_array_header(repr(fields), f"({len(paths)},)"))
    for path, vector in zip(paths, chain([first], vectors), strict=True):
        file.write(path.encode("utf-32-le", "surrogatepass").ljust(4 * longest, b"\0") + vector)


def _write_parquet(file: BinaryIO, paths: list[str], vectors: Iterator[bytes], metadata: dict[str, str]) -> None:
    """Columns `path` and `vector`, a list of d float32 numbers; the metadata are the schema's."""
    pyarrow, parquet = need_pyarrow()
    first = next(vectors)
    numbers, rows = len(first) // 4, chain([first], vectors)
    columns = [("path", pyarrow.string()), ("vector", pyarrow.list_(pyarrow.float32(), numbers))]
    with parquet.ParquetWriter(file, pyarrow.schema(columns, metadata)) as writer:
        for begin in range(0, len(paths), ROW_GROUP):
            some = paths[begin : begin + ROW_GROUP]
            values = pyarrow.Array.from_buffers(
                pyarrow.float32(),
                len(some) * numbers,
                [None, pyarrow.py_buffer(b"".join(islice(rows, len(some))))],
            )
            lists = pyarrow.FixedSizeListArray.from_arrays(values, numbers)
            writer.write_batch(pyarrow.record_batch([pyarrow.array(some), lists], schema=writer.schema))


def need_pyarrow() -> tuple[Any, Any]:
    """pyarrow, and its module for Parquet.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing_extra("Writing Parquet", "parquet") from error
    return pyarrow, parquet


WRITERS = {
    ".safetensors": _write_safetensors,
    ".npz": _write_npz,
    ".npy": _write_npy,
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
}
