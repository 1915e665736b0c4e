"""Threads in containers with a CPU limit, in forked processes, and in the first concurrent calls."""

import math
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from socket import socket

import pytest
import torch

import vitlite
from vitlite.inference.threads import cpu_quota, usable_cpus

TESTS = Path(__file__).parents[1]
STARTS = int(os.environ.get("VITLITE_STARTS", "1"))  # of processes, and
FORKS = int(os.environ.get("VITLITE_FORKS", "1"))  # of each kind
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}


# ---- CPU limits


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n", "a/cpu.max": "400000 100000\n"}, 1),
        ("0::/host/path\n", {"cpu.max": "200000 100000\n"}, 2),
        ("1:cpu:/a\n0::/\n", {"cpu/a/cpu.cfs_quota_us": "50000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 0.5),
        ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        (
            "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        ("3:cpuset:/a\n", {"cpuset/a/cpu.max": "50000 100000\n"}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_quota_is_that_of_the_control_group(groups: str, files: dict[str, str], quota: float, tmp_path: Path) -> None:
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    assert cpu_quota(tmp_path) == quota
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert usable_cpus(tmp_path) == max(1, min(affinity, int(min(quota, 10**6))))


def test_no_quota_without_control_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf


@pytest.fixture
def threads() -> Iterator[int]:
    """Use more threads than there are CPUs."""
    before = torch.get_num_threads()
    torch.set_num_threads(usable_cpus() + 1)
    yield usable_cpus() + 1
    torch.set_num_threads(before)


def test_threads_are_limited_to_the_cpus(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    assert vitlite.set_threads() == torch.get_num_threads() == threads  # as the user said
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert vitlite.set_threads() == torch.get_num_threads() == threads - 1
    torch.set_num_threads(1)
    assert vitlite.set_threads() == 1  # never more than before


def test_optimize_warns_about_too_many_threads(threads: int, caplog: pytest.LogCaptureFixture) -> None:
    vitlite.optimize(vitlite.create("vit_nano_4.cifar10"))
    assert caplog.messages == [
        f"torch uses {threads} threads, but the CPU limit of this process is {threads - 1}. Call vitlite.set_threads() "
        "first."
    ]
    caplog.clear()
    torch.set_num_threads(threads - 1)
    vitlite.optimize(vitlite.create("vit_nano_4.cifar10"))
    assert caplog.messages == []


# ---- forked processes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_forked_process_computes() -> None:
    line = [sys.executable, "-W", "ignore", TESTS / "forked.py", str(FORKS)]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=60 + 20 * FORKS)
    assert done.stdout == "done 2\n", done.stderr
    assert done.stderr.count("was forked. torch uses one thread here instead of 2.\n") == 2 * FORKS


@pytest.mark.skipif(find_spec("gunicorn") is None, reason="gunicorn is not installed")
def test_preloaded_gunicorn_worker_computes(tmp_path: Path) -> None:
    """The worker answers one request; then gunicorn forks another."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"--preload --workers 1 --max-requests 1 --timeout 30 --bind 127.0.0.1:{port} forked:app".split()
    with gunicorn(words, tmp_path / "log"):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for _ in range(FORKS):
            assert opener.open(f"http://127.0.0.1:{port}/", timeout=60).read() == b"cat 1"
    log = (tmp_path / "log").read_text("utf-8")
    assert "TIMEOUT" not in log, log


@contextmanager
def gunicorn(words: list[str], log: Path) -> Iterator[None]:
    line = [sys.executable, "-m", "gunicorn", *words]
    with log.open("w") as output, subprocess.Popen(line, env=ENVIRONMENT, stdout=output, stderr=output) as server:
        while "Booting worker" not in log.read_text() and server.poll() is None:
            time.sleep(0.1)
        try:
            yield
        finally:
            server.terminate()


# ---- the first concurrent calls


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("kind", ["eager", "fast", "create"])
def test_first_calls_may_be_concurrent(kind: str) -> None:
    """Eight threads of a new process import, check kernels and fill caches at the same time."""
    line = [sys.executable, "-W", "ignore", TESTS / "first_calls.py", kind, str(STARTS)]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=60 + 10 * STARTS)
    assert (done.stdout, done.stderr) == ("8 2\n" * STARTS, ""), done.stderr
