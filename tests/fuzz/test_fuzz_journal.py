"""Any journal that an interrupted run may have left, or somebody else: it goes on rightly, or one error names it."""

import json
import os
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vitlite.errors import InputError
from vitlite.inference.journal import Journal, Picture

CASES = int(os.environ.get("VITLITE_FUZZ", "50"))
RUN = {"sha256": "ab", "dtype": None}
PICTURES = [Picture(f"{i}.png", i, i, i, i) for i in range(4)]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
pictures = st.lists(st.tuples(st.text() | json_values, st.integers() | json_values, *[st.integers()] * 3))
lines = st.fixed_dictionaries(
    {},
    optional={
        "pictures": pictures | json_values,
        "vectors": st.sampled_from(["", "AACAPw==", "AACAPwAAgD8=", "*"]) | json_values,
        "broken": st.lists(st.text()) | json_values,
    },
)


def good(folder: Path) -> bytes:
    """A journal of two batches."""
    with Journal(folder / "good.npz", RUN) as journal:
        for i in (0, 2):
            journal.add(PICTURES[i : i + 2], struct.pack("<4f", i, i, i + 1, i + 1), ["broken.png"])
    content = journal.path.read_bytes()
    journal.path.unlink()
    return content


def check(content: bytes) -> None:
    """Goes on from a journal with this content: it is refused and left as it is, or the file is right."""
    with TemporaryDirectory() as name:
        target, partial = Path(name, "out.npz"), Path(name, "out.npz.partial")
        partial.write_bytes(content)
        try:
            with Journal(target, RUN) as journal:
                for picture in journal.missing(PICTURES):
                    number = int(picture.path[0])
                    journal.add([picture], struct.pack("<2f", number, number))
                assert journal.finish(PICTURES, {}) == 4
        except InputError as error:
            said = str(error)
        if not target.exists():
            assert str(partial) in said
            assert len(said) < 2000
            assert said.isprintable()
            assert partial.read_bytes().startswith(content[: content.rfind(b"\n") + 1])
            return
        with np.load(target) as arrays:
            assert arrays["paths"].tolist() == [picture.path for picture in PICTURES]
            assert arrays["vectors"].shape == (4, 2)


fuzzed = settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))


@fuzzed
@given(st.binary(max_size=300))
@example(b"\0" * 100)
@example(b'{"sha256": "ab", "dtype": null}')
@example(b"[" * 100_000 + b"\n")
@example(b"1" * 5000 + b"\n")
def test_any_bytes(content: bytes) -> None:
    check(content)


@fuzzed
@given(st.lists(lines | json_values, max_size=3), st.booleans())
def test_any_lines_behind_the_first(records: list[Any], torn: bool) -> None:
    content = "".join(json.dumps(record) + "\n" for record in [RUN, *records]).encode()
    check(content[:-1] if torn else content)


@fuzzed
@given(st.data())
def test_a_good_one_with_bytes_changed(data: st.DataObject) -> None:
    with TemporaryDirectory() as name:
        content = bytearray(good(Path(name)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["change", "cut", "insert"]))
        if kind == "change":
            content[place] = data.draw(st.integers(0, 255))
        elif kind == "cut" and place:
            del content[place:]
        else:
            content[place:place] = data.draw(st.binary(max_size=5))
    check(bytes(content))
