"""Training: it learns, a killed run ends with the same weights, and errors leave the last good state."""

import json
import os
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from kills import program
from tiny_run import CONFIG, TRANSFORM, Killed, new_model, settings, stop, stripes
from torch import nn
from unwritable import refuse_new_files

import vitlite
from vitlite import ViT, ViTConfig
from vitlite.checkpoints.save import write_tensors
from vitlite.errors import ImageError, TrainError
from vitlite.images import Preprocess
from vitlite.images.transform import normalise
from vitlite.training import STRENGTHS, ImageData, measure, read_folder, train, trainer
from vitlite.training.state import STATE, Run, log_prior

PLAIN = {"augmentation": STRENGTHS["none"], "smoothing": 0.0}


def test_learns_and_writes_checkpoints(tmp_path):
    model, data, validation = new_model(), stripes(256), stripes(32, seed=1)
    how = settings(epochs=8, batch=16, optimizer="muon", lr=5e-3)
    history = train(model, data, tmp_path, how, validation=validation)
    assert history[-1]["val_top1"] >= 0.9
    assert history[-1]["val_loss"] < history[0]["val_loss"] < 0.7
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == history
    assert not model.training
    again: list[list] = []
    train(new_model(), data, tmp_path, how, validation=validation, after_epoch=again.append)
    assert again == [history]  # the run was finished
    best = vitlite.load(tmp_path / "best")
    assert best.labels == ("lying", "standing")
    image = validation.images[1].permute(1, 2, 0)
    assert best.predict(image, top=1)[0].label == "standing"
    last = vitlite.load(tmp_path / "last")
    torch.testing.assert_close(last(last.preprocess(image)), model(model.preprocess(image)))


def test_a_callback_may_measure_the_model(tmp_path):
    """`measure` leaves a model in eval mode; the next steps have dropout again."""
    data, validation = stripes(24), stripes(8, seed=1)

    def log(name, **callbacks):
        history = train(new_model(CONFIG.replace(dropout=0.3)), data, tmp_path / name, settings(epochs=1), **callbacks)
        return [record | {"seconds": 0} for record in history]

    measured = []
    watched = log("watched", after_step=lambda run: measured.append(measure(run.model, validation).loss))
    assert len(set(measured)) > 1
    assert watched == log("alone")


def test_best_is_the_epoch_with_the_lowest_loss_among_the_most_accurate(tmp_path):
    data, validation = stripes(64), stripes(8, seed=1)
    bright = torch.arange(64).view(-1, 1, 1, 1) % 2 * 200 + torch.zeros(64, 3, 16, 16)
    easy, held = replace(data, images=bright.byte()), replace(validation, images=bright[:8].byte())
    history = train(new_model(), easy, tmp_path, settings(epochs=4, augmentation=STRENGTHS["none"]), validation=held)
    right = [record for record in history if record["val_top1"] == 1]
    assert len(right) > 1, history
    found = measure(vitlite.load(tmp_path / "best"), held)
    assert found.loss == pytest.approx(min(record["val_loss"] for record in right), abs=1e-4)


