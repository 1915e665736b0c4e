"""Training a `ViT`, from scratch or from weights.

Every random number is a function of (seed, epoch, sample) or, of dropout and stochastic depth, (seed, step, rank):
started again with the same command on the same machine, a run ends with the same weights, bit for bit.
Shapes: b pictures in a batch, or in this rank's share of it; c channels, h and w pixels, k classes.
"""

import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from logging import getLogger
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlite import storage
from vitlite.checkpoints.save import check_overwrite
from vitlite.errors import TrainError, shown
from vitlite.factory import load
from vitlite.images.transform import normalise
from vitlite.nn.vit import ViT
from vitlite.training import distributed
from vitlite.training.augment import Draws, augment, mix, shuffled
from vitlite.training.batches import batch_of, steps_of_an_epoch
from vitlite.training.best import check_best, is_better, is_done
from vitlite.training.datasets import Pictures, refuse_shared_labels
from vitlite.training.evaluate import Measured, check_fit, measure_together, preprocess_of
from vitlite.training.run import BEST, LAST, LOCK, LOG, STATE, History, Run
from vitlite.training.schedule import learning_rate
from vitlite.training.settings import Settings
from vitlite.training.start import take_classes
from vitlite.training.state import Progress

_log = getLogger("vitlite")
_drawing = Lock()  # of torch's generator, which all threads share


class Told(NamedTuple):
    """Whom the main process tells how far a run is."""

    after_resume: Callable[[Run], None]
    after_step: Callable[[Run], None]
    after_epoch: Callable[[History], None]
    after_best: Callable[[Measured], None]


def train(
    model: ViT,
    data: Pictures,
    out: Path,
    settings: Settings,
    *,
    validation: Pictures | None = None,
    after_resume: Callable[[Run], None] = lambda run: None,
    after_step: Callable[[Run], None] = lambda run: None,
    after_epoch: Callable[[History], None] = lambda history: None,
    after_best: Callable[[Measured], None] = lambda measured: None,
    save_every: float = 60.0,
) -> History:
    """Trains a model, or goes on with the run that `out` holds.

    Args:
        model: Random or trained, with as many classes as the data, and with its preprocessing. Of the same classes in
            another order, the rows of its head are moved; of other ones than its labels, the head is a new one.
        data: What to train on.
        out: A folder for the state, the log, and the checkpoints `last` and `best`, which `vitlite.load` opens.
        settings: The recipe.
        validation: What to measure after each epoch, of the same classes; the best one is kept in `best`,
            by accuracy, and where that ties by loss; it is measured again at the end, from the file.
        after_resume: Called with a run that goes on, or is done already.
        after_step: Called with the run.
        after_epoch: Called with what was measured so far; also when a run goes on, or is done already.
        after_best: Called at the end with what `best` gave when it was measured again, where there is one.
        save_every: Seconds between two writings of the state.

    Returns:
        What was measured, a dictionary for each epoch. The model ends with the averaged weights.

    Raises:
        TrainError: The data do not fit the model, the loss diverged, the disk is full, `out` holds another run, or
            `best` does not give what was measured.
        ImageError: A picture cannot be read.
    """
    _check_start(model, data, settings, validation)
    told = Told(after_resume, after_step, after_epoch, after_best)
    with _modes_of_its_own(model.device):
        return _train(model, data, out, settings, validation, told, save_every)


@contextmanager
def _modes_of_its_own(device: torch.device) -> Iterator[None]:
    """Gradients on and autocast off: the settings alone say how a run computes, and not from where it is called.

    Inside of an autocast, off or on, torch keeps what it has cast until that one ends: no step would change it.
    """
    on_cpu, on_device = (torch.autocast(kind, enabled=False, cache_enabled=False) for kind in ("cpu", device.type))
    with torch.inference_mode(False), torch.enable_grad(), on_cpu, on_device:
        yield


def _train(
    model: ViT,
    data: Pictures,
    out: Path,
    settings: Settings,
    validation: Pictures | None,
    told: Told,
    save_every: float,
) -> History:
    run: Run | None = None
    before, head = model.labels, [weight.detach().clone() for weight in model.head.parameters()]
    trainable = {weight: weight.requires_grad for weight in model.parameters()}
    try:
        about_head = take_classes(model, data.classes)
        check_fit(model, data)
        if validation is not None:
            check_fit(model, validation)
        check_place(out)
        _make_folder(out)
        if about_head and distributed.is_main() and not (out / STATE).exists():  # what goes on has a head by then
            _log.warning("vitlite: %s", about_head)
        with _alone(out):
            run = Run(model, data, settings, validation)
            with run.taken_back_unless_kept(out / STATE):
                _run_epochs(run, out, validation, told, save_every)
                if validation is not None:
                    _check_best(run, out, validation, told.after_best)
    finally:
        if run is None or run.progress == Progress():  # refused: nothing was trained, so it knows no other classes
            model.labels = before
            for weight, old in zip(model.head.parameters(), head, strict=True):
                weight.data.copy_(old)
        for weight, was_trainable in trainable.items():  # a frozen backbone is frozen for this run only
            weight.requires_grad_(was_trainable)
    run.swap_averages()
    model.eval()
    return run.history


