"""Which epoch of a run is the best, why, and whether the checkpoint of that name is what was measured."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitlite.errors import TrainError, VitliteError
from vitlite.factory import load
from vitlite.nn.vit import ViT
from vitlite.training.datasets import Pictures
from vitlite.training.evaluate import Measured, measure_together, preprocess_of
from vitlite.training.run import BEST, LAST
from vitlite.training.settings import Settings

NEAR = 0.01  # share by which a second measurement may differ: another machine, or number of threads, adds otherwise


def is_better(record: dict[str, Any], past: Sequence[dict[str, Any]]) -> bool:
    """Whether an epoch beats all before it: by accuracy on the validation pictures, and where that ties by loss.

    Accuracy alone would keep the first epoch that has all pictures right, however unsure it is of them.
    """
    best = best_epoch(past)
    return best is None or _rank(record) < _rank(best)


def best_epoch(history: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The record of the best epoch; None where nothing was validated."""
    return min((record for record in history if "val_top1" in record), key=_rank, default=None)


def is_done(history: Sequence[dict[str, Any]], settings: Settings) -> bool:
    """Whether a run has all its epochs, or has waited for a better one as long as it has patience.

    >>> accuracies = [0.5, 0.7, 0.6, 0.7]  # the last two are no better than the second
    >>> history = [{"epoch": i, "val_top1": top1, "val_loss": 1.0} for i, top1 in enumerate(accuracies, 1)]
    >>> [is_done(history, Settings(epochs=9, patience=patience)) for patience in (0, 2, 3)]
    [False, True, False]
    """
    if len(history) >= settings.epochs:
        return True
    best = best_epoch(history)
    return best is not None and 0 < settings.patience <= len(history) - best["epoch"]


def _rank(record: dict[str, Any]) -> tuple[float, float]:
    """The lower, the better."""
    loss = record["val_loss"]
    return -record["val_top1"], math.inf if math.isnan(loss) else loss


def why_best(history: Sequence[dict[str, Any]]) -> str:
    """A sentence that says which epoch is the best, and why; empty where nothing was validated.

    >>> why_best([{"epoch": 1, "val_top1": 1.0, "val_loss": 0.6}, {"epoch": 2, "val_top1": 1.0, "val_loss": 0.1}])
    'best is epoch 2 of 2: of the 2 with the highest validation accuracy, 100.00%, that with the lowest loss, 0.1'
    """
    best = best_epoch(history)
    if best is None:
        return ""
    tied = [record for record in history if record.get("val_top1") == best["val_top1"]]
    why = f"the highest validation accuracy, {best['val_top1']:.2%}"
    if len(tied) > 1:
        why = f"of the {len(tied)} with {why}, that with the lowest loss, {best['val_loss']:g}"
    return f"best is epoch {best['epoch']} of {len(history)}: {why}"


def check_best(
    out: Path, history: Sequence[dict[str, Any]], model: ViT, validation: Pictures, *, bfloat16: bool
) -> Measured | None:
    """Measures `best` again, from the file; None where no epoch was measured, or where the model's class saves itself.

    How the files of such a class are read, it knows alone.

    Args:
        out: The folder of the run.
        history: What was measured.
        model: The one that was trained: the other is put where it is, and computes in its type.
        validation: What was measured on.
        bfloat16: As in training.

    Raises:
        TrainError: It is not there, or gives something else.
    """
    best = best_epoch(history)
    if best is None or type(model).save is not ViT.save:
        return None
    try:
        again = load(out / BEST, device=model.device, dtype=model.dtype)
        if preprocess_of(model).quick_decode:  # which no file says
            again.preprocess = preprocess_of(again).with_quick_decode()
        measured = measure_together(again, validation, bfloat16=bfloat16)
    except VitliteError as error:
        raise _not_the_best(out, f"it cannot be measured again: {error.text}") from error
    wanted_loss, wanted_top1 = best["val_loss"], best["val_top1"]
    one_picture = 1 / len(validation)
    same_top1 = abs(measured.top1 - wanted_top1) <= max(NEAR, 1.5 * one_picture)
    same_loss = math.isclose(measured.loss, wanted_loss, rel_tol=NEAR, abs_tol=1e-3)
    if not same_top1 or not (same_loss or math.isnan(wanted_loss)):
        raise _not_the_best(
            out,
            f"epoch {best['epoch']} had an accuracy of {wanted_top1:.2%} and a loss of {wanted_loss:g}, and it has "
            f"{measured.top1:.2%} and {measured.loss:g}",
        )
    return measured


def _not_the_best(out: Path, reason: str) -> TrainError:
    return TrainError(
        f"{out / BEST} is not the best epoch of this run ({reason}). Something else wrote there, or the file is "
        f"damaged. {out / LAST} holds the last epoch.",
        python="Train again with another `out`, or use `last`.",
        command="Train again with another --out, or use what is in last.",
    )
