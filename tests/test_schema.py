"""What others wrote is what its schema says, or one error that names the file and the field."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitlite.errors import CheckpointError, TrainError, closest, shown
from vitlite.schema import (
    Check,
    anything,
    by_name,
    either,
    flag,
    null,
    number,
    one_of,
    optional,
    parse_json,
    read_json,
    several,
    table,
    text,
    whole,
)

SIDE = whole(1, 4096)
SCHEMA = table(
    {
        "size": either(SIDE, several(SIDE, 2, 2)),
        "eps": number(0, 1),
        "labels": optional(either(several(text(20), most=3), by_name(text(20), most=3))),
        "inner": table({"on": flag, "kind": one_of("a", "b", 3)}, required=("on",)),
        "none": null,
        "rest": anything,
    }
)


@pytest.mark.parametrize("value", [
    {}, {"size": 1}, {"size": [4, 4096]}, {"eps": 1}, {"eps": 0.5}, {"labels": None}, {"labels": ["a", "b"]},
    {"labels": {"0": "a"}}, {"inner": {"on": True, "kind": 3}}, {"none": None, "rest": [[{}]], "other": 5},
])  # fmt: skip
def test_what_fits_is_given_as_it_is(value: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "a.json", SCHEMA) == value


@pytest.mark.parametrize(("value", "said"), [
    ([], "it must be a table, got []."),
    ({"size": True}, "size must be a whole number from 1 to 4096 or a list of 2, got True."),
    ({"size": [1, 2, 3]}, "size must be a whole number from 1 to 4096 or a list of 2, got [1, 2, 3]."),
    ({"size": [1, 2.0]}, "size[1] must be a whole number from 1 to 4096, got 2.0."),
    ({"eps": "1"}, "eps must be a number from 0 to 1, got '1'."), ({"eps": 1.5}, "eps must be a number from 0 to 1"),
    ({"eps": float("nan")}, "eps must be a number from 0 to 1, got nan."),
    ({"eps": float("inf")}, "eps must be a number from 0 to 1, got inf."),
    ({"labels": ["a"] * 4}, "labels must be a list of 0 to 3 or a table of at most 3 or null, got ['a', 'a', 'a', "),
    ({"labels": ["x" * 21]}, "labels[0] must be a text of at most 20 letters, got 'xxxxxxxxxxxxxxxxxxxxx'."),
    ({"labels": {"7": 7}}, "labels.7 must be a text of at most 20 letters, got 7."),
    ({"labels": ["\ud800"]}, "labels[0] must be a text of at most 20 letters, got '\\ud800'."),
    ({"inner": {}}, "inner must be a table with on, got {}."),
    ({"inner": {"on": 1}}, "inner.on must be true or false, got 1."),
    ({"inner": {"on": True, "kind": 3.0}}, "inner.kind must be one of 'a', 'b', 3, got 3.0."),
    ({"none": 0}, "none must be null, got 0."),
])  # fmt: skip
def test_what_does_not_fit_is_named_with_its_place(value: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(value))
    with pytest.raises(TrainError) as error:
        read_json(tmp_path / "a.json", SCHEMA, error=TrainError)
    assert str(error.value).startswith(f"{tmp_path / 'a.json'}: {said}")
    assert error.value.__context__ is None


@pytest.mark.parametrize(("content", "said"), [
    (b"", "cannot be read as JSON"), (b"{", "cannot be read as JSON"), (b"\xff\xfe\x00", "cannot be read as JSON"),
    (b"[" * 100_000, "it is nested too deeply"), (b"[" * 40 + b"]" * 40, "it is nested too deeply"),
    (b"1" * 5000, "cannot be read as JSON"), (b'{"a": ' + b" " * 2000 + b"1}", "is larger than 1000 bytes"),
])  # fmt: skip
def test_what_is_no_json_or_too_much(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as error:
        read_json(tmp_path / "a.json", anything, most_bytes=1000 if "larger" in said else 10**6)
    assert str(tmp_path / "a.json") in str(error.value)


def test_what_is_not_there_or_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")  # who opens it waits for ever
    for path in (tmp_path, tmp_path / "none.json", tmp_path / "pipe.json"):
        with pytest.raises(CheckpointError, match=rf"{path} cannot be read: \w+"):
            read_json(path, anything)


def test_no_more_is_read_than_allowed(tmp_path: Path) -> None:
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate(2**33)  # without taking room on the disk
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="is larger than"):
        read_json(tmp_path / "a.json", anything)
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()


def test_errors_are_short_and_show_what_does_not_show() -> None:
    for value in ("x" * 10**6, {"y" * 10**6: 1}, ["\x1b[31m\u202e" * 1000], 10**4000):
        with pytest.raises(CheckpointError) as error:
            parse_json(json.dumps(value), flag, "evil\x1b[2J.json" * 100)
        said = str(error.value)
        assert len(said) < 700
        assert said.isprintable()
    with pytest.raises(CheckpointError) as error:
        parse_json(json.dumps({"z\n" * 10**5: 1}), by_name(flag), "a.json")
    assert len(str(error.value)) < 500
    assert str(error.value).isprintable()


def test_shown() -> None:
    assert shown("Grüße, 猫") == "Grüße, 猫"
    assert shown("a\tb\r\n\0\x1b\u202e\ud800") == r"a\tb\r\n\x00\x1b\u202e\ud800"
    assert shown("x" * 300, most=10) == "xxxxxxxxxx... (300 letters)"
    assert closest("heads" * 10**6, ["heads"]) == ""
    assert closest("head\x1b", ["head\x1b[2J"]) == r" Did you mean head\x1b[2J?"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["on", "a", 1, 0.5]),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["size", "labels", "inner", "on", "7"]), inner),
)


@given(JSON, st.sampled_from([SCHEMA, several(SCHEMA), by_name(either(SIDE, flag, SCHEMA))]))
def test_any_json_is_taken_or_one_error(value: Any, check: Check) -> None:
    try:
        assert repr(parse_json(json.dumps(value), check, "a.json")) == repr(value)
    except CheckpointError as error:
        said = str(error)
    else:
        said = "a.json: "
    assert said.startswith("a.json: ")


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_one_error(content: bytes) -> None:
    said = "a.json"
    try:
        parse_json(content, SCHEMA, "a.json")
    except CheckpointError as error:
        said = str(error)
    assert said.startswith("a.json")
