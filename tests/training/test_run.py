"""What a state is: everything that a run needs to go on, and nothing of another run."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import Killed, new_model, settings, stop, stripes
from torch import nn

import vitlite
from vitlite.errors import TrainError
from vitlite.fast import kernels, verdicts
from vitlite.images import Preprocess
from vitlite.storage import atomic_write
from vitlite.training import read_folder, run, train
from vitlite.training.run import STATE, Run


def test_the_average_follows_the_weights(tmp_path):
    model = new_model()
    begun = Run(model, stripes(24), settings(ema=0.5))
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(2.0)
        for average in begun.averages.values():
            average.fill_(1.0)
    begun.average(1000)
    with begun.averaged() as averaged:
        assert averaged.head.bias.tolist() == [1.5, 1.5]
    assert model.head.bias.tolist() == [2.0, 2.0]


def test_a_full_disk_leaves_the_last_state(tmp_path, monkeypatch):
    data = stripes(24)
    with pytest.raises(Killed):
        train(new_model(), data, tmp_path, settings(), after_epoch=stop)
    before = (tmp_path / STATE).read_bytes()

    def full(path, tensors, metadata):
        with atomic_write(path) as temporary:
            temporary.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(run, "write_tensors", full)
    with pytest.raises(TrainError, match=r"Cannot write .*state.safetensors: .*No space left.*intact"):
        train(new_model(), data, tmp_path, settings(), save_every=0)
    assert (tmp_path / STATE).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "log.jsonl", STATE]


def test_a_run_goes_on_with_the_same_kernels(tmp_path, monkeypatch):
    train(new_model(), stripes(24), tmp_path, settings())
    before = (tmp_path / STATE).read_bytes()
    with monkeypatch.context() as patch:
        other = verdicts.Verdict(not kernels.unpacked_pays(), "as somebody says")
        patch.setattr(verdicts, "_known", {("float32 linear layers", torch.get_num_threads()): other})
        with pytest.raises(TrainError, match=r"another run: kernels was 'linear layers by .*in evaluations.*VITLITE_K"):
            train(new_model(), stripes(24), tmp_path, settings())
    assert (tmp_path / STATE).read_bytes() == before
    train(new_model(), stripes(24), tmp_path, settings())


def test_another_run_is_not_overwritten(tmp_path):
    train(new_model(), stripes(24), tmp_path, settings())
    changes = r"lr was 0.001 and is 0.01; pictures was '24, sha256 \w+' and is '16, sha256 \w+'\. Use its"
    with pytest.raises(TrainError, match=f"another run: {changes}"):
        train(new_model(), stripes(16), tmp_path, settings(lr=0.01))
    (tmp_path / STATE).write_bytes(b"nothing like it")
    with pytest.raises(TrainError, match=r"not the state of a run, or is damaged.*begin anew.*last"):
        train(new_model(), stripes(24), tmp_path, settings())


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
            train(model, data, tmp_path / out, recipe, after_epoch=stop)
        with pytest.raises(TrainError, match=f"another run: {wrong}"):
            train(vitlite.load(tmp_path / "second"), data, tmp_path / out, recipe)
        assert len(train(model, data, tmp_path / out, recipe)) == 2  # as in a notebook: changed by the run itself
    train(first, data, tmp_path / "made", settings(frozen=True))
    with pytest.raises(TrainError, match="another run: frozen weights was"):
        train(second, data, tmp_path / "made", settings(frozen=True))


def test_a_run_goes_on_with_pictures_decoded_alike(tmp_path):
    """Which is no part of a recipe, and changes their pixels."""
    data, quick = stripes(24), new_model()
    quick.preprocess = quick.preprocess.with_quick_decode()
    for first, second in ((new_model(), quick), (quick, new_model())):
        out = tmp_path / str(first is quick)
        train(first, data, out, settings())
        with pytest.raises(
            TrainError, match=f"another run: quick_decode was {first is quick} and is {second is quick}"
        ):
            train(second, data, out, settings())


def test_a_run_goes_on_with_pictures_prepared_alike(tmp_path):
    """Also where what it was begun with has a field that is left out where it is usual."""
    cut, uncut = new_model(), new_model()
    recipe = replace(uncut.preprocess.transform, resize=(38, 38), cut=(34, 34))
    cut.preprocess = Preprocess(recipe, cut)
    uncut.preprocess = Preprocess(replace(recipe, cut=None), uncut)
    pixels = r"\[34, 34\]"
    for first, second, changed in (
        (cut, uncut, f"was {pixels} and is None"),
        (uncut, cut, f"was None and is {pixels}"),
    ):
        out = tmp_path / str(first is cut)
        train(first, stripes(24), out, settings())
        with pytest.raises(TrainError, match=f"another run: cut {changed}"):
            train(second, stripes(24), out, settings())


def test_a_run_goes_on_with_the_same_pictures(tmp_path, folders, monkeypatch):
    out, data = tmp_path / "out", stripes(24)
    train(new_model(), data, out, settings())
    for other in (replace(data, labels=1 - data.labels), replace(data, images=data.images.flip(0))):
        with pytest.raises(TrainError, match="another run: pictures was"):
            train(new_model(), other, out, settings())

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
    train(new_model(), stripes(24), tmp_path, settings())
    monkeypatch.setattr(Run, "identity", identity)
    with pytest.raises(TrainError, match="holds another run: pictures was 24 and is '24, sha256"):
        train(new_model(), stripes(24), tmp_path, settings())


def test_the_state_of_a_run_before_a_field_was_there(tmp_path, monkeypatch):
    identity = Run.identity

    def without(*names):
        def older_identity(run):
            return {name: value for name, value in identity(run).items() if name not in names}

        monkeypatch.setattr(Run, "identity", older_identity)
        train(new_model(), stripes(24), tmp_path / names[0], settings())
        monkeypatch.setattr(Run, "identity", identity)
        return train(new_model(), stripes(24), tmp_path / names[0], settings())

    assert len(without("resample", "margin", "seed")) == 2  # it did what is the default now
    with pytest.raises(TrainError, match=r"another run: dim was 768 and is 32\. Use"):
        without("dim")


def test_the_end_may_move_before_the_learning_rate_knows_of_it(tmp_path):
    whole, moved, data = new_model(), new_model(), stripes(24)
    train(whole, data, tmp_path / "whole", settings(epochs=4))
    with pytest.raises(Killed):
        train(moved, data, tmp_path / "moved", settings(epochs=2), after_epoch=stop)
    train(moved, data, tmp_path / "moved", settings(epochs=4))
    assert all(map(torch.equal, moved.parameters(), whole.parameters()))
    with pytest.raises(TrainError, match="another run: epochs was 4 and is 6"):
        train(moved, data, tmp_path / "moved", settings(epochs=6))


def test_a_run_may_be_given_pictures_to_validate_with_later(tmp_path):
    model, data = new_model(), stripes(24)
    with pytest.raises(Killed):
        train(model, data, tmp_path, settings(), after_epoch=stop)
    first, second = train(model, data, tmp_path, settings(), validation=stripes(8, seed=1))
    for other in (stripes(8, seed=2), None):  # with which `best` would compare what cannot be compared
        with pytest.raises(TrainError, match="another run: validation was 'sha256"):
            train(model, data, tmp_path, settings(), validation=other)
    assert "val_top1" not in first
    assert second["val_top1"] >= 0
    assert (tmp_path / "best").exists()


def test_a_run_of_which_no_step_is_kept_begins_with_the_model_that_it_is_given(tmp_path):
    """The first may have been without the weights that were wanted, which no file tells where Python filled them in."""
    data, wanted, expected = stripes(24), new_model(), new_model()
    for model in (wanted, expected):
        model.blocks[0].mlp.fc1.weight.data.mul_(2)

    def stop_at_once(run):
        raise Killed

    first = new_model()
    with pytest.raises(Killed):
        train(first, data, tmp_path / "out", settings(), after_step=stop_at_once)
    assert all(map(torch.equal, first.parameters(), new_model().parameters()))  # as it came
    train(wanted, data, tmp_path / "out", settings())
    train(expected, data, tmp_path / "new", settings())
    assert all(map(torch.equal, wanted.parameters(), expected.parameters()))


def test_a_run_that_stopped_before_its_state_was_written_again_begins_with_the_same_weights(tmp_path):
    """As in a notebook: the model has taken steps by then, of which the state knows nothing."""
    new_model().save(tmp_path / "first")
    data, whole = stripes(24), vitlite.load(tmp_path / "first")
    train(whole, data, tmp_path / "whole", settings())
    for steps in (1, 2):

        def stop_there(run, steps=steps):
            if run.progress.step == steps:
                raise Killed

        model, out = vitlite.load(tmp_path / "first"), tmp_path / f"stopped after {steps}"
        with pytest.raises(Killed):
            train(model, data, out, settings(), after_step=stop_there)
        told: list[Run] = []
        train(model, data, out, settings(), after_resume=told.append)
        assert all(map(torch.equal, model.parameters(), whole.parameters()))
        assert not told  # as nothing of it is left, it begins
