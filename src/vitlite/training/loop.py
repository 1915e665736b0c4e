"""Training a `ViT`, from scratch or from weights.

Every random number is a function of (seed, epoch, sample) or (seed, step): started again with the same command on the
same machine, a run ends with the same weights, bit for bit.
"""

import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlite.errors import TrainError
from vitlite.images import Preprocess
from vitlite.model import ViT
from vitlite.training import distributed as ranks
from vitlite.training.augment import Draws, augment, mix, shuffled
from vitlite.training.datasets import Pictures
from vitlite.training.evaluate import check_fit, measure, normalise
from vitlite.training.run import LOG, STATE, History, Progress, Run, save_checkpoint
from vitlite.training.schedule import learning_rate
from vitlite.training.settings import Settings


def train(
    model: ViT,
    data: Pictures,
    out: Path,
    settings: Settings,
    *,
    validation: Pictures | None = None,
    after_epoch: Callable[[History], None] = lambda history: None,
    save_every: float = 60.0,
) -> History:
    """Trains a model, or goes on with the run that `out` holds.

    Args:
        model: Random or trained, with as many classes as the data, and with its preprocessing.
        data: What to train on.
        out: A folder for the state, the log, and the checkpoints `last` and `best`, which `vitlite.load` opens.
        settings: The recipe.
        validation: What to measure after each epoch, of the same classes; the best one is kept in `best`.
        after_epoch: Called with what was measured so far; also when a run goes on, or is done already.
        save_every: Seconds between two writings of the state.

    Returns:
        What was measured, a dictionary for each epoch. The model ends with the averaged weights.

    Raises:
        TrainError: The data do not fit the model, the loss diverged, the disk is full, or `out` holds another run.
        ImageError: A picture cannot be read.
    """
    if not isinstance(model.preprocess, Preprocess):
        raise TrainError("The model has no preprocessing, so its checkpoints would have none. Set model.preprocess.")
    if len(data.classes) < 2 or model.config.num_classes != len(data.classes):
        raise TrainError(
            f"The data have {len(data.classes)} classes and the model's head {model.config.num_classes}; both must "
            "have the same number, at least 2. Create the model with num_classes= to match."
        )
    if 1 < ranks.world() > min(settings.batch, len(data)) // 2:
        raise TrainError(
            f"{len(data)} pictures in batches of {settings.batch} are too few for {ranks.world()} processes: each "
            "needs two of every batch. Raise --batch, or start fewer processes."
        )
    model.labels = data.classes
    for pictures in [data] if validation is None else [data, validation]:
        check_fit(model, pictures)
    out.mkdir(parents=True, exist_ok=True)
    run = Run(model, data, settings, validation)
    if (out / STATE).exists():
        run.resume(out / STATE)
        if run.history and not ranks.rank():
            after_epoch(run.history)
    ranks.agree("pictures, epoch and step", len(data), run.progress.epoch, run.progress.step)
    while run.progress.epoch < settings.epochs:
        _finish_epoch(run, out, save_every)
        progress = run.progress
        record = {
            "epoch": progress.epoch + 1,
            "loss": round(progress.loss / run.steps, 5),
            "accuracy": round(progress.right / run.steps, 5),
            "lr": learning_rate(settings, progress.epoch + 1),
            "seconds": round(progress.seconds, 1),
        }
        with run.averaged():
            if validation is not None:
                measured = measure(model, validation, bfloat16=settings.bfloat16)
                record |= {"val_loss": round(measured.loss, 5), "val_top1": round(measured.top1, 5)}
                if record["val_top1"] > max((past.get("val_top1", -1) for past in run.history), default=-1):
                    save_checkpoint(model, out / "best")
            save_checkpoint(model, out / "last")
        run.history.append(record)
        run.progress = Progress(epoch=progress.epoch + 1)
        run.write_log(out / LOG)
        run.save(out / STATE)
        if not ranks.rank():
            after_epoch(run.history)
    run._swap()
    model.eval()
    return run.history


def _finish_epoch(run: Run, out: Path, save_every: float) -> None:
    """Takes the steps that are left of the present epoch."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # comes with huggingface-hub

    s, progress = run.settings, run.progress
    order = shuffled(s.seed, progress.epoch, len(run.data))
    title = f"epoch {progress.epoch + 1}/{s.epochs}"
    hidden = True if ranks.rank() else None  # None: where stderr is no terminal
    bar = tqdm(total=run.steps, initial=progress.step, desc=title, disable=hidden, leave=False, file=sys.stderr)
    saved = time.monotonic()
    run.model.train(not s.frozen)  # a frozen backbone shall give the features that it will give later
    with bar:
        while progress.step < run.steps:
            start = time.perf_counter()
            with run.products:  # not timed: a run that goes on must compute as it did before
                loss, right = _step(run, order[progress.step * s.batch :][: s.batch])
            if not math.isfinite(loss):
                raise TrainError(
                    f"The loss became {loss} in epoch {progress.epoch + 1}, step {progress.step + 1}, at a learning "
                    f"rate of up to {s.lr:g}. {out / 'last'} holds the weights of the epoch before. Begin again with "
                    "a lower --lr and another --out."
                )
            progress.step += 1
            progress.loss += loss
            progress.right += right
            progress.seconds += time.perf_counter() - start
            if time.monotonic() - saved >= save_every:
                run.save(out / STATE)
                saved = time.monotonic()
            speed = progress.step * s.batch / progress.seconds
            shown = {"loss": progress.loss / progress.step, "accuracy": progress.right / progress.step}
            bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items()} | {"images/s": f"{speed:.0f}"})
            bar.update()


def _step(run: Run, rows: Tensor) -> tuple[float, float]:
    """One step on some of the pictures: its loss, and the share of right answers. Without finite gradients, no step."""
    s, model, epoch = run.settings, run.model, run.progress.epoch
    done = epoch * run.steps + run.progress.step
    torch.manual_seed(s.seed * 1_000_003 + done + (ranks.rank() << 40))  # for dropout and stochastic depth
    total, rows = len(rows), rows[ranks.share(len(rows))]
    draws = Draws(s.seed, epoch, rows)
    k = len(run.data.classes)
    labels = F.one_hot(run.data.labels[rows], k) * (1 - s.smoothing) + s.smoothing / k
    images = augment(run.data.fetch(rows), draws, s.augmentation)
    images, labels = mix(images, labels, images.flip(0), labels.flip(0), draws, s.augmentation)
    images, labels = normalise(images, run.recipe).to(model.device), labels.to(model.device)
    sums = torch.zeros(2, dtype=torch.float64)  # the loss, and the share of right answers
    parts = list(zip(images.chunk(s.accumulate), labels.chunk(s.accumulate), strict=True))
    for i, (x, y) in enumerate(parts, 1):
        with nullcontext() if i == len(parts) else ranks.unconnected(run.network):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=s.bfloat16):
                logits = run.network(x).float()
            part = F.cross_entropy(logits, y, reduction="sum") / total
            (part * ranks.world()).backward()  # type: ignore[no-untyped-call]  # the ranks' gradients are averaged
        sums += torch.stack([part.detach(), (logits.argmax(1) == y.argmax(1)).sum() / total]).cpu()
    ranks.add(sums)
    loss, right = sums.tolist()
    norm = nn.utils.clip_grad_norm_(run.weights.values(), s.clip)
    if not math.isfinite(norm):
        return math.nan, right
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["scale"] * learning_rate(s, done / run.steps)
        optimizer.step()
        optimizer.zero_grad()
    run.average(done)
    return loss, right
