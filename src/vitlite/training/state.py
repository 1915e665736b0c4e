"""The file of a run's state: what it must hold, checked once, where it is read, before anything of a run is changed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitlite.checkpoints.reader import Shape, open_weights
from vitlite.errors import TrainError, VitliteError, shown
from vitlite.schema import Check, number, optional, parse_json, several, table, text, whole
from vitlite.training.datasets import digest

METADATA, CHECKSUM = "vitlite.run", "vitlite.checksum"  # in the header of the state
MOST_BYTES = 100 * 2**20  # of it, which is what safetensors allows a header
MOST_COUNTED = 2**24  # AdamW counts its steps in float32, in which one more is no more from there on


@dataclass
class Progress:
    """Where a run is, and what it has seen of the present epoch."""

    epoch: int = 0  # epochs that are done
    step: int = 0  # steps that are done of the next
    loss: float = 0.0  # summed over these steps
    right: float = 0.0  # share of pictures whose best class is the one they have most of, summed likewise
    seconds: float = 0.0

    def add(self, loss: float, right: float, seconds: float) -> None:
        """One more step is done."""
        self.step += 1
        self.loss += loss
        self.right += right
        self.seconds += seconds


class Kept(NamedTuple):
    """What a tensor of a state is to be."""

    shape: Shape
    dtype: torch.dtype


STEP = Kept((), torch.float32)  # how many of them AdamW has taken


class State(NamedTuple):
    """What the file holds."""

    identity: dict[str, Any]  # what must be the same for a run to go on
    progress: Progress
    history: list[dict[str, Any]]
    unmoved: frozenset[str]  # weights that had no gradient so far
    tensors: dict[str, Tensor]


_float = Check("a number", lambda value: type(value) in (int, float))  # of a loss that was measured: also NaN
_progress = {"epoch": whole(), "step": whole(), "loss": number(), "right": number(0), "seconds": number(0)}
_record = {
    "epoch": whole(1),
    "loss": number(),
    "accuracy": number(0, 1.001),
    "lr": number(0),
    "seconds": number(0),
}
_measured = {"val_loss": optional(_float), "val_top1": optional(number(0, 1))}
_header = table(
    {
        "identity": table({"epochs": whole(1)}, ("epochs",)),
        "progress": table(_progress, tuple(_progress)),
        "history": several(table(_record | _measured, tuple(_record))),
        "unmoved": several(text()),
    },
    ("identity", "progress", "history"),
)


def read_state(path: Path) -> State:
    """Reads all of a state, without mapping the file, since it is to be replaced.

    Raises:
        TrainError: It is none, or damaged: the file and the field are named.
    """
    with damaged(path):
        with open_weights(path) as weights:
            metadata = weights.metadata
            if METADATA not in metadata:
                raise TrainError(f"its header has no {METADATA}")
            weights.check_dtypes(list(weights.entries))
            tensors = {name: weights.read(name) for name in weights.entries}
        saved = parse_json(metadata[METADATA], _header, "its header", most_bytes=MOST_BYTES, error=TrainError)
        progress = Progress(**{field.name: saved["progress"][field.name] for field in fields(Progress)})
        if len(saved["history"]) != progress.epoch:
            raise TrainError(f"its history has {len(saved['history'])} epochs, and progress.epoch is {progress.epoch}")
        if CHECKSUM in metadata and metadata[CHECKSUM] != checksum(metadata[METADATA], tensors):  # older ones have none
            raise TrainError("its checksum is that of other content")
    return State(saved["identity"], progress, saved["history"], frozenset(saved.get("unmoved", ())), tensors)


def checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    """A hash of all that a state holds, by which damage is noticed."""
    parts: list[str | Tensor] = [header]
    for name in sorted(tensors):
        parts += [f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}", tensors[name]]
    return digest(parts)


def check_tensors(path: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, Kept], steps: int) -> None:
    """Makes sure that these are the tensors of a run, and make sense.

    Args:
        path: Where they are from.
        tensors: By "kind.name", such as "average.head.bias".
        wanted: What the run has by these names.
        steps: How many it has taken.

    Raises:
        TrainError: One is missing, is one too many, or is of another shape, type or range.
    """
    with damaged(path):
        missing, extra = wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys()
        if missing:
            raise TrainError(f"it lacks {shown(min(missing))}")
        if extra:
            raise TrainError(f"{shown(min(extra))} belongs to no weight of the run")
        for name, tensor in tensors.items():
            _check_tensor(shown(name), tensor, wanted[name])
            if name.startswith("step.") and tensor.item() != min(steps, MOST_COUNTED):
                raise TrainError(f"{shown(name)} is {tensor.item():g}, and the run has taken {steps} steps")


def _check_tensor(name: str, tensor: Tensor, wanted: Kept) -> None:
    if (tuple(tensor.shape), tensor.dtype) != wanted:
        raise TrainError(
            f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, and {wanted.shape} of {wanted.dtype} in the run"
        )
    if tensor.isnan().any():
        raise TrainError(f"{name} has NaN in it")


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Says of whatever is wrong with a state which file it is, and what to do."""
    try:
        yield
    except Exception as error:  # a damaged file makes readers raise nearly anything
        reason = error.text if isinstance(error, VitliteError) else shown(f"{type(error).__name__}: {error}")
        raise TrainError(
            f"{shown(str(path))} is not the state of a run, or is damaged ({reason.rstrip('.')}).",
            python=f"Remove it to begin anew; or begin another run, perhaps from {path.parent / 'last'}, with "
            "another `out`.",
            command="Remove it to begin anew; or begin another run, perhaps with --model "
            f"{path.parent / 'last'} and another --out.",
        ) from None
