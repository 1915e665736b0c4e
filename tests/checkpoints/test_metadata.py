"""Metadata is read as the library that wrote it means it, and is read back as it was written."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import TINY, TRANSFORM

from vitlite import ViT, ViTConfig, load
from vitlite.checkpoints.convert import convert
from vitlite.checkpoints.formats.processors import transform_from_transformers, transform_to_transformers
from vitlite.checkpoints.formats.timm import transform_from_timm, transform_to_timm
from vitlite.checkpoints.formats.transformers import contents_for_transformers
from vitlite.checkpoints.formats.vitlite import metadata_content, transform_from_vitlite
from vitlite.checkpoints.metadata import Metadata, read_metadata, transform_from_record
from vitlite.errors import CheckpointError, ConfigError, ImageError


def write_metadata(folder: Path, *what: Any) -> None:
    (folder / "config.json").write_text(json.dumps(metadata_content(*what)))


def write_metadata_for_transformers(folder: Path, *what: Any) -> None:
    for name, content in contents_for_transformers(*what).items():
        (folder / name).write_text(json.dumps(content))


def beside(folder: Path, config: dict[str, Any], preprocessor: dict[str, Any] | None = None) -> Metadata:
    """What is read of these files."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").unlink(missing_ok=True)
    if preprocessor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return read_metadata(folder)


def test_a_folder_without_metadata(tmp_path: Path) -> None:
    assert read_metadata(tmp_path) == beside(tmp_path, {"some": "other"}, {"size": 3}) == Metadata()


# ---- vitlite's


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_metadata(tmp_path, TINY, ("ant", "bee", "cow"), TRANSFORM)
    again = read_metadata(tmp_path)
    assert again.fields == TINY.to_dict()
    assert again.labels == ("ant", "bee", "cow")
    assert again.transform == TRANSFORM
    assert again.transform.scaled((64, 64)).resize == (72, 72)
    assert (again.source, again.is_vitlite, again.names_network) == ("config.json", True, True)
    write_metadata(tmp_path, TINY, None, None)
    again = read_metadata(tmp_path)
    assert (again.labels, again.transform) == (None, None)


def test_transform_survives_json():
    assert transform_from_vitlite(json.loads(json.dumps(TRANSFORM.to_dict()))) == TRANSFORM
    with pytest.raises(ConfigError, match=r"Invalid preprocessing config: .*colour"):
        transform_from_vitlite(TRANSFORM.to_dict() | {"colour": 1})
    with pytest.raises(ConfigError, match=r"size must be .*got 'big'"):
        transform_from_vitlite(TRANSFORM.to_dict() | {"size": "big"})


