"""Download files from the Hugging Face Hub into the Hub's cache, and verify the files.

The Hub's client handles the cache layout, tokens, endpoints, retries and offline mode. This module does two things that
the client does not: it compares every file with a hash, and it resumes the download of a killed process (see
huggingface_hub #4196 and #3648). It writes a verified file into the cache as a blob, and the client then adds the
entries for the commit.
"""

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

from vitlite.errors import DownloadError
from vitlite.storage import (
    Verified,
    WrongBytesError,
    cache_folder,
    check_sha256,
    hash_of,
    lock,
    remember,
    sha256_of,
    write_text,
)

_log = getLogger("vitlite")
_COMMIT = re.compile("[0-9a-f]{40}")
ATTEMPTS = 5  # after broken connections, if each attempt received some bytes
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # git's sha1 for small files, sha256 for large files
_REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_PATH = re.compile(r"\w[\w.+=@-]*(/\w[\w.+=@-]*)*", re.ASCII)  # no part begins with a dot, so none is ".."
_BUSY = (408, 429, 500, 502, 503, 504)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)


class Downloaded(NamedTuple):
    """A verified file in the cache, and the source of the expected hash."""

    path: Path
    commit: str
    sha256: str
    verified: Verified


class AbsentError(DownloadError):
    """Raised if the repository does not contain the file."""


class UnreachableError(DownloadError):
    """Raised if the Hub does not answer or is busy, or if offline mode is on."""

    def __init__(self, file: "_File", reason: str) -> None:
        first_sentence = reason.partition(". ")[0].rstrip(".")
        super().__init__(
            f"Cannot download {file} to {cache_folder()}: {first_sentence}.\nWithout a connection, pass a file with "
            "weights= (--weights FILE), or use vit_nano_4.cifar10, which is part of vitlite."
        )
        self.reason = reason


@dataclass(frozen=True)
class _File:
    """A file of a repository at a branch, tag or commit."""

    repo: str
    name: str
    revision: str
    sha256: str | None = None

    def __post_init__(self) -> None:
        for value, pattern, meaning in (
            (self.repo, _REPO, "name of a repository (owner/name)"),
            (self.name, _PATH, "name of a file in a repository"),
            (self.revision, _PATH, "name of a branch, tag or commit"),
        ):
            if not isinstance(value, str) or not pattern.fullmatch(value):
                raise DownloadError(f"{value!r} is not a valid {meaning}.")

    def __str__(self) -> str:
        return f"{self.name} of {self.repo}@{self.revision}"

    @property
    def url(self) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repo, self.name, revision=self.revision, endpoint=endpoint())

    @property
    def folder(self) -> Path:
        return cache_folder() / f"models--{self.repo.replace('/', '--')}"


def fetch(
    repo: str,
    filename: str,
    *,
    revision: str | None = None,
    sha256: str | None = None,
    prefer_cache: bool = False,
    moves_branch: bool = True,
) -> Downloaded:
    """Return a verified file of a repository from the cache or the Hub.

    Args:
        repo: The repository, as "owner/name".
        filename: The path of the file in the repository.
        revision: A branch, tag or commit; None means "main". A cached commit needs no connection.
        sha256: The expected hash; None means the hash that the Hub reports.
        prefer_cache: If True, use a cached file of a branch without asking the Hub for a newer commit. Otherwise, ask
            the Hub first.
        moves_branch: If True, record the new commit of a branch in the cache. Otherwise, the caller must do this with
            `move_branch`.

    Raises:
        AbsentError: The repository does not contain the file.
        DownloadError: The file cannot be downloaded, or has the wrong hash.
    """
    file = _File(repo, filename, revision or "main", sha256)
    damage = None
    if prefer_cache or _COMMIT.fullmatch(file.revision):
        try:
            cached = _find_in_cache(file)
        except WrongBytesError as error:
            damage = error
            _log.warning("%s", error)
        else:
            if cached is not None:
                return cached
    try:
        found = _fetch_from_hub(file)
    except UnreachableError as error:
        if damage is not None:
            raise damage from None
        cached = _find_in_cache(file)
        if cached is None:
            raise
        _log.warning("%s: %s. Using the cached commit %s.", file, error.reason, cached.commit)
        return cached
    if moves_branch:
        move_branch(repo, revision, found.commit)
    return found


def fetch_optional(repo: str, filename: str, **options: Any) -> Downloaded | None:
    """Return the result of `fetch`, or None if the repository does not contain the file."""
    try:
        return fetch(repo, filename, **options)
    except AbsentError:
        return None


