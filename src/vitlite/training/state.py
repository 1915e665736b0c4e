"""Save and resume a training run. The state is one file, which is replaced atomically."""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from vitlite import storage
from vitlite.checkpoints.reader import RUN_STATE
from vitlite.checkpoints.save import check_savable, write_tensors
from vitlite.errors import TrainError
from vitlite.images.transform import preprocess_of
from vitlite.kernels import float32_products, float32_products_are_exact
from vitlite.nn.vit import ViT
from vitlite.training import distributed
from vitlite.training.data import ImageData, digest
from vitlite.training.history import History
from vitlite.training.optim import optimizers, restore_optimizer, state_names, weights_of
from vitlite.training.settings import Settings

STATE, LOG, LOCK = RUN_STATE, "log.jsonl", "train.lock"
IMAGES = "images.json"  # the list of the images with which the run began
LAST, BEST = "last", "best"  # folders with the weights of the last and of the best epoch
CONTENT, CHECKSUM = "vitlite.run", "vitlite.checksum"  # in the metadata of the state file


@dataclass
class Progress:
    """The position of a run, and sums over the finished steps of the current epoch."""

    epoch: int = 0  # number of finished epochs
    step: int = 0  # number of finished steps of the current epoch
    loss: float = 0.0
    accuracy: float = 0.0
    seconds: float = 0.0

    def add(self, loss: float, accuracy: float, seconds: float) -> None:
        """Add a finished step."""
        self.step += 1
        self.loss += loss
        self.accuracy += accuracy
        self.seconds += seconds


@dataclass(frozen=True)
class RunIdentity:
    """The values that must be the same when a run is resumed, in the types of JSON."""

    settings: dict[str, Any]  # without patience, which affects only the end of a run
    config: dict[str, Any]
    transform: dict[str, Any]
    classes: list[str]
    weights: str  # sha256 of the weights file; without a file, a hash of the frozen weights, which the state omits
    images: str  # the number of images, and a hash of the labels and of the pixels or file names
    validation: str | None

    @classmethod
    def of(cls, model: ViT, data: ImageData, settings: Settings, validation: ImageData | None) -> "RunIdentity":
        """Return the identity of a run that trains `model` on `data`."""
        preprocess = preprocess_of(model)
        frozen = (weight for weight in model.parameters() if not weight.requires_grad)
        identity = cls(
            settings={name: value for name, value in asdict(settings).items() if name != "patience"},
            config=model.config.to_dict(),
            transform=preprocess.transform.to_dict() | {"quick_decode": preprocess.quick_decode},
            classes=list(data.classes),
            weights=model.source.sha256 if model.source else digest(frozen),
            images=f"{len(data)}, {data.digest()}",
            validation=f"{len(validation)}, {validation.digest()}" if validation else None,
        )
        return cls(**json.loads(json.dumps(asdict(identity))))

    def differences(self, saved: "RunIdentity") -> list[str]:
        """Describe each field that differs from a saved run, with the old and the new value."""
        found = []
        for field in fields(self):
            old, new = getattr(saved, field.name), getattr(self, field.name)
            if not isinstance(new, dict):
                old, new = {field.name: old}, {field.name: new}
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    found.append(f"{name} was {old.get(name)!r} and is now {new.get(name)!r}")
        return found


class State(NamedTuple):
    """The content of a state file."""

    identity: RunIdentity
    progress: Progress
    history: History
    tensors: dict[str, Tensor]  # by "kind.name", such as "average.head.bias"


def read_state(path: Path) -> State:
    """Read a state file.

    Raises:
        TrainError: The file is not the state of a run, or is damaged.
    """
    with _damage_explained(path):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Clone the tensors, because the file must not stay mapped into memory when it is replaced.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if metadata[CHECKSUM] != _checksum(metadata[CONTENT], tensors):
            raise ValueError("the checksum does not match the content")
        content = json.loads(metadata[CONTENT])
        identity, progress = RunIdentity(**content["identity"]), Progress(**content["progress"])
        return State(identity, progress, content["history"], tensors)


def has_begun(path: Path) -> bool:
    """Return True if a state file exists and contains at least one finished step.

    Raises:
        TrainError: The file is not the state of a run, or is damaged.
    """
    if not path.exists():
        return False
    with _damage_explained(path), safe_open(path, framework="pt") as file:
        content = json.loads(file.metadata()[CONTENT])
        return Progress(**content["progress"]) != Progress()


def _checksum(content: str, tensors: Mapping[str, Tensor]) -> str:
    parts: list[str | Tensor] = [content]
    for name in sorted(tensors):
        parts += [f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}", tensors[name]]
    return digest(parts)


