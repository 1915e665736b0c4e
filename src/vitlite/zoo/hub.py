"""A file of a repository on the Hub -> a verified file in the cache.

The cache, tokens, endpoint and offline switches are those of huggingface_hub, which checks no hash. Here every file is
hashed once and remembered (`stamps`), and a zoo name keeps its bytes (`pins`), so that a warm start needs no socket.
Nothing in the cache is given up before something better has come and was verified. How the bytes came does not matter;
see `download` for how they come.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from logging import getLogger
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from vitlite.errors import DownloadError, VitliteError, shown
from vitlite.storage import cache_folder, lock, state_folder
from vitlite.zoo import stamps
from vitlite.zoo.cache import blob_of, commit_of, hash_in_name, look_up, move_branch, note_absence, place, stated_hash
from vitlite.zoo.download import Statement, ask_hub, finish_download
from vitlite.zoo.folders import stat_of
from vitlite.zoo.network import UnreachableError, said_after_a_while
from vitlite.zoo.pins import Pin, is_name, pin_path, read_pin, write_pin
from vitlite.zoo.remote import COMMIT, SHA256, AbsentError, RemoteFile, is_hash
from vitlite.zoo.stamps import ASKED, REMEMBERED, STATED, Stamp, Verified, WrongBytesError, is_sha256

P = ParamSpec("P")
T = TypeVar("T")

_log = getLogger("vitlite")


class Fetched(NamedTuple):
    """A file whose bytes were checked, and what they were checked against.

    `verified` is "record" (the sha256 the caller gave), "hub" (the hash the Hub states for the file, or stated when it
    came), or "first use" (nobody states one; what came first is remembered and compared from then on).
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
    says_who: str
    zoo_name: str | None  # the name to pin
    update: bool
    moves_branch: bool
    is_pinned: bool = False  # whether the pin says what is wanted


def _plainly(function: Callable[P, T]) -> Callable[P, T]:
    """Ends with an error that has no chain behind it: the HTTP library's own hundred lines help nobody."""

    @wraps(function)
    def plain(*args: P.args, **options: P.kwargs) -> T:
        try:
            return function(*args, **options)
        except VitliteError as error:
            _log.debug("%s", error, exc_info=True)
            raise error.with_traceback(None) from None

    return plain


@_plainly
def fetch(
    repo: str,
    filename: str,
    *,
    revision: str | None = None,
    sha256: str | None = None,
    pin: str | None = None,
    update: bool = False,
    moves_branch: bool = True,
) -> Fetched:
    """Hands over a repository's file from the cache or the Hub, its bytes verified.

    Args:
        repo: "owner/name".
        filename: Path within the repository.
        revision: Branch, tag or commit; None is "main". With a full commit hash and a warm cache no socket is opened.
        sha256: What the file must hash to. None: what the pin, else the Hub, states.
        pin: A zoo name. Its first verified download is remembered, and later calls hand over those bytes.
        update: Forget the pin, ask the Hub, and pin what it has now (compare the pins before and after).
        moves_branch: Whether the cache notes at once that the branch is at this commit. False where more files of the
            commit are to come: `arrive` then does, so that what is used offline is complete.

    Raises:
        DownloadError: The file is not there, cannot be fetched, or its bytes are wrong. The text says what to do.
    """
    file = RemoteFile(repo, filename, "main" if revision is None else revision)
    _check_sha256(sha256)
    if pin is not None and not is_name(pin):
        raise DownloadError(f"{shown(repr(pin))} is no name of a model to pin: letters, digits and ._-")
    request = _Request(file, sha256, "record", ASKED, pin, update, moves_branch)
    try:
        return _from_cache_or_hub(request)
    except OSError as error:
        raise _in_words(request, error) from error


def fetch_optional(
    repo: str, filename: str, *, revision: str | None = None, moves_branch: bool = True
) -> Fetched | None:
    """Like `fetch`, for a file that a repository may lack; None means that the Hub says it is not there.

    Not knowing (no network, nothing cached) is a DownloadError, as in `fetch`. Pass the weights' `Fetched.commit` as
    `revision`, so that all files are of one commit.
    """
    try:
        return fetch(repo, filename, revision=revision, moves_branch=moves_branch)
    except AbsentError:
        return None


