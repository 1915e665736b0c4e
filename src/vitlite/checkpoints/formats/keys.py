"""Check the keys and value types in the JSON files of other libraries."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitlite.errors import CheckpointError, ConfigError
from vitlite.images.transform import Margin, TransformConfig

LARGEST_SIDE = 100_000  # pixels


@dataclass(frozen=True)
class Keys:
    """The keys that may occur in a library's config, and how vitlite treats each key.

    An unknown key is an error, because it may change what the model computes.
    """

    fields: Mapping[str, str]  # from a key to the field of `ViTConfig` that it sets
    only: Mapping[str, Sequence[Any]]  # from a key to the values that vitlite supports
    ignored: frozenset[str]  # keys that do not change the results, or whose effect is visible in the tensors
    ignored_endings: tuple[str, ...] = ()  # a key with one of these endings is ignored as well

    def read(self, config: Mapping[str, Any], where: str = "") -> dict[str, Any]:
        """Return the fields of `ViTConfig` that a config sets. A key with the value null counts as missing.

        Args:
            config: The config of another library.
            where: The prefix of key names in errors, such as "model_args.".

        Raises:
            CheckpointError: A key is unknown, or the value of a key is not supported.
        """
        stated = {}
        for name, value in config.items():
            if value is None or name in self.ignored or name.endswith(self.ignored_endings):
                continue
            if name in self.fields:
                stated[self.fields[name]] = value
            elif name not in self.only:
                raise CheckpointError(
                    f"{where}{name} is an unknown key that may change the results. If it has no effect on these "
                    "weights, remove it from the file."
                )
            elif not any(type(value) is type(valid) and value == valid for valid in self.only[name]):
                valid = " or ".join(map(repr, self.only[name])) or f"models without {name}"
                raise CheckpointError(f"{where}{name} is {value!r}, but vitlite supports only {valid}.")
        return stated


def is_integer(value: Any, least: int = 0, most: int = 10_000_000) -> bool:
    """Return whether a value is an integer from `least` to `most`, and not a boolean."""
    return type(value) is int and least <= value <= most


def is_number(value: Any, most: float = 1e6) -> bool:
    """Return whether a value is a number from `-most` to `most`, and not a boolean."""
    return type(value) in (int, float) and abs(value) <= most


def is_strings(value: Any) -> bool:
    """Return whether a value is a list or a dictionary of strings of at most 1,000 characters."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [None]
    return all(isinstance(each, str) and len(each) <= 1000 for each in values)


def is_size(value: Any) -> bool:
    """Return whether a value is an integer, the side of a square in pixels, or a list [height, width]."""
    sides = value if isinstance(value, list) else [value, value]
    return len(sides) == 2 and all(is_integer(side, 1, LARGEST_SIDE) for side in sides)


def is_numbers(value: Any) -> bool:
    """Return whether a value is a list of numbers."""
    return isinstance(value, list) and all(is_number(each) for each in value)


def is_channels(value: Any) -> bool:
    """Return whether a value is a list of numbers, one for each channel."""
    return is_numbers(value) and 1 <= len(value) <= 1000


KINDS: dict[str, Callable[[Any], bool]] = {
    "a string": lambda value: isinstance(value, str) and len(value) <= 200,
    "true or false": lambda value: type(value) is bool,
    "a non-negative integer": is_integer,
    "a number": is_number,
    "a size in pixels or [height, width]": is_size,
    "a list or an object of strings": is_strings,
    "a list with a number for each channel": is_channels,
    "a list": lambda value: isinstance(value, list),
    "a JSON object": lambda value: isinstance(value, dict),
}
STRING, FLAG, COUNT, NUMBER, SIZE, STRINGS, CHANNELS, LIST, TABLE = KINDS


def check_types(config: Mapping[str, Any], kinds: Mapping[str, str], where: str = "") -> None:
    """Check the types of values in a config. A key may be missing or have the value null.

    Args:
        config: The config of another library.
        kinds: The type of each key, one of `KINDS`.
        where: The prefix of key names in errors, such as "model_args.".

    Raises:
        CheckpointError: A value has the wrong type.
    """
    for name, kind in kinds.items():
        value = config.get(name)
        if value is not None and not KINDS[kind](value):
            raise CheckpointError(f"{where}{name} must be {kind}, got {value!r}.")


def labels_in_order(names: Sequence[str] | Mapping[str, str] | None) -> tuple[tuple[str, ...] | None, str]:
    """Return the labels in class order and "", or None and the reason why there are no labels.

    Args:
        names: The labels in class order, or a mapping from class indices to labels such as {"0": "cat"}.
    """
    if not names:
        return None, ""
    if not isinstance(names, Mapping):
        return tuple(names), ""
    missing = [number for number in range(len(names)) if str(number) not in names]
    if missing:
        return None, f"there are {len(names)} labels, but none for class {missing[0]}"
    return tuple(names[str(number)] for number in range(len(names))), ""


def in_whole_patches(size: int | Sequence[int], patch: int) -> int | tuple[int, int]:
    """Return an image size rounded down to a multiple of the patch size.

    timm and transformers ignore the remaining pixels. A side shorter than a patch is returned unchanged.
    """
    height, width = (size, size) if isinstance(size, int) else size
    if height >= patch:
        height -= height % patch
    if width >= patch:
        width -= width % patch
    return height if height == width else (height, width)


def crops_alike(transform: TransformConfig, margin: Margin) -> bool:
    """Return whether a library crops every image exactly as `transform` does.

    Args:
        transform: The preprocessing. If it has a `cut`, no library can crop in the same way.
        margin: How the library rounds half of an odd margin. This makes no difference if no image has an odd margin:
            in mode "squash", all images have the same margins, but in mode "center", they differ between images.
    """
    if transform.cut is not None:
        return False
    if transform.margin == margin:
        return True
    odd = [(before - after) % 4 == 3 for before, after in zip(transform.resize, transform.size, strict=True)]
    return transform.mode == "squash" and not any(odd)  # both ways round 1/2 to 0, but 3/2 to 2 or 1


def as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config with the types that JSON has. For example, tuples become lists."""
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return plain


def required(config: Mapping[str, Any], *names: str) -> list[Any]:
    """Return the values of keys that a preprocessing config must have.

    Raises:
        ConfigError: A key is missing.
    """
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise ConfigError(f"The preprocessing config has no {', '.join(missing)}. Add the missing values to the file.")
    return [config[name] for name in names]
