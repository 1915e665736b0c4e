"""Every record against what the installed timm builds, and prepares pictures with, under the same name."""

from functools import cache
from typing import Any

import pytest
import torch
from peers import timm
from torch import nn

from vitlite import ViT
from vitlite.weights import zoo
from vitlite.weights.labels import read_label_set
from vitlite.weights.zoo import Record

RECORDS = [record for record in zoo.RECORDS.values() if record.layout == "timm" and record.repo]
GELU = {"GELU": "exact", "GELUTanh": "tanh", "QuickGELU": "quick"}
POOL = {"token": "cls", "avg": "mean"}


@cache
def theirs(architecture: str, num_classes: int) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(architecture, pretrained=False, num_classes=num_classes)


@cache
def ours(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return shapes(ViT(config))


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_all_rows_are_compared():
    assert len(RECORDS) == 221


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_record(record: Record):
    config, peer = record.config, theirs(record.alias.split(".")[0], record.config.num_classes)
    assert ours(config) == shapes(peer)

    block = peer.blocks[0]
    assert len(peer.blocks) == config.depth
    assert block.attn.num_heads == config.heads
    assert GELU[type(block.mlp.act).__name__] == config.gelu
    assert POOL[peer.global_pool] == config.pool
    assert peer.num_prefix_tokens == config.prefix_tokens
    assert {norm.eps for norm in peer.modules() if isinstance(norm, nn.LayerNorm)} == {config.norm_eps}
    assert getattr(block.ls1, "init_values", None) == config.layer_scale

    card = timm.models.get_pretrained_cfg(record.alias)
    assert (card.hf_hub_id, card.license or "apache-2.0") == (record.repo, record.license)
    assert (card.mean, card.std) == (record.mean, record.std)
    assert (card.crop_mode, card.interpolation) == (record.crop_mode, record.interpolation)
    assert card.num_classes == config.num_classes
    if record.name == "vit_so400m_14.siglip_gap_webli_384":  # timm's patches leave out the last 6 of its 384 pixels
        assert card.input_size == (3, 384, 384)
        assert (config.size, int(378 / record.crop_pct)) == ((378, 378), 384)
    else:
        assert (card.input_size, card.crop_pct) == ((3, *config.size), record.crop_pct)


def test_inner_norm():
    torch.manual_seed(0)
    small = {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8, "num_classes": 5}
    peer = timm.create_model("beit3_base_patch16_224", **small).eval()
    for tensor in peer.parameters():
        nn.init.normal_(tensor, std=0.5)
    config = zoo.info("vit_base_16.beit3_in22k_ft_in1k").config
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
    labels = read_label_set(name)
    assert len(labels) == wanted.num_classes()
    for label, synset in zip(labels, wanted.label_names(), strict=True):
        names = wanted.label_name_to_description(synset)
        first = names.split(",")[0]
        definition = wanted.label_name_to_description(synset, detailed=True).removeprefix(f"{names}: ")
        remark = label[label.find("(") + 1 : -1]
        assert label in (first, names, f"{names} ({synset})") or (
            label.startswith(f"{first} (") and remark in definition
        )
