"""From pictures to answers: `predict`, and `work_through`, which puts any number of pictures through a model.

Of a list, the files of the next batch are read in the background, several at once, while the model works on this one.
Nothing else about the process or the model is changed: training mode, gradients, threads and types are as they were.
Several threads may use one model.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from os import PathLike
from threading import Condition, Lock, get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from vitlite.errors import ImageError, InputError, check_count, not_finite, shown
from vitlite.images.transform import Preprocess, is_one, is_read_once, own_methods, pictures, pixels_in, preprocess_of

if TYPE_CHECKING:
    from vitlite.nn.vit import ViT

T = TypeVar("T")
S = TypeVar("S", bound=Sized)

READERS = 8  # files at once, at most
ROOM = 100_000_000  # pixels of files that are decoded at once, unless one alone has more: 400 MB; twice that if turned

_changing_modes = Lock()
_paused: dict[torch.nn.Module, int] = {}  # parts of models that were in training mode, and how many threads use them
_trained: dict[torch.nn.Module, int] = {}  # models that are being trained, and the thread that does it


@dataclass
class Pace:
    """Where the seconds of a run go, counted while it runs."""

    waited: float = 0.0  # for pictures that were not read yet
    worked: float = 0.0  # in the model


class Prediction(NamedTuple):
    """One label with its place among the classes, and its probability."""

    label: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks three fields for
    score: float


Outcomes: TypeAlias = Generator[tuple[Any, T | ImageError], None, None]  # each picture, with its result or the reason
Predictions: TypeAlias = list[Prediction] | list[list[Prediction]] | Iterator[list[Prediction]]


def predict(model: "ViT", images: Any, top: int = 5) -> Predictions:
    """The best labels of pictures, best first.

    Args:
        model: A model with labels and preprocessing.
        images: What `Preprocess` takes: one picture, or a list. Or an iterator of pictures, which is read at most two
            batches of 32 ahead, so that it may be of any length; each picture is prepared before the next is asked for.
        top: How many labels; all of them where the model has fewer.

    Returns:
        For one picture a list of `Prediction`; for a list a list of those; for an iterator a generator of those.

    Raises:
        ImageError: A picture cannot be read or prepared.
        InputError: The model has no labels or no head, or `top` is not a positive whole number.
    """
    if hasattr(images, "__next__") and not hasattr(images, "read"):  # an open file iterates too, over its lines
        return _answers(classify(model, images, top))
    several = pictures(images)
    answers = list(_answers(classify(model, [images] if several is None else several, top)))
    return answers[0] if several is None else answers


def classify(
    model: "ViT", images: Iterable[Any], top: int = 5, batch: int = 32, pace: Pace | None = None
) -> Outcomes[list[Prediction]]:
    """The pictures of `images` one after the other, each with its best labels or with the reason why it has none."""
    labels = _labels(model)
    check_count(top, "top")
    return work_through(model, images, partial(_best, model, labels, top), batch, pace)


def _best(model: "ViT", labels: Sequence[str], top: int, images: Tensor) -> list[list[Prediction]]:
    """The best labels of each of the images (b, c, h, w)."""
    logits = model(images).float()  # (b, k)
    classes = logits.shape[1]
    if classes != len(labels):
        raise InputError(
            f"The model has {len(labels)} labels and gave {classes} numbers: its head was replaced.",
            python=f"model.reset_head({classes}) first; then its weights, and model.labels = [...].",
        )
    if not logits.isfinite().all():
        raise not_finite(model.dtype)
    best_first = logits.topk(min(top, classes)).indices  # (b, top); of scores, which far below the best are all zero
    scores = logits.softmax(-1).gather(1, best_first)
    answers = []
    for row_of_scores, row_of_indices in zip(scores.tolist(), best_first.tolist(), strict=True):
        best = zip(row_of_indices, row_of_scores, strict=True)
        answers.append([Prediction(labels[index], index, score) for index, score in best])
    return answers


def embed(model: "ViT", images: Iterable[Any], batch: int = 32, pace: Pace | None = None) -> Outcomes[Tensor]:
    """The pictures of `images` one after the other, each with its vector (d,) in float32 on the CPU, or an error."""
    return work_through(model, images, partial(_vectors, model), batch, pace)


def _vectors(model: "ViT", images: Tensor) -> list[Tensor]:
    """The vector of each of the images (b, c, h, w)."""
    vectors = model.embed(images).float().cpu()  # (b, d)
    if not vectors.isfinite().all():
        raise not_finite(model.dtype)
    return list(vectors)


def work_through(
    model: "ViT",
    images: Iterable[Any],
    work: Callable[[Tensor], Sequence[T]],
    batch: int = 32,
    pace: Pace | None = None,
) -> Outcomes[T]:
    """Puts pictures through a model, in batches and in constant memory.

    Args:
        model: Whose preprocessing is used, and who is in eval mode while `work` runs.
        images: Several pictures; read in the caller's thread, at most two batches ahead.
        work: Turns a batch (b, c, h, w) into b results.
        batch: Pictures at a time.
        pace: Where to count what takes how long.

    Returns:
        A generator of each picture with its result, or with the `ImageError` that says why it has none.

    Raises:
        ImageError: The model has no preprocessing that could be used.
        InputError: `images` is one picture, whose rows would be taken for pictures; or `batch` is no positive number.
    """
    check_count(batch, "batch")
    if is_one(images):
        raise InputError(
            f"This takes a list or an iterator of pictures, got one {type(images).__name__}.",
            python="Put it into a list: [picture].",
        )
    return _work_through(model, preprocess_of(model), images, work, batch, pace or Pace())


def _work_through(
    model: "ViT",
    preprocess: Preprocess,
    images: Iterable[Any],
    work: Callable[[Tensor], Sequence[T]],
    batch: int,
    pace: Pace,
) -> Outcomes[T]:
    """The generator that `work_through` returns, which itself makes sure at once that there is preprocessing."""
    with closing(_prepared(preprocess, images, batch, pace)) as batches:  # also where the caller stops early
        for prepared in batches:
            good = [pixels for _, pixels in prepared if isinstance(pixels, Tensor)]
            results: Iterator[T] = iter(())
            if good:
                begun = time.perf_counter()
                with evaluating(model):
                    results = iter(_one_each(work(_one_each(preprocess.batch(good), len(good))), len(good)))
                pace.worked += time.perf_counter() - begun
            for image, pixels in prepared:
                if isinstance(pixels, ImageError):
                    yield image, pixels
                else:
                    yield image, next(results)


def _prepared(
    preprocess: Preprocess, images: Iterable[Any], batch: int, pace: Pace
) -> Generator[list[tuple[Any, Tensor | ImageError]], None, None]:
    """Batches of pictures, each with its pixels or what is wrong with it; while one is used, the next is prepared."""
    all_there = isinstance(images, (list, tuple))
    waiting: deque[tuple[Any, Future[Tensor]]] = deque()
    source, room = iter(images), Room()
    with readers() as at_once, _threads(1) as in_order:
        try:
            while True:
                for image in islice(source, min(2 * batch - len(waiting), sys.maxsize)):
                    if _goes_beside_others(preprocess, image):
                        pixels = at_once.submit(_pixels_beside_others, preprocess, image, room)
                    else:
                        pixels = in_order.submit(_pixels_alone, preprocess, image, room)
                    waiting.append((image, pixels))
                    if not all_there:
                        wait([pixels])  # an iterator may give one object or file again and again, and change it
                if not waiting:
                    return
                ready = [waiting.popleft() for _ in range(min(batch, len(waiting)))]
                begun = time.perf_counter()
                prepared = [(image, _outcome(pixels)) for image, pixels in ready]
                pace.waited += time.perf_counter() - begun
                yield prepared
        finally:
            for _, pixels in waiting:
                pixels.cancel()


class Room:
    """So many pixels are decoded at once, however many threads there are."""

    def __init__(self) -> None:
        self.free = ROOM
        self.changed = Condition()

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        """Waits until there is room for a picture of so many; one that is larger than all of it is alone."""
        pixels = min(pixels, ROOM)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= pixels)
            self.free -= pixels
        try:
            yield
        finally:
            with self.changed:
                self.free += pixels
                self.changed.notify_all()


def readers() -> ThreadPoolExecutor:
    """The threads that decode files at once."""
    return _threads(min(READERS, torch.get_num_threads()))


def _threads(most: int) -> ThreadPoolExecutor:
    """So many threads at most, which do what they are given in its order."""
    return ThreadPoolExecutor(max_workers=most, thread_name_prefix="vitlite-images")


def _goes_beside_others(preprocess: Preprocess, image: Any) -> bool:
    """Whether a picture can be prepared at the same time as others, before or after them: a file or its bytes.

    All else is done one by one, in order. The same open file or pipe may come several times, with another picture in it
    each time, and a class of one's own need not be made for threads and may count.
    """
    is_file = isinstance(image, (str, PathLike, bytes)) and not is_read_once(image)
    return is_file and not own_methods(preprocess, "pixels")


def _pixels_beside_others(preprocess: Preprocess, image: Any, room: Room) -> Tensor:
    """What `preprocess.pixels` makes of a file, once there is room for it."""
    with room.taken(pixels_in(image)):
        return preprocess.pixels(image)


def _pixels_alone(preprocess: Preprocess, image: Any, room: Room) -> Tensor:
    """What `preprocess.pixels` makes of a picture, while no other is prepared."""
    with room.taken(ROOM):
        return preprocess.pixels(image)


def _one_each(made: S, pictures: int) -> S:
    """What was made of a batch, once it is sure that each picture has its own."""
    if len(made) != pictures:
        raise InputError(f"Of {pictures} pictures, {len(made)} images or results were made: it must be one of each.")
    return made


def _outcome(pixels: Future[Tensor]) -> Tensor | ImageError:
    try:
        return pixels.result()
    except ImageError as error:
        return error


@contextmanager
def being_trained(model: torch.nn.Module) -> Iterator[None]:
    """Keeps other threads from a model whose mode and weights change from step to step; this one may look at it.

    Raises:
        InputError: Another thread trains it.
    """
    with _changing_modes:
        _refuse_while_trained(model)
        mine = model not in _trained
        _trained[model] = get_ident()
    try:
        while any(module in _paused for module in model.modules()):  # others end their batch first
            time.sleep(0.001)
        yield
    finally:
        if mine:
            with _changing_modes:
                del _trained[model]


def _refuse_while_trained(model: torch.nn.Module) -> None:
    if _trained.get(model, get_ident()) != get_ident():
        raise InputError(
            "Another thread trains this model, and what it answers between two steps means nothing.",
            python="Load what the run keeps after each epoch: vitlite.load(out / 'last').",
            command="",
        )


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards each part of the model is in the mode it was in.

    Where several threads use a model, the last of them puts it back: until then, one of them needs eval mode.
    """
    with _changing_modes:
        _refuse_while_trained(model)
        paused = [module for module in model.modules() if module.training or module in _paused]
        for module in paused:
            module.training = False
            _paused[module] = _paused.get(module, 0) + 1
    try:
        with torch.no_grad():
            yield
    finally:
        with _changing_modes:
            for module in paused:
                _paused[module] -= 1
                if not _paused[module]:
                    del _paused[module]
                    module.training = True


