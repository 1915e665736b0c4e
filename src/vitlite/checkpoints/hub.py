"""Download weights and their config files from the Hugging Face Hub into the Hub's cache."""

import re
from functools import partial

from vitlite.checkpoints.metadata import BESIDE_WEIGHTS
from vitlite.checkpoints.reader import INDEX, WEIGHTS, Location, files_of
from vitlite.errors import DownloadError
from vitlite.storage import Verified
from vitlite.zoo import download, registry

REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(.+))?")


def fetch_record(record: registry.Record) -> Location:
    """Return the location of a zoo checkpoint on the local disk, after downloading it if needed.

    Raises:
        DownloadError: The weights cannot be downloaded, or their hash differs from the hash in the record.
    """
    if record.file:
        return Location(registry.embedded(record.file), sha256=record.sha256, verified="record")
    got = download.fetch(record.repo, record.filename, revision=record.commit, sha256=record.sha256, prefer_cache=True)
    # Without metadata: the record describes the weights, not the config.json of the repository.
    return Location(got.path, repo=record.repo, commit=got.commit, sha256=got.sha256, verified=got.verified)


def fetch_repository(source: str) -> Location | None:
    """Download the weights in a Hub repository, and return their location on the local disk.

    Return None if `source` is neither of the form "owner/name" nor "owner/name@revision".

    Raises:
        DownloadError: The repository has no weights that vitlite can read, or cannot be reached.
    """
    match = REPOSITORY.fullmatch(source)
    if match is None:
        return None
    repo, revision = match[1], match[2]
    fetch_first = partial(download.fetch_optional, repo, revision=revision, moves_branch=False)  # all files first
    weights = fetch_first(WEIGHTS) or fetch_first(INDEX)
    if weights is None:
        raise DownloadError(
            f"The repository {repo} has no {WEIGHTS} and no {INDEX}. If it contains a pickle (.bin, .pth), download "
            "the pickle and convert it: vitlite convert FILE OUT.safetensors --to timm"
        )
    commit = weights.commit or revision  # all files of one commit
    for name in BESIDE_WEIGHTS:
        download.fetch_optional(repo, name, revision=commit)
    sha256: str | None = weights.sha256
    verified = weights.verified
    if weights.path.name == INDEX:
        sha256, verified = None, _fetch_shards(repo, commit, weights)  # each shard has a hash
    if weights.commit is not None:
        download.move_branch(repo, revision, weights.commit)
    return Location(weights.path, weights.path.parent, repo, weights.commit, sha256, verified)


def _fetch_shards(repo: str, commit: str | None, index: download.Downloaded) -> Verified:
    """Download the shards that an index lists. Return "hub" if the Hub gave a hash for every file, else "first use"."""
    _, shards = files_of(index.path)
    fetched = [index]
    for shard in shards:
        fetched.append(download.fetch(repo, shard.name, revision=commit))
    return "hub" if all(file.verified == "hub" for file in fetched) else "first use"
