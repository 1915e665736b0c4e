"""Downloads from a local Hub with the real client: verified, resumed, offline, and by several processes at once."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fetching import FETCH, FILE, OTHER, REPO, SHA256, SIZE, WEIGHTS, fetch, finish, flip, in_namespace, start
from huggingface_hub import hf_hub_download, scan_cache_dir
from server import Answer, Hub

from vitlite.checkpoints.reader import locate
from vitlite.errors import DownloadError
from vitlite.storage import cache_folder
from vitlite.zoo import download
from vitlite.zoo.download import fetch_optional


def blob() -> Path:
    return cache_folder() / "models--timm--vit" / "blobs" / SHA256


def test_second_call_needs_no_connection(server: Hub) -> None:
    found = fetch()
    assert found.path.read_bytes() == WEIGHTS
    assert found == (found.path, server.repos[REPO]["branches"]["main"], SHA256, "hub")
    assert server.sent == SIZE
    server.log.clear()
    assert fetch() == found
    assert download.fetch(REPO, FILE, revision=found.commit) == found
    assert not server.log


DENY_SOCKETS = """
import sys
def deny(event, args):
    if event.startswith("socket."):
        raise RuntimeError(f"{event} {args}")
sys.addaudithook(deny)
"""


def test_warm_start_opens_no_socket_and_does_not_import_the_client(server: Hub) -> None:
    fetch()
    server.log.clear()
    finish(start(DENY_SOCKETS + FETCH + "assert 'huggingface_hub' not in sys.modules"))
    assert not server.log
    assert "socket." in finish(start(DENY_SOCKETS + FETCH.replace("prefer_cache=True", "")))


def test_moved_branch_is_downloaded_if_asked_for(server: Hub) -> None:
    old = fetch()
    new = server.publish(REPO, model_safetensors=OTHER)
    assert fetch() == old
    found = download.fetch(REPO, FILE)
    assert (found.commit, found.path.read_bytes()) == (new, OTHER)
    assert fetch() == found
    assert download.fetch(REPO, FILE, revision=old.commit) == old


def test_same_bytes_in_another_commit_are_not_sent_again(server: Hub) -> None:
    fetch()
    newer = server.publish(REPO, model_safetensors=WEIGHTS, config_json=b"[]")
    assert download.fetch(REPO, FILE).commit == newer
    assert server.sent == SIZE


def test_client_reads_what_vitlite_cached(server: Hub) -> None:
    found = fetch()
    fetch_optional(REPO, "config.json")
    server.log.clear()
    for revision in ("main", found.commit):
        path = hf_hub_download(REPO, FILE, revision=revision, cache_dir=cache_folder(), local_files_only=True)
        assert path == str(found.path)
    (repo,) = scan_cache_dir(cache_folder()).repos
    assert not scan_cache_dir(cache_folder()).warnings
    assert repo.size_on_disk == SIZE + 2


def test_vitlite_reads_what_the_client_cached(server: Hub) -> None:
    path = hf_hub_download(REPO, FILE, cache_dir=cache_folder(), endpoint=server.url)
    server.log.clear()
    assert fetch() == (Path(path), server.repos[REPO]["branches"]["main"], SHA256, "hub")
    assert not server.log


def test_cache_without_links_keeps_one_copy(server: Hub) -> None:
    no_links = {"HF_HUB_DISABLE_SYMLINKS": "1"}
    finish(start(FETCH, **no_links))
    found = fetch()
    if found.path.is_symlink():
        pytest.skip("this client has no way to do without links")
    finish(start(FETCH.replace("prefer_cache=True", ""), **no_links))
    assert [path for path in cache_folder().rglob("*") if path.is_file() and path.stat().st_size == SIZE] == [
        found.path
    ]
    assert server.sent == SIZE
    flip(found.path)
    finish(start(FETCH.replace("prefer_cache=True", ""), **no_links))
    assert fetch().path.read_bytes() == WEIGHTS


# ---- verification


def test_expected_hash_is_compared(server: Hub) -> None:
    assert fetch(sha256=SHA256).verified == "record"
    with pytest.raises(DownloadError, match="has the wrong sha256: expected 0000"):
        fetch(sha256="0" * 64)
    assert server.sent == SIZE
    assert fetch().path.read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", [FILE, "config.json"])
def test_wrong_bytes_are_downloaded_once_more(server: Hub, name: str) -> None:
    server.wrong = 1
    found = download.fetch(REPO, name)
    assert found.path.read_bytes() == server.repos[REPO]["commits"][found.commit][name]
    assert found.verified == "hub"


def test_wrong_bytes_twice_are_an_error_and_nothing_is_kept(server: Hub) -> None:
    server.wrong = 2
    with pytest.raises(DownloadError, match=f"expected {SHA256}, got .*another HF_ENDPOINT"):
        fetch()
    assert not list(blob().parent.iterdir())
    assert fetch().path.read_bytes() == WEIGHTS


DAMAGES: list[Callable[[Path], None]] = [flip, lambda path: os.truncate(path, 5), lambda path: path.unlink()]


@pytest.mark.parametrize("damage", DAMAGES, ids=["flipped", "truncated", "missing"])
def test_damaged_cache_is_repaired(server: Hub, damage: Callable[[Path], None]) -> None:
    fetch()
    damage(blob())
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent == 2 * SIZE


def test_damaged_cache_is_an_error_offline(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch().path
    flip(blob())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match=f"Wrong hash of {path}: expected {SHA256}"):
        fetch()
    assert path.stat().st_size == SIZE


def test_hub_without_hashes(server: Hub) -> None:
    headers = {"ETag": '"65a1b2c3"', "X-Repo-Commit": "0" * 40, "Content-Length": str(SIZE)}
    server.instead = lambda request: Answer(200, headers, WEIGHTS)
    assert fetch() == (fetch().path, "0" * 40, SHA256, "first use")


@pytest.mark.parametrize("commit", ["", "../../../evil", "main"])
def test_answer_without_a_commit_is_not_from_a_hub(server: Hub, commit: str) -> None:
    server.instead = lambda request: Answer(200, {"ETag": f'"{SHA256}"', "X-Repo-Commit": commit}, b"Please log in")
    with pytest.raises(DownloadError, match="does not come from the Hugging Face Hub"):
        fetch()


# ---- interrupted downloads


BIG = WEIGHTS * 10  # the client writes 10 MB at a time


def test_cut_connection_is_resumed(server: Hub) -> None:
    server.publish(REPO, model_safetensors=BIG)
    server.cut.extend([len(BIG) // 2])
    assert fetch().path.read_bytes() == BIG
    assert server.sent < 1.3 * len(BIG)


def killed_in_the_middle(server: Hub, code: str = FETCH, size: int = SIZE) -> None:
    server.speed, before = 2 * size, server.sent
    process = start(code)
    while server.sent - before < 0.6 * size:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    server.speed = 0


def test_killed_download_is_resumed(server: Hub) -> None:
    server.publish(REPO, model_safetensors=BIG)
    killed_in_the_middle(server, size=len(BIG))
    assert [path.suffix for path in blob().parent.iterdir()] == [".incomplete"]
    assert fetch().path.read_bytes() == BIG
    assert server.sent < 1.3 * len(BIG)


def test_killed_repair_keeps_a_file(server: Hub) -> None:
    found = fetch()
    flip(blob())
    killed_in_the_middle(server)
    assert found.path.stat().st_size == SIZE
    assert fetch().path.read_bytes() == WEIGHTS


@pytest.mark.parametrize("left", [b"?" * (SIZE // 2), b"?" * (SIZE + 5), OTHER])
def test_wrong_leftover_is_not_kept(server: Hub, left: bytes) -> None:
    blob().parent.mkdir(parents=True)
    blob().with_name(f"{SHA256}.incomplete").write_bytes(left)
    assert fetch().path.read_bytes() == WEIGHTS
    assert not list(blob().parent.glob("*.incomplete"))


def test_server_without_ranges(server: Hub) -> None:
    server.ranges = False
    blob().parent.mkdir(parents=True)
    blob().with_name(f"{SHA256}.incomplete").write_bytes(WEIGHTS[: SIZE // 2])
    assert fetch().path.read_bytes() == WEIGHTS


def test_killed_between_the_files_of_a_repository(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, a branch is at the last commit of which all files are there."""
    old = server.publish("a/b", model_safetensors=WEIGHTS, config_json=b"{}")
    assert locate("a/b").commit == old
    new = server.publish("a/b", model_safetensors=OTHER, config_json=b'{"new": 1}')
    killed_in_the_middle(server, "from vitlite.checkpoints.reader import locate; locate('a/b')")
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        location = locate("a/b")
        assert (location.commit, location.path.read_bytes()) == (old, WEIGHTS)
    location = locate("a/b")
    assert (location.commit, location.path.read_bytes()) == (new, OTHER)


