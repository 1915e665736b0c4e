"""Choose the best epoch from the history of a run, a list with one record per epoch."""

import math
from collections.abc import Sequence
from typing import Any

from vitlite.training.settings import Settings

History = list[dict[str, Any]]
METRICS = {"val_top1": "validation accuracy", "val_map": "validation mAP"}  # by the key in a record


def best_epoch(history: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the record of the epoch with the highest validation accuracy or mAP, or None without validation.

    Among epochs with equal values, the lowest validation loss decides. If several epochs predict all images correctly,
    this chooses the most confident one.
    """
    return min((record for record in history if metric_of(record)), key=_rank, default=None)


def metric_of(record: dict[str, Any]) -> str:
    """Return the key of the metric by which epochs are compared, or "" without validation."""
    return next((name for name in METRICS if name in record), "")


def is_better(record: dict[str, Any], past: Sequence[dict[str, Any]]) -> bool:
    """Return True if an epoch is better than all epochs before it."""
    best = best_epoch(past)
    return best is None or _rank(record) < _rank(best)


def _rank(record: dict[str, Any]) -> tuple[float, float]:
    """Return the sort key of an epoch. The best epoch has the lowest key."""
    loss = record["val_loss"]
    return -record[metric_of(record)], math.inf if math.isnan(loss) else loss


def is_finished(history: Sequence[dict[str, Any]], settings: Settings) -> bool:
    """Return True if a run has completed all epochs, or if it ends early because of `patience`.

    >>> accuracies = [0.5, 0.7, 0.6, 0.7]  # the last two are not better than the second
    >>> history = [{"epoch": i, "val_top1": top1, "val_loss": 1.0} for i, top1 in enumerate(accuracies, 1)]
    >>> [is_finished(history, Settings(epochs=9, patience=patience)) for patience in (0, 2, 3)]
    [False, True, False]
    """
    if len(history) >= settings.epochs:
        return True
    best = best_epoch(history)
    return best is not None and 0 < settings.patience <= len(history) - best["epoch"]


def why_best(history: Sequence[dict[str, Any]]) -> str:
    """Return a sentence that says which epoch is the best and why. Without validation, return an empty string.

    >>> why_best([{"epoch": 1, "val_top1": 1.0, "val_loss": 0.6}, {"epoch": 2, "val_top1": 1.0, "val_loss": 0.1}])
    'Best epoch: 2 of 2, with the highest validation accuracy (100.00%) and, of 2 such epochs, the lowest loss (0.1).'
    """
    best = best_epoch(history)
    if best is None:
        return ""
    metric = metric_of(best)
    tied = [record for record in history if record.get(metric) == best[metric]]
    why = f"the highest {METRICS[metric]} ({best[metric]:.2%})"
    if len(tied) > 1:
        why += f" and, of {len(tied)} such epochs, the lowest loss ({best['val_loss']:g})"
    return f"Best epoch: {best['epoch']} of {len(history)}, with {why}."
