"""Which kernels pay: decided once for a machine, whatever a later timing would say, and never in anybody's way."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlite.errors import ConfigError
from vitlite.fast import cpu, verdicts
from vitlite.fast.verdicts import Contest, Verdict, kept_in, known, verdict

# A command line on a machine on which timings say what the first word says: times of ours and of torch's.
COMMAND = """
import sys
from vitlite.cli.main import main
from vitlite.fast import verdicts
times = [float(word) for word in sys.argv[1].split(",")]
verdicts._times = lambda clock, *ways: times
sys.exit(main(sys.argv[2:]))
"""
QUICK, SLOW = "1,3", "3,1"

# Asks once a file is there, and takes half a second to measure.
ASK = """
import os, sys, time
from vitlite.fast import verdicts
ratio = [float(word) for word in sys.argv[1].split(",")]
def times(clock, *ways):
    time.sleep(0.25)
    return ratio
verdicts._times = times
contest = verdicts.Contest(int, int)
print("ready", flush=True)
sys.stdin.readline()
print(verdicts.verdict("both", lambda: contest).pays)
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which nothing was decided."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("VITLITE_CACHE", str(folder))
    monkeypatch.delenv("VITLITE_KERNELS", raising=False)
    forget(monkeypatch)
    return folder


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(verdicts, "_known", {})


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verdict]:
    """Asks in what might be a new process, where timings say this."""

    def asked(*times: float, question: str = "kernel") -> Verdict:
        forget(monkeypatch)
        monkeypatch.setattr(verdicts, "_times", lambda clock, *ways: list(times))
        return verdict(question, lambda: Contest(int, int))

    return asked


def vectors(out: Path, times: str, *words: str, **environment: str) -> bytes:
    """What `vitlite embed` of one picture writes, in a process of its own."""
    picture = "examples/photos/chelsea.png"
    line = ["embed", picture, "--model", "vit_nano_4.cifar10", "--out", str(out), *words]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, times, *line],
        cwd=root,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out.read_bytes()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize(
    ("words", "otherwise"),
    [((), {"VITLITE_KERNELS": "torch"}), (("--fast",), {"VITLITE_CACHE": "/dev/null/nowhere"})],
    ids=["as created", "fast"],
)
def test_two_processes_give_the_same_bits(words: tuple[str, ...], otherwise: dict[str, str], tmp_path: Path) -> None:
    """Also where the second would have chosen otherwise, since it is busy when it measures."""
    out = tmp_path / "out.safetensors"
    first = vectors(out, QUICK, *words)
    assert vectors(out, SLOW, *words) == first
    assert vectors(out, SLOW, *words, **otherwise) != first  # so that the choice shows in the bits