def move_branch(repo: str, revision: str | None, commit: str) -> None:
    """Record the latest commit of a branch in the cache, so that the branch can be used offline."""
    file = _File(repo, "any", revision or "main")
    reference = file.folder / "refs" / file.revision
    with suppress(OSError):
        if not _COMMIT.fullmatch(file.revision) and not (
            reference.exists() and reference.read_text(encoding="ascii") == commit
        ):
            reference.parent.mkdir(parents=True, exist_ok=True)
            write_text(reference, commit)


def find_cached(repo: str, filename: str, revision: str | None = None) -> Path | None:
    """Return the path of a cached file without verifying it, or None if it is not in the cache."""
    file = _File(repo, filename, revision or "main")
    path = file.folder / "snapshots" / _cached_commit(file) / filename
    return path if path.is_file() else None


def stated_hash(path: Path) -> str | None:
    """Return the hash that the Hub reported for a cached file, or None if the hash is unknown.

    The cache stores the content of each file in a blob whose name is this hash.
    """
    blob = path.parent / os.readlink(path) if path.is_symlink() else path
    return blob.name if blob.parent.name == "blobs" and _HASH.fullmatch(blob.name) else None


def endpoint() -> str:
    """Return the address of the Hub, or of the mirror in HF_ENDPOINT."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, now or when huggingface_hub was imported."""
    from huggingface_hub import constants

    now = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return bool(constants.HF_HUB_OFFLINE) or now.upper() in ("1", "ON", "YES", "TRUE")


def _cached_commit(file: _File) -> str:
    """Return the revision of a file if it is a commit, otherwise the last known commit of the branch, or "none".

    This function does not use the client, because importing the client takes longer than loading a model.
    """
    if _COMMIT.fullmatch(file.revision):
        return file.revision
    with suppress(OSError, ValueError):
        commit = (file.folder / "refs" / file.revision).read_text(encoding="ascii").strip()
        if _COMMIT.fullmatch(commit):
            return commit
    return "none"


def _find_in_cache(file: _File) -> Downloaded | None:
    """Return a cached file at a commit or at the last known commit of a branch, or None if the file is not cached."""
    commit = _cached_commit(file)
    path = file.folder / "snapshots" / commit / file.name
    if path.is_file():
        return _checked(path, commit, file)
    if (file.folder / ".no_exist" / commit / file.name).is_file():
        raise AbsentError(f"{file.repo}@{file.revision} has no file {file.name}.")
    return None


def _checked(path: Path, commit: str, file: _File) -> Downloaded:
    """Compare a cached file with the expected hash or, if there is none, with the hash that the Hub reported."""
    stated = stated_hash(path)
    if file.sha256:
        return Downloaded(path, commit, check_sha256(path, file.sha256), "record")
    if stated is None:
        return Downloaded(path, commit, sha256_of(path), "first use")
    _check(path, stated)
    return Downloaded(path, commit, sha256_of(path), "hub")


def _check(path: Path, stated: str) -> None:
    found = sha256_of(path) if len(stated) == 64 else _git_hash(path)
    if found != stated:
        raise WrongBytesError(path, stated, found)


def _git_hash(path: Path) -> str:
    """Return git's hash of a file, which the Hub reports for small files."""
    return hash_of(path, hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False))


def _fetch_from_hub(file: _File) -> Downloaded:
    with _explained(file):
        metadata = _metadata_on_hub(file)
        commit, etag = str(metadata.commit_hash), str(metadata.etag)
        if not _COMMIT.fullmatch(commit):
            raise DownloadError(
                f"Cannot download {file}: the response from {endpoint()} does not come from the Hugging Face Hub. "
                "Check HF_ENDPOINT, your proxy, and whether the network needs a login."
            )
        if file.sha256 and len(etag) == 64 and etag != file.sha256:
            raise DownloadError(
                f"Cannot download {file}: the file on {endpoint()} has the wrong sha256: expected {file.sha256}, got "
                f"{etag}. Check HF_ENDPOINT, or upgrade vitlite."
            )
        _add_to_cache(replace(file, revision=commit), etag, metadata.size)
        return _checked(file.folder / "snapshots" / commit / file.name, commit, file)


