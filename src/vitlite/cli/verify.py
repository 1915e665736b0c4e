"""`vitlite verify`: check weights for damage by hashing the files again."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from vitlite.cli.options import expanded
from vitlite.errors import DownloadError, VitliteError, printable
from vitlite.storage import hash_again
from vitlite.zoo import registry
from vitlite.zoo.download import find_cached, stated_hash


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite verify`."""
    parser.add_argument(
        "targets",
        type=expanded,
        nargs="*",
        metavar="NAME|PATH",
        help="checkpoint or file; default: all cached checkpoints",
    )


def run(args: Namespace) -> int:
    """Hash files again, and compare with the expected hashes. Return 1 if a file is damaged or missing, else 0."""
    targets = args.targets or [record.name for record in registry.RECORDS.values() if _file_of(record) is not None]
    failed = 0
    for target in targets:
        try:
            line = _verify(target)
        except VitliteError as error:
            failed = 1
            line = f"{target}: FAILED: {error}"
        print(printable(line))
    return failed


def _file_of(record: registry.Record) -> Path | None:
    if record.file:
        return registry.embedded(record.file)
    return find_cached(record.repo, record.filename, record.commit)


def _verify(target: str) -> str:
    """Hash a file again, and return a line for the report.

    Raises:
        DownloadError: The hash does not match, or the file does not exist.
    """
    expected = None
    path: Path | None = Path(target)
    if target in registry.NAMES:
        record = registry.find(target)
        path, expected = _file_of(record), record.sha256
    if path is None or not path.is_file():
        raise DownloadError(
            f"Cannot verify {target}: it is neither a file nor a checkpoint in the cache. Check the path, or download "
            "the checkpoint: vitlite download NAME."
        )
    verified = "record" if expected else "first use"
    stated = stated_hash(path)
    if expected is None and stated is not None and len(stated) == 64:
        expected, verified = stated, "hub"
    return f"{target}: good, sha256 {hash_again(path, expected)} ({verified}), {path}"
