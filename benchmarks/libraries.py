"""`vitlite bench`: how long vitlite, other libraries and engines take for the same images, in one interleaved run.

Absolute times on a shared machine mean little, so what counts are ratios within one run. Contestants take turns, after
a pause in which the workers of the one before fall asleep, and the best of many turns counts.
"""

import copy
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from vitlite import costs as sizes
from vitlite.config import PRESETS, ViTConfig, preset
from vitlite.errors import OptimizedError, UnknownNameError, closest, missing_extra
from vitlite.speed.optimize import optimize
from vitlite.weights.layouts import LAYOUTS, to_theirs
from vitlite.model import ViT
from vitlite.speed.onednn import PackedLinear, PlainLinear, float32_products, float32_products_pay, packing_pays
from vitlite.peers import NARROW, PEERS
from vitlite.cli.options import positive

# Model, pixels, and batches: what one run of ten minutes holds on two cores.
CELLS = [
    ("vit_base_16", 224, (1, 8, 32)),
    ("vit_tiny_16", 224, (1, 8, 32)),
    ("vit_base_16", 384, (1, 8)),
    ("vit_small_16", 224, (1, 8)),
    ("vit_large_16", 224, (1, 8)),
    ("vit_tiny_16", 384, (1,)),
    ("vit_base_14", 518, (1,)),
]
FULL = ("vit_base_16", 224)  # where all peers are measured, and elsewhere these
EVERYWHERE = ("timm", "ONNX Runtime", "OpenVINO")
GROWING = PRESETS["vit_tiny_16"]
CREATIONS = 4
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # of the largest logit: beyond it, not the same network


@dataclass
class Contestant:
    """One way to compute the logits, and the best time it had so far."""

    name: str
    dtype: torch.dtype
    run: Callable[[], Any]
    best: float = math.inf  # seconds


@dataclass
class Result:
    """One cell of the table: seconds and differences of all contestants, by dtype and name."""

    model: str
    size: int
    batch: int
    dtype: str
    seconds: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def measure(contestants: Sequence[Contestant], rounds: int) -> None:
    """Lets the contestants take turns, and keeps the best time of each.

    A turn is a pause, a call that is left out, and two that count; where a call takes long, it is one that counts.
    Who is far behind the quickest of its dtype after two turns has had enough of them, and so has everybody after
    three turns and a minute.
    """
    start = time.perf_counter()
    slow = [_seconds(contestant.run) > 0.3 for contestant in contestants]  # which also warms up
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() - start > 60:
            return
        for contestant, long in zip(contestants, slow, strict=True):
            quickest = min(rival.best for rival in contestants if rival.dtype is contestant.dtype)
            if turn >= (1 if long else 2) and contestant.best > 1.5 * quickest:
                continue
            time.sleep(0.03)
            times = [_seconds(contestant.run) for _ in range(1 if long else 3)]
            contestant.best = min(contestant.best, *times[-2:])


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cell(model: ViT, name: str, batch: int, peers: Sequence[str], rounds: int) -> list[Result]:
    """Measures one model on one batch, in float32 and in bfloat16."""
    height, width = model.config.size
    images = torch.randn(batch, model.config.channels, height, width)
    results = {dtype: Result(name, height, batch, str(dtype).removeprefix("torch.")) for dtype in TOLERANCE}
    with torch.inference_mode():
        right = model(images)
        contestants = [
            contestant
            for dtype, result in results.items()
            for contestant in _contestants(model, images, dtype, peers, result.left_out)
        ]
        measure(contestants, rounds)
        for contestant in contestants:
            result = results[contestant.dtype]
            result.seconds[contestant.name] = contestant.best
            if contestant.name not in ("vit-pytorch", "all tokens", "products"):  # its own weights, other answers
                result.differences[contestant.name] = _difference(contestant.run(), right)
    return list(results.values())


def _contestants(
    model: ViT, images: Tensor, dtype: torch.dtype, peers: Sequence[str], left_out: dict[str, str]
) -> Iterator[Contestant]:
    eager, images = copy.deepcopy(model).to(dtype), images.to(dtype)
    yield Contestant("vitlite", dtype, lambda: eager(images))
    for name in peers if dtype is torch.float32 else [name for name in peers if name in NARROW]:
        try:
            yield Contestant(name, dtype, PEERS[name](eager, images))
        except ModuleNotFoundError as error:
            left_out[name] = f"not installed ({error.name})"
    try:
        fast = optimize(copy.deepcopy(model), dtype=dtype)
    except OptimizedError as error:
        left_out["optimized"] = str(error)
        return
    wide = images.float()
    yield Contestant("optimized", dtype, lambda: fast(wide))
    yield Contestant("all tokens", dtype, lambda: fast.features(wide))
    yield Contestant("products", dtype, products(model.config, images))


