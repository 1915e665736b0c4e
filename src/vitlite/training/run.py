"""The state of a training run, which is one file, replaced whole: a killed run goes on as if nothing had happened."""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitlite.errors import TrainError
from vitlite.images import Preprocess
from vitlite.model import ViT
from vitlite.speed.onednn import float32_products, float32_products_are_exact
from vitlite.training import distributed as ranks
from vitlite.training.datasets import Pictures, digest
from vitlite.training.optim import optimizers, weights_of
from vitlite.training.settings import Settings
from vitlite.weights.save import write_tensors

History = list[dict[str, Any]]

STATE, LOG = "state.safetensors", "log.jsonl"


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
        found = {weight: optimizer.state for optimizer in self.optimizers for weight in weights_of(optimizer)}
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