def test_eight_processes_download_once(server: Hub) -> None:
    server.speed = 10 * SIZE
    processes = [start(FETCH) for _ in range(8)]
    for process in processes:
        finish(process)
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent == SIZE
    assert server.count("GET", "/cdn/") == 1


# ---- no network, mirrors, refusals


@pytest.mark.parametrize("variables", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_error_without_a_network_says_what_to_do(server: Hub, variables: dict[str, str]) -> None:
    text = finish(start(FETCH, **variables), code=1)
    error, remedy = text.splitlines()[-2:]
    assert error.startswith(f"vitlite.zoo.download.UnreachableError: Cannot download {FILE} of {REPO}@main to ")
    assert len(error) < 300
    assert remedy.startswith(
        "Without a connection, pass a file with weights= (--weights FILE), or use vit_nano_4.cifar10, "
    )
    assert text.count("Traceback") == 1
    assert "httpx" not in text.replace(error, "")


def test_branch_falls_back_to_the_cached_commit(
    server: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = download.fetch(REPO, FILE)
    server.publish(REPO, model_safetensors=OTHER)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert download.fetch(REPO, FILE) == old
    assert f"TRANSFORMERS_OFFLINE is set). Using the cached commit {old.commit}" in caplog.text
    monkeypatch.delenv("HF_HUB_OFFLINE")
    server.instead = lambda request: Answer(503, {})
    assert download.fetch(REPO, FILE) == old
    server.instead = lambda request: None
    assert download.fetch(REPO, FILE).path.read_bytes() == OTHER


def test_absent_file_is_remembered(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = fetch().commit
    with pytest.raises(DownloadError, match=r"timm/vit@main has no file none\.json"):
        download.fetch(REPO, "none.json")
    assert fetch_optional(REPO, "none.json", revision=commit) is None
    server.log.clear()
    assert fetch_optional(REPO, "none.json", revision=commit) is None
    assert not server.log
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="offline mode is on"):  # unknown is not absent
        fetch_optional(REPO, "unknown.json", revision=commit)


def test_404_of_a_proxy_does_not_mean_absent(server: Hub) -> None:
    server.instead = lambda request: Answer(404, {"Content-Type": "text/html"}, b"<h1>blocked</h1>")
    with pytest.raises(DownloadError, match="404"):
        fetch_optional(REPO, "config.json")


def test_mirror_is_used(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with Hub() as mirror:
        mirror.publish("timm/other", model_safetensors=OTHER)
        monkeypatch.setenv("HF_ENDPOINT", mirror.url + "/")
        assert download.fetch("timm/other", FILE).path.read_bytes() == OTHER
    assert not server.log


def test_refusals_say_what_to_do(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DownloadError, match=r"of timm/none@main: .*Check the repository.*HF_TOKEN"):
        download.fetch("timm/none", FILE)
    with pytest.raises(DownloadError, match=r"of timm/vit@v9: .*Check the repository and the revision"):
        download.fetch(REPO, FILE, revision="v9")
    server.gated[REPO] = {"hf_accepted"}
    with pytest.raises(DownloadError, match=rf"Accept the licence at {server.url}/{REPO}. Then log in"):
        fetch()
    monkeypatch.setenv("HF_TOKEN", "hf_accepted")
    assert fetch().path.read_bytes() == WEIGHTS
    assert not any("authorization" in request.headers for request in server.log if "/cdn/" in request.path)


@pytest.mark.parametrize("repo", ["vit", "a/b/c", "../b", "a/..", "", "a/b\n"])
def test_invalid_repository(server: Hub, repo: str) -> None:
    with pytest.raises(DownloadError, match="is not a valid name of a repository"):
        download.fetch(repo, FILE)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "", "a//b", ".hidden", "a\0b"])
def test_names_do_not_lead_to_other_folders(server: Hub, name: str) -> None:
    with pytest.raises(DownloadError, match="is not a valid name of a file"):
        download.fetch(REPO, name)
    if name:
        with pytest.raises(DownloadError, match="is not a valid name of a branch, tag or commit"):
            download.fetch(REPO, FILE, revision=name)
    assert not server.log


# ---- disks


def test_read_only_cache(server: Hub, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    fetch()
    read_only = in_namespace(f"mount --bind {cache} {cache} && mount -o remount,ro,bind {cache}")
    shutil.rmtree(tmp_path / "cache/verified")
    server.log.clear()
    finish(start(FETCH, *read_only))
    assert not server.log
    text = finish(start(FETCH.replace(FILE, "config.json"), *read_only), code=1)
    assert "set VITLITE_CACHE to a writable folder" in text


def test_full_disk(server: Hub) -> None:
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({SIZE // 2}, {SIZE // 2}))\n"
    text = finish(start(limit + FETCH), code=1)
    assert f"Cannot download {FILE}" in text
    assert "Free some space" in text
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent <= 1.6 * SIZE


def test_cache_that_is_a_file(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="set VITLITE_CACHE to a writable folder"):
        fetch()


def test_interrupted_by_ctrl_c(server: Hub) -> None:
    server.speed = SIZE / 4
    process = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + FETCH],
        stderr=subprocess.PIPE,
        text=True,
    )
    while not server.sent:
        time.sleep(0.01)
    process.send_signal(2)
    assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
    server.speed = 0
    assert fetch().path.read_bytes() == WEIGHTS
