"""A small model for the tests of training, and images that it can learn, in memory and on disk."""

from pathlib import Path
from typing import Any, NoReturn

import torch
from PIL import Image

from vitlite import ViT, ViTConfig
from vitlite.images import Preprocess, TransformConfig
from vitlite.training import History, ImageData, Settings

CONFIG = ViTConfig(image_size=16, patch_size=8, dim=32, depth=2, heads=2, mlp_dim=64, num_classes=2)
TRANSFORM = TransformConfig(
    size=(16, 16), resize=(16, 16), mode="center", interpolation="bicubic", mean=(0.5,) * 3, std=(0.25,) * 3
)


def new_model(config: ViTConfig = CONFIG) -> ViT:
    """Return a model with the same random weights each time."""
    torch.manual_seed(0)
    model = ViT(config)
    model.preprocess = Preprocess(TRANSFORM, model)
    return model


def settings(**changes: Any) -> Settings:
    """Return settings that learn within few steps, in float32."""
    return Settings(**{"epochs": 2, "batch": 8, "lr": 1e-3, "bfloat16": False, "ema": 0.9} | changes)


def stripes(count: int, seed: int = 0, classes: tuple[str, ...] = ("lying", "standing")) -> ImageData:
    """Return noisy images with a bright stripe that lies or stands."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 100, (count, 3, 16, 16), generator=generator)
    labels = torch.arange(count) % 2
    where = torch.randint(0, 12, (count,), generator=generator)
    for image, label, first in zip(images, labels, where.tolist(), strict=True):
        (image if label else image.mT)[:, :, first : first + 4] += 120
    return ImageData(images.to(torch.uint8), labels, classes)


def stripes_in_folders(folder: Path) -> Path:
    """Write train/ with 24 images and val/ with 8, in a folder per class."""
    for split, data in (("train", stripes(24)), ("val", stripes(8, seed=1))):
        assert isinstance(data.images, torch.Tensor)
        for i, (image, label) in enumerate(zip(data.images, data.labels.tolist(), strict=True)):
            path = folder / split / data.classes[label] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return folder


def small_cifar10(folder: Path, names: bytes = b"plane\ncar\n") -> Path:
    """Write CIFAR-10's binary version, with 300 images of noise in each file, of two classes."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        rows = torch.randint(0, 256, (300, 3073), generator=generator, dtype=torch.uint8)
        rows[:, 0] = torch.arange(300) % 2
        (folder / f"{name}.bin").write_bytes(rows.numpy().tobytes())
    (folder / "batches.meta.txt").write_bytes(names)
    return folder


class Killed(Exception):
    """Stands for the end of a process."""


def stop(history: History) -> NoReturn:
    """End the process, as `after_epoch`."""
    raise Killed


def several_labels(folder: Path, count: int = 48) -> Path:
    """Write images with a bright stripe that lies, stands, both or neither, and a table of their labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 100, (count, 3, 16, 16), generator=generator)
    where = torch.randint(0, 12, (2, count), generator=generator).tolist()
    lines = ["path,labels"]
    folder.mkdir()
    for i, image in enumerate(images):
        labels = [name for k, name in enumerate(("lying", "standing")) if (i >> k) % 2]
        if "lying" in labels:
            image[:, where[0][i] : where[0][i] + 4] += 120
        if "standing" in labels:
            image[:, :, where[1][i] : where[1][i] + 4] += 120
        Image.fromarray(image.clamp(max=255).to(torch.uint8).permute(1, 2, 0).numpy()).save(folder / f"{i}.png")
        lines.append(f"{i}.png,{'|'.join(labels)}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder / "labels.csv"