def products(config: ViTConfig, images: Tensor) -> Callable[[], None]:
    """The matrix products of a forward pass and nothing else, as fast as this machine does them: the limit."""
    dtype, heads = images.dtype, config.heads
    linear = PackedLinear if packing_pays(dtype) else PlainLinear
    tokens = config.prefix_tokens + math.prod(config.grid)
    rows = min(len(images), 8)
    steps: list[tuple[Any, Tensor]] = []
    for layer in sizes.layers(config):
        if layer.macs and layer.weight and layer.output[0] == tokens:
            k, n = math.prod(layer.weight[1:]), layer.weight[0]
            steps.append((linear(torch.randn(n, k), torch.randn(n), dtype), torch.randn(rows * tokens, k, dtype=dtype)))
    q, k, v = torch.randn(3, heads, tokens, config.attention_dim // heads, dtype=dtype)
    scores, out = torch.empty(heads, tokens, tokens, dtype=dtype), torch.empty_like(q)
    exact = dtype is torch.float32 and float32_products_pay(tokens, q.shape[-1])

    def run() -> None:
        with float32_products if exact else nullcontext():
            for _ in range(config.depth * math.ceil(len(images) / rows)):
                for step, x in steps:
                    step(x)
                for _ in range(rows):
                    torch.bmm(q, k.mT, out=scores)
                    torch.bmm(scores, v, out=out)

    return run


def _difference(answer: Any, right: Tensor) -> float:
    answer = torch.as_tensor(answer).float()
    return float((answer - right).abs().max() / right.abs().max())


def random_model(config: ViTConfig) -> ViT:
    """A model whose logits depend on every weight, the same on each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ViT(config).eval()
        torch.nn.init.normal_(cast(torch.nn.Linear, model.head).weight, std=0.02)
    return model.requires_grad_(False)


def growth(rounds: int) -> dict[str, list[tuple[int, float, float]]]:
    """How cost grows: for batch, tokens and depth, (how many, billions of multiply-adds, seconds), optimized."""
    base = GROWING
    larger = [base.replace(image_size=base.size[0] // 2 * k) for k in (1, 2, 3, 4, 6)]
    variants = {
        "batch": [(batch, base, batch) for batch in (1, 2, 4, 8, 16, 32)],
        "depth": [(depth, base.replace(depth=depth), 4) for depth in (3, 6, 12, 24)],
        "tokens": [(config.prefix_tokens + math.prod(config.grid), config, 4) for config in larger],
    }
    found = {}
    for axis, rows in variants.items():
        contestants = []
        for value, config, batch in rows:
            fast, images = optimize(random_model(config)), torch.randn(batch, 3, *config.size)
            contestants.append(Contestant(f"{axis} {value}", torch.float32, partial(fast, images)))
        for contestant in contestants:
            measure([contestant], rounds)
        work = [sizes.gmacs(config) * batch for _, config, batch in rows]
        found[axis] = [(row[0], macs, c.best) for row, macs, c in zip(rows, work, contestants, strict=True)]
    return found


# How each library makes a ViT-B/16 from a local file, in a process of its own; timm and vitlite from the same file.
CREATION = {
    "one raw read": ("", "open(file, 'rb').read()"),
    "vitlite": ("import vitlite, vitlite.factory", "vitlite.create('vit_base_16', weights=file)"),
    "timm": (
        "timm = load('timm'); from safetensors.torch import load_file",
        "timm.create_model('vit_base_patch16_224').load_state_dict(load_file(file))",
    ),
    "torchvision": (
        "torchvision = load('torchvision'); from safetensors.torch import load_file",
        "torchvision.models.vit_b_16().load_state_dict(load_file(file + '.torchvision'))",
    ),
}
SCRIPT = """
import gc, json, pathlib, sys, time, torch
from importlib import import_module
status = pathlib.Path("/proc/self/status")  # of this process alone, which getrusage is not
peak = lambda: int(status.read_text().split("VmHWM:")[1].split()[0]) if status.exists() else float("nan")
file, load = sys.argv[1], import_module
{shim}
before, start = peak(), time.perf_counter()
{imports}
imported = time.perf_counter()
gc.collect()  # what the imports left, which is not the creation's to clear away
ready = time.perf_counter()
kept = {create}
print(json.dumps([time.perf_counter() - ready, (peak() - before) / 1024, imported - start]))
"""


def creation() -> dict[str, list[float]]:
    """For a ViT-B/16 from a local file: seconds to create it, megabytes at the peak, and seconds to import."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "model.safetensors"))
        state = random_model(PRESETS["vit_base_16"]).state_dict()
        save_file(state, file)
        save_file({k: v.contiguous() for k, v in to_theirs(LAYOUTS["torchvision"], "", state)}, file + ".torchvision")
        for _ in range(CREATIONS):  # the first warms the file cache, and stamps the file
            for name, (imports, create) in CREATION.items():
                shim = "from vitlite.peers import load" if "load(" in imports else ""
                script = SCRIPT.format(shim=shim, imports=imports, create=create)
                answer = subprocess.run([sys.executable, "-c", script, file], capture_output=True, text=True)
                if answer.returncode == 0:
                    values = json.loads(answer.stdout.splitlines()[-1])
                    found[name] = [min(pair) for pair in zip(values, found.get(name, values), strict=True)]
    return found


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    flags = next((line.split() for line in _lines("/proc/cpuinfo") if line.startswith("flags")), [])
    has = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile") if flag in flags]
    load = {"load": [round(load, 2) for load in os.getloadavg()]} if hasattr(os, "getloadavg") else {}  # not on Windows
    return {
        "cpu": cpu, "instructions": has, "cores": os.cpu_count(), "threads": torch.get_num_threads(), **load,
        "python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def table(report: dict[str, Any]) -> str:
    """The report in Markdown: each contestant's time over that of the optimized model."""
    about = report["machine"]
    load = f", load {about['load'][0]} at the start" if "load" in about else ""
    lines = [
        "# Speed, measured",
        "",
        f"One run of `vitlite bench` on {about['cores']} cores of {about['cpu']} ({', '.join(about['instructions'])}), "
        f"{about['threads']} threads, torch {about['torch']}, {about['date']}{load}.",
        "",
        "How many times as long as `vitlite.optimize` each takes. *All tokens* is vitlite without what it saves in the "
        "last block, which the other engines do not do; *products* is the matrix products alone.",
        "",
    ]
    names = list(dict.fromkeys(name for row in report["cells"] for name in row["seconds"] if name != "optimized"))
    lines += [f"| model | px | batch | dtype | ms | {' | '.join(names)} |", "|---" * (5 + len(names)) + "|"]
    for row in report["cells"]:
        own = row["seconds"].get("optimized", math.nan)
        ratios = [f"{row['seconds'][name] / own:.2f}" if name in row["seconds"] else "" for name in names]
        start = f"| {row['model']} | {row['size']} | {row['batch']} | {row['dtype']} | {own * 1e3:.1f} "
        lines.append(start + f"| {' | '.join(ratios)} |")
    if report["left_out"]:
        lines += ["", "Left out: " + "; ".join(f"{name}: {why}" for name, why in report["left_out"].items()) + "."]
    if report["creation"]:
        lines += ["", "| ViT-B/16 from a local file | create, s | peak over torch, MB | import beyond torch, s |"]
        lines += ["|---|---|---|---|"]
        lines += [f"| {name} | {s:.2f} | {mb:.0f} | {i:.2f} |" for name, (s, mb, i) in report["creation"].items()]
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], file: Path) -> None:
    """Draws the ratios, and how cost grows beside what the multiply-adds predict."""
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6), layout="constrained")
    ratios, *curves = figure.subplots(1, 1 + len(report["growth"]), width_ratios=[2] + [1] * len(report["growth"]),
                                      squeeze=False)[0]  # fmt: skip
    rows = [row for row in report["cells"] if "optimized" in row["seconds"]]
    labels = [f"{row['model'][4:]} {row['size']} px, {row['batch']}, {row['dtype']}" for row in rows]
    for name in EVERYWHERE:
        points = [(row["seconds"][name] / row["seconds"]["optimized"], i) for i, row in enumerate(rows)
                  if name in row["seconds"]]  # fmt: skip
        ratios.plot([x for x, _ in points], [y for _, y in points], "o", label=name)
    ratios.axvline(1, color="black", linewidth=1)
    ratios.set(yticks=range(len(rows)), yticklabels=labels, xlabel="time / time of vitlite.optimize")
    ratios.invert_yaxis()
    ratios.grid(axis="y", alpha=0.3)
    ratios.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(EVERYWHERE), frameon=False)
    for axes, (axis, points) in zip(curves, report["growth"].items(), strict=True):
        value, macs, seconds = zip(*points, strict=True)
        expected = [seconds[-1] * work / macs[-1] for work in macs]
        axes.loglog(value, [s * 1e3 for s in seconds], "o-", label="measured")
        axes.loglog(value, [s * 1e3 for s in expected], "--", color="gray", label="as the multiply-adds")
        axes.set(xlabel=axis, ylabel="ms")
        axes.set_xticks(value, labels=[str(v) for v in value])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(loc="lower right", frameon=False)
    about = report["machine"]
    figure.suptitle(f"{about['cores']} cores of {about['cpu']}, torch {about['torch']}, {about['date']}")
    with matplotlib.rc_context({"svg.hashsalt": "vitlite"}):
        figure.savefig(file)


