"""How often optimized models give the answers of the eager model: float32, bfloat16 and int8.

    python benchmarks/agreement.py DATA [--model vit_tiny_16.deit_fb_in1k] [--weights PATH] [--images 2000]

DATA is CIFAR-10's binary version (examples/cifar10/prepare.py), whose test pictures the model's own preprocessing
enlarges: what counts is not whether an answer is right, but whether it is that of float32. int8 is calibrated on 32
training pictures. "cosine" is that of `embed`, on average.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import vitlite
from vitlite.fast.optimize import optimize
from vitlite.training import ImageData, read_cifar10

BATCH = 50


RIGHT = "eager, float32"
CALIBRATION = 32


def kinds(data: Path, make: Callable[[], vitlite.ViT]) -> dict[str, vitlite.ViT]:
    """The model in each way, by its name in the table."""
    calibration = list(read_cifar10(data, "train").images[:CALIBRATION])
    return {
        RIGHT: make(),
        "optimized, float32": optimize(make()),
        "eager, bfloat16": make().bfloat16(),
        "optimized, bfloat16": optimize(make(), dtype=torch.bfloat16),
        "optimized, int8": optimize(make(), dtype=torch.int8, calibrate=calibration),
    }


def answers(models: dict[str, vitlite.ViT], data: ImageData, count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The logits and the vectors of each model for the first pictures: (count, k) and (count, d) each."""
    logits: dict[str, list[Tensor]] = {kind: [] for kind in models}
    vectors: dict[str, list[Tensor]] = {kind: [] for kind in models}
    with torch.inference_mode():
        for rows in torch.arange(count).split(BATCH):
            images = models[RIGHT].preprocess(list(data.images[rows]))
            for kind, model in models.items():
                logits[kind].append(model(images.to(model.dtype)).float())
                vectors[kind].append(model.embed(images.to(model.dtype)).float())
    return {kind: torch.cat(parts) for kind, parts in logits.items()}, {
        kind: torch.cat(parts) for kind, parts in vectors.items()
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="vit_tiny_16.deit_fb_in1k")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=int, default=2000)
    args = parser.parse_args()
    given = {"weights": args.weights} if args.weights else {}
    models = kinds(args.data, lambda: vitlite.create(args.model, **given).eval())
    logits, vectors = answers(models, read_cifar10(args.data, "test"), args.images)
    right = logits[RIGHT]
    best, second = right.softmax(1).topk(2, 1).values.unbind(1)
    sure = best - second >= 0.1
    print(f"{args.model}, {args.images} pictures; where float32's best is ahead by 0.1 or more: {int(sure.sum())}\n")
    print(
        "| | same top-1 | same, where ahead | RMS difference | largest difference | cosine |\n|---|---|---|---|---|---|"
    )
    for kind, answer in logits.items():
        same, difference = answer.argmax(1) == right.argmax(1), answer - right
        rms = difference.square().mean().sqrt() / right.square().mean().sqrt()
        most = difference.abs().max() / right.abs().max()
        cosine = torch.cosine_similarity(vectors[kind], vectors[RIGHT]).mean()
        shares = f"{same.float().mean():.2%} | {same[sure].float().mean():.2%}"
        print(f"| {kind} | {shares} | {rms:.1e} | {most:.1e} | {cosine:.4f} |")


if __name__ == "__main__":
    main()
