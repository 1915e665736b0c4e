"""That it learns, that a killed run ends as if nothing had been, and errors that leave the last good state."""

import json
import math
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from closed import refuse_new_files
from kills import program
from tiny_run import CONFIG, TRANSFORM, Killed, new_model, settings, stop, stripes
from torch import nn

import vitlite
from vitlite import ViT
from vitlite.errors import ImageError, TrainError, VitliteError
from vitlite.images import Preprocess
from vitlite.training import STRENGTHS, loop, measure, read_folder, train
from vitlite.training.best import is_better, why_best
from vitlite.training.run import STATE, Run


def test_learns_and_leaves_checkpoints_that_load(tmp_path):
    model, data, validation = new_model(), stripes(256), stripes(32, seed=1)
    recipe = settings(epochs=8, batch=16, optimizer="muon", lr=5e-3)
    history = train(model, data, tmp_path, recipe, validation=validation)
    assert history[-1]["val_top1"] >= 0.9
    assert history[-1]["val_loss"] < history[0]["val_loss"] < 0.7
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == history
    assert not model.training
    again: list[list] = []
    train(new_model(), data, tmp_path, recipe, validation=validation, after_epoch=again.append)
    assert again == [history]  # it was done already
    best = vitlite.load(tmp_path / "best")
    assert best.labels == ("lying", "standing")
    picture = validation.images[1].permute(1, 2, 0)
    assert best.predict(picture, top=1)[0].label == "standing"
    last = vitlite.load(tmp_path / "last")
    torch.testing.assert_close(last(last.preprocess(picture)), model(model.preprocess(picture)))


def test_a_callback_may_measure_the_model(tmp_path):
    """`measure` leaves a model in eval mode; the steps after it have their dropout all the same."""
    data, validation = stripes(24), stripes(8, seed=1)

    def logged(name, **callbacks):
        history = train(new_model(CONFIG.replace(dropout=0.3)), data, tmp_path / name, settings(epochs=1), **callbacks)
        return [record | {"seconds": 0} for record in history]

    measured = []
    watched = logged("watched", after_step=lambda run: measured.append(measure(run.model, validation).loss))
    assert len(set(measured)) > 1
    assert watched == logged("alone")


def test_best_is_the_surest_of_those_that_are_as_right(tmp_path):
    """On an easy set, accuracy is perfect long before the answers are sure."""
    data, validation = stripes(64), stripes(8, seed=1)
    bright = torch.arange(64).view(-1, 1, 1, 1) % 2 * 200 + torch.zeros(64, 3, 16, 16)
    easy, held = replace(data, images=bright.byte()), replace(validation, images=bright[:8].byte())
    recipe = settings(epochs=4, augmentation=STRENGTHS["none"])
    history = train(new_model(), easy, tmp_path, recipe, validation=held)
    right = [record for record in history if record["val_top1"] == 1]
    assert len(right) > 1, history
    assert right[0]["val_loss"] > 1.2 * right[-1]["val_loss"]
    found = measure(vitlite.load(tmp_path / "best"), held)
    assert found.loss == pytest.approx(min(record["val_loss"] for record in right), abs=1e-4)
    assert why_best(history).startswith(f"best is epoch 4 of 4: of the {len(right)} with the highest validation")


