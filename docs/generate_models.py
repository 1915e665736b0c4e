"""Writes docs/models.md and its plot from the zoo's records; with --check only says whether it is up to date.

With --counts it prints how many of timm's names of Vision Transformers are in the zoo, are refused with a reason, or
are neither; timm has to be installed for that.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from math import log
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from vitlite.errors import UnknownNameError
from vitlite.presets import PRESETS
from vitlite.zoo import registry
from vitlite.zoo.purposes import COMMERCIAL, PURPOSES, purpose_of
from vitlite.zoo.registry import Record

DOCS = Path(__file__).parent
PAGE, PLOT = DOCS / "models.md", DOCS / "images" / "accuracy.svg"
SPEED = DOCS / "lab_notes" / "speed.json"  # of benchmarks/libraries.py
LEAST = 60.0  # percent, of what is drawn
FAMILIES = (  # timm's modules of Vision Transformers
    "vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos", "vision_transformer_sam", "deit",
    "eva", "beit", "naflexvit", "qwen3_vit", "gemma4_vit", "deepseek_vit",
)  # fmt: skip
ANSWERS = ("in the zoo", "refused", "neither")


TEXTS = {  # by the title of a purpose
    "Tiny, for tests": """\
Small enough for a test that runs at every commit. `vit_nano_4.cifar10` comes with the package. The others are a
download of 2 MB.""",
    "Text and images": """\
Image towers that were trained together with a text tower. Use them to compare images with captions: see
[Classify and search by words](words.md). The embedding that SigLIP was trained for is that of the rows without `gap` in
their name, which pool by attention. Rows with `gap` average the patches instead. SigLIP's authors squash the whole
image. timm, and so these rows, crop 0.9 of it.""",
    "Dense features": """\
Features of each patch, for depth, segmentation, matching, or a language model that reads images. `model.features`
returns them as a grid. DINOv3's rows pool the mean, as timm does. Meta's own code returns the class token, which
`pool="cls"` gives. DINOv3 has Meta's own licence, with terms on commercial use. These rows download timm's copies,
which need no login. Meta's own repositories are [gated](offline.md).""",
    "Features without labels": """\
Trained without labels, with one vector for each image: for search, for clustering, and as a start for training. MAE and
I-JEPA need further training.""",
    "To train further": """\
Trained on ImageNet-21k by the authors of the ViT paper. The published files have no head. Many checkpoints under
Classification are also a good start for training. Those with 11,821 classes or more have seen the most labels.""",
    "Classification": """\
Checkpoints that name what an image shows. Top-1 is timm's published result on ImageNet-1k.""",
}


class Start(NamedTuple):
    """A checkpoint to start with, what it is best for, and the reason."""

    what: str
    name: str
    why: str


