"""Where files are kept: weights in the Hub's own cache, and beside it what vitlite remembers."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vitlite.errors import DownloadError
from vitlite.storage import write_json


def cache_folder() -> Path:
    """Where weights are kept: VITLITE_CACHE/hub, else the Hub's own cache, as the environment says now.

    Raises:
        DownloadError: Nothing is set, and there is no home folder.
    """
    variable = os.environ.get
    if folder := variable("VITLITE_CACHE"):
        return _expanded(folder) / "hub"
    if folder := variable("HF_HUB_CACHE") or variable("HUGGINGFACE_HUB_CACHE"):
        return _expanded(folder)
    if folder := variable("HF_HOME"):
        return _expanded(folder) / "hub"
    return _expanded(variable("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def state_folder() -> Path:
    """Where pins, stamps, locks, and which kernels pay are kept."""
    beside = cache_folder().parent
    return beside if os.environ.get("VITLITE_CACHE") else beside / "vitlite"


def write_state(path: Path, content: Mapping[str, Any]) -> OSError | None:
    """Keeps a pin, a stamp or verdicts; what went wrong, where they cannot be kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    except OSError as error:
        return error
    return None


def _expanded(folder: str) -> Path:
    """The folder that a variable names."""
    path = os.path.expanduser(os.path.expandvars(folder))
    if path.startswith("~"):
        raise DownloadError(
            f"There is no home folder for {folder}, so nothing says where weights are kept.",
            python="Set VITLITE_CACHE to a folder that can be written.",
        )
    return _anchored(path)


@cache
def _anchored(path: str) -> Path:
    """From where the program was when this folder was first asked for, as it may change its own folder later."""
    return Path(path).absolute()
