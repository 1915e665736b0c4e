"""A zoo of Vision Transformers: `create` a named one with verified weights, or `load` any plain ViT file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitlite.errors import VitliteError

if TYPE_CHECKING:
    from vitlite.config import ViTConfig
    from vitlite.factory import create, load
    from vitlite.fast.optimize import optimize
    from vitlite.nn.vit import ViT
    from vitlite.zoo.registry import info, list_models

__version__ = "0.1.0"
__all__ = ["ViT", "ViTConfig", "VitliteError", "create", "info", "list_models", "load", "optimize"]

_HOMES = {
    "ViT": "nn.vit",
    "ViTConfig": "config",
    "create": "factory",
    "info": "zoo.registry",
    "list_models": "zoo.registry",
    "load": "factory",
    "optimize": "fast.optimize",
}


def __getattr__(name: str) -> Any:  # names are looked up when first used, so that the command line starts at once
    if name not in _HOMES:
        from vitlite.migration import LIBRARY

        instead = f" {LIBRARY[name]}" if name in LIBRARY else ""
        raise AttributeError(f"module 'vitlite' has no attribute {name!r}.{instead}")
    value = getattr(import_module(f"vitlite.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
