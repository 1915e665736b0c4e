"""Pins the zoo: asks the Hub for the commit and sha256 of every checkpoint that has none, and writes pins.txt.

    make pin                                   # or: python examples/maintain/pin.py 'vit_base_*'

Nothing is downloaded: the Hub states the hash of each large file, and whoever downloads it first verifies it. A pin
that is there is never changed, because a name means the same bytes for ever.
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

from vitlite.weights import zoo
from vitlite.weights.zoo import Record


def pin(record: Record) -> tuple[str, str]:
    """The commit and sha256 of a checkpoint's file as they are now."""
    if record.file:
        return "-", hashlib.sha256((zoo.DATA / record.file).read_bytes()).hexdigest()
    url = hf_hub_url(record.repo, record.filename, endpoint=os.environ.get("HF_ENDPOINT"))
    stated = get_hf_file_metadata(url)
    if not re.fullmatch("[0-9a-f]{40}", stated.commit_hash or ""):
        raise ValueError(f"{url}: the Hub states no commit, but {stated.commit_hash!r}")
    if not re.fullmatch("[0-9a-f]{64}", stated.etag or ""):
        raise ValueError(f"{url}: the Hub states no sha256, but {stated.etag!r}")
    return str(stated.commit_hash), str(stated.etag)


def main() -> int:
    """Pins what is not pinned; 1 if something could not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="*", help="the checkpoints to pin; all by default")
    parser.add_argument("--pins", type=Path, default=zoo.DATA / "pins.txt", help="the file to fill in")
    args = parser.parse_args()

    lines = args.pins.read_text(encoding="utf-8").splitlines()
    pins = {line.split()[0]: line for line in lines if not line.startswith("#")}
    failed = 0
    for name, record in zoo.RECORDS.items():
        if name in pins or not fnmatchcase(name, args.pattern):
            continue
        try:
            commit, sha256 = pin(record)
        except (HfHubHTTPError, OSError, ValueError) as error:
            failed += 1
            print(f"{name}: {error}", file=sys.stderr)
            continue
        pins[name] = f"{name}  {commit}  {sha256}"
        text = [line for line in lines if line.startswith("#")] + [pins[name] for name in zoo.RECORDS if name in pins]
        new = args.pins.with_suffix(".new")
        new.write_text("\n".join(text) + "\n", encoding="utf-8")
        new.replace(args.pins)  # after each: an interrupted run keeps what it has
        print(pins[name])
    print(f"{len(pins)} of {len(zoo.RECORDS)} checkpoints are pinned; {failed} could not be.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
