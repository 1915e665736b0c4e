"""What `vitlite train` says: a row an epoch, or a line of JSON; and at the end what came of it, and what to do next."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlite.cli.progress import Lines
from vitlite.cli.tables import bold
from vitlite.errors import MissingExtraError, fit_to_print, shown
from vitlite.plots import draw_curves
from vitlite.training.best import is_better, is_done, why_best
from vitlite.training.datasets import Pictures, Prepared, listed
from vitlite.training.evaluate import Measured
from vitlite.training.loop import so_far
from vitlite.training.run import BEST, History, Run
from vitlite.training.settings import Settings
from vitlite.training.split import SPLIT, Split, parts_of, write_split

CURVES = "curves.png"
COLUMNS = ("epoch", "train loss", "val loss", "val accuracy", "seconds")


@dataclass
class Report:
    """Follows one run from its beginning to its end."""

    data: Path
    split: Split
    settings: Settings
    out: Path
    as_json: bool  # a line of JSON an epoch on stdout, and all else on stderr
    rows: int = 0  # that were printed
    lines: Lines = field(default_factory=Lines)

    def begin(self) -> None:
        """Says how many pictures of what are to be learned, and for how long."""
        train, validation, settings = self.split.train, self.split.validation, self.settings
        names = listed([shown(name) for name in train.classes])
        held = f" (held out: {self.out / SPLIT} lists them)" if self.split.held_out else ""
        test = parts_of(self.data).get("test")
        left = f"; {test} is left for the end" if test else ""
        _say(
            f"{len(train.classes)} classes ({names}); {len(train)} pictures to train on, "
            f"{len(validation)} to compare epochs with{held}; {settings.epochs} epochs in batches of "
            f"{min(settings.batch, len(train))}{left}"
        )

    def resumed(self, run: Run) -> None:
        """Says where a run goes on."""
        done, progress, epochs = len(run.history), run.progress, self.settings.epochs
        if is_done(run.history, self.settings):
            _say(f"this run is finished, after {done} of {epochs} epochs; to train again, name another --out")
        elif progress.step:
            _say(
                f"goes on in epoch {done + 1} of {epochs}, after step {progress.step} of {run.steps}, which took "
                f"{progress.seconds:.1f} seconds: they count in its row"
            )
        else:
            _say(f"goes on after epoch {done} of {epochs}")

    def step(self, run: Run) -> None:
        """Says now and then how far the epoch is; on a terminal, a bar does."""
        known = ", ".join(f"{name} {value}" for name, value in so_far(run).items())
        progress = run.progress
        self.lines.say(f"epoch {progress.epoch + 1}/{self.settings.epochs}: step {progress.step}/{run.steps}, {known}")

    def epoch(self, history: History) -> None:
        """Shows what is new. When this is called first, it is known that `out` holds no other run."""
        if not self.rows and self.split.held_out:
            write_split(self.out / SPLIT, self.data, self.split.held_out)
        if self.as_json:
            print(json.dumps(history[-1]), flush=True)
        else:
            self._show_rows(history)
        self.rows = len(history)

    def _show_rows(self, history: History) -> None:
        epochs = self.settings.epochs
        widths = [max(len(COLUMNS[0]), len(f"{epochs}/{epochs}")), *map(len, COLUMNS[1:])]
        if not self.rows:
            print(bold(_row(COLUMNS, widths)))
        for i in range(self.rows, len(history)):
            best = "val_top1" in history[i] and is_better(history[i], history[:i])
            print(_row(_cells(history[i], epochs), widths) + "  best so far" * best, flush=True)

    def end(self, history: History, measured: Measured) -> None:
        """Draws the curves, and says which epoch is the best and why, what it confuses, and how to use it."""
        try:
            draw_curves(history, self.out / CURVES)
        except MissingExtraError as error:
            _say(f"no {CURVES}: {error.for_command_line()}")
        text = summary(history, self.settings, measured, self.split.validation, self.out / BEST)
        commands = "\n".join(f"  {command}" for command in self._commands())
        stream = sys.stderr if self.as_json else sys.stdout
        print(fit_to_print(f"\n{text}\n\nWhat you can do next:\n{commands}"), file=stream)

    def _commands(self) -> list[str]:
        """Each can be pasted as it is."""
        best, images, photo = str(self.out / BEST), self.split.validation.images, "PHOTO.jpg"
        if isinstance(images, Prepared) and not isinstance(images.pictures, Tensor):
            photo = next((str(path) for path in images.pictures if str(path).isprintable()), photo)
        only = ["--split", str(self.out / SPLIT)] if self.split.held_out else []
        return [
            shlex.join(["vitlite", "classify", photo, "--model", best]),
            shlex.join(["vitlite", "eval", str(self.data), *only, "--model", best, "--out", str(self.out / "eval")]),
            shlex.join(["vitlite", "export", best, "--to", "onnx", "--out", str(self.out / "model.onnx")]),
        ]


def summary(history: History, settings: Settings, measured: Measured, validation: Pictures, best: Path) -> str:
    """Some sentences about a run that is done, a line each."""
    lines = []
    if len(history) < settings.epochs:
        lines.append(f"Ended early: none of the last {settings.patience} epochs was better (--patience).")
    reason = why_best(history)
    lines.append(f"{reason[0].upper()}{reason[1:]}.")
    right, total, classes = int(measured.right.sum()), len(validation), [shown(name) for name in validation.classes]
    lines.append(f"It is in {best}; measured again from there, it is right on {right} of {total} pictures.")
    confused = [f"{classes[one]} taken for {classes[other]} ({times})" for one, other, times in measured.confused()]
    if confused:
        lines.append(f"Most confused: {', '.join(confused)}.")
    return "\n".join(lines)


def _cells(record: dict[str, Any], epochs: int) -> list[str]:
    """A row of the table; an epoch of a run that was not measured at first has no accuracy."""
    return [
        f"{record['epoch']}/{epochs}",
        f"{record['loss']:.3f}",
        f"{record['val_loss']:.3f}" if "val_loss" in record else "-",
        f"{record['val_top1']:.1%}" if "val_top1" in record else "-",
        f"{record['seconds']:.1f}",
    ]


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _say(text: str) -> None:
    print(f"vitlite: {fit_to_print(text)}", file=sys.stderr)