FIVE = (
    Start("Smallest useful", "vit_tiny_16.augreg_in21k_ft_in1k", "for a phone, a test or a first try"),
    Start("Best for its cost on a CPU", "vit_small_16.deit3_fb_in22k_ft_in1k", "a third of the time of the default"),
    Start("Most accurate", "vit_giant_14.eva_m30m_ft_in22k_in1k_560", "a hundred times the arithmetic of the default"),
    Start("Best features without labels", "vit_base_14.dinov2_lvd142m_518", "for search, few labels and dense tasks"),
    Start("Free for any use", "vit_base_16.augreg2_in21k_ft_in1k", "the default of `vit_base_16`"),
)
INTRODUCTION = f"""\
vitlite has {len(registry.RECORDS)} checkpoints of {len(PRESETS)} presets. These five are a good start. Each line gives
top-1 on ImageNet-1k, the size of the weights in float32, the licence, and the time for one image on two CPU cores
after `optimize` ([the machine](lab_notes/measurements.md)). Where the time was not measured, the line gives the
arithmetic."""
ABOUT_PAGE = """\
The tables group the checkpoints by what they are good for. They are generated from `src/vitlite/zoo/data/zoo.txt`.
`vitlite info NAME` prints everything about a checkpoint, including what a phone leaves out of the tables. One
checkpoint comes with vitlite and needs no network: `vit_nano_4.cifar10`, for [32 x 32 pixels and ten
labels](#tiny-for-tests)."""
HOW_TO_READ = """\
`vitlite.create` takes the name of a checkpoint, timm's full name for it, or the name of a preset. The name of a preset
means its checkpoint in bold. A preset without one has no default, and `create` lists its checkpoints. A head of "512
numbers" is CLIP's projection. Without a head, the model returns its pooled features. GMACs are billions of
multiply-adds for one image of the given size. Unless `vitlite info` prints `mlp=`, a model has exact GELU. In Python,
this is `vitlite.info(NAME).config.mlp`. [Preprocessing](preprocessing.md) explains the crop. Top-1 on CIFAR-10 was
measured by this project."""
ABOUT_FRONT = """\
Every dot is a checkpoint that classifies ImageNet-1k and is free for commercial use. The line and the table show those
that are more accurate than all cheaper ones. Circles mark those of the five above that classify."""
ABOUT_LICENCES = """\
The weights belong to their authors. The licence is the one that timm or the repository states. The last column says
what its name tells about commercial use. For "its terms", read
the licence, which the page under "comes from" in `vitlite info NAME` names. The default of every preset allows
commercial use. In Python, it is the field `license` of `vitlite.info(NAME)`."""
ABOUT_PRESETS = "For a preset without checkpoints, `create` needs `weights=None` and gives random weights."
ABOUT_REFUSED = "A `*` stands for any letters. timm has most of these: `timm.create_model(name, pretrained=True)`."


def page() -> Iterator[str]:
    """The lines of the page."""
    yield f"# Models\n\n*Reference · for people who choose a checkpoint.*\n\n{paragraph(INTRODUCTION)}\n"
    yield from five()
    yield from frontier()
    yield f"\n## All checkpoints\n\n{paragraph(ABOUT_PAGE)}\n\n{paragraph(HOW_TO_READ)}\n"
    placed = records_by_purpose()
    yield from purposes(placed)
    for purpose in PURPOSES[::-1]:
        yield f"\n## {purpose.title}\n\n{paragraph(TEXTS[purpose.title])}\n"
        yield from folded(f"{len(placed[purpose.title])} checkpoints", checkpoints(placed[purpose.title]))
    yield from licences()
    yield f"\n## Presets\n\n{ABOUT_PRESETS}\n"
    yield from folded(f"{len(PRESETS)} presets", presets())
    yield f"\n## Not in the zoo\n\n{ABOUT_REFUSED}\n"
    yield from folded(f"{len(registry.REFUSED)} names", refusals())


def folded(summary: str, table: Iterator[str]) -> Iterator[str]:
    """A long table, open on a desk; docs/phone.js closes it on a phone."""
    yield f'<details open markdown="1">\n<summary>{summary}</summary>\n'
    yield from table
    yield "\n</details>"


def checkpoints(records: Sequence[Record]) -> Iterator[str]:
    """A table of them."""
    yield "| checkpoint | top-1 | licence | commercial use | pixels | params (M) | GMACs | head | crop |"
    yield "|---|--:|---|---|--:|--:|--:|---|---|"
    yield from map(row, records)


def paragraph(text: str) -> str:
    """A text in lines of at most 120 letters."""
    return fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def five() -> Iterator[str]:
    """Yield the lines about the five checkpoints to start with."""
    for start in FIVE:
        record = registry.RECORDS[start.name]
        top1 = f"{record.top1:.1f} %" if record.top1 else "no head"
        facts = f"{top1}, {4 * record.params / 1e6:,.0f} MB, {record.license}, {cost_of(record)} an image"
        yield f"- **{start.what}**: `{record.name}`  "
        yield f"  {facts}; {start.why}"


def measured() -> dict[tuple[str, tuple[int, int]], float]:
    """Return the seconds for one image in float32, by preset and size, from the table of speed."""
    cells = json.loads(SPEED.read_text(encoding="utf-8"))["cells"]
    return {
        (cell["model"], (cell["size"], cell["size"])): cell["seconds"]["optimized"]
        for cell in cells
        if (cell["batch"], cell["dtype"]) == (1, "float32")
    }


