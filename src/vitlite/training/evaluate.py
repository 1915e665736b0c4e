"""How good a model is on labelled pictures."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlite.errors import TrainError
from vitlite.images import Preprocess, Recipe
from vitlite.model import ViT
from vitlite.training import distributed as ranks
from vitlite.training.datasets import Pictures, Read, listed


@dataclass(frozen=True)
class Measured:
    """What a model made of some pictures."""

    loss: float  # cross entropy, mean
    top1: float  # share of pictures whose best class is right
    top5: float  # whose five best are, which says nothing of five classes or fewer
    confusion: Tensor  # (k, k) int64: pictures of each class, by the class they were taken for

    @property
    def recall(self) -> Tensor:
        """Of the pictures of each class, the share that was recognised: (k,), NaN where there are none."""
        return self.confusion.diagonal() / self.confusion.sum(1)

    @property
    def precision(self) -> Tensor:
        """Of the pictures taken for each class, the share that was of it: (k,), NaN where there are none."""
        return self.confusion.diagonal() / self.confusion.sum(0)


def measure(model: ViT, pictures: Pictures, *, batch: int = 256, bfloat16: bool = False) -> Measured:
    """Runs a model, in eval mode from then on, over labelled pictures.

    Args:
        model: Its preprocessing says how pictures are normalised.
        pictures: Of the size in the model's preprocessing, and of its classes, in the same order.
        batch: Pictures at once.
        bfloat16: Compute in it (autocast), as in training.

    Raises:
        TrainError: The pictures do not fit the model.
    """
    check_fit(model, pictures)
    model.eval()
    recipe = cast(Preprocess, model.preprocess).recipe
    k, total = model.config.num_classes, len(pictures)
    loss, right = torch.zeros(2, dtype=torch.float64)
    confusion = torch.zeros(k * k, dtype=torch.int64)
    mine = ranks.part(total)
    with torch.inference_mode(), torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
        for first in range(0, len(mine), batch):
            rows = mine[first : first + batch]
            images, labels = normalise(pictures.fetch(rows), recipe), pictures.labels[rows]
            logits = model(images.to(model.device, model.dtype)).float().cpu()
            best = logits.topk(min(5, k)).indices
            loss += F.cross_entropy(logits, labels, reduction="sum")
            right += (best == labels[:, None]).sum()
            confusion += torch.bincount(labels * k + best[:, 0], minlength=k * k)
    ranks.add(loss, right, confusion)
    confusion = confusion.view(k, k)
    top1 = confusion.diagonal().sum().item() / total
    return Measured(loss.item() / total, top1, right.item() / total, confusion)


def check_fit(model: ViT, pictures: Pictures) -> None:
    """Whether these are pictures for this model.

    Raises:
        TrainError: They are of other classes, or of the same in another order; or of another size.
    """
    classes, labels, k = pictures.classes, model.labels or pictures.classes, model.config.num_classes
    if len(classes) != k:
        raise TrainError(f"The pictures have {len(classes)} classes and the model {k}. Give the model's, all of them.")
    if moved := [f"{name} for {label}" for name, label in zip_longest(classes, labels) if name != label]:
        raise TrainError(
            f"The pictures' classes are not the model's: {listed(moved)}. Give them its names (model.labels), in its "
            "order, and labels to match."
        )
    size, wanted = tuple(pictures.fetch(torch.tensor([0])).shape[2:]), cast(Preprocess, model.preprocess).recipe.size
    if size != wanted:
        raise TrainError(
            f"The pictures are of {size[0]} x {size[1]} pixels, and the model's preprocessing makes them "
            f"{wanted[0]} x {wanted[1]}. Prepare them with model.preprocess.pixels."
        )


def normalise(images: Tensor, recipe: Recipe) -> Tensor:
    """Values from 0 to 1 as the model wants them: (b, c, h, w) as given."""
    white = 255 * recipe.scale  # what 1 stands for there
    mean, std = (torch.tensor(x, device=images.device)[:, None, None] / white for x in (recipe.mean, recipe.std))
    return (images - mean) / std


def preprocess_of(model: ViT, name: str) -> Preprocess:
    """How pictures are prepared for a model, which came by that name.

    Raises:
        TrainError: The weights came without it.
    """
    if not isinstance(model.preprocess, Preprocess):
        raise TrainError(
            f"{name} has no preprocessing, so pictures cannot be prepared for it. Name a checkpoint like it: --model "
            "NAME --weights PATH; or give it its own in Python (model.preprocess = ...), and name the folder that "
            "model.save writes."
        )
    return model.preprocess


def cifar10_reader(preprocess: Preprocess) -> Read | None:
    """How CIFAR-10's pictures are prepared; None where that would leave them as they are."""
    recipe = preprocess.recipe
    return None if recipe.size == recipe.resize == (32, 32) else preprocess.pixels
