"""Training: the same whether killed or not, errors that leave the last good state alone, and that it learns."""

import doctest
import errno
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import vitlite
from vitlite import ViT, ViTConfig, train
from vitlite.training import evaluate
from vitlite import draw as plots
from vitlite.training.augment import STRENGTHS, Augmentation, Draws, augment, mix, shuffled
from vitlite.cli.main import main
from vitlite.config import PRESETS
from vitlite.training.datasets import HOLDOUT, Pictures, class_names, read_cifar10, read_folder
from vitlite.errors import ImageError, TrainError
from vitlite.images import Preprocess, Recipe
from vitlite.training.optim import Muon, orthogonal
from vitlite.training.run import STATE, Run
from vitlite.training.settings import Settings
from vitlite.training.optim import optimizers

CONFIG = ViTConfig(image_size=16, patch_size=8, dim=32, depth=2, heads=2, mlp_dim=64, num_classes=2)
RECIPE = Recipe(
    size=(16, 16), resize=(16, 16), mode="center", interpolation="bicubic", mean=(0.5,) * 3, std=(0.25,) * 3
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_model(config: ViTConfig = CONFIG) -> ViT:
    torch.manual_seed(0)
    model = ViT(config)
    model.preprocess = Preprocess(RECIPE, model)
    return model


def stripes(count: int, seed: int = 0, classes: tuple[str, ...] = ("lying", "standing")) -> Pictures:
    """Noisy pictures whose bright stripe lies or stands."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 100, (count, 3, 16, 16), generator=generator)
    labels = torch.arange(count) % 2
    where = torch.randint(0, 12, (count,), generator=generator)
    for image, label, first in zip(images, labels, where.tolist(), strict=True):
        (image if label else image.mT)[:, :, first : first + 4] += 120
    return Pictures(images.to(torch.uint8), labels, classes)


def as_folders(folder: Path, pictures: Pictures, split: str) -> Path:
    for i, (image, label) in enumerate(zip(pictures.images, pictures.labels.tolist(), strict=True)):
        path = folder / split / pictures.classes[label] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return folder


@pytest.fixture
def folders(tmp_path):
    as_folders(tmp_path / "data", stripes(24), "train")
    return as_folders(tmp_path / "data", stripes(8, seed=1), "val")


def settings(**changes) -> Settings:
    return Settings(**{"epochs": 2, "batch": 8, "lr": 1e-3, "bfloat16": False, "ema": 0.9} | changes)


# Augmentation


def test_what_is_drawn_depends_on_the_sample_alone():
    images = torch.rand(6, 3, 16, 16)
    rows, how = torch.tensor([5, 9, 2, 7, 0, 4]), STRENGTHS["strong"]
    together = augment(images, Draws(1, 3, rows), how)
    alone = torch.cat([augment(images[i : i + 1], Draws(1, 3, rows[i : i + 1]), how) for i in range(6)])
    assert torch.equal(together, alone)
    assert not torch.equal(together, augment(images, Draws(1, 4, rows), how))
    assert not torch.equal(together, augment(images, Draws(2, 3, rows), how))


def test_draws_are_uniform_and_independent():
    draws = Draws(0, 0, torch.arange(50_000))
    others = [
        Draws(0, 1, torch.arange(50_000))("a"),
        Draws(1, 0, torch.arange(50_000))("a"),
        draws("b"),
        draws("a").roll(1),
    ]
    values = draws("a")
    assert 0 <= values.min() < 0.001
    assert 0.999 < values.max() < 1
    assert values.mean().item() == pytest.approx(0.5, abs=0.006)
    assert values.histc(10, 0, 1).min() > 4700
    for other in others:
        assert abs(torch.corrcoef(torch.stack([values, other]))[0, 1]) < 0.02
    assert draws.chance("a", 0.25).float().mean().item() == pytest.approx(0.25, abs=0.01)


def test_an_epoch_visits_every_sample_once_in_its_own_order():
    orders = [shuffled(0, 0, 1000), shuffled(0, 1, 1000), shuffled(1, 0, 1000)]
    assert all(torch.equal(order.sort().values, torch.arange(1000)) for order in orders)
    assert all((a == b).float().mean() < 0.02 for a, b in ((orders[0], orders[1]), (orders[0], orders[2])))


def test_no_augmentation_leaves_the_pixels():
    images, draws = torch.rand(4, 3, 16, 16), Draws(0, 0, torch.arange(4))
    torch.testing.assert_close(augment(images, draws, STRENGTHS["none"]), images, atol=1e-6, rtol=0)


@pytest.mark.parametrize("change", ["flip", "shift", "warp", "colour", "erase"])
def test_each_change_changes_some_pictures(change):
    images, draws = torch.rand(64, 3, 16, 16), Draws(0, 0, torch.arange(64))
    changed = augment(images, draws, replace(STRENGTHS["none"], **{change: 0.5}))
    share = ((changed - images).abs().amax((1, 2, 3)) > 1e-3).float().mean()
    assert 0.3 < share <= (1 if change == "shift" else 0.7)
    assert changed.min() >= 0
    assert changed.max() <= 1


def test_labels_are_mixed_as_pixels_are():
    ones, zeros, draws = torch.ones(200, 3, 16, 16), torch.zeros(200, 3, 16, 16), Draws(0, 0, torch.arange(200))
    labels = torch.tensor([[1.0, 0.0]]).expand(200, 2)
    images, mixed = mix(ones, labels, zeros, labels.flip(1), draws, Augmentation(mixup=0.4, cutmix=0.4))
    torch.testing.assert_close(images.mean((1, 2, 3)), mixed[:, 0])
    torch.testing.assert_close(mixed.sum(1), torch.ones(200))
    values = images[:, 0].flatten(1)
    cut = (values.min(1).values == 0) & (values.max(1).values == 1)
    untouched = values.min(1).values == 1
    assert 60 < cut.sum() < 100
    assert 20 < untouched.sum() < 60


# Optimizers


def test_orthogonal_evens_out_singular_values():
    torch.manual_seed(0)
    for shape in ((2, 8, 32), (2, 32, 8), (1, 16, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.4
        assert values.max() < 1.3


def test_muon_takes_query_key_and_value_apart():
    joint = nn.Parameter(torch.zeros(24, 8))
    parts = [nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    joint.grad = torch.randn(24, 8)
    for part, gradient in zip(parts, joint.grad.chunk(3), strict=True):
        part.grad = gradient.clone()
    tall = nn.Parameter(torch.zeros(24, 8))
    tall.grad = joint.grad.clone()
    Muon([{"params": [joint], "parts": 3}, {"params": [tall]}], lr=0.1).step()
    Muon([{"params": parts}], lr=0.1).step()
    torch.testing.assert_close(joint, torch.cat(list(parts)))
    assert (tall - joint).abs().max() > 0.01


def test_muon_takes_only_query_key_and_value_apart():
    model = new_model(CONFIG.replace(mlp_dim=3 * CONFIG.dim))
    _, muon = optimizers(model, dict(model.named_parameters()), settings(optimizer="muon"))
    apart = {weight for group in muon.param_groups if group["parts"] == 3 for weight in group["params"]}
    assert apart == {block.attn.qkv.weight for block in model.blocks}


@pytest.mark.parametrize(("name", "value"), [("lr", -2.0), ("smoothing", 3.0), ("ema", 1.0), ("clip", math.nan)])
def test_a_recipe_out_of_range(name: str, value: float) -> None:
    with pytest.raises(TrainError, match=rf"{name} must be from \S+ to \S+, got {value:g}"):
        settings(**{name: value})


def test_layer_decay_and_what_does_not_decay():
    model = new_model()
    for name in ("adamw", "muon"):
        optimizers = train.optimizers(model, dict(model.named_parameters()), settings(optimizer=name, layer_decay=0.5))
        names = {weight: name for name, weight in model.named_parameters()}
        groups = {
            names[w]: (g["scale"], g["weight_decay"]) for o in optimizers for g in o.param_groups for w in g["params"]
        }
        assert set(groups) == set(names.values())
        assert groups["head.weight"] == (1.0, 0.05)
        assert groups["norm.weight"] == groups["head.bias"] == (1.0, 0.0)
        assert groups["blocks.1.attn.qkv.weight"] == (0.5, 0.05)
        assert groups["blocks.0.mlp.fc1.bias"] == (0.25, 0.0)
        assert groups["cls_token"] == groups["pos_embed"] == (0.125, 0.0)
        assert groups["patch_embed.proj.weight"] == (0.125, 0.05)


def test_plain_attention_has_the_gradients_of_the_fused():
    attention = new_model().blocks[0].attn
    x = torch.randn(2, 5, 32, requires_grad=True)
    (plain,) = torch.autograd.grad(attention(x).square().sum(), x)
    q, k, v = attention.split(x)
    fused = attention.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    (wanted,) = torch.autograd.grad(fused.square().sum(), x)
    torch.testing.assert_close(plain, wanted)


# The loop


def test_learns_and_leaves_checkpoints_that_load(tmp_path):
    model, data, validation = new_model(), stripes(256), stripes(32, seed=1)
    recipe = settings(epochs=8, batch=16, optimizer="muon", lr=5e-3)
    history = train.train(model, data, tmp_path, recipe, validation=validation)
    assert history[-1]["val_top1"] >= 0.9
    assert history[-1]["val_loss"] < history[0]["val_loss"] < 0.7
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == history
    assert not model.training
    again: list[list] = []
    train.train(new_model(), data, tmp_path, recipe, validation=validation, after_epoch=again.append)
    assert again == [history]  # it was done already
    best = vitlite.load(tmp_path / "best")
    assert best.labels == ("lying", "standing")
    picture = validation.images[1].permute(1, 2, 0)
    assert best.predict(picture, top=1)[0].label == "standing"
    last = vitlite.load(tmp_path / "last")
    torch.testing.assert_close(last(last.preprocess(picture)), model(model.preprocess(picture)))


class Killed(Exception):
    """Stands for the end of a process."""


def stop(history):
    raise Killed


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
    train.train(whole, stripes(24), tmp_path / "whole", recipe)
    step, ends = train._step, iter([2, 3, 100])  # killed in the first epoch, in the second, and no more

    def mortal(run, rows):
        if (left := limits.pop()) == 0:
            raise Killed
        limits.append(left - 1)
        return step(run, rows)

    monkeypatch.setattr(train, "_step", mortal)
    for limit in ends:
        limits = [limit]
        torch.rand(limit)  # the state of torch's own generator shall not matter
        model = new_model(config)
        try:
            train.train(model, stripes(24), tmp_path / "parts", recipe, save_every=0)
        except Killed:
            assert limit < 100
    for (name, wanted), weight in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, wanted), name


def test_every_epoch_sees_every_picture_once(tmp_path, monkeypatch):
    step, seen = train._step, []
    monkeypatch.setattr(train, "_step", lambda run, rows: (seen.extend(rows.tolist()), step(run, rows))[1])
    train.train(new_model(), stripes(24), tmp_path, settings())
    assert sorted(seen[:24]) == sorted(seen[24:]) == list(range(24))
    assert seen[:24] != seen[24:]


def test_killed_with_sigkill_and_started_again(folders, tmp_path):
    def command(out: str) -> list[str]:
        words = "--model vit_nano_4 --weights none --size 16 --epochs 3 --batch 8 --save-every 0"
        return [sys.executable, "-m", "vitlite", "train", str(folders), *words.split(), "--out", str(tmp_path / out)]

    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    subprocess.run(command("whole"), check=True, env=environment, capture_output=True)
    state, deadline = tmp_path / "killed" / STATE, time.monotonic() + 120
    with subprocess.Popen(command("killed"), env=environment, stdout=subprocess.DEVNULL) as process:
        while not state.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert state.exists()
    done = subprocess.run(command("killed"), check=True, env=environment, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1])["epoch"] == 3
    for name in ("last/model.safetensors", "best/model.safetensors", "last/config.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not list(tmp_path.glob("killed/**/*.partial"))
    assert (tmp_path / "killed" / "curves.png").exists()


def test_the_end_may_move_before_the_learning_rate_knows_of_it(tmp_path):
    whole, moved, data = new_model(), new_model(), stripes(24)
    train.train(whole, data, tmp_path / "whole", settings(epochs=4))
    with pytest.raises(Killed):
        train.train(moved, data, tmp_path / "moved", settings(epochs=2), after_epoch=stop)
    train.train(moved, data, tmp_path / "moved", settings(epochs=4))
    assert all(map(torch.equal, moved.parameters(), whole.parameters()))
    with pytest.raises(TrainError, match="another run: epochs was 4 and is 6"):
        train.train(moved, data, tmp_path / "moved", settings(epochs=6))


def test_a_run_may_be_given_pictures_to_validate_with_later(tmp_path):
    model, data = new_model(), stripes(24)
    with pytest.raises(Killed):
        train.train(model, data, tmp_path, settings(), after_epoch=stop)
    first, second = train.train(model, data, tmp_path, settings(), validation=stripes(8, seed=1))
    for other in (stripes(8, seed=2), None):  # with which `best` would compare what cannot be compared
        with pytest.raises(TrainError, match="another run: validation was 'sha256"):
            train.train(model, data, tmp_path, settings(), validation=other)
    assert "val_top1" not in first
    assert second["val_top1"] >= 0
    assert (tmp_path / "best").exists()


def test_a_frozen_backbone_stays(tmp_path):
    model = new_model(CONFIG.replace(drop_path=0.5))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    modes: list[bool] = []
    model.register_forward_hook(lambda *_: modes.append(model.blocks[1].drop_path.training))
    train.train(model, stripes(24), tmp_path, settings(frozen=True))
    assert not any(modes)  # its features are those it will give later
    changed = [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])]
    assert changed == ["head.weight", "head.bias"]


def test_the_average_follows_the_weights(tmp_path):
    model = new_model()
    run = Run(model, stripes(24), settings(ema=0.5))
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(2.0)
        for average in run.averages.values():
            average.fill_(1.0)
    run.average(1000)
    with run.averaged() as averaged:
        assert averaged.head.bias.tolist() == [1.5, 1.5]
    assert model.head.bias.tolist() == [2.0, 2.0]


# What can go wrong


def test_a_diverged_loss_is_an_error_and_leaves_the_last_checkpoint(tmp_path):
    model, data = new_model(), stripes(24)
    train.train(model, data, tmp_path, settings(epochs=2))
    before = (tmp_path / STATE).read_bytes()
    broken = new_model()
    nn.init.constant_(broken.head.bias, torch.nan)
    with pytest.raises(TrainError, match=r"loss became nan in epoch \d, step \d.*last holds.*lower --lr"):
        train.train(broken, data, tmp_path / "new", settings())
    assert (tmp_path / STATE).read_bytes() == before
    assert not (tmp_path / "new" / STATE).exists()


def test_infinite_gradients_take_no_step(tmp_path):
    model = new_model()
    model.head.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(TrainError, match="loss became nan in epoch 1, step 1"):
        train.train(model, stripes(24), tmp_path, settings())
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_a_full_disk_leaves_the_last_state(tmp_path, monkeypatch):
    data = stripes(24)
    with pytest.raises(Killed):
        train.train(new_model(), data, tmp_path, settings(), after_epoch=stop)
    before = (tmp_path / STATE).read_bytes()

    def full(path, tensors, about):
        Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(train, "write_tensors", full)
    with pytest.raises(TrainError, match=r"Cannot write .*state.safetensors: .*No space left.*intact"):
        train.train(new_model(), data, tmp_path, settings(), save_every=0)
    assert (tmp_path / STATE).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "log.jsonl", STATE]


def test_a_picture_that_cannot_be_read_is_named(folders, tmp_path):
    (folders / "train" / "lying" / "0.png").write_bytes(b"no picture")
    model = new_model()
    data = read_folder(folders / "train", model.preprocess.pixels, ("lying", "standing"))
    with pytest.raises(ImageError, match=r"Cannot read .*lying/0.png"):
        train.train(model, data, tmp_path, settings())


def test_folders_that_are_no_data(tmp_path, folders):
    with pytest.raises(TrainError, match=r"no folder .*nowhere.*a folder per class"):
        class_names(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainError, match="holds no folders"):
        class_names(tmp_path / "empty")
    with pytest.raises(TrainError, match="has the classes standing, and those of the model are lying, sitting"):
        read_folder(folders / "val", torch.tensor, ("lying", "sitting"))
    (folders / "val" / "asleep").mkdir()
    with pytest.raises(TrainError, match="asleep holds no pictures"):
        read_folder(folders / "val", torch.tensor, ("asleep", "lying", "standing"))


def test_models_that_do_not_fit_the_data(tmp_path):
    with pytest.raises(TrainError, match="data have 2 classes and the model's head 5"):
        train.train(new_model(CONFIG.replace(num_classes=5)), stripes(8), tmp_path, settings())
    with pytest.raises(TrainError, match="no preprocessing"):
        train.train(ViT(CONFIG), stripes(8), tmp_path, settings())


WRONG = {
    "floats": (lambda data: {"images": data.images / 255}, r"of uint8, got \(8, 3, 16, 16\) of torch.float32\. Those"),
    "one": (lambda data: {"images": data.images[0]}, r"\(n, c, h, w\) of uint8, got \(3, 16, 16\)"),
    "fewer labels": (lambda data: {"labels": data.labels[:5]}, r"got 8 images and labels \(5,\)"),
    "other labels": (lambda data: {"labels": data.labels.float()}, r"labels \(8,\) of torch.float32"),
    "none": (lambda data: {"images": data.images[:0], "labels": data.labels[:0]}, "at least one image.* got 0"),
    "fewer classes": (lambda data: {"classes": ("lying",)}, "has 1 classes, whose labels are 0 to 0, got 0 to 1"),
    "from -1": (lambda data: {"labels": data.labels - 1}, "labels are 0 to 1, got -1 to 0. Name every class"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_pictures_that_make_no_sense(kind):
    change, text = WRONG[kind]
    data = stripes(8)
    with pytest.raises(TrainError, match=text):
        replace(data, **change(data))


def test_pictures_that_do_not_fit_the_model(tmp_path):
    model, data = new_model(), stripes(8)
    large = replace(data, images=data.images.repeat(1, 1, 2, 2))
    turned, three = replace(data, classes=data.classes[::-1]), replace(data, classes=(*data.classes, "sitting"))
    sizes, classes = "are of 32 x 32 pixels.*makes them 16 x 16. Prepare", "the model's: standing for lying, lying for"
    for other, text in ((large, sizes), (turned, classes), (three, "have 3 classes and the model 2")):
        with pytest.raises(TrainError, match=text):
            train.train(model, data, tmp_path / "out", settings(), validation=other)
        with pytest.raises(TrainError, match=text):
            evaluate.measure(model, other)
    with pytest.raises(TrainError, match=sizes):
        train.train(model, large, tmp_path / "out", settings())
    assert not (tmp_path / "out").exists()
    model.labels = None
    evaluate.measure(model, turned)  # no names that would say otherwise


def test_another_run_is_not_overwritten(tmp_path):
    train.train(new_model(), stripes(24), tmp_path, settings())
    changes = r"lr was 0.001 and is 0.01; pictures was '24, sha256 \w+' and is '16, sha256 \w+'\. Use its"
    with pytest.raises(TrainError, match=f"another run: {changes}"):
        train.train(new_model(), stripes(16), tmp_path, settings(lr=0.01))
    (tmp_path / STATE).write_bytes(b"nothing like it")
    with pytest.raises(TrainError, match=r"not the state of a run, or is damaged.*begin anew.*last"):
        train.train(new_model(), stripes(24), tmp_path, settings())


def test_a_run_goes_on_with_what_it_began_with(tmp_path):
    first, second, data = new_model(), new_model(), stripes(24)
    nn.init.ones_(second.blocks[0].attn.qkv.weight)
    for name, model in (("first", first), ("second", second)):
        model.save(tmp_path / name)
    for out, recipe, wrong in (
        ("whole", settings(), "weights was"),
        ("head", settings(frozen=True), r"weights was .*; frozen weights was 'sha256 \w+' and is"),
    ):
        model = vitlite.load(tmp_path / "first")
        with pytest.raises(Killed):
            train.train(model, data, tmp_path / out, recipe, after_epoch=stop)
        with pytest.raises(TrainError, match=f"another run: {wrong}"):
            train.train(vitlite.load(tmp_path / "second"), data, tmp_path / out, recipe)
        assert len(train.train(model, data, tmp_path / out, recipe)) == 2  # as in a notebook: changed by the run itself
    train.train(first, data, tmp_path / "made", settings(frozen=True))
    with pytest.raises(TrainError, match="another run: frozen weights was"):
        train.train(second, data, tmp_path / "made", settings(frozen=True))


def test_a_run_goes_on_with_the_same_pictures(tmp_path, folders, monkeypatch):
    out, data = tmp_path / "out", stripes(24)
    train.train(new_model(), data, out, settings())
    for other in (replace(data, labels=1 - data.labels), replace(data, images=data.images.flip(0))):
        with pytest.raises(TrainError, match="another run: pictures was"):
            train.train(new_model(), other, out, settings())

    def read(folder):
        return read_folder(folder, new_model().preprocess.pixels, data.classes).digest()

    before, (lying, standing) = read(folders / "train"), (folders / "train" / name for name in data.classes)
    monkeypatch.chdir(folders)
    assert read(Path("train")) == before  # the same from elsewhere
    with (lying / "0.png").open("ab") as picture:
        picture.write(b"more")
    assert read(folders / "train") != before
    (lying / "0.png").unlink()
    (lying / "0.png").symlink_to("nowhere")
    missing = read(folders / "train")
    (lying / "0.png").unlink()
    fewer = read(folders / "train")
    lying.rename(folders / "train" / "other")
    standing.rename(lying)
    (folders / "train" / "other").rename(standing)
    assert len({before, missing, fewer, read(folders / "train")}) == 4


def test_the_state_of_a_run_before_pictures_were_hashed(tmp_path, monkeypatch):
    identity = Run.identity
    monkeypatch.setattr(Run, "identity", lambda run: identity(run) | {"pictures": len(run.data)})
    train.train(new_model(), stripes(24), tmp_path, settings())
    monkeypatch.setattr(Run, "identity", identity)
    with pytest.raises(TrainError, match="holds another run: pictures was 24 and is '24, sha256"):
        train.train(new_model(), stripes(24), tmp_path, settings())


def test_fewer_pictures_than_a_batch(tmp_path):
    assert len(train.train(new_model(), stripes(6), tmp_path, settings(batch=64))) == 2


# CIFAR-10


def cifar10(folder: Path, names: bytes = b"plane\ncar\n") -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        rows = torch.randint(0, 256, (300, 3073), generator=generator, dtype=torch.uint8)
        rows[:, 0] = torch.arange(300) % 2
        (folder / f"{name}.bin").write_bytes(rows.numpy().tobytes())
    (folder / "batches.meta.txt").write_bytes(names)
    return folder


def test_cifar10_binary_version(tmp_path):
    folder = cifar10(tmp_path / "data")
    parts = [read_cifar10(folder, split) for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [1500 - HOLDOUT, HOLDOUT, 300]
    first = (folder / "data_batch_1.bin").read_bytes()[1:3073]
    assert bytes(parts[0].images[0].flatten().tolist()) == first
    assert parts[0].labels[:4].tolist() == [0, 1, 0, 1]
    assert parts[0].classes == ("plane", "car")
    model = new_model()
    resized = read_cifar10(folder, "test", model.preprocess.pixels).fetch(torch.tensor([0, 7]))
    assert resized.shape == (2, 3, 16, 16)


def test_damaged_cifar10(tmp_path):
    folder = cifar10(tmp_path / "data", b"plane\n")
    with pytest.raises(TrainError, match=r"has the label 1, and batches.meta.txt names 1 classes"):
        read_cifar10(folder, "train")
    (folder / "batches.meta.txt").unlink()
    with pytest.raises(TrainError, match=r"no batches.meta.txt"):
        read_cifar10(folder, "train")
    (folder / "data_batch_2.bin").write_bytes(b"short")
    with pytest.raises(TrainError, match=r"data_batch_2.bin has 5 bytes, which is no multiple of 3,073"):
        read_cifar10(folder, "train")
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(TrainError, match=r"data_batch_2.bin is missing"):
        read_cifar10(folder, "train")


def prepare():
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "examples" / "cifar10" / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prepare_builds_the_binary_version_from_pngs(tmp_path, monkeypatch, capsys):
    source, generator = tmp_path / "package", torch.Generator().manual_seed(0)
    source.mkdir()
    pixels = torch.randint(0, 256, (6, 2, 1024, 3), generator=generator, dtype=torch.uint8)
    for i, rows in enumerate(pixels, 1):
        Image.fromarray(rows.numpy()).save(source / (f"data_batch_{i}.png" if i < 6 else "test_batch.png"))
    (source / "train_lables.json").write_text(json.dumps(list(range(10))))
    (source / "test_lables.json").write_text("[7, 8]")
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(source), str(tmp_path / "bin")])
    prepare().main()
    test = read_cifar10(tmp_path / "bin", "test")
    assert test.labels.tolist() == [7, 8]
    assert torch.equal(test.images[1, 2].flatten(), pixels[5, 1, :, 2])
    assert (tmp_path / "bin" / "data_batch_5.bin").read_bytes()[3073] == 9
    assert "data_batch_1.bin  2 images" in capsys.readouterr().out


def test_prepare_opens_no_pickle_that_is_not_the_published_one(tmp_path, monkeypatch):
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path), str(tmp_path / "bin")])
    with pytest.raises(SystemExit, match=r"data_batch_1 has md5 .* It was not opened"):
        prepare().main()
    assert not (tmp_path / "bin").exists()


# Measuring


class Oracle(nn.Module):
    """Answers with a fixed class for each picture, read from its first pixel."""

    def __init__(self, model: ViT, answers: list[int], k: int) -> None:
        super().__init__()
        self.config, self.preprocess = model.config.replace(num_classes=k), model.preprocess
        self.answers, self.k, self.labels = torch.tensor(answers), k, None
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def forward(self, images):
        which = ((images[:, 0, 0, 0] * 0.25 + 0.5) * 255).round().long()
        return -(torch.arange(self.k) - self.answers[which][:, None]).abs().float()


def test_measure_counts_right_and_wrong():
    images = torch.zeros(6, 3, 16, 16, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(6)
    pictures = Pictures(images, torch.tensor([0, 0, 1, 2, 2, 9]), tuple("abcdefghij"))
    measured = evaluate.measure(Oracle(new_model(), [0, 1, 1, 2, 9, 0], 10), pictures, batch=4)
    assert measured.top1 == 3 / 6
    assert measured.top5 == 4 / 6
    assert measured.confusion.nonzero().tolist() == [[0, 0], [0, 1], [1, 1], [2, 2], [2, 9], [9, 0]]
    assert measured.recall[:3].tolist() == [0.5, 1.0, 0.5]
    assert measured.precision[:3].tolist() == [0.5, 0.5, 1.0]


def test_pictures_are_normalised_as_the_model_prepares_them():
    model = new_model()
    pixels = torch.arange(3 * 256).view(1, 3, 16, 16).to(torch.uint8)
    for changes in ({"mean": (0.4, 0.5, 0.6)}, {"scale": 1 / 127.5, "mean": (1.0,), "std": (1.0,)}):
        prepare = Preprocess(replace(RECIPE, **changes), model)
        wanted = prepare.batch(list(pixels))
        assert torch.allclose(evaluate.normalise(pixels.float() / 255, prepare.recipe), wanted, atol=1e-5)


def test_the_commands(folders, tmp_path, capsys):
    words = f"--model vit_nano_4 --weights none --size 16 --epochs 1 --batch 8 --out {tmp_path / 'run'}".split()
    assert main(["train", str(folders), *words]) == 0
    assert json.loads(capsys.readouterr().out)["epoch"] == 1
    best = str(tmp_path / "run" / "best")
    assert main(["eval", str(folders), "--model", best, "--out", str(tmp_path / "eval")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"lying +4 +\d+.\d%", out)
    assert re.search(r"top-1 \d+.\d\d%   8 pictures", out)  # of two classes, all are among the best five
    figures = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert figures["classes"] == ["lying", "standing"]
    assert "top5" not in figures
    assert sum(map(sum, figures["confusion"])) == 8
    with Image.open(tmp_path / "eval" / "confusion.png") as picture:
        assert picture.width > 200


def test_the_commands_on_cifar10(tmp_path, capsys):
    data, out = cifar10(tmp_path / "data"), tmp_path / "run"
    assert main(f"train {data} --model vit_nano_4 --weights none --size 8 --epochs 1 --out {out}".split()) == 0
    assert main(f"eval {data} --model {out / 'last'} --out {tmp_path / 'one'}".split()) == 0
    assert "300 pictures" in capsys.readouterr().out
    config = json.loads((out / "last" / "config.json").read_text())
    config["vitlite"]["labels"].reverse()
    (out / "last" / "config.json").write_text(json.dumps(config))
    assert main(f"eval {data} --model {out / 'last'} --out {tmp_path / 'other'}".split()) == 0
    one, other = (json.loads((tmp_path / name / "eval.json").read_text()) for name in ("one", "other"))
    assert (one["classes"], other["classes"]) == (["plane", "car"], ["car", "plane"])
    assert other["confusion"] == one["confusion"][::-1]
    new_model(CONFIG.replace(num_classes=5)).save(tmp_path / "five")
    assert main(f"eval {data} --model {tmp_path / 'five'}".split()) == 1
    assert "The data have 2 classes" in capsys.readouterr().err
    ViT(CONFIG).save(tmp_path / "bare")
    assert main(f"eval {data} --model {tmp_path / 'bare'}".split()) == 1
    assert "has no preprocessing" in capsys.readouterr().err


def test_cifar10_is_prepared_as_predict_does_it(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "train", lambda model, data, *_, validation, **__: seen.extend([data, validation]))
    monkeypatch.setattr(evaluate, "measure", lambda model, data, **_: (seen.append(data), stop(None)))
    folder, model, row = cifar10(tmp_path / "data"), new_model(CONFIG.replace(image_size=32)), torch.tensor([3])
    for resize, name in (((35, 35), "cropped"), ((32, 32), "whole")):
        model.preprocess = Preprocess(replace(RECIPE, size=(32, 32), resize=resize), model)
        model.save(tmp_path / name)
        assert main(f"train {folder} --model {tmp_path / name} --epochs 1 --out {tmp_path / 'run'}".split()) == 0
        assert main(f"eval {folder} --model {tmp_path / name}".split()) == 1  # killed once the pictures are there
        for split in ("train", "val", "test"):
            raw = read_cifar10(folder, split).images[row]
            got = seen.pop(0).images[row]
            assert torch.equal(got[0], model.preprocess.pixels(raw[0])), (name, split)
            assert torch.equal(got, raw) == (name == "whole")


def test_what_training_begins_with(tmp_path):
    def model(**options):
        defaults = {"model": "vit_nano_4", "weights": "none", "size": None, "device": None, "seed": 0, "drop_path": 0.0}
        return train._model(Namespace(**defaults | options), 2)

    fresh = model(size=16, drop_path=0.1)
    assert fresh.preprocess.recipe.std == (0.2470, 0.2435, 0.2616)  # the zoo's for this name
    assert fresh.preprocess.model is fresh
    assert (fresh.config.drop_path, fresh.config.size) == (0.1, (16, 16))
    assert model(model="vit_small_14", size=14).preprocess.recipe.mean == (0.5, 0.5, 0.5)  # no default in the zoo
    trained = new_model()
    trained.head.bias.data.fill_(3)
    trained.labels = ("a", "b")
    trained.save(tmp_path / "model")
    again = model(model=str(tmp_path / "model"), weights=None)
    assert again.preprocess.recipe == RECIPE
    assert again.head.bias.tolist() == [3, 3]
    embedded = model(weights=None)
    assert embedded.source.verified == "record"
    assert model(weights=None, drop_path=0.1).source == embedded.source
    file = str(ROOT / "src" / "vitlite" / "data" / "vit_nano_4.cifar10.safetensors")
    other = model(model="vit_nano_4.cifar10", weights=file)
    assert torch.equal(other.blocks[0].mlp.fc1.weight, embedded.blocks[0].mlp.fc1.weight)
    assert other.preprocess.recipe == embedded.preprocess.recipe


def test_weights_without_preprocessing_get_none_of_another(folders, tmp_path, capsys):
    ViT(CONFIG.replace(num_classes=0)).save(tmp_path / "bare")
    ViT(PRESETS["vit_nano_4"]).save(tmp_path / "nano")
    (tmp_path / "nano" / "config.json").unlink()
    nano = str(tmp_path / "nano" / "model.safetensors")
    for words in (["--model", str(tmp_path / "bare")], ["--model", "vit_nano_4", "--weights", nano]):
        command = ["train", str(folders), *words, "--epochs", "1", "--drop-path", "0.1", "--out", str(tmp_path / "run")]
        assert main(command) == 1
        said = f"{words[-1]} has no preprocessing, so pictures cannot be prepared for it. Name a checkpoint like it"
        assert said in capsys.readouterr().err
    command = ["train", str(folders), "--model", "vit_nano_4.cifar10", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert main([*command, "--weights", ""]) == 1  # a mistake, not a wish for the model's own
    assert main([*command, "--weights", nano]) == 0


def test_the_commands_say_what_is_wrong(folders, tmp_path, capsys):
    train_words = f"--model vit_nano_4 --weights none --size 16 --epochs 1 --out {tmp_path / 'run'}".split()
    for path in (folders / "train" / "standing").iterdir():
        path.unlink()
    (folders / "train" / "standing").rmdir()
    assert main(["train", str(folders), *train_words]) == 1
    assert "has one class only, lying" in capsys.readouterr().err
    (folders / "val" / "standing").rename(folders / "val" / "sitting")
    new_model().save(tmp_path / "model")
    assert main(["eval", str(folders), "--model", str(tmp_path / "model")]) == 0  # as many folders as classes
    (folders / "val" / "third").mkdir()
    assert main(["eval", str(folders), "--model", str(tmp_path / "model")]) == 1
    assert "Of the model's 2 classes, none is named lying, sitting, third. Name" in capsys.readouterr().err


def test_many_classes_are_drawn_without_names(tmp_path):
    plots.draw_confusion(torch.eye(60, dtype=torch.int64), [str(i) for i in range(60)], tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").stat().st_size > 1000


@pytest.mark.parametrize("module", [train])
def test_examples(module):
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(module).attempted > 0
