"""Measure the defaults of `vitlite train`: DeiT-Tiny is fine-tuned on few and on many images of CIFAR-10.

    python benchmarks/training_defaults.py DATA WEIGHTS --images 50,1000         # the defaults
    python benchmarks/training_defaults.py DATA WEIGHTS --images 1000 --epochs 10 --batch 128
    python benchmarks/training_defaults.py DATA WEIGHTS --images 50 --probe-head  # begin with the head of `probe`
    python benchmarks/training_defaults.py DATA WEIGHTS --uneven [--balance]     # 80 to 4 images of each class

DATA is CIFAR-10's binary version (see examples/cifar10/prepare.py), WEIGHTS the file of timm's
deit_tiny_patch16_224.fb_in1k. The seed decides which images are drawn, and the order of training. A smaller draw of
a seed is part of a larger one. The test images have equally many of each class. Each run prints a line of JSON.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import vitlite
from vitlite.checkpoints.metadata import transform_from_record
from vitlite.images import Preprocess
from vitlite.retrieval.probe import draw_per_class, fit
from vitlite.training import ImageData, Settings, read_cifar10, train
from vitlite.training.settings import usual_batch, usual_epochs, usual_layer_decay, usual_lr

NAME, CLASSES = "vit_tiny_16.deit_fb_in1k", 10
SHIFTS = (0.0, 0.5, 1.0)  # parts of the log prior that are subtracted from the logits after training


def new_model(args: argparse.Namespace) -> vitlite.ViT:
    """Return DeiT-Tiny with a new head."""
    torch.manual_seed(0)
    model = vitlite.create(NAME, weights=args.weights, num_classes=CLASSES, image_size=args.size)
    model.preprocess = Preprocess(transform_from_record(vitlite.info(NAME)).scaled(model.config.size), model)
    return model


def draw(data: ImageData, counts: Sequence[int], seed: int) -> ImageData:
    """Return so many random images of each class."""
    chosen = torch.zeros(len(data), dtype=torch.bool)
    for rows, count in zip(draw_per_class(data.labels, max(counts), seed).view(CLASSES, -1), counts, strict=True):
        chosen[rows[:count]] = True
    return data.subset(chosen)


def uneven_counts(seed: int) -> list[int]:
    """Return 80 to 4 images for the classes in a random order, each class 0.72 times the one before."""
    order = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(seed))
    return [round(80 * 0.05 ** (place / (CLASSES - 1))) for place in order.tolist()]


def outputs(model: vitlite.ViT, data: ImageData, *, embed: bool) -> Tensor:
    """Return the vectors or the logits of all images: (n, d) or (n, k)."""
    found = []
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for rows in torch.arange(len(data)).split(100):
            images = model.preprocess.batch(list(data.readable(rows)[0]))
            found.append((model.embed(images) if embed else model(images)).float())
    return torch.cat(found)


def settings(args: argparse.Namespace, images: int, seed: int) -> Settings:
    """Return the defaults of `vitlite train` for a number of images, with the changes of the command line."""
    return Settings(
        epochs=args.epochs or usual_epochs(images),
        batch=args.batch or usual_batch(images),
        lr=args.lr or usual_lr("adamw", frozen=False),
        layer_decay=usual_layer_decay(random_weights=False),
        balance=args.balance,
        seed=seed,
    )


def run(args: argparse.Namespace, data: ImageData, test: ImageData, seed: int) -> Iterator[dict[str, object]]:
    """Train, and yield the accuracy with what was done."""
    model, how = new_model(args), settings(args, len(data), seed)
    start = time.process_time()
    if args.probe_head:
        fit(outputs(model, data, embed=True), data.labels, CLASSES).put_on(model, data.classes)
    with TemporaryDirectory() as out:
        train(model, data, Path(out), how)
    seconds = round(time.process_time() - start)
    logits = outputs(model, test, embed=False)
    prior = torch.bincount(data.labels, minlength=CLASSES).log() - torch.tensor(len(data)).log()
    for shift in SHIFTS if args.uneven else SHIFTS[:1]:
        top1 = ((logits - shift * prior).argmax(1) == test.labels).double().mean().item()
        yield {
            "images": len(data),
            "seed": seed,
            "epochs": how.epochs,
            "batch": how.batch,
            "lr": how.lr,
            "balance": how.balance,
            "shift": shift,
            "probe_head": args.probe_head,
            "cpu_seconds": seconds,
            "top1": round(top1, 4),
        }


def numbers(text: str) -> list[int]:
    """Read integers with commas between them."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument(
        "--images", type=numbers, default="50,150,500,960,1010,2000,5000,20000", help="numbers of images"
    )
    parser.add_argument("--seeds", type=numbers, default="0,1,2")
    parser.add_argument("--size", type=int, default=64, help="pixels; default: %(default)s")
    parser.add_argument("--test", type=int, default=2000, help="number of test images; default: %(default)s")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--uneven", action="store_true", help="80 to 4 images of each class, instead of --images")
    parser.add_argument("--balance", action="store_true", help="as `vitlite train --balance`")
    parser.add_argument("--probe-head", action="store_true", help="begin with the classifier of `vitlite probe`")
    args = parser.parse_args()
    read = new_model(args).preprocess.pixels
    images, test = (read_cifar10(args.data, part, read) for part in ("train", "test"))
    test = draw(test, [args.test // CLASSES] * CLASSES, 0)
    for seed in args.seeds:
        evenly = [[count // CLASSES] * CLASSES for count in args.images]
        for counts in [uneven_counts(seed)] if args.uneven else evenly:
            for result in run(args, draw(images, counts, seed), test, seed):
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
