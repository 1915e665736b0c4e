"""Where each patch is: learned tables stretched to other grids, sines and cosines, rotations, each computed once.

Shapes: h and w patches down and across, d width of a token; a table has rows for the tokens, (1, rows, d).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vitlite.config import Resample

Grid = tuple[int, int]

# What each library passes to torch's interpolate; big_vision's scipy.ndimage.zoom(order=1) is bilinear on corners, and
# FlexiViT's tf.image.resize bilinear on centres.
RESAMPLE: dict[Resample, dict[str, Any]] = {
    "timm": {"mode": "bicubic", "antialias": True, "align_corners": False},
    "transformers": {"mode": "bicubic", "antialias": False, "align_corners": False},
    "torchvision": {"mode": "bicubic", "antialias": False, "align_corners": True},
    "jax": {"mode": "bilinear", "antialias": False, "align_corners": True},
    "tensorflow": {"mode": "bilinear", "antialias": False, "align_corners": False},
}


def resample_positions(table: Tensor, grid: Grid, new: Grid, method: Resample) -> Tensor:
    """Stretches a position table to another grid, in float32; rows before the patches' stay: (1, rows, d)."""
    first = table.shape[1] - grid[0] * grid[1]
    image = rearrange(table[:, first:].float(), "1 (h w) d -> 1 h w d", h=grid[0], w=grid[1])
    # torch.compile has no backward of the antialiased bicubic for sizes that vary.
    if torch.onnx.is_in_onnx_export() or (torch.compiler.is_compiling() and torch.is_grad_enabled()):
        stretched = _stretched_by_products(image, new, **RESAMPLE[method])
        return torch.cat([table[:, :first], rearrange(stretched, "1 h w d -> 1 (h w) d").to(table.dtype)], dim=1)
    if image.device.type == "mps":  # has no antialiased bicubic
        image = image.cpu()
    # torch's antialiasing is wrong for a result one patch wide in any layout but channels last, and in einops' strides
    # for that one. Asked for by its name, torch.func refuses it.
    image = image.clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)
    stretched = F.interpolate(image, size=new, **RESAMPLE[method])
    patches = rearrange(stretched, "1 d h w -> 1 (h w) d").to(table.device, table.dtype)
    return torch.cat([table[:, :first], patches], dim=1)


def _stretched_by_products(image: Tensor, new: Grid, mode: str, antialias: bool, align_corners: bool) -> Tensor:
    """The same as matrix products, for runtimes whose own resizing differs from torch's: (1, h, w, d) -> (1, h, w, d).

    >>> by_torch = F.interpolate(torch.arange(6.0).view(1, 1, 2, 3), (3, 2), mode="bicubic", antialias=True)
    >>> table = torch.arange(6.0).view(1, 2, 3, 1)
    >>> torch.allclose(_stretched_by_products(table, (3, 2), "bicubic", True, False)[..., 0], by_torch[:, 0], atol=1e-6)
    True
    """
    for side in (new[1], new[0]):  # columns, then rows
        old = image.shape[2]
        weights = _weights(old, side, mode, antialias, align_corners).to(image.device)
        if not antialias:  # the edge goes on
            image = image[:, :, torch.arange(-2, old + 2, device=image.device).clamp(0, old - 1)]
        image = (weights @ image).transpose(1, 2)
    return image


def _weights(old: int, new: int, mode: str, antialias: bool, align_corners: bool) -> Tensor:
    """How much each new row takes of each old one: (new, old), or without antialias (new, 2 + old + 2)."""
    rows = torch.arange(new, dtype=torch.float32)[:, None]
    count = torch.ones_like(rows).sum()  # `new` itself, which an exported file does not know yet
    if align_corners:
        centres = rows * (old - 1) / (count - 1).clamp(min=1)
    else:
        centres = (rows + 0.5) * old / count - 0.5
    if antialias:  # a smaller table is smoothed over as many rows as it leaves out
        distances = ((torch.arange(old) - centres) / (old / count).clamp(min=1)).abs()
    else:
        distances = (torch.arange(-2, old + 2) - centres).abs()
    if mode == "bicubic":
        weights = _cubic(distances, -0.5 if antialias else -0.75)
    else:
        weights = (1 - distances).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