def test_best_that_is_another_model_is_an_error(tmp_path):
    data, validation = stripes(24), stripes(8, seed=1)
    train(new_model(), data, tmp_path, settings(), validation=validation)
    other = new_model()
    nn.init.constant_(other.head.weight, 3.0)
    nn.init.constant_(other.head.bias[:1], 9.0)
    other.labels = data.classes
    other.save(tmp_path / "best")
    with pytest.raises(TrainError, match=r"best is not the best epoch of this run \(epoch \d had an accuracy of"):
        train(new_model(), data, tmp_path, settings(), validation=validation)
    (tmp_path / "best" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(TrainError, match=r"best is not the best epoch of this run \(it cannot be measured again: "):
        train(new_model(), data, tmp_path, settings(), validation=validation)


def test_an_epoch_is_better_by_accuracy_then_by_loss():
    def record(top1, loss):
        return {"epoch": 1, "val_top1": top1, "val_loss": loss}

    assert is_better(record(0.5, 9.0), [])
    assert is_better(record(0.6, 9.0), [record(0.5, 0.1)])
    assert is_better(record(0.5, 0.1), [record(0.5, 0.2), {"epoch": 2}])
    assert is_better(record(0.5, 0.1), [record(0.5, math.nan)])
    assert not is_better(record(0.5, 0.2), [record(0.5, 0.2)])
    assert not is_better(record(0.5, math.nan), [record(0.5, 9.0)])
    assert not is_better(record(0.4, 0.1), [record(0.5, 0.2)])
    assert why_best([{"epoch": 1}]) == ""


RECIPES = {
    "adamw": {},
    "muon": {"optimizer": "muon", "augmentation": STRENGTHS["strong"]},
    "parts": {"accumulate": 2, "layer_decay": 0.7},
    "bfloat16": {"bfloat16": True},
}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_resumed_run_ends_with_the_same_weights(tmp_path, monkeypatch, kind):
    config, recipe = CONFIG.replace(drop_path=0.2, dropout=0.1), settings(**RECIPES[kind])
    whole = new_model(config)
    train(whole, stripes(22), tmp_path / "whole", recipe)  # batches of 7 or 8
    step, ends = loop._step, iter([2, 3, 100])  # killed in the first epoch, in the second, and no more

    def mortal(run, rows):
        if (left := limits.pop()) == 0:
            raise Killed
        limits.append(left - 1)
        return step(run, rows)

    monkeypatch.setattr(loop, "_step", mortal)
    for limit in ends:
        limits = [limit]
        torch.rand(limit)  # the state of torch's own generator shall not matter
        model = new_model(config)
        try:
            train(model, stripes(22), tmp_path / "parts", recipe, save_every=0)
        except Killed:
            assert limit < 100
    for (name, wanted), weight in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, wanted), name


def test_every_epoch_sees_every_picture_once(tmp_path, monkeypatch):
    step, seen = loop._step, []
    monkeypatch.setattr(loop, "_step", lambda run, rows: (seen.extend(rows.tolist()), step(run, rows))[1])
    train(new_model(), stripes(24), tmp_path, settings())
    assert sorted(seen[:24]) == sorted(seen[24:]) == list(range(24))
    assert seen[:24] != seen[24:]


def test_pictures_are_trained_on_as_predict_prepares_them():
    model, data, rows = new_model(), stripes(8), torch.tensor([5, 2, 7])
    for changes in ({"mean": (0.4, 0.5, 0.6)}, {"scale": 1 / 127.5, "mean": (1.0,), "std": (1.0,)}):
        model.preprocess = Preprocess(replace(TRANSFORM, **changes), model)
        begun = Run(model, data, settings(augmentation=STRENGTHS["none"]))
        images, labels = loop._batch(begun, rows)
        assert torch.allclose(images, model.preprocess.batch(list(data.images[rows])), atol=1e-5)
        assert labels.argmax(1).tolist() == data.labels[rows].tolist()


def test_a_frozen_backbone_stays(tmp_path):
    model = new_model(CONFIG.replace(drop_path=0.5))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    modes: list[bool] = []
    model.register_forward_hook(lambda *_: modes.append(model.blocks[1].drop_path.training))
    train(model, stripes(24), tmp_path, settings(frozen=True))
    assert not any(modes)  # its features are those it will give later
    changed = [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])]
    assert changed == ["head.weight", "head.bias"]
    assert all(weight.requires_grad for weight in model.parameters())  # it was frozen for that run
    model.pos_embed.requires_grad_(False)
    with pytest.raises(Killed):
        train(model, stripes(24), tmp_path / "other", settings(frozen=True), after_epoch=stop)
    fixed = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    assert fixed == ["pos_embed"]


