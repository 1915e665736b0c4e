"""Where files are kept: weights in the Hub's own cache, and beside it what vitlite remembers of them."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitlite.disk import write_json


def cache_folder() -> Path:
    """Where weights are kept: VITLITE_CACHE/hub, else the Hub's own cache, as the environment says now."""
    variable = os.environ.get
    if folder := variable("VITLITE_CACHE"):
        return _expanded(folder) / "hub"
    if folder := variable("HF_HUB_CACHE") or variable("HUGGINGFACE_HUB_CACHE"):
        return _expanded(folder)
    if folder := variable("HF_HOME"):
        return _expanded(folder) / "hub"
    return _expanded(variable("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def state_folder() -> Path:
    """Where pins, stamps and locks are kept."""
    beside = cache_folder().parent
    return beside if os.environ.get("VITLITE_CACHE") else beside / "vitlite"


def write_state(path: Path, content: Mapping[str, Any]) -> None:
    """Keeps a pin or a stamp. Where nothing can be written, files are hashed each time; that is no error."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)


def _expanded(folder: str) -> Path:
    return Path(os.path.expandvars(folder)).expanduser()
