"""The Hub that the tests of weights ask."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fetching import REPO, WEIGHTS
from server import Hub


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
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
