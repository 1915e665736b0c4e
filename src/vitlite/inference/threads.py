"""Limit torch to the number of CPUs that this process may use, even in a container with a CPU limit."""

import math
import os
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch


def set_threads() -> int:
    """Limit torch to as many threads as this process may use CPUs, and return the number of threads.

    torch starts a thread for each core of the machine and does not know the CPU limit of a container. With more threads
    than the limit, the system stops the process many times a second, and inference becomes several times slower.
    Call this function once at the start of a program. The `vitlite` commands do so.

    If OMP_NUM_THREADS is set, the number of threads does not change. To set it directly, use `torch.set_num_threads`.

    >>> import vitlite
    >>> vitlite.set_threads() >= 1
    True
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))
    return torch.get_num_threads()


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs that this process may use, given its affinity and its CPU limit, rounded down."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cpus, cpu_quota(root))))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return the CPU limit of this process as a number of CPUs, or infinity if there is none or it is unknown.

    On Linux, this is the smallest limit of the control group (cgroup) of the process and of its parents.

    Args:
        root: The root of the file system, which contains the folders proc and sys.
    """
    quota = math.inf
    with suppress(OSError):  # no such file on other systems
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)  # such as 0::/a/b (version 2) or 4:cpu,cpuacct:/a/b (version 1)
            if controllers and "cpu" not in controllers.split(","):
                continue
            # The limits of all parents apply. In a container, the path may be that of the host, which does not exist.
            folders = [root / "sys/fs/cgroup" / controllers]
            for name in PurePosixPath(path).parts[1:]:
                folders.append(folders[-1] / name)
            quota = min(quota, *map(_quota_of, folders))
    return quota


def _quota_of(folder: Path) -> float:
    """Return the CPU limit of a control group from its folder, or infinity if there is none."""
    with suppress(OSError, ValueError):  # version 2, unless the file is missing or says "max"
        microseconds, period = map(int, (folder / "cpu.max").read_text(encoding="utf-8").split())
        return microseconds / period
    with suppress(OSError):  # version 1; -1 means that there is no limit
        microseconds = int((folder / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
        if microseconds > 0:
            return microseconds / int((folder / "cpu.cfs_period_us").read_text(encoding="utf-8"))
    return math.inf
