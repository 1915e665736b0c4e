"""Identify weights by the hash of the weights file or, if they were modified, by the hash of the tensors in memory."""

import ctypes
import json
from collections.abc import Iterable
from hashlib import sha256

import torch
from torch import Tensor

from vitlite.checkpoints.build import sample_of_weights
from vitlite.checkpoints.compare import check_unmodified, find_difference
from vitlite.errors import InputError
from vitlite.nn.vit import ViT


def bytes_of(tensor: Tensor) -> "ctypes.Array[ctypes.c_char]":
    """Return the bytes of a tensor in row-major order, without numpy. A contiguous tensor on the CPU is not copied."""
    plain = tensor.detach().cpu().resolve_neg().contiguous()
    memory = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())
    memory.owner = plain  # type: ignore[attr-defined]  # keeps the tensor alive
    return memory


def hash_of_weights(model: ViT) -> str:
    """Return an identifier of the weights that determine the embeddings: all weights except the head.

    For unmodified weights from a file, the identifier is the sha256 of the file. Otherwise, it is a hash of the
    tensors. An optimized model has the identifier of the original model.

    Raises:
        InputError: The modules or tensors of the model differ from its config.
    """
    stored: str | None = model.__dict__.get("_weights_hash")
    if stored is not None:
        return stored
    check_unmodified(model, "identify the weights of", InputError)
    weights = [(name, weight) for name, weight in model.named_parameters() if not name.startswith("head.")]
    return hash_of_source(model) or f"in memory {_hash_of(weights)}"


def hash_of_source(model: ViT) -> str | None:
    """Return the sha256 of the file that the weights came from, or None if there is none or the weights changed."""
    if model.source is None or model.loaded_sample is None or find_difference(model):
        return None
    now = sample_of_weights(model)
    return model.source.sha256 if torch.equal(model.loaded_sample.to(now.dtype), now) else None


def hash_of_answers(model: ViT) -> str:
    """Return a hash of all that turns embeddings into predictions: the head, the labels and the kind of scores."""
    return _hash_of(model.head.named_parameters(), json.dumps([model.labels, model.scores]))


def _hash_of(weights: Iterable[tuple[str, Tensor]], text: str = "") -> str:
    found = sha256(text.encode())
    for name, weight in sorted(weights):
        found.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        found.update(bytes_of(weight))
    return found.hexdigest()
