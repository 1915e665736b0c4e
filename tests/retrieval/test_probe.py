"""What a probe measures: its closed forms against the definitions, and that it does not flatter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vitlite.errors import InputError
from vitlite.retrieval.probe import PENALTIES, fit, held_out, left_out_error, probe, some_of_each, votes


def clusters(
    count: int, classes: int = 3, width: int = 12, spread: float = 0.5, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Vectors around a middle for each class, and the classes."""
    centers = 3 * torch.randn(classes, width, generator=torch.Generator().manual_seed(7))
    labels = torch.arange(count) % classes
    noise = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return centers[labels] + spread * noise, labels


@pytest.mark.parametrize("count", [40, 8])
def test_the_fit_is_ridge_regression(count: int) -> None:
    """Of more vectors than numbers, and of fewer."""
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


def test_leaving_each_out_in_turn_is_what_the_formula_says() -> None:
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
    right = float(torch.stack(errors).square().mean())
    assert left_out_error(left, kept, left.mT @ centered, centered) == pytest.approx(right, rel=1e-9)


def test_neighbours_vote_by_their_cosine() -> None:
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


def test_what_can_be_told_apart_is_and_noise_is_not() -> None:
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


def test_more_pictures_tell_more() -> None:
    few = probe(*clusters(300, spread=6), *clusters(600, spread=6, seed=1)).few_in_words()
    assert few[1][0] < few[5][0] < few[25][0]
    assert few[1][1] > 0


def test_what_is_drawn() -> None:
    labels = torch.tensor([0] * 10 + [1] * 5 + [3] * 1)
    aside = held_out(labels, seed=0)
    assert [int(aside[labels == label].sum()) for label in (0, 1, 3)] == [2, 1, 0]
    assert torch.equal(aside, held_out(labels, seed=0))
    assert not torch.equal(aside, held_out(labels, seed=1))
    assert labels[some_of_each(labels, 1, seed=0)].tolist() == [0, 1, 3]


def test_what_does_not_go_together() -> None:
    x, labels = clusters(9)
    with pytest.raises(InputError, match="got \\(9, 12\\) and \\(8,\\)"):
        probe(x, labels[:8], x, labels)
    with pytest.raises(InputError, match="of classes that no picture to fit to has: \\[2\\]"):
        probe(x[labels < 2], labels[labels < 2], x, labels)
    with pytest.raises(InputError, match="one class only"):
        probe(x, labels * 0, x, labels * 0)
    with pytest.raises(InputError, match="12 numbers do not go with some of 11"):
        probe(x, labels, x[:, 1:], labels)
    with pytest.raises(InputError, match="not finite"):
        probe(x / 0, labels, x, labels)


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e30, 1e200])
def test_what_is_measured_does_not_depend_on_how_long_vectors_are(scale: float) -> None:
    """Cosines and standardised numbers are the same, where float32 and squares would be infinite or nothing."""
    vectors, labels = clusters(90, spread=6)
    unseen, right = clusters(60, spread=6, seed=1)
    vectors, unseen = vectors.double(), unseen.double()
    assert probe(scale * vectors, labels, scale * unseen, right) == probe(vectors, labels, unseen, right)


def test_vectors_without_any_number_but_zero_tell_nothing() -> None:
    labels = torch.arange(30) % 3
    assert probe(torch.zeros(30, 4), labels, torch.zeros(30, 4), labels).linear == pytest.approx(1 / 3)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_torch_s_default_type_changes_nothing(default: torch.dtype) -> None:
    right = probe(*clusters(90, spread=6), *clusters(60, spread=6, seed=1))
    given = (*clusters(90, spread=6), *clusters(60, spread=6, seed=1))
    torch.set_default_dtype(default)
    try:
        found = probe(*given)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == right


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shots": [-1]}, r"shots are .*: whole numbers from 1, got \[-1\]"),
        ({"shots": [5, 0]}, r"got \[5, 0\]"),
        ({"shots": [1.5]}, r"got \[1.5\]"),
        ({"shots": 5}, "got 5"),
        ({"draws": 0}, "draws is .* at least 1, got 0"),
        ({"draws": 2.0}, r"got 2\.0"),
        ({"seed": 0.5}, r"seed says .* got 0\.5"),
        ({"seed": 10**20}, "at most 18 digits, got 1000"),
    ],
)
def test_arguments_that_are_none(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        probe(*clusters(9), *clusters(9), **wrong)


def test_vectors_and_labels_that_are_none() -> None:
    x, labels = clusters(9)
    with pytest.raises(InputError, match="Labels are whole numbers from 0, got -1"):
        probe(x, labels - 1, x, labels - 1)
    with pytest.raises(InputError, match=r"real numbers, got torch\.complex64"):
        probe(x, labels, x * 1j, labels)
    with pytest.raises(InputError, match="too large beside those to fit to"):
        probe(1e-200 * x.double(), labels, 1e200 * x.double(), labels)
    with pytest.raises(InputError, match=r"takes vectors \(n, d\)"):
        probe(x[:, :0], labels, x[:, :0], labels)
