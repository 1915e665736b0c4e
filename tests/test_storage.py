"""Atomic writes, locks, and the folders of vitlite."""

import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from vitlite.errors import CheckpointError, DownloadError
from vitlite.storage import (
    atomic_write,
    cache_folder,
    entry_of,
    folder_obstacle,
    lock,
    obstacle,
    read_json,
    remove_leftovers,
    write_json,
    write_text,
)


def test_text_is_written_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "first\r\nline")
    assert path.read_bytes() == b"first\r\nline"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("name", ["é", "caf\udce9"])  # the second is how Python reads a name that is not UTF-8
def test_json_keeps_every_name(name: str, tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {name: [1, 2]})
    assert json.loads((tmp_path / "a.json").read_text("utf-8")) == {name: [1, 2]}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_old_file_survives_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="stop"), atomic_write(path) as temporary:  # noqa: PT012
        temporary.write_text("half of the n")
        raise RuntimeError("stop")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


KILLED = """
import sys, time
from pathlib import Path
from vitlite.storage import atomic_write
with atomic_write(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_old_file_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    (tmp_path / "b.txt.01234567.partial").touch()
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert path.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 3
    remove_leftovers(path)
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt.01234567.partial"]


HOLDS = """
import sys
from pathlib import Path
from vitlite.storage import lock
with lock(Path(sys.argv[1])):
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
    started = time.monotonic()
    with pytest.raises(TimeoutError), lock(path, timeout=0):
        pass
    assert time.monotonic() - started < 5
    child.stdin.close()
    with lock(path):
        assert child.wait(30) == 0
    child.stdout.close()
    assert path.exists()  # another process may be waiting
    with lock(path, timeout=0):
        pass
    assert not path.exists()


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    child.kill()
    child.communicate()
    with lock(path, timeout=0):
        pass


def test_obstacles_are_known_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("old")
    assert obstacle(tmp_path / "a.txt") == obstacle(tmp_path / "new.txt") == ""
    assert obstacle(tmp_path) == "it is not a regular file"
    assert obstacle(Path(os.devnull)) == "it is not a regular file"
    assert obstacle(tmp_path / "none" / "a.txt") == f"there is no folder {tmp_path / 'none'}"
    assert folder_obstacle(tmp_path / "new" / "inner") == ""
    assert folder_obstacle(tmp_path / "a.txt" / "inner") == f"{tmp_path / 'a.txt'} is not a folder"
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert obstacle(tmp_path / "a.txt") == folder_obstacle(tmp_path) == f"the folder {tmp_path} is not writable"


VARIABLES = ("VITLITE_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.mark.parametrize(
    ("variable", "cache", "state"),
    [
        ("VITLITE_CACHE", "here/hub", "here"),
        ("HF_HUB_CACHE", "here", ".cache/huggingface/vitlite"),
        ("HF_HOME", "here/hub", "here/vitlite"),
        ("XDG_CACHE_HOME", "here/huggingface/hub", "here/huggingface/vitlite"),
    ],
)
def test_environment_names_the_folders(
    variable: str, cache: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, str(tmp_path / "here"))
    assert (cache_folder(), entry_of(tmp_path / "weights").parents[1]) == (tmp_path / cache, tmp_path / state)


def test_cache_is_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", str(tmp_path)))
    assert cache_folder() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(DownloadError, match="there is no home folder"):
        cache_folder()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not a valid JSON file: Expecting value"),
        (b'{"a": 1', "is not a valid JSON file: "),
        (b"[1]", "is not a valid JSON file: the top level is not an object"),
        (b"\xff\xfe\x00", "is not a valid JSON file: "),
        (b"1" * 5000, "is not a valid JSON file: "),
        (b'{"a":' * 100_000, "is not a valid JSON file: it is nested too deeply"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "is not a valid JSON file: it is nested too deeply"),
    ],
    ids=["empty", "cut", "list", "bytes", "number", "very deep", "deep"],
)
def test_json_that_is_not_valid(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path} {reason}"):
        read_json(path)


def test_json_within_the_limits(tmp_path: Path) -> None:
    content = {"a": [1, {"b": "é"}], "c": None}
    write_json(tmp_path / "a.json", content)
    assert read_json(tmp_path / "a.json") == content


def test_json_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path, tmp_path / "none.json", tmp_path / "pipe.json"):
        with pytest.raises(CheckpointError, match=rf"Cannot read {path}: \w+"):
            read_json(path)


def test_large_json_is_not_read_into_memory(tmp_path: Path) -> None:
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate(2**33)  # sparse
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="the file is larger than 16 MB"):
        read_json(tmp_path / "a.json")
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()
