"""Read weights files: first the names, shapes and dtypes of all tensors, then the values of each tensor on request.

The safetensors library checks the header. This module then reads the values, each tensor into its own memory. The
library would map the file into memory, and a program that overwrites the file would then change the model.
"""

import ctypes
import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import safetensors
import torch
from torch import Tensor

from vitlite.errors import CheckpointError, ConfigError, VitliteError, closest, missing_extra
from vitlite.storage import MAX_JSON, Verified, read_json
from vitlite.zoo import registry

Shape = tuple[int, ...]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
RUN_STATE = "state.safetensors"  # the state of a training run; the models are in folders beside this file
READABLE = (".safetensors", ".npz")
USUAL_PICKLE = "pytorch_model.bin"  # the name in repositories of timm and transformers
PICKLES = (".bin", ".pth", ".pt", ".th", ".ckpt", ".tar")  # .pth.tar is common for ImageNet models
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NUMPY_FLOATS = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "|V2": "BF16"}  # numpy has no name for bfloat16

# Limits on the time and memory that a damaged or hostile file can take.
MAX_HEADER = MAX_JSON
MAX_TENSORS = 20_000  # a ViT with 40 blocks has 500
MAX_NAME = 500
MAX_UNPACKED = 2**28  # bytes beyond ten times the size of an .npz; trained weights hardly compress

SHARD = re.compile(r"-\d{5}-of-(\d{5})\.\w+$")


class Entry(NamedTuple):
    """A tensor in a weights file, whose values can be read with `read`."""

    shape: Shape
    dtype: str  # safetensors' name of the dtype, a key of `FLOATS` if supported
    read: Callable[[], Tensor]


class WeightsFile(NamedTuple):
    """The tensors of an open weights file, or of all shards of an index."""

    path: Path  # the weights file, or the index of the shards
    files: Sequence[Path]  # the files that contain the tensors
    entries: Mapping[str, Entry]  # the tensors by name, in file order
    shapes: Mapping[str, Shape]
    header: Mapping[str, str]  # the metadata in the header of a safetensors file; empty for shards

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return FLOATS[self.entries[name].dtype]

    def read(self, name: str) -> Tensor:
        """Read a tensor into its own memory.

        Raises:
            CheckpointError: The file is damaged.
        """
        with naming_damage(self.path):
            return self.entries[name].read()

    def check_dtypes(self, names: Sequence[str]) -> None:
        """Check that tensors have a floating-point dtype.

        Raises:
            CheckpointError: A tensor has another dtype.
        """
        for name in names:
            dtype = self.entries[name].dtype
            if dtype not in FLOATS:
                raise CheckpointError(
                    f"{name} has the dtype {dtype}, but vitlite supports only {', '.join(FLOATS)}. Use a file with "
                    "weights that are not quantised."
                )


class Location(NamedTuple):
    """The location of weights on the local disk, and where they came from."""

    path: Path
    metadata_folder: Path | None = None  # the folder of the config.json that describes the weights
    repo: str | None = None
    commit: str | None = None
    sha256: str | None = None
    verified: Verified | None = None


def locate(source: str | PathLike[str]) -> Location:
    """Return the location of weights on the local disk, after downloading a Hub repository if necessary.

    An existing path takes priority over a repository of the same name.

    Args:
        source: A path, "owner/name" or "owner/name@revision".

    Raises:
        CheckpointError: `source` is neither an existing file or folder nor the name of a repository.
        ConfigError: `source` is empty.
        DownloadError: The repository has no weights that vitlite can read, or cannot be reached.
    """
    path = path_of(source)
    if os.path.lexists(path):  # a broken link is an error, too
        return Location(path, metadata_folder(path))
    if not isinstance(source, str) or _must_be_path(source):
        raise CheckpointError(f"There is no file or folder {path}. Check the path.")
    from vitlite.checkpoints.hub import fetch_repository
    from vitlite.zoo.download import UnreachableError

    try:
        location = fetch_repository(source)
    except UnreachableError as error:
        raise error.within(f"There is no file or folder {path}, and the Hub cannot be reached") from error
    if location is None:
        raise CheckpointError(
            f"There is no file or folder {path}. Pass an existing path or a Hub repository (owner/name or "
            f"owner/name@revision).{closest(source, registry.NAMES)}"
        )
    return location


def _must_be_path(source: str) -> bool:
    """Return whether a source can only be a path, and not the name "owner/name" of a Hub repository."""
    name = source.partition("@")[0]
    owner, _, rest = name.partition("/")
    suffixes = (*READABLE, *PICKLES, ".json")
    is_below_folder = bool(rest) and Path(owner).is_dir()
    return is_below_folder or owner in ("", ".", "..", "~") or "/" in rest or name.endswith(suffixes)


