"""What stands beside weights is read as each library means it, and written so that it is read back."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import TINY, TRANSFORM

from vitlite import ViT, ViTConfig, load
from vitlite.checkpoints.convert import convert
from vitlite.checkpoints.metadata import (
    Metadata,
    contradictions,
    metadata_content,
    metadata_contents_for_transformers,
    read_metadata,
    transform_from_record,
    transform_from_timm,
    transform_from_transformers,
    transform_from_vitlite,
    transform_of,
    transform_to_timm,
    transform_to_transformers,
)
from vitlite.errors import CheckpointError, ConfigError


def write_metadata(folder: Path, *what: Any) -> None:
    (folder / "config.json").write_text(json.dumps(metadata_content(*what)))


def write_metadata_for_transformers(folder: Path, *what: Any) -> None:
    for name, content in metadata_contents_for_transformers(*what).items():
        (folder / name).write_text(json.dumps(content))


def beside(folder: Path, config: dict[str, Any], pictures: dict[str, Any] | None = None) -> Metadata:
    """What is read of these files."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").unlink(missing_ok=True)
    if pictures is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    return read_metadata(folder)


def test_a_folder_without_any_says_nothing(tmp_path: Path) -> None:
    assert read_metadata(tmp_path) == beside(tmp_path, {"some": "other"}, {"size": 3}) == Metadata()
    assert transform_of(Metadata(), (32, 32)) is None


# ---- vitlite's


def test_what_is_written_is_read_back_whole(tmp_path: Path) -> None:
    write_metadata(tmp_path, TINY, ("ant", "bee", "cow"), TRANSFORM)
    again = read_metadata(tmp_path)
    assert again.claims == json.loads(json.dumps(TINY.to_dict()))
    assert again.labels == ("ant", "bee", "cow")
    assert transform_of(again, None) == TRANSFORM
    assert transform_of(again, (64, 64)).resize == (72, 72)
    assert again.library == "vitlite"
    write_metadata(tmp_path, TINY, None, None)
    again = read_metadata(tmp_path)
    assert (again.labels, again.transform) == (None, None)


def test_contradictions_are_named_with_both_values(tmp_path: Path) -> None:
    write_metadata(tmp_path, TINY, ("ant", "bee", "cow"), TRANSFORM)
    again = read_metadata(tmp_path)
    assert contradictions(again, ("ant", "bee", "cow"), TRANSFORM) == []
    assert contradictions(again, None, TRANSFORM) == [], "where only the file says something"
    assert contradictions(again, ("ant", "bat", "cow"), replace(TRANSFORM, mean=(0.1,) * 3)) == [
        "1 is bee, not bat",
        "mean is (0.5, 0.5, 0.5), not (0.1, 0.1, 0.1)",
    ]
    assert contradictions(Metadata(), ("ant",), TRANSFORM) == []
    assert contradictions(again, ("ant", "bee"), TRANSFORM) == ["3 classes are named, not 2"]
    assert contradictions(replace(again, labels=None, unlabelled="none is 0"), None, TRANSFORM) == []
    assert contradictions(replace(again, labels=None, unlabelled="none is 0"), ("ant",), TRANSFORM) == [
        "its classes are others: none is 0"
    ]
    (tmp_path / "config.json").write_text(json.dumps({"vitlite": {"config": {}, "labels": ["\x1b[2J" * 99]}}))
    (said,) = contradictions(read_metadata(tmp_path), ("ant",), TRANSFORM)
    assert said.isprintable()
    assert len(said) < 400


def test_recipe_survives_json():
    assert transform_from_vitlite(json.loads(json.dumps(TRANSFORM.to_dict()))) == TRANSFORM
    with pytest.raises(ConfigError, match=r"not the fields of a TransformConfig: .*colour"):
        transform_from_vitlite(TRANSFORM.to_dict() | {"colour": 1})
    with pytest.raises(ConfigError, match=r"size must be \(height, width\) in pixels, .*got 'big'"):
        transform_from_vitlite(TRANSFORM.to_dict() | {"size": "big"})


OTHER_SIZES = [(side, side) for side in range(32, 1030, 33)] + [(64, 448), (512, 384)]