def test_processes_that_decide_at_once_agree() -> None:
    line = [sys.executable, "-c", ASK]
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    processes = [subprocess.Popen([*line, times], **pipes) for times in (QUICK, SLOW)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert answers in ({"True\n"}, {"False\n"})


def test_threads_that_decide_at_once_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", "/dev/null/nowhere")  # so that no file makes them agree
    times = iter([[1.0, 3.0], [3.0, 1.0]] * 50)
    turn = threading.Lock()

    def differing(clock: Any, *ways: Any) -> list[float]:
        with turn:
            return next(times)

    monkeypatch.setattr(verdicts, "_best_times", differing)
    found: list[Verdict] = []
    asking = [
        threading.Thread(target=lambda: found.append(verdict("both", lambda: Contest(int, int)))) for _ in range(6)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == 1


def test_what_is_kept_is_for_this_machine(ask: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(1.0, 2.0).pays
    assert ask(2.0, 1.0).pays
    assert not ask(2.0, 1.0, question="another").pays
    assert set(known()) == {"another"}
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "name_of", lambda core: "Another CPU")
        assert not ask(2.0, 1.0).pays
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "flags_of", lambda core: {"avx2"})
        assert not ask(2.0, 1.0).pays
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        assert not ask(2.0, 1.0).pays
    with monkeypatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        assert not ask(2.0, 1.0).pays
    assert ask(2.0, 1.0).pays
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert not ask(2.0, 1.0).pays
    finally:
        torch.set_num_threads(before)


def test_a_tie_goes_to_torch(ask: Callable[..., Verdict]) -> None:
    assert not ask(0.96, 1.0).pays
    assert ask(0.94, 1.0, question="another").pays
    assert verdict("missing", lambda: None) == Verdict(False, "missing or wrong here")


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "empty": lambda content: "",
    "a list": lambda content: [],
    "another type": lambda content: content | {"verdicts": {"kernel": {"pays": "yes", "why": ""}}},
    "cut": lambda content: json.dumps(content)[:-20],
    "of another machine": lambda content: content | {"machine": {"cpu": "Another"}},
    "no bytes of text": lambda content: b"\xff\xfe\x00",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_none(damage: str, ask: Callable[..., Verdict]) -> None:
    assert ask(1.0, 2.0).pays
    path = kept_in()
    assert path is not None
    damaged = DAMAGE[damage](json.loads(path.read_text()))
    if isinstance(damaged, bytes):
        path.write_bytes(damaged)
    else:
        path.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
    assert not ask(2.0, 1.0).pays
    assert not ask(1.0, 2.0).pays  # mended


def test_a_cache_that_cannot_be_written(ask: Callable[..., Verdict], cache: Path) -> None:
    cache.write_text("a file, and no folder")
    assert ask(1.0, 2.0).pays
    assert not ask(2.0, 1.0).pays
    assert cache.read_text() == "a file, and no folder"


def test_nobody_at_home(ask: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", "~nobody-of-that-name/cache")
    assert kept_in() is None
    assert ask(1.0, 2.0).pays


def test_who_decides_for_too_long_is_not_waited_for(
    ask: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    from filelock import FileLock

    monkeypatch.setattr(verdicts, "PATIENCE", 0.1)
    path = kept_in()
    assert path is not None
    path.parent.mkdir(parents=True)
    with FileLock(path.with_suffix(".lock")):
        assert ask(1.0, 2.0).pays


def test_what_can_be_wished_for(ask: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_KERNELS", "torch")
    assert ask(1.0, 2.0) == Verdict(False, "VITLITE_KERNELS=torch")
    monkeypatch.setenv("VITLITE_KERNELS", "measure")
    assert ask(1.0, 2.0).pays
    assert not ask(2.0, 1.0).pays
    monkeypatch.setenv("VITLITE_KERNELS", "")
    assert not ask(1.0, 2.0).pays
    monkeypatch.setenv("VITLITE_KERNELS", "mkl\x1b")
    with pytest.raises(ConfigError, match=r"VITLITE_KERNELS is 'mkl\\x1b'\. Set it to torch, .*measure.*do without it"):
        ask(1.0, 2.0)


def test_a_busy_machine_is_timed_by_the_time_of_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    by_clock = {time.thread_time: [0.010, 0.020]}

    def times(clock: Callable[[], float], *ways: Any) -> list[float]:
        return by_clock[clock]

    monkeypatch.setattr(verdicts, "_times", times)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        by_clock[time.perf_counter] = [0.004, 0.005]
        assert verdicts._ratio(int, int) == pytest.approx(0.8)
        for busy in ([0.032, 0.032], [0.004, 0.021]):  # as long as the scheduler lets others run
            by_clock[time.perf_counter] = busy
            assert verdicts._ratio(int, int) == pytest.approx(0.5)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_what_is_timed() -> None:
    waits = [0.004, 0.001]

    def way(seconds: float) -> Callable[[], None]:
        return lambda: time.sleep(seconds)

    long, short = verdicts._best_times(time.perf_counter, *map(way, waits))
    assert long > short > 0.001


def test_a_question_may_be_asked_in_any_mode(ask: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def contest() -> Contest:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return Contest(int, int)

    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        verdict("kernel", contest)
    assert seen == [(False, False, False)]


LOOK = """
import time, torch
from vitlite.fast import kernels
begun = time.thread_time()
kernels.unpacked_pays()
print(time.thread_time() - begun)
"""


@pytest.mark.usefixtures("uncovered")
def test_a_look_takes_at_most_5_ms() -> None:
    """Processor time, the better of two after the first, which decides."""

    def seconds() -> float:
        return float(subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True).stdout)

    seconds()
    assert min(seconds() for _ in range(2)) < 0.005


def test_numbers_of_an_arm_cpu() -> None:
    core = {"CPU implementer": "0x41", "CPU part": "0xd40", "Features": "fp asimd bf16"}
    assert cpu.name_of(core) == "0x41 0xd40"
    assert cpu.flags_of(core) == {"fp", "asimd", "bf16"}
    assert cpu.name_of({})
    assert cpu.instructions()
    assert cpu.is_quick_with(torch.float32)
