"""A record or a repo id -> a verified local file.

The cache, tokens, endpoint and offline switches are those of huggingface_hub. Three things are added. Every file is
hashed once and remembered by its stamp. A zoo name keeps its bytes (a pin), so that a warm start needs no socket. And
the bytes are fetched here, by ranges over plain HTTP, because the client cannot resume after a killed process, checks
no hash, and pauses as long as any Retry-After says; what has arrived and is right is then handed to its cache.
"""

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from vitlite.errors import DownloadError

Verified = Literal["record", "hub", "first use"]
T = TypeVar("T")

_log = logging.getLogger("vitlite")
_COMMIT = re.compile("[0-9a-f]{40}")
_YES = ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads its switches
_TRIES = 5  # per request, with pauses of 0.5, 1, 2 and 4 s between
_LONGEST_PAUSE = 60.0  # s; however long a server asks us to wait
_BLOCKS = 32  # requests per file: a fault costs at most 1/32 of it again
_SMALLEST_BLOCK = 1 << 18
_CLOCK_TICK = 0.02  # s; a file system's clock may stand still as long as this
_NO_ROUTE = (errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH)
_seen_proxies: dict[str, str] | None = None


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
    wish = _Wish(repo, filename, revision or "main", sha256, "record", pin, update)
    try:
        return _fetch_once(wish)
    except _WrongBytes as damage:
        _log.warning("%s Fetching it once more.", damage)
        _remove(damage)
        try:
            return _fetch_once(wish)
        except _WrongBytes as again:
            _remove(again)
            raise
        except DownloadError as error:
            raise DownloadError(f"{damage} {error}") from error


def fetch_optional(repo: str, filename: str, *, revision: str | None = None) -> Fetched | None:
    """Like `fetch`, for a file that a repository may lack; None means that the Hub says it is not there.

    Not knowing (no network, nothing cached) is a DownloadError, as in `fetch`. Pass the weights' `Fetched.commit` as
    `revision`, so that all files are of one commit.
    """
    try:
        return fetch(repo, filename, revision=revision)
    except _AbsentError:
        return None


def check_file(path: Path | str, sha256: str | None = None) -> str:
    """The sha256 of a local file; hashed once, then remembered by its stamp until the file changes.

    Raises:
        DownloadError: The file cannot be read, or does not hash to `sha256` (when given).
    """
    stamp = _hash(Path(path))
    if sha256 not in (None, stamp.sha256):
        raise _WrongBytes(Path(path), sha256, stamp.sha256)
    _remember(Path(path), stamp)
    return stamp.sha256


def is_scanned(path: Path | str) -> bool:
    """Whether every tensor of this very file was found finite before, so that the scan may be skipped.

    Always False with VITLITE_VERIFY=always. A file never seen by `fetch` or `check_file` is not scanned.
    """
    stamp = _fresh_stamp(Path(path))
    return stamp is not None and stamp.finite


def mark_scanned(path: Path | str) -> None:
    """Remember that every tensor of this file is finite; after `fetch` or `check_file` and a scan without finds."""
    if stamp := _fresh_stamp(Path(path)):
        _remember(Path(path), stamp._replace(finite=True))


def verify(target: Path | str) -> Fetched:
    """Hash a file again whatever its stamp says: a pinned zoo name, or the path of a file.

    Raises:
        DownloadError: Not here, or its bytes are not those pinned or remembered. Text: path, expected, got, what to do.
    """
    pin = pins().get(str(target))
    path = _cached(pin.repo, pin.filename, pin.commit) if pin else Path(target)
    if path is None or not path.is_file():
        raise DownloadError(
            f"Cannot verify {target}: it is neither a file nor a model in the cache. Check the path, or fetch the "
            "model with `vitlite download NAME`."
        )
    known = _read_stamp(path)
    known = known if known and known.stat == _stat(path) else None
    expected = pin.sha256 if pin else known and known.sha256
    stamp = _hash(path, anew=True)
    if expected not in (None, stamp.sha256):
        _stamp_path(path).unlink(missing_ok=True)  # so that the next start does not trust it either
        raise _WrongBytes(path, expected, stamp.sha256)
    _remember(path, known or stamp)
    return Fetched(path, pin.commit if pin else None, stamp.sha256, pin.verified if pin else stamp.verified)


