"""A repository whose weights lie in shards is fetched whole, and each shard is compared with a hash of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fetching import open_to_all
from files_made import ASK, IMAGES, trained
from safetensors.torch import save
from server import Hub

from vitlite import load
from vitlite.checkpoints.locate import locate
from vitlite.errors import CheckpointError

REPO = "someone/sharded"


@pytest.mark.parametrize("count", [1, 2])
def test_shards_of_a_repository(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    model = trained()
    state = model.state_dict()
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    place = {tensor: names[i % count] for i, tensor in enumerate(state)}
    files = {"model.safetensors.index.json": json.dumps({"weight_map": place}).encode()}
    for name in names:
        files[name] = save({tensor: state[tensor].contiguous() for tensor in state if place[tensor] == name})
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.publish(REPO, **files)
        found = load(REPO, config=ASK)
        location = locate(REPO)
    assert torch.equal(found(IMAGES), model(IMAGES))
    assert location.sha256 is None, "that of the index is nobody's of the shards"
    assert location.verified == "hub"


def test_a_branch_that_moves_between_shards_and_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its commit lacked when it was last asked for, a later one may have."""
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")

    def shards(bias: float) -> dict[str, bytes]:
        state = trained().state_dict()
        state["head.bias"].fill_(bias)
        index = {"weight_map": dict.fromkeys(state, "model-1.safetensors")}
        return {"model.safetensors.index.json": json.dumps(index).encode(), "model-1.safetensors": save(state)}

    def bias_of_main() -> float:
        return load(REPO, config=ASK).head.bias[0].item()

    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for bias in (1.0, 2.0):
            hub.publish(REPO, **shards(bias))
            assert bias_of_main() == bias
            with monkeypatch.context() as offline:
                offline.setenv("HF_HUB_OFFLINE", "1")
                assert bias_of_main() == bias
        whole = shards(3.0)["model-1.safetensors"]
        hub.publish(REPO, **shards(2.0), **{"model.safetensors": whole})
        assert bias_of_main() == 3.0
        hub.publish(REPO, **{"model.safetensors": whole})
        assert bias_of_main() == 3.0


def test_an_adapter_in_a_repository_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers adds it to the weights beside it."""
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        weights = save(trained().state_dict())
        hub.publish(REPO, model_safetensors=weights)
        assert load(REPO, config=ASK).config.num_classes == 3
        hub.publish(REPO, model_safetensors=weights, adapter_config_json=b"{}")
        with pytest.raises(CheckpointError, match=r"has an adapter beside its weights \(adapter_config\.json\)"):
            load(REPO, config=ASK)


def unplug(path: Path) -> None:
    """As a link to a disk that is not mounted."""
    path.symlink_to("/nowhere/model")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def lead_away_above(path: Path) -> None:
    path.parent.rmdir()
    path.parent.symlink_to("/nowhere")


@pytest.mark.parametrize("make", [unplug, loop, lead_away_above])
def test_what_cannot_be_looked_at_is_not_fetched_from_a_stranger(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where "models/mine" is a link that leads nowhere, the Hub's repository of that name is another model."""
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    make(Path("models/mine"))
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.publish("models/mine", model_safetensors=save(trained().state_dict()), config_json=b"{}")
        with pytest.raises(CheckpointError, match=r"models/mine cannot be looked at: a link leads nowhere"):
            load("models/mine", config=ASK)
        assert not hub.log


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs to become somebody else")
def test_nor_is_what_belongs_to_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "models/mine").mkdir(parents=True)
    (tmp_path / "models").chmod(0o700)
    program = f"""
import os
from pathlib import Path
from vitlite.errors import CheckpointError
from vitlite.checkpoints.reader import exists
os.chdir({str(tmp_path)!r})
os.seteuid(65534)
try:
    print(exists(Path("models/mine")))
except CheckpointError as error:
    print(error)
"""
    open_to_all(tmp_path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "models/mine cannot be looked at: Permission denied.\n"
