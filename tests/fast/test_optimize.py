"""`optimize`: the answers of the eager model, for all that a config can describe."""

import copy
import gc
import math
import pickle
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from changed_models import quantise
from torch import Tensor, nn

from vitlite import ViT, ViTConfig, kernels, optimize
from vitlite.config import DINOV3_ROPE
from vitlite.errors import InputError, OptimizedError
from vitlite.fast import attention, blocks, slices
from vitlite.fast import optimize as module
from vitlite.images import Preprocess, TransformConfig
from vitlite.kernels import KernelChoice

SIZES: dict[str, Any] = dict(image_size=32, patch_size=8, dim=48, depth=3, heads=4, mlp_dim=96, num_classes=7)
TRANSFORM = TransformConfig(
    size=(32, 32), resize=(32, 32), mode="squash", interpolation="bicubic", mean=(0.5,), std=(0.5,)
)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"qkv_bias": False},
    {"mlp": "gelu_tanh"},
    {"mlp": "quick_gelu"},
    {"mlp": "quick_gelu", "inner_norm": "both"},
    {"inner_norm": "both"},
    {"layer_scale": 0.3},
    {"input_norm": "tokens"},
    {"input_norm": "patches"},
    {"registers": 4, "cls_position": False},
    {"cls_position": False},
    {"class_token": False, "pool": "mean"},
    {"pool": "mean"},
    {"pool": "mean_with_cls"},
    {"pool": "cls_and_mean"},
    {"pool": "cls_and_distillation", "registers": 1, "cls_position": False},
    {"final_norm": "none"},
    {"final_norm": "pooled"},
    {"final_norm": "pooled", "pool": "mean"},
    {"pre_logits": 20},
    {"head_dim": 10},
    {"positions": "sincos2d"},
    {"positions": "none"},
    {"num_classes": 0},
    {"channels": 5},
    {"depth": 1},
    {"dropout": 0.1, "drop_path": 0.1},
    {"pool": "map", "class_token": False},
    {"pool": "map", "class_token": False, "mlp": "gelu_tanh", "inner_norm": "both"},
    {"positions": "none", "rope": DINOV3_ROPE, "registers": 4, "layer_scale": 0.3, "qkv_bias": False},
    {"positions": "none", "rope": DINOV3_ROPE, "pool": "mean", "head_dim": 12},
    {"mlp": "swiglu"},
    {"mlp": "swiglu", "inner_norm": "both", "layer_scale": 0.3},
    {"positions": "none", "rope": DINOV3_ROPE, "mlp": "swiglu"},
    {"stem": ()},
    {"stem": (1, 2)},
]


def made(seed: int = 0, **options: Any) -> ViT:
    """A model in which every parameter matters, the same with any version of torch."""
    model = ViT(ViTConfig(**SIZES | options)).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            typical = parameter.mean().round(decimals=1)  # 1 for the weight of a norm, 0 for random ones
            parameter.copy_(typical + torch.randn_like(parameter) * 0.1)
    return model


def optimized(model: ViT, dtype: torch.dtype | None = None) -> ViT:
    return optimize(copy.deepcopy(model), dtype=dtype)


def distance(found: Tensor, right: Tensor) -> float:
    assert found.shape == right.shape
    assert found.dtype == right.dtype
    return float((found - right).abs().max() / right.abs().max())


def answers(model: ViT, images: Tensor) -> list[Tensor]:
    with torch.no_grad():
        features = model.features(images, layers=(0, -1))
        tensors = [model(images), model.embed(images), model.attention_maps(images, layers=(0, -1))]
    return [*tensors, *(part for part in features if isinstance(part, Tensor)), *features.layers]


