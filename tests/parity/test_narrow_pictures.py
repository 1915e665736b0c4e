"""Pictures one patch wide or high, where torch's own antialiased resampling is wrong in some memory layouts."""

import inspect
from pathlib import Path

import pytest
import torch
from peers import timm
from references import REFERENCES, Reference, distance
from test_equal import LOGITS, TABLE_OF, TABLES, pair, pictures
from torch import Tensor, nn

import vitlite
from vitlite.nn.positions import resample_positions

SIDES = [*range(1, 12), 25]
NARROW = [(1, n) for n in SIDES] + [(n, 1) for n in SIDES]
RESIZABLE = [reference for reference in REFERENCES if (24, 40) in reference.image_sizes]


TABLES_FROM = [(method, (7, 7)) for method in TABLE_OF]
TABLES_FROM += [(method, old) for method in ("timm", "jax") for old in ((1, 7), (7, 1), (5, 9))]  # others want squares


@pytest.mark.parametrize(("method", "old"), TABLES_FROM, ids=str)
def test_narrow_tables_are_resampled_as_each_library_does(method: str, old: tuple[int, int]) -> None:
    table = torch.randn(1, old[0] * old[1], 6, generator=torch.Generator().manual_seed(0))
    for new in NARROW:
        if method == "torchvision" and new != (1, 1):
            continue
        with torch.no_grad():
            wanted = TABLE_OF[method](table, old, new)
        assert distance(resample_positions(table, old, new, method), wanted) < TABLES, new  # type: ignore[arg-type]


@pytest.mark.parametrize("reference", RESIZABLE, ids=str)
def test_narrow_pictures(reference: Reference) -> None:
    ours, theirs = pair(reference)
    optimized = vitlite.optimize(pair(reference)[0])
    has_the_mistake = str(reference).startswith("transformers: SigLIP 2 NaFlex")  # for tables one patch wide
    for height, width in NARROW:
        if has_the_mistake and width == 1 < height:
            continue
        images = pictures(reference, (8 * height, 8 * width))
        with torch.no_grad():
            wanted = reference.logits(theirs, images)
            assert distance(ours(images), wanted) < LOGITS, (height, width)
            assert distance(optimized(images), wanted) < LOGITS, (height, width)


def test_loaded_for_narrow_pictures(tmp_path: Path) -> None:
    reference = next(reference for reference in REFERENCES if str(reference) == "timm: class token")
    ours, theirs = pair(reference)
    ours.save(tmp_path / "model")
    for size in ((64, 8), (8, 64), (200, 8), (8, 8)):
        images = pictures(reference, size)
        loaded = vitlite.load(tmp_path / "model", image_size=size)
        theirs.set_input_size(img_size=size)  # timm's own way for good
        with torch.no_grad():
            wanted = theirs(images)
            assert distance(loaded(images), wanted) < LOGITS
            assert distance(vitlite.optimize(loaded)(images), wanted) < LOGITS
        theirs = pair(reference)[1]


class Compiled(nn.Module):
    """The resampling alone, for a compiler."""

    def forward(self, table: Tensor, like: Tensor) -> Tensor:
        return resample_positions(table, (7, 7), (like.shape[0], like.shape[1]), "timm")


def test_an_exported_program_of_any_size_is_right_for_narrow_ones() -> None:
    dynamic = {0: torch.export.Dim("h", max=64), 1: torch.export.Dim("w", max=64)}
    table = torch.randn(1, 49, 6, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(
        Compiled(), (table, torch.zeros(5, 4)), dynamic_shapes={"table": None, "like": dynamic}
    )
    options = inspect.signature(program.module).parameters
    module = program.module(**{"check_guards": False} if "check_guards" in options else {})
    for new in NARROW:
        wanted = timm.layers.resample_abs_pos_embed(table, list(new), [7, 7], num_prefix_tokens=0)
        assert distance(module(table, torch.zeros(new)), wanted) < TABLES, new
