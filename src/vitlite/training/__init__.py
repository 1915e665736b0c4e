"""Train models on labelled images, and measure their accuracy."""

from vitlite.training.data import ImageData, class_names, read_cifar10, read_folder
from vitlite.training.evaluate import Measured, MeasuredLabels, measure, measure_labels
from vitlite.training.history import History
from vitlite.training.settings import STRENGTHS, Augmentation, Optimizer, Settings
from vitlite.training.split import hold_out
from vitlite.training.tables import Columns, read_table
from vitlite.training.trainer import train

__all__ = [
    "STRENGTHS",
    "Augmentation",
    "Columns",
    "History",
    "ImageData",
    "Measured",
    "MeasuredLabels",
    "Optimizer",
    "Settings",
    "class_names",
    "hold_out",
    "measure",
    "measure_labels",
    "read_cifar10",
    "read_folder",
    "read_table",
    "train",
]