def test_plain_attention_has_the_gradients_of_the_fused():
    attention = new_model().blocks[0].attn
    x = torch.randn(2, 5, 32, requires_grad=True)
    (plain,) = torch.autograd.grad(attention(x).square().sum(), x)
    q, k, v = attention.split(x)
    fused = attention.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    (wanted,) = torch.autograd.grad(fused.square().sum(), x)
    torch.testing.assert_close(plain, wanted)


def test_fewer_pictures_than_a_batch(tmp_path):
    assert len(train(new_model(), stripes(6), tmp_path, settings(batch=64))) == 2


def test_a_diverged_loss_is_an_error_and_leaves_the_last_checkpoint(tmp_path):
    data, broken = stripes(24), new_model()
    with pytest.raises(Killed):
        train(new_model(), data, tmp_path, settings(), after_epoch=stop)
    before = (tmp_path / STATE).read_bytes()
    broken.head.register_forward_hook(lambda *_: torch.full((8, 2), torch.nan, requires_grad=True))
    with pytest.raises(TrainError, match=r"loss became nan in epoch 2, step 1.*last holds the.*lower lr") as caught:
        train(broken, data, tmp_path, settings())
    assert "lower --lr and another --out" in caught.value.for_command_line()
    assert (tmp_path / STATE).read_bytes() == before
    with pytest.raises(
        TrainError, match=r"in epoch 1, step 1, at a learning rate of up to 0.001\. Begin again with the"
    ):
        train(broken, data, tmp_path / "new", settings())
    assert os.listdir(tmp_path / "new") == [STATE]  # of a run without a step


def test_infinite_gradients_take_no_step(tmp_path):
    model = new_model()
    model.head.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(TrainError, match="loss became nan in epoch 1, step 1"):
        train(model, stripes(24), tmp_path, settings())
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_gradients_of_others_go_into_no_step(tmp_path):
    """Of a loop or a saliency map before, of a step that was broken off, or of one whose gradients were infinite."""
    data, whole, model = stripes(24), new_model(), new_model()
    train(whole, data, tmp_path / "whole", settings())
    assert {weight.grad for weight in whole.parameters()} == {None}
    model(torch.rand(2, 3, 16, 16)).square().sum().backward()
    for weight, change, error in (
        (model.head.weight, lambda gradient: gradient * torch.inf, TrainError),
        (model.patch_embed.proj.weight, stop, Killed),  # which is the last that gets one
    ):
        hook = weight.register_hook(change)
        with pytest.raises(error):
            train(model, data, tmp_path / "out", settings())
        hook.remove()
    assert {weight.grad for weight in model.parameters()} == {None}
    train(model, data, tmp_path / "out", settings())
    assert all(map(torch.equal, model.parameters(), whole.parameters()))


def test_a_picture_that_cannot_be_read_is_named(folders, tmp_path):
    (folders / "train" / "lying" / "0.png").write_bytes(b"no picture")
    model = new_model()
    data = read_folder(folders / "train", model.preprocess.pixels, ("lying", "standing"))
    with pytest.raises(ImageError, match=r"Cannot read .*lying/0.png"):
        train(model, data, tmp_path, settings())


def test_models_that_do_not_fit_the_data(tmp_path):
    with pytest.raises(TrainError, match="data have 2 classes and the model's head 5"):
        train(new_model(CONFIG.replace(num_classes=5)), stripes(8), tmp_path, settings())
    for use in (partial(train, out=tmp_path, settings=settings()), measure):
        with pytest.raises(TrainError, match=r"no preprocessing.*model.preprocess = ") as caught:
            use(ViT(CONFIG), stripes(8))
        assert "--model NAME --weights PATH" in caught.value.for_command_line()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_another_type_are_not_trained(tmp_path, dtype):
    """In bfloat16, most steps are rounded away; in float16, torch's autocast fails."""
    for model in (new_model().to(dtype), new_model()):
        model.blocks[1].norm1.to(dtype)  # of one of them, this alone
        with pytest.raises(TrainError, match=rf"in float32, and its \S+ is of {dtype}\. model\.float\(\) first; with"):
            train(model, stripes(8), tmp_path / "out", settings(bfloat16=True))
        assert not (tmp_path / "out").exists()


