"""Kernels in place of torch's own: chosen by a rule, checked before use, and used in plain inference alone."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitlite import ViT, ViTConfig, kernels, optimize
from vitlite.errors import ConfigError
from vitlite.kernels import KernelChoice, PackedLinear, PlainLinear
from vitlite.nn.layers import linear as linear_layer

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
with_the_setting = pytest.mark.skipif(kernels.float32_products.matmul is None, reason="missing in older torch")
CACHED = [
    kernels.kernel_choice,
    kernels.first_core,
    kernels.onednn_linear_is_better,
    kernels.packing_is_right,
    kernels.float32_products_are_exact,
]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has chosen nothing yet."""
    for function in CACHED:
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in CACHED:
        function.cache_clear()


# ---- the rule

FLOATS = (torch.float32, torch.bfloat16)
CHOICES = {
    "AMD, AVX-512": (
        ("AVX512", "AuthenticAMD", False),
        KernelChoice(linear=True, packed=FLOATS, powers=FLOATS, products=True),
    ),
    "AMD, AVX2": (
        ("AVX2", "AuthenticAMD", False),
        KernelChoice(linear=True, packed=FLOATS, powers=FLOATS),
    ),
    "Intel, AMX": (
        ("AVX512", "GenuineIntel", True),
        KernelChoice(packed=FLOATS, powers=FLOATS),
    ),
    "Intel, AVX-512": (
        ("AVX512", "GenuineIntel", False),
        KernelChoice(packed=FLOATS, powers=FLOATS, products=True),
    ),
    "ARM": (("DEFAULT", "", True), KernelChoice()),
    "unknown vendor": (("AVX2", "", True), KernelChoice(packed=FLOATS, powers=FLOATS)),
}


@pytest.mark.parametrize("cpu", CHOICES)
@pytest.mark.usefixtures("fresh")
def test_the_cpu_decides(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (capability, vendor, amx), expected = CHOICES[cpu]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    monkeypatch.setattr(kernels, "first_core", lambda: {"vendor_id": vendor})
    assert kernels.kernel_choice() == expected
    monkeypatch.setattr(kernels, "first_core", dict)  # on Windows
    monkeypatch.setenv("PROCESSOR_IDENTIFIER", f"AMD64 Family 25 Model 33 Stepping 0, {vendor}")
    kernels.kernel_choice.cache_clear()
    assert kernels.kernel_choice() == expected


@pytest.mark.usefixtures("fresh")
def test_the_environment_turns_all_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_KERNELS", "torch")
    assert kernels.kernel_choice() == KernelChoice()
    assert not kernels.onednn_linear_is_better()
    assert not kernels.float32_products_are_exact()
    assert kernels.fastest_linear(torch.float32) is PlainLinear


@pytest.mark.usefixtures("fresh")
def test_an_unknown_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_KERNELS", "fast")
    with pytest.raises(ConfigError, match=r"VITLITE_KERNELS must be 'torch' or unset, got 'fast'"):
        kernels.kernel_choice()


def test_cpuinfo_of_the_first_core(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Fast: 9000\nvendor_id\t: GenuineIntel\n\nmodel name\t: Other\n")
    core = {"processor": "0", "model name": "Fast: 9000", "vendor_id": "GenuineIntel"}
    assert kernels.first_core(file) == core
    assert kernels.first_core(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("core", "is_fast"),
    [({"flags": "avx2"}, False), ({"flags": "avx2 avx512_bf16"}, True), ({"Features": "fp bf16"}, True), ({}, None)],
)
def test_instructions_for_a_dtype(core: dict[str, str], is_fast: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "first_core", lambda: core)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    assert kernels.is_fast_in(torch.bfloat16) == is_fast
    assert kernels.is_fast_in(torch.float32)


# ---- checks before the first use


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("fault", [AttributeError, RuntimeError, "wrong"])
def test_operators_that_are_missing_or_wrong_are_not_used(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "kernel_choice", lambda: KernelChoice(linear=True, packed=FLOATS, products=True))
    packed_added = PackedLinear.added

    def broken(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def function(*args: Any) -> Tensor:
            if fault == "wrong":
                return right(*args) * 1.001
            raise fault("no such operator")

        return function

    assert kernels.onednn_linear_is_better()
    assert kernels.fastest_linear(torch.float32) is PackedLinear
    for function in CACHED[2:]:
        function.cache_clear()
    monkeypatch.setattr(kernels, "onednn_linear", broken(nn.functional.linear))
    monkeypatch.setattr(PackedLinear, "added", broken(packed_added))
    assert not kernels.onednn_linear_is_better()
    assert kernels.fastest_linear(torch.float32) is PlainLinear


@with_the_setting
@pytest.mark.usefixtures("fresh")
def test_products_that_are_not_exact_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "kernel_choice", lambda: KernelChoice(products=True))
    right = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: right(a, b) if a.dtype is torch.float64 else right(a, b) * 1.001)
    assert not kernels.float32_products_are_exact()


@pytest.mark.usefixtures("fresh")
def test_an_autocast_around_the_first_use_changes_nothing() -> None:
    outside = kernels.float32_products_are_exact(), kernels.onednn_linear_is_better()
    for function in CACHED[2:]:
        function.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert (kernels.float32_products_are_exact(), kernels.onednn_linear_is_better()) == outside


@pytest.mark.usefixtures("fresh")
def test_another_default_dtype_at_the_first_use_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "kernel_choice", lambda: KernelChoice(linear=True))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert kernels.onednn_linear_is_better()
    finally:
        torch.set_default_dtype(torch.float32)


