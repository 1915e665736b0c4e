"""Training a `ViT`, from scratch or from weights, so that a killed run goes on as if nothing had happened.

`Settings` is the recipe, `Run` the state, `train` the loop; `vitlite train` is at the end. Every random number is a
function of (seed, epoch, sample) or (seed, step), and the state is one safetensors file, replaced whole: started again
with the same command on the same machine, a run ends with the same weights, bit for bit.
"""

import json
import math
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitlite import ranks, zoo
from vitlite.augment import STRENGTHS, Augmentation, Draws, augment, mix, shuffled
from vitlite.config import ViTConfig
from vitlite.datasets import Pictures, class_names, digest, is_cifar10, read_cifar10, read_folder
from vitlite.errors import TrainError
from vitlite.evaluate import check_fit, cifar10_reader, measure, normalise, preprocess_of
from vitlite.factory import create, load
from vitlite.images import Preprocess, Recipe
from vitlite.model import ViT
from vitlite.muon import Muon
from vitlite.onednn import float32_products, float32_products_are_exact
from vitlite.save import write_tensors
from vitlite.weights import image_size, is_place, positive

History = list[dict[str, Any]]
Optimizer = Literal["adamw", "muon"]

STATE, LOG = "state.safetensors", "log.jsonl"
RANGES = {  # the least and the most that a recipe may ask for
    "epochs": (1, 1e6),
    "batch": (1, 1e6),
    "accumulate": (1, 1e6),
    "lr": (1e-9, 1e3),
    "warmup": (1e-3, 1e6),
    "decay": (1e-3, 1),
    "weight_decay": (0, 1e3),
    "layer_decay": (1e-3, 1),
    "smoothing": (0, 0.99),
    "clip": (1e-9, math.inf),
    "ema": (0, 0.999999),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A training recipe."""

    epochs: int
    batch: int = 128
    optimizer: Optimizer = "adamw"  # muon takes the blocks' matrices, adamw the rest
    lr: float = 1e-3  # at its highest
    warmup: float = 1.0  # epochs in which the learning rate rises
    decay: float = 0.4  # last share of the epochs, in which it falls; before, it does not depend on how many they are
    weight_decay: float = 0.05
    layer_decay: float = 1.0  # each block's learning rate, as a share of the next one's
    smoothing: float = 0.1  # label smoothing
    clip: float = 1.0  # largest norm of the gradient
    accumulate: int = 1  # parts in which a batch is computed, to save memory
    ema: float = 0.999  # share of the averaged weights kept at each step
    frozen: bool = False  # train the head alone
    bfloat16: bool = True  # autocast
    seed: int = 0
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise TrainError(f"{name.replace('_', '-')} must be from {least:g} to {most:g}, got {value:g}.")


@dataclass
class Progress:
    """Where a run is, and what it has seen of the present epoch."""

    epoch: int = 0  # epochs that are done
    step: int = 0  # steps that are done of the next
    loss: float = 0.0  # summed over these steps
    right: float = 0.0  # share of pictures whose best class is the one they have most of, summed likewise
    seconds: float = 0.0


class Run:
    """A model, its averaged weights, its optimizers and its progress, which can be saved and resumed."""

    def __init__(self, model: ViT, data: Pictures, settings: Settings, validation: Pictures | None = None) -> None:
        self.model, self.data, self.settings = model, data, settings
        self.recipe = cast(Preprocess, model.preprocess).recipe
        self.steps = max(len(data) // settings.batch, 1)  # in an epoch
        self.progress = Progress()
        self.history: History = []
        if settings.frozen:
            model.requires_grad_(False)
            model.head.requires_grad_(True)
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        frozen = [weight for weight in model.parameters() if not weight.requires_grad]
        self.start = {
            "pictures": f"{len(data)}, {data.digest()}",
            "validation": validation.digest() if validation else None,
            "weights": model.source.sha256 if model.source else None,  # None: random ones, as the seed says
            "frozen weights": digest(frozen) if frozen else None,
        }
        self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.optimizers = optimizers(model, self.weights, settings)
        self.network = ranks.connected(model)
        tokens, head_dim = model.config.prefix_tokens + math.prod(model.config.grid), model.config.attention_dim
        exact = model.device.type == "cpu" and float32_products_are_exact(tokens, head_dim // model.config.heads)
        self.products = float32_products if exact and not settings.bfloat16 else nullcontext()

    def states(self) -> dict[str, dict[str, Tensor]]:
        """What the optimizers remember of each weight."""
        found = {weight: optimizer.state for optimizer in self.optimizers for weight in _weights_of(optimizer)}
        return {name: found[weight][weight] for name, weight in self.weights.items()}

    def save(self, path: Path) -> None:
        """Writes everything that a resumed run needs."""
        tensors: dict[str, Tensor] = {}
        for name, state in self.states().items():
            tensors |= {f"weight.{name}": self.weights[name].detach(), f"average.{name}": self.averages[name]}
            tensors |= {f"{key}.{name}": value for key, value in state.items()}
        about = {"identity": self.identity(), "progress": asdict(self.progress), "history": self.history}
        write(path, lambda temporary: write_tensors(temporary, tensors, {"vitlite.run": json.dumps(about)}))

    def write_log(self, path: Path) -> None:
        """Writes the history, a line an epoch."""
        lines = "".join(json.dumps(record) + "\n" for record in self.history)
        write(path, lambda temporary: temporary.write_text(lines, encoding="utf-8"))

    def resume(self, path: Path) -> None:
        """Goes on from what `save` wrote."""
        try:
            with safe_open(path, "pt") as file:
                about = json.loads(file.metadata()["vitlite.run"])
                self._check(path, about)
                states = self.states()
                for key in file.keys():  # noqa: SIM118  # no dictionary
                    kind, name = key.split(".", 1)
                    if kind == "weight":
                        self.weights[name].data.copy_(file.get_tensor(key))
                    elif kind == "average":
                        self.averages[name].copy_(file.get_tensor(key))
                    else:
                        states[name][kind] = file.get_tensor(key).to(self.model.device if kind != "step" else "cpu")
        except (SafetensorError, KeyError, ValueError) as error:
            raise TrainError(
                f"{path} is not the state of a run, or is damaged ({error}). Remove it to begin anew; or begin another "
                f"run, perhaps with --model {path.parent / 'last'} and another --out."
            ) from error
        self.progress, self.history = Progress(**about["progress"]), about["history"]

    def _check(self, path: Path, about: dict[str, Any]) -> None:
        """Everything must be the same; only the end may move, as long as the learning rate does not know of it."""
        old, new, progress = about["identity"], self.identity(), about["progress"]
        epochs = old["epochs"], new["epochs"]
        if progress["epoch"] + progress["step"] / self.steps <= min(epochs) * (1 - self.settings.decay):
            old = old | {"epochs": epochs[1]}
        if old.get("validation") is None:  # `best` compares with none so far
            old = old | {"validation": new["validation"]}
        changed = [f"{name} was {old.get(name)!r} and is {new[name]!r}" for name in new if old.get(name) != new[name]]
        if changed:
            hint = " More epochs fit in only before the learning rate begins to fall." if "epochs" in changed[0] else ""
            raise TrainError(
                f"{path.parent} holds another run: {'; '.join(changed)}.{hint} Use its settings to go on; or begin "
                f"another run, perhaps with --model {path.parent / 'last'} and another --out."
            )

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on, as JSON has it."""
        about = asdict(self.settings) | self.model.config.to_dict() | self.recipe.to_dict()
        about |= {"classes": self.data.classes} | self.start
        return cast(dict[str, Any], json.loads(json.dumps(about)))

    def average(self, step: int) -> None:
        """Moves the averages towards the weights; fast at first, since early weights are worth little."""
        keep = min(self.settings.ema, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.averages.values()), [w.detach() for w in self.weights.values()], 1 - keep)

    @contextmanager
    def averaged(self) -> Iterator[ViT]:
        """The model with the averages as its weights."""
        self._swap()
        try:
            yield self.model
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, weight in self.weights.items():
            weight.data, self.averages[name] = self.averages[name], weight.data


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


