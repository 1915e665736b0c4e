"""Any bytes as a stamp: what they say of this very file, or nothing."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vitlite.zoo import stamps
from vitlite.zoo.folders import stat_of

CASES = settings(
    max_examples=int(os.environ.get("VITLITE_FUZZ", "50")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
CONTENT = b"weights"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
FIELDS = ("stat", "sha256", "verified", "finite")
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner), max_leaves=9
)
changes = st.dictionaries(st.sampled_from([*FIELDS, "more"]), anything)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VITLITE_VERIFY", raising=False)
    path = tmp_path / "mine.safetensors"
    path.write_bytes(CONTENT)
    stamps.check_file(path)
    return path


def stamp_file(file: Path) -> Path:
    (stamp,) = (file.parent / "cache/stamps").iterdir()
    return stamp


def check(file: Path, content: bytes, is_of_this_file: bool) -> None:
    stamp = stamp_file(file)
    stamp.write_bytes(content)
    finite, found = stamps.is_scanned(file), stamps.read_stamp(file)
    assert not finite or (is_of_this_file and json.loads(content)["finite"] is True)
    if found is None or found.stat != stat_of(file):
        assert not finite
        assert stamps.check_file(file) == SHA256  # read again, whatever the stamp says
    assert stamps.check_again(file, SHA256, "") == SHA256


@given(st.binary(max_size=300) | anything.map(json.dumps).map(str.encode))
@example(b"[" * 100_000 + b"]" * 100_000)
@example(b'{"stat": [' + b"9" * 5000 + b"]}")
@example(b'{"sha256": "' + b"0" * 3_000_000 + b'"}')
@example(b"")
@CASES
def test_any_bytes_as_a_stamp(file: Path, content: bytes) -> None:
    check(file, content, is_of_this_file=False)


@given(changes)
@example({"stat": [True, 0, 0, 0], "finite": True})
@example({"finite": 1})
@CASES
def test_a_stamp_with_other_fields(file: Path, changes: dict[str, Any]) -> None:
    right = {"stat": stat_of(file), "sha256": SHA256, "verified": "first use", "finite": True}
    changed = {**right, **changes}
    check(file, json.dumps(changed).encode(), is_of_this_file=changed["stat"] == right["stat"])


@given(st.lists(st.integers(-(2**70), 2**70), min_size=4, max_size=4))
@example([0, 0, 0, 0])
@CASES
def test_a_stamp_of_another_file(file: Path, stat: list[int]) -> None:
    content = {"stat": stat, "sha256": "0" * 64, "verified": "hub", "finite": True}
    check(file, json.dumps(content).encode(), is_of_this_file=stat == stat_of(file))