def test_pictures_that_do_not_fit_the_model(tmp_path):
    model, data = new_model(), stripes(8)
    large = replace(data, images=data.images.repeat(1, 1, 2, 2))
    turned, three = replace(data, classes=data.classes[::-1]), replace(data, classes=(*data.classes, "sitting"))
    sizes, classes = "are of 32 x 32 pixels.*makes them 16 x 16. Prepare", "the model's: standing for lying, lying for"
    for other, text in ((large, sizes), (turned, classes), (three, "have 3 classes and the model 2")):
        with pytest.raises(TrainError, match=text):
            train(model, data, tmp_path / "out", settings(), validation=other)
        assert model.labels is None  # nothing was trained
        model.labels = data.classes
        with pytest.raises(TrainError, match=text):
            measure(model, other)
        model.labels = None
    with pytest.raises(TrainError, match=sizes):
        train(model, large, tmp_path / "out", settings())
    assert not (tmp_path / "out").exists()
    measure(model, turned)  # no names that would say otherwise


def test_classes_in_another_order_keep_what_the_head_knows(tmp_path, caplog):
    """The rows had other names given to them: a classifier was turned against its own classes."""
    model, data = new_model(), stripes(64)
    train(model, data, tmp_path / "first", settings(epochs=8, optimizer="muon", lr=5e-3))
    before = measure(model, data)
    assert before.top1 > 0.8
    turned = replace(data, labels=1 - data.labels, classes=data.classes[::-1])
    train(model, turned, tmp_path / "second", settings(epochs=1, lr=1e-9))
    assert measure(model, turned).top1 == before.top1
    assert not caplog.messages


def test_other_classes_begin_with_a_new_head(tmp_path, caplog):
    model, other = new_model(), stripes(8, classes=("hot", "cold"))
    model.labels = ("lying", "standing")
    nn.init.ones_(model.head.weight)
    small = replace(other, images=other.images[..., :8])
    with pytest.raises(TrainError, match="are of 16 x 8 pixels"):
        train(model, small, tmp_path / "refused", settings())
    assert model.labels == ("lying", "standing")
    assert model.head.weight.eq(1).all()  # what is refused changes nothing
    assert not caplog.messages
    with pytest.raises(Killed):
        train(model, other, tmp_path / "run", settings(lr=1e-9), after_epoch=stop)
    assert model.head.weight.abs().max() < 1e-6
    (said,) = caplog.messages
    assert said.startswith("vitlite: the head is a new one, as the model's own knew lying, standing, and the classes")
    model.labels = ("lying", "standing")
    train(model, other, tmp_path / "run", settings(lr=1e-9))
    assert len(caplog.messages) == 1  # a run that goes on has its head


def grey_model():
    """Of the zoo, whose pictures had three channels."""
    return vitlite.create("vit_nano_4.cifar10", channels=1, num_classes=2, image_size=16)


def test_a_model_of_the_zoo_with_one_channel(folders, tmp_path):
    model = grey_model()
    same_for_all = replace(model.preprocess.transform, mean=(0.5,) * 3, std=(0.25,) * 3)
    model.preprocess = Preprocess(same_for_all, model)
    data, validation = (
        read_folder(folders / split, model.preprocess.pixels, ("lying", "standing")) for split in ("train", "val")
    )
    history = train(model, data, tmp_path / "out", settings(), validation=validation)
    best = vitlite.load(tmp_path / "out" / "best")
    paths = [str(path) for path in validation.images.pictures]
    labels = [predictions[0].label for predictions in best.predict(paths, top=1)]
    right = sum(label == validation.classes[wanted] for label, wanted in zip(labels, validation.labels, strict=True))
    assert max(record["val_top1"] for record in history) == measure(best, validation).top1 == right / len(labels)


