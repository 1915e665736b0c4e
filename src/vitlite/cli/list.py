"""`vitlite list`: list the models of the zoo."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from vitlite.cli.info import fields_of
from vitlite.cli.tables import table, terminal_width, with_bold_header
from vitlite.errors import UnknownNameError
from vitlite.zoo import registry
from vitlite.zoo.purposes import in_words

SORTS: dict[str, Callable[[registry.Record], float]] = {  # the smallest value comes first
    "top1": lambda record: -(record.top1 or 0),
    "time": lambda record: record.gmacs,  # proportional to time
    "size": lambda record: record.params,
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite list`."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="part of a name, licence or purpose, or a pattern ('vit_*.dino*')",
    )
    parser.add_argument("--sort", choices=tuple(SORTS), help="best models first; default: by family")
    parser.add_argument("--json", action="store_true", help="print all fields of each record as JSON")


def run(args: Namespace) -> int:
    """Print the checkpoints of the zoo as a table."""
    records = _matching(args.words)
    if args.sort:
        records.sort(key=SORTS[args.sort])
    if args.json:
        print(json.dumps([fields_of(record) for record in records], indent=1))
    else:
        _print_table(records)
    return 0


def _matching(words: Sequence[str]) -> list[registry.Record]:
    """Return the records that match every word.

    Raises:
        UnknownNameError: No record matches.
    """
    found = [record for record in registry.RECORDS.values() if all(_matches(word.lower(), record) for word in words)]
    if not found:
        text = " ".join(words)
        hint = registry.did_you_mean(text.strip("*"))
        raise UnknownNameError(
            f"No model matches {text!r}.{hint} Pass any part of a name, a licence or a purpose, or a pattern such as "
            "'vit_*.dino*'."
        )
    return found


def _matches(word: str, record: registry.Record) -> bool:
    """Return True if a record contains a word, or if a name of the record matches a pattern."""
    if not any(character in word for character in "*?["):
        return word in in_words(record)
    names = [record.name, record.alias, record.preset if record.default else ""]
    return any(fnmatchcase(name.lower(), word) for name in names)


def _print_table(records: Sequence[registry.Record]) -> None:
    header = [
        "name",
        "top-1",
        "licence",
        "size",
        "GMACs",
        "image",
    ]  # `table` omits the last columns on a narrow terminal
    rows = [_row(record) for record in records]
    print(with_bold_header(table(header, rows, terminal_width())))
    default = next((record for record in records if record.default), None)
    if default is not None:
        print(f"* default checkpoint of a preset; for example, {default.preset} means {default.name}")


def _row(record: registry.Record) -> list[str]:
    return [
        f"{record.name} *" if record.default else record.name,
        "-" if record.top1 is None else f"{record.top1:.1f} %",
        record.license,
        f"{4 * record.params / 1e6:,.0f} MB",  # in float32
        f"{record.gmacs:.1f}",
        f"{record.config.size[0]} px",
    ]
