"""Two processes under torchrun do what one does alone. tests/cluster has more."""

import socket
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_run import new_model
from torchrun import ENVIRONMENT, history, launcher, same_weights, torchrun, train_command, write_images

from vitlite.cli.main import main
from vitlite.errors import TrainError
from vitlite.training import distributed


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [10, 11, 12])
def test_each_place_in_a_batch_has_one_rank_and_its_partner_the_same(
    world: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: world)
    shares, parts = [], []
    for rank in range(world):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        share = distributed.paired_share(count)
        assert torch.equal(share.flip(0), count - 1 - share)  # the batch reversed is the share reversed
        assert len(share) >= 1
        shares += share.tolist()
        parts += distributed.shard(count).tolist()
    assert sorted(shares) == sorted(parts) == list(range(count))


def test_alone_nothing_is_shared() -> None:
    with distributed.process_group("cpu"):
        assert (distributed.rank(), distributed.world_size()) == (0, 1)
        assert distributed.paired_share(4).tolist() == distributed.shard(4).tolist() == [0, 1, 2, 3]
        distributed.assert_equal_on_all_ranks({"nothing": 1})
        distributed.all_reduce(value := torch.ones(1))
        assert value == 1


def test_two_processes_train_and_measure_as_one_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_images(tmp_path / "data", train=39, val=9)
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(train_command(data, one)) == 0  # 20 steps, of 8 images or 7
    alone = history(capsys.readouterr().out)
    together = history(torchrun(2, *train_command(data, two)).stdout)  # one of the two says it
    assert len(alone) == len(together) == 4
    for a, b in zip(alone, together, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    assert same_weights(one, two, 1e-4)

    words = ["eval", str(data), "--model", str(one / "last"), "--batch", "4"]
    assert main(words) == 0
    answer = capsys.readouterr().out
    assert "9 images" in answer
    assert torchrun(2, *words).stdout == answer


TWO_MACHINES = """
import os, sys
from vitlite.cli.main import main

here = "here" if os.environ["RANK"] == "0" else "there"
sys.exit(main([word.replace("MACHINE", here) for word in sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("words", "different"),
    [
        ("train MACHINE/data --model here/model --epochs 1 --out out", "images, validation"),
        ("eval here/data --model MACHINE/model", "weights"),
    ],
)
def test_machines_with_different_data_or_models_are_an_error(
    words: str, different: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an older copy of the data, or a model from a cache of its own."""
    monkeypatch.chdir(tmp_path)
    for seed, (machine, ending) in enumerate((("here", ".png"), ("there", ".PNG"))):
        for image in list(write_images(Path(machine) / "data", train=16, val=4).rglob("*.png")):
            image.rename(image.with_suffix(ending))
        model = new_model()
        model.labels = ("lying", "standing")
        torch.nn.init.constant_(model.norm.bias, seed)
        model.save(Path(machine) / "model")
    Path("two.py").write_text(TWO_MACHINES)
    line = launcher(2, *words.split(), program=("two.py",))
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert f"These values differ between processes: {different}. Give all machines the same data" in done.stderr
    assert not list(tmp_path.rglob("last"))


def test_too_few_images_for_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_images(tmp_path / "data", train=8, val=2)
    monkeypatch.setattr(distributed, "world_size", lambda: 5)
    assert main(train_command(data, tmp_path / "out")) == 1
    assert "8 images in batches of 8 are too few for 5 processes" in capsys.readouterr().err


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to be started by torchrun."""
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(distributed, "_join", lambda device: None)
    monkeypatch.setattr(distributed, "_is_first_to_fail", lambda: True)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("error", [dist.DistNetworkError("gone\nand more"), RuntimeError("[gloo] gone")])
def test_a_lost_process_is_explained(error: Exception) -> None:
    with (
        pytest.raises(
            TrainError,
            match=r"lost the connection to another process \(.*gone\)\. Run .* With `torchrun --max-restarts",
        ),
        distributed.process_group("cpu"),
    ):
        raise error


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("error", [TrainError("of gloo"), KeyError("other")])
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, distributed.process_group("cpu"):
        raise error
    assert caught.value is error


@pytest.mark.usefixtures("launched")
def test_later_failures_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_is_first_to_fail", lambda: False)
    with pytest.raises(SystemExit), distributed.process_group("cpu"):
        raise RuntimeError("gloo")


@pytest.mark.parametrize(("restarts", "rank", "warned"), [("1", "0", True), ("0", "0", False), ("1", "1", False)])
def test_hanging_restarts_are_warned_of(
    restarts: str, rank: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": restarts, "RANK": rank}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    distributed._warn_of_hanging_restarts()
    assert [record.getMessage().startswith("vitlite: torch may hang") for record in caplog.records] == [True] * warned


def test_without_torchrun_this_process_is_the_first_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        port = closed_soon.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "timedelta", lambda seconds: timedelta(milliseconds=100))
    assert distributed._is_first_to_fail()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
@pytest.mark.parametrize(
    ("device", "error"),
    [
        ("cuda", r"started at least 3 processes on this machine, but torch finds only 0 GPUs\. Start one process"),
        ("cuda:1", r"but device is 'cuda:1'\. Pass device=\"cuda\" .*, and choose the GPUs with CUDA_VISIBLE_DEVICES"),
    ],
)
def test_each_process_has_a_gpu_of_its_own(device: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(TrainError, match=error), distributed.process_group(device):
        pytest.fail("there are none")
