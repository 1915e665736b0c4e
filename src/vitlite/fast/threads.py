"""Threads in each of which torch computes alone."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch


def lone_threads(count: int) -> ThreadPoolExecutor:
    """So many threads, begun already, in each of which torch computes with that thread only; elsewhere as before."""
    threads = torch.get_num_threads()
    begun = Barrier(count + 1)

    def begin() -> None:
        torch.get_num_threads()  # a thread's first look takes the default over, which must not happen later
        torch.set_num_threads(1)
        begun.wait()

    pool = ThreadPoolExecutor(count, "vitlite", begin)
    for _ in range(count):
        pool.submit(int)
    begun.wait()
    torch.set_num_threads(threads)  # this thread's, and the default of threads to come: both as they were
    return pool
