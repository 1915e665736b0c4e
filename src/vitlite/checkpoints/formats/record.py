"""What stands beside a weights file, whoever wrote it: the record that each library's reader fills in."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from vitlite.errors import CheckpointError, ConfigError, shown
from vitlite.images.transform import Margin, TransformConfig
from vitlite.schema import Check, by_name, either, number, optional, several, text, whole

Library = Literal["vitlite", "timm", "transformers"]

LABEL = text(1000)
NAMES = optional(either(several(LABEL), by_name(LABEL)))  # of classes: in order, or by number
WORD = text(200)
SIDE = whole(1, 100_000)  # pixels
SIDES = either(SIDE, several(SIDE, 2, 2))  # one for both, or height and width
COUNT = whole(0, 10_000_000)
COLOURS = several(number(-1e6, 1e6), 1, 1000)  # a number for each channel
SWITCH = Check("true, false or null", lambda value: value is None or type(value) is bool)


class UnreadTransform(NamedTuple):
    """How pictures are prepared, in a library's own words.

    `transform_of` reads it once it is needed: a model whose preprocessing nobody understands can still be loaded.
    """

    library: Library
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Metadata:
    """What config.json and preprocessor_config.json say of the weights beside them."""

    claims: Mapping[str, Any] = field(default_factory=dict)  # fields of a `ViTConfig`
    usual: Mapping[str, Any] = field(default_factory=dict)  # fields for which the architecture's name stands
    built: Mapping[str, Any] = field(default_factory=dict)  # and those which its tensors have to confirm
    labels: tuple[str, ...] | None = None
    unlabelled: str = ""  # why there are no labels, where classes are named after all
    transform: UnreadTransform | None = None
    architecture: str | None = None  # timm's name, with its tag
    library: Library | None = None  # who wrote it; None: nothing is there that names a network


def labels_in_order(names: Sequence[str] | Mapping[str, str] | None) -> tuple[tuple[str, ...] | None, str]:
    """Labels from a list, or from a table by number; none where a number is missing: then some output is nobody's.

    Returns:
        The labels, and why there are none, where there are names.
    """
    if not names:
        return None, ""
    if not isinstance(names, Mapping):
        return tuple(names), ""
    missing = [number for number in range(len(names)) if str(number) not in names]
    if missing:
        return None, f"of the {len(names)} classes that are named, none has the number {missing[0]}"
    return tuple(names[str(number)] for number in range(len(names))), ""


class Words:
    """The words of a library's config about its network: which are understood, with which values.

    Args:
        told: Words that a field of ours says too.
        only: Words with the values that change nothing here; of others the model computes something else.
        free: Words, in one text, without influence on what is computed, or of which the tensors tell.
        endings: How further such words may end.
    """

    def __init__(
        self,
        told: Mapping[str, str],
        only: Mapping[str, Sequence[Any]],
        free: str,
        endings: tuple[str, ...] = (),
    ) -> None:
        self.told, self.only, self.free, self.endings = told, only, frozenset(free.split()), endings

    def claims(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        """What a config says in our words; what is null is not said.

        Raises:
            CheckpointError: It has a word that is not known, or a value with which something else is computed.
        """
        found = {}
        for name, value in config.items():
            if value is None or name in self.free or name.endswith(self.endings):
                continue
            if name in self.told:
                found[self.told[name]] = value
            elif name not in self.only:
                raise CheckpointError(
                    f"{where} has {shown(name)}, which vitlite does not know: it may change the numbers.",
                    python="If it changes nothing for these weights, remove it from there.",
                )
            elif not any(type(value) is type(valid) and value == valid for valid in self.only[name]):
                valid = " or ".join(map(repr, self.only[name])) or "its absence"
                raise CheckpointError(f"{where} has {name} {shown(repr(value))}; vitlite computes {valid}.")
        return found


def one_or_two_sides(value: int | Sequence[int]) -> int | tuple[int, ...]:
    """A size that stands as a number, or as one for each side: both equal as one number."""
    if isinstance(value, int):
        return value
    return value[0] if len(set(value)) == 1 else tuple(value)


def in_whole_patches(size: int | Sequence[int], patch: int) -> int | tuple[int, ...]:
    """The size of which patches see something, where a library's convolution leaves out what they do not cover."""
    size = one_or_two_sides(size)
    if isinstance(size, int):
        return size - size % patch if size >= patch else size
    return tuple(side - side % patch if side >= patch else side for side in size)


def crops_alike(transform: TransformConfig, margin: Margin) -> bool:
    """Whether a library that rounds half of an odd margin so cuts every picture as a transform does.

    Where proportions are kept, some pictures have any margin; where pictures are stretched, all have the same. Of a
    crop, no library's words take the upper left part: its network does.
    """
    if transform.cut is not None:
        return False
    if transform.margin == margin:
        return True
    odd = [(before - after) % 4 == 3 for before, after in zip(transform.resize, transform.size, strict=True)]
    return transform.mode == "squash" and not any(odd)  # half of 1 is nearer to 0 than to 2, half of 3 is not


def as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as a file of JSON would have it, also where it comes from a library: lists for tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return plain


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
    python = "Write an images.TransformConfig by hand."
    command = "Name a checkpoint like it: --model NAME --weights PATH."
    if known:
        python, command = f"{python} {known}", f"{known} {command}"
    return ConfigError(text, python=python, command=command)
