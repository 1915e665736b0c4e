"""`optimize`: the answers of the plain model, over all that a config can say, and nothing else touched."""

import copy
import gc
import math
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from changed_models import quantise
from torch import Tensor, nn

from vitlite import ViT, ViTConfig, optimize
from vitlite.errors import InputError, OptimizedError
from vitlite.fast import attention, blocks, cpu, kernels, slices, verdicts
from vitlite.fast import optimize as module
from vitlite.images import Preprocess, TransformConfig
from vitlite.nn.layers import Attention
from vitlite.plots import patch_filters

SIZES: dict[str, Any] = dict(image_size=32, patch_size=8, dim=48, depth=3, heads=4, mlp_dim=96, num_classes=7)
TRANSFORM = TransformConfig(
    size=(32, 32), resize=(32, 32), mode="squash", interpolation="bicubic", mean=(0.5,), std=(0.5,)
)
ONEDNN_IS_EXACT = kernels.float32_products.matmul is not None and not torch.cpu._is_amx_tile_supported()
with_the_setting = pytest.mark.skipif(kernels.float32_products.matmul is None, reason="an older torch has none")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"qkv_bias": False},
    {"gelu": "tanh"},
    {"gelu": "quick"},
    {"gelu": "quick", "inner_norm": True},
    {"inner_norm": True},
    {"layer_scale": 0.3},
    {"pre_norm": True},
    {"patch_norm": True},
    {"registers": 4, "cls_position": False},
    {"cls_position": False},
    {"class_token": False, "pool": "mean"},
    {"pool": "mean"},
    {"pool": "mean_with_cls"},
    {"pool": "cls_and_mean"},
    {"pool": "cls_and_distillation", "registers": 1, "cls_position": False},
    {"final_norm": False},
    {"fc_norm": True},
    {"fc_norm": True, "pool": "mean"},
    {"pre_logits": 20},
    {"head_dim": 10},
    {"positions": "sincos2d"},
    {"positions": "none"},
    {"num_classes": 0},
    {"channels": 5},
    {"depth": 1},
    {"dropout": 0.1, "drop_path": 0.1},
    {"pool": "map", "class_token": False},
    {"pool": "map", "class_token": False, "gelu": "tanh", "inner_norm": True},
    {"positions": "rope", "registers": 4, "layer_scale": 0.3, "qkv_bias": False},
    {"positions": "rope", "pool": "mean", "head_dim": 12},
    {"mlp": "swiglu"},
    {"mlp": "swiglu", "inner_norm": True, "layer_scale": 0.3},
    {"positions": "rope", "mlp": "swiglu"},
    {"stem": ()},
    {"stem": (1, 2)},
]


def made(seed: int = 0, **options: Any) -> ViT:
    """A model in which every parameter matters; the same with any torch, though each draws initial values its way."""
    model = ViT(ViTConfig(**SIZES | options)).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            typical = parameter.mean().round(decimals=1)  # 1 for a norm's weight, 0 for what is drawn
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


