"""Writes docs/models.md from the zoo's records; with --check only says whether it is up to date.

With --counts it prints how many of timm's names of Vision Transformers are in the zoo, are refused with a reason, or
are neither; timm has to be installed for that.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from vitlite.config import PRESETS
from vitlite.errors import UnknownNameError
from vitlite.weights import zoo
from vitlite.weights.zoo import Record

PAGE = Path(__file__).with_name("models.md")
COMMERCIAL = {  # whether a licence allows commercial use, as far as its name says
    "apache-2.0": "yes",
    "mit": "yes",
    "cc-by-nc-4.0": "no",
    "fair-noncommercial-research-license": "no",
    "apple-amlr": "no",  # Apple Machine Learning Research
    "apple-ascl": "its terms",
    "dinov3-license": "its terms",
    "nvidia-open-model-license": "its terms",
}
FAMILIES = (  # timm's modules of Vision Transformers
    "vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos", "vision_transformer_sam", "deit",
    "eva", "beit", "naflexvit", "qwen3_vit", "gemma4_vit", "deepseek_vit",
)  # fmt: skip
ANSWERS = ("in the zoo", "refused", "neither")


class Section(NamedTuple):
    """A purpose, and the checkpoints that serve it: those of these patterns that stand in no section before."""

    title: str
    patterns: Sequence[str]
    text: str


TESTS, CLASSIFICATION = "Tiny, for tests", "Classification"
SECTIONS = (
    Section(
        TESTS,
        ("vit_nano_*", "vit_test*"),
        """Small enough for a test that runs at every commit. `vit_nano_4.cifar10` comes with the package, the others
        are a download of 2 MB.""",
    ),
    Section(
        "Text and images",
        ("*.clip_*", "*.siglip_[vw]*", "*.siglip_gap_[vw]*", "*.eva_clip_laion*", "*.eva_clip_merged*"),
        """Image towers that were trained beside a text tower: what a caption's vector is compared with. The text towers
        are not here. SigLIP's trained embedding is that of the rows without `gap` in their name, which pool by
        attention; the `gap` row of the same name takes the mean of the patches instead, which was never trained to be
        an embedding. SigLIP's authors squash the whole picture, where timm, and so these rows, cut 0.9 of it.""",
    ),
    Section(
        "Dense features",
        ("*dinov3_*", "*.lingbot_*", "*.radio_*", "*dinov2_*", "*tipsv2_*", "*.siglip_gap_pali*", "*.intern300m_*"),
        """What each patch shows: for depth, segmentation, matching, or a language model that reads the patches.
        `features` hands them out as a grid. DINOv3's rows pool the mean, as timm does; Meta's own code hands out the
        class token, which `pool="cls"` gives. Its licence is Meta's, with terms of its own on commercial use. The rows
        fetch timm's copies, which need no login; Meta's own repositories are [gated](weights.md#gated-checkpoints).""",
    ),
    Section(
        "Features without labels",
        ("*.dino", "*.mae", "*.ijepa_*", "*.beit3_pt", "*.beit3_indomain_pt"),
        """Trained without labels, one vector an image: for search, for clustering, and to train from. MAE's and
        I-JEPA's are meant to be trained further.""",
    ),
    Section(
        "To train further",
        ("*.orig_in21k",),
        """Trained on ImageNet-21k by the authors of the ViT paper; the published files have no head. Many rows of the
        section before are good to train further too: those with 11,821 classes and more have seen the most labels.""",
    ),
    Section(CLASSIFICATION, ("*",), "What is in a picture. Top-1 is timm's published result on ImageNet-1k."),
)
INTRODUCTION = f"""\
{len(PRESETS)} presets and {len(zoo.RECORDS)} checkpoints, by what they are good for. This page is generated from the
records in `src/vitlite/weights/data/zoo.txt`; `vitlite info NAME` has all of a record, with notes, and the mean and
deviation of its colours."""
HOW_TO_READ = """\
`vitlite.create` takes a checkpoint's name, timm's full name for it, or a preset's name, which means the checkpoint in
bold. Where none is bold the preset has no default, and `create` says what there is. A head of "512 numbers" is CLIP's
projection, and where there is no head the model returns what a head would have seen. GMACs are billions of
multiply-adds for one image of the size given. For CIFAR-10 top-1 was measured by this project."""
ABOUT_LICENCES = """\
The weights are their authors', under the licence that timm or the repository states. Whether it allows commercial use
is said here as far as its name tells; "its terms" are to be read. The default of every preset allows it."""


def page() -> Iterator[str]:
    """The lines of the page."""
    yield f"# Models\n\n{paragraph(INTRODUCTION)}\n\n{paragraph(HOW_TO_READ)}\n"
    placed = records_by_section()
    yield from purposes(placed)
    yield from frontier()
    yield from licences()
    for section in SECTIONS[::-1]:
        yield f"\n## {section.title}\n\n{paragraph(section.text)}\n"
        yield "| checkpoint | pixels | params (M) | GMACs | head | top-1 | crop | licence | commercial use |"
        yield "|---|--:|--:|--:|---|--:|---|---|---|"
        for record in placed[section.title]:
            yield row(record)
    yield from presets()
    yield from refusals()


