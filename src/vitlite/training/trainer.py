"""Train a `ViT` from random weights, or fine-tune trained weights.

Every random number is a function of (seed, epoch, sample) or, for dropout and stochastic depth, of (seed, step, rank).
A run that is resumed on the same machine therefore ends with exactly the same weights.
Shapes: b images in a batch, or in this rank's share of a batch; c channels, h and w pixels, k classes.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlite import storage
from vitlite.errors import TrainError
from vitlite.images.naflex import NaFlexTransform
from vitlite.images.transform import normalise, preprocess_of
from vitlite.nn.vit import ViT
from vitlite.training import distributed
from vitlite.training.augment import SampleRandom, augment, mix, shuffled
from vitlite.training.data import ImageData, listed
from vitlite.training.evaluate import check_data_fits, measure, measure_labels
from vitlite.training.history import History, is_better, is_finished, metric_of
from vitlite.training.optim import learning_rate
from vitlite.training.record import images_of_run, write_images
from vitlite.training.settings import Settings
from vitlite.training.state import BEST, LAST, LOCK, LOG, STATE, Progress, Run

_log = getLogger("vitlite")


class Callbacks(NamedTuple):
    """Functions that the main process calls during training."""

    after_resume: Callable[[Run], None]
    after_step: Callable[[Run], None]
    after_epoch: Callable[[History], None]


def train(
    model: ViT,
    data: ImageData,
    out: Path,
    settings: Settings,
    *,
    validation: ImageData | None = None,
    after_resume: Callable[[Run], None] = lambda run: None,
    after_step: Callable[[Run], None] = lambda run: None,
    after_epoch: Callable[[History], None] = lambda history: None,
    save_every: float = 60.0,
) -> History:
    """Train a model, or resume the run in `out`.

    Args:
        model: A model in float32, with preprocessing and as many classes as the data. The head is replaced if the
            labels of the model differ from the classes of the data.
        data: The images to train on. An image that cannot be read is replaced by another image of the same class, and
            `data.broken()` lists it. If the images are `strict`, an error is raised instead.
        out: A folder for the state, the log, and the checkpoints `last` and `best`, which `vitlite.load` opens.
        settings: The settings of the run.
        validation: Images of the same classes, used to measure the model after each epoch. `best` is the checkpoint
            of the epoch with the highest accuracy. Among epochs of equal accuracy, the lowest loss decides. If images
            may have several labels, the mean average precision replaces the accuracy.
        after_resume: Called with the run when it is resumed, even if no epochs are left.
        after_step: Called with the run after each step.
        after_epoch: Called with the history after each epoch, and when a run is resumed.
        save_every: Minimum number of seconds between two saves of the state.

    Returns:
        The history, a list with one dictionary per epoch. After training, the model has the averaged weights.

    Raises:
        TrainError: The data do not fit the model, the loss diverged, `out` contains another run, or writing to `out`
            failed.
        ImageError: An image cannot be read, and the images are `strict`.
    """
    _check_start(model, data, settings, validation)
    check_folder(out)
    trainable = {weight: weight.requires_grad for weight in model.parameters()}
    try:
        with _locked(out):
            data, validation = images_of_run(out, data, validation)
            model.zero_grad()
            _match_head(model, data)
            for images in (data, validation):
                if images is not None:
                    check_data_fits(model, images)
            run = Run(model, data, settings, validation)
            _run_epochs(run, out, validation, Callbacks(after_resume, after_step, after_epoch), save_every)
            # Wait for rank 0, because `best` and `last` must be complete when any rank returns.
            distributed.assert_equal_on_all_ranks({"epochs": run.progress.epoch})
    finally:
        model.zero_grad()
        for weight, was_trainable in trainable.items():  # `frozen` applies only to this run
            weight.requires_grad_(was_trainable)
    run.swap_averages()
    model.eval()
    return run.history


def _check_start(model: ViT, data: ImageData, settings: Settings, validation: ImageData | None) -> None:
    """Check that the model, the data, the settings and the number of processes fit together."""
    for name, weight in model.named_parameters():
        if weight.dtype != torch.float32:
            raise TrainError(
                f"The model must be in float32 for training, but {name} is {weight.dtype}. Call model.float(). To "
                "compute in bfloat16, use Settings(bfloat16=True)."
            )
    if isinstance(preprocess_of(model).transform, NaFlexTransform):
        raise TrainError(
            "Training needs images of equal size, but a NaFlex model keeps the aspect ratio of each image. Set "
            "model.preprocess = model.preprocess.transform.squashed()."
        )
    if len(data.classes) < 2 - data.multi_label or model.config.num_classes != len(data.classes):
        raise TrainError(
            f"The data have {len(data.classes)} classes, but the model has {model.config.num_classes}. The numbers "
            "must be equal and at least 2. Create the model with num_classes=."
        )
    if data.multi_label and settings.balance:
        raise TrainError("Classes cannot be balanced if images may have several labels. Omit balance= (--balance).")
    if validation is not None and validation.multi_label != data.multi_label:
        raise TrainError(
            "Only one of the training data and the validation data has several labels per image. Convert the other "
            "with data.with_multi_label()."
        )
    if settings.patience and validation is None:
        raise TrainError(f"patience={settings.patience} needs validation images. Pass validation= or patience=0.")
    processes, steps = distributed.world_size(), math.ceil(len(data) / settings.batch)
    if 1 < processes > len(data) // steps // 2:
        raise TrainError(
            f"{len(data)} images in batches of {settings.batch} are too few for {processes} processes, because each "
            "process needs two images of every batch. Raise batch= (--batch), or start fewer processes."
        )


def check_folder(out: Path, others: Sequence[str] = ()) -> None:
    """Check that a run can start or resume in a folder.

    Args:
        out: The folder of the run.
        others: Names of additional files that the run will write.

    Raises:
        TrainError: The folder contains files of a run, but no state from which to resume.
    """
    found = [name for name in (BEST, LAST, LOG, *others) if (out / name).exists()]
    if found and not (out / STATE).exists():
        raise TrainError(
            f"{out} contains {', '.join(found)}, but no {STATE} to resume from. Choose another out= (--out)."
        )


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Create the folder of a run, and lock it against other runs until the context ends.

    With torchrun, only the main process does this.

    Raises:
        TrainError: Another process is training in the folder, or the folder cannot be written to.
    """
    with ExitStack() as held:
        if distributed.is_main():
            try:
                out.mkdir(parents=True, exist_ok=True)
                held.enter_context(storage.lock(out / LOCK, timeout=0))
            except TimeoutError as error:
                raise TrainError(
                    f"Another process is training in {out}. Wait until it ends, or choose another out= (--out)."
                ) from error
            except OSError as error:
                raise TrainError(f"Cannot write to {out}: {error}. Choose another out= (--out).") from error
        yield


