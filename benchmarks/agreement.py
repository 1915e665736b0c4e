"""How often optimized models give the answers of the model as created: float32, bfloat16, and int8, were there one.

    python benchmarks/agreement.py DATA [--model vit_tiny_16.deit_fb_in1k] [--weights PATH] [--images 2000]

DATA is CIFAR-10's binary version (examples/cifar10/prepare.py), whose test pictures the model's own preprocessing
enlarges: what counts is not whether an answer is right, but whether it is that of float32. int8 is computed in float32,
with weights rounded per channel and inputs per token to 256 steps, in the blocks' linear layers.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitlite
from vitlite.speed.optimize import optimize
from vitlite.training.datasets import Pictures, read_cifar10

BATCH = 50


class Int8(nn.Module):
    """A linear layer as int8 would compute it, but for the order of its sums."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        step = linear.weight.abs().amax(1, keepdim=True) / 127
        self.weight, self.bias = (linear.weight / step).round() * step, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        step = ((high - low) / 255).clamp(min=1e-8)
        zero = (-low / step).round()
        return F.linear(((x / step).round() + zero).clamp(0, 255).sub(zero) * step, self.weight, self.bias)


def int8(model: vitlite.ViT) -> vitlite.ViT:
    """The model with every linear layer of its blocks in int8."""
    for name, module in list(model.blocks.named_modules()):
        if isinstance(module, nn.Linear):
            model.blocks.set_submodule(name, Int8(module))
    return model


RIGHT = "as created, float32"
KINDS: dict[str, Callable[[vitlite.ViT], vitlite.ViT]] = {
    RIGHT: lambda model: model,
    "optimized, float32": optimize,
    "as created, bfloat16": lambda model: model.bfloat16(),
    "optimized, bfloat16": lambda model: optimize(model, dtype=torch.bfloat16),
    "int8": int8,
}


def answers(models: dict[str, vitlite.ViT], pictures: Pictures, count: int) -> dict[str, Tensor]:
    """The logits of each model for the first pictures: (count, k) each."""
    found: dict[str, list[Tensor]] = {kind: [] for kind in models}
    with torch.inference_mode():
        for rows in torch.arange(count).split(BATCH):
            images = models[RIGHT].preprocess(list(pictures.images[rows]))
            for kind, model in models.items():
                found[kind].append(model(images.to(model.dtype)).float())
    return {kind: torch.cat(parts) for kind, parts in found.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="vit_tiny_16.deit_fb_in1k")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=int, default=2000)
    args = parser.parse_args()
    given = {"weights": args.weights} if args.weights else {}
    models = {kind: make(vitlite.create(args.model, **given).eval()) for kind, make in KINDS.items()}
    logits = answers(models, read_cifar10(args.data, "test"), args.images)
    right = logits[RIGHT]
    best, second = right.softmax(1).topk(2, 1).values.unbind(1)
    sure = best - second >= 0.1
    print(f"{args.model}, {args.images} pictures; where float32's best is ahead by 0.1 or more: {int(sure.sum())}\n")
    print("| | same top-1 | same, where ahead | RMS difference | largest difference |\n|---|---|---|---|---|")
    for kind, answer in logits.items():
        same, difference = answer.argmax(1) == right.argmax(1), answer - right
        rms = difference.square().mean().sqrt() / right.square().mean().sqrt()
        most = difference.abs().max() / right.abs().max()
        print(f"| {kind} | {same.float().mean():.2%} | {same[sure].float().mean():.2%} | {rms:.1e} | {most:.1e} |")


if __name__ == "__main__":
    main()
