"""Writes what stands between two marks of a page; with --check only says if it is stale."""

import sys
from collections.abc import Iterable
from pathlib import Path


def write_section(page: Path, begin: str, end: str, lines: Iterable[str]) -> int:
    """The exit code of the script that calls it: 1 where the page is stale and was not written."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(begin)
    new = before + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1]
    if new != text and "--check" in sys.argv:
        print(f"{page.name} is stale. Write it: python docs/{Path(sys.argv[0]).name}", file=sys.stderr)
        return 1
    page.write_text(new, encoding="utf-8")
    return 0
