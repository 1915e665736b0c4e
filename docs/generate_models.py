"""Writes docs/models.md from the zoo's records; with --check only says whether it is up to date."""

import sys
from collections.abc import Iterator
from pathlib import Path

from vitlite.config import PRESETS, ViTConfig
from vitlite.weights import zoo
from vitlite.weights.zoo import Record

PAGE = Path(__file__).with_name("models.md")


def page() -> Iterator[str]:
    """The lines of the page."""
    yield f"""\
# Models

{len(PRESETS)} presets and {len(zoo.RECORDS)} checkpoints. This page is generated from the records in
`src/vitlite/weights/data/zoo.txt`; `vitlite info NAME` has all of a record, with the mean and deviation of its colours.

`vitlite.create` takes a checkpoint's name, timm's full name for it, or a preset's name, which means the checkpoint in
bold. Where none is bold the preset has no default, and `create` says what there is. A head of "512 numbers" is CLIP's
projection, and where there is no head the model returns what a head would have seen. GMACs are billions of
multiply-adds for one image of the size given. Top-1 is timm's published ImageNet-1k result; for CIFAR-10 it was
measured by this project. A licence that contains `nc` allows no commercial use."""
    for preset, config in PRESETS.items():
        yield from section(preset, config)
    yield "\n## Not in the zoo\n"
    yield "| name | why |"
    yield "|---|---|"
    for alias, reason in zoo.REFUSED.items():
        yield f"| `{alias}` | {reason} |"


def section(preset: str, config: ViTConfig) -> Iterator[str]:
    """One preset, with a row for each of its checkpoints."""
    yield f"\n## {preset}\n"
    yield f"{config.dim} wide, {config.depth} blocks of {config.heads} heads, MLP {config.mlp_dim:,}.\n"
    records = [record for record in zoo.RECORDS.values() if record.preset == preset]
    if not records:
        yield "No public checkpoint is known: `create` gives random weights, with `weights=None`."
        return
    yield "| checkpoint | pixels | params (M) | GMACs | head | top-1 | crop | licence |"
    yield "|---|--:|--:|--:|---|--:|---|---|"
    for record in records:
        yield row(record)


def row(record: Record) -> str:
    """One checkpoint."""
    name = f"`{record.name}`"
    if record.default:
        name = f"**{name}**"
    size = record.config.size[0]
    top1 = "" if record.top1 is None else f"{record.top1:.2f}"
    crop = f"{record.crop_pct:g}"
    if record.crop_mode == "squash":
        crop += " squash"
    cells = (name, f"{size}", f"{record.params / 1e6:.1f}", f"{record.gmacs:.2f}", head(record), top1, crop)
    return f"| {' | '.join(cells)} | {record.license} |"


def head(record: Record) -> str:
    """What the outputs of a checkpoint's head are."""
    if record.labels_name is not None:
        return record.labels_name
    if record.config.num_classes:
        return f"{record.config.num_classes} numbers"
    return "none"


def main() -> None:
    """Writes the page, or compares it."""
    text = "\n".join(page()) + "\n"
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.name} is not what the records say. Run: python docs/{Path(__file__).name}")


if __name__ == "__main__":
    main()
