"""Bytes from the Hub over a bad network: what it states of a file, and the file's blocks, tried again after pauses.

The client's own session is used, so that its tokens, proxies and certificates are. Blocks are asked for here, by ranges
over plain HTTP, because the client cannot resume after a killed process and waits as long as any Retry-After says.
"""

import errno
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from io import FileIO
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vitlite.errors import DownloadError

T = TypeVar("T")

TRIES = 5  # per request
FIRST_PAUSE = 0.5  # s; each pause is twice the one before, so four take 7.5 s
LONGEST_PAUSE = 60.0  # s; however long a server asks us to wait
BUSY = (408, 429, 500, 502, 503, 504)  # answers after which it is worth trying again
NO_ROUTE = (errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH)
BLOCKS = 32  # requests per file: a fault costs at most 1/32 of it again
SMALLEST_BLOCK = 1 << 18  # bytes

_log = getLogger("vitlite")
_seen_proxies: dict[str, str] | None = None


class RemoteFile(NamedTuple):
    """A file of a repository on the Hub."""

    repo: str
    filename: str
    revision: str

    def __str__(self) -> str:
        return f"{self.filename} of {self.repo}@{self.revision}"

    @property
    def url(self) -> str:
        """Where it can be downloaded, by hand too."""
        from huggingface_hub import hf_hub_url

        return str(hf_hub_url(self.repo, self.filename, revision=self.revision, endpoint=endpoint()))


class Statement(NamedTuple):
    """What the Hub states of a file, and the token to go on with."""

    commit: str
    etag: str  # the sha256 of a large file, git's own hash of a small one
    size: int
    token: bool | None  # as the client takes it: None is the user's, False is none


class AbsentError(DownloadError):
    """The Hub says that the repository has no such file."""

    def __init__(self, file: RemoteFile) -> None:
        super().__init__(
            f"{file.repo}@{file.revision} has no file {file.filename}.", python="Its page lists those it has."
        )


class UnreachableError(DownloadError):
    """The Hub did not say anything."""

    def __init__(self, file: RemoteFile, why: str) -> None:
        by_hand = f"Where there is a network, download {file.url} and use that file:"
        otherwise = "Or copy that machine's cache here. HF_ENDPOINT names a mirror."
        super().__init__(
            f"Cannot fetch {file}: {why}.",
            python=f"{by_hand} create(..., weights=PATH) or load(PATH). {otherwise}",
            command=f"{by_hand} --weights PATH or --model PATH. {otherwise}",
        )
        self.why = why


def endpoint() -> str:
    """The Hub's address, as the environment says now."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def transport_error() -> type[Exception]:
    """What the HTTP library raises: requests, httpx or httpx2, whose errors those of the Hub's client derive from."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


def ask_hub(file: RemoteFile, *, patient: bool) -> Statement:
    """What the Hub states of a file: its commit, hash and size.

    A refused token is left out and the question asked again: one that has expired must not lock out public weights.

    Args:
        file: The file, at a branch, tag or commit.
        patient: Whether to go on asking a Hub that is busy or silent.

    Raises:
        AbsentError: The repository has no such file.
        UnreachableError: There is no answer.
        DownloadError: The Hub refuses, or it is no Hub that answers.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers

    if _is_offline():
        raise UnreachableError(file, "HF_HUB_OFFLINE is set")
    _renew_client()
    tries = TRIES if patient else 1
    try:
        return _ask(file, tries, token=None)
    except HfHubHTTPError as error:
        status = error.response.status_code
        has_token = "authorization" in build_hf_headers()
        if status not in (401, 403) or not has_token:
            raise _explained(file, error) from error
    try:
        statement = _ask(file, tries, token=False)
    except HfHubHTTPError as error:
        raise _explained(file, error) from error
    _log.warning("The Hub refuses your token (HTTP %d); going on without it.", status)
    return statement


def finish_download(file: RemoteFile, statement: Statement, incomplete: Path) -> None:
    """Completes `incomplete`, going on from where an earlier call or process stopped.

    Blocks are written at their own offset: processes that do not see each other's lock (some network disks) can only
    write the same bytes twice.
    """
    from huggingface_hub.utils import tqdm

    incomplete.parent.mkdir(parents=True, exist_ok=True)
    incomplete.touch()
    size, have = statement.size, incomplete.stat().st_size
    _refuse_a_full_disk(incomplete.parent, size - have)
    bar = tqdm(total=size, initial=have, unit="B", unit_scale=True, desc=file.filename[-40:], disable=None)
    with bar, incomplete.open("r+b", buffering=0) as out:
        for offset, block in _missing_blocks(file, have, size, statement.token):
            _write(out, offset, block)
            bar.update(offset + len(block) - bar.n)
        os.fsync(out.fileno())


def _is_offline() -> bool:
    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return offline.upper() in ("1", "ON", "YES", "TRUE")


def _renew_client() -> None:
    """The client reads the proxy variables once; where they are others now, it has to start again."""
    global _seen_proxies
    from urllib.request import getproxies

    import huggingface_hub

    proxies = getproxies()
    if proxies == _seen_proxies:
        return
    if hasattr(huggingface_hub, "close_session"):  # before 1.0 there is none, and none is needed
        huggingface_hub.close_session()
    _seen_proxies = proxies


def _ask(file: RemoteFile, tries: int, token: bool | None) -> Statement:
    from huggingface_hub import get_hf_file_metadata

    timeout = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 10)
    send = partial(get_hf_file_metadata, file.url, token=token, timeout=timeout)
    stated = _with_retries(file, send, tries)
    etag = stated.etag or ""
    is_file_name = re.fullmatch(r"[\w.-]+", etag)  # which it becomes
    if stated.commit_hash is None or stated.size is None or not is_file_name:
        raise DownloadError(
            f"Cannot fetch {file}: {endpoint()} does not answer like a Hub (no commit, hash or size).",
            python="Check HF_ENDPOINT, your proxy, and whether the network wants a login.",
        )
    return Statement(stated.commit_hash, etag, stated.size, token)


def _explained(file: RemoteFile, error: Any) -> DownloadError:
    """The Hub's refusal, as an error that says what to do."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    is_elsewhere = isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError))
    if error.response.status_code == 404 and not is_elsewhere:
        return AbsentError(file)
    why = str(error).strip().partition("\n")[0]
    return DownloadError(
        f"Cannot fetch {file}: {why} ({file.url}).",
        python="Check the names of repository and revision. A private or gated repository needs its licence accepted, "
        "and a login: hf auth login, or HF_TOKEN.",
    )


