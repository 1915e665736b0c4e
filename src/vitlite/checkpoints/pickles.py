"""Pickles (.pth, .bin), which `convert` alone opens, and only with weights_only=True: their tensors, and nothing else.

A network may lie deep in what a training script kept. Which one it is has to be certain, and it is no larger in memory
than weights may be for the size of the file.
"""

import os
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vitlite.checkpoints.metadata import BESIDE_WEIGHTS
from vitlite.checkpoints.reader import (
    INDEX,
    PICKLES,
    READABLE,
    ROOM_TO_UNPACK,
    USUAL_PICKLE,
    WEIGHTS,
    Shape,
    check_not_a_shard,
    has_usual_pickle,
    readable_in,
)
from vitlite.checkpoints.save import write_tensors
from vitlite.errors import CheckpointError, ConfigError, shown

SCRIPT_OPTIONS = SimpleNamespace, "argparse.Namespace"  # which training scripts keep beside weights; it runs no code
ARCHIVE = b"PK\3\4"  # how a pickle begins that torch opens as an archive
NESTED = ("model", "state_dict", "encoder", "teacher", "module")  # where training scripts keep the network
AVERAGED = ("model_ema", "state_dict_ema", "ema", "target_encoder")  # where they keep an average of its weights
DEEPEST = 10  # tables in tables until there are tensors
LOSSES = (
    "dino_loss",
    "ibot_loss",
)  # which scripts keep whose authors hand out and measure the teacher, not the student


@contextmanager
def without_pickles(source: Path) -> Iterator[Path]:
    """The source itself; or of a pickle, a folder with its tensors in a safetensors file, which is gone afterwards."""
    pickle = pickle_of(source)
    if pickle is None:
        yield source
        return
    tensors = _unpickled(pickle)
    with ExitStack() as stack:
        with _explained_aside(pickle):
            folder = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
            write_tensors(folder / WEIGHTS, tensors)
            _copy_metadata_files(pickle, folder)
        del tensors  # or they would be in memory twice
        try:
            yield folder
        except (CheckpointError, ConfigError) as error:  # which names files that nobody knows of
            error.text = error.text.replace(str(folder / WEIGHTS), str(pickle)).replace(str(folder), str(pickle.parent))
            raise


@contextmanager
def _explained_aside(pickle: Path) -> Iterator[None]:
    """Says what to do where what a pickle holds cannot be put into a file of its own."""
    try:
        yield
    except OSError as error:
        place = "" if error.filename is None else f" ({shown(str(error.filename), 1000)})"
        raise CheckpointError(
            f"{pickle} cannot be rewritten in the folder for temporary files, which comes first: "
            f"{error.strerror or error}{place}. Make room there, or name another folder in the variable TMPDIR."
        ) from None


def _copy_metadata_files(pickle: Path, folder: Path) -> None:
    """Puts the JSON that speaks for a pickle into a folder.

    Raises:
        CheckpointError: It is there, and is no file: without it, the weights would be taken for others.
        OSError: It cannot be read, or not be written.
    """
    for beside in described_in(pickle):
        if not os.path.isfile(beside):  # who opens a pipe may wait for ever
            raise CheckpointError(
                f"{beside} is no file, or a link that leads nowhere, and would say what {pickle.name} is. Put the file "
                "there, or move it away."
            )
        shutil.copyfile(beside, folder / beside.name)


def described_in(pickle: Path) -> list[Path]:
    """The JSON beside a pickle that speaks for it; none where it has a name of its own, and other weights are there.

    Raises:
        CheckpointError: Nobody may look whether there are.
    """
    there = [file for file in map(pickle.with_name, BESIDE_WEIGHTS) if os.path.lexists(file)]
    if not there or pickle.name == USUAL_PICKLE or _is_alone(pickle):
        return there
    return []


def _is_alone(pickle: Path) -> bool:
    """Whether no other weights are in its folder, which the JSON there could be of."""
    endings = (*READABLE, *PICKLES, ".index.json")
    weights = [file.name for file in _files_in(pickle.parent) if file.name.endswith(endings) and not file.is_dir()]
    return weights == [pickle.name]


