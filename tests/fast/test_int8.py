"""int8: products of bytes are exact, scales are those of the pictures seen, and the answers are nearly float32's."""

import copy
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_optimize import OPTIONS, made
from torch import Tensor, nn

from vitlite import ViT, optimize
from vitlite.errors import OptimizedError
from vitlite.fast import calibrate, int8
from vitlite.fast import optimize as module
from vitlite.fast.int8 import ByteLinear, Scale, bytes_are_right, round_weight
from vitlite.fast.optimize import OptimizedViT, kernels_of
from vitlite.nn.layers import MLP, Block, QuickGELU

pytestmark = pytest.mark.skipif(not bytes_are_right(torch.float32), reason="no products of bytes on this CPU")


def pictures(model: ViT, number: int = 32, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    return list(torch.randn(number, config.channels, 32, 32, generator=generator))


def ready(**options: Any) -> ViT:
    """A model whose pictures need no preparation."""
    model = made(**options)
    model.preprocess = torch.stack
    return model


def in_bytes(model: ViT, number: int = 32) -> OptimizedViT:
    fast = optimize(copy.deepcopy(model), dtype=torch.int8, calibrate=pictures(model, number))
    assert isinstance(fast, OptimizedViT)
    return fast


def relative(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def simulated(model: ViT, scales: list[dict[str, Scale]]) -> ViT:
    """The model in float32, where layers take and have what bytes would leave of their numbers."""
    model = copy.deepcopy(model)
    for block, of_block in zip(model.blocks, scales, strict=True):
        assert isinstance(block, Block)
        layers = {"qkv": block.attn.qkv, "proj": block.attn.proj, "fc1": block.mlp.fc1, "fc2": block.mlp.fc2}
        for name, scale in of_block.items():
            quick = name == "fc2" and isinstance(getattr(block.mlp, "act", None), QuickGELU)
            factor = 1.702 if quick and isinstance(block.mlp.norm, nn.Identity) else 1.0  # it is computed so many times
            layer, spread = layers[name], torch.as_tensor(scale.spread)
            rounded, steps = round_weight(layer.weight.detach() * spread)
            layer.weight.data = rounded * steps[:, None] / spread
            layer.register_forward_pre_hook(
                lambda _, given, scale=scale, factor=factor: (scale.rounded(given[0] * factor) / factor,)
            )
    return model


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_answers_are_those_of_rounded_numbers(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "bfloat16_pays", lambda: False)  # so that nothing but the bytes is rounded
    model = ready(**options)
    images = torch.stack(pictures(model, 5, seed=2))
    scales = calibrate.calibrated(model, pictures(model))
    if model.config.pool == "cls" and model.config.positions != "rope":
        del scales[-1]["qkv"]  # there the class token looks at the others without them
    with torch.no_grad():
        right, rounded, found = (
            model.embed(images),
            simulated(model, scales).embed(images),
            in_bytes(model).embed(images),
        )
    assert relative(found, rounded) < 0.03  # a number in the middle of two bytes may become either, and so on
    assert relative(found, right) > 0.005  # they are rounded


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_answers_are_nearly_those_of_float32(options: dict[str, Any]) -> None:
    model = ready(**options)
    images = torch.stack(pictures(model, 5, seed=2))
    with torch.no_grad():
        right, found = model.embed(images), in_bytes(model).embed(images)
    assert relative(found, right) < 0.12
    assert torch.cosine_similarity(found.flatten(1), right.flatten(1)).mean() > 0.99


@pytest.mark.parametrize("size", [(32, 32), (48, 16), (64, 64)])
@pytest.mark.parametrize("number", [1, 3, 9])
@pytest.mark.parametrize("threads", [1, 2])
def test_any_size_batch_and_number_of_threads(size: tuple[int, int], number: int, threads: int) -> None:
    model = ready(registers=2, cls_position=False, layer_scale=0.3)
    fast = in_bytes(model)
    images = torch.randn(number, 3, *size)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            right, found = model.features(images, layers=(0, 1, 2)), fast.features(images, layers=(0, 1, 2))
    finally:
        torch.set_num_threads(before)
    assert right.cls is not None
    assert found.cls is not None
    for ours, theirs in zip(
        (*found.layers, found.cls, found.patches), (*right.layers, right.cls, right.patches), strict=True
    ):
        assert relative(ours, theirs) < 0.06
    assert relative(fast.attention_maps(images), model.attention_maps(images).detach()) < 0.1


@pytest.mark.parametrize("gives", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [False, True])
def test_a_layer_of_bytes_computes_what_its_scale_says(gives: torch.dtype, spread: bool) -> None:
    if not bytes_are_right(gives):
        pytest.skip("not in this dtype")
    torch.manual_seed(0)
    weight, bias, x, other = torch.randn(24, 40), torch.randn(24), torch.randn(2, 7, 40), torch.randn(2, 9, 24)
    scale = Scale(0.03, 117, torch.rand(40) + 0.5 if spread else 1.0)
    layer = ByteLinear(weight, bias, scale, gives)
    divided = x / scale.spread
    given = (divided / scale.step + scale.zero).round().clamp(0, 255).to(torch.uint8)
    wide = weight.double() * scale.spread
    steps = wide.abs().amax(1, keepdim=True) / 127
    right = F.linear((given.double() - scale.zero) * scale.step, (wide / steps).round() * steps, bias.double())
    tolerance = 1e-5 if gives is torch.float32 else 1e-2
    assert relative(layer(given).double(), right) < tolerance
    strided = other[:, 1:8]  # a stream of which some tokens are left out: no row after the other
    assert relative(layer.added(given, strided).double(), right + strided.double()) < 1e-5
    kept = other.clone()
    assert relative(layer.added(given, strided, spare=True).double(), right + kept[:, 1:8].double()) < 1e-5
    assert relative(layer.activated(given, "tanh").double(), F.gelu(right, approximate="tanh")) < 100 * tolerance


def test_bytes_between_two_layers_are_rounded_to_the_nearest() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 40), torch.randint(0, 256, (2, 7, 40), dtype=torch.uint8)
    gelu = F.gelu(ByteLinear(weight, None, Scale(0.01, 128), torch.float32)(x))
    written = Scale(float(gelu.max()) / 200, 20)
    found = ByteLinear(weight, None, Scale(0.01, 128), written).activated(x, "none")
    expected = (gelu / written.step + written.zero).round().clamp(0, 255)
    assert found.dtype is torch.uint8
    assert (found.float() - expected).abs().max() <= 1
    assert (found.float() == expected).float().mean() > 0.99


def test_a_layer_that_bytes_serve_badly_stays_as_it_is() -> None:
    model = ready()
    with torch.no_grad():  # one number in fc2's input is a thousand times the others, and behind an activation
        model.blocks[1].mlp.fc1.bias[3] = 3000.0  # type: ignore[index,union-attr]
        model.blocks[1].mlp.fc2.weight[:, 3] *= 1e-3  # type: ignore[index,union-attr]
    scales = calibrate.calibrated(model, pictures(model))
    assert "fc2" in scales[0]
    assert "fc2" not in scales[1]
    images = torch.stack(pictures(model, 5, seed=2))
    with torch.no_grad():
        assert relative(in_bytes(model).embed(images), model.embed(images)) < 0.06


@pytest.mark.parametrize("gelu", ["exact", "tanh", "quick"])
def test_bytes_behind_an_activation_are_right_where_the_layer_before_has_none(gelu: str) -> None:
    model = ready(gelu=gelu)
    for block in model.blocks:
        assert isinstance(block, Block)
        assert isinstance(block.mlp, MLP)
        with torch.no_grad():  # a channel that is 1024 for every token, and whose products the bias takes away again
            block.norm2.weight[0], block.norm2.bias[0] = 0.0, 1024.0
            block.mlp.fc1.weight[:, 0] = torch.linspace(-1, 1, len(block.mlp.fc1.weight)).bfloat16()
            block.mlp.fc1.bias.copy_(-1024 * block.mlp.fc1.weight[:, 0])
    scales = calibrate.calibrated(model, pictures(model))
    assert all("fc1" not in of_block and "fc2" in of_block for of_block in scales)
    images = torch.stack(pictures(model, 5, seed=2))
    with torch.no_grad():
        assert relative(in_bytes(model).embed(images), model.embed(images)) < 0.06


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_models_in_any_dtype_are_calibrated(dtype: torch.dtype) -> None:
    model = ready(layer_scale=0.3)
    images = torch.stack(pictures(model, 5, seed=2))
    with torch.no_grad():
        right = model.embed(images)
        found = in_bytes(model.to(dtype)).embed(images.to(dtype))
    assert found.dtype is dtype
    assert relative(found.float(), right) < 0.06


def test_weights_whose_columns_stand_first_in_memory() -> None:
    """As numpy's .npz files give them back, and a transposed matrix that was put in place."""
    model = ready()
    images = torch.stack(pictures(model, 3, seed=2))
    right = in_bytes(model)(images)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.t().contiguous().t()
    assert relative(in_bytes(model)(images), right) < 1e-5


def test_channels_that_stand_out_go_into_the_weights() -> None:
    plain, odd = ready(), ready()
    with torch.no_grad():
        odd.blocks[1].norm1.weight[5] *= 200.0  # type: ignore[index,union-attr]
        odd.blocks[1].attn.qkv.weight[:, 5] /= 200.0  # type: ignore[index,union-attr]
    of_plain, of_odd = (calibrate.calibrated(model, pictures(model))[1]["qkv"] for model in (plain, odd))
    assert isinstance(of_odd.spread, torch.Tensor)
    assert of_odd.spread[5] > 5 * of_odd.spread.median()
    assert of_plain.step < of_odd.step * 20
    images = torch.stack(pictures(odd, 5, seed=2))
    with torch.no_grad():
        assert relative(in_bytes(odd).embed(images), odd.embed(images)) < 0.06


def test_the_same_pictures_give_the_same_scales() -> None:
    model = ready()
    first, second = in_bytes(model), in_bytes(model)
    other = optimize(copy.deepcopy(model), dtype=torch.int8, calibrate=pictures(model, seed=3))
    images = torch.stack(pictures(model, 3, seed=2))
    many = ready(image_size=80, patch_size=4, class_token=False, pool="mean")  # tokens: more than bfloat16 can count
    scales = in_bytes(many).calibration
    given = pictures(many)
    torch.set_default_dtype(torch.bfloat16)
    try:
        in_another = optimize(copy.deepcopy(many), dtype=torch.int8, calibrate=given)
    finally:
        torch.set_default_dtype(torch.float32)
    assert in_another.calibration == scales  # type: ignore[union-attr]
    assert isinstance(other, OptimizedViT)
    assert first.calibration == second.calibration != other.calibration
    assert torch.equal(first(images), second(images))
    assert first.calibration in kernels_of(first)
    assert first.compute_dtype is torch.int8
    assert first.dtype is first(images).dtype is torch.float32
    assert not optimize(copy.deepcopy(model)).calibration  # type: ignore[union-attr]


def test_calibrating_leaves_a_model_as_it_was() -> None:
    model = ready(dropout=0.1)
    model.train()
    model.blocks[0].eval()  # type: ignore[operator]
    modes = [module.training for module in model.modules()]
    with pytest.raises(OptimizedError, match="no picture"):
        optimize(model, dtype=torch.int8, calibrate=[])
    with pytest.raises(OptimizedError, match="one of the calibration pictures 9 to 10 are not finite"):
        optimize(model, dtype=torch.int8, calibrate=[*pictures(model, 9), torch.full((3, 32, 32), torch.nan)])
    assert type(model) is ViT
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_pictures_may_come_from_an_iterator() -> None:
    model = ready()
    fast = optimize(copy.deepcopy(model), dtype=torch.int8, calibrate=iter(pictures(model)))
    assert fast.calibration == in_bytes(model).calibration  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dtype": torch.int8}, "needs some 32 pictures"),
        ({"dtype": torch.bfloat16, "calibrate": []}, "are for int8, and torch.bfloat16 needs none"),
        ({"calibrate": []}, "Calibration pictures are for int8, and torch.float32"),
        ({"dtype": torch.int16}, "cannot compute in torch.int16.*torch.int8"),
    ],
)
def test_what_does_not_fit_is_said(given: dict[str, Any], text: str) -> None:
    with pytest.raises(OptimizedError, match=text):
        optimize(ready(), **given)


