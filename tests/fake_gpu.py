"""A GPU that has no memory and computes nothing, but on which every operator has its say: torch's FakeTensor.

It finds tensors of two devices in one operation, and whatever would wait for a value. What it cannot run is a backward
pass; that is walked on the meta device. A torch for CPUs enters CUDA's own library now and then, and is led around it.
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
    """Python's `x[:, 1:]` by calls."""
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
    """What enters CUDA's own library, by operators that do not."""

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
    """A torch before 2.10 that is made for CUDA asks for its driver even for tensors that have no memory."""
    if torch.version.cuda and not torch.cuda.is_available() and not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        pytest.skip("this torch wants a driver of CUDA")


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Tensors that are made here have no memory, those on "cuda" too."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        WithoutCudasLibrary(),
        torch.no_grad(),
        pytest.MonkeyPatch.context() as m,
    ):
        m.setattr(
            "vitlite.fast.optimize._check_parameters", lambda model: None
        )  # which refuses what is no plain tensor
        m.setattr(torch.utils, "swap_tensors", lambda old, new: None)  # `module.to` of what it is in already
        yield


def on_fake_gpu(config: ViTConfig, dtype: torch.dtype = torch.float32) -> ViT:
    """A model whose weights are there."""
    model = model_on_meta(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    weights = {name: torch.empty(shape, dtype=dtype, device="cuda") for name, shape in shapes.items()}
    model.load_state_dict(weights, assign=True)
    return model
