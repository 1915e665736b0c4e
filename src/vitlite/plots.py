"""Pictures of a training run, drawn with matplotlib: the curves, and who is taken for whom."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlite.errors import missing_extra

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise missing_extra("Drawing curves or a confusion matrix", "train") from error


def draw_curves(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss and accuracy by epoch; `history` is what `train` returns."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    epochs = [record["epoch"] for record in history]
    for axes, title, names in zip(
        figure.subplots(1, 2), ("loss", "accuracy"), (("loss", "val_loss"), ("accuracy", "val_top1")), strict=True
    ):
        for name, label in zip(names, ("training, pictures as augmented", "validation, averaged weights"), strict=True):
            if name in history[0]:
                axes.plot(epochs, [record[name] for record in history], marker=".", label=label)
        axes.set(title=title, xlabel="epoch")
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def draw_confusion(confusion: Tensor, classes: Sequence[str], path: Path) -> None:
    """Rows are what the pictures show, columns what they were taken for, in shares of the row."""
    k = len(classes)
    side = min(max(3.0, 0.55 * k + 1.5), 14)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    shares = (confusion / confusion.sum(1, keepdim=True).clamp(min=1)).tolist()
    figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), label="share of the row")
    axes.set(xlabel="taken for", ylabel="is")
    if k <= 40:
        axes.set_xticks(range(k), classes, rotation=90)
        axes.set_yticks(range(k), classes)
    if k <= 20:
        for i, row in enumerate(shares):
            for j, share in enumerate(row):
                if share:
                    color = "white" if share > 0.5 else "black"
                    axes.text(j, i, str(int(confusion[i, j])), ha="center", va="center", color=color, fontsize=8)
    figure.savefig(path, dpi=120)
