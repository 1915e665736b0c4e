"""Errors are vitlite's own and also what Python callers expect, and hints name what is near."""

import pickle

import pytest

from vitlite import errors
from vitlite.errors import ConfigError, VitliteError, closest, missing_extra

ALSO = {
    "ConfigError": ValueError,
    "InputError": ValueError,
    "ImageError": ValueError,
    "UnknownMethodError": AttributeError,
    "UnknownNameError": ValueError,
    "CheckpointError": RuntimeError,
    "DownloadError": OSError,
    "OptimizedError": RuntimeError,
    "ExportError": RuntimeError,
    "TrainError": RuntimeError,
    "MissingExtraError": ImportError,
}


def test_every_error_is_a_vitlite_error_and_a_common_one() -> None:
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and name.endswith("Error")}
    assert set(kinds) == {"VitliteError", *ALSO}
    for name, common in ALSO.items():
        assert issubclass(kinds[name], VitliteError)
        assert issubclass(kinds[name], common)
        with pytest.raises(common, match="what was given"):
            raise kinds[name]("what was given")


def test_what_an_error_says_can_be_printed_whatever_names_are_in_it() -> None:
    """Those of files and folders, in which a terminal would find commands; lines stay lines."""
    error = ConfigError("no \x1b[31mred\x90:\n- blocks.0", python="Say \r it.", command="Type \x07 it.")
    assert str(error) == "no \\x1b[31mred\\x90:\n- blocks.0 Say \\r it."
    assert error.for_command_line() == "no \\x1b[31mred\\x90:\n- blocks.0 Type \\x07 it."


def test_a_missing_extra_names_the_command_that_installs_it() -> None:
    error = missing_extra("Reading pictures", "images")
    assert isinstance(error, ImportError)
    assert str(error) == "Reading pictures needs an optional package. Install it: pip install 'vitlite[images]'"


def test_a_hint_names_what_is_near_or_nothing() -> None:
    names = ["vit_base_16", "vit_base_32", "dino"]
    assert closest("vit_bas_32", names) == " Did you mean vit_base_32, vit_base_16?"
    assert closest("vit_base_16", names, count=1) == " Did you mean vit_base_16?"
    assert closest("resnet", names) == ""
    assert closest(None, names) == ""  # type: ignore[arg-type]


def test_an_error_speaks_both_tongues() -> None:
    error = errors.CheckpointError("It is cut short.", python="Call fetch().", command="Say --update.", field="weights")
    assert str(error) == "It is cut short. Call fetch()."
    assert error.for_command_line() == "It is cut short. Say --update."
    assert errors.CheckpointError("It is cut short.", python="Fetch it.").for_command_line().endswith("Fetch it.")
    assert errors.CheckpointError("It is cut short.", python="Fetch it.", command="").for_command_line()[-1] == "."


@pytest.mark.parametrize("name", ALSO)
def test_context_and_pickling_keep_everything(name: str) -> None:
    kind = getattr(errors, name)
    error = kind("It is cut short.", python="Call fetch().", command="Say --update.", field="weights")
    inside = error.within("a.npz")
    again = pickle.loads(pickle.dumps(inside))
    assert type(again) is kind
    assert str(again) == "a.npz: It is cut short. Call fetch()."
    assert again.for_command_line() == "a.npz: It is cut short. Say --update."
    assert again.field == "weights"


class Absent(errors.DownloadError):
    def __init__(self, file: str, status: int) -> None:
        super().__init__(f"{file} is not there.", python="Look.")
        self.status = status


def test_an_error_with_a_constructor_of_its_own_gets_context_and_is_pickled() -> None:
    again = pickle.loads(pickle.dumps(Absent("a.npz", 404).within("owner/name")))
    assert (type(again), str(again), again.status) == (Absent, "owner/name: a.npz is not there. Look.", 404)