def pins() -> dict[str, Pin]:
    """Every zoo name this user has downloaded, and the bytes it is pinned to."""
    names = sorted(path.stem for path in (_state_folder() / "pins").glob("*.json"))
    return {name: pin for name in names if (pin := _read_pin(name))}


def cache_folder() -> Path:
    """Where weights are kept: VITLITE_CACHE/hub, else the Hub's own cache, as the environment says now."""
    env = os.environ.get
    home = env("HF_HOME") or os.path.join(env("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    own = os.path.join(env("VITLITE_CACHE") or home, "hub")
    theirs = None if env("VITLITE_CACHE") else env("HF_HUB_CACHE") or env("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(theirs or own)).expanduser()


def _state_folder() -> Path:
    return cache_folder().parent / ("" if os.environ.get("VITLITE_CACHE") else "vitlite")


class _Wish(NamedTuple):
    """The arguments of `fetch`, and who says that the sha256 is right."""

    repo: str
    filename: str
    revision: str
    sha256: str | None
    verified: Verified
    pin: str | None
    update: bool

    def __str__(self) -> str:
        return f"{self.filename} of {self.repo}@{self.revision}"

    @property
    def url(self) -> str:
        from huggingface_hub import hf_hub_url

        return str(hf_hub_url(self.repo, self.filename, revision=self.revision, endpoint=_endpoint()))


class _Stamp(NamedTuple):
    """What is known of a file, and what it looked like then: size, mtime_ns, ctime_ns, inode."""

    stat: list[int]
    sha256: str
    verified: Verified = "first use"
    finite: bool = False


class _WrongBytes(DownloadError):
    def __init__(self, path: Path, expected: str | None, got: str):
        super().__init__(
            f"Wrong bytes in {path}: expected hash {expected}, got {got}. A copy in the cache is replaced by the next "
            "`vitlite download NAME`; a file of your own has to be fetched again. If fresh copies are wrong too, try "
            "another network or HF_ENDPOINT; if the Hub has new bytes for a zoo name, add --update."
        )
        self.path = path


class _AbsentError(DownloadError):
    pass


class _UnreachableError(DownloadError):
    def __init__(self, wish: _Wish, why: str):
        super().__init__(
            f"Cannot fetch {wish}: {why}. It is not in the cache, {cache_folder()}. Where there is a network, download "
            f"{wish.url} and pass that file as weights=PATH, or copy that machine's cache here. HF_ENDPOINT names a "
            "mirror."
        )
        self.why = why


# From the cache, or from the Hub.


def _fetch_once(wish: _Wish) -> Fetched:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = _from_cache(_settled(wish))
        if found is None:
            with _alone(wish):
                settled = _settled(wish)
                found = _from_cache(settled) or _from_hub(settled)
                _pin(wish, found)
        _pin(wish, found)
        return found
    except DownloadError:
        raise
    except HFValidationError as error:
        raise DownloadError(f"Cannot fetch from {wish.repo!r}: a repository id is owner/name. {error}") from error
    except LocalEntryNotFoundError as error:  # from the client, whose network failed after ours had worked
        raise _UnreachableError(wish, str(error)) from error
    except HfHubHTTPError as error:
        why = str(error).strip().splitlines()[0]
        raise DownloadError(
            f"Cannot fetch {wish}: {why} ({wish.url}). Check the names of repository and revision. A private or gated "
            "repository needs its licence accepted, and a login: hf auth login, or HF_TOKEN."
        ) from error
    except OSError as error:
        raise DownloadError(
            f"Cannot write {wish} to {cache_folder()}: {error}. Nothing unfinished is ever used. Free some space, or "
            "set VITLITE_CACHE (or HF_HUB_CACHE) to a folder that can be written, then run it again."
        ) from error


def _settled(wish: _Wish) -> _Wish:
    """With the pin's commit and hash, where there is one that does not contradict the caller."""
    pin = _read_pin(wish.pin) if wish.pin and not wish.update else None
    if pin is None or (pin.repo, pin.filename) != (wish.repo, wish.filename):
        return wish
    if wish.revision not in ("main", pin.commit) or wish.sha256 not in (None, pin.sha256):
        return wish
    return wish._replace(revision=pin.commit, sha256=pin.sha256, verified=pin.verified)


def _pin(wish: _Wish, found: Fetched) -> None:
    if wish.pin is None or found.commit is None:
        return
    before, now = _read_pin(wish.pin), Pin(wish.repo, wish.filename, found.commit, found.sha256, found.verified)
    if now != before:
        _write_json(_state_folder() / "pins" / f"{wish.pin}.json", now._asdict())
    if before and now.commit != before.commit:
        _log.info("%s: the pin moved from %s to %s.", wish.pin, before.commit, now.commit)


def _from_cache(wish: _Wish) -> Fetched | None:
    """The cached file, where a full commit hash says which one; the network is not looked at."""
    if wish.update or not _COMMIT.fullmatch(wish.revision):
        return None
    path = _cached(wish.repo, wish.filename, wish.revision)
    return _checked(path, wish, wish.revision) if path else None


def _from_hub(wish: _Wish) -> Fetched:
    """The file as the Hub has it now; the cached one, with a log line, where the Hub cannot be reached."""
    fallback: Path | _AbsentError | None = None
    try:
        fallback = None if wish.update else _cached(wish.repo, wish.filename, wish.revision)
    except _AbsentError as absent:
        fallback = absent
    try:
        remote, token = _ask(wish, tries=1 if fallback else _TRIES)
    except _UnreachableError as error:
        if not isinstance(fallback, Path):
            raise fallback or error from None
        commit = next(filter(_COMMIT.fullmatch, fallback.parts), None)
        _log.warning("%s: %s. Using the cached commit %s.", wish, error.why, commit or "(unknown)")
        return _checked(fallback, wish, commit)
    path = _cached(wish.repo, wish.filename, remote.commit_hash)
    if path is None:
        _receive(wish._replace(revision=remote.commit_hash), remote, token)
        path = _client_download(wish, token)
    return _checked(path, wish, remote.commit_hash, remote.etag)


def _cached(repo: str, filename: str, revision: str) -> Path | None:
    from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache

    path = try_to_load_from_cache(repo, filename, cache_dir=cache_folder(), revision=revision)
    if path is _CACHED_NO_EXIST:
        raise _AbsentError(f"{repo}@{revision} has no file {filename}.")
    return Path(path) if isinstance(path, str) else None


def _client_download(wish: _Wish, token: bool | None) -> Path:
    """Let the Hub's client link the blob that was placed, and keep its own notes; it fetches what it misses."""
    from huggingface_hub import hf_hub_download

    place: dict[str, Any] = {"cache_dir": cache_folder(), "endpoint": _endpoint(), "token": token}
    return Path(hf_hub_download(wish.repo, wish.filename, revision=wish.revision, **place))


# What is asked of the Hub, and how often.


def _ask(wish: _Wish, tries: int, token: bool | None = None) -> tuple[Any, bool | None]:
    """The commit, hash and size the Hub states for a file, and the token to go on with (None: the user's, False: none).

    A refused token is left out and the question asked again: one that has expired must not lock out public weights.
    """
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import build_hf_headers

    if (os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or "").upper() in _YES:
        raise _UnreachableError(wish, "HF_HUB_OFFLINE is set")
    _renew_client()
    timeout = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 10)
    try:
        remote = _patiently(wish, lambda: get_hf_file_metadata(wish.url, token=token, timeout=timeout), tries)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403) and token is None and "authorization" in build_hf_headers():
            with suppress(HfHubHTTPError):
                answer = _ask(wish, tries, token=False)
                _log.warning("The Hub refuses your token (HTTP %d); going on without it.", status)
                return answer
        if status != 404 or isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError)):
            raise
        with suppress(HfHubHTTPError, OSError):
            _client_download(wish, token)  # it notes the absence, which is then known offline too
        raise _AbsentError(f"{wish.repo}@{wish.revision} has no file {wish.filename} ({wish.url}).") from error
    if None in (remote.commit_hash, remote.etag, remote.size):
        raise DownloadError(
            f"Cannot fetch {wish}: {_endpoint()} does not answer like a Hub (no commit, hash or size). Check "
            "HF_ENDPOINT, your proxy, and whether the network wants a login."
        )
    return remote, token