def _match_head(model: ViT, data: ImageData) -> None:
    """Set the labels of a model to the classes of the data. If the labels were different, replace the head."""
    classes = data.classes
    if model.labels is not None and tuple(model.labels) != tuple(classes):
        if distributed.is_main():
            _log.warning(
                "vitlite: replacing the head, because the model's labels (%s) differ from the classes of the data (%s)",
                listed(model.labels),
                listed(classes),
            )
        model.reset_head(len(classes))
    model.labels = classes
    model.scores, model.thresholds = ("sigmoid" if data.multi_label else "softmax"), None


def _run_epochs(run: Run, out: Path, validation: ImageData | None, callbacks: Callbacks, save_every: float) -> None:
    resumed = (out / STATE).exists() and run.resume(out / STATE)
    distributed.assert_equal_on_all_ranks({"epoch": run.progress.epoch, "step": run.progress.step})
    if not resumed:
        run.save(out / STATE)  # first, because `check_folder` rejects other files without a state
        write_images(out, run.data, validation)
    elif distributed.is_main():
        for name in (STATE, LOG):
            storage.remove_leftovers(out / name)
        callbacks.after_resume(run)
        if run.history:
            if run.progress.step == 0:  # the run may have been killed before it wrote the checkpoints
                _save_models(run, out)
            run.write_log(out / LOG)
            callbacks.after_epoch(run.history)
    while run.progress.step or not is_finished(run.history, run.settings):
        _take_steps(run, out, callbacks.after_step, save_every)
        _end_epoch(run, out, validation)
        if distributed.is_main():
            callbacks.after_epoch(run.history)