@pytest.mark.parametrize("given", ["photos", Path("photos"), 3])
def test_what_are_no_pictures_to_go_through_is_said(given: Any) -> None:
    with pytest.raises(OptimizedError, match=r"Calibration takes pictures, one after the other, not .*Pass a list"):
        optimize(ready(), dtype=torch.int8, calibrate=given)


def test_a_second_call_with_another_dtype_is_refused() -> None:
    model = in_bytes(ready())
    assert optimize(model) is model
    with pytest.raises(OptimizedError, match=re.escape("already computes in torch.int8")):
        optimize(model, dtype=torch.bfloat16)


def test_torch_alone_has_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_KERNELS", "torch")
    with pytest.raises(OptimizedError, match="VITLITE_KERNELS=torch"):
        in_bytes(ready())


def test_a_model_that_bytes_do_not_serve_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "WORST", 0.0)
    with pytest.raises(OptimizedError, match="too coarse for every layer"):
        in_bytes(ready())


def test_a_missing_or_inexact_operator_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Saturating(ByteLinear):
        """Adds up in 16 bits, as CPUs without products of bytes do."""

        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x).clamp(-300, 300)

    monkeypatch.setattr(int8, "ByteLinear", Saturating)
    assert not int8.bytes_are_right.__wrapped__(torch.float32)
    monkeypatch.setattr(torch.ops, "onednn", object())
    assert not int8.bytes_are_right.__wrapped__(torch.float32)


def bytes_in_memory() -> int:
    """Of all tensors that anybody holds, packed ones too."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return sum(tensor.nbytes for tensor in tensors if tensor.layout in (torch.strided, torch._mkldnn))


def test_what_is_kept_in_bytes_takes_a_quarter() -> None:
    model = ready(dim=128, mlp_dim=512, pool="mean")  # with "cls", the last block has its queries also in floats
    linear = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    weights = sum(layer.weight.nbytes for layer in linear)
    before = bytes_in_memory()
    blocks = in_bytes(model).blocks
    kept = bytes_in_memory() - before
    assert len(blocks) == model.config.depth
    vectors = sum(layer.out_features for layer in linear) * 20  # bytes: steps, zeros and biases; and those of norms
    assert weights / 4 < kept < weights / 4 + vectors