KINDS = {
    "adamw": {},
    "muon": {"optimizer": "muon", "augmentation": STRENGTHS["strong"]},
    "parts": {"accumulate": 2, "layer_decay": 0.7},
    "bfloat16": {"bfloat16": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_with_the_same_weights(tmp_path, kind):
    config, how = CONFIG.replace(drop_path=0.2, dropout=0.1), settings(**KINDS[kind])
    whole = new_model(config)
    train(whole, stripes(22), tmp_path / "whole", how)  # batches of 7 or 8
    for last_step in (2, 4, 100):  # killed in the first epoch, in the second, and not at all

        def kill(run, last_step=last_step):
            if run.progress.epoch * run.steps + run.progress.step == last_step:
                raise Killed

        torch.rand(last_step)  # the state of torch's generator must not matter
        model = new_model(config)
        try:
            train(model, stripes(22), tmp_path / "parts", how, after_step=kill, save_every=0)
        except Killed:
            assert last_step < 100
    for (name, wanted), weight in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, wanted), name


class Normed(ViT):
    """A subclass with a batch norm before the patches, an unused layer, and a `save` of its own."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.first = nn.BatchNorm2d(config.channels)
        self.unused = nn.Linear(config.dim, config.dim)

    def embed(self, images):
        return super().embed(self.first(images))

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / "model.safetensors", self.state_dict())


def test_a_resumed_subclass_has_its_buffers(tmp_path):
    def run(out, after_epoch=lambda history: None):
        torch.manual_seed(0)
        model = Normed(CONFIG)
        model.preprocess = Preprocess(TRANSFORM, model)
        train(model, stripes(24), out, settings(), after_epoch=after_epoch)
        return model.state_dict()

    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "killed", stop)
    resumed = run(tmp_path / "killed")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    assert int(whole["first.num_batches_tracked"]) == 6


@pytest.mark.parametrize(("images", "batch"), [(90, 32), (65, 32), (96, 32), (6, 64), (1, 8), (49_000, 128)])
def test_batches_are_even_and_complete(images, batch):
    order, steps = torch.randperm(images), -(-images // batch)
    batches = [trainer.batch_of(order, step, steps) for step in range(steps)]
    assert torch.equal(torch.cat(batches), order)
    sizes = {len(rows) for rows in batches}
    assert max(sizes) <= batch
    assert max(sizes) - min(sizes) <= 1


def test_every_epoch_sees_every_image_once(tmp_path, monkeypatch):
    step, seen = trainer._step, []
    monkeypatch.setattr(trainer, "_step", lambda run, rows: (seen.append(rows.tolist()), step(run, rows))[1])
    train(new_model(), stripes(90), tmp_path, settings(batch=32))
    assert [len(rows) for rows in seen] == [30] * 6
    first, second = (sorted(chain(*epoch)) for epoch in (seen[:3], seen[3:]))
    assert first == second == list(range(90))
    assert seen[:3] != seen[3:]


def gradients_of_an_epoch(run):
    """Return the sum of the gradients over the steps, with fixed weights, and the mean loss."""
    total = 0.0
    for step in range(run.steps):
        rows = trainer.batch_of(torch.arange(len(run.data)), step, run.steps)
        total += trainer._add_gradients(run, *trainer._batch(run, rows))[0]
    return [weight.grad for weight in run.weights.values()], total / run.steps


@pytest.mark.parametrize("changes", [{}, {"accumulate": 3}])
def test_each_image_of_an_epoch_counts_alike(changes):
    run = Run(new_model(), stripes(23), settings(**PLAIN, **changes))  # in batches of at most 8, one batch has 7
    found, loss = gradients_of_an_epoch(run)
    assert run.steps == 3
    model, data = new_model(), stripes(23)
    images = normalise(data.images, model.preprocess.transform, 3)
    wanted = F.cross_entropy(model(images), data.labels)
    (3 * wanted).backward()  # the mean over all images, in each of three steps
    torch.testing.assert_close(found, [weight.grad for weight in model.parameters()], rtol=1e-4, atol=1e-6)
    assert loss == pytest.approx(wanted.item(), rel=1e-5)


def uneven():
    """Return 24 images, of which 3 stand."""
    data = stripes(48)
    kept = torch.cat([(data.labels == 0).nonzero()[:21], (data.labels == 1).nonzero()[:3]])[:, 0]
    return replace(data, images=data.images[kept], labels=data.labels[kept])


def test_balance_adds_the_shares_of_the_classes_to_the_logits():
    data = replace(uneven(), classes=("lying", "standing", "sitting"))
    assert log_prior(data, balance=False).tolist() == [0, 0, 0]
    assert log_prior(data, balance=True).exp().tolist() == pytest.approx([21 / 24, 3 / 24, 1 / 24])
    run = Run(new_model(), uneven(), settings(**PLAIN, balance=True))
    found, _ = gradients_of_an_epoch(run)
    model, data = new_model(), uneven()
    images = normalise(data.images, model.preprocess.transform, 3)
    (3 * F.cross_entropy(model(images) + torch.tensor([21 / 24, 3 / 24]).log(), data.labels)).backward()
    torch.testing.assert_close(found, [weight.grad for weight in model.parameters()], rtol=1e-4, atol=1e-6)


def shades(each, seed):
    """Return dark and bright images, whose shades overlap."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.full((count,), k) for k, count in enumerate(each)])
    shade = 100 + 40 * labels + 25 * torch.randn(len(labels), generator=generator)
    images = shade.clamp(0, 255).to(torch.uint8)[:, None, None, None].expand(-1, 3, 16, 16).contiguous()
    return ImageData(images, labels, ("dark", "bright"))


def test_balance_recognises_the_small_class(tmp_path):
    data, held = shades((112, 14), seed=0), shades((50, 50), seed=1)
    right = {}
    for balance in (False, True):
        how = settings(epochs=4, batch=16, balance=balance, **PLAIN)
        train(model := new_model(), data, tmp_path / str(balance), how)
        right[balance] = measure(model, held).correct.tolist()
    assert right[False][1] < 10 < 20 < right[True][1], right
    assert sum(right[True]) > sum(right[False]) + 5


def test_images_are_trained_on_as_predict_prepares_them():
    model, data, rows = new_model(), stripes(8), torch.tensor([5, 2, 7])
    for changes in ({"mean": (0.4, 0.5, 0.6)}, {"scale": 1 / 127.5, "mean": (1.0,), "std": (1.0,)}):
        model.preprocess = Preprocess(replace(TRANSFORM, **changes), model)
        run = Run(model, data, settings(augmentation=STRENGTHS["none"]))
        images, labels = trainer._batch(run, rows)
        assert torch.allclose(images, model.preprocess.batch(list(data.images[rows])), atol=1e-5)
        assert labels.argmax(1).tolist() == data.labels[rows].tolist()


def test_a_frozen_backbone_stays(tmp_path):
    model = new_model(CONFIG.replace(drop_path=0.5))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    modes: list[bool] = []
    model.register_forward_hook(lambda *_: modes.append(model.blocks[1].drop_path.training))
    model.pos_embed.requires_grad_(False)
    train(model, stripes(24), tmp_path, settings(frozen=True))
    assert not any(modes)  # no stochastic depth: the features are those of inference
    changed = [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])]
    assert changed == ["head.weight", "head.bias"]
    fixed = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert fixed == ["pos_embed"]  # the others were frozen for that run only