def _refuse_a_full_disk(folder: Path, missing: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < missing:
        raise OSError(errno.ENOSPC, f"the disk is full ({missing:,} bytes to come, {free:,} free)")


def _missing_blocks(file: RemoteFile, have: int, size: int, token: bool | None) -> Iterator[tuple[int, bytes]]:
    """What comes after the first `have` bytes of a file, in blocks, each with its offset."""
    step = max(size // BLOCKS, SMALLEST_BLOCK)
    start = have
    while start < size:
        end = min(start + step, size)
        response = _with_retries(file, partial(_get_range, file, start, end, token), TRIES, was_reachable=True)
        if response.status_code == 200:  # the server knows no ranges, and sends the whole file
            start, end = 0, size
        block = response.content
        if len(block) != end - start:
            raise UnreachableError(file, f"{response.url} sent {len(block):,} bytes of {end - start:,}")
        yield start, block
        start = end


def _get_range(file: RemoteFile, start: int, end: int, token: bool | None) -> Any:
    """The answer to a request for the bytes from `start` up to `end`."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = build_hf_headers(token=token) | {"Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
    timeout = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or 10)
    response = get_session().get(file.url, headers=headers, timeout=timeout)
    hf_raise_for_status(response)
    return response


def _write(out: FileIO, offset: int, block: bytes) -> None:
    out.seek(offset)
    while block:  # on a disk that is nearly full, a write may be short
        written = out.write(block)
        block = block[written:]


def _with_retries(file: RemoteFile, send: Callable[[], T], tries: int, *, was_reachable: bool = False) -> T:
    """What `send` returns; tried again, with growing pauses, after 429, 5xx, timeouts and cut connections.

    Where no connection can be made at all there is no waiting, unless the Hub `was_reachable` a moment ago.
    """
    pause = 0.0
    while True:
        try:
            return send()
        except (OSError, transport_error()) as error:
            response = getattr(error, "response", None)
            if response is not None and response.status_code not in BUSY:
                raise
            why = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
            tries -= 1
            if tries == 0 or _is_hopeless(error, was_reachable):
                raise UnreachableError(file, f"{endpoint()} cannot be reached ({why})") from error
            pause = _next_pause(pause, response)
        _log.info("%s: %s; trying again in %.1f s.", file, why, pause)
        time.sleep(pause)


def _next_pause(pause: float, response: Any) -> float:
    """As long as the server asks for, else twice the pause before; in seconds."""
    asked = "" if response is None else response.headers.get("retry-after", "")
    seconds = float(asked) if asked.isdigit() else max(2 * pause, FIRST_PAUSE)
    return min(seconds, LONGEST_PAUSE)


def _is_hopeless(error: Exception, was_reachable: bool) -> bool:
    """Whether trying again makes no sense."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return True
    return _has_no_route(error) and not was_reachable


def _has_no_route(error: BaseException | None) -> bool:
    """Whether there is no way to the server: no such name, nobody who listens, no network."""
    while error is not None:
        if isinstance(error, socket.gaierror) or getattr(error, "errno", None) in NO_ROUTE:
            return True
        error = error.__cause__ or error.__context__
    return False
