"""A file fits entirely, or it is refused with its path and what is wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from files_made import TINY, trained, written
from safetensors.torch import save_file
from torch import Tensor

from vitlite import ViTConfig, load
from vitlite.errors import CheckpointError, ConfigError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("num_classes", [None, 0, 3, 5])
def test_any_missing_tensor_is_an_error(num_classes: int | None, tmp_path: Path) -> None:
    for name in trained().state_dict():
        path = written(tmp_path / "vit.safetensors", lambda state, name=name: state.pop(name))
        full = ViTConfig(**TINY.to_dict())
        with pytest.raises((CheckpointError, ConfigError), match=r"vit.safetensors"):
            load(path, config=full, num_classes=num_classes)


@pytest.mark.parametrize("config", [
    TINY.replace(registers=2, cls_position=False), TINY.replace(input_norm="tokens"), TINY.replace(layer_scale=1e-5),
    TINY.replace(final_norm="pooled"), TINY.replace(pre_logits=8), TINY.replace(inner_norm="both"),
])  # fmt: skip
def test_options_that_vanish_whole_are_missed_by_who_knows_of_them(config: ViTConfig, tmp_path: Path) -> None:
    parts = ("reg_token", "norm_pre", "ls", "fc_norm", "pre_logits", "attn.norm")
    extra = [name for name in trained(config).state_dict() if any(part in name for part in parts)]
    assert extra
    path = written(tmp_path / "vit.safetensors", lambda state: [state.pop(name) for name in extra], config)
    with pytest.raises(CheckpointError, match=r"vit.safetensors"):
        load(path, config=ViTConfig(**config.to_dict()))


def test_difference_is_sorted_and_signed(tmp_path: Path) -> None:
    def change(state: dict[str, Tensor]) -> None:
        del state["blocks.1.norm1.weight"]
        state["blocks.1.attn.proj.weight"] = torch.zeros(16, 17)
        state["blocks.1.attn.gate"] = torch.zeros(2)

    path = written(tmp_path / "vit.safetensors", change)
    with pytest.raises(CheckpointError) as error:
        load(path, config=TINY)
    assert str(error.value) == (
        f"The tensors in {path} (timm format) do not fit the config. Check that the config belongs to these weights. "
        "Differences (- expected, + in the file):\n"
        "+ blocks.1.attn.gate (2,)\n"
        "- blocks.1.attn.proj.weight (16, 16)\n"
        "+ blocks.1.attn.proj.weight (16, 17)\n"
        "- blocks.1.norm1.weight (16,)"
    )


def test_difference_uses_the_names_of_the_file(tmp_path: Path) -> None:
    state = {"encoder.layers.encoder_layer_0.mlp.0.bias": torch.zeros(3)}
    import peers

    theirs = peers.torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 24, num_classes=3).state_dict()
    save_file(theirs | state, tmp_path / "vit.safetensors")
    with pytest.raises(CheckpointError, match=r"- encoder.layers.encoder_layer_0.mlp.0.bias \(24,\)"):
        load(tmp_path / "vit.safetensors", config=TINY)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(value: float, tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", lambda state: state["blocks.1.mlp.fc2.bias"].view(-1)[3].fill_(value))
    for _ in range(2):  # the second time the file is known
        with pytest.raises(
            CheckpointError, match=r"vit.safetensors: blocks.1.mlp.fc2.bias contains NaN or infinity in"
        ):
            load(path, config=TINY)


def test_large_values_are_finite_unless_the_dtype_cannot_hold_them(tmp_path: Path) -> None:
    path = written(tmp_path / "vit.safetensors", lambda state: state["head.bias"].fill_(3e38))
    assert load(path, config=TINY).head.bias.isfinite().all()
    with pytest.raises(CheckpointError, match="too large for this dtype"):
        load(path, config=TINY, dtype=torch.float16)


@pytest.mark.parametrize("name", ["blocks.0.mlp.fc1.weight", "pos_embed"])
def test_a_scanned_file_is_scanned_again_for_a_narrower_type(name: str, tmp_path: Path) -> None:
    def widen(state: dict[str, Tensor]) -> None:
        state |= {key: tensor.double() for key, tensor in state.items()}
        state[name].view(-1)[-1] = 1e300

    path = written(tmp_path / "vit.safetensors", widen)
    for _ in range(2):
        assert load(path, config=TINY, dtype=torch.float64).state_dict()[name].max() == 1e300
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(CheckpointError, match=f"{name} contains NaN or infinity in {dtype}"):
            load(path, config=TINY, dtype=dtype)
    if name == "pos_embed":  # stretched in float32
        with pytest.raises(CheckpointError, match="pos_embed contains NaN or infinity"):
            load(path, config=TINY, dtype=torch.float64, image_size=32)
    largest = torch.finfo(torch.float32).max
    path = written(tmp_path / "full.safetensors", lambda state: state["pos_embed"].fill_(largest))
    load(path, config=TINY)
    with pytest.raises(CheckpointError, match=r"infinity in torch\.bfloat16"):
        load(path, config=TINY, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_quantised_and_whole_numbers_are_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = torch.ones(48, 16).to(dtype)
    try:
        path = written(tmp_path / "vit.safetensors", lambda state: state.update({"blocks.0.attn.qkv.weight": weight}))
    except KeyError:
        pytest.skip(f"this safetensors writes no {dtype}")
    with pytest.raises(
        CheckpointError, match=r"blocks.0.attn.qkv.weight has the dtype \w+, but vitlite supports only F64, F32"
    ):
        load(path, config=TINY)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", [None, torch.float32, torch.bfloat16])
def test_floating_types(stored: torch.dtype, wanted: torch.dtype | None, tmp_path: Path) -> None:
    state = {name: tensor.to(stored) for name, tensor in trained().state_dict().items()}
    save_file(state, tmp_path / "vit.safetensors")
    model = load(tmp_path / "vit.safetensors", config=TINY, dtype=wanted)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name].to(wanted or torch.float32))
        assert tensor.is_contiguous()


@pytest.mark.parametrize(("names", "reason"), [
    ({"head_dist.weight": (3, 16)}, "second head"), ({"blocks.0.attn.q_norm.weight": (8,)}, "norms of its own"),
    ({"blocks.0.mlp.fc1_g.weight": (8,)}, "gated in a way"), ({"attn_pool.pos_embed": (8,)}, "pools by attention"),
    ({"rope.bands": (8,)}, "another kind than DINOv3's"),
    ({"blocks.0.attn.qkv.weight_scale": (1,)}, "quantised"),
])  # fmt: skip
def test_what_is_no_plain_vit_is_refused_with_its_reason(names: dict[str, Any], reason: str, tmp_path: Path) -> None:
    more = {name: torch.zeros(shape) for name, shape in names.items()}
    path = written(tmp_path / "vit.safetensors", lambda state: state.update(more))
    with pytest.raises(CheckpointError, match=f"not a plain ViT: .*{reason}"):
        load(path, config=TINY)


def test_a_kernel_over_time_is_refused_by_its_name(tmp_path: Path) -> None:
    kernel = {"patch_embed.proj.weight": torch.ones(16, 3, 2, 8, 8)}
    path = written(tmp_path / "vit.safetensors", lambda state: state.update(kernel))
    with pytest.raises(CheckpointError, match=r"patch_embed.proj.weight: .* patch_embed.proj.weight must have 4 axes"):
        load(path, config=TINY)