def _receive(wish: _Wish, remote: Any, token: bool | None) -> None:
    """Put the right bytes into the cache's blob, going on from where an earlier call or process stopped.

    Blocks are written at their own offset: processes that do not see each other's lock (some network disks) can only
    write the same bytes twice.
    """
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import tqdm

    blob = cache_folder() / repo_folder_name(repo_id=wish.repo, repo_type="model") / "blobs" / remote.etag
    if blob.exists():
        return  # another commit's; it is checked like any other
    partial = blob.with_name(f"{blob.name}.vitlite.incomplete")  # the ending that `hf cache` knows and prunes
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.touch()
    have = partial.stat().st_size
    free = shutil.disk_usage(partial.parent).free
    if free < remote.size - have:
        raise OSError(errno.ENOSPC, f"the disk is full ({remote.size - have:,} bytes to come, {free:,} free)")
    with (
        partial.open("r+b", buffering=0) as file,
        tqdm(total=remote.size, initial=have, unit="B", unit_scale=True, desc=wish.filename[-40:], disable=None) as bar,
    ):
        for offset, block in _blocks(wish, have, remote.size, token):
            file.seek(offset)
            while block:  # on a disk that is nearly full, a write may be short
                block = block[file.write(block) :]
            bar.update(file.tell() - bar.n)
        os.fsync(file.fileno())
    try:
        stamp = _hash(partial)
        verified = _compare(partial, stamp, wish, remote.etag)
        partial.replace(blob)
        _remember(blob, _Stamp(_stat(blob), stamp.sha256, verified))
    except _WrongBytes:
        partial.unlink(missing_ok=True)
        raise
    except OSError:
        if not blob.exists():  # unless another process was quicker
            raise