def _matplotlib() -> Any:
    try:
        import matplotlib.ticker
    except ModuleNotFoundError as error:
        raise missing_extra("Drawing the measurements", "plot") from error
    return matplotlib


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `vitlite bench`."""
    names, add = [*PEERS, "none"], parser.add_argument
    add("--models", metavar="NAME,...", help="presets; default: a choice from tiny to large")
    add("--sizes", type=positives, default="224", metavar="PIXELS,...", help="with --models: image sizes; default: 224")
    add("--batch", type=positives, default="1,8", metavar="N,...", help="with --models: batch sizes; default: 1,8")
    add("--peers", metavar="NAME,...", help=f"of: {', '.join(names)}; default: all that are installed")
    add("--rounds", type=positive, default=10, metavar="N", help="turns of each contestant; default: 10")
    add("--quick", action="store_true", help="speed alone: neither creation nor growth")
    add("--out", default="docs", metavar="FOLDER", help="where table and plot go; default: docs")


def positives(text: str) -> list[int]:
    """The value of an option that lists numbers."""
    return [positive(part) for part in text.split(",")]


def run(args: Namespace) -> int:
    """Runs the command; 1 if some contestant's logits are not those of the model."""
    out = Path(args.out)
    peers = [name for name in (args.peers or ",".join(PEERS)).split(",") if name != "none"]
    for name in peers:
        if name not in PEERS:
            raise UnknownNameError(f"No peer {name!r}.{closest(name, PEERS)} Peers: {', '.join(PEERS)}, none.")
    cells = _cells(args)
    _matplotlib()  # this and the folder, too, before ten minutes are spent
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine(), "cells": [], "creation": {}, "growth": {}, "left_out": {}}
    wrong = 0
    for name, config, batches in cells:
        model = random_model(config)
        whole = args.models or (name, config.image_size) == FULL
        there = peers if whole else [peer for peer in peers if peer in EVERYWHERE]
        for batch in batches:
            for result in cell(model, name, batch, there, args.rounds):
                wrong += _say(result)
                report["cells"].append(asdict(result))
                report["left_out"] |= result.left_out
            _write(report, out)  # what is measured stays, should the run be stopped
    if not args.quick:
        report["creation"], report["growth"] = creation(), growth(args.rounds)
        _write(report, out)
    print(table(report))
    return int(wrong > 0)


def _write(report: dict[str, Any], out: Path) -> None:
    (out / "speed_table.md").write_text(table(report), encoding="utf-8")
    (out / "speed.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    plot(report, out / "speed.svg")


def _cells(args: Namespace) -> list[tuple[str, ViTConfig, Sequence[int]]]:
    """The models to measure, each with its batches."""
    chosen = product(args.models.split(","), args.sizes, [args.batch]) if args.models else CELLS
    return [(name, preset(name).replace(image_size=size), batches) for name, size, batches in chosen]


def _say(result: Result) -> int:
    """Prints a result as soon as it is there; how many contestants computed something else."""
    own = result.seconds.get("optimized", math.nan)
    ratios = (f"{name} {seconds / own:.2f}" for name, seconds in result.seconds.items() if name != "optimized")
    print(
        f"{result.model} {result.size} px, batch {result.batch}, {result.dtype}: {own * 1e3:.1f} ms; "
        + ", ".join(ratios)
    )
    limit = TOLERANCE[getattr(torch, result.dtype)]
    off = {name: value for name, value in result.differences.items() if not value <= limit}  # nor NaN
    for name, value in off.items():
        print(f"  {name} differs by {value:.1e} of the largest logit")
    sys.stdout.flush()
    return len(off)
