"""The small CNN of the experiments: with its own classifier, and as the stem of a ViT.

It has the shape of the speed-run networks of Jordan 2024 ("94% on CIFAR-10 in 3.29 seconds"), and a third of their
width. Shapes: b images, h and w pixels.
"""

import torch
import torch.nn.functional as F
from torch import nn

from vitlite.images.transform import TransformConfig, normalise
from vitlite.training import Augmentation, ImageData
from vitlite.training.augment import SampleRandom, augment, shuffled


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


def stem() -> nn.Sequential:
    """Return the first two stages: (b, 3, 32, 32) -> (b, 64, 7, 7)."""
    return nn.Sequential(nn.Conv2d(3, 24, 2), nn.GELU(), Stage(24, 32), Stage(32, 64))


def small_cnn(classes: int) -> nn.Sequential:
    """Return the stem, a third stage, and a linear classifier: (b, 3, 32, 32) -> (b, classes)."""
    return nn.Sequential(stem(), Stage(64, 128), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(128, classes))


def train_cnn(
    data: ImageData, transform: TransformConfig, augmentation: Augmentation, *, epochs: int, seed: int, batch: int
) -> nn.Module:
    """Train by SGD with momentum, with a learning rate that rises and falls linearly, which suits CNNs."""
    torch.manual_seed(seed)
    model = small_cnn(len(data.classes)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = len(data) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=epochs * steps, pct_start=0.2, anneal_strategy="linear", cycle_momentum=False
    )
    for epoch in range(epochs):
        for rows in shuffled(seed, epoch, len(data))[: steps * batch].split(batch):
            changed = augment(data.fetch(rows)[0], SampleRandom(seed, epoch, rows), augmentation)
            images = normalise(255 * changed, transform, channels=3)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(images.contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits.float(), data.labels[rows], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model


def accuracy(model: nn.Module, data: ImageData, transform: TransformConfig) -> float:
    """Return the share of images whose best class is right."""
    model.eval()
    right = 0
    with torch.inference_mode():
        for rows in torch.arange(len(data)).split(250):
            answers = model(normalise(data.images[rows], transform, channels=3)).argmax(1)
            right += int((answers == data.labels[rows]).sum())
    return right / len(data)
