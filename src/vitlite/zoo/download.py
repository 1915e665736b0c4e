"""Bytes from the Hub over a bad network: what it states of a file, and the file itself, from where it stopped before.

The bytes are asked for here, over plain HTTP, because the client cannot resume after a killed process and waits as long
as any Retry-After says. Whatever the Hub sends is held to what it stated; whether the bytes are right, a hash decides.
"""

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from io import FileIO
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

from vitlite.errors import DownloadError, shown
from vitlite.zoo.folders import is_no_file
from vitlite.zoo.network import (
    FIRST_WORD,
    TRIES,
    StatusError,
    UnreachableError,
    first_line,
    headers_with,
    is_offline,
    next_pause,
    patience,
    prepare_client,
    said_after_a_while,
    transport_error,
    with_retries,
)
from vitlite.zoo.remote import COMMIT, AbsentError, RemoteFile, endpoint, is_hash

NEVER_HEARD = 20.0  # s of silence after which a Hub that has sent nothing is given up
HEARD_BEFORE = 60.0  # s, where it has sent something: a network may come back
LEAST_PROGRESS = 1 << 16  # bytes that a try has to bring, or it has failed
SLOWEST = 1000  # bytes a second; what is slower for PACE seconds is no download
PACE = 20.0  # s
NEXT_WORD = 30.0  # s between two lines about a long download, where there is no bar
PIECE = 1 << 18  # bytes written at once, at most

_log = getLogger("vitlite")
_ETAG = re.compile(r"\w[\w.-]{0,199}", re.ASCII)  # it becomes a file's name
_HASH = re.compile(r"([0-9a-f]{64}|[0-9a-f]{40})(?![0-9a-z])", re.ASCII | re.IGNORECASE)


class Statement(NamedTuple):
    """What the Hub states of a file, and the token to go on with."""

    commit: str
    etag: str  # the sha256 of a large file, git's own hash of a small one
    size: int
    token: bool | None  # as the client takes it: None is the user's, False is none


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
    if is_offline():
        raise UnreachableError(file, "HF_HUB_OFFLINE is set")
    prepare_client()
    from huggingface_hub.errors import HfHubHTTPError

    tries = TRIES if patient else 1
    try:
        return _ask(file, tries, token=None)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status not in (401, 403) or "authorization" not in headers_with(None):
            raise _explained(file, error) from error
    try:
        statement = _ask(file, tries, token=False)
    except HfHubHTTPError as error:
        raise _explained(file, error) from error
    _log.warning("The Hub refuses your token (HTTP %d); going on without it.", status)
    return statement


def _ask(file: RemoteFile, tries: int, token: bool | None) -> Statement:
    from huggingface_hub import get_hf_file_metadata

    def send(timeout: float) -> Any:
        headers_with(token)  # checked before the client does the same
        return get_hf_file_metadata(file.url, token=token, timeout=timeout)

    how = patience("HF_HUB_ETAG_TIMEOUT", NEVER_HEARD, tries=tries)
    waiting = f"{file}: waiting for {endpoint()}, which is given up after {how.silence:.0f} s without an answer."
    with said_after_a_while(f"{waiting} Ctrl-C stops at once."):
        stated = with_retries(file, send, how)
    commit, etag, size = stated.commit_hash or "", _plain(stated.etag or ""), stated.size
    if file.is_at_commit and commit != file.revision:
        raise _no_hub(file, f"asked for that commit, it has {shown(commit)}")
    if not COMMIT.fullmatch(commit) or size is None or size < 0 or not _ETAG.fullmatch(etag):
        raise _no_hub(file, "no commit, hash or size")
    return Statement(commit, etag, size, token)


def _plain(etag: str) -> str:
    """The hash in an ETag, which a mirror may write in capitals, or with an ending; where there is none, all of it."""
    found = _HASH.match(etag)
    return found[1].lower() if found else etag


def _no_hub(file: RemoteFile, why: str) -> DownloadError:
    return DownloadError(
        f"Cannot fetch {file}: {endpoint()} does not answer like a Hub ({why}).",
        python="Check HF_ENDPOINT, your proxy, and whether the network wants a login.",
    )


