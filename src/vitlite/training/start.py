"""The model that a run begins with, where it takes more than `create` or `load`."""

from collections.abc import Sequence

import torch

from vitlite.config import ViTConfig
from vitlite.factory import create
from vitlite.images import Preprocess, Recipe
from vitlite.model import ViT
from vitlite.weights import zoo
from vitlite.weights.sidecar import recipe_from_record


def random_model(
    name: str,
    *,
    num_classes: int,
    image_size: int | tuple[int, int] | None = None,
    drop_path: float | None = None,
    checkpointing: bool | None = None,
    device: torch.device | str | None = None,
) -> ViT:
    """A model of the zoo with random weights, and with the preprocessing that is usual for it."""
    model = create(
        name,
        weights=None,
        num_classes=num_classes,
        image_size=image_size,
        drop_path=drop_path,
        checkpointing=checkpointing,
        device=device,
    )
    model.preprocess = Preprocess(usual_recipe(name, model.config), model)
    return model


def head_for(model: ViT, classes: Sequence[str]) -> tuple[str, ...]:
    """The classes to train on, in the order of the model's head: where it knows these very classes, that of its labels.

    A head that knows others, as many by chance, is replaced by a new one, as one of another number is.
    """
    labels = tuple(model.labels or ())
    if set(labels) == set(classes) and len(labels) == len(classes):
        return labels
    if labels:
        model.reset_head(len(classes))
    return tuple(classes)


def usual_recipe(name: str, config: ViTConfig) -> Recipe:
    """That of the zoo's record of this name; else the middle of the picture, as large as its shape allows."""
    if name in zoo.NAMES:
        return recipe_from_record(zoo.find(name), config.size)
    half = (0.5,) * config.channels
    return Recipe(size=config.size, resize=config.size, mode="center", interpolation="bicubic", mean=half, std=half)
