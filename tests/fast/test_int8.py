"""int8: exact products of bytes, quantised as the calibration images ask for, and answers close to float32."""

import copy
import gc
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
from vitlite.fast.int8 import Int8Linear, Quantization, int8_is_right, quantize_weight
from vitlite.fast.optimize import OptimizedViT, kernels_of
from vitlite.kernels import KernelChoice
from vitlite.nn.layers import MLP, Block, QuickGELU

pytestmark = pytest.mark.skipif(not int8_is_right(torch.float32), reason="no int8 on this CPU")


def images_for(model: ViT, number: int = 32, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    return list(torch.randn(number, config.channels, 32, 32, generator=generator))


def ready(**options: Any) -> ViT:
    """A model whose images need no preparation."""
    model = made(**options)
    model.preprocess = torch.stack
    return model


def in_int8(model: ViT, number: int = 32) -> OptimizedViT:
    fast = optimize(copy.deepcopy(model), dtype=torch.int8, calibrate=images_for(model, number))
    assert isinstance(fast, OptimizedViT)
    return fast


def relative(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def simulated(model: ViT, quantizations: list[dict[str, Quantization]]) -> ViT:
    """The model in float32, with inputs and weights of layers rounded as int8 would."""
    model = copy.deepcopy(model)
    for block, of_block in zip(model.blocks, quantizations, strict=True):
        assert isinstance(block, Block)
        layers = {"qkv": block.attn.qkv, "proj": block.attn.proj, "fc1": block.mlp.fc1, "fc2": block.mlp.fc2}
        for name, quantization in of_block.items():
            quick = name == "fc2" and isinstance(getattr(block.mlp, "act", None), QuickGELU)
            factor = 1.702 if quick and isinstance(block.mlp.norm, nn.Identity) else 1.0  # it is computed so many times
            layer, smoothing = layers[name], torch.as_tensor(quantization.smoothing)
            integers, scales = quantize_weight(layer.weight.detach() * smoothing)
            layer.weight.data = integers * scales[:, None] / smoothing
            layer.register_forward_pre_hook(
                lambda _, x, quantization=quantization, factor=factor: (quantization.simulate(x[0] * factor) / factor,)
            )
    return model


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_answers_are_close_to_float32_and_those_of_a_simulation(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ready(**options)
    images = torch.stack(images_for(model, 5, seed=2))
    quantizations = calibrate.calibrated(model, images_for(model))
    if model.config.pool == "cls" and model.config.rope is None:
        del quantizations[-1]["qkv"]  # the class token attends in floats
    with torch.no_grad():
        expected, rounded = model.embed(images), simulated(model, quantizations).embed(images)
        found = in_int8(model).embed(images)
        monkeypatch.setattr(module, "is_fast_in", lambda dtype: dtype is torch.int8)  # so that nothing else is rounded
        int8_alone = in_int8(model).embed(images)
    assert relative(found, expected) < 0.12
    assert torch.cosine_similarity(found.flatten(1), expected.flatten(1)).mean() > 0.99
    assert relative(int8_alone, rounded) < 0.03  # a number halfway between two bytes may become either
    assert relative(int8_alone, expected) > 0.005


@pytest.mark.parametrize(
    ("size", "batch", "threads"), [((32, 32), 1, 1), ((48, 16), 3, 2), ((64, 64), 9, 1), ((32, 32), 9, 2)]
)
def test_any_size_batch_and_number_of_threads(size: tuple[int, int], batch: int, threads: int) -> None:
    model = ready(registers=2, cls_position=False, layer_scale=0.3)
    fast = in_int8(model)
    images = torch.randn(batch, 3, *size)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            right, found = model.features(images, layers=(0, 1, 2)), fast.features(images, layers=(0, 1, 2))
    finally:
        torch.set_num_threads(before)
    assert right.cls is not None
    assert found.cls is not None
    tensors = (*right.layers, right.cls, right.patches)
    for ours, theirs in zip((*found.layers, found.cls, found.patches), tensors, strict=True):
        assert relative(ours, theirs) < 0.06
    assert relative(fast.attention_maps(images), model.attention_maps(images).detach()) < 0.1


@pytest.mark.parametrize("gives", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smooth", [False, True])
def test_an_int8_layer(gives: torch.dtype, smooth: bool) -> None:
    if not int8_is_right(gives):
        pytest.skip("no int8 with this dtype")
    torch.manual_seed(0)
    weight, bias, x, other = torch.randn(24, 40), torch.randn(24), torch.randn(2, 7, 40), torch.randn(2, 9, 24)
    scale = Quantization(0.03, 117, torch.rand(40) + 0.5 if smooth else 1.0)
    layer = Int8Linear(weight, bias, scale, gives)
    divided = x / scale.smoothing
    given = (divided / scale.scale + scale.zero_point).round().clamp(0, 255).to(torch.uint8)
    wide = weight.double() * scale.smoothing
    steps = wide.abs().amax(1, keepdim=True) / 127
    right = F.linear((given.double() - scale.zero_point) * scale.scale, (wide / steps).round() * steps, bias.double())
    tolerance = 1e-5 if gives is torch.float32 else 1e-2
    assert relative(layer(given).double(), right) < tolerance
    strided = other[:, 1:8]
    assert relative(layer.added(given, strided).double(), right + strided.double()) < 1e-5
    kept = other.clone()
    assert relative(layer.added(given, strided, overwrite=True).double(), right + kept[:, 1:8].double()) < 1e-5
    assert relative(layer.activated(given, "tanh").double(), F.gelu(right, approximate="tanh")) < 100 * tolerance


def test_bytes_between_two_layers_are_rounded_to_nearest() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 40), torch.randint(0, 256, (2, 7, 40), dtype=torch.uint8)
    gelu = F.gelu(Int8Linear(weight, None, Quantization(0.01, 128), torch.float32)(x))
    written = Quantization(float(gelu.max()) / 200, 20)
    found = Int8Linear(weight, None, Quantization(0.01, 128), written).activated(x, "none")
    expected = (gelu / written.scale + written.zero_point).round().clamp(0, 255)
    assert found.dtype is torch.uint8
    assert (found.float() - expected).abs().max() <= 1
    assert (found.float() == expected).float().mean() > 0.99


def test_a_layer_that_int8_serves_badly_stays_in_floats() -> None:
    model = ready()
    with torch.no_grad():  # one input of fc2 is a thousand times the others
        model.blocks[1].mlp.fc1.bias[3] = 3000.0  # type: ignore[index,union-attr]
        model.blocks[1].mlp.fc2.weight[:, 3] *= 1e-3  # type: ignore[index,union-attr]
    scales = calibrate.calibrated(model, images_for(model))
    assert "fc2" in scales[0]
    assert "fc2" not in scales[1]
    images = torch.stack(images_for(model, 5, seed=2))
    with torch.no_grad():
        assert relative(in_int8(model).embed(images), model.embed(images)) < 0.06


@pytest.mark.parametrize("mlp", ["gelu", "gelu_tanh", "quick_gelu"])
def test_int8_behind_an_activation_of_a_float_layer(mlp: str) -> None:
    model = ready(mlp=mlp)
    for block in model.blocks:
        assert isinstance(block, Block)
        assert isinstance(block.mlp, MLP)
        with torch.no_grad():  # a channel that is 1024 for every token, which the bias subtracts again
            block.norm2.weight[0], block.norm2.bias[0] = 0.0, 1024.0
            block.mlp.fc1.weight[:, 0] = torch.linspace(-1, 1, len(block.mlp.fc1.weight)).bfloat16()
            block.mlp.fc1.bias.copy_(-1024 * block.mlp.fc1.weight[:, 0])
    scales = calibrate.calibrated(model, images_for(model))
    assert all("fc1" not in of_block and "fc2" in of_block for of_block in scales)
    images = torch.stack(images_for(model, 5, seed=2))
    with torch.no_grad():
        assert relative(in_int8(model).embed(images), model.embed(images)) < 0.06


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_models_in_any_dtype_are_calibrated(dtype: torch.dtype) -> None:
    model = ready(layer_scale=0.3)
    images = torch.stack(images_for(model, 5, seed=2))
    with torch.no_grad():
        right = model.embed(images)
        found = in_int8(model.to(dtype)).embed(images.to(dtype))
    assert found.dtype is dtype
    assert relative(found.float(), right) < 0.06


def test_transposed_weights() -> None:
    """As numpy's .npz files return them."""
    model = ready()
    images = torch.stack(images_for(model, 3, seed=2))
    right = in_int8(model)(images)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.t().contiguous().t()
    assert relative(in_int8(model)(images), right) < 1e-5


def test_outlier_channels_move_into_the_weights() -> None:
    plain, odd = ready(), ready()
    with torch.no_grad():
        odd.blocks[1].norm1.weight[5] *= 200.0  # type: ignore[index,union-attr]
        odd.blocks[1].attn.qkv.weight[:, 5] /= 200.0  # type: ignore[index,union-attr]
    of_plain, of_odd = (calibrate.calibrated(model, images_for(model))[1]["qkv"] for model in (plain, odd))
    assert isinstance(of_odd.smoothing, torch.Tensor)
    assert of_odd.smoothing[5] > 5 * of_odd.smoothing.median()
    assert of_plain.scale < of_odd.scale * 20
    images = torch.stack(images_for(odd, 5, seed=2))
    with torch.no_grad():
        assert relative(in_int8(odd).embed(images), odd.embed(images)) < 0.06


def test_the_same_images_give_the_same_quantisation() -> None:
    model = ready()
    first, second = in_int8(model), in_int8(model)
    other = optimize(copy.deepcopy(model), dtype=torch.int8, calibrate=images_for(model, seed=3))
    images = torch.stack(images_for(model, 3, seed=2))
    many = ready(image_size=80, patch_size=4, class_token=False, pool="mean")  # more tokens than bfloat16 can count
    calibration = in_int8(many).calibration
    given = images_for(many)
    torch.set_default_dtype(torch.bfloat16)
    try:
        in_another = optimize(copy.deepcopy(many), dtype=torch.int8, calibrate=given)
    finally:
        torch.set_default_dtype(torch.float32)
    assert in_another.calibration == calibration  # type: ignore[union-attr]
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
    with pytest.raises(OptimizedError, match="no calibration images"):
        optimize(model, dtype=torch.int8, calibrate=[])
    with pytest.raises(OptimizedError, match="calibration images 9 to 10 is not finite"):
        optimize(model, dtype=torch.int8, calibrate=[*images_for(model, 9), torch.full((3, 32, 32), torch.nan)])
    assert type(model) is ViT
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_images_from_an_iterator() -> None:
    model = ready()
    fast = optimize(copy.deepcopy(model), dtype=torch.int8, calibrate=iter(images_for(model)))
    assert fast.calibration == in_int8(model).calibration  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dtype": torch.int8}, "needs about 32 typical images"),
        ({"dtype": torch.bfloat16, "calibrate": []}, "are only used for int8, but dtype is torch.bfloat16"),
        ({"calibrate": []}, "are only used for int8, but dtype is torch.float32"),
        ({"dtype": torch.int16}, "cannot compute in torch.int16.*torch.int8"),
    ],
)
def test_wrong_arguments_are_errors(given: dict[str, Any], text: str) -> None:
    with pytest.raises(OptimizedError, match=text):
        optimize(ready(), **given)


@pytest.mark.parametrize("given", ["photos", Path("photos"), 3])
def test_calibration_takes_a_list(given: Any) -> None:
    with pytest.raises(OptimizedError, match=r"calibrate must be a list of images, got .*Pass the paths"):
        optimize(ready(), dtype=torch.int8, calibrate=given)


def test_a_second_call_with_another_dtype_is_an_error() -> None:
    model = in_int8(ready())
    assert optimize(model) is model
    with pytest.raises(OptimizedError, match=r"already optimized for torch\.int8"):
        optimize(model, dtype=torch.bfloat16)


def test_torchs_own_kernels_have_no_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernel_choice", KernelChoice)
    with pytest.raises(OptimizedError, match="VITLITE_KERNELS=torch"):
        in_int8(ready())


def test_a_model_that_int8_does_not_serve_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "LARGEST_ERROR", 0.0)
    with pytest.raises(OptimizedError, match="not accurate enough for any layer"):
        in_int8(ready())


def test_a_missing_or_inexact_operator_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Saturating(Int8Linear):
        """Add in 16 bits, as CPUs without products of bytes do."""

        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x).clamp(-300, 300)

    monkeypatch.setattr(int8, "Int8Linear", Saturating)
    assert not int8.int8_is_right.__wrapped__(torch.float32)
    monkeypatch.setattr(torch.ops, "onednn", object())
    assert not int8.int8_is_right.__wrapped__(torch.float32)


def bytes_in_memory() -> int:
    """Return the bytes of all tensors, packed ones too."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return sum(tensor.nbytes for tensor in tensors if tensor.layout in (torch.strided, torch._mkldnn))


def test_int8_takes_a_quarter_of_the_memory() -> None:
    model = ready(dim=128, mlp_dim=512, pool="mean")  # with "cls", the last block has its queries also in floats
    linear = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    weights = sum(layer.weight.nbytes for layer in linear)
    before = bytes_in_memory()
    blocks = in_int8(model).blocks
    kept = bytes_in_memory() - before
    assert len(blocks) == model.config.depth
    vectors = sum(layer.out_features for layer in linear) * 20  # bytes: scales, zeros and biases, and norms
    assert weights / 4 < kept < weights / 4 + vectors
