"""Weights from a Hub with every fault we know of. The real huggingface_hub talks to a real server on loopback."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from fetching import (
    FETCH,
    FILE,
    OTHER,
    REPO,
    SHA256,
    SIZE,
    WEIGHTS,
    fetch,
    finish,
    finished_files,
    flip,
    open_to_all,
    rot,
    start,
)
from huggingface_hub import (
    _CACHED_NO_EXIST,
    hf_hub_download,
    scan_cache_dir,
    snapshot_download,
    try_to_load_from_cache,
)
from server import Answer, Hub, Request

from vitlite.errors import DownloadError
from vitlite.storage import cache_folder
from vitlite.zoo import hub, stamps
from vitlite.zoo.pins import all_pins


def test_cold_then_warm(server: Hub) -> None:
    found = fetch()
    assert found.path.read_bytes() == WEIGHTS
    assert found == (found.path, server.repos[REPO]["branches"]["main"], SHA256, "hub")
    assert server.sent == SIZE
    assert server.count("HEAD") == 1
    server.log.clear()
    assert fetch() == found
    assert hub.fetch(REPO, FILE, revision=found.commit) == found
    assert not server.log


def test_warm_start_opens_no_socket_and_needs_no_variable(server: Hub, tmp_path: Path) -> None:
    clean = {"HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"]}
    run = subprocess.run
    first = run(
        [sys.executable, "-c", FETCH], env={**clean, "HF_ENDPOINT": server.url}, capture_output=True, check=True
    )
    assert (tmp_path / "home/.cache/huggingface/vitlite/pins/vit.json").is_file()
    server.log.clear()
    deny = """
import sys
def deny(event, args):
    if event.startswith("socket."):
        raise RuntimeError(f"{event} {args}")
