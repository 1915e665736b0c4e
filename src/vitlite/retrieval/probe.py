"""Measure how well vectors separate classes, with a linear classifier and with nearest neighbours.

The classifier is ridge regression on targets of -1 and 1, as in the few-shot experiments of the ViT paper. It is
computed in closed form, with the penalty that gives the smallest leave-one-out error. A softmax turns the scores into
probabilities. Its temperature is fitted to leave-one-out scores, which are not biased by the fit.
Shapes: n vectors of width d, k classes.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, pstdev
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlite.errors import InputError, check_count
from vitlite.retrieval.search import check_real, cosines, normalized

if TYPE_CHECKING:
    from vitlite.nn.vit import ViT

PENALTIES = [10.0**power for power in range(-6, 4)]  # relative to the mean squared singular value
SHARPNESSES = [10.0 ** (power / 10) for power in range(-20, 41)]
NEIGHBOURS, TEMPERATURE = 20, 0.07  # votes are weighted by exp(cosine / TEMPERATURE), as in DINO
QUERIES = 2048  # query vectors compared at a time


class Linear(NamedTuple):
    """A linear classifier of vectors.

    Attributes:
        mean: The mean of the training vectors (d,).
        scale: The inverse of the standard deviation of the training vectors (d,).
        weight: The weights (d, k).
        bias: The bias (k,).
        penalty: The penalty of the ridge regression, relative to the mean squared singular value of the vectors.
        sharpness: The factor by which the scores are multiplied before a softmax, the inverse of a temperature.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor
    penalty: float
    sharpness: float

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return the score of each class for each vector: (n, d) -> (n, k)."""
        return ((vectors.double() - self.mean) * self.scale) @ self.weight + self.bias

    def put_on(self, model: "ViT", labels: Sequence[str]) -> None:
        """Make this classifier the head of the model that computed the vectors.

        The mean, the scale and the sharpness are combined with the weights and the bias of the head, so that the
        softmax of the logits gives the probabilities of the classes.

        Args:
            model: The model whose head is replaced.
            labels: The names of the k classes.
        """
        weight = self.scale[:, None] * self.weight * self.sharpness  # (d, k)
        bias = self.bias * self.sharpness - self.mean @ weight
        model.reset_head(len(labels))
        with torch.no_grad():
            model.head.weight.copy_(weight.mT)  # type: ignore[operator]
            model.head.bias.copy_(bias)  # type: ignore[operator]
        model.labels = list(labels)


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe. All accuracies are fractions from 0 to 1 of the test vectors.

    Attributes:
        linear: The accuracy of the linear classifier.
        penalty: The penalty of the linear classifier.
        neighbours: The accuracy of a vote among the nearest neighbours.
        commonest: The accuracy of always predicting the most frequent class of the training vectors.
        classifier: The linear classifier.
        few: The accuracies of linear classifiers fitted to only a few images. Keys are numbers of images per class, and
            each value has one accuracy per random draw.
    """

    linear: float
    penalty: float
    neighbours: float
    commonest: float
    classifier: Linear = field(compare=False, repr=False)
    few: dict[int, list[float]] = field(default_factory=dict)

    def mean_and_deviation(self) -> dict[int, tuple[float, float]]:
        """Return the mean and the standard deviation of the accuracies for each number of images per class in `few`."""
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
) -> ProbeResult:
    """Fit classifiers to vectors (n, d) with class indices (n,), and measure their accuracy on test vectors.

    Args:
        vectors: The training vectors, such as the output of `model.embed`.
        labels: The class indices of the training vectors.
        test_vectors: The test vectors.
        test_labels: The class indices of the test vectors.
        shots: Numbers of training images per class. For each number, additional classifiers are fitted to that many
            randomly drawn images of each class. Numbers larger than the smallest class are skipped.
        draws: The number of random draws for each number in `shots`.
        seed: The seed of the random draws.

    Raises:
        InputError: Vectors and labels do not match, a test class has no training vector, or an argument is invalid.
    """
    _check(vectors, labels, test_vectors, test_labels)
    check_count(draws, "draws")
    for count in shots:
        check_count(count, "Each number in shots")
    vectors, test_vectors = vectors.detach().cpu().double(), test_vectors.detach().cpu().double()
    largest = float(vectors.abs().max()) or 1.0
    vectors, test_vectors = vectors / largest, test_vectors / largest  # so that squares do not overflow
    labels, test_labels = labels.cpu(), test_labels.cpu()
    classes = int(labels.max()) + 1
    counts = labels.bincount(minlength=classes)
    classifier = fit(vectors, labels, classes)
    few: dict[int, list[float]] = {}
    for count in shots:
        if count <= counts[counts > 0].min():
            few[count] = []
            for draw in range(draws):
                rows = draw_per_class(labels, count, seed + draw)
                few[count].append(_accuracy(fit(vectors[rows], labels[rows], classes)(test_vectors), test_labels))
    commonest = float((test_labels == counts.argmax()).double().mean())
    neighbours = _accuracy(votes(vectors, labels, test_vectors, classes), test_labels)
    linear = _accuracy(classifier(test_vectors), test_labels)
    classifier = classifier._replace(mean=classifier.mean * largest, scale=classifier.scale / largest)
    return ProbeResult(linear, classifier.penalty, neighbours, commonest, classifier, few)


