"""`optimize`: the same calls and the same answers, for inference only, as fast as plain PyTorch can give them.

On a CPU, weights are packed once in oneDNN's own order, with GELU and the residuals fused into the products, and
attention runs as two batched products in buffers that stay in cache. Where `onednn` finds an operator missing, wrong or
slower, torch's public one serves.
"""

import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitlite.errors import OptimizedError
from vitlite.model import Block, Features, QuickGELU, ViT
from vitlite.speed.onednn import (
    Linear,
    PackedLinear,
    PlainLinear,
    float32_products,
    float32_products_pay,
    layer_times,
    packing_pays,
    powers_pay,
)

STREAM_SLICE = 4  # images at a time in each of several single-threaded streams
STREAM_LEAST = 2  # images for each stream, from which streams pay
SLICE = 8  # images at a time where all threads share one stream
TEMPORARY = 32 << 20  # bytes: above this, glibc maps and faults fresh pages for each temporary
SCORES = 4 << 20  # bytes of attention scores at a time, so that softmax finds them in cache
TURNED = 256  # tokens from which a float32 product with the keys is quicker, by more than it takes to turn them over
POWERS = 128  # tokens from which powers and their sum are quicker than softmax


def optimize(model: ViT, *, dtype: torch.dtype | None = None) -> ViT:
    """Takes a model over and makes it fast, for inference only: the same calls, the same answers.

    The packed weights replace the old ones, so memory does not double. Images and answers keep the dtype of the model;
    `dtype` is what it computes in. It cannot be trained, moved, copied or saved afterwards: optimize last.

    Args:
        model: A `ViT`, as created or loaded. A second call changes nothing.
        dtype: What to compute in, such as `torch.bfloat16`. None: what the model is made of.

    Returns:
        The same object.

    Raises:
        OptimizedError: The model has hooks or replaced modules, or `dtype` would be slower on this machine.

    >>> import torch, vitlite
    >>> config = vitlite.ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128, num_classes=5)
    >>> model = vitlite.optimize(vitlite.ViT(config))
    >>> model(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 5])
    """
    if isinstance(model, OptimizedViT):
        if dtype not in (None, model.compute_dtype):
            raise OptimizedError(
                f"The model already computes in {model.compute_dtype}, so it cannot in {dtype}. "
                f"Create it again: vitlite.optimize(vitlite.create(...), dtype={dtype})."
            )
        return model
    _check_plain(model)
    _check_dtype(model, dtype)
    _take_over(model, dtype or model.dtype)
    return model