@pytest.mark.parametrize("size", [(64, 64), (224, 224), (378, 378), (96, 64)])
@pytest.mark.parametrize("crop_pct", [0.93, 0.8873, 0.984375, 0.875, 0.9, 1.0])
def test_a_recipe_that_was_saved_scales_as_the_one_that_was_read(
    size: tuple[int, int], crop_pct: float, tmp_path: Path
) -> None:
    words = {"crop_pct": crop_pct, "interpolation": "bicubic", "mean": [0.5], "std": [0.25]}
    network = TINY.replace(image_size=size, patch_size=2)
    config = json.loads(json.dumps(metadata_content(network, None, transform_from_timm(words, size))))
    for_timm = {name: content for name, content in config.items() if name != "vitlite"}
    for saved in (config, for_timm | {"pretrained_cfg": for_timm["pretrained_cfg"] | {"input_size": [3, *size]}}):
        metadata = beside(tmp_path, saved)
        for other in OTHER_SIZES:
            again = transform_of(metadata, other)
            assert again is not None
            assert again.resize == transform_from_timm(words, other).resize
            assert again.scaled(size).resize == transform_from_timm(words, size).resize


def test_a_share_that_nobody_said_is_guessed_once(tmp_path: Path) -> None:
    """224 of 248 are .9 of it as well as .903, which at other sizes is something else."""
    recipe = replace(TRANSFORM, size=(224, 224), resize=(248, 248))
    assert recipe.share is None
    assert "share" not in metadata_content(TINY, None, recipe)["vitlite"]["preprocess"]
    config = json.loads(json.dumps(metadata_content(TINY.replace(image_size=224), None, recipe)))
    of_vitlite = beside(tmp_path, config)
    del config["vitlite"]
    of_timm = beside(tmp_path, config)
    for size in OTHER_SIZES:
        wanted = recipe.scaled(size).resize
        for metadata in (of_vitlite, of_timm):
            again = transform_of(metadata, size)
            assert again is not None
            assert again.resize == wanted


def test_a_share_of_other_sizes_is_none() -> None:
    recipe = replace(TRANSFORM, size=(224, 224), resize=(240, 240), share=0.93)
    assert recipe.share == 0.93
    changed = replace(recipe, resize=(256, 256))
    assert changed.share is None
    assert changed.scaled((448, 448)).resize == (512, 512)
    assert recipe == replace(recipe, share=None)  # the same pixels
    for share in (0, 1.5, "much", True):
        with pytest.raises(ConfigError, match="share must be made of numbers from 1e-06 to 1, got"):
            transform_from_vitlite(recipe.to_dict() | {"share": share})


def test_a_share_is_no_contradiction(tmp_path: Path) -> None:
    recipe = replace(TRANSFORM, size=(224, 224), resize=(240, 240))
    metadata = beside(tmp_path, json.loads(json.dumps(metadata_content(TINY, None, recipe))))
    assert contradictions(metadata, None, replace(recipe, share=0.93)) == []


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
    assert metadata.claims == {
        "pool": "mean", "num_classes": 3, "heads": 4, "image_size": (64, 32), "gelu": "tanh", "mlp": "gelu",
        "cls_position": False, "dim": 48, "layer_scale": None, "patch_size": 8,
    }  # fmt: skip
    assert metadata.labels == ("ant", "n2", "n3")
    assert metadata.architecture == "vit_base_patch16_224.some"
    assert "norm_eps" not in metadata.usual, "another norm may have another"
    library, fields = metadata.transform or ("", {})
    assert (library, fields["input_size"]) == ("timm", [1, 64, 32]), "the model takes no other"
    bare = beside(tmp_path, PLAIN)
    assert (bare.claims, bare.labels, bare.transform) == ({"pool": "cls", "patch_size": 16}, None, None)
    assert bare.usual == {
        "image_size": 224, "heads": 12, "norm_eps": 1e-6, "gelu": "exact", "cls_position": True, "resample": "timm",
        "final_norm": True,
    }  # fmt: skip
    assert bare.built == {
        "dim": 768, "depth": 12, "mlp_dim": 3072, "mlp": "gelu", "class_token": True, "registers": 0, "qkv_bias": True,
        "pre_norm": False, "fc_norm": False, "layer_scale": None, "positions": "learned",
    }  # fmt: skip
    assert metadata.built.keys() == bare.built.keys() - {
        "dim",
        "mlp_dim",
        "mlp",
        "fc_norm",
        "layer_scale",
    }  # arguments say otherwise
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
    assert said.claims["patch_size"] == pixels