def _blocks(wish: _Wish, start: int, size: int, token: bool | None) -> Iterator[tuple[int, bytes]]:
    """The rest of a file, in blocks with their offsets."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    step = max(size // _BLOCKS, _SMALLEST_BLOCK)
    timeout = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or 10)

    def get() -> Any:
        headers = build_hf_headers(token=token) | {"Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
        response = get_session().get(wish.url, headers=headers, timeout=timeout)
        hf_raise_for_status(response)
        return response

    while start < size:
        end = min(start + step, size)
        response = _patiently(wish, get, _TRIES, stubborn=True)
        if response.status_code == 200:  # the server knows no ranges, and sends the whole file
            start, end = 0, size
        if len(response.content) != end - start:
            raise _UnreachableError(wish, f"{response.url} sent {len(response.content):,} bytes of {end - start:,}")
        yield start, response.content
        start = end


def _patiently(wish: _Wish, send: Callable[[], T], tries: int, stubborn: bool = False) -> T:
    """What `send` returns; tried again, with growing pauses, after 429, 5xx, timeouts and cut connections.

    Where no connection can be made at all there is no waiting, unless `stubborn` (it worked a moment ago).
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The client's errors derive from those of the HTTP library below it: requests, httpx or httpx2.
    transport_error: Any = HfHubHTTPError.__mro__[1]
    pause = 0.25
    while True:
        tries, pause = tries - 1, min(pause * 2, _LONGEST_PAUSE)
        try:
            return send()
        except HfHubHTTPError as error:
            if error.response.status_code not in (408, 429, 500, 502, 503, 504):
                raise
            cause: BaseException = error
            hopeless = False
            if (asked := error.response.headers.get("retry-after", "")).isdigit():
                pause = min(float(asked), _LONGEST_PAUSE)
        except (OSError, transport_error) as error:
            cause, hopeless = error, isinstance(error, OfflineModeIsEnabled) or (_has_no_route(error) and not stubborn)
        why = f"{type(cause).__name__}: {str(cause).strip().splitlines()[0]}"
        if hopeless or tries == 0:
            raise _UnreachableError(wish, f"{_endpoint()} cannot be reached ({why})") from cause
        _log.info("%s: %s; trying again in %.1f s.", wish, why, pause)
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
    import huggingface_hub

    if (proxies := urllib.request.getproxies()) != _seen_proxies:
        getattr(huggingface_hub, "close_session", bool)()  # before 1.0 there is none, and none is needed
        _seen_proxies = proxies


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


