"""Write the tables of options in docs/cli.md from the commands' own parsers; with --check only compare."""

import argparse
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).with_name("cli.md")


def table(name: str) -> Iterator[str]:
    """Yield the table of one command, the required arguments first."""
    parser = argparse.ArgumentParser(add_help=False)
    import_module(f"vitlite.cli.{name}").add_arguments(parser)
    yield "| option | |"
    yield "|---|---|"
    for action in sorted(parser._actions, key=lambda action: bool(action.option_strings)):
        option = words(action).replace("|", r"\|")  # which would end a cell
        help_text = argparse.HelpFormatter("")._expand_help(action)  # fills in defaults and choices
        required = " (required)" if action.required and action.option_strings else ""
        yield f"| `{option}` | {escaped(help_text)}{required} |"


def words(action: argparse.Action) -> str:
    """Return an option as one types it, with its value."""
    if not action.option_strings:
        return str(action.metavar or action.dest)
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    if action.choices and not action.metavar:
        return f"{names} {'|'.join(map(str, action.choices))}"
    return f"{names} {action.metavar or action.dest.upper()}"


def escaped(text: str) -> str:
    """Escape what ends a cell or begins bold type."""
    return re.sub(r"([|*])", r"\\\1", text)


def page(text: str) -> str:
    """Return the page with new tables."""

    def fresh(match: re.Match[str]) -> str:
        return f"{match[1]}\n{chr(10).join(table(match[2]))}\n{match[3]}"

    return re.sub(r"(<!-- options: (\w+) -->)\n.*?(<!-- end -->)", fresh, text, flags=re.DOTALL)


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if sys.argv[1:] == ["--check"]:
        if before != after:
            sys.exit(f"{PAGE.name} is out of date. Run: python docs/{Path(__file__).name}")
    else:
        PAGE.write_text(after, encoding="utf-8")