def cost_of(record: Record) -> str:
    """Return the time for one image if it was measured, else the arithmetic."""
    seconds = measured().get((record.preset, record.config.size))
    return f"{record.gmacs:,.0f} GMACs" if seconds is None else f"{1e3 * seconds:,.0f} ms"


def records_by_purpose() -> dict[str, list[Record]]:
    """Every record, under the title of what it is good for."""
    placed: dict[str, list[Record]] = {purpose.title: [] for purpose in PURPOSES}
    for record in registry.RECORDS.values():
        placed[purpose_of(record)].append(record)
    return placed


def purposes(placed: dict[str, list[Record]]) -> Iterator[str]:
    """Links to the sections."""
    yield "| good for | checkpoints | free for commercial use |"
    yield "|---|--:|--:|"
    for purpose in PURPOSES[::-1]:
        records = placed[purpose.title]
        free = sum(COMMERCIAL[record.license] == "yes" for record in records)
        anchor = purpose.title.lower().replace(",", "").replace(" ", "-")
        yield f"| [{purpose.title}](#{anchor}) | {len(records)} | {free} |"


def frontier() -> Iterator[str]:
    """The classifiers that none beats at less cost."""
    yield "\n## Accuracy for its cost\n"
    yield paragraph(ABOUT_FRONT)
    yield "\n![Top-1 against multiply-adds, with the front marked](images/accuracy.svg)\n"
    yield "| checkpoint | top-1 | GMACs | pixels | params (M) |"
    yield "|---|--:|--:|--:|--:|"
    for record in front(classifiers()):
        size = record.config.size[0]
        cells = f"{record.top1:.2f} | {record.gmacs:.1f} | {size} | {record.params / 1e6:.1f}"
        yield f"| `{record.name}` | {cells} |"


def classifiers() -> list[Record]:
    """All that classify ImageNet-1k and are free for commercial use."""
    return [
        record
        for record in registry.RECORDS.values()
        if record.labels_name == "imagenet-1k" and record.top1 and COMMERCIAL[record.license] == "yes"
    ]


def front(records: Sequence[Record]) -> list[Record]:
    """Those that no cheaper one beats."""
    best, found = LEAST, []  # the tests' models are beaten by anything else
    for record in sorted(records, key=lambda record: (record.gmacs, -(record.top1 or 0))):
        if (record.top1 or 0) > best:
            best = record.top1 or 0
            found.append(record)
    return found