def _check(vectors: Tensor, labels: Tensor, test_vectors: Tensor, test_labels: Tensor) -> None:
    for rows, classes in ((vectors, labels), (test_vectors, test_labels)):
        if rows.ndim != 2 or classes.shape != (len(rows),) or not rows.numel() or classes.dtype != torch.int64:
            raise InputError(
                f"Expected vectors of shape (n, d) and int64 labels of shape (n,), got {tuple(rows.shape)} and "
                f"{tuple(classes.shape)} of {classes.dtype}. Pass one class index for each vector."
            )
        check_real(rows)
        if int(classes.min()) < 0:
            raise InputError(f"Labels must not be negative, got {int(classes.min())}. Number the classes from 0.")
    if vectors.shape[1] != test_vectors.shape[1]:
        raise InputError(
            f"Training vectors have width {vectors.shape[1]}, but test vectors have width {test_vectors.shape[1]}. "
            "Use vectors of the same model."
        )
    if len(set(labels.tolist())) < 2:
        raise InputError(
            "All training vectors have the same class, but a probe needs at least two classes. Add images of another "
            "class."
        )
    unseen = sorted(set(test_labels.tolist()) - set(labels.tolist()))
    if unseen:
        raise InputError(
            f"The test labels contain classes without training vectors: {unseen[:8]}. Add training vectors of these "
            "classes, or remove their test vectors."
        )


def fit(vectors: Tensor, labels: Tensor, classes: int) -> Linear:
    """Fit a linear classifier to vectors, with the penalty that gives the smallest leave-one-out error.

    Args:
        vectors: The training vectors (n, d).
        labels: The class indices of the vectors (n,).
        classes: The number of classes.
    """
    x = vectors.double()
    center, scale = x.mean(0), 1 / x.std(0, correction=0).clamp(min=1e-8)
    targets = 2 * F.one_hot(labels, classes).double() - 1  # (n, k)
    bias = targets.mean(0)
    left, singular, right = torch.linalg.svd((x - center) * scale, full_matrices=False)
    answers = left.mT @ (targets - bias)
    powers = singular.square()
    best, least, chosen, errors = powers, float("inf"), 0.0, targets
    for penalty in PENALTIES:
        kept = powers / (powers + penalty * powers.mean())  # of each direction
        residuals = left_out_residuals(left, kept, answers, targets - bias)
        error = float(residuals.square().mean())
        if error < least:
            best, least, chosen, errors = kept, error, penalty, residuals
    inverse = best / singular.clamp(min=1e-12)
    weight = right.mT @ (inverse[:, None] * answers)
    return Linear(center, scale, weight, bias, chosen, best_sharpness(targets - errors, labels))


