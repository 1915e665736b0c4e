"""`vitlite convert`."""

import json
from pathlib import Path

import pytest
import torch
from commands import Run
from peers import transformers, vit_pytorch
from safetensors.torch import load_file, save_file

import vitlite


def test_convert(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("convert", model, tmp_path / "there", "--to", "transformers")
    assert (code, out, err) == (0, f"wrote {tmp_path / 'there'}\n", "")
    assert json.loads((tmp_path / "there" / "config.json").read_text())["model_type"] == "vit"
    assert run("convert", model, tmp_path / "back", "--to", "vitlite", "--like", "nothing")[0] == 1
    assert run("convert", model, tmp_path / "back")[0] == 2
    assert "no pickles are made" in run("convert", model, tmp_path / "back.pth", "--to", "timm")[2]
    monkeypatch.setenv("HOME", str(model.parent))
    assert run("convert", f"~/{model.name}", tmp_path / "again.safetensors", "--to", "timm")[0] == 0
    for name in ("none.pth", "none"):
        assert f"no file or folder {name}." in run("convert", name, tmp_path / "back", "--to", "timm")[2]
    assert "vit_nano_4 is a name" in run("convert", "vit_nano_4", tmp_path / "back", "--to", "timm")[2]


def test_a_part_of_what_is_read_is_not_written_over(run: Run, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    del config["vitlite_pair"]  # which no weights bear that another program wrote
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    parts = {name: f"model-0000{1 + (name > 'd')}-of-00002.safetensors" for name in tensors}
    for file in set(parts.values()):
        save_file({name: tensors[name] for name in tensors if parts[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    (tmp_path / "link.safetensors").symlink_to(folder / "model-00002-of-00002.safetensors")
    for target in (folder / "model-00002-of-00002.safetensors", tmp_path / "link.safetensors", index):
        for source in (index, folder):
            code, _, err = run("convert", source, target, "--to", "timm")
            assert (code, "is to be read and to be written" in err) == (1, True)
    assert run("convert", index, tmp_path / "one.safetensors", "--to", "timm")[0] == 0


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
    assert "--margin down. Or convert to timm: where that is installed, transformers opens the folder too." in err
    assert not (tmp_path / "hf").exists()


def test_a_crop_that_moves_by_a_pixel_may_be_accepted(run: Run, tmp_path: Path) -> None:
    vitlite.create("vit_nano_4.cifar10", image_size=64).save(tmp_path / "ours")
    words = ("convert", tmp_path / "ours", tmp_path / "hf", "--to", "transformers")
    assert vitlite.load(tmp_path / "ours").preprocess.transform.margin == "nearest"
    refused = run(*words)
    code, out, err = run(*words, "--margin", "down")
    assert (code, err) == (0, "")
    assert "half of an odd margin is rounded down, which moves the crop of some pictures by a pixel" in out
    assert vitlite.load(tmp_path / "hf").preprocess.transform.margin == "down"
    assert type(transformers.AutoImageProcessor.from_pretrained(tmp_path / "hf")).__name__.endswith("ImageProcessor")
    assert refused[0] == 1


def test_what_is_said_one_by_one(run: Run, tmp_path: Path) -> None:
    """Five heads, which do not divide the width of any preset."""
    theirs = vit_pytorch.ViT(image_size=64, patch_size=16, num_classes=7, dim=80, depth=2, heads=5, mlp_dim=96)
    torch.save(theirs.state_dict(), tmp_path / "mine.pth")
    words = ("convert", tmp_path / "mine.pth", tmp_path / "mine", "--to", "vitlite")
    code, _, err = run(*words)
    assert code == 1
    assert "do not tell patch_size, image_size, heads" in err
    assert "or tell convert what it is, by its options: --patch-size, --size, --heads." in err
    assert run(*words, "--heads", 5, "--size", 64, "--patch-size", 16)[0] == 0
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(vitlite.load(tmp_path / "mine")(images), theirs.eval()(images))
    words = (*words[:2], tmp_path / "other", *words[3:])
    code, _, err = run(*words, "--like", "vit_tiny_16", "--heads", 5)
    assert code == 1
    assert "vit_tiny_16.augreg_in21k_ft_in1k says all of the config. Leave out --like, or what else" in err
    assert "not 7 heads" in run(*words, "--heads", 7, "--size", 64, "--patch-size", 16)[2]


def test_a_file_is_said_to_be_the_tensors_alone(run: Run, model: Path, tmp_path: Path) -> None:
    out = run("convert", model, tmp_path / "x.safetensors", "--to", "timm")[1]
    assert out == f"wrote {tmp_path / 'x.safetensors'}: tensors alone, without the config.json that a folder has\n"
    code, _, err = run("convert", model, tmp_path / "y.safetensors", "--to", "timm", "--margin", "nearest")
    assert code == 1
    assert "has the tensors alone, and a margin is about how pictures are cut. Leave out --margin" in err
    assert not (tmp_path / "y.safetensors").exists()
