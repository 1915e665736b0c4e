"""Servers that send something else, and processes that end in the middle: the old or the new, never neither."""

import gzip
import hashlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

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
    in_namespace,
    start,
)
from server import Answer, Hub, Request

from vitlite.errors import DownloadError
from vitlite.zoo import hub
from vitlite.zoo.pins import read_pin

OTHER_SHA256 = hashlib.sha256(OTHER).hexdigest()
UPDATE = FETCH.replace("pin='vit'", "pin='vit', update=True")


def instead_of_bytes(answer: Callable[[int, int], Answer]) -> Callable[[Request], Answer | None]:
    """Answers requests for a part of the large file, given its first and last byte."""

    def instead(request: Request) -> Answer | None:
        if request.method != "GET" or "/cdn/" not in request.path:
            return None
        first, last = request.headers["range"].removeprefix("bytes=").split("-")
        return answer(int(first), int(last))

    return instead


def part(first: int, last: int, total: int = SIZE) -> dict[str, str]:
    return {"Content-Range": f"bytes {first}-{last}/{total}"}


def endless(first: int, last: int) -> Answer:
    return Answer(206, part(first, last), itertools.repeat(b"more" * (1 << 16)))


def endless_whole(first: int, last: int) -> Answer:
    return Answer(200, {}, itertools.repeat(b"more" * (1 << 16)))


