"""vitlite's own part of config.json: all of a config, the labels, and the recipe. Read first, then written."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitlite import __version__
from vitlite.config import ViTConfig
from vitlite.errors import ConfigError
from vitlite.images import Recipe
from vitlite.weights.sidecar.record import Sidecar, UnreadRecipe


def sidecar_from_vitlite(config: Mapping[str, Any]) -> Sidecar:
    """What the config.json says that `config_to_vitlite` wrote."""
    saved = config["vitlite"]
    labels = saved.get("labels")
    recipe = saved.get("preprocess")
    return Sidecar(
        claims=dict(saved["config"]),
        labels=tuple(labels) if labels else None,
        recipe=UnreadRecipe("vitlite", dict(recipe)) if recipe else None,
        written_by_vitlite=True,
    )


def recipe_from_vitlite(fields: Mapping[str, Any], size: tuple[int, int] | None = None) -> Recipe:
    """The recipe that `Recipe.to_dict` gave, also by way of JSON; `size` scales its own numbers."""
    known: dict[str, Any] = {}
    for name, value in fields.items():
        known[name] = tuple(value) if isinstance(value, list) else value
    try:
        recipe = Recipe(**known)
    except TypeError as error:
        raise ConfigError(f"These are not the fields of a Recipe: {error}. Given: {', '.join(fields)}.") from error
    return recipe.scaled(size) if size else recipe


def config_to_vitlite(config: ViTConfig, labels: Sequence[str] | None, recipe: Recipe | None) -> dict[str, Any]:
    """All that `vitlite.load` needs to give a model back."""
    return {
        "vitlite": {
            "version": __version__,
            "config": config.to_dict(),
            "labels": labels,
            "preprocess": recipe.to_dict() if recipe else None,
        }
    }
