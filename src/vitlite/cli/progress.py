"""What a long run says on stderr while it works."""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from vitlite.errors import ImageError, counted, fit_to_print, shown

if TYPE_CHECKING:
    from vitlite.inference.predict import Outcomes

T = TypeVar("T")
EVERY = 30.0  # seconds between two lines that say how far a run is, where there is no terminal for a bar


def say_skipped(skipped: Counter[str]) -> None:
    """Says which files of folders are not looked at, and how they would be."""
    print(
        f"vitlite: skipped, as they are no files whose names end as pictures' do: {counted(skipped)}. If they are "
        "pictures: convert those of other formats (HEIC, raw), and name the others one by one, or by a pattern.",
        file=sys.stderr,
    )


def say_resumed(out: str, done: int) -> None:
    """Says that an interrupted run goes on."""
    print(f"vitlite: continuing {shown(out, 1000)}: {done} pictures are done", file=sys.stderr)


class Lines:
    """A line on stderr now and then, where that is no terminal: a log shows that something is being done."""

    def __init__(self) -> None:
        self.said = time.monotonic()

    def say(self, text: str) -> None:
        """Says this, unless something was said less than half a minute ago."""
        now = time.monotonic()
        if now - self.said >= EVERY and not sys.stderr.isatty():
            self.said = now
            print(f"vitlite: {text}", file=sys.stderr, flush=True)


class Progress:
    """How far a run over pictures is: a bar on a terminal, and elsewhere a line now and then."""

    def __init__(self, total: int, *, visible: bool = True) -> None:
        """Nothing is to be seen without `visible`, nor on a terminal where it is a batch or two."""
        from tqdm import tqdm  # type: ignore[import-untyped]  # comes with huggingface-hub

        self.total, self.done = total, 0
        self.bar = tqdm(total=total, unit=" pictures", disable=not (visible and total > 50 and sys.stderr.isatty()))
        self.lines = Lines() if visible else None

    def add(self, pictures: int) -> None:
        """So many more are done."""
        self.done += pictures
        self.bar.update(pictures)
        if self.lines is not None:
            self.lines.say(f"{self.done} of {self.total} pictures are done")


class Watch:
    """Says which pictures are broken, and how far a long run is."""

    def __init__(self, total: int, *, bar: bool) -> None:
        """With `bar`, a progress bar where stderr is a terminal and there is more than a batch or two to do."""
        from vitlite.inference.predict import Timings  # here, since it imports torch

        self.broken = 0
        self.timings, self.begun = Timings(), time.monotonic()
        self.progress = Progress(total, visible=bar)
        self.bar = self.progress.bar

    def outcomes(self, outcomes: "Outcomes[T]") -> "Outcomes[T]":
        """Every outcome, as it came."""
        with closing(outcomes), self.bar:
            for path, outcome in outcomes:
                if isinstance(outcome, ImageError):
                    self._say_broken(path, outcome)
                self.progress.add(1)
                yield path, outcome
            self._say_timings()

    def _say_timings(self) -> None:
        """How quick it was, and what to do about it."""
        waited, worked = self.timings.waited, self.timings.worked
        if self.bar.disable or not waited + worked:
            return
        share = round(100 * waited / (waited + worked))
        if waited > worked:
            text = f"reading them is what takes long: the model waited for pictures {share} % of the time"
        else:
            text = f"the model is what takes long: it waited for pictures {share} % of the time"
        seconds = max(time.monotonic() - self.begun, 1e-3)
        line = f"vitlite: {self.progress.done / seconds:.1f} pictures a second; {text}"
        self.bar.write(line, file=sys.stderr)

    def _say_broken(self, path: str, error: ImageError) -> None:
        self.broken += 1
        text, name = error.for_command_line(), shown(path, 1000)
        named = text if name in text else f"{name}: {text}"
        self.bar.write(f"vitlite: {fit_to_print(named)}", file=sys.stderr)

    def answers(self, outcomes: "Outcomes[T]") -> Iterator[tuple[str, T]]:
        """The outcomes that are no errors."""
        for path, outcome in self.outcomes(outcomes):
            if not isinstance(outcome, ImageError):
                yield path, outcome

    def exit_code(self) -> int:
        """1 where a picture was broken."""
        return int(self.broken > 0)
