"""A record or a repo id -> a verified local file.

The cache, tokens, endpoint and offline switches are those of huggingface_hub, which checks no hash. Here every file is
hashed once and remembered by its stamp, and a zoo name keeps its bytes (a pin), so that a warm start needs no socket.
How the bytes came does not matter; see `transfer` for how they come.
"""

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from logging import getLogger
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitlite.errors import DownloadError
from vitlite.weights.download import AbsentError, RemoteFile, UnreachableError, ask, endpoint, receive, transport_error

Verified = Literal["record", "hub", "first use"]

_log = getLogger("vitlite")
_COMMIT = re.compile("[0-9a-f]{40}")
_CLOCK_TICK = 0.02  # s; a file system's clock may stand still as long as this


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
    wish = _Wish(RemoteFile(repo, filename, revision or "main"), sha256, "record", pin, update)
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
    except AbsentError:
        return None


def check_file(path: Path | str, sha256: str | None = None) -> str:
    """The sha256 of a local file; hashed once, then remembered by its stamp until the file changes.

    Raises:
        DownloadError: The file cannot be read, or does not hash to `sha256` (when given).
    """
    stamp = _hash(Path(path))
    if sha256 not in (None, stamp.sha256):
        raise _WrongBytes(Path(path), str(sha256), stamp.sha256)
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


def verify(target: Path | str, sha256: str | None = None) -> Fetched:
    """Hash a file again whatever its stamp says: a pinned zoo name, or the path of a file, and what it must hash to.

    Raises:
        DownloadError: Not here, or its bytes are not those wanted, pinned or remembered, and what to do.
    """
    pin = pins().get(str(target))
    path = _cached(RemoteFile(pin.repo, pin.filename, pin.commit)) if pin else Path(target)
    if path is None or not path.is_file():
        raise DownloadError(
            f"Cannot verify {target}: it is neither a file nor a model in the cache. Check the path, or fetch the "
            "model with `vitlite download NAME`."
        )
    stamp, known = _hash(path, anew=True), _read_stamp(path)
    if known is None or known.stat != stamp.stat:
        known = stamp
    expected = sha256 or (pin or known).sha256
    if stamp.sha256 != expected:
        _stamp_path(path).unlink(missing_ok=True)  # so that the next start does not trust it either
        raise _WrongBytes(path, expected, stamp.sha256)
    _remember(path, known)
    return Fetched(path, pin and pin.commit, stamp.sha256, "record" if sha256 else (pin or stamp).verified)


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

    file: RemoteFile
    sha256: str | None
    verified: Verified
    pin: str | None
    update: bool


class _Stamp(NamedTuple):
    """What is known of a file, and what it looked like then: size, mtime_ns, ctime_ns, inode."""

    stat: list[int]
    sha256: str
    verified: Verified = "first use"
    finite: bool = False


class _WrongBytes(DownloadError):
    def __init__(self, path: Path, expected: str, got: str):
        super().__init__(
            f"Wrong bytes in {path}: expected hash {expected}, got {got}. A copy in the cache is replaced by the next "
            "`vitlite download NAME`; a file of your own has to be fetched again. If fresh copies are wrong too, try "
            "another network or HF_ENDPOINT; if the Hub has new bytes for a zoo name, add --update."
        )
        self.path = path


def _fetch_once(wish: _Wish) -> Fetched:
    try:
        found = _from_cache(_settled(wish))
        if found is None:
            with _alone(wish.file):
                settled = _settled(wish)
                found = _from_cache(settled) or _from_hub(settled)
        return found
    except UnreachableError as error:
        raise DownloadError(f"{error} It is not in the cache, {cache_folder()}.") from error
    except DownloadError:
        raise
    except (OSError, transport_error()) as error:
        raise DownloadError(
            f"Cannot keep {wish.file} in {cache_folder()}: {error}. Nothing unfinished is ever used. Run it again, "
            "after freeing some space or setting VITLITE_CACHE (or HF_HUB_CACHE) to a folder that can be written."
        ) from error
    except ValueError as error:  # the client's, for names that cannot be
        raise DownloadError(f"Cannot fetch {wish.file}: {error} A repository id is owner/name.") from error


def _settled(wish: _Wish) -> _Wish:
    """With the pin's commit and hash, where there is one that does not contradict the caller."""
    pin = _read_pin(wish.pin) if wish.pin and not wish.update else None
    if (
        pin is None
        or (pin.repo, pin.filename) != wish.file[:2]
        or wish.file.revision not in ("main", pin.commit)
        or wish.sha256 not in (None, pin.sha256)
    ):
        return wish
    return wish._replace(file=wish.file._replace(revision=pin.commit), sha256=pin.sha256, verified=pin.verified)


def _pin(name: str, now: Pin) -> None:
    before = _read_pin(name)
    if now != before:
        _write_json(_pin_path(name), now._asdict())
    if before and now.commit != before.commit:
        _log.info("%s: the pin moved from %s to %s.", name, before.commit, now.commit)


def _from_cache(wish: _Wish) -> Fetched | None:
    """The cached file, where a full commit hash says which one; the network is not looked at."""
    if not _COMMIT.fullmatch(wish.file.revision):
        return None
    path = _cached(wish.file)
    return _checked(path, wish, wish.file.revision) if path else None


