"""Any state of a run, by accident or not: it goes on rightly, or one error names the file and nothing has changed."""

import json
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny_run import new_model, stripes
from tiny_run import settings as recipe

from vitlite.errors import TrainError
from vitlite.training import train
from vitlite.training.run import STATE, Run
from vitlite.training.state import CHECKSUM, METADATA

CASES = int(os.environ.get("VITLITE_FUZZ", "40"))

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = (
    ["progress"],
    ["progress", "epoch"],
    ["progress", "step"],
    ["progress", "loss"],
    ["progress", "seconds"],
    ["history"],
    ["history", 0],
    ["history", 0, "epoch"],
    ["history", 1, "val_top1"],
    ["history", 1, "lr"],
    ["identity"],
    ["identity", "epochs"],
    ["identity", "classes"],
    ["identity", "weights"],
    ["unmoved"],
)


@cache
def good() -> bytes:
    """The state of a run of two epochs."""
    with TemporaryDirectory() as name:
        train(new_model(), stripes(24), Path(name), recipe(optimizer="muon"))
        return Path(name, STATE).read_bytes()


def everything(run: Run) -> list[torch.Tensor]:
    states = [value for state in run.states().values() for value in state.values()]
    return [value.clone() for value in (*run.weights.values(), *run.averages.values(), *states)]


def check(content: bytes) -> None:
    """A run is refused and left as it is, or holds what the file has and saves it again."""
    run = Run(new_model(), stripes(24), recipe(optimizer="muon"))
    before = everything(run)
    with TemporaryDirectory() as name:
        path = Path(name, STATE)
        path.write_bytes(content)
        try:
            run.resume(path)
        except TrainError as error:
            said = str(error)
        else:
            said = ""
        if said:
            assert name in said
            assert len(said) < 20_000
            assert said.isprintable()
            assert all(map(torch.equal, everything(run), before))
            assert (run.progress.epoch, run.progress.step, run.history) == (0, 0, [])
            return
        again = Path(name, "again.safetensors")
        run.save(again)
        run.resume(again)
        assert len(run.history) == run.progress.epoch
        assert not any(value.isnan().any() for value in everything(run))


def with_header(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The good state, its header changed."""
    content = good()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"][CHECKSUM]  # as if whoever made it had meant it
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def steered(test: Callable[..., None]) -> Callable[..., None]:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=CASES, deadline=None, suppress_health_check=slow)(test)


@steered
@given(st.sampled_from(FIELDS), json_values)
@example(["progress"], {})
@example(["progress", "epoch"], True)
@example(["progress", "step"], 3)
@example(["progress", "loss"], float("nan"))
@example(["progress", "loss"], 10**400)
@example(["history", 0, "epoch"], "1")
@example(["identity", "epochs"], 2**60)
@example(["identity", "weights"], "\x1b" * 1000)
@example(["unmoved"], ["head.bias"])
def test_any_value_in_any_field(place: list[Any], value: Any) -> None:
    def change(header: dict[str, Any]) -> None:
        saved = json.loads(header["__metadata__"][METADATA])
        part = saved
        for step in place[:-1]:
            part = part[step]
        part[place[-1]] = value
        header["__metadata__"][METADATA] = json.dumps(saved)

    check(with_header(change))


@steered
@given(st.data())
def test_any_tensor(data: st.DataObject) -> None:
    """Renamed, left out, of another type or shape, or elsewhere."""

    def change(header: dict[str, Any]) -> None:
        name = data.draw(st.sampled_from([name for name in header if name != "__metadata__"]))
        entry = header.pop(name)
        if data.draw(st.booleans()):
            header[data.draw(st.sampled_from([name, "weight.x", "x", "step.", "\n"]) | st.text())] = entry
        for key in ("dtype", "shape", "data_offsets"):
            if data.draw(st.booleans()):
                entry[key] = data.draw(json_values | st.sampled_from(["F16", "I32", [1], [2, 0], [0, 8], []]))

    check(with_header(change))


@steered
@given(st.integers(0), st.binary(min_size=1, max_size=16))
def test_any_bytes_anywhere(where: int, damage: bytes) -> None:
    content = bytearray(good())
    where %= len(content)
    content[where : where + len(damage)] = damage
    check(bytes(content))


@steered
@given(st.binary() | st.integers(0, 2000).map(lambda count: good()[:count]))
@example(b"")
@example(struct.pack("<Q", 2**63) + b"{}")
def test_any_file(content: bytes) -> None:
    check(content)
