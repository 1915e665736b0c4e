"""Encode the positions of patches with learned tables, fixed sines and cosines, or rotary positions.

Shapes: h and w patches down and across, d width of a token. A table has the shape (1, rows, d), with one row per token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitlite.config import Resample, Rotation

Grid = tuple[int, int]

# The arguments with which F.interpolate reproduces each library. "jax" is big_vision, which calls
# scipy.ndimage.zoom(order=1). "tensorflow" is FlexiViT, which calls tf.image.resize. "naflex" is SigLIP 2 NaFlex.
RESAMPLE: dict[Resample, dict[str, Any]] = {
    "timm": {"mode": "bicubic", "antialias": True, "align_corners": False},
    "transformers": {"mode": "bicubic", "antialias": False, "align_corners": False},
    "torchvision": {"mode": "bicubic", "antialias": False, "align_corners": True},
    "jax": {"mode": "bilinear", "antialias": False, "align_corners": True},
    "tensorflow": {"mode": "bilinear", "antialias": False, "align_corners": False},
    "naflex": {"mode": "bilinear", "antialias": True, "align_corners": False},
}


def resample_positions(table: Tensor, grid: Grid, new: Grid, method: Resample) -> Tensor:
    """Return a position table resampled to another grid of patches: (1, rows, d).

    The rows of the class token and the registers, if there are any, are copied.

    Args:
        table: The position table.
        grid: The number of patches down and across for which the table was made.
        new: The number of patches down and across for which it is needed.
        method: The library whose interpolation is reproduced, a key of `RESAMPLE`.
    """
    prefix = table.shape[1] - grid[0] * grid[1]
    image = rearrange(table[:, prefix:].float(), "1 (h w) d -> 1 h w d", h=grid[0], w=grid[1])
    # torch.compile has no backward pass for antialiased bicubic with dynamic sizes. ONNX resizes differently.
    if torch.onnx.is_in_onnx_export() or (torch.compiler.is_compiling() and torch.is_grad_enabled()):
        resized = _resize_by_matmul(image, new, **RESAMPLE[method])
    else:
        if image.device.type == "mps":  # antialiased bicubic is not implemented
            image = image.cpu()
        # For a grid one patch wide, torch's antialiasing is wrong unless the memory is channels last, as (h, w, d) is.
        image = image.clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)
        resized = F.interpolate(image, size=new, **RESAMPLE[method]).permute(0, 2, 3, 1)
    patches = rearrange(resized, "1 h w d -> 1 (h w) d").to(table.device, table.dtype)
    return torch.cat([table[:, :prefix], patches], dim=1)


def _resize_by_matmul(image: Tensor, new: Grid, mode: str, antialias: bool, align_corners: bool) -> Tensor:
    """Compute `F.interpolate` with matrix products, so that it can be exported: (1, h, w, d) -> (1, h, w, d).

    >>> by_torch = F.interpolate(torch.arange(6.0).view(1, 1, 2, 3), (3, 2), mode="bicubic", antialias=True)
    >>> table = torch.arange(6.0).view(1, 2, 3, 1)
    >>> torch.allclose(_resize_by_matmul(table, (3, 2), "bicubic", True, False)[..., 0], by_torch[:, 0], atol=1e-6)
    True
    """
    for side in (new[1], new[0]):  # columns, then rows
        old = image.shape[2]
        weights = _interpolation_weights(old, side, mode, antialias, align_corners).to(image.device)
        if not antialias:  # repeat the border
            image = image[:, :, torch.arange(-2, old + 2, device=image.device).clamp(0, old - 1)]
        image = (weights @ image).transpose(1, 2)  # (1, h, w, d) -> (1, w, h, d), and back in the second round
    return image


def _interpolation_weights(old: int, new: int, mode: str, antialias: bool, align_corners: bool) -> Tensor:
    """Return a matrix with the weight of each old row in each new row: (new, old).

    Without `antialias`, it has two more columns on each side, for repetitions of the border rows: (new, 2 + old + 2).
    """
    rows = torch.arange(new, dtype=torch.float32)[:, None]
    count = torch.ones_like(rows).sum()  # equals `new`, but stays symbolic in an exported graph
    if align_corners:
        centres = rows * (old - 1) / (count - 1).clamp(min=1)
    else:
        centres = (rows + 0.5) * old / count - 0.5
    if antialias:  # shrinking widens the kernel by old / new
        distances = ((torch.arange(old) - centres) / (old / count).clamp(min=1)).abs()
    else:
        distances = (torch.arange(-2, old + 2) - centres).abs()
    if mode == "bicubic":
        weights = _cubic(distances, -0.5 if antialias else -0.75)  # torch's two constants
    else:
        weights = (1 - distances).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


def _cubic(x: Tensor, a: float) -> Tensor:
    """Return the values of Keys' cubic kernel with the parameter `a` at distances `x`."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * a * x - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def sincos_positions(grid: Grid, dim: int) -> Tensor:
    """Return MAE's fixed position embeddings: sines and cosines of the column, then of the row, (1, h w, d)."""
    steps = torch.arange(dim // 4, dtype=torch.float64, device="cpu")  # mps has no float64
    frequencies = 10000 ** -(steps / (dim // 4))
    rows, columns = (torch.arange(side, device="cpu")[:, None] * frequencies for side in grid)  # (h or w, d/4)
    columns = columns[None].expand(grid[0], -1, -1)
    rows = rows[:, None].expand(-1, grid[1], -1)
    table = torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()], dim=-1)
    return rearrange(table, "h w d -> 1 (h w) d").float()


def rotation_angles(grid: Grid, width: int, rope: Rotation, frequencies: Tensor | None = None) -> Tensor:
    """Return the angles by which the channel pairs of a head are rotated at each patch.

    Args:
        grid: The number of patches down and across.
        width: The number of channels of a head.
        rope: The settings of rotary positions.
        frequencies: Learned frequencies (2, depth, heads, width/2), which multiply the two coordinates of a patch. None
            means the fixed frequencies that `rope` determines.

    Returns:
        The angles: (h w, width/2) with fixed frequencies, (depth, heads, h w, width/2) with learned ones.
    """
    positions = []
    for side in grid:
        places = torch.arange(side, dtype=torch.float64, device="cpu") + rope.offset  # mps has no float64
        if rope.unit == "image":
            places = 2 * math.pi * (2 * (places + 0.5) / side - 1)
        positions.append(places * rope.reference / side if rope.reference else places)
    rows, columns = torch.meshgrid(positions, indexing="ij")
    first, second = (rows, columns) if rope.order == "yx" else (columns, rows)
    if frequencies is not None:
        first, second = (x.flatten()[:, None].to(frequencies.device, frequencies.dtype) for x in (first, second))
        return first * frequencies[0, :, :, None] + second * frequencies[1, :, :, None]
    steps = torch.arange(width // 4, dtype=torch.float64, device="cpu")
    periods = rope.temperature ** (4 * steps / width)
    return torch.cat([first.flatten()[:, None] / periods, second.flatten()[:, None] / periods], dim=-1)


def rotate(x: Tensor, adjacent: bool, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate pairs of channels by the angles of their token: (b, heads, n, d) -> (b, heads, n, d).

    Args:
        x: Queries or keys.
        adjacent: If True, a pair is two adjacent channels; otherwise, it is one channel from each half.
        cosines: The cosines of the angles, ([heads,] n, d / 2).
        sines: The sines of the angles, in the same shape.
    """
    axis, shape = (-1, (-1, 2)) if adjacent else (-2, (2, -1))
    first, second = x.view(*x.shape[:-1], *shape).unbind(axis)
    rotated = torch.stack([first * cosines - second * sines, second * cosines + first * sines], axis)
    return rotated.flatten(-2).to(x.dtype)  # cosines and sines are at least float32


@dataclass(eq=False)
class PositionTables:
    """A cache of the position tables of one model. In inference on a CPU, each table is computed once per grid.

    Copies and pickles of the model start with an empty cache. A full cache is replaced by a new dictionary instead of
    being cleared, because another thread may be reading it.
    """

    LARGEST: ClassVar[int] = 16  # number of grids in a full cache

    resampled: tuple[Tensor, dict[Any, Tensor]] | None = None  # copy of the learned table; its resampled versions
    fixed: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[type["PositionTables"], tuple[()]]:
        return PositionTables, ()

    def learned(self, table: Tensor, grid: Grid, new: Grid, method: Resample) -> Tensor:
        """Return a learned position table resampled to another grid of patches: (1, rows, d)."""
        learns = table.requires_grad and torch.is_grad_enabled()
        if learns or table.device.type != "cpu" or not _is_plain_parameter(table):  # comparing would block a GPU
            return resample_positions(table, grid, new, method)
        # The values are compared, because changes through `.data` do not change the version of a tensor.
        if self.resampled is None or not _is_same(self.resampled[0], table):
            self.resampled = table.detach().clone(), {}
        copy, tables = self.resampled
        if (new, method) not in tables:
            if len(tables) >= self.LARGEST:
                tables = {}
                self.resampled = copy, tables
            with torch.inference_mode(False), torch.no_grad():  # backward fails on inference tensors
                tables[new, method] = resample_positions(table, grid, new, method)
        return tables[new, method]

    def sincos(self, like: Tensor, grid: Grid, cls_row: bool) -> Tensor:
        """Return the table of `sincos_positions` on the device and in the dtype of `like`: (1, rows, d).

        If `cls_row` is True, the table begins with a row of zeros for the class token.
        """

        def compute() -> tuple[Tensor]:
            table = F.pad(sincos_positions(grid, like.shape[0]), (0, 0, int(cls_row), 0))  # zeros for the class token
            return (table.to(like.device, like.dtype),)

        return self._fixed_tables(like, (grid, cls_row), compute)[0]

    def rotation(self, like: Tensor, grid: Grid, prefix: int, width: int, rope: Rotation) -> tuple[Tensor, ...]:
        """Return the cosines and sines of the angles of `rotation_angles`, each (n, width/2), in float32 or float64.

        The angles of the first `prefix` tokens are zero, because only patches are rotated.
        """

        def compute() -> tuple[Tensor, ...]:
            angles = F.pad(rotation_angles(grid, width, rope), (0, 0, prefix, 0))
            dtype = torch.promote_types(like.dtype, torch.float32)
            return angles.cos().to(like.device, dtype), angles.sin().to(like.device, dtype)

        return self._fixed_tables(like, (grid, prefix, width, rope), compute)

    def _fixed_tables(self, like: Tensor, key: Any, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if not _is_plain_parameter(like):
            return compute()
        tables, key = self.fixed, (key, like.dtype, like.device)
        if key not in tables:
            if len(tables) >= self.LARGEST:
                tables = self.fixed = {}
            with torch.inference_mode(False), torch.no_grad():
                tables[key] = compute()
        return tables[key]


def _is_same(copy: Tensor, table: Tensor) -> bool:
    return copy.dtype == table.dtype and torch.equal(copy, table)


def _is_plain_parameter(weight: Tensor) -> bool:
    """Return True if a weight is a plain parameter, not a tensor of a compiler, of torch.func or of FSDP."""
    return type(weight) is nn.Parameter and not torch.compiler.is_compiling() and not weight.is_inference()
