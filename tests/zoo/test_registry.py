import doctest
import hashlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from vitlite import ViT, ViTConfig
from vitlite.checkpoints.formats.timm import ARCHITECTURES, Architecture
from vitlite.errors import UnknownNameError
from vitlite.nn import costs
from vitlite.presets import PRESETS, preset
from vitlite.zoo import registry

# Parameters with 1000 classes, without a head, and GMACs, as published or computed from the papers' formulas.
PUBLISHED = """
vit_tiny_16     224     5_717_416     5_524_416   1.254
vit_tiny_16     384     5_790_376     5_597_376   4.682
vit_small_8     224    22_055_272    21_670_272  22.406
vit_small_8     384    22_638_952    22_253_952  98.079
vit_small_16    224    22_050_664    21_665_664   4.599
vit_small_16    384    22_196_584    21_811_584  15.49
vit_small_32    224    22_878_952    22_493_952   1.143
vit_small_32    384    22_915_432    22_530_432   3.443
vit_base_8      224    86_576_872    85_807_872  78.148
vit_base_8      384    87_744_232    86_975_232  294.045
vit_base_16     224    86_567_656    85_798_656  17.564
vit_base_16     384    86_859_496    86_090_496  55.484
vit_base_32     224    88_224_232    87_455_232   4.409
vit_base_32     384    88_297_192    87_528_192  13.044
vit_large_14    224   304_203_752   303_178_752  81.013
vit_large_16    224   304_326_632   303_301_632  61.555
vit_large_16    384   304_715_752   303_690_752  191.066
vit_large_32    224   306_535_400   305_510_400  15.378
vit_large_32    384   306_632_680   305_607_680  45.276
vit_huge_14     224   632_045_800   630_764_800  167.295
vit_huge_16     224   632_199_400   630_918_400  127.315
vit_huge_16     384   632_685_800   631_404_800  390.858
vit_huge_32     224   634_960_360   633_679_360  31.856
vit_huge_32     384   635_081_960   633_800_960  93.516
vit_giant_14    224 1_012_611_432 1_011_202_432  267.031
vit_giant_16    224 1_012_780_392 1_011_371_392  203.408
vit_giant_16    384 1_013_315_432 1_011_906_432  620.465
vit_gigantic_14 224 1_844_440_680 1_842_775_680  483.748
"""

TINY = ViTConfig(image_size=(32, 48), patch_size=8, dim=32, depth=2, heads=4, mlp_dim=80, num_classes=7)


@pytest.mark.parametrize("row", PUBLISHED.split("\n")[1:-1])
def test_sizes_are_the_published_ones(row: str):
    name, size, params, headless, gmacs = row.split()
    config = preset(name).replace(image_size=int(size))
    assert costs.params(config) == int(params)
    assert costs.params(config.replace(num_classes=0)) == int(headless)
    assert round(costs.gmacs(config), 3) == float(gmacs)


def test_size_of_vit_huge_16():
    record = registry.info("vit_huge_16.ijepa_in1k_448")
    assert record.params == 631_668_480
    assert round(record.gmacs, 1) == 544.4


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("vit_small_plus_16.dinov3_lvd1689m_256", 28.7),
        ("vit_huge_plus_16.dinov3_lvd1689m_256", 840.5),
        ("vit_7b_16.dinov3_lvd1689m_256", 6716.0),
        ("vit_giant2_swiglu_14.dinov2_lvd142m_518", 1136.5),
        ("vit_so400m_14.siglip_webli", 427.7),
        ("vit_base_16.siglip_webli", 92.9),
        ("vit_base_16.deit_distilled_fb_in1k", 87.3),
        ("vit_base_r50_16.orig_in21k_ft_in1k_384", 99.0),
        ("vit_large_r50_32.augreg_in21k_ft_in1k", 329.0),
        ("vit_mediumd_16.reg4_gap_sbb2_e200_in12k_ft_in1k_256", 64.1),
    ],
)
def test_sizes_of_records_are_the_published_ones(name: str, millions: float):
    assert round(registry.info(name).params / 1e6, 1) == millions


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pool": "mean", "class_token": False},
        {"pool": "cls_and_mean", "final_norm": "pooled"},
        {"registers": 3, "cls_position": False, "layer_scale": 1e-5, "qkv_bias": False},
        {"input_norm": "tokens", "pre_logits": 24},
        {"inner_norm": "both", "head_dim": 16},
        {"input_norm": "patches", "head_dim": 16, "positions": "sincos2d", "num_classes": 0},
    ],
)
def test_layers_are_those_of_the_model(changes: dict):
    config = TINY.replace(**changes)
    with torch.device("meta"):
        model = ViT(config)
    layers = costs.layers(config)
    tensors = model.state_dict()
    for layer in layers:
        name = layer.name.replace("*", "1")
        weight = tensors.pop(name, None) if name in tensors else tensors.pop(f"{name}.weight", None)
        assert layer.weight == (() if weight is None else tuple(weight.shape)), layer
    assert all("blocks.0." in left or left.endswith(".bias") for left in tensors), tensors
    assert sum(layer.params for layer in layers) == sum(p.numel() for p in model.parameters())


