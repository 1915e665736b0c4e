"""The recipe of a training run, and what is usual where it leaves something open."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from vitlite.errors import TrainError
from vitlite.schema import Check, one_of
from vitlite.training.augment import Augmentation
from vitlite.training.recipe_checks import FLAG, check_fields, number, whole

Optimizer = Literal["adamw", "muon"]
FEW = 1000  # pictures
CHECKS = {  # what each field of a recipe may be
    "epochs": whole(1, 10**6),
    "patience": whole(0, 10**6),
    "batch": whole(1, 10**6),
    "optimizer": one_of(*get_args(Optimizer)),
    "lr": number(1e-9, 1e3),
    "warmup": number(1e-3, 1e6),
    "decay": number(1e-3, 1),
    "weight_decay": number(0, 1e3),
    "layer_decay": number(1e-3, 1),
    "smoothing": number(0, 0.99),
    "clip": number(1e-9, math.inf),
    "accumulate": whole(1, 10**6),
    "ema": number(0, 0.999999),
    "balance": FLAG,
    "frozen": FLAG,
    "bfloat16": FLAG,
    "seed": whole(-(10**12), 10**12),  # times a million, plus the step, torch takes it
    "augmentation": Check(
        "an Augmentation, such as vitlite.training.STRENGTHS['weak']", lambda value: isinstance(value, Augmentation)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A training recipe.

    Raises:
        TrainError: A value is not what `CHECKS` says, or two do not go together.
    """

    epochs: int
    patience: int = 0  # epochs in a row of which none was the best so far, after which a run ends; 0: it never does
    batch: int = 128  # pictures of a step at most
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
    balance: bool = False  # of classes of unequal size, count all alike, and not all pictures
    frozen: bool = False  # train the head alone
    bfloat16: bool = True  # autocast
    seed: int = 0
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        check_fields(self, CHECKS)
        if self.frozen and self.optimizer == "muon":
            raise TrainError(
                "Muon moves the matrices of the blocks, and frozen trains the head alone.",
                python="Leave out optimizer= or frozen=.",
                command="Leave out --optimizer or --frozen.",
            )


def usual_epochs(pictures: int) -> int:
    """Enough to see a trained model learn few pictures, or many."""
    return 20 if pictures < FEW else 10


def usual_batch(pictures: int) -> int:
    """Of few pictures, small ones, as an epoch has to take some steps."""
    return 16 if pictures < FEW else 128


def usual_optimizer(*, random_weights: bool, frozen: bool) -> Optimizer:
    """Muon for matrices that begin with random weights; AdamW for fine-tuning, and for a head alone."""
    return "muon" if random_weights and not frozen else "adamw"


def usual_lr(optimizer: Optimizer, *, frozen: bool) -> float:
    """The highest learning rate that suits most models."""
    if optimizer == "muon":
        return 3e-3
    return 1e-3 if frozen else 3e-4


def usual_layer_decay(*, random_weights: bool) -> float:
    """All blocks alike from random weights; when fine-tuning, early blocks are to change less than late ones."""
    return 1.0 if random_weights else 0.75