def _add_to_cache(file: _File, etag: str, size: int | None) -> None:
    """Download the file of a commit unless a correct copy is in the cache, and let the client add the cache entry."""
    path = file.folder / "snapshots" / file.revision / file.name
    if not _HASH.fullmatch(etag):  # a mirror without hashes
        _link_or_download(file)
    elif not _is_right(path, etag):
        blob = file.folder / "blobs" / etag
        with _one_process(blob):
            if not _is_right(blob, etag):
                _download(file, size, blob)
        if not path.is_symlink():
            path.unlink(missing_ok=True)  # without symbolic links, the path is a damaged copy
        _link_or_download(file)
        if not path.is_symlink():
            blob.unlink()  # the client made a copy


def _link_or_download(file: _File) -> None:
    """Let the client link a downloaded blob into the snapshot of the commit, or download a file without a hash."""
    from huggingface_hub import hf_hub_download

    hf_hub_download(file.repo, file.name, revision=file.revision, cache_dir=cache_folder(), endpoint=endpoint())


def _metadata_on_hub(file: _File) -> Any:
    """Return the commit, hash and size that the Hub reports for a file."""
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.errors import EntryNotFoundError

    if is_offline():
        raise UnreachableError(file, "offline mode is on (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set)")
    try:
        return get_hf_file_metadata(file.url)
    except EntryNotFoundError as error:
        commit = error.response.headers.get("X-Repo-Commit")  # type: ignore[attr-defined]
        if commit is not None:  # record in the cache that the commit does not contain the file
            with suppress(Exception):
                _link_or_download(replace(file, revision=commit))
        raise AbsentError(f"{file.repo}@{file.revision} has no file {file.name}.") from None


@contextmanager
def _one_process(blob: Path) -> Iterator[None]:
    """Hold the client's lock for a blob, so that only one process downloads the blob."""
    path = cache_folder() / ".locks" / blob.parents[1].name / f"{blob.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock(path):
        yield


def _is_right(path: Path, stated: str) -> bool:
    try:
        _check(path, stated)
    except OSError:  # includes WrongBytesError
        return False
    return True


def _download(file: _File, size: int | None, blob: Path) -> None:
    """Download a blob, or resume the download of an earlier process. A file with the wrong hash is removed."""
    incomplete = blob.with_name(f"{blob.name}.incomplete")
    incomplete.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):  # if the bytes of an earlier process are wrong, download from the start
        _receive(file, size, incomplete)
        stat = incomplete.stat()
        found = hash_of(incomplete, hashlib.sha256()) if len(blob.name) == 64 else _git_hash(incomplete)
        if found == blob.name:
            os.replace(incomplete, blob)
            if len(found) == 64:
                remember(blob, stat, found)
            return
        incomplete.unlink()
    raise WrongBytesError(incomplete, blob.name, found)


def _receive(file: _File, size: int | None, incomplete: Path) -> None:
    """Append the missing bytes to a partly downloaded file. A broken connection is opened again."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    for attempt in range(ATTEMPTS):
        with open(incomplete, "ab") as out:
            if size is not None and out.tell() > size:  # older clients append a whole file
                out.truncate(0)
            start = out.seek(0, os.SEEK_END)
            try:
                http_get(file.url, out, resume_size=start, headers=headers, expected_size=size)
            except Exception as error:
                received = out.tell() > start
                if not received or attempt == ATTEMPTS - 1 or getattr(error, "errno", None) in _DISK:
                    raise
            else:
                out.flush()
                os.fsync(out.fileno())
                return


@contextmanager
def _explained(file: _File) -> Iterator[None]:
    """Turn errors of the client, the network and the disk into a DownloadError that says what to do."""
    try:
        yield
    except DownloadError:
        raise
    except Exception as error:  # requests, httpx and the client share no base class
        _log.debug("%s", file, exc_info=True)
        raise _explanation(file, error) from None


def _explanation(file: _File, error: Exception) -> DownloadError:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    reason = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
    text = f"Cannot download {file}: {reason}."
    if isinstance(error, GatedRepoError):
        page = f"{endpoint()}/{file.repo}"
        return DownloadError(f"{text} Accept the licence at {page}. Then log in with `hf auth login`, or set HF_TOKEN.")
    if isinstance(error, HfHubHTTPError) and error.response.status_code not in _BUSY:
        return DownloadError(
            f"{text} Check the repository and the revision. A private repository needs a login (hf auth login, or "
            "HF_TOKEN); renew or unset an expired token."
        )
    if isinstance(error, OSError) and error.errno in _DISK:
        return DownloadError(f"{text} Free some space, or set VITLITE_CACHE to a writable folder.")
    return UnreachableError(file, reason)
