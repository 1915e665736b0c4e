"""What is remembered of a file's bytes, and when they are looked at again."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from fetching import OTHER, SHA256, WEIGHTS, fetch, rot
from server import Hub

from vitlite.errors import DownloadError
from vitlite.weights import hub, stamps


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


def test_a_stamp_of_an_earlier_version_is_read(server: Hub, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    stamps.check_file(path)
    (stamp,) = (tmp_path / "cache/stamps").iterdir()
    fields = {"stat": stamps.stat_of(path), "sha256": "0" * 64, "verified": "hub", "finite": True}
    stamp.write_text(json.dumps(fields))
    assert stamps.check_file(path) == "0" * 64
    assert stamps.is_scanned(path)
    stamp.write_text("[]")  # no stamp at all
    assert stamps.check_file(path) == SHA256
    assert list(json.loads(stamp.read_text())) == list(fields)
