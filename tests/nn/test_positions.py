"""Position tables that are kept: once each, as long as they are right, and never in a way that another can see."""

import copy
import pickle
import threading
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlite.nn import positions
from vitlite.nn.positions import RESAMPLE, PositionTables, _resize_by_matmul, resample_positions, sincos_positions

GRID = (4, 4)


@pytest.fixture
def stretched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The grids that a table was stretched to."""
    grids: list[tuple[int, int]] = []

    def count(table: Tensor, old: Any, new: tuple[int, int], method: Any) -> Tensor:
        grids.append(new)
        return resample_positions(table, old, new, method)

    monkeypatch.setattr(positions, "resample_positions", count)
    return grids


def learned(seed: int = 0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(1, 17, 8, generator=generator))


def test_each_grid_and_method_is_computed_once(stretched: list[tuple[int, int]]) -> None:
    tables, table = PositionTables(), learned()
    with torch.no_grad():
        for _ in range(3):
            for grid in ((6, 6), (3, 5)):
                assert torch.equal(
                    tables.learned(table, GRID, grid, "timm"), resample_positions(table, GRID, grid, "timm")
                )
    assert stretched == [(6, 6), (3, 5)]
    with torch.no_grad():
        other = tables.learned(table, GRID, (6, 6), "jax")
    assert torch.equal(other, resample_positions(table, GRID, (6, 6), "jax"))


@pytest.mark.parametrize("change", [
    lambda table: table.mul_(2), lambda table: table.data.mul_(2), lambda table: table.data.__setitem__((0, 3, 1), 7.0),
])  # fmt: skip
def test_a_change_of_the_table_is_noticed(change: Any) -> None:
    tables, table = PositionTables(), learned()
    with torch.no_grad():
        tables.learned(table, GRID, (6, 6), "timm")
        change(table)
        assert torch.equal(tables.learned(table, GRID, (6, 6), "timm"), resample_positions(table, GRID, (6, 6), "timm"))


def test_another_table_is_resampled_again(stretched: list[tuple[int, int]]) -> None:
    tables = PositionTables()
    with torch.no_grad():
        first = tables.learned(learned(0), GRID, (6, 6), "timm")
        second = tables.learned(learned(1), GRID, (6, 6), "timm")
    assert not torch.equal(first, second)
    assert len(stretched) == 2


def test_no_cache_while_training(stretched: list[tuple[int, int]]) -> None:
    tables, table = PositionTables(), learned()
    for _ in range(2):
        tables.learned(table, GRID, (6, 6), "timm").sum().backward()
    assert len(stretched) == 2
    assert table.grad is not None
    assert tables.resampled is None


def test_only_parameters_are_cached() -> None:
    """Such as what torch.func puts in the place of one."""
    tables = PositionTables()
    with torch.no_grad():
        tables.learned(learned().detach(), GRID, (6, 6), "timm")
        tables.sincos(torch.ones(8, 3, 2, 2), (6, 6), True)
    assert tables.resampled is None
    assert not tables.fixed


def test_cache_is_bounded() -> None:
    tables, table = PositionTables(), learned()
    weight = nn.Parameter(torch.zeros(8, 3, 2, 2))
    with torch.no_grad():
        for side in range(5, 60):
            tables.learned(table, GRID, (side, 4), "timm")
            tables.sincos(weight, (side, 4), False)
            assert tables.resampled is not None
            assert len(tables.resampled[1]) <= PositionTables.LARGEST
            assert len(tables.fixed) <= PositionTables.LARGEST


def test_cache_keeps_all_it_has_room_for(stretched: list[tuple[int, int]]) -> None:
    tables, table = PositionTables(), learned()
    with torch.no_grad():
        for _ in range(3):
            for side in range(5, 5 + PositionTables.LARGEST):
                tables.learned(table, GRID, (side, 4), "timm")
    assert len(stretched) == PositionTables.LARGEST


def test_sincos_positions_are_cached() -> None:
    tables = PositionTables()
    weight = nn.Parameter(torch.zeros(8, 3, 2, 2))
    first = tables.sincos(weight, (3, 5), True)
    assert torch.equal(first[:, 1:], sincos_positions((3, 5), 8))
    assert not first[:, 0].any(), "the class token stands at zero"
    with torch.no_grad():
        weight.add_(1)
    assert tables.sincos(weight, (3, 5), True) is first
    narrow = nn.Parameter(weight.detach().bfloat16())
    assert tables.sincos(narrow, (3, 5), False).dtype is torch.bfloat16


def test_tables_cached_in_inference_mode_can_be_used_in_training() -> None:
    tables, table = PositionTables(), learned()
    with torch.inference_mode():
        tables.learned(table, GRID, (6, 6), "timm")
    table.requires_grad_(False)
    kept = tables.learned(table, GRID, (6, 6), "timm")
    assert not kept.is_inference()


def test_copies_start_with_an_empty_cache() -> None:
    tables, table = PositionTables(), learned()
    with torch.no_grad():
        tables.learned(table, GRID, (6, 6), "timm")
    for again in (copy.deepcopy(tables), pickle.loads(pickle.dumps(tables))):
        assert again.resampled is None


def test_threads_share_the_cache() -> None:
    """More grids than are kept, so that places are given up all the time."""
    tables, table = PositionTables(), learned()
    weight = nn.Parameter(torch.zeros(8, 3, 2, 2))
    faults: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for turn in range(400):
                grid = (5 + (start + turn) % 20, 3)
                with torch.no_grad():
                    assert tables.learned(table, GRID, grid, "jax").shape[1] == 1 + grid[0] * grid[1]
                    assert tables.sincos(weight, grid, False).shape[1] == grid[0] * grid[1]
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(5 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


@pytest.mark.parametrize("method", sorted(RESAMPLE))
def test_resizing_by_matmul_equals_interpolate(method: Any) -> None:
    """As exported files do it, at any number of rows and columns, one of them too."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in product((1, 2, 7, 14), (1, 5, 14)):
        table = torch.randn(1, rows, columns, 3, generator=generator)
        image = table.permute(0, 3, 1, 2).double().contiguous(memory_format=torch.channels_last)
        for new in ((1, 1), (2, 9), (7, 7), (14, 14), (37, 3), (20, 13), (13, 1)):
            wanted = F.interpolate(image, size=new, **RESAMPLE[method]).permute(0, 2, 3, 1)
            torch.testing.assert_close(
                _resize_by_matmul(table, new, **RESAMPLE[method]).double(), wanted, rtol=1e-5, atol=1e-5
            )