def _from_hub(wish: _Wish) -> Fetched:
    """The file as the Hub has it now; the cached one, with a log line, where the Hub cannot be reached."""
    try:
        remote, token = ask(wish.file, again=wish.update or _look_up(wish.file) is None)
    except AbsentError:
        with suppress(OSError):  # the client notes the absence, which is then known offline too
            _client_download(wish.file, None)
        raise
    except UnreachableError as error:
        path = None if wish.update else _cached(wish.file)
        if path is None:
            raise
        commit = next(filter(_COMMIT.fullmatch, path.parts), None)
        _log.warning("%s: %s. Using the cached commit %s.", wish.file, error.why, commit or "(unknown)")
        return _checked(path, wish, commit)
    at_commit = wish.file._replace(revision=remote.commit_hash)
    path = _cached(at_commit) or _place(wish, at_commit, remote, token)
    return _checked(path, wish, remote.commit_hash, remote.etag)


def _place(wish: _Wish, file: RemoteFile, remote: Any, token: bool | None) -> Path:
    """Put the right bytes where the Hub's client looks for them. (Were that to change, it would fetch them again.)"""
    from huggingface_hub.file_download import repo_folder_name

    blob = cache_folder() / repo_folder_name(repo_id=file.repo, repo_type="model") / "blobs" / remote.etag
    if not blob.exists():  # if it does, it is another commit's, and checked like any other
        partial = blob.with_name(f"{blob.name}.vitlite.incomplete")  # the ending that `hf cache` knows and prunes
        receive(file, partial, remote.size, token)
        try:
            stamp = _hash(partial)
            verified = _compare(partial, stamp, wish, remote.etag)
            partial.replace(blob)
            _remember(blob, _Stamp(_stat(blob), stamp.sha256, verified))
        except OSError:
            if not blob.exists():  # unless another process was quicker
                raise
    path = _client_download(wish.file, token)
    if not path.is_symlink():  # where there are no links (Windows) the client has made a copy
        blob.unlink(missing_ok=True)
    return path


def _client_download(file: RemoteFile, token: bool | None) -> Path:
    """Let the Hub's client link the blob that was placed, and keep its own notes; it fetches what it misses."""
    from huggingface_hub import hf_hub_download

    place: dict[str, Any] = {"cache_dir": cache_folder(), "endpoint": endpoint(), "token": token}
    return Path(hf_hub_download(file.repo, file.filename, revision=file.revision, **place))


def _look_up(file: RemoteFile) -> Any:
    """What the client knows without a network: the path, a mark that there is no such file, or None."""
    folder = cache_folder() / f"models--{file.repo.replace('/', '--')}" / "snapshots"  # as the client documents it
    if _COMMIT.fullmatch(file.revision) and (path := folder / file.revision / file.filename).is_file():
        return str(path)  # a warm start spares importing the client, which takes longer than checking the stamp
    from huggingface_hub import try_to_load_from_cache

    return try_to_load_from_cache(file.repo, file.filename, cache_dir=cache_folder(), revision=file.revision)


def _cached(file: RemoteFile) -> Path | None:
    known = _look_up(file)
    if known is None or isinstance(known, str):
        return Path(known) if known else None
    raise AbsentError(file)


@contextmanager
def _alone(file: RemoteFile) -> Iterator[None]:
    """One process at a time per file. Without locks, or a place for them: see `transfer.receive`."""
    from huggingface_hub.utils import WeakFileLock

    name = hashlib.sha256(f"{file.repo}/{file.filename}".encode()).hexdigest()[:32]
    path = _state_folder() / "locks" / f"{name}.lock"
    with ExitStack() as stack:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(WeakFileLock(path))
        yield


def _checked(path: Path, wish: _Wish, commit: str | None, etag: str | None = None) -> Fetched:
    """The cached file, if it has the bytes that the caller, else the Hub, else our memory says."""
    stamp = _hash(path)
    verified = _compare(path, stamp, wish, etag)
    _remember(path, stamp._replace(verified=verified))
    if wish.pin and commit:
        _pin(wish.pin, Pin(wish.file.repo, wish.file.filename, commit, stamp.sha256, verified))
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
    if not anew and (stamp := _fresh_stamp(path)):
        return stamp
    try:
        age = time.time() - path.stat().st_ctime
        if 0 <= age < _CLOCK_TICK:  # a change within one tick of the clock would not show
            time.sleep(_CLOCK_TICK - age)
        return _Stamp(_stat(path), _digest(path, hashlib.sha256()))
    except OSError as error:
        raise DownloadError(f"Cannot read {path}: {error}. Check the path and its permissions.") from error


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
    path = _pin_path(name)
    try:
        return Pin(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DownloadError(f"Cannot read the pin {path}: {error}. Delete it; the next download pins anew.") from error


def _pin_path(name: str) -> Path:
    return _state_folder() / "pins" / f"{name}.json"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write at once or not at all. Where nothing can be written, files are hashed each time; that is no error."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content), "utf-8")
        temporary.replace(path)


def _remove(damage: _WrongBytes) -> None:
    try:
        for path in (Path(os.path.realpath(damage.path)), damage.path):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise DownloadError(f"{damage} It cannot be removed: {error}.") from error
