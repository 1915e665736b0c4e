"""Make a model faster for inference with `optimize`. The methods and the outputs stay the same.

On a CPU, weights are packed once in the memory layout of oneDNN, GELU and residuals are fused into matrix products
(`blocks`), attention is two batched products in buffers that stay in cache (`attention`), and large batches are
computed in slices (`slices`). The module `vitlite.kernels` decides where oneDNN is used.
"""

import copy
import math
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from logging import getLogger
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from vitlite.checkpoints.compare import check_unmodified
from vitlite.checkpoints.fingerprint import hash_of_source
from vitlite.errors import OptimizedError
from vitlite.fast.blocks import FastAttentionPool, FastBlock, FastPatches, FloatLayers, Kernels, Layers, fastest_kernels
from vitlite.fast.calibrate import calibrated, fingerprint
from vitlite.fast.int8 import Int8Layers, int8_is_right
from vitlite.fast.slices import compute, join, split
from vitlite.inference.threads import usable_cpus
from vitlite.kernels import (
    LONG,
    PackedLinear,
    float32_products,
    float32_products_are_exact,
    is_fast_in,
    is_transforming,
    kernel_choice,
    onednn_linear_is_better,
)
from vitlite.nn.layers import AttentionPool, Block
from vitlite.nn.vit import Features, ViT, check_images

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
GRIDS = 16  # number of grids whose positions are cached
_log = getLogger("vitlite")


def optimize(model: ViT, *, dtype: torch.dtype | None = None, calibrate: Iterable[Any] | None = None) -> ViT:
    """Make a model faster for inference, with the same methods and the same outputs.

    The model is changed in place, and its weights are replaced by packed copies. Images and outputs keep the dtype of
    the model. Afterwards, the model cannot be trained, moved, copied, exported or saved, so optimize it last.
    torch.compile does not compile an optimized model. Hooks are removed. Later changes to the original weights have no
    effect.

    Args:
        model: A `ViT` whose modules were not modified. A model that is already optimized is returned unchanged.
        dtype: The dtype of the computation, such as `torch.bfloat16`. Default: the dtype of the model. With
            `torch.int8`, which needs a CPU, linear layers use int8 where it is accurate enough, and bfloat16 or float32
            elsewhere.
        calibrate: Only for int8: about 32 typical images, in any form that `model.preprocess` accepts. They determine
            the quantisation of each layer.

    Returns:
        The same model object, which is now optimized.

    Raises:
        OptimizedError: The modules of the model were modified, `dtype` is not supported, or the model is already
            optimized with other options.

    >>> import torch, vitlite
    >>> config = vitlite.ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=5)
    >>> model = vitlite.optimize(vitlite.ViT(config))
    >>> model(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 5])
    """
    if isinstance(model, OptimizedViT):
        if calibrate is not None or dtype not in (None, model.compute_dtype):
            raise OptimizedError(
                f"The model is already optimized for {model.compute_dtype}. To use other options, create the model "
                "again."
            )
        return model
    if type(model) is not ViT:
        raise OptimizedError(
            f"optimize expects a vitlite.ViT, got {type(model).__name__}. Create one with vitlite.create(NAME)."
        )
    check_unmodified(model, "optimize", OptimizedError)
    _check_parameters(model)
    _check_dtype(model, dtype)
    threads, cpus = torch.get_num_threads(), usable_cpus()
    if model.device.type == "cpu" and threads > cpus:
        text = "torch uses %d threads, but the CPU limit of this process is %d. Call vitlite.set_threads() first."
        _log.warning(text, threads, cpus)
    with torch.no_grad(), torch.device(model.device), torch.autocast(model.device.type, enabled=False):
        _rebuild(model, _plan(model, dtype or model.dtype, calibrate))
    return model


