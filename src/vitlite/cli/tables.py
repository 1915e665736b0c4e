"""Text for people: tables, bold, and large numbers."""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO


def table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Text in columns: the first to the left, the others to the right; what `width` cannot hold is left out.

    >>> print(table(["name", "params"], [["vit_tiny_16", "5.7 M"], ["vit_base_16", "86.6 M"]]))
    name         params
    vit_tiny_16   5.7 M
    vit_base_16  86.6 M
    """
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while width is not None and len(widths) > 1 and sum(widths) + 2 * (len(widths) - 1) > width:
        widths.pop()  # the last columns matter least
    lines = []
    for row in cells:
        padded = [f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths))]  # noqa: B905
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


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
    first, *rest = text.split("\n")
    return "\n".join([bold(first), *rest])


def count(number: float) -> str:
    """A large number for people.

    >>> count(86_567_656), count(17_564_000_000), count(512)
    ('86.6 M', '17.6 G', '512')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:.0f}"