def test_a_transform_that_is_not_valid_is_an_error_when_it_is_used(tmp_path: Path) -> None:
    content = metadata_content(TINY, None, TRANSFORM)
    content["vitlite"]["preprocess"]["mode"] = "border"
    assert "mode must be one of" in beside(tmp_path, content).transform_error
    model = ViT(TINY)
    model.preprocess = TRANSFORM
    model.save(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(file.read_text().replace(f'"mode": "{TRANSFORM.mode}"', '"mode": "border"'))
    with pytest.raises(ImageError, match=r"mode must be one of .* change the preprocessing in this folder") as caught:
        load(tmp_path / "model").preprocess(torch.zeros(3, 32, 32))
    assert "like=" not in str(caught.value), "it would not help"


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ([], "vitlite must be a JSON object"),
        ({"config": {"dim": "wide"}}, r"vitlite\.config: dim must be an integer from 1 to \d+, got 'wide'"),
        ({"config": {"wings": 2}}, r"vitlite\.config has unknown fields: wings\. If a newer version"),
        ({"config": {}, "labels": [1]}, r"vitlite\.labels must be a list or an object of strings, got \[1\]"),
    ],
)
def test_a_damaged_section_is_an_error(section: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {text}"):
        beside(tmp_path, {"vitlite": section})


OTHER_SIZES = [(side, side) for side in range(32, 1030, 33)] + [(64, 448), (512, 384)]


@pytest.mark.parametrize("size", [(64, 64), (224, 224), (378, 378), (96, 64)])
@pytest.mark.parametrize("crop_pct", [0.93, 0.8873, 0.984375, 0.875, 0.9, 1.0])
def test_a_transform_that_was_saved_scales_as_the_one_that_was_read(
    size: tuple[int, int], crop_pct: float, tmp_path: Path
) -> None:
    words = {"crop_pct": crop_pct, "interpolation": "bicubic", "mean": [0.5], "std": [0.25]}
    network = TINY.replace(image_size=size, patch_size=2)
    config = json.loads(json.dumps(metadata_content(network, None, transform_from_timm(words, size))))
    for_timm = {name: content for name, content in config.items() if name != "vitlite"}
    for saved in (config, for_timm | {"pretrained_cfg": for_timm["pretrained_cfg"] | {"input_size": [3, *size]}}):
        metadata = beside(tmp_path, saved)
        for other in OTHER_SIZES:
            again = metadata.transform.scaled(other)
            assert again.resize == transform_from_timm(words, other).resize
            assert again.scaled(size).resize == transform_from_timm(words, size).resize


def test_a_share_that_nobody_said_is_guessed_once(tmp_path: Path) -> None:
    """224 of 248 are .9 of it as well as .903, which at other sizes is something else."""
    transform = replace(TRANSFORM, size=(224, 224), resize=(248, 248))
    assert transform.crop_pct is None
    assert "share" not in metadata_content(TINY, None, transform)["vitlite"]["preprocess"]
    config = json.loads(json.dumps(metadata_content(TINY.replace(image_size=224), None, transform)))
    of_vitlite = beside(tmp_path, config)
    del config["vitlite"]
    of_timm = beside(tmp_path, config)
    for size in OTHER_SIZES:
        wanted = transform.scaled(size).resize
        for metadata in (of_vitlite, of_timm):
            assert metadata.transform.scaled(size).resize == wanted


def test_a_share_of_other_sizes_is_none() -> None:
    transform = replace(TRANSFORM, size=(224, 224), resize=(240, 240), crop_pct=0.93)
    assert transform.crop_pct == 0.93
    changed = replace(transform, resize=(256, 256))
    assert changed.crop_pct is None
    assert changed.scaled((448, 448)).resize == (512, 512)
    assert transform == replace(transform, crop_pct=None)  # the same pixels
    for share in (0, 1.5, "much"):
        with pytest.raises(ConfigError, match="crop_pct must be from 1e-06 to 1, got"):
            transform_from_vitlite(transform.to_dict() | {"crop_pct": share})


# ---- timm's


PLAIN = {"architecture": "vit_base_patch16_224"}


def test_timm_says_things_in_three_places(tmp_path: Path) -> None:
    metadata = beside(tmp_path, {
        "architecture": "vit_base_patch16_224", "num_classes": 3, "global_pool": "avg",
        "label_names": ["n1", "n2", "n3"],
        "model_args": {"img_size": [64, 32], "num_heads": 4, "act_layer": "gelu_tanh", "no_embed_class": True,
                       "norm_layer": "layernorm", "patch_size": [8, 8], "embed_dim": 48, "drop_path_rate": 0.1,
                       "init_values": 0.0, "mlp_layer": None},
        "pretrained_cfg": {"tag": "some", "global_pool": "token", "mean": [0.5], "input_size": [3, 224, 224],
                           "label_descriptions": {"n1": "ant"}},
    })  # fmt: skip
    stated = {
        "pool": "mean", "num_classes": 3, "heads": 4, "image_size": (64, 32), "mlp": "gelu_tanh",
        "cls_position": False, "dim": 48, "layer_scale": None, "patch_size": 8,
    }  # fmt: skip
    assert stated.items() <= metadata.fields.items()
    assert metadata.labels == ("ant", "n2", "n3")
    assert metadata.architecture == "vit_base_patch16_224.some"
    assert not {"norm", "norm_eps", "mlp_dim", "final_norm"} & metadata.fields.keys(), "arguments change these"
    assert (
        metadata.transform_error
        == "The preprocessing config has no crop_pct, interpolation, std. Add the missing values to the file."
    )
    plain = beside(tmp_path, PLAIN)
    assert (plain.labels, plain.transform, plain.usual_image_size) == (None, None, 224)
    assert plain.fields == {
        "heads": 12, "norm_eps": 1e-6, "cls_position": True, "resample": "timm", "final_norm": "tokens",
        "dim": 768, "depth": 12, "mlp_dim": 3072, "mlp": "gelu", "class_token": True, "registers": 0, "qkv_bias": True,
        "input_norm": "none", "inner_norm": "none", "layer_scale": None, "positions": "learned", "rope": None,
        "pool": "cls", "norm": "layer", "patch_size": 16,
    }  # fmt: skip
    former = {"labels": ["x", "y"], "label_names": ["n1", "n2"]}  # as it was called, all in one
    assert beside(tmp_path, PLAIN | former).labels == ("x", "y")
    assert beside(tmp_path, PLAIN | former | {"pretrained_cfg": {"tag": "x"}}).labels == ("n1", "n2")


@pytest.mark.parametrize(
    ("name", "given", "pixels"),
    [("vit_base_patch8_224", {}, 8), ("vit_base_patch8_224", {"patch_size": 4}, 4), ("vit_base_r50_s16_224", {}, 16),
     ("vit_tiny_r_s16_p8_224", {"patch_size": [4, 4]}, 16)],
)  # fmt: skip
def test_the_patches_that_timm_cuts(name: str, given: dict[str, Any], pixels: int, tmp_path: Path) -> None:
    """timm resizes the kernel of a file to these, silently; of a hybrid they are cells of its ResNet."""
    said = beside(tmp_path, {"architecture": name, "model_args": given})
    assert said.fields["patch_size"] == pixels


def test_two_numbers_of_classes(tmp_path: Path) -> None:
    """timm makes a new head for the one, and loads nothing for the other, without a word."""
    about = {"architecture": "vit_base_patch16_224", "num_classes": 3, "model_args": {"num_classes": 2}}
    with pytest.raises(
        CheckpointError,
        match=r"config\.json: num_classes is 2 in model_args, but the weights were trained with 3 classes",
    ):
        beside(tmp_path, about)


def test_patches_with_two_sides(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"config\.json: patch_size is 16 x 8, but vitlite supports only square patches"
    ):
        beside(tmp_path, {"architecture": "vit_base_patch16_224", "model_args": {"patch_size": [16, 8]}})


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu"])
def test_a_gelu_of_timm_s_gates_nothing(activation: str, tmp_path: Path) -> None:
    """timm's dinov2 giants gate by act_layer, and with a GELU compute what vitlite does not."""
    said = beside(tmp_path, {"architecture": "vit_giant_patch14_dinov2", "model_args": {"act_layer": activation}})
    assert said.fields["mlp"] == activation
    said = beside(tmp_path, {"architecture": "vit_giant_patch14_dinov2"})
    assert said.fields["mlp"] == "swiglu"


def test_timm_s_older_configs_are_in_one(tmp_path: Path) -> None:
    metadata = beside(
        tmp_path, PLAIN | {"mean": [0.5], "input_size": [3, 64, 64], "fixed_input_size": True, "tag": "x"}
    )
    assert (metadata.usual_image_size, metadata.architecture) == (64, "vit_base_patch16_224.x")


@pytest.mark.parametrize(("args", "size"), [
    ({"img_size": 64}, 64), ({"img_size": 64, "dynamic_img_size": True}, 224), ({}, 224),
])  # fmt: skip
def test_the_size_that_timm_prepares_images_for(args: dict[str, Any], size: int, tmp_path: Path) -> None:
    pretrained = {"mean": [0.5], "std": [0.5], "crop_pct": 1.0, "interpolation": "bicubic", "input_size": [3, 224, 224]}
    metadata = beside(tmp_path, PLAIN | {"model_args": args, "pretrained_cfg": pretrained})
    assert metadata.transform.size == (size, size)


@pytest.mark.parametrize(("pools", "pool"), [
    ({}, "cls"), ({"global_pool": "avg"}, "mean"), ({"pretrained_cfg": {"global_pool": "token"}}, "cls"),
    ({"pretrained_cfg": {"global_pool": "avg"}}, None),
    ({"model_args": {"global_pool": "avg"}, "pretrained_cfg": {"global_pool": "token"}}, "mean"),
])  # fmt: skip
def test_what_timm_pools_is_told_or_open(pools: dict[str, Any], pool: str | None, tmp_path: Path) -> None:
    metadata = beside(tmp_path, PLAIN | pools)
    assert metadata.fields.get("pool") == pool


def test_a_transform_goes_to_timm_and_comes_back(tmp_path: Path) -> None:
    fields = transform_to_timm(TRANSFORM)
    assert fields is not None
    assert transform_from_timm(fields, TRANSFORM.size) == TRANSFORM
    write_metadata(tmp_path, TINY, ("ant", "bee", "cow"), TRANSFORM)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["vitlite"]  # timm does not read this
    again = beside(tmp_path, config)
    assert again.transform == TRANSFORM
    assert again.labels == ("ant", "bee", "cow")
    assert again.fields == {name: getattr(TINY, name) for name in again.fields}


def test_timm_config():
    config = {"input_size": [3, 224, 224], "crop_pct": 0.9, "interpolation": "bicubic", "mean": [0.5], "std": [0.25]}
    transform = transform_from_timm(PLAIN | {"pretrained_cfg": config})
    assert (transform.size, transform.resize, transform.mode, transform.margin) == (
        (224, 224),
        (248, 248),
        "center",
        "nearest",
    )
    assert transform_from_timm(config | {"crop_pct": 1.0}, (384, 320)).resize == (384, 320)
    assert transform_from_timm(config | {"crop_mode": "squash"}).resized(1, 1000) == (248, 248)
    with pytest.raises(ConfigError, match=r"has no crop_pct, mean\."):
        transform_from_timm({"interpolation": "bicubic", "std": [1]})
    with pytest.raises(ConfigError, match="mode must be one of"):
        transform_from_timm(config | {"crop_mode": "border"})


def test_record():
    fields = {"crop_pct": 0.875, "crop_mode": "squash", "interpolation": "bilinear", "mean": (0.0,), "std": (1.0,)}
    record = SimpleNamespace(**fields, config=ViTConfig(image_size=14, patch_size=7), pixels=16)
    transform = transform_from_record(record).scaled((16, 32))
    assert (transform.size, transform.resize, transform.mode, transform.cut) == ((16, 32), (18, 36), "squash", None)
    transform = transform_from_record(record)
    assert (transform.size, transform.resize, transform.cut) == ((14, 14), (18, 18), (16, 16))


@pytest.mark.parametrize("size", [(224, 224), (224, 448), (96, 64)])
@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 0.95, 1.0])
def test_a_transform_is_scaled_as_timm_counts(size, crop_pct):
    config = {"crop_pct": crop_pct, "interpolation": "bicubic", "mean": [0.5], "std": [0.25]}
    for other in ((384, 384), (256, 320), size):
        assert transform_from_timm(config, size).scaled(other) == transform_from_timm(config, other)


