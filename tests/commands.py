"""The command `vitlite` as a process, or on a terminal."""

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
    """The command as a process of its own."""
    line = [sys.executable, "-m", "vitlite", *map(str, words)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@contextmanager
def terminal(columns: int, monkeypatch: pytest.MonkeyPatch, **environment: str) -> Iterator[list[str]]:
    """Puts stdout and stderr on a terminal; afterwards the list holds what it showed."""
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
    """What a command shows on a terminal of so many columns."""
    with terminal(columns, monkeypatch, **env) as shown:
        assert cli.main([str(word) for word in words]) == code
    return shown[0]


def paths_of(out: str) -> list[str]:
    return [json.loads(line)["path"] for line in out.splitlines()]
