"""A file that a Hub has, programs that fetch it, and damage: what the tests of hub, download, stamps and pins share."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vitlite.storage import state_folder
from vitlite.zoo import hub
from vitlite.zoo.folders import stat_of

SIZE = 4 << 20  # 16 blocks of 1/4 MiB
WEIGHTS = random.Random(0).randbytes(SIZE)
OTHER = random.Random(1).randbytes(SIZE)
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
REPO, FILE = "timm/vit", "model.safetensors"
# Where a shell started the tests with &, they and all that they start ignore Ctrl-C.
HEARS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
FETCH = f"from vitlite.zoo import hub; print(hub.fetch({REPO!r}, {FILE!r}, pin='vit').path.read_bytes().__hash__())"


def fetch(**options: object) -> hub.Fetched:
    return hub.fetch(REPO, FILE, pin="vit", **options)  # type: ignore[arg-type]


def start(code: str, *wrapper: str, **env: str) -> "subprocess.Popen[str]":
    """A program of its own, with this one's environment, which hears Ctrl-C."""
    command = [*wrapper, sys.executable, "-c", HEARS + code]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **env})


def finish(process: "subprocess.Popen[str]", code: int = 0) -> str:
    """What a program that ends with this exit code has printed."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out + err


def open_to_all(folder: Path) -> None:
    """Lets other users look into a folder, and into those above it: pytest keeps its own to itself."""
    for place in (folder, *folder.parents):
        place.chmod(place.stat().st_mode | 0o111)


def in_namespace(command: str, kind: str = "-m") -> tuple[str, ...]:
    """Runs a program after mounting something that only it sees, or in a network of its own (`kind` "-n")."""
    wrapper = ("unshare", kind, "sh", "-c", command + ' && exec "$@"', "sh")
    if not shutil.which("unshare") or subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"needs the right to do this: {command}")
    return wrapper


BLACK_HOLE = (  # whatever is sent there vanishes, names that are asked for too
    "ip link add here type veth peer name there && ip addr add 192.0.2.2/24 dev here && ip link set here up && "
    "ip link set there address 02:00:00:00:00:01 && ip link set there up && "
    "ip neigh add 192.0.2.1 dev here lladdr 02:00:00:00:00:01 && ip route add default via 192.0.2.1"
)


def finished_files(folder: Path) -> list[Path]:
    """Everything in the cache that the Hub's client would take for a finished file."""
    files = [path for path in (folder / "hub").rglob("*") if path.is_file() and ".locks" not in path.parts]
    return [path for path in files if path.stat().st_size > 1000 and path.suffix != ".incomplete"]


def flip(path: Path) -> None:
    """Another byte in the middle, as a disk may read it."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(bytes([255 - WEIGHTS[SIZE // 2]]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as if it had never been written


def rot(path: Path) -> None:
    """A change that the stamp does not show."""
    before = stat_of(path)
    flip(path)
    for stamp in (state_folder() / "stamps").iterdir():
        content = json.loads(stamp.read_text())
        if content["stat"] == before:
            stamp.write_text(json.dumps({**content, "stat": stat_of(path)}))
