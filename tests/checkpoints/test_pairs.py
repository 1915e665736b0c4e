"""Weights and the JSON beside them: of a process that ends in the middle, the old model or the new, and never a mix."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kills import program
from models import IMAGES, TRANSFORM, tiny_model
from peers import transformers
from safetensors.torch import load_file, save_file

from vitlite import ViT, create, load
from vitlite.checkpoints.convert import convert
from vitlite.errors import CheckpointError
from vitlite.images import Preprocess
from vitlite.storage import lock

MODELS = """
import os, shutil, sys
from dataclasses import replace
from pathlib import Path
import torch
from kills import kills, small_files
from models import IMAGES, TRANSFORM, tiny_model
import vitlite
from vitlite.checkpoints.convert import convert
from vitlite.errors import CheckpointError
from vitlite.images import Preprocess

old, new = tiny_model(), tiny_model(norm_eps=1e-2, num_classes=4)
new.labels = tuple("abcd")
down = replace(TRANSFORM, margin="down")
old.preprocess = Preprocess(down, old)
new.preprocess = Preprocess(replace(down, mean=(0.1,) * 3), new)
root, to = Path(sys.argv[1]), sys.argv[2]
for name, model in (("old", old), ("new", new)):
    model.save(root / f"{name} source")
    convert(root / f"{name} source", root / name, to)
folder = root / "folder"

def begin(before):
    shutil.rmtree(folder, ignore_errors=True)
    if before:
        shutil.copytree(root / "old", folder)

def write():
    if to == "vitlite":
        new.save(folder)
    else:
        convert(root / "new source", folder, to)

def all_of(folder):
    model = vitlite.load(folder)
    return model.config, tuple(model.labels), model.preprocess.transform, model(IMAGES).tolist()

known = {name: all_of(root / name) for name in ("old", "new")}

def is_now():
    found = all_of(folder)
    return next((name for name, content in known.items() if content == found), "a mix")
"""
KILLED = """
for before in (True, False):
    begin(before)
    for step in kills(write):
        weights = (folder / "model.safetensors").exists()
        print(is_now() if before or weights else "nothing", end=" ")
        write()
        assert is_now() == "new"
        assert sorted(os.listdir(folder)) == sorted(os.listdir(root / "new")), os.listdir(folder)
        begin(before)
    print()
