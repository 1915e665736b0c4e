"""Pins: the bytes that a zoo name stands for, for this user, from the first verified download on."""

import json
from logging import getLogger
from pathlib import Path
from typing import NamedTuple

from vitlite.errors import DownloadError
from vitlite.weights.cache import state_folder, write_state
from vitlite.weights.stamps import Verified

_log = getLogger("vitlite")


class Pin(NamedTuple):
    """A file of a repository at one commit, its sha256, and who vouched for that."""

    repo: str
    filename: str
    commit: str
    sha256: str
    verified: Verified


def all_pins() -> dict[str, Pin]:
    """Every zoo name this user has downloaded, and the bytes it is pinned to."""
    pins = {}
    for name in sorted(path.stem for path in _pins_folder().glob("*.json")):
        pin = read_pin(name)
        if pin is not None:  # somebody may have removed it just now
            pins[name] = pin
    return pins


def read_pin(name: str) -> Pin | None:
    """The pin of a zoo name, where it has one.

    Raises:
        DownloadError: There is one, and it cannot be read.
    """
    path = _pin_path(name)
    try:
        return Pin(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DownloadError(
            f"Cannot read the pin {path}: {error}.", python="Delete it; the next download pins anew."
        ) from error


def write_pin(name: str, pin: Pin) -> None:
    """Pins a zoo name, or moves its pin."""
    before = read_pin(name)
    if pin == before:
        return
    write_state(_pin_path(name), pin._asdict())
    if before is not None and pin.commit != before.commit:
        _log.info("%s: the pin moved from %s to %s.", name, before.commit, pin.commit)


def _pin_path(name: str) -> Path:
    return _pins_folder() / f"{name}.json"


def _pins_folder() -> Path:
    return state_folder() / "pins"
