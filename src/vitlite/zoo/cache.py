"""Files of weights in the Hub's own cache.

In it, `models--owner--name` has the bytes in `blobs`, by their hash; the files of each commit in `snapshots`, as links
to blobs; the commit of each branch in `refs`; in `.no_exist` what a commit is known to lack; and in `trees`, of a
repository that the Hub's client fetched whole, what it has.
Other libraries read and write the same; so a file here takes its place whole, and a branch moves last.
"""

import hashlib
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from vitlite.errors import CheckpointError
from vitlite.schema import by_name, read_json, table, text, whole
from vitlite.storage import cache_folder, write_text
from vitlite.zoo.folders import is_no_file
from vitlite.zoo.remote import COMMIT, AbsentError, RemoteFile, is_hash

LISTED = table({"lfs_sha256": text(), "blob_id": text()})
TREE = table({"format_version": whole(1, 1), "files": by_name(LISTED)}, required=("format_version", "files"))
BLOBS = "blobs"
_YES = ("1", "ON", "YES", "TRUE")


def look_up(file: RemoteFile) -> Path | None:
    """The file in the cache; None where it is not known.

    Raises:
        AbsentError: It is known that the repository has no such file.
    """
    folder = _folder_of(file)
    commit = file.revision if file.is_at_commit else _commit_of_branch(folder / "refs" / file.revision)
    if commit is None:
        return None
    path = folder / "snapshots" / commit / file.filename
    if path.is_file():
        return path
    if (folder / ".no_exist" / commit / file.filename).is_file() or _is_unlisted(folder, commit, file.filename):
        raise AbsentError(file)
    return None


def stated_hash(path: Path, file: RemoteFile) -> str | None:
    """What the Hub stated of a cached file when it came; None where nothing here says so."""
    about = (_list_of(_folder_of(file), file.revision) or {}).get(file.filename, {})
    known = (hash_in_name(path), about.get("lfs_sha256"), about.get("blob_id"))
    return next((stated for stated in known if stated and is_hash(stated)), None)


def hash_in_name(path: Path) -> str | None:
    """What a blob of a Hub's cache is called, or that which a link leads to, if that is a hash."""
    blob = Path(os.readlink(path)) if os.path.islink(path) else path
    return blob.name if blob.parent.name == BLOBS and is_hash(blob.name) else None


def _is_unlisted(folder: Path, commit: str, filename: str) -> bool:
    """Whether the client has a list of all files of a commit, and this is none of them."""
    files = _list_of(folder, commit)
    return files is not None and filename not in files


def _list_of(folder: Path, commit: str) -> dict[str, dict[str, str]] | None:
    """The client's list of all files of a commit; None where there is none, or one that a later client writes anew."""
    try:
        files: dict[str, dict[str, str]] = read_json(folder / "trees" / f"{commit}.json", TREE)["files"]
    except CheckpointError:
        return None
    return files


def _commit_of_branch(ref: Path) -> str | None:
    """The commit that was a branch's when it was last asked for."""
    if is_no_file(ref):
        return None
    try:
        with ref.open("rb") as file:
            commit = file.read(41).decode("ascii", "replace").strip()
    except OSError:
        return None
    return commit if COMMIT.fullmatch(commit) else None


def commit_of(path: Path, file: RemoteFile) -> str:
    """The commit of a cached file, which is the name of the folder that the file's own path begins in."""
    depth = len(Path(file.filename).parts)
    return path.parents[depth - 1].name


def blob_of(file: RemoteFile, etag: str) -> Path:
    """Where the bytes of a commit's file are kept: by their hash, where the ETag is one.

    Another ETag (of nginx: when a file was made, and its size) may be that of other bytes, too.
    """
    if not is_hash(etag):
        about = hashlib.sha256(f"{file.revision}/{file.filename}/{etag}".encode()).hexdigest()
        etag = f"{etag[:60]}.{about[:32]}"
    return _folder_of(file) / BLOBS / etag


def place(blob: Path, file: RemoteFile, *, is_new: bool) -> Path:
    """Lets the file of a commit lead to its blob; where there are no links (Windows), a new blob becomes that file.

    One that was there before is copied then: files of other commits may lead to it.
    """
    path = _folder_of(file) / "snapshots" / file.revision / file.filename
    if path.is_symlink() and os.path.realpath(path) == os.path.realpath(blob):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{secrets.token_hex(8)}.vitlite.incomplete")
    try:
        if not _is_linked(beside, blob):
            if is_new:
                beside = blob
            else:
                shutil.copyfile(blob, beside)
        os.replace(beside, path)
    finally:
        if beside != blob:
            beside.unlink(missing_ok=True)
    return path


def _is_linked(link: Path, blob: Path) -> bool:
    """Whether a link to a blob could be made there."""
    try:
        if os.environ.get("HF_HUB_DISABLE_SYMLINKS", "").upper() in _YES:
            raise OSError("links are not wanted")
        target = os.path.join(os.path.realpath(blob.parent), blob.name)
        link.symlink_to(os.path.relpath(target, os.path.realpath(link.parent)))
    except (OSError, ValueError):  # the second: on another drive
        return False
    return True


def move_branch(file: RemoteFile, commit: str) -> None:
    """Notes that the file's branch is at this commit now, for when the Hub cannot be asked."""
    ref = _folder_of(file) / "refs" / file.revision
    if file.is_at_commit or _commit_of_branch(ref) == commit:
        return
    with suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        write_text(ref, commit)


def note_absence(file: RemoteFile, commit: str) -> None:
    """Notes that a commit has no such file, for when the Hub cannot be asked."""
    with suppress(OSError):
        path = _folder_of(file) / ".no_exist" / commit / file.filename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def _folder_of(file: RemoteFile) -> Path:
    return cache_folder() / f"models--{file.repo.replace('/', '--')}"
