"""Run a model over images: `predict` returns labels, and `work_through` processes any number of images.

Memory use does not grow with the number of images. Background threads read the next batch of files while the model
computes the current batch. The model is in eval mode during each batch. Afterwards, the previous mode is restored.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from vitlite.errors import ImageError, InputError, check_count, missing_extra, not_finite
from vitlite.images.decode import BYTES
from vitlite.images.transform import Preprocess, by_shape, image_list, preprocess_of

if TYPE_CHECKING:
    from numpy import float32
    from numpy.typing import NDArray

    from vitlite.nn.vit import ViT

T = TypeVar("T")
READERS = 8  # maximum number of files that are decoded at the same time


@dataclass
class Timings:
    """The seconds that a run has spent so far on waiting for images and on computing."""

    waited: float = 0.0  # for images to be decoded
    worked: float = 0.0  # in the model


class Prediction(NamedTuple):
    """One predicted label, with the index of its class and its score, a probability from 0 to 1."""

    label: str
    index: int  # type: ignore[assignment]  # hides tuple.index
    score: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that can be written as JSON: {"label": ..., "index": ..., "score": ...}."""
        return self._asdict()


Outcomes: TypeAlias = Generator[tuple[Any, T | ImageError], None, None]  # each image with its result or its error
Predictions: TypeAlias = list[Prediction] | list[list[Prediction]] | Iterator[list[Prediction]]


def predict(model: "ViT", images: Any, top: int = 5) -> Predictions:
    """Return the most probable labels of images, in order of decreasing probability.

    Args:
        model: A model with labels and preprocessing.
        images: An image or a list of images, in any form that `Preprocess` accepts; or an iterator of any number of
            images, which is read at most two batches of 32 ahead.
        top: The number of labels. If the model has fewer, all of them are returned.

    Returns:
        A list of `Prediction` for one image; a list of these lists for a list of images; a generator of these lists
        for an iterator.

    Raises:
        ImageError: An image cannot be read or prepared.
        InputError: The model has no labels or no head, or `top` is not a positive integer.
    """
    if hasattr(images, "__next__") and not hasattr(images, "read"):  # an open file iterates over its lines
        return _answers(classify(model, images, top))
    several = image_list(images)
    if several is not None:
        return list(_answers(classify(model, several, top)))
    best_labels = _label_function(model, top)
    preprocess = preprocess_of(model)
    tensor = preprocess.batch([preprocess.pixels(images)])
    with evaluating(model):
        return best_labels(tensor)[0]


def classify(
    model: "ViT", images: Iterable[Any], top: int = 5, batch: int = 32, timings: Timings | None = None
) -> Outcomes[list[Prediction]]:
    """Yield each image with its `top` most probable labels or its error. See `work_through` for the other arguments."""
    return work_through(model, images, _label_function(model, top), batch, timings)


def embed(
    model: "ViT",
    images: Iterable[Any],
    batch: int = 32,
    timings: Timings | None = None,
    *,
    patches: bool = False,
) -> Outcomes[Tensor]:
    """Yield each image with its vector (d,) in float32 on the CPU, or its error. See `work_through` for the arguments.

    If `patches` is True, yield one vector for each patch after the final norm instead: (h, w, d).
    """

    if model.device.type == "meta":
        raise InputError(
            "The weights are on the meta device, and accelerate loads them only for model(images). For vectors, call "
            "model.reset_head(0) before you offload the weights, and model(images) afterwards."
        )

    def vectors_of(tensor: Tensor) -> list[Tensor]:
        found = model.features(tensor).map().movedim(1, 3) if patches else model.embed(tensor)
        embedded = found.float().cpu()
        if not embedded.isfinite().all():
            raise not_finite(model.dtype)
        return list(embedded)

    return work_through(model, images, vectors_of, batch, timings)