def _check_parameters(model: ViT) -> None:
    """Check that the weights can be packed: plain parameters on one device and in one dtype.

    Raises:
        OptimizedError: A weight is not a plain parameter, or the weights have several devices or dtypes, or no values.
    """
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise OptimizedError(
                f"optimize supports only weights that are plain parameters, but {name} is a "
                f"{type(parameter).__name__}. Pass a model that is not quantised or sharded. For int8, also pass "
                "dtype=torch.int8 and calibrate=."
            )
    places = sorted({f"{parameter.dtype} on {parameter.device}" for parameter in model.parameters()})
    if model.device.type == "meta":
        raise OptimizedError(
            "The weights are on the meta device, so they have no values. Create the model on another device, such as "
            "cpu."
        )
    if len(places) > 1:
        raise OptimizedError(
            f"The weights have different devices or dtypes: {', '.join(places)}. Convert all of them with "
            "model.to(device, dtype)."
        )


def _check_dtype(model: ViT, dtype: torch.dtype | None) -> None:
    """Check that a dtype is supported, and warn if this CPU has no fast instructions for it.

    Raises:
        OptimizedError: The dtype is not supported.
    """
    if dtype in (None, model.dtype):
        return
    if dtype not in DTYPES:
        raise OptimizedError(
            f"optimize cannot compute in {dtype}. Pass torch.float32, torch.bfloat16, torch.float16 or torch.int8, or "
            f"omit dtype= to use {model.dtype}, the dtype of the model."
        )
    if model.device.type == "cpu" and is_fast_in(dtype) is False:
        warnings.warn(
            f"This CPU has no fast instructions for {dtype}. Use float32, which is more accurate and probably faster.",
            stacklevel=3,
        )


# ---- the plan


class Plan(NamedTuple):
    """The dtypes, kernels and layers of an optimized model."""

    dtype: torch.dtype  # the requested dtype
    stream: torch.dtype  # of the tokens between two layers
    kernels: Kernels
    layers: list[Layers]  # of each block
    calibration: str = ""  # for int8, a hash of the quantisation

    @property
    def inner(self) -> torch.dtype:
        """The dtype of all computations except those of int8 layers and of the residual stream."""
        return self.layers[0].dtype


def _plan(model: ViT, dtype: torch.dtype, images: Iterable[Any] | None) -> Plan:
    if dtype is torch.int8:
        return _plan_int8(model, images)
    if images is not None:
        raise OptimizedError(
            f"Calibration images are only used for int8, but dtype is {dtype}. Omit calibrate= (--calibrate), or pass "
            "dtype=torch.int8 (--dtype int8)."
        )
    kernels = fastest_kernels(model.device, dtype, model.config.tokens)
    return Plan(dtype, dtype, kernels, [FloatLayers(dtype, kernels.linear)] * model.config.depth)


def _plan_int8(model: ViT, images: Iterable[Any] | None) -> Plan:
    """Plan a model with linear layers in int8 and a residual stream in float32.

    Layers that are too inaccurate in int8 use bfloat16 if the CPU has fast instructions for it, otherwise float32.

    Raises:
        OptimizedError: int8 is not supported on this device, or the calibration images are missing or unsuitable.
    """
    if model.device.type != "cpu":
        raise OptimizedError(
            f"int8 needs a CPU, but the model is on {model.device}. Move the model to the CPU (--device cpu), or use "
            "dtype=torch.bfloat16 (--dtype bfloat16)."
        )
    if images is None:
        raise OptimizedError(
            "int8 needs about 32 typical images for calibration. Pass calibrate=[...] (--calibrate FOLDER)."
        )
    if isinstance(images, (str, bytes, os.PathLike)) or not isinstance(images, Iterable):
        raise OptimizedError(
            f"calibrate must be a list of images, got {images!r}. Pass the paths of image files in a list."
        )
    inner = torch.bfloat16 if is_fast_in(torch.bfloat16) else torch.float32
    if not (kernel_choice().packed and int8_is_right(inner)):
        raise OptimizedError(
            "int8 is not available, because oneDNN does not compute exact int8 products on this CPU, or because "
            "VITLITE_KERNELS=torch disables oneDNN. Use dtype=torch.bfloat16 (--dtype bfloat16) or float32."
        )
    quantizations = calibrated(model, images)
    kernels = fastest_kernels(model.device, inner, model.config.tokens)
    floats = FloatLayers(inner, kernels.linear)
    layers: list[Layers] = [Int8Layers(of_block, floats) for of_block in quantizations]
    return Plan(torch.int8, torch.float32, kernels, layers, fingerprint(quantizations))


