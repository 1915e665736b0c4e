"""`vitlite convert`."""

import json
from pathlib import Path

import pytest
import torch
from commands import Run
from peers import transformers

import vitlite


def test_convert(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("convert", model, tmp_path / "there", "--to", "transformers")
    assert (code, out, err) == (0, f"wrote {tmp_path / 'there'}\n", "")
    assert json.loads((tmp_path / "there" / "config.json").read_text())["model_type"] == "vit"
    assert run("convert", model, tmp_path / "back", "--to", "vitlite", "--like", "nothing")[0] == 1
    assert run("convert", model, tmp_path / "back")[0] == 2
    assert "does not write pickles" in run("convert", model, tmp_path / "back.pth", "--to", "timm")[2]
    monkeypatch.setenv("HOME", str(model.parent))
    assert run("convert", f"~/{model.name}", tmp_path / "again.safetensors", "--to", "timm")[0] == 0
    for name in ("none.pth", "none"):
        assert f"no file or folder {name}." in run("convert", name, tmp_path / "back", "--to", "timm")[2]
    assert "vit_nano_4 is a model name" in run("convert", "vit_nano_4", tmp_path / "back", "--to", "timm")[2]


def test_like_brings_labels_and_preprocessing(run: Run, shared: Path, tmp_path: Path) -> None:
    """timm opens the folder, and by way of timm transformers' pipeline: all three say the same of a photo."""
    file, photo = shared / "weights" / "deit_tiny_16.timm.safetensors", shared / "photos" / "chelsea.png"
    code, _, err = run("convert", file, tmp_path / "deit", "--to", "timm", "--like", "vit_tiny_16.deit_fb_in1k")
    assert (code, err) == (0, "")
    (label, index, score), *_ = vitlite.load(tmp_path / "deit").predict(photo)
    assert (label, index) == ("Egyptian cat", 285)
    theirs = transformers.pipeline("image-classification", model=str(tmp_path / "deit"))(str(photo))[0]
    assert theirs == {"label": label, "score": pytest.approx(score, abs=1e-4)}
    code, _, err = run("convert", file, tmp_path / "hf", "--to", "transformers", "--like", "vit_tiny_16.deit_fb_in1k")
    assert code == 1
    assert "convert to timm, whose files transformers can load if timm is installed" in err
    assert not (tmp_path / "hf").exists()


def test_margin(run: Run, tmp_path: Path) -> None:
    vitlite.create("vit_nano_4.cifar10", image_size=64).save(tmp_path / "ours")
    words = ("convert", tmp_path / "ours", tmp_path / "hf", "--to", "transformers")
    assert vitlite.load(tmp_path / "ours").preprocess.transform.margin == "nearest"
    refused = run(*words)
    code, out, err = run(*words, "--margin", "down")
    assert (code, err) == (0, "")
    assert "half of an odd margin is rounded down, so the crop of some images moves by a pixel" in out
    assert vitlite.load(tmp_path / "hf").preprocess.transform.margin == "down"
    assert type(transformers.AutoImageProcessor.from_pretrained(tmp_path / "hf")).__name__.endswith("ImageProcessor")
    assert refused[0] == 1


def test_file_has_the_tensors_alone(run: Run, model: Path, tmp_path: Path) -> None:
    out = run("convert", model, tmp_path / "x.safetensors", "--to", "timm")[1]
    assert out == f"wrote {tmp_path / 'x.safetensors'}: only the tensors, without config.json\n"
    code, _, err = run("convert", model, tmp_path / "y.safetensors", "--to", "timm", "--margin", "nearest")
    assert code == 1
    assert "A .safetensors file contains neither preprocessing nor labels" in err
    assert not (tmp_path / "y.safetensors").exists()


def test_pickle_with_two_networks(run: Run, model: Path, tmp_path: Path) -> None:
    state = vitlite.load(model).state_dict()
    torch.save({"student": state, "teacher": state}, tmp_path / "vit.pth")
    words = ("convert", tmp_path / "vit.pth", tmp_path / "x.safetensors", "--to", "timm")
    assert "contains several ViTs: student, teacher. Choose one with key= (--key)." in run(*words)[2]
    assert run(*words, "--key", "teacher")[0] == 0
