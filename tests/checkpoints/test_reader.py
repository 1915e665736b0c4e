"""Damaged files are named, folders and shards are found, and reading is safe and exact."""

import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from files_made import ASK, IMAGES, TINY, flax, trained, written
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
    with pytest.raises(CheckpointError, match=f"{name} (cannot be read as|is)|{name}: The names"):
        load(path, config=ASK)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_damage_raises_anything_else(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
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
    with pytest.raises(CheckpointError, match=r"b.npz cannot be read as .npz: ValueError: a member is no .npy file"):
        load(tmp_path / "b.npz")


def test_a_flipped_byte_in_an_npz_is_noticed(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **flax())
    whole = bytearray((tmp_path / "vit.npz").read_bytes())
    whole[whole.index(flax()["head/kernel"].tobytes()) + 5] ^= 1
    (tmp_path / "vit.npz").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"vit.npz"):
        load(tmp_path / "vit.npz")


def test_an_npz_tells_everything(tmp_path: Path) -> None:
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
    model = load(tmp_path, config=ASK)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert len(model.source.sha256) == 64
    save_file(state, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="more than one shard has"):
        load(tmp_path, config=ASK)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b.safetensors cannot be read"):
        load(tmp_path, config=ASK)
    index["weight_map"] = dict.fromkeys(names, "../a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"weight_map.* of a .safetensors file beside it, got '../a"):
        load(tmp_path, config=ASK)


def test_shards_without_what_their_index_names_are_no_other_model(tmp_path: Path) -> None:
    """A head is where the number of classes is told: without one, this would be a model that has none."""
    state = trained().state_dict()
    names = sorted(state)
    save_file({name: state[name] for name in names if not name.startswith("head.")}, tmp_path / "a.safetensors")
    index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"index\.json says that a\.safetensors has head\.bias, and no shard has it"
    ):
        load(tmp_path, config=ASK)


def test_one_of_several_shards_is_no_network(tmp_path: Path) -> None:
    """Without the head, which was in another, it was a network that gives features."""
    tensors = {name: tensor for name, tensor in trained().state_dict().items() if not name.startswith("head.")}
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    for place in (tmp_path, tmp_path / "model-00001-of-00002.safetensors"):
        with pytest.raises(CheckpointError, match=r"is one of 2 shards, and without the others another network"):
            load(place, config=ASK)
    torch.save(tensors, tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(CheckpointError, match=r"is one of 2 shards, and without the others another network"):
        convert(tmp_path / "pytorch_model-00001-of-00002.bin", tmp_path / "out.safetensors", "timm")
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    assert load(tmp_path, config=ASK).config.num_classes == 0


def test_the_folder_of_a_run_names_the_models_in_it(tmp_path: Path) -> None:
    for name in ("best", "last"):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "model.safetensors")
    meant = f"Did you mean a folder in it: {tmp_path / 'best'}, {tmp_path / 'last'}?"
    state = written(tmp_path / "state.safetensors")  # as long as it is kept
    for _ in range(2):
        with pytest.raises(CheckpointError) as error:
            load(tmp_path, config=ASK)
        assert str(error.value).endswith(meant)
        state.unlink(missing_ok=True)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it has nothing"):
        load(tmp_path, config=ASK)
    torch.save(trained().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has pytorch_model.bin. vitlite unpickles nothing here; first: vitlite"):
        load(tmp_path, config=ASK)
    with pytest.raises(CheckpointError, match="is a pickle, which can run code"):
        load(tmp_path / "pytorch_model.bin", config=ASK)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "a.pth")
    written(tmp_path / "any.safetensors")
    assert load(tmp_path, config=ASK).source.path == tmp_path / "any.safetensors"
    written(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"a.pth, any.safetensors, cache, other.safetensors"):
        load(tmp_path, config=ASK)
    written(tmp_path / "model.safetensors")
    assert load(tmp_path, config=ASK).source.path == tmp_path / "model.safetensors"
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"notes.txt is no weights file that vitlite reads"):
        load(tmp_path / "notes.txt")


def test_a_config_beside_another_file_does_not_speak_for_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "num_attention_heads": 16}))
    with pytest.raises(ConfigError, match="do not tell image_size, heads"):
        load(written(tmp_path / "mine.safetensors"))