def vectors(model: "ViT", images: Iterable[Any], batch: int = 32) -> "NDArray[float32]":
    """Return the vectors of images as one array (n, d), in the order of the images.

    Args:
        model: A model with preprocessing.
        images: A list or an iterator of images, in any form that `Preprocess` accepts.
        batch: The number of images per batch.

    Raises:
        ImageError: An image cannot be read. The message says which image and why.
        MissingExtraError: numpy is not installed.
    """
    try:
        import numpy
    except ImportError as error:
        raise missing_extra("Returning vectors as a numpy array", "images") from error
    rows = [vector.numpy() for vector in _answers(embed(model, images, batch))]
    return numpy.stack(rows) if rows else numpy.empty((0, model.config.embed_dim), numpy.float32)


def work_through(
    model: "ViT",
    images: Iterable[Any],
    work: Callable[[Tensor], Sequence[T]],
    batch: int = 32,
    timings: Timings | None = None,
) -> Outcomes[T]:
    """Run images through a model in batches and in constant memory.

    Paths and bytes are decoded in background threads. Images of other types are prepared one at a time, each before the
    next image is requested from the iterator, which may therefore reuse one array or file object.

    Args:
        model: A model with preprocessing. It is in eval mode while `work` runs.
        images: A list or an iterator of images. It is read in the thread of the caller, at most two batches ahead.
        work: A function that turns a batch of images (b, c, h, w) into a sequence of b results.
        batch: The number of images per batch.
        timings: A `Timings` object, to which the seconds of this run are added.

    Returns:
        A generator of pairs: an image, and its result or an `ImageError`.

    Raises:
        ImageError: The model has no usable preprocessing.
        InputError: `images` is a single image, or `batch` is not a positive integer.
    """
    check_count(batch, "batch")
    is_file = isinstance(images, (str, PathLike, *BYTES)) or hasattr(images, "read")
    if is_file or isinstance(images, dict) or hasattr(images, "getexif") or getattr(images, "ndim", 0) in (2, 3):
        raise InputError(f"Expected a list or an iterator of images, got one {type(images).__name__}. Pass [image].")
    return _work_through(model, preprocess_of(model), images, work, batch, timings or Timings())


def _work_through(
    model: "ViT",
    preprocess: Preprocess,
    images: Iterable[Any],
    work: Callable[[Tensor], Sequence[T]],
    batch: int,
    timings: Timings,
) -> Outcomes[T]:
    with closing(_prepared(preprocess, images, batch, timings)) as batches:
        for prepared in batches:
            good = [pixels for _, pixels in prepared if isinstance(pixels, Tensor)]
            results: dict[int, T] = {}
            begun = time.perf_counter()
            for rows in by_shape(good):
                tensor = preprocess.batch([good[row] for row in rows])
                with evaluating(model):
                    results.update(zip(rows, work(tensor), strict=True))
            timings.worked += time.perf_counter() - begun
            in_order = iter(range(len(good)))
            for image, pixels in prepared:
                yield image, pixels if isinstance(pixels, ImageError) else results[next(in_order)]


def _prepared(
    preprocess: Preprocess, images: Iterable[Any], batch: int, timings: Timings
) -> Generator[list[tuple[Any, Tensor | ImageError]], None, None]:
    """Yield batches of images, each image with its pixels or its error. The next batch is prepared in advance."""
    waiting: deque[tuple[Any, Future[Tensor | ImageError] | Tensor | ImageError]] = deque()
    source = iter(images)
    pool = readers()
    try:
        while True:
            for image in islice(source, 2 * batch - len(waiting)):
                if isinstance(image, (str, PathLike, bytes, dict)):
                    waiting.append((image, pool.submit(_pixels, preprocess, image)))
                else:
                    waiting.append((image, _pixels(preprocess, image)))
            if not waiting:
                return
            begun = time.perf_counter()
            ready = [waiting.popleft() for _ in range(min(batch, len(waiting)))]
            prepared = [(image, made.result() if isinstance(made, Future) else made) for image, made in ready]
            timings.waited += time.perf_counter() - begun
            yield prepared
    finally:
        pool.shutdown(cancel_futures=True)


def readers() -> ThreadPoolExecutor:
    """Return a pool of threads for decoding files, with as many threads as torch uses, but at most `READERS`."""
    return ThreadPoolExecutor(min(READERS, torch.get_num_threads()), thread_name_prefix="vitlite-images")