@contextmanager
def open_weights(path: Path) -> Iterator[WeightsFile]:
    """Open a .safetensors or .npz file, an index of shards, or a folder that contains one of them.

    Raises:
        CheckpointError: There are no weights, or the weights are damaged or pickled.
    """
    path, files = files_of(path)
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    with ExitStack() as stack:
        for file in files:
            with naming_damage(file):
                if file.suffix == ".npz":
                    found = _open_npz(file, stack)
                else:
                    found, metadata = _open_safetensors(file, stack)
                if len(found) > MAX_TENSORS or any(len(name) > MAX_NAME for name in found):
                    raise ValueError(
                        f"the file has more than {MAX_TENSORS} tensors, or a name of more than {MAX_NAME} characters"
                    )
            if entries.keys() & found.keys():
                twice = min(entries.keys() & found.keys())
                raise CheckpointError(
                    f"{path}: more than one shard contains the tensor {twice}. Download all shards again."
                )
            entries |= found
        if path.suffix == ".json":
            missing = _weight_map(path).keys() - entries.keys()
            if missing:
                raise CheckpointError(
                    f"{path} lists the tensor {min(missing)}, which no shard contains. Download the index and all "
                    "shards again."
                )
        shapes = {name: entry.shape for name, entry in entries.items()}
        yield WeightsFile(path, files, entries, shapes, metadata if len(files) == 1 else {})


def files_of(path: Path) -> tuple[Path, list[Path]]:
    """Return the weights file or index at a path or in a folder, and the files that contain the tensors.

    Raises:
        CheckpointError: There are no weights that vitlite can read.
    """
    if path.is_dir():
        path = weights_in(path)
    if path.suffix in PICKLES:
        raise CheckpointError(
            f"{path} is a pickle, which can run code when opened. Convert the file to safetensors first: "
            f"vitlite convert {path} OUT.safetensors --to timm"
        )
    check_not_a_shard(path)
    if path.suffix == ".json":
        return path, [path.parent / name for name in sorted(set(_weight_map(path).values()))]
    if path.suffix not in READABLE:
        raise CheckpointError(f"{path} is not a weights file. Pass a .safetensors or .npz file, {INDEX}, or a folder.")
    return path, [path]


def _weight_map(index: Path) -> dict[str, str]:
    """Read an index of shards. Return the file name of the shard that contains each tensor."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(
            f"{index}: weight_map must be a JSON object, got {weight_map!r}. Download the file again."
        )
    for name, shard in weight_map.items():
        is_name = isinstance(shard, str) and Path(shard).name == shard and "\\" not in shard
        if not is_name or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: weight_map[{name!r}] must be the name of a .safetensors file in the same folder, got "
                f"{shard!r}. Correct the file or download it again."
            )
    return weight_map


def weights_in(folder: Path) -> Path:
    """Return the weights file in a folder.

    A file with a usual name, such as model.safetensors, takes priority. Otherwise, the folder must contain exactly one
    weights file or pickle.

    Raises:
        CheckpointError: There is no weights file, or more than one.
    """
    for name in (WEIGHTS, INDEX, USUAL_PICKLE):
        if (folder / name).exists():
            return folder / name
    with naming_damage(folder):
        names = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
    weights = [name for name in names if name.endswith((*READABLE, *PICKLES)) and name != RUN_STATE]
    if len(weights) == 1:
        return folder / weights[0]
    text = f"The folder {folder} contains neither {WEIGHTS} nor exactly one other weights file. "
    models = [name for name in names if (folder / name / WEIGHTS).exists()]
    if models:
        raise CheckpointError(f"{text}Pass a folder inside it: {', '.join(str(folder / name) for name in models)}.")
    raise CheckpointError(f"{text}Pass {'one of ' + ', '.join(weights) if weights else 'a folder with weights'}.")


def check_not_a_shard(path: Path) -> None:
    """Check that a file is not one of several shards, by its name.

    Raises:
        CheckpointError: The file is one of several shards.
    """
    match = SHARD.search(path.name)
    if match and int(match[1]) > 1:
        raise CheckpointError(
            f"{path} is only one of {int(match[1])} shards of a model. Pass the folder, or the index {INDEX}. If the "
            "shards are .bin files, save the model again as safetensors with the library that wrote them."
        )


def metadata_folder(path: Path) -> Path | None:
    """Return the folder whose config.json describes the weights, or None if the file has an unusual name."""
    if path.is_dir():
        return path
    return path.parent if path.name in (WEIGHTS, INDEX, USUAL_PICKLE) else None


def path_of(place: Any, what: str = "weights") -> Path:
    """Convert an argument to a path, and expand ~ to the home folder.

    Args:
        place: The argument.
        what: The name of the argument for the error message.

    Raises:
        ConfigError: The argument is not a path, or is empty. (pathlib would take an empty path for the current folder.)
    """
    if not isinstance(place, (str, PathLike)) or not str(place).strip():
        raise ConfigError(f"{what} must be a path, got {place!r}.")
    return Path(os.path.expanduser(place))


@contextmanager
def naming_damage(file: Path) -> Iterator[None]:
    """Turn any exception that is raised while reading a file into a CheckpointError that names the file."""
    try:
        yield
    except VitliteError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"Cannot read {file}: {error.strerror or error}. Check the path and the permissions."
        ) from None
    except Exception as error:  # for damaged files, readers raise errors of many types
        reason = f"{type(error).__name__}: {error}"[:500]
        raise CheckpointError(f"{file} is damaged or not a {file.suffix} file ({reason}). Download it again.") from None


def _open_safetensors(file: Path, stack: ExitStack) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors of a safetensors file in file order, and its metadata."""
    opened = stack.enter_context(file.open("rb"))
    length = int.from_bytes(opened.read(8), "little")
    if length > MAX_HEADER:
        raise ValueError(f"the header has {length} bytes, but at most {MAX_HEADER} are supported")
    metadata = checked_metadata(file)
    header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    entries = {}
    for _, name in sorted((tensor["data_offsets"], name) for name, tensor in header.items()):  # in file order
        tensor = header[name]
        start = 8 + length + tensor["data_offsets"][0]
        shape, dtype = tuple(tensor["shape"]), tensor["dtype"]
        entries[name] = Entry(shape, dtype, partial(_read_bytes, opened, start, shape, dtype))
    return entries, metadata


