"""What is asked of the Hub: names from outside, checked before a path, a URL or a header is made of them.

Every file that is fetched is a `RemoteFile`, and none can be made of names that lead elsewhere.
"""

import os
import re
from dataclasses import dataclass, replace

from vitlite.errors import DownloadError, shown

COMMIT = re.compile("[0-9a-f]{40}")
SHA256 = re.compile("[0-9a-f]{64}")
LONGEST_NAME = 200  # letters between two slashes; file systems take 255 bytes, and we add endings
LONGEST_PATH = 400

# What the Hub allows in the names of users and repositories, which become one folder: "--" divides them there.
_REPO = re.compile(r"\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?", re.ASCII)
_PART = re.compile(r"\w(?:[\w.+=@-]*[\w+=@-])?", re.ASCII)  # of a file's name or a revision's, between slashes
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?", re.IGNORECASE)  # Windows opens a device
_ENDPOINT = re.compile(r"https?://(?:[\w.-]+|\[[\da-f:.]+\])(?::\d{1,5})?(?:/[\w.~-]+)*", re.ASCII | re.IGNORECASE)
_TOKEN = re.compile(r"[!-~]{1,10000}")


def is_hash(etag: str) -> bool:
    """Whether an ETag tells bytes apart: a sha256, of a large file, or git's own hash, of a small one."""
    return bool(SHA256.fullmatch(etag) or COMMIT.fullmatch(etag))


def is_repo(name: object) -> bool:
    """Whether this is the name of a repository, "owner/name"."""
    if not isinstance(name, str) or not _REPO.fullmatch(name):
        return False
    return "--" not in name and ".." not in name and not name.endswith(".git")


def is_path(name: object) -> bool:
    """Whether this is the name of a file in a repository, or of a revision: parts that lead nowhere but down."""
    if not isinstance(name, str) or len(name) > LONGEST_PATH:
        return False
    return all(_is_part(part) for part in name.split("/"))


def _is_part(part: str) -> bool:
    if not _PART.fullmatch(part) or len(part) > LONGEST_NAME or ".." in part:
        return False
    return not _RESERVED.fullmatch(part)


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository on the Hub, at a branch, tag or commit.

    >>> print(RemoteFile("timm/vit", "model.safetensors", "main"))
    model.safetensors of timm/vit@main
    """

    repo: str
    filename: str
    revision: str

    def __post_init__(self) -> None:
        parts = "of letters, digits and ._+=@-, with / between its parts"
        if not is_repo(self.repo):
            raise DownloadError(
                f"{shown(repr(self.repo))} is no repository of the Hub.",
                python="A repository id is owner/name, in letters, digits and ._-",
            )
        if not is_path(self.filename):
            raise DownloadError(f"{shown(repr(self.filename))} is no file of a repository: a path {parts}.")
        if not is_path(self.revision):
            raise DownloadError(
                f"{shown(repr(self.revision))} is no revision: a branch, a tag or a commit {parts}.",
                python="The full hash of a commit always works.",
            )

    def __str__(self) -> str:
        return f"{self.filename} of {self.repo}@{self.revision}"

    @property
    def url(self) -> str:
        """Where it can be downloaded, by hand too."""
        from urllib.parse import quote

        return f"{endpoint()}/{self.repo}/resolve/{quote(self.revision, safe='')}/{quote(self.filename)}"

    @property
    def is_at_commit(self) -> bool:
        """Whether the revision is a commit, whose files never change."""
        return COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str) -> "RemoteFile":
        """The same file at another revision."""
        return replace(self, revision=revision)


class AbsentError(DownloadError):
    """The Hub says that the repository has no such file; of which commit, where it says that too."""

    def __init__(self, file: RemoteFile, commit: str | None = None) -> None:
        super().__init__(
            f"{file.repo}@{file.revision} has no file {file.filename}.", python="Its page lists those it has."
        )
        self.commit = commit


def endpoint() -> str:
    """The Hub's address, as the environment says now.

    Raises:
        DownloadError: HF_ENDPOINT is no address.
    """
    address = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not _ENDPOINT.fullmatch(address) or "/.." in address:
        without_password = address.rpartition("@")[2]
        raise DownloadError(
            f"HF_ENDPOINT is no address of a Hub: {shown(repr(without_password))}.",
            python="It is like https://huggingface.co or http://localhost:8080/mirror, without a user or password; "
            "those are for HF_TOKEN.",
        )
    return address


def checked_token(token: str | None) -> str | None:
    """The user's token, fit to go into a header.

    Raises:
        DownloadError: It has characters that no token has. The text does not repeat it.
    """
    given = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    for candidate in (given.strip(), token):
        if candidate and not _TOKEN.fullmatch(candidate):
            raise DownloadError(
                "Your token for the Hub has spaces, line breaks or other characters that no token has, or is longer "
                "than any.",
                python="Set HF_TOKEN to the token alone, or log in again: hf auth login.",
            )
    return token
