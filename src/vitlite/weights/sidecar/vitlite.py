"""vitlite's own part of config.json: all of a config, the labels, and the recipe. Read first, then written."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitlite import __version__
from vitlite.config import ViTConfig, check_fields
from vitlite.errors import CheckpointError, ConfigError, shown
from vitlite.images import Recipe
from vitlite.schema import anything, by_name, optional, several, table, verify
from vitlite.weights.sidecar.record import LABEL, Sidecar, UnreadRecipe

CONFIG = table(
    {
        "vitlite": table(
            {
                "config": by_name(anything, most=100),  # see check_fields
                "labels": optional(several(LABEL)),
                "preprocess": optional(by_name(anything, most=100)),  # whose fields a Recipe checks
            },
            required=("config",),
        )
    }
)


def sidecar_from_vitlite(config: Mapping[str, Any]) -> Sidecar:
    """What the config.json says that `config_to_vitlite` wrote.

    Raises:
        CheckpointError: It was not what wrote it.
    """
    verify(config, CONFIG)
    saved = config["vitlite"]
    try:
        check_fields(saved["config"])  # those, too, that tensors will overrule
    except ConfigError as error:
        raise CheckpointError(error.text) from None
    labels = saved.get("labels")
    recipe = saved.get("preprocess")
    return Sidecar(
        claims=saved["config"],
        labels=tuple(labels) if labels else None,
        recipe=UnreadRecipe("vitlite", recipe) if recipe else None,
        library="vitlite",
    )


def recipe_from_vitlite(fields: Mapping[str, Any], size: tuple[int, int] | None = None) -> Recipe:
    """The recipe of `config_to_vitlite` or `Recipe.to_dict`, also by way of JSON; `size` scales its own numbers.

    Raises:
        ConfigError: It is none.
    """
    known: dict[str, Any] = {}
    for name, value in fields.items():
        known[name] = tuple(value) if isinstance(value, list) else value
    try:
        recipe = Recipe(**known)
    except TypeError as error:
        raise ConfigError(
            f"These are not the fields of a Recipe: {shown(str(error))}. Given: {shown(', '.join(fields))}."
        ) from None
    return recipe.scaled(size) if size else recipe


def config_to_vitlite(config: ViTConfig, labels: Sequence[str] | None, recipe: Recipe | None) -> dict[str, Any]:
    """All that `vitlite.load` needs to give a model back."""
    return {
        "vitlite": {
            "version": __version__,
            "config": config.to_dict(),
            "labels": labels,
            "preprocess": _recipe_to_vitlite(recipe) if recipe else None,
        }
    }


def _recipe_to_vitlite(recipe: Recipe) -> dict[str, Any]:
    """All of a recipe; of its share nothing where none is known."""
    share = {} if recipe.share is None else {"share": recipe.share}
    return recipe.to_dict() | share
