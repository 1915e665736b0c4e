"""Tables, as wide as the terminal, and bold where it can show it."""

from pathlib import Path

import pytest
from commands import on_a_terminal

from vitlite.zoo import registry


def test_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_a_terminal(monkeypatch, "list", "vit_tiny", columns=60)
    rows = [line for line in shown.splitlines() if "vit_tiny_16." in line and not line.startswith("*")]
    assert len(rows) == sum(record.preset == "vit_tiny_16" for record in registry.RECORDS.values())
    assert max(map(len, rows)) <= 60
    assert "licence" not in shown
    assert "\033[1m" in shown
    assert "\033" not in on_a_terminal(monkeypatch, "list", "vit_tiny", NO_COLOR="1")
    assert "licence" in on_a_terminal(monkeypatch, "list", "vit_tiny", columns=120)


def test_bars_only_on_a_terminal(model: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "█" in on_a_terminal(monkeypatch, "classify", images / "a.png", "--model", model)