# ---- transformers'


def test_a_silent_config_has_the_defaults_of_its_class(tmp_path: Path) -> None:
    for kind, eps, mlp in (("vit", 1e-12, "gelu"), ("dinov2", 1e-6, "gelu"), ("clip_vision_model", 1e-5, "quick_gelu")):
        metadata = beside(tmp_path, {"model_type": kind})
        assert metadata.usual_image_size == 224
        fields = {"dim": 768, "depth": 12, "heads": 12, "norm_eps": eps, "mlp": mlp}
        assert metadata.fields == fields
    processor = {"resample": 3, "image_mean": [0.5], "image_std": [0.5], "size": 16, "crop_size": 16}
    assert beside(tmp_path, {"model_type": "vit"}, processor).transform.mode == "squash"
    assert beside(tmp_path, {"model_type": "clip"}, processor).transform.mode == "center"
    processor["feature_extractor_type"] = "X"
    assert "'X' is not supported" in beside(tmp_path, {"model_type": "clip"}, processor).transform_error
    for sides, patch_size in (([8, 8], 8), ([8, 16], (8, 16))):
        assert beside(tmp_path, {"model_type": "vit", "patch_size": sides}).fields["patch_size"] == patch_size


def test_the_image_part_of_clip_counts_and_older_configs_have_it_twice(tmp_path: Path) -> None:
    tower = {"model_type": "clip_vision_model", "num_attention_heads": 4, "temperature": 1.0}
    text = {"hidden_size": 8, "num_attention_heads": 2, "rope_theta": 3}
    both = {"model_type": "clip", "text_config": text, "vision_config": tower, "vision_config_dict": None}
    assert beside(tmp_path, both).fields["heads"] == 4
    both["vision_config_dict"] = {"num_attention_heads": 8, "hidden_act": "gelu"}
    fields = beside(tmp_path, both).fields
    assert (fields["heads"], fields["mlp"]) == (8, "gelu"), "it comes first in transformers"


