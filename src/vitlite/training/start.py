"""The model that a run begins with, where it takes more than `create` or `load`."""

from collections.abc import Sequence
from logging import getLogger

import torch

from vitlite.config import ViTConfig
from vitlite.errors import TrainError, shown
from vitlite.factory import create
from vitlite.images import Preprocess, Recipe
from vitlite.model import ViT
from vitlite.training import distributed
from vitlite.training.datasets import listed
from vitlite.training.evaluate import classes_in_order
from vitlite.weights import zoo
from vitlite.weights.sidecar import recipe_from_record

_log = getLogger("vitlite")


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
    """The classes to train on, in the order of the model's head: that of its labels, where they are these very classes.

    Where none of them is a label, as with ImageNet's n01440764, the head goes on in their order, which is said. A head
    of which it is not clear what it knows of them is replaced by a new one, as one of another number of classes is.
    """
    if model.labels is None:
        return tuple(classes)
    try:
        found = classes_in_order(model, classes)
    except TrainError:
        model.reset_head(len(classes))
        return tuple(classes)
    if found != tuple(model.labels) and distributed.is_main():
        pairs = [f"{shown(name)} for {shown(label)}" for name, label in zip(found, model.labels, strict=False)]
        _log.warning("vitlite: no folder is named after a label, so the head goes on in order: %s", listed(pairs))
    return found


def usual_recipe(name: str, config: ViTConfig) -> Recipe:
    """That of the zoo's record of this name; else the middle of the picture, as large as its shape allows."""
    if name in zoo.NAMES:
        return recipe_from_record(zoo.find(name), config.size)
    half = (0.5,) * config.channels
    return Recipe(size=config.size, resize=config.size, mode="center", interpolation="bicubic", mean=half, std=half)
