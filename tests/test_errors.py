"""Errors are vitlite's own and what Python callers expect; their text is printable and bounded."""

import pickle
from typing import Any

import pytest

from vitlite import errors
from vitlite.errors import CheckpointError, ConfigError, InputError, VitliteError, check_count, closest, missing_extra

ALSO = {
    "ConfigError": ValueError,
    "InputError": ValueError,
    "ImageError": ValueError,
    "UnknownNameError": ValueError,
    "CheckpointError": RuntimeError,
    "DownloadError": OSError,
    "OptimizedError": RuntimeError,
    "ExportError": RuntimeError,
    "TrainError": RuntimeError,
    "MissingExtraError": ImportError,
}


def test_every_error_is_a_vitlite_error_and_a_builtin_one() -> None:
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and name.endswith("Error")}
    assert set(kinds) == {"VitliteError", *ALSO}
    for name, builtin in ALSO.items():
        assert issubclass(kinds[name], VitliteError)
        with pytest.raises(builtin, match="what was given"):
            raise kinds[name]("what was given")


def test_unprintable_characters_are_made_visible() -> None:
    assert str(ConfigError("no \x1b[31mred\x90:\n- blocks.0 \r")) == "no \\x1b[31mred\\x90:\n- blocks.0 \\r"
    assert str(CheckpointError("a.npz: damaged.").within("b\x07")) == "b\\x07: a.npz: damaged."


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = str(CheckpointError(f"No tensor {'x' * 100_000}. Download it again."))
    assert len(text) < 1.1 * errors.LONGEST
    assert text.startswith("No tensor xxx")
    assert text.endswith("xxx. Download it again.")


def test_a_missing_extra_names_the_command_that_installs_it() -> None:
    error = missing_extra("Reading images", "images")
    assert isinstance(error, ImportError)
    assert str(error) == "Reading images needs an optional package. Install it: pip install 'vitlite[images]'"


def test_closest_names_are_suggested() -> None:
    names = ["vit_base_16", "vit_base_32", "dino"]
    assert closest("vit_bas_32", names) == " Did you mean vit_base_32, vit_base_16?"
    assert closest("vit_base_16", names, count=1) == " Did you mean vit_base_16?"
    assert closest("resnet", names) == ""


@pytest.mark.parametrize("number", [0, -1, 2.5, True, "8"])
def test_a_count_is_a_positive_integer(number: Any) -> None:
    with pytest.raises(InputError, match=rf"^batch must be a positive integer, got {number!r}\.$"):
        check_count(number, "batch")


@pytest.mark.parametrize("name", ALSO)
def test_errors_can_be_pickled(name: str) -> None:
    kind = getattr(errors, name)
    again = pickle.loads(pickle.dumps(kind("It is cut short.").within("a.npz")))
    assert (type(again), str(again)) == (kind, "a.npz: It is cut short.")


class Absent(errors.DownloadError):
    def __init__(self, file: str, status: int) -> None:
        super().__init__(f"{file} is missing.")
        self.status = status


def test_an_error_with_its_own_constructor_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(Absent("a.npz", 404).within("owner/name")))
    assert (type(again), str(again), again.status) == (Absent, "owner/name: a.npz is missing.", 404)
