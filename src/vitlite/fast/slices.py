"""Compute large batches in slices, so that temporary tensors stay in cache.

The slices are computed one after the other with all threads, or in parallel by several streams of one thread each.
"""

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

STREAM_SLICE = 4  # images in a slice if there are several streams
STREAM_MINIMUM = 2  # minimum number of images per stream for which several streams are faster
SLICE = 8  # images in a slice if there is one stream, which uses all threads
_starting = Lock()
TEMPORARY = 32 << 20  # bytes; for larger tensors, glibc maps new pages every time


def split(images: Tensor, temporary: int) -> tuple[Sequence[Tensor], int]:
    """Split a batch on a CPU into slices.

    Args:
        images: The batch (b, c, h, w).
        temporary: The size in bytes of the largest temporary tensor for one image.

    Returns:
        The slices, and the number of parallel streams that should compute them.
    """
    threads = torch.get_num_threads()
    streams = threads if 1 < threads <= len(images) // STREAM_MINIMUM else 1
    size = max(1, min(SLICE if streams == 1 else STREAM_SLICE, TEMPORARY // temporary))
    rounds = max(1, math.ceil(len(images) / (size * streams)))  # slices per stream, equal for all
    return images.tensor_split(max(1, min(rounds * streams, len(images)))), streams


def compute(slices: Sequence[Tensor], streams: int, run: Callable[[Tensor], Any]) -> list[Any]:
    """Call `run` on each slice, `streams` slices in parallel, and return the results in the order of the slices."""
    if streams == 1:
        return [run(part) for part in slices]
    with _starting:  # one thread at a time, because torch's default is briefly 1 while the workers start
        pool = _single_threads(streams, os.getpid())
    return list(pool.map(run, slices))


@lru_cache(maxsize=1)
def _single_threads(count: int, process: int) -> ThreadPoolExecutor:
    """Return a pool of threads in each of which torch uses one thread. In other threads, torch uses as many as before.

    Args:
        count: The number of threads in the pool.
        process: The id of this process, as a key of the cache. A forked process needs a pool of its own.
    """
    threads = torch.get_num_threads()
    started = Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # the first call in a thread sets the default number, so call it before setting 1
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(count, "vitlite", start)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(threads)  # restores the number of this thread and the default of new threads
    return pool


def join(answers: list[Any], dtype: torch.dtype, batch_axis: int) -> Any:
    """Concatenate the results of all slices: tensors, `Features`, or tuples of tensors.

    Args:
        answers: The result of each slice.
        dtype: The dtype of the result.
        batch_axis: The axis along which tensors are concatenated.
    """
    first = answers[0]
    if isinstance(first, Tensor):
        whole = first if len(answers) == 1 else torch.cat(answers, batch_axis)
        return whole.to(dtype)
    if isinstance(first, tuple):
        fields = [join(list(field), dtype, batch_axis) for field in zip(*answers, strict=True)]
        return Features(*fields) if isinstance(first, Features) else tuple(fields)
    return first  # a grid size or None, which is the same for all slices
