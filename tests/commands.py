"""Run the command `vitlite` in a process or on a terminal."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

import pytest

from vitlite.cli import main as cli

Run = Callable[..., tuple[int, str, str]]


def start(*words: object, **options: Any) -> "subprocess.Popen[str]":
    """Start the command in a new process."""
    line = [sys.executable, "-m", "vitlite", *map(str, words)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@contextmanager
def terminal(columns: int, monkeypatch: pytest.MonkeyPatch, **environment: str) -> Iterator[list[str]]:
    """Redirect stdout and stderr to a terminal; afterwards the list holds its output."""
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    shown: list[str] = []

    def read() -> None:
        pieces = []
        with suppress(OSError):  # Linux says that the other end is closed
            while piece := os.read(ours, 65536):
                pieces.append(piece)
        shown.append(b"".join(pieces).decode().replace("\r\n", "\n"))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(theirs, "w") as stream, redirect_stdout(stream), redirect_stderr(stream):
            yield shown
    finally:
        reader.join()
        os.close(ours)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *words: object, columns: int = 60, code: int = 0, **env: str) -> str:
    """Return what a command prints on a terminal with so many columns."""
    with terminal(columns, monkeypatch, **env) as shown:
        assert cli.main([str(word) for word in words]) == code
    return shown[0]


def paths_of(out: str) -> list[str]:
    return [json.loads(line)["path"] for line in out.splitlines()]
