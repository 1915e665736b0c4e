"""How long a FlexiViT takes by the size of its patches, beside patches of 16 pixels: docs/lab_notes/patches.json.

    python benchmarks/patches.py

One picture at a time, optimized, on one thread. All sizes take turns; the median of the processor's time counts.
The weights are random, which takes as long.
"""

import json
import sys
from pathlib import Path
from statistics import median
from time import process_time

import torch

import vitlite

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

from generate_sizes import NAME, PATCHES, TIMES, USUAL  # noqa: E402

ROUNDS = 5


def main() -> None:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    models = {patch: vitlite.create(NAME, weights=None, patch_size=patch).eval() for patch in PATCHES}
    faster = {patch: vitlite.optimize(model) for patch, model in models.items()}
    image = torch.randn(1, 3, 240, 240)
    times: dict[int, list[float]] = {patch: [] for patch in PATCHES}
    for _ in range(ROUNDS):
        for patch, model in faster.items():
            start = process_time()
            model(image)
            times[patch].append(process_time() - start)
    usual = median(times[USUAL])
    ratios = {patch: round(median(taken) / usual, 2) for patch, taken in times.items()}
    TIMES.write_text(json.dumps(ratios, indent=1) + "\n", encoding="utf-8")
    for patch, ratio in ratios.items():
        print(f"patch {patch}: {ratio} of patch {USUAL}'s {1000 * usual:.0f} ms")


if __name__ == "__main__":
    main()