def _pixels(preprocess: Preprocess, image: Any) -> Tensor | ImageError:
    try:
        return preprocess.pixels(image)
    except ImageError as error:
        return error


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Return a context manager in which the model is in eval mode and gradients are disabled.

    On exit, each module of the model returns to its previous mode.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():  # not inference_mode, because training cannot use tensors from it
            yield
    finally:
        for module in training:
            module.training = True


def _label_function(model: "ViT", top: int) -> Callable[[Tensor], list[list[Prediction]]]:
    """Return a function that turns a batch (b, c, h, w) into the `top` most probable labels of each image.

    Raises:
        InputError: The model has no labels or too few classes, or `top` is not a positive integer.
    """
    if type(top) is not int or top < 1:
        raise InputError(f"top must be a positive integer, got {top!r}.")
    classes = model.config.num_classes
    if classes < (1 if model.scores == "sigmoid" else 2):  # the only softmax score would be 1
        raise InputError(
            f"Predicting labels needs at least two classes, but the model has {classes}. Use model(images) for the "
            "output of the head, or model.embed(images) for vectors (vitlite embed). A CLIP or SigLIP checkpoint takes "
            "labels from vitlite.with_labels (--labels)."
        )
    labels = model.labels
    if labels is None:
        why = model.source.report.unlabelled if model.source else ""
        if why:  # like= would not help
            raise InputError(f"The model has no labels: {why}. Set model.labels to the names of its {classes} classes.")
        raise InputError(
            f"The model has no labels. Set model.labels to the names of its {classes} classes (vitlite convert "
            "--labels), or load the weights with like= (--model NAME --weights PATH)."
        )
    return partial(_most_probable, model, labels, top)


def labels_to_show(
    model: "ViT", top: int | None = None, min_score: float | None = None
) -> Callable[[Tensor], list[list[Prediction]]]:
    """Return a function that turns a batch (b, c, h, w) into the labels that `vitlite classify` prints for each image.

    Args:
        model: A model with labels.
        top: The maximum number of labels. Default: 5, or all if the model has thresholds.
        min_score: The minimum score of a label. Default: the model's thresholds, or 0.

    Raises:
        InputError: The model has no labels or too few classes, or `top` is not a positive integer.
    """
    classes = model.config.num_classes
    if top is None:
        top = 5 if model.thresholds is None else classes
    if min_score is not None:
        minimums, most = [min_score] * classes, top
    elif model.thresholds is not None:
        minimums, most = list(model.thresholds), classes  # a less probable label may have a lower threshold
    else:
        return _label_function(model, top)
    best_labels = _label_function(model, most)

    def above_minimums(images: Tensor) -> list[list[Prediction]]:
        return [[each for each in row if each.score >= minimums[each.index]][:top] for row in best_labels(images)]

    return above_minimums


def _most_probable(model: "ViT", labels: Sequence[str], top: int, images: Tensor) -> list[list[Prediction]]:
    logits = model(images).float()  # (b, k)
    classes = logits.shape[1]
    if classes != len(labels):
        raise InputError(
            f"The model has {classes} classes but {len(labels)} labels. Set model.labels to {classes} names."
        )
    if not logits.isfinite().all():
        raise not_finite(model.dtype)
    best_first = logits.topk(min(top, classes)).indices  # (b, top); not by scores, because low ones may all round to 0
    scores = (logits.sigmoid() if model.scores == "sigmoid" else logits.softmax(-1)).gather(1, best_first)
    answers = []
    for row_of_scores, row_of_indices in zip(scores.tolist(), best_first.tolist(), strict=True):
        best = zip(row_of_indices, row_of_scores, strict=True)
        answers.append([Prediction(labels[index], index, score) for index, score in best])
    return answers


def _answers(results: Outcomes[T]) -> Iterator[T]:
    """Yield the results of `work_through` without the images. If a result is an error, raise it."""
    with closing(results):
        for i, (_, result) in enumerate(results):
            if isinstance(result, ImageError):
                raise result.within(f"Image {i}") from result
            yield result