def test_the_width_of_the_mlp_is_stated_in_two_ways(tmp_path: Path) -> None:
    config = {"intermediate_size": 64, "mlp_ratio": 4}
    assert beside(tmp_path, {"model_type": "vit", "intermediate_size": 64}).fields["mlp_dim"] == 64
    assert "mlp_dim" not in beside(tmp_path, {"model_type": "dinov2"} | config).fields, "DINOv2 uses the ratio"


@pytest.mark.parametrize(("config", "classes", "labels"), [
    ({"id2label": {"1": "bee", "0": "ant"}}, 2, ("ant", "bee")), ({}, 2, ("LABEL_0", "LABEL_1")),
    ({"num_labels": 3}, 3, ("LABEL_0", "LABEL_1", "LABEL_2")),
    ({"num_labels": 5, "id2label": {"0": "ant"}}, 1, ("ant",)),
    ({"id2label": {"0": "ant", "2": "cow"}}, 2, "there are 2 labels, but none for class 1"),
    ({"architectures": ["ViTModel"]}, None, None),
    ({"id2label": {"0": "ant"}, "problem_type": "regression"}, 1, "problem_type is regression"),
    ({"id2label": {"0": "ant"}, "problem_type": "multi_label_classification"}, 1, ("ant",)),
    ({"id2label": {"0": "ant"}, "problem_type": "single_label_classification"}, 1, ("ant",)),
    ({"architectures": None}, None, None),
])  # fmt: skip
def test_classes(
    config: dict[str, Any], classes: int | None, labels: tuple[str, ...] | str | None, tmp_path: Path
) -> None:
    metadata = beside(tmp_path, {"model_type": "vit", "architectures": ["ViTForImageClassification"]} | config)
    assert metadata.fields.get("num_classes") == classes
    if isinstance(labels, str):
        assert metadata.labels is None
        assert metadata.labels_error.startswith(labels)
    else:
        assert (metadata.labels, metadata.labels_error) == (labels, "")


