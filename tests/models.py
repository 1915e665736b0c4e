"""A small model for tests that need one on the disk."""

from pathlib import Path

import torch

from vitlite import ViT, ViTConfig
from vitlite.images import Preprocess, Recipe


def small_model(folder: Path, labels: tuple[str, ...]) -> Path:
    """Saves a model that tells pictures apart only by chance, but has labels and preprocessing."""
    torch.manual_seed(0)
    config = ViTConfig(image_size=16, patch_size=8, dim=32, depth=2, heads=2, mlp_dim=64, num_classes=len(labels))
    model = ViT(config).eval()
    torch.nn.init.normal_(model.head.weight)
    model.labels = labels
    half = (0.5, 0.5, 0.5)
    recipe = Recipe(size=(16, 16), resize=(16, 16), mode="squash", interpolation="bilinear", mean=half, std=half)
    model.preprocess = Preprocess(recipe, model)
    model.save(folder)
    return folder
