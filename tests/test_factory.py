"""`create` and `load` do the same to every source, and refuse what would make trained weights meaningless."""

import inspect
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import TIMM_SIZES, TRANSFORMERS_SIZES
from peers import timm
from safetensors.torch import load_file, save_file
from server import Hub
from torch import Tensor, nn

import vitlite
from vitlite import ViT, ViTConfig, create, load
from vitlite.checkpoints.convert import convert
from vitlite.checkpoints.key_mapping import FORMATS, rename_tensors
from vitlite.checkpoints.metadata import transform_from_record
from vitlite.cli.main import main as command
from vitlite.errors import CheckpointError, ConfigError, DownloadError, ImageError, InputError, UnknownNameError
from vitlite.images import Preprocess, TransformConfig
from vitlite.presets import PRESETS
from vitlite.zoo import registry

DEIT = "vit_tiny_16.deit_fb_in1k"
TINY = ViTConfig(image_size=32, patch_size=8, dim=16, depth=2, heads=2, mlp_dim=24, num_classes=3)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


def state_of(config: ViTConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in ViT(config).state_dict().items()}
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(state_of(TINY), tmp_path / "vit.safetensors")
    return tmp_path / "vit.safetensors"


# ---- names and options


def test_the_signatures_are_the_documented_ones() -> None:
    options = "num_classes=None, image_size=None, patch_size=None, pool=None, channels=None, drop_path=None, "
    options += "checkpointing=None, device=None, dtype=None"
    plain = {name: str(inspect.signature(function)) for name, function in (("create", create), ("load", load))}
    for name, first in (("create", "name, *, weights='default'"), ("load", "source, *, like=None, config=None")):
        parameters = inspect.signature(getattr(vitlite, name)).parameters.values()
        bare = inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters])
        assert str(bare) == f"({first}, {options})", plain[name]


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'pretrained'"):
        create("vit_tiny_16", pretrained=True)  # type: ignore[call-arg]


def test_wrong_names_and_places(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="vit_base_16"):
        create("vit_bass_16")
    with pytest.raises(UnknownNameError, match="weights=None"):
        create("vit_huge_32")
    with pytest.raises(UnknownNameError, match=r"is a model name. Use vitlite.create"):
        load("vit_base_16")
    with pytest.raises(CheckpointError, match=r"There is no file or folder .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"There is no file or folder missing/vit.safetensors"):
        load("missing/vit.safetensors")
    with pytest.raises(ConfigError, match="weights must be a path, 'owner/name', 'default' or None, got True"):
        create("vit_tiny_16", weights=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"config must be a vitlite.ViTConfig, got \{'heads': 3\}"):
        load(tmp_path, config={"heads": 3})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"like= and config= cannot be combined"):
        load(tmp_path, like=DEIT, config=TINY)


@pytest.mark.parametrize("empty", ["", " ", "\t\n"])
def test_an_empty_path_is_not_the_current_folder(
    empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    create("vit_nano_4", weights=None).save(here)
    monkeypatch.chdir(here)
    there = {path: path.read_bytes() for path in here.iterdir()}
    calls: list[Any] = [
        lambda: load(empty),
        lambda: create("vit_nano_4", weights=empty),
        lambda: create("vit_nano_4.cifar10", weights=empty),
        lambda: convert(empty, tmp_path / "out", "timm"),
        lambda: convert(here, empty, "timm"),
        lambda: load(".").save(empty),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"must be a path, got "):
            call()
    photo = str(Path(__file__).parents[1] / "examples" / "photos" / "chelsea.png")
    for words in (["--model", ""], ["--model", "vit_nano_4", "--weights", empty]):
        assert command(["classify", photo, *words]) == 1
        assert "must be a path, got" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in here.iterdir()} == there
    assert load(".").config.depth == load(Path()).config.depth == 6


@pytest.mark.parametrize("place", [None, 3, b"vit", ["vit"]])
def test_what_is_no_path_at_all(place: Any) -> None:
    with pytest.raises(ConfigError, match=r"weights must be a path, got "):
        load(place)


@pytest.mark.parametrize("place", ["x" * 5000, "~nobody-here/vit.safetensors", "\x1b[31m"])
def test_a_path_that_cannot_be_asked_for_is_not_there(place: str) -> None:
    with pytest.raises(CheckpointError, match=r"There is no file or folder ") as error:
        load(place)
    assert len(str(error.value)) < 5000
    assert str(error.value).isprintable()