@pytest.mark.parametrize("mode", ["center", "squash"])
def test_a_transform_goes_to_transformers_and_comes_back(mode: Any, tmp_path: Path) -> None:
    transform = replace(TRANSFORM, mode=mode, margin="down")
    assert transform_from_transformers(transform_to_transformers(transform)) == transform
    write_metadata_for_transformers(tmp_path, TINY, ("ant", "bee", "cow"), transform)
    again = read_metadata(tmp_path)
    assert again.transform == transform
    assert again.labels == ("ant", "bee", "cow")
    assert again.fields == {name: getattr(TINY, name) for name in again.fields}


def test_a_transform_that_transformers_has_not_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"cover 36 x 40 pixels\. Convert to a \.safetensors file"):
        contents_for_transformers(TINY, None, replace(TRANSFORM, resize=(36, 40), margin="down"))
    assert contents_for_transformers(TINY, None, None).keys() == {"config.json"}


@pytest.mark.parametrize("labels", [(1, 2, 3), ("a", None, "c"), ("a", "b", "c" * 2000)])
def test_labels_that_could_not_be_read_back_are_not_written(labels: Any) -> None:
    with pytest.raises(CheckpointError, match=r"vitlite\.labels must be a list or an object of strings, got "):
        metadata_content(TINY, labels, None)
    with pytest.raises(CheckpointError, match="id2label must be a list or an object of strings"):
        contents_for_transformers(TINY, labels, None)


HUGGING = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "ViTImageProcessor"}


@pytest.mark.parametrize(
    ("config", "size", "resize", "mode"),
    [
        ({"size": 224, "resample": 2, "feature_extractor_type": "ViTFeatureExtractor"}, 224, 224, "squash"),
        ({"size": {"height": 224, "width": 224}, "resample": 2}, 224, 224, "squash"),
        ({"size": 256, "crop_size": 224, "do_center_crop": True, "resample": 3}, 224, 256, "squash"),
        (
            {"size": {"shortest_edge": 256}, "resample": 3, "image_processor_type": "BitImageProcessorFast"},
            224,
            256,
            "center",
        ),
        (
            {"size": 224, "crop_size": 224, "resample": 3, "image_processor_type": "CLIPImageProcessorPil"},
            224,
            224,
            "center",
        ),
        ({"size": 256, "resample": 3, "image_processor_type": "DeiTImageProcessor"}, 224, 256, "squash"),
        (
            {"size": 224, "crop_size": 192, "resample": 3, "do_center_crop": None},
            224,
            224,
            "squash",
        ),
        ({"size": 224, "crop_size": 192, "do_center_crop": False, "resample": 3}, 224, 224, "squash"),
    ],
)
def test_transformers_config(config, size, resize, mode):
    transform = transform_from_transformers(HUGGING | config)
    assert (transform.size, transform.resize, transform.mode, transform.margin) == (
        (size,) * 2,
        (resize,) * 2,
        mode,
        "down",
    )
    assert transform.interpolation == {2: "bilinear", 3: "bicubic"}[config["resample"]]
    assert transform.scale == 1 / 255


