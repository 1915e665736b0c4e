"""Write the results in docs/lab_notes/cifar10.md from examples/cifar10/results; --check only compares."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sections import write_section

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "lab_notes" / "cifar10.md", ROOT / "examples" / "cifar10" / "results"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"
sys.path.insert(0, str(ROOT / "examples" / "cifar10"))


def read(name: str) -> Any:
    """One of the results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def section() -> Iterator[str]:
    """The lines between the marks."""
    yield from embedded_model()
    yield from few_images()
    yield from fine_tuning()
    yield from experiments()


def embedded_model() -> Iterator[str]:
    """How the model in the package was trained, epoch by epoch."""
    log = [json.loads(line) for line in (RESULTS / "embedded.jsonl").read_text(encoding="utf-8").splitlines()]
    minutes = sum(record["seconds"] for record in log) / 60
    top1 = read("embedded_eval.json")["top1"]
    yield f"""\
The float16 file in the package classifies **{top1:.2%}** of the 10,000 test images correctly (`vitlite eval`).
Its {len(log)} epochs took {minutes:.0f} minutes, most of them on one core. The loss is that of augmented images. The
accuracy is that of the averaged weights on the 1,000 validation images.

| epoch | loss | accuracy |
|--:|--:|--:|"""
    for record in log:
        if record["epoch"] in (1, 2) or record["epoch"] % 5 == 0 or record is log[-1]:
            yield f"| {record['epoch']} | {record['loss']:.3f} | {record['val_top1']:.1%} |"


def few_images() -> Iterator[str]:
    """What its features are worth."""
    few = read("fewshot.json")
    shots = next(iter(few.values()))
    yield f"""
## Few images per class

The few-shot measure of the ViT paper (`fewshot.py`): a linear classifier is fitted to the features of a frozen network.
The table shows the accuracy on 2,000 test images, as mean and deviation of ten draws.

![Accuracy of three networks by the images of each class](../images/few_shots.png)

| images of each class | {" | ".join(shots)} |
|---|{"--:|" * len(shots)}"""
    for name, by_shots in few.items():
        cells = " | ".join(f"{mean:.1%} ± {deviation:.1%}" for mean, deviation in by_shots.values())
        yield f"| {name} | {cells} |"
    yield """
The embedded model was trained on the other 49,000 images of CIFAR-10, and five images of each class are enough for it.
DeiT-Tiny has seen none of them, and comes close with 25. [`vitlite probe`](../cli.md) draws such curves for your own
images."""


def fine_tuning() -> Iterator[str]:
    """What trained weights are worth."""
    fine = read("finetune.json")
    yield f"""
## Fine-tuning against training from scratch

DeiT-Tiny on {fine["images"]:,} training images at {fine["pixels"]} pixels, {fine["epochs"]} epochs (`finetune.py`):
**{fine["fine-tuned"]["top1"]:.1%}** of {fine["test_images"]:,} test images from its ImageNet weights,
**{fine["from scratch"]["top1"]:.1%}** from random ones."""


def experiments() -> Iterator[str]:
    """Positions, pooling, and convolutions."""
    import ablation

    small = ablation.SMALL
    yield f"""
## The classic experiments

Each row is one pass over the 49,000 images, unless it says otherwise (`ablation.py`), with two seeds, measured on
the test images. The small ViT is {small.dim} wide and {small.depth} deep, with patches of {small.patch_size} pixels. If
several learning rates were tried, the best one on the 1,000 validation images is shown.

{ablation.table(read("ablation.json"))}"""


def main() -> int:
    """The command: 1 where the page is stale and was not written."""
    return write_section(PAGE, BEGIN, END, section())


if __name__ == "__main__":
    sys.exit(main())