def test_fewer_images_than_a_batch(tmp_path):
    assert len(train(new_model(), stripes(6), tmp_path, settings(batch=64))) == 2


def test_a_diverged_loss_is_an_error_and_leaves_the_last_checkpoint(tmp_path):
    data, broken = stripes(24), new_model()
    with pytest.raises(Killed):
        train(new_model(), data, tmp_path, settings(), after_epoch=stop)
    with pytest.raises(
        TrainError, match=r"loss became nan in epoch 2, step 1.*lower lr=.*weights of the previous epoch"
    ):
        train(
            broken,
            data,
            tmp_path,
            settings(),
            after_resume=lambda run: nn.init.constant_(broken.head.weight, torch.nan),
        )
    assert vitlite.load(tmp_path / "last").head.weight.isfinite().all()


def test_infinite_gradients_take_no_step(tmp_path):
    model = new_model()
    model.head.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(TrainError, match="loss became nan in epoch 1, step 1"):
        train(model, stripes(24), tmp_path, settings())
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_earlier_gradients_are_not_used(tmp_path):
    data, whole, model = stripes(24), new_model(), new_model()
    train(whole, data, tmp_path / "whole", settings())
    model(torch.rand(2, 3, 16, 16)).square().sum().backward()
    train(model, data, tmp_path / "out", settings())
    assert {weight.grad for weight in model.parameters()} == {None}
    assert all(map(torch.equal, model.parameters(), whole.parameters()))


def test_an_unreadable_image_is_named(folders, tmp_path):
    (folders / "train" / "lying" / "0.png").write_bytes(b"no image")
    model = new_model()
    data = read_folder(folders / "train", model.preprocess.pixels, ("lying", "standing"), strict=True)
    with pytest.raises(ImageError, match=r"lying/0.png"):
        train(model, data, tmp_path, settings())


