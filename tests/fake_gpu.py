"""A fake GPU without memory, by torch's FakeTensor, which computes no values.

It finds operations on tensors of two devices, and synchronisations. It cannot run a backward pass; the meta device can.
In a torch without CUDA, a few calls would need CUDA's library and are replaced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from vitlite.config import ViTConfig
from vitlite.nn.vit import ViT, model_on_meta


def _place(x: Tensor, places: Any) -> Tensor:
    """Return `x[:, 1:]` by function calls."""
    axis = 0
    for place in places if isinstance(places, tuple) else (places,):
        if isinstance(place, int):
            x = x.select(axis, place)
            continue
        if place is None:
            x = x.unsqueeze(axis)
        else:
            x = torch.ops.aten.slice.Tensor(x, axis, place.start, place.stop)
        axis += 1
    return x


class WithoutCudasLibrary(TorchFunctionMode):
    """Replace calls that need CUDA's library."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _place(*args)
        if func is Tensor.__setitem__:
            place = _place(args[0], args[1])
            return place.copy_(args[2]) if isinstance(args[2], Tensor) else place.fill_(args[2])
        if func is Tensor.copy_:  # from any device to any
            args[1].expand(args[0].shape)
            return args[0]
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], torch.device):
            dtype = args[2] if len(args) > 2 else (kwargs or {}).get("dtype")
            return torch.empty_like(args[0], device=args[1], dtype=dtype)
        if func is Tensor.contiguous:
            return torch.ops.aten.clone.default(args[0], memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def skip_where_a_driver_is_needed() -> None:
    """Skip the test in a torch for CUDA before 2.10, which needs a driver even for fake tensors."""
    if torch.version.cuda and not torch.cuda.is_available() and not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        pytest.skip("this torch wants a driver of CUDA")


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Make all tensors inside fake ones, on "cuda" too."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        WithoutCudasLibrary(),
        torch.no_grad(),
        pytest.MonkeyPatch.context() as m,
    ):
        m.setattr("vitlite.fast.optimize._check_parameters", lambda model: None)  # it takes plain parameters only
        m.setattr(torch.utils, "swap_tensors", lambda old, new: None)  # called by `module.to`
        yield


def on_fake_gpu(config: ViTConfig, dtype: torch.dtype = torch.float32) -> ViT:
    """Return a model on the fake GPU."""
    model = model_on_meta(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    weights = {name: torch.empty(shape, dtype=dtype, device="cuda") for name, shape in shapes.items()}
    model.load_state_dict(weights, assign=True)
    return model