class OptimizedViT(ViT):
    """What `optimize` turns a `ViT` into: (b, c, h, w) -> (b, k) as before, and nothing that needs the old weights."""

    compute_dtype: torch.dtype
    _device: torch.device
    _dtype: torch.dtype
    _tables: dict[tuple[int, int], Tensor]
    patch_embed: "FastPatches"  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """What images and answers are made of."""
        return self._dtype

    def forward(self, images: Tensor) -> Tensor:
        """As `ViT.forward`: (b, c, h, w) -> (b, k)."""
        return self._run(images, lambda part: self.head(self._embed(part)))

    def embed(self, images: Tensor) -> Tensor:
        """As `ViT.embed`: (b, c, h, w) -> (b, d)."""
        return self._run(images, self._embed)

    def features(self, images: Tensor, layers: Iterable[int] = ()) -> Features:
        """As `ViT.features`."""
        wanted = self._layers(layers)
        return self._run(images, lambda part: super(OptimizedViT, self).features(part, wanted))

    def attention_maps(self, images: Tensor, layers: Iterable[int] = (-1,)) -> Tensor:
        """As `ViT.attention_maps`: (b, c, h, w) -> (layers, b, heads, n, n)."""
        wanted = self._layers(layers)
        return self._run(images, lambda part: super(OptimizedViT, self).attention_maps(part, wanted), batch_axis=1)

    def _embed(self, images: Tensor) -> Tensor:
        x = self._tokens(images)
        *blocks, last = cast("Sequence[FastBlock]", self.blocks)
        for block in blocks:
            x = block(x)
        x = last(x) if last.single is None else last.first(x, last.single)
        return self.pre_logits(self.fc_norm(self._pool(x)))

    def _tokens(self, images: Tensor) -> Tensor:
        grid = self._grid(images)
        if grid not in self._tables:
            if len(self._tables) >= 16:
                self._tables.clear()
            self._tables[grid] = self._table(grid)
        return self.norm_pre(self.patch_embed(images, self._tables[grid]))

    def _table(self, grid: tuple[int, int]) -> Tensor:
        """Everything that is added to the projected patches and the zeros before them: (1, n, d)."""
        patches: Tensor = self.patch_embed.bias.expand(1, math.prod(grid), -1)
        cls: Tensor | None = self.cls_token
        if self.config.positions != "none":
            trained = self.pos_embed if grid == self.config.grid else None
            positions = self._compute_positions(grid) if trained is None else trained
            patches = patches + positions[:, -patches.shape[1] :]
            if cls is not None and self.config.cls_position:
                cls = cls + positions[:, :1]
        tokens = [token for token in (cls, self.reg_token, patches) if token is not None]
        return torch.cat(tokens, dim=1).to(self.compute_dtype)

    def _run(self, images: Tensor, run: Callable[[Tensor], Any], batch_axis: int = 0) -> Any:
        """Checks the images, and hands them to `run` slice by slice."""
        self._check(images)
        if images.requires_grad and torch.is_grad_enabled():
            raise OptimizedError(
                "An optimized model gives no gradients, and these images require them. "
                "Pass images.detach(), or create the model again and do not optimize it."
            )
        parts, streams = self._slices(images)

        def one(part: Tensor) -> Any:
            with torch.no_grad(), torch.autocast(part.device.type, enabled=False):  # each thread has these of its own
                return run(part)

        with float32_products if self._by_onednn(images) else nullcontext():
            done = list(_streams(streams, os.getpid()).map(one, parts) if streams > 1 else map(one, parts))
        with torch.no_grad():
            return _join(done, self._dtype, batch_axis)

    def _slices(self, images: Tensor) -> tuple[Sequence[Tensor], int]:
        """The batch in parts whose temporaries stay in cache, and in how many streams to compute them."""
        if images.device.type != "cpu":
            return [images], 1
        threads, widest = torch.get_num_threads(), max(3 * self.config.attention_dim, self.config.mlp_dim)
        streams = threads if 1 < threads <= len(images) // STREAM_LEAST else 1
        fitting = TEMPORARY // (self._token_count(images) * widest * self.compute_dtype.itemsize)
        size = max(1, min(SLICE if streams == 1 else STREAM_SLICE, fitting))
        rounds = math.ceil(len(images) / (size * streams))  # each stream gets as many parts as the others
        return images.tensor_split(min(rounds * streams, len(images))), streams

    def _by_onednn(self, images: Tensor) -> bool:
        if images.device.type != "cpu" or self.compute_dtype is not torch.float32:
            return False
        return float32_products_pay(self._token_count(images), self.config.attention_dim // self.config.heads)

    def _token_count(self, images: Tensor) -> int:
        return self.config.prefix_tokens + math.prod(self._grid(images))

    def train(self, mode: bool = True) -> "OptimizedViT":
        """Refuses training; `eval()` changes nothing."""
        if mode:
            _refuse("be trained")
        return self

    def parameters(self, recurse: bool = True) -> NoReturn:
        _refuse("list its parameters")

    def named_parameters(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("list its parameters")

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("give its weights")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("take other weights")

    def save(self, folder: str | os.PathLike[str]) -> NoReturn:
        _refuse("be saved")

    def reset_head(self, num_classes: int) -> NoReturn:
        _refuse("change its head")

    def _apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("be moved or converted")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse("be copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("be copied or pickled")


def _refuse(action: str) -> NoReturn:
    raise OptimizedError(
        f"An optimized model cannot {action}: its weights are packed for this machine. "
        "Do that first and optimize last, or create the model again."
    )


def _join(parts: list[Any], dtype: torch.dtype, batch_axis: int) -> Any:
    """The answers for all slices as one: tensors, or `Features` of them."""
    first = parts[0]
    if isinstance(first, Tensor):
        return (first if len(parts) == 1 else torch.cat(parts, batch_axis)).to(dtype)
    if isinstance(first, Features):
        joined = (_join(list(field), dtype, batch_axis) for field in zip(*parts, strict=True))
        return Features(*joined)._replace(grid=first.grid)
    if isinstance(first, tuple):
        return tuple(_join(list(item), dtype, batch_axis) for item in zip(*parts, strict=True))
    return first


@torch.no_grad()
def _take_over(model: ViT, dtype: torch.dtype) -> None:
    """Packs the weights layer by layer, dropping each original, and turns `model` into an `OptimizedViT`."""
    device, own = model.device, model.dtype
    kernels = _kernels(device, dtype, model.config.prefix_tokens + math.prod(model.config.grid))
    model.patch_embed = FastPatches(model, dtype, kernels.linear)  # type: ignore[assignment]
    for i in range(len(model.blocks)):
        single = i == len(model.blocks) - 1 and model.config.pool == "cls"
        model.blocks[i] = FastBlock(model.blocks[i], dtype, kernels, single)  # type: ignore[arg-type]
    for module in (model.norm_pre, model.norm, model.fc_norm, model.pre_logits, model.head):
        module.to(dtype)
    model.__dict__.update(_device=device, _dtype=own, _tables={}, compute_dtype=dtype)
    model.eval()
    model.__class__ = OptimizedViT


class Kernels(NamedTuple):
    """What computes the two parts of a block that take the time."""

    linear: Linear
    attend: Callable[[Tensor, float], Tensor]  # (3, b, heads, n, d) and the unit -> (b, n, heads, d)
    unit: float  # of scores: 1, or ln 2, where attention takes powers of two in place of those of e


def _kernels(device: torch.device, dtype: torch.dtype, tokens: int) -> Kernels:
    """What is fastest: measured on a CPU; elsewhere torch's own, which is not measured here."""
    if device.type != "cpu":
        return Kernels(PlainLinear, attend_fused, 1.0)
    unit = math.log(2) if tokens >= POWERS and powers_pay(dtype) else 1.0
    return Kernels(PackedLinear if packing_pays(dtype) else PlainLinear, attend_in_cache, unit)


class FastPatches(nn.Module):
    """Cuts images into patches and projects each, with everything that is added to them: (b, c, h, w) -> (b, n, d)."""

    def __init__(self, model: ViT, dtype: torch.dtype, linear: Linear) -> None:
        super().__init__()
        embed, config = model.patch_embed, model.config
        kernel, bias = embed.proj.weight, embed.proj.bias
        self.patch_size, self.prefix, self.dtype = config.patch_size, config.prefix_tokens, dtype
        self.norm_in, self.norm = None, embed.norm.to(dtype)
        if embed.norm_in is not None:  # then bias comes before a norm, and not with the positions
            self.norm_in, self.proj = embed.norm_in.to(dtype), linear(kernel.flatten(1), bias, dtype)
            bias = None
        else:
            self.proj = linear(kernel.flatten(1), None, dtype)
        self.bias = kernel.new_zeros(config.dim) if bias is None else bias.detach()

    def forward(self, images: Tensor, table: Tensor) -> Tensor:
        """`table` is what is added, (1, n, d): the prefix tokens, then positions and bias."""
        b, c, p, n = len(images), images.shape[1], self.patch_size, table.shape[1]
        x = images.new_empty((b, n, c * p * p), dtype=self.dtype)
        x[:, : self.prefix] = 0  # projects to nothing: the prefix is in the table
        patches = rearrange(images, "b c (h p) (w q) -> b h w c p q", p=p, q=p)
        x[:, self.prefix :].view(patches.shape).copy_(patches)
        if self.norm_in is None:
            return self.proj.added(x, table.expand(b, -1, -1).contiguous())
        x = self.norm(self.proj(self.norm_in(x)))
        x[:, : self.prefix] = 0
        return x + table


class FastBlock(nn.Module):
    """A `Block` for inference, its scales folded into the weights: (b, n, d) -> (b, n, d)."""

    def __init__(self, block: Block, dtype: torch.dtype, kernels: Kernels, single: bool) -> None:
        super().__init__()
        linear, self.attend, self.unit = kernels
        attn, mlp = block.attn, block.mlp
        self.heads, width = attn.heads, attn.proj.in_features
        weight = attn.qkv.weight
        scale = weight.new_ones(3, width, dtype=torch.promote_types(weight.dtype, torch.float32))
        scale[0] = (width // attn.heads) ** -0.5 / kernels.unit
        quick = 1.702 if isinstance(mlp.act, QuickGELU) else 1.0  # x sigmoid(1.702 x) = swish(1.702 x) / 1.702
        self.act = mlp.act.approximate if isinstance(mlp.act, nn.GELU) else "swish"
        if isinstance(mlp.norm, nn.LayerNorm):
            mlp.norm.eps, unquick = mlp.norm.eps * quick**2, 1.0  # the norm undoes the factor, but for its eps
        else:
            unquick = 1 / quick

        qkv = _scaled(attn.qkv, scale.flatten())
        self.norm1, self.norm2 = _norm(block.norm1, dtype), _norm(block.norm2, dtype)
        self.attn_norm, self.mlp_norm = _norm(attn.norm, dtype), _norm(mlp.norm, dtype)
        self.qkv = linear(*qkv, dtype)
        self.proj = linear(*_scaled(attn.proj, getattr(block.ls1, "gamma", 1.0)), dtype)
        self.fc1 = linear(*_scaled(mlp.fc1, quick), dtype)
        self.fc2 = linear(*_scaled(mlp.fc2, getattr(block.ls2, "gamma", 1.0), unquick), dtype)
        self.single = SingleQuery(*qkv, self.heads, dtype, self.unit) if single else None

    def forward(self, x: Tensor) -> Tensor:
        """Every token."""
        return self.rest(self.attend(self.split(x), self.unit).flatten(2), x)

    def first(self, x: Tensor, attend: "SingleQuery") -> Tensor:
        """The first token only: (b, n, d) -> (b, 1, d)."""
        return self.rest(attend(self.norm1(x)), x[:, :1])

    def map(self, x: Tensor) -> Tensor:
        """The attention map, (b, n, d) -> (b, heads, n, n)."""
        q, k, _ = self.split(x)
        return (q @ k.mT).mul_(self.unit).softmax(-1)

    def split(self, x: Tensor) -> Tensor:
        """Queries, already scaled, keys and values: (3, b, heads, n, head_dim)."""
        return self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)

    def rest(self, attended: Tensor, x: Tensor) -> Tensor:
        """The layer after attention, with both residuals."""
        x = self.proj.added(self.attn_norm(attended), x)
        return self.fc2.added(self.mlp_norm(self.fc1.activated(self.norm2(x), self.act)), x)


class SingleQuery:
    """Attention of the first token alone, without computing a key or a value of any other.

    q (W x) = (q W) x, and the weighted mean of W x is W times that of x: so the one query goes through the weights of
    the keys, and one mean through those of the values. A bias of the keys shifts all scores alike, and is left out.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, heads: int, dtype: torch.dtype, unit: float) -> None:
        self.unit = unit
        self.q, k, v = (part.to(dtype, copy=True) for part in weight.chunk(3))
        self.k = rearrange(k, "(h d) c -> h d c", h=heads)
        self.v = rearrange(v, "(h d) c -> h c d", h=heads).contiguous()
        biases: Sequence[Tensor | None] = (None, None, None) if bias is None else bias.to(dtype).chunk(3)
        self.q_bias, _, self.v_bias = biases

    def __call__(self, x: Tensor) -> Tensor:
        """(b, n, c) -> (b, 1, h d)."""
        q = rearrange(F.linear(x[:, 0], self.q, self.q_bias), "b (h d) -> h b d", h=len(self.k))
        weights = torch.bmm(torch.bmm(q, self.k).transpose(0, 1), x.mT).mul_(self.unit).softmax(-1)  # (b, h, n)
        y = torch.bmm(torch.bmm(weights, x).transpose(0, 1), self.v)  # (h, b, d)
        y = rearrange(y, "h b d -> b 1 (h d)")
        return y if self.v_bias is None else y + self.v_bias


def _norm(norm: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A LayerNorm as a plain call, which skips what a module's call looks up."""
    if not isinstance(norm, nn.LayerNorm):
        return lambda x: x
    norm.to(dtype)
    shape, weight, bias, eps = norm.normalized_shape, norm.weight, norm.bias, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def _scaled(linear: nn.Linear, *scales: Tensor | float) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a layer whose outputs are multiplied by the first scale, and the weight alone by a second."""
    scale, inner = (*scales, 1.0)[:2]
    weight, bias = linear.weight.detach(), linear.bias
    if isinstance(scale, float) and scale == inner == 1:
        return weight, bias
    wide = torch.promote_types(weight.dtype, torch.float32)  # so that a narrow dtype rounds once
    column = scale[:, None] if isinstance(scale, Tensor) else scale
    return (weight.to(wide) * column).mul_(inner), None if bias is None else bias.detach().to(wide) * scale


def attend_fused(qkv: Tensor, unit: float) -> Tensor:
    """softmax(q k^T) v by torch's own choice of kernel: (3, b, heads, n, d) -> (b, n, heads, d)."""
    q, k, v = qkv
    return F.scaled_dot_product_attention(q, k, v, scale=unit).transpose(1, 2)


def attend_in_cache(qkv: Tensor, unit: float) -> Tensor:
    """The same through buffers small enough to stay in cache, as two batched products; good until the next call.

    Where scores come in units of ln 2, their powers of two are taken, without a pass to shift them by their largest.
    Where the sums show that some left the range of float32, softmax does it.
    """
    space = _workspace(qkv.shape[1:], qkv.dtype)
    for image, groups in zip(qkv.unbind(1), space.groups, strict=True):
        space.heads.copy_(image)
        if space.turned is not None:
            space.turned.copy_(space.heads[1].mT)
        for q, k, v, scores, weights, sums, y in groups:
            torch.bmm(q, k, out=scores)
            if unit != 1.0:
                torch.sum(torch.exp2(scores, out=weights), -1, keepdim=True, out=sums)
                low, high = torch.aminmax(sums)
                if low.item() > 1e-24 and high.item() < 1e24:  # else, or if it is no number: as below
                    torch.bmm(weights, v, out=y).div_(sums)
                    continue
                scores *= unit
            torch.softmax(scores, -1, out=weights)
            torch.bmm(weights, v, out=y)
    return space.out


class Workspace(NamedTuple):
    """Memory for attention, and its views, which would take long to make for small models."""

    heads: Tensor  # of one image, (3, heads, n, d)
    turned: Tensor | None  # its keys, (heads, d, n), where a product is quicker with them
    groups: list[list[tuple[Tensor, ...]]]  # by image and some heads: q, k, v, scores, weights, sums, y
    out: Tensor  # (b, n, heads, d)


_kept = threading.local()


def _workspace(shape: torch.Size, dtype: torch.dtype) -> Workspace:
    """Each thread keeps its last for the next layer and the next call: fresh pages would cost as much as a product."""
    b, count, n, d = shape
    size = max(1, min(count, SCORES // (n * n * dtype.itemsize)))
    key = shape, size, dtype
    if getattr(_kept, "key", None) != key:
        with torch.inference_mode(False):  # tensors that any later call may write
            heads, out = torch.empty(3, count, n, d, dtype=dtype), torch.empty(b, n, count, d, dtype=dtype)
            turned = torch.empty(count, d, n, dtype=dtype) if n >= TURNED and dtype is torch.float32 else None
            scores, sums = torch.empty(2, size, n, n, dtype=dtype), torch.empty(size, n, 1, dtype=dtype)
            q, k, v = heads
            parts = [part.split(size) for part in (q, k.mT if turned is None else turned, v)]
            groups = [
                [
                    (*each, *scores[:, : len(y)], sums[: len(y)], y)
                    for *each, y in zip(*parts, image.transpose(0, 1).split(size), strict=True)
                ]
                for image in out
            ]
        _kept.key, _kept.space = key, Workspace(heads, turned, groups, out)
    return _kept.space


@lru_cache(maxsize=1)
def _streams(count: int, process: int) -> ThreadPoolExecutor:
    """`count` workers that compute in one thread each; a forked process, which inherits none, makes its own."""
    threads, ready = torch.get_num_threads(), threading.Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread's first look takes the default over, which must not happen later
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(count, "vitlite", start)
    for _ in range(count):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(threads)  # this thread's, and the default of threads to come: both as they were
    return pool


def _check_dtype(model: ViT, dtype: torch.dtype | None) -> None:
    """Refuses what is no dtype to compute in, and on a CPU a narrow one that is no faster than float32."""
    if dtype in (None, model.dtype, torch.float32):
        return
    if dtype not in (torch.bfloat16, torch.float16):
        raise OptimizedError(
            f"optimize cannot compute in {dtype!r}. Pass dtype=torch.float32, torch.bfloat16 or torch.float16, "
            f"or none for the model's own, {model.dtype}."
        )
    if model.device.type == "cpu":
        narrow, wide = layer_times(dtype, torch.float32)
        if narrow > wide:
            raise OptimizedError(
                f"{dtype} is slower than float32 on this CPU: {narrow * 1e3:.2f} ms against {wide * 1e3:.2f} ms for a "
                "layer of ViT-Base. Leave dtype out, which computes in the model's own."
            )


def _check_plain(model: ViT) -> None:
    """Refuses models whose modules were changed: what was added would be lost without a word."""
    if type(model) is not ViT:
        raise OptimizedError(f"optimize takes a vitlite.ViT, got {type(model).__name__}.")
    with torch.device("meta"):
        plain = ViT(model.config)
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module.__dict__.get("forward"))
        if any(hooks):
            raise OptimizedError(
                f"{name or 'The model'} has hooks or a forward of its own, which optimize would lose. "
                "Remove them, or use the model as it is."
            )
    changed = _layout(model) ^ _layout(plain)
    if changed:
        names = ", ".join(sorted({name for name, _ in changed})[:5])
        raise OptimizedError(
            f"The model's modules are not those of its config: {names}. "
            "optimize rebuilds what the config describes; undo the change, or use the model as it is."
        )
    kinds = {(parameter.device, parameter.dtype) for parameter in model.parameters()}
    if len(kinds) > 1 or model.device.type == "meta":
        raise OptimizedError(
            f"The weights are on {', '.join(sorted({f'{device} in {dtype}' for device, dtype in kinds}))}. "
            "optimize needs them in one place and one dtype: model.to(...) first."
        )


def _layout(model: ViT) -> set[tuple[Any, ...]]:
    modules = {(name, type(module)) for name, module in model.named_modules()}
    return modules | {(name, parameter.shape) for name, parameter in model.named_parameters()}
