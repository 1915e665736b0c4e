"""`vitlite list` and `vitlite info`, and the tables that all commands print. Imports no torch."""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from vitlite import zoo
from vitlite.config import PRESETS
from vitlite.errors import UnknownNameError, closest
from vitlite.sizes import layers


def table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Text in columns: the first to the left, the others to the right; what `width` cannot hold is left out.

    >>> print(table(["name", "params"], [["vit_tiny_16", "5.7 M"], ["vit_base_16", "86.6 M"]]))
    name         params
    vit_tiny_16   5.7 M
    vit_base_16  86.6 M
    """
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while width is not None and len(widths) > 1 and sum(widths) + 2 * (len(widths) - 1) > width:
        widths.pop()  # the last columns matter least
    lines = []
    for row in cells:
        padded = [f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths))]  # noqa: B905
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that `stream` (stdout, if not given) writes to; None where it is none."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    wanted = os.environ.get("COLUMNS", "")
    return int(wanted) if wanted.isdecimal() else os.get_terminal_size(stream.fileno()).columns or 80


def bold(text: str, stream: TextIO | None = None) -> str:
    """The text in bold, on a terminal that has it, unless NO_COLOR asks otherwise."""
    stream = stream or sys.stdout
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain else f"\033[1m{text}\033[0m"


def with_bold_header(text: str) -> str:
    """A table whose first line is bold on a terminal."""
    first, *rest = text.split("\n")
    return "\n".join([bold(first), *rest])


def count(number: float) -> str:
    """A large number for people.

    >>> count(86_567_656), count(17_564_000_000), count(512)
    ('86.6 M', '17.6 G', '512')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:.0f}"


def add_list_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite list`."""
    parser.add_argument("pattern", nargs="?", default="*", help="part of a name, or 'vit_*.dino*'")
    parser.add_argument("--json", action="store_true", help="all fields of each record, for programs")


def run_list(args: Namespace) -> int:
    """The zoo's checkpoints as a table."""
    pattern = args.pattern if set(args.pattern) & set("*?[") else f"*{args.pattern}*"
    records = list(dict.fromkeys(map(zoo.find, zoo.list_models(pattern))))
    if not records:
        names = [*PRESETS, *zoo.RECORDS]
        raise UnknownNameError(
            f"No model matches {args.pattern!r}.{closest(args.pattern.strip('*'), names)} "
            "Any part of a name will do, and * and ?, such as 'vit_*.dino*'; without a pattern, all are listed."
        )
    if args.json:
        print(json.dumps([_fields(record) for record in records], indent=1))
        return 0
    rows = [
        (
            f"{record.name}{' *' if record.default else ''}",
            count(record.params),
            f"{record.config.size[0]} px",
            f"{record.gmacs:.1f}",
            "-" if record.top1 is None else f"{record.top1:.1f} %",
            record.license,
        )
        for record in records
    ]
    print(with_bold_header(table(["name", "params", "image", "GMACs", "top-1", "licence"], rows, terminal_width())))
    default = next((record for record in records if record.default), None)
    if default:
        print(f"* what the preset's own name stands for: {default.preset} is {default.name}")
    return 0


def add_info_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite info`."""
    parser.add_argument("name", help="a name that `vitlite list` shows, a preset, or timm's full name")
    parser.add_argument("--json", action="store_true", help="the record and its layers, for programs")


def run_info(args: Namespace) -> int:
    """One record, and the network layer by layer."""
    record = zoo.info(args.name)
    if args.json:
        shapes = [layer._asdict() for layer in layers(record.config)]
        print(json.dumps(_fields(record) | {"layers": shapes}, indent=1))
        return 0
    facts = _facts(record)
    widest = max(map(len, facts))
    print(bold(record.name))
    print("\n".join(f"{name:<{widest}}  {value}" for name, value in facts.items()))
    rows = [
        (
            layer.name,
            " x ".join(map(str, layer.output)),
            count(layer.params) if layer.params else "-",
            f"{layer.macs / 1e9:.3f}" if layer.macs else "-",
            " x ".join(map(str, layer.weight)) or "-",
        )
        for layer in layers(record.config)
    ]
    rows.append(("all", "", count(record.params), f"{record.gmacs:.3f}", ""))
    print("\n" + with_bold_header(table(["layer", "output", "params", "GMACs", "weight"], rows, terminal_width())))
    return 0


def _facts(record: zoo.Record) -> dict[str, str]:
    """What `info` prints above the layers."""
    c = record.config
    usual = {"image_size", "patch_size", "dim", "depth", "heads", "mlp_dim", "num_classes", "pool"}
    ordinary = PRESETS["vit_base_16"]
    special = [f"{k}={v}" for k, v in c.to_dict().items() if k not in usual and v != getattr(ordinary, k)]
    crop = f"resized for a centre crop of {record.crop_pct:g}" if record.crop_mode == "center" else "squashed"
    mean, std = (" ".join(f"{value:g}" for value in values) for values in (record.mean, record.std))
    facts = {
        "preset": record.preset + (" (its default)" if record.default else ""),
        "timm's name": record.alias if record.layout == "timm" else "",
        "comes from": f"https://huggingface.co/{record.repo}" if record.repo else "vitlite itself, no download",
        "commit": record.commit or ("the first download pins it" if record.repo else ""),
        "sha256": record.sha256 or ("the first download pins it" if record.repo else ""),
        "licence": record.license,
        "top-1": "" if record.top1 is None else f"{record.top1:g} %",
        "classes": f"{c.num_classes} ({record.labels_name})" if record.labels_name else str(c.num_classes),
        "network": f"dim {c.dim}, depth {c.depth}, heads {c.heads}, mlp_dim {c.mlp_dim}, patch {c.patch_size}, "
        f"pool {c.pool}",
        "also": ", ".join(special),
        "pictures": f"{c.size[0]} x {c.size[1]} px, {crop}, {record.interpolation}, mean {mean}, std {std}",
        "size": f"{count(record.params)} parameters, {record.gmacs:.2f} GMACs an image",
        "note": record.note,
    }
    return {name: value for name, value in facts.items() if value}


def _fields(record: zoo.Record) -> dict[str, Any]:
    return asdict(record) | {"params": record.params, "gmacs": round(record.gmacs, 6)}
