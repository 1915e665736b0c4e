"""Names from outside lead nowhere but to the file that is meant."""

import doctest
import os
import re
from pathlib import Path
from typing import Any

import pytest
from fetching import FILE, OTHER, REPO, WEIGHTS, fetch
from server import Hub

import vitlite
from vitlite.errors import DownloadError, VitliteError
from vitlite.zoo import hub, registry, remote
from vitlite.zoo.pins import read_pin, write_pin
from vitlite.zoo.remote import RemoteFile, is_path, is_repo

ELSEWHERE = [
    "../../../evil",
    "a/../../../evil",
    "..",
    ".",
    "",
    "/etc/passwd",
    "a//b",
    "a/",
    "a\\b",
    "..\\evil",
    "%2e%2e%2fevil",
    "a%b",
    "a\nb",
    "a\x1b[31m",
    "a\0b",
    "a b",
    "a?b",
    "a#b",
    "a:b",
    "CON",
    "nul.safetensors",
    "a/com1/b",
    "a.",
    ".a",
    "a..b",
    "\u202egnp",
    "\ud800",
    "a" * 201,
    "a/" * 300 + "a",
    "a" * 1_000_000,
]
REPOS = [*ELSEWHERE, "name", "a/b/c", "a/b.git", "a--b/c", "a/-b", "a/b-", "../b", "a/..", "a" * 97 + "/b", "a/b@c"]


def is_untouched(server: Hub, cache: Path) -> bool:
    """Whether nothing was asked for, and nothing written."""
    return not server.log and not list(cache.parent.rglob("*"))


@pytest.mark.parametrize("name", ELSEWHERE, ids=range(len(ELSEWHERE)))
def test_revisions_and_files_lead_nowhere_else(server: Hub, tmp_path: Path, name: str) -> None:
    for call, words in (
        (lambda: hub.fetch(REPO, FILE, revision=name), "is no revision: a branch, a tag or a commit"),
        (lambda: hub.fetch_optional(REPO, name), "is no file of a repository: a path"),
    ):
        with pytest.raises(DownloadError, match=words) as error:
            call()
        assert len(str(error.value)) < 500
        assert str(error.value).isprintable()
    assert is_untouched(server, tmp_path / "cache")


@pytest.mark.parametrize("name", REPOS, ids=range(len(REPOS)))
def test_a_repository_is_owner_and_name(server: Hub, tmp_path: Path, name: str) -> None:
    with pytest.raises(DownloadError, match=r"is no repository of the Hub\. A repository id is owner/name") as error:
        hub.fetch(name, FILE)
    assert len(str(error.value)) < 500
    assert is_untouched(server, tmp_path / "cache")


def test_load_takes_no_revision_that_leads_elsewhere(server: Hub, tmp_path: Path) -> None:
    for revision in ("../../../evil", "a" * 1000, "a\\b", "%2e%2e"):
        with pytest.raises(DownloadError, match="is no revision"):
            vitlite.load(f"{REPO}@{revision}")
    assert is_untouched(server, tmp_path / "cache")


def test_names_that_are_used(server: Hub) -> None:
    for revision in ("main", "v1.0", "refs/pr/1", "feature/x_y-z", "a" * 40, "0123abc"):
        assert RemoteFile(REPO, FILE, revision).revision == revision
    for filename in (FILE, "model-00001-of-00002.safetensors", "model.safetensors.index.json", "unet/config.json"):
        assert is_path(filename)
    for record in registry.RECORDS.values():
        assert not record.repo or RemoteFile(record.repo, record.filename, record.commit or "main")
    assert is_repo("timm/vit_base_patch16_224.augreg2_in21k_ft_in1k")
    assert is_repo("a/b")
    assert not is_repo(None)


def test_a_sha256_is_one(server: Hub) -> None:
    with pytest.raises(DownloadError, match=r"'abc' is no sha256"):
        hub.fetch(REPO, FILE, sha256="abc")
    assert not server.log


def test_a_name_that_is_a_path_has_no_pin(server: Hub, tmp_path: Path) -> None:
    fetch()
    (tmp_path / "cache/outside.json").write_bytes((tmp_path / "cache/pins/vit.json").read_bytes())
    assert read_pin("vit") is not None
    assert read_pin("../outside") is None
    with pytest.raises(DownloadError, match=r"Cannot verify \.\./outside"):
        hub.verify("../outside")


TOKENS = ["hf_a\nX-Evil: 1", "hf_a\r\nX: 1", "hf_a b", "hf_\x07", "hf_é", "hf_" + "a" * 20_000, "a\tb"]


