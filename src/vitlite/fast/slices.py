"""Large batches in slices whose temporaries stay in cache, one after the other or in streams of one thread each."""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from vitlite.nn.vit import Features

STREAM_SLICE = 4  # images at a time in each of several single-threaded streams
STREAM_MINIMUM = 2  # images for each stream, from which streams are faster
SLICE = 8  # images at a time where all threads share one stream
TEMPORARY = 32 << 20  # bytes: above this, glibc maps and faults fresh pages for each temporary


def split(images: Tensor, temporary: int) -> tuple[Sequence[Tensor], int]:
    """Return slices of a batch on a CPU, and in how many streams to compute them.

    Args:
        images: The batch.
        temporary: Bytes of the widest temporary of one image.
    """
    threads = torch.get_num_threads()
    streams = threads if 1 < threads <= len(images) // STREAM_MINIMUM else 1
    size = max(1, min(SLICE if streams == 1 else STREAM_SLICE, TEMPORARY // temporary))
    rounds = max(1, math.ceil(len(images) / (size * streams)))  # each stream gets as many slices as the others
    return images.tensor_split(max(1, min(rounds * streams, len(images)))), streams


def compute(slices: Sequence[Tensor], streams: int, run: Callable[[Tensor], Any]) -> list[Any]:
    """Return what `run` returns for each slice, in their order."""
    if streams == 1:
        return [run(part) for part in slices]
    return list(_single_threads(streams, os.getpid()).map(run, slices))


@lru_cache(maxsize=1)
def _single_threads(count: int, process: int) -> ThreadPoolExecutor:
    """Start workers in which torch uses one thread each. The setting elsewhere stays as it is.

    Args:
        count: The number of workers.
        process: The id of this process: a fork inherits no threads and needs workers of its own.
    """
    threads = torch.get_num_threads()
    started = Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # the first call in a thread takes over the default, which must not happen later
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(count, "vitlite", start)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(threads)  # restores this thread's number, and the default of threads to come
    return pool


def join(answers: list[Any], dtype: torch.dtype, batch_axis: int) -> Any:
    """Concatenate the answers for all slices: tensors, `Features`, or tuples of tensors."""
    first = answers[0]
    if isinstance(first, Tensor):
        whole = first if len(answers) == 1 else torch.cat(answers, batch_axis)
        return whole.to(dtype)
    if isinstance(first, tuple):
        fields = [join(list(field), dtype, batch_axis) for field in zip(*answers, strict=True)]
        return Features(*fields) if isinstance(first, Features) else tuple(fields)
    return first  # numbers of the grid, or None: the same for all
