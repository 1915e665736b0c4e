"""Any config.json and preprocessor_config.json: what the library that wrote them computes with them, or one error.

Beside weights that stay as they are: a value that changes what is computed is followed, or refused, never overlooked.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from attempts import CASES, Content, attempt, json_values, kept, spoilt, spoilt_bytes
from hypothesis import given
from hypothesis import strategies as st
from models import tiny_model
from peers import timm, transformers
from PIL import Image
from references import distance, spread
from torch import Tensor

from vitlite import ViT, ViTConfig
from vitlite.checkpoints.metadata import ID
from vitlite.config import FIELDS
from vitlite.errors import ImageError

CORPUS = sorted((Path(__file__).parent / "corpus" / "metadata").iterdir())
CONFIGS = sorted((Path(__file__).parent / "corpus" / "configs").iterdir())  # NAME.LIBRARY.json
EQUAL = 1e-5
CONFIG, PICTURES = "config.json", "preprocessor_config.json"
PICTURE = np.random.default_rng(0).integers(0, 256, (50, 41, 3), dtype=np.uint8)

# What is likely, or likely to be overlooked.
WORDS = [
    "gelu", "gelu_tanh", "gelu_new", "quick_gelu", "relu", "silu", "token", "avg", "map", "max", "avgmax", "learn",
    "none",
    "rope", "layernorm", "rmsnorm", "bicubic", "bilinear", "nearest", "center", "squash", "border", "vit", "dinov2",
    "siglip_vision_model", "clip_vision_model", "ViTModel", "ViTForImageClassification", "vit_base_patch16_224",
    "vit_small_patch14_dinov2", "vit_base_patch16_clip_224", "deit3_small_patch16_224", "BitImageProcessor",
    "ViTImageProcessor", "CLIPImageProcessor", "single_label_classification", "multi_label_classification",
]  # fmt: skip
NUMBERS = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 256, 1000, -1, 1e-12, 1e-6, 1e-5, 0.1, 0.5, 0.9, 1.5, 4.0]
KEYS = [
    "qk_norm", "num_heads", "fc_norm", "reg_tokens", "global_pool", "act_layer", "class_token", "hidden_act",
    "qkv_bias",
    "layer_norm_eps", "do_rescale", "do_center_crop", "crop_pct", "crop_mode", "rescale_offset", "interpolation",
    "heads",
]  # fmt: skip
values = st.sampled_from(WORDS) | st.sampled_from(NUMBERS) | st.booleans() | st.none() | json_values
values |= st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=3)
values |= st.dictionaries(st.sampled_from(KEYS), st.sampled_from([*WORDS, *NUMBERS, True, False, None]), max_size=2)
Answer = tuple[Tensor, Tensor | None]  # logits, and how a picture is prepared


class Library(NamedTuple):
    """Who wrote files, and how it answers with them."""

    write: Callable[[Path], None]
    answer: Callable[[Path, ViT, Tensor], Answer | None]


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, across_first: None) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


TOLD_BY_TENSORS = ("patch_size", "dim", "depth", "mlp_dim", "channels", "num_classes")  # a config need not say them


def write_vitlite(folder: Path) -> None:
    tiny_model().save(folder)


def answer_of_vitlite(folder: Path, ours: ViT, images: Tensor) -> Answer | None:
    config = json.loads((folder / CONFIG).read_text())
    if "vitlite" not in config:
        return answer_of_timm(folder, ours, images)
    saved = config["vitlite"]
    by_tensors = {field: getattr(ours.config, field) for field in TOLD_BY_TENSORS}
    by_table = {"cls_position": ours.config.cls_position}  # whose rows tell, whatever is said
    model = ViT(ViTConfig(**(by_tensors | saved["config"] | by_table))).eval()
    model.load_state_dict(ours.state_dict())
    assert ours.config == model.config
    labels = saved.get("labels") or []
    assert list(ours.labels or []) == (labels if len(labels) == model.config.num_classes else [])
    return model(images), None


def timm_writer(**arguments: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        small = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 3}
        model = spread(timm.create_model("vit_tiny_patch16_224", **small, **arguments))
        names = {"label_names": ["n1", "n2", "n3"], "label_descriptions": {"n1": "ant", "n2": "bee", "n3": "cow"}}
        config = {"model_args": small | arguments, "num_classes": 3, "global_pool": model.global_pool, **names}
        timm.models.save_for_hf(model, folder, model_config=config, safe_serialization=True)

    return write


def answer_of_timm(folder: Path, ours: ViT, images: Tensor) -> Answer | None:
    try:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        prepare = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
        pixels = prepare(Image.fromarray(PICTURE))
    except Exception:  # whatever it makes of such a config
        return None
    try:
        model(pixels[None])
    except AssertionError:  # of pictures that its own model does not take: their size is said nowhere
        return model(images), None
    return model(images), pixels


def transformers_writer(name: str) -> Callable[[Path], None]:
    small = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    if name.startswith("CLIP"):
        processor = transformers.CLIPImageProcessor(size={"shortest_edge": 36}, crop_size=32)

    def write(folder: Path) -> None:
        kind = getattr(transformers, name)
        spread(kind(kind.config_class(**small, num_labels=3))).save_pretrained(folder)
        processor.save_pretrained(folder)

    return write


def answer_of_transformers(folder: Path, ours: ViT, images: Tensor) -> Answer | None:
    try:
        name = json.loads((folder / CONFIG).read_text())["architectures"][0]
        model, about = getattr(transformers, name).from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager"
        )
    except Exception:
        return None
    if about["missing_keys"] or about["mismatched_keys"]:  # it goes on with random numbers there
        return None
    output = model.eval()(images)
    logits = getattr(output, "logits", getattr(output, "image_embeds", None))
    if logits is None:
        logits = output.last_hidden_state[:, 0]
    pixels = None
    with contextlib.suppress(Exception):
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        pixels = processor(Image.fromarray(PICTURE), return_tensors="pt")["pixel_values"][0]
    return logits, pixels


LIBRARIES = {
    "vitlite": Library(write_vitlite, answer_of_vitlite),
    "timm": Library(timm_writer(), answer_of_timm),
    "timm, registers": Library(timm_writer(reg_tokens=2, init_values=1e-5, global_pool="avg"), answer_of_timm),
    "ViT": Library(transformers_writer("ViTForImageClassification"), answer_of_transformers),
    "DINOv2": Library(transformers_writer("Dinov2ForImageClassification"), answer_of_transformers),
    "CLIP": Library(transformers_writer("CLIPVisionModelWithProjection"), answer_of_transformers),
}


@cache
def files(library: str) -> dict[str, bytes]:
    """What a library writes, by name."""
    with TemporaryDirectory() as folder, quiet():
        LIBRARIES[library].write(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        yield


def check(library: str, changed: dict[str, bytes]) -> None:
    """The answers of the library with these files in place of its own, or an error that names the folder."""
    with kept(b"\0".join(changed.values()), f".{library}.json"), TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in {**files(library), **changed}.items():
            (folder / file).write_bytes(content)
        ours = attempt(folder)
        if ours is None:
            return
        pixels = prepared(ours, name)
        images = torch.randn(2, ours.config.channels, *ours.config.size, generator=torch.Generator().manual_seed(0))
        with quiet():
            theirs = LIBRARIES[library].answer(folder, ours, images)
        if theirs is None:
            return
        with torch.no_grad():
            assert distance(ours(images), theirs[0]) < EQUAL
        if pixels is not None and theirs[1] is not None:
            assert levels_apart(ours, pixels, theirs[1]) <= 1.01


def prepared(ours: ViT, folder: str) -> Tensor | None:
    if ours.preprocess is None:
        return None
    try:
        return ours.preprocess(PICTURE)[0]
    except ImageError as error:
        said = str(error)
    assert said.isprintable()
    assert len(said) < 2000
    return None


def levels_apart(ours: ViT, mine: Tensor, theirs: Tensor) -> float:
    """The largest difference, in grey levels; none where it is rounding, which a small factor makes levels of."""
    if (
        ours.preprocess.transform.cut is not None
    ):  # of a picture that patches do not cover, they see the upper left part
        theirs = theirs[..., : mine.shape[-2], : mine.shape[-1]]
    assert mine.shape == theirs.shape
    if (mine - theirs).abs().max() < EQUAL:
        return 0.0
    recipe = ours.preprocess.transform
    std = torch.tensor(recipe.std)[:, None, None]
    rounding = mine.abs().max() * 2**-22  # of float32, which a large mean makes hundredths of a level
    return float((((mine - theirs).abs() - rounding) * std / recipe.scale).max())


@pytest.mark.parametrize("library", LIBRARIES)
def test_files_as_they_were_written(library: str) -> None:
    check(library, {})


@pytest.mark.parametrize("library", LIBRARIES)
@CASES
@given(st.data())
def test_any_config(library: str, data: st.DataObject) -> None:
    good = json.loads(files(library)[CONFIG])
    check(library, {CONFIG: json.dumps(data.draw(spoilt(good, values))).encode()})


@pytest.mark.parametrize("field", FIELDS)
def test_a_config_without_a_field(field: str) -> None:
    config = json.loads(files("vitlite")[CONFIG])
    del config["vitlite"]["config"][field]
    check("vitlite", {CONFIG: json.dumps(config).encode()})


@pytest.mark.parametrize("library", [name for name in LIBRARIES if PICTURES in files(name)])
@CASES
@given(st.data())
def test_any_preprocessing(library: str, data: st.DataObject) -> None:
    good = json.loads(files(library)[PICTURES])
    check(library, {PICTURES: json.dumps(data.draw(spoilt(good, values))).encode()})


@st.composite
def damaged(draw: st.DrawFn, library: str) -> Content:
    return spoilt_bytes(draw, files(library)[CONFIG])


@pytest.mark.parametrize("library", LIBRARIES)
@CASES
@given(st.data())
def test_any_bytes(library: str, data: st.DataObject) -> None:
    check(library, {CONFIG: data.draw(damaged(library) | st.binary(max_size=100))})


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_what_was_ever_found_of_configs(file: Path) -> None:
    config = json.loads(file.read_bytes())
    config.pop("vitlite_pair", None)
    if "vitlite" in config:  # for the weights that are written now
        config[ID] = json.loads(files("vitlite")[CONFIG])[ID]
    check(file.name.split(".")[1], {CONFIG: json.dumps(config).encode()})


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.name)
def test_what_was_ever_found(file: Path) -> None:
    check("CLIP", {PICTURES: file.read_bytes()})
