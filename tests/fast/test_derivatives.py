"""Forward-mode AD and the transforms of torch.func: equal to torch's public operators, or an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import IMAGES, tiny_model
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitlite import kernels
from vitlite.errors import OptimizedError
from vitlite.fast.optimize import optimize

pytestmark = [  # of torch itself
    pytest.mark.filterwarnings("ignore:.*torch.jit"),  # is deprecated, in words and a class that differ by version
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]
TANGENT = torch.randn(IMAGES.shape, generator=torch.Generator().manual_seed(1))
WEIGHTS = ["patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.1.mlp.fc2.bias", "pos_embed", "head.bias"]


@pytest.fixture(autouse=True)
def _onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN wherever it may compute."""
    monkeypatch.setattr(kernels, "onednn_linear_is_better", lambda: True)


def tangent_of(model: Any, primals: dict[str, Tensor], images: Tensor = IMAGES) -> Tensor | None:
    """Return the tangent of the answer to dual weights or images."""
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        duals = {}
        for name, value in primals.items():
            tangent = torch.linspace(-1, 1, value.numel()).view(value.shape).to(value.dtype)
            duals[name] = forward_ad.make_dual(value.detach(), tangent)
        images = duals.pop("images", images)
        answer = functional_call(model, duals, (images,)) if duals else model(images)
        return forward_ad.unpack_dual(answer).tangent


@pytest.mark.parametrize("name", ["images", *WEIGHTS])
@pytest.mark.parametrize("size", [32, 40])
def test_tangents_without_gradients_are_those_with(name: str, size: int) -> None:
    model = tiny_model()
    images = torch.nn.functional.interpolate(IMAGES, (size, size))
    primal = images if name == "images" else model.get_parameter(name)
    with_gradients = tangent_of(model, {name: primal}, images)
    with torch.no_grad():
        model(images)  # what is cached for an image size has no tangent
        without = tangent_of(model, {name: primal}, images)
    assert with_gradients is not None
    assert without is not None
    torch.testing.assert_close(without, with_gradients, rtol=1e-4, atol=1e-5)
    doubled = tangent_of(model.double(), {name: primal.double()}, images.double())
    torch.testing.assert_close(without.double(), doubled, rtol=1e-3, atol=1e-4)


def test_without_tangents_in_torch_there_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="forward AD"), torch.no_grad():
        jvp(tiny_model(), (IMAGES,), (TANGENT,))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "dual numbers": lambda model: tangent_of(model, {"images": IMAGES}),
    "vmap": lambda model: vmap(lambda image: model(image[None])[0])(IMAGES),
    "grad": lambda model: grad(lambda images: model(images).square().sum())(IMAGES),
    "jvp": lambda model: jvp(model, (IMAGES,), (TANGENT,))[1],
    "gradients of each": lambda model: vmap(grad(lambda image: model(image[None]).square().sum()))(IMAGES),
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transforms_of_an_eager_model(kind: str, gradients: bool) -> None:
    transform, model, doubled = TRANSFORMS[kind], tiny_model(), tiny_model().double()
    with torch.set_grad_enabled(gradients), sdpa_kernel(SDPBackend.MATH):
        found = transform(model)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = transform(lambda images: doubled(images.double()).float())
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", WEIGHTS)
def test_many_weights_at_once(name: str) -> None:
    """The images are not mapped over."""
    model = tiny_model()
    weight = model.get_parameter(name).detach()
    three = torch.stack([weight, 2 * weight, -weight])
    with torch.no_grad():
        found = vmap(lambda value: functional_call(model, {name: value}, (IMAGES,)))(three)
        wanted = torch.stack([functional_call(model, {name: value}, (IMAGES,)) for value in three])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_an_optimized_model_has_no_derivatives(kind: str) -> None:
    model = optimize(tiny_model())
    with torch.no_grad(), pytest.raises(OptimizedError, match="has no gradients"):
        TRANSFORMS[kind](model)
