"""AdamW and Muon: which weights each has and how it moves them; and the learning rate."""

import doctest

import pytest
import torch
from models import FAMILIES, tiny_model
from peers import timm  # noqa: F401
from timm.optim import param_groups_layer_decay
from tiny_run import CONFIG, new_model, settings
from torch import nn

from vitlite.training import distributed, optim
from vitlite.training.optim import Muon, depth_of, learning_rate, optimizers, orthogonal
from vitlite.training.settings import Settings


def test_orthogonal_evens_out_singular_values():
    torch.manual_seed(0)
    for shape in ((2, 8, 32), (2, 32, 8), (1, 16, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.4
        assert values.max() < 1.3


@pytest.mark.parametrize("count", [1, 5])
def test_ranks_share_the_matrices(count, monkeypatch):
    torch.manual_seed(0)
    matrices = torch.randn(count, 8, 16)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    sums = []
    monkeypatch.setattr(distributed, "all_reduce", sums.append)
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        assert optim._orthogonal_on_all_ranks(matrices) is sums[rank]
    assert all(len(matrix.nonzero()) == 0 for matrix in sums[0][1::2])
    torch.testing.assert_close(sums[0] + sums[1], orthogonal(matrices))


def test_muon_splits_queries_keys_and_values():
    joint = nn.Parameter(torch.zeros(24, 8))
    parts = [nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    joint.grad = torch.randn(24, 8)
    for part, gradient in zip(parts, joint.grad.chunk(3), strict=True):
        part.grad = gradient.clone()
    tall = nn.Parameter(torch.zeros(24, 8))
    tall.grad = joint.grad.clone()
    Muon([{"params": [joint], "parts": 3}, {"params": [tall]}], lr=0.1).step()
    Muon([{"params": parts}], lr=0.1).step()
    torch.testing.assert_close(joint, torch.cat(list(parts)))
    assert (tall - joint).abs().max() > 0.01


def test_muon_splits_only_queries_keys_and_values():
    model = new_model(CONFIG.replace(mlp_dim=3 * CONFIG.dim))
    _, muon = optimizers(model, dict(model.named_parameters()), settings(optimizer="muon"))
    apart = {weight for group in muon.param_groups if group["parts"] == 3 for weight in group["params"]}
    assert apart == {block.attn.qkv.weight for block in model.blocks}


def test_muon_splits_the_gate_and_the_value_of_swiglu():
    model = new_model(CONFIG.replace(mlp="swiglu"))
    _, muon = optimizers(model, dict(model.named_parameters()), settings(optimizer="muon"))
    parts = {weight: group["parts"] for group in muon.param_groups for weight in group["params"]}
    for block in model.blocks:
        assert (parts[block.mlp.fc1.weight], parts[block.mlp.fc2.weight], parts[block.attn.qkv.weight]) == (2, 1, 3)


def test_layer_decay_and_what_does_not_decay():
    model = new_model()
    for name in ("adamw", "muon"):
        both = optimizers(model, dict(model.named_parameters()), settings(optimizer=name, layer_decay=0.5))
        names = {weight: name for name, weight in model.named_parameters()}
        groups = {names[w]: (g["scale"], g["weight_decay"]) for o in both for g in o.param_groups for w in g["params"]}
        assert set(groups) == set(names.values())
        assert groups["head.weight"] == (1.0, 0.05)
        assert groups["head.bias"] == (1.0, 0.0)
        assert groups["norm.weight"] == (0.5, 0.0)
        assert groups["blocks.1.attn.qkv.weight"] == (0.5, 0.05)
        assert groups["blocks.0.mlp.fc1.bias"] == (0.25, 0.0)
        assert groups["cls_token"] == groups["pos_embed"] == (0.125, 0.0)
        assert groups["patch_embed.proj.weight"] == (0.125, 0.05)


@pytest.mark.parametrize("changes", [{}, *FAMILIES.values()], ids=["plain", *FAMILIES])
def test_depths_equal_timms(changes):
    model = tiny_model(**changes)
    scale = {
        weight: group["lr_scale"]
        for group in param_groups_layer_decay(model, layer_decay=0.5)
        for weight in group["params"]
    }
    for name, weight in model.named_parameters():
        assert scale[weight] == 0.5 ** (model.config.depth + 1 - depth_of(name, model.config.depth)), name


def test_examples():
    assert doctest.testmod(optim).failed == 0
    assert doctest.testmod(optim).attempted > 0


def test_the_learning_rate_does_not_depend_on_the_end_until_it_falls():
    short, long = Settings(epochs=10), Settings(epochs=100)
    for epoch in (0, 0.3, 1, 5.9):
        assert learning_rate(short, epoch) == learning_rate(long, epoch)
    assert learning_rate(short, 6.5) < learning_rate(long, 6.5)
    assert 0 < learning_rate(short, 0) < 1e-5  # the first step changes the weights
    assert learning_rate(short, 10) == pytest.approx(0)
