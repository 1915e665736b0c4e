"""A weights file: the names, shapes and types of its tensors, and their values when they are wanted.

The header of a safetensors file is checked by the format's own library. The bytes are read here, each tensor once and
straight into its own memory, so that no tensor is a map of the file: for ViT-B in 0.14 CPU seconds, as one read of the
whole file, where the library takes 0.17. Google's .npz is read with the standard library.
Nothing here passes through numpy or unpickles.
"""

import ast
import ctypes
import errno
import json
import math
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BufferedIOBase, FileIO
from os import PathLike
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import safetensors
import torch
from torch import Tensor

from vitlite.errors import CheckpointError, ConfigError, shown
from vitlite.schema import MOST_BYTES, Check, by_name, read_json, table

Shape = tuple[int, ...]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
RUN_STATE = "state.safetensors"  # of a run of training, whose models are in folders beside it
READABLE = (".safetensors", ".npz")
USUAL_PICKLE = "pytorch_model.bin"  # what timm and transformers call the one that a config.json speaks for,
USUAL_PICKLES = (USUAL_PICKLE, f"{USUAL_PICKLE}.index.json")  # or that of shards
PICKLES = (".bin", ".pth", ".pt", ".th", ".ckpt", ".tar")  # .pth.tar, as scripts for ImageNet call theirs
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NPY_TYPES = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "|V2": "BF16"}  # numpy has no name for bfloat16

MOST_TENSORS = 20_000  # of a file: a ViT of 40 blocks has 500, one with a text tower and its optimizer's state 4,000
SHARD_OF_SEVERAL = re.compile(r"-\d{5}-of-(\d{5})\.\w+$")
LONGEST_SIDE = 2**63 - 1  # of a tensor
LONGEST_NAME = 500  # letters
LONGEST_NPY_HEADER = 10_000  # bytes, as numpy has it
ROOM_TO_UNPACK = 2**28  # bytes beside ten times the size of the archive: trained weights hardly shrink, a bomb does
BLOCK = 2**24  # bytes read at once
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL)


