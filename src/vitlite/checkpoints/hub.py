"""Download weights and their config files from the Hub into its cache."""

import re
from functools import partial

from vitlite.checkpoints.metadata import BESIDE_WEIGHTS
from vitlite.checkpoints.reader import INDEX, WEIGHTS, Location, files_of
from vitlite.errors import DownloadError
from vitlite.storage import Verified
from vitlite.zoo import download, registry

REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(.+))?")


def fetch_record(record: registry.Record) -> Location:
    """Return the weights of a checkpoint of the zoo. They come from the package, from the cache or from the Hub.

    Raises:
        DownloadError: The weights cannot be downloaded, or have a different hash than in the record.
    """
    if record.file:
        return Location(registry.embedded(record.file), sha256=record.sha256, verified="record")
    got = download.fetch(record.repo, record.filename, revision=record.commit, sha256=record.sha256, prefer_cache=True)
    # Without metadata: the record describes the weights, not the config.json of the repository.
    return Location(got.path, repo=record.repo, commit=got.commit, sha256=got.sha256, verified=got.verified)


def fetch_repository(source: str) -> Location | None:
    """Return the weights of a repository "owner/name" or "owner/name@revision". For any other `source`, return None.

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
            f"{repo} has no {WEIGHTS} and no {INDEX}. If there is a pickle (.bin, .pth), download and convert it: "
            "vitlite convert FILE OUT.safetensors --to timm"
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
    """Download the shards that an index lists. Return the weakest verification of all files."""
    _, shards = files_of(index.path)
    fetched = [index]
    for shard in shards:
        fetched.append(download.fetch(repo, shard.name, revision=commit))
    return "hub" if all(file.verified == "hub" for file in fetched) else "first use"
