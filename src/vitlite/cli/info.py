"""`vitlite info`: all about one model, with its layers."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from vitlite.cli.tables import bold, count, table, terminal_width, with_bold_header
from vitlite.config import PRESETS, ViTConfig
from vitlite.costs import Layer, layers
from vitlite.weights import zoo

NAMED_FIELDS = {"image_size", "patch_size", "dim", "depth", "heads", "mlp_dim", "num_classes", "pool"}


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite info`."""
    parser.add_argument("name", help="a name that `vitlite list` shows, a preset, or timm's full name")
    parser.add_argument("--json", action="store_true", help="the record and its layers, for programs")


def run(args: Namespace) -> int:
    """One record, and the network layer by layer."""
    record = zoo.info(args.name)
    if args.json:
        shapes = [layer._asdict() for layer in layers(record.config)]
        print(json.dumps(fields_of(record) | {"layers": shapes}, indent=1))
    else:
        _print_facts(record)
        print()
        _print_layers(record)
    return 0


def fields_of(record: zoo.Record) -> dict[str, Any]:
    """The record as JSON takes it, with what its network costs."""
    return asdict(record) | {"params": record.params, "gmacs": round(record.gmacs, 6)}


def _print_facts(record: zoo.Record) -> None:
    facts = {name: value for name, value in _facts(record).items() if value}
    widest = max(len(name) for name in facts)
    print(bold(record.name))
    for name, value in facts.items():
        print(f"{name:<{widest}}  {value}")


def _facts(record: zoo.Record) -> dict[str, str]:
    """What stands above the layers; what is empty is left out."""
    unpinned = "the first download pins it" if record.repo else ""
    return {
        "preset": f"{record.preset} (its default)" if record.default else record.preset,
        "timm's name": record.alias if record.layout.startswith("timm") else "",
        "comes from": f"https://huggingface.co/{record.repo}" if record.repo else "vitlite itself, no download",
        "commit": record.commit or unpinned,
        "sha256": record.sha256 or unpinned,
        "licence": record.license,
        "top-1": "" if record.top1 is None else f"{record.top1:g} %",
        "classes": _classes(record),
        "network": _network(record.config),
        "also": ", ".join(_unlike_the_usual(record.config)),
        "pictures": _preparation(record),
        "size": f"{count(record.params)} parameters, {record.gmacs:.2f} GMACs an image",
        "note": record.note,
    }


def _classes(record: zoo.Record) -> str:
    number = str(record.config.num_classes)
    return f"{number} ({record.labels_name})" if record.labels_name else number


def _network(c: ViTConfig) -> str:
    return f"dim {c.dim}, depth {c.depth}, heads {c.heads}, mlp_dim {c.mlp_dim}, patch {c.patch_size}, pool {c.pool}"


def _unlike_the_usual(config: ViTConfig) -> list[str]:
    """The fields that no other line names, where they are not those of the plain preset."""
    usual = PRESETS["vit_base_16"].to_dict()
    unlike = []
    for field, value in config.to_dict().items():
        if field not in NAMED_FIELDS and value != usual[field]:
            unlike.append(f"{field}={value}")
    return unlike


def _preparation(record: zoo.Record) -> str:
    """How a picture becomes the network's input."""
    height, width = record.config.size
    crop = f"resized for a centre crop of {record.crop_pct:g}" if record.crop_mode == "center" else "squashed"
    mean, std = _spaced(record.mean), _spaced(record.std)
    return f"{height} x {width} px, {crop}, {record.interpolation}, mean {mean}, std {std}"


def _spaced(numbers: Iterable[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)


def _print_layers(record: zoo.Record) -> None:
    header = ["layer", "output", "params", "GMACs", "weight"]
    rows = [_row(layer) for layer in layers(record.config)]
    rows.append(["all", "", count(record.params), f"{record.gmacs:.3f}", ""])
    print(with_bold_header(table(header, rows, terminal_width())))


def _row(layer: Layer) -> list[str]:
    return [
        layer.name,
        _shape(layer.output),
        count(layer.params) if layer.params else "-",
        f"{layer.macs / 1e9:.3f}" if layer.macs else "-",
        _shape(layer.weight) or "-",
    ]


def _shape(sides: Iterable[int]) -> str:
    return " x ".join(str(side) for side in sides)
