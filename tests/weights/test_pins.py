"""A zoo name keeps the bytes of its first verified download."""

import hashlib
import json
import logging
from pathlib import Path

import pytest
from fetching import FILE, OTHER, REPO, SHA256, WEIGHTS, fetch
from server import Hub

from vitlite.errors import DownloadError
from vitlite.weights.pins import all_pins


def test_a_name_keeps_its_bytes_until_updated(server: Hub, caplog: pytest.LogCaptureFixture) -> None:
    old = fetch()
    new = server.publish(REPO, model_safetensors=OTHER)
    server.log.clear()
    assert fetch() == old
    assert not server.log
    assert all_pins() == {"vit": (REPO, FILE, old.commit, SHA256, "hub")}
    with caplog.at_level(logging.INFO, "vitlite"):
        moved = fetch(update=True)
    assert f"vit: the pin moved from {old.commit} to {new}" in caplog.text
    assert moved.path.read_bytes() == OTHER
    assert all_pins()["vit"].commit == new
    assert fetch() == moved


def test_update_does_not_settle_for_the_cache(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set") as error:
        fetch(update=True)
    assert "not in the cache" not in str(error.value)


def test_a_record_wins_over_the_pin(server: Hub) -> None:
    first = fetch()
    other = server.publish(REPO, model_safetensors=OTHER)
    sha256 = hashlib.sha256(OTHER).hexdigest()
    found = fetch(revision=other, sha256=sha256)
    assert found[1:] == (other, sha256, "record")
    with pytest.raises(DownloadError, match=f"expected hash {SHA256}, got {sha256}"):
        fetch(revision=other, sha256=SHA256)
    assert first.path.read_bytes() == WEIGHTS


def test_a_damaged_pin_is_not_ignored(server: Hub, tmp_path: Path) -> None:
    fetch()
    (tmp_path / "cache/pins/vit.json").write_text("{")
    with pytest.raises(DownloadError, match=r"The pin of vit .*vit\.json cannot be read.*Delete it"):
        fetch()


def test_a_pin_that_somebody_removes_just_now(server: Hub, tmp_path: Path) -> None:
    fetch()
    (tmp_path / "cache/pins/gone.json").symlink_to("nowhere")
    assert list(all_pins()) == ["vit"]


def test_a_pin_of_an_earlier_version_is_read(server: Hub, tmp_path: Path) -> None:
    fetch()
    pin = tmp_path / "cache/pins/vit.json"
    pin.write_text(json.dumps(json.loads(pin.read_text())))
    server.log.clear()
    assert fetch().path.read_bytes() == WEIGHTS
    assert not server.log
    assert list(json.loads(pin.read_text())) == ["repo", "filename", "commit", "sha256", "verified"]
