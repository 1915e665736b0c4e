"""Writes the tables of options into docs/cli.md from the commands' own parsers; with --check only compares."""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from vitlite.cli.main import COMMANDS, find

BAR = r"\|"  # which does not end a cell
PAGE = Path(__file__).with_name("cli.md")


def table(name: str) -> Iterator[str]:
    """The options of one command."""
    parser = argparse.ArgumentParser(add_help=False)
    find(COMMANDS[name].add_arguments)(parser)
    yield "| option | |"
    yield "|---|---|"
    for action in sorted(parser._actions, key=lambda action: bool(action.option_strings)):  # what must be given first
        value = "" if action.nargs == 0 else action.metavar or (action.dest.upper() if action.option_strings else "")
        if action.choices:
            value = "|".join(map(str, action.choices))
        if not action.option_strings:
            word = f"{action.metavar or action.dest}"
        else:
            word = f"{', '.join(action.option_strings)} {value}".strip()
        help_text = (action.help or "") % {"default": action.default}
        shown = re.sub(r"([|*])", r"\\\1", help_text)
        yield f"| `{word.replace('|', BAR)}` | {shown} |"


def page(text: str) -> str:
    """The page with every table made anew."""

    def fresh(match: re.Match[str]) -> str:
        return f"{match[1]}\n{chr(10).join(table(match[2]))}\n{match[3]}"

    return re.sub(r"(<!-- options: (\w+) -->)\n.*?(<!-- end -->)", fresh, text, flags=re.DOTALL)


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if sys.argv[1:] == ["--check"]:
        if before != after:
            sys.exit(f"{PAGE.name} is not what the commands say. Run: python docs/{Path(__file__).name}")
    else:
        PAGE.write_text(after, encoding="utf-8")
