"""The pictures of a training run; that files appear is tested with the commands that draw them."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from vitlite import draw as plots


@pytest.mark.parametrize("epochs", [1, 2, 3, 50])
def test_the_axis_has_whole_epochs(epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **options: drawn.append(figure))
    history: list[dict[str, Any]] = [
        {"epoch": i, "loss": 1 / i, "accuracy": 0.5, "val_loss": 1.0, "val_top1": 0.5} for i in range(1, epochs + 1)
    ]
    plots.draw_curves(history, tmp_path / "curves.png")
    for axes in drawn[0].axes:
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert ticks
        assert all(tick == round(tick) for tick in ticks)