def test_every_checkpoint_has_one_record():
    assert len(registry.RECORDS) >= 349
    assert len(registry.ALIASES) == len(registry.RECORDS) - 1
    for name, record in registry.RECORDS.items():
        assert (record.name, record.preset) == (name, name.split(".")[0])
    assert {r.name for r in registry.RECORDS.values() if not r.repo} == {"vit_nano_4.cifar10"}


def test_defaults_never_change():
    assert registry.DEFAULTS == {
        "vit_nano_4": "vit_nano_4.cifar10",
        "vit_test_16": "vit_test_16.r160_in1k",
        "vit_test2_16": "vit_test2_16.r160_in1k",
        "vit_tiny_16": "vit_tiny_16.augreg_in21k_ft_in1k",
        "vit_wee_16": "vit_wee_16.reg1_gap_sbb_in1k_256",
        "vit_little_16": "vit_little_16.reg1_gap_sbb_in12k_ft_in1k_256",
        "vit_small_16": "vit_small_16.augreg_in21k_ft_in1k",
        "vit_small_32": "vit_small_32.augreg_in21k_ft_in1k",
        "vit_mediumd_16": "vit_mediumd_16.reg4_gap_sbb2_e200_in12k_ft_in1k_256",
        "vit_betwixt_16": "vit_betwixt_16.reg4_gap_sbb2_e200_in12k_ft_in1k_256",
        "vit_base_8": "vit_base_8.augreg2_in21k_ft_in1k",
        "vit_base_16": "vit_base_16.augreg2_in21k_ft_in1k",
        "vit_base_32": "vit_base_32.augreg_in21k_ft_in1k",
        "vit_so150m_16": "vit_so150m_16.reg4_gap_sbb_e250_in12k_ft_in1k_256",
        "vit_so150m2_16": "vit_so150m2_16.reg1_gap_sbb_e200_in12k_ft_in1k_256",
        "vit_large_14": "vit_large_14.clip_openai_ft_in12k_in1k",
        "vit_large_16": "vit_large_16.augreg_in21k_ft_in1k",
        "vit_large_32": "vit_large_32.orig_in21k_ft_in1k_384",
        "vit_huge_14": "vit_huge_14.clip_laion2b_ft_in12k_in1k",
        "vit_tiny_r_32": "vit_tiny_r_32.augreg_in21k_ft_in1k",
        "vit_small_r26_32": "vit_small_r26_32.augreg_in21k_ft_in1k",
        "vit_base_r50_16": "vit_base_r50_16.orig_in21k_ft_in1k_384",
        "vit_large_r50_32": "vit_large_r50_32.augreg_in21k_ft_in1k",
    }


def test_no_default_is_non_commercial():
    assert {registry.find(name).license for name in registry.DEFAULTS} == {"apache-2.0"}
    assert any("-nc-" in record.license for record in registry.RECORDS.values())


def test_defaults_have_labels():
    assert all(registry.find(name).labels_name for name in registry.DEFAULTS)


def test_untrained_embeddings_are_noted():
    for record in registry.RECORDS.values():
        if ".siglip_gap_" in record.name and record.labels_name is None:
            *_, trained = record.note.split()
            assert registry.info(trained).config.pool == "map", record
            assert "embedding" in record.note


def test_list_models():
    assert registry.list_models()[:2] == ["vit_base_16", "vit_base_32"]
    assert set(registry.list_models()) == set(registry.RECORDS) | set(registry.DEFAULTS)
    assert registry.list_models("*dino") == [
        "vit_base_16.dino",
        "vit_small_8.dino",
        "vit_small_16.dino",
        "vit_base_8.dino",
    ]
    assert registry.list_models("resnet*") == []
    for name in registry.list_models():
        assert registry.info(name).name == registry.DEFAULTS.get(name, name)