def check_place(out: Path, beside: Sequence[str] = ()) -> None:
    """Makes sure that nothing is where a run will write, but what an earlier one left that can go on.

    A run writes its state before anything else: where there is none, no run that can go on left what is there.

    Args:
        out: The folder of the run.
        beside: Names of files that are written there, too.

    Raises:
        TrainError, CheckpointError: Something is, which stays; or nothing can be written there.
    """
    in_the_way = storage.folder_obstacle(out)
    if in_the_way:
        raise TrainError(
            f"Cannot write to {shown(str(out))}: {in_the_way}.",
            python="Name another `out`.",
            command="Name another --out.",
        )
    for name in (LAST, BEST):
        check_overwrite(out / name)
    there = [name for name in (BEST, LAST, LOG, *beside) if (out / name).exists()]
    if there and not (out / STATE).exists():
        models = [name for name in there if name in (BEST, LAST)]
        raise TrainError(
            f"{shown(str(out))} has {', '.join(there)}, and no {STATE}: they are of a finished run whose state was "
            "deleted, or of somebody else, and stay.",
            python="Name another `out`" + ("; to train the weights there further, begin with them." if models else "."),
            command="Name another --out"
            + (f"; to train the weights there further: --model {shown(str(out / models[0]))}." if models else "."),
        )


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(
            f"Cannot make the folder {shown(str(out))}: {error.strerror}.",
            python="Name another `out`.",
            command="Name another --out.",
        ) from error


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keeps other runs from the folder of this one, which writes there when it is rank 0.

    Raises:
        TrainError: Another process trains there.
    """
    with ExitStack() as held:
        if distributed.is_main():
            try:
                held.enter_context(storage.lock(out / LOCK, timeout=0))
            except TimeoutError as error:
                raise TrainError(
                    f"Another process is training in {out}.",
                    python=f"Wait for it, or use another `out`. If there is none, delete {out / LOCK}.",
                    command=f"Wait for it, or use another --out. If there is none, delete {out / LOCK}.",
                ) from error
            except OSError as error:
                raise TrainError(
                    f"{shown(str(out / LOCK))} cannot be used as a lock: {error.strerror}.",
                    python="Move it away, or name another `out`.",
                    command="Move it away, or name another --out.",
                ) from error
        yield


def _run_epochs(run: Run, out: Path, validation: Pictures | None, told: Told, save_every: float) -> None:
    """Goes on where the run is, to its end."""
    goes_on = (out / STATE).exists() and run.resume(out / STATE)
    run.refuse_other_log(out / LOG)
    if goes_on and distributed.is_main():
        told.after_resume(run)
        if run.history:
            told.after_epoch(run.history)
    distributed.assert_equal_on_all_ranks({"epoch": run.progress.epoch, "step": run.progress.step})
    if not goes_on:
        run.save(out / STATE)  # before anything else, as `check_place` says
    elif distributed.is_main():
        _write_what_was_left_out(run, out)
    while not is_done(run.history, run.settings):
        _take_steps(run, out, told.after_step, save_every)
        _end_epoch(run, out, validation)
        if distributed.is_main():
            told.after_epoch(run.history)
    if run.progress.step:
        _return_to_last(run, out)


def _write_what_was_left_out(run: Run, out: Path) -> None:
    """Ends what a kill may have cut short after the last state was written: see `_end_epoch`."""
    storage.remove_leftovers(out / STATE)
    if run.history and run.progress.step == 0 and not run.is_logged(out / LOG):
        _save_models(run, out)
    run.write_log(out / LOG)


def _check_best(run: Run, out: Path, validation: Pictures, after_best: Callable[[Measured], None]) -> None:
    """Measures `best` again, by all ranks."""
    distributed.assert_equal_on_all_ranks({"epochs": run.progress.epoch})  # waits for rank 0, which writes
    measured = check_best(out, run.history, run.model, validation, bfloat16=run.settings.bfloat16)
    if measured is not None and distributed.is_main():
        after_best(measured)


def _check_start(model: ViT, data: Pictures, settings: Settings, validation: Pictures | None) -> None:
    """Whether model, data, recipe and processes can go together at all."""
    preprocess_of(model)
    _refuse_other_types(model)
    if len(data.classes) < 2 or model.config.num_classes != len(data.classes):
        raise TrainError(
            f"The data have {len(data.classes)} classes and the model's head {model.config.num_classes}; both must "
            "have the same number, at least 2.",
            python="Create the model with num_classes= to match.",
        )
    refuse_shared_labels(data.classes, data.classes)
    if settings.patience and validation is None:
        raise TrainError(
            f"patience {settings.patience} waits for a better epoch, and without validation pictures none is better.",
            python="Give validation pictures, or leave patience out.",
        )
    processes = distributed.world_size()
    smallest = len(data) // steps_of_an_epoch(len(data), settings.batch)  # batch
    if 1 < processes > smallest // 2:
        raise TrainError(
            f"{len(data)} pictures in batches of {settings.batch} are too few for {processes} processes: each needs "
            "two of every batch.",
            python="Raise Settings.batch, or start fewer processes.",
            command="Raise --batch, or start fewer processes.",
        )


def _refuse_other_types(model: ViT) -> None:
    """Makes sure that weights are of float32: the steps of a fine-tune are smaller than what shorter types can tell.

    And that torch computes gradients of them.
    """
    for name, weight in model.named_parameters():
        if weight.is_inference():
            raise TrainError(
                f"The model was made under torch.inference_mode, and of its {name} torch computes no gradients.",
                python="Create or load it outside.",
            )
        if weight.is_floating_point() and weight.dtype != torch.float32:
            raise TrainError(
                f"The model is trained in float32, and its {name} is of {weight.dtype}.",
                python="model.float() first; with Settings.bfloat16, as it is by default, it computes in bfloat16 all "
                "the same (autocast).",
            )


def _take_steps(run: Run, out: Path, after_step: Callable[[Run], None], save_every: float) -> None:
    """Takes the steps that are left of the present epoch, and saves the state now and then."""
    settings, progress = run.settings, run.progress
    order = shuffled(settings.seed, progress.epoch, len(run.data))
    saved = time.monotonic()
    with _progress_bar(run) as bar, _no_gradients_but_its_own(run.weights.values()):
        while progress.step < run.steps:
            start = time.perf_counter()
            run.model.train(not settings.frozen)  # a frozen backbone shall give the features that it will give later
            with run.matmul_context:
                loss, right = _step(run, batch_of(order, progress.step, run.steps))
            _check_finite(loss, run, out)
            progress.add(loss, right, time.perf_counter() - start)
            if time.monotonic() - saved >= save_every:
                run.save(out / STATE)
                saved = time.monotonic()
            bar.set_postfix(so_far(run))
            bar.update()
            if distributed.is_main():
                after_step(run)


@contextmanager
def _no_gradients_but_its_own(weights: Collection[Tensor]) -> Iterator[None]:
    """Takes away what gradients weights have, before and after: the next step, whoever takes it, would add to them."""
    try:
        for weight in weights:
            weight.grad = None
        yield
    finally:
        for weight in weights:
            weight.grad = None


def _check_finite(loss: float, run: Run, out: Path) -> None:
    if math.isfinite(loss):
        return
    kept = f" {out / LAST} holds the weights of the epoch before." if run.history else ""
    raise TrainError(
        f"The loss became {loss} in epoch {run.progress.epoch + 1}, step {run.progress.step + 1}, at a learning rate "
        f"of up to {run.settings.lr:g}.{kept}",
        python="Begin again with the model as it was before, a lower lr and another `out`.",
        command="Begin again with a lower --lr and another --out.",
    )


def _progress_bar(run: Run) -> Any:
    """A bar with a mark for each step of the epoch, where stderr is a terminal."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # comes with huggingface-hub

    return tqdm(
        total=run.steps,
        initial=run.progress.step,
        desc=f"epoch {run.progress.epoch + 1}/{run.settings.epochs}",
        disable=None if distributed.is_main() else True,  # None: where it is no terminal
        leave=False,
        file=sys.stderr,
    )


