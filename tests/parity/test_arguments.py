"""No argument of another library's model is overlooked: the model is equal, refused, or asked about."""

from pathlib import Path

import pytest
import torch
from arguments import CASES, KINDS, Kind, Value, outcome


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_argument_has_values(kind: Kind) -> None:
    assert list(kind.values) == list(dict.fromkeys(kind.values))
    assert set(kind.arguments()) == set(kind.values), "a new argument: say in arguments.py with which values to try it"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_defaults_are_equal(kind: Kind, tmp_path: Path) -> None:
    got = outcome(kind, "", Value(None), tmp_path)
    assert got.bare == "equal"
    assert got.folder in ("equal", "")


@pytest.mark.parametrize(("kind", "name", "value"), CASES, ids=lambda each: str(each)[:40])
def test_no_value_is_overlooked(kind: Kind, name: str, value: Value, tmp_path: Path) -> None:
    assert "differs" not in outcome(kind, name, value, tmp_path)