class Run:
    """The model, the averaged weights, the optimizers and the progress of a run, which can be saved and resumed."""

    def __init__(self, model: ViT, data: ImageData, settings: Settings, validation: ImageData | None = None) -> None:
        self.model, self.data, self.settings = model, data, settings
        self.transform = preprocess_of(model).transform
        if type(model) is ViT:
            check_savable(model, "train")  # now, rather than after the first epoch
        self.steps = -(-len(data) // settings.batch)  # per epoch, rounded up
        self.log_prior = log_prior(data, balance=settings.balance)  # (k,)
        self.class_shares = class_shares(data)  # (k,)
        self.progress = Progress()
        self.history: History = []
        if settings.frozen:
            model.requires_grad_(False)
            model.head.requires_grad_(True)
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.names = {weight: name for name, weight in self.weights.items()}
        self.identity = RunIdentity.of(model, data, settings, validation)
        self.optimizers = optimizers(model, self.weights, settings)
        self.matmul_context = _matmul_context(model, settings)
        distributed.assert_equal_on_all_ranks(asdict(self.identity) | {"patience": settings.patience})
        self.network = distributed.wrap_ddp(model)  # copies the weights of rank 0 to all ranks
        self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers, the weights, their averages and the state of the optimizers by "kind.name"."""
        tensors = {f"buffer.{name}": buffer for name, buffer in self.model.named_buffers()}
        for optimizer in self.optimizers:
            for weight in weights_of(optimizer):
                name = self.names[weight]
                tensors[f"weight.{name}"] = weight.detach()
                tensors[f"average.{name}"] = self.averages[name]
                for kind in state_names(optimizer):
                    if kind in optimizer.state[weight]:  # not before the first gradient
                        tensors[f"{kind}.{name}"] = optimizer.state[weight][kind]
        return tensors

    def save(self, path: Path) -> None:
        """Write the state from which the run can be resumed."""
        if not distributed.is_main():
            return
        tensors = self.tensors()
        content = json.dumps(
            {"identity": asdict(self.identity), "progress": asdict(self.progress), "history": self.history}
        )
        with _write_errors_explained(path):
            write_tensors(path, tensors, {CONTENT: content, CHECKSUM: _checksum(content, tensors)})

    def write_log(self, path: Path) -> None:
        """Write the history to a file, with one line of JSON per epoch."""
        if distributed.is_main():
            with _write_errors_explained(path):
                storage.write_text(path, "".join(json.dumps(record) + "\n" for record in self.history))

    def save_checkpoint(self, folder: Path) -> None:
        """Write the model to a folder that `vitlite.load` opens."""
        if distributed.is_main():
            with _write_errors_explained(folder):
                self.model.save(folder)

    def resume(self, path: Path) -> bool:
        """Restore a saved state and return True. A state from before the first step is ignored, and False is returned.

        Raises:
            TrainError: The file is the state of another run, or is damaged.
        """
        saved = read_state(path)
        if saved.progress == Progress():
            return False
        self._check_identity(saved, path.parent)
        with _damage_explained(path), torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(saved.tensors[f"buffer.{name}"])
            for name, weight in self.weights.items():
                weight.copy_(saved.tensors[f"weight.{name}"])
                self.averages[name].copy_(saved.tensors[f"average.{name}"])
            for optimizer in self.optimizers:
                restore_optimizer(optimizer, self.names, saved.tensors)
        self.progress, self.history = saved.progress, saved.history
        return True

    def _check_identity(self, saved: State, out: Path) -> None:
        identity, epochs = saved.identity, self.settings.epochs
        done = saved.progress.epoch + saved.progress.step / self.steps
        if done <= min(identity.settings["epochs"], epochs) * (1 - self.settings.decay):
            # The number of epochs has no effect before the learning rate begins to fall, and may therefore change.
            identity = replace(identity, settings=identity.settings | {"epochs": epochs})
        differences = self.identity.differences(identity)
        if differences:
            raise TrainError(
                f"{out} contains another run: {'; '.join(differences)}. Use the same arguments to resume that run, or "
                f"start a new run with another out= (--out). The new run can start from the weights in {out / LAST}."
            )

    def average(self, step: int) -> None:
        """Update the averages of the weights. Early steps of a run move the averages faster."""
        keep = min(self.settings.ema, (1 + step) / (10 + step))
        weights = [weight.detach() for weight in self.weights.values()]
        torch._foreach_lerp_(list(self.averages.values()), weights, 1 - keep)

    @contextmanager
    def averaged(self) -> Iterator[ViT]:
        """Return a context in which the model has the averaged weights."""
        self.swap_averages()
        try:
            yield self.model
        finally:
            self.swap_averages()

    def swap_averages(self) -> None:
        """Swap the model's weights and the averaged weights."""
        for name, weight in self.weights.items():
            weight.data, self.averages[name] = self.averages[name], weight.data


def log_prior(data: ImageData, *, balance: bool) -> Tensor:
    """Return the values to add to the logits in the loss: (k,).

    Args:
        data: The training images.
        balance: If True, return the logarithm of each class's share of the images (logit adjustment, Menon et al.
            2021), so that the logits themselves do not favour large classes. If False, return zeros.
    """
    if not balance:
        return torch.zeros(len(data.classes), dtype=torch.float32, device="cpu")
    counts = torch.bincount(data.labels, minlength=len(data.classes)).clamp(min=1)  # log(0) is infinite
    return (counts / len(data)).log()


def class_shares(data: ImageData) -> Tensor:
    """Return the shares towards which labels are smoothed: (k,).

    If an image may have several labels, these are the frequencies of the labels. Otherwise, all shares are equal.
    """
    if data.multi_label:
        return data.labels.float().mean(0)
    return torch.full((len(data.classes),), 1 / len(data.classes), dtype=torch.float32, device="cpu")


def _matmul_context(model: ViT, settings: Settings) -> AbstractContextManager[Any]:
    """Return a context in which float32 matrix products on a CPU use oneDNN, if oneDNN is exact.

    The choice does not depend on speed, so that a resumed run computes exactly the same results.
    """
    if model.device.type != "cpu" or settings.bfloat16:
        return nullcontext()
    return float32_products if float32_products_are_exact() else nullcontext()


@contextmanager
def _damage_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # damaged files raise errors of many types
        raise TrainError(
            f"{path} is damaged or not the state of a run ({type(error).__name__}: {error}). Start a new run with "
            f"another out= (--out). It can start from the weights in {path.parent / LAST}, if they exist."
        ) from None


@contextmanager
def _write_errors_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainError(
            f"Cannot write {path}: {error.strerror or error}. The last saved state is intact. Check the "
            "permissions and the free space, and run the same command again to resume."
        ) from error
