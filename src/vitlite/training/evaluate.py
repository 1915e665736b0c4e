"""Measure the accuracy of a model on labelled images.

Shapes: n images, k classes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlite.errors import TrainError, check_count, not_finite
from vitlite.images.naflex import NaFlexTransform
from vitlite.images.transform import Preprocess, by_shape, preprocess_of
from vitlite.nn.vit import ViT
from vitlite.training import distributed
from vitlite.training.data import ImageData, PreparedImages, listed

MOST_CONFUSED = 4096  # largest number of classes for a confusion matrix (134 MB); ImageNet-21k would take 3.8 GB
PIXEL_FIELDS = (
    "size",
    "resize",
    "mode",
    "interpolation",
    "margin",
    "background",
    "cut",
    "max_patches",
    "patch_size",
)  # fields of a transform that affect the pixels


@dataclass(frozen=True)
class Measured:
    """The predictions of a model on labelled images."""

    loss: float  # mean cross entropy
    top1: float  # share of images whose predicted class is correct
    top5: float  # share of images with the correct class among the best five
    images: Tensor  # (k,) int64: number of images of each class
    predicted: Tensor  # (k,) int64: number of images predicted as each class
    correct: Tensor  # (k,) int64: number of correctly predicted images of each class
    confusion: Tensor | None  # (k, k) int64: number of images by class and prediction; None for over 4096 classes
    predictions: Tensor  # (n,) int64: predicted class of each image, or -1 if the image cannot be read

    @property
    def recall(self) -> Tensor:
        """The share of the images of each class that are predicted correctly: (k,). NaN for a class without images."""
        return self.correct.float() / self.images

    @property
    def precision(self) -> Tensor:
        """The share of the predictions of each class that are correct: (k,). NaN for a class that is not predicted."""
        return self.correct.float() / self.predicted


@dataclass(frozen=True)
class MeasuredLabels:
    """The predictions of a model on images that may have several labels."""

    loss: float  # mean binary cross entropy over all labels
    rows: Tensor  # (n,) int64: rows of the images that can be read
    scores: Tensor  # (n, k): score of each label, from 0 to 1
    labels: Tensor  # (n, k) bool: True for the labels of each image

    @property
    def average_precisions(self) -> Tensor:
        """The average precision of each label: (k,). NaN for a label without images."""
        return torch.stack([average_precision(s, y) for s, y in zip(self.scores.T, self.labels.T, strict=True)])

    @property
    def mean_average_precision(self) -> float:
        """The mean of `average_precisions` over the labels that have images."""
        return self.average_precisions.nanmean().item()

    @property
    def best_thresholds(self) -> tuple[float, ...]:
        """The threshold with the highest F1 score for each label, or 0.5 for a label without images."""
        return tuple(best_threshold(s, y) for s, y in zip(self.scores.T, self.labels.T, strict=True))

    def recall_and_precision(self, thresholds: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return the recall and the precision of each label, (k,) each, for one threshold per label."""
        predicted = self.scores >= torch.tensor(thresholds, device="cpu")
        correct = (predicted & self.labels).sum(0)
        return correct / self.labels.sum(0), correct / predicted.sum(0)


def average_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the average precision, the area under the precision-recall curve, as scikit-learn defines it.

    >>> average_precision(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True])).item()
    0.8333333333333333

    Args:
        scores: The score of each image (n,).
        labels: A mask of the images that have the label (n,). If no image has it, the result is NaN.
    """
    _, hits, found = _curve(scores, labels)
    return (hits.diff(prepend=hits.new_zeros(1)) * hits / found).sum() / labels.sum()


def best_threshold(scores: Tensor, labels: Tensor) -> float:
    """Return the threshold with the highest F1 score, or 0.5 if no image has the label.

    The threshold is midway between two scores.

    >>> best_threshold(torch.tensor([0.125, 0.25, 0.5, 0.75]), torch.tensor([False, False, True, True]))
    0.375
    """
    if not labels.any():
        return 0.5
    values, hits, found = _curve(scores, labels)
    best = int((2 * hits / (found + labels.sum())).argmax())
    following = values[best + 1] if best + 1 < len(values) else torch.zeros((), device="cpu")
    return ((values[best] + following) / 2).item()


def _curve(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct scores in descending order, with the cumulative numbers of labelled images and of images."""
    order = scores.argsort(descending=True)
    values, hits = scores[order], labels[order].double().cumsum(0)
    # True at the last image of each group with equal scores
    last = torch.cat([values[1:] != values[:-1], torch.ones(1, dtype=torch.bool, device="cpu")])
    return values[last], hits[last], torch.arange(1, len(scores) + 1, device="cpu")[last]