def _files_in(folder: Path) -> list[Path]:
    """What is in a folder, by name.

    Raises:
        CheckpointError: Nobody may look.
    """
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"Cannot look into the folder {folder}: {error.strerror}.") from None


def pickle_of(source: Path) -> Path | None:
    """The pickle that is to be opened: the source, or in a folder without other weights the only one.

    Raises:
        CheckpointError: It is no file; or which of several is meant, nobody said.
    """
    pickle = source if source.suffix in PICKLES else None
    if os.path.isdir(source):
        pickle = _only_pickle_in(source)
    if pickle is not None and not os.path.isfile(pickle):
        raise CheckpointError(f"There is no file {pickle}.")
    if pickle is not None:
        check_not_a_shard(pickle)
    return pickle


def _only_pickle_in(folder: Path) -> Path | None:
    """The pickle of a folder; none where there is something for `load`, which goes first.

    Raises:
        CheckpointError: There are several; or several files for `load` beside it; or nobody may look.
    """
    files = _files_in(folder)
    weights = readable_in(files)
    pickles = [file for file in files if file.suffix in PICKLES and not file.is_dir()]
    if not pickles or any(file.name in (WEIGHTS, INDEX) for file in files):
        return None
    if len(weights) == 1 and not has_usual_pickle(files):
        return None
    candidates = [*weights, *pickles]
    if len(candidates) > 1:
        names = shown(", ".join(file.name for file in candidates), 1000)
        raise CheckpointError(
            f"The folder {folder} has no {WEIGHTS}, nor one other weights file; it has {names}. Name the one of them."
        )
    return pickles[0]


def _unpickled(pickle: Path) -> dict[str, Tensor]:
    """The tensors of a network in a pickle, however deep a training script put them.

    Raises:
        CheckpointError: It holds more than tensors and plain values, or no network; or it is small, and they are not.
    """
    content = _opened(pickle)
    for _ in range(DEEPEST):
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{pickle} has no tensors with names, but one {type(content).__name__}.")
        tensors = _tensors_with_names(content)
        if tensors:
            _refuse_valueless(pickle, tensors)
            _refuse_bomb(pickle, sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()))
            return _without_compiler_s_word(pickle, tensors)
        content = _network_in(pickle, content)
    raise CheckpointError(f"{pickle} has no tensors with names in its first {DEEPEST} tables, each in the other.")