def plot() -> str:
    """The drawing: a point a checkpoint, and a line along the front; to the right what computes more."""
    records = [record for record in classifiers() if (record.top1 or 0) > LEAST]
    width, height, left, bottom = 520, 420, 56, 380  # so that its letters can be read also on a phone
    lowest, highest, least, most = 68.0, 91.0, 0.3, 3000.0

    def place(record: Record) -> tuple[float, float]:
        across = log(record.gmacs / least) / log(most / least)
        up = ((record.top1 or 0) - lowest) / (highest - lowest)
        return left + across * (width - left - 20), bottom - up * (bottom - 20)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="14" fill="#333333">',
        "<title>Top-1 on ImageNet-1k against multiply-adds an image; the front is marked</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for percent in range(70, 91, 5):
        y = bottom - (percent - lowest) / (highest - lowest) * (bottom - 20)
        lines.append(f'<path d="M{left} {y:.0f} H{width - 20}" stroke="#dddddd"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 5:.0f}" text-anchor="end">{percent} %</text>')
    for gmacs in (1, 10, 100, 1000):
        x = left + log(gmacs / least) / log(most / least) * (width - left - 20)
        lines.append(f'<path d="M{x:.0f} 20 V{bottom}" stroke="#eeeeee"/>')
        lines.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{gmacs:,} GMACs</text>')
    best = front(records)
    for record in records:
        x, y = place(record)
        fill = "#e65100" if record in best else "#9fa8da"
        title = f"{record.name}: {record.top1:.2f} %, {record.gmacs:.1f} GMACs"
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}"><title>{title}</title></circle>')
    path = " L".join(f"{x:.1f} {y:.1f}" for x, y in map(place, best))
    lines.append(f'<path d="M{path}" fill="none" stroke="#e65100" stroke-width="1.5" opacity=".6"/>')
    for name in (start.name for start in FIVE):
        if registry.RECORDS[name] in records:
            x, y = place(registry.RECORDS[name])
            anchor = "end" if x > width / 2 else "start"
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" stroke="#333333"/>')
            lines.append(f'<text x="{x:.1f}" y="{y + 24:.1f}" text-anchor="{anchor}">{name.partition(".")[0]}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def licences() -> Iterator[str]:
    """How many checkpoints each licence covers."""
    yield "\n## Licences\n"
    yield f"{paragraph(ABOUT_LICENCES)}\n"
    yield "| licence | checkpoints | commercial use |"
    yield "|---|--:|---|"
    counts = Counter(record.license for record in registry.RECORDS.values())
    for licence, count in counts.most_common():
        yield f"| {licence} | {count} | {COMMERCIAL[licence]} |"


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
    first = (name, top1, record.license, COMMERCIAL[record.license])  # what a phone shows
    rest = (f"{size}", f"{record.params / 1e6:.1f}", f"{record.gmacs:.2f}", head(record), crop)
    return f"| {' | '.join((*first, *rest))} |"


def head(record: Record) -> str:
    """What the outputs of a checkpoint's head are."""
    if record.labels_name is not None:
        return record.labels_name
    if record.config.num_classes:
        return f"{record.config.num_classes} numbers"
    return "none"


def presets() -> Iterator[str]:
    """The shapes, and what each name stands for."""
    yield "| preset | checkpoints | default | patch | dim | depth | heads | MLP |"
    yield "|---|--:|---|--:|--:|--:|--:|--:|"
    counts = Counter(record.preset for record in registry.RECORDS.values())
    for name, config in PRESETS.items():
        mlp = f"{config.mlp_dim:,}{' SwiGLU' if config.mlp == 'swiglu' else ''}"
        shape = f"{config.patch_size} | {config.dim} | {config.depth} | {config.heads} | {mlp}"
        default = f"`{registry.DEFAULTS[name]}`" if name in registry.DEFAULTS else ""
        yield f"| `{name}` | {counts[name]} | {default} | {shape} |"


def refusals() -> Iterator[str]:
    """What the zoo does not have."""
    yield "| name | why | nearest in the zoo |"
    yield "|---|---|---|"
    for refusal in registry.REFUSED:
        nearest = f"`{refusal.nearest}`" if refusal.nearest else ""
        yield f"| `{refusal.name}` | {refusal.reason} | {nearest} |"


def answer_to(name: str) -> str:
    """What the zoo says to a name of timm's: one of ANSWERS."""
    here, refused, neither = ANSWERS
    try:
        registry.info(name)
    except UnknownNameError as error:
        return refused if str(error).startswith(f"{name!r} is not in the zoo: ") else neither
    return here


def print_counts() -> None:
    """Of timm's names with trained weights, family by family and together."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from peers import timm

    together: Counter[str] = Counter()
    for family in FAMILIES:
        counts = Counter(map(answer_to, timm.list_models(pretrained=True, module=family)))
        print(count_line(family, counts))
        together += counts
    print(count_line(f"timm {timm.__version__}", together))
    print(f"{len(registry.RECORDS)} checkpoints, with those that timm does not have")


def count_line(title: str, counts: Counter[str]) -> str:
    """How often each answer was given."""
    return "  ".join([f"{title:<26}", *(f"{counts[answer]:>4} {answer}" for answer in ANSWERS)])


def main() -> None:
    """Writes the page, or compares it, or counts."""
    if sys.argv[1:] == ["--counts"]:
        print_counts()
        return
    for file, text in ((PAGE, "\n".join(page()) + "\n"), (PLOT, plot())):
        if sys.argv[1:] != ["--check"]:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"{file.name} is not what the records say. Run: python docs/{Path(__file__).name}")


if __name__ == "__main__":
    main()
