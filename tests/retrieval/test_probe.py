"""The closed forms of a probe equal their definitions, and noise scores as chance."""

from typing import Any

import pytest
import torch
from models import tiny_model
from torch import Tensor

from vitlite.errors import InputError
from vitlite.retrieval.probe import PENALTIES, draw_per_class, fit, held_out, left_out_residuals, probe, votes


def clusters(
    count: int, classes: int = 3, width: int = 12, spread: float = 0.5, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return vectors around a centre for each class, and the classes."""
    centers = 3 * torch.randn(classes, width, generator=torch.Generator().manual_seed(7))
    labels = torch.arange(count) % classes
    noise = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return centers[labels] + spread * noise, labels


@pytest.mark.parametrize("count", [40, 8])
def test_the_fit_is_ridge_regression(count: int) -> None:
    """With more vectors than dimensions, and with fewer."""
    x, labels = clusters(count)
    found = fit(x, labels, 3)
    assert found.penalty in PENALTIES
    z = (x.double() - found.mean) * found.scale
    targets = 2 * torch.nn.functional.one_hot(labels, 3).double() - 1
    penalty = found.penalty * torch.linalg.svdvals(z).square().mean()
    right = torch.linalg.solve(
        z.mT @ z + penalty * torch.eye(12, dtype=torch.float64), z.mT @ (targets - targets.mean(0))
    )
    torch.testing.assert_close(found.weight, right, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found(x), z @ right + targets.mean(0))


def test_leave_one_out_error() -> None:
    x, labels = clusters(9)
    z = x.double() - x.double().mean(0)
    targets = 2 * torch.nn.functional.one_hot(labels, 3).double() - 1
    left, singular, _ = torch.linalg.svd(z, full_matrices=False)
    kept = singular.square() / (singular.square() + 0.7)
    centered = targets - targets.mean(0)
    errors = []
    for row in range(9):
        rest = torch.arange(9) != row
        middle, goal = z[rest].mean(0), targets[rest].mean(0)
        inner = (z[rest] - middle).mT @ (z[rest] - middle) + 0.7 * torch.eye(12, dtype=torch.float64)
        weights = torch.linalg.solve(inner, (z[rest] - middle).mT @ (targets[rest] - goal))
        errors.append(targets[row] - ((z[row] - middle) @ weights + goal))
    found = left_out_residuals(left, kept, left.mT @ centered, centered)
    torch.testing.assert_close(found, torch.stack(errors), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spread", [0.5, 4, 8, 100])
def test_scores_are_as_high_as_the_accuracy(spread: float) -> None:
    """From classes that are told apart without a mistake to classes that are not told apart at all."""
    vectors, labels = clusters(400, spread=spread)
    unseen, right = clusters(2000, spread=spread, seed=1)
    classifier = fit(vectors, labels, 3)
    scores, found = (classifier.sharpness * classifier(unseen)).softmax(1).max(1)
    assert float(scores.mean()) == pytest.approx(float((found == right).double().mean()), abs=0.04)
    assert float(scores.mean()) < 0.9999  # 400 images without a mistake are not a certainty


def test_a_classifier_as_head_gives_the_same_accuracy_and_classes() -> None:
    """With vectors far from zero and of very different widths, whose mean and scale are folded into the weights."""
    model = tiny_model()
    for scale in (1.0, 1e-3, 1e4):
        vectors, labels = clusters(90, width=16, spread=6)
        unseen, right = clusters(600, width=16, spread=6, seed=1)
        widths = scale * torch.logspace(-2, 2, 16)
        vectors, unseen = widths * (vectors + 5), widths * (unseen + 5)
        result = probe(vectors, labels, unseen, right)
        result.classifier.put_on(model, ["a", "b", "c"])
        with torch.no_grad():
            logits = model.head(unseen)
        assert model.labels == ["a", "b", "c"]
        assert float((logits.argmax(1) == right).double().mean()) == result.linear
        expected = (result.classifier.sharpness * result.classifier(unseen)).softmax(1)
        torch.testing.assert_close(logits.softmax(1).double(), expected, atol=1e-5, rtol=0)


def test_votes_of_neighbours() -> None:
    known, labels = clusters(60)
    queries, right = clusters(30, seed=1)
    found = votes(known, labels, queries, 3)
    cosines = torch.nn.functional.cosine_similarity(queries[:, None], known[None], dim=2)
    for query in range(30):
        best = cosines[query].topk(20).indices
        weights = (cosines[query, best] / 0.07).softmax(0)
        for label in range(3):
            assert float(found[query, label]) == pytest.approx(float(weights[labels[best] == label].sum()), abs=1e-5)
    assert torch.equal(found.argmax(1), right)


def test_clusters_are_told_apart_and_noise_is_not() -> None:
    good = probe(*clusters(90), *clusters(60, seed=1), shots=(1, 5, 25, 50))
    assert good.linear == good.neighbours == 1
    assert good.commonest == pytest.approx(1 / 3)
    assert list(good.few) == [1, 5, 25]  # there are 30 of each
    assert all(len(draws) == 5 for draws in good.few.values())
    assert good == probe(*clusters(90), *clusters(60, seed=1), shots=(1, 5, 25, 50))
    vectors, labels = clusters(90, spread=1000)
    unseen, right = clusters(600, spread=1000, seed=1)
    noise = probe(vectors, labels, unseen, right)
    for share in (noise.linear, noise.neighbours, *noise.few[1]):
        assert 0.25 < share < 0.42


def test_more_images_give_a_higher_accuracy() -> None:
    few = probe(*clusters(300, spread=6), *clusters(600, spread=6, seed=1)).mean_and_deviation()
    assert few[1][0] < few[5][0] < few[25][0]
    assert few[1][1] > 0


def test_draws_and_held_out_rows() -> None:
    labels = torch.tensor([0] * 10 + [1] * 5 + [3] * 1)
    aside = held_out(labels, seed=0)
    assert [int(aside[labels == label].sum()) for label in (0, 1, 3)] == [2, 1, 0]
    assert torch.equal(aside, held_out(labels, seed=0))
    assert not torch.equal(aside, held_out(labels, seed=1))
    assert labels[draw_per_class(labels, 1, seed=0)].tolist() == [0, 1, 3]


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e30, 1e200])
def test_the_scale_of_vectors_does_not_matter(scale: float) -> None:
    """In float32, these numbers or their squares would be infinite or zero."""
    vectors, labels = clusters(90, spread=6)
    unseen, right = clusters(60, spread=6, seed=1)
    vectors, unseen = vectors.double(), unseen.double()
    assert probe(scale * vectors, labels, scale * unseen, right) == probe(vectors, labels, unseen, right)


def test_vectors_of_zeros_score_as_chance() -> None:
    labels = torch.arange(30) % 3
    assert probe(torch.zeros(30, 4), labels, torch.zeros(30, 4), labels).linear == pytest.approx(1 / 3)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_default_dtype_does_not_matter(default: torch.dtype) -> None:
    right = probe(*clusters(90, spread=6), *clusters(60, spread=6, seed=1))
    given = (*clusters(90, spread=6), *clusters(60, spread=6, seed=1))
    torch.set_default_dtype(default)
    try:
        found = probe(*given)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == right


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [({"shots": [5, 0]}, "shots must be a positive integer, got 0"), ({"draws": 0}, "draws must be .* got 0")],
)
def test_arguments_that_are_not_valid(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        probe(*clusters(9), *clusters(9), **wrong)


def test_vectors_and_labels_that_do_not_match() -> None:
    x, labels = clusters(9)
    for arguments, reason in (
        ((x, labels[:8], x, labels), r"got \(9, 12\) and \(8,\)"),
        ((x[:, :0], labels, x[:, :0], labels), r"Expected vectors of shape \(n, d\)"),
        ((x[labels < 2], labels[labels < 2], x, labels), r"classes without training vectors: \[2\]"),
        ((x, labels * 0, x, labels * 0), "have the same class"),
        ((x, labels, x[:, 1:], labels), "have width 12, but test vectors have width 11"),
        ((x / 0, labels, x, labels), "must be finite"),
        ((x, labels, x * 1j, labels), r"must be real, got torch\.complex64"),
        ((x, labels - 1, x, labels - 1), "must not be negative, got -1"),
        ((1e-200 * x.double(), labels, 1e200 * x.double(), labels), "test vectors are not finite"),
    ):
        with pytest.raises(InputError, match=reason):
            probe(*arguments)
