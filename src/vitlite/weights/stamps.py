"""What is known of a file on this disk: its sha256, who vouched for it, and whether its numbers are finite.

A file is hashed once. Its stamp keeps the answer, with the file's size, times and inode, until one of these changes.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitlite.errors import DownloadError
from vitlite.weights.cache import state_folder, write_state

# Who says that bytes are right: the caller's sha256, the hash that the Hub states, or nobody but what came first.
Verified = Literal["record", "hub", "first use"]

CLOCK_TICK = 0.02  # s; a file system's clock may stand still as long as this
BLOCK = 1 << 20  # bytes read and hashed at once


class Stamp(NamedTuple):
    """What was found in a file, and what the file looked like then."""

    stat: list[int]  # size, mtime_ns, ctime_ns, inode
    sha256: str
    verified: Verified = "first use"
    finite: bool = False  # whether all its tensors were scanned, and found finite


class WrongBytesError(DownloadError):
    """A file that does not hash to what it should."""

    def __init__(self, path: Path, expected: str, got: str) -> None:
        super().__init__(
            f"Wrong bytes in {path}: expected hash {expected}, got {got}.",
            python="A copy in the cache is replaced by the next `vitlite download NAME`; a file of your own has to be "
            "fetched again. If fresh copies are wrong too, try another network or HF_ENDPOINT; if the Hub has new "
            "bytes for a zoo name, add --update.",
        )
        self.path = path


def check_file(path: Path | str, sha256: str | None = None) -> str:
    """The sha256 of a local file; hashed once, then remembered by its stamp until the file changes.

    Raises:
        DownloadError: The file cannot be read, or does not hash to `sha256` (when given).
    """
    path = Path(path)
    stamp = stamp_of(path)
    if sha256 is not None and sha256 != stamp.sha256:
        raise WrongBytesError(path, sha256, stamp.sha256)
    remember(path, stamp)
    return stamp.sha256


def check_again(path: Path, sha256: str | None = None) -> str:
    """The sha256 of a local file, hashed whatever its stamp says.

    Raises:
        DownloadError: The file cannot be read, or does not hash to `sha256`; where that is None, to what is remembered
            of this unchanged file.
    """
    found, known = hash_file(path), read_stamp(path)
    if known is None or known.stat != found.stat:  # changed since: what was known then is not of these bytes
        known = found
    expected = sha256 or known.sha256
    if found.sha256 != expected:
        forget(path)
        raise WrongBytesError(path, expected, found.sha256)
    remember(path, known)
    return found.sha256


def is_scanned(path: Path | str) -> bool:
    """Whether every tensor of this very file was found finite before, so that the scan may be skipped.

    Always False with VITLITE_VERIFY=always. A file never seen by `hub.fetch` or `check_file` is not scanned.
    """
    stamp = _fresh_stamp(Path(path))
    return stamp is not None and stamp.finite


def mark_scanned(path: Path | str) -> None:
    """Remembers that every tensor of this file is finite; after `hub.fetch` or `check_file`, and a scan."""
    path = Path(path)
    stamp = _fresh_stamp(path)
    if stamp is not None:
        remember(path, stamp._replace(finite=True))


def stamp_of(path: Path) -> Stamp:
    """The stamp of a file as it is now; hashed only where none is remembered."""
    stamp = _fresh_stamp(path)
    return hash_file(path) if stamp is None else stamp


def hash_file(path: Path) -> Stamp:
    """A new stamp of a file, whatever is remembered of it."""
    try:
        _let_the_clock_tick(path)
        return Stamp(stat_of(path), _digest(path, hashlib.sha256()))
    except OSError as error:
        raise DownloadError(f"Cannot read {path}: {error}.", python="Check the path and its permissions.") from error


def git_hash(path: Path) -> str:
    """What git calls the content of a file, and the Hub too where the file is small."""
    header = b"blob %d\0" % path.stat().st_size
    return _digest(path, hashlib.sha1(header, usedforsecurity=False))


def stat_of(path: Path) -> list[int]:
    """What changes when a file does, in the order of `Stamp.stat`."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def read_stamp(path: Path) -> Stamp | None:
    """What is remembered of a file, even if the file has changed since."""
    try:
        return Stamp(**json.loads(_stamp_path(path).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def remember(path: Path, stamp: Stamp) -> None:
    """Keeps a stamp, unless the file has changed meanwhile, or it is kept already."""
    if stamp != read_stamp(path) and stamp.stat == stat_of(path):
        write_state(_stamp_path(path), stamp._asdict())


def forget(path: Path) -> None:
    """Removes what is remembered of a file, so that it is hashed before its next use."""
    with suppress(OSError):
        _stamp_path(path).unlink(missing_ok=True)


def _fresh_stamp(path: Path) -> Stamp | None:
    """The stamp of a file that has not changed since; None where VITLITE_VERIFY says to look at the bytes."""
    if os.environ.get("VITLITE_VERIFY") == "always":
        return None
    stamp = read_stamp(path)
    if stamp is None or not path.exists() or stamp.stat != stat_of(path):
        return None
    return stamp


def _stamp_path(path: Path) -> Path:
    name = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:32]
    return state_folder() / "stamps" / f"{name}.json"


def _let_the_clock_tick(path: Path) -> None:
    """A second change within one tick of the clock would leave the times as they are, and not show."""
    age = time.time() - path.stat().st_ctime
    if 0 <= age < CLOCK_TICK:
        time.sleep(CLOCK_TICK - age)


def _digest(path: Path, digest: Any) -> str:
    """The hex digest of a file's content, read in blocks."""
    block = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return str(digest.hexdigest())
