"""`vitlite list` and `vitlite info`."""

import json
import shutil
from pathlib import Path

import pytest
from commands import Run
from server import Hub

import vitlite
from vitlite.zoo import registry


def test_list(run: Run) -> None:
    code, out, _ = run("list", "vit_small_8")
    assert code == 0
    assert out == (
        "name              top-1     licence   size  GMACs   image\n"
        "vit_small_8.dino      -  apache-2.0  87 MB   22.4  224 px\n"
    )
    names = [row["name"] for row in json.loads(run("list", "--json")[1])]
    assert names == sorted(registry.RECORDS, key=names.index)
    assert len(names) == len(registry.RECORDS)
    assert "vit_base_16 means vit_base_16.augreg2_in21k_ft_in1k" in run("list", "vit_base_16*")[1]
    code, _, err = run("list", "vit_smoll")
    assert code == 1
    assert "No model matches 'vit_smoll'. Did you mean vit_small_" in err


@pytest.mark.parametrize("command", ["list", "info"])
def test_parts_in_another_order_are_understood(run: Run, command: str) -> None:
    for name, meant in (("deit_tiny_16", "vit_tiny_16.deit_fb_in1k"), ("dino-base-16", "vit_base_16.dino")):
        code, _, err = run(command, name)
        assert code == 1
        assert f"Did you mean {meant}" in err


def test_info(run: Run) -> None:
    code, out, _ = run("info", "deit_tiny_patch16_224.fb_in1k")
    assert code == 0
    assert out.startswith("vit_tiny_16.deit_fb_in1k\n")
    assert "224 x 224 px, resized for a centre crop of 0.9, bicubic, mean 0.485 0.456 0.406" in out
    *_, last = out.splitlines()
    assert last.split() == ["all", "5.7", "M", "1.254"]
    fields = json.loads(run("info", "vit_base_16", "--json")[1])
    assert fields["params"] == 86567656
    assert fields["config"]["depth"] == 12
    assert sum(layer["params"] for layer in fields["layers"]) == fields["params"]
    assert "registers=4" in run("info", "vit_small_14.reg4_dinov2_lvd142m_518")[1]


def test_info_of_what_is_too_large_for_most_machines(run: Run) -> None:
    code, out, _ = run("info", "vit_7b_patch16_dinov3.lvd1689m")
    assert code == 0
    assert out.startswith("vit_7b_16.dinov3_lvd1689m_256\n")
    assert "licence      dinov3-license\n" in out
    assert "positions=none, rope={'temperature': 100.0, 'unit': 'image'" in out
    assert "size         6.7 G parameters, " in out
    assert "note         27 GB; " in out


def names(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines()[1:] if not line.startswith("*")]


def test_list_by_what_models_are_good_for(run: Run) -> None:
    assert run("list", "DINO", "small", "MIT")[0] == 1
    found = names(run("list", "DINO", "small", "Apache")[1])
    assert "vit_small_16.dino" in found
    assert all("small" in name and "dino" in name for name in found)
    features = names(run("list", "features", "without", "labels")[1])
    assert "vit_base_16.mae" in features
    assert "vit_base_16.augreg2_in21k_ft_in1k" not in features
    free = names(run("list", "free")[1])
    licences = {registry.RECORDS[name].license for name in free}
    assert licences == {"apache-2.0", "mit"}
    assert names(run("list", "VIT_BASE_16")[1]) == names(run("list", "vit_base_16")[1])


@pytest.mark.parametrize(("sort", "key"), [("top1", -1), ("time", 1), ("size", 1)])
def test_list_sorted(run: Run, sort: str, key: int) -> None:
    records = [registry.RECORDS[name] for name in names(run("list", "classification", "--sort", sort)[1])]
    values = {"top1": [r.top1 or 0 for r in records], "time": [r.gmacs for r in records]}.get(
        sort, [r.params for r in records]
    )
    assert values == sorted(values, key=lambda value: key * value)
    assert len(records) > 100


def test_info_of_a_folder_and_a_file(run: Run, model: Path, tmp_path: Path) -> None:
    code, out, _ = run("info", model)
    assert code == 0
    assert out.startswith(f"{model}\ncomes from  {model / 'model.safetensors'}\n")
    assert "classes     3 (one, two, or more, three)\n" in out
    assert "network     dim 32, depth 2, heads 2, mlp_dim 64, patch 8, pool cls\n" in out
    assert "images      16 x 16 px, resized to 16 x 16, bilinear, mean 0.5 0.5 0.5, std 0.5 0.5 0.5\n" in out
    fields = json.loads(run("info", model / "model.safetensors", "--json")[1])
    assert fields["config"]["image_size"] == 16
    assert fields["labels"] == ["one", "two, or more", "three"]
    assert fields["sha256"] == vitlite.load(model).source.sha256
    assert sum(layer["params"] for layer in fields["layers"]) == fields["params"]
    shutil.copy(model / "model.safetensors", tmp_path / "bare.safetensors")
    code, _, err = run("info", tmp_path / "bare.safetensors")
    assert code == 1
    assert "The tensors do not determine image_size, heads" in err


def test_info_of_a_file_that_does_not_tell_all(run: Run, tmp_path: Path) -> None:
    path = shutil.copy(registry.DATA / "vit_nano_4.cifar10.safetensors", tmp_path / "bare.safetensors")
    code, _, err = run("info", path)
    assert code == 1
    assert "Checkpoints with the same tensor names and shapes: vit_nano_4.cifar10." in err
    code, out, _ = run("info", "vit_nano_4.cifar10", "--weights", path)
    assert code == 0
    assert out.startswith(f"{path}\ncomes from  {path}\n")
    assert "classes     10 (airplane, automobile, bird, ...)\n" in out
    assert run("info", "vit_nano_4.cifar10", "--weights", "")[0] == 1  # a mistake, not a wish for the model's own


def test_info_of_a_repository(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Hub() as hub:
        weights, config = (model / "model.safetensors").read_bytes(), (model / "config.json").read_bytes()
        hub.publish("somebody/vit", model_safetensors=weights, config_json=config)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        code, out, _ = run("info", "somebody/vit")
    assert code == 0
    assert "comes from  https://huggingface.co/somebody/vit\n" in out
    assert "classes     3 (one," in out
