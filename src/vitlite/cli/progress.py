"""Report the progress of a long run on stderr."""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from vitlite.errors import ImageError, counted, printable

if TYPE_CHECKING:
    from vitlite.inference.predict import Outcomes

T = TypeVar("T")
MOST_NAMED = 8  # number of unreadable images that are named at the end of a run
EVERY = 30.0  # seconds between two lines in a log


def say_skipped(skipped: Counter[str]) -> None:
    """Print the number of skipped files, by extension."""
    number = sum(skipped.values())
    files = "1 file that is not an image" if number == 1 else f"{number} files that are not images"
    print(
        f"vitlite: skipped {files}: {counted(skipped)}. To read files with other extensions, pass their paths instead "
        "of the folder. Convert raw images to JPEG first.",
        file=sys.stderr,
    )


def say_broken(names: Sequence[str], count: int | None = None) -> None:
    """Print how many images could not be read, and the names of the first eight.

    Args:
        names: The names of the unreadable images. Those after the first eight may be missing.
        count: The number of unreadable images. Default: the number of names.
    """
    count = len(names) if count is None else count
    if count:
        images = "1 image" if count == 1 else f"{count} images"
        more = ", …" if count > MOST_NAMED else ""
        print(f"vitlite: {images} could not be read: {printable(', '.join(names[:MOST_NAMED]))}{more}", file=sys.stderr)


def say_resumed(out: str, done: int) -> None:
    """Print that an interrupted run is resumed."""
    print(f"vitlite: resuming {out}: {done} images are done", file=sys.stderr)


class Lines:
    """Prints progress for a log at intervals, unless stderr is a terminal."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line, unless the last line was printed less than 30 seconds ago."""
        now = time.monotonic()
        if now - self.last >= EVERY and not sys.stderr.isatty():
            self.last = now
            print(f"vitlite: {text}", file=sys.stderr, flush=True)


class Progress:
    """Shows how many images or other units are done: a bar on a terminal, otherwise a line every 30 seconds."""

    def __init__(self, total: int, *, visible: bool = True, unit: str = "images") -> None:
        """Create the bar, which is hidden for 50 images or fewer. If `visible` is False, show nothing at all."""
        from tqdm import tqdm  # type: ignore[import-untyped]  # comes with huggingface-hub

        self.total, self.done, self.unit = total, 0, unit
        hidden = not (visible and total > 50 and sys.stderr.isatty())
        self.bar = tqdm(total=total, unit=f" {unit}", unit_scale=unit != "images", disable=hidden)
        self.lines = Lines() if visible else None

    def add(self, count: int) -> None:
        """Count further images as done."""
        self.done += count
        self.bar.update(count)
        if self.lines is not None:
            self.lines.say(f"{self.done} of {self.total} {self.unit} are done")


class ImageProgress:
    """Shows the progress of a run over images, and prints an error for each image that cannot be read.

    Args:
        total: The number of images.
        bar: If True, show a bar on a terminal.
        strict: If True, the first image that cannot be read is an error.
        verb: The word for a processed image in the final count, such as "classified".
    """

    def __init__(self, total: int, *, bar: bool, strict: bool = False, verb: str = "") -> None:
        from vitlite.inference.predict import Timings  # here, because it imports torch

        self.strict, self.verb = strict, verb
        self.broken = 0
        self.broken_names: list[str] = []  # the first MOST_NAMED images
        self.timings, self.begun = Timings(), time.monotonic()
        self.progress = Progress(total, visible=bar)
        self.bar = self.progress.bar

    def outcomes(self, outcomes: "Outcomes[T]") -> "Outcomes[T]":
        """Yield the outcomes unchanged, print errors as they occur, and print the counts at the end."""
        with closing(outcomes), self.bar:
            for path, outcome in outcomes:
                if isinstance(outcome, ImageError):
                    self._add_broken(path, outcome)
                self.progress.add(1)
                yield path, outcome
            self._say_speed()
        if self.verb:
            done = self.progress.done - self.broken
            print(f"vitlite: {done} {'image' if done == 1 else 'images'} {self.verb}", file=sys.stderr)
        say_broken(self.broken_names, self.broken)

    def _add_broken(self, path: str, error: ImageError) -> None:
        error = error if printable(path) in str(error) else error.within(path)
        if self.strict:
            raise error
        self.broken += 1
        if self.broken <= MOST_NAMED:
            self.broken_names.append(path)
        self.bar.write(f"vitlite: {error}", file=sys.stderr)

    def answers(self, outcomes: "Outcomes[T]") -> Iterator[tuple[str, T]]:
        """Yield the outcomes of the readable images."""
        for path, outcome in self.outcomes(outcomes):
            if not isinstance(outcome, ImageError):
                yield path, outcome

    def exit_code(self) -> int:
        """Return 1 if an image could not be read, else 0."""
        return int(self.broken > 0)

    def _say_speed(self) -> None:
        waited, worked = self.timings.waited, self.timings.worked
        if self.bar.disable or not waited + worked:
            return
        speed = self.progress.done / max(time.monotonic() - self.begun, 1e-3)
        share = round(100 * waited / (waited + worked))
        line = f"vitlite: {speed:.1f} images/s; the model waited for images {share} % of the time"
        self.bar.write(line, file=sys.stderr)
