"""Set the number of threads of torch to the CPUs that this process may use, also in a container with a CPU limit."""

import math
import os
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch


def set_threads() -> int:
    """Limit the threads of torch to the CPUs that this process may use, and return their number.

    torch starts a thread for each core of the machine and does not know the CPU limit of a container. With more threads
    than the limit, the system stops the process many times a second, and inference becomes several times slower.
    Call this function once at the start of a program. The `vitlite` commands do so.

    If OMP_NUM_THREADS is set, the number does not change. For another number, use `torch.set_num_threads`.

    >>> import vitlite
    >>> vitlite.set_threads() >= 1
    True
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))
    return torch.get_num_threads()


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs that this process may use, by its affinity and its CPU quota, rounded down."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cpus, cpu_quota(root))))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return the CPU limit of this process in CPUs, or infinity. On Linux, it is that of the control group (cgroup).

    Args:
        root: The folder that contains proc and sys.
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
    """Return the CPU limit of one control group, or infinity."""
    with suppress(OSError, ValueError):  # version 2, unless the file is missing or says "max"
        microseconds, period = map(int, (folder / "cpu.max").read_text(encoding="utf-8").split())
        return microseconds / period
    with suppress(OSError):  # version 1; -1 means that there is no limit
        microseconds = int((folder / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
        if microseconds > 0:
            return microseconds / int((folder / "cpu.cfs_period_us").read_text(encoding="utf-8"))
    return math.inf
