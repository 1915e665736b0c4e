"""What stands beside a weights file, whoever wrote it: the record that each library's reader fills in."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from vitlite.errors import ConfigError

Library = Literal["vitlite", "timm", "transformers"]

ACTIVATIONS = {  # what timm and transformers call them -> our `gelu`
    "gelu": "exact",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_tanh": "tanh",
    "quick_gelu": "quick",
}


class UnreadRecipe(NamedTuple):
    """How pictures are prepared, in a library's own words.

    `recipe_of` reads it once it is needed: a model whose preprocessing nobody understands can still be loaded.
    """

    library: Library
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Sidecar:
    """What config.json and preprocessor_config.json say of the weights beside them."""

    claims: Mapping[str, Any] = field(default_factory=dict)  # fields of a `ViTConfig`
    labels: tuple[str, ...] | None = None
    recipe: UnreadRecipe | None = None
    architecture: str | None = None  # timm's name, which stands for a config
    not_claimed: Sequence[str] = ()  # fields of that config which it does not stand for here
    written_by_vitlite: bool = False

    def contradictions(self, labels: Sequence[str] | None, recipe: Mapping[str, Any]) -> dict[Any, tuple[Any, Any]]:
        """Where this file contradicts labels, by number, or fields of a recipe: what it says, and what they say."""
        here: dict[Any, Any] = dict(enumerate(self.labels or ()))
        if self.recipe is not None:
            here |= self.recipe.fields
        there: dict[Any, Any] = dict(enumerate(labels or ()))
        there |= json.loads(json.dumps(recipe))  # tuples as JSON has them
        different = {}
        for name, value in here.items():
            if name in there and there[name] != value:
                different[name] = value, there[name]
        return different


def labels_in_order(names: Sequence[str] | Mapping[str, str] | None) -> tuple[str, ...] | None:
    """Labels from a list, or from a table by number; None where a number is missing: then some output is nobody's."""
    if not names:
        return None
    if not isinstance(names, Mapping):
        return tuple(names)
    numbered = {int(number): name for number, name in names.items()}
    if sorted(numbered) != list(range(len(names))):
        return None
    return tuple(numbered[number] for number in range(len(names)))


def required(config: Mapping[str, Any], *names: str) -> list[Any]:
    """These fields of a preprocessing config.

    Raises:
        ConfigError: It lacks some of them.
    """
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise not_understood(f"The preprocessing config has no {', '.join(missing)}.")
    return [config[name] for name in names]


def not_understood(text: str, known: str = "") -> ConfigError:
    """The error for preprocessing that is not understood; `known` says what would be."""
    python = "Write an images.Recipe by hand."
    command = "Name a checkpoint like it: --model NAME --weights PATH."
    if known:
        python, command = f"{python} {known}", f"{known} {command}"
    return ConfigError(text, python=python, command=command)
