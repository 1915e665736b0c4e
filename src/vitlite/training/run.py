"""The state of a training run, which is one file, replaced whole: a killed run goes on as if nothing had happened."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vitlite import storage
from vitlite.checkpoints.reader import RUN_STATE, WEIGHTS
from vitlite.checkpoints.save import check_savable, write_tensors
from vitlite.config import ViTConfig
from vitlite.errors import TrainError, VitliteError, shown
from vitlite.fast.kernels import float32_products, float32_products_are_exact, kernels_as_created
from vitlite.images.transform import TransformConfig, transform_to_save
from vitlite.nn.vit import ViT
from vitlite.training import distributed
from vitlite.training.batches import importance_of_classes, steps_of_an_epoch
from vitlite.training.datasets import Pictures, digest
from vitlite.training.evaluate import preprocess_of
from vitlite.training.optim import optimizers, remembers, restore_optimizer, weights_of
from vitlite.training.settings import Settings
from vitlite.training.state import (
    CHECKSUM,
    METADATA,
    STEP,
    Kept,
    Progress,
    State,
    check_tensors,
    checksum,
    damaged,
    read_state,
)

History = list[dict[str, Any]]

STATE, LOG, LOCK = RUN_STATE, "log.jsonl", "train.lock"
LAST, BEST = "last", "best"  # the folders of the weights of the last epoch, and of the best


class Run:
    """A model, its averaged weights, its optimizers and its progress, which can be saved and resumed."""

    def __init__(self, model: ViT, data: Pictures, settings: Settings, validation: Pictures | None = None) -> None:
        self.model, self.data, self.settings = model, data, settings
        self.transform = preprocess_of(model).transform
        transform_to_save(model)  # both are too late to say in an hour
        if type(model).save is ViT.save:  # a class of its own may know how to save what no config tells
            check_savable(model, Path(WEIGHTS))
        self.steps = steps_of_an_epoch(len(data), settings.batch)
        self.importance = importance_of_classes(data, balance=settings.balance)  # (k,)
        self.progress = Progress()
        self.history: History = []
        self.is_saved = False  # what it began with, or has by now
        if settings.frozen:
            model.requires_grad_(False)
            model.head.requires_grad_(True)
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.names = {weight: name for name, weight in self.weights.items()}
        self.begun_with = _begun_with(model, data, validation)
        self.optimizers = optimizers(model, self.weights, settings)
        self.matmul_context = _matmul_context(model, settings)
        self.kernels = _kernels(model, self.matmul_context)
        own = {"kernels": None, "patience": settings.patience}  # machines may differ in what is fast
        distributed.assert_equal_on_all_ranks(self.identity() | own)
        self.network = distributed.wrap_ddp(model)  # which gives all ranks the random weights of the first
        self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def states(self) -> dict[str, dict[str, Tensor]]:
        """What the optimizers remember of each weight."""
        state_of = {}
        for optimizer in self.optimizers:
            for weight in weights_of(optimizer):
                state_of[weight] = optimizer.state[weight]
        return {name: state_of[weight] for name, weight in self.weights.items()}

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on, as JSON has it."""
        identity = asdict(self.settings) | self.model.config.to_dict() | self.transform.to_dict()
        del identity["patience"]  # it says when a run ends, and nothing of what it does until then
        identity |= {"classes": self.data.classes, "kernels": self.kernels} | self.begun_with
        identity["quick_decode"] = preprocess_of(self.model).quick_decode
        return cast(dict[str, Any], json.loads(json.dumps(identity)))

    def save(self, path: Path) -> None:
        """Writes everything that a resumed run needs."""
        self.is_saved = True
        if not distributed.is_main():
            return
        tensors: dict[str, Tensor] = {}
        for name, state in self.states().items():
            tensors[f"weight.{name}"] = self.weights[name].detach()
            tensors[f"average.{name}"] = self.averages[name]
            for kind, value in state.items():
                tensors[f"{kind}.{name}"] = value
        for name, buffer in self.model.named_buffers():
            tensors[f"buffer.{name}"] = _in_floats(buffer)
        unmoved = [name for name, state in self.states().items() if not state]  # which had no gradient so far
        saved = {"identity": self.identity(), "progress": asdict(self.progress), "history": self.history}
        saved["unmoved"] = unmoved
        header = json.dumps(saved)
        with _explained(path):
            write_tensors(path, tensors, {METADATA: header, CHECKSUM: checksum(header, tensors)})

    def write_log(self, path: Path) -> None:
        """Writes the history, a line an epoch."""
        if not distributed.is_main():
            return
        with _explained(path):
            storage.write_text(path, self._log())

    def _log(self) -> str:
        return "".join(json.dumps(record) + "\n" for record in self.history)

    def is_logged(self, path: Path) -> bool:
        """Whether a log has all of the history."""
        log = self._log().encode()
        return path.exists() and _read(path, len(log) + 1) == log

    def refuse_other_log(self, path: Path) -> None:
        """Makes sure that a log is the one of this run, all of it or, after a kill, its beginning.

        Raises:
            TrainError: It is another.
        """
        log = self._log().encode()
        if path.exists() and not log.startswith(_read(path, len(log) + 1)):
            raise TrainError(
                f"{shown(str(path))} is not the log of this run, and stays.",
                python="Move it away, or name another `out`.",
                command="Move it away, or name another --out.",
            )

    def save_checkpoint(self, folder: Path) -> None:
        """Writes the model as it is now to a folder that `vitlite.load` opens."""
        if not distributed.is_main():
            return
        with _explained(folder):
            self.model.save(folder)

    def resume(self, path: Path) -> bool:
        """Takes over what `save` wrote, if any step was taken by then, and says whether.

        A state without a step is as if there were none: nothing is lost, and the model may have other weights by now.
        Where the run cannot go on, nothing of it was changed.

        Raises:
            TrainError: It is the state of another run, or damaged.
        """
        saved = read_state(path)
        if not _is_begun(saved, path.parent):
            return False
        self._refuse_changes(self._changes(saved), path.parent)
        done = saved.progress.epoch * self.steps + saved.progress.step
        with damaged(path):
            if saved.progress.epoch > self.settings.epochs:
                raise TrainError(f"progress.epoch is {saved.progress.epoch}, of {self.settings.epochs}")
            if saved.progress.step > self.steps:
                raise TrainError(f"progress.step is {saved.progress.step}, and an epoch has {self.steps} steps")
        check_tensors(path, saved.tensors, self._kept(saved.unmoved), done)
        self._restore_weights(saved.tensors)
        self._restore_buffers(saved.tensors)
        self._restore_averages(saved.tensors)
        self._restore_optimizers(saved.tensors)
        self.progress, self.history = saved.progress, saved.history
        return True

    @contextmanager
    def taken_back_unless_kept(self, path: Path) -> Iterator[None]:
        """Where it ends by an error before any step was kept, the model gets back what it began with.

        For the run is begun anew with this model then, and ends as if nothing had happened.
        """
        try:
            yield
        except BaseException:
            with suppress(VitliteError, OSError):
                if self.is_saved and not _is_begun(saved := read_state(path), path.parent):
                    self._restore_weights(saved.tensors)
                    self._restore_buffers(saved.tensors)
            raise

    def _kept(self, unmoved: Collection[str]) -> dict[str, Kept]:
        """What a state must hold. Of a weight that never had a gradient, an optimizer remembers nothing."""
        kept = {}
        for name, buffer in self.model.named_buffers():
            kept[f"buffer.{name}"] = Kept(tuple(buffer.shape), _in_floats(buffer).dtype)
        for optimizer in self.optimizers:
            kinds = remembers(optimizer)
            for weight in weights_of(optimizer):
                name, like = self.names[weight], Kept(tuple(weight.shape), weight.dtype)
                kept[f"weight.{name}"] = kept[f"average.{name}"] = like
                if name not in unmoved:
                    kept |= {f"{kind}.{name}": STEP if kind == "step" else like for kind in kinds}
        return kept

    def _restore_weights(self, tensors: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.data.copy_(tensors[f"weight.{name}"])

    def _restore_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Those that a class of one's own may have, such as the running means of a batch norm."""
        for name, buffer in self.model.named_buffers():
            buffer.copy_(tensors[f"buffer.{name}"])

    def _restore_averages(self, tensors: Mapping[str, Tensor]) -> None:
        for name, average in self.averages.items():
            average.copy_(tensors[f"average.{name}"])

    def _restore_optimizers(self, tensors: Mapping[str, Tensor]) -> None:
        for optimizer in self.optimizers:
            restore_optimizer(optimizer, self.names, tensors)

    def _changes(self, saved: State) -> dict[str, str]:
        """What is another than in a saved run: its name, and how it differs.

        Everything must be the same; only the end may move, as long as the learning rate does not know of it.
        """
        old, new = _defaults() | saved.identity, _defaults() | self.identity()
        if self._end_may_move(saved.progress, old["epochs"]):
            old["epochs"] = new["epochs"]
        old.setdefault("kernels", new["kernels"])  # which older states do not name, as the next
        old.setdefault("quick_decode", False)
        if old.get("validation") is None:  # `best` compares with none so far
            old["validation"] = new["validation"]
        return {
            name: f"{name} was {shown(repr(old.get(name)))} and is {shown(repr(new.get(name)))}"
            for name in new | old
            if old.get(name) != new.get(name)
        }

    def _refuse_changes(self, changed: Mapping[str, str], out: Path) -> None:
        if not changed:
            return
        changes = "; ".join(changed.values())
        if "kernels" in changed:
            changes += " (chosen once for a machine, torch and number of threads, and by VITLITE_KERNELS)"
        if "epochs" in changed:
            changes += ". More epochs fit in only before the learning rate begins to fall"
        raise TrainError(
            f"{out} holds another run: {changes}.",
            python=f"Use its settings to go on; or begin another run, perhaps from {out / 'last'}, with another `out`.",
            command="Use its settings to go on; or begin another run, perhaps with --model "
            f"{out / 'last'} and another --out.",
        )

    def _end_may_move(self, progress: Progress, old_epochs: int) -> bool:
        """Whether a saved run is where the learning rate is the same, be its end the old one or the new."""
        epochs_done = progress.epoch + progress.step / self.steps
        sooner = min(old_epochs, self.settings.epochs)
        return bool(epochs_done <= sooner * (1 - self.settings.decay))

    def average(self, step: int) -> None:
        """Moves the averages towards the weights; fast at first, since early weights are worth little."""
        keep = min(self.settings.ema, (1 + step) / (10 + step))
        weights = [weight.detach() for weight in self.weights.values()]
        torch._foreach_lerp_(list(self.averages.values()), weights, 1 - keep)

    @contextmanager
    def averaged(self) -> Iterator[ViT]:
        """The model with the averages as its weights."""
        self.swap_averages()
        try:
            yield self.model
        finally:
            self.swap_averages()

    def swap_averages(self) -> None:
        """Gives the model the averages as its weights, and keeps its weights in their place."""
        for name, weight in self.weights.items():
            weight.data, self.averages[name] = self.averages[name], weight.data


def _in_floats(buffer: Tensor) -> Tensor:
    """As a state holds a buffer: whole numbers, such as a count of steps, are float64 there."""
    return buffer.detach() if buffer.is_floating_point() else buffer.detach().double()


def _is_begun(saved: State, out: Path) -> bool:
    """Whether any step of a run is kept, in its state or in a checkpoint."""
    return saved.progress != Progress() or any((out / name).exists() for name in (LAST, BEST))


def _read(path: Path, most: int) -> bytes:
    with _explained(path), open(path, "rb") as file:
        return file.read(most)


def _defaults() -> dict[str, Any]:
    """What a state means that does not name a field: an older vitlite did not have it, or its value is left out."""
    defaults = {}
    for kind in (Settings, ViTConfig, TransformConfig):
        for field in fields(kind):
            if field.default is not MISSING:
                defaults[field.name] = field.default
    return cast(dict[str, Any], json.loads(json.dumps(defaults)))


def _begun_with(model: ViT, data: Pictures, validation: Pictures | None) -> dict[str, str | None]:
    """What a run begins with, of which a state knows its own."""
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    return {
        "pictures": f"{len(data)}, {data.digest()}",
        "validation": validation.digest() if validation else None,
        "weights": model.source.sha256 if model.source else None,  # None: random ones, as the seed says
        "frozen weights": digest(frozen) if frozen else None,
    }


def _matmul_context(model: ViT, settings: Settings) -> AbstractContextManager[Any]:
    """A context in which steps in float32 compute by oneDNN, where it is exact.

    Whether it is faster is not asked: a run that goes on must compute as it did before.
    """
    if model.device.type != "cpu" or settings.bfloat16:
        return nullcontext()
    exact = float32_products_are_exact(model.config.tokens, model.config.head_width)
    return float32_products if exact else nullcontext()


def _kernels(model: ViT, matmul_context: AbstractContextManager[Any]) -> str:
    """What computes steps and evaluations, in words: it decides the last bits of losses and weights."""
    products = "torch" if isinstance(matmul_context, nullcontext) else "oneDNN"
    return f"{kernels_as_created(model.device, model.dtype)} in evaluations, products of steps by {products}"


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Says what to do where a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise TrainError(
            f"Cannot write {path}: {error}. The last state of the run is intact.",
            python="Make room, and call train again with the same arguments: it goes on from there.",
            command="Make room, and start the same command: it goes on from there.",
        ) from error