@contextmanager
def _alone(wish: _Wish) -> Iterator[None]:
    """One process at a time per file. Without locks, or a place for them: see `_receive`."""
    from filelock import FileLock, Timeout

    name = hashlib.sha256(f"{wish.repo}/{wish.filename}".encode()).hexdigest()[:32]
    lock = FileLock(_state_folder() / "locks" / f"{name}.lock")
    with suppress(OSError, NotImplementedError):
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _log.info("%s: waiting for another process that fetches it.", wish)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


# Hashes, and what is remembered of them.


def _checked(path: Path, wish: _Wish, commit: str | None, etag: str | None = None) -> Fetched:
    """The cached file, if it has the bytes that the caller, else the Hub, else our memory says."""
    stamp = _hash(path)
    verified = _compare(path, stamp, wish, etag)
    _remember(path, stamp._replace(verified=verified))
    return Fetched(path, commit, stamp.sha256, verified)


def _compare(path: Path, stamp: _Stamp, wish: _Wish, etag: str | None) -> Verified:
    """Who vouches for these bytes. The Hub states a sha256 for large files, and git's own hash for small ones."""
    known = _read_stamp(path) or stamp
    verified, expected, got = known.verified, known.sha256, stamp.sha256
    if wish.sha256:
        verified, expected = wish.verified, wish.sha256
    elif etag and len(etag) == 64:
        verified, expected = "hub", etag
    elif etag and _COMMIT.fullmatch(etag):
        sha1 = hashlib.sha1(b"blob %d\0" % stamp.stat[0], usedforsecurity=False)
        verified, expected, got = "hub", etag, _digest(path, sha1)
    if expected != got:
        raise _WrongBytes(path, expected, got)
    return verified


def _hash(path: Path, anew: bool = False) -> _Stamp:
    stamp = None if anew else _fresh_stamp(path)
    try:
        if stamp is None:
            age = time.time() - path.stat().st_ctime
            if 0 <= age < _CLOCK_TICK:  # a change within one tick of the clock would not show
                time.sleep(_CLOCK_TICK - age)
            stamp = _Stamp(_stat(path), _digest(path, hashlib.sha256()))
    except OSError as error:
        raise DownloadError(f"Cannot read {path}: {error}. Check the path and its permissions.") from error
    return stamp


def _digest(path: Path, digest: Any) -> str:
    block = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return str(digest.hexdigest())


def _stat(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _fresh_stamp(path: Path) -> _Stamp | None:
    """The stamp of a file that has not changed since; None where VITLITE_VERIFY says to look at the bytes."""
    stamp = None if os.environ.get("VITLITE_VERIFY") == "always" else _read_stamp(path)
    return stamp if stamp and path.exists() and stamp.stat == _stat(path) else None


def _read_stamp(path: Path) -> _Stamp | None:
    try:
        return _Stamp(**json.loads(_stamp_path(path).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _remember(path: Path, stamp: _Stamp) -> None:
    if stamp != _read_stamp(path) and stamp.stat == _stat(path):
        _write_json(_stamp_path(path), stamp._asdict())


def _stamp_path(path: Path) -> Path:
    name = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:32]
    return _state_folder() / "stamps" / f"{name}.json"


def _read_pin(name: str) -> Pin | None:
    path = _state_folder() / "pins" / f"{name}.json"
    try:
        return Pin(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DownloadError(f"Cannot read the pin {path}: {error}. Delete it; the next download pins anew.") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write at once or not at all. Where nothing can be written, files are hashed each time; that is no error."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content), "utf-8")
        temporary.replace(path)
    except OSError as error:
        _log.debug("Cannot write %s: %s", path, error)


def _remove(damage: _WrongBytes) -> None:
    try:
        for path in (Path(os.path.realpath(damage.path)), damage.path):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise DownloadError(f"{damage} It cannot be removed: {error}.") from error