def arrive(repo: str, revision: str | None, commit: str) -> None:
    """Notes that all wanted files of a branch's commit are in the cache, so that it is used where the Hub is silent."""
    move_branch(RemoteFile(repo, "config.json", "main" if revision is None else revision), commit)


@_plainly
def verify(target: Path | str, sha256: str | None = None) -> Fetched:
    """Hashes a file again whatever its stamp says: a pinned zoo name, or the path of a file, and what it must hash to.

    Raises:
        DownloadError: Not here, or its bytes are not those wanted, pinned, stated by the Hub, or last read; and what to
            do.
    """
    if not isinstance(target, (str, Path)):
        raise DownloadError(f"Cannot verify {shown(repr(target))}: it is neither a name nor the path of a file.")
    _check_sha256(sha256)
    try:
        return _verify(target, sha256)
    except DownloadError:
        raise
    except OSError as error:
        raise DownloadError(
            f"Cannot verify {shown(str(target))}: {shown(str(error))}.", python="Check the permissions of the cache."
        ) from error


def _verify(target: Path | str, sha256: str | None) -> Fetched:
    pin = read_pin(str(target))
    path: Path | None = Path(target)
    stated = hash_in_name(Path(target))
    commit, expected, says_who = None, None, REMEMBERED
    verified: Verified = "first use"
    if is_sha256(stated):
        expected, says_who, verified = stated, STATED, "hub"
    if pin is not None:
        path, commit = look_up(RemoteFile(pin.repo, pin.filename, pin.commit)), pin.commit
        expected, says_who, verified = pin.sha256, _pinned(str(target)), pin.verified
    if sha256 is not None:
        expected, says_who, verified = sha256, ASKED, "record"
    if path is None or not _is_file(path):
        raise DownloadError(
            f"Cannot verify {shown(str(target))}: it is neither a file nor a model in the cache.",
            python="Check the path, or fetch the model with `vitlite download NAME`.",
        )
    return Fetched(path, commit, stamps.check_again(path, expected, says_who), verified)


def _check_sha256(sha256: str | None) -> None:
    if sha256 is not None and not is_sha256(sha256):
        raise DownloadError(f"{shown(repr(sha256))} is no sha256, which has 64 hexadecimal digits, a to f small.")


def _is_file(path: Path) -> bool:
    with suppress(OSError):  # such as: a name too long for any file
        return path.is_file()
    return False


def _pinned(zoo_name: str) -> str:
    return f"The first is what {pin_path(zoo_name)} pins."


def _in_words(request: _Request, error: OSError) -> DownloadError:
    """What went wrong, and what to do."""
    file = request.file
    if isinstance(error, UnreachableError):
        cached = "" if request.update else f" It is not in the cache, {cache_folder()}."
        python, command = _way_out(request)
        return DownloadError(f"{error.text}{cached}", python=python, command=command)
    if isinstance(error, DownloadError):
        return error
    return DownloadError(
        f"Cannot keep {file} in {cache_folder()}: {error}. Nothing unfinished is ever used.",
        python="Run it again, after freeing some space or setting VITLITE_CACHE (or HF_HUB_CACHE) to a folder that can "
        "be written.",
    )


OFFLINE = "Without any download: --model vit_nano_4.cifar10 (the ten classes of CIFAR-10) comes with vitlite."


def _way_out(request: _Request) -> tuple[str, str]:
    """What to do without a network, in Python's words and in the command line's: what works for just this file."""
    file, name = request.file, request.zoo_name
    otherwise = "Or copy that machine's cache here. HF_ENDPOINT names a mirror."
    if name is None:
        folder = f"./{file.repo.partition('/')[2]}"
        by_hand = (
            f"Where there is a network: `hf download {file.repo} --revision {file.revision} --local-dir {folder}`. "
            f"Copy that folder here, and give it instead of {file.repo}:"
        )
        return f"{by_hand} vitlite.load({folder!r}). {otherwise}", f"{by_hand} --model {folder}  {otherwise} {OFFLINE}"
    saved = file.filename.rpartition("/")[2]
    by_hand = f"Where there is a network, download {file.url} and use that file here:"
    return (
        f"{by_hand} vitlite.create({name!r}, weights={saved!r}). {otherwise}",
        f"{by_hand} --model {name} --weights {saved} (export and positions take the name without --model). {otherwise} "
        f"{OFFLINE}",
    )