def test_two_numbers_of_classes(tmp_path: Path) -> None:
    """timm makes a new head for the one, and loads nothing for the other, without a word."""
    about = {"architecture": "vit_base_patch16_224", "num_classes": 3, "model_args": {"num_classes": 2}}
    with pytest.raises(CheckpointError, match=r"config\.json: num_classes is 3, and in model_args 2"):
        beside(tmp_path, about)


def test_patches_with_two_sides(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: patch_size is 16 x 8; vitlite's patches are square"):
        beside(tmp_path, {"architecture": "vit_base_patch16_224", "model_args": {"patch_size": [16, 8]}})


@pytest.mark.parametrize(("activation", "gelu"), [("gelu", "exact"), ("gelu_tanh", "tanh"), ("quick_gelu", "quick")])
def test_a_gelu_of_timm_s_gates_nothing(activation: str, gelu: str, tmp_path: Path) -> None:
    """timm's dinov2 giants gate by act_layer, and with a GELU compute what vitlite does not."""
    said = beside(tmp_path, {"architecture": "vit_giant_patch14_dinov2", "model_args": {"act_layer": activation}})
    assert (said.claims["gelu"], said.claims["mlp"]) == (gelu, "gelu")
    said = beside(tmp_path, {"architecture": "vit_giant_patch14_dinov2"})
    assert ("mlp" in said.claims, said.built["mlp"]) == (False, "swiglu")


def test_timm_s_older_configs_are_in_one(tmp_path: Path) -> None:
    metadata = beside(
        tmp_path, PLAIN | {"mean": [0.5], "input_size": [3, 64, 64], "fixed_input_size": True, "tag": "x"}
    )
    assert (metadata.usual["image_size"], metadata.architecture) == (64, "vit_base_patch16_224.x")
    assert metadata.transform is not None


@pytest.mark.parametrize(("args", "input_size"), [
    ({"img_size": 64}, [1, 64, 64]), ({"img_size": 64, "dynamic_img_size": True}, [3, 224, 224]), ({}, [3, 224, 224]),
])  # fmt: skip
def test_the_size_that_timm_prepares_pictures_for(args: dict[str, Any], input_size: list[int], tmp_path: Path) -> None:
    pretrained = {"mean": [0.5], "input_size": [3, 224, 224]}
    metadata = beside(tmp_path, PLAIN | {"model_args": args, "pretrained_cfg": pretrained})
    _, fields = metadata.transform or ("", {})
    assert fields["input_size"] == input_size


@pytest.mark.parametrize(("pools", "pool"), [
    ({}, "cls"), ({"global_pool": "avg"}, "mean"), ({"pretrained_cfg": {"global_pool": "token"}}, "cls"),
    ({"pretrained_cfg": {"global_pool": "avg"}}, None), ({"global_pool": ""}, None),
    ({"model_args": {"global_pool": "avg"}, "pretrained_cfg": {"global_pool": "token"}}, "mean"),
])  # fmt: skip
def test_what_timm_pools_is_told_or_open(pools: dict[str, Any], pool: str | None, tmp_path: Path) -> None:
    metadata = beside(tmp_path, PLAIN | pools)
    assert metadata.claims.get("pool") == pool
    assert "pool" not in metadata.usual


def test_a_recipe_goes_to_timm_and_comes_back(tmp_path: Path) -> None:
    fields = transform_to_timm(TRANSFORM)
    assert fields is not None
    assert transform_from_timm(fields, TRANSFORM.size) == TRANSFORM
    write_metadata(tmp_path, TINY, ("ant", "bee", "cow"), TRANSFORM)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["vitlite"]  # timm does not read this
    again = beside(tmp_path, config)
    assert transform_of(again, None) == TRANSFORM
    assert again.labels == ("ant", "bee", "cow")
    assert again.claims == {name: getattr(TINY, name) for name in again.claims}


def test_timm_config():
    config = {"input_size": [3, 224, 224], "crop_pct": 0.9, "interpolation": "bicubic", "mean": [0.5], "std": [0.25]}
    recipe = transform_from_timm(PLAIN | {"pretrained_cfg": config})
    assert (recipe.size, recipe.resize, recipe.mode, recipe.margin) == ((224, 224), (248, 248), "center", "nearest")
    assert transform_from_timm(config | {"crop_pct": 1.0}, (384, 320)).resize == (384, 320)
    assert transform_from_timm(config | {"crop_mode": "squash"}).resized(1, 1000) == (248, 248)
    with pytest.raises(ConfigError, match=r"has no crop_pct, mean\. Write an images.TransformConfig by hand"):
        transform_from_timm({"interpolation": "bicubic", "std": [1]})
    with pytest.raises(ConfigError, match=r"mode must be one of \('center', 'squash'\), got 'border'"):
        transform_from_timm(config | {"crop_mode": "border"})


def test_record():
    fields = {"crop_pct": 0.875, "crop_mode": "squash", "interpolation": "bilinear", "mean": (0.0,), "std": (1.0,)}
    record = SimpleNamespace(**fields, config=ViTConfig(image_size=14, patch_size=7), pixels=16)
    recipe = transform_from_record(record, (16, 32))
    assert (recipe.size, recipe.resize, recipe.mode, recipe.cut) == ((16, 32), (18, 36), "squash", None)
    recipe = transform_from_record(record, (14, 14))
    assert (recipe.size, recipe.resize, recipe.cut) == ((14, 14), (18, 18), (16, 16))


@pytest.mark.parametrize("size", [(224, 224), (224, 448), (96, 64)])
@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 0.95, 1.0])
def test_a_recipe_is_scaled_as_timm_counts(size, crop_pct):
    config = {"crop_pct": crop_pct, "interpolation": "bicubic", "mean": [0.5], "std": [0.25]}
    for other in ((384, 384), (256, 320), size):
        assert transform_from_timm(config, size).scaled(other) == transform_from_timm(config, other)


