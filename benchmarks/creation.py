"""How long each library takes to make a ViT-B/16 from a local file, and how much memory: each in a fresh process.

    python benchmarks/creation.py [runs]

vitlite and timm read the same file. `loading.py` looks closer, at vitlite's own cache and at the second call.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file

from vitlite.checkpoints.key_mapping import FORMATS, rename_tensors
from vitlite.fast.measure import random_model
from vitlite.presets import PRESETS

RUNS = 4
HERE = str(Path(__file__).parent)


class Library(NamedTuple):
    """Lines for a process, in which `file` is the weights' name and `load` imports what may import torchvision."""

    imports: str
    create: str


TORCHVISION = ".torchvision"  # behind the name of the same weights under torchvision's names
LIBRARIES = {
    "one raw read": Library("", "open(file, 'rb').read()"),
    "vitlite": Library(
        "import vitlite, vitlite.factory", "vitlite.create('vit_base_16.augreg2_in21k_ft_in1k', weights=file)"
    ),
    "timm": Library(
        "timm = load('timm'); from safetensors.torch import load_file",
        "timm.create_model('vit_base_patch16_224').load_state_dict(load_file(file))",
    ),
    "torchvision": Library(
        "torchvision = load('torchvision'); from safetensors.torch import load_file",
        f"torchvision.models.vit_b_16().load_state_dict(load_file(file + '{TORCHVISION}'))",
    ),
}
SCRIPT = """
import gc, json, pathlib, sys, time, torch
file, benchmarks, with_peers = sys.argv[1:]
if with_peers:
    sys.path.insert(0, benchmarks)
    from peer_models import load
status = pathlib.Path("/proc/self/status")  # of this process alone, which getrusage is not
peak = lambda: int(status.read_text().split("VmHWM:")[1].split()[0]) if status.exists() else float("nan")
before, start = peak(), time.perf_counter()
{imports}
imported = time.perf_counter()
gc.collect()  # what the imports left, which is not the creation's to clear away
ready = time.perf_counter()
kept = {create}
print(json.dumps([time.perf_counter() - ready, (peak() - before) / 1024, imported - start]))
"""


def creation(runs: int = RUNS) -> dict[str, list[float]]:
    """The best of several runs, by library: seconds to create it, megabytes at the peak, and seconds to import."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "model.safetensors"))
        state = random_model(PRESETS["vit_base_16"]).state_dict()
        save_file(state, file)
        renamed = rename_tensors(FORMATS["torchvision"], "", state)
        save_file({name: tensor.contiguous() for name, tensor in renamed.items()}, file + TORCHVISION)
        for _ in range(runs):  # the first warms the file cache, and hashes the file
            for name, library in LIBRARIES.items():
                values = _in_a_process(library, file)
                if values is not None:
                    best = found.get(name, values)
                    found[name] = [min(value, least) for value, least in zip(values, best, strict=True)]
    return found


def _in_a_process(library: Library, file: str) -> list[float] | None:
    """What one process measures; None where the library is not installed."""
    script = SCRIPT.format(imports=library.imports, create=library.create)
    with_peers = "yes" if "load(" in library.imports else ""
    command = [sys.executable, "-c", script, file, HERE, with_peers]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


if __name__ == "__main__":
    for name, (seconds, megabytes, importing) in creation(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS).items():
        print(f"{name:12} {seconds:6.2f} s to create {megabytes:6.0f} MB at the peak {importing:6.2f} s to import")
