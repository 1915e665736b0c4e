"""Compute large batches in slices, whose temporaries stay in cache. Slices run in sequence or in parallel streams."""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier, Lock
from typing import Any

import torch
from torch import Tensor

from vitlite.nn.vit import Features

STREAM_SLICE = 4  # images at a time in each of several single-threaded streams
STREAM_MINIMUM = 2  # images per stream from which streams are faster
SLICE = 8  # images at a time if all threads share one stream
_starting = Lock()
TEMPORARY = 32 << 20  # bytes; above this, glibc maps fresh pages for each temporary


def split(images: Tensor, temporary: int) -> tuple[Sequence[Tensor], int]:
    """Return slices of a batch on a CPU, and the number of streams that compute them.

    Args:
        images: The batch.
        temporary: The size of the largest temporary of one image, in bytes.
    """
    threads = torch.get_num_threads()
    streams = threads if 1 < threads <= len(images) // STREAM_MINIMUM else 1
    size = max(1, min(SLICE if streams == 1 else STREAM_SLICE, TEMPORARY // temporary))
    rounds = max(1, math.ceil(len(images) / (size * streams)))  # slices per stream, equal for all
    return images.tensor_split(max(1, min(rounds * streams, len(images)))), streams


def compute(slices: Sequence[Tensor], streams: int, run: Callable[[Tensor], Any]) -> list[Any]:
    """Return the result of `run` for each slice, in order."""
    if streams == 1:
        return [run(part) for part in slices]
    with _starting:  # one thread at a time, because torch's default is briefly 1 while the workers start
        pool = _single_threads(streams, os.getpid())
    return list(pool.map(run, slices))


@lru_cache(maxsize=1)
def _single_threads(count: int, process: int) -> ThreadPoolExecutor:
    """Start worker threads in which torch is single-threaded. The setting of other threads does not change.

    Args:
        count: The number of workers.
        process: The id of this process. A forked process inherits no threads and needs its own workers.
    """
    threads = torch.get_num_threads()
    started = Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # the first call in a thread applies the default, so make it before setting the number
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(count, "vitlite", start)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(threads)  # restores this thread's number and the default for new threads
    return pool


def join(answers: list[Any], dtype: torch.dtype, batch_axis: int) -> Any:
    """Concatenate the results of all slices: tensors, `Features`, or tuples of tensors."""
    first = answers[0]
    if isinstance(first, Tensor):
        whole = first if len(answers) == 1 else torch.cat(answers, batch_axis)
        return whole.to(dtype)
    if isinstance(first, tuple):
        fields = [join(list(field), dtype, batch_axis) for field in zip(*answers, strict=True)]
        return Features(*fields) if isinstance(first, Features) else tuple(fields)
    return first  # sizes of the grid, or None, which are the same for all slices
