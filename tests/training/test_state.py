"""The state of a run: all that a resumed run needs, and an error for damage and for another run."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import skip_where_a_driver_is_needed
from safetensors import safe_open
from tiny_run import TRANSFORM, Killed, new_model, settings, stop, stripes
from torch import nn
from torch._subclasses import FakeTensorMode

import vitlite
from vitlite.checkpoints.save import write_tensors
from vitlite.errors import TrainError
from vitlite.images import Preprocess
from vitlite.training import state, train, trainer
from vitlite.training.optim import optimizers, restore_optimizer, state_names, weights_of
from vitlite.training.state import CONTENT, STATE, Run, RunIdentity, read_state


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of a run with both optimizers."""
    out = tmp_path_factory.mktemp("run")
    train(new_model(), stripes(24), out, settings(optimizer="muon"))
    return out / STATE


def a_run() -> Run:
    return Run(new_model(), stripes(24), settings(optimizer="muon"))


def refused(path: Path, reason: str) -> None:
    run = a_run()
    before = {name: tensor.clone() for name, tensor in run.tensors().items()}
    with pytest.raises(TrainError, match=rf"{path} is damaged or not the state of a run \(.*{reason}") as caught:
        run.resume(path)
    assert len(str(caught.value)) < 2000
    after = run.tensors()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert run.history == []


def test_a_resumed_run_has_everything_that_was_saved(written: Path) -> None:
    run = a_run()
    assert run.resume(written)
    saved = read_state(written)
    assert (run.progress, run.history) == (saved.progress, saved.history)
    assert run.tensors().keys() == saved.tensors.keys()
    assert all(torch.equal(tensor, saved.tensors[name]) for name, tensor in run.tensors().items())
    kinds = {name.partition(".")[0] for name in saved.tensors}
    assert kinds == {"weight", "average", "momentum", "step", "exp_avg", "exp_avg_sq"}
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(written) not in maps.read_text()  # the file will be replaced