@pytest.fixture(params=["packed", "plain", "elsewhere"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The packed path, where this machine has it; the plain one; and what other devices than a CPU run."""
    packed = request.param == "packed"
    monkeypatch.setattr(blocks, "packing_pays", lambda dtype: packed and kernels._packing_is_right(dtype))
    monkeypatch.setattr(module, "float32_products_pay", lambda tokens, head_dim: packed and ONEDNN_IS_EXACT)
    if request.param == "plain":  # and attention by powers, which small models have by softmax
        monkeypatch.setattr(blocks, "POWERS", 1)
        monkeypatch.setattr(blocks, "powers_pay", lambda dtype: dtype is not torch.float16)
    if request.param == "elsewhere":
        chosen = blocks.Kernels(kernels.PlainLinear, attention.attend_fused, 1.0)
        monkeypatch.setattr(module, "fastest_kernels", lambda *args: chosen)
    return request.param


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_answers_are_the_same(options: dict[str, Any], way: str) -> None:
    model = made(**options)
    faster = optimized(model)
    for batch, size in ((1, (32, 32)), (3, (40, 24)), (9, (32, 32))):
        images = torch.randn(batch, model.config.channels, *size)
        for found, right in zip(answers(faster, images), answers(model, images), strict=True):
            assert distance(found, right) < 1e-5


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_four_threads_share_a_model(positions: str) -> None:
    """As a service does: pictures of other sizes, and in other numbers, at the same time."""
    registers = 4 if positions == "rope" else 0
    model = made(positions=positions, cls_position=positions != "rope", registers=registers)
    inputs = [torch.randn(*shape) for shape in ((1, 3, 32, 32), (9, 3, 32, 32), (2, 3, 48, 24), (1, 3, 64, 64))]
    with torch.inference_mode():
        wanted = [model(images) for images in inputs]
    optimize(model)
    wrong: list[Any] = []

    def work(first: int) -> None:
        for turn in range(25):
            i = (first + turn) % len(inputs)
            try:
                answers = model(inputs[i])
                if not (answers - wanted[i]).abs().max() <= 1e-5 * wanted[i].abs().max():
                    wrong.append(inputs[i].shape)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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


@pytest.mark.parametrize("size", [48, 72])  # 145 tokens, and so many that keys are turned
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3])  # of the scores: sums in range, some beyond it, nearly all
def test_scores_of_any_size(size: int, scale: float, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shifted = Mock(side_effect=torch.softmax)
    monkeypatch.setattr(torch, "softmax", shifted)
    monkeypatch.setattr(blocks, "powers_pay", lambda dtype: True)
    model = made(image_size=size, patch_size=4)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[: model.config.attention_dim] *= scale
    images = torch.randn(2, 3, size, size)
    found = optimized(model)(images).double()
    right = model.double()(images.double()).detach()
    assert distance(found, right) < 1e-5 * max(1, scale / 10)  # what the scores' own rounding does to weights
    if way != "elsewhere":
        assert shifted.called == (scale > 1)


def test_any_memory_layout() -> None:
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
    monkeypatch.setattr(blocks, "POWERS", 128)
    eager_logits, logits, _, maps = rounding(own, 32, 4, depth=6, head_dim=16, patch_size=patch)
    assert logits < 1.2 * eager_logits
    assert maps < 0.05


FAMILIES: dict[str, dict[str, Any]] = {
    "attention pooling": {"pool": "map", "class_token": False, "gelu": "tanh"},
    "rotary": {"positions": "rope", "registers": 4, "layer_scale": 0.3},
    "rotary, gated": {"positions": "rope", "registers": 4, "layer_scale": 0.3, "mlp": "swiglu"},
    "gated": {"mlp": "swiglu", "layer_scale": 0.3},
    "distilled": {"pool": "cls_and_distillation", "registers": 1, "cls_position": False},
    "no final norm": {"final_norm": False},
    "hybrid": {"stem": (1,), "patch_size": 4},
}


def test_bfloat16_of_each_family_is_as_near_as_eager(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one family a few samples differ by chance up to twofold; of all of them together they tell."""
    monkeypatch.setattr(blocks, "POWERS", 128)
    logarithms = []
    for family, options in FAMILIES.items():
        eager_logits, logits, eager_maps, maps = rounding(torch.float32, 8, 4, head_dim=16, **options)
        assert logits < 2 * eager_logits, family
        assert maps < max(0.05, 1.5 * eager_maps), family
        logarithms.append(math.log(logits / eager_logits))
    assert math.exp(sum(logarithms) / len(logarithms)) < 1.2


def test_float64_and_half_take_the_plain_path() -> None:
    model = made().double()
    images = torch.randn(9, 3, 32, 32, dtype=torch.float64)
    assert distance(optimized(model)(images), model(images).detach()) < 1e-12
    half = optimized(made().half())(images.half()).double()
    assert distance(half, model(images).detach()) < 0.02


def test_wide_computing_for_a_narrow_model() -> None:
    model, images = made().bfloat16(), torch.randn(2, 3, 32, 32).bfloat16()
    found = optimized(model, torch.float32)(images)
    assert distance(found, model.float()(images.float()).detach().bfloat16()) < 0.01


def test_what_is_no_dtype_to_compute_in_is_refused() -> None:
    model = made()
    with pytest.raises(OptimizedError, match=r"cannot compute in torch\.int16.*torch\.bfloat16"):
        optimize(model, dtype=torch.int16)
    assert type(model) is ViT


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Says what timings give, to a process that has decided nothing."""

    def say(*times: float) -> None:
        monkeypatch.setattr(verdicts, "_known", {})
        monkeypatch.setattr(verdicts, "_times", lambda clock, *ways: list(times))

    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path))
    monkeypatch.setenv("VITLITE_KERNELS", "measure")
    return say


def test_a_slow_timing_refuses_nothing(timed: Callable[..., None]) -> None:
    """On a machine so busy that bfloat16 looks seven times as slow, and every kernel of ours, too."""
    timed(7.0, 1.0)
    images = torch.randn(2, 3, 32, 32)
    right = made()(images).detach()
    assert distance(optimize(made(), dtype=torch.bfloat16)(images), right) < 0.1
    assert not any(verdict.pays for verdict in verdicts.known().values())


@pytest.mark.parametrize(
    ("has", "words"),
    [({"avx2", "avx512f"}, "no instructions for torch.bfloat16: float32"), ({"avx512_bf16"}, ""), (set(), "")],
    ids=["without", "with", "unknown"],
)
def test_the_cpu_says_whether_it_is_quick_with_a_dtype(
    has: set[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "instructions", lambda: frozenset(has))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        faster = optimize(made(), dtype=torch.bfloat16)
    assert faster.compute_dtype is torch.bfloat16
    assert [words in str(warning.message) for warning in said] == [True] * bool(words)


def test_elsewhere_than_on_a_cpu_torch_chooses() -> None:
    kernels = blocks.fastest_kernels(torch.device("cuda"), torch.float32, 197)
    assert kernels == (kernels.kernels.PlainLinear, attention.attend_fused, 1.0)


@pytest.mark.parametrize("fault", [AttributeError, RuntimeError, "wrong"])
def test_operators_that_are_missing_or_wrong_are_not_used(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.PackedLinear.added

    def added(self: Any, x: Tensor, other: Tensor) -> Tensor:
        if fault == "wrong":
            return right(self, x, other) * 1.001
        raise fault("no such operator")

    assert kernels._packing_is_right(torch.float32) == torch.backends.mkldnn.is_available()
    monkeypatch.setattr(kernels.PackedLinear, "added", added)
    assert not kernels._packing_is_right(torch.float32)
    assert kernels._contest_of_packing(torch.float32) is None
    assert not kernels.packing_pays(torch.float16)


def test_powers_need_the_range_of_float32(timed: Callable[..., None]) -> None:
    timed(1.0, 2.0)
    assert kernels.powers_pay(torch.bfloat16)
    assert not kernels.powers_pay(torch.float16)


def test_packing_is_chosen_by_the_clock(timed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_packing_is_right", lambda dtype: True)
    for times, chosen in (((1.0, 2.0), True), ((2.0, 1.0), False), ((0.99, 1.0), False)):  # the last is a tie
        timed(*times)
        assert kernels.packing_pays(torch.float32) == chosen


@with_the_setting
def test_onednn_is_chosen_where_it_is_exact_and_faster(
    timed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pays = kernels.float32_products_pay
    monkeypatch.setattr(kernels, "float32_products_are_exact", kernels.float32_products_are_exact.__wrapped__)
    monkeypatch.setattr(kernels, "_has_amx", lambda: False)
    monkeypatch.setattr(kernels, "_distance", lambda found, right: 1e-6)
    for times, chosen in (((2.0, 1.0), False), ((1.0, 2.0), True)):
        timed(*times)
        assert pays(17, 12) == chosen
    assert set(verdicts.known()) == {"float32 attention of up to 32 tokens, 12 wide"}
    by_onednn, by_default = kernels._contest_of_float32_products(32, 12)
    assert distance(by_onednn(), by_default()) < 0.05  # float32 or, with AMX, bfloat16
    monkeypatch.setattr(kernels, "_distance", lambda found, right: 1e-3)  # as bfloat16 would be
    assert not pays(17, 12)
    monkeypatch.setattr(kernels, "_distance", lambda found, right: 1e-6)
    monkeypatch.setattr(kernels, "_has_amx", lambda: True)
    assert not pays(17, 12)
    monkeypatch.setattr(kernels, "_has_amx", lambda: False)
    monkeypatch.setattr(kernels.float32_products, "matmul", None)  # an older torch
    assert not pays(17, 12)


@with_the_setting
def test_the_precision_setting_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "float32_products_pay", lambda tokens, head_dim: True)
    faster, setting = optimized(made()), kernels.float32_products.matmul
    before, seen = setting.fp32_precision, []
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda *a, **k: (seen.append(setting.fp32_precision), softmax(*a, **k))[1])
    faster(torch.randn(1, 3, 32, 32))
    assert set(seen) == {"bf16"}
    assert setting.fp32_precision == before
    with kernels.float32_products:
        with kernels.float32_products:
            pass
        assert setting.fp32_precision == "bf16"  # until the last is out
    assert setting.fp32_precision == before


@with_the_setting
def test_an_exception_and_another_threads_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = kernels.float32_products.matmul
    before = setting.fp32_precision
    monkeypatch.setattr(module, "float32_products_pay", lambda tokens, head_dim: True)
    faster = optimized(made())
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_attend", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            faster(torch.randn(1, 3, 32, 32))
    assert (setting.fp32_precision, kernels.float32_products.inside) == (before, 0)
    try:
        with kernels.float32_products:
            other = threading.Thread(target=lambda: setattr(setting, "fp32_precision", "ieee"))
            other.start()
            other.join()
        assert setting.fp32_precision == "ieee"  # as that thread wants it
    finally:
        setting.fp32_precision = before


ANOTHER_THREAD = """
import threading, time, torch, vitlite
from vitlite.fast import kernels, optimize as module
kernels._has_amx = lambda: False  # as oneDNN is limited to what a CPU without it has
assert kernels.float32_products_are_exact(197, 64)
module.float32_products_pay = lambda tokens, head_dim: True
config = vitlite.ViTConfig(image_size=64, patch_size=8, dim=128, depth=4, heads=2, mlp_dim=256, num_classes=5)
model, images = vitlite.optimize(vitlite.ViT(config)), torch.randn(2, 3, 64, 64)
a, b = torch.randn(64, 768), torch.randn(768, 512)
right, settings, errors = a.double() @ b.double(), set(), []

def multiply():
    while thread.is_alive():
        settings.add(kernels.float32_products.matmul.fp32_precision)
        errors.append(float(((a @ b).double() - right).abs().max() / right.abs().max()))

def answer():
    for _ in range(15):
        model(images)

thread = threading.Thread(target=answer)
thread.start()
multiply()
thread.join()
assert "bf16" in settings, settings  # the product was computed under it
print(max(errors))
"""


@pytest.mark.usefixtures("uncovered")
@with_the_setting
def test_what_another_thread_multiplies_stays_float32() -> None:
    """Where oneDNN has no bfloat16 of AMX to gain by; elsewhere the setting is not touched."""
    limited = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    done = subprocess.run([sys.executable, "-c", ANOTHER_THREAD], env=limited, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2e-6


def test_many_threads_at_once(way: str) -> None:
    model = made()
    faster = optimized(model)
    batches = [torch.randn(n, 3, *size) for n in (1, 3, 9) for size in ((32, 32), (40, 24))] * 3
    wrong = []

    def use(images: Tensor) -> None:
        for _ in range(4):
            if distance(faster(images), model(images).detach()) >= 1e-5:
                wrong.append(images.shape)

    threads = [threading.Thread(target=use, args=(images,)) for images in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    if kernels.float32_products.matmul is not None:
        assert kernels.float32_products.inside == 0


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


def test_the_same_inputs_are_refused() -> None:
    model = made()
    faster = optimized(model)
    for images in (torch.zeros(3, 32, 32), torch.zeros(1, 3, 33, 32), torch.zeros(0, 3, 32, 32), "cat.png"):
        with pytest.raises(InputError) as plain:
            model(images)
        with pytest.raises(InputError) as fast_one:
            faster(images)
        assert str(plain.value) == str(fast_one.value)
    with pytest.raises(InputError, match="no layers"):
        faster.attention_maps(torch.zeros(1, 3, 32, 32), layers=())


def test_images_that_want_gradients_are_refused() -> None:
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


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # is deprecated, in words and a class that differ by version
@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_an_optimized_model_cannot_do(name: str) -> None:
    said = (
        r"An optimized model cannot .* optimize last, or create the model again\. .*torch\.jit\.trace take it as it was"
    )
    with pytest.raises(OptimizedError, match=said):
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


def test_torch_export_of_a_model_with_it_inside_is_refused() -> None:
    outer = nn.Sequential(nn.Identity(), optimized(made()))
    with pytest.raises(Exception, match=r"An optimized model cannot .*torch\.export.* as it was created"):
        torch.export.export(outer, (torch.randn(2, 3, 32, 32),), strict=False)


def test_a_second_call_that_asks_for_something_else_is_refused() -> None:
    model = optimized(made())
    with pytest.raises(OptimizedError, match=r"optimized already, in torch\.float32, so it cannot be calibrated with"):
        optimize(model, calibrate=[torch.zeros(3, 32, 32)])
    with pytest.raises(OptimizedError, match=r"in torch\.float32, so it cannot in torch\.int8\. .*calibrate=pictures"):
        optimize(model, dtype=torch.int8, calibrate=[torch.zeros(3, 32, 32)])


def test_what_stays() -> None:
    model = made()
    model.labels, model.source = tuple("abcdefg"), None
    config, preprocess = model.config, model.preprocess
    assert optimize(model) is model
    assert optimize(model) is model
    assert optimize(model, dtype=torch.float32) is model
    with pytest.raises(OptimizedError, match=r"already computes in torch\.float32.*Create it again"):
        optimize(model, dtype=torch.bfloat16)
    assert isinstance(model, ViT)
    assert (model.config, model.preprocess, model.labels, model.source) == (config, preprocess, tuple("abcdefg"), None)
    assert (model.device, model.dtype, model.training) == (torch.device("cpu"), torch.float32, False)
    assert model.eval() is model
    model.preprocess = Preprocess(TRANSFORM, model)
    pictures = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    found = model.predict(pictures, top=1)
    assert [best.index for (best,) in found] == model(model.preprocess(pictures)).argmax(1).tolist()


def test_a_model_in_training_becomes_one_in_eval() -> None:
    model = made(dropout=0.5, drop_path=0.5)
    images = torch.randn(2, 3, 32, 32)
    right = model(images).detach()
    assert distance(optimize(model.train())(images), right) < 1e-5


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "kind", "times"),
    [
        ({}, blocks.FastBlock, 3),
        ({"stem": (1, 2)}, blocks.FastBlock, 1),
        ({"patch_norm": True}, blocks.FastPatches, 1),
        ({"pool": "map", "class_token": False}, blocks.FastAttentionPool, 1),
        ({"fc_norm": True}, nn.Linear, 1),  # the head, which comes last
    ],
)
def test_where_it_fails_the_model_is_as_it_was(
    options: dict[str, Any], kind: Any, times: int, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = made(dropout=0.1, **options).train(), torch.randn(2, 3, 32, 32)
    before, right = copy.deepcopy(model.state_dict()), copy.deepcopy(model).eval()(images)
    parts = [*model.named_modules(), *model.named_parameters()]
    name = "to" if kind is nn.Linear else "__init__"
    done, left = getattr(kind, name), iter(range(times - 1))

    def fails(self: nn.Module, *given: Any, **named: Any) -> Any:
        if next(left, None) is None:
            raise MemoryError
        return done(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(kind, name, fails)
        with pytest.raises(MemoryError):
            optimize(model, dtype=dtype)
    assert (type(model), model.training) == (ViT, True)
    after = [*model.named_modules(), *model.named_parameters()]
    assert all(old == new and found is part for (old, part), (new, found) in zip(parts, after, strict=True))
    for weight, value in model.state_dict().items():
        assert weight in before
        assert value.dtype is before[weight].dtype
        assert torch.equal(value, before[weight])
    assert torch.equal(model.eval()(images), right)
    optimize(model, dtype=dtype)(images)


def test_the_old_weights_are_gone() -> None:
    model = made(depth=4)
    large = {id(parameter.untyped_storage()) for parameter in model.parameters() if parameter.ndim > 1}
    weights = [parameter for name, parameter in model.named_parameters() if name.endswith(("qkv.weight", "fc1.weight"))]
    references = [torch.utils.weak.WeakTensorKeyDictionary() for _ in weights]
    for reference, weight in zip(references, weights, strict=True):
        reference[weight] = True
    del weights, weight
    optimize(model)
    gc.collect()
    assert not any(len(reference) for reference in references)
    assert len(large) > 0


def test_tables_for_many_sizes_are_not_hoarded() -> None:
    model = made()
    faster = optimized(model)
    for side in range(1, 20):
        images = torch.randn(1, 3, 8 * side, 8)
        assert distance(faster(images), model(images).detach()) < 1e-5
    assert len(faster._by_grid) <= 16


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def _hooked(model: ViT) -> None:
    model.blocks[1].attn.register_forward_hook(lambda *a: None)


def _patched(model: ViT) -> None:
    model.blocks[1].attn.forward = lambda x: x


def _patched_inside(model: ViT) -> None:
    model.blocks[1].residuals = lambda x: x


def _patched_outside(model: ViT) -> None:
    model.embed = lambda images: ViT.embed(model, images) * 2


def _strided(model: ViT) -> None:
    model.patch_embed.proj.stride = (4, 4)


def _replaced(model: ViT) -> None:
    model.blocks[1].attn.qkv = Wrapped(model.blocks[1].attn.qkv)


def _run_twice(model: ViT) -> None:
    model.blocks.append(model.blocks[0])


def _in_another_order(model: ViT) -> None:
    model.blocks._modules["0"] = model.blocks._modules.pop("0")


def _quantised(model: ViT) -> None:
    quantise(model.blocks[1].attn.qkv)


def _narrowed(model: ViT) -> None:
    model.blocks[1].bfloat16()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_hooked, r"blocks\.1\.attn has hooks"),
        (_patched, r"blocks\.1\.attn has its own forward"),
        (_patched_inside, r"blocks\.1 has its own residuals"),
        (_patched_outside, r"The model has its own embed"),
        (_strided, r"not those of its config: patch_embed\.proj"),
        (_replaced, r"not those of its config: blocks\.1\.attn\.qkv"),
        (_run_twice, r"not those of its config: blocks, blocks\.3,"),
        (_in_another_order, r"not those of its config: blocks\."),
        (_quantised, r"blocks\.1\.attn\.qkv\.weight is a Quantised, and no plain tensor"),
        (_narrowed, r"cpu in torch\.bfloat16, cpu in torch\.float32"),
    ],
)
def test_a_changed_model_is_refused(change: Callable[[ViT], None], text: str) -> None:
    model = made()
    change(model)
    with pytest.raises(OptimizedError, match=text):
        optimize(model)
    assert type(model) is ViT


def test_layers_that_share_a_part_answer_as_before() -> None:
    model, images = made(), torch.randn(2, 3, 32, 32)
    model.blocks[1].mlp = model.blocks[0].mlp
    right = model(images).detach()
    assert distance(optimize(model)(images), right) < 1e-5


def test_what_was_put_into_a_class_or_hooked_to_all_modules_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "forward", lambda self, x: x)
    with pytest.raises(OptimizedError, match=r"blocks\.0\.attn has its own forward"):
        optimize(made())
    monkeypatch.undo()
    model, images = optimized(made()), torch.randn(1, 3, 32, 32)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(OptimizedError, match="The model has hooks"):
            optimize(made())
        for use in (model, model.embed, model.features, model.attention_maps):
            with pytest.raises(OptimizedError, match="There is a hook of all modules"):
                use(images)
    finally:
        hook.remove()
    assert model(images).isfinite().all()


def test_a_part_of_a_larger_module_takes_no_other_weights() -> None:
    whole = nn.Sequential(nn.Identity(), optimized(made()))
    with pytest.raises(OptimizedError, match="cannot take other weights"):
        whole.load_state_dict({f"1.{name}": value for name, value in made(seed=1).state_dict().items()}, strict=False)


def test_a_shallow_copy_is_as_it_was() -> None:
    model, images = made(), torch.randn(1, 3, 32, 32)
    other, answer = copy.copy(model), model(images).detach()
    optimize(model)
    assert torch.equal(other(images), answer)


def test_a_method_set_back_is_that_of_the_class() -> None:
    model, images = made(), torch.randn(1, 3, 32, 32)
    model.forward = model.forward  # as accelerate leaves it
    answer = model(images)
    torch.testing.assert_close(optimize(model)(images), answer)


def test_another_default_device_changes_nothing() -> None:
    model, images = made(), torch.randn(2, 3, 32, 48)  # a size for which no memory is kept yet
    usual = copy.deepcopy(model)
    with torch.device("meta"):  # stands for cuda
        found = optimize(model)(images)
    torch.testing.assert_close(found, optimize(usual)(images))


def test_only_a_vit_with_weights_is_taken() -> None:
    with pytest.raises(OptimizedError, match=r"takes a vitlite\.ViT, got Linear"):
        optimize(nn.Linear(2, 2))
    with torch.device("meta"):
        empty = ViT(ViTConfig(**SIZES))
    with pytest.raises(OptimizedError, match="meta"):
        optimize(empty)


def test_hooks_of_the_last_block_see_all_tokens() -> None:
    """Where it would compute the class token alone."""
    model, images = made(depth=2), torch.randn(2, 3, 32, 32)
    seen: list[Tensor] = []
    wanted = model(images)
    handle = model.blocks[-1].register_forward_hook(lambda *given: seen.append(given[-1]))
    model(images)
    handle.remove()
    faster = optimized(model)
    torch.testing.assert_close(faster(images), wanted)
    faster.blocks[-1].register_forward_hook(lambda *given: seen.append(given[-1]))
    torch.testing.assert_close(faster(images), wanted)
    torch.testing.assert_close(seen[1], seen[0])


OTHER_PARTS = [{}, {"pool": "mean"}, {"pre_norm": True}, {"pool": "map", "class_token": False}, {"mlp": "swiglu"}]


@pytest.mark.parametrize("options", OTHER_PARTS, ids=str)
def test_a_hook_sees_what_it_sees_of_the_model_as_created_or_is_refused(options: dict[str, Any]) -> None:
    """Any part, beside the one of the same name: attention gave other numbers, dropout no word."""
    model, images = made(dropout=0.1, **options), torch.randn(2, 3, 32, 32)
    faster = optimized(model)
    for name, part in faster.named_modules():
        if name.rpartition(".")[2] in ("patch_embed", "attn", "mlp"):
            for register in part.register_forward_hook, part.register_forward_pre_hook:
                with pytest.raises(OptimizedError, match="takes no hooks"):
                    register(lambda *_: None)
            continue
        seen: list[Tensor] = []
        for which in model, faster:
            hook = which.get_submodule(name).register_forward_hook(lambda *given, seen=seen: seen.append(given[-1]))
            which(images)
            hook.remove()
        assert len(seen) in (0, 2), name
        torch.testing.assert_close(seen[:1], seen[1:], msg=name)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["blocks.0", "norm", "head"])
def test_a_hook_sees_the_whole_batch_in_its_order(name: str, threads: int) -> None:
    """It saw slices, and those of two streams in the order in which they got there."""
    model, images, before = made(), torch.randn(40, 3, 32, 32), torch.get_num_threads()
    faster = optimized(model)
    seen: list[Tensor] = []
    torch.set_num_threads(threads)
    try:
        for which in model, faster:
            which.get_submodule(name).register_forward_hook(lambda *given: seen.append(given[-1].detach()))
            which(images)
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], seen[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OTHER_PARTS, ids=str)
def test_what_others_do_to_the_old_weights_changes_no_answer(options: dict[str, Any], dtype: torch.dtype) -> None:
    """An optimizer or an average that holds them, or a copy that is trained on: it became a mixture of old and new."""
    model, images = made(registers=2, cls_position=False, **options).to(dtype), torch.randn(2, 3, 32, 32, dtype=dtype)
    held = list(model.parameters())
    faster = optimize(model)
    wanted, larger = faster(images), torch.randn(1, 3, 48, 32, dtype=dtype)
    with torch.no_grad():
        wanted_of_larger = optimized(made(registers=2, cls_position=False, **options).to(dtype))(larger)
        for weight in held:
            weight.mul_(2).add_(1)
    torch.testing.assert_close(faster(images), wanted, rtol=0, atol=0)
    torch.testing.assert_close(faster(larger), wanted_of_larger)


CHANGED_SETTINGS = {
    "eps": lambda model: setattr(model.blocks[0].norm1, "eps", 0.5),
    "heads": lambda model: setattr(model.blocks[0].attn, "heads", 1),
    "gelu": lambda model: setattr(model.blocks[0].mlp.act, "approximate", "tanh"),
}


@pytest.mark.parametrize("name", CHANGED_SETTINGS)
def test_settings_of_layers_that_were_changed_are_kept(name: str) -> None:
    """They are no more in the config, and `save` refuses them; the answers are still those of before."""
    model, images = made(), torch.randn(2, 3, 32, 32) * 10
    before = model(images)
    CHANGED_SETTINGS[name](model)
    wanted = model(images)
    assert not torch.allclose(wanted, before, rtol=1e-4, atol=1e-5), "or this test says nothing"
    torch.testing.assert_close(optimized(model)(images), wanted, rtol=1e-5, atol=1e-6)


def test_autocast_around_optimize_rounds_nothing() -> None:
    model, images = made(pool="map", class_token=False), torch.randn(2, 3, 32, 32)
    wanted = optimized(model)(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        faster = optimized(model)
    torch.testing.assert_close(faster(images), wanted, rtol=0, atol=0)


def test_dropout_that_goes_on_in_eval_mode_is_refused() -> None:
    model = made(dropout=0.1)
    model.blocks[0].mlp.drop.train()
    with pytest.raises(OptimizedError, match=r"blocks\.0\.mlp\.drop is in training mode, and the model is not"):
        optimize(model)
    optimize(model.train())


def test_hooks_of_every_block_fire() -> None:
    faster = optimized(made(depth=3))
    seen: list[int] = []
    for i, block in enumerate(faster.blocks):
        block.register_forward_hook(lambda *_, i=i: seen.append(i))
    faster(torch.randn(1, 3, 32, 32))
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("name", ["cls_token", "reg_token", "pos_embed"])
def test_tokens_that_were_packed_are_out_of_reach(name: str) -> None:
    """A change of them would show at some sizes, and at others not."""
    faster = optimized(made(registers=2, cls_position=False))
    with pytest.raises(OptimizedError, match="An optimized model cannot give its"):
        getattr(faster, name)
    with pytest.raises(OptimizedError, match="An optimized model cannot give its"):
        setattr(faster, name, torch.nn.Parameter(torch.zeros(1, 1, 48)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_that_were_packed_are_out_of_reach(dtype: torch.dtype, way: str) -> None:
    """They are flat, scaled or in an order of their own; a change of them would not be known."""
    faster = optimized(made().to(dtype))
    with pytest.raises(OptimizedError, match="cannot give the weights of a layer"):
        patch_filters(faster)
    for layer in faster.patch_embed.proj, faster.blocks[0].attn.qkv, faster.blocks[0].fc2:
        for name in "weight", "bias":
            with pytest.raises(OptimizedError, match="cannot give the weights of a layer"):
                getattr(layer, name)


def test_threads_with_more_grids_than_are_kept() -> None:
    faster = optimized(made(depth=1))
    faults: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for turn in range(60):
                faster(torch.zeros(1, 3, 8 * (1 + (start + turn) % 30), 8))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(7 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


@pytest.mark.usefixtures("uncovered")
def test_the_first_call_does_not_import_a_compiler() -> None:
    code = "import sys, einops, torch; einops.rearrange(torch.zeros(1), 'a -> a'); " \
           "before = set(sys.modules); import vitlite; config = vitlite.ViTConfig(" \
           f"**{SIZES!r}); vitlite.optimize(vitlite.ViT(config)); " \
           "print('torch._dynamo' in set(sys.modules) - before)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
