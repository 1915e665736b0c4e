"""`vitlite bench`: how fast vitlite is on this machine, and what to use. Other libraries: benchmarks/libraries.py."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitlite.cli.options import check_device, expanded_path, positive, positives
from vitlite.cli.tables import bold
from vitlite.config import ViTConfig
from vitlite.errors import InputError, fit_to_print, shown
from vitlite.fast import verdicts
from vitlite.fast.bench import Timing, advice, time_model
from vitlite.fast.measure import machine, random_model
from vitlite.presets import preset
from vitlite.storage import obstacle, write_json

Choice = Sequence[tuple[str, int, Sequence[int]]]  # presets to measure, each in some size, with its batches
CHOICE: Choice = [
    ("vit_tiny_16", 224, (1, 8)),
    ("vit_small_16", 224, (1, 8)),
    ("vit_base_16", 224, (1, 8)),
    ("vit_base_16", 384, (1,)),
    ("vit_large_16", 224, (1,)),
]
QUICK: Choice = [("vit_base_16", 224, (1, 8))]
GPU_BATCHES = (1, 64)
SIZES, BATCHES = (224,), (1, 8)  # of presets that are named
ROUNDS, QUICK_ROUNDS = 10, 3
HEADER = ("model", "px", "batch", "dtype", "created", "optimized", "limit", "images/s", "gain")
GPU_HEADER = tuple("MB" if title == "limit" else title for title in HEADER)
LEGEND = (
    "created, optimized: ms for a batch; limit: its matrix products alone; gain: times as fast as created in float32"
)
GPU_LEGEND = (
    "created, optimized: ms for a batch; MB: of the GPU, at most, beside the weights; "
    "gain: times as fast as created in float32"
)


class Case(NamedTuple):
    """A network to measure."""

    name: str
    config: ViTConfig
    batches: Sequence[int]


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite bench`."""
    add = parser.add_argument
    add("--models", metavar="NAME,...", help="presets; default: a choice from tiny to large")
    add("--sizes", type=positives, metavar="PIXELS,...", help="with --models: image sizes; default: 224")
    add("--batch", type=positives, metavar="N,...", help="with --models: batch sizes; default: 1,8")
    add("--rounds", type=positive, metavar="N", help=f"turns of each; default: {ROUNDS}, with --quick {QUICK_ROUNDS}")
    add("--device", default="cpu", help="such as cpu, cuda, mps; default: cpu")
    add("--quick", action="store_true", help="vit_base_16 alone, if no --models are named, and fewer turns")
    add(
        "--out",
        type=expanded_path,
        metavar="FILE",
        help="write the figures there as JSON, in place of what is there; default: nowhere",
    )


def run(args: Namespace) -> int:
    """Measures and says what to use; 1 if some way gives other answers than the model as created."""
    check_device(args.device)
    cases = _cases(args)
    if args.out:
        _check_out(args.out)  # before minutes are spent
    rounds = QUICK_ROUNDS if args.quick else ROUNDS
    timings = _measure(cases, args.rounds or rounds, args.out, torch.device(args.device))
    print()
    for sentence in advice(timings):
        print(sentence)
    if args.device == "cpu":
        _print_kernels()
    return _print_wrong(timings)


def _measure(cases: Sequence[Case], rounds: int, out: Path | None, device: torch.device) -> list[Timing]:
    """Measures one batch after the other, and prints it at once."""
    described = machine(device)
    print(_machine_line(described))
    print((LEGEND if device.type == "cpu" else GPU_LEGEND) + "\n")
    widths = _widths([case.name for case in cases])
    print(bold(_line(HEADER if device.type == "cpu" else GPU_HEADER, widths)), flush=True)
    timings: list[Timing] = []
    for name, config, batches in cases:
        model = random_model(config).to(device)
        for batch in batches:
            measured = time_model(model, name, batch, rounds)
            _print_rows(measured, widths)
            timings += measured
            if out:  # what is measured stays, should the run be stopped
                _write(out, {"machine": described, "timings": [asdict(timing) for timing in timings]})
    return timings


