"""Where files are kept, and what happens where nothing can be."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from fetching import FETCH, FILE, OTHER, REPO, SHA256, WEIGHTS, fetch, finish, flip, in_namespace, rot, start
from server import Hub

from vitlite.errors import DownloadError
from vitlite.storage import cache_folder
from vitlite.zoo import hub


def test_where_things_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VITLITE_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    seen = [cache_folder()]
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE", "VITLITE_CACHE"):
        monkeypatch.setenv(name, f"/{name}")
        seen.append(cache_folder())
    assert [str(path) for path in seen] == [
        "/home/me/.cache/huggingface/hub",
        "/XDG_CACHE_HOME/huggingface/hub",
        "/HF_HOME/hub",
        "/HUGGINGFACE_HUB_CACHE",
        "/HF_HUB_CACHE",
        "/VITLITE_CACHE/hub",
    ]


def test_a_folder_from_where_one_is_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", "weights of mine")
    monkeypatch.chdir(tmp_path)
    assert cache_folder() == tmp_path / "weights of mine/hub"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cache_folder() == tmp_path / "weights of mine/hub"


def test_a_read_only_cache(server: Hub, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    found = fetch()
    read_only = in_namespace(f"mount --bind {cache} {cache} && mount -o remount,ro,bind {cache}")
    server.log.clear()
    assert finish(start(FETCH, *read_only, VITLITE_VERIFY="always")).strip().lstrip("-").isdigit()
    assert not server.log
    missing = FETCH.replace(FILE, "config.json").replace("'vit'", "None")
    assert "Read-only file system" in (text := finish(start(missing, *read_only), code=1))
    assert "setting VITLITE_CACHE (or HF_HUB_CACHE) to a folder that can be written" in text
    flip(Path(os.path.realpath(found.path)))
    text = finish(start(FETCH, *read_only), code=1)
    assert f"Wrong bytes in {found.path}: expected hash {SHA256}" in text
    assert "Read-only file system" in text


def test_rot_in_a_read_only_cache_is_found(server: Hub, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    path = fetch().path
    rot(Path(os.path.realpath(path)))
    read_only = in_namespace(f"mount --bind {cache} {cache} && mount -o remount,ro,bind {cache}")
    text = finish(start("from vitlite.zoo import hub; hub.verify('vit')", *read_only), code=1)
    assert f"Wrong bytes in {path}: expected hash {SHA256}" in text
    assert "Read-only file system" not in text


PLACES = ["with spaces and 'quotes'", "Gewichte für später 重み", "a%20b", "$HOME-less", "-x", "#1", "a\nb"]


@pytest.mark.parametrize("name", PLACES)
def test_folders_with_any_name(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cache = tmp_path / name
    monkeypatch.setenv("VITLITE_CACHE", str(cache))
    if "$" in name:
        monkeypatch.setenv("HOME", str(tmp_path))
        cache = Path(os.path.expandvars(cache))
    found = fetch()
    assert found.path.is_relative_to(cache)
    server.log.clear()
    assert fetch() == hub.verify("vit") == found
    assert not server.log


def test_a_folder_whose_name_is_no_unicode(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    found = fetch()
    server.log.clear()
    assert fetch() == hub.verify("vit") == found
    assert not server.log


@pytest.mark.parametrize("linked", ["", "hub", "pins", "hub/models--timm--vit", "hub/models--timm--vit/blobs"])
def test_folders_that_are_links(server: Hub, tmp_path: Path, linked: str) -> None:
    """Somebody has moved a part of the cache to another disk."""
    cache, elsewhere = tmp_path / "cache", tmp_path / "another/disk/deep/down"
    elsewhere.mkdir(parents=True)
    (cache / linked).parent.mkdir(parents=True, exist_ok=True)
    (cache / linked).symlink_to(elsewhere, target_is_directory=True)
    found = fetch()
    assert found.path.read_bytes() == WEIGHTS
    server.log.clear()
    assert fetch() == found
    assert not server.log
    server.publish(REPO, model_safetensors=OTHER)
    assert fetch(update=True).path.read_bytes() == OTHER
    flip(Path(os.path.realpath(fetch().path)))
    assert hub.fetch(REPO, FILE).path.read_bytes() == OTHER
    assert found.path.read_bytes() == WEIGHTS


def test_snapshots_on_another_disk(server: Hub, tmp_path: Path) -> None:
    """A link is made from where it really is."""
    snapshots = tmp_path / "cache/hub/models--timm--vit/snapshots"
    snapshots.parent.mkdir(parents=True)
    (tmp_path / "x").mkdir()
    snapshots.symlink_to(tmp_path / "x")
    assert fetch().path.read_bytes() == WEIGHTS
    assert fetch().path.is_symlink()


def test_a_blob_that_belongs_to_others_is_not_written_to(server: Hub, tmp_path: Path) -> None:
    """A newer client keeps blobs that several caches share, with links to them."""
    found = fetch()
    blob, shared = Path(os.path.realpath(found.path)), tmp_path / "shared"
    shutil.move(blob, shared)
    blob.symlink_to(shared)
    assert fetch().path.read_bytes() == WEIGHTS
    flip(shared)
    damaged = shared.read_bytes()
    assert fetch().path.read_bytes() == WEIGHTS
    assert shared.read_bytes() == damaged


def test_a_link_to_nowhere_or_a_file_in_the_place_of_the_cache(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nowhere").symlink_to(tmp_path / "not there" / "either")
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name in ("nowhere", "file", "circle"):
        monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / name))
        with pytest.raises(DownloadError, match=r"Cannot keep model\.safetensors .*VITLITE_CACHE"):
            fetch()
    assert (tmp_path / "file").read_bytes() == b""


def test_relative_folders(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VITLITE_CACHE")
    monkeypatch.setenv("HF_HOME", "mine/hf")
    monkeypatch.chdir(tmp_path)
    found = fetch()
    assert found.path.is_relative_to(tmp_path / "mine/hf/hub")
    assert (tmp_path / "mine/hf/vitlite/pins/vit.json").exists()
    (tmp_path / "elsewhere").mkdir()
    os.chdir("elsewhere")  # as a program may, that has the path already
    assert found.path.read_bytes() == WEIGHTS


def test_empty_variables_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("VITLITE_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    assert str(cache_folder()) == "/home/me/.cache/huggingface/hub"


def test_nobody_is_at_home(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VITLITE_CACHE")
    monkeypatch.setenv("HF_HOME", "~nobody-of-that-name/hf")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DownloadError, match=r"There is no home folder for ~nobody-of-that-name/hf.*Set VITLITE_CACHE"):
        fetch()
    assert not list(tmp_path.iterdir())


AS_ANOTHER = f"""
import os, shutil, tempfile
from vitlite.zoo import hub
place = os.environ["VITLITE_CACHE"]
os.environ["VITLITE_CACHE"] = tempfile.mkdtemp()
hub.fetch({REPO!r}, "config.json")  # imports what the other user may not be allowed to read
hub.verify(hub.fetch({REPO!r}, {FILE!r}, pin="vit").path)
shutil.rmtree(os.environ["VITLITE_CACHE"])
os.environ["VITLITE_CACHE"] = place
os.setgroups([]); os.setgid(12345); os.setuid(12345)
"""


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs to become another user")
@pytest.mark.usefixtures("uncovered")
def test_two_users_of_one_cache(server: Hub) -> None:
    """The second may read what the first has fetched; what it may not write is said."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        mine = {"VITLITE_CACHE": f"{folder}/cache", "HOME": folder}
        finish(start(FETCH, **mine))
        server.publish("timm/other", model_safetensors=OTHER)
        assert finish(start(AS_ANOTHER + FETCH, **mine)).count("\n") == 1
        other = FETCH.replace(REPO, "timm/other")
        text = finish(start(AS_ANOTHER + other, **mine), code=1)
        assert "Cannot keep model.safetensors of timm/other@main" in text
        assert "Permission denied" in text
        text = finish(start(AS_ANOTHER + FETCH.replace("pin='vit'", "pin='vit', update=True"), **mine))
        assert text.count("\n") == 1  # nothing newer, nothing to write
        server.publish(REPO, model_safetensors=OTHER, config_json=b"{}")
        text = finish(start(AS_ANOTHER + FETCH.replace("pin='vit'", "pin='vit', update=True"), **mine), code=1)
        assert "Permission denied" in text
        assert finish(start(FETCH, **mine)).count("\n") == 1
        assert len(list(Path(folder, "cache/pins").iterdir())) == 1


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs to become another user")
def test_a_cache_that_may_not_even_be_looked_into(server: Hub) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        text = finish(start(AS_ANOTHER + FETCH, VITLITE_CACHE=f"{folder}/cache", HOME="/"), code=1)
        assert "vitlite.errors.DownloadError: Cannot keep model.safetensors" in text
        assert "Permission denied" in text
