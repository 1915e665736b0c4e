"""Format tables, bold text and large numbers for a terminal."""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

GAP = 2  # spaces between columns


def table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Format a table. The first column is aligned left, the others right. Columns that exceed `width` are omitted.

    >>> print(table(["name", "params"], [["vit_tiny_16", "5.7 M"], ["vit_base_16", "86.6 M"]]))
    name         params
    vit_tiny_16   5.7 M
    vit_base_16  86.6 M
    """
    lines = [list(header), *map(list, rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    while width is not None and len(widths) > 1 and sum(widths) + GAP * (len(widths) - 1) > width:
        widths.pop()
    text = []
    for first, *others in lines:
        cells = [f"{first:<{widths[0]}}", *(f"{cell:>{w}}" for cell, w in zip(others, widths[1:], strict=False))]
        text.append((" " * GAP).join(cells).rstrip())
    return "\n".join(text)


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the width of the terminal of `stream` (default: stdout), or None if `stream` is not a terminal."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() else os.get_terminal_size(stream.fileno()).columns or 80


def bold(text: str, stream: TextIO | None = None) -> str:
    """Return the text in bold if `stream` is a terminal, unless NO_COLOR is set."""
    stream = stream or sys.stdout
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain else f"\033[1m{text}\033[0m"


def with_bold_header(text: str) -> str:
    """Return the text of a table with the first line in bold if stdout is a terminal."""
    header, newline, rows = text.partition("\n")
    return bold(header) + newline + rows


def count(number: float) -> str:
    """Format a large number with a unit prefix.

    >>> count(86_567_656), count(17_564_000_000), count(512)
    ('86.6 M', '17.6 G', '512')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:.0f}"
