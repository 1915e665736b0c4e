"""Latency and throughput of examples/serve.py, beside the model alone and LitServe with timm.

    python benchmarks/serving.py [MODEL] [--clients 1,8,32] [--seconds 3] [--rounds 10]
    python benchmarks/serving.py --clients 32 --seconds 300 --rounds 1

The clients run in a process of their own on the same cores, and send JPEGs of 500 x 375 pixels without a pause. The
model alone decodes and computes the same images in one process, in batches of 16, as the services do. All are measured
in turns. The CPU time is that of all processes of a service. It limits the throughput when all cores are busy, and
changes less than images/s if other programs use the machine. "of the model alone" compares it. LitServe and timm take
part if they are installed. Weights are random.
"""

import argparse
import base64
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from importlib.util import find_spec
from itertools import count, cycle, product, takewhile
from pathlib import Path
from socket import socket
from statistics import median

import torch
from PIL import Image

import vitlite
from vitlite.cli.options import positives
from vitlite.fast.measure import machine
from vitlite.images import TransformConfig
from vitlite.inference.predict import classify

ROOT = Path(__file__).parents[1]
PHOTOS = sorted((ROOT / "examples" / "photos").glob("*.[jp][pn]g"))
BATCH = 16  # of examples/serve.py
SHORT = 10  # seconds at most for the model alone, and until a service is warm
TIMM = {"vit_tiny_16": "vit_tiny_patch16_224", "vit_base_16": "vit_base_patch16_224"}


def jpegs() -> list[bytes]:
    """Return photos of ImageNet's usual size."""
    found = []
    for path in PHOTOS:
        with Image.open(path) as photo, io.BytesIO() as file:
            photo.convert("RGB").resize((500, 375)).save(file, "JPEG", quality=90)
            found.append(file.getvalue())
    return found


def save_model(name: str, folder: Path) -> None:
    """Save a preset with random weights and the preprocessing of ImageNet's models."""
    model = vitlite.create(name, weights=None)
    half = (0.5, 0.5, 0.5)
    model.preprocess = TransformConfig(
        size=(224, 224), resize=(248, 248), mode="center", interpolation="bicubic", mean=half, std=half
    )
    torch.nn.init.normal_(model.head.weight, std=0.02)
    model.labels = [f"class {i}" for i in range(model.config.num_classes)]
    model.save(folder)


def free_port() -> int:
    """Return a port that is free now."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(port: int) -> None:
    """Wait until a service answers GET /health."""
    for _ in range(600):
        with suppress(OSError), closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"the service on port {port} does not start")


def drive(port: int, path: str, bodies: list[bytes], clients: int, seconds: float) -> tuple[list[float], int, float]:
    """Let clients send requests without a pause. Return the latencies, the number of errors, and the seconds."""
    latencies: list[float] = []
    errors: list[object] = []
    start = time.perf_counter()

    def client(first: int) -> None:
        with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
            for i in count(first):
                begun = time.perf_counter()
                if begun - start > seconds:
                    return
                try:
                    connection.request("POST", path, bodies[i % len(bodies)], {"Content-Type": "application/json"})
                    response = connection.getresponse()
                    response.read()
                    if response.status != 200:
                        errors.append(response.status)
                except OSError as error:
                    errors.append(error)
                    connection.close()
                latencies.append(time.perf_counter() - begun)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies, len(errors), time.perf_counter() - start


def cpu_seconds(session: int) -> float:
    """Return the CPU time of all processes of a session, from /proc."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            values = file.read_text().rpartition(")")[2].split()
            if int(values[3]) == session:
                ticks += int(values[11]) + int(values[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass
class Result:
    """The measurements of a service, or of the model alone, with a number of clients."""

    latencies: list[float] = field(default_factory=list)  # of all requests
    rates: list[float] = field(default_factory=list)  # images per second, of each round
    cpu: list[float] = field(default_factory=list)  # seconds of an image, of each round
    errors: int = 0

    def row(self, name: str, clients: int, alone: "Result") -> str:
        """Return a row of the table."""
        found = sorted(self.latencies)
        p50, p99 = (f"{1000 * found[int(x * (len(found) - 1))]:.0f}" if found else "" for x in (0.5, 0.99))
        ratio = median(b / a for a, b in zip(self.cpu, alone.cpu, strict=True))
        speed = f"{median(self.rates):.1f} | {1000 * median(self.cpu):.1f} | {ratio:.2f}"
        counts = f"{len(found)} | {self.errors}" if found else " | "
        return f"| {name} | {clients or ''} | {p50} | {p99} | {speed} | {counts} |"


def run_alone(model: vitlite.ViT, images: list[bytes], seconds: float, result: Result) -> None:
    """Run a model on images without a service."""
    start, cpu = time.perf_counter(), time.process_time()
    stream = takewhile(lambda _: time.perf_counter() - start < seconds, cycle(images))
    done = sum(1 for _ in classify(model, stream, batch=BATCH))
    result.rates.append(done / (time.perf_counter() - start))
    result.cpu.append((time.process_time() - cpu) / done)


class Service:
    """A service in processes of its own."""

    def __init__(self, words: list[str], path: str, bodies: list[bytes]) -> None:
        self.port, self.path, self.bodies = free_port(), path, bodies
        self.process = subprocess.Popen([sys.executable, *words, str(self.port)], start_new_session=True)

    def run(self, clients: int, seconds: float, result: Result) -> None:
        """Let clients use the service."""
        cpu = cpu_seconds(self.process.pid)
        found, failed, seconds = drive(self.port, self.path, self.bodies, clients, seconds)
        result.latencies += found
        result.errors += failed
        result.rates.append(len(found) / seconds)
        result.cpu.append((cpu_seconds(self.process.pid) - cpu) / len(found))

    def stop(self) -> None:
        """End the service and all processes that it started. LitServe waits for its own processes for ever."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main() -> None:
    """Measure in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="vit_tiny_16", choices=TIMM)
    parser.add_argument("--clients", type=positives, default="1,8,32")
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    images = jpegs()
    encoded = [json.dumps({"image": base64.b64encode(image).decode()}).encode() for image in images]
    results: dict[tuple[str, int], Result] = defaultdict(Result)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_model(args.model, Path(folder) / "model")
        model = vitlite.optimize(vitlite.load(Path(folder) / "model"))
        services = {"serve.py": Service([str(ROOT / "examples/serve.py"), f"{folder}/model", "--port"], "/", images)}
        stack.callback(services["serve.py"].stop)
        if find_spec("litserve") and find_spec("timm"):
            words = [str(ROOT / "benchmarks/litserve_timm.py"), TIMM[args.model]]
            services["LitServe, timm"] = Service(words, "/predict", encoded)
            stack.callback(services["LitServe, timm"].stop)
        for service in services.values():
            wait_for(service.port)
            service.run(8, min(args.seconds, SHORT), Result())  # the first requests take longer
        for _ in range(args.rounds):
            run_alone(model, images, min(args.seconds, SHORT), results["the model alone", 0])
            for clients, (name, service) in product(args.clients, services.items()):
                service.run(clients, args.seconds, results[name, clients])
    cpu = f"{os.cpu_count()} cores of {machine()['cpu']}, {torch.get_num_threads()} threads"
    print(f"{args.model}, {cpu}, torch {torch.__version__}, load {load:.1f} at the start")
    print("| service | clients | p50 ms | p99 ms | images/s | CPU ms/image | of the model alone | requests | errors |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for (name, clients), result in results.items():
        print(result.row(name, clients, results["the model alone", 0]))


if __name__ == "__main__":
    main()
