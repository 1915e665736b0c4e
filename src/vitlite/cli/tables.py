"""Text for people: tables, bold, and large numbers."""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

GAP = 2  # spaces between columns


def table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Text in columns: the first to the left, the others to the right; what `width` cannot hold is left out.

    >>> print(table(["name", "params"], [["vit_tiny_16", "5.7 M"], ["vit_base_16", "86.6 M"]]))
    name         params
    vit_tiny_16   5.7 M
    vit_base_16  86.6 M
    """
    lines = [list(header), *map(list, rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    if width is not None:
        widths = _first_that_fit(widths, width)
    return "\n".join(_line(cells[: len(widths)], widths) for cells in lines)


def _first_that_fit(widths: Sequence[int], width: int) -> list[int]:
    """The first columns, at least one, that fit side by side; the last matter least."""
    fitting = list(widths)
    while len(fitting) > 1 and sum(fitting) + GAP * (len(fitting) - 1) > width:
        fitting.pop()
    return fitting


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [f"{cells[0]:<{widths[0]}}"]
    for cell, width in zip(cells[1:], widths[1:], strict=True):
        padded.append(f"{cell:>{width}}")
    return (" " * GAP).join(padded).rstrip()


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that `stream` (stdout, if not given) writes to; None where it is none."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    wanted = os.environ.get("COLUMNS", "")
    return int(wanted) if wanted.isdecimal() else os.get_terminal_size(stream.fileno()).columns or 80


def bold(text: str, stream: TextIO | None = None) -> str:
    """The text in bold, on a terminal that has it, unless NO_COLOR asks otherwise."""
    stream = stream or sys.stdout
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain else f"\033[1m{text}\033[0m"


def with_bold_header(text: str) -> str:
    """A table whose first line is bold on a terminal."""
    header, newline, rows = text.partition("\n")
    return bold(header) + newline + rows


def count(number: float) -> str:
    """A large number for people.

    >>> count(86_567_656), count(17_564_000_000), count(512)
    ('86.6 M', '17.6 G', '512')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:.0f}"
