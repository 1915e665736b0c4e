"""The file of a run's state: read whole and checked, or one error that names file and field and changes nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import skip_where_a_driver_is_needed
from safetensors import safe_open
from tiny_run import new_model, settings, stripes
from torch import nn
from torch._subclasses import FakeTensorMode

from vitlite.checkpoints.save import write_tensors
from vitlite.errors import TrainError
from vitlite.training import loop, train
from vitlite.training.optim import optimizers, remembers, restore_optimizer, weights_of
from vitlite.training.run import STATE, Run
from vitlite.training.state import METADATA, read_state


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of a run with both optimizers."""
    out = tmp_path_factory.mktemp("run")
    train(new_model(), stripes(24), out, settings(optimizer="muon"))
    return out / STATE


def content(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name).clone() for name in names}, json.loads(file.metadata()[METADATA])


def everything(run: Run) -> list[torch.Tensor]:
    states = [value for state in run.states().values() for value in state.values()]
    return [value.clone() for value in (*run.weights.values(), *run.averages.values(), *states)]


def refused(run: Run, path: Path, reason: str) -> None:
    before, progress = everything(run), run.progress
    with pytest.raises(TrainError, match=rf"{path} is not the state of a run, or is damaged \(.*{reason}") as caught:
        run.resume(path)
    assert "perhaps with --model" in caught.value.for_command_line()
    assert len(str(caught.value)) < 2000
    after = everything(run)
    assert len(after) == len(before)
    assert all(map(torch.equal, after, before))
    assert (run.progress, run.history) == (progress, [])


def a_run() -> Run:
    return Run(new_model(), stripes(24), settings(optimizer="muon"))


LAST = "weight.head.weight"
TENSORS = {
    "missing": (lambda t: t.pop("exp_avg.head.bias"), "it lacks exp_avg.head.bias"),
    "all of a weight": (lambda t: t.pop(LAST), f"it lacks {LAST}"),
    "extra": (lambda t: t.update({"weight.other": torch.ones(1)}), "weight.other belongs to no weight"),
    "without a dot": (lambda t: t.update({"other": torch.ones(1)}), "other belongs to no weight"),
    "shape": (lambda t: t.update({LAST: t[LAST].mT}), rf"{LAST} is \(32, 2\).*\(2, 32\) .*in the run"),
    "would be broadcast": (lambda t: t.update({LAST: t[LAST][:1]}), rf"{LAST} is \(1, 32\)"),
    "type": (lambda t: t.update({LAST: t[LAST].half()}), f"{LAST} is .*float16, and .*float32"),
    "whole": (lambda t: t.update({LAST: t[LAST].long()}), f"{LAST} is of type I64"),
    "nan": (lambda t: t[LAST].view(-1)[5:6].fill_(torch.nan), f"{LAST} has NaN"),
    "all that an optimizer knew": (
        lambda t: [t.pop(f"{kind}.head.bias") for kind in ("step", "exp_avg", "exp_avg_sq")],
        "it lacks exp_avg.head.bias",
    ),
    "momentum": (lambda t: t["momentum.blocks.1.mlp.fc1.weight"].fill_(torch.nan), "fc1.weight has NaN"),
    "step": (lambda t: t["step.head.bias"].fill_(-1), "step.head.bias is -1, and the run has taken 6"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_are_not_the_runs(written: Path, tmp_path: Path, kind: str) -> None:
    change, reason = TENSORS[kind]
    tensors, saved = content(written)
    change(tensors)
    write_tensors(tmp_path / STATE, tensors, {METADATA: json.dumps(saved)})
    refused(a_run(), tmp_path / STATE, reason)


FIELDS = {
    "no table": (lambda s: [s], "its header: it must be a table with identity, progress, history"),
    "no progress": (lambda s: {"identity": s["identity"], "history": []}, "must be a table with"),
    "epoch": (lambda s: s["progress"].update(epoch="2"), "progress.epoch must be a whole number"),
    "negative": (lambda s: s["progress"].update(step=-1), "progress.step must be a whole number"),
    "true": (lambda s: s["progress"].update(step=True), "progress.step must be a whole number"),
    "nan": (lambda s: s["progress"].update(loss=float("nan")), "progress.loss must be a number"),
    "beyond the epoch": (lambda s: s["progress"].update(step=4), "progress.step is 4, and an epoch has 3"),
    "beyond the end": (
        lambda s: (s["progress"].update(epoch=3), s["history"].append(s["history"][0])),
        "progress.epoch is 3, of 2",
    ),
    "history": (lambda s: s["history"].pop(), "its history has 1 epochs, and progress.epoch is 2"),
    "records": (lambda s: s["history"][0].update(epoch=None), r"history\[0\].epoch must be"),
    "top1": (lambda s: s["history"][1].update(val_top1="high"), r"history\[1\].val_top1 must be"),
    "identity": (lambda s: s.update(identity=[]), "identity must be a table with epochs"),
    "epochs": (lambda s: s["identity"].update(epochs="many"), "identity.epochs must be"),
}


@pytest.mark.parametrize("kind", FIELDS)
def test_fields_that_are_not_what_they_should_be(written: Path, tmp_path: Path, kind: str) -> None:
    change, reason = FIELDS[kind]
    tensors, saved = content(written)
    changed = change(saved)
    whole = changed if isinstance(changed, list) or kind == "no progress" else saved
    write_tensors(tmp_path / STATE, tensors, {METADATA: json.dumps(whole)})
    refused(a_run(), tmp_path / STATE, reason)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (None, "its header has no vitlite.run"),
        ({METADATA: "[" * 100_000}, "nested too deeply"),
        ({METADATA: '{"identity": ' + "9" * 5000 + "}"}, "cannot be read as JSON"),
        ({METADATA: '{"identity": ' + "[" * 40 + "]" * 40 + "}"}, "nested too deeply"),
        ({METADATA: "{"}, "cannot be read as JSON"),
    ],
)
def test_headers_that_are_none(written: Path, tmp_path: Path, header: dict[str, str] | None, reason: str) -> None:
    write_tensors(tmp_path / STATE, content(written)[0], header)
    refused(a_run(), tmp_path / STATE, reason)


