"""`vitlite download`: fetch weights ahead of use."""

from argparse import ArgumentParser, Namespace

from vitlite.errors import fit_to_print
from vitlite.zoo import hub, registry
from vitlite.zoo.pins import pin_before


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite download`."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="names that `vitlite list` shows, or presets")
    parser.add_argument("--update", action="store_true", help="ask the Hub for its newest file and pin that instead")


def run(args: Namespace) -> int:
    """Fetches checkpoints, so that later calls need no network."""
    records = [registry.find(name) for name in args.names]  # a wrong name is said before anything is fetched
    for record in dict.fromkeys(records):
        if record.repo:
            _download(record, update=args.update)
        else:
            print(f"{record.name}: comes with vitlite, nothing to download")
    return 0


def _download(record: registry.Record, *, update: bool) -> None:
    """Fetches one checkpoint, and says where it is; with `update` also from where to where its pin moved."""
    before = pin_before(record.name, update)
    fetched = hub.fetch(
        record.repo, record.filename, revision=record.commit, sha256=record.sha256, pin=record.name, update=update
    )
    print(fit_to_print(f"{record.name}: {fetched.path}\n  sha256 {fetched.sha256}, verified by {fetched.verified}"))
    if not update or before is None:
        return
    if before.sha256 == fetched.sha256:
        print("  nothing newer")
    else:
        print(f"  the pin moved from commit {before.commit} to {fetched.commit}")
