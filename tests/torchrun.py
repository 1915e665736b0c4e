"""How tests start `vitlite` in several processes, and what they train on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def pictures(folder: Path, **counts: int) -> Path:
    """A folder per split and class, with noisy pictures whose bright stripe lies or stands."""
    noise = torch.Generator().manual_seed(0)
    for split, count in counts.items():
        for i in range(count):
            name = ("lying", "standing")[i % 2]
            pixels = torch.randint(0, 100, (16, 16, 3), dtype=torch.uint8, generator=noise)
            where = slice(i % 12, i % 12 + 4)
            pixels[where if name == "lying" else (slice(None), where)] += 120
            path = folder / split / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.numpy()).save(path)
    return folder


def train_words(data: Path, out: Path, *more: str) -> list[str]:
    """`vitlite train` of a small random model in float32, with every kind of augmentation."""
    words = f"train {data} --model vit_nano_4 --weights none --size 16 --epochs 4 --batch 8 --dtype float32"
    return [
        *words.split(),
        "--augment",
        "strong",
        "--optimizer",
        "adamw",
        "--format",
        "jsonl",
        "--out",
        str(out),
        *more,
    ]


def launcher(
    processes: int,
    *words: str,
    options: tuple[str, ...] = ("--standalone",),
    program: tuple[str, ...] = ("-m", "vitlite"),
) -> list[str]:
    """The command line of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", str(processes)]
    return [*command, *program, *words]


def torchrun(processes: int, *words: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command of vitlite in several processes, to its good end. What torch's Gloo prints too is left out."""
    done = subprocess.run(launcher(processes, *words), env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    done.stdout = without_gloo(done.stdout)
    return done


def without_gloo(printed: str) -> str:
    """The same without the lines that some versions of torch print on the same channel, several at once and mixed."""
    lines = printed.splitlines(keepends=True)
    return "".join(line for line in lines if "[Gloo]" not in line and "connected peer ranks" not in line)


def history(printed: str) -> list[dict[str, Any]]:
    """What `vitlite train` printed of each epoch, but for the time."""
    return [{**json.loads(line), "seconds": 0} for line in without_gloo(printed).splitlines()]


def same_weights(one: Path, other: Path, most: float = 0.0) -> bool:
    """Whether the last checkpoints of two runs differ by that much at most, anywhere."""
    a, b = (load_file(run / "last" / "model.safetensors") for run in (one, other))
    return a.keys() == b.keys() and all((a[name] - b[name]).abs().max() <= most for name in a)
