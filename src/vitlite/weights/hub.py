"""A file of a repository on the Hub -> a verified file in the cache.

The cache, tokens, endpoint and offline switches are those of huggingface_hub, which checks no hash. Here every file is
hashed once and remembered (`stamps`), and a zoo name keeps its bytes (`pins`), so that a warm start needs no socket.
How the bytes came does not matter; see `download` for how they come.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

from vitlite.disk import locked
from vitlite.errors import DownloadError
from vitlite.weights import stamps
from vitlite.weights.cache import cache_folder, state_folder
from vitlite.weights.download import (
    AbsentError,
    RemoteFile,
    Statement,
    UnreachableError,
    ask_hub,
    endpoint,
    finish_download,
    transport_error,
)
from vitlite.weights.pins import Pin, all_pins, read_pin, write_pin
from vitlite.weights.stamps import Stamp, Verified, WrongBytesError

_log = getLogger("vitlite")
COMMIT = re.compile("[0-9a-f]{40}")
SHA256_LENGTH = 64


class Fetched(NamedTuple):
    """A file whose bytes were checked, and what they were checked against.

    `verified` is "record" (the sha256 the caller gave), "hub" (the hash the Hub states for the file), or
    "first use" (nobody states one; what came first is remembered and compared from then on).
    """

    path: Path
    commit: str | None
    sha256: str
    verified: Verified


class _Request(NamedTuple):
    """The arguments of `fetch`, and who says that the sha256 is right."""

    file: RemoteFile
    sha256: str | None
    verified: Verified
    zoo_name: str | None  # the name to pin
    update: bool


def fetch(
    repo: str,
    filename: str,
    *,
    revision: str | None = None,
    sha256: str | None = None,
    pin: str | None = None,
    update: bool = False,
) -> Fetched:
    """Hands over a repository's file from the cache or the Hub, its bytes verified.

    Args:
        repo: "owner/name".
        filename: Path within the repository.
        revision: Branch, tag or commit; None is "main". With a full commit hash and a warm cache no socket is opened.
        sha256: What the file must hash to. None: what the pin, else the Hub, states.
        pin: A zoo name. Its first verified download is remembered, and later calls hand over those bytes.
        update: Forget the pin, ask the Hub, and pin what it has now (compare `all_pins()` before and after).

    Raises:
        DownloadError: The file is not there, cannot be fetched, or its bytes are wrong. The text says what to do.
    """
    request = _Request(RemoteFile(repo, filename, revision or "main"), sha256, "record", pin, update)
    try:
        return _fetch_once(request)
    except WrongBytesError as damage:
        _log.warning("%s Fetching it once more.", damage)
        _remove(damage)
        return _fetch_again(request, damage)


def fetch_optional(repo: str, filename: str, *, revision: str | None = None) -> Fetched | None:
    """Like `fetch`, for a file that a repository may lack; None means that the Hub says it is not there.

    Not knowing (no network, nothing cached) is a DownloadError, as in `fetch`. Pass the weights' `Fetched.commit` as
    `revision`, so that all files are of one commit.
    """
    try:
        return fetch(repo, filename, revision=revision)
    except AbsentError:
        return None


def verify(target: Path | str, sha256: str | None = None) -> Fetched:
    """Hashes a file again whatever its stamp says: a pinned zoo name, or the path of a file, and what it must hash to.

    Raises:
        DownloadError: Not here, or its bytes are not those wanted, pinned or remembered, and what to do.
    """
    path: Path | None = Path(target)
    commit, expected = None, sha256
    verified: Verified = "first use"
    pin = all_pins().get(str(target))
    if pin is not None:
        path = _cached(RemoteFile(pin.repo, pin.filename, pin.commit))
        commit, expected, verified = pin.commit, sha256 or pin.sha256, pin.verified
    if sha256 is not None:
        verified = "record"
    if path is None or not path.is_file():
        raise DownloadError(
            f"Cannot verify {target}: it is neither a file nor a model in the cache.",
            python="Check the path, or fetch the model with `vitlite download NAME`.",
        )
    return Fetched(path, commit, stamps.check_again(path, expected), verified)


def _fetch_once(request: _Request) -> Fetched:
    """The file, its bytes verified; whatever goes wrong is a DownloadError that says what to do."""
    try:
        return _from_cache_or_hub(request)
    except UnreachableError as error:
        cached = "" if request.update else f" It is not in the cache, {cache_folder()}."
        raise DownloadError(f"{error.text}{cached}", python=error.python, command=error.command) from error
    except DownloadError:
        raise
    except (OSError, transport_error()) as error:
        raise DownloadError(
            f"Cannot keep {request.file} in {cache_folder()}: {error}. Nothing unfinished is ever used.",
            python="Run it again, after freeing some space or setting VITLITE_CACHE (or HF_HUB_CACHE) to a folder that "
            "can be written.",
        ) from error
    except ValueError as error:  # the client's, for names that cannot be
        raise DownloadError(f"Cannot fetch {request.file}: {error}", python="A repository id is owner/name.") from error


def _fetch_again(request: _Request, damage: WrongBytesError) -> Fetched:
    """The file, after a damaged one was removed."""
    try:
        return _fetch_once(request)
    except WrongBytesError as again:
        _remove(again)
        raise
    except DownloadError as error:
        raise DownloadError(f"{damage} {error.text}", python=error.python, command=error.command) from error


def _remove(damage: WrongBytesError) -> None:
    """Removes a file with wrong bytes, and the link to it."""
    try:
        for path in (damage.path.resolve(), damage.path):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise DownloadError(f"{damage} It cannot be removed: {error}.") from error


def _from_cache_or_hub(request: _Request) -> Fetched:
    found = _from_cache(_with_pin(request))
    if found is not None:
        return found
    with _download_lock(request.file):
        pinned = _with_pin(request)  # another process may have fetched and pinned it while we waited
        found = _from_cache(pinned)
        return _from_hub(pinned) if found is None else found


@contextmanager
def _download_lock(file: RemoteFile) -> Iterator[None]:
    """One process at a time downloads a file. Without locks, or a place for them, each does: see `finish_download`."""
    name = hashlib.sha256(f"{file.repo}/{file.filename}".encode()).hexdigest()[:32]
    path = state_folder() / "locks" / f"{name}.lock"
    with ExitStack() as held:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(path, wait=True))
        yield


def _with_pin(request: _Request) -> _Request:
    """The request with the pin's commit and hash, where there is a pin that does not contradict the caller."""
    if request.zoo_name is None or request.update:
        return request
    pin = read_pin(request.zoo_name)
    if pin is None:
        return request
    file = request.file
    is_this_file = (file.repo, file.filename) == (pin.repo, pin.filename)
    is_this_commit = file.revision in ("main", pin.commit)
    has_these_bytes = request.sha256 in (None, pin.sha256)
    if not (is_this_file and is_this_commit and has_these_bytes):
        return request
    return request._replace(file=file._replace(revision=pin.commit), sha256=pin.sha256, verified=pin.verified)