def _explained(file: RemoteFile, error: Any) -> DownloadError:
    """The Hub's refusal, as an error that says what to do."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    response = error.response
    if isinstance(error, GatedRepoError):
        return _gated(file, response.status_code)
    if isinstance(error, EntryNotFoundError):
        commit = response.headers.get("x-repo-commit") or ""
        return AbsentError(file, commit if COMMIT.fullmatch(commit) else None)
    is_elsewhere = isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError))
    if response.status_code == 404 and not is_elsewhere:  # of a proxy, who knows nothing of the repository
        return _no_hub(file, "HTTP 404, and no word of which is absent, the file, the repository or the revision")
    why = shown(str(error).strip().partition("\n")[0])
    return _refused(file, why)


def _gated(file: RemoteFile, status: int) -> DownloadError:
    return DownloadError(
        f"Cannot fetch {file}: its repository is gated, and the Hub does not know you as one who may read it "
        f"(HTTP {status}).",
        python=f"Accept its licence on {endpoint()}/{file.repo} in a browser, and wait where access has to be granted. "
        "Then log in here with the same account, hf auth login, or set HF_TOKEN to a token of it.",
    )


def _refused(file: RemoteFile, why: str) -> DownloadError:
    return DownloadError(
        f"Cannot fetch {file}: {why} ({file.url}).",
        python="Check the names of repository and revision. A private or gated repository needs its licence accepted, "
        "and a login: hf auth login, or HF_TOKEN.",
    )


# ---- the bytes


class _Progress:
    """How much of a file is there: shown by a bar on a terminal, else said now and then; and whether more comes."""

    def __init__(self, file: RemoteFile, size: int, have: int) -> None:
        from huggingface_hub.utils import are_progress_bars_disabled, tqdm

        self.file, self.size, self.have, self.began_with = file, size, have, have
        self.most = have  # a server without ranges begins anew each time
        self.heard = time.monotonic()  # when the last bytes came
        self.etag = ""  # of the answer that they came with
        self.bar = tqdm(total=size, initial=have, unit="B", unit_scale=True, desc=file.filename[-40:], disable=None)
        self.speaks = self.bar.disable and not are_progress_bars_disabled()
        self.ended = threading.Event()

    def __enter__(self) -> "_Progress":
        threading.Thread(target=self._speak, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.bar.close()

    def reach(self, have: int) -> None:
        """So many bytes are there now."""
        self.have, self.most, self.heard = have, max(have, self.most), time.monotonic()
        self.bar.update(have - self.bar.n)

    @property
    def longest_silence(self) -> float:
        """How long nothing may come, in seconds."""
        return NEVER_HEARD if self.have == self.began_with else HEARD_BEFORE

    def _speak(self) -> None:
        next_line, told = time.monotonic() + FIRST_WORD, 0.0
        while not self.ended.wait(FIRST_WORD / 10):
            now, heard = time.monotonic(), self.heard
            if now - heard > FIRST_WORD and told != heard:
                told = heard
                _log.warning("%s: nothing has come for %.0f s. Still trying; Ctrl-C stops.", self.file, FIRST_WORD)
            elif self.speaks and now > next_line:
                next_line = now + NEXT_WORD
                share = f"{self.have:,} of {self.size:,} bytes"
                _log.warning("%s: %s are here. Ctrl-C stops, and the next call goes on from there.", self.file, share)


class _Pace:
    """Whether bytes come quickly enough to be worth waiting for."""

    def __init__(self) -> None:
        self.began, self.bytes = time.monotonic(), 0

    def is_too_slow(self, count: int) -> bool:
        """Whether it is, with `count` bytes more, over the last seconds."""
        self.bytes += count
        seconds = time.monotonic() - self.began
        if seconds < PACE:
            return False
        too_slow = self.bytes < SLOWEST * seconds
        self.began, self.bytes = time.monotonic(), 0
        return too_slow


class _CutError(Exception):
    """A connection ended before its bytes did."""


def finish_download(file: RemoteFile, statement: Statement, incomplete: Path) -> None:
    """Completes `incomplete`, going on from where an earlier call or process stopped.

    Bytes are written at their own offset: processes that do not see each other's lock (some network disks) can only
    write the same bytes twice.

    Raises:
        UnreachableError: They do not come, or too slowly.
        DownloadError: The server sends something else than it was asked for.
        OSError: They cannot be written.
    """
    incomplete.parent.mkdir(parents=True, exist_ok=True)
    if incomplete.is_symlink():  # what it leads to is not ours to write to
        incomplete.unlink()
    if is_no_file(incomplete):  # what is written to a pipe is never read
        raise FileExistsError(errno.EEXIST, "Is no file; move it away", str(incomplete))
    incomplete.touch()
    have, size = incomplete.stat().st_size, statement.size
    _refuse_a_full_disk(incomplete.parent, size - have)
    with incomplete.open("r+b", buffering=0) as out:
        if have > size or not is_hash(statement.etag):  # of something else; or perhaps, and no hash would tell
            have = out.truncate(0)
        with _Progress(file, size, have) as progress:
            _receive_all(statement, out, progress)
        os.fsync(out.fileno())


def _refuse_a_full_disk(folder: Path, missing: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < missing:
        raise OSError(errno.ENOSPC, f"the disk is full ({missing:,} bytes to come, {free:,} free)")


def _receive_all(statement: Statement, out: FileIO, progress: _Progress) -> None:
    """Asks for what is missing until all is there; a try that brings next to nothing has failed."""
    failed, pause = 0, 0.0
    while progress.have < progress.size:
        before, most = progress.have, progress.most
        try:
            _receive(statement, out, progress)
        except _CutError as cut:
            why = str(cut)
        else:
            why = f"{progress.have - before:,} bytes came instead of {progress.size - before:,}"
        if progress.most - most >= LEAST_PROGRESS or progress.have == progress.size:
            failed, pause = 0, 0.0
            continue
        failed, pause = failed + 1, next_pause(pause)
        if failed == TRIES or time.monotonic() - progress.heard + pause > progress.longest_silence:
            raise UnreachableError(progress.file, f"{endpoint()} does not send it ({why})")
        _log.info("%s: %s; trying again in %.1f s.", progress.file, why, pause)
        time.sleep(pause)


def _receive(statement: Statement, out: FileIO, progress: _Progress) -> None:
    """Asks once, and writes what comes."""
    send = partial(_open, progress.file, progress.have, progress.size, statement.token)
    how = patience("HF_HUB_DOWNLOAD_TIMEOUT", progress.longest_silence, was_reachable=True)
    pace = _Pace()
    try:
        answer = with_retries(progress.file, send, how)
    except StatusError as error:
        raise _refused(progress.file, str(error)) from error
    with closing(answer) as response:
        have = _offset(response, progress)
        _begin_anew_with_another(response, statement, progress, have)
        for piece in _pieces(response):
            wanted = piece[: progress.size - have]
            if len(piece) > len(wanted) and not is_hash(statement.etag):  # else the hash decides about what is here
                raise _no_hub(progress.file, f"it states {progress.size:,} bytes and sends more")
            _write(out, have, wanted)
            have += len(wanted)
            progress.reach(have)
            if have == progress.size:
                return
            if pace.is_too_slow(len(piece)):
                raise UnreachableError(progress.file, f"{endpoint()} sends less than {SLOWEST:,} bytes a second")


def _open(file: RemoteFile, have: int, size: int, token: bool | None, timeout: float) -> Any:
    """The answer to a request for the bytes from `have` on; its body is not read yet."""
    from huggingface_hub.utils import get_session

    headers = headers_with(token) | {"Accept-Encoding": "identity", "Range": f"bytes={have}-{size - 1}"}
    session: Any = get_session()
    if hasattr(session, "build_request"):  # httpx
        request = session.build_request("GET", file.url, headers=headers, timeout=timeout)
        response = session.send(request, stream=True, follow_redirects=True)
    else:  # requests, before version 1.0 of the client
        response = session.get(file.url, headers=headers, timeout=timeout, stream=True)
    if response.status_code not in (200, 206):
        response.close()
        raise StatusError(response)
    return response


def _offset(response: Any, progress: _Progress) -> int:
    """Where in the file the body of an answer begins.

    Raises:
        DownloadError: It is another part than the one asked for, or another file.
    """
    file, size, headers = progress.file, progress.size, response.headers
    if "html" in headers.get("content-type", "") and not file.filename.endswith(".html"):
        raise _no_hub(file, "it sends a web page instead")
    if response.status_code == 200:  # the server knows no ranges, and sends the whole file
        return 0
    expected = f"bytes {progress.have}-{size - 1}/{size}"
    part = headers.get("content-range", expected)
    wanted = re.fullmatch(rf"bytes {progress.have}-\d+/(?:{size}|\*)", part)
    if wanted is None or headers.get("content-encoding", "identity") != "identity":
        raise _no_hub(file, f"asked for {expected}, it sends {shown(part)}")
    return progress.have


def _begin_anew_with_another(response: Any, statement: Statement, progress: _Progress, have: int) -> None:
    """Goes on with the bytes of one version only, where no hash will tell two versions of a file from one.

    Raises:
        _CutError: An answer that goes on is not known to be of the version of which there are bytes.
    """
    etag = response.headers.get("x-linked-etag") or response.headers.get("etag") or ""
    if have > 0 and not is_hash(statement.etag) and (not etag or etag != progress.etag):
        progress.reach(0)
        raise _CutError(f"{endpoint()} may send another version of it by now")
    progress.etag = etag


def _pieces(response: Any) -> Iterator[bytes]:
    """The body of an answer as it comes in.

    Raises:
        _CutError: The connection ended early, or nothing more comes.
    """
    try:
        yield from _raw_pieces(response)
    except (OSError, RuntimeError, transport_error()) as error:  # the second: another thread has closed the session
        raise _CutError(first_line(error)) from error


def _raw_pieces(response: Any) -> Iterator[bytes]:
    if hasattr(response, "iter_bytes"):  # httpx
        yield from response.iter_bytes()
        return
    from urllib3.exceptions import HTTPError  # of requests

    raw = response.raw
    read = partial(raw.read1, PIECE) if hasattr(raw, "read1") else partial(raw.read, 1 << 10)
    try:
        while piece := read(decode_content=True):
            yield piece
    except HTTPError as error:
        raise OSError(str(error)) from error


def _write(out: FileIO, offset: int, piece: bytes) -> None:
    out.seek(offset)
    while piece:  # on a disk that is nearly full, a write may be short
        written = out.write(piece)
        piece = piece[written:]
