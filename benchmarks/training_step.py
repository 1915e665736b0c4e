"""How long a training step takes with vitlite's modules and with timm's, in turns, and whether they learn alike.

    python benchmarks/training_step.py [--model vit_nano_4] [--batch 128] [--turns 10] [--curve DATA --steps 383]

Both have the same weights, pictures, precision and fused AdamW. With --curve (CIFAR-10's binary version, see
examples/cifar10/prepare.py) they also learn from the same pictures, and a third run with vitlite's modules and another
order of them shows how much loss curves differ by chance.
"""

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from peer_models import load
from torch import Tensor, nn

from vitlite import ViT
from vitlite.checkpoints.metadata import transform_from_record
from vitlite.config import ViTConfig
from vitlite.images.transform import normalise
from vitlite.kernels import float32_products, float32_products_are_exact
from vitlite.presets import PRESETS
from vitlite.training.augment import shuffled
from vitlite.training.data import read_cifar10
from vitlite.zoo import registry


class Trainee:
    """A network with its optimizer; `step` is what a training loop does."""

    def __init__(self, network: nn.Module, bfloat16: bool) -> None:
        self.network, self.bfloat16 = network.train(), bfloat16
        exact = isinstance(network, ViT) and float32_products_are_exact()
        self.products = float32_products if exact and not bfloat16 else nullcontext()  # as `vitlite train` does
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
        self.best = float("inf")  # seconds

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Forward, backward, clip, update: the loss."""
        start = time.perf_counter()
        with self.products:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
                logits = self.network(images)
            loss = F.cross_entropy(logits.float(), labels)
            loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.best = min(self.best, time.perf_counter() - start)
        return loss.item()


def ours(config: ViTConfig) -> nn.Module:
    """vitlite's modules, with the same random weights each time."""
    torch.manual_seed(0)
    return ViT(config)


def theirs(config: ViTConfig) -> nn.Module:
    """timm's modules, with the same weights as `ours`."""
    c = config
    build = load("timm").models.VisionTransformer
    network = build(
        c.size, c.patch_size, c.channels, c.num_classes, "token", c.dim, c.depth, c.heads, c.mlp_dim / c.dim
    )
    network.load_state_dict(ours(config).state_dict())
    return network


def speed(config: ViTConfig, batch: int, turns: int, bfloat16: bool) -> dict[str, float]:
    """The best step of each in milliseconds, and their ratio."""
    trainees = {"timm": Trainee(theirs(config), bfloat16), "vitlite": Trainee(ours(config), bfloat16)}
    images, labels = torch.randn(batch, config.channels, *config.size), torch.randint(config.num_classes, (batch,))
    for _ in range(turns):
        for trainee in trainees.values():
            kept = trainee.best
            trainee.step(images, labels)  # wakes the threads and does not count
            trainee.best = kept
            for _ in range(3):
                trainee.step(images, labels)
    best = {name: round(1000 * trainee.best, 1) for name, trainee in trainees.items()}
    return best | {"ratio": round(best["timm"] / best["vitlite"], 2)}


def curves(config: ViTConfig, batch: int, steps: int, folder: Path) -> dict[str, list[float]]:
    """The losses of both over the same pictures, and of vitlite's over others."""
    data = read_cifar10(folder, "train")
    recipe = transform_from_record(registry.find("vit_nano_4.cifar10"))
    runs = {"timm": (theirs, 0), "vitlite": (ours, 0), "vitlite, another order": (ours, 1)}
    losses: dict[str, list[float]] = {}
    for name, (build, seed) in runs.items():
        trainee, order = Trainee(build(config), True), shuffled(seed, 0, len(data))
        rows = order[: steps * batch].split(batch)
        losses[name] = []
        for some in rows:
            images = normalise(data.images[some], recipe, channels=3)
            losses[name].append(trainee.step(images, data.labels[some]))
    return losses


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="vit_nano_4", metavar="PRESET")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--curve", type=Path, metavar="DATA")
    parser.add_argument("--steps", type=int, default=383)
    args = parser.parse_args()
    config = PRESETS[args.model]
    for bfloat16 in (True, False):
        name = "bfloat16" if bfloat16 else "float32"
        print(json.dumps({"precision": name} | speed(config, args.batch, args.turns, bfloat16)), flush=True)
    if args.curve:
        losses = curves(config, args.batch, args.steps, args.curve)
        reference = torch.tensor(losses["timm"])
        for name, values in losses.items():
            difference = (torch.tensor(values) - reference).abs().mean().item()
            last = sum(values[-50:]) / len(values[-50:])
            print(f"{name}: mean of the last losses {last:.4f}, mean difference to timm's {difference:.4f}")


if __name__ == "__main__":
    main()
