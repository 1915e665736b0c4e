"""Find near-duplicates: images whose vectors have a cosine of at least a threshold. Exact, and in constant memory.

Every vector is compared with every other one, two blocks of the file at a time. The time grows with the square of the
number of vectors.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from vitlite.errors import InputError
from vitlite.retrieval.search import Match, cosines, normalized
from vitlite.retrieval.store import Vectors

ROWS = 2**12  # vectors in a block
ROUNDING = 1e-6  # of cosines in float32: two equal vectors may have a cosine of 0.9999999


class Pair(NamedTuple):
    """Two images with the cosine between their vectors."""

    first: str
    second: str
    score: float


def duplicate_pairs(
    vectors: Vectors, threshold: float, after_block: Callable[[int], None] = lambda comparisons: None
) -> Iterator[Pair]:
    """Yield each pair of images whose vectors have a cosine of at least `threshold`.

    Args:
        vectors: The result of `open_vectors(path)`.
        threshold: A cosine, above 0 and at most 1.
        after_block: Called after each block with the number of comparisons in it, for a progress bar.

    Raises:
        InputError: The threshold is not in this range, or a vector is not finite.
    """
    _check_threshold(threshold)
    for first in range(0, len(vectors), ROWS):
        blocks = map(normalized, vectors.parts(ROWS, first))
        block = next(blocks)
        start = first
        for other in chain([block], blocks):
            scores = cosines(block, other)  # (rows, columns)
            near = scores >= threshold - ROUNDING
            if start == first:
                near = near.triu(1)  # each pair once, and no vector with itself
            for row, column in near.nonzero().tolist():
                yield Pair(vectors.paths[first + row], vectors.paths[start + column], float(scores[row, column]))
            start += len(other)
            after_block(scores.numel())


def duplicate_groups(
    vectors: Vectors, threshold: float, after_block: Callable[[int], None] = lambda comparisons: None
) -> dict[str, list[Match]]:
    """Return groups of near-duplicates: for each representative, the other images of its group, most similar first.

    Images are taken in the order of the file. An image joins the group of the nearest representative before it, if the
    cosine is at least `threshold`; otherwise it is a representative itself. So every image of a group is near the
    representative, and images never form a chain. Representatives without near-duplicates are left out.

    Args:
        vectors: The result of `open_vectors(path)`.
        threshold: A cosine, above 0 and at most 1.
        after_block: Called after each block with the number of comparisons in it, for a progress bar.

    Returns:
        The groups, largest first. The keys are the paths of the representatives.

    Raises:
        InputError: The threshold is not in this range, or a vector is not finite.
    """
    _check_threshold(threshold)
    least = threshold - ROUNDING
    nearest = _Nearest(len(vectors))
    for first in range(0, len(vectors), ROWS):
        blocks = map(normalized, vectors.parts(ROWS, first))
        block = next(blocks)
        scores = cosines(block, block)
        for row in range(len(block)):  # the rows before are decided, so this one is as well
            if nearest.scores[first + row] < least:
                nearest.update(first + row + 1, scores[row, row + 1 :], first + row)
        after_block(scores.numel())
        chosen = (nearest.scores[first : first + len(block)] < least).nonzero()[:, 0]
        representatives = block[chosen]
        start = first + len(block)
        for other in blocks:
            if len(chosen):
                best, which = cosines(representatives, other).max(0)
                nearest.update(start, best, first + chosen[which])
            start += len(other)
            after_block(len(block) * len(other))
    groups: dict[str, list[Match]] = {}
    for row in (nearest.scores >= least).nonzero()[:, 0].tolist():
        match = Match(vectors.paths[row], float(nearest.scores[row]))
        groups.setdefault(vectors.paths[int(nearest.rows[row])], []).append(match)
    for members in groups.values():
        members.sort(key=lambda match: -match.score)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


class _Nearest:
    """The nearest representative so far of each image: its cosine (n,), which is -2 without one, and its row (n,)."""

    def __init__(self, count: int) -> None:
        self.scores = torch.full((count,), -2.0, dtype=torch.float32, device="cpu")
        self.rows = torch.zeros(count, dtype=torch.int64, device="cpu")

    def update(self, start: int, scores: Tensor, rows: Tensor | int) -> None:
        """Compare the images from `start` on with further representatives: their cosines, and their rows."""
        part = slice(start, start + len(scores))
        nearer = scores > self.scores[part]
        self.rows[part] = torch.where(nearer, rows, self.rows[part])
        self.scores[part] = torch.where(nearer, scores, self.scores[part])


def comparisons(vectors: Vectors) -> int:
    """Return the number of comparisons that both functions make, for a progress bar."""
    count = len(vectors)
    sizes = [min(ROWS, count - first) for first in range(0, count, ROWS)]
    return sum(size * (count - first) for size, first in zip(sizes, range(0, count, ROWS), strict=True))


def _check_threshold(threshold: float) -> None:
    if not 0 < threshold <= 1:
        raise InputError(f"The threshold must be above 0 and at most 1, got {threshold}. Start with 0.95.")
