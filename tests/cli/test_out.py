"""Commands never write over their inputs."""

import json
import os
import shutil
from pathlib import Path

import pytest
from commands import Run
from safetensors.torch import load_file, save_file


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_inputs_are_not_overwritten(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    mine, data = tmp_path / "mine", tmp_path / "data"
    shutil.copytree(model, mine)
    for split in ("train", "val"):
        for name in ("one", "two"):
            shutil.copytree(images, data / split / name)
    weights, photo = mine / "model.safetensors", data / "val/one/a.png"
    os.link(weights, tmp_path / "link.safetensors")
    train = ("train", data, "--epochs", 1, "--size", 16)
    before = contents(tmp_path)
    for words, out in (
        (("embed", images, "--model", mine), weights),
        (("embed", images, "--model", weights), tmp_path / "link.safetensors"),
        (("embed", images, "--model", "vit_nano_4", "--weights", weights), mine / "../mine/model.safetensors"),
        (("attention", photo, "--model", mine), photo),
        (("distances", data, "--model", mine), photo),
        ((*train, "--model", "vit_nano_4"), data),
        ((*train, "--model", "vit_nano_4"), data / "train"),
        (("eval", data, "--model", mine), data / "val/one"),
    ):
        code, _, err = run(*words, "--out", out)
        assert (code, str(out) in err) == (1, True), (words, err)
        assert contents(tmp_path) == before


def test_convert_does_not_overwrite_its_input_or_a_folder_of_others(run: Run, model: Path, tmp_path: Path) -> None:
    folder, weights = tmp_path / "other", tmp_path / "weights.safetensors"
    folder.mkdir()
    (folder / "config.json").write_text("not written by vitlite")
    shutil.copy(model / "model.safetensors", weights)
    before = contents(tmp_path)
    for words in (("convert", model, folder, "--to", "transformers"), ("convert", weights, weights, "--to", "timm")):
        assert run(*words)[0] == 1
        assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "words",
    [
        ("attention", "{photo}", "--model", "{model}", "--out", "none/a.png"),
        ("embed", "{photo}", "--model", "{model}", "--out", "none/a.npz"),
        ("export", "{model}", "--to", "torch", "--out", "none/a.pt2"),
    ],
    ids=lambda words: words[0],
)
def test_a_missing_folder_is_reported_before_the_model_runs(
    run: Run, model: Path, images: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("vitlite.cli.options.create_or_load", lambda *_, **__: pytest.fail("the model was opened"))
    code, _, err = run(*(word.format(photo=images / "a.png", model=model) for word in words))
    assert code == 1
    assert "there is no folder none" in err


def test_convert_does_not_overwrite_a_shard_of_its_input(run: Run, model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    parts = {name: f"model-0000{1 + (name > 'd')}-of-00002.safetensors" for name in tensors}
    folder = tmp_path / "parts"
    folder.mkdir()
    for file in set(parts.values()):
        save_file({name: tensors[name] for name in tensors if parts[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    (tmp_path / "link.safetensors").symlink_to(folder / "model-00002-of-00002.safetensors")
    before = contents(folder)
    for target in (folder / "model-00002-of-00002.safetensors", tmp_path / "link.safetensors"):
        assert run("convert", folder, target, "--to", "timm")[0] == 1
        assert contents(folder) == before
