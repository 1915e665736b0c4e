"""Near-duplicates equal those of a comparison of all vectors with all, whatever the size of a block."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_search import noise, write
from torch import Tensor

from vitlite.errors import InputError
from vitlite.retrieval import duplicate_groups, duplicate_pairs, open_vectors
from vitlite.retrieval.duplicates import comparisons

duplicates = import_module("vitlite.retrieval.duplicates")


def near_copies(count: int = 300, width: int = 24) -> Tensor:
    """Return vectors of different lengths, of which many are near others, in random order."""
    centres = noise(count // 3, width)[torch.arange(count) % (count // 3)]
    lengths = torch.logspace(-3, 3, count)[:, None]
    mixed = lengths * (centres + 0.25 * noise(count, width, seed=1))
    return mixed[torch.randperm(count, generator=torch.Generator().manual_seed(2))]


@pytest.mark.parametrize("rows", [37, 64, 1000])
@pytest.mark.parametrize("threshold", [0.9, 0.95])
def test_duplicates_equal_brute_force(
    rows: int, threshold: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "ROWS", rows)
    vectors = near_copies()
    opened = open_vectors(write(tmp_path / "v.safetensors", vectors))
    scores = F.cosine_similarity(vectors[:, None].double(), vectors[None].double(), dim=2)
    right = {(i, j) for i, j in (scores >= threshold).nonzero().tolist() if i < j}
    assert len(right) > 100
    done: list[int] = []
    found = {}
    for first, second, score in duplicate_pairs(opened, threshold, done.append):
        found[int(first[:-4]), int(second[:-4])] = score
    assert set(found) == right
    assert all(score == pytest.approx(float(scores[pair]), abs=1e-6) for pair, score in found.items())
    assert sum(done) == comparisons(opened)

    groups: dict[int, list[int]] = {}  # one image after the other
    for i in range(len(vectors)):
        nearest = max(groups, key=lambda j: float(scores[i, j]), default=None)
        if nearest is None or scores[i, nearest] < threshold:
            groups[i] = []
        else:
            groups[nearest].append(i)
    done.clear()
    grouped = duplicate_groups(opened, threshold, done.append)
    assert sum(done) == comparisons(opened)
    ours = {int(path[:-4]): {int(match.path[:-4]) for match in members} for path, members in grouped.items()}
    assert ours == {i: set(members) for i, members in groups.items() if members}
    sizes = [len(members) for members in grouped.values()]
    assert sizes == sorted(sizes, reverse=True)
    for members in grouped.values():
        assert [match.score for match in members] == sorted((match.score for match in members), reverse=True)


def test_a_group_is_no_chain(tmp_path: Path) -> None:
    """Each vector is near the next one, but the first is not near the last."""
    angles = 0.2 * torch.arange(10.0)
    opened = open_vectors(write(tmp_path / "v.safetensors", torch.stack([angles.cos(), angles.sin()], 1)))
    groups = duplicate_groups(opened, 0.975)  # an angle of 0.22
    names = {path: [match.path for match in members] for path, members in groups.items()}
    assert names == {f"{i}.png": [f"{i + 1}.png"] for i in (0, 2, 4, 6, 8)}


def test_equal_vectors_are_found_at_a_threshold_of_1(tmp_path: Path) -> None:
    """Vectors of zeros have no direction and are no duplicates."""
    vectors = torch.cat([noise(50, 768), noise(50, 768), torch.zeros(2, 768)])
    opened = open_vectors(write(tmp_path / "v.safetensors", vectors))
    expected = [(f"{i}.png", f"{i + 50}.png") for i in range(50)]
    assert [(pair.first, pair.second) for pair in duplicate_pairs(opened, 1)] == expected
    assert [(path, members[0].path) for path, members in duplicate_groups(opened, 1).items()] == expected
    for threshold in (0, -0.5, 1.1, 95, float("nan")):
        for find in (duplicate_groups, lambda *arguments: list(duplicate_pairs(*arguments))):
            with pytest.raises(InputError, match="The threshold must be above 0 and at most 1, got"):
                find(opened, threshold)
