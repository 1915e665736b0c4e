"""Ask the Hub for the commit and sha256 of every checkpoint that has none, and write them to pins.txt.

    make pin                                   # or: python examples/maintain/pin.py 'vit_base_*'

Nothing is downloaded: the Hub states the hash of each large file, and every download is compared with it. A pin never
changes, because a name means the same bytes for ever.
"""

import argparse
import hashlib
import os
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError

from vitlite.storage import write_text
from vitlite.zoo import registry
from vitlite.zoo.registry import Record


def ask_for_pin(record: Record) -> tuple[str, str]:
    """Return the commit and sha256 of a checkpoint's file as the Hub states them now."""
    if record.file:
        return "-", hashlib.sha256((registry.DATA / record.file).read_bytes()).hexdigest()
    url = hf_hub_url(record.repo, record.filename, endpoint=os.environ.get("HF_ENDPOINT"))
    stated = get_hf_file_metadata(url)
    if not re.fullmatch("[0-9a-f]{40}", stated.commit_hash or ""):
        raise ValueError(f"{url}: expected a commit, got {stated.commit_hash!r}")
    if not re.fullmatch("[0-9a-f]{64}", stated.etag or ""):
        raise ValueError(f"{url}: expected a sha256, got {stated.etag!r}")
    return str(stated.commit_hash), str(stated.etag)


class PinTable:
    """The comments at the head of pins.txt, and a line for each pinned checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: list[str] = []
        self.lines: dict[str, str] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("#"):
                self.head.append(line)
            else:
                self.lines[line.split()[0]] = line

    def add(self, name: str, commit: str, sha256: str) -> None:
        """Add a pin and write the file, in the order of the registry."""
        self.lines[name] = f"{name}  {commit}  {sha256}"
        pinned = [self.lines[name] for name in registry.RECORDS if name in self.lines]
        write_text(self.path, "\n".join([*self.head, *pinned]) + "\n")


def main() -> int:
    """Pin what is not pinned. Return 1 if a checkpoint could not be pinned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="*", help="the checkpoints to pin; all by default")
    parser.add_argument("--pins", type=Path, default=registry.DATA / "pins.txt", help="the file to fill in")
    args = parser.parse_args()

    pins = PinTable(args.pins)
    failed = 0
    for name, record in registry.RECORDS.items():
        if name in pins.lines or not fnmatchcase(name, args.pattern):
            continue
        try:
            commit, sha256 = ask_for_pin(record)
        except (HfHubHTTPError, OSError, ValueError) as error:
            failed += 1
            print(f"{name}: {error}", file=sys.stderr)
        else:
            pins.add(name, commit, sha256)  # at once: an interrupted run keeps what it has
            print(pins.lines[name])
    print(f"{len(pins.lines)} of {len(registry.RECORDS)} checkpoints are pinned; {failed} could not be.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
