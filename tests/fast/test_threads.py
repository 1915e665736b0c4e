"""Threads that compute alone leave the number of threads elsewhere as it was."""

from concurrent.futures import ThreadPoolExecutor

import torch

from vitlite.fast.threads import lone_threads


def test_torch_computes_alone_in_these_threads_only() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with lone_threads(2) as alone, ThreadPoolExecutor(1) as others:
            assert list(alone.map(lambda _: torch.get_num_threads(), range(8))) == [1] * 8
            assert torch.get_num_threads() == 3
            assert others.submit(torch.get_num_threads).result() == 3  # a thread that begins later, too
    finally:
        torch.set_num_threads(before)
