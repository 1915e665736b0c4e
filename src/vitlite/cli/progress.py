"""Says on stderr which pictures are broken, and how far a long run is."""

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from vitlite.errors import ImageError

if TYPE_CHECKING:
    from vitlite.predict import Outcomes

T = TypeVar("T")


class Watch:
    """Says on stderr which pictures are broken, and how far a long run is."""

    def __init__(self, total: int, *, bar: bool) -> None:
        """With `bar`, a progress bar where stderr is a terminal and there is more than a batch or two to do."""
        from tqdm import tqdm  # type: ignore[import-untyped]  # comes with huggingface-hub

        self.broken = 0
        self.bar = tqdm(total=total, unit=" pictures", disable=not (bar and total > 50 and sys.stderr.isatty()))

    def all(self, outcomes: "Outcomes[T]") -> "Outcomes[T]":
        """Every outcome, as it came."""
        with closing(outcomes), self.bar:
            for path, outcome in outcomes:
                if isinstance(outcome, ImageError):
                    self.broken += 1
                    text = str(outcome)
                    self.bar.write(f"vitlite: {text if path in text else f'{path}: {text}'}", file=sys.stderr)
                self.bar.update()
                yield path, outcome

    def good(self, outcomes: "Outcomes[T]") -> Iterator[tuple[str, T]]:
        """The outcomes that are no errors."""
        for path, outcome in self.all(outcomes):
            if not isinstance(outcome, ImageError):
                yield path, outcome

    def exit_code(self) -> int:
        """1 where a picture was broken."""
        return int(self.broken > 0)