def _from_cache(request: _Request) -> Fetched | None:
    """The cached file, where a full commit hash says which one; the network is not looked at."""
    commit = request.file.revision
    if not COMMIT.fullmatch(commit):
        return None
    path = _cached(request.file)
    return None if path is None else _check_and_pin(path, request, commit)


def _from_hub(request: _Request) -> Fetched:
    """The file as the Hub has it now; the cached one, with a log line, where the Hub cannot be reached."""
    patient = request.update or _look_up(request.file) is None
    try:
        statement = ask_hub(request.file, patient=patient)
    except AbsentError:
        with suppress(OSError):
            _link(request.file, None)  # the client notes the absence, which is then known offline too
        raise
    except UnreachableError as error:
        return _from_cache_unasked(request, error)
    path = _cached(request.file._replace(revision=statement.commit))
    if path is None:
        path = _download(request, statement)
    return _check_and_pin(path, request, statement.commit, statement.etag)


def _from_cache_unasked(request: _Request, unreachable: UnreachableError) -> Fetched:
    """The cached file of a branch or tag, where the Hub cannot say whether it has a newer one."""
    path = None if request.update else _cached(request.file)
    if path is None:
        raise unreachable
    commit = _commit_of(path, request.file)
    _log.warning("%s: %s. Using the cached commit %s.", request.file, unreachable.why, commit)
    return _check_and_pin(path, request, commit)


