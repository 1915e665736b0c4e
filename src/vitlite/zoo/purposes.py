"""The purposes and licence terms of checkpoints, for `vitlite list` and docs/models.md."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from vitlite.zoo.registry import Record

COMMERCIAL = {  # from a licence to whether it allows commercial use
    "apache-2.0": "yes",
    "mit": "yes",
    "cc-by-nc-4.0": "no",
    "fair-noncommercial-research-license": "no",
    "apple-amlr": "no",  # Apple Machine Learning Research
    "apple-ascl": "its terms",
    "dinov3-license": "its terms",
    "nvidia-open-model-license": "its terms",
    "qwen-community-1.0": "its terms",
}


class Purpose(NamedTuple):
    """A purpose of checkpoints, and patterns for their names. A checkpoint has the first purpose that matches."""

    title: str
    patterns: Sequence[str]


TESTS, TEXT = Purpose("Tiny, for tests", ("vit_nano_*", "vit_test*")), "Text and images"
CLASSIFICATION = Purpose("Classification", ("*",))
PURPOSES = (
    TESTS,
    Purpose(
        TEXT,
        ("*.clip_*", "*.siglip_[vw]*", "*.siglip_gap_[vw]*", "*.eva_clip_laion*", "*.eva_clip_merged*",
         "*.eva02_clip_*", "*.pe_core_*"),
    ),
    Purpose(
        "Dense features",
        ("*dinov3_*", "*.lingbot_*", "*.radio_*", "*dinov2_*", "*tipsv2_*", "*.siglip_gap_pali*", "*.intern300m_*",
         "*.pe_*", "*.qwen*", "*.aimv2_*"),
    ),
    Purpose("To train further", ("*.orig_in21k", "*.eva02_mim_*_ft_in22k_448")),
    Purpose(
        "Features without labels",
        ("*.eva02_mim_*", "*.dino", "*.mae", "*.ijepa_*", "*.beit3_pt", "*.beit3_indomain_pt"),
    ),
    CLASSIFICATION,
)  # fmt: skip


def purpose_of(record: Record) -> str:
    """Return the title of a checkpoint's purpose. A checkpoint with labels is for tests or for classification."""
    purposes = PURPOSES if record.labels_name is None else (TESTS, CLASSIFICATION)
    serving = [each.title for each in purposes if any(fnmatchcase(record.name, pattern) for pattern in each.patterns)]
    return serving[0]


def in_words(record: Record) -> str:
    """Return the text that `vitlite list` searches for a checkpoint, in lower case."""
    free = "free" if COMMERCIAL[record.license] == "yes" else ""
    texts = (record.name, record.alias, record.license, free, record.labels_name or "", purpose_of(record), record.note)
    return " ".join(texts).lower()
