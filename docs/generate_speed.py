"""Write the table of speeds in README.md and docs/index.md. With --check, only report whether it is stale.

The times are those of docs/lab_notes/speed.json, which benchmarks/libraries.py measures.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from sections import write_section

DOCS = Path(__file__).parent
BEGIN, END = "<!-- speed: docs/generate_speed.py -->", "<!-- end of speed -->"
MODEL, SIZE, BATCHES = "vit_base_16", 224, (1, 8)
COLUMNS = {
    "optimized": "optimized",
    "vitlite": "eager",
    "timm": "timm",
    "transformers": "transformers",
    "ONNX Runtime": "ONNX Runtime",
    "OpenVINO": "OpenVINO",
}


def table() -> Iterator[str]:
    """Yield the rows of the table and a sentence about loading."""
    report = json.loads((DOCS / "lab_notes" / "speed.json").read_text(encoding="utf-8"))
    machine = report["machine"]
    cores, cpu, torch_version = machine["cores"], machine["cpu"], machine["torch"].partition("+")[0]
    yield f"\n\nViT-B/16 on {cores} cores of an {cpu} with torch {torch_version}, in milliseconds:\n"
    yield f"||{'|'.join(COLUMNS.values())}|"
    yield "|---|" + "--:|" * len(COLUMNS)
    for cell in report["cells"]:
        if cell["model"] == MODEL and cell["size"] == SIZE and cell["batch"] in BATCHES:
            images = "1 image" if cell["batch"] == 1 else f"{cell['batch']} images"
            times = [f"{cell['seconds'][name] * 1e3:,.0f}" if name in cell["seconds"] else "" for name in COLUMNS]
            yield f"|{images}, {cell['dtype']}|**{times[0]}**|{'|'.join(times[1:])}|"
    ours, theirs = report["creation"]["vitlite"], report["creation"]["timm"]  # seconds, MB, seconds of the import
    yield (
        f"\nCreating this model from a local file takes {ours[0]:.2f} s and {ours[1]:.0f} MB with vitlite, "
        f"and {theirs[0]:.2f} s and {theirs[1]:.0f} MB with timm.\n"
        f"Importing vitlite after torch takes {ours[2]:.2f} s, and importing timm {theirs[2]:.2f} s.\n"
    )


if __name__ == "__main__":
    pages = (DOCS.parent / "README.md", DOCS / "index.md")
    sys.exit(max(write_section(page, BEGIN, END, table()) for page in pages))
