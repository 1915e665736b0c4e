"""Atomic writes, JSON of other programs, locks between processes, and the folders of the cache and its state."""

import glob
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vitlite.errors import CheckpointError, DownloadError

PARTIAL = ".partial"  # the suffix of temporary files
MAX_JSON = 16 * 2**20  # bytes; the names of the classes of ImageNet-21k take 2 million
MAX_DEPTH = 32


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, and move the file written there to `path` at the end.

    If writing fails, or the process is killed, the old file stays. mkstemp and safetensors make files that only their
    owner can read, so the temporary file gets its name here and its mode from the umask.
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
    """Return the object in a JSON file that another program wrote. Its size and its depth are limited.

    Raises:
        CheckpointError: The file cannot be read, is too large or too deep, or is not a JSON object.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise OSError("it is not a regular file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(min(size, MAX_JSON) + 1)  # allocates as much as it is asked for
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
    """Return why no file can be written at `path`, as part of a sentence, or an empty string if one can."""
    if os.path.exists(path) and not os.path.isfile(path):
        return "it is not a regular file"
    return folder_obstacle(path.parent) if os.path.isdir(path.parent) else f"there is no folder {path.parent}"


def folder_obstacle(folder: Path) -> str:
    """Return why no files can be written in `folder`, which may not exist yet, or an empty string if they can."""
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
        raise DownloadError(f"There is no home folder for {folder}. Set VITLITE_CACHE to a folder that can be written.")
    return Path(path).absolute()


def state_folder() -> Path:
    """Return the folder of what vitlite remembers about files, next to the cache of weights."""
    beside = cache_folder().parent
    return beside if os.environ.get("VITLITE_CACHE") else beside / "vitlite"
