"""Find near-duplicates: images whose vectors have a cosine similarity of at least a threshold.

The search is exact and takes constant memory: every vector is compared with every other one, two blocks of the file at
a time. The time grows with the square of the number of vectors.
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
    """Two images, and the cosine similarity of their vectors (`score`)."""

    first: str
    second: str
    score: float


def duplicate_pairs(
    vectors: Vectors, threshold: float, after_block: Callable[[int], None] = lambda comparisons: None
) -> Iterator[Pair]:
    """Yield each pair of images whose vectors have a cosine similarity of at least `threshold`.

    Args:
        vectors: The vectors, as `open_vectors` returns them.
        threshold: The smallest cosine similarity of a pair, above 0 and at most 1.
        after_block: A function that is called after each block of vectors with the number of comparisons made for it,
            for example to update a progress bar.

    Raises:
        InputError: The threshold is not above 0 and at most 1, or a vector is not finite.
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
    """Return groups of near-duplicates, each with a representative and the images that are similar to it.

    Images are taken in the order of the file. An image joins the group of the most similar earlier representative if
    their cosine similarity is at least `threshold`; otherwise, the image becomes a representative. Every image of a
    group is therefore similar to the representative, and long chains of similar images do not form one group.

    Args:
        vectors: The vectors, as `open_vectors` returns them.
        threshold: The smallest cosine similarity to a representative, above 0 and at most 1.
        after_block: A function that is called after each block of vectors with the number of comparisons made for it,
            for example to update a progress bar.

    Returns:
        A dictionary from the path of each representative to the other images of the group, most similar first. The
        largest group comes first. Representatives without near-duplicates are left out.

    Raises:
        InputError: The threshold is not above 0 and at most 1, or a vector is not finite.
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
    """The most similar representative found so far for each image.

    Attributes:
        scores: The cosine similarity of each image and its representative (n,), or -2 if there is none yet.
        rows: The row of that representative in the file (n,).
    """

    def __init__(self, count: int) -> None:
        self.scores = torch.full((count,), -2.0, dtype=torch.float32, device="cpu")
        self.rows = torch.zeros(count, dtype=torch.int64, device="cpu")

    def update(self, start: int, scores: Tensor, rows: Tensor | int) -> None:
        """Compare images with further representatives, and keep the more similar ones.

        Args:
            start: The row of the first image.
            scores: The cosine similarity of each image and its new representative.
            rows: The rows of the new representatives.
        """
        part = slice(start, start + len(scores))
        nearer = scores > self.scores[part]
        self.rows[part] = torch.where(nearer, rows, self.rows[part])
        self.scores[part] = torch.where(nearer, scores, self.scores[part])


def comparisons(vectors: Vectors) -> int:
    """Return the number of comparisons that `duplicate_pairs` and `duplicate_groups` make, for a progress bar."""
    count = len(vectors)
    sizes = [min(ROWS, count - first) for first in range(0, count, ROWS)]
    return sum(size * (count - first) for size, first in zip(sizes, range(0, count, ROWS), strict=True))


def _check_threshold(threshold: float) -> None:
    if not 0 < threshold <= 1:
        raise InputError(
            f"The threshold must be above 0 and at most 1, got {threshold}. Start with 0.95 (--threshold 0.95)."
        )