def test_timm_names_are_aliases():
    record = registry.info("vit_tiny_16.deit_fb_in1k")
    assert registry.info("deit_tiny_patch16_224.fb_in1k") is record
    assert registry.info("timm/deit_tiny_patch16_224.fb_in1k") is record
    assert record.repo == "timm/deit_tiny_patch16_224.fb_in1k"
    assert registry.info("vit_small_patch16_dinov3.lvd1689m").name == "vit_small_16.dinov3_lvd1689m_256"
    assert registry.info("facebook/ijepa_vith16_1k").repo == "facebook/ijepa_vith16_1k"
    quick = registry.info("vit_base_patch16_clip_quickgelu_224.openai")  # two networks, one file
    assert (quick.config.mlp, quick.repo) == ("quick_gelu", "timm/vit_base_patch16_clip_224.openai")
    assert "vit_base_16.clip_quickgelu_openai" in registry.info("vit_base_16.clip_openai").note


def test_packaged_checkpoint():
    record = registry.info("vit_nano_4")
    assert (record.repo, record.alias, record.file) == ("", "", "vit_nano_4.cifar10.safetensors")
    assert (record.config.size, record.config.num_classes, record.license) == ((32, 32), 10, "apache-2.0")
    assert (record.mean, record.std) == ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def test_pins_are_whole_or_absent():
    for record in registry.RECORDS.values():
        assert record.commit is None or re.fullmatch("[0-9a-f]{40}", record.commit)
        assert record.sha256 is None or re.fullmatch("[0-9a-f]{64}", record.sha256)
        assert record.sha256 or not record.commit


def message(name: str) -> str:
    with pytest.raises(UnknownNameError) as caught:
        registry.info(name)
    return str(caught.value)


def test_preset_without_a_default_lists_its_checkpoints():
    assert message("vit_huge_32") == (
        "The preset 'vit_huge_32' has no default checkpoint. It has no checkpoints. "
        "For random weights, use create('vit_huge_32', weights=None) (--weights none)."
    )
    assert "Its checkpoints: vit_huge_16.ijepa_in1k_448, vit_huge_16.radio_v3_c_radio_512, " in message("vit_huge_16")
    for name in set(PRESETS) - set(registry.DEFAULTS):
        assert f"create({name!r}, weights=None)" in message(name)


def test_wrong_name_gets_similar_ones():
    text = message("vit_bas_16")
    assert text.startswith("There is no model 'vit_bas_16'. Did you mean vit_base_16, ")
    assert text.endswith(
        " To list all names, use list_models() (vitlite list). To load a Hub repository, a folder or a file, "
        "use vitlite.load(source) (--model SOURCE)."
    )
    assert message("qqqq").startswith("There is no model 'qqqq'. To list all names, use list_models()")


def test_wrong_tag_gets_similar_ones_and_the_list():
    text = message("vit_base_8.dinno")
    assert text.startswith("There is no checkpoint 'vit_base_8.dinno'. Did you mean vit_base_8.dino")
    assert text.endswith(
        " Checkpoints of vit_base_8: vit_base_8.augreg2_in21k_ft_in1k, vit_base_8.augreg_in21k_ft_in1k, "
        "vit_base_8.augreg_in21k, vit_base_8.dino."
    )
    assert message("vit_large_16.dinov3") == (
        "There is no checkpoint 'vit_large_16.dinov3'. Did you mean vit_large_16.dinov3_lvd1689m_256, "
        "vit_large_16.dinov3_qkvb_lvd1689m_256, vit_large_16.dinov3_sat493m_256, "
        "vit_large_16.dinov3_qkvb_sat493m_256? To list all 40 checkpoints of vit_large_16, "
        "use list_models('vit_large_16.*') (vitlite list)."
    )


def test_timm_name_without_its_tag():
    assert message("vit_large_patch32_384") == (
        "'vit_large_patch32_384' is timm's name for an architecture. Pass a checkpoint of it: "
        "vit_large_patch32_384.orig_in21k_ft_in1k. "
        "For random weights, use create('vit_large_patch32_384', weights=None) (--weights none)."
    )


def test_refused_checkpoint_says_why():
    assert message("timm/beit_base_patch16_224.in22k_ft_in22k") == (
        "'beit_base_patch16_224.in22k_ft_in22k' is not in the zoo: its attention adds a bias for each distance between "
        "two tokens. The nearest checkpoint is 'vit_base_16.beit3_in22k_ft_in1k'. "
        "timm has it: timm.create_model('beit_base_patch16_224.in22k_ft_in22k', pretrained=True)."
    )
    assert message("vit_giant_patch14_224").endswith("The nearest checkpoint is 'vit_giant_14.eva_clip_ft_in1k'.")
    assert message("google/vit-base-patch16-224").endswith(
        "Use vitlite.load('google/vit-base-patch16-224') (--model google/vit-base-patch16-224)."
    )


