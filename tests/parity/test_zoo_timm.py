"""Every record against what the installed timm builds, and prepares pictures with, under the same name."""

import json
import os
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import generate_models
import pytest
import torch
from peers import timm
from references import distance, final_norm_of, mlp_of, norm_of, rotation_of, spread
from safetensors.torch import save_file
from torch import nn

from vitlite import ViT, create
from vitlite.checkpoints.metadata import Metadata, metadata_from_record
from vitlite.checkpoints.reader import open_weights
from vitlite.checkpoints.resolve import map_and_resolve
from vitlite.errors import UnknownNameError
from vitlite.nn.positions import resample_positions
from vitlite.zoo import registry
from vitlite.zoo.registry import Record

RECORDS = [record for record in registry.RECORDS.values() if record.format.startswith("timm") and record.repo]
FAMILIES = (  # timm's modules of Vision Transformers: all of their names are in the zoo, or refused with a reason
    "vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos", "vision_transformer_sam", "deit",
    "eva", "beit", "naflexvit", "qwen3_vit", "gemma4_vit", "deepseek_vit",
)  # fmt: skip
POOL = {"token": "cls", "avg": "mean", "map": "map"}


@cache
def theirs(architecture: str, num_classes: int) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(architecture, pretrained=False, num_classes=num_classes)


@pytest.mark.parametrize("architecture", sorted({record.alias.partition(".")[0] for record in RECORDS}))
def test_a_network_without_a_tag_is_what_timm_builds_then(architecture: str) -> None:
    default = registry.network(architecture)
    assert default.num_classes == timm.get_pretrained_cfg(architecture).num_classes
    for record in RECORDS:
        if record.alias.partition(".")[0] == architecture:
            assert record.config.replace(num_classes=default.num_classes) == default


