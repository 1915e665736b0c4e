"""A Hub on localhost for the real huggingface_hub, with a log of every request and faults on demand.

Run as a program it serves a folder: `python tests/server.py FOLDER`, with FOLDER/owner/name/files.
"""

import hashlib
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".npz", ".bin", ".pth")  # kept as LFS: their hash is a sha256, their bytes on the CDN


@cache
def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0  # bytes of a file's content


class Answer(NamedTuple):
    """An answer instead of the file. A body of several pieces is sent one by one, then the connection is cut."""

    status: int
    headers: dict[str, str]
    body: bytes | Iterable[bytes] = b""


@dataclass
class Hub:
    """Use as a context manager. `publish` makes a commit; the faults are attributes that can be set at any time."""

    fail: deque[tuple[int, dict[str, str]]] = field(default_factory=deque)  # answers to give instead: status, headers
    cut: deque[int] = field(default_factory=deque)  # drop the connection of the next content answers after n bytes
    wrong: int = 0  # content answers with wrong bytes of the right size
    instead: Callable[[Request], Answer | None] = lambda request: None  # another answer
    speed: float = 0  # bytes per second; 0: as fast as it goes
    ranges: bool = True
    gated: dict[str, set[str]] = field(default_factory=dict)  # repositories, and the tokens that may read them
    repos: dict[str, dict[str, Any]] = field(default_factory=dict)
    log: list[Request] = field(default_factory=list)

    def __enter__(self) -> "Hub":
        hub = self

        class Bound(_Handler):
            pass

        Bound.hub = hub
        self._server = _Server(("127.0.0.1", 0), Bound)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def publish(self, repo: str, branch: str = "main", **files: bytes) -> str:
        """Make a commit with these files and return its hash. In `config_json=b"..."` the last underscore is a dot."""
        named = {".".join(name.rsplit("_", 1)): content for name, content in files.items()}
        entry = self.repos.setdefault(repo, {"commits": {}, "branches": {}})
        text = repo + repr(sorted((name, sha256_of(content)) for name, content in named.items()))
        commit = hashlib.sha1(text.encode()).hexdigest()
        entry["commits"][commit] = named
        entry["branches"][branch] = commit
        return commit

    def count(self, method: str, path: str = "") -> int:
        return sum(request.method == method and path in request.path for request in self.log)

    @property
    def sent(self) -> int:
        """The number of bytes of files sent so far."""
        return sum(request.sent for request in self.log)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """Ignore killed clients, which some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        self.request_log = Request(self.command, path, {k.lower(): v for k, v in self.headers.items()})
        hub.log.append(self.request_log)
        if path == "/api/agent-harnesses":
            return self._reply(200, b'{"standardEnvVars": [], "harnesses": {}}')
        if hub.fail:
            status, headers = hub.fail.popleft()
            return self._reply(status, b"", headers)
        answer = hub.instead(self.request_log)
        if answer is not None:
            return self._reply(answer.status, answer.body, answer.headers)
        if path.startswith("/cdn/"):
            return self._content(path.split("/")[2])
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        entry = hub.repos.get(repo)
        if entry is None:
            return self._refuse(401, "RepoNotFound", "Repository not found")
        if token not in hub.gated.get(repo, {token}):
            return self._refuse(403 if token else 401, "GatedRepo", f"Access to model {repo} is restricted.")
        revision = (parts[5:6] or ["main"])[0] if is_api else parts[3]
        commit = entry["branches"].get(revision, revision)
        files = entry["commits"].get(commit)
        if files is None:
            return self._refuse(404, "RevisionNotFound", "Revision not found")
        if is_api:
            content = _tree(files) if parts[4:5] == ["tree"] else _model_info(repo, commit, files)
            return self._reply(200, content)
        return self._resolve(commit, files, "/".join(parts[4:]))

    def _resolve(self, commit: str, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        content = files[name]
        if not name.endswith(LARGE):
            return self._send(content, {"ETag": f'"{git_hash(content)}"', "X-Repo-Commit": commit})
        sha256 = sha256_of(content)
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{sha256}"',
            "X-Linked-Size": str(len(content)),
            "Location": f"http://localhost:{self.hub.port}/cdn/{sha256}",  # another host, which must not get the token
        }
        return self._reply(302, b"", headers)

    def _content(self, sha256: str) -> None:
        for entry in self.hub.repos.values():
            for files in entry["commits"].values():
                for content in files.values():
                    if sha256_of(content) == sha256:
                        return self._send(content, {"ETag": '"of the cdn"'})
        return self._refuse(404, "", "")

    def _send(self, content: bytes, headers: dict[str, str]) -> None:
        hub, status = self.hub, 200
        if hub.wrong and self.command == "GET":
            hub.wrong -= 1
            content = bytes(255 - byte for byte in content)
        asked = self.headers.get("range")
        if asked and hub.ranges:
            first, last = (int(number) if number else len(content) - 1 for number in asked[6:].split("-"))
            headers = {**headers, "Content-Range": f"bytes {first}-{last}/{len(content)}"}
            status, content = 206, content[first : last + 1]
        self._reply(status, content, {**headers, "Accept-Ranges": "bytes"})

    def _refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        self._reply(status, b"", {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})})

    def _reply(self, status: int, content: bytes | Iterable[bytes], headers: dict[str, str] | None = None) -> None:
        hub = self.hub
        self.request_log.status = status
        self.send_response(status)
        length = {"Content-Length": str(len(content))} if isinstance(content, bytes) else {"Connection": "close"}
        for name, value in {**length, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if not isinstance(content, bytes):
            self.close_connection = True
            for piece in content:
                self.wfile.write(piece)
                self.request_log.sent += len(piece)
            return
        cut = hub.cut.popleft() if hub.cut and status in (200, 206) else None
        step = min(max(int(hub.speed / 10), 1), 1 << 16) if hub.speed else 1 << 16
        for start in range(0, len(content) if cut is None else min(cut, len(content)), step):
            piece = content[start : min(start + step, cut or len(content))]
            self.wfile.write(piece)
            self.request_log.sent += len(piece)
            if hub.speed:
                time.sleep(len(piece) / hub.speed)
        if cut is not None:
            self.close_connection = True


def _model_info(repo: str, commit: str, files: dict[str, bytes]) -> bytes:
    siblings: list[dict[str, Any]] = []
    for name, content in files.items():
        sibling: dict[str, Any] = {"rfilename": name, "size": len(content)}
        if name.endswith(LARGE):
            sibling["lfs"] = {"sha256": sha256_of(content), "size": len(content), "pointerSize": 134}
        siblings.append(sibling)
    info = {"_id": "0", "id": repo, "modelId": repo, "sha": commit, "private": False, "tags": [], "siblings": siblings}
    return json.dumps({**info, "downloads": 0, "likes": 0}).encode()


def _tree(files: dict[str, bytes]) -> bytes:
    entries = []
    for name, content in files.items():
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
        if name.endswith(LARGE):
            entry["lfs"] = {"oid": sha256_of(content), "size": len(content), "pointerSize": 134}
        entries.append(entry)
    return json.dumps(entries).encode()


if __name__ == "__main__":
    with Hub() as served:
        for folder in sorted(path for path in Path(sys.argv[1]).glob("*/*") if path.is_dir()):
            contents = {"_".join(file.name.rsplit(".", 1)): file.read_bytes() for file in folder.iterdir()}
            served.publish("/".join(folder.parts[-2:]), **contents)
        print(f"HF_ENDPOINT={served.url}", flush=True)
        threading.Event().wait()