# ---- transformers'


def test_configs_say_what_their_classes_assume(tmp_path: Path) -> None:
    for kind, eps, gelu in (("vit", 1e-12, "exact"), ("dinov2", 1e-6, "exact"), ("clip_vision_model", 1e-5, "quick")):
        metadata = beside(tmp_path, {"model_type": kind})
        assert (metadata.claims, metadata.library) == ({}, "transformers")
        assert metadata.usual == {"image_size": 224, "heads": 12, "norm_eps": eps, "gelu": gelu}
    for kind, named in (("vit", "ViT"), ("clip", "CLIP")):
        for pictures in ({"size": 16}, {"size": 16, "feature_extractor_type": "X"}):
            _, fields = beside(tmp_path, {"model_type": kind}, pictures).transform or ("", {})
            assert fields.get("image_processor_type") == (None if "feature_extractor_type" in pictures else named)
    for sides, patch_size in (([8, 8], 8), ([8, 16], (8, 16))):
        assert beside(tmp_path, {"model_type": "vit", "patch_size": sides}).claims["patch_size"] == patch_size


def test_the_tower_of_clip_is_what_counts_and_older_configs_say_it_twice(tmp_path: Path) -> None:
    tower = {"model_type": "clip_vision_model", "num_attention_heads": 4, "temperature": 1.0}
    text = {"hidden_size": 8, "num_attention_heads": 2, "rope_theta": 3}
    both = {"model_type": "clip", "text_config": text, "vision_config": tower, "vision_config_dict": None}
    assert beside(tmp_path, both).claims == {"heads": 4}
    both["vision_config_dict"] = {"num_attention_heads": 8, "hidden_act": "gelu"}
    assert beside(tmp_path, both).claims == {"heads": 8, "gelu": "exact"}, "transformers lets it win"


def test_the_width_of_the_mlp_is_said_in_two_ways(tmp_path: Path) -> None:
    config = {"intermediate_size": 64, "mlp_ratio": 4}
    assert beside(tmp_path, {"model_type": "vit", "intermediate_size": 64}).claims["mlp_dim"] == 64
    assert "mlp_dim" not in beside(tmp_path, {"model_type": "dinov2"} | config).claims, "DINOv2 uses the ratio"


