"""`vitlite verify`: hash weights again."""

from argparse import ArgumentParser, Namespace

from vitlite.cli.options import expanded
from vitlite.errors import UnknownNameError, VitliteError, fit_to_print
from vitlite.zoo import hub, registry
from vitlite.zoo.pins import pinned_names


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite verify`."""
    parser.add_argument(
        "targets", type=expanded, nargs="*", metavar="NAME|PATH", help="default: every name downloaded so far"
    )


def run(args: Namespace) -> int:
    """Hashes files again and compares, each on its own line; 1 where any is not what it should be."""
    targets = args.targets or pinned_names()
    if not targets:
        raise UnknownNameError("Nothing to verify: no name was downloaded so far. Give a name or the path of a file.")
    failed = 0
    for target in targets:
        try:
            fetched = _verify(target)
        except VitliteError as error:
            failed = 1
            print(fit_to_print(f"{target}: FAILED: {error.for_command_line()}"))
        else:
            print(fit_to_print(f"{target}: good, sha256 {fetched.sha256} ({fetched.verified}), {fetched.path}"))
    return failed


def _verify(target: str) -> hub.Fetched:
    """The file of a name or path, as it is now."""
    if target not in registry.NAMES:
        return hub.verify(target)
    record = registry.find(target)
    if record.file:  # comes with vitlite
        return hub.verify(registry.DATA / record.file, record.sha256)
    return hub.verify(record.name)
