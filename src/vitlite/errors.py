"""The exceptions that vitlite raises.

Each exception also inherits from a built-in exception such as `ValueError` or `OSError`. The message says what failed,
with which value, and what to do. The command line prints the same message, so the message names both the Python
argument and the command-line option: "Pass image_size= (--size)."
"""

import copy
import difflib
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

LONGEST = 4000  # characters of an error message
E = TypeVar("E", bound="VitliteError")


class VitliteError(Exception):
    r"""Base class of all exceptions that vitlite raises.

    Args:
        text: The message. Unprintable characters are escaped, and a long message is shortened.

    >>> str(VitliteError("There is no file \x1b[31mred. Check the path."))
    'There is no file \\x1b[31mred. Check the path.'
    """

    def __init__(self, text: str) -> None:
        self.text = printable(text)
        super().__init__(self.text)

    def __str__(self) -> str:
        return self.text

    def within(self: E, context: str) -> E:
        """Return a copy of the error whose message starts with a context, such as the name of a file.

        >>> str(CheckpointError("The header is damaged.").within("mine.safetensors"))
        'mine.safetensors: The header is damaged.'
        """
        error = copy.copy(self)
        error.text = printable(f"{context}: {self.text}")
        return error

    def __reduce__(self) -> tuple[Any, ...]:  # the constructor of a subclass may have other arguments
        return _rebuild, (type(self), self.__dict__)


def _rebuild(kind: type[E], state: dict[str, Any]) -> E:
    error = kind.__new__(kind)
    error.__dict__.update(state)
    return error


def printable(text: str) -> str:
    r"""Escape the unprintable characters of a text, and shorten the text if it is very long.

    >>> print(printable("There is no file \x1b[31mred:\n- blocks.0"))
    There is no file \x1b[31mred:
    - blocks.0
    """
    if len(text) > LONGEST:
        start, end = text[: LONGEST * 3 // 4], text[-LONGEST // 4 :]  # keep the end, which says what to do
        text = f"{start} ... ({len(text) - LONGEST} characters left out) ... {end}"
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


class ConfigError(VitliteError, ValueError):
    """Raised for an invalid configuration or option, for example of `create` or `load`."""


class InputError(VitliteError, ValueError):
    """Raised for an argument that a model or function does not accept, such as a tensor of the wrong shape."""


class ImageError(VitliteError, ValueError):
    """Raised for an image that cannot be read or preprocessed."""


class UnknownNameError(VitliteError, ValueError):
    """Raised for a name that does not exist, for example of a model or a layer."""


class CheckpointError(VitliteError, RuntimeError):
    """Raised if weights cannot be loaded, converted or saved, for example because a file is damaged."""


class DownloadError(VitliteError, OSError):
    """Raised if a file cannot be downloaded or uploaded, or has the wrong hash."""


class OptimizedError(VitliteError, RuntimeError):
    """Raised if a model cannot be optimized, or if an optimized model does not support an operation."""


class ExportError(VitliteError, RuntimeError):
    """Raised if a model cannot be exported, or if the exported file gives different results."""


class TrainError(VitliteError, RuntimeError):
    """Raised if a training run cannot start or continue."""


class MissingExtraError(VitliteError, ImportError):
    """Raised if an optional package is needed but not installed."""


def missing_extra(task: str, extra: str) -> MissingExtraError:
    """Return the error for an optional package that is not installed, with the command that installs it."""
    return MissingExtraError(f"{task} needs an optional package. Install it: pip install 'vitlite[{extra}]'")


def check_count(number: Any, name: str) -> None:
    """Check that an argument is a positive integer.

    Raises:
        InputError: The argument is not a positive integer, or is a boolean.
    """
    if type(number) is not int or number < 1:
        raise InputError(f"{name} must be a positive integer, got {number!r}.")


def not_finite(dtype: object) -> InputError:
    """Return the error for model outputs with NaN or infinity, for example after an overflow in float16."""
    return InputError(f"The outputs of the model are not finite in {dtype}. Use float32 or bfloat16 (--dtype).")


def counted(endings: Counter[str]) -> str:
    """Return the number of files for each extension as text, starting with the most frequent extension.

    >>> counted(Counter({".heic": 12, "": 1}))
    '12 .heic, 1 without an extension'
    """
    most = endings.most_common(5)
    parts = [f"{number} {ending[:20] or 'without an extension'}" for ending, number in most]
    others = sum(endings.values()) - sum(number for _, number in most)
    return ", ".join([*parts, f"{others} others"] if others else parts)


def closest(name: str, names: Iterable[str], count: int = 4) -> str:
    """Return ' Did you mean a, b?' for an unknown name, or '' if no known name is similar."""
    near = difflib.get_close_matches(str(name)[:200], list(names), n=count, cutoff=0.5)
    return f" Did you mean {', '.join(near)}?" if near else ""