def _is_beside(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and Path(value).name == value and value.endswith(READABLE[0])


SHARD = Check("the name of a .safetensors file beside it", _is_beside)
SHARDS = table(  # what of an index is looked at
    {"weight_map": Check("a table of tensors and files", lambda value: isinstance(value, dict) and bool(value),
                         by_name(SHARD).parts)}, required=("weight_map",),
)  # fmt: skip


class Entry(NamedTuple):
    """One tensor of a file, not read yet."""

    shape: Shape
    dtype: str  # as safetensors writes it
    read: Callable[[], Tensor]


class WeightsFile:
    """What is in a weights file, or in all shards of one. `path` is that file, or the index of the shards."""

    def __init__(
        self, path: Path, files: Sequence[Path], entries: Mapping[str, Entry], stats: Mapping[Path, os.stat_result]
    ) -> None:
        self.path, self.files, self.entries = path, files, entries
        self.stats = stats  # of every file that is read, the index too, before it was opened
        self.shapes = {name: entry.shape for name, entry in entries.items()}

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says of itself; nothing where it is no safetensors file, or one of several."""
        return metadata_of(self.path) if self.path.suffix == ".safetensors" else {}

    def dtype(self, name: str) -> torch.dtype:
        """What a tensor is made of."""
        return FLOATS[self.entries[name].dtype]

    def read(self, name: str) -> Tensor:
        """The values of a tensor, in memory of their own.

        Raises:
            CheckpointError: The file is damaged there.
        """
        with explain_damage(self.path):
            return self.entries[name].read()

    def refuse_changes(self) -> None:
        """Makes sure that all that was read so far, and hashed, is of the files that were there in the beginning.

        Raises:
            CheckpointError: One was written to, or another has its place.
        """
        for path, stat in self.stats.items():
            now = path.stat()
            if (now.st_size, now.st_mtime_ns, now.st_ino) != (stat.st_size, stat.st_mtime_ns, stat.st_ino):
                raise CheckpointError(
                    f"{shown(str(path), 1000)} was changed while it was read: what was read may be of two files. Load "
                    "it again once it is written."
                )

    def check_dtypes(self, names: Sequence[str]) -> None:
        """Makes sure that these tensors are made of floats.

        Raises:
            CheckpointError: One is not.
        """
        for name in names:
            kind = self.entries[name].dtype
            if kind not in FLOATS:
                raise CheckpointError(
                    f"{name} is of type {kind}, and vitlite reads {', '.join(FLOATS)}: quantised weights, fp8 and "
                    "whole numbers are refused, objects never unpickled. Get the file in a floating-point type."
                )


@contextmanager
def open_weights(path: Path) -> Iterator[WeightsFile]:
    """Opens a file, a folder, or an index of shards.

    Raises:
        CheckpointError: There are no weights, or they are damaged, or pickled; or they change before all is read.
    """
    if sys.byteorder != "little":
        raise CheckpointError(f"{path} cannot be read here: weights files are little-endian, and this machine is not.")
    path = _file_of(path)
    stats = {path: _stat_of(path)}
    files = _parts_of(path)
    stats |= {file: _stat_of(file) for file in files}
    entries: dict[str, Entry] = {}
    with ExitStack() as stack:
        for file in files:
            with explain_damage(file):
                found = _open_npz(file, stack) if file.suffix == ".npz" else _open_safetensors(file, stack)
                _check_shapes(found)
            twice = entries.keys() & found.keys()
            if twice:
                raise CheckpointError(f"{path}: more than one shard has {', '.join(sorted(twice))}.")
            entries |= found
        if path.suffix == ".json":
            _refuse_absent(path, entries)
        weights = WeightsFile(path, files, entries, stats)
        yield weights
        weights.refuse_changes()


def _stat_of(file: Path) -> os.stat_result:
    if os.path.exists(file) and not os.path.isfile(file):
        raise CheckpointError(f"{shown(str(file), 1000)} is no file.")
    with explain_damage(file):
        return file.stat()


@contextmanager
def explain_damage(file: Path) -> Iterator[None]:
    """Says of whatever a reader raises that the file is damaged, and which one."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file makes readers raise nearly anything
        reason = shown(f"{type(error).__name__}: {error}", 500)
        raise CheckpointError(
            f"{shown(str(file), 1000)} cannot be read as {shown(file.suffix) or 'weights'}: {reason}. It is damaged, "
            "cut short, or something else; fetch it again."
        ) from None


def path_of(place: Any, what: str = "weights") -> Path:
    """The path that somebody gave, with ~ spelt out. An empty one is no path: Python would take the current folder.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(place, (str, PathLike)):
        raise ConfigError(f"{what}: give a path, as text or a pathlib.Path, not {shown(repr(place))}.")
    text = os.fspath(place)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(
            f"{what}: {shown(repr(text))} is no path (was a variable not set?). The current folder is '.'."
        )
    try:
        return Path(text).expanduser()
    except RuntimeError:  # "~somebody", who has no home here
        return Path(text)


def exists(path: Path) -> bool:
    """Whether something is there; of a name that no file can have, nothing is.

    Raises:
        CheckpointError: Nobody can tell: who takes it for absent may take something else in its place.
    """
    try:
        os.stat(path)
    except ValueError:
        return False
    except OSError as error:
        if any(place.is_symlink() and not os.path.exists(place) for place in (path, *path.parents)):
            reason = "a link leads nowhere"
        elif error.errno in NOT_THERE:
            return False
        else:
            reason = str(error.strerror)
        raise CheckpointError(f"{shown(str(path))} cannot be looked at: {reason}.") from None
    return True


def metadata_folder(path: Path) -> Path | None:
    """The folder whose config.json speaks for the weights at `path`; None for a file with a name of its own."""
    if path.is_dir():
        return path
    return path.parent if path.name in (WEIGHTS, INDEX) else None


def files_of(path: Path) -> tuple[Path, list[Path]]:
    """The weights file, or the index, and the files that hold the tensors.

    Raises:
        CheckpointError: There are none that vitlite reads.
    """
    path = _file_of(path)
    return path, _parts_of(path)


def _file_of(path: Path) -> Path:
    """The weights file, or the index of shards, that a path leads to.

    Raises:
        CheckpointError: There are none that vitlite reads.
    """
    if path.is_dir():
        path = _weights_in(path)
    if path.suffix in PICKLES:
        raise CheckpointError(
            f"{path} is a pickle, which can run code when opened, so it is not loaded. Make it a safetensors file: "
            f"vitlite convert {path} OUT.safetensors --to timm"
        )
    check_not_a_shard(path)
    if path.suffix not in (*READABLE, ".json"):
        raise CheckpointError(
            f"{path} is no weights file that vitlite reads: .safetensors, .npz, {INDEX}, or a folder."
        )
    return path


def check_not_a_shard(path: Path) -> None:
    """Makes sure that a file is no part of a network, as its name may say.

    Raises:
        CheckpointError: It is.
    """
    shard = SHARD_OF_SEVERAL.search(path.name)
    if shard and int(shard[1]) > 1:
        raise CheckpointError(
            f"{shown(str(path), 1000)} is one of {int(shard[1])} shards, and without the others another network. Name "
            f"the index that lies beside them, {INDEX}, or its folder; pickled ones (.bin) load in the library that "
            "wrote them, and save whole."
        )


def _weights_in(folder: Path) -> Path:
    """The weights of a folder: by their usual name, or the only ones there.

    Beside the pickle that a folder's config.json speaks for, a file of another name is of nobody knows what.
    """
    for name in (WEIGHTS, INDEX):
        if os.path.lexists(folder / name):
            return folder / name
    files = sorted(folder.iterdir())
    models = _folders_of_models(files)
    weights = [file for file in readable_in(files) if not (models and file.name == RUN_STATE)]
    if len(weights) == 1 and not has_usual_pickle(files):
        return weights[0]
    names = shown(", ".join(file.name for file in files), 1000) or "nothing"
    hint = ""
    if models:
        hint = f" Did you mean a folder in it: {shown(', '.join(map(str, models)), 1000)}?"
    if len(weights) == 1:
        pickle = folder / USUAL_PICKLE
        hint = f" Name {weights[0]} if that is meant; else first: vitlite convert {pickle} OUT --to vitlite"
    elif any(file.name.endswith(PICKLES) for file in files):
        hint = f" vitlite unpickles nothing here; first: vitlite convert {folder} OUT --to vitlite"
    raise CheckpointError(f"The folder {folder} has no {WEIGHTS}, nor one other weights file; it has {names}.{hint}")


def readable_in(files: Sequence[Path]) -> list[Path]:
    """Those that `load` reads, but for hidden ones, as some systems and programs leave them."""
    return [file for file in files if file.suffix in READABLE and not file.name.startswith(".")]


def has_usual_pickle(files: Sequence[Path]) -> bool:
    """Whether there are pickled weights that timm and transformers would open."""
    return any(file.name in USUAL_PICKLES for file in files)


def _folders_of_models(files: Sequence[Path]) -> list[Path]:
    return [file for file in files if (file / WEIGHTS).exists() or (file / INDEX).exists()]


def _parts_of(path: Path) -> list[Path]:
    """The files that hold the tensors: of an index its shards."""
    if path.suffix != ".json":
        return [path]
    names = sorted(set(read_json(path, SHARDS)["weight_map"].values()))
    return [path.parent / name for name in names]


def _refuse_absent(index: Path, entries: Mapping[str, Entry]) -> None:
    """Makes sure that shards have all that their index names: without a head, say, they would be another model.

    Raises:
        CheckpointError: They have not.
    """
    for name, shard in read_json(index, SHARDS)["weight_map"].items():
        if name not in entries:
            raise CheckpointError(
                f"{shown(str(index), 1000)} says that {shown(shard)} has {shown(name)}, and no shard has it: one of "
                "them is of another model. Fetch all of them again, from one place."
            )


def metadata_of(file: Path) -> dict[str, str]:
    """What a safetensors file says of itself, once its types, shapes and offsets are checked: no gaps, no overlaps.

    Raises:
        Exception: Of whatever kind the format's library has for a damaged file.
    """
    try:
        opened: Any = safetensors.safe_open(file, framework="pt", backend="pread")
    except TypeError:  # before safetensors 0.8: it maps the file for as long as it is open, which is not long
        opened = safetensors.safe_open(file, framework="pt")
    with opened:
        return opened.metadata() or {}


def _open_safetensors(file: Path, stack: ExitStack) -> dict[str, Entry]:
    opened = stack.enter_context(FileIO(file))
    length = int.from_bytes(opened.read(8), "little")
    if length > MOST_BYTES:
        raise ValueError(f"its header would be {length} bytes long, and at most {MOST_BYTES} are read")
    metadata_of(file)
    header = json.loads(opened.read(length), object_pairs_hook=_each_once)
    header.pop("__metadata__", None)
    _check_names(list(header))
    in_file_order = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    entries = {}
    for name, tensor in in_file_order:
        start = 8 + length + tensor["data_offsets"][0]
        shape, dtype = tuple(tensor["shape"]), tensor["dtype"]
        entries[name] = Entry(shape, dtype, partial(_read_bytes, opened, start, shape, dtype))
    return entries


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON; of two values of a name, one reader may take the first and another the last."""
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


def _check_names(names: Sequence[str]) -> None:
    """Makes sure that names of tensors can be gone through, and printed.

    Raises:
        ValueError: They are too many, too long, unprintable, or not different.
    """
    if len(names) > MOST_TENSORS:
        raise ValueError(f"it has {len(names)} tensors, and at most {MOST_TENSORS} are read")
    for name in names:
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise ValueError(f"the name of a tensor is no printable text of at most {LONGEST_NAME} letters: {name!r}")
    if len(set(names)) < len(names):
        raise ValueError("a name is there twice")


def _check_shapes(entries: Mapping[str, Entry]) -> None:
    """Makes sure that torch can count each side: where another is 0, no bytes are missing for it.

    Raises:
        ValueError: It cannot.
    """
    for name, entry in entries.items():
        if max(entry.shape, default=0) > LONGEST_SIDE:
            raise ValueError(f"{name} would be of shape {entry.shape}")


def _read_bytes(opened: FileIO, start: int, shape: Shape, dtype: str) -> Tensor:
    opened.seek(start)
    return _filled(opened.readinto, shape, dtype)


def _filled(read_into: Callable[[memoryview], int | None], shape: Shape, dtype: str) -> Tensor:
    """A tensor whose bytes are read one after the other."""
    tensor = torch.empty(shape, dtype=FLOATS[dtype], device="cpu")
    missing = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
    while missing:
        count = read_into(missing[:BLOCK])
        if not count:
            raise EOFError("it ends early")
        missing = missing[count:]
    return tensor


class NpyHeader(NamedTuple):
    """What numpy says before the values of an array."""

    shape: Shape
    kind: str
    columns_first: bool
    length: int  # of all that stands before the values, in bytes


def _open_npz(file: Path, stack: ExitStack) -> dict[str, Entry]:
    with open(file, "rb") as opened:
        if not opened.read(2).startswith(b"PK"):  # zipfile would look for an archive behind what is there
            raise ValueError("it does not begin as an archive")
    archive = stack.enter_context(zipfile.ZipFile(file))
    members = archive.infolist()
    names = [member.filename.removesuffix(".npy") for member in members]
    _check_names(names)
    _refuse_bomb(members, file.stat().st_size)
    entries = {}
    for name, member in zip(names, members, strict=True):
        with archive.open(member) as npy:
            header = _npy_header(npy)
        kind = NPY_TYPES.get(header.kind, header.kind)
        if kind in FLOATS:
            needed = math.prod(header.shape) * FLOATS[kind].itemsize
            if member.file_size != header.length + needed:
                raise ValueError(f"{name} has {member.file_size - header.length} bytes of values, and not {needed}")
        entries[name] = Entry(header.shape, kind, partial(_read_npy, archive, member, header))
    return entries


def _refuse_bomb(members: Sequence[zipfile.ZipInfo], size: int) -> None:
    """Makes sure that an archive is packed as numpy does it, and unpacks to what weights may be.

    Raises:
        ValueError: It is not, or does not.
    """
    for member in members:
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{member.filename} is compressed in a way that numpy never writes")
    unpacked = sum(member.file_size for member in members)
    if unpacked > 10 * size + ROOM_TO_UNPACK:
        raise ValueError(f"it would unpack to {unpacked} bytes from {size}, as no trained weights do")


def _npy_header(npy: IO[bytes]) -> NpyHeader:
    """A magic, a version, the length of a Python literal, and that literal: shape, type, whether columns come first."""
    magic = npy.read(8)
    length_of_length = 2 if magic[6:7] == b"\x01" else 4
    length = int.from_bytes(npy.read(length_of_length), "little")
    if magic[:6] != b"\x93NUMPY" or magic[6:7] not in (b"\x01", b"\x02", b"\x03") or length > LONGEST_NPY_HEADER:
        raise ValueError("a member is no .npy file")
    header = ast.literal_eval(npy.read(length).decode("latin1"))
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("a member is no .npy file")
    shape, columns_first = header["shape"], header["fortran_order"]
    if not isinstance(shape, tuple) or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"{shown(repr(shape))} is no shape")
    if type(columns_first) is not bool:
        raise ValueError(f"fortran_order is {shown(repr(columns_first))}, neither True nor False")
    return NpyHeader(shape, shown(str(header["descr"])), columns_first, 8 + length_of_length + length)


def _read_npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, header: NpyHeader) -> Tensor:
    with archive.open(member) as npy:
        npy.read(header.length)
        shape = header.shape[::-1] if header.columns_first else header.shape
        values = _filled(cast(BufferedIOBase, npy).readinto, shape, NPY_TYPES[header.kind])
    return values.permute(*reversed(range(len(shape)))) if header.columns_first else values
