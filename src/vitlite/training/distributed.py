"""Several processes that train or measure one model together, as `torchrun` starts them; alone, nothing changes.

A rank is one of these processes. Gradients are averaged by torch's DistributedDataParallel: over gloo on CPUs, over
nccl on GPUs. Rank 0 alone writes and prints.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitlite.errors import TrainError, VitliteError


def rank() -> int:
    """Which of the processes this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def together(device: str | None) -> Iterator[None]:
    """Joins the processes that torchrun started for this run. Of those that fail, the first alone says why.

    Args:
        device: What the models are on: with "cuda", each process takes a GPU of its own.
    """
    if not dist.is_torchelastic_launched():
        yield
        return
    # Functions there have the group as a default argument. DistributedDataParallel imports them; if the group exists by
    # then, they keep it, and its threads abort the process when it ends (pytorch/pytorch#190489).
    import torch.distributed.nn

    cuda = device is not None and device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then processes find addresses of dead ones
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and os.environ["RANK"] == "0":
        print(
            "vitlite: torch may hang after a restart. To prevent it: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
            file=sys.stderr,
        )
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield
    except Exception as error:
        if not _first_to_fail():
            sys.exit(1)
        if not isinstance(error, VitliteError) and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise TrainError(
                f"Rank {rank()} lost another process of this run. With `torchrun --max-restarts N` all are started "
                f"again, and go on from the last state. ({str(error).splitlines()[0]})"
            ) from error
        raise
    dist.destroy_process_group()


def _first_to_fail() -> bool:
    """Whether no other process has failed before: the others only notice that one is missing."""
    try:
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"], port, is_master=False, timeout=timedelta(seconds=5)
        )
        return bool(store.add(f"vitlite failed {os.environ['TORCHELASTIC_RESTART_COUNT']}", 1) == 1)
    except (dist.DistError, RuntimeError, OSError):  # torchrun is gone too
        return True


def share(count: int) -> Tensor:
    """This rank's places in a batch of `count`: with each place its mirror image, as mixing two pictures needs it."""
    places = torch.arange(count)
    return places[torch.minimum(places, places.flip(0)) % world() == rank()]


def part(count: int) -> Tensor:
    """This rank's places among `count`, each of which exactly one rank has."""
    return torch.arange(rank(), count, world())


def add(*values: Tensor) -> None:
    """Replaces tensors by their sums over all ranks."""
    for value in values:
        if world() > 1:
            dist.all_reduce(value)


def agree(what: str, *values: int) -> None:
    """Makes sure that all ranks begin with the same numbers.

    Raises:
        TrainError: on every rank, where they differ.
    """
    if world() > 1:
        ends = torch.tensor([values, [-value for value in values]])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        high, low = ends.tolist()[0], (-ends[1]).tolist()
        if high != low:
            raise TrainError(
                f"The processes begin with different {what}: {low} and {high}. All machines must see the same data, "
                "and share the folder --out."
            )


def connected(model: nn.Module) -> nn.Module:
    """The model, whose backward pass averages the gradients of all ranks."""
    return DistributedDataParallel(model) if world() > 1 else model


def unconnected(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which what `connected` returned keeps its gradients to itself."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