sys.addaudithook(deny)
"""
    light = "; assert 'huggingface_hub' not in sys.modules  # whose import takes longer than reading a model"
    again = run([sys.executable, "-c", deny + FETCH + light], env=clean, capture_output=True, check=True)
    assert again.stdout != b""
    assert first.stderr == again.stderr == b""
    assert not server.log
    denied = run(
        [sys.executable, "-c", deny + FETCH.replace("'vit'", "None")], env=clean, capture_output=True, check=False
    )
    assert b"socket." in denied.stderr  # the denial works: without a pin the Hub is asked


def test_another_commit_with_the_same_file_costs_no_bytes(server: Hub) -> None:
    fetch()
    newer = server.publish(REPO, model_safetensors=WEIGHTS, config_json=b"[]")
    assert fetch(update=True).commit == newer
    assert server.sent == SIZE


def test_a_file_that_another_program_cached(server: Hub) -> None:
    path = hf_hub_download(REPO, FILE, cache_dir=cache_folder(), endpoint=server.url)
    sent = server.sent
    assert fetch().verified == "hub"
    assert server.sent == sent
    os.truncate(path, 1000)
    assert fetch(update=True).path.read_bytes() == WEIGHTS


def test_a_full_commit_needs_no_network_even_unseen(server: Hub) -> None:
    hf_hub_download(REPO, FILE, cache_dir=cache_folder(), endpoint=server.url)
    server.log.clear()
    commit = server.repos[REPO]["branches"]["main"]
    found = hub.fetch(REPO, FILE, revision=commit)
    assert found.verified == "hub"  # what it stated is what the blob is called
    Path(os.path.realpath(found.path)).write_bytes(OTHER)
    assert not server.log
    assert hub.fetch(REPO, FILE, revision=commit).path.read_bytes() == WEIGHTS


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("name", [FILE, "config.json"])
@pytest.mark.parametrize("revision", ["main", "commit"])
def test_what_another_program_cached_is_held_to_what_the_hub_stated_then(
    server: Hub, monkeypatch: pytest.MonkeyPatch, links: bool, name: str, revision: str
) -> None:
    """Its blob's name says so; where there are no links, the client's list of the commit."""
    if not links and not hasattr(huggingface_hub, "_tree_cache"):
        pytest.skip("this client keeps no list of a repository's files")
    path = Path(snapshot_download(REPO, cache_dir=cache_folder(), endpoint=server.url), name)
    if not links:
        path.resolve().replace(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)  # as a bad disk, or a program that crashed
    commit = server.repos[REPO]["branches"]["main"]
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(DownloadError, match=r"Wrong bytes in .*The first is what the Hub states"):
            hub.fetch(REPO, name, revision=commit if revision == "commit" else None)
    found = hub.fetch(REPO, name, revision=commit if revision == "commit" else None)
    assert found.path.read_bytes() == (WEIGHTS if name == FILE else b"{}")
    assert found.verified == "hub"


def test_wrong_bytes_of_the_right_size_are_fetched_again(server: Hub) -> None:
    server.wrong = 1
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent == 2 * SIZE


def test_wrong_bytes_twice_are_an_error_and_leave_nothing(server: Hub, tmp_path: Path) -> None:
    server.wrong = 1000
    with pytest.raises(DownloadError) as error:
        fetch()
    assert server.sent == 2 * SIZE
    got = hashlib.sha256(bytes(255 - byte for byte in WEIGHTS)).hexdigest()
    assert f"expected hash {SHA256}, got {got}" in str(error.value)
    assert str(tmp_path / "cache") in str(error.value)
    assert "try another network or HF_ENDPOINT" in str(error.value)
    assert not list((tmp_path / "cache/hub/models--timm--vit/blobs").iterdir())
    assert not all_pins()


def test_wrong_bytes_of_a_small_file(server: Hub) -> None:
    server.wrong = 1
    assert hub.fetch(REPO, "config.json").path.read_bytes() == b"{}"
    assert server.sent == 4


DAMAGES: list[Callable[[Path], None]] = [
    flip,
    lambda path: os.truncate(path, SIZE - 1),
    lambda path: os.truncate(path, 0),
    lambda path: path.unlink(),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=["flipped", "truncated", "empty", "dangling"])
def test_damage_in_a_warm_cache_is_repaired(server: Hub, damage: Callable[[Path], None]) -> None:
    path = fetch().path
    damage(Path(os.path.realpath(path)))
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent == 2 * SIZE


def test_damage_without_a_network_is_explained(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch().path
    flip(Path(os.path.realpath(path)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match=f"Wrong bytes in {path}: expected hash {SHA256}, got .*HF_HUB_OFFLINE"):
        fetch()


def test_the_client_finds_what_was_fetched(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of its cache is that which it documents."""
    hub.fetch_optional(REPO, "none.json")
    found = [hub.fetch(REPO, name) for name in (FILE, "config.json")]
    server.publish(REPO, "refs/pr/1", model_safetensors=OTHER)
    hub.fetch(REPO, FILE, revision="refs/pr/1")
    server.log.clear()
    place = {"cache_dir": cache_folder(), "local_files_only": True}
    for fetched in found:
        for revision in ("main", fetched.commit):
            path = hf_hub_download(REPO, fetched.path.name, revision=revision, **place)
            assert Path(path).samefile(fetched.path)
    assert Path(hf_hub_download(REPO, FILE, revision="refs/pr/1", **place)).read_bytes() == OTHER
    assert try_to_load_from_cache(REPO, "none.json", cache_dir=cache_folder()) is _CACHED_NO_EXIST
    assert not server.log
    (repo,) = scan_cache_dir(cache_folder()).repos
    assert not scan_cache_dir(cache_folder()).warnings
    assert {ref: revision.commit_hash for ref, revision in repo.refs.items()} == server.repos[REPO]["branches"]
    assert repo.size_on_disk == 2 * SIZE + 2
    assert hf_hub_download(REPO, FILE, cache_dir=cache_folder(), endpoint=server.url) == str(found[0].path)
    assert server.sent == 0


def test_a_disk_without_links_keeps_one_copy(server: Hub, tmp_path: Path) -> None:
    finish(start(FETCH, HF_HUB_DISABLE_SYMLINKS="1"))
    if fetch().path.is_symlink():
        pytest.skip("needs a newer huggingface_hub, or a disk without links")
    assert len(finished_files(tmp_path / "cache")) == 1
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent == SIZE