"""


@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize("to", ["vitlite", "transformers"])
def test_killed_at_any_step(tmp_path: Path, to: str) -> None:
    """And writing again repairs all, and takes away what was left."""
    over_old, anew = program(MODELS + KILLED, tmp_path, to).splitlines()
    for line, first in ((over_old, "old"), (anew, "nothing")):
        found = line.split()
        assert set(found) == {first, "new"}, line
        assert found == sorted(found, key=[first, "new"].index), "what is new stays"
        assert found.count("new") > 3, "also between the weights and what describes them"


FULL = """
begin(True)
weights = (folder / "model.safetensors").stat().st_size
there = {file.name: file.read_bytes() for file in folder.iterdir()}
for size in small_files(write, [0, 1, 300, weights // 2, weights - 1]):
    assert is_now() == "old"
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == there
"""


@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize("to", ["vitlite", "transformers"])
def test_a_full_disk_at_any_moment(tmp_path: Path, to: str) -> None:
    said = program(MODELS + FULL, tmp_path, to).splitlines()
    assert len(said) == 5
    for line in said:
        assert line == (
            f"CheckpointError: Cannot write {tmp_path / 'folder'}: File too large. What was there is still there. Make "
            "room, and start again."
        )


KILLED_THEN_FULL = """
weights = (root / "old source" / "model.safetensors").stat().st_size
begin(True)
for step in kills(write):
    before = is_now()
    for size in small_files(lambda: old.save(folder), [0, 600, weights - 1]):
        assert is_now() == before
    print(before)
    assert all(len(file.suffix) < 33 for file in folder.iterdir()), os.listdir(folder)
    begin(True)
"""


@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize("to", ["vitlite", "transformers"])
def test_killed_and_then_a_full_disk(tmp_path: Path, to: str) -> None:
    """What the killed process left stays whole where the next one cannot write."""
    said = program(MODELS + KILLED_THEN_FULL, tmp_path, to).splitlines()
    assert {line for line in said if not line.startswith("CheckpointError: Cannot write")} == {"old", "new"}


@pytest.fixture
def two(tmp_path: Path) -> tuple[ViT, ViT]:
    """Models of the same shape, in the folders one and two, that another config.json would make others."""
    one, two = tiny_model(), tiny_model(norm_eps=1e-2)
    one.save(tmp_path / "one")
    two.save(tmp_path / "two")
    return one, two


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_of_two_folders_one_file_each(two: tuple[ViT, ViT], tmp_path: Path, name: str) -> None:
    shutil.copy(tmp_path / "two" / name, tmp_path / "one" / name)
    with pytest.raises(CheckpointError, match=r"config\.json was written for other weights than those beside it: one"):
        load(tmp_path / "one")
    with pytest.raises(CheckpointError, match="written for other weights"):
        convert(tmp_path / "one", tmp_path / "three", "transformers")
    two[0].save(tmp_path / "one")
    assert torch.equal(load(tmp_path / "one")(IMAGES), two[0](IMAGES))


def test_weights_are_not_replaced_alone(two: tuple[ViT, ViT], tmp_path: Path) -> None:
    before = (tmp_path / "two/model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"belongs to the config\.json beside it.*Name another file, or a folder"):
        convert(tmp_path / "one", tmp_path / "two/model.safetensors", "timm")
    assert (tmp_path / "two/model.safetensors").read_bytes() == before
    convert(tmp_path / "one", tmp_path / "two/other.safetensors", "timm")


def test_pictures_of_other_weights(tmp_path: Path) -> None:
    model = tiny_model()
    model.preprocess = Preprocess(replace(TRANSFORM, margin="down"), model)
    for name in ("one", "two"):
        model.save(tmp_path / name)
        convert(tmp_path / name, tmp_path / f"{name} theirs", "transformers")
        model.labels = ("x", "y", "z")
    shutil.copy(tmp_path / "one theirs/preprocessor_config.json", tmp_path / "two theirs")
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json was written for other weights"):
        load(tmp_path / "two theirs")


def test_files_without_a_mark_stay_loadable(two: tuple[ViT, ViT], tmp_path: Path) -> None:
    """Those of an older vitlite, and those of somebody who keeps one of the two by hand."""
    tensors, config = load_file(tmp_path / "one/model.safetensors"), tmp_path / "one/config.json"
    content = json.loads(config.read_text())
    del content["vitlite_pair"]
    config.write_text(json.dumps(content))
    assert torch.equal(load(tmp_path / "one")(IMAGES), two[0](IMAGES))
    save_file(tensors, tmp_path / "one/model.safetensors")
    assert torch.equal(load(tmp_path / "one")(IMAGES), two[0](IMAGES))
    shutil.copy(tmp_path / "two/config.json", config)
    with pytest.raises(CheckpointError, match=r"bear its mark, vitlite_pair, and those beside it bear none"):
        load(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"has model.safetensors, config.json, which vitlite did not write"):
        two[0].save(tmp_path / "one")
    content = json.loads((tmp_path / "two/config.json").read_text())
    content["vitlite"]["labels"] = ["new", "names", "by hand"]
    (tmp_path / "two/config.json").write_text(json.dumps(content))
    assert load(tmp_path / "two").labels == ("new", "names", "by hand")


CHANGED: dict[str, Callable[[dict[str, Any]], Any]] = {  # in what timm reads alone
    "label_names": lambda config: config.update(label_names=["my", "own", "names"]),
    "pretrained_cfg": lambda config: config["pretrained_cfg"].update(mean=[0.1, 0.2, 0.3]),
    "global_pool": lambda config: config.update(global_pool="avg"),
    "model_args": lambda config: config["model_args"].update(num_heads=1),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_was_changed_for_timm_alone_is_no_answer_of_ours(name: str, tmp_path: Path) -> None:
    """transformers writes the file anew, with words of its own beside: only where it says otherwise is it refused."""
    model = tiny_model()
    model.labels = ("ant", "bee", "cow")
    model.save(tmp_path)
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert "transformers_version" in config
    assert load(tmp_path).labels == ("ant", "bee", "cow")
    CHANGED[name](config)
    file.write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=rf"config.json: its {name} was changed .*, which timm reads, and its vitl"
    ):
        load(tmp_path)
    del config["vitlite"]
    file.write_text(json.dumps(config))
    if name == "label_names":
        assert load(tmp_path).labels == ("my", "own", "names")


def test_weights_that_a_script_wrote_anew_are_asked_about(tmp_path: Path) -> None:
    """Averaged, say. timm's words beside ours do not say all: how positions are stretched, say."""
    model = tiny_model(resample="torchvision")
    model.labels = None
    model.save(tmp_path)
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"bear its mark, vitlite_pair, .*take vitlite_pair out of it"):
        load(tmp_path)
    config = tmp_path / "config.json"
    content = json.loads(config.read_text())
    assert "architecture" in content
    del content["vitlite_pair"]
    config.write_text(json.dumps(content))
    again = load(tmp_path)
    assert (again.config, again.labels) == (model.config, None)


@pytest.mark.parametrize("pair", ["../two/x", "", "0" * 31, "\n"])
def test_a_mark_that_is_none(two: tuple[ViT, ViT], tmp_path: Path, pair: str) -> None:
    tensors = load_file(tmp_path / "one/model.safetensors")
    save_file(tensors, tmp_path / "one/model.safetensors", {"vitlite_pair": pair})
    shutil.copy(tmp_path / "two/config.json", tmp_path / "two/x")
    with pytest.raises(CheckpointError, match="written for other weights"):
        load(tmp_path / "one")


def test_what_another_program_saved_from_ours_has_its_own_labels_and_stays(tmp_path: Path) -> None:
    """transformers writes what it does not know, such as our words, back beside its own."""
    labels = [f"mine{number}" for number in range(10)]
    create("vit_nano_4.cifar10").save(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"label_names": labels}))
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors")
    assert load(tmp_path).labels == tuple(labels)
    with pytest.raises(CheckpointError, match=r"has model.safetensors, config.json, which vitlite did not write"):
        tiny_model().save(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin"])
def test_weights_of_another_program_beside_ours(name: str, tmp_path: Path) -> None:
    """Its config.json keeps our mark: ours are not taken for what it describes."""
    model = tiny_model()
    model.save(tmp_path)
    (tmp_path / name).write_bytes(b"{}")
    assert load(tmp_path).labels == model.labels
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("ant", "new"))
    there = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=rf"has model\.safetensors, which vitlite wrote, and {name}, and its con"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"which vitlite did not write\. What is there stays"):
        tiny_model().save(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == there
    (tmp_path / name).unlink()
    assert load(tmp_path).labels == ("new", "bee", "cow")
    tiny_model().save(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_a_link_that_leads_nowhere_is_no_file_that_is_absent(name: str, tmp_path: Path) -> None:
    """Without its config.json a fine-tune would be taken for the checkpoint that it is given for."""
    tiny_model().save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "model", "transformers", margin="down")
    (tmp_path / "model" / name).unlink(missing_ok=True)
    (tmp_path / "model" / name).symlink_to("/nowhere/blob")
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: it is a link that leads nowhere"):
        load(tmp_path / "model")
    with pytest.raises(CheckpointError, match=f"{name} is no file, and stands where one is to be written"):
        tiny_model().save(tmp_path / "model")


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_somebodys_preprocessing_stays(tmp_path: Path, name: str) -> None:
    tiny_model().save(tmp_path)
    (tmp_path / name).write_text('{"crop_size": 224}')
    with pytest.raises(CheckpointError, match=rf"has {name}, which vitlite did not write"):
        tiny_model().save(tmp_path)
    assert (tmp_path / name).read_text() == '{"crop_size": 224}'


@pytest.mark.skipif(os.name == "nt", reason="has no modes")
def test_what_was_private_stays_so(tmp_path: Path) -> None:
    tiny_model().save(tmp_path)
    for file in tmp_path.iterdir():
        file.chmod(0o600)
    tiny_model(norm_eps=1e-2).save(tmp_path)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


def test_what_only_looks_begun_stays(tmp_path: Path) -> None:
    mine = {"config.json.backup": "{}", f"config.json.{'0' * 32}": "{}", f"config.json.{'a' * 32}": "no JSON"}
    model = tiny_model()
    model.save(tmp_path)
    for name, content in mine.items():
        (tmp_path / name).write_text(content)
    model.save(tmp_path)
    assert {*os.listdir(tmp_path)} == {"config.json", "model.safetensors", *mine}


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    model = tiny_model()
    model.save(tmp_path)
    with lock(tmp_path / "model.safetensors.lock", timeout=0):
        with pytest.raises(CheckpointError, match=r"Another process is writing .*\. Wait for it\."):
            model.save(tmp_path)
        assert load(tmp_path).config == model.config
    model.save(tmp_path)


def test_saved_where_it_was_loaded_from(tmp_path: Path) -> None:
    tiny_model().save(tmp_path)
    model = load(tmp_path)
    with torch.no_grad():
        model.head.bias.add_(1)
    model.preprocess = Preprocess(model.preprocess.transform, model)
    model.save(tmp_path)
    assert torch.equal(load(tmp_path)(IMAGES), model(IMAGES))
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
