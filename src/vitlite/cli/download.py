"""`vitlite download`: download weights before they are needed."""

from argparse import ArgumentParser, Namespace

from vitlite.errors import printable
from vitlite.zoo import download, registry


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite download`."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="names from `vitlite list`, or presets")
    parser.add_argument("--update", action="store_true", help="ask the Hub for a newer file, even if a file is cached")


def run(args: Namespace) -> int:
    """Download checkpoints so that they can be used without a network."""
    records = [registry.find(name) for name in args.names]  # an unknown name is an error before any download
    for record in dict.fromkeys(records):
        if record.repo:
            found = download.fetch(
                record.repo,
                record.filename,
                revision=record.commit,
                sha256=record.sha256,
                prefer_cache=not args.update,
            )
            text = f"{record.name}: {found.path}\n  sha256 {found.sha256}, verified by {found.verified}"
            print(printable(text))
        else:
            print(f"{record.name}: comes with vitlite, nothing to download")
    return 0
