"""What the values of a training recipe shall be: each field has a check in a table, and one loop goes through it."""

from collections.abc import Mapping
from typing import Any

from vitlite.errors import TrainError, shown
from vitlite.schema import Check

FLAG = Check("True or False", lambda value: isinstance(value, bool))


def whole(least: int, most: int) -> Check:
    """A whole number in a range; True is none."""
    return Check(f"a whole number from {least} to {most}", lambda value: _is_one(value, int) and least <= value <= most)


def number(least: float, most: float) -> Check:
    """A number in a range, whole or not, numpy's float64 too."""
    return Check(
        f"a number from {least:g} to {most:g}", lambda value: _is_one(value, (int, float)) and least <= value <= most
    )


def _is_one(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_fields(recipe: Any, checks: Mapping[str, Check]) -> None:
    """Makes sure that each field of a recipe is what its check says.

    Raises:
        TrainError: One is not; the first.
    """
    for name, check in checks.items():
        value = getattr(recipe, name)
        if not check.fits(value):
            raise TrainError(f"{name} must be {check.wanted}, got {shown(repr(value))}.", field=name)
