"""Recipes out of range, and what is usual."""

import math
from dataclasses import fields
from typing import Any

import pytest
from tiny_run import settings

from vitlite.errors import TrainError
from vitlite.training import Augmentation, Settings
from vitlite.training import augment as augment_module
from vitlite.training import settings as settings_module
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
    with pytest.raises(TrainError, match=rf"{name} must be a .*number from \S+ to \S+, got {value}\.") as caught:
        settings(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("optimizer", "sgd", "one of 'adamw', 'muon'"),
        ("optimizer", "Muon", "one of 'adamw', 'muon'"),
        ("optimizer", None, "one of 'adamw', 'muon'"),
        ("frozen", "no", "True or False"),
        ("balance", 0, "True or False"),
        ("bfloat16", "no", "True or False"),
        ("epochs", 1.5, "a whole number from 1 to 1000000"),
        ("epochs", "2", "a whole number from 1 to 1000000"),
        ("epochs", True, "a whole number from 1 to 1000000"),
        ("batch", 16.5, "a whole number"),
        ("patience", 0.5, "a whole number from 0"),
        ("accumulate", 1.5, "a whole number"),
        ("seed", 1.5, "a whole number"),
        ("lr", None, "a number from 1e-09 to 1000"),
        ("augmentation", "weak", "an Augmentation, such as vitlite.training.STRENGTHS['weak']"),
    ],
)
def test_a_recipe_of_values_that_nobody_knows(name: str, value: object, wanted: str) -> None:
    """Each of them trained something else than it seems to say, or ended in Python's own words later."""
    with pytest.raises(TrainError) as caught:
        settings(**{name: value})
    assert str(caught.value).startswith(f"{name} must be {wanted}")
    assert str(caught.value).endswith(f", got {value!r}.")


@pytest.mark.parametrize(
    "changes", [{"flip": 2.0}, {"mixup": -1}, {"erase": math.nan}, {"shift": 5.0}, {"warp": "some"}, {"colour": None}]
)
def test_changes_of_pictures_that_are_no_shares(changes: dict[str, Any]) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(TrainError, match=rf"^{name} must be a number from 0 to 1, got {value!r}\.$"):
        Augmentation(**changes)


def test_muon_moves_nothing_of_a_head_alone() -> None:
    with pytest.raises(TrainError, match=r"Muon moves the matrices of the blocks, and frozen trains the head alone\."):
        Settings(epochs=1, frozen=True, optimizer="muon")


def test_a_picture_is_mixed_in_one_way() -> None:
    with pytest.raises(TrainError, match=r"at most 1 together, as an image gets one of them, got 0\.8 and 0\.8"):
        Augmentation(mixup=0.8, cutmix=0.8)
    assert Augmentation(mixup=0.9, cutmix=0.1).mixup == 0.9


def test_every_field_has_a_check() -> None:
    assert [field.name for field in fields(Settings)] == list(settings_module.CHECKS)
    assert [field.name for field in fields(Augmentation)] == list(augment_module.CHECKS)


def test_what_is_usual() -> None:
    assert usual_optimizer(random_weights=True, frozen=False) == "muon"
    assert usual_optimizer(random_weights=True, frozen=True) == "adamw"
    assert usual_optimizer(random_weights=False, frozen=False) == "adamw"
    assert usual_lr("muon", frozen=False) == 3e-3
    assert (usual_lr("adamw", frozen=False), usual_lr("adamw", frozen=True)) == (3e-4, 1e-3)
    assert (usual_layer_decay(random_weights=True), usual_layer_decay(random_weights=False)) == (1.0, 0.75)