def so_far(run: Run) -> dict[str, str]:
    """What there is to say of the epoch, once a step of it is done."""
    progress, batch = run.progress, len(run.data) / run.steps  # pictures of a batch, on average
    return {
        "loss": f"{progress.loss / progress.step:.3f}",
        "accuracy": f"{progress.right / progress.step:.3f}",
        "images/s": f"{progress.step * batch / progress.seconds:.0f}",
    }


def _end_epoch(run: Run, out: Path, validation: Pictures | None) -> None:
    """Measures the averaged weights, and writes state, checkpoints and log, in this order.

    A killed run goes on from its state, and perhaps otherwise than before: with another end, or as many threads as
    round otherwise. So no checkpoint is replaced by one of an epoch that the state does not have.
    """
    progress = run.progress
    record = {
        "epoch": progress.epoch + 1,
        "loss": round(progress.loss / run.steps, 5),
        "accuracy": round(progress.right / run.steps, 5),
        "lr": learning_rate(run.settings, progress.epoch + 1),
        "seconds": round(progress.seconds, 1),
    }
    if validation is not None:
        with run.averaged() as model:
            measured = measure_together(model, validation, bfloat16=run.settings.bfloat16)
        record |= {"val_loss": round(measured.loss, 5), "val_top1": round(measured.top1, 5)}
    run.history.append(record)
    run.progress = Progress(epoch=progress.epoch + 1)
    run.save(out / STATE)
    _save_models(run, out)
    run.write_log(out / LOG)  # last: whoever reads a line of it knows that the epoch is kept