@pytest.fixture(params=["packed", "plain", "other device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Packed layers, where this machine has them; plain ones, with powers of two; and what runs on a GPU."""
    packed = request.param == "packed"
    float_types = (torch.float32, torch.bfloat16)
    choice = KernelChoice(packed=float_types if packed else (), powers=() if packed else float_types)
    exact = packed and kernels.float32_products_are_exact()
    monkeypatch.setattr(kernels, "kernel_choice", lambda: choice)
    monkeypatch.setattr(blocks, "kernel_choice", lambda: choice)
    monkeypatch.setattr(module, "float32_products_are_exact", lambda: exact)
    monkeypatch.setattr(module, "LONG", 1)
    monkeypatch.setattr(blocks, "LONG", 1)
    if request.param == "other device":
        torch_alone = blocks.Kernels(kernels.PlainLinear, attention.attend_fused, 1.0)
        monkeypatch.setattr(module, "fastest_kernels", lambda *args: torch_alone)
    return request.param


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_answers_are_the_same(options: dict[str, Any], way: str) -> None:
    model = made(**options)
    faster = optimized(model)
    for batch, size in ((1, (32, 32)), (3, (40, 24)), (9, (32, 32))):
        images = torch.randn(batch, model.config.channels, *size)
        for found, right in zip(answers(faster, images), answers(model, images), strict=True):
            assert distance(found, right) < 1e-5


def test_threads_share_a_model(way: str) -> None:
    """As in a service: images of other sizes, and in other numbers, at the same time."""
    model = made(positions="none", rope=DINOV3_ROPE, cls_position=False, registers=4)
    faster = optimized(model)
    batches = [torch.randn(n, 3, *size) for n in (1, 3, 9) for size in ((32, 32), (40, 24))] * 2
    expected = [model(images).detach() for images in batches]
    wrong: list[Any] = []

    def work(first: int) -> None:
        try:
            for turn in range(24):
                i = (first + turn) % len(batches)
                if distance(faster(batches[i]), expected[i]) >= 1e-5:
                    wrong.append(batches[i].shape)
                faster(torch.zeros(1, 3, 8 * (1 + (first + turn) % 30), 8))  # more grids than are kept
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, len(batches), 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert kernels.float32_products.threads == 0
    assert len(faster._tables_of) <= module.GRIDS + len(threads)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_batches_in_slices_and_streams(threads: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = made(), torch.get_num_threads()
    faster = optimized(model)
    torch.set_num_threads(threads)
    try:
        for batch in (1, 4, 8, 11, 13, 25):
            images = torch.randn(batch, 3, 32, 32)
            for found, right in zip(answers(faster, images), answers(model, images), strict=True):
                assert distance(found, right) < 1e-5
            assert torch.get_num_threads() == threads
        monkeypatch.setattr(slices, "TEMPORARY", 1)  # one image at a time, one head at a time
        monkeypatch.setattr(attention, "SCORES", 1)
        assert distance(faster(images), model(images).detach()) < 1e-5
        monkeypatch.setattr(attention, "SCORES", 3 * 17 * 17 * 4)  # three heads, then the fourth
        assert distance(faster(images), model(images).detach()) < 1e-5
    finally:
        torch.set_num_threads(before)
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    seen: list[int] = []
    other.start()
    other.join()
    assert seen == [before]  # what a new thread takes over


def test_streams_leave_the_number_of_threads_elsewhere() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with slices._single_threads.__wrapped__(2, 0) as streams:
            assert list(streams.map(lambda _: torch.get_num_threads(), range(8))) == [1] * 8
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [48, 72])  # 145 tokens, and so many that keys are turned
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3])  # of the scores: sums in range, some beyond it, nearly all
def test_scores_of_any_size(size: int, scale: float, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shifted = Mock(side_effect=torch.softmax)
    monkeypatch.setattr(torch, "softmax", shifted)
    floats = (torch.float32,)
    monkeypatch.setattr(blocks, "kernel_choice", lambda: KernelChoice(packed=floats, powers=floats))
    model = made(image_size=size, patch_size=4)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[: model.config.attention_dim] *= scale
    images = torch.randn(2, 3, size, size)
    found = optimized(model)(images).double()
    right = model.double()(images.double()).detach()
    assert distance(found, right) < 1e-5 * max(1, scale / 10)  # what the scores' own rounding does to weights
    if way != "other device":
        assert shifted.called == (scale > 1)


def test_an_empty_batch_has_no_answers() -> None:
    assert optimized(made())(torch.zeros(0, 3, 32, 32)).shape == (0, 7)


def test_images_in_any_memory_layout() -> None:
    model = made()
    faster = optimized(model)
    images = torch.randn(4, 40, 36, 3).permute(0, 3, 1, 2)[::2, :, 4:36, 2:34]
    assert distance(faster(images), model(images).detach()) < 1e-5


def rounding(own: torch.dtype, images: int, seeds: int, **options: Any) -> tuple[float, float, float, float]:
    """Mean squares of what the logits of eager and optimized models are off by in bfloat16; then of maps, at most."""
    found = []
    for seed in range(seeds):  # the rounding of one model's weights is one sample, however many images
        right = made(seed=seed, **options).to(own).float()
        pixels = torch.randn(images, 3, 32, 32)
        eager, faster = copy.deepcopy(right).bfloat16(), optimized(copy.deepcopy(right).to(own), torch.bfloat16)
        with torch.no_grad():
            answer, maps = faster(pixels.to(own)), right.attention_maps(pixels)
            assert answer.dtype == own == faster.dtype
            off = [(model.float() - right(pixels)).square().mean() for model in (eager(pixels.bfloat16()), answer)]
            off += [distance(model.attention_maps(pixels.to(dtype)).float(), maps)
                    for model, dtype in ((eager, torch.bfloat16), (faster, own))]  # fmt: skip
            found.append(torch.tensor(off))
    eager_logits, logits, eager_maps, maps_off = torch.stack(found).mean(0).tolist()
    return eager_logits, logits, eager_maps, maps_off


@pytest.mark.parametrize("patch", [8, 2])  # 17 tokens, and so many that attention is by powers
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_bfloat16_is_as_near_as_eager(own: torch.dtype, patch: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LONG", 128)
    eager_logits, logits, _, maps = rounding(own, 16, 4, depth=6, head_dim=16, patch_size=patch)
    assert logits < 1.2 * eager_logits
    assert maps < 0.05


FAMILIES: dict[str, dict[str, Any]] = {
    "attention pooling": {"pool": "map", "class_token": False, "mlp": "gelu_tanh"},
    "rotary": {"positions": "none", "rope": DINOV3_ROPE, "registers": 4, "layer_scale": 0.3},
    "rotary, gated": {"positions": "none", "rope": DINOV3_ROPE, "registers": 4, "layer_scale": 0.3, "mlp": "swiglu"},
    "gated": {"mlp": "swiglu", "layer_scale": 0.3},
    "AIMv2": {"norm": "rms", "input_norm": "projected", "mlp": "swiglu", "qkv_bias": False},
    "distilled": {"pool": "cls_and_distillation", "registers": 1, "cls_position": False},
    "no final norm": {"final_norm": "none"},
    "hybrid": {"stem": (1,), "patch_size": 4},
}


def test_bfloat16_of_each_family_is_as_near_as_eager(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one family a few samples differ by chance up to twofold; of all of them together they tell."""
    monkeypatch.setattr(blocks, "LONG", 128)
    logarithms = []
    for family, options in FAMILIES.items():
        eager_logits, logits, eager_maps, maps = rounding(torch.float32, 8, 4, head_dim=16, **options)
        assert logits < 2 * eager_logits, family
        assert maps < max(0.05, 1.5 * eager_maps), family
        logarithms.append(math.log(logits / eager_logits))
    assert math.exp(sum(logarithms) / len(logarithms)) < 1.2


def test_float64_and_half_use_plain_layers() -> None:
    model = made().double()
    images = torch.randn(9, 3, 32, 32, dtype=torch.float64)
    assert distance(optimized(model)(images), model(images).detach()) < 1e-12
    half = optimized(made().half())(images.half()).double()
    assert distance(half, model(images).detach()) < 0.02


def test_float32_inside_a_bfloat16_model() -> None:
    model, images = made().bfloat16(), torch.randn(2, 3, 32, 32).bfloat16()
    found = optimized(model, torch.float32)(images)
    assert distance(found, model.float()(images.float()).detach().bfloat16()) < 0.01


def test_an_unsupported_dtype_is_an_error() -> None:
    model = made()
    with pytest.raises(OptimizedError, match=r"cannot compute in torch\.int16.*torch\.bfloat16"):
        optimize(model, dtype=torch.int16)
    assert type(model) is ViT


@pytest.mark.parametrize("fast", [True, False])
def test_an_emulated_dtype_gives_a_warning(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_fast_in", lambda dtype: fast)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        faster = optimize(made(), dtype=torch.bfloat16)
    assert faster.compute_dtype is torch.bfloat16
    assert ["no fast instructions for torch.bfloat16. Use float32" in str(warning.message) for warning in caught] == [
        True
    ] * (not fast)


def test_other_devices_get_torchs_own_kernels() -> None:
    chosen = blocks.fastest_kernels(torch.device("cuda"), torch.float32, 197)
    assert chosen == (kernels.PlainLinear, attention.attend_fused, 1.0)


def test_answers_can_train_what_comes_after() -> None:
    faster = optimized(made())
    images = torch.randn(9, 3, 32, 32)
    answer = faster.embed(images)
    assert not answer.requires_grad
    probe = nn.Linear(48, 2)
    probe(answer).sum().backward()
    with torch.inference_mode():
        assert distance(faster.embed(images), answer) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_around_it_changes_nothing(dtype: torch.dtype) -> None:
    """Where slices are joined too, for which it has no word of float16."""
    faster, images = optimized(made().to(dtype)), torch.randn(9, 3, 32, 32, dtype=dtype)
    right = faster(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(faster(images), right)


def test_autocast_around_optimize_rounds_nothing() -> None:
    model, images = made(pool="map", class_token=False), torch.randn(2, 3, 32, 32)
    wanted = optimized(model)(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        faster = optimized(model)
    torch.testing.assert_close(faster(images), wanted, rtol=0, atol=0)


def test_another_default_device_changes_nothing() -> None:
    model, images = made(), torch.randn(2, 3, 32, 48)  # a size for which no memory is kept yet
    usual = copy.deepcopy(model)
    with torch.device("meta"):  # stands for cuda
        found = optimize(model)(images)
    torch.testing.assert_close(found, optimize(usual)(images))


def test_the_same_inputs_are_errors() -> None:
    model = made()
    faster = optimized(model)
    for images in (torch.zeros(3, 32, 32), torch.zeros(1, 3, 33, 32), "cat.png"):
        with pytest.raises(InputError) as plain:
            model(images)
        with pytest.raises(InputError) as fast_one:
            faster(images)
        assert str(plain.value) == str(fast_one.value)
    with pytest.raises(InputError, match="no layers"):
        faster.attention_maps(torch.zeros(1, 3, 32, 32), layers=())


def test_images_that_require_gradients_are_an_error() -> None:
    faster, images = optimized(made()), torch.randn(1, 3, 32, 32, requires_grad=True)
    with pytest.raises(OptimizedError, match=r"images\.detach\(\)"):
        faster(images)
    with torch.no_grad():
        faster(images)


FORBIDDEN: dict[str, Callable[[ViT], Any]] = {
    "train": lambda model: model.train(),
    "to": lambda model: model.to("cpu"),
    "half": lambda model: model.half(),
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict({}),
    "save": lambda model: model.save("somewhere"),
    "reset_head": lambda model: model.reset_head(3),
    "parameters": lambda model: sum(parameter.numel() for parameter in model.parameters()),
    "named_parameters": lambda model: dict(model.named_parameters()),
    "requires_grad_": lambda model: model.requires_grad_(False),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "export": lambda model: torch.export.export(model, (torch.randn(2, 3, 32, 32),)),
    "trace": lambda model: torch.jit.trace(model, torch.randn(2, 3, 32, 32)),
    "script": torch.jit.script,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_an_optimized_model_cannot_do(name: str) -> None:
    with pytest.raises(OptimizedError, match=r"An optimized model cannot .*Do this before calling vitlite\.optimize"):
        FORBIDDEN[name](optimized(made()))


def never(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    raise AssertionError(f"looked into:\n{graph.code}")


def answer_or_error(call: Callable[[Tensor], Tensor], images: Tensor) -> Tensor | str:
    try:
        return call(images)
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("call", ["forward", "embed", "within another"])
def test_torch_compile_leaves_it_as_it_is(call: str) -> None:
    """Of packed weights its own compiler makes "LoweringException: AssertionError"; in torch 2.6 our error ends it."""
    model, images = optimized(made()), torch.randn(2, 3, 32, 32)
    within: Callable[[Tensor], Tensor] = model
    if call == "embed":
        within = model.embed
    elif call == "within another":
        within = nn.Sequential(nn.Identity(), model)
    right = within(images)
    torch._dynamo.reset()
    compiled = torch.compile(within, backend=never)
    for _ in range(2):
        found = answer_or_error(compiled, images)
        if isinstance(found, str):
            assert re.search("An optimized model cannot .* torch.compile, .* as it was created", found)
        else:
            assert torch.equal(found, right)
    assert torch.equal(within(images), right)


def test_a_part_of_a_larger_module_is_not_exported_or_loaded() -> None:
    whole = nn.Sequential(nn.Identity(), optimized(made()))
    with pytest.raises(Exception, match="An optimized model cannot be exported"):
        torch.export.export(whole, (torch.randn(2, 3, 32, 32),), strict=False)
    with pytest.raises(OptimizedError, match="cannot load other weights"):
        whole.load_state_dict({f"1.{name}": value for name, value in made(seed=1).state_dict().items()}, strict=False)


def test_a_second_call() -> None:
    model = optimized(made())
    assert optimize(model) is model
    assert optimize(model, dtype=torch.float32) is model
    for other in ({"calibrate": []}, {"dtype": torch.bfloat16}, {"dtype": torch.int8, "calibrate": []}):
        with pytest.raises(OptimizedError, match=r"already optimized for torch\.float32. To use other"):
            optimize(model, **other)


def test_what_stays() -> None:
    model = made()
    model.labels = tuple("abcdefg")
    config, preprocess = model.config, model.preprocess
    assert optimize(model) is model
    assert isinstance(model, ViT)
    assert (model.config, model.preprocess, model.labels, model.source) == (config, preprocess, tuple("abcdefg"), None)
    assert (model.device, model.dtype, model.training) == (torch.device("cpu"), torch.float32, False)
    assert model.eval() is model
    model.preprocess = Preprocess(TRANSFORM, model)
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    found = model.predict(images, top=1)
    assert [best.index for (best,) in found] == model(model.preprocess(images)).argmax(1).tolist()


def test_a_model_in_training_is_optimized_in_eval_mode() -> None:
    model = made(dropout=0.5, drop_path=0.5)
    images = torch.randn(2, 3, 32, 32)
    expected = model(images).detach()
    assert distance(optimize(model.train())(images), expected) < 1e-5


@pytest.mark.parametrize(
    ("options", "part"), [({}, blocks.FastBlock), ({"pool": "map", "class_token": False}, blocks.FastAttentionPool)]
)
def test_a_failure_leaves_the_model_as_it_was(
    options: dict[str, Any], part: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = made(dropout=0.1, **options), torch.randn(2, 3, 32, 32)
    expected, before = model(images), list(model.named_parameters())
    with monkeypatch.context() as patch:
        patch.setattr(part, "__init__", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            optimize(model.train())
    assert (type(model), model.training) == (ViT, True)
    assert all(old is new for (_, old), (_, new) in zip(before, model.named_parameters(), strict=True))
    assert torch.equal(model.eval()(images), expected)
    assert distance(optimize(model)(images), expected.detach()) < 1e-5


def test_the_old_weights_are_freed() -> None:
    model = made(depth=4)
    weights = [parameter for name, parameter in model.named_parameters() if name.endswith(("qkv.weight", "fc1.weight"))]
    references = [torch.utils.weak.WeakTensorKeyDictionary() for _ in weights]
    for reference, weight in zip(references, weights, strict=True):
        reference[weight] = True
    del weights, weight
    optimize(model)
    gc.collect()
    assert len(references) == 8
    assert not any(len(reference) for reference in references)


def test_a_shallow_copy_stays_eager() -> None:
    model, images = made(), torch.randn(1, 3, 32, 32)
    other, expected = copy.copy(model), model(images).detach()
    optimize(model)
    assert torch.equal(other(images), expected)


def _wrap(model: ViT) -> None:
    model.blocks[1].attn.qkv = nn.Sequential(model.blocks[1].attn.qkv)


def _change_stride(model: ViT) -> None:
    model.patch_embed.proj.stride = (4, 4)


def _run_twice(model: ViT) -> None:
    model.blocks.append(model.blocks[0])


def _quantise(model: ViT) -> None:
    quantise(model.blocks[1].attn.qkv)


def _narrow_one_block(model: ViT) -> None:
    model.blocks[1].bfloat16()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_wrap, r"modified model: blocks\.1\.attn\.qkv is Sequential"),
        (_change_stride, r"modified model: patch_embed\.proj is"),
        (_run_twice, r"modified model: blocks\.3 is"),
        (_quantise, r"blocks\.1\.attn\.qkv\.weight is a Quantised"),
        (_narrow_one_block, r"torch\.bfloat16 on cpu, torch\.float32 on cpu"),
    ],
)
def test_a_modified_model_is_an_error(change: Callable[[ViT], None], text: str) -> None:
    model = made()
    change(model)
    with pytest.raises(OptimizedError, match=text):
        optimize(model)
    assert type(model) is ViT


def test_only_a_vit_with_weights_is_taken() -> None:
    with pytest.raises(OptimizedError, match=r"expects a vitlite\.ViT, got Linear"):
        optimize(nn.Linear(2, 2))
    with torch.device("meta"):
        empty = ViT(ViTConfig(**SIZES))
    with pytest.raises(OptimizedError, match="meta"):
        optimize(empty)


@pytest.mark.usefixtures("uncovered")
def test_the_first_call_does_not_import_a_compiler() -> None:
    code = "import sys, einops, torch; einops.rearrange(torch.zeros(1), 'a -> a'); " \
           "before = set(sys.modules); import vitlite; config = vitlite.ViTConfig(" \
           f"**{SIZES!r}); vitlite.optimize(vitlite.ViT(config)); " \
           "print('torch._dynamo' in set(sys.modules) - before)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