def measure(
    model: ViT,
    data: ImageData,
    *,
    batch: int = 256,
    bfloat16: bool = False,
    after_batch: Callable[[int], None] = lambda images: None,
) -> Measured:
    """Measure a model on labelled images. With torchrun, the images are divided among the processes.

    Images that cannot be read are skipped, and `data.broken()` lists them.

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
    if data.multi_label:
        raise TrainError("The images may have several labels. Call measure_labels instead of measure.")
    batches = _logits(model, data, batch, bfloat16, after_batch)
    k = model.config.num_classes
    loss = torch.zeros((), dtype=torch.float64, device="cpu")
    top5 = torch.zeros((), dtype=torch.int64, device="cpu")
    counts = torch.zeros(3, k, dtype=torch.int64, device="cpu")  # images, predicted and correct
    not_finite_rows = torch.zeros((), dtype=torch.int64, device="cpu")
    confusion = torch.zeros(k * k if k <= MOST_CONFUSED else 0, dtype=torch.int64, device="cpu")
    predictions = torch.zeros(len(data), dtype=torch.int64, device="cpu")  # class + 1, because 0 means not predicted
    for rows, logits in batches:
        labels = data.labels[rows]
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
    if not_finite_rows:  # summed over all ranks, because all of them must raise the error
        raise not_finite(torch.bfloat16 if bfloat16 else model.dtype)
    total = counts[0].sum().item()
    if not total:
        raise _none_readable(data)
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


def measure_labels(
    model: ViT,
    data: ImageData,
    *,
    batch: int = 256,
    bfloat16: bool = False,
    after_batch: Callable[[int], None] = lambda images: None,
) -> MeasuredLabels:
    """Measure a model on images that may have several labels. See `measure` for the arguments and the errors."""
    data = data.with_multi_label()
    batches = _logits(model, data, batch, bfloat16, after_batch)
    n, k = data.labels.shape
    loss = torch.zeros((), dtype=torch.float64, device="cpu")
    logits_of_all = torch.zeros(n, k, device="cpu")  # summed over the ranks
    is_read = torch.zeros(n, dtype=torch.int64, device="cpu")
    for rows, logits in batches:
        logits_of_all[rows] = logits
        is_read[rows] = 1
        loss += F.binary_cross_entropy_with_logits(logits, data.labels[rows].float(), reduction="sum")
    distributed.all_reduce(loss, logits_of_all, is_read)
    if not logits_of_all.isfinite().all():
        raise not_finite(torch.bfloat16 if bfloat16 else model.dtype)
    rows = is_read.nonzero()[:, 0]
    if not len(rows):
        raise _none_readable(data)
    return MeasuredLabels(loss.item() / (len(rows) * k), rows, logits_of_all[rows].sigmoid(), data.labels[rows])


def _logits(
    model: ViT, data: ImageData, batch: int, bfloat16: bool, after_batch: Callable[[int], None]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Check the arguments of `measure`. Return an iterator over the rows (b,) of this rank and their logits (b, k)."""
    check_count(batch, "batch")
    check_data_fits(model, data)
    if distributed.world_size() > 1:
        weights = model.source and model.source.sha256
        distributed.assert_equal_on_all_ranks({"data": data.names(), "config": model.config, "weights": weights})
    model.eval()
    preprocess = preprocess_of(model)
    mine = distributed.shard(len(data))

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, len(mine), batch):
            in_batch = mine[first : first + batch]
            after_batch(len(in_batch))
            pixels, rows = data.readable(in_batch)
            for same in by_shape(pixels):
                images = preprocess.batch([pixels[i] for i in same])
                with torch.inference_mode(), torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
                    logits = model(images).float().cpu()  # (b, k)
                yield rows[same], logits

    return batches()


def _none_readable(data: ImageData) -> TrainError:
    return TrainError(f"None of the {len(data)} images can be read. Check the files named above.")


def check_data_fits(model: ViT, data: ImageData) -> None:
    """Check that images fit a model.

    Raises:
        TrainError: The classes, the image size or the preprocessing of the images and of the model differ.
    """
    preprocess, k = preprocess_of(model), model.config.num_classes
    if data.multi_label and model.scores != "sigmoid":
        raise TrainError(
            "The images may have several labels, but the model predicts only one. If the model was trained for several "
            "labels, set model.scores = 'sigmoid'. Otherwise, train it on such images first."
        )
    if len(data.classes) != k:
        raise TrainError(
            f"The images have {len(data.classes)} classes, but the model has {k}. Use images of the model's classes, "
            "or create the model with num_classes=."
        )
    labels = model.labels or data.classes
    moved = [f"{name} for {label}" for name, label in zip(data.classes, labels, strict=True) if name != label]
    if moved:
        raise TrainError(
            f"The classes of the images and of the model differ: {listed(moved)}. If only the order differs, use "
            "data.with_classes(model.labels)."
        )
    if isinstance(data.images, PreparedImages):
        theirs = getattr(data.images.read, "__self__", None)
        if isinstance(theirs, Preprocess):
            fields = [
                name
                for name in PIXEL_FIELDS
                if getattr(theirs.transform, name, None) != getattr(preprocess.transform, name, None)
            ]
            if theirs.quick_decode != preprocess.quick_decode:
                fields.append("quick_decode")
            if fields:
                raise TrainError(
                    f"The preprocessing of the images and of the model differs in {', '.join(fields)}. Prepare the "
                    "images with model.preprocess.pixels."
                )
    channels, height, width = _shape_of(data)
    of_any_shape = isinstance(preprocess.transform, NaFlexTransform)
    size = (height, width) if of_any_shape else preprocess.transform.size
    if (channels, height, width) != (model.config.channels, *size):
        raise TrainError(
            f"The images have {channels} channels and {height} x {width} pixels, but the model expects "
            f"{model.config.channels} channels and {size[0]} x {size[1]} pixels. Prepare the images with "
            "model.preprocess.pixels."
        )


def _shape_of(data: ImageData) -> tuple[int, ...]:
    """Return the shape (c, h, w) of the first readable image. At most 20 images, spread over the data, are tried."""
    tried = min(len(data), 20)
    for row in torch.linspace(0, len(data) - 1, tried, device="cpu").long():
        images, _ = data.readable(row[None])
        if images:
            return tuple(images[0].shape)
    raise TrainError(f"Cannot read any of {tried} images of the data. Check the files named above.")