def learning_rate(s: Settings, epoch: float) -> float:
    """Rises linearly, stays, and falls as a half cosine; `epoch` counts from 0 and may lie within one.

    >>> [round(learning_rate(Settings(epochs=10, lr=1.0), epoch), 2) for epoch in (0, 0.5, 1, 6, 8, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    left = (s.epochs - epoch) / (s.decay * s.epochs)
    return s.lr * min(1.0, (epoch + 0.001) / s.warmup, 0.5 - 0.5 * math.cos(math.pi * min(left, 1.0)))


def optimizers(model: ViT, weights: dict[str, nn.Parameter], s: Settings) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon where wanted. Matrices decay; norms, biases, tokens and positions do not."""
    groups: dict[tuple[bool, int, bool, bool], dict[str, Any]] = {}
    for name, weight in weights.items():
        depth, matrix = _depth(name, model.config.depth), weight.ndim in (2, 4)
        muon = s.optimizer == "muon" and matrix and name.startswith("blocks.")
        scale = s.layer_decay ** (model.config.depth + 1 - depth)
        joint = name.endswith("attn.qkv.weight")
        group = {"params": [], "scale": scale, "weight_decay": s.weight_decay if matrix else 0.0}
        group["parts"] = 3 if joint else 1
        groups.setdefault((muon, depth, matrix, joint), group)["params"].append(weight)
    adamw = [group for (muon, *_), group in groups.items() if not muon]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(adamw, lr=s.lr, fused=model.device.type in ("cpu", "cuda"))]
    if others := [group for (muon, *_), group in groups.items() if muon]:
        found.append(Muon(others, lr=s.lr))
    return found


