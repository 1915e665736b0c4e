"""Find the weights of a record, a path or a repository of the Hub on this disk, and download them if needed."""

import os
import re
from functools import partial
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from vitlite.checkpoints.metadata import BESIDE_WEIGHTS
from vitlite.checkpoints.reader import INDEX, PICKLES, READABLE, WEIGHTS, files_of, metadata_folder, path_of
from vitlite.errors import CheckpointError, DownloadError, closest
from vitlite.storage import Verified
from vitlite.zoo import download, registry

REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(.+))?")


class Location(NamedTuple):
    """Weights on this disk."""

    path: Path
    metadata: Path | None = None  # the folder whose config.json describes them
    repo: str | None = None
    commit: str | None = None
    sha256: str | None = None
    verified: Verified | None = None


def locate_record(record: registry.Record) -> Location:
    """Return the weights of a record: in the package, in the cache, or from the Hub.

    Raises:
        DownloadError: They cannot be downloaded, or have another hash than the record.
    """
    if record.file:
        return Location(registry.DATA / record.file, sha256=record.sha256, verified="record")
    got = download.fetch(record.repo, record.filename, revision=record.commit, sha256=record.sha256, prefer_cache=True)
    return Location(got.path, None, record.repo, got.commit, got.sha256, got.verified)


def locate(source: str | PathLike[str]) -> Location:
    """Return where weights are on this disk. A path that exists comes first, then a repository of the Hub.

    Args:
        source: A path, "owner/name" or "owner/name@revision".

    Raises:
        CheckpointError: There is no such file or folder, and it is not the name of a repository.
        ConfigError: It is empty.
        DownloadError: The repository has no weights that vitlite reads, or cannot be reached.
    """
    path = path_of(source)
    if os.path.lexists(path):  # also a broken link: a repository of the same name would be another model
        return Location(path, metadata_folder(path))
    match = REPOSITORY.fullmatch(str(source))
    if match is None or path.suffix in (*READABLE, *PICKLES, ".json") or isinstance(source, PathLike):
        raise CheckpointError(
            f"There is no file or folder {path}, and it is not a repository of the Hub (owner/name or "
            f"owner/name@revision).{closest(str(source), registry.NAMES)}"
        )
    return _fetch_repository(repo=match[1], revision=match[2])


def _fetch_repository(repo: str, revision: str | None) -> Location:
    fetch_first = partial(download.fetch_optional, repo, revision=revision, moves_branch=False)  # all files first
    weights = fetch_first(WEIGHTS) or fetch_first(INDEX)
    if weights is None:
        raise DownloadError(
            f"{repo} has no {WEIGHTS}, whole or in shards. If it has a pickle (.bin, .pth), download and convert it: "
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
    """Download the shards of an index, and return the weakest way in which one of the files was verified."""
    _, shards = files_of(index.path)
    fetched = [index]
    for shard in shards:
        fetched.append(download.fetch(repo, shard.name, revision=commit))
    return "hub" if all(file.verified == "hub" for file in fetched) else "first use"
