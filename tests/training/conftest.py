"""How the tests of training compute, and what they read from the disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_run import stripes_in_folders


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So that two runs, also of different processes, add in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """train/ and val/, with a folder per class in each."""
    return stripes_in_folders(tmp_path / "data")