def _depth(name: str, depth: int) -> int:
    """How far a weight is from the pixels: 0 the embedding, 1 the first block, depth + 1 the head."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return depth + 1 if name.startswith(("norm.", "fc_norm", "pre_logits", "head")) else 0


def _weights_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (weight for group in optimizer.param_groups for weight in group["params"])


def write(path: Path, content: Callable[[Path], object]) -> None:
    """Replaces a file whole, or leaves it as it was. Of several processes, the first writes."""
    if ranks.rank():
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        content(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise TrainError(
            f"Cannot write {path}: {error}. What was there before is intact: make room, and start the same command."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(model: ViT, folder: Path) -> None:
    """Writes a folder that `vitlite.load` opens. Of several processes, the first writes."""
    if ranks.rank():
        return
    try:
        model.save(folder)
    except (OSError, SafetensorError) as error:
        raise TrainError(
            f"Cannot write {folder}: {error}. Make room, and start the same command: it goes on from the last state."
        ) from error


def add_train_arguments(parser: ArgumentParser) -> None:
    """Of `vitlite train`."""
    default, add = Settings(epochs=1), parser.add_argument
    add(
        "data",
        type=Path,
        metavar="DATA",
        help="train/ and val/ with a folder per class in each, or CIFAR-10's .bin files",
    )
    add("--model", required=True, help="a name of `vitlite list`, a folder or a file; with --weights none a preset too")
    add("--weights", metavar="none|PATH", help="what to begin with, none being random; default: the model's own")
    add("--out", type=Path, required=True, metavar="DIR", help="for checkpoints, log and state; a killed run goes on")
    add("--epochs", type=positive, required=True, metavar="N", help="how often to see every picture")
    add("--batch", type=positive, default=default.batch, metavar="N", help="default: %(default)s")
    add("--optimizer", choices=("adamw", "muon"), help="default: muon with random weights, otherwise adamw")
    add("--lr", type=float, metavar="X", help="default: 3e-3 for muon, 3e-4 for adamw, 1e-3 with --frozen")
    add("--layer-decay", type=float, metavar="X", help="default: 1 with random weights, otherwise 0.75")
    add("--weight-decay", type=float, default=default.weight_decay, metavar="X", help="default: %(default)s")
    add("--drop-path", type=float, default=0.0, metavar="X", help="stochastic depth; default: %(default)s")
    add("--smoothing", type=float, default=default.smoothing, metavar="X", help="of labels; default: %(default)s")
    add("--clip", type=float, default=default.clip, metavar="X", help="largest gradient; default: %(default)s")
    add("--ema", type=float, default=default.ema, metavar="X", help="of averaged weights; default: %(default)s")
    add("--augment", choices=tuple(STRENGTHS), default="weak", help="changes to pictures; default: %(default)s")
    add("--accumulate", type=positive, default=1, metavar="N", help="parts of a batch, to save memory")
    add("--frozen", action="store_true", help="train the head alone")
    add("--size", type=image_size, metavar="PIXELS", help="image size other than the model's")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default: %(default)s")
    add("--device", help="such as cpu, cuda, mps; default: cpu")
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add("--save-every", type=float, default=60.0, metavar="SECONDS", help="how often, at most; default: %(default)s")


def run_train(args: Namespace) -> int:
    """Trains, and draws the curves after each epoch."""
    with ranks.together(args.device):
        return _run_train(args)


def _run_train(args: Namespace) -> int:
    from vitlite.plots import draw_curves  # says at once if matplotlib is missing

    cifar = is_cifar10(args.data)
    classes = read_cifar10(args.data, "val").classes if cifar else class_names(args.data / "train")
    if len(classes) < 2:
        raise TrainError(f"{args.data / 'train'} has one class only, {classes[0]}. Training needs at least two.")
    model = _model(args, len(classes))
    prepare = cast(Preprocess, model.preprocess)
    if cifar:
        data, validation = (read_cifar10(args.data, split, cifar10_reader(prepare)) for split in ("train", "val"))
    else:
        data, validation = (read_folder(args.data / split, prepare.pixels, classes) for split in ("train", "val"))
    fresh = args.weights == "none"
    optimizer: Optimizer = args.optimizer or ("muon" if fresh and not args.frozen else "adamw")
    settings = Settings(
        epochs=args.epochs,
        batch=args.batch,
        optimizer=optimizer,
        lr=(3e-3 if optimizer == "muon" else 1e-3 if args.frozen else 3e-4) if args.lr is None else args.lr,
        layer_decay=(1.0 if fresh else 0.75) if args.layer_decay is None else args.layer_decay,
        weight_decay=args.weight_decay,
        smoothing=args.smoothing,
        clip=args.clip,
        ema=args.ema,
        accumulate=args.accumulate,
        frozen=args.frozen,
        bfloat16=args.dtype == "bfloat16",
        seed=args.seed,
        augmentation=STRENGTHS[args.augment],
    )

    def show(history: History) -> None:
        print(json.dumps(history[-1]), flush=True)
        draw_curves(history, args.out / "curves.png")

    train(model, data, args.out, settings, validation=validation, after_epoch=show, save_every=args.save_every)
    return 0


def _model(args: Namespace, classes: int) -> ViT:
    """The model to begin with, with its preprocessing: its weights' own, or with random ones what is usual."""
    options = {"num_classes": classes, "image_size": args.size, "device": args.device}
    torch.manual_seed(args.seed)
    if args.weights == "none":
        model = create(args.model, weights=None, **options)
        model.preprocess = Preprocess(_usual_recipe(args.model, model.config), model)
    elif args.weights is not None:
        model = create(args.model, weights=args.weights, **options)
    elif is_place(args.model):
        model = load(args.model, **options)
    else:
        model = create(args.model, **options)
    preprocess_of(model, args.weights or args.model)
    if args.drop_path:
        model = _with_drop_path(model, args.drop_path)
    return model


def _usual_recipe(name: str, config: ViTConfig) -> Recipe:
    """That of the zoo's record of this name, else the whole picture."""
    if name in zoo.NAMES:
        return Recipe.from_record(zoo.find(name), config.size)
    half = (0.5,) * config.channels
    return Recipe(size=config.size, resize=config.size, mode="center", interpolation="bicubic", mean=half, std=half)


def _with_drop_path(model: ViT, rate: float) -> ViT:
    """The same weights, and what is known of them, in a model with stochastic depth."""
    changed = ViT(model.config.replace(drop_path=rate)).to(model.device)
    changed.load_state_dict(model.state_dict())
    changed.labels, changed.source = model.labels, model.source
    changed.preprocess = Preprocess(cast(Preprocess, model.preprocess).recipe, changed)
    return changed
