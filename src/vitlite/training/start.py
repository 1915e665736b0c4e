"""The model that a run begins with, where it takes more than `create` or `load`, with the classes that it learns."""

from collections.abc import Sequence

import torch
from torch import nn

from vitlite.config import ViTConfig
from vitlite.errors import TrainError, shown
from vitlite.factory import create
from vitlite.images import Preprocess, Recipe
from vitlite.model import ViT
from vitlite.training.datasets import listed
from vitlite.training.names import rows_by_name
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


def usual_recipe(name: str, config: ViTConfig) -> Recipe:
    """That of the zoo's record of this name; else the middle of the picture, as large as its shape allows."""
    if name in zoo.NAMES:
        return recipe_from_record(zoo.find(name), config.size)
    half = (0.5,) * config.channels
    return Recipe(size=config.size, resize=config.size, mode="center", interpolation="bicubic", mean=half, std=half)


def take_classes(model: ViT, classes: Sequence[str]) -> str:
    """Gives a model as many other labels, and the rows of its head to those whom they are of.

    The same classes in another order keep their rows; of other classes, the head is a new one of zeros, as it would be
    of another number. Where nobody said what a trained head knows, it stays as it is.

    Args:
        model: With as many classes.
        classes: Their names, in the order that the head is to have.

    Returns:
        What to say about it, if anything.

    Raises:
        TrainError: It is a head whose rows nobody knows.
    """
    labels, model.labels = model.labels, classes
    names = listed([shown(name) for name in classes])
    if labels is None:
        if model.source is None or not any(weight.any() for weight in model.head.parameters()):
            return ""  # there is nothing in it, or it is of the caller's making
        return f"the model has no labels, so its head is taken to know these classes in order: {names}"
    rows = rows_by_name(labels, classes)
    if rows == list(range(len(labels))):
        return ""
    known = listed([shown(label) for label in labels])
    if not isinstance(model.head, nn.Linear):
        raise TrainError(
            f"The head knows the classes {known}, the data have {names}, and which weights of a "
            f"{type(model.head).__name__} are whose is not known.",
            python="Where it is meant for the classes of the data: model.labels = data.classes.",
        )
    for weight in model.head.parameters():
        weight.data.copy_(torch.zeros_like(weight) if rows is None else weight.data[rows])
    if rows is not None:
        return ""
    return (
        f"the head is a new one, as the model's own knew {known}, and the classes are {names}; classes that are named "
        "after its labels keep it"
    )
