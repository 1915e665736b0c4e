"""What is known of a file on this disk: its sha256, who vouched for it, and whether its numbers are finite.

A file is hashed once. Its stamp keeps the answer, with the file's size, times and inode, until one of these changes.
Rot of the disk changes none of these, and a store through a memory map may not: see docs/weights.md.
"""

import errno
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from vitlite import schema
from vitlite.errors import DownloadError, shown
from vitlite.storage import state_folder
from vitlite.zoo.folders import in_whole_seconds, is_no_file, numbers_of, settled_stat, stat_of, write_state
from vitlite.zoo.remote import SHA256

# Who says that bytes are right: the caller's sha256, the hash that the Hub states, or nobody but what came first.
Verified = Literal["record", "hub", "first use"]

BLOCK = 1 << 20  # bytes read and hashed at once


class Stamp(NamedTuple):
    """What was found in a file, and what the file looked like then."""

    stat: list[int]  # as `disk.numbers_of`
    sha256: str
    verified: Verified = "first use"
    finite: bool = False  # whether all its tensors were scanned, and found finite


def is_sha256(value: object) -> bool:
    """Whether this is a sha256, as it is written everywhere here."""
    return isinstance(value, str) and SHA256.fullmatch(value) is not None


A_SHA256 = schema.Check("a sha256 of 64 hexadecimal digits", is_sha256)
STAMP = schema.table(
    {
        "stat": schema.several(schema.whole(-(2**63), 2**64), 4, 4),
        "sha256": A_SHA256,
        "verified": schema.one_of(*get_args(Verified)),
        "finite": schema.flag,
    },
    required=("stat", "sha256"),
)
LARGEST_STATE = 1 << 16  # bytes; pins and stamps have some 300

# Who says what the bytes should hash to, for an error.
ASKED = "The first is what was asked for."
STATED = "The first is what the Hub states."
REMEMBERED = "The first is what it was when it was last read: it has changed since."


class WrongBytesError(DownloadError):
    """A file that does not hash to what it should, and who says so."""

    def __init__(self, path: Path, expected: str, got: str, says_who: str) -> None:
        super().__init__(
            f"Wrong bytes in {shown(str(path), 1000)}: expected hash {expected}, got {got}. {says_who}",
            python="A copy in the cache is replaced by the next `vitlite download NAME`; a file of your own has to be "
            "fetched again, unless it was you who changed it. If fresh copies are wrong too, try another network or "
            "HF_ENDPOINT; if the Hub has new bytes for a zoo name, add --update.",
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
        raise WrongBytesError(path, sha256, stamp.sha256, ASKED)
    remember(path, stamp)
    return stamp.sha256


def check_again(path: Path, sha256: str | None, says_who: str) -> str:
    """The sha256 of a local file, hashed whatever its stamp says.

    Raises:
        DownloadError: The file cannot be read, or does not hash to `sha256`; where that is None, to what is remembered
            of it, which is then forgotten, so that a change is said once. `says_who` says who wants that hash.
    """
    found = hash_file(path)
    known = read_stamp(path) or found
    expected = sha256 or known.sha256
    if found.sha256 != expected:
        forget(path)
        raise WrongBytesError(path, expected, found.sha256, says_who)
    if known.sha256 == found.sha256:  # touched or copied, but the same
        found = known._replace(stat=found.stat)
    remember(path, found)
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
        if is_no_file(path):  # who opens a pipe may wait for ever
            raise FileNotFoundError(errno.ENOENT, "It is no file")
        return Stamp(numbers_of(settled_stat(path)), _digest(path, hashlib.sha256()))
    except OSError as error:
        raise DownloadError(
            f"Cannot read {shown(str(path))}: {error.strerror}.", python="Check the path and its permissions."
        ) from None


def git_hash(path: Path) -> str:
    """What git calls the content of a file, and the Hub too where the file is small."""
    header = b"blob %d\0" % path.stat().st_size
    return _digest(path, hashlib.sha1(header, usedforsecurity=False))


def read_stamp(path: Path) -> Stamp | None:
    """What is remembered of a file, even if the file has changed since."""
    try:
        content = schema.read_json(_stamp_path(path), STAMP, most_bytes=LARGEST_STATE, error=DownloadError)
    except DownloadError:  # a stamp that cannot be read is none
        return None
    return Stamp(**{field: content[field] for field in Stamp._fields if field in content})


def remember(path: Path, stamp: Stamp) -> None:
    """Keeps a stamp, unless the file has changed meanwhile, or it is kept already."""
    with suppress(OSError):  # it is gone meanwhile
        if stamp != read_stamp(path) and stamp.stat == stat_of(path):
            write_state(_stamp_path(path), stamp._asdict())


def forget(path: Path) -> None:
    """Removes what is remembered of a file, so that it is hashed before its next use."""
    with suppress(OSError):
        _stamp_path(path).unlink(missing_ok=True)


def _fresh_stamp(path: Path) -> Stamp | None:
    """The stamp of a file that has not changed since; None where that cannot be known, or VITLITE_VERIFY is set.

    Where times are whole seconds, all files of a disk's image may have been given the same, and so may the next image
    that is mounted there.
    """
    stamp = None if _bytes_are_wanted() else read_stamp(path)
    with suppress(OSError):  # it is gone meanwhile
        stat = path.stat()
        if stamp is not None and stamp.stat == numbers_of(stat) and not in_whole_seconds(stat):
            return stamp
    return None


def _bytes_are_wanted() -> bool:
    """Whether to look at the bytes each time."""
    wish = os.environ.get("VITLITE_VERIFY") or ""
    if wish not in ("", "always"):
        raise DownloadError(f"VITLITE_VERIFY is {shown(repr(wish))}.", python="Set it to always, or do without it.")
    return wish == "always"


def _stamp_path(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return state_folder() / "stamps" / f"{name}.json"


def _digest(path: Path, digest: Any) -> str:
    """The hex digest of a file's content, read in blocks."""
    block = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return str(digest.hexdigest())
