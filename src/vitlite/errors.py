"""Every error vitlite raises on purpose.

Each also is what a caller would expect from Python (`ValueError`, `OSError`, ...). Its text says what failed, what was
given and what is valid; its remedy says what to do, in Python and on the command line, each in its own words.
"""

import difflib
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

E = TypeVar("E", bound="VitliteError")


class VitliteError(Exception):
    """Any mistake or failure that vitlite noticed and can explain.

    Args:
        text: What failed, what was given, what is valid.
        python: What to do about it, for somebody who writes Python; `str(error)` ends with it.
        command: The same for somebody at the command line; None where the words for Python will do.
        field: The field of the config, or the option, that the text begins with; the command says its own name for it.

    >>> error = VitliteError("These weights have no labels.", python="Set model.labels.", command="Say --like NAME.")
    >>> str(error), error.for_command_line()
    ('These weights have no labels. Set model.labels.', 'These weights have no labels. Say --like NAME.')
    """

    def __init__(self, text: str, *, python: str = "", command: str | None = None, field: str | None = None) -> None:
        super().__init__(text)
        self.text, self.python, self.command, self.field = text, python, command, field

    def __str__(self) -> str:
        return _sentences(self.text, self.python)

    def for_command_line(self) -> str:
        """The text and what to do about it, for somebody who does not write Python."""
        return _sentences(self.text, self.python if self.command is None else self.command)

    def within(self: E, context: str) -> E:
        """The same error, its text beginning with what was being done or read: "mine.safetensors: ...".

        >>> str(CheckpointError("It is damaged.", python="Fetch it again.").within("mine.safetensors"))
        'mine.safetensors: It is damaged. Fetch it again.'
        """
        state = {**self.__dict__, "text": f"{context}: {self.text}"}
        return _rebuilt(type(self), state["text"], state)

    def __reduce__(self) -> tuple[Any, ...]:  # keywords are no part of `args`, by which exceptions are pickled
        return _rebuilt, (type(self), self.text, dict(self.__dict__))


def _rebuilt(kind: type[E], text: str, state: dict[str, Any]) -> E:
    """An error of a kind whose constructor may take something else."""
    error = kind.__new__(kind, text)
    Exception.__init__(error, text)
    error.__dict__.update(state)
    return error


def _sentences(*parts: str) -> str:
    """One after the other, whatever names from outside are in them."""
    return fit_to_print(" ".join(part for part in parts if part))


class ConfigError(VitliteError, ValueError):
    """A `ViTConfig`, or an option of `create` and `load`, that cannot be built."""


class InputError(VitliteError, ValueError):
    """Tensors that a model cannot take."""


class ImageError(VitliteError, ValueError):
    """A picture that cannot be read or prepared."""


class UnknownNameError(VitliteError, ValueError):
    """A model, layer or option name that does not exist."""


class UnknownMethodError(VitliteError, AttributeError):
    """A method or an attribute that a model or a config does not have, and that another library's has."""


class CheckpointError(VitliteError, RuntimeError):
    """A weights file that does not fit, is damaged, or is not what it should be."""


class DownloadError(VitliteError, OSError):
    """Weights that could not be fetched or verified."""


class OptimizedError(VitliteError, RuntimeError):
    """An operation that an optimized model no longer offers."""


class ExportError(VitliteError, RuntimeError):
    """A model that cannot be written for another runtime, or does not answer the same there."""


class TrainError(VitliteError, RuntimeError):
    """A training run that cannot start or go on."""


class MissingExtraError(VitliteError, ImportError):
    """An optional package that the call needs and that is not installed."""


def missing_extra(task: str, extra: str) -> MissingExtraError:
    """The error for an optional package: what needs it and the command that installs it."""
    return MissingExtraError(f"{task} needs an optional package. Install it: pip install 'vitlite[{extra}]'")


def check_count(number: Any, meaning: str) -> None:
    """Makes sure that an argument counts something: of none, or fewer, nothing would be done without a word.

    Args:
        number: What was given.
        meaning: What it counts, as the error begins: "batch is how many pictures at a time".

    Raises:
        InputError: It is no whole number of at least 1; True is none.
    """
    if type(number) is not int or number < 1:
        raise InputError(f"{meaning}: a whole number of at least 1, got {number!r}.")


def not_finite(dtype: object) -> InputError:
    """The error for answers that mean nothing, such as where a type cannot hold the numbers between two layers."""
    return InputError(
        f"The model's answers are not finite numbers in {dtype}.",
        python="Use float32 or bfloat16.",
        command="Use --dtype float32 or --dtype bfloat16.",
    )


def shown(text: str, most: int = 200) -> str:
    """A text from a file or from outside, fit to be printed: shortened, and with what does not show made visible.

    >>> print(shown("two\\nlines, and \\x1b[31mred"))
    two\\nlines, and \\x1b[31mred
    """
    visible = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:most])
    return visible + (f"... ({len(text)} letters)" if len(text) > most else "")


def fit_to_print(text: str) -> str:
    """A text of ours with names from outside in it: what does not show is made visible, but for the ends of lines.

    >>> print(fit_to_print("There is no file \\x1b[31mred:\\n- blocks.0"))
    There is no file \\x1b[31mred:
    - blocks.0
    """
    return "\n".join(shown(line, len(line)) for line in text.split("\n"))


def counted(endings: Counter[str]) -> str:
    """How many files of which endings, the most frequent first.

    >>> counted(Counter({".heic": 12, "": 1}))
    '12 .heic, 1 without an ending'
    """
    most = endings.most_common(5)
    parts = [f"{number} {shown(ending, 20) or 'without an ending'}" for ending, number in most]
    more = sum(endings.values()) - sum(number for _, number in most)
    return ", ".join([*parts, f"{more} others"] if more else parts)


def closest(name: str, names: Iterable[str], count: int = 4) -> str:
    """A hint for a wrong name: ' Did you mean a, b?', or nothing where no name is near."""
    near = difflib.get_close_matches(str(name)[:200], list(names), n=count, cutoff=0.5)
    return f" Did you mean {', '.join(map(shown, near))}?" if near else ""
