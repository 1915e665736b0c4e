"""JSON that others wrote, checked once, where it is read: size, nesting, types, ranges, lengths.

A `Check` says what a value shall be; a `table` of them is the schema of a file. What passes `read_json` needs no second
look; what fails is one error, which names the file and the field.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlite.errors import CheckpointError, VitliteError, shown

MOST_BYTES = 16 * 2**20  # of a JSON file; the names of ImageNet-21k's classes take 2 of them
DEEPEST = 32  # tables and lists within each other
LONGEST_TEXT = 10_000  # letters, where a check says nothing else
LARGEST = 2**53  # of whole numbers: all below it are exact in every JSON reader

Part = tuple[str, Any, "Check"]  # of a value: where it stands in it, and what it shall be


@dataclass(frozen=True)
class Check:
    """What a value shall be: in words, by a question, and the parts that have checks of their own."""

    wanted: str
    fits: Callable[[Any], bool]
    parts: Callable[[Any], Iterator[Part]] = lambda value: iter(())


def verify(value: Any, check: Check, place: str = "", *, error: type[VitliteError] = CheckpointError) -> None:
    """Makes sure that a value, and every part of it, is what a check says; `place` says where it is from, if known.

    Raises:
        VitliteError: It is not; by the first part that is not.
    """
    for name, part, its_check in _with_parts("", value, check):
        if not its_check.fits(part):
            where = f"{shown(place)}: " if place else ""
            raise error(f"{where}{shown(name) or 'it'} must be {its_check.wanted}, got {shown(repr(part))}.")


def _with_parts(name: str, value: Any, check: Check) -> Iterator[Part]:
    """A value, and where it fits its check all that is in it."""
    yield name, value, check
    if check.fits(value):
        for part_name, part, its_check in check.parts(value):
            inner = f"{name}{part_name}" if part_name.startswith("[") else f"{name}.{part_name}".lstrip(".")
            yield from _with_parts(inner, part, its_check)


def read_json(
    path: Path, check: Check, *, most_bytes: int = MOST_BYTES, error: type[VitliteError] = CheckpointError
) -> Any:
    """What a JSON file holds, once it is known to be what `check` says.

    Raises:
        VitliteError: It cannot be read, is too large or too deep, or holds something else; of the kind `error`.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # who opens a pipe may wait for ever
        raise error(f"{shown(str(path))} cannot be read: it is no file.")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size  # to ask for the most costs milliseconds of memory
            content = file.read(min(size, most_bytes) + 1)
    except OSError as problem:
        reason = "it is a link that leads nowhere" if os.path.islink(path) else problem.strerror
        raise error(f"{shown(str(path))} cannot be read: {reason}.") from None
    return parse_json(content, check, str(path), most_bytes=most_bytes, error=error)


def parse_json(
    content: bytes | str,
    check: Check,
    place: str,
    *,
    most_bytes: int = MOST_BYTES,
    error: type[VitliteError] = CheckpointError,
) -> Any:
    """The same for JSON that is in memory already, such as a line of a file; `place` says where it is from.

    >>> parse_json('{"epoch": -1}', table({"epoch": whole(least=0)}), "state.json")
    Traceback (most recent call last):
    vitlite.errors.CheckpointError: state.json: epoch must be a whole number from 0 to 9007199254740992, got -1.
    """
    if len(content) > most_bytes:
        raise error(
            f"{shown(place)} is larger than {most_bytes} bytes, which is the most that vitlite reads of such a file."
        )
    try:
        value = json.loads(content)
        _refuse_depth(value)
    except (ValueError, RecursionError) as problem:  # also text that is not UTF-8, and numbers of thousands of digits
        reason = "it is nested too deeply" if isinstance(problem, RecursionError) else shown(str(problem))
        text = f"{shown(place)} cannot be read as JSON: {reason}. It is damaged, cut short, or something else."
        raise error(text) from None
    verify(value, check, place, error=error)
    return value


def _refuse_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        level = inner
    if level:
        raise RecursionError


# ---- values


anything = Check("anything", lambda value: True)
null = Check("null", lambda value: value is None)
flag = Check("true or false", lambda value: type(value) is bool)


def whole(least: int = 0, most: int = LARGEST) -> Check:
    """A whole number in a range."""
    return Check(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


def number(least: float = -1e300, most: float = 1e300) -> Check:
    """A number in a range, whole or not, and finite."""
    return Check(
        f"a number from {least:g} to {most:g}", lambda value: type(value) in (int, float) and least <= value <= most
    )


def text(most: int = LONGEST_TEXT) -> Check:
    """A text of bounded length that can be written out again."""
    return Check(f"a text of at most {most} letters", lambda value: _is_text(value) and len(value) <= most)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def one_of(*values: Any) -> Check:
    """One of these values, of the same type."""
    return Check(
        f"one of {', '.join(map(repr, values))}",
        lambda value: any(type(value) is type(valid) and value == valid for valid in values),
    )


# ---- what is made of values


def several(of: Check, least: int = 0, most: int = 1_000_000) -> Check:
    """A list, each entry of which is what `of` says."""

    def parts(value: list[Any]) -> Iterator[Part]:
        return ((f"[{i}]", entry, of) for i, entry in enumerate(value))

    count = f"{least}" if least == most else f"{least} to {most}"
    return Check(f"a list of {count}", lambda value: isinstance(value, list) and least <= len(value) <= most, parts)


def by_name(of: Check, most: int = 1_000_000) -> Check:
    """A table with any names, each value of which is what `of` says."""

    def parts(value: dict[str, Any]) -> Iterator[Part]:
        return ((name, entry, of) for name, entry in value.items())

    return Check(f"a table of at most {most}", lambda value: isinstance(value, dict) and len(value) <= most, parts)


def table(fields: Mapping[str, Check], required: tuple[str, ...] = ()) -> Check:
    """A table in which these fields, where they are there, are what is said; others are not looked at."""

    def parts(value: dict[str, Any]) -> Iterator[Part]:
        return ((name, value[name], check) for name, check in fields.items() if name in value)

    wanted = f"a table with {', '.join(required)}" if required else "a table"
    return Check(wanted, lambda value: isinstance(value, dict) and all(name in value for name in required), parts)


def either(*checks: Check) -> Check:
    """What the first of these checks says that a value fits."""

    def parts(value: Any) -> Iterator[Part]:
        return next(check for check in checks if check.fits(value)).parts(value)

    wanted = " or ".join(check.wanted for check in checks)
    return Check(wanted, lambda value: any(check.fits(value) for check in checks), parts)


def optional(check: Check) -> Check:
    """What a check says, or null."""
    return either(check, null)
