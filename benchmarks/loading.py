"""How long `create` takes beside one read of the same file, and how much memory beside its size.

    python benchmarks/loading.py [runs]

A ViT-B/16 of random weights is served once on loopback and fetched into a cache. Each run is a fresh process, and the
kinds take turns. "first" is the first call in a process, after the imports, "again" the second. Times are CPU seconds:
with the file in the page cache nothing waits, and other programs on the machine do not count. What importing torch left
to the garbage collector is collected before, for all three.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
NAME = "vit_base_16"


def measure(kind: str, path: str) -> None:
    """Measures in this process: seconds of the first call and of the second, peak memory over the size of the file."""
    call = CALLS[kind](path)
    gc.collect()
    gc.freeze()
    before = peak()
    first = seconds(call)
    memory = (peak() - before) / os.path.getsize(path)
    again = seconds(call)
    print(json.dumps([first, again, memory]))


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of a call; what it gives is kept until then, and not longer."""
    start = time.process_time()
    result = call()
    end = time.process_time()
    del result
    return end - start


def peak() -> int:
    """The most memory this process has had, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def reading(path: str) -> Callable[[], object]:
    """What cannot be avoided."""

    def call() -> object:
        with open(path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), os.path.getsize(path), 0)

    return call


def vitlite(_: str) -> Callable[[], object]:
    """By its name, from the cache."""
    from vitlite import factory

    return lambda: factory.create(NAME)


def timm(path: str) -> Callable[[], object]:
    """By its name, with the same file."""
    from peer_models import load

    library = load("timm")
    return lambda: library.create_model("vit_base_patch16_224", pretrained=True, pretrained_cfg_overlay={"file": path})


CALLS = {"one pread": reading, "vitlite": vitlite, "timm": timm}


def main(runs: int) -> None:
    """Prepares the cache, takes turns, prints the table."""
    sys.path.insert(0, str(TESTS))
    from safetensors.torch import save_file
    from server import Hub

    from vitlite import create
    from vitlite.zoo import registry

    with tempfile.TemporaryDirectory() as folder, Hub() as hub:
        model = create(NAME, weights=None)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.02)
        save_file(model.state_dict(), Path(folder) / "weights")
        hub.publish(registry.info(NAME).repo, model_safetensors=(Path(folder) / "weights").read_bytes())
        os.environ |= {"VITLITE_CACHE": folder, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1"}
        show(in_turns(str(create(NAME).source.path), runs), os.path.getsize(Path(folder) / "weights"))


def in_turns(path: str, runs: int) -> dict[str, list[float]]:
    """The medians of what `measure` prints, by kind."""
    found: dict[str, list[list[float]]] = {kind: [] for kind in CALLS}
    for _ in range(runs):
        for kind, results in found.items():
            done = subprocess.run([sys.executable, __file__, kind, path], check=True, capture_output=True, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    return {kind: [statistics.median(values) for values in zip(*rows, strict=True)] for kind, rows in found.items()}


def show(medians: dict[str, list[float]], size: int) -> None:
    """The table: each time, and over that of one read."""
    first_read, again_read, _ = medians["one pread"]
    print(f"{'':10} {'first':>14} {'again':>14} {'peak / file':>12}   ({size / 1e6:.0f} MB)")
    for kind, (first, again, memory) in medians.items():
        times = f"{first:.3f} s {first / first_read:4.2f}x {again:.3f} s {again / again_read:4.2f}x"
        print(f"{kind:10} {times} {memory:12.2f}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(*sys.argv[1:])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
