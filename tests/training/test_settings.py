"""Settings out of range, and the usual values."""

import math
from itertools import pairwise

import pytest
from tiny_run import settings

from vitlite.errors import TrainError
from vitlite.training import Augmentation, Settings
from vitlite.training.settings import usual_batch, usual_epochs, usual_layer_decay, usual_lr, usual_optimizer


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("lr", -2.0, "a number from 1e-09 to 1000"),
        ("lr", None, "a number from 1e-09 to 1000"),
        ("smoothing", 3.0, "a number from 0 to 0.99"),
        ("clip", math.nan, "a number from 1e-09 to inf"),
        ("epochs", 0, "an integer from 1 to 1e+06"),
        ("epochs", 1.5, "an integer from 1 to 1e+06"),
        ("epochs", True, "an integer from 1 to 1e+06"),
        ("seed", 10**13, "an integer from -1e+12 to 1e+12"),
        ("optimizer", "sgd", "one of adamw, muon"),
    ],
)
def test_a_setting_out_of_range_is_an_error(name: str, value: object, wanted: str) -> None:
    with pytest.raises(TrainError) as caught:
        settings(**{name: value})
    assert str(caught.value) == f"{name} must be {wanted}, got {value!r}."


@pytest.mark.parametrize("changes", [{"flip": 2.0}, {"mixup": -1}, {"erase": math.nan}, {"warp": "some"}])
def test_an_augmentation_out_of_range_is_an_error(changes: dict[str, object]) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(TrainError, match=rf"^{name} must be a number from 0 to 1, got {value!r}\.$"):
        Augmentation(**changes)


def test_settings_that_exclude_each_other_are_errors() -> None:
    with pytest.raises(TrainError, match=r"Muon trains the blocks, but frozen=True trains only the head\."):
        Settings(epochs=1, frozen=True, optimizer="muon")
    with pytest.raises(TrainError, match=r"add up to at most 1, got 0\.8 and 0\.8\."):
        Augmentation(mixup=0.8, cutmix=0.8)
    assert Augmentation(mixup=0.9, cutmix=0.1).mixup == 0.9


def test_usual_values() -> None:
    assert usual_optimizer(random_weights=True, frozen=False) == "muon"
    assert usual_optimizer(random_weights=True, frozen=True) == "adamw"
    assert usual_optimizer(random_weights=False, frozen=False) == "adamw"
    assert usual_lr("muon", frozen=False) == 3e-3
    assert (usual_lr("adamw", frozen=False), usual_lr("adamw", frozen=True)) == (3e-4, 1e-3)
    assert (usual_layer_decay(random_weights=True), usual_layer_decay(random_weights=False)) == (1.0, 0.75)


def test_usual_epochs_and_batches_change_smoothly() -> None:
    counts = [round(50 * 1.02**i) for i in range(450)]  # up to 363,000 images
    batches, epochs = [usual_batch(n) for n in counts], [usual_epochs(n) for n in counts]
    steps = [e * math.ceil(n / b) for n, b, e in zip(counts, batches, epochs, strict=True)]
    assert (batches[0], batches[-1], epochs[-1]) == (16, 128, 10)
    assert all(fewer <= more <= 1.1 * fewer for fewer, more in pairwise(batches))
    assert all(more <= fewer <= 1.1 * more for fewer, more in pairwise(epochs))
    assert all(more >= 0.9 * fewer for fewer, more in pairwise(steps))
    assert all(late >= early for early, late in zip(steps, steps[20:], strict=False))  # half as many images again


def test_usual_costs() -> None:
    assert (usual_epochs(300), usual_batch(300)) == (21, 16)
    assert (usual_epochs(50_000), usual_batch(50_000)) == (10, 111)