# ---- linear layers of an eager model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that oneDNN was given, on a CPU that gains by it."""
    seen: list[tuple[int, ...]] = []
    product = kernels.onednn_linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(tuple(x.shape))
        return product(x, weight, bias)

    monkeypatch.setattr(kernels, "onednn_linear", linear)
    monkeypatch.setattr(kernels, "onednn_linear_is_better", lambda: True)
    return seen


def test_inference_uses_it_and_training_does_not(calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    model = ViT(ViTConfig(image_size=32, patch_size=8, dim=48, depth=2, heads=4, mlp_dim=96, num_classes=7)).eval()
    nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 40, 32)
    expected = model(images)
    assert calls == []
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected.detach(), rtol=0, atol=1e-5)
        assert len(calls) == 2 * 4
        monkeypatch.setattr(kernels, "onednn_linear_is_better", lambda: False)
        model(images)
        assert len(calls) == 2 * 4
    expected.sum().backward()
    assert model.blocks[0].mlp.fc1.weight.grad is not None


class Quantised(nn.Parameter):
    """A weight of another class, as libraries for quantisation make it."""


def run_vmap(layer: nn.Linear, x: Tensor) -> None:
    torch.func.vmap(lambda row: linear_layer(layer, row))(x)


class Applied(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return linear_layer(self.layer, x)


def run_trace(layer: nn.Linear, x: Tensor) -> None:
    torch.jit.trace(Applied(layer), x, check_trace=False)


def run_export(layer: nn.Linear, x: Tensor) -> None:
    torch.export.export(Applied(layer), (x,))


def run_quantised(layer: nn.Linear, x: Tensor) -> None:
    layer.weight = Quantised(layer.weight.detach())
    linear_layer(layer, x)


class Observer(TorchDispatchMode):
    """A mode that does nothing, but would see each operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    ("run", "around"),
    [
        (run_vmap, nullcontext),
        (run_trace, nullcontext),
        (run_export, nullcontext),
        (run_quantised, nullcontext),
        (lambda layer, x: linear_layer(layer.double(), x.double()), nullcontext),
        (lambda layer, x: linear_layer(layer.to("meta"), x.to("meta")), nullcontext),
        (linear_layer, lambda: torch.autocast("cpu", torch.bfloat16)),
        (linear_layer, torch.enable_grad),
        (linear_layer, Observer),
    ],
    ids=["vmap", "trace", "export", "quantised", "double", "meta", "autocast", "gradients", "dispatch mode"],
)
@torch.no_grad()
def test_torch_computes_all_but_plain_inference(
    run: Callable[[nn.Linear, Tensor], Any],
    around: Callable[[], AbstractContextManager[Any]],
    calls: list[tuple[int, ...]],
) -> None:
    with around():
        run(nn.Linear(8, 4), torch.randn(2, 3, 8))
    assert calls == []
    linear_layer(nn.Linear(8, 4), torch.randn(2, 3, 8))
    assert calls == [(2, 3, 8)]


# ---- memory layouts


def with_gaps(tensor: Tensor) -> Tensor:
    """The same numbers, with others between them in memory."""
    return torch.stack([tensor, tensor + 9], -1)[..., 0]


LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "with gaps": with_gaps,
    "transposed": lambda tensor: tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor,
    "expanded": lambda tensor: tensor[..., :1].expand(tensor.shape),
    "from the middle": lambda tensor: torch.cat([tensor, tensor])[len(tensor) :],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "weight", "bias", "other"])
def test_any_memory_layout(which: str, layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 10, 32), "weight": (48, 32), "bias": (48,), "other": (2, 10, 48)}
    given = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    given[which] = LAYOUTS[layout](given[which])
    x, weight, bias, other = given.values()
    expected = nn.functional.linear(x.double(), weight.double(), bias.double()).float()
    with torch.no_grad():
        for linear in (PlainLinear, PackedLinear):
            layer = linear(weight, bias, torch.float32)
            assert torch.allclose(layer(x), expected, atol=1e-4)
            assert torch.allclose(layer.added(x, other.clone()), expected + other, atol=1e-4)
        assert torch.allclose(kernels.onednn_linear(x, weight, bias), expected, atol=1e-4)


def test_a_model_with_strided_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "onednn_linear_is_better", lambda: True)
    torch.manual_seed(0)
    model = ViT(ViTConfig(image_size=16, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=64, num_classes=3)).eval()
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    images = torch.randn(2, 3, 16, 16)
    expected = model(images).detach()  # with gradients, by torch's own products
    model.load_state_dict({name: with_gaps(tensor) for name, tensor in state.items()}, assign=True)
    with torch.inference_mode():
        assert torch.allclose(model(images), expected, atol=1e-3)
        assert torch.allclose(optimize(model)(images), expected, atol=1e-3)


# ---- the setting of float32 products, which belongs to the process


@with_the_setting
def test_the_setting_comes_back_with_the_last_thread() -> None:
    setting = kernels.float32_products.matmul
    before = setting.fp32_precision
    with kernels.float32_products:
        with kernels.float32_products:
            pass
        assert setting.fp32_precision == "bf16"
    assert setting.fp32_precision == before
    with pytest.raises(MemoryError), kernels.float32_products:
        raise MemoryError
    assert (setting.fp32_precision, kernels.float32_products.threads) == (before, 0)


@with_the_setting
def test_a_setting_changed_meanwhile_stays() -> None:
    setting = kernels.float32_products.matmul
    before = setting.fp32_precision
    try:
        with kernels.float32_products:
            other = threading.Thread(target=lambda: setattr(setting, "fp32_precision", "ieee"))
            other.start()
            other.join()
        assert setting.fp32_precision == "ieee"
    finally:
        setting.fp32_precision = before


ANOTHER_THREAD = """
import threading, torch, vitlite
from vitlite import kernels
from vitlite.fast import optimize as module
torch.cpu._is_amx_tile_supported = lambda: False  # oneDNN is limited to what a CPU without it has
if not kernels.float32_products_are_exact():
    print(0.0)
    raise SystemExit
module.LONG = 1
config = vitlite.ViTConfig(image_size=64, patch_size=8, dim=128, depth=4, heads=2, mlp_dim=256, num_classes=5)
model, images = vitlite.optimize(vitlite.ViT(config)), torch.randn(2, 3, 64, 64)
a, b = torch.randn(64, 768), torch.randn(768, 512)
expected, settings, errors = a.double() @ b.double(), set(), []

def multiply():
    while thread.is_alive():
        settings.add(kernels.float32_products.matmul.fp32_precision)
        errors.append(float(((a @ b).double() - expected).abs().max() / expected.abs().max()))

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
def test_products_of_another_thread_stay_float32() -> None:
    limited = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    done = subprocess.run([sys.executable, "-c", ANOTHER_THREAD], env=limited, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2e-6


# ---- without what is private to torch

WITHOUT = """
import sys, types, torch
sys.path.insert(0, sys.argv[1])
missing = sys.argv[2]
if missing == "operators":
    torch.ops.__dict__["mkldnn"] = types.SimpleNamespace()
elif missing == "matmul":
    torch.backends.mkldnn = types.SimpleNamespace(is_available=torch.backends.mkldnn.is_available)
elif missing == "amx":
    vars(torch.cpu).pop("_is_amx_tile_supported", None)
else:
    vars(torch._C._functorch).pop("peek_interpreter_stack", None)
from models import tiny_model
import vitlite
from vitlite import kernels

for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
    model = tiny_model(dim=64, mlp_dim=96)
    images = torch.randn(2, 3, *model.config.size)
    with torch.no_grad():
        expected = model(images)
        if missing == "functorch":
            continue
        found = vitlite.optimize(model, dtype=dtype)(images)
    assert (found - expected).abs().max() / expected.abs().max() < limit, dtype
    plain = kernels.fastest_linear(dtype) is kernels.PlainLinear and not kernels.onednn_linear_is_better()
    assert missing != "operators" or plain
    assert missing != "matmul" or not kernels.float32_products_are_exact()
"""


@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize("missing", ["operators", "matmul", "amx", "functorch"])
def test_another_torch_gives_the_same_answers(missing: str) -> None:
    command = [sys.executable, "-c", WITHOUT, str(Path(__file__).parent), missing]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
