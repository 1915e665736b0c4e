"""Write the vectors of many images to one file. A journal on disk allows an interrupted run to be resumed."""

import errno
import json
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from vitlite.errors import InputError, missing_extra
from vitlite.storage import atomic_write, lock, obstacle, remove_leftovers

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

IMAGES, VECTORS, ORDERED = "images.jsonl", "vectors.f32", "ordered.f32"  # the files of a journal
MAX_NAME_BYTES = 99_000_000  # for the paths in a .safetensors file; the library reads headers of up to 100 MB
CHUNK = 2**24  # number of values written at a time


class ImageFile(NamedTuple):
    """An image file, with its size and modification time at the start of the run.

    If the size or the modification time changes, the file counts as a new image.
    """

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def at(cls, path: str) -> "ImageFile":
        """Return the image file at a path, with its current size and modification time.

        If the file is missing, the size and the modification time are -1.
        """
        try:
            stat = os.stat(path)
        except (OSError, ValueError):  # ValueError: a null byte in the name
            return cls(path, -1, -1)
        return cls(path, stat.st_size, stat.st_mtime_ns)


class Journal:
    """The vectors that a run has computed so far, stored in the folder `<target>.partial`.

    The file `vectors.f32` contains one row of float32 numbers per image, without a header. In `images.jsonl`, the first
    line identifies the run, and each further line lists the images of one batch. The rows of a batch are on disk before
    this line is written. When a killed run is resumed, rows without a complete line are discarded.
    """

    def __init__(self, target: Path, identity: Mapping[str, Any], dim: int) -> None:
        """Open a new journal for `target`, or the journal of an interrupted run.

        Args:
            target: The file to write the vectors to.
            identity: Values that determine the vectors and can be written as JSON, such as the fields of
                `VectorIdentity`.
            dim: The number of values stored per image.

        Raises:
            InputError: The journal belongs to a run with another identity, or is damaged.
        """
        self.target, self.dim = target, dim
        self.folder = target.with_name(target.name + ".partial")
        self.rows: dict[ImageFile, int] = {}
        self.failed: set[str] = set()  # paths of images that could not be read
        self._count = 0  # rows in vectors.f32, including rows of older versions of changed images
        self.folder.mkdir(exist_ok=True)
        end = self._read(json.loads(json.dumps(identity)))
        self._images = open(self.folder / IMAGES, "ab")  # noqa: SIM115  # closed by __exit__
        self._vectors = open(self.folder / VECTORS, "ab")  # noqa: SIM115
        self._images.truncate(end)
        self._vectors.truncate(self._count * 4 * dim)
        if end == 0:
            self._append_line(dict(identity))

    def _read(self, identity: dict[str, Any]) -> int:
        """Read the journal of an earlier run, if there is one.

        Returns:
            The length in bytes of the usable part of images.jsonl, or 0 in a new journal.
        """
        images, vectors = self.folder / IMAGES, self.folder / VECTORS
        if not images.exists():
            return 0
        available = vectors.stat().st_size // (4 * self.dim) if vectors.exists() else 0
        end = 0
        with open(images, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):  # the run was killed while it wrote this line
                    break
                record = self._parse(line, number)
                if number == 1:
                    self._check_identity(record, identity)
                elif self._count + len(record["images"]) > available:
                    break
                else:
                    self._note(record["images"], record["failed"])
                end += len(line)
        return end

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        """Parse a line of images.jsonl: the identity of the run in line 1, the images of a batch in other lines."""
        try:
            record = dict(json.loads(line))
            if number > 1:
                images = [ImageFile(*fields) for fields in record["images"]]
                record = {"images": dict.fromkeys(images), "failed": set(record["failed"])}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            place = f"{self.folder / IMAGES}, line {number}"
            raise InputError(
                f"The journal of an earlier run is damaged in {place}. Delete the folder {self.folder} to start over."
            ) from error
        return record

    def _check_identity(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        changed = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        if changed:
            raise InputError(
                f"Cannot resume the run in {self.folder}, because these settings have changed: {', '.join(changed)}. "
                "Use the same model, options and inputs to resume it, or delete the folder to start over."
            )

    def _note(self, images: Iterable[ImageFile], failed: Iterable[str]) -> None:
        for image in images:
            self.rows[image] = self._count
            self._count += 1
        self.failed.update(failed)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        """Close the journal, and delete its files if they contain no vectors to keep for a later run."""
        self._images.close()
        self._vectors.close()
        if not self.rows:
            self._remove()

    def add(self, images: Sequence[ImageFile], vectors: "Sequence[Tensor]", failed: Sequence[str] = ()) -> None:
        """Append a batch to the journal.

        Args:
            images: The images that were read.
            vectors: The vector of each image.
            failed: The paths of images that could not be read.

        Raises:
            InputError: The journal cannot be written, for example because the disk is full.
        """
        try:
            for vector in vectors:
                self._vectors.write(vector.numpy().astype("<f4").tobytes())
            self._vectors.flush()
            os.fsync(self._vectors.fileno())
            self._append_line({"images": images, "failed": failed})
        except OSError as error:
            raise InputError(
                f"Cannot write to {self.folder}: {error.strerror}. The vectors computed so far are kept. Check the "
                "permissions and the free space, and run the same command again to resume."
            ) from error
        self._note(images, failed)

    def _append_line(self, content: dict[str, Any]) -> None:
        self._images.write(json.dumps(content).encode() + b"\n")
        self._images.flush()
        os.fsync(self._images.fileno())

    def finish(self, images: Iterable[ImageFile], metadata: dict[str, str], shape: tuple[int, ...] = (-1,)) -> int:
        """Write the vectors to the target file, in the order of `images`. Afterwards, closing the journal deletes it.

        Args:
            images: The images. Those that could not be read are left out.
            metadata: Strings for the header of the file, if the format has one.
            shape: The shape of the vectors of an image, such as (h, w, d) for one vector per patch.

        Returns:
            The number of images whose vectors were written.

        Raises:
            InputError: There are no vectors, or the target cannot be written. If writing fails, the journal is kept.
        """
        rows = {image.path: self.rows[image] for image in images if image in self.rows}
        if not rows:
            raise InputError(
                f"No image could be read, so {self.target} was not written. Check the paths and formats of the images."
            )
        try:
            vectors = self._ordered(list(rows.values())).reshape(len(rows), *shape)
            with atomic_write(self.target) as temporary:
                WRITERS[self.target.suffix](temporary, list(rows), vectors, metadata)
        except OSError as error:
            raise InputError(
                f"Cannot write {self.target}: {error.strerror}. The vectors are kept in {self.folder}. Check the "
                "permissions and the free space, and run the same command again to finish."
            ) from error
        self.rows = {}  # the target contains the vectors now, so the journal can be removed
        return len(rows)

    def _ordered(self, rows: list[int]) -> "np.ndarray":
        """Return the rows of vectors.f32 with the given indices, in this order, as a memory-mapped array: (n, d)."""
        import numpy as np

        path = self.folder / VECTORS
        vectors = np.memmap(path, "<f4", "r", shape=(self._count, self.dim))
        if rows == list(range(len(rows))):
            return vectors[: len(rows)]
        with open(self.folder / ORDERED, "wb") as file:
            for part in _chunks(vectors, len(rows)):
                file.write(vectors[rows[part]].tobytes())
        return np.memmap(self.folder / ORDERED, "<f4", "r", shape=(len(rows), self.dim))

    def _remove(self) -> None:
        for name in (ORDERED, VECTORS, IMAGES):
            (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # the folder contains files of other programs
            self.folder.rmdir()


@contextmanager
def open_journal(target: Path, identity: Mapping[str, Any], dim: int) -> Iterator[Journal]:
    """Open the journal for the file `target`, and lock it so that no other process can write it.

    Args:
        target: The file to write the vectors to.
        identity: Values that determine the vectors and can be written as JSON, such as the fields of `VectorIdentity`.
        dim: The number of values stored per image.

    Raises:
        InputError: Another process is writing `target`, or the journal cannot be opened or resumed.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(target.with_name(target.name + ".lock"), timeout=0))
            remove_leftovers(target)
            journal = stack.enter_context(Journal(target, identity, dim))
        except TimeoutError as error:
            raise InputError(
                f"Another process is writing to {target}. Wait until it finishes, or choose another file (--out)."
            ) from error
        except OSError as error:
            raise InputError(
                f"Cannot write to {target}.partial: {error.strerror}. Check the permissions and the free space, or "
                "choose another file (--out)."
            ) from error
        yield journal


def check_target(target: Path) -> None:
    """Check that vectors can be written to a file.

    Raises:
        InputError: The extension is not supported, or the folder does not exist or is not writable.
        MissingExtraError: The library that writes this format is not installed.
    """
    if target.suffix not in WRITERS:
        raise InputError(
            f"Cannot write {target}: the extension is not supported. Choose a name that ends in {', '.join(WRITERS)}."
        )
    in_the_way = obstacle(target)
    if in_the_way:
        raise InputError(f"Cannot write {target}: {in_the_way}. Choose a file in an existing, writable folder.")
    if target.suffix == ".parquet":
        _import_pyarrow()
    try:
        import numpy  # noqa: F401  # ICN001
    except ImportError as error:
        raise missing_extra("Writing vectors to a file", "images") from error


def check_names(target: Path, paths: Sequence[str]) -> None:
    """Check that the paths fit into `target` if it is a .safetensors file.

    Raises:
        InputError: The paths are too long.
    """
    size = len(json.dumps(json.dumps(paths))) if target.suffix == ".safetensors" else 0
    if size > MAX_NAME_BYTES:
        raise InputError(
            f"The paths of {len(paths)} images take {size:,} bytes, but a .safetensors file can hold at most "
            f"{MAX_NAME_BYTES:,} bytes of paths. Write .npz, .npy, .jsonl or .parquet instead."
        )


def _chunks(vectors: "np.ndarray", count: int | None = None) -> Iterator[slice]:
    """Yield slices that cover the rows of an array, or its first `count` rows, with at most `CHUNK` values each."""
    rows = max(1, CHUNK // math.prod(vectors.shape[1:]))
    for start in range(0, len(vectors) if count is None else count, rows):
        yield slice(start, start + rows)


def _write_safetensors(target: Path, paths: list[str], vectors: "np.ndarray", metadata: dict[str, str]) -> None:
    """Write a .safetensors file with the tensor `vectors` (n, d), and the paths as a JSON list in the metadata."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file({"vectors": vectors}, target, {**metadata, "paths": json.dumps(paths)})
    except SafetensorError as error:  # a full disk, for example
        raise OSError(errno.EIO, str(error)) from error


def _write_npz(target: Path, paths: list[str], vectors: "np.ndarray", metadata: dict[str, str]) -> None:
    """Write an .npz file with two arrays, `paths` (n,) and `vectors` (n, d)."""
    import numpy as np

    text = np.dtype(("<U", max(map(len, paths))))
    with zipfile.ZipFile(target, "w") as archive:
        with archive.open("paths.npy", "w", force_zip64=True) as file:
            _write_array(file, text, (len(paths),), (np.array(paths[part], text) for part in _chunks(vectors)))
        with archive.open("vectors.npy", "w", force_zip64=True) as file:
            _write_array(file, vectors.dtype, vectors.shape, (vectors[part] for part in _chunks(vectors)))


def _write_npy(target: Path, paths: list[str], vectors: "np.ndarray", metadata: dict[str, str]) -> None:
    """Write an .npy file with one array (n,) of two fields, `path` and `vector` (d,)."""
    import numpy as np

    fields = np.dtype([("path", "<U", max(map(len, paths))), ("vector", "<f4", vectors.shape[1:])])

    def chunks() -> "Iterator[np.ndarray]":
        for part in _chunks(vectors):
            chunk = np.empty(len(paths[part]), fields)
            chunk["path"], chunk["vector"] = paths[part], vectors[part]
            yield chunk

    with open(target, "wb") as file:
        _write_array(file, fields, (len(paths),), chunks())


def _write_array(file: IO[bytes], dtype: "np.dtype", shape: tuple[int, ...], chunks: "Iterable[np.ndarray]") -> None:
    """Write an array of any size to a file in the .npy format, chunk by chunk."""
    from numpy.lib import format as npy

    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, header)
    for chunk in chunks:
        file.write(chunk.tobytes())


def _write_jsonl(target: Path, paths: list[str], vectors: "np.ndarray", metadata: dict[str, str]) -> None:
    """Write a .jsonl file with one line of JSON per image, which contains the path and the vector.

    Numbers are written with nine digits, which represent a float32 exactly.
    """
    with open(target, "w", encoding="utf-8", newline="\n") as file:
        for path, vector in zip(paths, vectors, strict=True):
            numbers = [float(f"{number:.9g}") for number in vector.tolist()]
            file.write(json.dumps({"path": path, "vector": numbers}) + "\n")


def _write_parquet(target: Path, paths: list[str], vectors: "np.ndarray", metadata: dict[str, str]) -> None:
    """Write a .parquet file with two columns: `path`, and `vector` with a list of d float32 numbers."""
    pyarrow, parquet = _import_pyarrow()
    vector = pyarrow.list_(pyarrow.float32(), vectors.shape[1])
    schema = pyarrow.schema([("path", pyarrow.string()), ("vector", vector)], metadata)
    with parquet.ParquetWriter(target, schema) as writer:
        for part in _chunks(vectors):
            names = [path.encode(errors="replace").decode() for path in paths[part]]  # Parquet needs valid Unicode
            rows = pyarrow.FixedSizeListArray.from_arrays(vectors[part].reshape(-1), type=vector)
            writer.write_batch(pyarrow.record_batch([pyarrow.array(names), rows], schema=schema))


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing_extra("Writing a Parquet file", "parquet") from error
    return pyarrow, parquet


WRITERS = {
    ".safetensors": _write_safetensors,
    ".npz": _write_npz,
    ".npy": _write_npy,
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
}