def checked_metadata(file: Path) -> dict[str, str]:
    """Check the header of a safetensors file with the safetensors library, and return the metadata in the header.

    Raises:
        Exception: The file is damaged. `naming_damage` handles the exceptions of the library.
    """
    try:
        opened: Any = safetensors.safe_open(file, framework="pt", backend="pread")
    except TypeError:  # before safetensors 0.8
        opened = safetensors.safe_open(file, framework="pt")
    with opened:
        return opened.metadata() or {}


def _read_bytes(opened: BinaryIO, start: int, shape: Shape, dtype: str) -> Tensor:
    tensor = torch.empty(shape, dtype=FLOATS[dtype], device="cpu")
    opened.seek(start)
    # The memory of the tensor. tensor.numpy() would give it, too, but numpy is optional.
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    if opened.readinto(memory) < tensor.nbytes:  # type: ignore[attr-defined]
        raise EOFError("the file ends early")
    return tensor


def _open_npz(file: Path, stack: ExitStack) -> dict[str, Entry]:
    """Return the arrays of an .npz file, the format of Google's ViTs."""
    try:
        import numpy as np
    except ImportError:
        raise missing_extra("Reading an .npz file", "images") from None
    archive: Any = np.load(stack.enter_context(file.open("rb")), allow_pickle=False)
    if isinstance(archive, np.ndarray):
        raise ValueError("the file contains a single array, not an archive of arrays")
    stack.enter_context(archive)
    packed: zipfile.ZipFile = archive.zip
    members = packed.infolist()
    unpacked = sum(member.file_size for member in members)
    if unpacked > 10 * file.stat().st_size + MAX_UNPACKED:
        raise ValueError(f"the arrays would take {unpacked} bytes, which is too much for a file of this size")
    entries = {}
    for member in members:
        with packed.open(member) as opened:
            if np.lib.format.read_magic(opened) == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(opened)
            else:
                shape, _, dtype = np.lib.format.read_array_header_2_0(opened)
        if math.prod(shape) * dtype.itemsize > member.file_size:
            raise ValueError(f"{member.filename} has too few bytes for an array of the shape {shape}")
        name = member.filename.removesuffix(".npy")
        entries[name] = Entry(shape, NUMPY_FLOATS.get(dtype.str, str(dtype)), partial(_read_array, archive, name))
    return entries


def _read_array(archive: Any, name: str) -> Tensor:
    array = archive[name]
    if array.dtype.str == "|V2":
        return torch.from_numpy(array.view("<i2")).view(torch.bfloat16)
    return torch.from_numpy(array)