def test_links_of_another_commit_stay_where_no_more_can_be_made(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of somebody who sets HF_HUB_DISABLE_SYMLINKS later, or who moves the cache to a disk without links."""
    first = hub.fetch(REPO, FILE)
    assert first.path.is_symlink()
    monkeypatch.setenv("HF_HUB_DISABLE_SYMLINKS", "1")
    server.publish(REPO, model_safetensors=WEIGHTS, config_json=b"{ }")
    second = hub.fetch(REPO, FILE)
    assert second.commit != first.commit
    assert not second.path.is_symlink()
    flip(Path(os.path.realpath(first.path)))
    server.publish(REPO, model_safetensors=WEIGHTS, config_json=b"{  }")
    third = hub.fetch(REPO, FILE)
    assert server.sent == 2 * SIZE  # what was there already is copied, unless it was damaged
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for found in (first, second, third):
        assert hub.fetch(REPO, FILE, revision=found.commit) == found
        assert found.path.read_bytes() == WEIGHTS
        place = {"cache_dir": cache_folder(), "local_files_only": True}
        assert hf_hub_download(REPO, FILE, revision=found.commit, **place) == str(found.path)
    assert not list(cache_folder().rglob("*.incomplete"))


def test_eight_cold_processes_download_once(server: Hub) -> None:
    server.speed = 10 * SIZE
    processes = [start(FETCH) for _ in range(8)]
    assert len({finish(process) == f"{hash(WEIGHTS)}\n" or 1 for process in processes}) == 1
    assert server.sent == SIZE
    assert server.count("HEAD") == 1
    assert server.count("GET", "/cdn/") == 1


def test_processes_that_cannot_lock_do_not_harm_each_other(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/locks").touch()  # no place for a lock
    server.speed = 4 * SIZE
    processes = [start(FETCH) for _ in range(3)]
    for process in processes:
        finish(process)
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent <= 3 * SIZE


@pytest.mark.parametrize("variables", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_offline_and_cold_says_at_once_what_to_do(
    server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    began = time.perf_counter()
    with pytest.raises(DownloadError) as error:
        fetch()
    assert time.perf_counter() - began < 1
    assert not server.log
    text = str(error.value)
    assert text.startswith(f"Cannot fetch {FILE} of {REPO}@main: ")
    assert f"{os.environ['HF_ENDPOINT']}/timm/vit/resolve/main/model.safetensors" in text
    assert f"It is not in the cache, {tmp_path / 'cache/hub'}" in text
    assert "use that file here: vitlite.create('vit', weights='model.safetensors')." in text
    assert "use that file here: --model vit --weights model.safetensors " in error.value.for_command_line()


def test_a_branch_falls_back_to_the_cached_commit_with_a_log_line(
    server: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = hub.fetch(REPO, FILE)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.fetch(REPO, FILE) == old
    assert f"HF_HUB_OFFLINE is set. Using the cached commit {old.commit}" in caplog.text
    monkeypatch.delenv("HF_HUB_OFFLINE")
    server.publish(REPO, model_safetensors=OTHER)
    server.log.clear()
    server.fail.append((503, {}))
    assert hub.fetch(REPO, FILE) == old  # without waiting: one question
    assert len(server.log) == 1
    assert hub.fetch(REPO, FILE).path.read_bytes() == OTHER


def test_the_cached_commit_of_a_file_in_a_folder(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = server.publish(REPO, **{"a/b/config_json": b"{}"})
    found = hub.fetch(REPO, "a/b/config.json")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.fetch(REPO, "a/b/config.json") == found
    assert found.commit == commit


def test_files_that_may_be_absent(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = hub.fetch_optional(REPO, "config.json")
    assert found
    assert found.path.read_bytes() == b"{}"
    assert hub.fetch_optional(REPO, "none.json", revision=found.commit) is None
    server.log.clear()
    assert hub.fetch_optional(REPO, "none.json", revision=found.commit) is None
    assert not server.log
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):  # not knowing is not absence
        hub.fetch_optional(REPO, "unasked.json", revision=found.commit)


def test_a_proxy_s_404_is_no_word_on_a_file(server: Hub) -> None:
    """Taken for absent, a config.json left a fine-tune with the labels of another model."""
    server.instead = lambda request: Answer(404, {"Content-Type": "text/html"}, b"<h1>blocked</h1>")
    with pytest.raises(DownloadError, match=r"does not answer like a Hub \(HTTP 404, and no word of which is absent"):
        hub.fetch_optional(REPO, "config.json")
    server.instead = lambda request: None
    assert hub.fetch_optional(REPO, "config.json")


def states(
    content: dict[str, bytes], size: int | None = None, at: str | None = "main"
) -> Callable[[Request], Answer | None]:
    """Answers as a mirror that knows no hashes: its ETag is when a file was made, and all were made at once."""

    def instead(request: Request) -> Answer | None:
        commit = request.path.split("/")[4].replace("main", max(content)) if at else max(content)
        if commit not in content:
            return None
        length = len(content[commit]) if size is None or request.method == "GET" else size
        headers = {"ETag": '"65a1b2c3"', "X-Repo-Commit": commit, "Content-Length": str(length)}
        return Answer(200, headers, content[commit])

    return instead


def test_another_commit_than_the_one_asked_for_is_refused(server: Hub) -> None:
    """By a mirror that knows no revisions, and has one commit: it says so itself."""
    first = fetch().commit
    assert first
    server.publish(REPO, model_safetensors=OTHER, config_json=b"[]")
    wanted = first.replace(first[0], "0" if first[0] != "0" else "1")
    server.instead = states({"2" * 40: OTHER}, at=None)
    with pytest.raises(DownloadError, match=f"asked for that commit, it has {'2' * 40}"):
        hub.fetch(REPO, FILE, revision=wanted)


@pytest.mark.parametrize("written", [str.upper, lambda etag: f"{etag}-gzip", lambda etag: f"{etag};br"])
@pytest.mark.parametrize("name", [FILE, "config.json"])
def test_a_hash_that_a_mirror_writes_otherwise_is_one(server: Hub, name: str, written: Callable[[str], str]) -> None:
    etag = SHA256 if name == FILE else hashlib.sha1(b"blob 2\0{}").hexdigest()

    def instead(request: Request) -> Answer | None:
        content = WEIGHTS if name == FILE else b"{}"
        headers = {"ETag": f'"{written(etag)}"', "X-Repo-Commit": "3" * 40, "Content-Length": str(len(content))}
        return Answer(200, headers, content[::-1] if request.method == "GET" and damaged else content)

    server.instead = instead
    damaged = True
    with pytest.raises(DownloadError, match=f"expected hash {etag}"):
        hub.fetch(REPO, name)
    damaged = False
    assert hub.fetch(REPO, name).verified == "hub"


@pytest.mark.parametrize("newer", [OTHER[:1000], OTHER[:2000]])
def test_an_etag_that_is_no_hash_says_nothing_of_another_commit(server: Hub, newer: bytes) -> None:
    content = {"0" * 40: WEIGHTS[:1000]}
    server.instead = states(content)
    old = hub.fetch(REPO, FILE)
    assert old.path.read_bytes() == WEIGHTS[:1000]
    content["1" * 40] = newer
    new = hub.fetch(REPO, FILE)
    assert (new.commit, new.path.read_bytes(), new.verified) == ("1" * 40, newer, "first use")
    assert old.path.read_bytes() == WEIGHTS[:1000]


@pytest.mark.parametrize("newer", ['"65b-new"', ""])
def test_bytes_of_two_versions_are_never_joined_where_no_hash_tells(server: Hub, newer: str) -> None:
    """A mirror's file is replaced by one of its size while the line is cut: both answers are of the range asked for."""
    gets: list[str] = []

    def instead(request: Request) -> Answer | None:
        replaced = len(gets) > 0
        content, etag = (OTHER, newer) if replaced else (WEIGHTS, '"65a-old"')
        headers = {"X-Repo-Commit": "0" * 40} | ({"ETag": etag} if etag else {})
        if request.method == "HEAD":
            return Answer(200, headers | {"ETag": etag or '"65b-new"', "Content-Length": str(len(content))})
        gets.append(request.headers["range"])
        first = int(gets[-1].removeprefix("bytes=").split("-")[0])
        part = content[first:]
        headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        return Answer(206, headers, part if replaced else iter([part[: len(part) // 2]]))

    assert len(WEIGHTS) == len(OTHER)
    server.instead = instead
    assert hub.fetch(REPO, FILE).path.read_bytes() == OTHER
    assert [range.split("-")[0] == "bytes=0" for range in gets] == [True, False, True]


def test_what_a_killed_process_left_begins_anew_where_no_hash_tells(server: Hub) -> None:

    def instead(request: Request) -> Answer | None:
        headers = {"X-Repo-Commit": "0" * 40, "ETag": '"65a1b2c3"'}
        if request.method == "HEAD":
            return Answer(200, headers | {"Content-Length": str(len(WEIGHTS))})
        first = int(request.headers["range"].removeprefix("bytes=").split("-")[0])
        headers["Content-Range"] = f"bytes {first}-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"
        return Answer(206, headers, WEIGHTS[first:])

    server.instead = instead
    blob = hub.fetch(REPO, FILE).path.resolve()
    for left in (OTHER[:1000], WEIGHTS[:1000]):
        blob.unlink()
        blob.with_name(f"{blob.name}.vitlite.incomplete").write_bytes(left)
        assert hub.fetch(REPO, FILE).path.read_bytes() == WEIGHTS


def test_without_a_hash_the_size_is_all_there_is_to_go_by(server: Hub) -> None:
    content = {"0" * 40: WEIGHTS[:1000]}
    server.instead = states(content, size=500)
    with pytest.raises(DownloadError, match="it states 500 bytes and sends more"):
        hub.fetch(REPO, FILE)
    server.instead = states(content)
    path = hub.fetch(REPO, FILE).path
    os.truncate(path, 500)
    stamps.forget(path)
    assert hub.fetch(REPO, FILE).path.read_bytes() == WEIGHTS[:1000]


def test_without_a_hash_what_came_first_is_remembered(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.instead = states({"0" * 40: WEIGHTS[:1000]})
    found = hub.fetch(REPO, FILE)
    assert found.verified == "first use"
    found.path.write_bytes(OTHER[:1000])
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(DownloadError, match=r"Wrong bytes in .*it has changed since"):
            hub.fetch(REPO, FILE, revision=found.commit)
    assert hub.fetch(REPO, FILE, revision=found.commit) == found
    assert found.path.read_bytes() == WEIGHTS[:1000]


def test_what_the_client_fetched_whole_is_known_to_lack_the_rest(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(huggingface_hub, "_tree_cache"):
        pytest.skip("this client keeps no list of a repository's files")
    snapshot_download(REPO, cache_dir=cache_folder(), endpoint=server.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.fetch_optional(REPO, "config.json")
    assert hub.fetch_optional(REPO, "adapter_config.json") is None


def test_verify(server: Hub, tmp_path: Path) -> None:
    found = fetch()
    assert hub.verify("vit") == found
    assert hub.verify(found.path).sha256 == SHA256
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    assert hub.verify(path) == (path, None, SHA256, "first use")
    assert hub.verify(path, SHA256) == (path, None, SHA256, "record")
    assert hub.verify("vit", SHA256) == (found.path, found.commit, SHA256, "record")
    for wrong in ("", "abc", SHA256.upper()):  # nothing that a file could have; it says nothing about this one
        with pytest.raises(DownloadError, match=f"'{wrong}' is no sha256"):
            hub.verify(path, wrong)
    rot(path)
    with pytest.raises(DownloadError, match=f"Wrong bytes in {path}"):
        hub.verify(path)
    with pytest.raises(DownloadError, match="Cannot verify nothing: it is neither a file nor a model"):
        hub.verify("nothing")


@pytest.mark.parametrize("is_link", [True, False])
def test_a_file_in_the_cache_is_verified_by_what_the_hub_stated(server: Hub, is_link: bool) -> None:
    path = Path(hf_hub_download(REPO, FILE, cache_dir=cache_folder(), endpoint=server.url))
    path = path if is_link else path.resolve()
    assert hub.verify(path) == (path, None, SHA256, "hub")
    path.write_bytes(OTHER)
    for _ in range(2):
        with pytest.raises(DownloadError, match=f"expected hash {SHA256}, got .*The first is what the Hub states"):
            hub.verify(path)


OF_ANOTHER_USER = """
import os
from vitlite.errors import DownloadError
from vitlite.zoo import hub
os.seteuid(65534)
try:
    hub.verify("vit")
except DownloadError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs to become somebody else")
@pytest.mark.parametrize("closed", ["pins", "hub"])
def test_verify_in_a_cache_that_is_closed(server: Hub, tmp_path: Path, closed: str) -> None:
    fetch()
    open_to_all(tmp_path)
    (tmp_path / "cache" / closed).chmod(0o700)
    assert "Cannot verify vit: [Errno 13] Permission denied" in finish(start(OF_ANOTHER_USER))
