"""Classes made of `ViT`, with tensors and files of their own: what a run keeps of them."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import CONFIG, TRANSFORM, Killed, new_model, settings, stripes
from torch import Tensor, nn

from vitlite import ViT, ViTConfig
from vitlite.checkpoints.save import write_tensors
from vitlite.errors import InputError
from vitlite.images import Preprocess
from vitlite.training import measure, train
from vitlite.training.run import Run


class Normed(ViT):
    """With a batch norm before the patches, and a layer that nothing uses."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.first = nn.BatchNorm2d(config.channels)
        self.blocks[0].unused = nn.Linear(config.dim, config.dim)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.first(images))

    def save(self, path: Any) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        write_tensors(Path(path) / "all.safetensors", {name: x.double() for name, x in self.state_dict().items()})


def normed() -> Normed:
    torch.manual_seed(0)
    model = Normed(CONFIG)
    model.preprocess = Preprocess(TRANSFORM, model)
    return model


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("killed_after", [0, 4])
def test_a_run_of_a_class_of_ones_own_goes_on(tmp_path: Path, optimizer: str, killed_after: int) -> None:
    """Its buffers are as if nothing had happened, too; what has no gradient is left alone, and `best` is not read."""
    data, validation = stripes(24), stripes(8, seed=1)
    recipe = settings(optimizer=optimizer, epochs=3)

    def kill(run: Run) -> None:
        if run.progress.epoch * run.steps + run.progress.step >= killed_after:
            raise Killed

    whole, killed = normed(), normed()
    history = train(whole, data, tmp_path / "whole", recipe, validation=validation)
    save_every = 60.0 if killed_after == 0 else 0.0  # before any step was kept; after each
    with pytest.raises(Killed):
        train(killed, data, tmp_path / "killed", recipe, validation=validation, after_step=kill, save_every=save_every)
    again = killed if killed_after == 0 else normed()
    went_on = train(again, data, tmp_path / "killed", recipe, validation=validation)
    assert [record["val_loss"] for record in went_on] == [record["val_loss"] for record in history]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert int(whole.first.num_batches_tracked) == 9
    assert torch.equal(whole.blocks[0].unused.weight, normed().blocks[0].unused.weight)
    assert measure(again, validation).loss == measure(whole, validation).loss


def test_another_thread_does_not_ask_a_model_that_is_being_trained(tmp_path: Path) -> None:
    """It would put it into eval mode for some steps, and be answered by half a step."""
    model, answers, errors = new_model(), [], []

    def look() -> None:
        try:
            model.predict(torch.zeros(16, 16, 3))
        except InputError as error:
            errors.append(str(error))

    def watch(run: Run) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        answers.append(model.predict(torch.zeros(16, 16, 3)))  # from here it may be asked

    train(model, stripes(24), tmp_path, settings(epochs=1), after_step=watch)
    assert len(errors) == len(answers) == 3
    assert errors[0].startswith("Another thread trains this model, and what it answers between two steps means nothing")
    look()
    assert len(errors) == 3
