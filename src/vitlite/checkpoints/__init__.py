"""Find, read, convert and save the weights of a model."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:  # `vitlite.checkpoints.save.push_to_hub` needs no import of its own
    if name in ("convert", "save"):
        return import_module(f"vitlite.checkpoints.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
