"""Damaged files are named, folders and shards are found, and reading is safe and exact."""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files_made import IMAGES, TINY, flax, trained, written
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TIMM_SIZES
from safetensors.torch import save_file
from torch import Tensor

from vitlite import ViTConfig, load
from vitlite.checkpoints.convert import convert
from vitlite.checkpoints.reader import open_weights
from vitlite.errors import CheckpointError, ConfigError, ImageError, VitliteError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


def damage(path: Path) -> dict[str, bytes]:
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    return {
        "empty": b"",
        "cut short": whole[:-5],
        "longer": whole + b"12345",
        "a page of HTML": b"<!doctype html><html>Not found</html>",
        "an LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:aaaa\nsize 10\n",
        "a huge header": (1 << 62).to_bytes(8, "little") + whole[8:],
        "no JSON": whole[:8] + b"x" * (header % len(whole)) + whole[8 + header :],
        "zeros": bytes(len(whole)),
    }


@pytest.mark.parametrize("kind", ["empty", "cut short", "longer", "a page of HTML", "an LFS pointer", "a huge header",
                                  "no JSON", "zeros"])  # fmt: skip
@pytest.mark.parametrize("name", ["vit.safetensors", "vit.npz"])
def test_damaged_files(kind: str, name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors")
    if name == "vit.npz":
        np.savez(tmp_path / name, **{"embedding/kernel": np.zeros((8, 8, 3, 16), "f4")})
        path = tmp_path / name
    path.write_bytes(damage(path)[kind])
    with pytest.raises(CheckpointError, match=f"{name} is damaged or not a|{name}: The tensor names"):
        load(path, config=TINY)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_damaged_header_is_an_error_that_names_the_file(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    chance = random.Random(seed)
    path = written(tmp_path_factory.mktemp("damage") / "vit.safetensors")
    whole = bytearray(path.read_bytes())
    header = int.from_bytes(whole[:8], "little")
    for _ in range(chance.randint(1, 3)):
        whole[chance.randrange(8 + header)] = chance.randrange(256)
    path.write_bytes(whole)
    raised = []
    try:
        model = load(path, config=ViTConfig(**TINY.to_dict()))
    except VitliteError as error:
        raised.append(error)
    if raised:
        assert str(path) in str(raised[0])
    else:
        assert {k: x.shape for k, x in model.state_dict().items()} == {
            k: x.shape for k, x in trained().state_dict().items()
        }


def test_npz_of_objects_and_of_no_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{f"Transformer/encoderblock_0/{n}": np.array([{}], dtype=object) for n in (
        "LayerNorm_0/scale", "LayerNorm_2/scale", "MlpBlock_3/Dense_0/kernel")})  # fmt: skip
    with pytest.raises(CheckpointError, match=r"a.npz"):
        load(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("readme.txt", "no array")
    with pytest.raises(CheckpointError, match=r"b.npz is damaged or not a .npz file"):
        load(tmp_path / "b.npz")


def test_flipped_byte_in_npz_is_an_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **flax())
    whole = bytearray((tmp_path / "vit.npz").read_bytes())
    whole[whole.index(flax()["head/kernel"].tobytes()) + 5] ^= 1
    (tmp_path / "vit.npz").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"vit.npz"):
        load(tmp_path / "vit.npz")


def test_npz_needs_no_config(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **flax())
    model = load(tmp_path / "vit.npz")
    assert (model.config.heads, model.config.pre_logits, model.config.norm_eps) == (2, 8, 1e-6)
    assert model.config.image_size == 16
    assert torch.equal(model.head.weight, torch.from_numpy(flax()["head/kernel"]).T)


