"""Vectors of many pictures as one file, safetensors, npz or jsonl, and the journal that an interrupted run leaves.

The journal holds one line for each batch, so that a killed run continues at a batch's edge and ends with the same
numbers. The files are written with the standard library, in one pass, whatever their size.
"""

import base64
import json
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from vitlite.errors import InputError


def check_target(target: Path) -> Path:
    """Refuses, before any work is done, a file that could not be written at its end."""
    if target.suffix not in WRITERS:
        raise InputError(f"--out {target}: the name must end in one of {', '.join(WRITERS)}.")
    if not target.parent.is_dir():
        raise InputError(f"--out {target}: there is no folder {target.parent}. Make it first.")
    if target.is_dir():
        raise InputError(f"--out {target} is a folder. Name a file that is new, or may be replaced.")
    return target


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """Keeps every other process from writing the same file.

    Raises:
        InputError: One is writing it.
    """
    from filelock import FileLock, Timeout  # comes with huggingface-hub

    path = target.with_name(target.name + ".lock")
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise InputError(
            f"--out {target}: another process is writing it. Wait for it, or name another file. "
            f"If there is none, delete {path}."
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):  # on Windows it goes with the lock
            path.unlink()
        lock.release()


class Picture(NamedTuple):
    """A file as it was before it was read. Changed or replaced, it is another picture."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def at(cls, path: str) -> "Picture":
        """The file as it is now; -1 for all that is not known of one that is not there."""
        try:
            stat = os.stat(path)
        except (OSError, ValueError):  # the latter for a name that cannot be
            return cls(path, -1, -1, -1)
        return cls(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class Journal:
    """Batches of (pictures, float32 bytes) beside the file that they will become."""

    def __init__(self, target: Path, run: dict[str, Any]) -> None:
        """Opens the journal of `target`, new or left by an interrupted run.

        Args:
            target: The file to be written.
            run: What decides the numbers: the weights' hash, config, preprocessing, precision, where names begin.

        Raises:
            InputError: The journal was left by a run with other weights or options, or elsewhere.
        """
        self.target = target
        self.path = target.with_name(target.name + ".partial")
        self.offsets: list[tuple[int, list[Picture]]] = []  # where each batch's line starts, and its pictures
        self.broken: list[str] = []  # paths that gave no vector
        end = self._read(json.loads(json.dumps(run))) if self.path.exists() else 0
        self._file = self.path.open("a+b")
        self._file.truncate(end)  # cuts off a line that was not finished
        if end == 0:
            self._append(run)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves an unfinished journal where it is, for another run, if there is any vector in it."""
        self._file.close()
        if not self.done:
            self.path.unlink()

    def _read(self, run: dict[str, Any]) -> int:
        """Notes the batches of an earlier run, and where the last whole line ends."""
        end = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise InputError(f"{self.path} is not the journal of an interrupted run. Move it away.") from error
                if end:
                    self.offsets.append((end, [Picture(*fields) for fields in record["pictures"]]))
                    self.broken += record["broken"]
                elif record != run:
                    changed = sorted(key for key in {*record, *run} if record.get(key) != run.get(key))
                    raise InputError(
                        f"{self.path} was left by a run with another {', '.join(changed)}. "
                        "Repeat that command to continue it, or delete the file to start afresh."
                    )
                end += len(line)
        return end

    @property
    def done(self) -> set[Picture]:
        """The pictures whose vectors are in the journal."""
        return {picture for _, pictures in self.offsets for picture in pictures}

    def add(self, pictures: Sequence[Picture], vectors: bytes, broken: Sequence[str] = ()) -> None:
        """Keeps one batch: pictures, as many rows of little-endian float32 numbers, and the paths that gave none."""
        end = self._file.seek(0, os.SEEK_END)
        encoded = base64.b64encode(vectors).decode()
        self._append({"pictures": list(pictures), "vectors": encoded, "broken": list(broken)})
        self.offsets.append((end, list(pictures)))

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, wanted: Iterable[Picture], about: dict[str, str]) -> int:
        """Writes the target with the vectors of `wanted`, in that order, removes the journal, and says how many."""
        places = {picture: (offset, i) for offset, batch in self.offsets for i, picture in enumerate(batch)}
        found = {picture: places[picture] for picture in wanted if picture in places}
        paths = [picture.path for picture in found]
        if not paths:
            raise InputError(f"There is nothing to write to {self.target}: no picture could be read.")
        unfinished = self.target.with_name(self.target.name + ".writing")
        try:
            with unfinished.open("wb") as file:
                WRITERS[self.target.suffix](file, paths, self._rows(found), about)
            os.replace(unfinished, self.target)
        except OSError as error:
            raise InputError(
                f"Cannot write {self.target}: {error.strerror}. The vectors stay in {self.path}: make room, and start "
                "the same command."
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)
        self._file.close()
        self.path.unlink()
        return len(paths)

    def _rows(self, places: dict[Picture, tuple[int, int]]) -> Iterator[bytes]:
        """The vectors of pictures, each at the offset of its batch and its place there."""
        last = None
        for picture, (offset, i) in places.items():
            if offset != last:
                self._file.seek(offset)
                record = json.loads(self._file.readline())
                vectors, last = base64.b64decode(record["vectors"]), offset
            if record["pictures"][i : i + 1] != [list(picture)]:
                raise InputError(f"{self.path} was changed while it was in use. Delete it, and start afresh.")
            width = len(vectors) // len(record["pictures"])
            yield vectors[i * width : (i + 1) * width]


def _write_safetensors(file: BinaryIO, paths: list[str], rows: Iterator[bytes], about: dict[str, str]) -> None:
    """One tensor, `vectors` (n, d); the paths are a JSON list in the metadata."""
    first = next(rows)
    shape = [len(paths), len(first) // 4]
    header = json.dumps(
        {
            "__metadata__": about | {"paths": json.dumps(paths)},
            "vectors": {"dtype": "F32", "shape": shape, "data_offsets": [0, len(paths) * len(first)]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    file.write(struct.pack("<Q", len(header)) + header + first)
    file.writelines(rows)


def _write_npz(file: BinaryIO, paths: list[str], rows: Iterator[bytes], about: dict[str, str]) -> None:
    """Two arrays, `paths` (n) and `vectors` (n, d)."""
    first = next(rows)
    longest = max(map(len, paths))
    names = (path.encode("utf-32-le", "surrogatepass").ljust(4 * longest, b"\0") for path in paths)
    members = {
        "paths": (f"<U{longest}", f"({len(paths)},)", names),
        "vectors": ("<f4", f"({len(paths)}, {len(first) // 4})", chain([first], rows)),
    }
    with zipfile.ZipFile(file, "w") as archive:
        for name, (dtype, shape, content) in members.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
                header = header.ljust(127 - 10) + "\n"  # numpy's own padding: 128 bytes with what stands before it
                member.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
                for row in content:
                    member.write(row)


def _write_jsonl(file: BinaryIO, paths: list[str], rows: Iterator[bytes], about: dict[str, str]) -> None:
    """A line for each picture: its path, and its vector with the nine digits that float32 has."""
    for path, row in zip(paths, rows, strict=True):
        numbers = [float(f"{number:.9g}") for (number,) in struct.iter_unpack("<f", row)]
        file.write(json.dumps({"path": path, "vector": numbers}).encode() + b"\n")


WRITERS = {".safetensors": _write_safetensors, ".npz": _write_npz, ".jsonl": _write_jsonl}
