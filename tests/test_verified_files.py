"""The verified-file cache: files are hashed once, and again when they change."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from fetching import OTHER, SHA256, WEIGHTS, flip, rot

from vitlite import storage
from vitlite.errors import DownloadError
from vitlite.storage import check_sha256, hash_again, is_known_finite, mark_finite, sha256_of

OTHER_SHA256 = hashlib.sha256(OTHER).hexdigest()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VITLITE_VERIFY", raising=False)
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read to be hashed."""
    read: list[Path] = []
    hash_of = storage.hash_of

    def note(path: Path, digest: Any) -> str:
        read.append(path)
        return hash_of(path, digest)

    monkeypatch.setattr(storage, "hash_of", note)
    return read


def entry_of(file: Path) -> Path:
    (entry,) = (file.parent / "cache" / "verified").iterdir()
    return entry


def test_file_is_hashed_once(file: Path, hashed: list[Path]) -> None:
    assert [sha256_of(file), check_sha256(file, SHA256), check_sha256(file, None)] == [SHA256] * 3
    assert hashed == [file]


def test_changed_file_is_hashed_again(file: Path) -> None:
    assert sha256_of(file) == SHA256
    file.write_bytes(OTHER)
    assert sha256_of(file) == OTHER_SHA256
    with pytest.raises(DownloadError, match=f"Wrong hash of {file}: expected {SHA256}, got {OTHER_SHA256}"):
        check_sha256(file, SHA256)


def test_replaced_file_is_hashed_again(file: Path, tmp_path: Path) -> None:
    sha256_of(file)
    mark_finite(file)
    stat = file.stat()
    (tmp_path / "new").write_bytes(OTHER)
    os.utime(tmp_path / "new", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(tmp_path / "new", file)
    assert not is_known_finite(file)
    assert sha256_of(file) == OTHER_SHA256


def test_scan_is_remembered_with_the_bytes(file: Path) -> None:
    mark_finite(file)
    assert not is_known_finite(file)  # it was never hashed
    sha256_of(file)
    assert not is_known_finite(file)
    mark_finite(file)
    assert is_known_finite(file)
    flip(file)
    assert not is_known_finite(file)


def test_setting_ignores_the_cache(file: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    sha256_of(file)
    mark_finite(file)
    rot(file)
    assert sha256_of(file) == SHA256
    monkeypatch.setenv("VITLITE_VERIFY", "always")
    assert sha256_of(file) != SHA256
    assert not is_known_finite(file)
    assert len(hashed) == 2
    monkeypatch.setenv("VITLITE_VERIFY", "yes")
    with pytest.raises(DownloadError, match=r"VITLITE_VERIFY must be 'always' or unset, got 'yes'"):
        sha256_of(file)


def test_rot_is_found_when_hashed_again(file: Path) -> None:
    assert hash_again(file) == SHA256
    rot(file)
    for expected in (None, SHA256):
        with pytest.raises(DownloadError, match=f"expected {SHA256}"):
            hash_again(file, expected)
    file.write_bytes(OTHER)  # a change by its owner is not rot
    assert hash_again(file) == OTHER_SHA256


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"size": 1}', b"[" * 100_000, b"1" * 9999])
def test_damaged_entry_is_ignored(file: Path, content: bytes) -> None:
    sha256_of(file)
    mark_finite(file)
    entry_of(file).write_bytes(content)
    assert not is_known_finite(file)
    assert sha256_of(file) == SHA256
    mark_finite(file)
    assert is_known_finite(file)


@pytest.mark.parametrize(
    "change", [{"finite": 1}, {"sha256": 5}, {"sha256": "x" * 64}, {"sha256": ""}, {"size": 5}, {"inode": None}]
)
def test_entry_with_a_wrong_field_is_ignored(file: Path, change: dict[str, Any]) -> None:
    sha256_of(file)
    mark_finite(file)
    entry = entry_of(file)
    entry.write_text(json.dumps(json.loads(entry.read_text()) | change))
    assert not is_known_finite(file)
    assert sha256_of(file) == SHA256


def test_state_folder_that_cannot_be_written(file: Path) -> None:
    (file.parent / "cache").touch()
    assert sha256_of(file) == SHA256
    mark_finite(file)
    assert not is_known_finite(file)


def test_missing_file(tmp_path: Path) -> None:
    for function in (sha256_of, hash_again):
        with pytest.raises(DownloadError, match=r"Cannot read .*none: No such file"):
            function(tmp_path / "none")
