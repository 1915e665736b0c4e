"""Write the tables of options in docs/cli.md from the commands' own parsers; with --check only compare.

An option that several commands have, with the same help, is in the section "Common options", in the table of its group.
The table of a command has its arguments and its other options, and a line below it names the common groups and options.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from statistics import mode
from typing import TypeAlias

from vitlite.cli.main import COMMANDS

PAGE = Path(__file__).with_name("cli.md")
REQUIRED = " (required)"
SMALL = 2  # options in a group that is not worth a table
Row: TypeAlias = tuple[str, str]  # an option and its help


def options_of(command: str) -> dict[Row, str]:
    """Return the options of a command, the positional arguments first, with the titles of their groups."""
    parser = argparse.ArgumentParser(add_help=False)
    import_module(f"vitlite.cli.{command}").add_arguments(parser)
    return {
        (words(action), help_of(action)): str(group.title)
        for group in parser._action_groups
        for action in group._group_actions
    }


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


def help_of(action: argparse.Action) -> str:
    """Return the help of an option, and whether the option is required."""
    text = argparse.HelpFormatter("")._expand_help(action)  # with the default and the choices
    return text + REQUIRED if action.required and action.option_strings else text


def table(rows: Iterable[Row]) -> str:
    """Return a table of options."""
    lines = ["|option|meaning|", "|---|---|"]
    for option, text in rows:
        lines.append(f"|{code(option)}|{escaped(text)}|")
    return "\n".join(lines)


def code(option: str) -> str:
    r"""Return an option in code type. Python-Markdown would show the backslash of \| in backticks."""
    return f"<code>{option.replace('|', '&#124;')}</code>" if "|" in option else f"`{option}`"


def escaped(text: str) -> str:
    """Escape what ends a cell or begins bold type."""
    return re.sub(r"([|*])", r"\\\1", text)


def common_groups(options: dict[str, dict[Row, str]]) -> dict[str, list[Row]]:
    """Return the options that several commands have, by group. Small groups are together in the last one."""
    titles: dict[Row, list[str]] = {}
    for rows in reversed(options.values()):  # eval first, which has most of them
        for row, title in rows.items():
            titles.setdefault(row, []).append(title)
    groups: dict[str, list[Row]] = {}
    for row, found in titles.items():
        if len(found) > 1 and row[0].startswith("-") and not row[1].endswith(REQUIRED):
            groups.setdefault(mode(found), []).append(row)
    others = [row for title in list(groups) if len(groups[title]) <= SMALL for row in groups.pop(title)]
    return groups | {"options": groups.pop("options", []) + others}


def section(rows: Iterable[Row], groups: dict[str, list[Row]]) -> str:
    """Return the table of a command, and the line that names the common groups and options."""
    shared = []
    for title, group in groups.items():
        present = [row for row in group if row in rows]
        if present == group and title != "options":
            shared.append(f"[{title}](#{re.sub(' ', '-', title)})")
        else:
            shared += [f"`{option.split()[0]}`" for option, _ in present]
    own = [row for row in rows if not any(row in group for group in groups.values())]
    parts = [table(own)] if own else []
    if shared:
        parts.append(f"[Common](#common-options): {', '.join(shared)}")
    return "\n\n".join(parts)


def page(text: str) -> str:
    """Return the page with new tables."""
    options = {command: options_of(command) for command in COMMANDS}
    groups = common_groups(options)
    tables = {command: section(rows, groups) for command, rows in options.items()}
    headings = {title: "Others" if title == "options" else title.capitalize() for title in groups}
    tables["common"] = "\n\n".join(f"### {headings[title]}\n\n{table(rows)}" for title, rows in groups.items())

    def fresh(match: re.Match[str]) -> str:
        return f"{match[1]}\n{tables[match[2]]}\n{match[3]}"

    return re.sub(r"(<!--options:(\w+)-->)\n.*?(<!--end-->)", fresh, text, flags=re.DOTALL)


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if sys.argv[1:] == ["--check"]:
        if before != after:
            sys.exit(f"{PAGE.name} is out of date. Run: python docs/{Path(__file__).name}")
    else:
        PAGE.write_text(after, encoding="utf-8")