def _opened(pickle: Path) -> Any:
    """What a pickle holds: tensors, plain values, and options of a script.

    Raises:
        CheckpointError: It holds more, is damaged, or is packed as no weights are.
    """
    try:
        _refuse_bomb(pickle, _bytes_unpacked(pickle))
        damaged = _damaged_member(pickle)
        if damaged:
            raise _unopened(pickle, f"{damaged} in it does not have its checksum")
        with torch.serialization.safe_globals([SCRIPT_OPTIONS]):
            return torch.load(pickle, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a file that is no pickle makes torch raise nearly anything
        raise _unopened(pickle, str(error)) from None


def _bytes_unpacked(pickle: Path) -> int:
    """What the archive of a pickle takes in memory; one that is none, as older versions of torch wrote, its size."""
    if not _is_archive(pickle):
        return pickle.stat().st_size
    with zipfile.ZipFile(pickle) as archive:
        return sum(member.file_size for member in archive.infolist())


def _damaged_member(pickle: Path) -> str | None:
    """What in an archive is other than it was written, which torch does not look at; torch may leave checksums out."""
    if not _is_archive(pickle):
        return None
    with zipfile.ZipFile(pickle) as archive:
        if all(member.CRC == 0 for member in archive.infolist()):
            return None
        return archive.testzip()


def _is_archive(pickle: Path) -> bool:
    with open(pickle, "rb") as file:
        return file.read(len(ARCHIVE)) == ARCHIVE


def _refuse_bomb(pickle: Path, needed: int) -> None:
    """Makes sure that a pickle becomes no larger than weights may: one number may stand for a million in it.

    Raises:
        CheckpointError: It would, by the limit that an .npz has.
    """
    size = pickle.stat().st_size
    if needed > 10 * size + ROOM_TO_UNPACK:
        raise CheckpointError(
            f"{pickle} would unpack to {needed} bytes from {size}, as no trained weights do. Get the weights from "
            "somewhere else."
        )


def _tensors_with_names(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    tensors = {}
    for name, value in content.items():
        if isinstance(name, str) and isinstance(value, Tensor):
            tensors[name] = value
    return tensors


def _refuse_valueless(pickle: Path, tensors: Mapping[str, Tensor]) -> None:
    """Makes sure that tensors have all their values in memory, one beside the other.

    Raises:
        CheckpointError: One is sparse, nested, or of torch's meta device.
    """
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            raise CheckpointError(
                f"{shown(name)} in {pickle} is a sparse tensor, a nested one, or one without values, and no plain one."
            )


def _without_compiler_s_word(pickle: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names, into which torch.compile puts a word of its own for what it wraps.

    Raises:
        CheckpointError: Two would have one name.
    """
    plain = {name.replace("_orig_mod.", ""): value for name, value in tensors.items()}
    if len(plain) < len(tensors):
        raise CheckpointError(
            f"{pickle} has tensors with torch.compile's _orig_mod. in their names, and the same without."
        )
    return plain


def _unopened(pickle: Path, reason: str) -> CheckpointError:
    """The error for a pickle that torch does not open, or not without running what it says."""
    text = f"{pickle} cannot be opened with weights_only=True"
    found = re.search(r"Unsupported global: GLOBAL (\S+)", reason)
    if found is None:
        return CheckpointError(f"{text}: {shown(reason.partition(chr(10))[0], 500)}")
    keep = (
        'whole = torch.load(path, weights_only=False); torch.save(whole.state_dict(), "tensors.pth"), or of a table '
        'whole["state_dict"]'
    )
    return CheckpointError(
        f"{text}: beside tensors it has {shown(found[1])}, which could run code.",
        python=f"If you trust where it is from, keep its tensors alone: {keep}.",
        command=f"If you trust where it is from, keep its tensors alone, in Python: {keep}.",
    )


def _network_in(pickle: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a training script keeps the network in.

    Raises:
        CheckpointError: It is in none of the usual places, or an average of it, or another like it, is there too.
    """
    found = next((name for name in NESTED if isinstance(content.get(name), Mapping)), None)
    left_out = "student" if found == "teacher" and any(loss in content for loss in LOSSES) else None
    for name in content:
        if name in AVERAGED:
            raise _two_networks(f"{pickle} has averaged weights, {name}, beside others.", name)
        if found and name not in (found, left_out) and _are_alike(content[found], content[name]):
            raise _two_networks(f"{pickle} has {found} and {shown(name)}, two networks of the same sizes.", name)
    if found:
        network: Mapping[str, Any] = content[found]
        return network
    raise CheckpointError(f"{pickle} has no tensors, but: {shown(', '.join(map(str, content)))}.")


def _two_networks(problem: str, name: str) -> CheckpointError:
    choice = (
        f"torch.save(torch.load(path, weights_only=True)[{name!r}], 'chosen.pth'), after "
        "torch.serialization.add_safe_globals([argparse.Namespace])."
    )
    return CheckpointError(problem, python=f"Choose: {choice}", command=f"Choose, in Python: {choice}")


def _are_alike(network: Mapping[str, Any], other: Any) -> bool:
    """Whether what stands beside a network is one too: whether it has weights of most of the same shapes, by name."""
    wanted, there = Counter(_shapes_in(network)), Counter(_shapes_in(other))
    return wanted.total() > 0 and (wanted & there).total() > wanted.total() / 2


def _shapes_in(content: Any) -> list[Shape]:
    """The shapes of all matrices that have names, also deeper inside; an optimizer numbers its own."""
    shapes: list[Shape] = []
    waiting, seen = [content], set()
    while waiting:
        table = waiting.pop()
        if not isinstance(table, Mapping) or id(table) in seen:  # a table may be in itself
            continue
        seen.add(id(table))
        waiting += [value for name, value in table.items() if isinstance(name, str)]
        for value in _tensors_with_names(table).values():
            if value.ndim > 1 and not value.is_nested:  # of which each row has its own
                shapes.append(tuple(value.shape))
    return shapes
