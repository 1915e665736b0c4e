"""That reading, measuring and training do not depend on torch's defaults, which belong to whoever set them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import new_model, settings, small_cifar10

from vitlite import ViT
from vitlite.training import STRENGTHS, measure, read_cifar10, train
from vitlite.training.evaluate import read_to_measure
from vitlite.training.split import read_to_train


@pytest.fixture(params=["float64", "float16", "bfloat16", "meta"])
def default(request: pytest.FixtureRequest) -> Iterator[str]:
    """Another type of new tensors than float32, or another device than the CPU: for `set_default`, and undone here."""
    yield request.param
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def set_default(name: str) -> None:
    if name == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(getattr(torch, name))


def results(model: ViT, folders: Path, cifar10: Path, out: Path) -> list[Any]:
    """What reading, measuring and training give."""
    read = read_to_measure(folders, model, "it")
    measured = measure(model, read)
    images = read_cifar10(cifar10, "test").images
    split = read_to_train(folders / "train", model.preprocess, ("lying", "standing"))
    recipe = settings(epochs=1, balance=True, optimizer="muon", augmentation=STRENGTHS["strong"])
    history = train(model, split.train, out, recipe, validation=split.validation)
    again = train(model, split.train, out, recipe, validation=split.validation)  # it is done already
    records = [record | {"seconds": None} for record in (*history, *again)]
    tensors = [images[0], read.labels, measured.answers, measured.recall, measured.precision, *model.parameters()]
    return [*records, measured.loss, measured.top1, *([tensor.dtype, tensor.tolist()] for tensor in tensors)]


def test_training_is_the_same_whatever_torch_s_defaults_are(default: str, folders: Path, tmp_path: Path) -> None:
    cifar10 = small_cifar10(tmp_path / "cifar10")
    usual, other = new_model(), new_model()
    wanted = results(usual, folders, cifar10, tmp_path / "usual")
    set_default(default)
    assert repr(results(other, folders, cifar10, tmp_path / "other")) == repr(wanted)
