"""What is written of a recipe for other libraries gives, read by them and by us, the same pixels; or it is refused."""

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import TINY
from peers import timm, transformers
from PIL import Image
from torch import Tensor

from vitlite.checkpoints.formats.timm import transform_to_timm
from vitlite.checkpoints.formats.transformers import contents_for_transformers
from vitlite.checkpoints.formats.vitlite import metadata_content
from vitlite.checkpoints.metadata import read_metadata
from vitlite.errors import CheckpointError
from vitlite.images import Preprocess, TransformConfig

SIDES = st.integers(1, 120)


@st.composite
def recipes(draw: Any) -> TransformConfig:
    height, width = draw(st.integers(2, 6)) * 8, draw(st.integers(2, 6)) * 8
    if draw(st.booleans()):
        width = height
    more = draw(st.tuples(st.integers(0, 13), st.integers(0, 13)) | st.integers(0, 13).map(lambda both: (both, both)))
    mean = draw(st.sampled_from([(0.5, 0.4, 0.3), (0.0, 0.1, 0.2), (0.5,)]))
    return TransformConfig(
        size=(height, width),
        resize=(height + more[0], width + more[1]),
        mode=draw(st.sampled_from(["center", "squash"])),
        interpolation=draw(st.sampled_from(["bilinear", "bicubic"])),
        mean=mean,
        std=tuple(value + 0.1 for value in mean),
        scale=draw(st.sampled_from([1 / 255, 1 / 127.5])),
        margin=draw(st.sampled_from(["nearest", "down"])),
    )


def noise(height: int, width: int) -> Image.Image:
    levels = np.random.default_rng(height * 301 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def prepared(recipe: TransformConfig, picture: Image.Image) -> Tensor:
    config = SimpleNamespace(channels=3)
    return Preprocess(recipe, SimpleNamespace(config=config, device=torch.device("cpu"), dtype=torch.float32))(picture)


ANY = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
ODD = TransformConfig(size=(32, 32), resize=(35, 35), mode="center", interpolation="bicubic", mean=(0.5,), std=(0.5,))


@ANY
@given(recipe=recipes(), height=SIDES, width=SIDES)
def test_timm_prepares_what_was_written_for_it_so(
    recipe: TransformConfig, height: int, width: int, across_first: None, tmp_path: Path
) -> None:
    content = json.loads(json.dumps(metadata_content(TINY.replace(image_size=recipe.size), None, recipe)))
    assert ("pretrained_cfg" in content) == (transform_to_timm(recipe) is not None)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read_metadata(tmp_path).transform == recipe
    if "pretrained_cfg" not in content:
        return
    picture = noise(height, width)
    ours = prepared(recipe, picture)
    data = timm.data.resolve_data_config(pretrained_cfg=content["pretrained_cfg"])
    assert torch.allclose(timm.data.create_transform(**data)(picture)[None], ours, atol=1e-4)
    del content["vitlite"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    back = read_metadata(tmp_path).transform
    assert back is not None
    assert torch.allclose(prepared(back, picture), ours, atol=1e-4)


@ANY
@given(recipe=recipes(), height=SIDES, width=SIDES)
def test_transformers_prepares_what_was_written_for_it_so(
    recipe: TransformConfig, height: int, width: int, across_first: None, tmp_path: Path
) -> None:
    try:
        contents = contents_for_transformers(TINY.replace(image_size=recipe.size), None, recipe)
    except CheckpointError:
        assert recipe.mode == "center" or recipe.margin == "nearest"
        return
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    kind = contents["preprocessor_config.json"]["image_processor_type"]
    family = kind.removesuffix("ImageProcessor").lower()
    module = import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    processor = getattr(module, f"{kind}Pil").from_pretrained(tmp_path)
    picture = noise(height, width)
    ours = prepared(recipe, picture)
    theirs = torch.as_tensor(np.asarray(processor(picture, return_tensors="np")["pixel_values"]))
    assert torch.allclose(theirs, ours, atol=1e-4)
    back = read_metadata(tmp_path).transform
    assert back is not None
    assert torch.allclose(prepared(back, picture), ours, atol=1e-4)
    assert type(transformers.AutoImageProcessor.from_pretrained(tmp_path)).__name__ == kind


def test_a_crop_that_would_move_by_a_pixel_is_refused_with_what_to_do() -> None:
    with pytest.raises(CheckpointError, match="transformers would shift some crops of this model") as error:
        contents_for_transformers(TINY, None, ODD)
    assert "margin='down'" in str(error.value)
