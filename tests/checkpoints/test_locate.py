"""A repository whose weights lie in shards is fetched whole, and each shard is compared with a hash of its own."""

import json
from pathlib import Path

import pytest
import torch
from files_made import IMAGES, TINY, trained
from safetensors.torch import save
from server import Hub

from vitlite import load
from vitlite.checkpoints.reader import locate
from vitlite.errors import CheckpointError, DownloadError

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
        found = load(REPO, config=TINY)
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
        return load(REPO, config=TINY).head.bias[0].item()

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
        assert load(REPO, config=TINY).config.num_classes == 3
        hub.publish(REPO, model_safetensors=weights, adapter_config_json=b"{}")
        with pytest.raises(CheckpointError, match=r"contains an adapter \(adapter_config\.json\)"):
            load(REPO, config=TINY)


def test_broken_link_is_not_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository of the same name would be another model."""
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    Path("models/mine").symlink_to("/nowhere/model")
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.publish("models/mine", model_safetensors=save(trained().state_dict()), config_json=b"{}")
        with pytest.raises(CheckpointError, match="models/mine is not a weights file"):
            load("models/mine", config=TINY)
        assert not hub.log


@pytest.mark.parametrize("source", ["nothing", "a/b/c", "models/vit.safetensors", Path("a/b")])
def test_missing_path_is_an_error(source: str | Path) -> None:
    why = "Pass an existing path" if source == "nothing" else "Check the path"
    with pytest.raises(CheckpointError, match=rf"There is no file or folder {source}\. {why}"):
        load(source)


@pytest.mark.parametrize(
    "source", ["./run", "../run/best", "/none/best", "~none/best/", "a/b/c", "runs/best", "owner/vit.safetensors"]
)
def test_what_can_only_be_a_path_is_not_asked_for_at_the_hub(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(CheckpointError, match=r"There is no file or folder .*\. Check the path\."):
            load(source)
        assert not hub.log


def test_a_folder_that_is_gone_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    text = r"^There is no file or folder run/best, and the Hub cannot be reached: Cannot download .* of run/best@"
    with pytest.raises(DownloadError, match=text) as error:
        load("run/best")
    assert len(str(error.value)) < 400
