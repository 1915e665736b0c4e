"""Writes docs/models.md from the zoo's records; with --check only says whether it is up to date."""

import sys
from collections.abc import Iterator
from pathlib import Path

from vitlite.weights import zoo
from vitlite.config import PRESETS
from vitlite.weights.zoo import Record

PAGE = Path(__file__).with_name("models.md")


def page() -> Iterator[str]:
    """The lines of the page."""
    yield f"""\
# Models

{len(PRESETS)} presets and {len(zoo.RECORDS)} checkpoints. This page is generated from the records in
`src/vitlite/data/zoo.txt`; `vitlite info NAME` has all of a record, with the mean and deviation of its colours.

`vitlite.create` takes a checkpoint's name, timm's full name for it, or a preset's name, which means the checkpoint in
bold. Where none is bold the preset has no default, and `create` says what there is. A head of "512 numbers" is CLIP's
projection, and where there is no head the model returns what a head would have seen. GMACs are billions of
multiply-adds for one image of the size given. Top-1 is timm's published ImageNet-1k result; for CIFAR-10 it was
measured by this project. A licence that contains `nc` allows no commercial use."""
    for preset, config in PRESETS.items():
        yield f"\n## {preset}\n"
        yield f"{config.dim} wide, {config.depth} blocks of {config.heads} heads, MLP {config.mlp_dim:,}.\n"
        records = [record for record in zoo.RECORDS.values() if record.preset == preset]
        if not records:
            yield "No public checkpoint is known: `create` gives random weights, with `weights=None`."
            continue
        yield "| checkpoint | pixels | params (M) | GMACs | head | top-1 | crop | licence |"
        yield "|---|--:|--:|--:|---|--:|---|---|"
        yield from map(row, records)
    yield "\n## Not in the zoo\n"
    yield "| name | why |"
    yield "|---|---|"
    for alias, why in zoo.REFUSED.items():
        yield f"| `{alias}` | {why} |"


def row(record: Record) -> str:
    """One checkpoint."""
    name = f"**`{record.name}`**" if record.default else f"`{record.name}`"
    classes = record.config.num_classes
    head = record.labels_name or (f"{classes} numbers" if classes else "none")
    top1 = "" if record.top1 is None else f"{record.top1:.2f}"
    crop = f"{record.crop_pct:g}" + (" squash" if record.crop_mode == "squash" else "")
    size = record.config.size[0]
    cells = (name, size, f"{record.params / 1e6:.1f}", f"{record.gmacs:.2f}", head, top1, crop, record.license)
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    text = "\n".join(page()) + "\n"
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            sys.exit(f"{PAGE.name} is not what the records say. Run: python docs/{Path(__file__).name}")
    else:
        PAGE.write_text(text, encoding="utf-8")
