"""An HTTP service that labels images: python examples/serve.py [MODEL] [--host ADDRESS] [--port PORT]

    curl --data-binary @photo.jpg http://127.0.0.1:8000/
    {"labels": [{"label": "cat", "index": 3, "score": 0.8128}, ...]}

MODEL is a name or a folder. Requests are decoded in threads of their own, and one thread runs the model on the images
that have arrived meanwhile. After SIGTERM, the service finishes the requests in progress, answers others with 503, and
exits with code 0.
"""

import argparse
import json
import logging
import queue
import signal
import sys
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

import vitlite
from vitlite.errors import ImageError
from vitlite.inference.predict import Prediction, labels_to_show

LARGEST = 20 << 20  # bytes of an image; larger ones get 413
REQUESTS = 64  # at a time; others get 429
BATCH = 16  # images that the model computes at a time, at most
SECONDS = 30  # that a client may take to send its image


class Service:
    """A model, the thread that runs it, and the images that wait for it."""

    def __init__(self, model: vitlite.ViT) -> None:
        self.model, self.best_labels = model, labels_to_show(model)
        self.slots = threading.Semaphore(REQUESTS)
        self.decoders = threading.Semaphore(torch.get_num_threads())
        self.waiting: queue.SimpleQueue[tuple[torch.Tensor, Future[list[Prediction]]]] = queue.SimpleQueue()
        self.stopping = False
        threading.Thread(target=self.run_model, daemon=True).start()

    def labels(self, image: bytes) -> list[dict[str, Any]]:
        """Return the labels that `vitlite classify` prints for an image."""
        with self.decoders:
            pixels = self.model.preprocess.pixels(image)
        answer: Future[list[Prediction]] = Future()
        self.waiting.put((pixels, answer))
        return [best.to_dict() | {"score": round(best.score, 4)} for best in answer.result()]

    def run_model(self) -> None:
        """Compute all images that wait, at most `BATCH` at a time, again and again."""
        while True:
            batch = [self.waiting.get()]
            while len(batch) < BATCH and not self.waiting.empty():
                batch.append(self.waiting.get())
            try:
                with torch.inference_mode():
                    predictions = self.best_labels(self.model.preprocess.batch([pixels for pixels, _ in batch]))
                for (_, answer), labels in zip(batch, predictions, strict=True):
                    answer.set_result(labels)
            except Exception as error:
                for _, answer in batch:
                    answer.set_exception(error)

    def stop(self) -> None:
        """Answer further requests with 503, and wait until the others are answered."""
        self.stopping = True
        for _ in range(REQUESTS):
            self.slots.acquire(timeout=SECONDS)


class Handler(BaseHTTPRequestHandler):
    """One connection. Each request gets JSON: {"labels": [...]} or {"error": "..."}."""

    protocol_version = "HTTP/1.1"  # several requests per connection
    disable_nagle_algorithm = True  # otherwise each answer may take 40 ms longer
    timeout = SECONDS
    service: Service

    def do_GET(self) -> None:
        """Answer GET /health with 200, or with 503 if the service is about to end."""
        if self.path != "/health":
            self.answer(404, {"error": "POST an image to /, or GET /health."})
        else:
            self.answer(503 if self.service.stopping else 200, {"stopping": self.service.stopping})

    def do_POST(self) -> None:
        """Answer POST / with labels, if there is a free slot."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True  # where the next request begins is unknown
            self.answer(411, {"error": "The request needs a Content-Length."})
        elif self.path != "/":
            self.refuse(404, "POST an image to /, or GET /health.")
        elif int(length) > LARGEST:
            self.refuse(413, f"The image has {length} bytes, but at most {LARGEST} are allowed.")
        elif self.service.stopping:
            self.refuse(503, "The service is about to end. Try again.")
        elif not self.service.slots.acquire(blocking=False):
            self.refuse(429, f"{REQUESTS} requests are in progress. Try again later.")
        else:
            try:
                image = self.rfile.read(int(length))
                if len(image) == int(length):  # otherwise the client is gone
                    self.answer(*self.label(image))
            finally:
                self.service.slots.release()

    def label(self, image: bytes) -> tuple[int, dict[str, Any]]:
        """Return the status and the content of the answer."""
        try:
            return 200, {"labels": self.service.labels(image)}
        except ImageError as error:
            return 400, {"error": str(error)}
        except Exception:
            logging.exception("cannot answer a request")
            return 500, {"error": "Internal error. The log of the service has the reason."}

    def refuse(self, code: int, reason: str) -> None:
        """Answer with an error and close the connection. What the client sends is read first, so that it can listen."""
        left = min(int(self.headers["Content-Length"]), 4 * LARGEST)
        while left and (part := self.rfile.read(min(left, 1 << 16))):
            left -= len(part)
        self.close_connection = True
        self.answer(code, {"error": reason})

    def answer(self, code: int, content: dict[str, Any]) -> None:
        """Send a status and JSON."""
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Log nothing for each request."""


class Server(ThreadingHTTPServer):
    """A server with a thread per connection."""

    request_queue_size = 128  # connections that wait to be accepted

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log one line for a connection that broke."""
        logging.warning("lost the connection to %s: %r", client_address[0], sys.exc_info()[1])


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description="Label images over HTTP.")
    parser.add_argument("model", nargs="?", default="vit_nano_4.cifar10", help="a name, or a folder")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 in a container; default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one; default: %(default)s")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threads = vitlite.set_threads()
    model = vitlite.load(args.model) if Path(args.model).exists() else vitlite.create(args.model)
    service = Handler.service = Service(vitlite.optimize(model))
    server = Server((args.host, args.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    logging.info("serving %s at http://%s:%d, threads: %d", args.model, *server.server_address[:2], threads)
    stop.wait()
    service.stop()
    server.shutdown()
    server.server_close()  # a client that connects now is refused at once
    logging.info("all requests are answered")


if __name__ == "__main__":
    main()
