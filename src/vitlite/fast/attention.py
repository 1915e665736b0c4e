"""Attention without gradients: by torch's fused kernel, in buffers that stay in cache, and for the class token alone.

Shapes: b images, n tokens, d numbers of a head, c of a token; q, k and v stand behind one another in `qkv`. Scores come
in a unit, 1 or ln 2: softmax is powers of e of scores in units of 1, and powers of two of scores in units of ln 2.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

SCORES = 4 << 20  # bytes of attention scores at a time, so that softmax finds them in cache
TURNED = 256  # tokens from which a float32 product with the keys is quicker, by more than it takes to turn them over
IN_RANGE = 1e-24, 1e24  # sums of powers between these leave float32 room on both sides


def attend_fused(qkv: Tensor, unit: float) -> Tensor:
    """softmax(q k^T) v by torch's own choice of kernel: (3, b, heads, n, d) -> (b, n, heads, d)."""
    q, k, v = qkv
    return F.scaled_dot_product_attention(q, k, v, scale=unit).transpose(1, 2)


def attend_in_cache(qkv: Tensor, unit: float) -> Tensor:
    """The same through buffers small enough to stay in cache, as two batched products; good until the next call."""
    space = _workspace(qkv.shape[1:], qkv.dtype)
    for image, groups in zip(qkv.unbind(1), space.groups, strict=True):
        space.qkv.copy_(image)
        if space.turned_keys is not None:
            space.turned_keys.copy_(space.qkv[1].mT)
        for group in groups:
            _attend(group, unit)
    return space.out


class HeadGroup(NamedTuple):
    """Views for some heads of one image, from which and into which their attention is computed."""

    q: Tensor  # (heads, n, d), already scaled
    k: Tensor  # (heads, d, n)
    v: Tensor  # (heads, n, d)
    scores: Tensor  # (heads, n, n)
    weights: Tensor  # (heads, n, n)
    sums: Tensor  # (heads, n, 1)
    out: Tensor  # (heads, n, d), of the answer


def _attend(group: HeadGroup, unit: float) -> None:
    """Writes softmax(q k^T) v of some heads into their part of the answer.

    Where scores come in units of ln 2, their powers of two are taken, without a pass to shift them by their largest.
    Where the sums show that some left the range of float32, softmax does it.
    """
    q, k, v, scores, weights, sums, out = group
    torch.bmm(q, k, out=scores)
    if unit != 1.0:
        torch.sum(torch.exp2(scores, out=weights), -1, keepdim=True, out=sums)
        if _in_range(sums):
            torch.bmm(weights, v, out=out).div_(sums)
            return
        scores *= unit
    torch.softmax(scores, -1, out=weights)
    torch.bmm(weights, v, out=out)


def _in_range(sums: Tensor) -> bool:
    """Whether all sums are well within float32; one that is no number is not."""
    low, high = torch.aminmax(sums)
    return low.item() > IN_RANGE[0] and high.item() < IN_RANGE[1]


class Workspace(NamedTuple):
    """Memory for attention, and its views, which would take long to make for small models."""

    qkv: Tensor  # of one image, (3, heads, n, d)
    turned_keys: Tensor | None  # its keys, (heads, d, n), where a product is quicker with them
    groups: list[list[HeadGroup]]  # by image
    out: Tensor  # (b, n, heads, d)


_kept = threading.local()


def _workspace(shape: torch.Size, dtype: torch.dtype) -> Workspace:
    """Each thread keeps its last for the next layer and the next call: fresh pages would cost as much as a product."""
    _, heads, n, _ = shape
    together = max(1, min(heads, SCORES // (n * n * dtype.itemsize)))  # heads in a group
    key = shape, together, dtype
    if getattr(_kept, "key", None) != key:
        with torch.inference_mode(False), torch.device("cpu"):  # tensors that any later call may write
            _kept.space = _new_workspace(shape, together, dtype)
        _kept.key = key
    return _kept.space


def _new_workspace(shape: torch.Size, together: int, dtype: torch.dtype) -> Workspace:
    b, heads, n, d = shape
    qkv = torch.empty(3, heads, n, d, dtype=dtype)
    turned_keys = None
    if n >= TURNED and dtype is torch.float32:
        turned_keys = torch.empty(heads, d, n, dtype=dtype)
    out = torch.empty(b, n, heads, d, dtype=dtype)
    scores, weights = torch.empty(2, together, n, n, dtype=dtype)  # for one group after the other
    sums = torch.empty(together, n, 1, dtype=dtype)

    q, k, v = qkv
    keys = k.mT if turned_keys is None else turned_keys
    groups = []
    for image in out:
        by_head = image.transpose(0, 1)  # (heads, n, d)
        of_image = []
        for first in range(0, heads, together):
            group = slice(first, min(first + together, heads))
            count = group.stop - first
            memory = scores[:count], weights[:count], sums[:count]
            of_image.append(HeadGroup(q[group], keys[group], v[group], *memory, by_head[group]))
        groups.append(of_image)
    return Workspace(qkv, turned_keys, groups, out)


class ClassTokenAttention:
    """Attention of the first token alone, without computing a key or a value of any other: (b, n, c) -> (b, 1, h d).

    q (W x) = (q W) x, and the weighted mean of W x is W times that of x: so the one query goes through the weights of
    the keys, and one mean through those of the values. A bias of the keys shifts all scores alike, and is left out.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, heads: int, dtype: torch.dtype, unit: float) -> None:
        self.unit = unit
        q, k, v = (part.to(dtype, copy=True) for part in weight.chunk(3))  # (h d, c) each
        self.q = q
        self.k = rearrange(k, "(h d) c -> h d c", h=heads)
        self.v = rearrange(v, "(h d) c -> h c d", h=heads).contiguous()
        biases: Sequence[Tensor | None] = (None, None, None)
        if bias is not None:
            biases = bias.to(dtype).chunk(3)
        self.q_bias, _, self.v_bias = biases

    def __call__(self, x: Tensor) -> Tensor:
        """What the first token reads from all."""
        q = F.linear(x[:, 0], self.q, self.q_bias)
        q = rearrange(q, "b (h d) -> h b d", h=len(self.k))
        q_on_tokens = torch.bmm(q, self.k).transpose(0, 1)  # (b, h, c)
        weights = torch.bmm(q_on_tokens, x.mT).mul_(self.unit).softmax(-1)  # (b, h, n)
        means = torch.bmm(weights, x).transpose(0, 1)  # (h, b, c)
        y = rearrange(torch.bmm(means, self.v), "h b d -> b 1 (h d)")
        return y if self.v_bias is None else y + self.v_bias
