"""Helpers of tests that run `vitlite` in several processes."""

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


def write_images(folder: Path, **counts: int) -> Path:
    """Write a folder per split and class, with noisy images whose bright stripe lies or stands."""
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


def train_command(data: Path, out: Path, *more: str) -> list[str]:
    """Return the arguments to train a small random model in float32, with every kind of augmentation."""
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
    """Return the command line of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", str(processes)]
    return [*command, *program, *words]


def torchrun(processes: int, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of vitlite in several processes, and return its output without that of Gloo."""
    done = subprocess.run(launcher(processes, *words), env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    done.stdout = without_gloo(done.stdout)
    return done


def without_gloo(printed: str) -> str:
    """Remove the lines that some versions of torch print to stdout."""
    lines = printed.splitlines(keepends=True)
    return "".join(line for line in lines if "[Gloo]" not in line and "connected peer ranks" not in line)


def history(printed: str) -> list[dict[str, Any]]:
    """Parse the epochs that `vitlite train` printed, without their time."""
    return [{**json.loads(line), "seconds": 0} for line in without_gloo(printed).splitlines()]


def same_weights(one: Path, other: Path, most: float = 0.0) -> bool:
    """Return whether the weights of two runs differ by at most so much."""
    a, b = (load_file(run / "last" / "model.safetensors") for run in (one, other))
    return a.keys() == b.keys() and all((a[name] - b[name]).abs().max() <= most for name in a)
