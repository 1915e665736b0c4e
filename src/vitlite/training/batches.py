"""Which pictures a step takes, and how much each of them counts.

Shapes: n pictures in all, k classes.
"""

import math

import torch
from torch import Tensor

from vitlite.training.datasets import Pictures


def steps_of_an_epoch(pictures: int, batch: int) -> int:
    """How many steps see all pictures once, where a step sees `batch` of them at most."""
    return math.ceil(pictures / batch)


def batch_of(order: Tensor, step: int, steps: int) -> Tensor:
    """The pictures of one step, an even part of all: batches differ by one picture at most, so none is tiny.

    >>> [len(batch_of(torch.arange(65), step, steps=3)) for step in range(3)]  # and not 32, 32 and 1
    [21, 22, 22]
    """
    n = len(order)
    return order[step * n // steps : (step + 1) * n // steps]


def importance_of_classes(data: Pictures, *, balance: bool) -> Tensor:
    """How much a picture of each class counts; on average over all pictures, 1: (k,).

    Args:
        data: What is trained on.
        balance: Whether the classes that have pictures count all alike, however many they have. The pictures are then
            weighed, and none is drawn twice or left out: an epoch still sees each of them once.
    """
    count = torch.bincount(data.labels, minlength=len(data.classes))
    if not balance:
        return torch.ones_like(count, dtype=torch.float32)
    there = int((count > 0).sum())
    return torch.where(count > 0, len(data) / (there * count.clamp(min=1)).float(), 0.0)
