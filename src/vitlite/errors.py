"""The exceptions that vitlite raises.

Each one is also a subclass of the built-in exception that a caller expects (`ValueError`, `OSError`, ...). The text
says what failed and with which value, and then what to do. The command line prints the same text, so it names both the
argument and the option: "Pass image_size= (--size)."
"""

import copy
import difflib
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

LONGEST = 4000  # characters of an error's text
E = TypeVar("E", bound="VitliteError")


class VitliteError(Exception):
    r"""Base class of vitlite's errors.

    Args:
        text: What failed and with which value, and then what to do. Names and values from files need no escaping:
            unprintable characters are escaped here, and a text that is too long is shortened.

    >>> str(VitliteError("There is no file \x1b[31mred. Check the path."))
    'There is no file \\x1b[31mred. Check the path.'
    """

    def __init__(self, text: str) -> None:
        self.text = printable(text)
        super().__init__(self.text)

    def __str__(self) -> str:
        return self.text

    def within(self: E, context: str) -> E:
        """Return the same error with context, such as the name of the file, before the text.

        >>> str(CheckpointError("The header is damaged.").within("mine.safetensors"))
        'mine.safetensors: The header is damaged.'
        """
        error = copy.copy(self)
        error.text = printable(f"{context}: {self.text}")
        return error

    def __reduce__(self) -> tuple[Any, ...]:  # subclasses may have constructors with other arguments
        return _rebuild, (type(self), self.__dict__)


def _rebuild(kind: type[E], state: dict[str, Any]) -> E:
    error = kind.__new__(kind)
    error.__dict__.update(state)
    return error


def printable(text: str) -> str:
    r"""Return the text with unprintable characters escaped, shortened if it is very long.

    >>> print(printable("There is no file \x1b[31mred:\n- blocks.0"))
    There is no file \x1b[31mred:
    - blocks.0
    """
    if len(text) > LONGEST:
        start, end = text[: LONGEST * 3 // 4], text[-LONGEST // 4 :]  # the end says what to do
        text = f"{start} ... ({len(text) - LONGEST} characters left out) ... {end}"
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


class ConfigError(VitliteError, ValueError):
    """An invalid `ViTConfig`, or an invalid option of `create` or `load`."""


class InputError(VitliteError, ValueError):
    """An argument or a tensor that a model or function cannot accept."""


class ImageError(VitliteError, ValueError):
    """An image that cannot be read or preprocessed."""


class UnknownNameError(VitliteError, ValueError):
    """A model, layer or option name that does not exist."""


class CheckpointError(VitliteError, RuntimeError):
    """A weights file that is damaged, does not fit the model, or is not supported."""


class DownloadError(VitliteError, OSError):
    """Weights that could not be downloaded or verified."""


class OptimizedError(VitliteError, RuntimeError):
    """An operation that an optimized model does not support."""


class ExportError(VitliteError, RuntimeError):
    """A model that cannot be exported, or whose exported file gives other results."""


class TrainError(VitliteError, RuntimeError):
    """A training run that cannot start or continue."""


class MissingExtraError(VitliteError, ImportError):
    """An optional package that is needed but not installed."""


def missing_extra(task: str, extra: str) -> MissingExtraError:
    """Return the error for an optional package that is not installed, with the command that installs it."""
    return MissingExtraError(f"{task} needs an optional package. Install it: pip install 'vitlite[{extra}]'")


def check_count(number: Any, name: str) -> None:
    """Check that an argument is a positive integer.

    Raises:
        InputError: The argument is not a positive integer. True is not accepted.
    """
    if type(number) is not int or number < 1:
        raise InputError(f"{name} must be a positive integer, got {number!r}.")


def not_finite(dtype: object) -> InputError:
    """Return the error for outputs with NaN or infinity, for example after an overflow in float16."""
    return InputError(f"The model's outputs are not finite in {dtype}. Use float32 or bfloat16 (--dtype).")


def counted(endings: Counter[str]) -> str:
    """Return the number of files for each extension, most frequent first.

    >>> counted(Counter({".heic": 12, "": 1}))
    '12 .heic, 1 without an extension'
    """
    most = endings.most_common(5)
    parts = [f"{number} {ending[:20] or 'without an extension'}" for ending, number in most]
    others = sum(endings.values()) - sum(number for _, number in most)
    return ", ".join([*parts, f"{others} others"] if others else parts)


def closest(name: str, names: Iterable[str], count: int = 4) -> str:
    """Return ' Did you mean a, b?' for a name that does not exist, or '' if no name is close."""
    near = difflib.get_close_matches(str(name)[:200], list(names), n=count, cutoff=0.5)
    return f" Did you mean {', '.join(near)}?" if near else ""
