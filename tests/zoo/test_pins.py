"""A zoo name keeps the bytes of its first verified download."""

import hashlib
import json
import logging
from functools import partial
from pathlib import Path

import pytest
from fetching import FETCH, FILE, OTHER, REPO, SHA256, WEIGHTS, fetch, finish, start
from server import Hub

from vitlite.errors import DownloadError
from vitlite.zoo import hub
from vitlite.zoo.pins import all_pins, pinned_names


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


UPDATED_MEANWHILE = f"""
import subprocess, sys
update = {FETCH.replace("pin='vit'", "pin='vit', update=True")!r}
opened = []
def watch(event, arguments):
    if event == "open" and str(arguments[0]).endswith(({FILE!r}, {SHA256!r})) and not opened:
        opened.append(arguments[0])
        subprocess.run([sys.executable, "-c", update], check=True)
sys.addaudithook(watch)
{FETCH}
assert opened
"""


def test_an_update_is_not_undone_by_who_was_loading_the_name(server: Hub) -> None:
    """The name is updated while another process hashes the file that was pinned."""
    old = fetch()
    new = server.publish(REPO, model_safetensors=OTHER)
    said = finish(start(UPDATED_MEANWHILE, VITLITE_VERIFY="always"))
    assert "the pin moved" not in said
    assert all_pins()["vit"].commit == new != old.commit
    assert fetch().path.read_bytes() == OTHER


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


DEEP = "[" * 100_000 + "]" * 100_000
GOOD = {"repo": REPO, "filename": FILE, "commit": "0" * 40, "sha256": SHA256, "verified": "hub"}
BAD_PINS = {
    "no json": "{",
    "nothing": "",
    "a list": "[]",
    "null": "null",
    "no text": b"\xff\xfe\x00",
    "too deep": DEEP,
    "deep in a field": json.dumps(GOOD)[:-1] + f', "more": {DEEP}}}',
    "5,000 digits": '{"repo": ' + "9" * 5000 + "}",
    "infinite": '{"repo": Infinity}',
    "megabytes": json.dumps({**GOOD, "repo": "a" * 3_000_000}),
    "a field less": json.dumps({name: value for name, value in GOOD.items() if name != "sha256"}),
    **{
        f"{field} {value!r}": json.dumps({**GOOD, field: value})
        for field in GOOD
        for value in (None, 5, [], {}, "", "a\n")
    },
    "repo elsewhere": json.dumps({**GOOD, "repo": "../../evil"}),
    "file elsewhere": json.dumps({**GOOD, "filename": "../../../evil"}),
    "commit elsewhere": json.dumps({**GOOD, "commit": "../../../evil"}),
    "a short hash": json.dumps({**GOOD, "sha256": SHA256[:-1]}),
    "a capital hash": json.dumps({**GOOD, "sha256": SHA256.upper()}),
    "vouched by nobody": json.dumps({**GOOD, "verified": "me"}),
    "a surrogate": '{"repo": "\\ud800/a"}',
}


@pytest.mark.parametrize("content", BAD_PINS.values(), ids=BAD_PINS)
def test_a_bad_pin_is_one_error_that_names_it(server: Hub, tmp_path: Path, content: str | bytes) -> None:
    found = fetch()
    pin = tmp_path / "cache/pins/vit.json"
    pin.write_bytes(content if isinstance(content, bytes) else content.encode())
    server.log.clear()
    for call in (fetch, partial(hub.verify, "vit"), all_pins):
        with pytest.raises(DownloadError) as error:
            call()
        text = str(error.value)
        assert text.startswith(f"The pin of vit cannot be used. {pin}")
        assert "Delete it, and the next download pins anew" in text
        assert text.isprintable()
        assert len(text) < 1000
    assert not server.log
    assert found.path.read_bytes() == WEIGHTS
    assert fetch(update=True) == found  # which is what the error says to do
    assert fetch() == found
    assert server.sent == 0


def test_the_error_of_a_bad_pin_names_the_field(server: Hub, tmp_path: Path) -> None:
    fetch()
    pin = tmp_path / "cache/pins/vit.json"
    for field, value in {"repo": 5, "commit": "\x1b[31m", "verified": ["hub"]}.items():
        pin.write_text(json.dumps({**GOOD, field: value}))
        with pytest.raises(DownloadError, match=rf"vit\.json: {field} must be .*, got "):
            fetch()


def test_a_bad_pin_does_not_stand_in_the_way_of_others(server: Hub, tmp_path: Path) -> None:
    found = fetch()
    (tmp_path / "cache/pins/bad.json").write_text("{")
    assert fetch() == found
    assert hub.verify("vit") == found
    assert hub.verify(found.path).sha256 == SHA256
    assert pinned_names() == ["bad", "vit"]


WRONG = "0" * 64


@pytest.mark.parametrize("offline", [False, True])
def test_a_pin_with_another_hash_costs_nothing(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    """The file is right, the Hub says so, and it may be the only copy."""
    found = fetch()
    pin = tmp_path / "cache/pins/vit.json"
    right = pin.read_text()
    pin.write_text(right.replace(SHA256, WRONG))
    server.log.clear()
    with monkeypatch.context() as patch:
        if offline:
            patch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(DownloadError) as error:
            fetch()
        with pytest.raises(DownloadError, match=f"expected hash {WRONG}, got {SHA256}"):
            hub.verify("vit")
    text = str(error.value)
    assert f"expected hash {WRONG}, got {SHA256}. The first is what {pin} pins." in text
    assert offline or "Wrong bytes on the Hub: " in text
    assert offline or "`vitlite download vit --update`" in text
    assert found.path.read_bytes() == WEIGHTS
    assert json.loads(pin.read_text())["sha256"] == WRONG
    assert server.sent == 0
    pin.write_text(right)
    assert fetch() == found
    pin.write_text(right.replace(SHA256, WRONG))
    assert fetch(update=True) == found
    assert pin.read_text() == right
    assert server.sent == 0


def test_a_wrong_hash_of_the_caller_costs_nothing(server: Hub) -> None:
    found = fetch()
    for revision in (None, found.commit):
        with pytest.raises(DownloadError, match=f"expected hash {WRONG}, got {SHA256}"):
            hub.fetch(REPO, FILE, revision=revision, sha256=WRONG)
    assert found.path.read_bytes() == WEIGHTS
    assert server.sent == len(WEIGHTS)


def test_a_wrong_hash_of_a_small_file_costs_nothing(server: Hub) -> None:
    """The Hub states git's hash of it, so that only its bytes tell."""
    found = hub.fetch(REPO, "config.json")
    with pytest.raises(DownloadError, match=f"expected hash {WRONG}"):
        hub.fetch(REPO, "config.json", sha256=WRONG)
    assert found.path.read_bytes() == b"{}"
    assert hub.fetch(REPO, "config.json") == found


def test_a_pin_that_cannot_be_kept_is_said(server: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/pins").touch()
    assert fetch().path.read_bytes() == WEIGHTS
    assert "vit is not pinned, because its pin cannot be written: " in caplog.text
    with pytest.raises(DownloadError, match=r"The pin of vit cannot be moved: .*VITLITE_CACHE"):
        fetch(update=True)
