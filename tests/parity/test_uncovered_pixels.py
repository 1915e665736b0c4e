"""Pictures of another size than the network's, and such as patches do not cover.

timm and transformers leave out what remains on the right and below; so do we.

SigLIP's so400m of 384 pixels is the one that people have: 27 patches of 14 see 378 of them.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import timm, transformers
from PIL import Image
from references import spread
from torch import Tensor

from vitlite import VitliteError, create, load
from vitlite.checkpoints.convert import convert
from vitlite.checkpoints.metadata import read_metadata, transform_from_record
from vitlite.zoo import registry

PHOTO = Path(__file__).parents[2] / "examples" / "photos" / "chelsea.png"
SIDE, PATCH = 45, 14  # three patches and three pixels
TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": SIDE, "patch_size": PATCH}
COLOURS = {"mean": [0.5] * 3, "std": [0.25] * 3}
Answer = Callable[[Any], Tensor]


def of_timm(folder: Path, crop_pct: float = 0.9, **options: Any) -> Answer:
    model = spread(timm.create_model("vit_so400m_patch14_siglip_384", **TINY, **options)).eval()
    pictures = {"input_size": (3, SIDE, SIDE), "crop_pct": crop_pct, "crop_mode": "center", "interpolation": "bicubic"}
    model.pretrained_cfg = {**model.pretrained_cfg, **pictures, **COLOURS}
    timm.models.save_for_hf(model, folder, model_args=TINY | options, safe_serialization=True)
    prepare = timm.data.create_transform(**pictures, **COLOURS)
    return lambda picture: model(prepare(picture)[None])


def of_transformers(folder: Path) -> Answer:
    config = transformers.SiglipVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=SIDE,
        patch_size=PATCH,
    )  # fmt: skip
    model = spread(transformers.SiglipVisionModel(config)).eval()
    model.save_pretrained(folder)
    family = "transformers.models.siglip.image_processing_pil_siglip"
    kind = __import__(family, fromlist=["x"]).SiglipImageProcessorPil
    processor = kind(size={"height": SIDE, "width": SIDE})
    processor.save_pretrained(folder)
    return lambda picture: model(**processor(picture, return_tensors="pt")).pooler_output


@pytest.mark.parametrize("write", [of_timm, of_transformers])
def test_from_a_photo_to_numbers(write: Callable[[Path], Answer], tmp_path: Path) -> None:
    theirs = write(tmp_path)
    ours = load(tmp_path)
    assert ours.config.size == (42, 42)
    with Image.open(PHOTO) as photo, torch.no_grad():
        picture = photo.convert("RGB")
        assert (ours(ours.preprocess(picture)) - theirs(picture)).abs().max() < 1e-5


@pytest.mark.parametrize("write", [of_timm, of_transformers])
def test_what_is_saved_prepares_pictures_as_before(write: Callable[[Path], Answer], tmp_path: Path) -> None:
    write(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    ours.save(tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert again.preprocess.transform == ours.preprocess.transform
    assert torch.equal(again.preprocess(PHOTO), ours.preprocess(PHOTO))
    assert "architecture" not in json.loads((tmp_path / "ours" / "config.json").read_text())  # timm has no words for it


@pytest.mark.parametrize("to", ["timm", "transformers"])
def test_what_other_libraries_have_no_word_for_is_refused(to: str, tmp_path: Path) -> None:
    of_timm(tmp_path / "theirs")
    with pytest.raises(VitliteError, match=r"preprocessing of this model|upper left 42 x 42 pixels of each crop"):
        convert(tmp_path / "theirs", tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_another_size_is_cut_as_ever(tmp_path: Path) -> None:
    of_timm(tmp_path)
    recipe = load(tmp_path, image_size=56).preprocess.transform
    assert (recipe.size, recipe.resize, recipe.cut) == ((56, 56), (62, 62), None)
    recipe = load(tmp_path).preprocess.transform
    assert recipe.scaled(recipe.size) == recipe
    assert recipe.scaled((56, 56)).resize == (62, 62)


def test_padding_up_to_whole_patches_is_refused(tmp_path: Path) -> None:
    of_timm(tmp_path, dynamic_img_pad=True)
    with pytest.raises(VitliteError, match=r"With dynamic_img_pad, timm would pad .* multiple of patch_size 14"):
        load(tmp_path)


@pytest.mark.parametrize("tag", ["siglip_webli_384", "siglip_gap_webli_384"])
def test_the_zoo_s_own(tag: str) -> None:
    record = registry.find(f"vit_so400m_14.{tag}")
    assert (record.pixels, record.config.image_size) == (384, 378)
    recipe = transform_from_record(record)
    assert (recipe.cut, recipe.resize) == ((384, 384), (int(384 / record.crop_pct),) * 2)
    left, top, right, bottom = recipe.crop_box(500, 700)
    assert (left, top) == (round((700 - 384) / 2), round((500 - 384) / 2))
    assert (right - left, bottom - top) == (378, 378)


def test_a_folder_of_the_zoo_s_own_pictures_is_no_contradiction(tmp_path: Path) -> None:
    """Of the very checkpoint, timm's own config.json says what the record says."""
    record = registry.find("vit_so400m_14.siglip_webli_384")
    card = timm.models.get_pretrained_cfg(record.alias).to_dict()
    config = {"architecture": "vit_so400m_patch14_siglip_384", "num_classes": 0, "pretrained_cfg": card}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    metadata = read_metadata(tmp_path)
    assert metadata.usual_image_size == 378
    assert metadata.transform.in_whole_patches(14) == transform_from_record(record)


@pytest.mark.parametrize("changes", [{"input_size": (3, 64, 64)}, {}])
def test_pictures_for_a_model_that_takes_any_size(changes: dict[str, Any], tmp_path: Path) -> None:
    """timm prepares them at the input_size, also where another img_size is said."""
    small = {"embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 3} | ({} if changes else {"img_size": 64})
    model = spread(timm.create_model("vit_small_patch16_dinov3", **small)).eval()
    model.pretrained_cfg = {**model.pretrained_cfg, **changes}
    timm.models.save_for_hf(model, tmp_path, model_args=small, safe_serialization=True)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))
    ours = load(tmp_path)
    with Image.open(PHOTO) as photo, torch.no_grad():
        picture = photo.convert("RGB")
        answer, wanted = ours(ours.preprocess(picture)), theirs(prepare(picture)[None])
    assert (answer - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_a_recipe_of_another_size_than_the_network_s_is_none_of_timm_s(tmp_path: Path) -> None:
    """Its config.json has one size for both."""
    model = create("vit_nano_4.cifar10")
    model.preprocess = replace(model.preprocess.transform, size=(64, 64), resize=(64, 64))
    model.save(tmp_path / "ours")
    assert "architecture" not in json.loads((tmp_path / "ours" / "config.json").read_text())
    assert load(tmp_path / "ours").preprocess.transform.size == (64, 64)
    with pytest.raises(VitliteError, match="cannot describe the preprocessing of this model"):
        convert(tmp_path / "ours", tmp_path / "theirs", "timm")
