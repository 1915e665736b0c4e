"""How long vitlite, other libraries and engines take for the same images, in one interleaved run.

    python benchmarks/libraries.py [--models vit_tiny_16 --batch 1 --peers timm --rounds 1 --quick --out FOLDER]

Without options it takes about 25 minutes on two cores, and writes speed_table.md, speed.json and speed.svg into
docs/lab_notes. To measure vitlite alone, and to see what to use on a machine, run `vitlite bench`.
"""

import argparse
import copy
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from creation import creation
from growth import growth
from peer_models import NARROW, PEERS
from speed_pages import EVERYWHERE, need_matplotlib, plot, table
from torch import Tensor

from vitlite.cli.options import positive, positives
from vitlite.config import ViTConfig
from vitlite.errors import OptimizedError, UnknownNameError, VitliteError, closest
from vitlite.fast.measure import TOLERANCE, Benchmark, difference, eager, machine, measure, products, random_model
from vitlite.fast.optimize import optimize
from vitlite.nn.vit import ViT
from vitlite.presets import preset
from vitlite.storage import write_text

LAB_NOTES = Path(__file__).parents[1] / "docs" / "lab_notes"
# Model, pixels, and batches.
CELLS = [
    ("vit_base_16", 224, (1, 8, 32)),
    ("vit_tiny_16", 224, (1, 8, 32)),
    ("vit_base_16", 384, (1, 8)),
    ("vit_small_16", 224, (1, 8)),
    ("vit_large_16", 224, (1, 8)),
    ("vit_tiny_16", 384, (1,)),
    ("vit_base_14", 518, (1,)),
]
FULL = ("vit_base_16", 224)  # where all peers are measured, and elsewhere those of EVERYWHERE
OTHER_ANSWERS = ("vit-pytorch", "all tokens", "products")  # which have weights of their own, or give no logits


@dataclass
class Result:
    """One row of the table: seconds and differences of all benchmarks, by name."""

    model: str
    size: int
    batch: int
    dtype: str
    seconds: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def cell(model: ViT, name: str, batch: int, peers: Sequence[str], rounds: int) -> list[Result]:
    """Measures one model on one batch, in float32 and in bfloat16."""
    height, width = model.config.size
    images = torch.randn(batch, model.config.channels, height, width)
    results = {dtype: Result(name, height, batch, str(dtype).removeprefix("torch.")) for dtype in TOLERANCE}
    benchmarks: list[Benchmark] = []
    with torch.inference_mode():
        right = model(images)
        for dtype, result in results.items():
            benchmarks += _benchmarks(model, images, dtype, peers, result.left_out)
        measure(benchmarks, rounds)
        for benchmark in benchmarks:
            result = results[benchmark.dtype]
            result.seconds[benchmark.name] = benchmark.best
            if benchmark.name not in OTHER_ANSWERS:
                result.differences[benchmark.name] = difference(benchmark.run(), right)
    return list(results.values())


def _benchmarks(
    model: ViT, images: Tensor, dtype: torch.dtype, peers: Sequence[str], left_out: dict[str, str]
) -> Iterator[Benchmark]:
    yield eager(model, images, dtype, "vitlite")
    given = copy.deepcopy(model).to(dtype), images.to(dtype)
    for name in peers:
        if dtype is torch.float32 or name in NARROW:
            try:
                yield Benchmark(name, dtype, PEERS[name](*given))
            except ModuleNotFoundError as error:
                left_out[name] = f"not installed ({error.name})"
    try:
        fast = optimize(copy.deepcopy(model), dtype=dtype)
    except OptimizedError as error:
        left_out["optimized"] = str(error)
        return
    yield Benchmark("optimized", dtype, lambda: fast(images))
    yield Benchmark("all tokens", dtype, lambda: fast.features(images))
    yield products(model.config, images.to(dtype))


def main(words: Sequence[str] | None = None) -> int:
    """The command; 1 if some benchmark's logits are not those of the model, or an option is wrong."""
    args = _parser().parse_args(words)
    try:
        return _run(args)
    except (VitliteError, OSError) as error:
        print(f"libraries.py: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="libraries.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", metavar="NAME,...", help="presets; default: a choice from tiny to large")
    add("--sizes", type=positives, default="224", metavar="PIXELS,...", help="with --models: image sizes; default: 224")
    add("--batch", type=positives, default="1,8", metavar="N,...", help="with --models: batch sizes; default: 1,8")
    names = ", ".join([*PEERS, "none"])
    add("--peers", default=",".join(PEERS), metavar="NAME,...", help=f"of: {names}; default: all that are installed")
    add("--rounds", type=positive, default=10, metavar="N", help="turns of each benchmark; default: 10")
    add("--quick", action="store_true", help="speed alone: neither creation nor growth")
    add("--out", type=Path, default=LAB_NOTES, metavar="FOLDER", help="folder of the results; default: docs/lab_notes")
    return parser


def _run(args: argparse.Namespace) -> int:
    peers = _peers(args.peers)
    cells = _cells(args)
    need_matplotlib()  # this and the folder, too, before minutes are spent
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine(), "cells": [], "creation": {}, "growth": {}, "left_out": {}}
    code = 0
    for name, config, batches in cells:
        model = random_model(config)
        everyone = args.models or (name, config.image_size) == FULL
        there = peers if everyone else [peer for peer in peers if peer in EVERYWHERE]
        for batch in batches:
            for result in cell(model, name, batch, there, args.rounds):
                print(_line(result), flush=True)
                for text in _wrong(result):
                    print(f"  {text}", flush=True)
                    code = 1
                report["cells"].append(asdict(result))
                report["left_out"] |= result.left_out
            _write(report, args.out)  # what is measured stays, should the run be stopped
    if not args.quick:
        report["creation"], report["growth"] = creation(), growth(args.rounds)
        _write(report, args.out)
    print(table(report))
    return code


def _peers(text: str) -> list[str]:
    names = [name for name in text.split(",") if name != "none"]
    for name in names:
        if name not in PEERS:
            raise UnknownNameError(f"No peer {name!r}.{closest(name, PEERS)} Peers: {', '.join(PEERS)}, none.")
    return names


def _cells(args: argparse.Namespace) -> list[tuple[str, ViTConfig, Sequence[int]]]:
    """The models to measure, each with its batches."""
    chosen: Any = CELLS
    if args.models:
        chosen = product(args.models.split(","), args.sizes, [args.batch])
    return [(name, preset(name).replace(image_size=size), batches) for name, size, batches in chosen]


def _line(result: Result) -> str:
    """A result in words, for who waits."""
    optimized = result.seconds.get("optimized", math.nan)
    ratios = [f"{name} {seconds / optimized:.2f}" for name, seconds in result.seconds.items() if name != "optimized"]
    place = f"{result.model} {result.size} px, batch {result.batch}, {result.dtype}"
    return f"{place}: {optimized * 1e3:.1f} ms; {', '.join(ratios)}"


def _wrong(result: Result) -> Iterator[str]:
    """Who computed something else."""
    limit = TOLERANCE[getattr(torch, result.dtype)]
    for name, value in result.differences.items():
        if not value <= limit:  # nor what is no number
            yield f"{name} differs by {value:.1e} of the largest logit"


def _write(report: dict[str, Any], out: Path) -> None:
    write_text(out / "speed_table.md", table(report))
    write_text(out / "speed.json", json.dumps(report, indent=1) + "\n")
    plot(report, out / "speed.svg")


if __name__ == "__main__":
    sys.exit(main())