def paragraph(text: str) -> str:
    """A text in lines of at most 120 letters."""
    return fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def records_by_section() -> dict[str, list[Record]]:
    """Every record in the first section that has a pattern for it."""
    placed: dict[str, list[Record]] = {section.title: [] for section in SECTIONS}
    for record in zoo.RECORDS.values():
        placed[title_of(record)].append(record)
    return placed


def title_of(record: Record) -> str:
    """The section in which a record stands: heads that name things classify, whatever began their training."""
    sections = [section for section in SECTIONS if section.title in (TESTS, CLASSIFICATION)]
    if record.labels_name is None:
        sections = list(SECTIONS)
    for section in sections:
        if any(fnmatchcase(record.name, pattern) for pattern in section.patterns):
            return section.title
    raise ValueError(f"{record.name} has no section")


def purposes(placed: dict[str, list[Record]]) -> Iterator[str]:
    """Links to the sections."""
    yield "| good for | checkpoints | free for commercial use |"
    yield "|---|--:|--:|"
    for section in SECTIONS[::-1]:
        records = placed[section.title]
        free = sum(COMMERCIAL[record.license] == "yes" for record in records)
        anchor = section.title.lower().replace(",", "").replace(" ", "-")
        yield f"| [{section.title}](#{anchor}) | {len(records)} | {free} |"


def frontier() -> Iterator[str]:
    """The classifiers that none beats at less cost."""
    yield "\n## Accuracy for its cost\n"
    yield "Of all that classify ImageNet-1k and are free for commercial use: those that no cheaper one beats.\n"
    yield "| checkpoint | pixels | GMACs | params (M) | top-1 |"
    yield "|---|--:|--:|--:|--:|"
    best = 60.0  # the tests' models are beaten by anything else
    for record in sorted(zoo.RECORDS.values(), key=lambda record: (record.gmacs, -(record.top1 or 0))):
        if record.labels_name != "imagenet-1k" or record.top1 is None or COMMERCIAL[record.license] != "yes":
            continue
        if record.top1 > best:
            best = record.top1
            size = record.config.size[0]
            yield f"| `{record.name}` | {size} | {record.gmacs:.1f} | {record.params / 1e6:.1f} | {best:.2f} |"


def licences() -> Iterator[str]:
    """How many checkpoints each licence covers."""
    yield "\n## Licences\n"
    yield f"{paragraph(ABOUT_LICENCES)}\n"
    yield "| licence | checkpoints | commercial use |"
    yield "|---|--:|---|"
    counts = Counter(record.license for record in zoo.RECORDS.values())
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
    cells = (name, f"{size}", f"{record.params / 1e6:.1f}", f"{record.gmacs:.2f}", head(record), top1, crop)
    return f"| {' | '.join(cells)} | {record.license} | {COMMERCIAL[record.license]} |"


def head(record: Record) -> str:
    """What the outputs of a checkpoint's head are."""
    if record.labels_name is not None:
        return record.labels_name
    if record.config.num_classes:
        return f"{record.config.num_classes} numbers"
    return "none"


def presets() -> Iterator[str]:
    """The shapes, and what each name stands for."""
    yield "\n## Presets\n"
    yield "Where there is no checkpoint, `create` gives random weights, with `weights=None`.\n"
    yield "| preset | patch | dim | depth | heads | MLP | checkpoints | default |"
    yield "|---|--:|--:|--:|--:|--:|--:|---|"
    counts = Counter(record.preset for record in zoo.RECORDS.values())
    for name, config in PRESETS.items():
        mlp = f"{config.mlp_dim:,}{' SwiGLU' if config.mlp == 'swiglu' else ''}"
        shape = f"{config.patch_size} | {config.dim} | {config.depth} | {config.heads} | {mlp}"
        default = f"`{zoo.DEFAULTS[name]}`" if name in zoo.DEFAULTS else ""
        yield f"| `{name}` | {shape} | {counts[name]} | {default} |"


def refusals() -> Iterator[str]:
    """What the zoo does not have."""
    yield "\n## Not in the zoo\n"
    yield "A `*` stands for any letters. timm has most of them: `timm.create_model(name, pretrained=True)`.\n"
    yield "| name | why | nearest in the zoo |"
    yield "|---|---|---|"
    for refusal in zoo.REFUSED:
        nearest = f"`{refusal.nearest}`" if refusal.nearest else ""
        yield f"| `{refusal.name}` | {refusal.reason} | {nearest} |"


def answer_to(name: str) -> str:
    """What the zoo says to a name of timm's: one of ANSWERS."""
    here, refused, neither = ANSWERS
    try:
        zoo.info(name)
    except UnknownNameError as error:
        return refused if error.text.startswith(f"{name!r} is not in the zoo: ") else neither
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
    print(f"{len(zoo.RECORDS)} checkpoints, with those that timm does not have")


def count_line(title: str, counts: Counter[str]) -> str:
    """How often each answer was given."""
    return "  ".join([f"{title:<26}", *(f"{counts[answer]:>4} {answer}" for answer in ANSWERS)])


def main() -> None:
    """Writes the page, or compares it, or counts."""
    if sys.argv[1:] == ["--counts"]:
        print_counts()
        return
    text = "\n".join(page()) + "\n"
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.name} is not what the records say. Run: python docs/{Path(__file__).name}")


if __name__ == "__main__":
    main()
