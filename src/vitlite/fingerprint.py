"""What weights are known again by: the hash of their file, as long as they are those; else one of what is in memory."""

import ctypes
from hashlib import sha256
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitlite.errors import InputError

if TYPE_CHECKING:
    from vitlite.model import ViT

SAMPLED = 61  # numbers of a weight, or nearly


def bytes_of(tensor: Tensor) -> "ctypes.Array[ctypes.c_char]":
    """What a tensor holds, row by row; without a copy where it lies so on a CPU. numpy need not be there."""
    plain = tensor.detach().cpu().resolve_neg().contiguous()
    memory = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())
    memory.owner = plain  # type: ignore[attr-defined]  # which must not be freed before this is
    return memory


def sample_of(model: "ViT") -> Tensor:
    """Some numbers of each weight but the head's, by which training, pruning and the like are noticed."""
    parts = []
    for name, weight in model.named_parameters():
        if not name.startswith("head."):
            step = max(weight.numel() // SAMPLED, 1) | 1  # odd, so that it goes through all columns
            parts.append(weight.detach().flatten()[::step])
    return torch.cat(parts).cpu()


def hash_of_weights(model: "ViT") -> str:
    """Of their file, where they came from one and are as they were; else of what is in memory, but for the head.

    An optimized model has packed its weights, and says what this was before.

    Raises:
        InputError: They are quantised or sharded: what they hold is not in memory as it seems.
    """
    kept: str | None = model.__dict__.get("_hash_of_weights")
    if kept is not None:
        return kept
    for name, weight in model.named_parameters():
        if type(weight) is not nn.Parameter:
            raise InputError(
                f"{name} is a {type(weight).__name__}, and no plain tensor: its values tell of no other model.",
                python="Use the model as it was created.",
                command="",
            )
    if model.source is not None and _is_as_loaded(model):
        return model.source.sha256
    found = sha256()
    for name, weight in sorted(model.named_parameters()):
        if not name.startswith("head."):
            found.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            found.update(bytes_of(weight))
    return f"in memory {found.hexdigest()}"


def _is_as_loaded(model: "ViT") -> bool:
    loaded: Tensor | None = model.__dict__.get("_sample")
    if loaded is None:
        return False
    now = sample_of(model)
    return torch.equal(loaded.to(now.dtype), now)