def _take_steps(run: Run, out: Path, after_step: Callable[[Run], None], save_every: float) -> None:
    """Take the remaining steps of the current epoch, and save the state at intervals."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # comes with huggingface-hub

    settings, progress = run.settings, run.progress
    order = shuffled(settings.seed, progress.epoch, len(run.data))
    saved = time.monotonic()
    bar = tqdm(
        total=run.steps,
        initial=progress.step,
        desc=f"epoch {progress.epoch + 1}/{settings.epochs}",
        disable=None if distributed.is_main() else True,  # None shows the bar only on a terminal
        leave=False,
        file=sys.stderr,
    )
    with bar:
        while progress.step < run.steps:
            start = time.perf_counter()
            run.model.train(not settings.frozen)  # a frozen backbone stays in eval mode
            with run.matmul_context:
                loss, accuracy = _step(run, batch_of(order, progress.step, run.steps))
            if not math.isfinite(loss):
                last = f" The weights of the previous epoch are in {out / LAST}." if run.history else ""
                raise TrainError(
                    f"The loss became {loss} in epoch {progress.epoch + 1}, step {progress.step + 1}, at a learning "
                    f"rate of up to {settings.lr:g}. Start a new run with a lower lr= (--lr).{last}"
                )
            progress.add(loss, accuracy, time.perf_counter() - start)
            if time.monotonic() - saved >= save_every:
                run.save(out / STATE)
                saved = time.monotonic()
            bar.set_postfix(running_figures(run))
            bar.update()
            if distributed.is_main():
                after_step(run)


def batch_of(order: Tensor, step: int, steps: int) -> Tensor:
    """Return the rows of the images for one step of an epoch.

    Batch sizes differ by at most one, which avoids a tiny last batch.

    >>> [len(batch_of(torch.arange(65), step, steps=3)) for step in range(3)]  # rather than 32, 32 and 1
    [21, 22, 22]
    """
    n = len(order)
    return order[step * n // steps : (step + 1) * n // steps]


def running_figures(run: Run) -> dict[str, str]:
    """Return the loss, the accuracy and the speed of the current epoch as strings."""
    progress, batch = run.progress, len(run.data) / run.steps  # images in a batch, on average
    accuracy = {} if run.data.multi_label else {"accuracy": f"{progress.accuracy / progress.step:.3f}"}
    return {
        "loss": f"{progress.loss / progress.step:.3f}",
        **accuracy,
        "images/s": f"{progress.step * batch / progress.seconds:.0f}",
    }


def _end_epoch(run: Run, out: Path, validation: ImageData | None) -> None:
    """Measure the averaged weights, then write the state, the checkpoints and the log.

    The state is written first, because the process may be killed before it writes the checkpoints. Checkpoints newer
    than the state would be wrong if the run is then resumed with another number of epochs.
    """
    progress = run.progress
    record: dict[str, Any] = {
        "epoch": progress.epoch + 1,
        "loss": round(progress.loss / run.steps, 5),
        **({} if run.data.multi_label else {"accuracy": round(progress.accuracy / run.steps, 5)}),
        "lr": learning_rate(run.settings, progress.epoch + 1),
        "seconds": round(progress.seconds, 1),
    }
    if validation is not None:
        with run.averaged() as model:
            record |= _validate(model, validation, bfloat16=run.settings.bfloat16)
    run.history.append(record)
    run.progress = Progress(epoch=progress.epoch + 1)
    run.save(out / STATE)
    _save_models(run, out)
    run.write_log(out / LOG)


def _validate(model: ViT, validation: ImageData, *, bfloat16: bool) -> dict[str, Any]:
    """Return the loss and the accuracy. For several labels per image, return the loss, the mAP and the thresholds."""
    if not validation.multi_label:
        measured = measure(model, validation, bfloat16=bfloat16)
        return {"val_loss": round(measured.loss, 5), "val_top1": round(measured.top1, 5)}
    labels = measure_labels(model, validation, bfloat16=bfloat16)
    return {
        "val_loss": round(labels.loss, 5),
        "val_map": round(labels.mean_average_precision, 5),
        "thresholds": [round(threshold, 5) for threshold in labels.best_thresholds],
    }


def _save_models(run: Run, out: Path) -> None:
    """Write the checkpoints of the epoch that has just ended."""
    *past, record = run.history
    run.model.thresholds = record.get("thresholds")
    with run.averaged():
        if metric_of(record) and is_better(record, past):
            run.save_checkpoint(out / BEST)
        run.save_checkpoint(out / LAST)


def _step(run: Run, rows: Tensor) -> tuple[float, float]:
    """Take one training step on the images of these rows, and return the loss and the accuracy."""
    settings = run.settings
    done = run.progress.epoch * run.steps + run.progress.step
    images, labels = _batch(run, rows[distributed.paired_share(len(rows))])
    # fork_rng restores torch's generator, because dropout must not change the caller's random numbers.
    with torch.random.fork_rng([images.device] if images.device.type == "cuda" else []):
        torch.manual_seed(_dropout_seed(settings.seed, done, distributed.rank()))
        loss, accuracy = _add_gradients(run, images, labels)
    norm = nn.utils.clip_grad_norm_(run.weights.values(), settings.clip)
    if not math.isfinite(norm):
        return math.nan, accuracy
    lr = learning_rate(settings, done / run.steps)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["scale"] * lr
        optimizer.step()
        optimizer.zero_grad()
    run.average(done)
    return loss, accuracy


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return a seed for dropout and stochastic depth.

    The last 32 bits must differ between steps and ranks, because torch's CPU generator ignores the others.
    """
    return seed * 1_000_003 + step + rank * 0x9E3779B1