def _download(request: _Request, statement: Statement) -> Path:
    """Puts the right bytes where the Hub's client looks for them. (Were that to change, it would fetch them again.)"""
    from huggingface_hub.file_download import repo_folder_name

    folder = cache_folder() / repo_folder_name(repo_id=request.file.repo, repo_type="model")
    blob = folder / "blobs" / statement.etag
    if not blob.exists():  # if it does, it is another commit's, and checked like any other
        _download_blob(blob, request, statement)
    path = _link(request.file, statement.token)
    if not path.is_symlink():  # where there are no links (Windows) the client has made a copy
        blob.unlink(missing_ok=True)
    return path


def _download_blob(blob: Path, request: _Request, statement: Statement) -> None:
    incomplete = blob.with_name(f"{blob.name}.vitlite.incomplete")  # the ending that `hf cache` knows and prunes
    finish_download(request.file._replace(revision=statement.commit), statement, incomplete)
    try:
        stamp = stamps.stamp_of(incomplete)
        verified = _compare(incomplete, stamp, request, statement.etag)
        incomplete.replace(blob)
        stamps.remember(blob, Stamp(stamps.stat_of(blob), stamp.sha256, verified))
    except OSError:
        if not blob.exists():  # unless another process was quicker
            raise


def _link(file: RemoteFile, token: bool | None) -> Path:
    """Lets the Hub's client link the blob that was placed, and keep its own notes; it fetches what it misses."""
    from huggingface_hub import hf_hub_download

    place: dict[str, Any] = {"cache_dir": cache_folder(), "endpoint": endpoint(), "token": token}
    return Path(hf_hub_download(file.repo, file.filename, revision=file.revision, **place))


def _cached(file: RemoteFile) -> Path | None:
    """The file in the Hub's cache; None where nothing is known of it.

    Raises:
        AbsentError: It is known that the repository has no such file.
    """
    known = _look_up(file)
    if known is None:
        return None
    if isinstance(known, str):
        return Path(known)
    raise AbsentError(file)


def _look_up(file: RemoteFile) -> Any:
    """What the client knows without a network: the path, a mark that there is no such file, or None."""
    if COMMIT.fullmatch(file.revision):
        # A warm start spares importing the client, which takes longer than checking the stamp.
        folder = cache_folder() / f"models--{file.repo.replace('/', '--')}"  # as the client documents it
        path = folder / "snapshots" / file.revision / file.filename
        if path.is_file():
            return str(path)
    from huggingface_hub import try_to_load_from_cache

    return try_to_load_from_cache(file.repo, file.filename, cache_dir=cache_folder(), revision=file.revision)


def _commit_of(path: Path, file: RemoteFile) -> str:
    """The commit of a cached file, which is the name of the folder that the file's own path begins in."""
    depth = len(Path(file.filename).parts)
    return path.parents[depth - 1].name


def _check_and_pin(path: Path, request: _Request, commit: str, etag: str | None = None) -> Fetched:
    """The cached file, if it has the bytes that it should have; it is then remembered, and pinned where asked."""
    stamp = stamps.stamp_of(path)
    verified = _compare(path, stamp, request, etag)
    stamps.remember(path, stamp._replace(verified=verified))
    if request.zoo_name is not None:
        write_pin(request.zoo_name, Pin(request.file.repo, request.file.filename, commit, stamp.sha256, verified))
    return Fetched(path, commit, stamp.sha256, verified)


def _compare(path: Path, stamp: Stamp, request: _Request, etag: str | None) -> Verified:
    """Who vouches for the bytes of a file: the caller, else the Hub, else our memory.

    The Hub states a sha256 for large files, and git's own hash for small ones.

    Raises:
        WrongBytesError: They are others.
    """
    known = stamps.read_stamp(path) or stamp
    verified, expected, got = known.verified, known.sha256, stamp.sha256
    if request.sha256:
        verified, expected = request.verified, request.sha256
    elif etag and len(etag) == SHA256_LENGTH:
        verified, expected = "hub", etag
    elif etag and COMMIT.fullmatch(etag):
        verified, expected, got = "hub", etag, stamps.git_hash(path)
    if expected != got:
        raise WrongBytesError(path, expected, got)
    return verified
