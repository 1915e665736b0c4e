"""A damaged state of a run is one error that names the file, and changes nothing."""

import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny_run import new_model, stripes
from tiny_run import settings as run_settings

from vitlite.errors import TrainError
from vitlite.training import train
from vitlite.training.state import STATE, Run

CASES = int(os.environ.get("VITLITE_FUZZ", "40"))


@cache
def good() -> bytes:
    """Return the state of a run of two epochs."""
    with TemporaryDirectory() as name:
        train(new_model(), stripes(24), Path(name), run_settings(optimizer="muon"))
        return Path(name, STATE).read_bytes()


def check(content: bytes) -> None:
    run = Run(new_model(), stripes(24), run_settings(optimizer="muon"))
    before = {name: tensor.clone() for name, tensor in run.tensors().items()}
    with TemporaryDirectory() as name:
        path = Path(name, STATE)
        path.write_bytes(content)
        with pytest.raises(TrainError) as caught:
            run.resume(path)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 20_000
    assert "".join(str(caught.value).splitlines()).isprintable()
    after = run.tensors()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def fuzzed(test: Callable[..., None]) -> Callable[..., None]:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=CASES, deadline=None, suppress_health_check=slow)(test)


@fuzzed
@given(st.integers(0), st.binary(min_size=1, max_size=16))
def test_any_bytes_anywhere(where: int, damage: bytes) -> None:
    content = bytearray(good())
    where %= len(content)
    content[where : where + len(damage)] = damage
    spaces = content.translate(bytes.maketrans(b"\t\n\r", b"   "))
    if spaces != good():  # other white space in the header is not damage
        check(bytes(content))


@fuzzed
@given(st.binary() | st.integers(0, 2000).map(lambda count: good()[:count]))
@example(b"")
@example(struct.pack("<Q", 2**63) + b"{}")
def test_any_file(content: bytes) -> None:
    check(content)