def test_shards(tmp_path: Path) -> None:
    state = trained().state_dict()
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in shards.items():
        save_file({name: state[name] for name in inside}, tmp_path / file)
    index = {"weight_map": {name: file for file, inside in shards.items() for name in inside}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = load(tmp_path, config=TINY)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert len(model.source.sha256) == 64
    save_file(state, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="more than one shard contains"):
        load(tmp_path, config=TINY)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"Cannot read .*b.safetensors: No such file"):
        load(tmp_path, config=TINY)
    index["weight_map"] = dict.fromkeys(names, "../a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"weight_map.* of a .safetensors file in the same folder, got '../a"):
        load(tmp_path, config=TINY)


def test_shards_that_lack_a_tensor_of_their_index(tmp_path: Path) -> None:
    """A head is where the number of classes is told: without one, this would be a model that has none."""
    state = trained().state_dict()
    names = sorted(state)
    save_file({name: state[name] for name in names if not name.startswith("head.")}, tmp_path / "a.safetensors")
    index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json lists the tensor head\.bias, which no shard contains"):
        load(tmp_path, config=TINY)


def test_single_shard_is_an_error(tmp_path: Path) -> None:
    """Without the head, which was in another, it was a network that gives features."""
    tensors = {name: tensor for name, tensor in trained().state_dict().items() if not name.startswith("head.")}
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    for place in (tmp_path, tmp_path / "model-00001-of-00002.safetensors"):
        with pytest.raises(CheckpointError, match=r"is only one of 2 shards of a model"):
            load(place, config=TINY)
    torch.save(tensors, tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(CheckpointError, match=r"is only one of 2 shards of a model"):
        convert(tmp_path / "pytorch_model-00001-of-00002.bin", tmp_path / "out.safetensors", "timm")
    (tmp_path / "pytorch_model-00001-of-00002.bin").unlink()
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    assert load(tmp_path, config=TINY.replace(num_classes=0)).config.num_classes == 0


def test_folder_of_a_training_run_is_an_error_that_names_its_models(tmp_path: Path) -> None:
    for name in ("best", "last"):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "model.safetensors")
    written(tmp_path / "state.safetensors")
    with pytest.raises(CheckpointError, match=f"Pass a folder inside it: {tmp_path / 'best'}, {tmp_path / 'last'}"):
        load(tmp_path, config=TINY)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Pass a folder with weights"):
        load(tmp_path, config=TINY)
    torch.save(trained().state_dict(), tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"a\.pth is a pickle, .* vitlite convert .*a\.pth OUT"):
        load(tmp_path, config=TINY)
    written(tmp_path / "any.safetensors")
    with pytest.raises(CheckpointError, match=r"Pass one of a\.pth, any\.safetensors\."):
        load(tmp_path, config=TINY)
    (tmp_path / "a.pth").unlink()
    assert load(tmp_path, config=TINY).source.path == tmp_path / "any.safetensors"
    written(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"Pass one of any\.safetensors, other\.safetensors\."):
        load(tmp_path, config=TINY)
    written(tmp_path / "model.safetensors")
    assert load(tmp_path, config=TINY).source.path == tmp_path / "model.safetensors"
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"notes.txt is not a weights file"):
        load(tmp_path / "notes.txt")


def test_weights_beside_the_usual_pickle_are_not_taken_for_it(tmp_path: Path) -> None:
    torch.save(trained().state_dict(), tmp_path / "pytorch_model.bin")
    written(tmp_path / "ema.safetensors")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        load(tmp_path, config=TINY)


def test_config_json_does_not_describe_a_file_with_a_name_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "num_attention_heads": 16}))
    with pytest.raises(ConfigError, match="do not determine image_size, heads"):
        load(written(tmp_path / "mine.safetensors"))


