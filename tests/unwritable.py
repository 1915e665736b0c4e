"""Simulate a folder in which no files can be created, also for root, who may write anywhere."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def refuse_new_files(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make every creation of a file or folder below `folder` fail as it does without permission."""
    open_file, open_path, make_folder = os.open, Path.open, os.mkdir

    def check(path: Any) -> None:
        place = Path(os.path.abspath(os.fsdecode(path)))
        if folder in place.parents and not place.exists():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def os_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            check(path)
        return open_file(path, flags, *args, **options)

    def path_open(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "r" not in mode:
            check(path)
        return open_path(path, mode, *args, **options)

    def mkdir(path: Any, *args: Any, **options: Any) -> None:
        check(path)
        make_folder(path, *args, **options)

    monkeypatch.setattr(os, "open", os_open)
    monkeypatch.setattr(Path, "open", path_open)
    monkeypatch.setattr(os, "mkdir", mkdir)
