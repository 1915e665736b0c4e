"""Hash files once, and remember the results in the verified-file cache.

The state folder has one small JSON file for each hashed file. The result counts as long as the file's size,
modification time and inode stay the same. A cache that is damaged or cannot be written costs another hash, and is never
an error. VITLITE_VERIFY=always ignores it.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from vitlite.errors import DownloadError
from vitlite.storage import state_folder, write_json

# What a hash was compared with: the registry, the hash that the Hub states, or nothing but the first download.
Verified = Literal["record", "hub", "first use"]


class WrongBytesError(DownloadError):
    """A file whose hash is not the expected one."""

    def __init__(self, path: Path, expected: str, got: str) -> None:
        super().__init__(
            f"Wrong bytes in {path}: expected hash {expected}, got {got}. Download the file again; if the new copy is "
            "wrong as well, try another network or another HF_ENDPOINT."
        )


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, which is read only if it has changed since it was last hashed.

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
    """Return the sha256 of a file after comparing it with the expected one, if there is one.

    Raises:
        WrongBytesError: They differ.
        DownloadError: The file cannot be read.
    """
    found = sha256_of(path)
    if expected is not None and found != expected:
        raise WrongBytesError(path, expected, found)
    return found


def hash_again(path: Path, expected: str | None = None) -> str:
    """Return the sha256 of a file, which is read even if its hash is known.

    Raises:
        WrongBytesError: It is not the expected hash, or not the hash from before although the file seems unchanged.
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
    """Return True if all tensors of this file were found finite before, and the file has not changed since."""
    return bool(_remembered(path).get("finite"))


def mark_scanned(path: Path) -> None:
    """Remember that all tensors of a file are finite. The file must have been hashed before."""
    known = _remembered(path, ignore_setting=True)
    if known:
        remember(path, path.stat(), known["sha256"], finite=True)


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
    """Return the cache entry of a file; empty if there is none, the file has changed, or VITLITE_VERIFY is set."""
    setting = os.environ.get("VITLITE_VERIFY") or ""
    if setting not in ("", "always"):
        raise DownloadError(f"VITLITE_VERIFY is {setting!r}. Set it to always, or unset it.")
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
    """Write the cache entry of a file, whose metadata was read before it was hashed."""
    with suppress(OSError):
        entry = _entry_of(path)
        entry.parent.mkdir(parents=True, exist_ok=True)
        content = {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
        write_json(entry, {**content, "sha256": sha256, "finite": finite})


def _entry_of(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return state_folder() / "verified" / f"{name}.json"
