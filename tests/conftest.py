"""Fixtures that more than one test file uses."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with trained weights and photos that are not in the repository; without it the test is skipped."""
    folder = Path(os.environ.get("VITLITE_TEST_DATA") or Path(__file__).parents[2] / "shared")
    if not folder.is_dir():
        pytest.skip(f"needs the test data of VITLITE_TEST_DATA, and {folder} is not there")
    return folder


@pytest.fixture
def uncovered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that a test starts are not measured for coverage, which takes time, memory, and files of its own."""
    for name in ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"):
        monkeypatch.delenv(name, raising=False)