def _batch(run: Run, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return augmented and mixed images (b, c, h, w), and their soft labels (b, k).

    If an image has one label, labels are smoothed towards a uniform distribution. If it may have several, each label is
    smoothed towards its frequency in the data, which keeps the mean score of rare labels correct.
    """
    settings, k = run.settings, len(run.data.classes)
    random = SampleRandom(settings.seed, run.progress.epoch, rows)
    images, labels = run.data.fetch(rows)
    images = augment(images, random, settings.augmentation)
    shares = labels.float() if run.data.multi_label else F.one_hot(labels, k).float()
    images, shares = mix(images, shares, images.flip(0), shares.flip(0), random, settings.augmentation)
    targets = shares * (1 - settings.smoothing) + settings.smoothing * run.class_shares
    images = normalise(images * 255, run.transform, run.model.config.channels)
    return images.to(run.model.device), targets.to(run.model.device)


def _loss(logits: Tensor, targets: Tensor, *, multi_label: bool) -> Tensor:
    """Return the cross entropy, summed over the images. For several labels, average the binary ones."""
    if multi_label:
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / targets.shape[1]
    return F.cross_entropy(logits, targets, reduction="sum")


def _add_gradients(run: Run, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Run the forward and the backward pass in `accumulate` parts. Return the loss and the accuracy over all ranks.

    Both are sums over the images, divided by the average batch size. Every image of an epoch therefore has the same
    weight, although batch sizes differ by one, and the mean over the steps is the mean over the images.
    """
    total = len(run.data) / run.steps
    sums = torch.zeros(2, dtype=torch.float64, device="cpu")  # loss and accuracy
    parts = list(zip(images.chunk(run.settings.accumulate), labels.chunk(run.settings.accumulate), strict=True))
    for i, (x, y) in enumerate(parts, 1):
        is_last = i == len(parts)
        with nullcontext() if is_last else distributed.no_sync(run.network):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=run.settings.bfloat16):
                logits = run.network(x).float()  # (b, k)
            loss = _loss(logits + run.log_prior.to(logits.device), y, multi_label=run.data.multi_label) / total
            accuracy = (logits.argmax(1) == y.argmax(1)).sum().float() / total
            scaled = loss * distributed.world_size()  # DDP averages gradients, but the sum is needed
            scaled.backward()  # type: ignore[no-untyped-call]
        sums += torch.stack([loss.detach(), accuracy]).cpu()
    distributed.all_reduce(sums)
    loss_of_all, accuracy_of_all = sums.tolist()
    return loss_of_all, accuracy_of_all