def test_transformers_switches():
    config = {"size": 256, "crop_size": 224, "resample": 3, "do_center_crop": True} | HUGGING
    assert transform_from_transformers(config).scaled((384, 384)).resize == (438, 438)
    assert transform_from_transformers(config | {"do_rescale": False}).scale == 1
    assert transform_from_transformers(config | {"rescale_factor": 1 / 127.5}).scale == 1 / 127.5
    assert transform_from_transformers(config | {"do_normalize": False}).mean == (0.0,)
    with pytest.raises(ConfigError, match=r"Unsupported preprocessing config: size is"):
        transform_from_transformers(config | {"do_resize": False})
    with pytest.raises(ConfigError, match=r"Unsupported preprocessing config: size is"):
        transform_from_transformers({"size": {"shortest_edge": 224}, "resample": 3} | HUGGING)
    with pytest.raises(ConfigError, match=r"Unsupported preprocessing config: size is"):
        transform_from_transformers(config | {"size": {"shortest_edge": 224, "longest_edge": 300}})
    with pytest.raises(ConfigError, match="Unsupported preprocessing config: size is"):
        transform_from_transformers({"size": 224, "do_center_crop": True, "resample": 3} | HUGGING)
    with pytest.raises(ConfigError, match="has no resample"):
        transform_from_transformers(HUGGING)
    with pytest.raises(ConfigError, match=r"interpolation must be one of .*, got 1"):
        transform_from_transformers(config | {"resample": 1})


@pytest.mark.parametrize(("change", "text"), [
    ({"crop_pct": 0.875}, "crop_pct"), ({"keep_aspect_ratio": True}, "keep_aspect_ratio"), ({"do_pad": True}, "do_pad"),
    ({"do_thumbnail": True}, "do_thumbnail"), ({"include_top": True}, "include_top"),
    ({"rescale_offset": True}, "rescale_offset"), ({"do_flip_channel_order": True}, "do_flip_channel_order"),
    ({"image_processor_type": "LevitImageProcessor"}, "Levit"),
    ({"image_processor_type": "VivitImageProcessor"}, "Vivit"),
    ({"image_processor_type": None}, "image processor ''"),
])  # fmt: skip
def test_processors_that_do_something_else_are_refused(change, text):
    config = {"size": 224, "resample": 3, **HUGGING}
    assert transform_from_transformers(config | {"do_pad": False, "crop_pct": None}).resize == (224, 224)
    with pytest.raises(ConfigError, match=f"{text}.* (is|does) not support(ed)?"):
        transform_from_transformers(config | change)


@pytest.mark.parametrize("processor", ["CLIP", "Bit", "Siglip", "ViTHybrid"])
def test_a_size_of_one_number_is_the_shorter_edge_where_the_processor_says_so(processor):
    config = HUGGING | {"size": 256, "resample": 3, "image_processor_type": f"{processor}ImageProcessor"}
    transform = transform_from_transformers(config | {"do_center_crop": True, "crop_size": 224})
    assert (transform.mode, transform.resize) == ("center", (256, 256))
    with pytest.raises(ConfigError, match="Unsupported preprocessing config: size is"):  # each picture keeps its own
        transform_from_transformers(config | {"do_center_crop": False})


def test_what_dinov3_s_processor_is_not_told_is_as_usual():
    config = HUGGING | {"size": 224, "resample": 2, "image_processor_type": "DINOv3ViTImageProcessorFast"}
    assert transform_from_transformers(config) == transform_from_transformers(config | {"do_rescale": True})
    with pytest.raises(ConfigError, match="has no resample"):
        transform_from_transformers({name: value for name, value in config.items() if name != "resample"})


def test_an_adapter_beside_weights_is_not_left_out(tmp_path: Path) -> None:
    """transformers adds it to the weights that it opens, whoever wrote them there."""
    model = ViT(TINY)
    model.save(tmp_path)
    load(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    for place in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError, match=r"contains an adapter .* Merge the adapter with peft"):
            load(place)
    with pytest.raises(CheckpointError, match="contains an adapter"):
        convert(tmp_path, tmp_path / "converted", "timm")
