"""`vitlite download`: download weights before they are needed."""

from argparse import ArgumentParser, Namespace

from vitlite.errors import printable
from vitlite.zoo import download, registry
from vitlite.zoo.text import text_record


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite download`."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="checkpoint from `vitlite list`, or preset")
    parser.add_argument("--update", action="store_true", help="ask the Hub for a newer file, even if one is cached")
    parser.add_argument("--text", action="store_true", help="also download the text half of CLIP or SigLIP")


def run(args: Namespace) -> int:
    """Download checkpoints for later use without a network."""
    records = [registry.find(name) for name in args.names]  # an unknown name is an error before any download
    texts = {record.name: text_record(record.name) for record in records if args.text}
    for record in dict.fromkeys(records):
        if record.repo:
            found = download.fetch(
                record.repo,
                record.filename,
                revision=record.commit,
                sha256=record.sha256,
                prefer_cache=not args.update,
            )
            _say(record.name, found)
        else:
            print(f"{record.name}: comes with vitlite, nothing to download")
    for name, text in texts.items():
        from vitlite.text.half import fetch_text_half  # here, because it imports torch

        for found in fetch_text_half(text, prefer_cache=not args.update):
            _say(f"{name}, text", found)
    return 0


def _say(name: str, found: download.Downloaded) -> None:
    print(printable(f"{name}: {found.path}\n  sha256 {found.sha256}, verified by {found.verified}"))