def _labels(model: "ViT") -> Sequence[str]:
    """The labels of a model, one for each of its classes."""
    classes = model.config.num_classes
    if classes == 0:
        raise InputError(
            "This model has no head.",
            python="For vectors: model.embed(model.preprocess(images)).",
            command="For vectors: vitlite embed.",
        )
    if classes == 1:
        raise InputError(
            "The model has one class, and scores are shares of several: the only one would have all, of every picture.",
            python="What it gives: model(model.preprocess(images)). Where it was trained by binary cross entropy, "
            "torch.sigmoid of that is the score.",
            command="What it gives is to be had in Python.",
        )
    if model.labels is None:
        why = model.source.report.unlabelled if model.source else ""
        raise InputError(
            f"The model has no labels{f': {shown(why)}' if why else ''}.",
            python=f"Name its {classes} classes in order: model.labels = ['...', ...].",
            command=f"Name its {classes} classes in order in its config.json, or name a checkpoint like it: "
            "--model NAME --weights PATH.",
        )
    if len(model.labels) != classes:
        raise InputError(f"model.labels has {len(model.labels)} names, and the model {classes} classes.")
    return model.labels


def _answers(results: Outcomes[list[Prediction]]) -> Iterator[list[Prediction]]:
    """The answers alone; the first picture that has none ends them."""
    with closing(results):
        for i, (_, result) in enumerate(results):
            if isinstance(result, ImageError):
                raise result.within(f"Picture {i}") from result
            yield result