@pytest.mark.parametrize(("config", "classes", "labels"), [
    ({"id2label": {"1": "bee", "0": "ant"}}, 2, ("ant", "bee")), ({}, 2, ("LABEL_0", "LABEL_1")),
    ({"num_labels": 3}, 3, ("LABEL_0", "LABEL_1", "LABEL_2")),
    ({"num_labels": 5, "id2label": {"0": "ant"}}, 1, ("ant",)),
    ({"id2label": {"0": "ant", "2": "cow"}}, 2, "of the 2 classes that are named, none has the number 1"),
    ({"architectures": ["ViTModel"]}, None, None),
    ({"id2label": {"0": "ant"}, "problem_type": "multi_label_classification"}, 1, "problem_type is multi_label_cl"),
    ({"id2label": {"0": "ant"}, "problem_type": "single_label_classification"}, 1, ("ant",)),
    ({"architectures": None}, None, None),
])  # fmt: skip
def test_classes(
    config: dict[str, Any], classes: int | None, labels: tuple[str, ...] | str | None, tmp_path: Path
) -> None:
    """The labels; or why the names of classes are none."""
    metadata = beside(tmp_path, {"model_type": "vit", "architectures": ["ViTForImageClassification"]} | config)
    assert metadata.claims.get("num_classes") == classes
    if isinstance(labels, str):
        assert metadata.labels is None
        assert metadata.unlabelled.startswith(labels)
    else:
        assert (metadata.labels, metadata.unlabelled) == (labels, "")


@pytest.mark.parametrize("mode", ["center", "squash"])
def test_a_recipe_goes_to_transformers_and_comes_back(mode: Any, tmp_path: Path) -> None:
    recipe = replace(TRANSFORM, mode=mode, margin="down")
    assert transform_from_transformers(transform_to_transformers(recipe)) == recipe
    write_metadata_for_transformers(tmp_path, TINY, ("ant", "bee", "cow"), recipe)
    again = read_metadata(tmp_path)
    assert transform_of(again, None) == recipe
    assert again.labels == ("ant", "bee", "cow")
    assert again.claims == {name: getattr(TINY, name) for name in again.claims}


def test_a_recipe_that_transformers_has_not_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"cover 36 x 40 pixels\. Convert to a \.safetensors file"):
        metadata_contents_for_transformers(TINY, None, replace(TRANSFORM, resize=(36, 40), margin="down"))
    assert metadata_contents_for_transformers(TINY, None, None).keys() == {"config.json"}


@pytest.mark.parametrize("labels", [(1, 2, 3), ("a", None, "c"), ("a", "b", "c" * 2000), ("a", "b", "\ud800")])
def test_labels_that_could_not_be_read_back_are_not_written(labels: Any) -> None:
    with pytest.raises(CheckpointError, match=r"vitlite\.labels\[\d\] must be a text of at most 1000 letters, got "):
        metadata_content(TINY, labels, None)
    with pytest.raises(CheckpointError, match=r"must be a text of at most 1000 letters, got |id2label must be"):
        metadata_contents_for_transformers(TINY, labels, None)


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
    recipe = transform_from_transformers(HUGGING | config)
    assert (recipe.size, recipe.resize, recipe.mode, recipe.margin) == ((size,) * 2, (resize,) * 2, mode, "down")
    assert recipe.interpolation == {2: "bilinear", 3: "bicubic"}[config["resample"]]
    assert recipe.scale == 1 / 255


