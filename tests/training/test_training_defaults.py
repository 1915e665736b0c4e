"""That reading, measuring and training do not depend on torch's defaults, which belong to whoever set them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import CONFIG, new_model, settings, small_cifar10, stripes

from vitlite import ViT
from vitlite.errors import TrainError
from vitlite.training import STRENGTHS, loop, measure, read_cifar10, train
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


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same_wherever_it_is_called_from(mode: str, bfloat16: bool, tmp_path: Path) -> None:
    """The settings say in which type is computed, and an autocast around keeps no weights of earlier steps."""
    data, validation, recipe = stripes(24), stripes(8, seed=1), settings(bfloat16=bfloat16)
    usual, other = new_model(), new_model()
    wanted = train(usual, data, tmp_path / "usual", recipe, validation=validation)
    with MODES[mode]():
        found = train(other, stripes(24), tmp_path / "other", recipe, validation=stripes(8, seed=1))
    assert all(map(torch.equal, other.parameters(), usual.parameters()))
    assert [record | {"seconds": 0} for record in found] == [record | {"seconds": 0} for record in wanted]


def test_a_model_without_gradients_is_refused(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = new_model()
        with pytest.raises(
            TrainError, match=r"made under torch\.inference_mode, and of its \S+ .*Create or load it out"
        ):
            train(model, stripes(8), tmp_path / "out", settings())
    assert not (tmp_path / "out").exists()


def test_runs_in_threads_do_not_draw_each_others_numbers(tmp_path: Path) -> None:
    """torch has one generator for all threads."""
    models = [new_model(CONFIG.replace(drop_path=0.4, dropout=0.1)) for _ in range(8)]
    data, seeds = stripes(24), (0, 1, 2, 3)

    def trained(out: Path, seed: int) -> list[Any]:
        model = models.pop()
        train(model, data, out, settings(seed=seed))
        return [weight.tolist() for weight in model.parameters()]

    alone = [trained(tmp_path / f"alone {seed}", seed) for seed in seeds]
    with ThreadPoolExecutor(len(seeds)) as pool:
        together = list(pool.map(lambda seed: trained(tmp_path / f"together {seed}", seed), seeds))
    assert together == alone


def test_each_process_and_step_leaves_out_others(tmp_path: Path) -> None:
    seeds = [loop._seed_of_masks(0, step, rank) for step in range(3) for rank in range(3)]
    masks = {tuple(torch.rand(8, generator=torch.Generator().manual_seed(seed)).tolist()) for seed in seeds}
    assert len(masks) == len(seeds)


def test_training_leaves_torch_s_random_numbers_as_they_were(tmp_path: Path) -> None:
    model, before = new_model(CONFIG.replace(dropout=0.1)), torch.get_rng_state()
    train(model, stripes(24), tmp_path, settings())
    assert torch.equal(torch.get_rng_state(), before)
