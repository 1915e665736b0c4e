"""Measure a model on labelled images.

Shapes: n images, k classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlite.errors import TrainError, check_count, not_finite
from vitlite.images.transform import Preprocess, normalise, preprocess_of
from vitlite.nn.vit import ViT
from vitlite.training import distributed
from vitlite.training.data import ImageData, PreparedImages, listed

MOST_CONFUSED = 4096  # classes in a confusion matrix (134 MB); for ImageNet-21k it would take 3.8 GB
PIXEL_FIELDS = (
    "size",
    "resize",
    "mode",
    "interpolation",
    "margin",
    "background",
    "cut",
)  # fields of a transform that affect the pixels


@dataclass(frozen=True)
class Measured:
    """The predictions of a model on labelled images."""

    loss: float  # mean cross entropy
    top1: float  # share of images whose best class is right
    top5: float  # share with the right class among the best five
    images: Tensor  # (k,) int64: images of each class
    predicted: Tensor  # (k,) int64: images predicted as each class
    correct: Tensor  # (k,) int64: correctly predicted images of each class
    confusion: Tensor | None  # (k, k) int64: images by class and prediction; None for more than 4096 classes
    predictions: Tensor  # (n,) int64: the predicted class of each image; -1 for one that cannot be read

    @property
    def recall(self) -> Tensor:
        """The share of each class's images that are predicted correctly: (k,). NaN for a class without images."""
        return self.correct.float() / self.images

    @property
    def precision(self) -> Tensor:
        """The share of each class's predictions that are correct: (k,). NaN for a class that is never predicted."""
        return self.correct.float() / self.predicted


def measure(
    model: ViT,
    data: ImageData,
    *,
    batch: int = 256,
    bfloat16: bool = False,
    after_batch: Callable[[int], None] = lambda images: None,
) -> Measured:
    """Measure a model on labelled images. With torchrun, the images are divided among the processes.

    Images that cannot be read are skipped: `data.broken()` names them.

    Args:
        model: A model with preprocessing. It stays in eval mode.
        data: Images prepared for this model, with the same classes in the same order.
        batch: Number of images per batch.
        bfloat16: If True, compute in bfloat16 with autocast.
        after_batch: Called with the number of images in each batch.

    Raises:
        TrainError: The images do not fit the model, or none of them can be read.
        ImageError: An image cannot be read, and the images are `strict`.
        InputError: The output of the model is not finite, or `batch` is not a positive integer.
    """
    check_count(batch, "batch")
    check_data_fits(model, data)
    if distributed.world_size() > 1:
        weights = model.source and model.source.sha256
        distributed.assert_equal_on_all_ranks({"data": data.names(), "config": model.config, "weights": weights})
    model.eval()
    transform, channels = preprocess_of(model).transform, model.config.channels
    k = model.config.num_classes
    loss = torch.zeros((), dtype=torch.float64, device="cpu")
    top5 = torch.zeros((), dtype=torch.int64, device="cpu")
    counts = torch.zeros(3, k, dtype=torch.int64, device="cpu")  # images, predicted and correct
    not_finite_rows = torch.zeros((), dtype=torch.int64, device="cpu")
    confusion = torch.zeros(k * k if k <= MOST_CONFUSED else 0, dtype=torch.int64, device="cpu")
    predictions = torch.zeros(len(data), dtype=torch.int64, device="cpu")  # plus one; summed over the ranks
    mine = distributed.shard(len(data))
    with torch.inference_mode(), torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
        for first in range(0, len(mine), batch):
            in_batch = mine[first : first + batch]
            after_batch(len(in_batch))
            pixels, rows = data.readable(in_batch)
            if not len(rows):
                continue
            images, labels = normalise(pixels, transform, channels), data.labels[rows]
            logits = model(images.to(model.device, model.dtype)).float().cpu()  # (b, k)
            not_finite_rows += (~logits.isfinite()).any(1).sum()
            best = logits.topk(min(5, k)).indices
            loss += F.cross_entropy(logits, labels, reduction="sum")
            top5 += (best == labels[:, None]).sum()
            predicted = best[:, 0]
            predictions[rows] = predicted + 1
            for count, classes in zip(counts, (labels, predicted, labels[labels == predicted]), strict=True):
                count += torch.bincount(classes, minlength=k)
            if len(confusion):
                confusion.index_add_(0, labels * k + predicted, torch.ones_like(labels))
    sums = (loss, top5, counts, not_finite_rows, confusion, predictions)
    distributed.all_reduce(*(tensor for tensor in sums if tensor.numel()))
    if not_finite_rows:  # summed over all ranks, so that all of them raise the error
        raise not_finite(torch.bfloat16 if bfloat16 else model.dtype)
    total = counts[0].sum().item()
    if not total:
        raise TrainError(f"None of the {len(data)} images can be read. Check the files named above.")
    return Measured(
        loss=loss.item() / total,
        top1=counts[2].sum().item() / total,
        top5=top5.item() / total,
        images=counts[0],
        predicted=counts[1],
        correct=counts[2],
        confusion=confusion.view(k, k) if len(confusion) else None,
        predictions=predictions - 1,
    )


def check_data_fits(model: ViT, data: ImageData) -> None:
    """Check that images fit a model.

    Raises:
        TrainError: The classes, the image size or the preprocessing differ.
    """
    preprocess, k = preprocess_of(model), model.config.num_classes
    if len(data.classes) != k:
        raise TrainError(
            f"The images have {len(data.classes)} classes, but the model has {k}. "
            "Use images of the model's classes, or create the model with num_classes=."
        )
    labels = model.labels or data.classes
    moved = [f"{name} for {label}" for name, label in zip(data.classes, labels, strict=True) if name != label]
    if moved:
        raise TrainError(
            f"The classes of the images and the model differ: {listed(moved)}. If only the order differs, use "
            "data.with_classes(model.labels)."
        )
    if isinstance(data.images, PreparedImages):
        theirs = getattr(data.images.read, "__self__", None)
        if isinstance(theirs, Preprocess):
            fields = [
                name for name in PIXEL_FIELDS if getattr(theirs.transform, name) != getattr(preprocess.transform, name)
            ]
            if theirs.quick_decode != preprocess.quick_decode:
                fields.append("quick_decode")
            if fields:
                raise TrainError(
                    f"The preprocessing of the images and of the model differs in {', '.join(fields)}. Prepare the "
                    "images with model.preprocess.pixels."
                )
    channels, height, width = _shape_of(data)
    if (channels, (height, width)) != (model.config.channels, preprocess.transform.size):
        size = preprocess.transform.size
        raise TrainError(
            f"The images have {channels} channels and {height} x {width} pixels, but the model expects "
            f"{model.config.channels} channels and {size[0]} x {size[1]} pixels. Prepare the images with "
            "model.preprocess.pixels."
        )


def _shape_of(data: ImageData) -> tuple[int, ...]:
    """Return the shape (c, h, w) of the first image that can be read, of at most 20 that are spread over the data."""
    tried = min(len(data), 20)
    for row in torch.linspace(0, len(data) - 1, tried, device="cpu").long():
        images, _ = data.readable(row[None])
        if len(images):
            return tuple(images.shape[1:])
    raise TrainError(f"Cannot read any of {tried} images of the data. Check the files named above.")
