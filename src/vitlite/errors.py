"""Every error vitlite raises on purpose.

Each also is what a caller would expect from Python (`ValueError`, `OSError`, ...), and its text says
what failed, what was given, what is valid, and what to do.
"""

import difflib
from collections.abc import Iterable


class VitliteError(Exception):
    """Any mistake or failure that vitlite noticed and can explain."""


class ConfigError(VitliteError, ValueError):
    """A `ViTConfig`, or an option of `create` and `load`, that cannot be built."""


class InputError(VitliteError, ValueError):
    """Tensors that a model cannot take."""


class ImageError(VitliteError, ValueError):
    """A picture that cannot be read or prepared."""


class UnknownNameError(VitliteError, ValueError):
    """A model, layer or option name that does not exist."""


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


def closest(name: str, names: Iterable[str], count: int = 4) -> str:
    """A hint for a wrong name: ' Did you mean a, b?', or nothing where no name is near."""
    near = difflib.get_close_matches(str(name), list(names), n=count, cutoff=0.5)
    return f" Did you mean {', '.join(near)}?" if near else ""
