"""The learning rate over time."""

import doctest

import pytest

from vitlite.training import schedule
from vitlite.training.schedule import learning_rate
from vitlite.training.settings import Settings


def test_examples() -> None:
    assert doctest.testmod(schedule).failed == 0
    assert doctest.testmod(schedule).attempted > 0


def test_until_it_falls_it_does_not_know_the_end() -> None:
    short, long = Settings(epochs=10), Settings(epochs=100)
    for epoch in (0, 0.3, 1, 5.9):
        assert learning_rate(short, epoch) == learning_rate(long, epoch)
    assert learning_rate(short, 6.5) < learning_rate(long, 6.5)


def test_the_first_step_moves_the_weights() -> None:
    assert 0 < learning_rate(Settings(epochs=10), 0) < 1e-5
    assert learning_rate(Settings(epochs=10), 10) == pytest.approx(0)
