"""A batch in slices whose temporaries stay in cache, computed in turn or by several streams of one thread each."""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vitlite.fast.threads import lone_threads
from vitlite.nn.vit import Features

STREAM_SLICE = 4  # images at a time in each of several single-threaded streams
STREAM_LEAST = 2  # images for each stream, from which streams pay
SLICE = 8  # images at a time where all threads share one stream
TEMPORARY = 32 << 20  # bytes: above this, glibc maps and faults fresh pages for each temporary


def cut(images: Tensor, temporary: int) -> tuple[Sequence[Tensor], int]:
    """Slices of a batch on the CPU, and in how many streams to compute them.

    Args:
        images: The batch.
        temporary: Bytes of the widest temporary that one image needs.
    """
    threads = torch.get_num_threads()
    streams = threads if 1 < threads <= len(images) // STREAM_LEAST else 1
    usual = SLICE if streams == 1 else STREAM_SLICE
    size = max(1, min(usual, TEMPORARY // temporary))
    rounds = math.ceil(len(images) / (size * streams))  # each stream gets as many slices as the others
    return images.tensor_split(min(rounds * streams, len(images))), streams


def compute(slices: Sequence[Tensor], streams: int, run: Callable[[Tensor], Any]) -> list[Any]:
    """What `run` answers for each slice, in their order."""
    if streams == 1:
        return [run(part) for part in slices]
    return list(_pool(streams, os.getpid()).map(run, slices))


@lru_cache(maxsize=1)
def _pool(streams: int, process: int) -> ThreadPoolExecutor:
    """Workers that compute in one thread each; a forked process, which inherits none, makes its own."""
    return lone_threads(streams)


def join(answers: list[Any], dtype: torch.dtype, batch_axis: int) -> Any:
    """The answers for all slices as one: tensors, `Features`, or tuples of tensors."""
    first = answers[0]
    if isinstance(first, Tensor):
        whole = first if len(answers) == 1 else torch.cat(answers, batch_axis)
        return whole.to(dtype)
    if isinstance(first, tuple):
        fields = [join(list(field), dtype, batch_axis) for field in zip(*answers, strict=True)]
        return Features(*fields) if isinstance(first, Features) else tuple(fields)
    return first  # the same for all: numbers of the grid, or nothing
