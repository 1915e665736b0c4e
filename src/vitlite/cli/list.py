"""`vitlite list`: the models of the zoo."""

import json
from argparse import ArgumentParser, Namespace

from vitlite.cli.info import _fields
from vitlite.cli.tables import count, table, terminal_width, with_bold_header
from vitlite.config import PRESETS
from vitlite.errors import UnknownNameError, closest
from vitlite.weights import zoo


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite list`."""
    parser.add_argument("pattern", nargs="?", default="*", help="part of a name, or 'vit_*.dino*'")
    parser.add_argument("--json", action="store_true", help="all fields of each record, for programs")


def run(args: Namespace) -> int:
    """The zoo's checkpoints as a table."""
    pattern = args.pattern if set(args.pattern) & set("*?[") else f"*{args.pattern}*"
    records = list(dict.fromkeys(map(zoo.find, zoo.list_models(pattern))))
    if not records:
        names = [*PRESETS, *zoo.RECORDS]
        raise UnknownNameError(
            f"No model matches {args.pattern!r}.{closest(args.pattern.strip('*'), names)} "
            "Any part of a name will do, and * and ?, such as 'vit_*.dino*'; without a pattern, all are listed."
        )
    if args.json:
        print(json.dumps([_fields(record) for record in records], indent=1))
        return 0
    rows = [
        (
            f"{record.name}{' *' if record.default else ''}",
            count(record.params),
            f"{record.config.size[0]} px",
            f"{record.gmacs:.1f}",
            "-" if record.top1 is None else f"{record.top1:.1f} %",
            record.license,
        )
        for record in records
    ]
    print(with_bold_header(table(["name", "params", "image", "GMACs", "top-1", "licence"], rows, terminal_width())))
    default = next((record for record in records if record.default), None)
    if default:
        print(f"* what the preset's own name stands for: {default.preset} is {default.name}")
    return 0
