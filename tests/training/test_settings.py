"""Recipes out of range, and what is usual."""

import math
import re

import pytest
from tiny_run import settings

from vitlite.errors import TrainError
from vitlite.training.settings import usual_layer_decay, usual_lr, usual_optimizer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -2.0),
        ("smoothing", 3.0),
        ("ema", 1.0),
        ("clip", math.nan),
        ("layer_decay", 0.0),
        ("epochs", 0),
        ("seed", 10**13),
    ],
)
def test_a_recipe_out_of_range(name: str, value: float) -> None:
    with pytest.raises(TrainError, match=rf"{name} must be from \S+ to \S+, got {re.escape(f'{value:g}')}") as caught:
        settings(**{name: value})
    assert caught.value.field == name


def test_what_is_usual() -> None:
    assert usual_optimizer(random_weights=True, frozen=False) == "muon"
    assert usual_optimizer(random_weights=True, frozen=True) == "adamw"
    assert usual_optimizer(random_weights=False, frozen=False) == "adamw"
    assert usual_lr("muon", frozen=False) == 3e-3
    assert (usual_lr("adamw", frozen=False), usual_lr("adamw", frozen=True)) == (3e-4, 1e-3)
    assert (usual_layer_decay(random_weights=True), usual_layer_decay(random_weights=False)) == (1.0, 0.75)
