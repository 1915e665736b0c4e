"""`vitlite bench`: measure the speed of eager and optimized models on this machine.

To compare vitlite with other libraries, see benchmarks/libraries.py.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

import torch

from vitlite import kernels
from vitlite.cli.options import check_device, expanded_path, positive, positives
from vitlite.cli.tables import bold
from vitlite.config import ViTConfig
from vitlite.errors import InputError
from vitlite.fast.bench import Timing, advice, time_model
from vitlite.fast.measure import machine, random_model
from vitlite.inference.threads import set_threads
from vitlite.presets import preset
from vitlite.storage import write_json

Choice = Sequence[tuple[str, int, Sequence[int]]]  # a preset, an image size, and batch sizes
CHOICE: Choice = [
    ("vit_tiny_16", 224, (1, 8)),
    ("vit_small_16", 224, (1, 8)),
    ("vit_base_16", 224, (1, 8)),
    ("vit_base_16", 384, (1,)),
    ("vit_large_16", 224, (1,)),
]
QUICK: Choice = [("vit_base_16", 224, (1, 8))]
GPU_BATCHES = (1, 64)
SIZES, BATCHES = (224,), (1, 8)  # defaults with --models
ROUNDS, QUICK_ROUNDS = 10, 3
LEGEND = "eager, optimized: ms per batch; gain: speedup over eager float32"
LIMIT_LEGEND = "; limit: matrix products only"
MEMORY_LEGEND = "; MB: GPU memory besides the weights"


class Case(NamedTuple):
    """A network to measure, and the batch sizes."""

    name: str
    config: ViTConfig
    batches: Sequence[int]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite bench`."""
    add = parser.add_argument
    add("--models", metavar="NAME,...", help="presets to measure; default: from tiny to large")
    add("--sizes", type=positives, metavar="PIXELS,...", help="image sizes for --models; default: 224")
    add("--batch", type=positives, metavar="N,...", help="batch sizes for --models; default: 1,8")
    add("--rounds", type=positive, metavar="N", help=f"repetitions; default: {ROUNDS}, or {QUICK_ROUNDS} with --quick")
    add("--device", default="cpu", help="torch device, such as cpu, cuda or mps; default: %(default)s")
    add("--quick", action="store_true", help="measure vit_base_16 (or --models) with fewer repetitions")
    add(
        "--out",
        type=expanded_path,
        metavar="FILE",
        help="JSON file for the results, replaced if it exists",
    )


def run(args: Namespace) -> int:
    """Measure the speed, and print advice. Return 1 if a result differs too much from eager float32."""
    check_device(args.device)
    device = torch.device(args.device)
    set_threads()
    cases = _cases(args)
    if args.out and (args.out.is_dir() or not args.out.parent.is_dir()):  # before the measurement, which takes minutes
        raise InputError(f"Cannot write the results to {args.out}. Choose a file in an existing folder.")
    described, on_cpu = machine(device), device.type == "cpu"
    print(_machine_line(described))
    print(LEGEND + (LIMIT_LEGEND if on_cpu else MEMORY_LEGEND) + "\n")
    width = max(len(case.name) for case in cases)
    header = ("model", "px", "batch", "dtype", "eager", "optimized", "limit" if on_cpu else "MB", "images/s", "gain")
    print(bold(_line(header, width)), flush=True)
    timings: list[Timing] = []
    for name, config, batches in cases:
        model = random_model(config).to(device)
        for batch in batches:
            measured = time_model(model, name, batch, args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS))
            _print_rows(measured, width)
            timings += measured
            if args.out:  # after each batch size, in case the run is stopped
                write_json(args.out, {"machine": described, "timings": [asdict(timing) for timing in timings]})
    print()
    for sentence in advice(timings):
        print(sentence)
    if on_cpu:
        _print_kernels()
    return _print_wrong(timings)


def _cases(args: Namespace) -> list[Case]:
    """Return the networks to measure. Without --models, the batch sizes depend on the device."""
    chosen = QUICK if args.quick else CHOICE
    if args.models:
        chosen = list(product(args.models.split(","), args.sizes or SIZES, [args.batch or BATCHES]))
    elif args.sizes or args.batch:
        raise InputError("--sizes and --batch need --models. Add one or more presets, such as --models vit_base_16.")
    elif args.device != "cpu":
        chosen = [(name, size, GPU_BATCHES) for name, size, _ in chosen]
    return [Case(name, preset(name).replace(image_size=size), batches) for name, size, batches in chosen]


def _machine_line(described: dict[str, Any]) -> str:
    threads = f"{described['cores']} cores, {described['threads']} threads"
    line = f"{described['cpu']}, {threads}, torch {described['torch']}"
    if "device" in described:
        line = f"{described['device']}, CUDA {described['cuda']}; {line}"
    load = described.get("load", [0.0])[0]
    if load > 0.5:  # busy cores on average
        line += f"; load {load}: other programs are running, so the results are less reliable"
    return line


def _line(cells: Sequence[str], width: int) -> str:
    """Format the cells as a table row. The first column, with the model name, is `width` characters wide."""
    model, size, batch, dtype, eager, optimized, limit, rate, gain = cells
    line = f"{model:<{width}}  {size:>4}  {batch:>5}  {dtype:<8}  {eager:>6}  {optimized:>9}  {limit:>6}"
    return f"{line}  {rate:>8}  {gain:>6}"


def _print_rows(measured: Sequence[Timing], width: int) -> None:
    """Print one line for each dtype of a model and batch size."""
    eager_float32 = measured[0].seconds["eager"]
    for timing in measured:
        eager, optimized = timing.seconds["eager"], timing.seconds["optimized"]
        fastest = min(eager, optimized)
        if "products" in timing.seconds:
            limit = f"{timing.seconds['products'] * 1e3:.1f}"
        else:  # on a GPU
            limit = f"{timing.memory['eager' if eager == fastest else 'optimized'] / 1e6:.0f}"
        cells = (
            timing.model,
            str(timing.size),
            str(timing.batch),
            timing.dtype,
            f"{eager * 1e3:.1f}",
            f"{optimized * 1e3:.1f}",
            limit,
            f"{timing.batch / fastest:.1f}",
            f"{eager_float32 / fastest:.2f}",
        )
        print(_line(cells, width), flush=True)


def _print_kernels() -> None:
    """Print which of torch's kernels are replaced on this CPU."""
    used = {"linear layers of an eager model in float32, by oneDNN": kernels.onednn_linear_is_better()}
    for dtype in (torch.float32, torch.bfloat16):
        packed = kernels.fastest_linear(dtype) is kernels.PackedLinear
        used[f"packed linear layers in {str(dtype).removeprefix('torch.')}, by oneDNN"] = packed
    used["products of attention in float32, by oneDNN"] = kernels.float32_products_are_exact()
    used["softmax by powers of two"] = bool(kernels.kernel_choice().powers)
    print("\nKernels on this CPU, in place of torch's own (VITLITE_KERNELS=torch turns all of them off):")
    for kernel, is_used in used.items():
        print(f"  {kernel}: {'yes' if is_used else 'no'}")


def _print_wrong(timings: Sequence[Timing]) -> int:
    """Print the results that differ too much, and return the exit code."""
    code = 0
    for timing in timings:
        for name, value in timing.wrong().items():
            code = 1
            print(
                f"Wrong: {timing.model} at {timing.size} px, batch {timing.batch}, {name} in {timing.dtype} differs by "
                f"{value:.1e} of the largest logit"
            )
    return code
