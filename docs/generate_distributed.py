"""Write the costs in docs/lab_notes/measurements.md from those of benchmarks/libraries.py; --check only compares."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sections import write_section

from vitlite.presets import preset

ROOT = Path(__file__).parents[1]
NOTES = ROOT / "docs" / "lab_notes"
PAGE, SPEED = NOTES / "measurements.md", NOTES / "speed.json"
BEGIN, END = "<!-- costs -->\n", "<!-- end of costs -->\n"
MODELS = ("vit_tiny_16", "vit_small_16", "vit_base_16", "vit_large_16")
PICTURES = 100_000_000
BYTES = 110_000  # of a picture: a JPEG of 500 x 375 pixels, as ImageNet's are on average
PREPARE = 0.002  # seconds of a core for such a picture: benchmarks/folder.py, reading alone
MACHINES, CORES = 32, 64


def section() -> Iterator[str]:
    """The lines between the marks."""
    report = json.loads(SPEED.read_text(encoding="utf-8"))
    machine = report["machine"]
    yield f"Measured on {machine['cpu']}, {machine['date']}:\n"
    cluster = f"{MACHINES} machines of {CORES} cores"
    yield f"|model|dtype|images/s per core|core-hours|hours, {cluster}|MB/s to each machine|vectors, GB|"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for name in MODELS:
        for dtype in ("float32", "bfloat16"):
            seconds = core_seconds(report, name, dtype) + PREPARE
            yield f"|{name}|{dtype}|{'|'.join(costs(name, seconds))}|"


def core_seconds(report: dict[str, Any], name: str, dtype: str) -> float:
    """Seconds of one core for one picture of 224 pixels, in the quickest batch."""
    found = []
    for cell in report["cells"]:
        if (cell["model"], cell["size"], cell["dtype"]) == (name, 224, dtype):
            found.append(cell["seconds"]["optimized"] / cell["batch"])
    return min(found) * report["machine"]["threads"]


def costs(name: str, seconds: float) -> list[str]:
    """The last columns, for a model that takes so many seconds of a core for a picture."""
    core_hours = seconds * PICTURES / 3600
    hours = core_hours / MACHINES / CORES
    traffic = CORES / seconds * BYTES / 1e6
    vectors = preset(name).embed_dim * 4 * PICTURES / 1e9
    return [f"{1 / seconds:.1f}", f"{core_hours:,.0f}", f"{hours:.1f}", f"{traffic:.0f}", f"{vectors:.0f}"]


def main() -> int:
    """The command: 1 where the page is stale and was not written."""
    if not SPEED.exists():
        print(f"{SPEED.relative_to(ROOT)} is not there: run python benchmarks/libraries.py", file=sys.stderr)
        return 1
    return write_section(PAGE, BEGIN, END, section())


if __name__ == "__main__":
    sys.exit(main())