@cache
def ours(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return shapes(ViT(config))


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def said_by_timm(peer: nn.Module) -> dict[str, Any]:
    """The fields of a config, as they are in timm's model of it."""
    encoder = getattr(peer, "encoder", peer)  # Qwen3's classifier is around one
    block = encoder.blocks[0]
    norms = [module for module in peer.modules() if isinstance(module, (nn.LayerNorm, timm.layers.RmsNorm))]
    (norm_eps,), (norm,) = {each.eps for each in norms}, {norm_of(each) for each in norms}
    assert (block.attn.proj.bias is None) == (block.mlp.fc2.bias is None) == (norm == "rms")
    attn, is_norm = block.attn, lambda module: isinstance(module, (nn.LayerNorm, timm.layers.RmsNorm))
    qkv = attn.q_proj if attn.qkv is None else attn.qkv
    return {
        "dim": peer.embed_dim,
        "depth": len(encoder.blocks),
        "heads": attn.num_heads,
        "mlp_dim": block.mlp.fc2.in_features,
        "mlp": mlp_of(block.mlp),
        "num_classes": peer.num_classes,
        "class_token": getattr(peer, "cls_token", None) is not None,
        "registers": peer.num_prefix_tokens - (getattr(peer, "cls_token", None) is not None),
        "qkv_bias": qkv.bias is not None or getattr(attn, "q_bias", None) is not None,
        "layer_scale": block.init_values if hasattr(block, "gamma_1") else getattr(block.ls1, "init_values", None),
        "inner_norm": "both" if is_norm(attn.norm) else "mlp" if is_norm(getattr(block.mlp, "norm", None)) else "none",
        "norm": norm,
        "input_norm": input_norm_of(peer),
        "final_norm": final_norm_of(peer),
        "norm_eps": norm_eps,
        **pool_and_positions(peer),
        **patches(peer),
    }


def input_norm_of(peer: nn.Module) -> str:
    if isinstance(getattr(peer, "norm_pre", None), nn.LayerNorm):
        return "tokens"
    embed = getattr(getattr(peer, "encoder", peer), "patch_embed", None)  # NaFlex has none
    return "none" if isinstance(getattr(embed, "norm", nn.Identity()), nn.Identity) else "projected"


def pool_and_positions(peer: nn.Module) -> dict[str, Any]:
    assert not getattr(peer, "pool_include_prefix", False)
    pool = POOL[peer.global_pool]
    if hasattr(peer, "head_dist"):
        pool = "cls_and_distillation"
    if pool == "map" and isinstance(peer, timm.models.Eva):
        pool = "map_all"
        assert peer.attn_pool.num_heads == 8
    encoder = getattr(peer, "embeds", getattr(peer, "encoder", peer))  # of NaFlex, and of Qwen3
    positions = "learned" if encoder.pos_embed is not None else "none"
    rope = rotation_of(peer)
    assert rope is not None or positions == "learned"
    return {"pool": pool, "positions": positions, "rope": rope}


def patches(peer: nn.Module) -> dict[str, Any]:
    """The size of a token in pixels; of a hybrid, the units of its ResNet's stages."""
    if isinstance(peer, timm.models.NaFlexVit):
        embeds = peer.embeds
        assert (embeds.pos_embed_interp_mode, embeds.pos_embed_antialias) == ("bilinear", True)
        assert not embeds.pos_embed_align_corners
        return {"stem": None, "patch_size": embeds.patch_size[0], "resample": "naflex"}
    embed = getattr(peer, "encoder", peer).patch_embed
    assert embed.proj.bias is not None or isinstance(peer.norm_pre, nn.LayerNorm)
    backbone = getattr(embed, "backbone", None)
    stem = None
    if backbone is not None:
        stem = tuple(len(stage.blocks) for stage in getattr(backbone, "stages", ()))
    return {"stem": stem, "patch_size": embed.img_size[0] // embed.grid_size[0]}


def test_all_rows_are_compared():
    assert len(RECORDS) >= 344


def write_shapes(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of zeros that takes no room on the disk, however large it is."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, path.stat().st_size + end)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_config_and_tensors(record: Record, tmp_path: Path):
    """timm's file becomes our tensors: none missing, none left over, each of its shape, and the config is the row's."""
    peer = theirs(record.alias.split(".")[0], record.config.num_classes)
    wanted = said_by_timm(peer)
    assert {field: getattr(record.config, field) for field in wanted} == wanted
    path = tmp_path / "model.safetensors"
    write_shapes(path, shapes(peer))
    with open_weights(path) as file:
        mapping, resolved = map_and_resolve(file, metadata_from_record(record), Metadata())
    path.unlink()
    assert mapping.format.name == record.format
    assert not mapping.unknown
    assert {name: found.shape for name, found in mapping.tensors.items()} == ours(record.config)
    assert resolved.config.to_dict() == record.config.to_dict()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_preprocessing(record: Record):
    config = record.config
    card = timm.models.get_pretrained_cfg(record.alias)
    recipe = timm.data.resolve_data_config(pretrained_cfg=card.to_dict())
    assert (card.hf_hub_id, card.license or "apache-2.0") == (record.repo, record.license)
    assert (recipe["mean"], recipe["std"]) == (record.mean, record.std)
    assert (recipe["crop_mode"], recipe["interpolation"]) == (record.crop_mode, record.interpolation)
    assert card.num_classes == config.num_classes
    if (
        config.resample == "naflex"
    ):  # timm's loader for it ignores the size and the crop, and asks for a number of patches
        assert record.config.position_rows == 256
        return
    assert (recipe["input_size"], recipe["crop_pct"]) == ((3, record.pixels, record.pixels), record.crop_pct)
    seen = record.pixels - record.pixels % config.patch_size  # by timm's patches, which leave out the last
    assert config.size == (seen, seen)


def names_of(module: str) -> set[str]:
    """All that timm 1.0.31 takes: with weights and without, and what it called some before."""
    former = timm.models._registry._module_to_deprecated_models.get(module, {})
    return {*timm.list_models(pretrained=True, module=module), *timm.list_models(module=module), *former}


def answer_to(name: str) -> str:
    """What the zoo says to a name of timm's."""
    if name in registry.NAMES:
        return "in the zoo"
    with pytest.raises(UnknownNameError) as caught:
        registry.info(name)
    for answer in ("is not in the zoo: ", "is timm's name for an architecture"):
        if str(caught.value).startswith(f"{name!r} {answer}"):
            return answer
    return "neither"


@pytest.mark.parametrize("module", FAMILIES)
def test_every_name_is_in_the_zoo_or_refused_with_a_reason(module: str):
    answers = {name: answer_to(name) for name in names_of(module)}
    assert answers
    assert not [name for name, answer in answers.items() if answer == "neither"]


def test_counts(capsys: pytest.CaptureFixture[str]):
    generate_models.print_counts()
    together = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("timm 1.0.31"))
    assert " ".join(together.split()).endswith(" 0 neither")


def test_former_names():
    former = {}
    for module in FAMILIES:
        former |= timm.models._registry._module_to_deprecated_models.get(module, {})
    assert set(registry.FORMER) == set(former)
    for name, now in former.items():
        assert registry.info(name).alias in (now, f"{now}_in1k")  # timm's own entry for SAM's lacks the end


def test_refusals():
    """Each row of the table is about some name of timm, or about a repository; and what it recommends is in the zoo."""
    names = {name for module in FAMILIES for name in names_of(module)} - set(registry.NAMES)
    first = {next((row.name for row in registry.REFUSED if row.fits(name)), None) for name in names}
    others = timm.list_models()
    for row in registry.REFUSED:
        unpublished = row.reason.startswith("no primary source")
        of_another_kind = any(row.fits(name) for name in others if name not in names)
        assert row.name in first or of_another_kind or "/" in row.name or unpublished, row
        assert row.nearest is None or row.nearest in registry.RECORDS, row
        assert (row.instead == "load") == (row.nearest is None)


ANSWERS = [  # the smallest of each family
    "vit_test_16.r160_in1k", "vit_test2_16.r160_in1k", "vit_wee_16.reg1_gap_sbb_in1k_256",
    "vit_xsmall_16.clip_tinyclip_yfcc15m", "vit_small_16.flexivit_1200ep_in1k_240",
    "vit_tiny_16.deit_distilled_fb_in1k", "vit_tiny_16.dinov3_qkvb_eupe_lvd1689m_256",
    "vit_small_16.dinov3_lvd1689m_256", "vit_small_plus_16.dinov3_qkvb_lvd1689m_256", "vit_base_16.siglip_webli",
    "vit_base_16.radio_v3_c_radio_512", "vit_tiny_r_32.augreg_in21k_ft_in1k",
]  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str, tmp_path: Path):
    """timm's file under the row's name, all the way: what comes out is what timm's model says."""
    record = registry.info(name)
    peer = spread(timm.create_model(record.alias.split(".")[0], num_classes=record.config.num_classes))
    path = tmp_path / "model.safetensors"
    save_file(peer.state_dict(), path)
    model = create(name, weights=path)
    images = torch.randn(1, 3, *record.config.size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert distance(model(images), peer(images)) < 1e-5


STRETCHED = ["flexivit_small", "vit_base_patch16_radio_v3", "vit_large_patch16_radio_v3", "vit_so400m_patch16_radio_v4",
             "vit_base_patch16_siglip_224", "eva_giant_patch14_224"]  # fmt: skip


@pytest.mark.parametrize("architecture", STRETCHED)
def test_position_tables_are_stretched_as_timm_does_on_loading(architecture: str, tmp_path: Path):
    """Its rule depends on the name of the architecture: the row of the zoo has it as `resample`."""
    small = {"embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 0}
    record = next(record for record in RECORDS if record.alias.split(".")[0] == architecture)
    patch, native = record.config.patch_size, record.config.size
    new = (native[0] - 4 * patch, native[1] + 2 * patch)
    peer = timm.create_model(architecture, img_size=native, **small)
    nn.init.normal_(peer.pos_embed)
    path = tmp_path / "model.safetensors"
    save_file(peer.state_dict(), path)

    overlay = {"file": str(path), "custom_load": False, "num_classes": 0}
    there = timm.create_model(architecture, img_size=new, pretrained=True, pretrained_cfg_overlay=overlay, **small)
    grid = new[0] // patch, new[1] // patch
    ours = resample_positions(peer.pos_embed, record.config.grid, grid, record.config.resample)
    assert (ours - there.pos_embed).abs().max() <= 1e-6


def test_inner_norm():
    torch.manual_seed(0)
    small = {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8, "num_classes": 5}
    peer = timm.create_model("beit3_base_patch16_224", **small).eval()
    for tensor in peer.parameters():
        nn.init.normal_(tensor, std=0.5)
    config = registry.info("vit_base_16.beit3_in22k_ft_in1k").config
    changes = {"dim": 32, "depth": 2, "heads": 4, "mlp_dim": 128, "image_size": 32, "patch_size": 8, "num_classes": 5}
    model = ViT(config.replace(**changes)).eval()
    model.load_state_dict(peer.state_dict())
    images = torch.randn(2, 3, 32, 32)
    wanted = peer(images)
    assert (model(images) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("name", "subset"),
    [
        ("imagenet-1k", "imagenet-1k"),
        ("imagenet-12k", "imagenet-12k"),
        ("imagenet-21k", "imagenet-21k-goog"),
        ("imagenet-21k-miil", "imagenet-21k-miil"),
    ],
)
def test_labels(name: str, subset: str):
    wanted = timm.data.ImageNetInfo(subset)
    labels = (registry.DATA / "labels" / f"{name}.txt").read_text("utf-8").splitlines()
    assert len(labels) == wanted.num_classes()
    for label, synset in zip(labels, wanted.label_names(), strict=True):
        names = wanted.label_name_to_description(synset)
        first = names.split(",")[0]
        definition = wanted.label_name_to_description(synset, detailed=True).removeprefix(f"{names}: ")
        remark = label[label.find("(") + 1 : -1]
        assert label in (first, names, f"{names} ({synset})") or (
            label.startswith(f"{first} (") and remark in definition
        )