def test_a_recipe_for_more_channels_than_the_model_has(folders, tmp_path):
    model = grey_model()
    data = read_folder(folders / "train", model.preprocess.pixels, ("lying", "standing"))
    model.labels = data.classes
    for use in (partial(train, out=tmp_path / "out", settings=settings()), measure):
        with pytest.raises(ImageError, match="mean and std for 3 channels, the model takes 1"):
            use(model, data)


def test_patience_ends_a_run_and_outlives_a_kill(tmp_path, monkeypatch):
    """Epochs without a better one are counted from the history, which the state holds."""
    data, validation = stripes(16), stripes(8, seed=1)
    accuracies = iter([0.5, 0.75, 0.75, 0.5, 0.75, 0.75])
    monkeypatch.setattr(
        loop, "measure_together", lambda *_, **__: replace(measured, top1=next(accuracies), loss=1.0)
    )  # with the same loss, an epoch of the same accuracy is no better
    monkeypatch.setattr(loop, "check_best", lambda *_, **__: None)
    measured = measure(new_model(), validation)

    def run(patience, killed_after=99):
        def kill(history):
            if len(history) == killed_after:
                raise Killed

        recipe = settings(epochs=6, patience=patience)
        return train(new_model(), data, tmp_path, recipe, validation=validation, after_epoch=kill)

    for epochs in (1, 2, 3):
        with pytest.raises(Killed):
            run(3, killed_after=epochs)
    assert len(run(3)) == 5  # the second was the best, and three followed
    assert len(run(3)) == 5  # it is done
    assert len(run(4)) == len(run(1)) == 6  # which may be changed, as it says when a run ends and nothing else
    with pytest.raises(TrainError, match="patience 3 waits for a better epoch, and without validation pictures"):
        train(new_model(), data, tmp_path / "none", settings(patience=3))


@pytest.mark.parametrize("name", [
    "best/model.safetensors.index.json", "last/config.json", "last/model.safetensors", "best/model.safetensors.lock",
    "last", "log.jsonl",
])  # fmt: skip
def test_what_is_in_the_way_is_said_before_the_first_step(name, tmp_path, monkeypatch):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    monkeypatch.setattr(loop, "_take_steps", stop)
    with pytest.raises(VitliteError, match=name.partition("/")[0]):
        train(new_model(), stripes(24), tmp_path, settings())
    assert (tmp_path / name).read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]


