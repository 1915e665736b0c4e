"""`vitlite info`: show a model from the zoo, the disk or the Hub, and the layers of the network."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vitlite.cli.options import add_weights, expanded, is_place
from vitlite.cli.tables import bold, count, table, terminal_width, with_bold_header
from vitlite.config import ViTConfig
from vitlite.errors import InputError, printable
from vitlite.nn import costs
from vitlite.nn.costs import Layer, layers
from vitlite.presets import PRESETS
from vitlite.zoo import registry
from vitlite.zoo.purposes import purpose_of
from vitlite.zoo.text import WITHOUT_TEXT, text_record

if TYPE_CHECKING:
    from vitlite.checkpoints.build import Source
    from vitlite.images import TransformConfig

NAMED_FIELDS = {"image_size", "patch_size", "dim", "depth", "heads", "mlp_dim", "num_classes", "pool"}


class About(NamedTuple):
    """The facts about a model."""

    title: str
    config: ViTConfig
    fields: dict[str, Any]  # for --json
    facts: dict[str, str]  # for the terminal, one per line; empty values are not shown


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `vitlite info`."""
    parser.add_argument(
        "name",
        type=expanded,
        metavar="MODEL",
        help="name (also timm's), folder, file or Hub repository (owner/name)",
    )
    add_weights(parser)
    parser.add_argument("--json", action="store_true", help="print all facts and the layers as JSON")


def run(args: Namespace) -> int:
    """Print the facts about a checkpoint or a file, and a table of the layers."""
    if args.weights is not None or is_place(args.name):
        about = _about_file(args)
    else:
        about = _about_record(registry.info(args.name))
    if args.json:
        print(json.dumps(about.fields | {"layers": [layer._asdict() for layer in layers(about.config)]}, indent=1))
    else:
        _print_facts(about)
        print()
        _print_layers(about.config)
    return 0


def _about_file(args: Namespace) -> About:
    """Describe the model that `load` or `create` returns."""
    from vitlite.factory import create, load
    from vitlite.images import Preprocess

    model = load(args.name) if args.weights is None else create(args.name, weights=args.weights)
    transform = model.preprocess.transform if isinstance(model.preprocess, Preprocess) else None
    config, labels, origin = model.config, model.labels, cast("Source", model.source)
    fields = {
        "source": str(origin.path),
        "sha256": origin.sha256,
        "config": config.to_dict(),
        "labels": None if labels is None else list(labels),
        "preprocessing": transform.to_dict() if transform else None,
        "params": costs.params(config),
        "gmacs": round(costs.gmacs(config), 6),
    }
    facts = {
        "comes from": f"https://huggingface.co/{origin.repo}" if origin.repo else str(origin.path),
        "commit": origin.commit or "",
        "sha256": origin.sha256,
        "classes": f"{config.num_classes} ({_first_few(labels)})" if labels else str(config.num_classes),
        "labels": f"not used: {origin.report.unlabelled}" if origin.report.unlabelled else "",
        "network": _network(config),
        "also": ", ".join(_unusual_fields(config)),
        "images": _preprocessing(transform) if transform else "preprocessing unknown",
        "size": f"{count(costs.params(config))} parameters, {costs.gmacs(config):.2f} GMACs per image",
    }
    return About(args.weights or args.name, config, fields, facts)


def _first_few(labels: Sequence[str]) -> str:
    return ", ".join(label[:20] for label in labels[:3]) + (", ..." if len(labels) > 3 else "")


def _preprocessing(transform: "TransformConfig") -> str:
    from vitlite.images import NaFlexTransform

    (height, width), (rows, columns) = transform.size, transform.resize
    resized = f"resized to {rows} x {columns}" if transform.mode == "squash" else f"resized to cover {rows} x {columns}"
    size = f"{height} x {width} px, {resized}"
    if isinstance(transform, NaFlexTransform):
        size = f"keeps the aspect ratio, at most {transform.max_patches} patches of {transform.patch_size} px"
    mean, std = _spaced(transform.mean), _spaced(transform.std)
    return f"{size}, {transform.interpolation}, mean {mean}, std {std}"


def fields_of(record: registry.Record) -> dict[str, Any]:
    """Return a record as a dictionary for JSON, including its number of parameters and its GMACs."""
    return asdict(record) | {"params": record.params, "gmacs": round(record.gmacs, 6)}


def _print_facts(about: About) -> None:
    known = {name: value for name, value in about.facts.items() if value}
    widest = max(len(name) for name in known)
    print(bold(printable(about.title)))
    for name, value in known.items():
        print(printable(f"{name:<{widest}}  {value}"))


def _about_record(record: registry.Record) -> About:
    unpinned = "recorded at the first download" if record.repo else ""
    facts = {
        "good for": purpose_of(record),
        "preset": f"{record.preset} (its default)" if record.default else record.preset,
        "timm's name": record.alias if record.format.startswith("timm") else "",
        "comes from": f"https://huggingface.co/{record.repo}" if record.repo else "vitlite itself, no download",
        "commit": record.commit or unpinned,
        "sha256": record.sha256 or unpinned,
        "licence": record.license,
        "top-1": "" if record.top1 is None else f"{record.top1:g} %",
        "classes": _classes(record),
        "network": _network(record.config),
        "also": ", ".join(_unusual_fields(record.config)),
        "images": _preprocessing_of(record),
        "text": _text_of(record),
        "size": f"{count(record.params)} parameters, {record.gmacs:.2f} GMACs per image",
        "note": record.note,
    }
    return About(record.name, record.config, fields_of(record), facts)


def _classes(record: registry.Record) -> str:
    number = str(record.config.num_classes)
    return f"{number} ({record.labels_name})" if record.labels_name else number


def _network(c: ViTConfig) -> str:
    return f"dim {c.dim}, depth {c.depth}, heads {c.heads}, mlp_dim {c.mlp_dim}, patch {c.patch_size}, pool {c.pool}"


def _unusual_fields(config: ViTConfig) -> list[str]:
    """List the config fields that differ from a plain ViT, without the fields that other lines show."""
    usual = PRESETS["vit_base_16"].to_dict()
    unusual = []
    for field, value in config.to_dict().items():
        if field not in NAMED_FIELDS and value != usual[field]:
            unusual.append(f"{field}={value}")
    return unusual


def _preprocessing_of(record: registry.Record) -> str:
    height, width = record.config.size
    crop = f"resized for a centre crop of {record.crop_pct:g}" if record.crop_mode == "center" else "squashed"
    size = f"{height} x {width} px, {crop}"
    if record.config.resample == "naflex":
        patches, patch_size = record.config.position_rows, record.config.patch_size
        size = f"keeps the aspect ratio, at most {patches} patches of {patch_size} px"
    mean, std = _spaced(record.mean), _spaced(record.std)
    return f"{size}, {record.interpolation}, mean {mean}, std {std}"


def _text_of(record: registry.Record) -> str:
    """Return where the text half is, or why there is none. For checkpoints trained without text, return ""."""
    try:
        return f"https://huggingface.co/{text_record(record.name).repo}"
    except InputError as error:
        reason = str(error).partition(": ")[2]
        return "" if reason.startswith(WITHOUT_TEXT) else f"none: {reason.rstrip('.')}"


def _spaced(numbers: Iterable[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)


def _print_layers(config: ViTConfig) -> None:
    header = ["layer", "output", "params", "GMACs", "weight"]
    rows = [_row(layer) for layer in layers(config)]
    rows.append(["all", "", count(costs.params(config)), f"{costs.gmacs(config):.3f}", ""])
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
