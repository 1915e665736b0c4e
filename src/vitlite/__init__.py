"""A zoo of Vision Transformers. `create` returns a named model with verified weights; `load` reads any plain ViT."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitlite.errors import VitliteError

if TYPE_CHECKING:
    from vitlite import checkpoints as checkpoints
    from vitlite import export as export
    from vitlite import images as images
    from vitlite import inference as inference
    from vitlite import nn as nn
    from vitlite import plots as plots
    from vitlite import retrieval as retrieval
    from vitlite import training as training
    from vitlite.config import ViTConfig
    from vitlite.factory import create, load
    from vitlite.fast.optimize import optimize
    from vitlite.inference.threads import set_threads
    from vitlite.nn.vit import ViT
    from vitlite.text.labels import with_labels
    from vitlite.zoo.registry import info, list_models

__version__ = "0.1.0"
__all__ = [
    "ViT",
    "ViTConfig",
    "VitliteError",
    "create",
    "info",
    "list_models",
    "load",
    "optimize",
    "sample",
    "set_threads",
    "with_labels",
]

sample = os.path.join(os.path.dirname(__file__), "images", "chelsea.jpg")  # a photo by Stéfan van der Walt, CC0

_MODULES = {
    "ViT": "nn.vit",
    "ViTConfig": "config",
    "create": "factory",
    "info": "zoo.registry",
    "list_models": "zoo.registry",
    "load": "factory",
    "optimize": "fast.optimize",
    "set_threads": "inference.threads",
    "with_labels": "text.labels",
}
_PACKAGES = {  # available after `import vitlite`, with the module that defines the public names
    "checkpoints": "checkpoints",
    "export": "export",
    "images": "images",
    "inference": "inference.predict",
    "nn": "nn.vit",
    "plots": "plots",
    "retrieval": "retrieval",
    "training": "training",
}
_HINTS = {  # replacements for names from other libraries
    "AutoImageProcessor": "Use model.preprocess(image).",
    "create_model": "Use vitlite.create(name).",
    "create_transform": "Use model.preprocess(image).",
    "from_pretrained": "Use vitlite.load('owner/name').",
    "list_pretrained": "Use vitlite.list_models().",
    "load_model": "Use vitlite.load(path) or vitlite.create(name).",
    "pipeline": "Use model.predict(images).",
}


if not TYPE_CHECKING:  # with __getattr__, type checkers would accept any name

    def __getattr__(name: str) -> Any:  # import on first use; the command line starts without torch
        if name in _PACKAGES:
            import_module(f"vitlite.{_PACKAGES[name]}")
            return globals()[name]
        if name not in _MODULES:
            hint = f". {_HINTS[name]}" if name in _HINTS else ""
            raise AttributeError(f"module 'vitlite' has no attribute {name!r}{hint}")
        value = getattr(import_module(f"vitlite.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