def left_out_residuals(left: Tensor, kept: Tensor, answers: Tensor, targets: Tensor) -> Tensor:
    """Return the errors of a ridge regression for each row if it is fitted without that row (PRESS residuals): (n, k).

    The errors have a closed form, so the regression is not fitted again.

    Args:
        left: The left singular vectors of the inputs (n, r).
        kept: The factor by which the penalty shrinks each singular direction (r,).
        answers: The targets in the basis of the left singular vectors (r, k).
        targets: The targets without their mean (n, k).
    """
    residuals = targets - left @ (kept[:, None] * answers)
    leverage = left.square() @ kept + 1 / len(left)  # 1 / n comes from the bias
    return residuals / (1 - leverage).clamp(min=1e-9)[:, None]


def best_sharpness(scores: Tensor, labels: Tensor) -> float:
    """Return the number from `SHARPNESSES` by which to multiply scores so that their softmax fits the labels best.

    The measure is the cross-entropy with smoothed targets, as if there were one more image, of an unknown class.
    Without smoothing, the best number would be infinite if all images are classified correctly.

    Args:
        scores: The scores of each image for each class (n, k).
        labels: The true class of each image (n,).
    """
    smoothing = 1 / (len(scores) + 1)

    def loss(i: int) -> float:
        return float(F.cross_entropy(SHARPNESSES[i] * scores, labels, label_smoothing=smoothing))

    # The loss is convex, so it falls up to the best factor and then rises.
    return SHARPNESSES[bisect_left(range(len(SHARPNESSES) - 1), True, key=lambda i: loss(i) <= loss(i + 1))]


def votes(vectors: Tensor, labels: Tensor, queries: Tensor, classes: int) -> Tensor:
    """Return the votes of the nearest neighbours of each query, weighted by similarity and added up by class: (q, k).

    Args:
        vectors: The known vectors (n, d).
        labels: The class indices of the known vectors (n,).
        queries: The vectors to classify (q, d).
        classes: The number of classes.
    """
    known = normalized(vectors)
    found = []
    for group in torch.split(queries, QUERIES):
        nearness, rows = cosines(normalized(group), known).topk(min(NEIGHBOURS, len(known)))
        weights = (nearness / TEMPERATURE).softmax(1)
        found.append(weights.new_zeros(len(group), classes).scatter_add(1, labels[rows], weights))
    return torch.cat(found)


def draw_per_class(labels: Tensor, count: int, seed: int) -> Tensor:
    """Choose `count` random images of each class, and return their indices.

    Args:
        labels: The class index of each image (n,).
        count: The number of images to choose from each class.
        seed: The seed of the random choice.
    """
    check_count(count, "count")
    order = _order(len(labels), seed)
    return torch.cat([order[labels[order] == label][:count] for label in sorted(set(labels.tolist()))])


def _order(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def held_out(labels: Tensor, seed: int, share: float = 0.2) -> Tensor:
    """Return a random mask (n,) that is True for the images to hold out, for example for validation.

    Args:
        labels: The class index of each image (n,).
        seed: The seed of the random choice.
        share: The fraction of each class to hold out. At least one image of every class with two or more is held out.
    """
    chosen = labels.new_zeros(len(labels), dtype=torch.bool)
    order = _order(len(labels), seed)
    for label in sorted(set(labels.tolist())):
        rows = order[labels[order] == label]
        chosen[rows[: max(round(share * len(rows)), int(len(rows) > 1))]] = True
    return chosen


def _accuracy(scores: Tensor, labels: Tensor) -> float:
    if not scores.isfinite().all():
        raise InputError(
            "The scores of the test vectors are not finite, because some values are far larger than in the training "
            "vectors. Compute both sets with the same model."
        )
    return float((scores.argmax(1) == labels).double().mean())
