"""Write files atomically, read JSON files, and manage locks, cache folders and the hashes of files.

The verified-file cache stores the sha256 of each weights file in a small JSON file. A cached hash is valid until the
size, the modification time or the inode of the weights file changes. If the cache is damaged or not writable, files are
hashed again. With VITLITE_VERIFY=always, cached hashes are ignored.
"""

import glob
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from vitlite.errors import CheckpointError, DownloadError

PARTIAL = ".partial"  # the suffix of temporary files
MAX_JSON = 16 * 2**20  # bytes; the class names of ImageNet-21k take 2 million
MAX_DEPTH = 32

# The source of the hash that a file was compared with: the registry, the Hub, or only the first download.
Verified = Literal["record", "hub", "first use"]


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename the temporary file to `path` at the end of the `with` block.

    If writing fails or the process is killed, an existing file is kept. The new file has the user's default
    permissions, unlike a file that mkstemp or safetensors creates.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    temporary.touch()
    mode = temporary.stat().st_mode
    try:
        yield temporary
        temporary.chmod(mode)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8 and without changing line endings."""
    with atomic_write(path) as temporary:  # backslashreplace: the text may contain file names that are not UTF-8
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of limited size and nesting.

    Raises:
        CheckpointError: The file cannot be read, is too large or too deeply nested, or is not a JSON object.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise OSError("the path is not a regular file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(min(size, MAX_JSON) + 1)  # read(n) allocates n bytes
        if len(content) > MAX_JSON:
            raise OSError(f"the file is larger than {MAX_JSON // 2**20} MB")
    except OSError as error:
        raise CheckpointError(
            f"Cannot read {path}: {error.strerror or error}. Check that it is a readable JSON file."
        ) from None
    try:
        value = json.loads(content)
        if not isinstance(value, dict):
            raise ValueError("the top level is not an object")
        level: list[Any] = [value]
        for _ in range(MAX_DEPTH):
            level = [
                inner
                for outer in level
                if isinstance(outer, (dict, list))
                for inner in (outer.values() if isinstance(outer, dict) else outer)
            ]
        if level:
            raise RecursionError
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8, or a very long number
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{path} is not a valid JSON file: {reason}. Correct it or download it again.") from None
    return value


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that killed processes left beside `path`. The caller must hold the lock for `path`."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}{PARTIAL}"):
        leftover.unlink(missing_ok=True)


def obstacle(path: Path) -> str:
    """Return the reason why the file `path` cannot be written, as a clause, or "" if it can be written."""
    if os.path.exists(path) and not os.path.isfile(path):
        return "it is not a regular file"
    return folder_obstacle(path.parent) if os.path.isdir(path.parent) else f"there is no folder {path.parent}"


def folder_obstacle(folder: Path) -> str:
    """Return the reason why `folder` cannot be created or written to, as a clause, or "" if it can."""
    existing = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), folder)
    if not os.path.isdir(existing):
        return f"{existing} is not a folder"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"the folder {existing} is not writable"


@contextmanager
def lock(path: Path, *, timeout: float | None = None) -> Iterator[None]:
    """Hold a file lock during a `with` block.

    Args:
        path: The lock file. Its folder must exist.
        timeout: The maximum number of seconds to wait for the lock. None means no limit. With a timeout, the lock file
            is removed at the end. Otherwise, it is kept, because other processes may be waiting for it.

    Raises:
        TimeoutError: Another process still held the lock after `timeout` seconds.
        OSError: The lock file cannot be created.
    """
    from huggingface_hub.utils import WeakFileLock

    with WeakFileLock(path, timeout=None if timeout is None else max(timeout, 0.01)):  # 0 would fail without trying
        try:
            yield
        finally:
            if timeout is not None:
                with suppress(OSError):  # on Windows, filelock has removed the file
                    path.unlink()


def cache_folder(kind: Literal["hub", "verified"] = "hub") -> Path:
    """Return the folder of downloaded weights ("hub") or of the verified-file cache ("verified").

    Both are in VITLITE_CACHE if this variable is set. Otherwise, weights are in the Hub's cache, and the verified-file
    cache is in the folder vitlite beside it, in HF_HOME.

    Raises:
        DownloadError: No environment variable gives a folder, and there is no home folder.
    """
    variable = os.environ.get
    own, home = variable("VITLITE_CACHE"), variable("HF_HOME")
    home = home or os.path.join(variable("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    if kind == "verified" or own:
        folder = os.path.join(own or os.path.join(home, "vitlite"), kind)
    else:
        folder = variable("HF_HUB_CACHE") or variable("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    path = os.path.expanduser(os.path.expandvars(folder))
    if path.startswith("~"):
        raise DownloadError(
            f"Cannot expand the cache folder {folder}: there is no home folder. Set VITLITE_CACHE to a writable folder."
        )
    return Path(path).absolute()


# ---- The verified-file cache


class WrongBytesError(DownloadError):
    """Raised if the hash of a file differs from the expected hash."""

    def __init__(self, path: Path, expected: str, got: str) -> None:
        super().__init__(
            f"Wrong hash of {path}: expected {expected}, got {got}. Download the file again. If the new copy is wrong "
            "as well, try another network or another HF_ENDPOINT."
        )


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file. The hash is cached until the file changes.

    Raises:
        DownloadError: The file cannot be read.
    """
    known = _remembered(path)
    if known:
        return str(known["sha256"])
    stat, found = _hash_file(path)
    remember(path, stat, found)
    return found


