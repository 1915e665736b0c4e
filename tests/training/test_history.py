"""Which epoch is the best."""

import doctest
import math

from vitlite.training import history
from vitlite.training.history import is_better, why_best


def test_examples() -> None:
    assert doctest.testmod(history).failed == 0
    assert doctest.testmod(history).attempted > 0


def test_an_epoch_is_better_by_accuracy_then_by_loss() -> None:
    def record(top1: float, loss: float) -> dict[str, float]:
        return {"epoch": 1, "val_top1": top1, "val_loss": loss}

    assert is_better(record(0.5, 9.0), [])
    assert is_better(record(0.6, 9.0), [record(0.5, 0.1)])
    assert is_better(record(0.5, 0.1), [record(0.5, 0.2), {"epoch": 2}])
    assert is_better(record(0.5, 0.1), [record(0.5, math.nan)])
    assert not is_better(record(0.5, 0.2), [record(0.5, 0.2)])
    assert not is_better(record(0.5, math.nan), [record(0.5, 9.0)])
    assert not is_better(record(0.4, 0.1), [record(0.5, 0.2)])
    assert why_best([{"epoch": 1}]) == ""
