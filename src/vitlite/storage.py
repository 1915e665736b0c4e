"""Write files atomically, read JSON of other programs, and manage locks, cache folders and verified hashes.

The verified-file cache has one small JSON file per hashed file. The hash is valid as long as the file's size,
modification time and inode are unchanged. If the cache is damaged or not writable, files are hashed again.
VITLITE_VERIFY=always ignores the cache.
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
MAX_JSON = 16 * 2**20  # bytes; the names of the classes of ImageNet-21k take 2 million
MAX_DEPTH = 32

# The source of the hash that a file was compared with: the registry, the Hub, or only the first download.
Verified = Literal["record", "hub", "first use"]


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, and move the file written there to `path` at the end.

    If writing fails or the process is killed, the old file is kept. mkstemp and safetensors create files that only the
    owner can read, so the temporary file is created here, with the mode that the umask allows.
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
    """Replace a text file atomically. The text is written in UTF-8, with its line endings unchanged."""
    with atomic_write(path) as temporary:  # backslashreplace: file names that are not UTF-8 still fit into JSON
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file that another program wrote. The size and nesting of the file are limited.

    Raises:
        CheckpointError: The file cannot be read, is too large or too deeply nested, or is not a JSON object.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise OSError("it is not a regular file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(min(size, MAX_JSON) + 1)  # read(n) allocates n bytes
        if len(content) > MAX_JSON:
            raise OSError(f"it is larger than {MAX_JSON} bytes")
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from None
    try:
        value = json.loads(content)
        if not isinstance(value, dict):
            raise ValueError("it is not an object")
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
    except (ValueError, RecursionError) as error:  # ValueError: also text that is not UTF-8, and very long numbers
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{path} is not valid JSON: {reason}.") from None
    return value


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of `path` that killed processes left. The caller must hold the lock for `path`."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}{PARTIAL}"):
        leftover.unlink(missing_ok=True)


def obstacle(path: Path) -> str:
    """Return the reason why `path` cannot be written, as part of a sentence, or "" if it can."""
    if os.path.exists(path) and not os.path.isfile(path):
        return "it is not a regular file"
    return folder_obstacle(path.parent) if os.path.isdir(path.parent) else f"there is no folder {path.parent}"


def folder_obstacle(folder: Path) -> str:
    """Return the reason why `folder`, which need not exist yet, cannot be written to, or "" if it can."""
    existing = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), folder)
    if not os.path.isdir(existing):
        return f"{existing} is not a folder"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"the folder {existing} is not writable"


@contextmanager
def lock(path: Path, *, timeout: float | None = None) -> Iterator[None]:
    """Hold a lock file, which is removed at the end.

    Args:
        path: The lock file, in an existing folder.
        timeout: The number of seconds to wait for another process that holds the lock; None waits without a limit.

    Raises:
        TimeoutError: Another process still holds the lock.
        OSError: The lock file cannot be created.
    """
    from huggingface_hub.utils import WeakFileLock

    with WeakFileLock(path, timeout=None if timeout is None else max(timeout, 0.01)):  # at 0 it does not even try
        try:
            yield
        finally:
            with suppress(OSError):  # Windows removes it when it is released
                path.unlink()


def cache_folder() -> Path:
    """Return the folder of downloaded weights: VITLITE_CACHE/hub if it is set, otherwise the Hub's own cache.

    Raises:
        DownloadError: No variable is set, and there is no home folder.
    """
    variable = os.environ.get
    if variable("VITLITE_CACHE"):
        folder = os.path.join(variable("VITLITE_CACHE", ""), "hub")
    else:
        home = variable("HF_HOME") or os.path.join(variable("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        folder = variable("HF_HUB_CACHE") or variable("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    path = os.path.expanduser(os.path.expandvars(folder))
    if path.startswith("~"):
        raise DownloadError(f"There is no home folder for {folder}. Set VITLITE_CACHE to a writable folder.")
    return Path(path).absolute()


def state_folder() -> Path:
    """Return the folder of the verified-file cache, next to the cache of weights."""
    beside = cache_folder().parent
    return beside if os.environ.get("VITLITE_CACHE") else beside / "vitlite"


# ---- The verified-file cache


class WrongBytesError(DownloadError):
    """A file whose hash is not the expected one."""

    def __init__(self, path: Path, expected: str, got: str) -> None:
        super().__init__(
            f"Wrong bytes in {path}: expected hash {expected}, got {got}. Download the file again; if the new copy is "
            "wrong as well, try another network or another HF_ENDPOINT."
        )


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file. The file is read only if it has changed since it was last hashed.

    Raises:
        DownloadError: The file cannot be read.
    """
    known = _remembered(path)
    if known:
        return str(known["sha256"])
    stat, digest = _hash_file(path)
    remember(path, stat, digest)
    return digest


def check_sha256(path: Path, expected: str | None) -> str:
    """Return the sha256 of a file. If `expected` is given, check that it is the same.

    Raises:
        WrongBytesError: The hash is not the expected one.
        DownloadError: The file cannot be read.
    """
    found = sha256_of(path)
    if expected is not None and found != expected:
        raise WrongBytesError(path, expected, found)
    return found


def hash_again(path: Path, expected: str | None = None) -> str:
    """Return the sha256 of a file. The file is read even if the hash is known.

    Raises:
        WrongBytesError: The hash is not the expected one, or has changed although the file seems unchanged.
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


def was_scanned(path: Path) -> bool:
    """Return whether all tensors of a file were found to be finite and the file has not changed since then."""
    return bool(_remembered(path).get("finite"))


def mark_scanned(path: Path) -> None:
    """Record that all tensors of a file are finite. The hash of the file must already be in the cache."""
    known = _remembered(path, ignore_setting=True)
    if known:
        with suppress(OSError):
            write_json(_entry_of(path), {**known, "finite": True})


def hash_of(path: Path, digest: Any) -> str:
    """Return the hex digest of a file's content."""
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return str(digest.hexdigest())


def _hash_file(path: Path) -> tuple[os.stat_result, str]:
    try:
        return path.stat(), hash_of(path, hashlib.sha256())
    except OSError as error:
        raise DownloadError(f"Cannot read {path}: {error.strerror}. Check the path and its permissions.") from None


def _remembered(path: Path, *, ignore_setting: bool = False) -> dict[str, Any]:
    """Return the cache entry of a file, or {} if it is missing or outdated, or if VITLITE_VERIFY is set."""
    setting = os.environ.get("VITLITE_VERIFY") or ""
    if setting not in ("", "always"):
        raise DownloadError(f"VITLITE_VERIFY must be 'always' or unset, got {setting!r}.")
    if setting and not ignore_setting:
        return {}
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        stat = path.stat()
        entry: dict[str, Any] = json.loads(_entry_of(path).read_bytes())
        is_fresh = [entry["size"], entry["mtime_ns"], entry["inode"]] == [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        if is_fresh and type(entry["finite"]) is bool and len(bytes.fromhex(entry["sha256"])) == 32:
            return entry
    return {}


def remember(path: Path, stat: os.stat_result, sha256: str, *, finite: bool = False) -> None:
    """Write the cache entry of a file. `stat` must have been read before the file was hashed."""
    with suppress(OSError):
        entry = _entry_of(path)
        entry.parent.mkdir(parents=True, exist_ok=True)
        content = {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
        write_json(entry, {**content, "sha256": sha256, "finite": finite})


def _entry_of(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return state_folder() / "verified" / f"{name}.json"
