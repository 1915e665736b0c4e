"""`vitlite list`: the models of the zoo."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from vitlite.cli.info import fields_of
from vitlite.cli.tables import count, table, terminal_width, with_bold_header
from vitlite.errors import UnknownNameError
from vitlite.weights import zoo


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite list`."""
    parser.add_argument("pattern", nargs="?", default="*", help="part of a name, or 'vit_*.dino*'")
    parser.add_argument("--json", action="store_true", help="all fields of each record, for programs")


def run(args: Namespace) -> int:
    """The zoo's checkpoints as a table."""
    records = _matching(args.pattern)
    if args.json:
        print(json.dumps([fields_of(record) for record in records], indent=1))
    else:
        _print_table(records)
    return 0


def _matching(pattern: str) -> list[zoo.Record]:
    """The records of the names that a pattern, or a part of a name, fits; each once."""
    is_pattern = any(character in pattern for character in "*?[")
    names = zoo.list_models(pattern if is_pattern else f"*{pattern}*")
    if not names:
        hint = zoo.nearest(pattern.strip("*"))
        raise UnknownNameError(
            f"No model matches {pattern!r}.{hint} "
            "Any part of a name will do, and * and ?, such as 'vit_*.dino*'; without a pattern, all are listed."
        )
    return list(dict.fromkeys(zoo.find(name) for name in names))


def _print_table(records: Sequence[zoo.Record]) -> None:
    header = ["name", "params", "image", "GMACs", "top-1", "licence"]
    rows = [_row(record) for record in records]
    print(with_bold_header(table(header, rows, terminal_width())))
    default = next((record for record in records if record.default), None)
    if default is not None:
        print(f"* what the preset's own name stands for: {default.preset} is {default.name}")


def _row(record: zoo.Record) -> list[str]:
    return [
        f"{record.name} *" if record.default else record.name,
        count(record.params),
        f"{record.config.size[0]} px",
        f"{record.gmacs:.1f}",
        "-" if record.top1 is None else f"{record.top1:.1f} %",
        record.license,
    ]