def web_page(first: int, last: int) -> Answer:
    return Answer(200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>Please log in</html>")


def web_page_as_a_part(first: int, last: int) -> Answer:
    return Answer(206, {"Content-Type": "text/html"}, b"<html>Please log in</html>")


def another_part(first: int, last: int) -> Answer:
    return Answer(206, part(first + 1, last), WEIGHTS[first + 1 :])


def part_of_another_file(first: int, last: int) -> Answer:
    return Answer(206, part(first, last, SIZE + 5), WEIGHTS[first:])


def nonsense_as_a_part(first: int, last: int) -> Answer:
    return Answer(206, {"Content-Range": "x" * 5000}, WEIGHTS[first:])


def part_of_something_compressed(first: int, last: int) -> Answer:
    return Answer(206, {**part(first, last), "Content-Encoding": "gzip"}, gzip.compress(WEIGHTS)[first:])


def not_compressed_at_all(first: int, last: int) -> Answer:
    return Answer(200, {"Content-Encoding": "gzip"}, WEIGHTS)


def endless_refusal(first: int, last: int) -> Answer:
    return Answer(403, {}, itertools.repeat(b"no" * (1 << 16)))


def beyond_the_end(first: int, last: int) -> Answer:
    return Answer(416, {}, b"")


def circle(first: int, last: int) -> Answer:
    return Answer(302, {"Location": "/cdn/" + SHA256}, b"")


def away_with_nonsense(first: int, last: int) -> Answer:
    return Answer(302, {"Location": "http://[nonsense:99999999/x"}, b"")


def to_a_file(first: int, last: int) -> Answer:
    return Answer(302, {"Location": "file:///etc/passwd"}, b"")


WRONG_ANSWERS = {
    endless: f"Wrong bytes in .*: expected hash {SHA256}",
    endless_whole: f"Wrong bytes in .*: expected hash {SHA256}",
    web_page: "it sends a web page instead",
    web_page_as_a_part: "it sends a web page instead",
    another_part: "asked for bytes 0-4194303/4194304, it sends bytes 1-4194303/4194304",
    part_of_another_file: "asked for bytes 0-4194303/4194304, it sends bytes 0-4194303/4194309",
    nonsense_as_a_part: r"asked for bytes 0-4194303/4194304, it sends x{200}\.\.\.",
    part_of_something_compressed: "asked for bytes 0-4194303/4194304, it sends",
    not_compressed_at_all: "does not send it",
    endless_refusal: r"HTTP 403 .*Check the names",
    beyond_the_end: "HTTP 416",
    circle: "TooManyRedirects",
    away_with_nonsense: "cannot be reached|Invalid IPv6 URL",
    to_a_file: "cannot be reached|UnsupportedProtocol|InvalidSchema",
}


@pytest.mark.parametrize("answer", WRONG_ANSWERS, ids=lambda answer: answer.__name__)
def test_wrong_answers_are_said_and_leave_nothing(
    server: Hub, tmp_path: Path, answer: Callable[[int, int], Answer]
) -> None:
    server.instead = instead_of_bytes(answer)
    tracemalloc.start()
    try:
        with pytest.raises(DownloadError, match=WRONG_ANSWERS[answer]) as error:
            fetch()
        assert tracemalloc.get_traced_memory()[1] < 4 * SIZE
    finally:
        tracemalloc.stop()
    assert len(str(error.value)) < 1200
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__
    assert not finished_files(tmp_path / "cache")
    server.instead = lambda request: None
    assert fetch().path.read_bytes() == WEIGHTS


@pytest.mark.parametrize("status", [200, 206])
@pytest.mark.parametrize("more", [[b"more"], itertools.repeat(b"more" * (1 << 16))], ids=["longer", "endless"])
def test_what_comes_after_the_file_is_not_looked_at(server: Hub, status: int, more: Iterable[bytes]) -> None:
    body = itertools.chain([WEIGHTS], more)
    server.instead = instead_of_bytes(lambda first, last: Answer(status, {}, body))
    assert fetch().path.read_bytes() == WEIGHTS


def test_short_answers_are_continued(server: Hub) -> None:
    """A server may send less than what was asked for."""
    step = SIZE // 4

    def quarter(first: int, last: int) -> Answer:
        return Answer(206, part(first, first + step - 1), WEIGHTS[first : first + step])

    server.instead = instead_of_bytes(quarter)
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.count("GET", "/cdn/") == 4


def test_a_server_that_begins_anew_each_time_and_is_cut_is_given_up(server: Hub) -> None:
    """Each second answer came further than the one before, for ever; none further than the second."""
    server.ranges = False
    server.cut.extend([SIZE // 8, SIZE // 4] * 20)
    with pytest.raises(DownloadError, match="does not send it"):
        fetch()
    assert server.count("GET", "/cdn/") == 7


def test_crumbs_are_given_up(server: Hub) -> None:
    def crumb(first: int, last: int) -> Answer:
        return Answer(206, part(first, first), WEIGHTS[first : first + 1])

    server.instead = instead_of_bytes(crumb)
    with pytest.raises(DownloadError, match=r"does not send it \(1 bytes came instead of 4,194,300\)"):
        fetch()
    server.instead = lambda request: None
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.log[-1].sent == SIZE - 5


def test_compressed_where_it_was_not_asked_for(server: Hub) -> None:
    packed = gzip.compress(WEIGHTS)
    server.instead = instead_of_bytes(lambda first, last: Answer(200, {"Content-Encoding": "gzip"}, packed))
    assert fetch().path.read_bytes() == WEIGHTS

    def small(request: Request) -> Answer | None:
        if request.method != "GET" or not request.path.endswith("config.json"):
            return None
        return Answer(200, {"Content-Encoding": "gzip"}, gzip.compress(b"{}"))

    server.instead = small
    assert hub.fetch(REPO, "config.json").path.read_bytes() == b"{}"


def test_the_whole_file_where_a_part_was_asked_for(server: Hub) -> None:
    server.cut.append(SIZE // 2)
    server.instead = instead_of_bytes(lambda first, last: None if first == 0 else Answer(200, {}, WEIGHTS))  # type: ignore[arg-type,return-value]
    assert fetch().path.read_bytes() == WEIGHTS


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_circles_end(server: Hub, method: str) -> None:
    def circle(request: Request) -> Answer | None:
        return Answer(302, {"Location": request.path}, b"") if request.method == method else None

    server.instead = circle
    began = time.monotonic()
    with pytest.raises(DownloadError, match=r"TooManyRedirects|RecursionError|no answer in 20 s"):  # older clients
        fetch()
    assert time.monotonic() - began < 25


def test_a_token_does_not_follow_to_another_host(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to where the bytes are, nor to where a question is sent on to."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with Hub() as evil:
        evil.publish(REPO, model_safetensors=WEIGHTS, config_json=b"{}")
        server.cdn = evil.url
        assert fetch().path.read_bytes() == WEIGHTS
        assert evil.log

        def away(request: Request) -> Answer | None:
            return Answer(307, {"Location": f"{evil.url}{request.path}"}, b"") if "config" in request.path else None

        server.instead = away
        with pytest.raises(DownloadError, match="does not answer like a Hub"):
            hub.fetch(REPO, "config.json")
        assert [request.headers["authorization"] for request in server.log if "cdn" not in request.path] == [
            "Bearer hf_secret"
        ] * len(server.log)
        assert not any("hf_secret" in str(request.headers) for request in evil.log)


def test_a_branch_that_moves_in_the_middle(server: Hub) -> None:
    """The bytes are those of the commit that was asked for, and the branch is where it was then."""
    first = server.repos[REPO]["branches"]["main"]

    def move(request: Request) -> bool:
        if request.method == "GET" and len(server.repos[REPO]["commits"]) == 1:
            server.publish(REPO, model_safetensors=OTHER)
        return False

    server.drop = move
    found = hub.fetch(REPO, FILE)
    assert (found.commit, found.path.read_bytes()) == (first, WEIGHTS)
    assert hub.fetch(REPO, FILE).path.read_bytes() == OTHER


def test_a_mirror_whose_bytes_change(server: Hub, tmp_path: Path) -> None:
    """It states one hash and sends what it has by now."""
    old = fetch()
    server.publish(REPO, model_safetensors=OTHER)
    mixed = OTHER[: SIZE // 2] + WEIGHTS[SIZE // 2 :]
    server.instead = instead_of_bytes(lambda first, last: Answer(206, part(first, last), mixed[first:]))
    with pytest.raises(DownloadError, match=f"expected hash {OTHER_SHA256}, got .*The first is what the Hub states"):
        fetch(update=True)
    assert fetch() == old
    assert {os.path.realpath(path) for path in finished_files(tmp_path / "cache")} == {os.path.realpath(old.path)}


def test_right_bytes_are_not_given_up_for_wrong_ones(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage in the cache, and a Hub that sends damage too: what is there stays, for whoever can mend it."""
    found = fetch()
    flip(Path(os.path.realpath(found.path)))
    server.wrong = 1000
    with pytest.raises(DownloadError, match=f"Wrong bytes in .*: expected hash {SHA256}"):
        fetch()
    assert found.path.stat().st_size == SIZE
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match=r"Wrong bytes in .*HF_HUB_OFFLINE is set"):
        fetch()
    assert found.path.stat().st_size == SIZE
    monkeypatch.delenv("HF_HUB_OFFLINE")
    server.wrong = 0
    assert fetch().path.read_bytes() == WEIGHTS


# ---- killed


def killed(process: "subprocess.Popen[str]", seconds: float) -> None:
    """After so many seconds of work, which begin with the first request."""
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("seed", range(8))
def test_killed_while_it_is_updated(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    old = fetch()
    new = server.publish(REPO, model_safetensors=OTHER)
    server.log.clear()
    server.speed = SIZE / 0.3
    process = start(UPDATE)
    while not server.log:
        assert process.poll() is None
        time.sleep(0.005)
    killed(process, random.Random(seed).uniform(0, 0.6))
    server.speed = 0
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        found = fetch()
        assert found.path.read_bytes() == (OTHER if found.commit == new else WEIGHTS)
        assert found.commit in (old.commit, new)
        assert hub.verify("vit") == found
        assert hub.fetch(REPO, FILE).path.read_bytes() in (WEIGHTS, OTHER)
    assert fetch(update=True).path.read_bytes() == OTHER


@pytest.mark.parametrize("seed", range(4))
def test_killed_while_damage_is_repaired(server: Hub, tmp_path: Path, seed: int) -> None:
    found = fetch()
    flip(Path(os.path.realpath(found.path)))
    server.log.clear()
    server.speed = SIZE / 0.3
    process = start(FETCH)
    while not server.log:
        assert process.poll() is None
        time.sleep(0.005)
    killed(process, random.Random(seed).uniform(0, 0.6))
    server.speed = 0
    assert found.path.stat().st_size == SIZE  # with the damage, or without
    assert fetch().path.read_bytes() == WEIGHTS


@pytest.mark.parametrize("seed", range(3))
def test_killed_between_the_files_of_a_repository(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Offline, the branch is where all files are here."""
    from vitlite.checkpoints.locate import locate

    files = {"model_safetensors": WEIGHTS, "config_json": b"{}", "preprocessor_config_json": b"{}"}
    old = server.publish("a/b", **files)
    assert locate("a/b").commit == old
    new = server.publish("a/b", **{**files, "model_safetensors": OTHER, "config_json": b'{"new": 1}'})
    server.log.clear()
    server.speed = SIZE / 0.2
    process = start("from vitlite.checkpoints.locate import locate; locate('a/b')")
    while not server.log:
        assert process.poll() is None
        time.sleep(0.005)
    killed(process, random.Random(seed).uniform(0, 0.5))
    server.speed = 0
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        location = locate("a/b")
        is_new = location.commit == new
        assert location.path.read_bytes() == (OTHER if is_new else WEIGHTS)
        assert (location.path.parent / "config.json").read_bytes() == (b'{"new": 1}' if is_new else b"{}")
    assert locate("a/b").commit == new


def test_a_network_that_ends_between_the_files_of_a_repository(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitlite.checkpoints.locate import locate

    files = {"model_safetensors": WEIGHTS, "config_json": b"{}", "preprocessor_config_json": b"{}"}
    old = server.publish("a/b", **files)
    assert locate("a/b").commit == old
    server.publish("a/b", **{**files, "model_safetensors": OTHER, "config_json": b"[]"})
    server.drop = lambda request: request.path.endswith("r_config.json")
    with pytest.raises(DownloadError, match=r"preprocessor_config\.json"):
        locate("a/b")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    location = locate("a/b")
    assert (location.commit, location.path.read_bytes()) == (old, WEIGHTS)


# ---- disks


def test_a_disk_that_is_full_for_the_new_keeps_the_old(server: Hub, tmp_path: Path) -> None:
    """6 MB for a file of 4 and another of 4."""
    (tmp_path / "cache").mkdir()
    disk = in_namespace(f"mount -t tmpfs -o size=6m tmpfs {tmp_path}/cache")
    server.publish("timm/new", model_safetensors=OTHER)
    code = f"""
from vitlite.zoo import hub
from vitlite.errors import DownloadError
old = hub.fetch({REPO!r}, {FILE!r}, pin="vit")
try:
    hub.fetch("timm/new", {FILE!r}, pin="new")
except DownloadError as error:
    print(error)
import os
os.environ["HF_HUB_OFFLINE"] = "1"
assert hub.fetch({REPO!r}, {FILE!r}, pin="vit") == old == hub.verify("vit")
"""
    text = finish(start(code, *disk))
    assert "the disk is full (4,194,304 bytes to come" in text
    assert "after freeing some space" in text


@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize("limit", [0, 1, 200, 5000, SIZE // 2])
def test_a_quota_at_any_moment(server: Hub, tmp_path: Path, limit: int) -> None:
    """No file may grow beyond this: neither the weights, nor what is remembered of them."""
    old = fetch()
    server.publish(REPO, model_safetensors=OTHER)
    quota = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    text = finish(start(quota + UPDATE), code=1)
    assert text.splitlines()[-1].startswith("vitlite.errors.DownloadError: Cannot keep model.safetensors")
    assert fetch() == old
    assert read_pin("vit") is not None
    assert fetch(update=True).path.read_bytes() == OTHER


def test_nothing_can_be_remembered_but_all_is_right(server: Hub, tmp_path: Path) -> None:
    fetch()
    shutil.rmtree(tmp_path / "cache/stamps")
    (tmp_path / "cache/stamps").touch()
    found = fetch()
    assert found.path.read_bytes() == WEIGHTS
    flip(Path(os.path.realpath(found.path)))
    assert fetch().path.read_bytes() == WEIGHTS


def test_a_link_in_the_place_of_what_is_unfinished(server: Hub, tmp_path: Path) -> None:
    """What it leads to belongs to somebody else."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    blobs = tmp_path / "cache/hub/models--timm--vit/blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{SHA256}.vitlite.incomplete").symlink_to(precious)
    assert fetch().path.read_bytes() == WEIGHTS
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("where", ["blob", "snapshot", "incomplete"])
def test_a_folder_in_the_place_of_a_file(server: Hub, tmp_path: Path, where: str) -> None:
    """It is not removed, and said."""
    path = fetch().path
    blob = Path(os.path.realpath(path))
    path.unlink()
    blob.unlink()
    folder = {"blob": blob, "snapshot": path, "incomplete": blob.with_name(f"{blob.name}.vitlite.incomplete")}[where]
    folder.mkdir()
    (folder / "precious").touch()
    with pytest.raises(DownloadError, match=r"Cannot keep model\.safetensors"):
        fetch()
    assert (folder / "precious").exists()
    shutil.rmtree(folder)
    assert fetch().path.read_bytes() == WEIGHTS
