"""Two processes under torchrun do what one does alone. tests/cluster has more of them, and what they survive."""

from pathlib import Path

import pytest
import torch
from torchrun import history, pictures, same_weights, torchrun, train_words

from vitlite.training import distributed as ranks
from vitlite.cli.main import main


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [10, 11, 12])
def test_each_place_in_a_batch_has_one_rank_and_its_partner_the_same(
    world: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "world", lambda: world)
    shares, parts = [], []
    for rank in range(world):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        share = ranks.share(count)
        assert torch.equal(share.flip(0), count - 1 - share)  # the batch reversed is the share reversed
        assert len(share) >= 1
        shares += share.tolist()
        parts += ranks.part(count).tolist()
    assert sorted(shares) == sorted(parts) == list(range(count))


def test_alone_nothing_is_shared() -> None:
    with ranks.together("cpu"):
        assert (ranks.rank(), ranks.world()) == (0, 1)
        assert ranks.share(4).tolist() == ranks.part(4).tolist() == [0, 1, 2, 3]
        ranks.agree("nothing", 1)
        ranks.add(value := torch.ones(1))
        assert value == 1


def test_two_processes_train_and_measure_as_one_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = pictures(tmp_path / "data", train=40, val=9)
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(train_words(data, one)) == 0  # 20 steps
    alone = history(capsys.readouterr().out)
    together = history(torchrun(2, *train_words(data, two)).stdout)  # one of the two says it
    assert len(alone) == len(together) == 4
    for a, b in zip(alone, together, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert same_weights(one, two, 1e-4)

    words = ["eval", str(data), "--model", str(one / "last"), "--batch", "4"]
    assert main(words) == 0
    answer = capsys.readouterr().out
    assert "9 pictures" in answer
    assert torchrun(2, *words).stdout == answer


def test_too_few_pictures_for_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = pictures(tmp_path / "data", train=8, val=2)
    monkeypatch.setattr(ranks, "world", lambda: 5)
    assert main(train_words(data, tmp_path / "out")) == 1
    assert "8 pictures in batches of 8 are too few for 5 processes" in capsys.readouterr().err