def test_broken_and_foreign_configs(tmp_path: Path) -> None:
    written(tmp_path / "model.safetensors")
    for text, said in (
        ("{", "cannot be read as JSON: Expecting property name"),
        ("[]", "it must be a table of at most 1000000, got []"),
        ('{"vitlite": {"config": [1]}}', "vitlite.config must be a table of at most 100, got [1]."),
        ('{"vitlite": {"config": {}, "preprocess": "none"}}', "vitlite.preprocess must be a table"),
        ('{"vitlite": {}}', "vitlite must be a table with config, got {}."),
        ('{"model_type": 3}', "model_type must be a text of at most 200 letters, got 3."),
        ('{"model_type": "vit", "hidden_act": []}', "hidden_act must be a text of at most 200 letters or null"),
        ('{"model_type": "vit", "hidden_act": "relu"}', "hidden_act is 'relu'; vitlite computes gelu"),
        ('{"model_type": "vit", "layer_norm_eps": "small"}', "layer_norm_eps must be a number from 0 to 1 or null"),
        ('{"model_type": "vit", "image_size": [1, 2, 3]}', "image_size must be a whole number from 1 to 100000 or a"),
        ('{"architecture": null}', "architecture must be a text of at most 200 letters, got None."),
        ('{"architecture": "vit_tiny_patch16_224", "global_pool": "prr"}', "global_pool is prr; vitlite computes"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError) as error:
            load(tmp_path, config=ASK)
        assert str(error.value).startswith(f"{tmp_path / 'config.json'}")
        assert said in str(error.value)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 32}))
    with pytest.raises(CheckpointError, match=r"dim: the tensors say 16, its config.json says 32"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert load(tmp_path, config=ASK).config.heads == 2


@pytest.mark.parametrize("wrong", [{"mean": 5}, {"crop_pct": 0}, {"crop_pct": "a"}, {"std": None}, {"std": [0.0]}])
def test_preprocessing_that_makes_no_sense(wrong: dict[str, Any], tmp_path: Path) -> None:
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
        with pytest.raises(ImageError, match=rf"{tmp_path}: .*(preprocessing|{next(iter(wrong))})") as error:
            same.preprocess(torch.zeros(16, 16, 3))
        assert "TransformConfig" not in error.value.for_command_line() or "std" in str(error.value)


def test_a_block_with_a_huge_number_is_one_that_is_too_many(tmp_path: Path) -> None:
    extra = {"blocks.1000000000000.norm1.weight": torch.ones(16)}
    path = written(tmp_path / "vit.safetensors", lambda state: state.update(extra))
    with pytest.raises(CheckpointError, match="1000000000000"):
        load(path, config=ASK)


def test_the_file_may_be_overwritten_and_deleted(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors")
    model = load(path, config=ASK)
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


def _write_again(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(bytes(4))


def _replace(path: Path) -> None:
    shutil.copy(path, path.with_name("other"))
    path.with_name("other").replace(path)


@pytest.mark.parametrize("change", [_write_again, _replace, Path.unlink])
@pytest.mark.parametrize("which", ["model.safetensors.index.json", "1.safetensors"])
def test_what_changes_while_it_is_read_is_not_taken(change: Callable[[Path], None], which: str, tmp_path: Path) -> None:
    """It would be of two files: a tensor of the first, and the next of the second."""
    tensors = trained().state_dict()
    save_file(tensors, tmp_path / "1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "1.safetensors")}))

    def read_and_change() -> None:
        with open_weights(index) as file:
            file.read("head.weight")
            change(tmp_path / which)
            file.read("head.bias")

    with pytest.raises(CheckpointError, match=f"{which} was changed while it was read"):
        read_and_change()


def test_a_backup_that_links_a_file_while_it_is_read_changes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors")
    with open_weights(path) as file:
        os.link(path, tmp_path / "backup")
        assert torch.equal(file.read("head.weight"), trained().head.weight)


def test_a_file_that_is_written_all_the_time_is_whole_or_refused(tmp_path: Path) -> None:
    """By somebody who copies two fine-tunes to one place in turn, a piece at a time."""
    config = TINY.replace(dim=256, heads=4, mlp_dim=1024, depth=6)
    states = [trained(config, seed).state_dict() for seed in (0, 1)]
    contents = [safetensors.torch.save(state) for state in states]
    by_hash = {hashlib.sha256(content).hexdigest(): state for content, state in zip(contents, states, strict=True)}
    path = tmp_path / "vit.safetensors"
    path.write_bytes(contents[0])
    over = threading.Event()

    def write() -> None:
        with path.open("r+b", buffering=0) as file:
            while not over.is_set():
                for content in reversed(contents):
                    file.seek(0)
                    for start in range(0, len(content), 1 << 20):
                        file.write(content[start : start + (1 << 20)])
                        time.sleep(0.001)
                    over.wait(0.1)

    writer = threading.Thread(target=write)
    writer.start()

    def load_one() -> None:
        model = load(path, config=ASK.replace(dim=256, heads=4))
        wanted = by_hash[model.source.sha256]
        assert all(torch.equal(wanted[name], tensor) for name, tensor in model.state_dict().items())

    try:
        for _ in range(40):
            with suppress(CheckpointError):
                load_one()
    finally:
        over.set()
        writer.join()
    load_one()


def test_tensors_own_their_memory_and_learn(tmp_path: Path) -> None:
    model = load(written(tmp_path / "vit.safetensors"), config=ASK)
    for tensor in model.parameters():
        assert tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    model(IMAGES).sum().backward()
    assert model.cls_token.grad is not None


def test_a_known_file_is_not_scanned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "vit.safetensors")
    os.utime(path, (1, 1))
    load(path, config=ASK)
    scans: list[Tensor] = []
    monkeypatch.setattr("vitlite.checkpoints.build.is_finite", lambda values: not scans.append(values))
    load(path, config=ASK)
    assert not scans
    monkeypatch.setenv("VITLITE_VERIFY", "always")
    load(path, config=ASK)
    assert scans


def test_everything_works_without_numpy(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **flax())
    program = f"""
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")  # torch says once that it found no numpy
import torch, vitlite
model = vitlite.load({str(tmp_path / "vit.npz")!r})
before = model.embed(torch.ones(1, 3, 16, 16))
model.save({str(tmp_path / "saved")!r})
again = vitlite.load({str(tmp_path / "saved")!r}, num_classes=2, image_size=32)
assert torch.equal(vitlite.load({str(tmp_path / "saved")!r}).embed(torch.ones(1, 3, 16, 16)), before)
print(again(torch.ones(1, 3, 32, 32)).shape)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert "torch.Size([1, 2])" in out.stdout


def test_open_checkpoint_reads_nothing_but_headers(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors")
    with open_weights(path) as file:
        assert file.shapes["head.weight"] == (3, 16)
        assert torch.equal(file.entries["head.weight"].read(), trained().head.weight)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def test_the_same_number_of_patches_in_another_order_is_resampled_and_reported(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", config=TINY.replace(image_size=32))
    model = load(path, config=ASK.replace(image_size=32), image_size=(16, 64))
    assert model.source.report.resampled == {"pos_embed": ((1, 17, 16), (1, 17, 16))}
    assert "pos_embed" not in model.source.report.loaded
