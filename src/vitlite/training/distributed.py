"""Several processes that train or measure one model together, as `torchrun` starts them; alone, nothing changes.

A rank is one of these processes. Gradients are averaged by torch's DistributedDataParallel: over gloo on CPUs, over
nccl on GPUs. Rank 0 alone writes and prints.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from hashlib import sha256
from logging import getLogger

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitlite.errors import TrainError, VitliteError

_log = getLogger("vitlite")


def rank() -> int:
    """Which of the processes this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is rank 0, which writes and prints for all."""
    return rank() == 0


@contextmanager
def process_group(device: str | None) -> Iterator[None]:
    """Joins the processes that torchrun started for this run. Of those that fail, the first alone says why.

    Args:
        device: What the models are on: with "cuda", each process takes a GPU of its own.

    Raises:
        TrainError: Another process of the run is gone, or there is no GPU for this one.
    """
    if not dist.is_torchelastic_launched():
        yield
        return
    _warn_of_hanging_restarts()
    _join(device)
    try:
        yield
    except Exception as error:
        if not _is_first_to_fail():
            sys.exit(1)
        if _comes_from_a_lost_process(error):
            reason = str(error).splitlines()[0]
            raise TrainError(
                f"Rank {rank()} lost another process of this run ({reason}).",
                python="With `torchrun --max-restarts N` all are started again, and go on from the last state.",
            ) from error
        raise
    # Gloo's threads take the interpreter's lock to let go of their last tensors, and destroying the group waits for
    # them with that lock in hand: torch 2.6 was seen to hang there. Asleep, this thread gives it away.
    time.sleep(0.1)
    dist.destroy_process_group()


def _warn_of_hanging_restarts() -> None:
    """Where torchrun's own store serves the processes, those of the next start find the addresses of dead ones there.

    See pytorch/pytorch#135712.
    """
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if shares_store and restarts and os.environ["RANK"] == "0":
        _log.warning(
            "vitlite: torch may hang after a restart. To prevent it: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )


def _join(device: str | None) -> None:
    # Functions there have the group as a default argument. DistributedDataParallel imports them; if the group exists by
    # then, they keep it, and its threads abort the process when it ends (pytorch/pytorch#190489).
    import torch.distributed.nn

    if device is not None and device.startswith("cuda"):
        torch.cuda.set_device(_own_gpu(device))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")


def _own_gpu(device: str) -> int:
    """Which GPU this process takes.

    Raises:
        TrainError: `device` is one that all would share, or there are fewer GPUs than processes.
    """
    if device != "cuda":
        raise TrainError(
            f"torchrun starts a process for each GPU, and all of them would be on {device}.",
            python='Give device="cuda", and choose GPUs by CUDA_VISIBLE_DEVICES.',
            command="Say --device cuda, and choose GPUs by CUDA_VISIBLE_DEVICES.",
        )
    own, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if own >= there:
        raise TrainError(
            f"torchrun started process {own + 1} on this machine, where torch sees {there} GPUs.",
            python="Start as many processes as there are GPUs (torchrun --nproc-per-node), or train on the CPU.",
            command="Start as many processes as there are GPUs (torchrun --nproc-per-node), or say --device cpu.",
        )
    return own


def _is_first_to_fail() -> bool:
    """Whether no other process has failed before: the others only notice that one is missing."""
    try:
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"], port, is_master=False, timeout=timedelta(seconds=5)
        )
        failed = store.add(f"vitlite failed {os.environ['TORCHELASTIC_RESTART_COUNT']}", 1)  # this one included
    except (dist.DistError, RuntimeError, OSError):  # torchrun is gone too
        return True
    return bool(failed == 1)


def _comes_from_a_lost_process(error: Exception) -> bool:
    if isinstance(error, VitliteError):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error)  # gloo raises plain RuntimeErrors


def paired_share(count: int) -> Tensor:
    """This rank's places in a batch of `count`: with each place its mirror image, as mixing two pictures needs it."""
    places = torch.arange(count, device="cpu")
    pairs = torch.minimum(places, places.flip(0))  # the first place of a pair stands for both
    return places[pairs % world_size() == rank()]


def shard(count: int) -> Tensor:
    """This rank's places among `count`, each of which exactly one rank has."""
    return torch.arange(rank(), count, world_size(), device="cpu")


def all_reduce(*tensors: Tensor) -> None:
    """Replaces tensors by their sums over all ranks."""
    if world_size() == 1:
        return
    for tensor in tensors:
        dist.all_reduce(tensor)


def assert_equal_on_all_ranks(facts: Mapping[str, object]) -> None:
    """Makes sure that all ranks begin with the same, by what Python prints of each fact.

    Raises:
        TrainError: On every rank, where one differs.
    """
    if world_size() == 1:
        return
    hashes = [_hash(fact) for fact in facts.values()]
    extremes = torch.tensor([hashes, [-value for value in hashes]], device="cpu")
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    different = [name for name, high, low in zip(facts, *extremes.tolist(), strict=True) if high != -low]
    if different:
        raise TrainError(
            f"The processes begin with different {', '.join(different)}.",
            python="All machines must see the same data and the same model, and share the folder `out`.",
            command="All machines must see the same data and the same model, and share the folder --out.",
        )


def _hash(fact: object) -> int:
    """That fits in 64 bits, also with another sign."""
    return int.from_bytes(sha256(repr(fact).encode(errors="surrogateescape")).digest()[:7], "big")


def wrap_ddp(model: nn.Module) -> nn.Module:
    """The model, whose backward pass averages the gradients of all ranks."""
    return DistributedDataParallel(model) if world_size() > 1 else model


def no_sync(network: nn.Module) -> AbstractContextManager[None]:
    """A context in which what `wrap_ddp` returned keeps its gradients to itself."""
    return network.no_sync() if isinstance(network, DistributedDataParallel) else nullcontext()