def _save_models(run: Run, out: Path) -> None:
    """Writes the checkpoints of the epoch that has just ended."""
    *past, record = run.history
    with run.averaged():
        if "val_top1" in record and is_better(record, past):
            run.save_checkpoint(out / BEST)
        run.save_checkpoint(out / LAST)


def _return_to_last(run: Run, out: Path) -> None:
    """Gives the averages what `last` has, where another patience ends a run that had begun a further epoch."""
    last = load(out / LAST, device=run.model.device, dtype=run.model.dtype).state_dict()
    for name, average in run.averages.items():
        average.copy_(last[name])


def _step(run: Run, rows: Tensor) -> tuple[float, float]:
    """One step on some of the pictures: its loss, and the share of right answers. Without finite gradients, no step."""
    settings = run.settings
    done = run.progress.epoch * run.steps + run.progress.step
    images, labels = _batch(run, rows[distributed.paired_share(len(rows))])
    with _random_numbers(_seed_of_masks(settings.seed, done, distributed.rank()), images.device):
        loss, right = _add_gradients(run, images, labels)
    norm = nn.utils.clip_grad_norm_(run.weights.values(), settings.clip)
    if not math.isfinite(norm):
        return math.nan, right
    lr = learning_rate(settings, done / run.steps)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["scale"] * lr
        optimizer.step()
        optimizer.zero_grad()
    run.average(done)
    return loss, right


def _seed_of_masks(seed: int, step: int, rank: int) -> int:
    """For dropout and stochastic depth of a step. On a CPU, torch's generator takes no more than its last 32 bits."""
    return seed * 1_000_003 + step + rank * 0x9E3779B1


@contextmanager
def _random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Lets the model draw by this seed, and torch's generator go on afterwards as it was."""
    with _drawing, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _batch(run: Run, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Changed and mixed pictures, and what share of each class is in them, times how much the picture counts.

    (b,) -> (b, c, h, w) and (b, k).
    """
    settings, k = run.settings, len(run.data.classes)
    draws = Draws(settings.seed, run.progress.epoch, rows)
    images = augment(run.data.fetch(rows), draws, settings.augmentation)
    shares = F.one_hot(run.data.labels[rows], k).float()
    images, shares = mix(images, shares, images.flip(0), shares.flip(0), draws, settings.augmentation)
    smooth = shares * (1 - settings.smoothing) + settings.smoothing / k
    labels = smooth * (shares @ run.importance)[:, None]
    images = normalise(images * 255, run.transform, run.model.config.channels)
    return images.to(run.model.device), labels.to(run.model.device)


def _add_gradients(run: Run, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Adds to the gradients, in as many parts as are wanted: the loss of all ranks, and the share of right answers.

    Both are sums over the pictures, divided by how many a batch has on average. So each picture of an epoch counts
    alike, also where a batch has one more than another, and the mean over the steps is that over the pictures.
    """
    total = len(run.data) / run.steps
    sums = torch.zeros(2, dtype=torch.float64, device="cpu")  # the loss, and the share of right answers
    parts = list(zip(images.chunk(run.settings.accumulate), labels.chunk(run.settings.accumulate), strict=True))
    for i, (x, y) in enumerate(parts, 1):
        is_last = i == len(parts)
        with nullcontext() if is_last else distributed.no_sync(run.network):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=run.settings.bfloat16):
                logits = run.network(x).float()  # (b, k)
            loss = F.cross_entropy(logits, y, reduction="sum") / total
            right = (logits.argmax(1) == y.argmax(1)).sum().float() / total
            scaled = loss * distributed.world_size()  # as the ranks' gradients are averaged, and are to be summed
            scaled.backward()  # type: ignore[no-untyped-call]
        sums += torch.stack([loss.detach(), right]).cpu()
    distributed.all_reduce(sums)
    loss_of_all, right_of_all = sums.tolist()
    return loss_of_all, right_of_all
