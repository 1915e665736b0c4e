"""Three ways to compute attention for inference: torch's fused kernel, small buffers, and the class token alone.

Each computes softmax(unit q k^T) v from queries that are already multiplied by 1 / sqrt(d). `unit` is 1, or ln 2 if the
queries are also divided by ln 2, so that softmax can use powers of two instead of powers of e.

Shapes: b images, n tokens, d width of a head, c width of a token; `qkv` stacks q, k and v.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

SCORES = 4 << 20  # bytes of attention scores computed at a time, so that they stay in cache for softmax
TRANSPOSED = 256  # minimum number of tokens for which transposing the keys pays off in float32
IN_RANGE = 1e-24, 1e24  # bounds for sums of powers, far from the limits of float32


def attend_fused(qkv: Tensor, unit: float) -> Tensor:
    """Compute attention with the kernel that torch chooses: (3, b, heads, n, d) -> (b, n, heads, d)."""
    q, k, v = qkv
    return F.scaled_dot_product_attention(q, k, v, scale=unit).transpose(1, 2)


def attend_in_cache(qkv: Tensor, unit: float) -> Tensor:
    """Compute attention with two batched matrix products in small buffers: (3, b, heads, n, d) -> (b, n, heads, d).

    The result is one of the buffers, which the next call overwrites.
    """
    buffers = _buffers(qkv.shape[1:], qkv.dtype)
    for image, groups in zip(qkv.unbind(1), buffers.groups, strict=True):
        buffers.qkv.copy_(image)
        if buffers.transposed_keys is not None:
            buffers.transposed_keys.copy_(buffers.qkv[1].mT)
        for group in groups:
            _attend(group, unit)
    return buffers.out


class HeadGroup(NamedTuple):
    """Views of the attention buffers for a group of heads of one image."""

    q: Tensor  # (heads, n, d)
    k: Tensor  # (heads, d, n)
    v: Tensor  # (heads, n, d)
    scores: Tensor  # (heads, n, n)
    weights: Tensor  # (heads, n, n)
    sums: Tensor  # (heads, n, 1)
    out: Tensor  # (heads, n, d)


def _attend(group: HeadGroup, unit: float) -> None:
    """Compute the attention of a group of heads, and write it to `group.out`.

    If `unit` is ln 2, powers of two are used, and the maximum is not subtracted from the scores first. If a sum of
    powers is then too large or too small, torch's softmax is used instead.
    """
    q, k, v, scores, weights, sums, out = group
    torch.bmm(q, k, out=scores)
    if unit != 1.0:
        torch.sum(torch.exp2(scores, out=weights), -1, keepdim=True, out=sums)
        low, high = torch.aminmax(sums)
        if low.item() > IN_RANGE[0] and high.item() < IN_RANGE[1]:  # also false for NaN
            torch.bmm(weights, v, out=out).div_(sums)
            return
        scores *= unit
    torch.softmax(scores, -1, out=weights)
    torch.bmm(weights, v, out=out)


class Buffers(NamedTuple):
    """The buffers for attention, and views of them, which are kept because creating views takes time."""

    qkv: Tensor  # of one image, (3, heads, n, d)
    transposed_keys: Tensor | None  # (heads, d, n), if the product with transposed keys is faster
    groups: list[list[HeadGroup]]  # by image
    out: Tensor  # (b, n, heads, d)


_thread = threading.local()


def _buffers(shape: torch.Size, dtype: torch.dtype) -> Buffers:
    """Return the attention buffers of this thread. They are reused, because allocating memory is slow.

    Args:
        shape: The shape of queries, keys and values (b, heads, n, d).
        dtype: The dtype of queries, keys and values.
    """
    key = shape, dtype, SCORES
    if getattr(_thread, "key", None) != key:
        with torch.inference_mode(False), torch.device("cpu"):  # later calls may run outside inference mode
            _thread.buffers = _new_buffers(shape, dtype)
        _thread.key = key
    return _thread.buffers


def _new_buffers(shape: torch.Size, dtype: torch.dtype) -> Buffers:
    b, heads, n, d = shape
    group_size = max(1, min(heads, SCORES // (n * n * dtype.itemsize)))
    qkv = torch.empty(3, heads, n, d, dtype=dtype)
    q, k, v = qkv
    transposed_keys, keys = None, k.mT
    if n >= TRANSPOSED and dtype is torch.float32:
        transposed_keys = keys = torch.empty(heads, d, n, dtype=dtype)
    out = torch.empty(b, n, heads, d, dtype=dtype)
    scores, weights = torch.empty(2, group_size, n, n, dtype=dtype)  # shared by all groups
    sums = torch.empty(group_size, n, 1, dtype=dtype)

    groups: list[list[HeadGroup]] = []
    for image in rearrange(out, "b n heads d -> b heads n d"):
        groups.append([])
        for first in range(0, heads, group_size):
            group = slice(first, min(first + group_size, heads))
            size = group.stop - first
            shared = scores[:size], weights[:size], sums[:size]
            groups[-1].append(HeadGroup(q[group], keys[group], v[group], *shared, image[group]))
    return Buffers(qkv, transposed_keys, groups, out)


class ClassTokenAttention:
    """Attention of the class token (the first token) without keys and values: (b, n, c) -> (b, 1, heads d).

    Keys and values need not be computed for all tokens. The query is multiplied by the weights of the keys, because
    q (W x) = (q W) x. Only the weighted mean of the tokens is multiplied by the weights of the values, because the mean
    of W x is W times the mean of x. The bias of the keys is omitted, because it shifts all scores of a query equally.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, heads: int, dtype: torch.dtype, unit: float) -> None:
        self.unit = unit
        q, k, v = (part.to(dtype, copy=True) for part in weight.chunk(3))  # (heads d, c) each
        self.q = q
        self.k = rearrange(k, "(h d) c -> h d c", h=heads)
        self.v = rearrange(v, "(h d) c -> h c d", h=heads).contiguous()
        biases: Sequence[Tensor | None] = (None, None, None) if bias is None else bias.to(dtype).chunk(3)
        self.q_bias, _, self.v_bias = biases

    def __call__(self, x: Tensor) -> Tensor:
        """Return the attention output of the first token: (b, n, c) -> (b, 1, heads d)."""
        q = F.linear(x[:, 0], self.q, self.q_bias)
        q = rearrange(q, "b (h d) -> h b d", h=len(self.k))
        q_on_tokens = torch.bmm(q, self.k).transpose(0, 1)  # (b, h, c)
        weights = torch.bmm(q_on_tokens, x.mT).mul_(self.unit).softmax(-1)  # (b, h, n)
        means = torch.bmm(weights, x).transpose(0, 1)  # (h, b, c)
        y = rearrange(torch.bmm(means, self.v), "h b d -> b 1 (h d)")
        return y if self.v_bias is None else y + self.v_bias
