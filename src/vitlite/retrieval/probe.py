"""How good vectors are: what a linear classifier, and the nearest neighbours, make of them, with many labels and few.

The classifier is ridge regression on targets of -1 and 1, as the few-shot figures of the ViT paper are measured: solved
in closed form, with the penalty that predicts pictures best which it was not fitted to, by leaving out each in turn.
Shapes: n vectors of width d, k classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, pstdev
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlite.errors import InputError, check_count
from vitlite.retrieval.search import cosines, of_length_one, refuse_complex

PENALTIES = [10.0**power for power in range(-6, 4)]  # as shares of the mean squared singular value
NEIGHBOURS, WARMTH = 20, 0.07  # how many vote, and exp(cosine / WARMTH) is the weight of a vote: DINO's
ROWS = 2048  # vectors whose neighbours are sought together


class Linear(NamedTuple):
    """A linear classifier of vectors."""

    mean: Tensor  # (d,), of the vectors that it was fitted to
    scale: Tensor  # (d,)
    weight: Tensor  # (d, k)
    bias: Tensor  # (k,)
    penalty: float  # one of PENALTIES

    def __call__(self, vectors: Tensor) -> Tensor:
        """How much each class is meant: (n, d) -> (n, k)."""
        return ((vectors.double() - self.mean) * self.scale) @ self.weight + self.bias


@dataclass(frozen=True)
class Probed:
    """What was measured on pictures that nothing was fitted to: shares of right answers, from 0 to 1."""

    linear: float
    penalty: float
    neighbours: float
    commonest: float  # always the class that most pictures have
    few: dict[int, list[float]] = field(default_factory=dict)  # pictures a class -> the linear classifier's, by draw

    def few_in_words(self) -> dict[int, tuple[float, float]]:
        """Mean and standard deviation over the draws."""
        return {shots: (mean(shares), pstdev(shares)) for shots, shares in self.few.items()}


def probe(
    vectors: Tensor,
    labels: Tensor,
    test_vectors: Tensor,
    test_labels: Tensor,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    draws: int = 5,
    seed: int = 0,
) -> Probed:
    """Fits classifiers to vectors (n, d) with labels (n,), and measures them on others.

    Args:
        vectors: What `model.embed` gives of the pictures to fit to.
        labels: Their classes, from 0.
        test_vectors: Of the pictures to measure on.
        test_labels: Their classes.
        shots: How many pictures of each class to fit to, beside all: whole numbers from 1; what a class does not have
            is left out.
        draws: How often such few are drawn: a whole number from 1.
        seed: Which are drawn: a whole number.

    Raises:
        InputError: Vectors and labels do not go together, a class to measure on is none to fit to, or `shots`, `draws`
            or `seed` is not what it is to be.
    """
    _check(vectors, labels, test_vectors, test_labels)
    _check_draws(shots, draws, seed)
    vectors, test_vectors = _near_one(vectors, test_vectors)
    labels, test_labels = labels.cpu(), test_labels.cpu()
    classes = int(labels.max()) + 1
    counts = labels.bincount(minlength=classes)
    classifier = fit(vectors, labels, classes)
    few: dict[int, list[float]] = {}
    for count in shots:
        if count <= counts[counts > 0].min():
            few[count] = []
            for draw in range(draws):
                rows = some_of_each(labels, count, seed + draw)
                few[count].append(_share(fit(vectors[rows], labels[rows], classes)(test_vectors), test_labels))
    commonest = float((test_labels == counts.argmax()).double().mean())
    neighbours = _share(votes(vectors, labels, test_vectors, classes), test_labels)
    return Probed(_share(classifier(test_vectors), test_labels), classifier.penalty, neighbours, commonest, few)


def _check(vectors: Tensor, labels: Tensor, test_vectors: Tensor, test_labels: Tensor) -> None:
    for rows, classes in ((vectors, labels), (test_vectors, test_labels)):
        if rows.ndim != 2 or classes.shape != (len(rows),) or not rows.numel() or classes.dtype != torch.int64:
            raise InputError(
                f"A probe takes vectors (n, d) and a label of int64 for each, got {tuple(rows.shape)} and "
                f"{tuple(classes.shape)} of {classes.dtype}.",
                python="Give as many of both.",
                command="",
            )
        refuse_complex(rows)
        if not rows.isfinite().all():
            raise InputError("Some of the vectors are not finite numbers: they tell nothing.")
        if int(classes.min()) < 0:
            raise InputError(f"Labels are whole numbers from 0, got {int(classes.min())}.")
    if vectors.shape[1] != test_vectors.shape[1]:
        raise InputError(f"Vectors of {vectors.shape[1]} numbers do not go with some of {test_vectors.shape[1]}.")
    if len(set(labels.tolist())) < 2:
        raise InputError("There is one class only. To tell classes apart takes two.")
    unseen = sorted(set(test_labels.tolist()) - set(labels.tolist()))
    if unseen:
        raise InputError(f"Some pictures to measure on are of classes that no picture to fit to has: {unseen[:8]}.")


def _check_draws(shots: Sequence[int], draws: int, seed: int) -> None:
    if not isinstance(shots, Sequence) or not all(type(count) is int and count >= 1 for count in shots):
        raise InputError(f"shots are how many pictures of a class to fit to: whole numbers from 1, got {shots!r}.")
    check_count(draws, "draws")
    if type(seed) is not int or abs(seed) >= 10**18:
        raise InputError(f"seed says which pictures are drawn: a whole number of at most 18 digits, got {seed!r}.")


def _near_one(vectors: Tensor, test_vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, divided by the largest number to fit to: of very large ones, squares are no numbers."""
    vectors, test_vectors = vectors.detach().cpu().double(), test_vectors.detach().cpu().double()
    largest = vectors.abs().max()
    return (vectors / largest, test_vectors / largest) if largest > 0 else (vectors, test_vectors)


