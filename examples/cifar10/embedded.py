"""Train `vit_nano_4.cifar10`, the model inside the wheel, from scratch; a killed run is resumed when started again.

    python examples/cifar10/embedded.py DATA OUT

DATA is CIFAR-10's binary version (see prepare.py). Of the 50,000 training images the last 1,000 are held out to
watch; the test images are not read.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from vitlite.checkpoints.metadata import transform_from_record
from vitlite.images import Preprocess
from vitlite.nn.positions import sincos_positions
from vitlite.nn.vit import ViT
from vitlite.presets import PRESETS
from vitlite.training import Settings, read_cifar10, train
from vitlite.zoo import registry


def mimetic(model: ViT) -> None:
    """Initialise attention like that of trained networks: tokens attend to similar ones, and values partly cancel them.

    Trockman & Kolter 2023, "Mimetic Initialization of Self-Attention Layers": for each head the product of query and
    key weights is near 0.7 (noise + identity), that of value and output weights near 0.4 (noise - identity).
    """
    d, heads = model.config.dim, model.config.heads
    with torch.no_grad():
        patches = model.config.grid[0] * model.config.grid[1]
        model.pos_embed[:, -patches:] = sincos_positions(model.config.grid, d)
        for block in model.blocks:
            pairs = [_halves(0.7, 0.7, d, d // heads) for _ in range(heads)]
            queries, keys = [query for query, _ in pairs], [key for _, key in pairs]
            values, out = _halves(0.4, -0.4, d, d)
            block.attn.qkv.weight.copy_(torch.cat([*queries, *keys, values]))
            block.attn.proj.weight.copy_(out.T)


def _halves(noise: float, identity: float, dim: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return two matrices (rank, dim) whose product a.T @ b is the best approximation of noise + identity."""
    u, s, v = torch.linalg.svd(noise * torch.randn(dim, dim) / dim**0.5 + identity * torch.eye(dim))
    root = s[:rank].sqrt()[:, None]
    return root * u.T[:rank], root * v[:rank]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=26)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = ViT(PRESETS["vit_nano_4"])
    mimetic(model)
    model.preprocess = Preprocess(transform_from_record(registry.find("vit_nano_4.cifar10")), model)
    settings = Settings(epochs=args.epochs, seed=args.seed, optimizer="muon", lr=3e-3)
    data, validation = (read_cifar10(args.data, split) for split in ("train", "val"))
    train(model, data, args.out, settings, validation=validation, after_epoch=lambda history: print(history[-1]))


if __name__ == "__main__":
    main()
