"""A record or a repo id -> a verified local file."""

from pathlib import Path
from typing import Literal, NamedTuple

Verified = Literal["record", "hub", "first use"]


class Fetched(NamedTuple):
    """A file whose bytes were checked, and what they were checked against.

    `verified` is "record" (the sha256 the caller gave), "hub" (the hash the Hub states for the file), or
    "first use" (nobody states one; what came first is remembered and compared from then on).
    """

    path: Path
    commit: str | None
    sha256: str
    verified: Verified


class Pin(NamedTuple):
    """The bytes a zoo name stands for, for this user: set by the first verified download."""

    repo: str
    filename: str
    commit: str
    sha256: str
    verified: Verified


def fetch(
    repo: str,
    filename: str,
    *,
    revision: str | None = None,
    sha256: str | None = None,
    pin: str | None = None,
    update: bool = False,
) -> Fetched:
    """Hand over a repository's file from the cache or the Hub, its bytes verified.

    Args:
        repo: "owner/name".
        filename: Path within the repository.
        revision: Branch, tag or commit; None is "main". With a full commit hash and a warm cache no socket is opened.
        sha256: What the file must hash to. None: what the pin, else the Hub, states.
        pin: A zoo name. Its first verified download is remembered, and later calls hand over those bytes.
        update: Forget the pin, ask the Hub, and pin what it has now (compare `pins()` before and after).

    Raises:
        DownloadError: The file is not there, cannot be fetched, or its bytes are wrong. The text says what to do.
    """
    raise NotImplementedError


def fetch_optional(repo: str, filename: str, *, revision: str | None = None) -> Fetched | None:
    """Like `fetch`, for a file that a repository may lack; None means that the Hub says it is not there.

    Not knowing (no network, nothing cached) is a DownloadError, as in `fetch`. Pass the weights' `Fetched.commit` as
    `revision`, so that all files are of one commit.
    """
    raise NotImplementedError


def check_file(path: Path | str, sha256: str | None = None) -> str:
    """The sha256 of a local file; hashed once, then remembered by its stamp until the file changes.

    Raises:
        DownloadError: The file cannot be read, or does not hash to `sha256` (when given).
    """
    raise NotImplementedError


def is_scanned(path: Path | str) -> bool:
    """Whether every tensor of this very file was found finite before, so that the scan may be skipped.

    Always False with VITLITE_VERIFY=always. A file never seen by `fetch` or `check_file` is not scanned.
    """
    raise NotImplementedError


def mark_scanned(path: Path | str) -> None:
    """Remember that every tensor of this file is finite; after `fetch` or `check_file` and a scan without finds."""
    raise NotImplementedError


def verify(target: Path | str) -> Fetched:
    """Hash a file again whatever its stamp says: a pinned zoo name, or the path of a file.

    Raises:
        DownloadError: Not here, or its bytes are not those pinned or remembered. Text: path, expected, got, what to do.
    """
    raise NotImplementedError


def pins() -> dict[str, Pin]:
    """Every zoo name this user has downloaded, and the bytes it is pinned to."""
    raise NotImplementedError


def cache_folder() -> Path:
    """Where weights are kept: VITLITE_CACHE/hub, else the Hub's own cache, as the environment says now."""
    raise NotImplementedError