def fit(vectors: Tensor, labels: Tensor, classes: int) -> Linear:
    """Ridge regression in closed form, with the best of PENALTIES: (n, d) and (n,) -> a classifier."""
    x = vectors.double()
    center, scale = x.mean(0), 1 / x.std(0, correction=0).clamp(min=1e-8)
    targets = 2 * F.one_hot(labels, classes).double() - 1  # (n, k)
    bias = targets.mean(0)
    left, singular, right = torch.linalg.svd((x - center) * scale, full_matrices=False)
    answers = left.mT @ (targets - bias)
    powers = singular.square()
    best, least, chosen = powers, float("inf"), 0.0
    for penalty in PENALTIES:
        kept = powers / (powers + penalty * powers.mean())  # of each direction
        error = left_out_error(left, kept, answers, targets - bias)
        if error < least:
            best, least, chosen = kept, error, penalty
    inverse = best / singular.clamp(min=1e-12)
    return Linear(center, scale, right.mT @ (inverse[:, None] * answers), bias, chosen)


def left_out_error(left: Tensor, kept: Tensor, answers: Tensor, targets: Tensor) -> float:
    """The mean squared error for each picture by a fit to all others, which need not be made: the PRESS statistic."""
    residuals = targets - left @ (kept[:, None] * answers)
    own_part = left.square() @ kept + 1 / len(left)  # that a picture has in its own prediction; 1 / n by the bias
    return float((residuals / (1 - own_part).clamp(min=1e-9)[:, None]).square().mean())


def votes(vectors: Tensor, labels: Tensor, queries: Tensor, classes: int) -> Tensor:
    """How much the nearest neighbours of each query speak for each class: (q, k)."""
    known = of_length_one(vectors)
    found = []
    for first in range(0, len(queries), ROWS):
        part = queries[first : first + ROWS]
        nearness, rows = cosines(of_length_one(part), known).topk(min(NEIGHBOURS, len(known)))
        weights = (nearness / WARMTH).softmax(1)
        found.append(weights.new_zeros(len(part), classes).scatter_add(1, labels[rows], weights))
    return torch.cat(found)


def some_of_each(labels: Tensor, count: int, seed: int) -> Tensor:
    """So many rows of each class that there is, drawn by the seed."""
    check_count(count, "count")
    order = _order(len(labels), seed)
    return torch.cat([order[labels[order] == label][:count] for label in sorted(set(labels.tolist()))])


def _order(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def held_out(labels: Tensor, seed: int, share: float = 0.2) -> Tensor:
    """Which rows are to measure on: a share of each class, at least one of two and more: (n,) of bool."""
    chosen = labels.new_zeros(len(labels), dtype=torch.bool)
    order = _order(len(labels), seed)
    for label in sorted(set(labels.tolist())):
        rows = order[labels[order] == label]
        chosen[rows[: max(round(share * len(rows)), int(len(rows) > 1))]] = True
    return chosen


def _share(answers: Tensor, labels: Tensor) -> float:
    """Of right answers.

    Raises:
        InputError: Some answers are no numbers.
    """
    if not answers.isfinite().all():
        raise InputError("The vectors to measure on are too large beside those to fit to: the answers are not finite.")
    return float((answers.argmax(1) == labels).double().mean())
