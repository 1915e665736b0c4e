"""`vitlite info`: all about one model, with its layers."""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from vitlite.cli.tables import bold, count, table, terminal_width, with_bold_header
from vitlite.config import PRESETS
from vitlite.costs import layers
from vitlite.weights import zoo


def add_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite info`."""
    parser.add_argument("name", help="a name that `vitlite list` shows, a preset, or timm's full name")
    parser.add_argument("--json", action="store_true", help="the record and its layers, for programs")


def run(args: Namespace) -> int:
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
