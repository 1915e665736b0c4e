"""The model that a run begins with, where it takes more than `create` or `load`, with the classes that it learns."""

import re
from collections.abc import Sequence

import torch
from torch import nn

from vitlite.checkpoints.metadata import transform_from_record
from vitlite.config import ViTConfig
from vitlite.errors import TrainError, shown
from vitlite.factory import create
from vitlite.images import Preprocess, TransformConfig
from vitlite.nn.vit import ViT
from vitlite.training.datasets import listed
from vitlite.training.evaluate import classes_in_order
from vitlite.training.names import rows_by_name
from vitlite.zoo import registry


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
    model.preprocess = Preprocess(usual_transform(name, model.config), model)
    return model


def usual_transform(name: str, config: ViTConfig) -> TransformConfig:
    """That of the zoo's record of this name; else the middle of the picture, as large as its shape allows."""
    if name in registry.NAMES:
        return transform_from_record(registry.find(name), config.size)
    half = (0.5,) * config.channels
    return TransformConfig(
        size=config.size, resize=config.size, mode="center", interpolation="bicubic", mean=half, std=half
    )


def take_classes(model: ViT, classes: Sequence[str]) -> str:
    """Gives a model as many other labels, and the rows of its head to those whom they are of.

    The same classes in another order keep their rows. Other classes get a new head of zeros, as of another number they
    would; but where their names are numbers, such as ImageNet's n01440764, they are those of the labels in order, as
    `eval` takes them. Where nobody said what a trained head knows, it stays as it is.

    Args:
        model: With as many classes.
        classes: Their names, in the order that the head is to have.

    Returns:
        What to say about it, if anything.

    Raises:
        TrainError: It is a head whose rows nobody knows.
    """
    if model.labels is None:
        model.labels = classes
        if model.source is None or not any(weight.any() for weight in model.head.parameters()):
            return ""  # there is nothing in it, or it is of the caller's making
        return f"the model has no labels, so its head is taken to know these classes in order: {_listed(classes)}"
    labels, said = model.labels, ""
    rows = rows_by_name(labels, classes)
    if rows is None and _are_numbers_of_labels(model, classes):
        rows = list(range(len(labels)))
        pairs = [f"{name} for {label}" for name, label in zip(classes, labels, strict=True)]
        said = f"no folder is named after a label, so the head goes on in order: {_listed(pairs)}"
    elif rows is None:
        said = (
            f"the head is a new one, as the model's own knew {_listed(labels)}, and the classes are "
            f"{_listed(classes)}; classes that are named after its labels keep it"
        )
    _move_rows(model, rows, classes)
    model.labels = classes
    return said


def _listed(names: Sequence[str]) -> str:
    return listed([shown(name) for name in names])


def _are_numbers_of_labels(model: ViT, classes: Sequence[str]) -> bool:
    """Whether the names say nothing but their order, and that is certain."""
    try:
        return all(re.search("[0-9]", name) for name in classes) and bool(classes_in_order(model, classes))
    except TrainError:
        return False


def _move_rows(model: ViT, rows: Sequence[int] | None, classes: Sequence[str]) -> None:
    """Puts the rows of the head in another order; None: zeros in their place."""
    if rows == list(range(len(classes))):
        return
    if not isinstance(model.head, nn.Linear):
        raise TrainError(
            f"The head knows the classes {_listed(model.labels or ())}, the data have {_listed(classes)}, and which "
            f"weights of a {type(model.head).__name__} are whose is not known.",
            python="Where it is meant for the classes of the data: model.labels = data.classes.",
        )
    for weight in model.head.parameters():
        weight.data.copy_(torch.zeros_like(weight) if rows is None else weight.data[rows])