def test_a_model_with_other_classes_or_without_preprocessing_is_an_error(tmp_path):
    with pytest.raises(TrainError, match="data have 2 classes, but the model has 5"):
        train(new_model(CONFIG.replace(num_classes=5)), stripes(8), tmp_path / "out", settings())
    with pytest.raises(ImageError, match="preprocess"):
        train(ViT(CONFIG), stripes(8), tmp_path / "out", settings())
    with pytest.raises(TrainError, match="patience=3 needs validation images"):
        train(new_model(), stripes(8), tmp_path / "out", settings(patience=3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_in_another_dtype_is_an_error(tmp_path, dtype):
    model = new_model()
    model.blocks[1].norm1.to(dtype)
    with pytest.raises(TrainError, match=rf"must be in float32 for training, but blocks.1.norm1.weight is {dtype}"):
        train(model, stripes(8), tmp_path / "out", settings(bfloat16=True))
    assert not (tmp_path / "out").exists()


def test_other_classes_get_a_new_head(tmp_path, caplog):
    model, other = new_model(), stripes(8, classes=("hot", "cold"))
    model.labels = ("lying", "standing")
    nn.init.ones_(model.head.weight)
    with pytest.raises(Killed):
        train(model, other, tmp_path / "run", settings(lr=1e-9), after_epoch=stop)
    assert model.head.weight.abs().max() < 1e-6
    assert model.labels == ("hot", "cold")
    (message,) = caplog.messages
    assert message.startswith("vitlite: replacing the head, because the model's labels (lying, standing) differ from")


def test_a_zoo_model_with_one_channel(folders, tmp_path):
    model = vitlite.create("vit_nano_4.cifar10", channels=1, num_classes=2, image_size=16)
    classes = ("lying", "standing")
    data = read_folder(folders / "train", model.preprocess.pixels, classes)
    with pytest.raises(ImageError, match="mean and std for 3 channels"):
        train(model, data, tmp_path / "out", settings())
    same_for_all = replace(model.preprocess.transform, mean=(0.5,) * 3, std=(0.25,) * 3)
    model.preprocess = Preprocess(same_for_all, model)
    validation = read_folder(folders / "val", model.preprocess.pixels, classes)
    history = train(model, data, tmp_path / "grey", settings(), validation=validation)
    best = vitlite.load(tmp_path / "grey" / "best")
    paths = [str(path) for path in validation.files()]
    labels = [predictions[0].label for predictions in best.predict(paths, top=1)]
    right = sum(label == classes[wanted] for label, wanted in zip(labels, validation.labels, strict=True))
    assert max(record["val_top1"] for record in history) == right / len(labels)


def test_patience_ends_a_run_and_survives_a_kill(tmp_path, monkeypatch):
    data, validation = stripes(16), stripes(8, seed=1)
    measured = measure(new_model(), validation)
    accuracies = iter([0.5, 0.75, 0.75, 0.5, 0.75, 0.75])
    monkeypatch.setattr(trainer, "measure", lambda *_, **__: replace(measured, top1=next(accuracies), loss=1.0))

    def run(patience, killed_after=99):
        def kill(history):
            if len(history) == killed_after:
                raise Killed

        how = settings(epochs=6, patience=patience)
        return train(new_model(), data, tmp_path, how, validation=validation, after_epoch=kill)

    for epochs in (1, 2, 3):
        with pytest.raises(Killed):
            run(3, killed_after=epochs)
    assert len(run(3)) == 5  # the second was the best, and three followed
    assert len(run(3)) == 5  # finished
    assert len(run(4)) == 6  # patience may change


@pytest.mark.parametrize("name", ["last/model.safetensors", "best/config.json", "log.jsonl"])
def test_files_of_something_else_are_not_overwritten(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(
        TrainError, match=rf"contains {name.partition('/')[0]}, but no state.safetensors .*Choose another"
    ):
        train(new_model(), stripes(24), tmp_path, settings())
    assert (tmp_path / name).read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]


def stop_anywhere(*_):
    raise Killed


@pytest.mark.parametrize("moment", ["save_checkpoint", "write_log"])
def test_a_run_killed_at_the_end_of_its_first_epoch_is_resumed(tmp_path, monkeypatch, moment):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    first = train(new_model(), stripes(24), whole, settings())
    with monkeypatch.context() as patch:
        patch.setattr(Run, moment, stop_anywhere)
        with pytest.raises(Killed):
            train(new_model(), stripes(24), killed, settings())
    with pytest.raises(TrainError, match="contains another run: lr was"):
        train(new_model(), stripes(24), killed, settings(lr=0.1))
    again = train(new_model(), stripes(24), killed, settings())
    assert [record["loss"] for record in again] == [record["loss"] for record in first]
    assert [json.loads(line) for line in (killed / "log.jsonl").read_text().splitlines()] == again
    assert (killed / "last/model.safetensors").read_bytes() == (whole / "last/model.safetensors").read_bytes()


def test_a_run_killed_before_its_first_saved_step_may_be_started_with_other_settings(tmp_path):
    with pytest.raises(Killed):
        train(new_model(), stripes(24), tmp_path / "killed", settings(), after_step=stop_anywhere)
    assert STATE in os.listdir(tmp_path / "killed")
    other = [train(new_model(), stripes(24), tmp_path / name, settings(lr=0.01)) for name in ("killed", "whole")]
    assert [record["loss"] for record in other[0]] == [record["loss"] for record in other[1]]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(TrainError, match=r"Cannot write to .*file: .*Choose another out="):
        train(new_model(), stripes(24), tmp_path / "file", settings())
    refuse_new_files(monkeypatch, tmp_path)
    with pytest.raises(TrainError, match=r"Cannot write to .*Permission denied.*Choose another out="):
        train(new_model(), stripes(24), tmp_path / "new", settings())


def test_only_one_process_trains_in_a_folder(tmp_path):
    def again(history):
        with pytest.raises(TrainError, match="Another process is training in"):
            train(new_model(), stripes(24), tmp_path, settings())

    train(new_model(), stripes(24), tmp_path, settings(), after_epoch=again)


END_OF_AN_EPOCH = """
import shutil, sys
from pathlib import Path
import torch
from kills import kills
from tiny_run import Killed, new_model, settings, stripes
from vitlite import load
from vitlite.errors import TrainError
from vitlite.training import measure, train
from vitlite.training.history import best_epoch

def run(out, epochs, stop_after=99):
    def stop(history):
        if len(history) == stop_after:
            raise Killed
    how = settings(lr=0.03, ema=0.5, decay=0.3, seed=6, epochs=epochs)
    try:
        return train(new_model(), stripes(24), out, how, validation=validation, after_epoch=stop)
    except Killed:
        return None

torch.set_num_threads(1)
root = Path(sys.argv[1])
validation, begun, out = stripes(8, seed=1), root / "begun", root / "out"
run(begun, 6, stop_after=2)
shutil.copytree(begun, out)
for step in kills(lambda: run(out, 6, stop_after=3), every=11):
    try:
        history = run(out, 3)
    except TrainError as error:
        if "another run: epochs was" not in str(error):
            raise
        history = run(out, 6)
    for name, record in (("best", best_epoch(history)), ("last", history[-1])):
        found = measure(load(out / name), validation)
        assert round(found.loss, 5) == record["val_loss"], (step, name, found, history)
    print(len(history), best_epoch(history)["epoch"])
    shutil.rmtree(out)
    shutil.copytree(begun, out)
"""


@pytest.mark.usefixtures("uncovered")
def test_killed_anywhere_at_the_end_of_an_epoch_and_resumed_with_another_end(tmp_path):
    """`best` and `last` are epochs of the log, whatever was being written."""
    assert set(program(END_OF_AN_EPOCH, tmp_path).splitlines()) == {"3 2", "6 4"}


def test_each_process_and_step_has_its_own_dropout():
    seeds = [trainer._dropout_seed(0, step, rank) for step in range(3) for rank in range(3)]
    masks = {tuple(torch.rand(8, generator=torch.Generator().manual_seed(seed)).tolist()) for seed in seeds}
    assert len(masks) == len(seeds)


def test_torch_s_random_numbers_are_not_used_up(tmp_path):
    model, before = new_model(CONFIG.replace(dropout=0.1)), torch.get_rng_state()
    train(model, stripes(24), tmp_path, settings())
    assert torch.equal(torch.get_rng_state(), before)
