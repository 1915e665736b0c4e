"""Fixtures that more than one test file uses."""

import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

Reports = Generator[None, pytest.CollectReport, pytest.CollectReport]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """In environments that lack libraries on purpose (`tests/matrix.py`), skips the files that need them."""
    report = yield
    if report.failed and "VITLITE_TESTS_MAY_SKIP" in os.environ:
        missing = re.search(r"(ModuleNotFoundError|ImportError): ([^\n]*)", str(report.longrepr))
        if missing is not None and "vitlite" not in missing[2]:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: {missing[2]}")
    return report


@contextmanager
def _what_is_lacking_is_skipped() -> Iterator[None]:
    try:
        yield
    except (ModuleNotFoundError, RuntimeError) as error:
        lacks = "Numpy is not available" in str(error) or isinstance(error, ModuleNotFoundError)  # torch's own words
        if lacks and "VITLITE_TESTS_MAY_SKIP" in os.environ and "vitlite" not in str(error):
            pytest.skip(str(error))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """The same for what single tests begin with."""
    with _what_is_lacking_is_skipped():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """The same for single tests."""
    with _what_is_lacking_is_skipped():
        yield


@pytest.fixture
def across_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow since version 13 resizes some tall pictures down before across; every one before it went across first."""
    from PIL import Image

    resize = Image.Image.resize

    def in_two(self: Any, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None) -> Any:
        return resize(resize(self, (size[0], self.height), resample), size, resample)

    monkeypatch.setattr(Image.Image, "resize", in_two)


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
