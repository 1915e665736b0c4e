"""Folders in which nothing can be made, for whoever runs the tests: root may write anywhere."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def refuse_new_files(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str = "") -> None:
    """From now on, a new file below a folder, or the one of that name, is an error, as without permission to write."""
    opened, opened_path, made = os.open, Path.open, os.mkdir

    def refuse(path: Any) -> None:
        place = Path(os.path.abspath(os.fsdecode(path)))
        if folder in place.parents and not place.exists() and name in ("", place.name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def open_file(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            refuse(path)
        return opened(path, flags, *args, **options)

    def open_path(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "r" not in mode:
            refuse(path)
        return opened_path(path, mode, *args, **options)

    def make_folder(path: Any, *args: Any, **options: Any) -> None:
        refuse(path)
        made(path, *args, **options)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(Path, "open", open_path)
    monkeypatch.setattr(os, "mkdir", make_folder)
