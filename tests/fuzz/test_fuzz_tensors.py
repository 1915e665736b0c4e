"""Tensors that do not fit together, or fit in another way: what the library itself computes from them, or an error."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from attempts import CASES, Content, attempt, kept
from hypothesis import given
from hypothesis import strategies as st
from peers import timm, transformers, vit_pytorch
from references import distance, spread
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

from vitlite import load
from vitlite.errors import CheckpointError

EQUAL = 1e-5
OTHER_TYPES = [torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64]
BAD_VALUES = {"NaN": torch.nan, "infinite": -torch.inf, "huge": 1e300}
SIZES = {
    "img_size": 16,
    "patch_size": 8,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 1.5,
    "num_classes": 3,
}
ASK = {"image_size": 16, "heads": 2, "norm_eps": 1e-6, "mlp": "gelu", "pool": "cls", "positions": "learned"}
build_timm = partial(timm.models.VisionTransformer, **SIZES)
TIMM: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "plain": (build_timm, ASK),
    "registers": (partial(build_timm, reg_tokens=2, no_embed_class=True, init_values=1e-5), ASK),
    "mean": (partial(build_timm, global_pool="avg", class_token=False), ASK | {"pool": "mean"}),
    "CLIP": (partial(build_timm, pre_norm=True, act_layer="quick_gelu"), ASK | {"mlp": "quick_gelu"}),
    "attention pooling": (partial(build_timm, global_pool="map", class_token=False), ASK | {"pool": "map"}),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


@st.composite
def otherwise(draw: st.DrawFn, state: dict[str, Tensor], most: int = 3) -> Any:
    """Some tensors missing, swapped, of other shapes and types, or with values that are no numbers."""
    changed = dict(state)
    for _ in range(draw(st.integers(0, most))):
        name = draw(st.sampled_from(sorted(changed)))
        other = draw(st.sampled_from(sorted(changed)))
        x = changed[name]
        axis = draw(st.integers(0, 3)) % max(x.ndim, 1)
        what = draw(st.sampled_from([
            "rank", "flat", "transposed", "none", "half", "double", "gone", "swapped", "copied", "type", "whole", "NaN",
            "infinite", "huge", "twin",
        ]))  # fmt: skip
        if what == "rank":
            x = x[None] if draw(st.booleans()) else x[..., None]
        elif what == "flat":
            x = x.flatten()
        elif what == "transposed" and x.ndim > 1:
            x = x.movedim(axis, 0) if axis else x.movedim(0, -1)
        elif what == "none" and x.ndim:
            x = x.narrow(axis, 0, 0)
        elif what == "half" and x.ndim:
            x = x.narrow(axis, 0, x.shape[axis] // 2)
        elif what == "double" and x.ndim:
            x = torch.cat([x, x], dim=axis)
        elif what == "swapped":
            x, changed[other] = changed[other], x
        elif what == "copied":
            x = changed[other]
        elif what == "type" and not x.is_complex():  # of which torch warns that it would drop half
            x = x.to(draw(st.sampled_from([torch.float64, torch.float16, torch.bfloat16])))
        elif what == "whole" and not x.is_complex():
            x = x.to(
                draw(st.sampled_from([torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64]))
            )
        elif what in ("NaN", "infinite", "huge") and x.numel() and x.is_floating_point():
            x = x.contiguous().clone().double()
            x.view(-1)[draw(st.integers(0, x.numel() - 1))] = {"NaN": torch.nan, "infinite": -torch.inf, "huge": 1e300}[
                what
            ]
        elif what == "twin":
            changed[f"{draw(st.sampled_from(['module.', 'model.', 'blocks.0.', 'x.']))}{name}"] = x
        changed[name] = x
        if what == "gone" and len(changed) > 1:
            del changed[name]
    return Content(save({name: tensor.contiguous().clone() for name, tensor in changed.items()}))


@cache
def state_of(name: str) -> dict[str, Tensor]:
    return spread(TIMM[name][0]()).state_dict()


def images(model: Any) -> Tensor:
    return torch.randn(2, model.config.channels, *model.config.size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", TIMM)
@CASES
@given(st.data())
def test_timm(name: str, data: st.DataObject) -> None:
    """A model of timm's of the sizes that the tensors have takes them too, and answers the same."""
    build, ask = TIMM[name]
    content = data.draw(otherwise(state_of(name)))
    with kept(content, ".safetensors"), TemporaryDirectory() as folder:
        path = Path(folder, "vit.safetensors")
        path.write_bytes(content)
        ours = attempt(path, ask)
        if ours is None:
            return
        state = {key: tensor.float() for key, tensor in load_file(path).items()}
        config = ours.config
        theirs = build(
            img_size=config.size, patch_size=config.patch_size, embed_dim=config.dim, depth=config.depth,
            mlp_ratio=config.mlp_dim / config.dim, num_classes=config.num_classes, in_chans=config.channels,
            qkv_bias=config.qkv_bias, no_embed_class=not config.cls_position, reg_tokens=config.registers,
            init_values=1e-5 if config.layer_scale else None, fc_norm=config.final_norm == "pooled",
        ).eval()  # fmt: skip
        dropped = ours.source.report.dropped  # and no registers at all are none
        theirs.load_state_dict({key: state[key] for key in state if state[key].numel() and key not in dropped})
        with torch.no_grad():
            assert distance(ours(images(ours)), theirs(images(ours))) < EQUAL