@pytest.mark.parametrize("token", TOKENS, ids=range(len(TOKENS)))
def test_a_token_is_no_header(server: Hub, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(DownloadError, match=r"Your token for the Hub has .* hf auth login") as error:
        fetch()
    assert "hf_" not in str(error.value)
    assert not server.log


def test_a_token_that_a_file_holds(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the line break that most editors leave."""
    monkeypatch.setenv("HF_TOKEN", " hf_good\n")
    server.token = "hf_good"
    server.private.add(REPO)
    assert fetch().path.read_bytes() == WEIGHTS
    assert server.log[0].headers["authorization"] == "Bearer hf_good"


ENDPOINTS = [
    "huggingface.co",
    "ftp://huggingface.co",
    "https://",
    "https://user:secret@huggingface.co",
    "https://hugging face.co",
    "https://huggingface.co/../x",
    "https://huggingface.co?x=1",
    "https://huggingface.co#x",
    "https://huggingface.co\\@evil.example",
    "https://huggingface.co\n",
    "https://h:99999999",
    "file:///etc",
    "https://é.example",
]


@pytest.mark.parametrize("address", ENDPOINTS)
def test_an_endpoint_is_an_address(server: Hub, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(DownloadError, match=r"HF_ENDPOINT is no address of a Hub: .*It is like https://") as error:
        fetch()
    assert "secret" not in str(error.value)
    assert str(error.value).isprintable()


def test_endpoints_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("http://localhost:8080", "https://hf-mirror.com/", "http://[::1]:80", "https://a_b.c/api/hf/x~y"):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert remote.endpoint() == address.rstrip("/")
    monkeypatch.setenv("HF_ENDPOINT", "")
    assert remote.endpoint() == "https://huggingface.co"
    file = RemoteFile(REPO, "a/b+c.json", "refs/pr/1")
    assert file.url == f"https://huggingface.co/{REPO}/resolve/refs%2Fpr%2F1/a/b%2Bc.json"


def test_a_pin_is_checked_like_any_name(server: Hub) -> None:
    found = fetch()
    pin = read_pin("vit")
    assert pin is not None
    write_pin("vit", pin._replace(filename="../../../../etc/passwd"))
    with pytest.raises(DownloadError, match=r"vit\.json: filename must be the path of a file in a repository, got"):
        fetch()
    with pytest.raises(DownloadError, match=r"vit\.json: filename must be the path of a file in a repository, got"):
        hub.verify("vit")
    assert found.path.read_bytes() == WEIGHTS != OTHER


@pytest.mark.parametrize("commit", ["../../../evil", "main", "A" * 40, "0" * 39, "0" * 40 + "\\n"])
def test_what_the_hub_states_leads_nowhere_else(server: Hub, tmp_path: Path, commit: str) -> None:
    server.fail.append((200, {"X-Repo-Commit": commit, "ETag": '"abc"', "Content-Length": "9"}))
    with pytest.raises(DownloadError, match="does not answer like a Hub"):
        fetch()
    assert not (tmp_path / "cache/hub").exists()


@pytest.mark.parametrize("etag", ["..", ".", "a/b", "../x", "a" * 300, "a\\b", "é", ""])
def test_nor_does_the_name_it_gives_the_bytes(server: Hub, tmp_path: Path, etag: str) -> None:
    server.fail.append((200, {"X-Repo-Commit": "0" * 40, "ETag": f'"{etag}"', "Content-Length": "9"}))
    with pytest.raises(DownloadError, match="does not answer like a Hub"):
        fetch()
    assert not (tmp_path / "cache/hub").exists()


def test_a_commit_noted_in_the_cache_leads_nowhere_else(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hub.fetch(REPO, FILE)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / FILE).write_bytes(OTHER)
    snapshots = found.path.parents[1]
    ref = snapshots.parent / "refs/main"
    ref.write_text(os.path.relpath(tmp_path / "evil", snapshots))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match=r"HF_HUB_OFFLINE is set.* It is not in the cache"):
        hub.fetch(REPO, FILE)


def test_examples() -> None:
    assert doctest.testmod(remote) == (0, 1)
    assert re.fullmatch(remote.COMMIT, "0" * 40)


@pytest.mark.parametrize("value", [5, b"x", ["a"], {}, "a" * 1_000_000, "\ud800", "a\x1b[31m"], ids=range(7))
def test_what_is_no_name_at_all(server: Hub, value: Any) -> None:
    """Whatever a program passes ends in words, and in few of them."""
    for call in (
        lambda: hub.fetch(value, FILE),
        lambda: hub.fetch(REPO, value),
        lambda: hub.fetch(REPO, FILE, revision=value),
        lambda: hub.fetch(REPO, FILE, sha256=value),
        lambda: hub.fetch(REPO, FILE, pin=value),
        lambda: hub.verify(value),
        lambda: registry.find(value),
    ):
        with pytest.raises(VitliteError) as error:
            call()
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 3000
    assert not server.log
    if not isinstance(value, str):
        with pytest.raises(VitliteError, match="A pattern is a text"):
            registry.list_models(value)
