"""Files are there whole or not at all, and one process works at a time."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from closed import refuse_new_files
from fetching import open_to_all

from vitlite.storage import (
    files_below,
    is_no_file,
    locked,
    obstacle,
    obstacle_in,
    refuse_content,
    replacing,
    write_json,
    write_text,
)

OF_ANOTHER_USER = """
import os, sys
from pathlib import Path
from vitlite.storage import write_text
path = Path(sys.argv[1])
write_text(path.with_name("other"), "")  # imports what that takes, from where others may not look
os.setgid(65534); os.setgroups([]); os.setuid(65534)
write_text(path, "newer")
"""


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "first\r\nline")
    assert path.read_bytes() == b"first\r\nline"
    for name in ("é", "caf\udce9"):  # the latter as Python calls a file whose name is no Unicode
        write_json(path, {name: [1, 2]})
        assert json.loads(path.read_text("utf-8")) == {name: [1, 2]}
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.skipif(os.name == "nt", reason="has no modes")
def test_whoever_may_read_a_file_may_read_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for mode in (0o600, 0o640, 0o444):
        path.write_text("old")
        path.chmod(mode)
        with replacing(path) as temporary:
            assert temporary.stat().st_mode & 0o777 == mode | 0o200, "from the first byte on"
            temporary.unlink()  # as some libraries write
            temporary.write_text("new")
        assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", mode)
        path.unlink()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs files of other groups")
def test_the_group_that_may_read_a_file_may_read_the_next_one_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    os.chown(path, -1, 2000)
    path.chmod(0o640)
    write_text(path, "new")
    assert (path.stat().st_gid, path.stat().st_mode & 0o777) == (2000, 0o640)
    tmp_path.chmod(0o777)
    open_to_all(tmp_path)
    os.chown(path, 65534, 2000)
    path.chmod(0o440)
    subprocess.run([sys.executable, "-c", OF_ANOTHER_USER, path], check=True)
    assert (path.read_text(), path.stat().st_gid, path.stat().st_mode & 0o777) == ("newer", 65534, 0o400)


WITHOUT_LOCKS = """
import errno, fcntl, os, sys
def flock(*_):
    raise OSError(getattr(errno, sys.argv[1]), "no locks here")
fcntl.flock = flock
from pathlib import Path
from vitlite.storage import locked, write_text
with locked(Path("a.lock"), wait=False):
    write_text(Path("a.txt"), "new")
print(sorted(os.listdir()))
"""


@pytest.mark.skipif(os.name == "nt", reason="has other locks")
@pytest.mark.parametrize("error", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_a_disk_without_locks(error: str, tmp_path: Path) -> None:
    """As some network disks are: what they answer who asks for a lock is made up here."""
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_LOCKS, error]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("['a.txt']\n", "")


def write_half(path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text("half of the n")
        raise RuntimeError("stop")


def test_what_was_there_survives_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="stop"):
        write_half(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_full_disk_is_said_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: .*a\.txt'$"), replacing(tmp_path / "a.txt"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert os.listdir(tmp_path) == []


KILLED = """
import sys, time
from pathlib import Path
from vitlite.storage import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_what_was_there_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert path.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 3  # and what was begun, with its lock
    write_text(path, "new")
    assert os.listdir(tmp_path) == ["a.txt"]


