"""Pins: the bytes that a zoo name stands for, for this user, from the first verified download on."""

import re
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import NamedTuple, get_args

from vitlite import schema
from vitlite.errors import DownloadError
from vitlite.storage import state_folder
from vitlite.zoo.folders import write_state
from vitlite.zoo.remote import COMMIT, is_path, is_repo
from vitlite.zoo.stamps import A_SHA256, LARGEST_STATE, Verified

_log = getLogger("vitlite")
_NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)  # of a model; others have no pin

PIN = schema.table(
    fields := {
        "repo": schema.Check("a repository of the Hub, owner/name", is_repo),
        "filename": schema.Check("the path of a file in a repository", is_path),
        "commit": schema.Check(
            "a commit of 40 hexadecimal digits", lambda value: isinstance(value, str) and bool(COMMIT.fullmatch(value))
        ),
        "sha256": A_SHA256,
        "verified": schema.one_of(*get_args(Verified)),
    },
    required=tuple(fields),
)


def is_name(name: object) -> bool:
    """Whether this can be the name of a model, and so of its pin."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


class Pin(NamedTuple):
    """A file of a repository at one commit, its sha256, and who vouched for that."""

    repo: str
    filename: str
    commit: str
    sha256: str
    verified: Verified


def pinned_names() -> list[str]:
    """Every zoo name this user has downloaded."""
    return sorted(path.stem for path in _folder().glob("*.json") if path.is_file() and is_name(path.stem))


def all_pins() -> dict[str, Pin]:
    """Every zoo name this user has downloaded, and the bytes it is pinned to.

    Raises:
        DownloadError: One of the pins cannot be read.
    """
    pins = {name: read_pin(name) for name in pinned_names()}
    return {name: pin for name, pin in pins.items() if pin is not None}  # somebody may have removed it just now


def read_pin(name: str) -> Pin | None:
    """The pin of a zoo name, where it has one.

    Raises:
        DownloadError: There is one, and it cannot be read, or is not what a pin is.
    """
    if not is_name(name):
        return None
    path = pin_path(name)
    if not path.exists():
        return None
    try:
        content = schema.read_json(path, PIN, most_bytes=LARGEST_STATE, error=DownloadError)
    except DownloadError as error:
        raise DownloadError(
            f"The pin of {name} cannot be used. {error.text}",
            python=f"Delete it, and the next download pins anew; or pin what the Hub has now: "
            f"`vitlite download {name} --update`.",
        ) from None
    return Pin(**{field: content[field] for field in Pin._fields})


def write_pin(name: str, pin: Pin, *, update: bool = False) -> None:
    """Pins a zoo name, or moves its pin. With `update` also one that cannot be read.

    Raises:
        DownloadError: It was to be moved, and cannot be written.
    """
    before = pin_before(name, update)
    if pin == before:
        return
    problem = write_state(pin_path(name), pin._asdict())
    if problem is not None and update:
        raise DownloadError(
            f"The pin of {name} cannot be moved: {problem}.",
            python="Set VITLITE_CACHE to a folder that can be written.",
        )
    if problem is not None:
        _log.warning("%s is not pinned, because its pin cannot be written: %s.", name, problem)
    elif before is not None and pin.commit != before.commit:
        level = INFO if update else WARNING  # without: because vitlite's table names other bytes now
        _log.log(level, "%s: the pin moved from %s to %s.", name, before.commit, pin.commit)


def pin_before(name: str, update: bool) -> Pin | None:
    """The pin of a name; one that cannot be read counts as none where it is to be replaced anyway."""
    try:
        return read_pin(name)
    except DownloadError:
        if update:
            return None
        raise


def pin_path(name: str) -> Path:
    """Where the pin of a name is kept."""
    return _folder() / f"{name}.json"


def _folder() -> Path:
    return state_folder() / "pins"
