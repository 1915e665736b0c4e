"""Bytes from the Hub over a bad network: what it states of a file, and the file's blocks.

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
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vitlite.errors import DownloadError

T = TypeVar("T")

_log = getLogger("vitlite")
_BUSY = (408, 429, 500, 502, 503, 504)
_TRIES = 5  # per request, with pauses of 0.5, 1, 2 and 4 s between
_LONGEST_PAUSE = 60.0  # s; however long a server asks us to wait
_BLOCKS = 32  # requests per file: a fault costs at most 1/32 of it again
_SMALLEST_BLOCK = 1 << 18
_NO_ROUTE = (errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH)
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


class AbsentError(DownloadError):
    """The Hub says that the repository has no such file."""

    def __init__(self, file: RemoteFile):
        super().__init__(f"{file.repo}@{file.revision} has no file {file.filename}. Its page lists those it has.")


class UnreachableError(DownloadError):
    """The Hub did not say anything."""

    def __init__(self, file: RemoteFile, why: str):
        super().__init__(
            f"Cannot fetch {file}: {why}. Where there is a network, download {file.url} and use that file: "
            "create(..., weights=PATH) or load(PATH). Or copy that machine's cache here. HF_ENDPOINT names a mirror."
        )
        self.why = why


def endpoint() -> str:
    """The Hub's address, as the environment says now."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def transport_error() -> type[Exception]:
    """What the HTTP library raises: requests, httpx or httpx2, whose errors those of the Hub's client derive from."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


def ask(file: RemoteFile, *, again: bool, token: bool | None = None) -> tuple[Any, bool | None]:
    """The commit, hash and size the Hub states for a file, and the token to go on with (None: the user's, False: none).

    A refused token is left out and the question asked again: one that has expired must not lock out public weights.
    `again`: whether to go on asking a Hub that is busy or silent.
    """
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import build_hf_headers

    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    if offline.upper() in ("1", "ON", "YES", "TRUE"):
        raise UnreachableError(file, "HF_HUB_OFFLINE is set")
    _renew_client()
    timeout = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 10)
    tries = _TRIES if again else 1
    try:
        remote = _patiently(file, lambda: get_hf_file_metadata(file.url, token=token, timeout=timeout), tries)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403) and token is None and "authorization" in build_hf_headers():
            with suppress(HfHubHTTPError):
                answer = ask(file, again=again, token=False)
                _log.warning("The Hub refuses your token (HTTP %d); going on without it.", status)
                return answer
        if status == 404 and not isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError)):
            raise AbsentError(file) from error
        why = str(error).strip().partition("\n")[0]
        raise DownloadError(
            f"Cannot fetch {file}: {why} ({file.url}). Check the names of repository and revision. A private or gated "
            "repository needs its licence accepted, and a login: hf auth login, or HF_TOKEN."
        ) from error
    if None in (remote.commit_hash, remote.size) or not re.fullmatch(r"[\w.-]+", remote.etag or ""):
        raise DownloadError(
            f"Cannot fetch {file}: {endpoint()} does not answer like a Hub (no commit, hash or size). Check "
            "HF_ENDPOINT, your proxy, and whether the network wants a login."
        )
    return remote, token


def receive(file: RemoteFile, partial: Path, size: int, token: bool | None) -> None:
    """Complete `partial`, going on from where an earlier call or process stopped.

    Blocks are written at their own offset: processes that do not see each other's lock (some network disks) can only
    write the same bytes twice.
    """
    from huggingface_hub.utils import tqdm

    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.touch()
    have = partial.stat().st_size
    free = shutil.disk_usage(partial.parent).free
    if free < size - have:
        raise OSError(errno.ENOSPC, f"the disk is full ({size - have:,} bytes to come, {free:,} free)")
    bar = tqdm(total=size, initial=have, unit="B", unit_scale=True, desc=file.filename[-40:], disable=None)
    with bar, partial.open("r+b", buffering=0) as out:
        for offset, block in _blocks(file, have, size, token):
            out.seek(offset)
            while block:  # on a disk that is nearly full, a write may be short
                block = block[out.write(block) :]
            bar.update(out.tell() - bar.n)
        os.fsync(out.fileno())


def _blocks(file: RemoteFile, start: int, size: int, token: bool | None) -> Iterator[tuple[int, bytes]]:
    """The rest of a file, in blocks with their offsets."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    step = max(size // _BLOCKS, _SMALLEST_BLOCK)
    timeout = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or 10)

    def get() -> Any:
        headers = build_hf_headers(token=token) | {"Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
        response = get_session().get(file.url, headers=headers, timeout=timeout)
        hf_raise_for_status(response)
        return response

    while start < size:
        end = min(start + step, size)
        response = _patiently(file, get, _TRIES, stubborn=True)
        if response.status_code == 200:  # the server knows no ranges, and sends the whole file
            start, end = 0, size
        if len(response.content) != end - start:
            raise UnreachableError(file, f"{response.url} sent {len(response.content):,} bytes of {end - start:,}")
        yield start, response.content
        start = end


def _patiently(file: RemoteFile, send: Callable[[], T], tries: int, stubborn: bool = False) -> T:
    """What `send` returns; tried again, with growing pauses, after 429, 5xx, timeouts and cut connections.

    Where no connection can be made at all there is no waiting, unless `stubborn` (it worked a moment ago).
    """
    from huggingface_hub.errors import OfflineModeIsEnabled

    pause = 0.25
    while True:
        try:
            return send()
        except (OSError, transport_error()) as error:
            answer = getattr(error, "response", None)
            if answer is not None and answer.status_code not in _BUSY:
                raise
            asked = "" if answer is None else answer.headers.get("retry-after", "")
            pause = min(float(asked) if asked.isdigit() else 2 * pause, _LONGEST_PAUSE)
            why = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
            tries -= 1
            hopeless = isinstance(error, OfflineModeIsEnabled) or (_has_no_route(error) and not stubborn)
            if hopeless or tries == 0:
                raise UnreachableError(file, f"{endpoint()} cannot be reached ({why})") from error
        _log.info("%s: %s; trying again in %.1f s.", file, why, pause)
        time.sleep(pause)


def _has_no_route(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, socket.gaierror) or getattr(error, "errno", None) in _NO_ROUTE:
            return True
        error = error.__cause__ or error.__context__
    return False


def _renew_client() -> None:
    """The client reads the proxy variables once; where they are others now, it has to start again."""
    global _seen_proxies
    from urllib.request import getproxies

    import huggingface_hub

    if (proxies := getproxies()) != _seen_proxies:
        getattr(huggingface_hub, "close_session", bool)()  # before 1.0 there is none, and none is needed
        _seen_proxies = proxies
