"""A file that the test Hub has, and programs that download it."""

import hashlib
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vitlite.zoo import download
from vitlite.zoo.download import Downloaded

SIZE = 4 << 20
WEIGHTS = random.Random(0).randbytes(SIZE)
OTHER = random.Random(1).randbytes(SIZE)
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
REPO, FILE = "timm/vit", "model.safetensors"
FETCH = f"""
from vitlite.zoo.download import fetch
print(fetch({REPO!r}, {FILE!r}, prefer_cache=True).path.read_bytes().__hash__())
"""


def fetch(**options: bool | str) -> Downloaded:
    return download.fetch(REPO, FILE, prefer_cache=True, **options)  # type: ignore[arg-type]


def start(code: str, *wrapper: str, **env: str) -> "subprocess.Popen[str]":
    """Start a program with the environment of this one."""
    command = [*wrapper, sys.executable, "-c", code]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **env})


def finish(process: "subprocess.Popen[str]", code: int = 0) -> str:
    """Return what a program printed that ends with this exit code."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out + err


def in_namespace(command: str) -> tuple[str, ...]:
    """Return what runs a program after a mount that only this program sees."""
    wrapper = ("unshare", "-m", "sh", "-c", command + ' && exec "$@"', "sh")
    if not shutil.which("unshare") or subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"needs the right to do this: {command}")
    return wrapper


def flip(path: Path) -> None:
    """Change a byte in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(bytes([255 - WEIGHTS[SIZE // 2]]))


def rot(path: Path) -> None:
    """Change a byte, but neither the size nor the modification time."""
    stat = path.stat()
    flip(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