def kernels_of(model: ViT) -> str:
    """Describe how linear layers and attention of a model are computed on this machine, which affects rounding errors.

    A run can only be resumed if the description has not changed.

    >>> import vitlite
    >>> kernels_of(vitlite.create("vit_nano_4.cifar10", dtype=torch.float64))
    'linear layers by torch'
    """
    if not isinstance(model, OptimizedViT):
        by_onednn = model.device.type == "cpu" and model.dtype is torch.float32 and onednn_linear_is_better()
        return f"linear layers by {'oneDNN' if by_onednn else 'torch'}"
    kernels = model._plan.kernels
    linear = "packed linear layers by oneDNN" if kernels.linear is PackedLinear else "linear layers by torch"
    softmax = "softmax by torch" if kernels.unit == 1 else "softmax by powers of two"
    products = "oneDNN" if model._uses_onednn_products(model.config.tokens) else "torch"
    int8 = f", int8 calibrated as {model.calibration}" if model.calibration else ""
    return f"{linear}, {softmax}, products of attention by {products}{int8}"


# ---- the optimized model


def _rebuild(model: ViT, plan: Plan) -> None:
    """Turn a model into an `OptimizedViT` in place. If packing the weights fails, the model is not changed."""
    config, linear = model.config, plan.kernels.linear
    blocks = cast("Sequence[Block]", model.blocks)
    parts: dict[str, nn.Module] = {
        "patch_embed": FastPatches(model.patch_embed, config.prefix_tokens, plan.inner, linear),
        "blocks": nn.ModuleList(
            FastBlock(block, layers, plan.kernels, class_token_only=block is blocks[-1] and config.pool == "cls")
            for block, layers in zip(blocks, plan.layers, strict=True)
        ),
    }
    if isinstance(model.attn_pool, AttentionPool):
        parts["attn_pool"] = FastAttentionPool(model.attn_pool, plan.stream, linear)
    for name in ("norm_pre", "norm", "fc_norm", "pre_logits", "head"):
        parts[name] = copy.deepcopy(model.get_submodule(name)).to(plan.stream)
    own = {
        "_modules": model._modules | parts,  # a new dict, so that shallow copies of the model keep the old modules
        "_plan": plan,
        "_device": model.device,
        "_dtype": model.dtype,
        "_tables_of": {},
        "_weights_hash": hash_of_source(model) or f"of no file {secrets.token_hex(16)}",  # unique
    }
    model.__dict__.update(own)
    model.__class__ = OptimizedViT
    model.eval()


def _error(failure: str) -> OptimizedError:
    return OptimizedError(
        f"{failure}, because its weights are packed for this machine. Do this before calling vitlite.optimize, or "
        "create a model that is not optimized (without --fast)."
    )


def _unsupported(failure: str) -> Callable[..., Any]:
    """Return a method of `OptimizedViT` that raises an error, because the model is optimized."""

    def method(self: "OptimizedViT", *args: Any, **kwargs: Any) -> NoReturn:
        raise _error(failure)

    return method


