"""Writes the results in docs/training.md from examples/cifar10/results; with --check only says if they are up to date."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "training.md", ROOT / "examples" / "cifar10" / "results"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"
sys.path.insert(0, str(ROOT / "examples" / "cifar10"))


def section() -> Iterator[str]:
    """The lines between the marks."""
    log = [json.loads(line) for line in (RESULTS / "embedded.jsonl").read_text().splitlines()]
    measured = json.loads((RESULTS / "embedded_eval.json").read_text())
    yield f"**{measured['top1']:.2%}** of the 10,000 test pictures are recognised, measured by"
    yield "`vitlite eval cifar-10-batches-bin --model vit_nano_4.cifar10` with the float16 file in the package. Its learning"
    yield "curve, on the thousand pictures that were watched:\n"
    yield "| epoch | loss | accuracy of the averaged weights |"
    yield "|--:|--:|--:|"
    for record in log:
        if record["epoch"] in (1, 2) or record["epoch"] % 5 == 0 or record is log[-1]:
            yield f"| {record['epoch']} | {record['loss']:.3f} | {record['val_top1']:.1%} |"
    yield f"\n{sum(record['seconds'] for record in log) / 60:.0f} minutes in all, of which most on one core."


def main() -> int:
    """The command: 1 where the page is stale and was not written."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    new = before + BEGIN + "\n".join(section()) + "\n" + END + after
    if new != text and "--check" in sys.argv:
        print(f"{PAGE.name} is stale. Write it: python {Path(__file__).relative_to(ROOT)}", file=sys.stderr)
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
