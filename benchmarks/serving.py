"""Latency and throughput of examples/serve.py, beside the model alone and LitServe with timm.

    python benchmarks/serving.py [MODEL] [--clients 1,8,32] [--seconds 60] [--rounds 5]

The clients run in a process of their own on the same cores, and send JPEGs of 500 x 375 pixels without a pause. All
candidates are measured in turns. LitServe and timm take part if they are installed. Weights are random.
"""

import argparse
import base64
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from socket import socket
from statistics import median

import torch
from PIL import Image

import vitlite
from vitlite.images import TransformConfig

ROOT = Path(__file__).parents[1]
PHOTOS = sorted((ROOT / "examples" / "photos").glob("*.[jp][pn]g"))
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


def alone(model: vitlite.ViT, images: list[bytes], seconds: float) -> float:
    """Return the images per second of `predict` on lists of 32 images, decoding included."""
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        model.predict([images[i % len(images)] for i in range(done, done + 32)])
        done += 32
    return done / (time.perf_counter() - start)


def main() -> None:
    """Measure in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="vit_tiny_16", choices=TIMM)
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=60, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    images = jpegs()
    encoded = [json.dumps({"image": base64.b64encode(image).decode()}).encode() for image in images]
    ports = {"serve.py": free_port()}
    latencies, errors, rates = defaultdict(list), defaultdict(int), defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_model(args.model, Path(folder) / "model")
        model = vitlite.optimize(vitlite.load(Path(folder) / "model"))
        lines = [[str(ROOT / "examples/serve.py"), f"{folder}/model", "--port", str(ports["serve.py"])]]
        if find_spec("litserve") and find_spec("timm"):
            ports["LitServe, timm"] = free_port()
            lines.append([str(ROOT / "benchmarks/litserve_timm.py"), TIMM[args.model], str(ports["LitServe, timm"])])
        for line in lines:
            process = subprocess.Popen([sys.executable, *line])
            stack.callback(process.wait)
            stack.callback(process.terminate)
        for port in ports.values():
            wait_for(port)
        for _ in range(args.rounds):
            rates["predict"].append(alone(model, images, args.seconds))
            for clients in map(int, args.clients.split(",")):
                for name, port in ports.items():
                    at, bodies = ("/", images) if name == "serve.py" else ("/predict", encoded)
                    found, failed, seconds = drive(port, at, bodies, clients, args.seconds)
                    latencies[name, clients] += found
                    errors[name, clients] += failed
                    rates[name, clients].append(len(found) / seconds)
        print(f"{args.model}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
        print(f"predict without a service: {median(rates['predict']):.1f} images/s")
        print("| service | clients | p50 ms | p99 ms | images/s | of predict | requests | errors |")
        print("|---|--:|--:|--:|--:|--:|--:|--:|")
        for (name, clients), found in latencies.items():
            found.sort()
            p50, p99 = (1000 * found[int(share * (len(found) - 1))] for share in (0.5, 0.99))
            rate, counts = median(rates[name, clients]), f"{len(found)} | {errors[name, clients]}"
            ratio = median(a / b for a, b in zip(rates[name, clients], rates["predict"], strict=True))
            print(f"| {name} | {clients} | {p50:.0f} | {p99:.0f} | {rate:.1f} | {ratio:.2f} | {counts} |")


if __name__ == "__main__":
    main()