# ---- from the cache


def _from_cache_or_hub(request: _Request) -> Fetched:
    with suppress(WrongBytesError):
        found = _from_cache(_with_pin(request))
        if found is not None:
            return found
    with _download_lock(request.file):
        pinned = _with_pin(request)  # another process may have fetched and pinned it while we waited
        try:
            found = _from_cache(pinned)
        except WrongBytesError as damage:
            return _instead_of(damage, pinned)
        return _from_hub(pinned) if found is None else found


def _instead_of(damage: WrongBytesError, request: _Request) -> Fetched:
    """The file from the Hub, where that in the cache is damaged."""
    _log.warning("%s Asking the Hub.", damage.text)
    try:
        return _from_hub(request)
    except OSError as error:
        why = _in_words(request, error)
        raise DownloadError(f"{damage.text} {why.text}", python=why.python, command=why.command) from error


@contextmanager
def _download_lock(file: RemoteFile) -> Iterator[None]:
    """One process at a time downloads a file. Without locks, or a place for them, each does: see `finish_download`."""
    name = hashlib.sha256(f"{file.repo}/{file.filename}".encode()).hexdigest()[:32]
    path = state_folder() / "locks" / f"{name}.lock"
    with ExitStack() as held:
        with suppress(OSError), said_after_a_while(f"{file}: waiting for another process, which holds {path}."):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock(path))
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
    return request._replace(
        file=file.at(pin.commit),
        sha256=pin.sha256,
        verified=pin.verified,
        says_who=_pinned(request.zoo_name),
        is_pinned=True,
    )


def _from_cache(request: _Request) -> Fetched | None:
    """The cached file, where a full commit hash says which one; the network is not looked at."""
    if not request.file.is_at_commit:
        return None
    path = look_up(request.file)
    return None if path is None else _check_and_pin(path, request, request.file.revision)


# ---- from the Hub


def _from_hub(request: _Request) -> Fetched:
    """The file as the Hub has it now; the cached one, with a log line, where the Hub cannot be reached."""
    patient = request.update or not _is_known(request.file)
    try:
        statement = ask_hub(request.file, patient=patient)
    except AbsentError as absent:
        if absent.commit is not None:
            note_absence(request.file, absent.commit)
        raise
    except UnreachableError as error:
        return _from_cache_unasked(request, error)
    file = request.file.at(statement.commit)
    fetched = _cached_as_stated(file, request, statement)
    if fetched is None:
        path = _download(file, request, statement)
        fetched = _check_and_pin(path, request, statement.commit, statement.etag)
    if request.moves_branch:
        move_branch(request.file, statement.commit)
    return fetched


def _is_known(file: RemoteFile) -> bool:
    """Whether the cache has a file, or knows that there is none: of a branch, the Hub may know better by now."""
    try:
        return look_up(file) is not None
    except AbsentError:
        return True


def _from_cache_unasked(request: _Request, unreachable: UnreachableError) -> Fetched:
    """The cached file of a branch or tag, where the Hub cannot say whether it has a newer one."""
    path = None if request.update or request.file.is_at_commit else look_up(request.file)
    if path is None:
        raise unreachable
    commit = commit_of(path, request.file)
    _log.warning("%s: %s. Using the cached commit %s.", request.file, unreachable.why, commit)
    return _check_and_pin(path, request, commit)


def _cached_as_stated(file: RemoteFile, request: _Request, statement: Statement) -> Fetched | None:
    """The file of that commit in the cache, if its bytes are right.

    Raises:
        WrongBytesError: They are what the Hub states, but the caller or the pin wants others, which it has not.
    """
    _refuse_contradiction(file, request, statement)
    path = look_up(file)
    if path is None:
        return None
    if path.stat().st_size != statement.size:
        _log.warning("%s: %s has another size than the Hub states. Fetching it again.", file, path)
        return None
    try:
        return _check_and_pin(path, request, statement.commit, statement.etag)
    except WrongBytesError as damage:
        _log.warning("%s Fetching it again.", damage.text)
        return None


