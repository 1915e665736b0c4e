"""Any bytes as a pin: the pin they are, or one error that names the file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vitlite.errors import DownloadError
from vitlite.zoo.pins import Pin, pin_path, read_pin
from vitlite.zoo.remote import COMMIT, SHA256, is_path, is_repo

CASES = settings(
    max_examples=int(os.environ.get("VITLITE_FUZZ", "50")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
GOOD = {"repo": "a/b", "filename": "c", "commit": "0" * 40, "sha256": "1" * 64, "verified": "hub"}
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner), max_leaves=9
)
fields = st.dictionaries(st.sampled_from([*GOOD, "more", ""]), anything)
documents = st.one_of(
    anything.map(json.dumps).map(str.encode),
    fields.map(lambda changes: json.dumps({**GOOD, **changes}).encode()),
    st.binary(max_size=400),
    st.tuples(st.integers(0, 200), st.binary(max_size=4)).map(lambda cut: _spoilt(*cut)),
)


def _spoilt(at: int, inserted: bytes) -> bytes:
    """A good pin, with something put over a place in it."""
    content = json.dumps(GOOD).encode()
    return content[:at] + inserted + content[at + len(inserted) :]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path))
    (tmp_path / "pins").mkdir()
    return tmp_path


@given(documents)
@example(b"[" * 100_000 + b"]" * 100_000)
@example(b'{"repo": ' + b"9" * 5000 + b"}")
@example(b'{"repo": "' + b"a" * 3_000_000 + b'"}')
@example(json.dumps({**GOOD, "repo": "../../evil"}).encode())
@example(json.dumps({**GOOD, "commit": "\x1b[31m"}).encode())
@example(b"")
@CASES
def test_a_pin_is_one_or_an_error(cache: Path, content: bytes) -> None:
    path = pin_path("vit")
    path.write_bytes(content)
    try:
        pin = read_pin("vit")
    except DownloadError as error:
        text = str(error)
        assert str(path) in text
        assert text.isprintable()
        assert len(text) < 1500
    else:
        assert pin is not None
        assert is_right(pin)
        assert pin._asdict() == {name: json.loads(content)[name] for name in GOOD}


def is_right(pin: Pin) -> Any:
    """Whether paths and URLs may be made of it."""
    hashes = COMMIT.fullmatch(pin.commit) and SHA256.fullmatch(pin.sha256)
    return is_repo(pin.repo) and is_path(pin.filename) and hashes and pin.verified in ("record", "hub", "first use")
