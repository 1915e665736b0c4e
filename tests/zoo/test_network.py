"""How long a Hub may be silent, what is said meanwhile, and how it ends."""

import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fetching import BLACK_HOLE, FETCH, FILE, REPO, SHA256, SIZE, WEIGHTS, fetch, finish, in_namespace, start
from server import Answer, Hub, Request

from vitlite.errors import DownloadError
from vitlite.storage import state_folder
from vitlite.zoo import hub, network


class Said:
    """What a program says on stderr, each line with the second in which it came."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.began = process, time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append((time.monotonic() - self.began, line.rstrip()))

    def until(self, words: str, seconds: float = 15) -> float:
        """When that was said."""
        while time.monotonic() - self.began < seconds:
            for when, line in [*self.lines]:
                if words in line:
                    return when
            time.sleep(0.02)
        raise AssertionError(f"{words!r} was not said in {seconds} s, but {self.lines}")

    def end(self, seconds: float = 60) -> str:
        """Its last line, once it has ended."""
        self.process.wait(seconds)
        self.reader.join()
        assert self.process.stdout
        self.process.stdout.close()
        assert self.process.stderr
        self.process.stderr.close()
        return self.lines[-1][1]


READY = """
import sys
from huggingface_hub import get_hf_file_metadata, get_session
from huggingface_hub.utils import build_hf_headers
from vitlite.zoo import hub
get_session()
print("begins", file=sys.stderr, flush=True)  # imports take seconds
"""


def begin(*wrapper: str, code: str = READY + FETCH, **env: str) -> Said:
    """A program that fetches, once it has begun to."""
    said = Said(start(code, *wrapper, **env))
    said.began += said.until("begins", 60)
    return said


def silent(hub: Hub) -> None:
    hub.hang = deque([1000.0] * 100)


def head_drips(hub: Hub) -> None:
    hub.drip = 1


def trickles(hub: Hub) -> None:
    hub.speed = 1


def silent_when_it_comes_to_the_bytes(hub: Hub) -> None:
    hub.instead = lambda request: time.sleep(1000) if request.method == "GET" else None  # type: ignore[func-returns-value]


def body_never_comes(hub: Hub) -> None:
    def wait() -> Iterator[bytes]:
        yield b""
        time.sleep(1000)

    def answer(request: Request) -> Answer | None:
        return Answer(206, {"Content-Length": str(SIZE)}, wait()) if request.method == "GET" else None

    hub.instead = answer


FAULTS: list[Callable[[Hub], None]] = [
    silent,
    head_drips,
    trickles,
    silent_when_it_comes_to_the_bytes,
    body_never_comes,
]


def test_the_first_word_after_3_seconds_and_the_end_after_20(server: Hub, tmp_path: Path) -> None:
    """All at once, as each takes its time."""
    hole = in_namespace(BLACK_HOLE, "-n")
    hubs = [Hub() for _ in FAULTS]
    running = {}
    for spoil, faulty in zip(FAULTS, hubs, strict=True):
        faulty.__enter__().publish(REPO, model_safetensors=WEIGHTS)
        spoil(faulty)
        running[spoil.__name__] = begin(HF_ENDPOINT=faulty.url, VITLITE_CACHE=str(tmp_path / spoil.__name__))
    for name, address in (("black hole", "http://198.51.100.1"), ("no name server", "https://huggingface.co")):
        running[name] = begin(*hole, HF_ENDPOINT=address, VITLITE_CACHE=str(tmp_path / name))
    for name, said in running.items():
        last = said.end()
        said_first = next(when for when, line in said.lines if "Ctrl-C stops" in line)
        assert 2.5 < said_first < 8, (name, said.lines)
        ended = said.lines[-1][0] - said_first + network.FIRST_WORD
        assert ended < 24, (name, said.lines)
        assert ended > 18 or name == "no name server", (name, said.lines)  # the system gives up looking for a name
        assert last.startswith("vitlite.errors.DownloadError: Cannot fetch model.safetensors of timm/vit@"), name
        assert "vitlite.create('vit', weights='model.safetensors')" in last, name
        assert len(said.lines) < 40, name  # no chain of tracebacks
    for faulty in hubs:
        faulty.__exit__()


def test_what_came_slowly_is_kept(server: Hub, tmp_path: Path) -> None:
    """Also where it ends with the clock, or by Ctrl-C."""
    server.speed = 200_000
    said = begin()
    said.until("bytes are here. Ctrl-C stops, and the next call goes on from there.")
    said.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert said.end() == "KeyboardInterrupt"
    assert time.monotonic() - began < 5
    server.speed = 0
    sent = server.sent
    assert fetch().path.read_bytes() == WEIGHTS
    assert sent > 2 * 200_000
    assert server.log[-1].sent < SIZE - 2 * 200_000


@pytest.mark.parametrize("spoil", [silent, head_drips, silent_when_it_comes_to_the_bytes])
def test_ctrl_c_while_waiting(server: Hub, spoil: Callable[[Hub], None]) -> None:
    spoil(server)
    said = begin()
    said.until("Ctrl-C stops")
    began = time.monotonic()
    said.process.send_signal(signal.SIGINT)
    assert said.end() == "KeyboardInterrupt"
    assert time.monotonic() - began < 5


def test_ctrl_c_while_a_name_is_looked_up(server: Hub) -> None:
    hole = in_namespace(BLACK_HOLE, "-n")
    said = begin(*hole, HF_ENDPOINT="https://huggingface.co")
    said.until("waiting for https://huggingface.co, which is given up after 20 s without an answer. Ctrl-C stops")
    began = time.monotonic()
    said.process.send_signal(signal.SIGINT)
    assert said.end() == "KeyboardInterrupt"
    assert time.monotonic() - began < 5


def test_a_long_download_says_how_far_it_is(server: Hub) -> None:
    server.speed = SIZE / 6
    said = begin()
    said.process.wait(60)
    assert said.process.returncode == 0
    assert said.end().startswith(f"{FILE} of {REPO}@")
    assert " of 4,194,304 bytes are here. Ctrl-C stops, and the next call goes on from there." in said.end()
    server.publish("timm/other", model_safetensors=WEIGHTS)
    other = FETCH.replace(REPO, "timm/other").replace("'vit'", "None")
    assert finish(start(other, HF_HUB_DISABLE_PROGRESS_BARS="1")).count("\n") == 1


def test_who_waits_for_another_process_says_so(server: Hub) -> None:
    server.speed = SIZE / 8
    first = start(FETCH, HF_HUB_DISABLE_PROGRESS_BARS="1")
    while not server.sent:
        assert first.poll() is None
        time.sleep(0.05)
    second = begin(HF_HUB_DISABLE_PROGRESS_BARS="1")
    second.until(f"waiting for another process, which holds {state_folder() / 'locks'}")
    finish(first)
    second.process.wait(60)
    assert second.process.returncode == 0
    second.end()
    assert server.sent == SIZE


def test_a_pause_that_the_server_asks_for_is_said(server: Hub) -> None:
    server.fail.extend([(429, {"Retry-After": "7"})])
    said = begin()
    assert said.until("429 ", 5) < 5
    assert "trying again in 7.0 s." in said.lines[-1][1]
    said.process.kill()
    said.end()


@pytest.mark.parametrize("value", ["abc", "2.5", "-1", "0", "inf", "nan", "1e3", "\u0663", "9" * 5000])
def test_timeouts_are_numbers(server: Hub, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    for variable in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            with pytest.raises(DownloadError, match=f"{variable} is .*a whole number of seconds") as error:
                fetch()
        assert len(str(error.value)) < 500


def test_an_odd_timeout_in_a_fresh_process(server: Hub) -> None:
    """Where the client cannot even be imported."""
    for value in ("abc", "2.5"):
        text = finish(start(FETCH, HF_HUB_ETAG_TIMEOUT=value), code=1)
        last = text.splitlines()[-1]
        assert last.startswith("vitlite.errors.DownloadError: ")
        assert f"HF_HUB_ETAG_TIMEOUT is '{value}'" in last


def test_longer_timeouts_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = network.patience("HF_HUB_ETAG_TIMEOUT", 20)
    assert (usual.timeout, usual.silence) == (10, 20)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "45")
    longer = network.patience("HF_HUB_ETAG_TIMEOUT", 20)
    assert (longer.timeout, longer.silence) == (45, 45)


@pytest.mark.parametrize("value", ["y", "2", "enabled", " 1"])
@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_is_yes_or_no(server: Hub, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(DownloadError, match=f"{variable} is '{value}', which is neither yes nor no"):
        fetch()
    assert not server.log


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("on", True), ("No", False), ("0", False), ("", False)])
def test_offline_in_the_client_s_words(server: Hub, monkeypatch: pytest.MonkeyPatch, value: str, offline: bool) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert network.is_offline() == offline


def test_certificates_that_are_not_there(server: Hub) -> None:
    began = time.monotonic()
    text = finish(start(FETCH, SSL_CERT_FILE="/none.pem", HF_ENDPOINT="https://localhost:1"), code=1)
    assert "vitlite.errors.DownloadError: Cannot fetch model.safetensors" in text
    assert time.monotonic() - began < 15


def test_proxies_that_are_none(server: Hub) -> None:
    for proxy in ("nonsense://x", "socks5://localhost:1", "http://[bad"):
        text = finish(start(FETCH, HTTP_PROXY=proxy, ALL_PROXY=proxy, HF_ENDPOINT="http://hub.invalid"), code=1)
        assert "vitlite.errors.DownloadError: Cannot fetch model.safetensors" in text.splitlines()[-1], text


def test_threads_share_the_session(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One of them sets a proxy, so that the session of all begins anew."""
    for i in range(4):
        server.publish(f"timm/vit{i}", model_safetensors=WEIGHTS)
    server.speed = SIZE
    failures = []

    def fetch_one(i: int) -> None:
        try:
            assert hub.fetch(f"timm/vit{i}", FILE).sha256 == SHA256
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=fetch_one, args=(i,)) for i in range(4)]
    for i, thread in enumerate(threads):
        thread.start()
        time.sleep(0.2)
        monkeypatch.setenv("FTP_PROXY", f"http://localhost:{i + 1}")
    for thread in threads:
        thread.join()
    assert not failures
    assert server.sent < 5 * SIZE


def test_nothing_is_left_behind(server: Hub) -> None:
    """Neither a thread nor an open connection."""
    before = threading.active_count()
    fetch()
    deadline = time.monotonic() + 5
    kept = before + 3  # connections of the server's: two, and one more of older clients
    while threading.active_count() > kept and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= kept
