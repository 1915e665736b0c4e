"""Writes the costs in docs/distributed.md from what `vitlite bench` measured; --check only says if they are stale."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from sections import write_section

from vitlite.config import preset

ROOT = Path(__file__).parents[1]
PAGE, SPEED = ROOT / "docs" / "distributed.md", ROOT / "docs" / "speed.json"
BEGIN, END = "<!-- costs -->\n", "<!-- end of costs -->\n"
MODELS = ("vit_tiny_16", "vit_small_16", "vit_base_16", "vit_large_16")
PICTURES = 100_000_000
BYTES = 110_000  # of a picture: a JPEG of 500 x 375 pixels, as ImageNet's are on average
PREPARE = 0.002  # seconds of a core for such a picture: benchmarks/folder.py, reading alone
MACHINES, CORES = 32, 64


def section() -> Iterator[str]:
    """The lines between the marks."""
    report = json.loads(SPEED.read_text(encoding="utf-8"))
    about = report["machine"]
    yield f"Measured on {about['cpu']}, {about['date']}:\n"
    cluster = f"{MACHINES} machines of {CORES} cores"
    yield f"| model | dtype | images/s a core | core-hours | hours, {cluster} | MB/s to each machine | vectors, GB |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for name in MODELS:
        for dtype in ("float32", "bfloat16"):
            cells = [
                cell for cell in report["cells"] if (cell["model"], cell["size"], cell["dtype"]) == (name, 224, dtype)
            ]
            model = min(cell["seconds"]["optimized"] / cell["batch"] for cell in cells) * about["threads"]
            seconds = model + PREPARE  # of a core, for a picture
            hours = seconds * PICTURES / 3600
            traffic = CORES / seconds * BYTES / 1e6
            vectors = preset(name).embed_dim * 4 * PICTURES / 1e9
            figures = (
                f"{1 / seconds:.1f} | {hours:,.0f} | {hours / MACHINES / CORES:.1f} | {traffic:.0f} | {vectors:.0f}"
            )
            yield f"| {name} | {dtype} | {figures} |"


def main() -> int:
    """The command: 1 where the page is stale and was not written."""
    if not SPEED.exists():
        print(f"{SPEED.relative_to(ROOT)} is not there: run vitlite bench", file=sys.stderr)
        return 1
    return write_section(PAGE, BEGIN, END, section())


if __name__ == "__main__":
    sys.exit(main())