def test_broken_and_foreign_configs(tmp_path: Path) -> None:
    written(tmp_path / "model.safetensors")
    for text, said in (
        ("{", "is not a valid JSON file: Expecting property name"),
        ("[]", "is not a valid JSON file: the top level is not an object"),
        ('{"vitlite": {"config": [1]}}', "vitlite.config must be a JSON object, got [1]."),
        ('{"vitlite": {"config": {}, "preprocess": "none"}}', "vitlite.preprocess must be a JSON object"),
        ('{"vitlite": {}}', "The section `vitlite` of the file has no entry `config`."),
        ('{"model_type": 3}', "model_type must be a string, got 3."),
        ('{"model_type": "vit", "hidden_act": []}', "hidden_act must be a string, got []"),
        ('{"model_type": "vit", "hidden_act": "relu"}', "hidden_act is 'relu', but vitlite supports only gelu"),
        ('{"model_type": "vit", "layer_norm_eps": "small"}', "layer_norm_eps must be a number, got 'small'"),
        (
            '{"model_type": "vit", "image_size": [1, 2, 3]}',
            "image_size must be a size in pixels or [hei",
        ),
        ('{"architecture": null}', "timm's architecture None is not supported"),
        (
            '{"architecture": "vit_tiny_patch16_224", "global_pool": "prr"}',
            "global_pool must be token or avg or map, and",
        ),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError) as error:
            load(tmp_path, config=TINY)
        assert str(error.value).startswith(f"{tmp_path / 'config.json'}")
        assert said in str(error.value)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 32}))
    with pytest.raises(CheckpointError, match=r"dim is 16 in the tensors and 32 in config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert load(tmp_path, config=TINY).config.heads == 2


@pytest.mark.parametrize("wrong", [{"mean": 5}, {"crop_pct": 0}, {"crop_pct": "a"}, {"std": None}, {"std": [0.0]}])
def test_invalid_preprocessing_is_an_error_when_it_is_used(wrong: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path / "model.safetensors")
    right = {
        "input_size": [3, 16, 16],
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    }
    about = {
        "architecture": "vit_tiny_patch16_224",
        "model_args": {"num_heads": 2, "img_size": 16, "patch_size": 8, **TIMM_SIZES},
    }
    (tmp_path / "config.json").write_text(json.dumps(about | {"pretrained_cfg": right}))
    assert load(tmp_path).preprocess.transform.mean == (0.5,) * 3
    (tmp_path / "config.json").write_text(json.dumps(about | {"pretrained_cfg": right | wrong}))
    model = load(tmp_path)
    for same in (model, pickle.loads(pickle.dumps(model))):
        with pytest.raises(ImageError, match=rf"{tmp_path}: .*(preprocessing|{next(iter(wrong))})"):
            same.preprocess(torch.zeros(16, 16, 3))


def test_block_with_a_huge_number_is_an_error(tmp_path: Path) -> None:
    extra = {"blocks.1000000000000.norm1.weight": torch.ones(16)}
    path = written(tmp_path / "vit.safetensors", lambda state: state.update(extra))
    with pytest.raises(CheckpointError, match="1000000000000"):
        load(path, config=TINY)


def test_overwriting_the_file_does_not_change_the_model(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors")
    model = load(path, config=TINY)
    before = model(IMAGES)
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(model(IMAGES), before)
    path.unlink()
    assert torch.equal(model(IMAGES), before)
    if sys.platform == "linux":
        assert "vit.safetensors" not in Path("/proc/self/maps").read_text()
        open_files = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert not any("vit.safetensors" in name for name in open_files)


def test_tensors_own_their_memory_and_get_gradients(tmp_path: Path) -> None:
    model = load(written(tmp_path / "vit.safetensors"), config=TINY)
    for tensor in model.parameters():
        assert tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    model(IMAGES).sum().backward()
    assert model.cls_token.grad is not None


def test_a_known_file_is_not_scanned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "vit.safetensors")
    os.utime(path, (1, 1))
    load(path, config=TINY)
    scans: list[Tensor] = []
    monkeypatch.setattr("vitlite.checkpoints.build.is_finite", lambda values: not scans.append(values))
    load(path, config=TINY)
    assert not scans
    monkeypatch.setenv("VITLITE_VERIFY", "always")
    load(path, config=TINY)
    assert scans


def test_without_numpy(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **flax())
    path = written(tmp_path / "vit.safetensors")
    program = f"""
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")  # torch says once that it found no numpy
import torch, vitlite
try:
    vitlite.load({str(tmp_path / "vit.npz")!r})
except vitlite.VitliteError as error:
    print(error)
model = vitlite.load({str(path)!r}, config=vitlite.ViTConfig(**{TINY.to_dict()!r}))
before = model.embed(torch.ones(1, 3, 16, 16))
model.save({str(tmp_path / "saved")!r})
again = vitlite.load({str(tmp_path / "saved")!r}, num_classes=2, image_size=32)
assert torch.equal(vitlite.load({str(tmp_path / "saved")!r}).embed(torch.ones(1, 3, 16, 16)), before)
print(again(torch.ones(1, 3, 32, 32)).shape)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert "Reading an .npz file needs" in out.stdout
    assert "vitlite[images]" in out.stdout
    assert "torch.Size([1, 2])" in out.stdout


def test_open_weights_reads_values_on_demand(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors")
    with open_weights(path) as file:
        assert file.shapes["head.weight"] == (3, 16)
        assert torch.equal(file.entries["head.weight"].read(), trained().head.weight)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def test_same_number_of_patches_in_another_grid_is_resampled(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=TINY.replace(image_size=32))
    model = load(path, config=TINY.replace(image_size=32), image_size=(16, 64))
    assert model.source.report.resampled == {"pos_embed": ((1, 17, 16), (1, 17, 16))}
    assert "pos_embed" not in model.source.report.loaded
