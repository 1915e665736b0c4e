"""Where files are kept, and what happens where nothing can be."""

import os
from pathlib import Path

import pytest
from fetching import FETCH, FILE, SHA256, fetch, finish, flip, in_namespace, rot, start
from server import Hub

from vitlite.weights.cache import cache_folder


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
    text = finish(start("from vitlite.weights import hub; hub.verify('vit')", *read_only), code=1)
    assert f"Wrong bytes in {path}: expected hash {SHA256}" in text
    assert "Read-only file system" not in text
