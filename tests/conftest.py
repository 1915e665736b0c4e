"""Fixtures of several test files."""

import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fetching import REPO, WEIGHTS
from server import Hub

Reports = Generator[None, pytest.CollectReport, pytest.CollectReport]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip files that need a library which an environment of `tests/matrix.py` lacks."""
    report = yield
    if report.failed and "VITLITE_TESTS_MAY_SKIP" in os.environ:
        missing = re.search(r"(ModuleNotFoundError|ImportError): ([^\n]*)", str(report.longrepr))
        if missing is not None and "vitlite" not in missing[2]:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: {missing[2]}")
    return report


@contextmanager
def _skip_without_library() -> Iterator[None]:
    try:
        yield
    except (ModuleNotFoundError, RuntimeError) as error:
        lacks = "Numpy is not available" in str(error) or isinstance(error, ModuleNotFoundError)  # torch's own words
        if lacks and "VITLITE_TESTS_MAY_SKIP" in os.environ and "vitlite" not in str(error):
            pytest.skip(str(error))
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """The same for fixtures."""
    with _skip_without_library():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """The same for single tests."""
    with _skip_without_library():
        yield


@pytest.fixture
def across_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resize across first, as Pillow did before version 13, which resizes some tall images down first."""
    from PIL import Image

    resize = Image.Image.resize

    def in_two(self: Any, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None) -> Any:
        return resize(resize(self, (size[0], self.height), resample), size, resample)

    monkeypatch.setattr(Image.Image, "resize", in_two)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with trained weights and photos that are not in the repository; skip without it."""
    folder = Path(os.environ.get("VITLITE_TEST_DATA") or Path(__file__).parents[2] / "shared")
    if not folder.is_dir():
        pytest.skip(f"needs the test data of VITLITE_TEST_DATA; there is no folder {folder}")
    return folder


@pytest.fixture
def uncovered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not measure the coverage of programs that a test starts: it takes time, memory and files."""
    for name in ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub that tests of downloads ask, with a cache of its own."""
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING", "VITLITE_", "TRANSFORMERS_"))]:
        monkeypatch.delenv(name)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Hub() as server:
        server.publish(REPO, model_safetensors=WEIGHTS, config_json=b"{}")
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield server
