"""Print the output of `vitlite train`: a table row or a line of JSON per epoch, and a summary at the end."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitlite.cli.progress import Lines
from vitlite.cli.tables import bold
from vitlite.errors import MissingExtraError, printable
from vitlite.plots import draw_curves
from vitlite.training.data import listed
from vitlite.training.history import History, is_better, is_finished, metric_of, why_best
from vitlite.training.settings import Settings
from vitlite.training.split import SPLIT, Data, Split, data_parts, write_split
from vitlite.training.state import BEST, Run
from vitlite.training.trainer import running_figures

CURVES = "curves.png"


@dataclass
class Report:
    """Prints the progress of one training run."""

    data: Data
    split: Split
    settings: Settings
    out: Path
    as_json: bool  # a line of JSON per epoch on stdout, everything else on stderr
    options: Sequence[str] = ()  # table options of this run, repeated in the suggested commands
    rows: int = 0  # number of epochs printed so far
    lines: Lines = field(default_factory=Lines)

    def begin(self) -> None:
        """Print the data and the number of epochs."""
        train, validation, settings = self.split.train, self.split.validation, self.settings
        held = f" (held out, listed in {self.out / SPLIT})" if self.split.held_out else ""
        test = data_parts(self.data).get("test")
        unused = "" if test is None else f"; {test if isinstance(test, Path) else 'test'} is not used"
        several = ", several for an image" if train.multi_label else ""
        _say(
            f"{len(train.classes)} classes ({listed(train.classes)}){several}, {len(train)} training images, "
            f"{len(validation)} validation images{held}, {settings.epochs} epochs in batches of "
            f"{min(settings.batch, len(train))}{unused}"
        )

    def resumed(self, run: Run) -> None:
        """Print the epoch and step at which a run is resumed."""
        done, progress, epochs = len(run.history), run.progress, self.settings.epochs
        if progress.step:
            _say(
                f"resuming in epoch {done + 1} of {epochs}, after step {progress.step} of {run.steps} "
                f"({progress.seconds:.1f} seconds)"
            )
        elif is_finished(run.history, self.settings):
            _say(f"this run already finished after {done} of {epochs} epochs; to train again, choose another --out")
        else:
            _say(f"resuming after epoch {done} of {epochs}")

    def step(self, run: Run) -> None:
        """Print the progress within an epoch at intervals, unless a terminal shows a bar."""
        figures = ", ".join(f"{name} {value}" for name, value in running_figures(run).items())
        progress = run.progress
        self.lines.say(
            f"epoch {progress.epoch + 1}/{self.settings.epochs}: step {progress.step}/{run.steps}, {figures}"
        )

    def epoch(self, history: History) -> None:
        """Print the epochs that have not been printed yet. The first call also writes the list of held-out images."""
        if not self.rows and self.split.held_out:
            write_split(self.out / SPLIT, self.data, self.split.held_out)
        if self.as_json:
            print(json.dumps(history[-1]), flush=True)
        else:
            self._print_rows(history)
        self.rows = len(history)

    def _print_rows(self, history: History) -> None:
        epochs = self.settings.epochs
        metric = "val mAP" if self.split.train.multi_label else "val accuracy"
        columns = ("epoch", "train loss", "val loss", metric, "seconds")
        widths = [max(len(columns[0]), len(f"{epochs}/{epochs}")), *map(len, columns[1:])]
        if not self.rows:
            print(bold(_row(columns, widths)))
        for i in range(self.rows, len(history)):
            best = bool(metric_of(history[i])) and is_better(history[i], history[:i])
            print(_row(_cells(history[i], epochs), widths) + "  best so far" * best, flush=True)

    def end(self, history: History) -> None:
        """Draw the training curves, print the best epoch, and suggest commands that use its weights."""
        try:
            draw_curves(history, self.out / CURVES)
        except MissingExtraError as error:
            _say(f"{CURVES} was not drawn. {error}")
        lines = [f"{why_best(history)} The weights are in {self.out / BEST}.", "", "Next steps:"]
        if len(history) < self.settings.epochs:
            lines.insert(0, f"Stopped early: no improvement in {self.settings.patience} epochs (--patience).")
        lines += [f"  {command}" for command in self._commands()]
        print(printable("\n" + "\n".join(lines)), file=sys.stderr if self.as_json else sys.stdout)

    def _commands(self) -> list[str]:
        """Return shell commands that use the weights of the best epoch."""
        best, photo = str(self.out / BEST), "PHOTO.jpg"
        photo = next((str(path) for path in self.split.validation.files() if str(path).isprintable()), photo)
        split = ["--split", str(self.out / SPLIT)] if self.split.held_out else []
        model_and_out = ["--model", best, "--out", str(self.out / "eval")]
        return [
            shlex.join(["vitlite", "classify", photo, "--model", best]),
            shlex.join(["vitlite", "eval", str(self.data), *self.options, *split, *model_and_out]),
            shlex.join(["vitlite", "export", best, "--to", "onnx", "--out", str(self.out / "model.onnx")]),
        ]


def _cells(record: dict[str, Any], epochs: int) -> list[str]:
    metric = metric_of(record)
    return [
        f"{record['epoch']}/{epochs}",
        f"{record['loss']:.3f}",
        f"{record['val_loss']:.3f}" if "val_loss" in record else "-",
        f"{record[metric]:.1%}" if metric else "-",
        f"{record['seconds']:.1f}",
    ]


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _say(text: str) -> None:
    print(f"vitlite: {printable(text)}", file=sys.stderr)
