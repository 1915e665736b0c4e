"""What stands beside a weights file, in config.json and preprocessor_config.json: read and written in this room only.

A library, a module: `vitlite`, `timm` and `transformers` each turn their JSON into a `Sidecar`, and back.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitlite.config import ViTConfig
from vitlite.disk import write_json
from vitlite.images import Recipe
from vitlite.weights.sidecar.record import Sidecar, UnreadRecipe
from vitlite.weights.sidecar.timm import (
    config_to_timm,
    recipe_from_record,
    recipe_from_timm,
    recipe_to_timm,
    sidecar_from_timm,
)
from vitlite.weights.sidecar.transformers import (
    config_to_transformers,
    model_type,
    recipe_from_transformers,
    recipe_to_transformers,
    sidecar_from_transformers,
)
from vitlite.weights.sidecar.vitlite import config_to_vitlite, recipe_from_vitlite, sidecar_from_vitlite

__all__ = [
    "CONFIG",
    "PICTURES",
    "Sidecar",
    "UnreadRecipe",
    "model_type",
    "read_sidecar",
    "recipe_from_record",
    "recipe_from_timm",
    "recipe_from_transformers",
    "recipe_from_vitlite",
    "recipe_of",
    "recipe_to_timm",
    "recipe_to_transformers",
    "write_sidecar",
    "write_sidecar_for_transformers",
]

CONFIG, PICTURES = "config.json", "preprocessor_config.json"


def read_sidecar(folder: Path) -> Sidecar:
    """What stands beside the weights of a folder, as vitlite, timm or transformers wrote it; empty where nothing does.

    Raises:
        CheckpointError: It is a model that vitlite does not run.
    """
    config = _read(folder / CONFIG)
    if "vitlite" in config:
        return sidecar_from_vitlite(config)
    if "architecture" in config:
        return sidecar_from_timm(config)
    if "model_type" in config:
        return sidecar_from_transformers(config, _read(folder / PICTURES))
    return Sidecar()


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def recipe_of(sidecar: Sidecar, size: tuple[int, int] | None) -> Recipe | None:
    """How pictures are prepared for images of `size`, or of the file's own; None where nothing is said of it.

    Raises:
        ConfigError: It is not understood. A value of a wrong type raises what Python makes of it.
    """
    if sidecar.recipe is None:
        return None
    library, fields = sidecar.recipe
    if library == "vitlite":
        return recipe_from_vitlite(fields, size)
    if library == "timm":
        return recipe_from_timm(fields, size)
    return recipe_from_transformers(fields, size)


def write_sidecar(folder: Path, config: ViTConfig, labels: Sequence[str] | None, recipe: Recipe | None) -> None:
    """Writes config.json, which vitlite reads back in full, and timm as far as it goes."""
    write_json(folder / CONFIG, config_to_vitlite(config, labels, recipe) | config_to_timm(config, labels, recipe))


def write_sidecar_for_transformers(
    folder: Path, config: ViTConfig, labels: Sequence[str] | None, recipe: Recipe | None
) -> None:
    """Writes config.json and preprocessor_config.json.

    Raises:
        CheckpointError: transformers has no processor that prepares pictures like this; nothing was written.
    """
    pictures = recipe_to_transformers(recipe) if recipe else None
    write_json(folder / CONFIG, config_to_transformers(config, labels))
    if pictures is None:
        (folder / PICTURES).unlink(missing_ok=True)  # of what was there before
    else:
        write_json(folder / PICTURES, pictures)
