"""Which kernels pay on this machine: timed once, kept in the cache, and the same in every process from then on.

Kernels that compute the same differ in the last bits, so a timing in each process would give two processes two answers.
A question, such as "packed float32", is therefore timed by the first process that asks it, and its verdict is kept in a
file for this CPU, torch and number of threads. Processes that ask at once wait for the first. Where the cache cannot be
written or read, each process decides for itself. First come the verdicts, last the timing.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitlite import schema
from vitlite.errors import ConfigError, VitliteError, shown
from vitlite.fast import cpu
from vitlite.fast.threads import lone_threads
from vitlite.storage import lock, state_folder, write_json

MARGIN = 0.95  # of the time of torch's own: a gain below that is noise, and torch's own is taken
ROUNDS = 4  # of a heat, at least
STEADY = 0.97  # of the best time before: what changes it by less is steady
PATIENCE = 20.0  # seconds to wait for a process that decides
MOST_BYTES = 2**20  # of a file of verdicts
WISHES = ("", "torch", "measure")  # of VITLITE_KERNELS
VERDICTS = schema.table(
    {
        "machine": schema.by_name(schema.anything, most=100),
        "verdicts": schema.by_name(
            schema.table({"pays": schema.flag, "why": schema.text(200)}, required=("pays", "why")), most=1000
        ),
    },
    required=("machine", "verdicts"),
)


class Verdict(NamedTuple):
    """Whether a kernel is used, and why."""

    pays: bool
    why: str


class Contest(NamedTuple):
    """The same computed in two ways."""

    candidate: Callable[[], Any]
    usual: Callable[[], Any]  # torch's own


_known: dict[tuple[str, int], Verdict] = {}  # by question and threads: in one process a verdict never changes


def verdict(question: str, contest: Callable[[], Contest | None]) -> Verdict:
    """Whether a kernel is used in this process, with as many threads as torch has now.

    Args:
        question: Which kernel for what, such as "packed float32".
        contest: Gives what is to be timed; None where the kernel is missing or wrong. Called where nobody knows.

    Raises:
        ConfigError: VITLITE_KERNELS says something unknown.
    """
    key = question, torch.get_num_threads()
    found = _known.get(key)
    if found is None:
        found = _known.setdefault(key, _decide(question, contest))  # threads may ask at once, and take the first's
    return found


def only_torch() -> bool:
    """Whether VITLITE_KERNELS says that nothing but torch's public operators is to be used."""
    return _wish() == "torch"


def known() -> dict[str, Verdict]:
    """The questions that this process has asked with as many threads as torch has now, and their verdicts."""
    threads = torch.get_num_threads()
    return {question: found for (question, asked_with), found in _known.items() if asked_with == threads}


def kept_in() -> Path | None:
    """The file of this machine's verdicts, which may not be there; None where no folder is known."""
    try:
        folder = state_folder()
    except VitliteError:  # nobody is at home
        return None
    digest = hashlib.sha256(json.dumps(_machine(), sort_keys=True).encode()).hexdigest()
    return folder / "kernels" / f"{digest[:32]}.json"


def _decide(question: str, contest: Callable[[], Contest | None]) -> Verdict:
    """From VITLITE_KERNELS, from the file, or by measuring, which goes into the file."""
    wish = _wish()
    if wish == "torch":
        return Verdict(False, "VITLITE_KERNELS=torch")
    path = kept_in()
    if path is None:
        return _judge(contest)
    anew = wish == "measure"
    if not anew and question in (kept := _read(path)):
        return kept[question]
    with _one_at_a_time(path):
        kept = _read(path)  # again: another process may have been quicker
        if anew or question not in kept:
            kept[question] = _judge(contest)
            _write(path, kept)
        return kept[question]


def _wish() -> str:
    wish = os.environ.get("VITLITE_KERNELS") or ""
    if wish not in WISHES:
        remedy = "Set it to torch, for torch's public operators only, or to measure, to decide anew; or do without it."
        raise ConfigError(f"VITLITE_KERNELS is {shown(repr(wish))}.", python=remedy)
    return wish


def _judge(contest: Callable[[], Contest | None]) -> Verdict:
    """Measures, whatever mode of torch the question was asked in."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        ways = contest()
        if ways is None:
            return Verdict(False, "missing or wrong here")
        ratio = _ratio(*ways)
    return Verdict(ratio < MARGIN, f"{ratio:.2f} of the time of torch's own, measured {time.strftime('%Y-%m-%d')}")


def _machine() -> dict[str, Any]:
    """All that decides which kernel is quicker, and whether it is right."""
    core = cpu.first_core()
    return {
        "cpu": cpu.name_of(core),
        "instructions": " ".join(sorted(cpu.flags_of(core) or cpu.instructions())),
        "limits": cpu.limits(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "threads": torch.get_num_threads(),
    }


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Waits for another process that decides; where that cannot be arranged, goes ahead all the same."""
    with ExitStack() as stack:
        with suppress(OSError):  # a cache that cannot be written, or who decides takes too long
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock(path.with_suffix(".lock"), timeout=PATIENCE))
        yield


def _read(path: Path) -> dict[str, Verdict]:
    """The verdicts that are kept for this machine; none where there are none, or the file is damaged."""
    if not path.is_file():
        return {}
    try:
        content = schema.read_json(path, VERDICTS, most_bytes=MOST_BYTES)
    except VitliteError:
        return {}
    if content["machine"] != _machine():
        return {}
    return {question: Verdict(each["pays"], each["why"]) for question, each in content["verdicts"].items()}


def _write(path: Path, kept: Mapping[str, Verdict]) -> None:
    """Keeps the verdicts, where that is possible: where it is not, this process has its own."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"machine": _machine(), "verdicts": {name: each._asdict() for name, each in kept.items()}})


# ---- timing


def _ratio(candidate: Callable[[], Any], usual: Callable[[], Any]) -> float:
    """The time of the candidate over that of the usual way.

    By the clock, in as many threads as torch has. Where that takes longer than one thread takes processor time, others
    have the cores, and threads wait for each other by chance: then it is by one thread's processor time, which hardly
    depends on what else is running.
    """
    with lone_threads(1) as pool:
        alone = pool.submit(_best_times, time.thread_time, candidate, usual).result()
    together = _best_times(time.perf_counter, candidate, usual) if torch.get_num_threads() > 1 else alone
    is_busy = any(several >= one for several, one in zip(together, alone, strict=True))
    seconds, usual_seconds = alone if is_busy else together
    return seconds / usual_seconds


def _best_times(clock: Callable[[], float], *ways: Callable[[], Any]) -> list[float]:
    """The best time of each, in heats, until one more changes none by much, or half a second has passed."""
    end = time.perf_counter() + 0.5
    best = _times(clock, *ways)
    steady = False
    while not steady and time.perf_counter() < end:
        before, times = best, _times(clock, *ways)
        best = [min(pair) for pair in zip(before, times, strict=True)]
        steady = all(new > STEADY * old for new, old in zip(best, before, strict=True))
    return best


def _times(clock: Callable[[], float], *ways: Callable[[], Any]) -> list[float]:
    """The best time of each, in turns, for a fortieth of a second and some rounds at least."""
    best = [math.inf] * len(ways)
    end = time.perf_counter() + 0.025
    rounds = 0
    while rounds < ROUNDS or time.perf_counter() < end:
        rounds += 1
        for i, run in enumerate(ways):
            start = clock()
            run()
            best[i] = min(best[i], clock() - start)
    return best
