"""Trains the small CNN that teaches the embedded model, and that stands for "a CNN" in the table of experiments.

    python examples/cifar10/teacher.py DATA OUT [--epochs 12] [--seed 0]

DATA is CIFAR-10's binary version (see prepare.py); OUT becomes a safetensors file. Two million weights, after
the speed-run networks of Jordan (2024, "94% on CIFAR-10 in 3.29 seconds"), without their whitening.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Stage(nn.Sequential):
    """Two 3 x 3 convolutions and a 2 x 2 pool: (b, c, h, w) -> (b, d, h/2, w/2)."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__(
            nn.Conv2d(channels, dim, 3, padding=1, bias=False),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(dim),
            nn.GELU(),
            nn.Conv2d(dim, dim, 3, padding=1, bias=False),
            nn.BatchNorm2d(dim),
            nn.GELU(),
        )


class CNN(nn.Module):
    """Three stages; `features` is the map before the last, which the hybrid hands to a ViT."""

    def __init__(self, num_classes: int = 10, widths: tuple[int, int, int] = (64, 256, 256)) -> None:
        super().__init__()
        a, b, c = widths
        self.features = nn.Sequential(nn.Conv2d(3, 24, 2), nn.GELU(), Stage(24, a), Stage(a, b))  # (b, 256, 7, 7)
        self.last = nn.Sequential(Stage(b, c), nn.MaxPool2d(3), nn.Flatten())
        self.head = nn.Linear(c, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.last(self.features(images)))


def load_teacher(path: Path) -> CNN:
    """The trained network, for inference."""
    model = CNN()
    model.load_state_dict(load_file(path))
    return model.eval().to(memory_format=torch.channels_last)


def read(folder: Path, *names: str) -> tuple[Tensor, Tensor]:
    """Normalised images and labels of some batches of the binary version."""
    files = [bytearray((folder / f"{name}.bin").read_bytes()) for name in names]
    rows = torch.cat([torch.frombuffer(file, dtype=torch.uint8) for file in files]).view(-1, 3073)
    mean, std = (torch.tensor(v)[:, None, None] for v in (MEAN, STD))
    return (rows[:, 1:].reshape(-1, 3, 32, 32) / 255 - mean) / std, rows[:, 0].long()


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip, shift by up to 4 pixels, and blank a square of 8: (b, c, h, w) as given."""
    b, _, h, w = images.shape
    draw = torch.randint(0, 1 << 30, (5, b), generator=generator)
    images = torch.where((draw[0] % 2 == 0)[:, None, None, None], images.flip(3), images)
    padded = F.pad(images, (4, 4, 4, 4), mode="reflect")
    rows = (draw[1] % 9)[:, None] + torch.arange(h)
    columns = (draw[2] % 9)[:, None] + torch.arange(w)
    images = padded[torch.arange(b)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    down = (torch.arange(h) - (draw[3] % h)[:, None]).abs() < 4
    across = (torch.arange(w) - (draw[4] % w)[:, None]).abs() < 4
    return images.masked_fill((down[:, :, None] & across[:, None, :])[:, None], 0)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images whose best class is the label."""
    model.eval()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        right = sum((model(x).argmax(1) == y).sum() for x, y in zip(images.split(500), labels.split(500), strict=True))
    return float(right) / len(labels)


def train(model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int, seed: int, batch: int = 256) -> None:
    """SGD with momentum under a one-cycle learning rate, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    steps = len(labels) // batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.2, total_steps=epochs * steps, pct_start=0.2, anneal_strategy="linear", cycle_momentum=False
    )
    for epoch in range(epochs):
        model.train()
        start, total = time.perf_counter(), 0.0
        for index in torch.randperm(len(labels), generator=generator)[: steps * batch].view(steps, batch):
            x = augment(images[index], generator).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1}/{epochs}  loss {total / steps:.4f}  {seconds:.0f} s", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = CNN().to(memory_format=torch.channels_last)
    train(model, *read(args.data, *(f"data_batch_{i}" for i in range(1, 6))), epochs=args.epochs, seed=args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, args.out)
    print(f"test accuracy {accuracy(model, *read(args.data, 'test_batch')):.4f}  ->  {args.out}")


if __name__ == "__main__":
    main()