def _check_out(out: Path) -> None:
    """Makes sure that the figures can be written, and that only a file is replaced."""
    in_the_way = obstacle(out)
    if in_the_way:
        raise InputError(
            f"Cannot write the figures {shown(str(out))}: {in_the_way}. Name a .json file in a folder that exists and "
            "can be written."
        )


def _write(out: Path, figures: dict[str, Any]) -> None:
    try:
        write_json(out, figures)
    except OSError as error:
        raise InputError(
            f"Cannot write the figures {shown(str(out))}: {error.strerror}. Make room, or name another file."
        ) from error


def _cases(args: Namespace) -> list[Case]:
    """What to measure, with the batches that suit the device where none are named."""
    chosen = QUICK if args.quick else CHOICE
    if args.models:
        chosen = list(product(args.models.split(","), args.sizes or SIZES, [args.batch or BATCHES]))
    elif args.sizes or args.batch:
        raise InputError("--sizes and --batch belong to --models: what is measured without has its own. Name presets.")
    elif args.device != "cpu":
        chosen = [(name, size, GPU_BATCHES) for name, size, _ in chosen]
    return [Case(name, preset(name).replace(image_size=size), batches) for name, size, batches in chosen]


def _machine_line(described: dict[str, Any]) -> str:
    threads = f"{described['cores']} cores, {described['threads']} threads"
    line = f"{described['cpu']}, {threads}, torch {described['torch']}"
    if "device" in described:
        line = f"{described['device']}, CUDA {described['cuda']}; {line}"
    load = described.get("load", [0.0])[0]
    if load > 0.5:  # of a core, which another program has
        line += f"; load {load}: something else is running, and the figures are worth less"
    return line


def _widths(names: Sequence[str]) -> list[int]:
    longest = {"model": max(map(len, names)), "dtype": len("bfloat16")}
    return [max(len(title), longest.get(title, 6)) for title in HEADER]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Text in columns: name and dtype to the left, numbers to the right."""
    padded = []
    for title, cell, width in zip(HEADER, cells, widths, strict=True):
        padded.append(f"{cell:<{width}}" if title in ("model", "dtype") else f"{cell:>{width}}")
    return "  ".join(padded)


def _print_rows(measured: Sequence[Timing], widths: Sequence[int]) -> None:
    """One line for each dtype of one batch."""
    as_created = measured[0].seconds["vitlite"]
    for timing in measured:
        created, optimized = timing.seconds["vitlite"], timing.seconds["optimized"]
        quickest = min(created, optimized)
        name = "vitlite" if created == quickest else "optimized"
        limit = timing.seconds.get("products")
        cells = (
            timing.model,
            str(timing.size),
            str(timing.batch),
            timing.dtype,
            _milliseconds(created),
            _milliseconds(optimized),
            _milliseconds(limit) if limit else f"{timing.memory[name] / 1e6:.0f}",
            f"{timing.batch / quickest:.1f}",
            f"{as_created / quickest:.2f}",
        )
        print(_line(cells, widths), flush=True)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _print_kernels() -> None:
    """Which kernels computed, and why."""
    print("\nKernels of oneDNN and powers of two, in place of torch's own, on this machine:")
    for question, verdict in verdicts.known().items():
        print(fit_to_print(f"  {question}: {'used' if verdict.pays else 'not used'} ({verdict.why})"))
    place = verdicts.kept_in()
    if place and place.exists():
        print(f"Decided once, and kept in {shown(str(place), 1000)}. VITLITE_KERNELS=measure decides anew.")


def _print_wrong(timings: Sequence[Timing]) -> int:
    """Says which answers are not the model's; the exit code."""
    code = 0
    for timing in timings:
        for name, value in timing.wrong().items():
            code = 1
            print(
                f"Wrong: {timing.model} at {timing.size} px, batch {timing.batch}, {name} in {timing.dtype} differs by "
                f"{value:.1e} of the largest logit"
            )
    return code
