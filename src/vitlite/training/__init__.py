"""Labelled pictures become weights: `train` makes them, `measure` says how good they are."""

from vitlite.training.augment import STRENGTHS, Augmentation
from vitlite.training.datasets import Pictures, class_names, read_cifar10, read_folder
from vitlite.training.evaluate import Measured, measure
from vitlite.training.loop import train
from vitlite.training.run import History
from vitlite.training.settings import Optimizer, Settings
from vitlite.training.split import hold_out

__all__ = [
    "STRENGTHS",
    "Augmentation",
    "History",
    "Measured",
    "Optimizer",
    "Pictures",
    "Settings",
    "class_names",
    "hold_out",
    "measure",
    "read_cifar10",
    "read_folder",
    "train",
]
