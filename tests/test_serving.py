"""examples/serve.py is a service that answers, refuses and ends as it should."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import vitlite
from vitlite.cli.main import main

ROOT = Path(__file__).parents[1]
PHOTO = (ROOT / "examples" / "photos" / "chelsea.png").read_bytes()


class Service:
    """The service in a process of its own."""

    def __init__(self, *words: str, **options: Any) -> None:
        line = [sys.executable, str(ROOT / "examples" / "serve.py"), *words, "--port", "0"]
        self.process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, **options)
        assert self.process.stderr
        self.line = self.process.stderr.readline()
        self.port = int(self.line.split(", ")[0].rpartition(":")[2])

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
        with closing(self.connect()) as connection:
            connection.request(method, path, body)
            return answer_of(connection.getresponse())


def answer_of(response: HTTPResponse) -> tuple[int, dict[str, Any]]:
    return response.status, json.loads(response.read())


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    cache = str(tmp_path_factory.mktemp("cache"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "VITLITE_CACHE": cache}
    service = Service(env=environment)
    yield service
    service.process.kill()
    service.process.communicate()


def test_service_answers_and_refuses(service: Service) -> None:
    code, content = service.ask("POST", "/", PHOTO)
    assert code == 200
    assert len(content["labels"]) == 5
    assert content["labels"][0] == {"label": "cat", "index": 3, "score": pytest.approx(0.8128, abs=2e-4)}
    assert service.ask("GET", "/health") == (200, {"stopping": False})
    reason = "Cannot read the 99 bytes as an image: image file is truncated"
    assert service.ask("POST", "/", PHOTO[:99]) == (400, {"error": reason})
    large = bytes((20 << 20) + 1)
    assert service.ask("POST", "/", large)[1]["error"].startswith("The image has 20971521 bytes, but at most 20971520")
    assert service.ask("POST", "/", large)[0] == 413
    assert service.ask("POST", "/labels", PHOTO)[0] == service.ask("GET", "/")[0] == 404
    with closing(service.connect()) as connection:
        connection.request("POST", "/", headers={"Transfer-Encoding": "chunked"})
        assert answer_of(connection.getresponse())[0] == 411
    with closing(service.connect()) as connection:
        for body in (PHOTO, b"", PHOTO):  # one connection for several requests
            connection.request("POST", "/", body)
            assert answer_of(connection.getresponse())[0] == (200 if body else 400)


def end(client: socket.socket) -> int:
    """Read the whole answer, close the connection and return the status."""
    response = HTTPResponse(client)
    response.begin()
    code, _ = answer_of(response)
    client.close()
    return code


def begin(service: Service) -> socket.socket:
    """Begin a request without sending the whole image."""
    client = socket.create_connection(("127.0.0.1", service.port), timeout=60)
    client.sendall(f"POST / HTTP/1.1\r\nContent-Length: {len(PHOTO)}\r\n\r\n".encode() + PHOTO[:1000])
    return client


def test_full_service_answers_429(service: Service) -> None:
    clients = [begin(service) for _ in range(64)]
    deadline = time.monotonic() + 60
    while (found := service.ask("POST", "/", PHOTO))[0] == 200 and time.monotonic() < deadline:
        time.sleep(0.1)  # until the service has seen all of them
    assert found == (429, {"error": "64 requests are in progress. Try again later."})
    assert service.ask("GET", "/health")[0] == 200
    for client in clients:
        client.sendall(PHOTO[1000:])
    assert {end(client) for client in clients} == {200}
    assert service.ask("POST", "/", PHOTO)[0] == 200


@pytest.mark.parametrize("kind", ["one label", "several labels", "thresholds"])
def test_labels_are_those_of_classify(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_from_file_location("serve", ROOT / "examples" / "serve.py")
    assert spec
    assert spec.loader
    serve = module_from_spec(spec)
    spec.loader.exec_module(serve)
    model = vitlite.create("vit_nano_4.cifar10")
    if kind != "one label":
        model.scores = "sigmoid"
    if kind == "thresholds":
        best = model.predict(PHOTO, top=10)
        model.thresholds = [1.0 if each in best[:3] else 0.0 for each in sorted(best, key=lambda each: each.index)]
    model.save(tmp_path / "model")
    photo = str(ROOT / "examples" / "photos" / "chelsea.png")
    main(["classify", photo, "--model", str(tmp_path / "model"), "--format", "jsonl"])
    expected = json.loads(capsys.readouterr().out)["predictions"]
    assert len(expected) == (7 if kind == "thresholds" else 5)
    assert serve.Service(model).labels(PHOTO) == [
        row | {"score": pytest.approx(row["score"], abs=1e-4)} for row in expected
    ]


def test_concurrent_clients_get_their_own_answers(service: Service) -> None:
    photos = {name: (ROOT / "examples" / "photos" / name).read_bytes() for name in ("chelsea.png", "coffee.png")}
    alone = {name: service.ask("POST", "/", photo)[1]["labels"][0]["index"] for name, photo in photos.items()}
    assert len(set(alone.values())) == 2
    wrong = []

    def client(name: str) -> None:
        for _ in range(5):
            code, content = service.ask("POST", "/", photos[name])
            if code != 200 or content["labels"][0]["index"] != alone[name]:
                wrong.append((code, content))

    threads = [threading.Thread(target=client, args=(name,)) for name in list(photos) * 8]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_service_answers_what_it_has_begun_before_it_ends(service: Service) -> None:
    """This test is the last one, because it ends the service."""
    client = begin(service)
    idle = service.connect()
    idle.request("GET", "/health")
    assert answer_of(idle.getresponse())[0] == 200
    time.sleep(0.5)
    service.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    idle.request("POST", "/", PHOTO)
    assert answer_of(idle.getresponse())[0] == 503
    assert service.ask("GET", "/health") == (503, {"stopping": True})  # in a new connection
    assert service.ask("POST", "/", PHOTO)[0] == 503
    assert service.process.poll() is None
    client.sendall(PHOTO[1000:])
    assert end(client) == 200
    idle.close()
    _, log = service.process.communicate(timeout=60)
    assert service.process.returncode == 0
    assert log.endswith("all requests are answered\n")