def test_a_flipped_byte_is_noticed_anywhere(written: Path, tmp_path: Path) -> None:
    whole = bytearray(written.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    loss = whole.index(b"loss") + 8
    for place in (loss, header + 2, (header + len(whole)) // 2 // 4 * 4, len(whole) - 4):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (tmp_path / STATE).write_bytes(damaged)
        refused(tmp_path / STATE, "the checksum does not match the content")


def test_files_that_are_not_a_state_are_errors(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    for damage in (b"", b"nothing like it", whole[:-1], whole[:100], whole[:8] + b"\0" * 200):
        (tmp_path / STATE).write_bytes(damage)
        refused(tmp_path / STATE, "")
    write_tensors(tmp_path / STATE, read_state(written).tensors)
    refused(tmp_path / STATE, "KeyError")
    (tmp_path / STATE).unlink()
    (tmp_path / STATE).mkdir()
    refused(tmp_path / STATE, "")


def test_the_average_follows_the_weights() -> None:
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


def test_weights_without_gradients_are_saved_too(tmp_path: Path) -> None:
    run = a_run()
    run.model.norm.bias.requires_grad_(False)
    trainer._step(run, torch.arange(8))
    run.progress.add(1.0, 0.5, 0.0)
    run.save(tmp_path / STATE)
    again = a_run()
    assert again.resume(tmp_path / STATE)
    missing = {f"weight.{name}" for name in again.weights} - again.tensors().keys()
    assert not missing
    assert "step.norm.bias" not in again.tensors()


def test_a_full_disk_leaves_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = stripes(24)
    with pytest.raises(Killed):
        train(new_model(), data, tmp_path, settings(), after_epoch=stop)
    before = (tmp_path / STATE).read_bytes()

    def full(path: Path, tensors: Any, metadata: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(state, "write_tensors", full)
    with pytest.raises(TrainError, match=r"Cannot write .*state.safetensors: .*No space left.*intact"):
        train(new_model(), data, tmp_path, settings(), save_every=0)
    assert (tmp_path / STATE).read_bytes() == before


def test_the_identity_of_a_run_has_all_that_decides_its_weights() -> None:
    identity = RunIdentity.of(new_model(), stripes(24), settings(), stripes(8))
    assert asdict(identity).keys() == {"settings", "config", "transform", "classes", "weights", "images", "validation"}
    assert RunIdentity(**json.loads(json.dumps(asdict(identity)))) == identity
    other = RunIdentity.of(new_model(), stripes(16), settings(lr=0.01, frozen=True, patience=3), None)
    changes = [text.split()[0] for text in other.differences(identity)]
    assert changes == ["frozen", "lr", "images", "validation"]


def other_transform(**changes: Any) -> Any:
    def change(model: Any, data: Any) -> tuple[Any, ...]:
        model.preprocess = Preprocess(replace(TRANSFORM, **changes), model)
        return model, data, settings(), None

    return change


def quick(model: Any, data: Any) -> tuple[Any, ...]:
    model.preprocess = model.preprocess.with_quick_decode()
    return model, data, settings(), None


CHANGES: dict[str, tuple[Any, str]] = {
    "lr": (lambda model, data: (model, data, settings(lr=0.01), None), r"lr was 0\.001 and is now 0\.01"),
    "epochs": (lambda model, data: (model, data, settings(epochs=9), None), "epochs was 2 and is now 9"),
    "images": (
        lambda model, data: (model, stripes(16), settings(), None),
        r"images was '24, sha256 \w+' and is now '16, ",
    ),
    "validation": (
        lambda model, data: (model, data, settings(), stripes(8)),
        "validation was None and is now '8, sha256",
    ),
    "transform": (other_transform(mean=(0.4,) * 3), r"mean was \[0\.5, 0\.5, 0\.5\] and is now \[0\.4, "),
    "cut": (other_transform(resize=(38, 38), cut=(34, 34)), r"cut was None and is now \[34, 34\]; resize was"),
    "quick_decode": (quick, "quick_decode was False and is now True"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_another_run_is_not_resumed(written: Path, tmp_path: Path, kind: str) -> None:
    change, text = CHANGES[kind]
    train(new_model(), stripes(24), tmp_path, settings())
    before = (tmp_path / STATE).read_bytes()
    model, data, how, validation = change(new_model(), stripes(24))
    with pytest.raises(TrainError, match=f"contains another run: {text}.* Use the same arguments to resume"):
        train(model, data, tmp_path, how, validation=validation)
    assert (tmp_path / STATE).read_bytes() == before


def test_a_run_from_other_weights_is_not_resumed(tmp_path: Path) -> None:
    first, second, data = new_model(), new_model(), stripes(24)
    nn.init.ones_(second.blocks[0].attn.qkv.weight)
    for name, model in (("first", first), ("second", second)):
        model.save(tmp_path / name)
    for out, how in (("whole", settings()), ("head", settings(frozen=True))):
        model = vitlite.load(tmp_path / "first")
        with pytest.raises(Killed):
            train(model, data, tmp_path / out, how, after_epoch=stop)
        with pytest.raises(TrainError, match="another run: weights was"):
            train(vitlite.load(tmp_path / "second"), data, tmp_path / out, how)
        assert len(train(model, data, tmp_path / out, how)) == 2  # in a notebook: the model that the run has changed
    train(first, data, tmp_path / "random", settings(frozen=True))
    with pytest.raises(TrainError, match="another run: weights was 'sha256"):
        train(second, data, tmp_path / "random", settings(frozen=True))


def test_the_number_of_epochs_may_change_before_the_learning_rate_falls(tmp_path: Path) -> None:
    whole, moved, data = new_model(), new_model(), stripes(24)
    train(whole, data, tmp_path / "whole", settings(epochs=4))
    with pytest.raises(Killed):
        train(moved, data, tmp_path / "moved", settings(epochs=2), after_epoch=stop)
    train(moved, data, tmp_path / "moved", settings(epochs=4))
    assert all(map(torch.equal, moved.parameters(), whole.parameters()))
    with pytest.raises(TrainError, match="another run: epochs was 4 and is now 6"):
        train(moved, data, tmp_path / "moved", settings(epochs=6))


SAVES = """
import resource, signal, sys
from pathlib import Path
import torch
from tiny_run import CONFIG, new_model, settings, stripes
from vitlite.errors import TrainError
from vitlite.training import trainer
from vitlite.training.state import Run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path, limits = Path(sys.argv[1]), map(int, sys.argv[2:])
run = Run(new_model(CONFIG.replace(dim=512, mlp_dim=2048)), stripes(24), settings())
run.progress.add(*trainer._step(run, torch.arange(8)), 0.0)
run.save(path)
print("saved", flush=True)
for limit in limits:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        run.save(path)
        print("saved", flush=True)
    except TrainError as error:
        print(error, flush=True)
while len(sys.argv) == 2:
    run.save(path)
"""


def saving(path: Path, *limits: str) -> "subprocess.Popen[str]":
    """Start a process that saves a state of 100 MB again and again, or once for each limit of a file's size."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", SAVES, str(path), *limits], env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL and limits are those of POSIX systems")
def test_killed_while_the_state_is_written(tmp_path: Path) -> None:
    path = tmp_path / STATE
    for _ in range(2):
        with saving(path) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "saved\n"
            time.sleep(random.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert read_state(path).progress.step == 1


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL and limits are those of POSIX systems")
def test_a_file_that_cannot_grow_leaves_the_last_state(tmp_path: Path) -> None:
    path = tmp_path / STATE
    with saving(path, "1", "1000000", "50000000") as process:
        lines = process.communicate()[0].splitlines()
    assert process.returncode == 0
    assert lines[0] == "saved"
    assert len(lines) == 4
    for line in lines[1:]:
        assert line.startswith(f"Cannot write {path}: ")
        assert "The last saved state is intact." in line
    assert read_state(path).progress.step == 1


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_states_are_restored_to_the_gpu(written: Path, kind: str) -> None:
    """Fused AdamW counts its steps on the device of the weights."""
    skip_where_a_driver_is_needed()
    model, tensors = new_model(), read_state(written).tensors
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(torch.empty(weight.shape, device="cuda")))
        weights = dict(model.named_parameters())
        found = optimizers(model, weights, settings(optimizer="muon"))
        assert found[0].defaults["fused"]
        for optimizer in found:
            restore_optimizer(optimizer, {weight: name for name, weight in weights.items()}, tensors)
            for weight in weights_of(optimizer):
                devices = {name: value.device.type for name, value in optimizer.state[weight].items()}
                assert devices == dict.fromkeys(state_names(optimizer), "cuda")


def test_the_content_of_the_state_is_json(written: Path) -> None:
    with safe_open(written, "pt") as file:
        content = json.loads(file.metadata()[CONTENT])
    assert content.keys() == {"identity", "progress", "history"}