def test_transformers_switches():
    config = {"size": 256, "crop_size": 224, "resample": 3, "do_center_crop": True} | HUGGING
    assert transform_from_transformers(config, (384, 384)).resize == (438, 438)
    assert transform_from_transformers(config | {"do_rescale": False}).scale == 1
    assert transform_from_transformers(config | {"rescale_factor": 1 / 127.5}).scale == 1 / 127.5
    assert transform_from_transformers(config | {"do_normalize": False}).mean == (0.0,)
    with pytest.raises(ConfigError, match=r"fixes no image size"):
        transform_from_transformers(config | {"do_resize": False})
    with pytest.raises(ConfigError, match=r"fixes no image size"):
        transform_from_transformers({"size": {"shortest_edge": 224}, "resample": 3} | HUGGING)
    with pytest.raises(ConfigError, match=r"fixes no image size"):
        transform_from_transformers(config | {"size": {"shortest_edge": 224, "longest_edge": 300}})
    with pytest.raises(ConfigError, match="has no crop_size"):
        transform_from_transformers({"size": 224, "do_center_crop": True, "resample": 3} | HUGGING)
    with pytest.raises(ConfigError, match="has no size, resample"):
        transform_from_transformers(HUGGING)
    with pytest.raises(ConfigError, match=r"interpolation must be one of .*, got 1"):
        transform_from_transformers(config | {"resample": 1})


@pytest.mark.parametrize(("change", "text"), [
    ({"crop_pct": 0.875}, "crop_pct"), ({"keep_aspect_ratio": True}, "keep_aspect_ratio"), ({"do_pad": True}, "do_pad"),
    ({"do_thumbnail": True}, "do_thumbnail"), ({"include_top": True}, "include_top"),
    ({"rescale_offset": True}, "rescale_offset"), ({"do_flip_channel_order": True}, "do_flip_channel_order"),
    ({"image_processor_type": "LevitImageProcessor"}, "LevitImageProcessor"),
    ({"image_processor_type": "VivitImageProcessor"}, "VivitImageProcessor"),
    ({"image_processor_type": None}, "no image_processor_type"),
])  # fmt: skip
def test_processors_that_do_something_else_are_refused(change, text):
    config = {"size": 224, "resample": 3, **HUGGING}
    assert transform_from_transformers(config | {"do_pad": False, "crop_pct": None}).resize == (224, 224)
    with pytest.raises(
        ConfigError, match=f"config has {text}, which is not understood. Write an images.TransformConfig"
    ):
        transform_from_transformers(config | change)


@pytest.mark.parametrize("processor", ["CLIP", "Bit", "Siglip", "ViTHybrid"])
def test_a_size_of_one_number_is_the_shorter_edge_where_the_processor_says_so(processor):
    config = HUGGING | {"size": 256, "resample": 3, "image_processor_type": f"{processor}ImageProcessor"}
    recipe = transform_from_transformers(config | {"do_center_crop": True, "crop_size": 224})
    assert (recipe.mode, recipe.resize) == ("center", (256, 256))
    with pytest.raises(ConfigError, match="fixes no image size"):  # each picture keeps its own
        transform_from_transformers(config | {"do_center_crop": False})


def test_what_dinov3_s_processor_is_not_told_is_as_usual():
    config = HUGGING | {"size": 224, "resample": 2, "image_processor_type": "DINOv3ViTImageProcessorFast"}
    assert transform_from_transformers(config) == transform_from_transformers(config | {"do_rescale": True})
    with pytest.raises(ConfigError, match="has no resample"):
        transform_from_transformers({name: value for name, value in config.items() if name != "resample"})


def test_preprocessing_that_is_not_understood_has_a_remedy_in_both_tongues():
    config = {"size": 224, "resample": 3, **HUGGING}
    for wrong, text in (
        (
            config | {"do_pad": True},
            "Known are the processors ViT, DeiT, CLIP, Bit, Beit, Siglip, DINOv3ViT, ViTHybrid. Name a checkpoint "
            "like it",
        ),
        ({"image_processor_type": "ViT"}, "has no size, resample. Name a checkpoint like it"),
    ):
        with pytest.raises(ConfigError, match=r"Write an images\.TransformConfig by hand") as error:
            transform_from_transformers(wrong)
        assert f"{text}: --model NAME --weights PATH." in error.value.for_command_line()
        assert "TransformConfig" not in error.value.for_command_line()


def test_an_adapter_beside_weights_is_not_left_out(tmp_path: Path) -> None:
    """transformers adds it to the weights that it opens, whoever wrote them there."""
    model = ViT(TINY)
    model.save(tmp_path)
    load(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    for place in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError, match=r"has an adapter beside its weights .* With the adapter: peft's"):
            load(place)
    with pytest.raises(CheckpointError, match="has an adapter beside its weights"):
        convert(tmp_path, tmp_path / "converted", "timm")