@pytest.mark.parametrize("name", ["state.safetensors", "log.jsonl", "last/model.safetensors"])
def test_folders_where_files_are_to_stand_are_said_too(name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(loop, "_take_steps", stop)
    with pytest.raises(VitliteError, match=f"{name} is no file, and stands where one is to be written"):
        train(new_model(), stripes(24), tmp_path, settings())


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_stays_also_without_its_state(tmp_path):
    train(new_model(), stripes(24), tmp_path, settings(), validation=stripes(8))
    (tmp_path / STATE).unlink()
    before = contents(tmp_path)
    said = r"has best, last, log.jsonl, and no state.safetensors: .*finished run.*, and stay\. Name another `out`; to"
    for recipe in (settings(), settings(epochs=1, lr=1e-9)):
        with pytest.raises(TrainError, match=said) as refused:
            train(new_model(), stripes(24), tmp_path, recipe)
        assert f"Name another --out; to train the weights there further: --model {tmp_path / 'best'}." in (
            refused.value.for_command_line()
        )
        assert contents(tmp_path) == before


def test_a_model_alone_is_no_run(tmp_path):
    new_model().save(tmp_path / "last")
    before = contents(tmp_path)
    with pytest.raises(TrainError, match=r"has last, and no state.safetensors") as refused:
        train(new_model(), stripes(24), tmp_path, settings())
    assert f"--model {tmp_path / 'last'}." in refused.value.for_command_line()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("moment", ["save_checkpoint", "write_log"])
def test_a_run_that_was_killed_in_its_first_epoch_goes_on(tmp_path, monkeypatch, moment):
    """Also right after its first checkpoint, and right before its first line in the log."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    first = train(new_model(), stripes(24), whole, settings())

    def stop_there(run, path):
        if moment == "save_checkpoint":
            save(run, path)
        raise Killed

    save = Run.save_checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(Run, moment, stop_there)
        with pytest.raises(Killed):
            train(new_model(), stripes(24), killed, settings())
    with pytest.raises(TrainError, match="holds another run: lr was"):  # of whose model there is something
        train(new_model(), stripes(24), killed, settings(lr=0.1))
    again = train(new_model(), stripes(24), killed, settings())
    assert [record["loss"] for record in again] == [record["loss"] for record in first]
    assert [json.loads(line) for line in (killed / "log.jsonl").read_text().splitlines()] == again
    assert (killed / "last/model.safetensors").read_bytes() == (whole / "last/model.safetensors").read_bytes()


def test_a_run_that_was_killed_before_its_first_step_is_nobodys_loss(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_take_steps", stop_at_once)
        with pytest.raises(Killed):
            train(new_model(), stripes(24), tmp_path / "killed", settings())
    assert os.listdir(tmp_path / "killed") == [STATE]
    other = [train(new_model(), stripes(24), tmp_path / name, settings(lr=0.01)) for name in ("killed", "whole")]
    assert [record["loss"] for record in other[0]] == [record["loss"] for record in other[1]]


def stop_at_once(*_):
    raise Killed


@pytest.mark.parametrize("mine", [
    '{"epoch": 1, "loss": 0.7, "note": "my own trainer"}\n', "notes", "{}", '{"epoch": 1}\n{"epoch": 2}\n',
])  # fmt: skip
def test_a_log_of_somebody_else_stays(tmp_path, monkeypatch, mine):
    """Be it there before the run, or put there beside its state."""
    log = tmp_path / "log.jsonl"
    log.write_text(mine)
    model = new_model()
    model.labels = ("ant", "bee")
    with pytest.raises(TrainError, match=r"has log.jsonl, and no state.safetensors.* stay\. Name another `out`"):
        train(model, stripes(24), tmp_path, settings())
    assert contents(tmp_path) == {"log.jsonl": mine.encode()}
    assert model.labels == ("ant", "bee")  # it has learned nothing else
    log.unlink()
    with pytest.raises(Killed):
        train(new_model(), stripes(24), tmp_path, settings(), after_epoch=stop)
    ours = log.read_text()
    for text in (mine, ours + mine):
        log.write_text(text)
        before = contents(tmp_path)
        with pytest.raises(
            TrainError, match=r"log.jsonl is not the log of this run, and stays\. Move it away, or name"
        ):
            train(new_model(), stripes(24), tmp_path, settings())
        assert contents(tmp_path) == before
    log.unlink()
    assert len(train(new_model(), stripes(24), tmp_path, settings())) == 2
    assert log.read_text().startswith(ours)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", [STATE, "log.jsonl", "train.lock"])
def test_pipes_and_folders_in_the_way_are_not_waited_for(tmp_path, make, name):
    make(tmp_path / name)
    with pytest.raises(TrainError, match=f"{name} is no file, and stands where one is to be written. Name another"):
        train(new_model(), stripes(24), tmp_path, settings())
    assert os.listdir(tmp_path) == [name]


def test_a_folder_that_cannot_be_written_is_said_before_the_first_step(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        refuse_new_files(patch, tmp_path)
        with pytest.raises(
            TrainError, match=r"Cannot write to .*no file can be made in the folder .*Permission denied"
        ):
            train(new_model(), stripes(24), tmp_path / "new", settings())
    with pytest.raises(TrainError, match=r"Cannot write to .*: its name is too long. Name another `out`"):
        train(new_model(), stripes(24), tmp_path / ("x" * 300), settings())
    with pytest.raises(TrainError, match=r"Cannot make the folder .*: File name too long. Name another `out`"):
        train(new_model(), stripes(24), tmp_path / "new" / ("x" * 300), settings())
    refuse_new_files(monkeypatch, tmp_path, "train.lock")
    monkeypatch.setattr(loop, "check_place", lambda out: None)
    with pytest.raises(TrainError, match=r"train.lock cannot be used as a lock: Permission denied. Move it away, or"):
        train(new_model(), stripes(24), tmp_path, settings())


def test_a_folder_is_trained_in_by_one_process_at_a_time(tmp_path):
    def again(history):
        with pytest.raises(TrainError, match=r"Another process is training in .*delete .*train\.lock"):
            train(new_model(), stripes(24), tmp_path, settings())

    train(new_model(), stripes(24), tmp_path, settings(), after_epoch=again)
    assert not (tmp_path / "train.lock").exists()


END_OF_AN_EPOCH = """
import json, os, shutil, sys
from pathlib import Path
import torch
from kills import kills
from tiny_run import Killed, new_model, settings, stripes
from vitlite import load
from vitlite.errors import TrainError
from vitlite.training import measure, train
from vitlite.training.best import best_epoch

def run(out, recipe, stop_after=99):
    def stop(history):
        if len(history) == stop_after:
            raise Killed
    recipe = settings(lr=0.03, ema=0.5, decay=0.3, **recipe)
    try:
        return train(new_model(), stripes(24), out, recipe, validation=validation, after_epoch=stop)
    except Killed:
        return None

torch.set_num_threads(1)
root, first, then = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
validation, begun, out = stripes(8, seed=1), root / "begun", root / "out"
run(begun, first, stop_after=2)
shutil.copytree(begun, out)
for step in kills(lambda: run(out, first, stop_after=3), every=int(os.environ["EVERY"])):
    try:
        history = run(out, then)
    except TrainError as error:
        if "another run: epochs was" not in str(error):
            raise
        history = run(out, first)
    for name, record in (("best", best_epoch(history)), ("last", history[-1])):
        found = measure(load(out / name), validation)
        assert round(found.loss, 5) == record["val_loss"], (step, name, found, history)
    print(len(history), best_epoch(history)["epoch"])
    shutil.rmtree(out)
    shutil.copytree(begun, out)
"""


@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize(
    ("recipe", "then", "every", "ends"),
    [
        ({"epochs": 3, "seed": 10}, {"patience": 1}, 2, {"2 1", "3 3"}),  # the third is better than those that ended it
        ({"epochs": 6, "seed": 6}, {"epochs": 3}, 5, {"3 2", "6 4"}),  # and this is, as long as it is one of six
    ],
)
def test_killed_at_the_end_of_an_epoch_and_given_another_end(tmp_path, monkeypatch, recipe, then, every, ends):
    """`best` and `last` are epochs of the log, whichever was about to be kept."""
    monkeypatch.setenv("EVERY", str(every))
    words = json.dumps(recipe), json.dumps(recipe | then)
    said = program(END_OF_AN_EPOCH, tmp_path, *words).splitlines()
    assert set(said) == ends


def test_a_run_that_ends_before_the_epoch_that_it_was_in(tmp_path):
    """It ends as `last` does: what the steps since then made of the weights was never measured."""

    def kill(run):
        if (len(run.history), run.progress.step) == (2, 2):
            raise Killed

    recipe, data, validation = settings(epochs=3, lr=0.03, ema=0.5, seed=10), stripes(24), stripes(8, seed=1)
    with pytest.raises(Killed):
        train(new_model(), data, tmp_path, recipe, validation=validation, after_step=kill, save_every=0)
    model = new_model()
    history = train(model, data, tmp_path, replace(recipe, patience=1), validation=validation)
    assert len(history) == 2
    assert measure(model, validation).loss == pytest.approx(history[-1]["val_loss"], abs=1e-5)
    assert all(map(torch.equal, model.parameters(), vitlite.load(tmp_path / "last").parameters()))
    assert len(train(new_model(), data, tmp_path, recipe, validation=validation)) == 3
