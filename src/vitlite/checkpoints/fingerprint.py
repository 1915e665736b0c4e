"""What weights are known again by: the hash of their file, as long as they are those; else one of what is in memory."""

import ctypes
import json
from collections.abc import Iterator
from hashlib import sha256

import torch
from torch import Tensor, nn

from vitlite.checkpoints.forensics import COMPUTING, differences
from vitlite.errors import InputError
from vitlite.nn.vit import ViT, model_on_meta

SMALL = 10_000  # numbers of a weight that is looked at whole, as biases, norms and tokens are


def bytes_of(tensor: Tensor) -> "ctypes.Array[ctypes.c_char]":
    """What a tensor holds, row by row; without a copy where it lies so on a CPU. numpy need not be there."""
    plain = tensor.detach().cpu().resolve_neg().contiguous()
    memory = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())
    memory.owner = plain  # type: ignore[attr-defined]  # which must not be freed before this is
    return memory


def sample_of(model: ViT) -> Tensor | None:
    """Each small weight but the head's, and one number or two of each row of the large ones; none of meta.

    Training, pruning and edits of whole rows are noticed by these, and single numbers of a large weight are not. All
    numbers of a ViT-B would take 10 ms and more at each load, also of those who never ask.
    """
    parts = []
    for name, weight in _weights_of(model):
        if weight.is_meta:
            return None
        if not name.startswith("head."):
            step = 1 if weight.numel() <= SMALL else max(weight.shape[-1] - 1, 1)  # so that none is passed over
            parts.append(weight.detach().flatten()[::step])
    return torch.cat(parts).cpu() if parts else torch.empty(0, device="cpu")


def _weights_of(model: ViT) -> Iterator[tuple[str, nn.Parameter]]:
    """By name; of an optimized model, which lists none, those that were not packed."""
    return nn.Module.named_parameters(model)


def hash_of_weights(model: ViT) -> str:
    """Of their file, where they came from one and are as they were; else of what is in memory, but for the head.

    An optimized model keeps the hash of the weights that it packed.

    Raises:
        InputError: They are quantised or sharded: what they hold is not in memory as it seems.
    """
    packed: str | None = model.__dict__.get("_weights_hash")
    return packed or hash_of_file(model) or _hash_of_memory(model)


def hash_of_answers(model: ViT) -> str:
    """Of what makes answers of vectors, and of what they are called: the weights of the head, and the labels."""
    found = sha256(json.dumps(model.labels).encode())
    for name, weight in sorted(model.head.named_parameters()):
        found.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        found.update(bytes_of(weight))
    return found.hexdigest()


def hash_of_file(model: ViT) -> str | None:
    """Of the file that weights came from, if they are what they were; else none."""
    loaded: Tensor | None = model.__dict__.get("_sample")
    if model.source is None or loaded is None or _strange(model):
        return None
    return model.source.sha256 if _is_alike(loaded, sample_of(model)) else None


def _is_alike(before: Tensor | None, now: Tensor | None) -> bool:
    """Whether a sample is what it was; narrowed since then, as that would be."""
    return before is not None and now is not None and torch.equal(before.to(now.dtype), now)


def _strange(model: ViT) -> str:
    """Why the weights do not tell how a model computes, but for its head; nothing where they do."""
    return _other_than_plain(model) or _other_than_config(model)


def _other_than_plain(model: ViT) -> str:
    """The first weight that is no plain one, and what it is; nothing where all are."""
    for name, weight in _weights_of(model):
        if type(weight) is not nn.Parameter or weight.is_meta:
            return (
                f"{name} is {'without values' if weight.is_meta else f'a {type(weight).__name__}'}, and no plain tensor"
            )
    return ""


def _other_than_config(model: ViT) -> str:
    """The first layer, setting, tensor or method that is not what the config says; nothing where all are."""
    for name in COMPUTING:
        if hasattr(ViT, name) and getattr(type(model), name) is not getattr(ViT, name):
            return f"This model is a {type(model).__name__} with its own {name}, which no config tells"
    for name, found, wanted in differences(model):
        if name.partition(".")[0] != "head":
            return f"{name} is {found}, and not {wanted} as its config says"
    tensors = dict(nn.Module.named_parameters(model_on_meta(model.config)))
    for name in (*dict(model.named_parameters()), *dict(model.named_buffers())):
        if name not in tensors and not name.startswith("head."):
            return f"This model has a tensor {name}, of which its config knows nothing"
    return ""


def _hash_of_memory(model: ViT) -> str:
    _refuse_strange(_strange(model))
    found = sha256()
    for name, weight in sorted(_weights_of(model)):
        if not name.startswith("head."):
            found.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            found.update(bytes_of(weight))
    return f"in memory {found.hexdigest()}"


def _refuse_strange(strange: str) -> None:
    if strange:
        raise InputError(
            f"{strange}: what vectors of it mean, nobody knows later.",
            python="Use the model as it was created.",
            command="",
        )