def check_sha256(path: Path, expected: str | None) -> str:
    """Return the sha256 of a file after comparing it with `expected`. If `expected` is None, accept any hash.

    Raises:
        WrongBytesError: The hash is not the expected one.
        DownloadError: The file cannot be read.
    """
    found = sha256_of(path)
    if expected is not None and found != expected:
        raise WrongBytesError(path, expected, found)
    return found


def hash_again(path: Path, expected: str | None = None) -> str:
    """Hash a file even if its hash is cached, and return the sha256.

    Args:
        path: The file.
        expected: The expected hash; None means the cached hash, if there is one.

    Raises:
        WrongBytesError: The hash is not the expected one.
        DownloadError: The file cannot be read.
    """
    known = _remembered(path, ignore_setting=True)
    stat, found = _hash_file(path)
    expected = expected or known.get("sha256", found)
    if found != expected:
        raise WrongBytesError(path, expected, found)
    if not known:
        remember(path, stat, found)
    return found


def is_known_finite(path: Path) -> bool:
    """Return whether the verified-file cache records that all tensors of a weights file are finite."""
    return bool(_remembered(path).get("finite"))


def mark_finite(path: Path) -> None:
    """Record in the verified-file cache that all tensors of a weights file are finite.

    Nothing is recorded if the hash of the file is not in the cache.
    """
    known = _remembered(path, ignore_setting=True)
    if known:
        with suppress(OSError):
            write_json(entry_of(path), {**known, "finite": True})


def hash_of(path: Path, digest: Any) -> str:
    """Return the hash of a file in hexadecimal. `digest` is a new hash object, such as `hashlib.sha256()`."""
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return str(digest.hexdigest())


def _hash_file(path: Path) -> tuple[os.stat_result, str]:
    try:
        before = path.stat()  # a change during hashing then makes the cache entry outdated
        return before, hash_of(path, hashlib.sha256())
    except OSError as error:
        raise DownloadError(f"Cannot read {path}: {error.strerror}. Check the path and its permissions.") from None


def _remembered(path: Path, *, ignore_setting: bool = False) -> dict[str, Any]:
    """Return the entry of a file in the verified-file cache, or {} if it is missing or outdated.

    With VITLITE_VERIFY=always, return {} unless `ignore_setting` is True.
    """
    setting = os.environ.get("VITLITE_VERIFY") or ""
    if setting not in ("", "always"):
        raise DownloadError(f"VITLITE_VERIFY must be 'always' or unset, got {setting!r}.")
    if setting and not ignore_setting:
        return {}
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        stat = path.stat()
        entry: dict[str, Any] = json.loads(entry_of(path).read_bytes())
        is_fresh = [entry["size"], entry["mtime_ns"], entry["inode"]] == [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        if is_fresh and type(entry["finite"]) is bool and len(bytes.fromhex(entry["sha256"])) == 32:
            return entry
    return {}


def remember(path: Path, stat: os.stat_result, sha256: str, *, finite: bool = False) -> None:
    """Store the sha256 of a file in the verified-file cache. `stat` must be the file's status before it was hashed."""
    with suppress(OSError):
        entry = entry_of(path)
        entry.parent.mkdir(parents=True, exist_ok=True)
        content = {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
        write_json(entry, {**content, "sha256": sha256, "finite": finite})


def entry_of(path: Path) -> Path:
    """Return the file in the verified-file cache that describes `path`."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return cache_folder("verified") / f"{name}.json"
