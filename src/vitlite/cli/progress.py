"""What a run over many pictures says on stderr while it works."""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from vitlite.bulk.local import counted
from vitlite.errors import ImageError, fit_to_print, shown

if TYPE_CHECKING:
    from vitlite.predict import Outcomes

T = TypeVar("T")


def say_skipped(skipped: Counter[str]) -> None:
    """Says which files of folders are not looked at, and how they would be."""
    print(
        f"vitlite: skipped, as they are no files whose names end as pictures' do: {counted(skipped)}. If they are "
        "pictures: convert those of other formats (HEIC, raw), and name the others one by one, or by a pattern.",
        file=sys.stderr,
    )


class Watch:
    """Says which pictures are broken, and how far a long run is."""

    def __init__(self, total: int, *, bar: bool) -> None:
        """With `bar`, a progress bar where stderr is a terminal and there is more than a batch or two to do."""
        from tqdm import tqdm  # type: ignore[import-untyped]  # comes with huggingface-hub

        from vitlite.predict import Pace  # here, since it imports torch

        self.broken, self.done = 0, 0
        self.pace, self.begun = Pace(), time.monotonic()
        self.bar = tqdm(total=total, unit=" pictures", disable=not (bar and total > 50 and sys.stderr.isatty()))

    def outcomes(self, outcomes: "Outcomes[T]") -> "Outcomes[T]":
        """Every outcome, as it came."""
        with closing(outcomes), self.bar:
            for path, outcome in outcomes:
                if isinstance(outcome, ImageError):
                    self._say_broken(path, outcome)
                self.bar.update()
                self.done += 1
                yield path, outcome
            self._say_pace()

    def _say_pace(self) -> None:
        """How quick it was, and what to do about it."""
        waited, worked = self.pace.waited, self.pace.worked
        if self.bar.disable or not waited + worked:
            return
        share = round(100 * waited / (waited + worked))
        if waited > worked:
            text = f"reading them is what takes long: the model waited for pictures {share} % of the time"
        else:
            text = f"the model is what takes long: it waited for pictures {share} % of the time"
        seconds = max(time.monotonic() - self.begun, 1e-3)
        line = f"vitlite: {self.done / seconds:.1f} pictures a second; {text}"
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
