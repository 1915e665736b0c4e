"""What is remembered of a file's bytes, and when they are looked at again."""

import hashlib
import json
import mmap
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from fetching import FILE, OTHER, REPO, SHA256, WEIGHTS, fetch, finish, in_namespace, rot, start
from server import Hub

from vitlite.errors import DownloadError
from vitlite.zoo import hub, stamps
from vitlite.zoo.folders import stat_of


def test_local_files_are_hashed_once(server: Hub, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    assert stamps.check_file(path) == stamps.check_file(str(path), SHA256) == SHA256
    rot(path)
    assert stamps.check_file(path) == SHA256  # not read again
    path.write_bytes(OTHER)
    assert stamps.check_file(path) == hashlib.sha256(OTHER).hexdigest()
    with pytest.raises(DownloadError, match=f"Wrong bytes in {path}: expected hash {SHA256}"):
        stamps.check_file(path, SHA256)
    with pytest.raises(DownloadError, match=r"Cannot read .*none"):
        stamps.check_file(tmp_path / "none")


def test_scans_are_remembered_with_the_bytes(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    stamps.mark_scanned(path)
    assert not stamps.is_scanned(path)  # nobody has hashed it
    stamps.check_file(path)
    assert not stamps.is_scanned(path)
    stamps.mark_scanned(path)
    assert stamps.is_scanned(path)
    assert stamps.check_file(path) == SHA256
    assert stamps.is_scanned(path)
    hub.verify(path)
    assert stamps.is_scanned(path)
    monkeypatch.setenv("VITLITE_VERIFY", "always")
    assert not stamps.is_scanned(path)
    monkeypatch.delenv("VITLITE_VERIFY")
    path.write_bytes(WEIGHTS)
    assert not stamps.is_scanned(path)


def test_rot_below_the_stamp_is_found_when_asked(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch().path
    rot(Path(os.path.realpath(path)))
    assert fetch().path.read_bytes() != WEIGHTS  # so warm starts do not hash
    with pytest.raises(DownloadError, match=f"Wrong bytes in {path}: expected hash {SHA256}"):
        hub.verify("vit")
    assert fetch().path.read_bytes() == WEIGHTS  # and what `verify` has found is not trusted any more
    rot(Path(os.path.realpath(path)))
    monkeypatch.setenv("VITLITE_VERIFY", "always")
    assert fetch().path.read_bytes() == WEIGHTS


def test_what_is_written_through_a_memory_map_is_found_when_asked(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second store into a page may leave size and times as they are, as docs/weights.md says."""
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[0] ^= 1
        before = stamps.check_file(path)
        mapped[0] ^= 1
        with monkeypatch.context() as patch:
            patch.setenv("VITLITE_VERIFY", "always")
            assert before != stamps.check_file(path) == SHA256
        mapped[0] ^= 1
        with pytest.raises(DownloadError, match=f"Wrong bytes in {path}: expected hash {SHA256}, got {before}"):
            hub.verify(path)


def test_a_stamp_of_an_earlier_version_is_read(server: Hub, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    stamps.check_file(path)
    (stamp,) = (tmp_path / "cache/stamps").iterdir()
    fields = {"stat": stat_of(path), "sha256": "0" * 64, "verified": "hub", "finite": True}
    stamp.write_text(json.dumps(fields))
    assert stamps.check_file(path) == "0" * 64
    assert stamps.is_scanned(path)
    stamp.write_text("[]")  # no stamp at all
    assert stamps.check_file(path) == SHA256
    assert list(json.loads(stamp.read_text())) == list(fields)


BAD_STAMPS = {
    "no json": "{",
    "nothing": "",
    "no text": b"\xff",
    "null": "null",
    "too deep": "[" * 100_000 + "]" * 100_000,
    "5,000 digits": '{"stat": [' + "9" * 5000 + "]}",
    "no stat": json.dumps({"sha256": SHA256}),
    "short": json.dumps({"stat": [1, 2, 3], "sha256": SHA256}),
    "an object for a number": json.dumps({"stat": [{}, 2, 3, 4], "sha256": SHA256}),
    "megabytes": json.dumps({"stat": [1, 2, 3, 4], "sha256": "0" * 3_000_000}),
}
BAD_FIELDS = [
    {"sha256": None},
    {"sha256": "0" * 63},
    {"sha256": 5},
    {"verified": "me"},
    {"verified": []},
    {"finite": 1},
    {"finite": "yes"},
    {"stat": "abcd"},
    {"stat": [True, 2, 3, 4]},
    {"stat": [0.5, 2, 3, 4]},
]


@pytest.mark.parametrize("content", [*BAD_STAMPS.values(), *BAD_FIELDS])
def test_a_bad_stamp_is_as_none(server: Hub, tmp_path: Path, content: str | bytes | dict[str, object]) -> None:
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    stamps.check_file(path)
    (stamp,) = (tmp_path / "cache/stamps").iterdir()
    right = stamp.read_text()
    if isinstance(content, dict):
        content = json.dumps({**json.loads(right), "finite": True, **content})
    stamp.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert stamps.read_stamp(path) is None
    assert not stamps.is_scanned(path)
    assert stamps.check_file(path, SHA256) == SHA256
    assert hub.verify(path).sha256 == SHA256
    assert stamp.read_text() == right


def test_a_stamp_of_another_file_says_nothing_of_this_one(server: Hub, tmp_path: Path) -> None:
    """Finite, and with the right hash even; but of a file with other times."""
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    stamps.check_file(path)
    stamps.mark_scanned(path)
    assert stamps.is_scanned(path)
    (stamp,) = (tmp_path / "cache/stamps").iterdir()
    content = json.loads(stamp.read_text())
    for i in range(4):
        stat = [*content["stat"]]
        stat[i] += 1
        stamp.write_text(json.dumps({**content, "stat": stat}))
        assert not stamps.is_scanned(path)
        stamps.mark_scanned(path)
        assert not stamps.is_scanned(path)


def test_a_stamp_with_another_hash_costs_nothing(server: Hub, tmp_path: Path) -> None:
    """The file is hashed, not thrown away: what the Hub stated of it is what it is called."""
    found = hub.fetch(REPO, FILE)
    (stamp,) = (tmp_path / "cache/stamps").iterdir()
    content = json.loads(stamp.read_text())
    stamp.write_text(json.dumps({**content, "sha256": "0" * 64, "stat": [0, 0, 0, 0]}))
    server.log.clear()
    assert hub.fetch(REPO, FILE, revision=found.commit) == found
    assert not server.log
    assert json.loads(stamp.read_text()) == content


def test_a_file_of_ones_own_that_has_changed(server: Hub, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    assert hub.verify(path).sha256 == SHA256
    os.utime(path, (0, 0))
    assert hub.verify(path).sha256 == SHA256  # touched is not changed
    path.write_bytes(OTHER)
    with pytest.raises(DownloadError, match=f"expected hash {SHA256}, got .*it has changed since"):
        hub.verify(path)
    assert hub.verify(path).sha256 == hashlib.sha256(OTHER).hexdigest()  # which is said once
    path.write_bytes(WEIGHTS)
    assert stamps.check_file(path) == SHA256  # who loads it takes it as it is,
    assert hub.verify(path).sha256 == SHA256
    rot(path)
    with pytest.raises(DownloadError, match=f"expected hash {SHA256}, got .*it has changed since"):
        hub.verify(path)  # and it is compared with what was loaded last


@pytest.mark.parametrize("when", [-(10**9), 0, 10**9, 4 * 10**9, 10**11])
def test_times_in_the_past_and_the_future(server: Hub, tmp_path: Path, when: int) -> None:
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    os.utime(path, (when, when))
    assert stamps.check_file(path) == SHA256
    stamps.mark_scanned(path)
    assert stamps.is_scanned(path)
    path.write_bytes(OTHER)
    os.utime(path, (when, when))
    assert not stamps.is_scanned(path)
    assert stamps.check_file(path) == hashlib.sha256(OTHER).hexdigest()


def test_a_clock_that_went_back(server: Hub, tmp_path: Path) -> None:
    """How old a file from the future is, nobody knows: its next change must not fall into the same tick."""
    path = tmp_path / "mine.safetensors"
    path.write_bytes(b"small")
    os.utime(path, (4 * 10**9, 4 * 10**9))
    time.sleep(2 * 0.02)
    began = time.perf_counter()
    stamps.check_file(path)
    assert time.perf_counter() - began >= 0.02


TWICE = """
from pathlib import Path
from vitlite.zoo import stamps
path = Path({path!r})
path.write_bytes(b"a" * 1000)
first = stamps.check_file(path)
path.write_bytes(b"b" * 1000)
print(first != stamps.check_file(path))
"""


@pytest.mark.skipif(shutil.which("mke2fs") is None, reason="needs to make a file system")
def test_a_disk_that_keeps_whole_seconds(server: Hub, tmp_path: Path) -> None:
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mke2fs", "-q", "-t", "ext2", "-I", "128", image], check=True, capture_output=True)
    mounted = in_namespace(f"mount -o loop {image} {disk}")
    assert finish(start(TWICE.format(path=str(disk / "a")), *mounted)) == "True\n"


IMAGES = """
import subprocess
from pathlib import Path
from vitlite.zoo import stamps
for image in {images}:
    subprocess.run(["mount", "-o", "loop,ro", image, {disk!r}], check=True)
    print(stamps.stat_of(Path({disk!r}, "a")), stamps.check_file(Path({disk!r}, "a")))
    subprocess.run(["umount", {disk!r}], check=True)
"""


@pytest.mark.skipif(shutil.which("debugfs") is None, reason="needs to make a file system")
def test_images_of_disks_whose_files_have_the_same_times(server: Hub, tmp_path: Path) -> None:
    """As those of containers have, so that they are the same each time they are made."""
    disk, images = tmp_path / "disk", []
    disk.mkdir()
    for content in (WEIGHTS[:1000], OTHER[:1000]):
        folder, image = tmp_path / f"{len(images)}", tmp_path / f"{len(images)}.image"
        folder.mkdir()
        (folder / "a").write_bytes(content)
        subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", folder, image, "8M"], check=True, capture_output=True)
        for field in ("ctime", "mtime"):
            for command in (f"set_inode_field /a {field} 20260101000000", f"set_inode_field /a {field}_extra 0"):
                subprocess.run(["debugfs", "-w", "-R", command, image], check=True, capture_output=True)
        images.append(str(image))
    found = finish(start(IMAGES.format(images=images, disk=str(disk)), *in_namespace("true"))).splitlines()
    stats = [line.partition("]")[0] for line in found]
    assert stats[0] == stats[1], "or this test says nothing"
    assert [line[-64:] for line in found] == [hashlib.sha256(x[:1000]).hexdigest() for x in (WEIGHTS, OTHER)]


def test_names_that_are_no_unicode(server: Hub, tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.safetensors"))
    path.write_bytes(WEIGHTS)
    assert stamps.check_file(path) == SHA256
    stamps.mark_scanned(path)
    assert stamps.is_scanned(path)


@pytest.mark.parametrize("wish", ["Always", "1", "yes", "never"])
def test_a_wish_to_verify_is_understood_or_refused(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    monkeypatch.setenv("VITLITE_VERIFY", wish)
    with pytest.raises(DownloadError, match=f"VITLITE_VERIFY is '{wish}'. Set it to always"):
        stamps.check_file(path)
    monkeypatch.setenv("VITLITE_VERIFY", "")
    assert stamps.check_file(path) == SHA256


def test_a_pipe_has_no_hash(tmp_path: Path) -> None:
    """And is not waited for."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(DownloadError, match=r"Cannot read .*model.safetensors: It is no file"):
        stamps.check_file(tmp_path / "model.safetensors")