def test_name_must_be_a_string():
    with pytest.raises(UnknownNameError, match="A model name must be a string, got None"):
        registry.info(None)
    with pytest.raises(UnknownNameError, match="The pattern must be a string such as 'vit_small\\*', got 5"):
        registry.list_models(5)


@pytest.mark.parametrize(("theirs", "first"), [
    ("vit_b_16", "vit_base_16, "), ("vit_l_32", "vit_large_32, "), ("vit_h_14", "vit_huge_14, "),  # torchvision's
    ("dino_vits8", "vit_small_8.dino?"), ("dinov2_vitb14", "vit_base_14.dinov2_lvd142m_518, "),  # torch.hub's
    ("dinov2_vits14_reg", "vit_small_14.reg4_dinov2_lvd142m_518?"), ("dinov3_vits16", "vit_small_16.dinov3_lvd1689m"),
    ("ViT-B/16", "vit_base_16, "), ("ViT-L-14", "vit_large_14, "), ("B_16", "vit_base_16, "),  # CLIP's, Google's
    ("openai/clip-vit-base-patch32", "vit_base_32.clip_openai, "),
    ("hf-hub:timm/deit_tiny_patch16_224.fb_in1k", "deit_tiny_patch16_224.fb_in1k, "),
])  # fmt: skip
def test_names_of_other_libraries_get_a_hint(theirs: str, first: str):
    assert f"There is no model {theirs!r}. Did you mean {first}" in message(theirs)


def test_refused_names_are_not_in_the_registry():
    names = {row.name for row in registry.REFUSED}
    assert len(names) == len(registry.REFUSED) == 89
    assert not names & set(registry.NAMES)
    for row in registry.REFUSED:
        name = row.name.replace("*", "x")
        assert message(name).startswith(f"{name!r} is not in the zoo: {row.reason}."), row


def test_former_timm_names():
    assert registry.info("vit_base_patch16_224_dino").name == "vit_base_16.dino"
    assert registry.info("vit_base_resnet50_384").name == "vit_base_r50_16.orig_in21k_ft_in1k_384"
    assert not set(registry.FORMER) & {*registry.ALIASES, *registry.RECORDS, *PRESETS}


def test_every_class_has_a_label():
    for record in registry.RECORDS.values():
        assert record.labels is None or record.config.num_classes == len(record.labels)
    assert registry.info("vit_nano_4").labels[3] == "cat"
    assert registry.info("vit_base_16.dino").labels is None
    assert registry.info("vit_base_16.clip_openai").labels is None  # 512 numbers, not classes


def test_labels_are_known_and_different():
    imagenet = registry.info("vit_base_16").labels
    assert [imagenet[i] for i in (0, 281, 285, 657, 967)] == ["tench", "tabby", "Egyptian cat", "missile", "espresso"]
    assert imagenet[134].startswith("crane (large long-necked wading bird")
    assert imagenet[517] == "crane (lifts and moves heavy objects)"
    counts = Counter(record.labels_name for record in registry.RECORDS.values())
    assert counts["imagenet-1k"] >= 128
    assert {path.stem for path in (registry.DATA / "labels").iterdir()} == set(counts) - {None}
    for name in set(counts) - {None}:
        labels = (registry.DATA / "labels" / f"{name}.txt").read_text("utf-8").splitlines()
        assert len(set(labels)) == len(labels)
        assert all(label == label.strip() != "" for label in labels)


def test_names_and_sizes_need_no_torch():
    code = """
import sys
import vitlite
from vitlite import storage
from vitlite.zoo import download
vitlite.list_models()
record = vitlite.info("vit_base_16")
record.labels, record.gmacs
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("module", [registry, costs])
def test_examples(module):
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(module).attempted > 0


def test_packaged_file_has_the_pinned_hash():
    record = registry.info("vit_nano_4.cifar10")
    path = registry.DATA / record.file
    if not path.exists():
        pytest.skip(f"{path.name} is not here yet")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == record.sha256


def test_models_page_is_current():
    script = Path(__file__).parents[2] / "docs" / "generate_models.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_configs_agree_with_timms_architectures() -> None:
    """So that the config.json in their repositories agrees with their tensors."""
    compared = 0
    for record in registry.RECORDS.values():
        architecture = ARCHITECTURES.get(record.alias.split(".")[0])
        if architecture is not None:
            compared += 1
            for field in Architecture._fields[Architecture._fields.index("dim") :]:
                built = getattr(record.config, field)
                if field == "layer_scale":
                    built = built is not None
                assert built == getattr(architecture, field), (record.name, field)
    assert compared > 300
