"""What the modules of this package still need of file metadata until the verified-file cache replaces them."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any

from vitlite.storage import cache_folder, state_folder, write_json

__all__ = ["cache_folder", "in_whole_seconds", "is_no_file", "numbers_of", "settled_stat", "stat_of", "state_folder"]


def write_state(path: Path, content: Mapping[str, Any]) -> OSError | None:
    """Write a pin or a stamp. Return the error if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    except OSError as error:
        return error
    return None


def is_no_file(path: Path | str) -> bool:
    """Return whether something other than a file is there."""
    try:
        return not S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def stat_of(path: Path) -> list[int]:
    """Return the size, times and inode of a file."""
    return numbers_of(path.stat())


def numbers_of(stat: os.stat_result) -> list[int]:
    """Return the size, times and inode."""
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def settled_stat(path: Path) -> os.stat_result:
    """Return the metadata of a file once it is older than a tick of the clock."""
    stat = path.stat()
    tick = 2.0 if in_whole_seconds(stat) else 0.02
    age = time.time() - max(stat.st_mtime, stat.st_ctime)
    if age < tick:
        time.sleep(min(tick, tick - age))
    return path.stat()


def in_whole_seconds(stat: os.stat_result) -> bool:
    """Return whether a file's times have no fractions of seconds."""
    return stat.st_mtime_ns % 10**9 == stat.st_ctime_ns % 10**9 == 0
