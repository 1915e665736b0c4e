"""Weights from a Hub with every fault we know of. The real huggingface_hub talks to a real server on loopback."""

import hashlib
import json
import logging
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download
from server import Hub

from vitlite.errors import DownloadError
from vitlite.weights import download, hub, stamps
from vitlite.weights.cache import cache_folder
from vitlite.weights.pins import all_pins

SIZE = 4 << 20  # 16 blocks of 1/4 MiB
WEIGHTS = random.Random(0).randbytes(SIZE)
OTHER = random.Random(1).randbytes(SIZE)
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
REPO, FILE = "timm/vit", "model.safetensors"
FETCH = f"from vitlite.weights import hub; print(hub.fetch({REPO!r}, {FILE!r}, pin='vit').path.read_bytes().__hash__())"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING", "VITLITE_", "TRANSFORMERS_"))]:
        monkeypatch.delenv(name)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Hub() as server:
        server.publish(REPO, model_safetensors=WEIGHTS, config_json=b"{}")
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield server


def fetch(**options: object) -> hub.Fetched:
    return hub.fetch(REPO, FILE, pin="vit", **options)  # type: ignore[arg-type]


def start(code: str, *wrapper: str, **env: str) -> "subprocess.Popen[str]":
    """A program of its own, with this one's environment."""
    command = [*wrapper, sys.executable, "-c", code]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **env})


def finish(process: "subprocess.Popen[str]", code: int = 0) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out + err


def in_namespace(command: str) -> tuple[str, ...]:
    """Runs a program after mounting something that only it sees."""
    probe = ["unshare", "-m", "true"]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    return ("unshare", "-m", "sh", "-c", command + ' && exec "$@"', "sh")


def trusted(folder: Path) -> list[Path]:
    """Everything in the cache that the Hub's client would take for a finished file."""
    files = [path for path in (folder / "hub").rglob("*") if path.is_file() and ".locks" not in path.parts]
    return [path for path in files if path.stat().st_size > 1000 and path.suffix != ".incomplete"]


# ---- cold, warm, pinned


def test_cold_then_warm(server: Hub) -> None:
    found = fetch()
    assert found.path.read_bytes() == WEIGHTS
    assert found == (found.path, server.repos[REPO]["branches"]["main"], SHA256, "hub")
    assert server.sent == SIZE
    assert server.count("HEAD") == 2  # ours, and the client's when it links the file
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
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):
        fetch(update=True)


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
    with pytest.raises(DownloadError, match=r"Cannot read the pin .*vit\.json.*Delete it"):
        fetch()


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
    assert found.verified == "first use"
    Path(os.path.realpath(found.path)).write_bytes(OTHER)
    assert not server.log
    assert hub.fetch(REPO, FILE, revision=commit).path.read_bytes() == WEIGHTS  # what came first is remembered


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


# ---- wrong bytes


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
    assert server.count("HEAD") == 2  # the client was never shown the wrong bytes
    assert not list((tmp_path / "cache/hub/models--timm--vit/blobs").iterdir())
    assert not all_pins()


def test_wrong_bytes_of_a_small_file(server: Hub) -> None:
    server.wrong = 1
    assert hub.fetch(REPO, "config.json").path.read_bytes() == b"{}"
    assert server.sent == 4


