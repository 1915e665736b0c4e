"""Train or evaluate one model with several processes, which `torchrun` starts.

Each process is a rank. DistributedDataParallel averages the gradients, through gloo on CPUs and nccl on GPUs. Only
rank 0 writes and prints. Without torchrun, there is one rank.
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
    """Return the rank of this process, counted from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return True if this process is rank 0, which writes and prints."""
    return rank() == 0


@contextmanager
def process_group(device: str | None) -> Iterator[None]:
    """Join the process group of torchrun. If several processes fail, only the first one raises its error.

    Args:
        device: The device of the models. With "cuda", each process uses its own GPU.

    Raises:
        TrainError: The connection to another process was lost, or there is no GPU for this process.
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
        is_from_gloo = isinstance(error, dist.DistError) or "gloo" in str(error)  # gloo raises plain RuntimeErrors
        if is_from_gloo and not isinstance(error, VitliteError):
            reason = str(error).splitlines()[0]
            raise TrainError(
                f"Rank {rank()} lost the connection to another process ({reason}). Run the same command again to "
                "resume. With `torchrun --max-restarts N`, torchrun restarts all processes itself."
            ) from error
        raise
    # In torch 2.6, destroy_process_group can deadlock. It holds the interpreter lock while it waits for gloo's threads,
    # which need the lock to free their last tensors. Sleeping releases the lock and lets the threads finish first.
    time.sleep(0.1)
    dist.destroy_process_group()


def _warn_of_hanging_restarts() -> None:
    """Warn if torchrun's store gives restarted processes the addresses of dead ones (pytorch/pytorch#135712)."""
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if shares_store and restarts and os.environ["RANK"] == "0":
        _log.warning(
            "vitlite: torch may hang when torchrun restarts the processes. To prevent this, set the environment "
            "variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )


def _join(device: str | None) -> None:
    # Import torch.distributed.nn before the group exists. Its functions store the current group as a default argument
    # and would keep it alive at exit, where the group's threads abort the process (pytorch/pytorch#190489).
    import torch.distributed.nn

    if device is not None and device.startswith("cuda"):
        torch.cuda.set_device(_own_gpu(device))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")


def _own_gpu(device: str) -> int:
    """Return the GPU of this process.

    Raises:
        TrainError: `device` names one GPU for all processes, or there are fewer GPUs than processes.
    """
    if device != "cuda":
        raise TrainError(
            f'With torchrun, each process needs its own GPU, but device is {device!r}. Pass device="cuda" (--device '
            "cuda), and choose the GPUs with CUDA_VISIBLE_DEVICES."
        )
    own, available = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if own >= available:
        raise TrainError(
            f"torchrun started at least {own + 1} processes on this machine, but torch finds only {available} GPUs. "
            "Start one process per GPU (torchrun --nproc-per-node), or use the CPU (--device cpu)."
        )
    return own


def _is_first_to_fail() -> bool:
    """Return True if this process failed first. The others then fail because they lose the connection to it."""
    try:
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"], port, is_master=False, timeout=timedelta(seconds=5)
        )
        failed = store.add(
            f"vitlite failed {os.environ['TORCHELASTIC_RESTART_COUNT']}", 1
        )  # the count includes this process
    except (dist.DistError, RuntimeError, OSError):  # torchrun has ended
        return True
    return bool(failed == 1)


def paired_share(count: int) -> Tensor:
    """Return the positions in a batch that this rank processes.

    `mix` combines each image with the image at the mirrored position, so one rank processes both.
    """
    places = torch.arange(count, device="cpu")
    pairs = torch.minimum(places, places.flip(0))  # each pair is numbered by its first position
    return places[pairs % world_size() == rank()]


def shard(count: int) -> Tensor:
    """Return the positions from 0 to `count` - 1 that this rank processes."""
    return torch.arange(rank(), count, world_size(), device="cpu")


def all_reduce(*tensors: Tensor) -> None:
    """Replace each tensor with its sum over all ranks."""
    if world_size() == 1:
        return
    for tensor in tensors:
        dist.all_reduce(tensor)


def assert_equal_on_all_ranks(values: Mapping[str, object]) -> None:
    """Check that all ranks have the same values, compared by their `repr`.

    Raises:
        TrainError: A value differs between ranks. All ranks raise this error.
    """
    if world_size() == 1:
        return
    hashes = []
    for value in values.values():
        digest = sha256(repr(value).encode(errors="surrogateescape")).digest()
        hashes.append(int.from_bytes(digest[:7], "big"))  # 7 bytes, because the negated hash must also fit in int64
    extremes = torch.tensor([hashes, [-value for value in hashes]], device="cpu")
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    different = [name for name, high, low in zip(values, *extremes.tolist(), strict=True) if high != -low]
    if different:
        raise TrainError(
            f"These values differ between processes: {', '.join(different)}. Give all machines the same data, model "
            "and options, and the same shared folder as out= (--out)."
        )


def wrap_ddp(model: nn.Module) -> nn.Module:
    """Wrap a model so that the backward pass averages the gradients of all ranks."""
    return DistributedDataParallel(model) if world_size() > 1 else model


def no_sync(network: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a wrapped model does not average its gradients."""
    return network.no_sync() if isinstance(network, DistributedDataParallel) else nullcontext()
