"""A record of the zoo, a path, or a repository of the Hub -> weights on this disk, and what is known of their bytes."""

import re
from functools import partial
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from vitlite.checkpoints.metadata import BESIDE_WEIGHTS
from vitlite.checkpoints.reader import INDEX, PICKLES, WEIGHTS, exists, files_of, metadata_folder, path_of
from vitlite.errors import CheckpointError, DownloadError, closest, shown
from vitlite.zoo import download, registry
from vitlite.zoo.verify import Verified

REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(.+))?")


class Location(NamedTuple):
    """Weights on this disk."""

    path: Path
    metadata: Path | None = None  # the folder whose config.json speaks for them
    repo: str | None = None
    commit: str | None = None
    sha256: str | None = None
    verified: Verified | None = None


def locate_record(record: registry.Record) -> Location:
    """The file of a record: in the package, in the cache, or from the Hub.

    Raises:
        DownloadError: It cannot be fetched, or is not what it should be.
    """
    if record.file:
        return Location(registry.DATA / record.file, sha256=record.sha256, verified="record")
    got = download.fetch(record.repo, record.filename, revision=record.commit, sha256=record.sha256, prefer_cache=True)
    return Location(got.path, None, record.repo, got.commit, got.sha256, got.verified)


def locate(source: str | PathLike[str]) -> Location:
    """A path; or else a repository of the Hub, with what describes its weights.

    Raises:
        CheckpointError: It is neither.
        ConfigError: It is empty.
        DownloadError: The repository has no weights that can be read, or cannot be reached.
    """
    path = path_of(source)
    if exists(path):
        return Location(path, metadata_folder(path))
    prefix = re.match("hf[-_]hub:|local-dir:", str(source))
    if prefix is not None:
        raise CheckpointError(f"{prefix[0]} is timm's word.", python=f"Without it: {str(source)[prefix.end() :]!r}.")
    match = REPOSITORY.fullmatch(str(source))
    is_file_name = path.suffix in (".safetensors", ".npz", ".json", *PICKLES)
    if match is None or is_file_name or isinstance(source, PathLike):
        raise CheckpointError(
            f"There is no file or folder {shown(str(path))}, and it is no repository of the Hub (owner/name, "
            f"owner/name@revision).{closest(str(source), registry.NAMES)}"
        )
    return _fetch_repository(repo=match[1], revision=match[2])


def _fetch_repository(repo: str, revision: str | None) -> Location:
    fetch_first = partial(
        download.fetch_optional, repo, revision=revision, moves_branch=False
    )  # until all files are here
    weights = fetch_first(WEIGHTS) or fetch_first(INDEX)
    if weights is None:
        raise DownloadError(
            f"{repo} has no {WEIGHTS}, whole or in shards. A pickle (.bin, .pth) of it is loaded only by way of "
            "vitlite convert; fetch it yourself, if you trust it."
        )
    commit = weights.commit or revision  # all files of one commit
    for name in BESIDE_WEIGHTS:
        download.fetch_optional(repo, name, revision=commit)
    sha256: str | None = weights.sha256
    verified = weights.verified
    if weights.path.name == INDEX:
        sha256, verified = None, _fetch_shards(repo, commit, weights)  # each shard was compared with a hash of its own
    if weights.commit is not None:
        download.move_branch(repo, revision, weights.commit)
    return Location(weights.path, weights.path.parent, repo, weights.commit, sha256, verified)


def _fetch_shards(repo: str, commit: str | None, index: download.Downloaded) -> Verified:
    """Fetches what an index names; who vouches for the least vouched of it, the index included."""
    _, shards = files_of(index.path)
    fetched = [index]
    for shard in shards:
        fetched.append(download.fetch(repo, shard.name, revision=commit))
    return "hub" if all(file.verified == "hub" for file in fetched) else "first use"