def _refuse_contradiction(file: RemoteFile, request: _Request, statement: Statement) -> None:
    """Nothing is fetched, and nothing given up, where what the Hub has cannot be what is wanted."""
    wanted, stated = request.sha256, statement.etag
    if wanted is None or not SHA256.fullmatch(stated) or wanted == stated:
        return
    update = f" To pin what the Hub has: `vitlite download {request.zoo_name} --update`." if request.zoo_name else ""
    raise DownloadError(
        f"Wrong bytes on the Hub: expected hash {wanted}, got {stated} for {file}. {request.says_who}",
        python=f"Nothing was changed. If the first is wrong, correct it.{update}",
    )


def _download(file: RemoteFile, request: _Request, statement: Statement) -> Path:
    """Puts the right bytes where the Hub's client looks for them too."""
    blob = blob_of(file, statement.etag)
    is_new = not os.path.lexists(blob)
    if not _is_right(blob, request, statement):  # where it is: it came with another commit
        try:
            _download_blob(file, blob, request, statement)
        except WrongBytesError as damage:
            _log.warning("%s Fetching it once more.", damage.text)
            _download_blob(file, blob, request, statement)
    return place(blob, file, is_new=is_new)


def _is_right(blob: Path, request: _Request, statement: Statement) -> bool:
    if not blob.is_file() or blob.stat().st_size != statement.size:
        return False
    try:
        _compare(blob, stamps.stamp_of(blob), request, statement.etag)
    except DownloadError:
        return False
    return True


def _download_blob(file: RemoteFile, blob: Path, request: _Request, statement: Statement) -> None:
    incomplete = blob.with_name(f"{blob.name}.vitlite.incomplete")  # the ending that `hf cache` knows and prunes
    finish_download(file, statement, incomplete)
    try:
        stamp = stamps.hash_file(incomplete)
        verified = _compare(incomplete, stamp, request, statement.etag)
        incomplete.replace(blob)
        stamps.remember(blob, Stamp(stat_of(blob), stamp.sha256, verified))
    except WrongBytesError:
        incomplete.unlink(missing_ok=True)
        raise
    except OSError:
        if not _is_right(blob, request, statement):  # unless another process was quicker
            raise


def _check_and_pin(path: Path, request: _Request, commit: str, etag: str | None = None) -> Fetched:
    """The cached file, if it has the bytes that it should have; it is then remembered, and pinned where asked.

    Where the Hub was not asked, or states no hash, what it once stated counts.
    """
    stamp = stamps.stamp_of(path)
    stated = etag if etag and is_hash(etag) else stated_hash(path, request.file.at(commit))
    verified = _compare(path, stamp, request, stated)
    stamps.remember(path, stamp._replace(verified=verified))
    if request.zoo_name is not None and not request.is_pinned:  # its pin stays, or is what somebody made of it since
        pin = Pin(request.file.repo, request.file.filename, commit, stamp.sha256, verified)
        write_pin(request.zoo_name, pin, update=request.update)
    return Fetched(path, commit, stamp.sha256, verified)


def _compare(path: Path, stamp: Stamp, request: _Request, etag: str | None) -> Verified:
    """Who vouches for the bytes of a file: the caller, else the Hub, else our memory.

    The Hub states a sha256 for large files, and git's own hash for small ones.

    Raises:
        WrongBytesError: They are others.
    """
    known = stamps.read_stamp(path) or stamp
    verified, expected, got, says_who = known.verified, known.sha256, stamp.sha256, REMEMBERED
    if request.sha256:
        verified, expected, says_who = request.verified, request.sha256, request.says_who
    elif etag and SHA256.fullmatch(etag):
        verified, expected, says_who = "hub", etag, STATED
    elif etag and COMMIT.fullmatch(etag):
        verified, expected, got, says_who = "hub", etag, stamps.git_hash(path), STATED
    if expected != got:
        raise WrongBytesError(path, expected, got, says_who)
    return verified