def test_random_weights_are_asked_for() -> None:
    model = create("vit_huge_32", weights=None, num_classes=2, image_size=64, channels=1, device="meta")
    assert model.training
    assert model.source is None
    assert model.config.grid == (2, 2)
    assert model.patch_embed.proj.weight.shape[1] == 1
    assert create("vit_nano_4", weights=None, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert create(DEIT, weights=None, device="meta").config == registry.info(DEIT).config
    with pytest.raises(ImageError, match="without preprocessing"):
        model.preprocess("x.png")


@pytest.mark.parametrize("device", ["foo", "", "xla", "hpu", "cuda:99", 99, 2.5, [], torch.device("cuda:99")], ids=repr)
@pytest.mark.parametrize("weights", ["default", None])
def test_a_device_that_is_not_here_is_answered(device: Any, weights: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"Cannot use the device {re.escape(repr(device))}: .*--device cpu",
    ):
        create("vit_nano_4", weights=weights, device=device)


@pytest.mark.parametrize("name", ["vit_base_patch16_224", "timm/vit_base_patch16_224"])
def test_timm_s_name_of_a_network_has_random_weights_only(name: str) -> None:
    model = create(name, weights=None, device="meta")
    assert model.config == registry.info("vit_base_16").config
    assert create(name, weights=None, num_classes=3, device="meta").config.num_classes == 3
    with pytest.raises(UnknownNameError, match=r"Pass a checkpoint of it"):
        create(name)
    with pytest.raises(UnknownNameError, match="There is no model 'vit_nonsense'"):
        create("vit_nonsense", weights=None)


def test_names_of_other_libraries_get_a_hint() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'create_model'\. Use vitlite\.create\(name\)\.$"):
        vitlite.create_model("vit_base_16")  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = vitlite.nonsense  # type: ignore[attr-defined]


# ---- what the file gives


def test_a_loaded_model(file: Path) -> None:
    model = load(file, config=TINY)
    assert not model.training
    assert model.labels is None
    assert (model.source.path, model.source.verified, len(model.source.sha256)) == (file, None, 64)
    assert model.source.report.loaded.keys() == model.state_dict().keys()
    assert model.config.to_dict() == TINY.to_dict()
    with pytest.raises(ImageError, match="without preprocessing"):
        model.preprocess("x.png")
    assert load(str(file), config=TINY, pool="cls").config.pool == "cls"


def test_like_is_create_with_weights(shared: Path) -> None:
    weights = shared / "weights" / "deit_tiny_16.timm.safetensors"
    ours, same = load(weights, like=DEIT), create(DEIT, weights=weights)
    assert ours.config == same.config == registry.info(DEIT).config
    assert ours.labels == same.labels
    assert ours.preprocess.transform == same.preprocess.transform
    assert ours.source.name == DEIT
    provenance = ours.source.report.provenance
    assert set(provenance.values()) == {f"the record of {DEIT}"}, "the tensors are those of the record"


def test_a_preset_states_the_shape_alone(shared: Path) -> None:
    weights = shared / "weights" / "deit_tiny_16.timm.safetensors"
    text = r"do not determine norm_eps, mlp, pool \(the preset vit_tiny_16 determines only the shape\)\. Pass the "
    with pytest.raises(ConfigError, match=text):
        create("vit_tiny_16", weights=weights)
    with pytest.raises(ConfigError, match=text):
        load(weights, like="vit_tiny_16", pool="cls")
    with pytest.raises(CheckpointError, match="dim is 192 in the tensors and 384 in the preset vit_small_16"):
        create("vit_small_16", weights=weights)
    config = registry.info(DEIT).config
    assert load(weights, config=config.replace(heads=12)).config.heads == 12


OTHERWISE = {  # networks whose tensors are called as those of a plain ViT
    "gap": dict(global_pool="avg", fc_norm=False),
    "quick": dict(act_layer="quick_gelu"),
    "tanh": dict(act_layer="gelu_tanh"),
    "eps": dict(norm_layer=partial(nn.LayerNorm, eps=1e-5)),
    "clip": dict(pre_norm=True, act_layer="quick_gelu"),
    "mae": dict(global_pool="avg"),
    "beit3": dict(global_pool="avg", scale_attn_norm=True, scale_mlp_norm=True),
    "no row": dict(no_embed_class=True),
    "sincos": dict(pos_embed="none"),
    "no class": dict(class_token=False, global_pool="max", fc_norm=False),
    "registers": dict(reg_tokens=4, no_embed_class=True),
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_a_preset_never_fills_in_what_a_file_leaves_open(kind: str, tmp_path: Path) -> None:
    sizes = dict(img_size=32, patch_size=4, embed_dim=192, depth=6, num_heads=3, num_classes=10)
    theirs = timm.models.VisionTransformer(**sizes, **OTHERWISE[kind])
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    for options in ({}, {"pool": "cls"}, {"pool": "mean"}):
        with pytest.raises(
            ConfigError, match=r"do not determine .*norm_eps, mlp.*the preset vit_nano_4 determines only the shape"
        ):
            create("vit_nano_4", weights=tmp_path / "vit.safetensors", **options)


def test_a_preset_answers_what_a_format_leaves_open(tmp_path: Path) -> None:
    """torchvision's code says the rest, and a table of another size is not the preset's."""
    for image_size in (32, 48):
        state = state_of(PRESETS["vit_nano_4"].replace(image_size=image_size))
        save_file(dict(rename_tensors(FORMATS["torchvision"], "", state)), tmp_path / "vit.safetensors")
        model = create("vit_nano_4", weights=tmp_path / "vit.safetensors")
        assert (model.config.heads, model.config.image_size, model.labels) == (3, image_size, None)
        with pytest.raises(ImageError, match="without preprocessing"):
            model.preprocess("x.png")


def test_a_preset_does_not_say_how_a_format_resizes_positions(tmp_path: Path) -> None:
    state = state_of(PRESETS["vit_nano_4"])
    save_file(dict(rename_tensors(FORMATS["torchvision"], "", state)), tmp_path / "vit.safetensors")
    for image_size in (32, 48):
        config = PRESETS["vit_nano_4"].replace(resample="torchvision")
        ours = load(tmp_path / "vit.safetensors", config=config, image_size=image_size)
        named = create("vit_nano_4", weights=tmp_path / "vit.safetensors", image_size=image_size)
        assert named.config.to_dict() == ours.config.to_dict()
        assert named.config.resample == "torchvision"
        assert torch.equal(named.pos_embed, ours.pos_embed)


def test_a_checkpoint_s_name_brings_both(shared: Path) -> None:
    weights = shared / "weights" / "deit_tiny_16.timm.safetensors"
    for name in (DEIT, "timm/deit_tiny_patch16_224.fb_in1k"):
        model = create(name, weights=weights)
        assert model.labels == registry.info(DEIT).labels
        assert model.preprocess.transform == transform_from_record(registry.info(DEIT))
        assert model.source.name == DEIT
    top = model.predict([shared / "photos" / "chelsea.png", shared / "photos" / "coffee.png"], top=2)
    assert [guess.label for guess in top[0]] == ["Egyptian cat", "tabby"]
    assert top[1][0].label == "espresso"
    assert create(DEIT, weights=weights, image_size=384).preprocess.transform.size == (384, 384)
    assert create(DEIT, weights=weights, num_classes=2).labels is None
    with pytest.raises(CheckpointError, match=r"dim is 192 in the tensors and 768 in the record of vit_base_16.dino"):
        create("vit_base_16.dino", weights=weights)


def test_a_fine_tune_with_as_many_classes_has_its_own_labels(tmp_path: Path) -> None:
    """num_classes= means that the classes are the caller's own, also if the checkpoint has as many."""
    name, file = "vit_nano_4.cifar10", tmp_path / "fine_tuned.safetensors"
    trained = create(name)
    tensors = load_file(trained.source.path)
    save_file(tensors | {"head.weight": tensors["head.weight"].flip(0).contiguous()}, file)
    ours = create(name, weights=file, num_classes=10)
    assert ours.labels is None
    assert ours.source.report.unlabelled.startswith("num_classes was passed, so the classes may differ from those of")
    convert(file, tmp_path / "converted", "vitlite", like=name, num_classes=10)
    assert load(tmp_path / "converted").labels is None
    assert create(name, num_classes=10).labels == trained.labels
    ours.labels = [f"mine {i}" for i in range(10)]
    ours.save(tmp_path / "mine")
    assert create(name, weights=tmp_path / "mine", num_classes=10).labels == tuple(ours.labels)
    assert create(name, weights=tmp_path / "mine").labels == tuple(ours.labels)


def test_a_fine_tune_of_timm_with_other_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commonest port: timm's head for one's own classes, and no more than its tensors."""
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=3).eval()
    file = tmp_path / "fine_tuned.safetensors"
    save_file(theirs.state_dict(), file)
    ours = create(name, weights=file, num_classes=3)
    images = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(ours(images), theirs(images))
    assert ours.labels is None
    assert ours.preprocess.transform == transform_from_record(registry.find(name))
    assert not ours.source.report.reinitialised
    with pytest.raises(
        CheckpointError, match=r"For a model fine-tuned on 3 classes, pass num_classes=3 \(vitlite convert --num-cl"
    ):
        create(name, weights=file)
    renewed = create(name, weights=file, num_classes=1000)
    assert renewed.labels is None
    assert not renewed.head.weight.any()
    line = ["convert", str(file), str(tmp_path / "mine"), "--to", "timm", "--like", name]
    assert command(line) == 1
    assert "on 3 classes, pass num_classes=3 (vitlite convert --num-classes 3 --labels ...)" in capsys.readouterr().err
    assert command([*line, "--num-classes", "4"]) == 1
    assert command([*line, "--num-classes", "3"]) == 0
    converted = load(tmp_path / "mine")
    assert (converted.labels, converted.preprocess.transform) == (None, ours.preprocess.transform)
    assert torch.equal(converted(images), ours(images))
    assert command([*line, "--labels", "cat,coffee"]) == 1
    assert command([*line, "--labels", "cat,coffee,rocket"]) == 0
    assert load(tmp_path / "mine").labels == ("cat", "coffee", "rocket")
    opened = timm.create_model(f"local-dir:{tmp_path / 'mine'}", pretrained=True).eval()
    torch.testing.assert_close(opened(images), theirs(images))
    convert(file, tmp_path / "again.safetensors", "timm", like=name, num_classes=3)
    again = load_file(tmp_path / "again.safetensors")
    assert all(torch.equal(again[key], tensor) for key, tensor in theirs.state_dict().items())


@pytest.mark.parametrize("target", ["folder", "alone.safetensors"])
@pytest.mark.parametrize("classes", [3])
def test_a_conversion_neither_makes_a_head_nor_drops_one(target: str, classes: int, tmp_path: Path) -> None:
    name = "vit_nano_4.cifar10"
    with pytest.raises(CheckpointError, match=f", which is 10, got {classes}"):
        convert(
            registry.DATA / registry.find(name).file,
            tmp_path / target,
            "vitlite",
            like=name,
            num_classes=classes,
        )
    assert not (tmp_path / target).exists()


def test_of_a_fine_tune_without_a_head_none_is_made(tmp_path: Path) -> None:
    name, file = "vit_nano_4.cifar10", tmp_path / "headless.safetensors"
    save_file(create(name, num_classes=0).state_dict(), file)
    with pytest.raises(CheckpointError, match=r"headless\.safetensors, which is 0, got 3"):
        convert(file, tmp_path / "folder", "vitlite", like=name, num_classes=3)
    convert(file, tmp_path / "folder", "vitlite", like=name, num_classes=0)
    assert load(tmp_path / "folder").config.num_classes == 0
    convert(file, tmp_path / "alone.safetensors", "vitlite", like=name, num_classes=0)


def test_a_fine_tune_keeps_its_own_labels_and_preprocessing(tmp_path: Path) -> None:
    name = "vit_nano_4.cifar10"
    model = create(name)
    model.save(tmp_path / "same")
    assert create(name, weights=tmp_path / "same").labels == model.labels
    plain = model.preprocess
    own = replace(plain.transform, mean=(0.0,) * 3)
    model.preprocess = Preprocess(own, model)
    model.labels = ("ant", *model.labels[1:])
    model.save(tmp_path / "own")
    for like in (None, name, "vit_nano_4"):
        ours = load(tmp_path / "own", like=like)
        assert (ours.labels, ours.preprocess.transform) == (model.labels, own)
    assert create(name, weights=tmp_path / "own", num_classes=2).labels is None
    model.labels, model.preprocess = None, None
    model.save(tmp_path / "silent")
    silent = create(name, weights=tmp_path / "silent")
    assert (silent.labels, silent.preprocess.transform) == (None, plain.transform)


TRANSFORM = TransformConfig(
    size=(16, 16), resize=(18, 18), mode="center", interpolation="bicubic", mean=(0.5,), std=(0.5,)
)


def test_a_recipe_keeps_its_own_size_unless_another_is_asked_for(tmp_path: Path) -> None:
    model = ViT(TINY).eval()
    model.preprocess = Preprocess(TRANSFORM, model)
    model.save(tmp_path)
    loaded = load(tmp_path)
    assert loaded.preprocess.transform == TRANSFORM
    assert torch.equal(loaded(loaded.preprocess(torch.zeros(20, 20, 3))), model(torch.full((1, 3, 16, 16), -1.0)))
    assert load(tmp_path, image_size=32).preprocess.transform == TRANSFORM.scaled((32, 32))


def test_transformers_pictures_may_be_smaller_than_config_json_says(tmp_path: Path) -> None:
    """DINOv2's are 224 pixels wide, though its table is that of 518."""
    save_file(state_of(TINY), tmp_path / "model.safetensors")
    about = {"model_type": "dinov2", "image_size": 32, "num_attention_heads": 2, **TRANSFORMERS_SIZES}
    (tmp_path / "config.json").write_text(json.dumps(about))
    pictures = {"size": {"shortest_edge": 18}, "crop_size": {"height": 16, "width": 16}, "do_center_crop": True}
    pictures |= {"resample": 3, "image_mean": [0.5], "image_std": [0.5], "image_processor_type": "BitImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pictures))
    for options, size, resize in (({}, 16, 18), ({"image_size": 32}, 32, 36)):
        recipe = load(tmp_path, config=TINY, **options).preprocess.transform
        assert (recipe.size, recipe.resize) == ((size, size), (resize, resize))


OF_TINY = {"num_heads": 2, "patch_size": 8, **TIMM_SIZES}


@pytest.mark.parametrize(("args", "size"), [
    ({}, 48), ({"img_size": 32}, 32), ({"img_size": [32, 32]}, 32), ({"img_size": 32, "dynamic_img_size": True}, 48),
])  # fmt: skip
def test_timm_s_pictures_have_the_size_that_its_model_takes(args: dict[str, Any], size: int, tmp_path: Path) -> None:
    pictures = {"crop_pct": 1.0, "interpolation": "bicubic", "mean": [0.5], "std": [0.5], "input_size": [3, 48, 48]}
    args = OF_TINY | args
    about = {"architecture": "vit_tiny_patch16_224", "model_args": args, "pretrained_cfg": pictures}
    save_file(state_of(TINY), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert load(tmp_path, config=TINY).preprocess.transform.size == (size, size)
    assert load(tmp_path, config=TINY, image_size=64).preprocess.transform.size == (64, 64)


# ---- options, on any source


@pytest.fixture(params=["file", "saved folder", "preset", "repository"])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The same weights by four ways: a function that loads them with options."""
    config = ViTConfig(**PRESETS["vit_nano_4"].replace(depth=6).to_dict())
    save_file(state_of(config), tmp_path / "vit.safetensors")
    ask = config.replace()
    if request.param == "file":
        yield lambda **options: load(tmp_path / "vit.safetensors", config=ask, **options)
    elif request.param == "preset":
        state = state_of(config)
        save_file(dict(rename_tensors(FORMATS["torchvision"], "", state)), tmp_path / "torchvision.safetensors")
        yield lambda **options: create("vit_nano_4", weights=tmp_path / "torchvision.safetensors", **options)
    else:
        load(tmp_path / "vit.safetensors", config=ask).save(tmp_path / "saved")
        if request.param == "saved folder":
            yield lambda **options: load(tmp_path / "saved", **options)
            return
        with Hub() as hub:
            files = {path.name.replace(".", "_", 1): path.read_bytes() for path in (tmp_path / "saved").iterdir()}
            hub.publish("me/vit", **files)
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
            yield lambda **options: load("me/vit@main", **options)


def test_options_act_alike(source: Any) -> None:
    state = state_of(PRESETS["vit_nano_4"])
    plain = source()
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())
    assert source(num_classes=10).head.weight.equal(state["head.weight"])  # its own number: the head stays
    renewed = source(num_classes=4)
    assert renewed.head.weight.shape == (4, 192)
    assert not renewed.head.weight.any()
    assert renewed.source.report.reinitialised == {"head.weight": (4, 192), "head.bias": (4,)}
    assert set(renewed.source.report.dropped.values()) == {(10, 192), (10,)}
    headless = source(num_classes=0)
    assert set(headless.source.report.dropped.values()) == {(10, 192), (10,)}
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(headless(images), plain.embed(images))
    with pytest.raises(ConfigError, match="trained with pool='cls' and does not fit pool='mean'"):
        source(pool="mean")
    mean = source(pool="mean", num_classes=10)
    assert not mean.head.weight.any()
    assert torch.allclose(mean.embed(images), plain.features(images).patches.mean(1))
    small = source(dtype=torch.bfloat16, image_size=(32, 64), channels=1)
    assert small.dtype == torch.bfloat16
    assert small.source.report.resampled == {
        "patch_embed.proj.weight": ((192, 3, 4, 4), (192, 1, 4, 4)),
        "pos_embed": ((1, 65, 192), (1, 129, 192)),
    }
    assert source(device="meta").device.type == "meta"


def test_the_table_is_stretched_as_timm_does(file: Path, tmp_path: Path) -> None:
    sizes = dict(patch_size=8, embed_dim=16, depth=2, num_heads=2, mlp_ratio=1.5, num_classes=3)
    theirs = timm.models.VisionTransformer(img_size=(48, 24), **sizes).eval()
    state = timm.models.vision_transformer.checkpoint_filter_fn(load_file(file), theirs)
    theirs.load_state_dict(state)
    ours = load(file, config=TINY, image_size=(48, 24))
    images = torch.randn(2, 3, 48, 24)
    assert torch.allclose(ours(images), theirs(images), atol=1e-5)
    half = load(file, config=TINY, image_size=48, dtype=torch.bfloat16)
    full = load(file, config=TINY, image_size=48)
    assert torch.equal(half.pos_embed, full.pos_embed.bfloat16())  # stretched in float32


@pytest.mark.parametrize("channels", [1, 2, 4, 6, 7])
def test_the_kernel_takes_other_channels_as_timm_does(channels: int, file: Path) -> None:
    theirs = timm.models.adapt_input_conv(channels, load_file(file)["patch_embed.proj.weight"])
    assert torch.allclose(load(file, config=TINY, channels=channels).patch_embed.proj.weight, theirs)


def test_what_cannot_change_is_refused(tmp_path: Path) -> None:
    normed = TINY.replace(input_norm="patches", final_norm="pooled")
    save_file(state_of(normed), tmp_path / "vit.safetensors")
    with pytest.raises(ConfigError, match="channels cannot be changed from 3"):
        load(tmp_path / "vit.safetensors", config=normed, channels=1)
    with pytest.raises(ConfigError, match="would change the width of a trained layer"):
        load(tmp_path / "vit.safetensors", config=normed, pool="cls_and_mean", num_classes=3)
    with pytest.raises(ConfigError, match=r"is not a multiple of patch_size 8. The nearest"):
        load(tmp_path / "vit.safetensors", config=normed, image_size=30)
    with pytest.raises(ConfigError, match="num_classes must be an integer"):
        load(tmp_path / "vit.safetensors", config=normed, num_classes=-1)


def test_types_and_devices_follow_torch_s_defaults(file: Path) -> None:
    with torch.device("meta"):
        assert load(file, config=TINY).device.type == "meta"
    torch.set_default_dtype(torch.float64)
    try:
        assert load(file, config=TINY).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_is_made_anew_is_right_with_another_default_device(file: Path) -> None:
    right = load(file, config=TINY, patch_size=4, image_size=16)
    with torch.device("meta"):  # stands for cuda
        model = load(file, config=TINY, patch_size=4, image_size=16, device="cpu")
        model.reset_head(4)
    assert torch.equal(model.patch_embed.proj.weight, right.patch_embed.proj.weight)
    assert (model.head.weight.device.type, len(model.head.weight)) == ("cpu", 4)


def test_labels_that_do_not_fit_the_head_are_not_used_and_it_is_said_why(file: Path, tmp_path: Path) -> None:
    load(file, config=TINY).save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    config["vitlite"]["labels"] = ["one", "two"]
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    model = load(tmp_path / "saved")
    assert model.labels is None
    why = f"there are 2 labels but {model.config.num_classes} classes"
    assert model.source.report.unlabelled == why
    with pytest.raises(InputError, match=rf"The model has no labels: {why}\. Set model\.labels to .* classes\.$"):
        model.predict(torch.zeros(3, 32, 32))
    for changed in (load(tmp_path / "saved", num_classes=0), load(tmp_path / "saved", num_classes=2)):
        assert changed.source.report.unlabelled == "", "whose labels would these be?"


SIZED = {"model_args": {"num_heads": 2, "img_size": 32, "patch_size": 8, **TIMM_SIZES}}


def beside(folder: Path, about: dict[str, Any], **changes: Any) -> Path:
    """A folder with a tiny model and this config.json."""
    save_file(state_of(TINY.replace(**changes)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(about))
    return folder


def test_timm_s_architecture_says_what_its_name_stands_for(tmp_path: Path) -> None:
    folder = beside(tmp_path, {"architecture": "vit_base_patch32_clip_quickgelu_224"} | SIZED, input_norm="tokens")
    model = load(folder)
    assert (model.config.mlp, model.config.norm_eps, model.config.pool) == ("quick_gelu", 1e-5, "cls")
    with pytest.raises(CheckpointError, match=r"mlp is quick_gelu in config\.json and gelu in config="):
        load(folder, config=model.config.replace(mlp="gelu"))
    with pytest.raises(CheckpointError, match=r"dim is 16 in config\.json and 768 in the preset vit_base_32"):
        create("vit_base_32", weights=folder)


@pytest.mark.parametrize(("changes", "text"), [
    ({"embed_dim": None}, "dim is 16 in the tensors and 768 in config.json"),
    ({"depth": None}, "depth is 2 in the tensors and 12 in config.json"),
    ({"architecture": "vit_base_patch16_224"}, "input_norm is tokens in the tensors and none in config.json"),
    ({"architecture": "vit_base_patch16_reg4_gap_256"}, "class_token is .*; registers"),
    ({"architecture": "vit_giant_patch14_dinov2"}, "mlp is not gated in the tensors and swiglu in config.json"),
])  # fmt: skip
def test_tensors_of_another_architecture_of_timm_s_are_refused(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    """Copied into the wrong folder, they would get its heads, epsilon, GELU and pool."""
    about = {"architecture": "vit_base_patch32_clip_quickgelu_224"} | SIZED
    folder = beside(tmp_path, about, input_norm="tokens")
    assert load(folder).config.mlp == "quick_gelu"
    args = {word: value for word, value in (SIZED["model_args"] | changes).items() if word != "architecture"}
    named = {"architecture": changes.get("architecture", about["architecture"]), "model_args": args}
    (folder / "config.json").write_text(json.dumps(named))
    with pytest.raises(CheckpointError, match=text):
        load(folder)


def test_a_norm_after_the_mean_is_none_of_an_architecture_that_reads_the_class_token(tmp_path: Path) -> None:
    about = {"architecture": "vit_tiny_patch16_224", "num_classes": 3} | SIZED
    folder = beside(tmp_path, about, pool="mean", final_norm="pooled")
    with pytest.raises(CheckpointError, match=r"final_norm is pooled in the tensors and tokens in config\.json"):
        load(folder)
    for said in ({"global_pool": "avg"}, {"model_args": SIZED["model_args"] | {"global_pool": "avg"}}):
        (folder / "config.json").write_text(json.dumps(about | said))
        assert (load(folder).config.pool, load(folder).config.final_norm) == ("mean", "pooled")


@pytest.mark.parametrize(("name", "changes", "text"), [
    ("deit3_small_patch16_224", {}, "cls_position is False in config.json, but"),
    ("vit_small_patch16_224", {"cls_position": False}, "cls_position is True in config.json, but"),
    ("vit_small_patch16_224", {"layer_scale": 0.1}, "layer_scale is present in the tensors and None in"),
    ("vit_small_patch16_dinov3_qkvb", {"registers": 4, "cls_position": False, "layer_scale": 0.1},
     "positions is learned in the tensors and none in"),
    ("vit_base_patch16_siglip_gap_224", {"class_token": False, "pool": "map"},
     "pool is map in the tensors and mean in config.json"),
])  # fmt: skip
def test_what_tells_timm_s_architectures_apart_is_not_overlooked(
    name: str, changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=text):
        load(beside(tmp_path, {"architecture": name} | SIZED, **changes))


def test_tensors_of_another_width_than_transformers_usual_are_refused(tmp_path: Path) -> None:
    about: dict[str, Any] = {"architectures": ["ViTForImageClassification"], "model_type": "vit"}
    about |= {"image_size": 32, "patch_size": 8, "id2label": {"0": "a", "1": "b", "2": "c"}}
    folder = beside(tmp_path, about)
    with pytest.raises(CheckpointError, match=r"depth is 2 in .* and 12 in config\.json"):
        load(folder)
    (folder / "config.json").write_text(json.dumps(about | TRANSFORMERS_SIZES | {"num_attention_heads": 2}))
    assert load(folder, config=TINY.replace(norm_eps=1e-12)).config.heads == 2


def test_another_norm_layer_may_have_another_eps(tmp_path: Path) -> None:
    about: dict[str, Any] = {"architecture": "vit_base_patch16_clip_224", **SIZED}
    assert load(beside(tmp_path, about, input_norm="tokens")).config.norm_eps == 1e-5
    about["model_args"] = about["model_args"] | {"norm_layer": "layernorm"}
    folder = beside(tmp_path, about, input_norm="tokens")
    with pytest.raises(
        ConfigError, match=r"do not determine norm_eps\. Pass the name of the original checkpoint as like="
    ):
        load(folder)
    assert load(folder, config=TINY.replace(input_norm="tokens", norm_eps=1e-4)).config.norm_eps == 1e-4


def test_tokens_that_are_not_pooled_are_an_error(tmp_path: Path) -> None:
    about = {"architecture": "vit_tiny_patch16_224", "num_classes": 0, "global_pool": "", **SIZED}
    folder = beside(tmp_path, about, num_classes=0)
    with pytest.raises(CheckpointError, match="global_pool is '', with which timm returns all tokens"):
        load(folder)


@pytest.mark.parametrize("tag", [{}, {"tag": "augreg2_in21k_ft_in1k"}])
def test_a_fine_tune_does_not_borrow_the_labels_of_what_it_began_with(tag: dict[str, str], tmp_path: Path) -> None:
    about = {"architecture": "vit_base_patch16_224", "num_classes": 1000, "pretrained_cfg": tag, **SIZED}
    assert load(beside(tmp_path, about, num_classes=1000)).labels is None


@pytest.mark.parametrize(("changes", "text"), [
    ({"architecture": "vit_base_patch16_sapiens2"}, "timm's architecture vit_base_patch16_sapiens2 is not"),
    ({"architecture": "vit_base_patch16_rpn_224"}, "timm's architecture vit_base_patch16_rpn_224 is not"),
    ({"architecture": "mine"}, "timm's architecture mine is not supported. If the weights are"),
    ({"model_args": {"act_layer": "relu"}}, "model_args.act_layer is 'relu', but vitlite supports only gelu, "),
    ({"model_args": {"norm_layer": "rmsnorm"}}, "model_args.norm_layer is 'rmsnorm', but vitlite supports"),
    ({"model_args": {"pool_include_prefix": True}}, "model_args.pool_include_prefix is True, but vitlite supports"),
    ({"model_args": {"block_fn": "ResPostBlock"}}, "model_args.block_fn is 'ResPostBlock', but vitlite supports only"),
    ({"model_args": {"mlp_layer": "Mlp"}}, "model_args.mlp_layer is 'Mlp', but vitlite supports only models without"),
    ({"model_args": {"attn_layer": "diff"}}, "model_args.attn_layer is 'diff', but vitlite supports"),
    ({"model_args": {"embed_layer": "hybrid"}}, "model_args.embed_layer is 'hybrid'"),
    ({"model_args": {"sparkle": 3}}, "model_args.sparkle is an unknown key that may"),
    ({"model_args": {"global_pool": "avgmax"}, "global_pool": "token"}, "global_pool must be token or avg or map, and"),
    ({"global_pool": "max"}, "global_pool must be token or avg or map, and"),
])  # fmt: skip
def test_what_timm_computes_otherwise_is_refused_by_name(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    folder = beside(tmp_path, {"architecture": "vit_tiny_patch16_224"} | changes)
    with pytest.raises(CheckpointError, match=f"config.json: {re.escape(text)}"):
        load(folder, config=TINY)


@pytest.mark.parametrize(("about", "text"), [
    ({"model_type": "paddleocr_vl"}, "transformers' model_type paddleocr_vl is not supported"),
    ({"model_type": "vit", "architectures": ["ViTForMaskedImageModeling"]}, "architectures contains ViTForMaskedI"),
    ({"model_type": "dinov2", "architectures": ["Dinov2Backbone"]}, "architectures contains Dinov2Backbone"),
    ({"model_type": "clip", "architectures": ["CLIPForImageClassification"]}, "architectures contains CLIPForImage"),
    ({"model_type": "clip", "vision_config": {"model_type": "siglip_vision_model"}}, "vision_config.model_type must"),
    ({"model_type": "vit", "hidden_act": "gelu_10"}, "hidden_act is 'gelu_10', but vitlite supports"),
    ({"model_type": "vit", "auto_map": {"AutoModel": "m.M"}}, "auto_map is {'AutoModel': 'm.M'}, but vitlite supports"),
    ({"model_type": "vit", "rope_theta": 100}, "rope_theta is an unknown key that may"),
    ({"model_type": "vit", "quantization_config": {}}, "quantization_config is {}, but vitlite supports only models"),
])  # fmt: skip
def test_what_transformers_computes_otherwise_is_refused_by_name(
    about: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {re.escape(text)}"):
        load(beside(tmp_path, about), config=TINY)


DOORS = ["door"] * 10
OF_TIMM = {"architecture": "vit_tiny_patch16_224", "label_names": DOORS}
NANO = {"hidden_size": 192, "num_hidden_layers": 6}
OF_TRANSFORMERS = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "layer_norm_eps": 1e-6}


def test_labels_that_were_taken_away_do_not_come_back(tmp_path: Path) -> None:
    name = "vit_nano_4.cifar10"
    model = create(name)
    model.reset_head(10)
    model.save(tmp_path)
    assert load(tmp_path).labels is create(name, weights=tmp_path).labels is None
    model.labels = create(name).labels
    model.save(tmp_path)
    assert create(name, weights=tmp_path).labels == create(name).labels


@pytest.mark.parametrize("about", [
    OF_TIMM | {"model_args": {"num_heads": 3, "img_size": 32, "patch_size": 4, "depth": 6}},
    OF_TRANSFORMERS | NANO | {"num_attention_heads": 3, "image_size": 32, "id2label": dict(enumerate(DOORS))},
])  # fmt: skip
def test_other_labels_in_other_libraries_configs_come_first(about: dict[str, Any], tmp_path: Path) -> None:
    name = "vit_nano_4.cifar10"
    save_file(create(name).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(about))
    for model in (create(name, weights=tmp_path), load(tmp_path, config=registry.find(name).config)):
        assert model.labels == ("door",) * 10


@pytest.mark.parametrize(("changes", "resize"), [
    ({"mean": [0.5] * 3}, (32, 32)), ({"crop_pct": 0.5}, (64, 64)), ({"crop_pct": "x"}, None),
])  # fmt: skip
def test_other_preprocessing_in_timm_s_config_comes_first(changes: dict[str, Any], resize: Any, tmp_path: Path) -> None:
    name = "vit_nano_4.cifar10"
    create(name).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["vitlite"]
    config["pretrained_cfg"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = create(name, weights=tmp_path)
    if resize is not None:
        assert model.preprocess.transform.resize == resize
        return
    with pytest.raises(ImageError, match="crop_pct must be a number, got 'x'"):
        model.preprocess(torch.zeros(3, 32, 32))


@pytest.mark.parametrize(("changes", "labels"), [
    ({"id2label": {"2": "c", "0": "a", "1": "b"}}, ("a", "b", "c")),
    ({"id2label": {"0": "a", "1": "b", "5": "c"}}, None),
    ({"problem_type": "regression"}, None),
    ({"problem_type": "multi_label_classification"}, ("a", "b", "c")),
])  # fmt: skip
def test_labels_are_those_of_the_outputs_or_none(changes: dict[str, Any], labels: Any, tmp_path: Path) -> None:
    about = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "num_attention_heads": 2,
        **TRANSFORMERS_SIZES,
    }
    names = {"id2label": {"0": "a", "1": "b", "2": "c"}}
    save_file(state_of(TINY), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(about | names | changes))
    assert load(tmp_path, config=TINY.replace(norm_eps=1e-12)).labels == labels


def test_timm_s_labels_by_number(tmp_path: Path) -> None:
    about = {"architecture": "vit_tiny_patch16_224", **SIZED}
    save_file(state_of(TINY), tmp_path / "model.safetensors")
    for names, labels in (({"1": "b", "0": "a", "2": "c"}, ("a", "b", "c")), ({"0": "a", "3": "b", "4": "c"}, None)):
        (tmp_path / "config.json").write_text(json.dumps(about | {"label_names": names}))
        assert load(tmp_path).labels == labels


def test_positions_that_flax_computes_are_refused(tmp_path: Path) -> None:
    name = "Transformer/encoderblock_0/"
    shapes = {
        "embedding/kernel": (8, 8, 3, 16),
        f"{name}LayerNorm_0/scale": (16,),
        f"{name}LayerNorm_1/scale": (16,),
        f"{name}MlpBlock_0/Dense_0/kernel": (16, 24),
        f"{name}MultiHeadDotProductAttention_0/query/kernel": (16, 2, 8),
        f"{name}MultiHeadDotProductAttention_0/key/kernel": (16, 2, 8),
        f"{name}MultiHeadDotProductAttention_0/value/kernel": (16, 2, 8),
    }
    np.savez(tmp_path / "vit.npz", **{name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    with pytest.raises(CheckpointError, match="does not contain pos_embedding"):
        load(tmp_path / "vit.npz")


# ---- the Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield hub


def test_a_zoo_name_cold_and_then_without_any_socket(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = registry.info("vit_tiny_16")
    save_file(state_of(record.config), tmp_path / "vit.safetensors")
    commit = hub.publish(record.repo, model_safetensors=(tmp_path / "vit.safetensors").read_bytes())
    model = create("vit_tiny_16")
    source = model.source
    assert (source.name, source.repo, source.commit, source.verified) == (record.name, record.repo, commit, "hub")
    assert len(model.labels) == 1000
    asked = len(hub.log)

    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    again = create("vit_tiny_16", num_classes=5, image_size=384)
    assert len(hub.log) == asked
    assert again.source.sha256 == source.sha256
    assert torch.equal(again.cls_token, model.cls_token)


def test_a_repository_of_transformers_with_shards(hub: Hub, tmp_path: Path) -> None:
    from peers import transformers

    kind = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=32, patch_size=8,
        id2label={0: "ant", 1: "bee", 2: "cow"},
    )  # fmt: skip
    transformers.ViTForImageClassification(kind).save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    processor = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "hf" / "preprocessor_config.json").write_text(json.dumps(processor))
    files = {
        path.name.rpartition(".")[0] + "_" + path.suffix[1:]: path.read_bytes() for path in (tmp_path / "hf").iterdir()
    }
    commit = hub.publish("me/fine-tune", **files)
    model = load("me/fine-tune")
    assert model.labels == ("ant", "bee", "cow")
    assert model.config.norm_eps == 1e-12
    assert model.preprocess.transform.interpolation == "bilinear"
    assert (model.source.repo, model.source.commit) == ("me/fine-tune", commit)
    before = len(hub.log)
    assert load(f"me/fine-tune@{commit}").source.commit == commit
    assert len(hub.log) == before


def test_a_repository_without_safetensors(hub: Hub) -> None:
    hub.publish("me/old", pytorch_model_bin=b"x", config_json=b"{}")
    with pytest.raises(
        DownloadError,
        match=r"me/old has no model.safetensors and no .*json. If it contains a pickle",
    ):
        load("me/old")
    with pytest.raises(DownloadError):
        load("me/nothing")


def test_what_is_for_training_alone_changes_no_answer() -> None:
    plain = create("vit_nano_4.cifar10")
    trained = create("vit_nano_4.cifar10", drop_path=0.5, checkpointing=True)
    assert (trained.config.drop_path, trained.config.checkpointing) == (0.5, True)
    assert trained.labels == plain.labels
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(trained(images), plain(images))
    assert not torch.equal(trained.train()(images), plain.train()(images))
    again = load(plain.source.path.parent / "vit_nano_4.cifar10.safetensors", config=plain.config, drop_path=0.5)
    assert again.config.drop_path == 0.5
    assert create("vit_nano_4", weights=None, drop_path=0.5).blocks[5].drop_path.rate == 0.5
    with pytest.raises(ConfigError, match="drop_path must be at least 0 and below 1, got 2"):
        create("vit_nano_4.cifar10", drop_path=2)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.complex64, torch.float8_e4m3fn, "float32"], ids=str)
def test_a_dtype_that_is_none_for_weights_is_refused(dtype: Any) -> None:
    for weights in ("default", None):
        with pytest.raises(ConfigError, match=r"dtype must be one of torch.float64, .* For int8, use vitlite.optimize"):
            create("vit_nano_4.cifar10", weights=weights, dtype=dtype)


def test_values_that_a_changed_load_left_out_are_scanned_later(tmp_path: Path) -> None:
    """With two channels the third is not read, so the file is not known to be finite."""
    model = create("vit_test_16.r160_in1k", weights=None)
    weights = model.state_dict()
    weights["patch_embed.proj.weight"][:, 2] = float("nan")
    file = tmp_path / "weights.safetensors"
    save_file(weights, file)
    create("vit_test_16.r160_in1k", weights=file, channels=2)
    with pytest.raises(CheckpointError, match="contains NaN or infinity"):
        create("vit_test_16.r160_in1k", weights=file)
