"""Bad networks, refusals and full disks: how the bytes come all the same, or what is said."""

import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fetching import FETCH, FILE, OTHER, REPO, SHA256, SIZE, WEIGHTS, fetch, finish, finished_files, in_namespace, start
from server import Hub, Request

from vitlite.errors import DownloadError
from vitlite.storage import cache_folder
from vitlite.zoo import hub, network
from vitlite.zoo.remote import RemoteFile


def test_cut_connections_are_resumed(server: Hub, tmp_path: Path) -> None:
    server.cut.extend([1 << 17, 0])
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent == SIZE  # what had come is kept


def test_a_killed_process_is_resumed(server: Hub, tmp_path: Path) -> None:
    server.speed = 2 * SIZE
    process = start(FETCH)
    while server.sent < 0.6 * SIZE:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    server.speed = 0
    assert not finished_files(tmp_path / "cache")
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent <= 1.1 * SIZE


def test_a_damaged_beginning_is_not_built_upon(server: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "cache/hub/models--timm--vit/blobs"
    folder.mkdir(parents=True)
    (folder / f"{SHA256}.vitlite.incomplete").write_bytes(b"?" * (SIZE // 2))
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent == 1.5 * SIZE


def test_a_server_without_ranges(server: Hub) -> None:
    server.ranges = False
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent == SIZE


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_busy_servers_are_asked_again(server: Hub, status: int) -> None:
    server.fail.extend([(status, {"Retry-After": "0"})] * 4)
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent == SIZE


def test_a_busy_server_is_given_up_after_five_tries(server: Hub) -> None:
    server.fail.extend([(503, {"Retry-After": "0"})] * 100)
    with pytest.raises(DownloadError, match=r"cannot be reached \(HfHubHTTPError: .*503"):
        fetch()
    assert len(server.log) == 5


def test_pauses_grow_and_what_the_server_asks_for_is_capped(server: Hub) -> None:
    server.fail.extend([(500, {}), (500, {}), (500, {"Retry-After": "86400"})])
    log = "import logging; logging.basicConfig(level='INFO', format='%(message)s')\n"
    process = start(log + FETCH)
    assert process.stderr
    pauses: list[str] = []
    for line in process.stderr:
        pauses += [line.rpartition("in ")[2].strip()] if "trying again" in line else []
        if len(pauses) == 3:
            break
    process.kill()
    process.communicate()
    assert pauses == ["0.5 s.", "1.0 s.", "60.0 s."]


def test_silence_times_out_and_is_tried_again(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    server.hang.extend([2, 0, 2])  # the question, its repetition, the first block
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.count("HEAD") == 2
    assert server.count("GET", "/resolve/") == 2
    assert server.sent <= 1.1 * SIZE


def test_errors_without_a_text_are_tried_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.time, "sleep", lambda seconds: None)
    failures = [TimeoutError(), TimeoutError("\n")]
    file, patience = RemoteFile(REPO, FILE, "main"), network.Patience(3, 1, 20, False)
    assert network.with_retries(file, lambda timeout: failures and _raise(failures.pop()), patience) == []
    with pytest.raises(DownloadError, match=r"cannot be reached \(TimeoutError: \)"):
        network.with_retries(file, lambda timeout: _raise(TimeoutError()), patience._replace(tries=1))


def _raise(error: Exception) -> None:
    raise error


def test_a_client_that_was_imported_offline_is_not_asked_again(server: Hub) -> None:
    read = "import os, huggingface_hub.constants; del os.environ['HF_HUB_OFFLINE']\n"
    began = time.perf_counter()
    assert "cannot be reached (OfflineModeIsEnabled: " in finish(start(read + FETCH, HF_HUB_OFFLINE="1"), code=1)
    assert time.perf_counter() - began < 7.5  # what four pauses would take
    assert not server.log


def test_answers_that_are_too_short(server: Hub) -> None:
    def answer_with_nothing(request: Request) -> bool:
        if request.method == "GET":
            server.fail.append((206, {}))
        return False

    server.drop = answer_with_nothing
    with pytest.raises(DownloadError, match=r"does not send it \(0 bytes came instead of 4,194,304\)"):
        fetch()
    server.drop = lambda request: False
    assert fetch().path.read_bytes() == WEIGHTS


def test_connections_closed_without_an_answer(server: Hub) -> None:
    server.drop = lambda request: len(server.log) == 1
    assert fetch().path.read_bytes() == WEIGHTS


def test_a_login_page_is_not_a_hub(server: Hub) -> None:
    evil = {"X-Repo-Commit": "0" * 40, "ETag": '"../../../evil"', "Content-Length": "9"}
    server.fail.extend([(200, {}), (200, evil)])
    for _ in range(2):
        with pytest.raises(DownloadError, match=r"does not answer like a Hub.*HF_ENDPOINT"):
            fetch()
    assert server.sent == 0


def test_what_the_hub_does_not_have(server: Hub) -> None:
    with pytest.raises(DownloadError, match=r"Cannot fetch .* of timm/none@main: 401 .*Check the names.*HF_TOKEN"):
        hub.fetch("timm/none", FILE)
    with pytest.raises(DownloadError, match=r"of timm/vit@v9: 404 .*revision"):
        hub.fetch(REPO, FILE, revision="v9")
    with pytest.raises(DownloadError, match=r"timm/vit@main has no file other\.bin"):
        hub.fetch(REPO, "other.bin")
    with pytest.raises(DownloadError, match=r"a/b/c.* A repository id is owner/name"):
        hub.fetch("a/b/c", FILE)
    assert len(server.log) <= 8  # none of this is tried again


def test_an_expired_token_does_not_lock_out_public_weights(
    server: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server.token = "hf_good"
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    assert fetch().path.read_bytes() == WEIGHTS
    assert "refuses your token (HTTP 401)" in caplog.text
    assert hub.fetch_optional(REPO, "none.json") is None


def test_private_weights_and_a_token_set_later(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.token = "hf_good"
    server.private.add(REPO)
    for token in ("", "hf_bad"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(DownloadError, match=r"401.*HF_TOKEN"):
            fetch()
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert fetch().path.read_bytes() == WEIGHTS
    assert not any("authorization" in request.headers for request in server.log if "/cdn/" in request.path)


def test_a_gated_repository_and_what_to_do(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.gated[REPO] = {"hf_accepted"}
    for token in ("", "hf_not_accepted"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(DownloadError, match=r"is gated.*HTTP 40[13]") as caught:
            fetch()
        page = f"Accept its licence on {server.url}/{REPO} in a browser"
        for text in (str(caught.value), caught.value.for_command_line()):
            assert page in text
            assert "hf auth login" in text
            assert "HF_TOKEN" in text
    monkeypatch.setenv("HF_TOKEN", "hf_accepted")
    assert fetch().path.read_bytes() == WEIGHTS


def test_an_endpoint_set_later(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with Hub() as mirror:
        mirror.publish("timm/other", model_safetensors=OTHER)
        monkeypatch.setenv("HF_ENDPOINT", mirror.url + "/")
        assert hub.fetch("timm/other", FILE).path.read_bytes() == OTHER
    assert not server.log


def test_a_proxy_set_later(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.fetch(REPO, "config.json")
    monkeypatch.setenv("HTTP_PROXY", server.url)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    assert fetch().path.read_bytes() == WEIGHTS
    hosts = [request.headers["host"] for request in server.log if FILE in request.path]
    assert hosts == ["hub.invalid"] * 2
    monkeypatch.delenv("HTTP_PROXY")
    with pytest.raises(DownloadError, match="cannot be reached"):
        fetch(update=True)


def test_a_full_disk(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    small = in_namespace(f"mount -t tmpfs -o size=1m tmpfs {tmp_path}/cache")
    text = finish(start(FETCH, *small), code=1)
    assert "the disk is full" in text
    assert "after freeing some space or setting VITLITE_CACHE" in text
    assert server.sent == 0


def test_a_disk_that_fills_up_on_the_way(server: Hub) -> None:
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({SIZE // 2}, {SIZE // 2}))\n"
    text = finish(start(limit + FETCH), code=1)
    assert "Cannot keep model.safetensors" in text
    assert "freeing some space" in text
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.log[-1].sent == SIZE // 2


def test_progress_is_for_terminals(server: Hub) -> None:
    pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))
    assert finish(start(FETCH)).count("\n") == 1
    shutil.rmtree(cache_folder())
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    subprocess.run([sys.executable, "-c", FETCH], stderr=theirs, stdout=subprocess.PIPE, check=True, timeout=60)
    os.write(theirs, b"the end")
    shown = ""
    while "the end" not in shown:
        shown += os.read(ours, 1 << 16).decode()
    os.close(theirs)
    os.close(ours)
    assert "model.safetensors: 100%" in shown