class OptimizedViT(ViT):
    """A `ViT` that was changed by `optimize`: (b, c, h, w) -> (b, k).

    It is only for inference, and its weights cannot be accessed.
    """

    _plan: Plan
    _device: torch.device
    _dtype: torch.dtype
    _tables_of: dict[tuple[int, int], tuple[Tensor, Sequence[tuple[Tensor, ...]]]]  # by grid
    patch_embed: FastPatches  # type: ignore[assignment]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which the model computes, which may differ from the dtype of the outputs."""
        return self._plan.dtype

    @property
    def calibration(self) -> str:
        """A hash of the quantisation if the model uses int8, otherwise ""."""
        return self._plan.calibration

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of images and outputs."""
        return self._dtype

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits: (b, c, h, w) -> (b, k). See `ViT.forward`."""
        return self._run(images, lambda part: self.head(self._embed(part)))

    def embed(self, images: Tensor) -> Tensor:
        """Return one vector per image: (b, c, h, w) -> (b, embed_dim). See `ViT.embed`."""
        return self._run(images, self._embed)

    def features(self, images: Tensor, layers: Iterable[int] | int = (), norm: bool = False) -> Features:
        """Return all tokens after the final norm, and the outputs of selected blocks. See `ViT.features`."""
        wanted = self._layers(layers)
        return self._run(images, lambda part: super(OptimizedViT, self).features(part, wanted, norm))

    def attention_maps(self, images: Tensor, layers: Iterable[int] | int = (-1,)) -> Tensor:
        """Return attention maps: (b, c, h, w) -> (layers, b, heads, n, n). See `ViT.attention_maps`."""
        wanted = self._layers(layers)
        return self._run(images, lambda part: super(OptimizedViT, self).attention_maps(part, wanted), batch_axis=1)

    def _embed(self, images: Tensor) -> Tensor:
        x, rotations = self._tokens(images)
        *blocks, last = cast("Sequence[FastBlock]", self.blocks)
        for block, rotation in zip(blocks, rotations, strict=False):
            x = block(x, *rotation)
        x = self.fc_norm(self._pool(last.pooled_tokens(x, *rotations[-1])))
        return self.pre_logits(x).tanh() if self.config.pre_logits else x

    def _tokens(self, images: Tensor) -> tuple[Tensor, Sequence[tuple[Tensor, ...]]]:
        added, rotations = self._tables(images)
        return self.norm_pre(self.patch_embed(images, added).to(self._plan.stream)), rotations

    def _tables(self, images: Tensor) -> tuple[Tensor, Sequence[tuple[Tensor, ...]]]:
        """Return the tables for the size of these images: the tensor that is added to the patches, and the rotations.

        The tables of up to `GRIDS` sizes are cached. See `_added_to_patches` and `_complex_rotations`.
        """
        grid = self._grid(images)
        tables = self._tables_of.get(grid)
        if tables is None:
            if len(self._tables_of) >= GRIDS:
                self._tables_of = {}
            tables = self._added_to_patches(grid), self._complex_rotations(grid)
            self._tables_of[grid] = tables
        return tables

    def _added_to_patches(self, grid: tuple[int, int]) -> Tensor:
        """Return the prefix tokens, followed by the sum of position and bias for each patch: (1, n, d)."""
        patches: Tensor = self.patch_embed.bias.expand(1, math.prod(grid), -1)
        cls: Tensor | None = self.cls_token
        positions = self._positions(grid, patches)
        if positions is not None:
            patches = patches + positions[:, -patches.shape[1] :]
            if cls is not None and self.config.cls_position:
                cls = cls + positions[:, :1]
        tokens = [token for token in (cls, self.reg_token, patches) if token is not None]
        return torch.cat(tokens, dim=1).to(self._plan.inner)

    def _like(self, tokens: Tensor) -> Tensor:
        return self.patch_embed.bias

    def _complex_rotations(self, grid: tuple[int, int]) -> Sequence[tuple[Tensor, ...]]:
        """Return the rotary positions of each block as complex numbers, (n, 1, 1 or heads, head_dim / 2)."""
        config = self.config
        if config.rope is None:
            return [()] * config.depth
        if self.rope is None:  # the same for all blocks
            weight, prefix = self.patch_embed.bias, config.prefix_tokens
            tables = self.tables.rotation(weight, grid, prefix, config.head_width, config.rope)
            return [(torch.complex(*tables)[:, None, None],)] * config.depth
        return [(torch.complex(*tables).transpose(0, 1)[:, None],) for tables in self.rope(grid)]

    def _run(self, images: Tensor, answer: Callable[[Tensor], Any], batch_axis: int = 0) -> Any:
        """Split a batch into slices, apply a function to each slice, and join the results.

        Args:
            images: The batch (b, c, h, w).
            answer: The function.
            batch_axis: The batch axis of the result.

        Raises:
            OptimizedError: The model is being traced or exported, or gradients are required.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise _error("An optimized model cannot be traced")
        if torch.compiler.is_compiling():
            if not torch.compiler.is_dynamo_compiling():
                raise _error("An optimized model cannot be exported")
            return torch.compiler.disable(OptimizedViT._run_slices)(self, images, answer, batch_axis)  # type: ignore[no-untyped-call]
        if "torch._dynamo" in sys.modules:  # nothing is compiled before this is imported, which takes seconds
            return _uncompiled()(self, images, answer, batch_axis)
        return self._run_slices(images, answer, batch_axis)

    def _run_slices(self, images: Tensor, answer: Callable[[Tensor], Any], batch_axis: int) -> Any:
        check_images(images, self.config)
        if is_transforming() or (images.requires_grad and torch.is_grad_enabled()):
            raise OptimizedError(
                "An optimized model has no gradients. Pass images.detach(), or create the model again without "
                "vitlite.optimize."
            )

        def in_inference(part: Tensor) -> Any:
            with torch.no_grad(), torch.autocast(part.device.type, enabled=False):  # these settings are per thread
                return answer(part)

        slices: Sequence[Tensor] = [images]
        streams = 1
        tokens = self.config.prefix_tokens + math.prod(self._grid(images))
        if images.device.type == "cpu":
            widest = max(3 * self.config.attention_dim, self.config.mlp_dim)
            slices, streams = split(images, tokens * widest * self._plan.inner.itemsize)
        products: AbstractContextManager[None] = nullcontext()
        if self._uses_onednn_products(tokens):
            products = float32_products
        with products:
            answers = compute(slices, streams, in_inference)
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            return join(answers, self._dtype, batch_axis)

    def _uses_onednn_products(self, tokens: int) -> bool:
        """Return True if oneDNN computes the matrix products of attention for a number of tokens."""
        in_float32 = self._device.type == "cpu" and self._plan.inner is torch.float32
        return in_float32 and tokens >= LONG and float32_products_are_exact()

    def train(self, mode: bool = True) -> "OptimizedViT":
        """Raise an error if `mode` is True. Otherwise, do nothing: an optimized model is always in eval mode."""
        if mode:
            raise _error("An optimized model cannot be trained")
        return super().train(False)

    parameters = _unsupported("An optimized model cannot list its parameters")
    named_parameters = _unsupported("An optimized model cannot list its parameters")
    state_dict = _unsupported("An optimized model cannot return its weights")
    load_state_dict = _unsupported("An optimized model cannot load other weights")
    _load_from_state_dict = _unsupported("An optimized model cannot load other weights")  # as part of another module
    reset_head = _unsupported("An optimized model cannot change its head")
    save = _unsupported("An optimized model cannot be saved")
    _apply = _unsupported("An optimized model cannot be moved or converted")
    __deepcopy__ = _unsupported("An optimized model cannot be copied")
    __reduce_ex__ = _unsupported("An optimized model cannot be copied or pickled")
    __prepare_scriptable__ = _unsupported("An optimized model cannot be scripted")


@cache
def _uncompiled() -> Callable[..., Any]:
    """Return `OptimizedViT._run_slices`, excluded from torch.compile, which does not support packed weights."""
    method: Callable[..., Any] = torch.compiler.disable(OptimizedViT._run_slices)  # type: ignore[no-untyped-call]
    return method
