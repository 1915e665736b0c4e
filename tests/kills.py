"""A real process killed before each of its steps on the disk, one after the other; and one whose files may not grow."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}  # as Python's audit calls them
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def program(code: str, *words: object) -> str:
    """What a program prints that may import this module and others of the tests; it must end well."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    line = [sys.executable, "-c", code, *map(str, words)]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kills(work: Callable[[], Any], every: int = 1) -> Iterator[int]:
    """After each kill of a process that does this work, how many steps it had taken; the last ends by itself."""
    step, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        code = _ended(lambda: sys.addaudithook(_killer(step)), work)  # noqa: B023  # called at once
        yield step
        step += every
    assert code == 0


def small_files(work: Callable[[], Any], sizes: list[int]) -> Iterator[int]:
    """The same for processes whose files may have these sizes at most: each must say what is wrong, and fail."""
    for size in sizes:
        assert _ended(lambda: _limit(size), work) == 1  # noqa: B023
        yield size


def _killer(steps: int) -> Callable[[str, tuple[Any, ...]], None]:
    left = [steps]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and arguments[2] & WRITES and arguments[0] != os.devnull):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    return watch


def _limit(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _ended(prepare: Callable[[], Any], work: Callable[[], Any]) -> int:
    """The exit code of a process that does the work after this preparation: 1 where an error was raised."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            prepare()
            work()
            code = 0
        except BaseException as error:
            sys.stdout.write(f"{type(error).__name__}: {error}\n")
            sys.stdout.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
