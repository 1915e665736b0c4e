"""Settings of training and augmentation, and the functions that choose defaults for the command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Literal, get_args

from vitlite.errors import TrainError

Optimizer = Literal["adamw", "muon"]
Range = tuple[type[int] | type[float], float, float]  # type, lowest and highest value
AUGMENTATION_RANGES: dict[str, Range] = dict.fromkeys(
    ("flip", "shift", "warp", "colour", "erase", "mixup", "cutmix"), (float, 0, 1)
)
RANGES: dict[str, Range] = {
    "epochs": (int, 1, 10**6),
    "patience": (int, 0, 10**6),
    "batch": (int, 1, 10**6),
    "lr": (float, 1e-9, 1e3),
    "warmup": (float, 1e-3, 1e6),
    "decay": (float, 1e-3, 1),
    "weight_decay": (float, 0, 1e3),
    "layer_decay": (float, 1e-3, 1),
    "smoothing": (float, 0, 0.99),
    "clip": (float, 1e-9, float("inf")),
    "accumulate": (int, 1, 10**6),
    "ema": (float, 0, 0.999999),
    "seed": (int, -(10**12), 10**12),
}


def _check_ranges(settings: object, ranges: Mapping[str, Range]) -> None:
    for name, (kind, low, high) in ranges.items():
        value = getattr(settings, name)
        is_number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            what = "an integer" if kind is int else "a number"
            raise TrainError(f"{name} must be {what} from {low:g} to {high:g}, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Probabilities and strengths of the random augmentations. 0 turns an augmentation off.

    Raises:
        TrainError: A value is not from 0 to 1, or mixup and cutmix add up to more than 1.
    """

    flip: float = 0.5  # share of images mirrored
    shift: float = 0.125  # largest shift as a share of the side, rounded to whole pixels
    warp: float = 0.25  # share of images rotated, sheared and zoomed
    colour: float = 0.25  # share of images with changed brightness, contrast and saturation
    erase: float = 0.1  # share of images with a rectangle turned grey
    mixup: float = 0.0  # share of images blended with another image (Zhang et al. 2018)
    cutmix: float = 0.3  # share of images with a rectangle from another image (Yun et al. 2019)

    def __post_init__(self) -> None:
        _check_ranges(self, AUGMENTATION_RANGES)
        if self.mixup + self.cutmix > 1 + 1e-9:  # rounding errors can lift a sum of 1 slightly above 1
            raise TrainError(
                f"mixup and cutmix must add up to at most 1, got {self.mixup:g} and {self.cutmix:g}. Lower one of them."
            )


STRENGTHS = {
    "none": Augmentation(flip=0, shift=0, warp=0, colour=0, erase=0, mixup=0, cutmix=0),
    "weak": Augmentation(),  # for a few dozen epochs
    "strong": Augmentation(warp=0.5, colour=0.5, erase=0.25, mixup=0.25, cutmix=0.5),  # for hundreds of epochs
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a training run.

    Raises:
        TrainError: A value is out of range, or `frozen` is combined with Muon.
    """

    epochs: int
    patience: int = 0  # stop after this many epochs without improvement; 0 never stops early
    batch: int = 128  # maximum number of images per step
    optimizer: Optimizer = "adamw"  # "muon" applies to the matrices of the blocks; all other weights use adamw
    lr: float = 1e-3  # maximum learning rate
    warmup: float = 1.0  # number of epochs at the start during which the learning rate rises
    decay: float = 0.4  # share of the epochs at the end during which the learning rate falls
    weight_decay: float = 0.05
    layer_decay: float = 1.0  # learning rate of each block divided by that of the next block
    smoothing: float = 0.1  # label smoothing
    clip: float = 1.0  # maximum norm of the gradient
    accumulate: int = 1  # number of parts in which each batch is computed; more parts need less memory
    ema: float = 0.999  # decay of the exponential moving average of the weights
    balance: bool = False  # predict small classes as readily as large ones
    frozen: bool = False  # train only the head
    bfloat16: bool = True  # compute in bfloat16 with autocast
    seed: int = 0
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        _check_ranges(self, RANGES)
        if self.optimizer not in get_args(Optimizer):
            raise TrainError(f"optimizer must be one of {', '.join(get_args(Optimizer))}, got {self.optimizer!r}.")
        if self.frozen and self.optimizer == "muon":
            raise TrainError(
                "Muon trains the blocks, but frozen=True trains only the head. Omit optimizer= (--optimizer) or "
                "frozen= (--frozen)."
            )


def usual_epochs(images: int) -> int:
    """Return the default number of epochs, which falls to 10 as the number of images rises.

    >>> [usual_epochs(images) for images in (50, 300, 1000, 5000, 50_000)]
    [38, 21, 16, 12, 10]
    """
    return 10 + int(200 / images**0.5)


def usual_batch(images: int) -> int:
    """Return the default batch size: half the square root of the number of images, but from 16 to 128.

    Few images get small batches, because an epoch needs several steps.
    """
    return min(max(16, isqrt(images) // 2), 128)


def usual_optimizer(*, random_weights: bool, frozen: bool) -> Optimizer:
    """Return "muon" to train all weights from random values, and "adamw" to fine-tune or to train only the head."""
    return "muon" if random_weights and not frozen else "adamw"


def usual_lr(optimizer: Optimizer, *, frozen: bool) -> float:
    """Return the default learning rate of an optimizer."""
    if optimizer == "muon":
        return 3e-3
    return 1e-3 if frozen else 3e-4


def usual_layer_decay(*, random_weights: bool) -> float:
    """Return the default layer decay. It is below 1 for fine-tuning, which should change early blocks less."""
    return 1.0 if random_weights else 0.75
