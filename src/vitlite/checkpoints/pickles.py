"""Read pickles (.pth, .bin) for `vitlite convert` with torch.load(weights_only=True), which runs no code."""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vitlite.checkpoints.key_mapping import detect_format
from vitlite.checkpoints.metadata import BESIDE_WEIGHTS
from vitlite.checkpoints.reader import (
    MAX_UNPACKED,
    PICKLES,
    WEIGHTS,
    check_not_a_shard,
    metadata_folder,
    naming_damage,
    weights_in,
)
from vitlite.checkpoints.save import write_tensors
from vitlite.errors import CheckpointError, ConfigError, VitliteError

SCRIPT_OPTIONS = SimpleNamespace, "argparse.Namespace"  # scripts save their options with the weights
MAX_DEPTH = 4  # number of nested dictionaries
COMPILED = "_orig_mod."  # torch.compile adds this prefix to tensor names


@contextmanager
def without_pickle(source: Path, key: str | None = None) -> Iterator[Path]:
    """Yield a path that `load` accepts: the source or, for a pickle, a temporary copy as safetensors.

    Args:
        source: A file or a folder.
        key: The key of the network in a pickle that contains several networks.

    Raises:
        CheckpointError: The pickle contains no ViT, more than one ViT, or objects other than tensors and plain values.
        ConfigError: `key` is not None, but the source is not a pickle.
    """
    path = weights_in(source) if source.is_dir() else source
    if path.suffix not in PICKLES:
        if key is not None:
            raise ConfigError(f"key= (--key) applies only to pickles, but {path} is not a pickle. Leave out key=.")
        yield source
        return
    check_not_a_shard(path)
    tensors = read_pickle(path, key)
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_tensors(folder / WEIGHTS, tensors)
        described_by = metadata_folder(source) or metadata_folder(path)
        for beside in BESIDE_WEIGHTS:
            if described_by is not None and (described_by / beside).exists():
                shutil.copyfile(described_by / beside, folder / beside)
        del tensors  # free the memory before loading the copy
        try:
            yield folder
        except VitliteError as error:
            error.text = error.text.replace(str(folder / WEIGHTS), str(path)).replace(str(folder), str(path.parent))
            raise


def read_pickle(path: Path, key: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of the ViT in a pickle.

    Training scripts save the network together with other objects. The ViT is the dictionary whose keys are tensor names
    of a ViT. If there is more than one, such as a student and a teacher, `key` selects the ViT.

    Raises:
        CheckpointError: The file is damaged, contains no ViT or more than one ViT, or contains objects other than
            tensors and plain values.
    """
    with naming_damage(path):
        try:
            with torch.serialization.safe_globals([SCRIPT_OPTIONS]):
                content = torch.load(path, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            foreign = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
            if foreign is None:
                raise
            raise CheckpointError(
                f"{path} contains an object of the type {foreign[1]}, and loading it could run code. If you trust the "
                "file, save only the tensors in Python: torch.save(torch.load(PATH, weights_only=False).state_dict(), "
                "NEW)."
            ) from None
    found = _find_vits(content)
    if key is None and len(found) > 1:
        raise CheckpointError(f"{path} contains several ViTs: {', '.join(found)}. Choose one with key= (--key).")
    if not found or key not in (None, *found):
        keys = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise CheckpointError(
            f"{path} contains no ViT in a known format{f' under the key {key!r}' if key else ''}. It contains: "
            f"{', '.join(found) or keys}."
        )
    tensors = next(iter(found.values())) if key is None else found[key]
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    if size > 10 * path.stat().st_size + MAX_UNPACKED:  # a small file may expand to huge tensors
        raise CheckpointError(f"{path} is damaged: its tensors would take {size} bytes. Download the file again.")
    return tensors


def _find_vits(content: Any, key: str = "", depth: int = 0) -> dict[str, dict[str, Tensor]]:
    """Find the dictionaries that contain the tensors of a ViT, also in nested dictionaries.

    Each is returned under its key. The keys of nested dictionaries are joined with dots.
    """
    if not isinstance(content, Mapping) or depth > MAX_DEPTH:
        return {}
    named = {name: value for name, value in content.items() if isinstance(name, str)}
    tensors = {name.replace(COMPILED, ""): value for name, value in named.items() if isinstance(value, Tensor)}
    try:
        detect_format(tensors)
    except CheckpointError:
        found: dict[str, dict[str, Tensor]] = {}
        for name, value in named.items():
            found |= _find_vits(value, f"{key}.{name}".lstrip("."), depth + 1)
        return found
    return {key: tensors}