def test_a_weight_without_a_gradient_is_nothing_to_remember(tmp_path: Path) -> None:
    run = a_run()
    run.model.norm.bias.requires_grad_(False)
    loop._step(run, torch.arange(8))
    run.progress.add(1.0, 0.5, 0.0)
    run.save(tmp_path / STATE)
    again = a_run()
    again.resume(tmp_path / STATE)
    assert [name for name, state in again.states().items() if not state] == ["norm.bias"]


def test_a_flipped_byte_is_noticed_wherever_it_is(written: Path, tmp_path: Path) -> None:
    """Also where the numbers stay plausible."""
    whole = bytearray(written.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    loss = whole.index(b"loss") + 8
    for place in (loss, header + 2, (header + len(whole)) // 2 // 4 * 4, len(whole) - 4):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (tmp_path / STATE).write_bytes(damaged)
        refused(a_run(), tmp_path / STATE, "its checksum is that of other content")


def test_a_state_of_an_older_vitlite_has_no_checksum(written: Path, tmp_path: Path) -> None:
    tensors, saved = content(written)
    write_tensors(tmp_path / STATE, tensors, {METADATA: json.dumps(saved)})
    run = a_run()
    run.resume(tmp_path / STATE)
    assert all(torch.equal(value, tensors[f"weight.{name}"]) for name, value in run.weights.items())


def test_files_that_are_no_state(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    for damage in (b"", b"nothing like it", whole[:-1], whole[:100], whole[:8] + b"\0" * 200):
        (tmp_path / STATE).write_bytes(damage)
        refused(a_run(), tmp_path / STATE, "")


def test_long_texts_of_another_run_are_shortened(written: Path, tmp_path: Path) -> None:
    tensors, saved = content(written)
    saved["identity"]["pictures"] = "x" * 1_000_000 + "\x1b"
    write_tensors(tmp_path / STATE, tensors, {METADATA: json.dumps(saved)})
    with pytest.raises(TrainError, match="another run: pictures was 'xxx") as caught:
        a_run().resume(tmp_path / STATE)
    assert len(str(caught.value)) < 2000


SAVES = """
import resource, signal, sys
from pathlib import Path
import torch
from tiny_run import CONFIG, new_model, settings, stripes
from vitlite.errors import TrainError
from vitlite.training import loop
from vitlite.training.run import Run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path, limits = Path(sys.argv[1]), map(int, sys.argv[2:])
run = Run(new_model(CONFIG.replace(dim=512, mlp_dim=2048)), stripes(24), settings())
run.progress.add(*loop._step(run, torch.arange(8)), 0.0)
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
    """A process that saves a state of 100 MB again and again, or once for each limit of what a file may take."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
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
def test_a_file_that_may_not_grow_leaves_the_state_of_before(tmp_path: Path) -> None:
    path = tmp_path / STATE
    with saving(path, "1", "1000000", "50000000") as process:
        said = process.communicate()[0].splitlines()
    assert process.returncode == 0
    assert said[0] == "saved"
    assert len(said) == 4
    for line in said[1:]:
        assert line.startswith(f"Cannot write {path}: ")
        assert "The last state of the run is intact." in line
    assert read_state(path).progress.step == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is mapped")
def test_the_file_is_not_mapped_while_its_tensors_are_used(written: Path) -> None:
    run = a_run()
    run.resume(written)
    state = read_state(written)
    assert state.tensors
    assert str(written) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_on_a_gpu_everything_is_where_the_optimizers_want_it(tmp_path: Path, kind: str) -> None:
    """Fused AdamW counts its steps on the device of the weights."""
    skip_where_a_driver_is_needed()
    recipe, model = settings(optimizer=kind), new_model()
    train(model, stripes(24), tmp_path, recipe)
    tensors = read_state(tmp_path / STATE).tensors
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(torch.empty(weight.shape, device="cuda")))
        weights = dict(model.named_parameters())
        found = optimizers(model, weights, recipe)
        assert found[0].defaults["fused"]
        for optimizer in found:
            restore_optimizer(optimizer, {weight: name for name, weight in weights.items()}, tensors)
            for weight in weights_of(optimizer):
                devices = {name: value.device.type for name, value in optimizer.state[weight].items()}
                assert devices == dict.fromkeys(remembers(optimizer), "cuda")


def test_a_resumed_run_has_all_that_was_saved(written: Path) -> None:
    run = a_run()
    run.resume(written)
    tensors = content(written)[0]
    run.save(written.parent / "again")
    again = content(written.parent / "again")[0]
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], value) for name, value in tensors.items())
    run.resume(written)
    assert {state["step"].device.type for state in run.states().values() if "step" in state} == {"cpu"}
