"""A linear classifier on frozen features with 1, 5, 10 or 25 images a class: the embedded model beside DeiT-Tiny.

    python examples/cifar10/fewshot.py DATA WEIGHTS

DATA is CIFAR-10's binary version (see prepare.py), WEIGHTS the file of timm's deit_tiny_patch16_224.fb_in1k. It is the
few-shot measure of the ViT paper, as `vitlite probe` has it. Ten draws of images from the held-out thousand, which
the embedded model has not learnt from; the first 2,000 test images tell how well. Kept in results/fewshot.json, and
drawn in docs/images/few_shots.png.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor

import vitlite
from vitlite.inference.predict import embed
from vitlite.plots import draw_few_shots
from vitlite.retrieval import probe
from vitlite.training import ImageData, read_cifar10

RESULTS = Path(__file__).parent / "results" / "fewshot.json"
PLOT = Path(__file__).parents[2] / "docs" / "images" / "few_shots.png"
EMBEDDED, DEIT = "vit_nano_4.cifar10", "vit_tiny_16.deit_fb_in1k"
SHOTS, DRAWS, TESTED = (1, 5, 10, 25), 10, 2000


def vectors(model: vitlite.ViT, data: ImageData) -> Tensor:
    """Return the input of the head: (n, d)."""
    found = [vector for _, vector in embed(model, data.images)]
    return torch.stack([vector for vector in found if isinstance(vector, Tensor)])


def few_shots(model: vitlite.ViT, few: ImageData, test: ImageData) -> dict[int, list[float]]:
    """Return the accuracy of each draw, by the number of images per class."""
    known, unseen = vectors(model, few), vectors(model, test)
    return probe(known, few.labels, unseen, test.labels, shots=SHOTS, draws=DRAWS).few


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("weights", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    untrained = vitlite.create(EMBEDDED, weights=None).eval()
    untrained.preprocess = vitlite.create(EMBEDDED).preprocess
    models = {
        f"{DEIT}, ImageNet-1k": vitlite.optimize(vitlite.create(DEIT, weights=args.weights)),
        f"{EMBEDDED}, CIFAR-10": vitlite.create(EMBEDDED),
        f"{EMBEDDED}, random weights": untrained,
    }
    few, test = (read_cifar10(args.data, split) for split in ("val", "test"))
    test = test.subset(torch.arange(len(test)) < TESTED)
    curves, results = [], {}
    for name, model in models.items():
        found = few_shots(model, few, test)
        curves.append((name, found))
        results[name] = {str(n): [round(mean(draws), 4), round(stdev(draws), 4)] for n, draws in found.items()}
        print(name, results[name], flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw_few_shots(curves).save(PLOT)


if __name__ == "__main__":
    main()
