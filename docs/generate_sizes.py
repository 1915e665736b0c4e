"""Write the table of FlexiViT's cost by patch size into docs/lab_notes/measurements.md; with --check, only check it.

The times are those of docs/lab_notes/patches.json, which benchmarks/patches.py measures.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from sections import write_section

from vitlite.nn.costs import gmacs
from vitlite.zoo import registry

LAB_NOTES = Path(__file__).parent / "lab_notes"
PAGE, TIMES = LAB_NOTES / "measurements.md", LAB_NOTES / "patches.json"
BEGIN, END = "<!-- patches: docs/generate_sizes.py -->", "<!-- end of patches -->"
NAME = "vit_small_16.flexivit_1200ep_in1k_240"
PATCHES = (8, 10, 12, 15, 16, 20, 24, 30, 40, 48)  # the paper's, on images of 240 pixels
USUAL = 16


def table() -> Iterator[str]:
    """Yield the lines of the table, a row for each patch size."""
    config = registry.find(NAME).config
    times = json.loads(TIMES.read_text(encoding="utf-8"))
    yield f"\n\n| patch | tokens | GMACs | GMACs / {USUAL}'s | time / {USUAL}'s |"
    yield "|--:|--:|--:|--:|--:|"
    for patch in PATCHES:
        resized = config.replace(patch_size=patch)
        share = gmacs(resized) / gmacs(config)
        yield f"| {patch} | {resized.tokens} | {gmacs(resized):.2f} | {share:.2f} | {times[str(patch)]:.2f} |"
    yield ""


if __name__ == "__main__":
    sys.exit(write_section(PAGE, BEGIN, END, table()))
