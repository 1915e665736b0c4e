"""Writes the table of docs/weights.md that says what a preset may say of a file; with --check only if it is stale."""

import sys
from collections.abc import Iterator
from pathlib import Path

from sections import write_section

from vitlite.factory import PRESET_MAY_SAY

PAGE = Path(__file__).with_name("weights.md")
BEGIN, END = "<!-- preset: docs/generate_weights.py -->", "<!-- end of preset -->"


def table() -> Iterator[str]:
    """A row for each reason."""
    yield "\n\n| a preset says | because |"
    yield "|---|---|"
    reasons: dict[str, list[str]] = {}
    for field, reason in PRESET_MAY_SAY.items():
        reasons.setdefault(reason, []).append(f"`{field}`")
    for reason, fields in reasons.items():
        yield f"| {', '.join(fields)} | {reason} |"
    yield ""


if __name__ == "__main__":
    sys.exit(write_section(PAGE, BEGIN, END, table()))