# transformers, which fills in at random what a file lacks: there we must have refused

WIDTHS = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 3,
}
CLASSES = [
    "ViTForImageClassification",
    "Dinov2WithRegistersForImageClassification",
    "CLIPVisionModelWithProjection",
    "IJepaForImageClassification",
]


@cache
def saved(name: str) -> Any:
    """The files that transformers saves, by their names."""
    kind = getattr(transformers, name)
    model = spread(kind(kind.config_class(**WIDTHS)))
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder, "model.safetensors")), Path(folder, "config.json").read_bytes()


@pytest.mark.parametrize("name", CLASSES)
@CASES
@given(st.data())
def test_transformers(name: str, data: st.DataObject) -> None:
    state, config = saved(name)
    content = data.draw(otherwise(state))
    with kept(content, ".safetensors"), TemporaryDirectory() as folder:
        Path(folder, "model.safetensors").write_bytes(content)
        Path(folder, "config.json").write_bytes(config)
        ours = attempt(Path(folder))
        if ours is None:
            return
        dropped = ours.source.report.dropped  # whose shapes do not matter to us
        needed = {}
        for key, tensor in load_file(Path(folder, "model.safetensors")).items():
            if key not in dropped:
                same = key in state and tensor.numel() == state[key].numel()  # an axis more or less
                needed[key] = tensor.reshape(state[key].shape) if same else tensor
        save_file(needed, Path(folder, "model.safetensors"))
        theirs, about = getattr(transformers, name).from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
        )
        assert about["missing_keys"] <= {key for key in about["missing_keys"] if "mask_token" in key}
        with torch.no_grad():
            output = theirs.eval()(images(ours))
            logits = output.image_embeds if "CLIP" in name else output.logits
            assert distance(ours(images(ours)), logits) < EQUAL


def test_an_empty_position_table(tmp_path: Path) -> None:
    """Ever found: added to tokens, it left none of them."""
    state, config = saved("Dinov2WithRegistersForImageClassification")
    name = next(name for name in state if name.endswith("position_embeddings"))
    save_file(state | {name: state[name][:0].clone()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(config)
    assert attempt(tmp_path) is None


def test_a_clip_without_the_projection_that_its_config_names(tmp_path: Path) -> None:
    """Ever found: its features were given in place of projected ones, where transformers makes a projection up."""
    state, config = saved("CLIPVisionModelWithProjection")
    state = dict(state)
    (tmp_path / "config.json").write_bytes(config)
    save_file(state, tmp_path / "model.safetensors")
    assert load(tmp_path).config.num_classes == state["visual_projection.weight"].shape[0]
    del state["visual_projection.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="num_classes"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["ViTForImageClassification", "CLIPVisionModelWithProjection"])
def test_a_head_of_twice_the_width_where_heads_read_one_token(name: str, tmp_path: Path) -> None:
    """Ever found: it was taken for DINOv2's, which read two, where the library refuses the file."""
    state, config = saved(name)
    head = "classifier.weight" if "classifier.weight" in state else "visual_projection.weight"
    (tmp_path / "config.json").write_bytes(config)
    save_file(dict(state) | {head: torch.cat([state[head], state[head]], dim=1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"\n- .*\n\+ .*(classifier|visual_projection)\.weight"):
        load(tmp_path)


def test_keys_and_values_that_only_together_are_as_many_as_they_should_be(tmp_path: Path) -> None:
    """Ever found: without keys and with twice the values, what was cut into three parts was three others."""
    state, config = saved("IJepaForImageClassification")
    name = "ijepa.encoder.layer.1.attention.attention.{}.weight"
    key, value = state[name.format("key")], state[name.format("value")]
    changed = {name.format("key"): key[:0], name.format("value"): torch.cat([value, value])}
    (tmp_path / "config.json").write_bytes(config)
    save_file(dict(state) | changed, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensors must have the same shape"):
        load(tmp_path)


@cache
def of_vit_pytorch() -> dict[str, Tensor]:
    return spread(small_vit_pytorch()).state_dict()


def small_vit_pytorch() -> nn.Module:
    return vit_pytorch.ViT(image_size=16, patch_size=8, dim=16, depth=2, heads=2, mlp_dim=24, num_classes=3, dim_head=8)


@CASES
@given(otherwise(of_vit_pytorch()))
def test_vit_pytorch(content: Content) -> None:
    """Of the very sizes that the model was built with; others would need its arguments."""
    with kept(content, ".safetensors"), TemporaryDirectory() as folder:
        path = Path(folder, "vit.safetensors")
        path.write_bytes(content)
        ours = attempt(path, {"image_size": 16, "patch_size": 8, "heads": 2})
        if ours is None:
            return
        state = {key: tensor.float() for key, tensor in load_file(path).items()}
        theirs = small_vit_pytorch().eval()
        try:
            theirs.load_state_dict(state)
        except RuntimeError:
            return
        with torch.no_grad():
            assert distance(ours(images(ours)), theirs(images(ours))) < EQUAL