def _cubic(x: Tensor, a: float) -> Tensor:
    """Keys' kernel of a distance; torch takes a = -0.5 with antialias, else -0.75."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * a * x - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def sincos_positions(grid: Grid, dim: int) -> Tensor:
    """Fixed positions, MAE's way: sines and cosines of the column, then of the row: (1, h w, d)."""
    steps = torch.arange(dim // 4, dtype=torch.float64, device="cpu")  # mps has no float64
    frequencies = 10000 ** -(steps / (dim // 4))
    rows, columns = (torch.arange(side, device="cpu")[:, None] * frequencies for side in grid)  # (h or w, d/4)
    columns = columns[None].expand(grid[0], -1, -1)
    rows = rows[:, None].expand(-1, grid[1], -1)
    table = torch.cat([columns.sin(), columns.cos(), rows.sin(), rows.cos()], dim=-1)
    return rearrange(table, "h w d -> 1 (h w) d").float()


def rotation_angles(grid: Grid, width: int) -> Tensor:
    """DINOv3's: by which angles the pairs of channels of a head are turned, of the row, then of the column: (h w, d/2).

    A patch's centre lies between -1 and 1 on each axis, and the periods of d/4 pairs are 1 to 100, or nearly.
    """
    steps = torch.arange(width // 4, dtype=torch.float64, device="cpu")  # mps has no float64
    periods = 100 ** (4 * steps / width)
    centres = (2 * (torch.arange(side, dtype=torch.float64, device="cpu") + 0.5) / side - 1 for side in grid)
    rows, columns = (2 * math.pi * centre[:, None] / periods for centre in centres)  # (h or w, d/4)
    rows = rows[:, None].expand(-1, grid[1], -1)
    columns = columns[None].expand(grid[0], -1, -1)
    return rearrange(torch.cat([rows, columns], dim=-1), "h w d -> (h w) d")


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns each pair of channels, one of either half, by its token's angle: (b, heads, n, d) -> the same."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    return turned.to(x.dtype)  # the tables are in full precision


class KeptTables(NamedTuple):
    """Tables for other grids, stretched from one state of a learned table."""

    source: Tensor
    state: tuple[Any, ...]
    values: Tensor  # what the learned table was, to notice a change that leaves no other trace (`.data`)
    tables: dict[Any, Tensor]


class PositionTables:
    """The position tables of one model: in inference each is computed once, and kept as long as it is right.

    What is kept is neither copied nor pickled with the model. Nothing is ever taken out of a dictionary that another
    thread may be reading: a full one is replaced.
    """

    MOST = 16

    def __init__(self) -> None:
        self.stretched: KeptTables | None = None
        self.fixed: dict[Any, tuple[Tensor, ...]] = {}

    def __reduce__(self) -> tuple[type["PositionTables"], tuple[()]]:
        return PositionTables, ()

    def learned(self, table: Tensor, grid: Grid, new: Grid, method: Resample) -> Tensor:
        """A learned table for another grid: (1, rows, d)."""
        dynamic = isinstance(new[0], torch.SymInt) or isinstance(new[1], torch.SymInt)
        if not dynamic and new == grid:
            return table
        learns = table.requires_grad and torch.is_grad_enabled()
        # Elsewhere than on a CPU, to see whether values have changed would mean to wait for them.
        if learns or table.device.type != "cpu" or not _is_a_models_own(table):
            return resample_positions(table, grid, new, method)
        tables = self._tables_stretched_from(table)
        key = (grid, new, method)
        if key not in tables:
            if len(tables) >= self.MOST:
                tables = self._begin_anew(table)
            with _outside_autograd():
                tables[key] = resample_positions(table, grid, new, method)
        return tables[key]

    def _tables_stretched_from(self, table: Tensor) -> dict[Any, Tensor]:
        """What was kept of this very table in its present state; else a new place to keep things."""
        kept = self.stretched
        state = (table.dtype, table.data_ptr(), table._version)
        if kept is None or kept.source is not table or kept.state != state or not torch.equal(kept.values, table):
            return self._begin_anew(table)
        return kept.tables

    def _begin_anew(self, table: Tensor) -> dict[Any, Tensor]:
        state = (table.dtype, table.data_ptr(), table._version)
        self.stretched = KeptTables(table, state, table.detach().clone(), {})
        return self.stretched.tables

    def sincos(self, like: Tensor, grid: Grid, cls_row: bool) -> Tensor:
        """The table of sines and cosines, (1, rows, d), for tokens like the weight that projects patches to them."""
        [table] = self._kept(like, (grid, cls_row, like.dtype), lambda: (_sincos_table(like, grid, cls_row),))
        return table

    def rotation(self, like: Tensor, grid: Grid, prefix: int, width: int) -> tuple[Tensor, ...]:
        """Cosines and sines of `rotation_angles`, (n, d/2) each, in at least float32; `prefix` tokens stay as they are.

        `like` is the weight that projects patches to tokens, and `width` that of a head.
        """
        return self._kept(like, (grid, prefix, width, like.dtype), lambda: _rotation_tables(like, grid, prefix, width))

    def _kept(self, like: Tensor, key: Any, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Tables that depend on no value, computed once for a weight like this."""
        if not _is_a_models_own(like):
            return compute()
        tables = self.fixed
        if (key, like.device) not in tables:
            if len(tables) >= self.MOST:
                tables = self.fixed = {}
            with _outside_autograd():
                tables[key, like.device] = compute()
        return tables[key, like.device]


@contextmanager
def _outside_autograd() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor would break a later backward
        yield


def _is_a_models_own(weight: Tensor) -> bool:
    """Whether this is a parameter itself, and not what a compiler, torch.func, or a fake or sharded mode put there."""
    return type(weight) is nn.Parameter and not torch.compiler.is_compiling() and not weight.is_inference()


def _sincos_table(like: Tensor, grid: Grid, cls_row: bool) -> Tensor:
    table = sincos_positions(grid, like.shape[0])
    if cls_row:
        table = F.pad(table, (0, 0, 1, 0))  # the class token stands at zero
    return table.to(like.device, like.dtype)


def _rotation_tables(like: Tensor, grid: Grid, prefix: int, width: int) -> tuple[Tensor, ...]:
    angles = F.pad(rotation_angles(grid, width), (0, 0, prefix, 0))  # an angle of zero turns nothing
    dtype = torch.promote_types(like.dtype, torch.float32)
    return angles.cos().to(like.device, dtype), angles.sin().to(like.device, dtype)