def flip(path: Path) -> None:
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(bytes([255 - WEIGHTS[SIZE // 2]]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as if it had never been written


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


def rot(path: Path, cache: Path) -> None:
    """A change that the stamp does not show."""
    before = stamps.stat_of(path)
    flip(path)
    for stamp in (cache / "stamps").iterdir():
        content = json.loads(stamp.read_text())
        if content["stat"] == before:
            stamp.write_text(json.dumps({**content, "stat": stamps.stat_of(path)}))


def test_rot_below_the_stamp_is_found_when_asked(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch().path
    rot(Path(os.path.realpath(path)), tmp_path / "cache")
    assert fetch().path.read_bytes() != WEIGHTS  # so warm starts do not hash
    with pytest.raises(DownloadError, match=f"Wrong bytes in {path}: expected hash {SHA256}"):
        hub.verify("vit")
    assert fetch().path.read_bytes() == WEIGHTS  # and what `verify` has found is not trusted any more
    rot(Path(os.path.realpath(path)), tmp_path / "cache")
    monkeypatch.setenv("VITLITE_VERIFY", "always")
    assert fetch().path.read_bytes() == WEIGHTS


# ---- bad networks


def test_cut_connections_are_resumed(server: Hub, tmp_path: Path) -> None:
    server.cut.extend([1 << 17, 0])
    assert fetch().path.read_bytes() == WEIGHTS
    assert SIZE < server.sent <= 1.1 * SIZE


def test_a_killed_process_is_resumed(server: Hub, tmp_path: Path) -> None:
    server.speed = 2 * SIZE
    process = start(FETCH)
    while server.sent < 0.6 * SIZE:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    server.speed = 0
    assert not trusted(tmp_path / "cache")
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
    assert server.count("HEAD") == 3
    assert server.count("GET", "/resolve/") == 17
    assert server.sent <= 1.1 * SIZE


def test_errors_without_a_text_are_tried_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    failures = [TimeoutError(), TimeoutError("\n")]
    file = download.RemoteFile(REPO, FILE, "main")
    assert download._with_retries(file, lambda: failures and _raise(failures.pop()), tries=3) == []
    with pytest.raises(DownloadError, match=r"cannot be reached \(TimeoutError: \)"):
        download._with_retries(file, lambda: _raise(TimeoutError()), tries=1)


def _raise(error: Exception) -> None:
    raise error


def test_connections_closed_without_an_answer(server: Hub) -> None:
    server.drop = lambda request: len(server.log) == 1
    assert fetch().path.read_bytes() == WEIGHTS


def test_a_network_that_fails_at_the_last_step(server: Hub) -> None:
    server.drop = lambda request: request.method == "HEAD" and server.sent == SIZE
    with pytest.raises(DownloadError, match=f"Cannot keep {FILE} of {REPO}@main.*Run it again"):
        fetch()
    server.drop = lambda request: False
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent == SIZE


def test_a_disk_without_links_keeps_one_copy(server: Hub, tmp_path: Path) -> None:
    finish(start(FETCH, HF_HUB_DISABLE_SYMLINKS="1"))
    if fetch().path.is_symlink():
        pytest.skip("needs a newer huggingface_hub, or a disk without links")
    assert len(trusted(tmp_path / "cache")) == 1
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent == SIZE


def test_a_login_page_is_not_a_hub(server: Hub) -> None:
    evil = {"X-Repo-Commit": "0" * 40, "ETag": '"../../../evil"', "Content-Length": "9"}
    server.fail.extend([(200, {}), (200, evil)])
    for _ in range(2):
        with pytest.raises(DownloadError, match=r"does not answer like a Hub.*HF_ENDPOINT"):
            fetch()
    assert server.sent == 0


def test_eight_cold_processes_download_once(server: Hub) -> None:
    server.speed = 10 * SIZE
    processes = [start(FETCH) for _ in range(8)]
    assert len({finish(process) == f"{hash(WEIGHTS)}\n" or 1 for process in processes}) == 1
    assert server.sent == SIZE
    assert server.count("HEAD") == 2
    assert server.count("GET", "/cdn/") == 16


def test_processes_that_cannot_lock_do_not_harm_each_other(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/locks").touch()  # no place for a lock
    server.speed = 4 * SIZE
    processes = [start(FETCH) for _ in range(3)]
    for process in processes:
        finish(process)
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.sent <= 3 * SIZE


# ---- refusals, tokens, endpoints, proxies


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
    assert server.log[-1].headers["host"] == "hub.invalid"
    monkeypatch.delenv("HTTP_PROXY")
    with pytest.raises(DownloadError, match="cannot be reached"):
        fetch(update=True)


# ---- offline


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
    assert "use that file: create(..., weights=PATH) or load(PATH)." in text


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


# ---- disks


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
    assert "It cannot be removed" in text


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
    assert server.sent <= 1.1 * SIZE


# ---- files of one's own, and what is remembered


def test_local_files_are_hashed_once(server: Hub, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    assert stamps.check_file(path) == stamps.check_file(str(path), SHA256) == SHA256
    rot(path, tmp_path / "cache")
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


def test_verify(server: Hub, tmp_path: Path) -> None:
    found = fetch()
    assert hub.verify("vit") == found
    assert hub.verify(found.path).sha256 == SHA256
    path = tmp_path / "mine.safetensors"
    path.write_bytes(WEIGHTS)
    assert hub.verify(path) == (path, None, SHA256, "first use")
    rot(path, tmp_path / "cache")
    with pytest.raises(DownloadError, match=f"Wrong bytes in {path}"):
        hub.verify(path)
    with pytest.raises(DownloadError, match="Cannot verify nothing: it is neither a file nor a model"):
        hub.verify("nothing")


# ---- what is shown


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