def test_what_is_not_provably_left_by_a_killed_writer_stays(tmp_path: Path) -> None:
    """Somebody's file, another name's, one that is being written, and one whose lock is somebody's data."""
    path = tmp_path / "a.txt"
    others = ["a.txt.partial", "a.txt.0123abcd.partial", "b.txt.0123abcd.partial", "a.txt.backup0.partial"]
    locks = ["b.txt.0123abcd.partial.lock", "a.txt.backup0.partial.lock"]
    for name in (*others, *locks):
        (tmp_path / name).touch()
    (tmp_path / "a.txt.01234567.partial").touch()
    (tmp_path / "a.txt.01234567.partial.lock").write_text("somebody's data")
    there = set(os.listdir(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    with replacing(path) as temporary:
        temporary.write_text("mine")
        write_text(path, "of another thread")
        assert temporary.read_text() == "mine"
    being_written = set(os.listdir(tmp_path)) - there - {"a.txt"}
    assert sorted(Path(name).suffix for name in being_written) == [".lock", ".partial"]
    child.kill()
    child.wait()
    child.stdout.close()
    write_text(path, "new")
    assert set(os.listdir(tmp_path)) == there | {"a.txt"}


HOLDS = """
import sys, time
from pathlib import Path
from vitlite.storage import locked
with locked(Path(sys.argv[1]), wait=False):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError, match="another process holds"), locked(path, wait=False):
        pass
    started = time.monotonic()
    child.stdin.close()
    with locked(path, wait=True):
        assert child.wait(30) == 0
    child.stdout.close()
    assert time.monotonic() - started < 30
    with locked(path, wait=False):
        pass
    assert not path.exists()


def test_only_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Is a device or a pipe, and no file"):
        write_text(tmp_path / "pipe", "new")
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "new")
    with pytest.raises(FileNotFoundError, match="No such folder"):
        write_text(tmp_path / "none" / "a.txt", "new")
    assert os.listdir(tmp_path) == ["pipe"]


KILLED_WITHOUT_LOCKS = """
import os, signal, sys
from filelock import SoftFileLock
lock = SoftFileLock(sys.argv[1])
lock.acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_on_a_disk_without_locks_is_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    subprocess.run([sys.executable, "-c", KILLED_WITHOUT_LOCKS, path], check=False)
    assert path.read_text()
    refuse_content(path)
    with locked(path, wait=False):
        pass


@pytest.mark.parametrize("wait", [False, True])
def test_somebodys_file_is_no_lock(tmp_path: Path, wait: bool) -> None:
    path = tmp_path / "poetry.lock"
    path.write_text("[[package]]")
    with pytest.raises(FileExistsError, match="Is no lock of vitlite's"), locked(path, wait=wait):
        pass
    assert path.read_text() == "[[package]]"
    path.write_text("123\nhost\n")  # of a file system without locks
    with locked(path, wait=wait):
        pass


def test_where_a_file_cannot_be_written_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "link").symlink_to("a.txt")
    (tmp_path / "to nowhere").symlink_to("b.txt")
    longest = "x" * (255 - len(".01234567.partial.lock"))
    for name, wanted in (
        ("a.txt", ""),
        (longest, ""),
        (longest + "x", "its name is too long: it is begun under one with 22 letters more"),
        ("x" * 300, "its name is too long: it is begun under one with 22 letters more"),
        ("a\0b", "no file can be called so"),
        ("pipe", "it is a device or a pipe"),
        ("link", "it is a link to a.txt, which would stay as it is"),
        ("to nowhere", "it is a link to b.txt, which would stay as it is"),
        ("none/a.txt", f"there is no folder {tmp_path / 'none'}"),
        ("a.txt/b.txt", f"there is no folder {tmp_path / 'a.txt'}"),
        ("", "it is a folder"),
    ):
        assert obstacle(tmp_path / name) == wanted
        if not wanted:
            write_text(tmp_path / name, "new")
    assert obstacle_in(tmp_path / "new" / "inner", ["pipe"]) == ""
    assert obstacle_in(tmp_path / ("x" * 300), []) == "its name is too long"
    assert obstacle_in(tmp_path / "a\0b", []) == "no folder can be called so"
    assert obstacle_in(tmp_path / "a.txt" / "inner", []) == f"{tmp_path / 'a.txt'} is no folder"
    assert obstacle_in(tmp_path, ["a.txt", "pipe"]).startswith(f"{tmp_path / 'pipe'} is no file, and stands where")
    assert sorted(os.listdir(tmp_path)) == sorted(["a.txt", "link", "pipe", "to nowhere", longest])
    refuse_new_files(monkeypatch, tmp_path)
    wanted = f"no file can be made in the folder {tmp_path} (Permission denied)"
    assert (obstacle(tmp_path / "a.txt"), obstacle_in(tmp_path / "new", [])) == (wanted, wanted)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_no_lock(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Nor is it waited for."""
    make(tmp_path / "lock")
    with pytest.raises(FileExistsError, match="Is no file"), locked(tmp_path / "lock", wait=False):
        pass
    make(tmp_path / "a.txt.01234567.partial.lock")
    write_text(tmp_path / "a.txt", "new")
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "a.txt.01234567.partial.lock", "lock"]


def test_a_lock_that_goes_meanwhile_is_no_obstacle(tmp_path: Path) -> None:
    """Another process takes it and lets it go all the time."""
    path, over = tmp_path / "a.lock", threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            path.touch()
            path.unlink()

    other = threading.Thread(target=come_and_go)
    other.start()
    ends = time.perf_counter() + 1
    try:
        while time.perf_counter() < ends:
            assert not is_no_file(path)
    finally:
        over.set()
        other.join()


def test_what_is_hidden_is_below_a_folder_where_it_is_asked_for(tmp_path: Path) -> None:
    for name in ("a.png", ".b.png", "c/d.png", ".e/f.png", "c/.g/h.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def found(**options: bool) -> set[str]:
        return {os.path.relpath(file.path, tmp_path) for file in files_below(str(tmp_path), **options)}

    assert found(hidden=False) == {"a.png", os.path.join("c", "d.png")}
    assert len(found()) == 5
