"""The un-optimized model in inference: oneDNN's products where they pay, and nowhere that they could do harm."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitlite import ViT, ViTConfig, optimize
from vitlite.fast import kernels, verdicts
from vitlite.nn.layers import linear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what oneDNN was given, on a machine where it pays."""
    seen: list[tuple[int, ...]] = []
    product = kernels.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(tuple(x.shape))
        return product(x, weight, bias)

    monkeypatch.setattr(kernels, "linear", linear)
    monkeypatch.setattr(kernels, "unpacked_pays", lambda: True)
    return seen


@pytest.fixture
def model() -> ViT:
    torch.manual_seed(0)
    model = ViT(ViTConfig(image_size=32, patch_size=8, dim=48, depth=2, heads=4, mlp_dim=96, num_classes=7)).eval()
    nn.init.normal_(model.head.weight)
    return model


def test_inference_takes_it_and_training_does_not(model: ViT, calls: list[tuple[int, ...]]) -> None:
    images = torch.randn(2, 3, 40, 32)
    right = model(images)
    assert calls == []
    with torch.no_grad():
        torch.testing.assert_close(model(images), right.detach(), rtol=0, atol=1e-5)
    assert len(calls) == 2 * 4
    right.sum().backward()
    assert model.blocks[0].mlp.fc1.weight.grad is not None


def test_where_it_does_not_pay_nothing_changes(
    model: ViT, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "unpacked_pays", lambda: False)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images), model(images))
    assert calls == []


class Quantised(nn.Parameter):
    """A weight of a kind of its own, as libraries for quantisation put in place."""


def vmapped(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.func.vmap(layer)


def traced(layer: nn.Module) -> Callable[[Tensor], Any]:
    return lambda x: torch.jit.trace(layer, x, check_trace=False)


def exported(layer: nn.Module) -> Callable[[Tensor], Any]:
    return lambda x: torch.export.export(layer, (x,))


def of_its_own_kind(layer: nn.Module) -> nn.Module:
    layer.weight = Quantised(layer.weight.detach())
    return layer


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
class Linear(nn.Module):
    """A linear layer as the network calls it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.layer, x)


@pytest.mark.parametrize(
    ("change", "around"),
    [
        (vmapped, nullcontext),
        (traced, nullcontext),
        (exported, nullcontext),
        (of_its_own_kind, nullcontext),
        (lambda layer: layer.double(), nullcontext),
        (lambda layer: layer.to("meta"), nullcontext),
        (lambda layer: layer, autocast),
        (lambda layer: layer, torch.enable_grad),
    ],
    ids=["vmap", "trace", "export", "quantised", "double", "meta", "autocast", "gradients"],
)
@torch.no_grad()
def test_whatever_is_not_plain_inference_is_left_to_torch(
    change: Callable[[nn.Module], Callable[[Tensor], Any]],
    around: Callable[[], AbstractContextManager[Any]],
    calls: list[tuple[int, ...]],
) -> None:
    layer = Linear(8, 4)
    run = change(layer)
    with around():
        run(torch.randn(2, 3, 8, dtype=layer.weight.dtype, device=layer.weight.device))
    assert calls == []
    Linear(8, 4)(torch.randn(2, 3, 8))
    assert calls == [(2, 3, 8)]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., bool]]:
    def pays(*times: float) -> bool:
        monkeypatch.setattr(verdicts, "_known", {})
        monkeypatch.setattr(verdicts, "_times", lambda clock, *ways: list(times))
        return kernels.unpacked_pays()

    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path))
    monkeypatch.setenv("VITLITE_KERNELS", "measure")
    return pays


def test_it_is_chosen_by_the_clock(measured: Callable[..., bool]) -> None:
    assert measured(1.0, 2.0)
    assert not measured(2.0, 1.0)


@pytest.mark.parametrize("fault", [AttributeError, RuntimeError, "wrong"])
def test_an_operator_that_is_missing_or_wrong_is_not_used(
    fault: Any, measured: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if fault == "wrong":
            return nn.functional.linear(x, weight, bias) * 1.001
        raise fault("no such operator")

    monkeypatch.setattr(kernels, "linear", linear)
    assert not measured(1.0, 2.0)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, with others between them in memory."""
    return torch.stack([tensor, tensor + 9], -1)[..., 0]


LAYOUTS = {
    "in a row": lambda tensor: tensor,
    "with gaps": spread,
    "turned": lambda tensor: tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor,
    "expanded": lambda tensor: tensor[..., :1].expand(tensor.shape),
    "from the middle": lambda tensor: torch.cat([tensor, tensor])[len(tensor) :],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "weight", "bias", "other"])
def test_whatever_lies_in_memory_is_read_right(which: str, layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.randn(shape, generator=generator) for name, shape in
             (("x", (2, 10, 32)), ("weight", (48, 32)), ("bias", (48,)), ("other", (2, 10, 48)))}  # fmt: skip
    given[which] = LAYOUTS[layout](given[which])
    x, weight, bias, other = given.values()
    right = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).float()
    with torch.no_grad():
        for linear in (kernels.PlainLinear, kernels.PackedLinear):
            made = linear(weight, bias, torch.float32)
            assert torch.allclose(made(x), right, atol=1e-4)
            assert torch.allclose(made.added(x, other.clone()), right + other, atol=1e-4)
        assert torch.allclose(kernels.linear(x, weight, bias), right, atol=1e-4)


def test_a_model_of_strided_biases_answers_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "unpacked_pays", lambda: True)
    torch.manual_seed(0)
    model = ViT(ViTConfig(image_size=16, patch_size=8, dim=32, depth=1, heads=2, mlp_dim=64, num_classes=3)).eval()
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    images = torch.randn(2, 3, 16, 16)
    right = model(images).detach()  # with gradients, by torch's own products
    model.load_state_dict({name: spread(tensor) for name, tensor in state.items()}, assign=True)
    with torch.inference_mode():
        assert torch.allclose(model(images), right, atol=1e-3)
        assert torch.allclose(optimize(model)(images), right, atol=1e-3)


def test_whether_products_are_exact_is_not_asked_in_an_autocast_around() -> None:
    are_exact = kernels.float32_products_are_exact.__wrapped__
    outside = are_exact(197, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert are_exact(197, 64) == outside
