"""No argument of another library's model is overlooked: the model is equal, refused, or asked about."""

from pathlib import Path

import pytest
import torch
from arguments import CASES, KINDS, Kind, Value, label, outcome, row

PAGE = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8").splitlines()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_argument_has_values(kind: Kind) -> None:
    assert set(kind.arguments()) == set(kind.values), "say in arguments.py with which values the new one is tried"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_defaults_are_equal(kind: Kind, tmp_path: Path) -> None:
    got = outcome(kind, "", Value(None), tmp_path)
    assert got.bare == "equal"
    assert got.folder in ("equal", "")


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: label(*CASES[number])[2:-2])
def test_no_value_is_overlooked(number: int, tmp_path: Path) -> None:
    """What becomes of it is what the page says, and never "differs"."""
    case = CASES[number]
    got = outcome(*case, tmp_path)
    assert "differs" not in got
    assert row(*case, got) in PAGE, "run docs/generate_parity.py"


def test_the_page_has_no_other_rows() -> None:
    labels = [label(*case) for case in CASES]
    assert len(set(labels)) == len(labels)
    assert [line for line in PAGE if line.endswith(("|  |", "equal |", "refused |", "asked |", "assumed |"))] == [
        line for name in labels for line in PAGE if line.startswith(name)
    ]
