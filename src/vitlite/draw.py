"""Where a model looks and what it knows of positions, as tensors and as pictures; and the pictures of a training run.

Pictures are drawn with Pillow, curves with matplotlib. Shapes: b images, h and w patches down and across (or pixels,
for pictures), n tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from vitlite.errors import ImageError, InputError, missing_extra
from vitlite.images import Preprocess
from vitlite.model import sincos_positions

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

    from vitlite.model import ViT

# Matplotlib's colour maps of these names, at every eighth of the way.
INFERNO = "000004 210c4a 57106e 8a226a bc3754 e45a31 f98e09 f9cb35 fcffa4"
VIRIDIS = "440154 472d7b 3b528b 2c728e 21918c 28ae80 5ec962 addc30 fde725"
PANEL = 256  # pixels of one panel's longer side
GAP = 12  # between panels
CAPTION = 22  # height of the line below a panel


def attention(model: "ViT", images: Tensor, layer: int = -1) -> Tensor:
    """How much the output of each head depends on each patch in one block, (b, c, h, w) -> (b, heads, h, w).

    That is the class token's row of the attention map; with mean pooling the mean row of all patches.

    >>> from vitlite import ViT, ViTConfig
    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128))
    >>> attention(model, torch.zeros(1, 3, 32, 48)).shape
    torch.Size([1, 4, 4, 6])
    """
    with torch.no_grad():
        maps = model.attention_maps(images, layers=(layer,))[0]
    return _as_grid(model, maps, images)


def rollout(model: "ViT", images: Tensor) -> Tensor:
    """Attention followed through all blocks down to the pixels, (b, c, h, w) -> (b, h, w).

    Abnar and Zuidema 2020: heads averaged, half of each token kept for the residual path, blocks multiplied.

    >>> from vitlite import ViT, ViTConfig
    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128))
    >>> rollout(model, torch.zeros(1, 3, 32, 48)).shape
    torch.Size([1, 4, 6])
    """
    with torch.no_grad():
        maps = model.attention_maps(images, layers=range(model.config.depth)).float().mean(2)  # (layers, b, n, n)
    keep = torch.eye(maps.shape[-1], device=maps.device)
    rolled = keep
    for layer in maps:
        rolled = (layer + keep) / 2 @ rolled
    return _as_grid(model, rolled[:, None], images)[:, 0]


def position_similarity(model: "ViT") -> Tensor:
    """The cosine similarity of every patch's position embedding to every other: (h, w, h, w).

    >>> from vitlite import ViT, ViTConfig
    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128))
    >>> position_similarity(model).shape
    torch.Size([4, 4, 4, 4])
    """
    h, w = model.config.grid
    if model.config.positions == "none":
        raise InputError("This model has no position embeddings (positions='none'), so there is nothing to compare.")
    learned = model.pos_embed
    table = sincos_positions((h, w), model.config.dim) if learned is None else learned.detach()
    rows = F.normalize(table[0, -h * w :].float(), dim=-1)
    return rearrange(rows @ rows.T, "(h w) (i j) -> h w i j", h=h, w=w, i=h, j=w).cpu()


def _as_grid(model: "ViT", maps: Tensor, images: Tensor) -> Tensor:
    """The rows that the output is read from, on the patches only: (b, heads, n, n) -> (b, heads, h, w)."""
    first, p = model.config.prefix_tokens, model.config.patch_size
    read = {"mean": slice(first, None), "mean_with_cls": slice(None)}.get(model.config.pool, slice(1))
    patches = reduce(maps[:, :, read, first:].float(), "b heads rows n -> b heads n", "mean")
    h, w = images.shape[2] // p, images.shape[3] // p
    return rearrange(patches, "b heads (h w) -> b heads h w", h=h, w=w).cpu()


def picture_of_attention(model: "ViT", image: Any, *, layer: int = -1, rolled_out: bool = False) -> "Image":
    """The photo as the model saw it, and the attention laid over it: all heads together, then each.

    Every panel is scaled by its own range, so that its colours show where a head looks, not how strongly.

    Args:
        model: With its preprocessing.
        image: Anything that `model.preprocess` takes, once.
        layer: The block, from 0, or from the last with -1.
        rolled_out: Draws `rollout` instead.
    """
    images = model.preprocess(image)
    if len(images) > 1:
        raise InputError(f"The picture of attention is drawn for one image, got {len(images)}. Pass one at a time.")
    photo = _photo(model, image)
    if rolled_out:
        panels = {"rollout through all blocks": rollout(model, images)[0]}
    else:
        maps = attention(model, images, layer)[0]
        block = f"block {layer % model.config.depth}"
        panels = {f"{block}, all heads": maps.mean(0)} | {f"head {i}": one for i, one in enumerate(maps)}
    drawn = {"photo": photo} | {caption: overlaid(photo, one) for caption, one in panels.items()}
    return arrange(drawn, columns=max(2, round((1.8 * len(drawn)) ** 0.5)) if len(drawn) > 5 else len(drawn))


def picture_of_positions(model: "ViT") -> "Image":
    """One tile a patch: how similar its position embedding is to those of all patches, itself brightest.

    After Figure 7 (centre) of Dosovitskiy et al. 2021.
    """
    similarity = position_similarity(model)
    h, w = similarity.shape[:2]
    cell = max(1, 800 // max(h, w) ** 2)  # pixels a patch within a tile
    low = similarity.min().item()
    tiles = (similarity - low) / max(1 - low, 1e-6)
    tiles = tiles.repeat_interleave(cell, 2).repeat_interleave(cell, 3)
    gap = max(2, cell)
    framed = F.pad(tiles, (0, gap, 0, gap), value=-1)  # -1 marks what stays white
    sheet = F.pad(rearrange(framed, "h w i j -> (h i) (w j)"), (gap, 0, gap, 0), value=-1)
    colors = torch.where(sheet[..., None] < 0, torch.tensor(255.0), colored(sheet.clamp(0, 1), VIRIDIS))
    return _with_scale(to_pillow(colors), low)


def _photo(model: "ViT", image: Any) -> Tensor:
    """What the model saw of a picture, large enough to look at: float (h, w, 3), 0..255."""
    if not isinstance(model.preprocess, Preprocess):
        raise ImageError("To draw on a picture, model.preprocess must be a vitlite.images.Preprocess, with its recipe.")
    recipe = model.preprocess.recipe
    factor = PANEL / max(recipe.size)
    (h, w), (rows, columns) = recipe.size, recipe.resize
    large = replace(
        recipe,
        size=(round(h * factor), round(w * factor)),
        resize=(round(rows * factor), round(columns * factor)),
    )
    pixels = Preprocess(large, model).pixels(image)
    return rearrange(pixels, "c h w -> h w c").float().expand(-1, -1, 3)


def overlaid(photo: Tensor, grid: Tensor) -> Tensor:
    """Attention as light on a dimmed photo: (h, w, 3) and a grid of patches -> (h, w, 3)."""
    lowest = (grid - grid.min())[None, None]
    smooth = F.interpolate(lowest, photo.shape[:2], mode="bicubic", align_corners=False)[0, 0].clamp(min=0)
    heat = (smooth / smooth.max().clamp(min=1e-12)).sqrt()[..., None]  # the root: one bright patch hides no others
    dimmed = 0.5 * photo.mean(-1, keepdim=True) + 0.15 * photo
    return dimmed * (1 - 0.8 * heat) + colored(heat[..., 0], INFERNO) * 0.9 * heat


def colored(values: Tensor, anchors: str) -> Tensor:
    """Numbers from 0 to 1 in a colour map: (...) -> (..., 3), 0..255."""
    colors = torch.tensor([list(bytes.fromhex(anchor)) for anchor in anchors.split()], dtype=torch.float32)
    place = values * (len(colors) - 1)
    below = place.long().clamp(max=len(colors) - 2)
    return torch.lerp(colors[below], colors[below + 1], (place - below)[..., None])


def arrange(panels: dict[str, Tensor], columns: int) -> "Image":
    """Panels with their captions, row by row on white."""
    image_type, draw_type, font = _pillow()
    h, w = next(iter(panels.values())).shape[:2]
    rows = -(-len(panels) // columns)
    sheet = image_type.new("RGB", (columns * (w + GAP) + GAP, rows * (h + CAPTION + GAP) + GAP), "white")
    pen = draw_type.Draw(sheet)
    for i, (caption, pixels) in enumerate(panels.items()):
        left, top = GAP + i % columns * (w + GAP), GAP + i // columns * (h + CAPTION + GAP)
        sheet.paste(to_pillow(pixels), (left, top))
        pen.text((left, top + h + 4), caption, fill="#333333", font=font)
    return sheet


def _with_scale(sheet: "Image", low: float) -> "Image":
    """The sheet with its colour scale to the right, from `low` to 1."""
    image_type, draw_type, font = _pillow()
    wide = image_type.new("RGB", (sheet.width + 70, sheet.height), "white")
    wide.paste(sheet, (0, 0))
    bar = colored(torch.linspace(1, 0, sheet.height - 2 * GAP)[:, None].expand(-1, 16), VIRIDIS)
    wide.paste(to_pillow(bar), (sheet.width + 6, GAP))
    pen = draw_type.Draw(wide)
    for text, y in (("1.0", GAP), (f"{low:.1f}", sheet.height - GAP - 14)):
        pen.text((sheet.width + 28, y), text, fill="#333333", font=font)
    return wide


def to_pillow(pixels: Tensor) -> "Image":
    """Floats (h, w, 3), 0..255."""
    image_type, _, _ = _pillow()
    h, w, _ = pixels.shape
    data = bytes(pixels.round().clamp(0, 255).to(torch.uint8).contiguous().view(-1).tolist())
    return image_type.frombytes("RGB", (w, h), data)


def _pillow() -> tuple[Any, Any, Any]:
    """Pillow's Image and ImageDraw, and a font."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise missing_extra("Drawing", "images") from error
    return Image, ImageDraw, ImageFont.load_default(14)


def check_target(path: str) -> None:
    """Refuses, before a model is fetched for nothing, a picture that could not be written."""
    image_type, _, _ = _pillow()
    target = Path(path)
    if target.suffix.lower() not in image_type.registered_extensions() or not target.parent.is_dir():
        raise InputError(f"Cannot write the picture {path}. Name a .png file in a folder that exists.")


def save_picture(picture: "Image", path: str) -> None:
    try:
        picture.save(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"Cannot write the picture {path}: {error}. Name a .png file in a folder that exists."
        ) from error
    print(f"wrote {path}, {picture.width} x {picture.height} pixels")


def draw_curves(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss and accuracy by epoch; `history` is what `train` returns."""
    figure = need_matplotlib()(figsize=(9, 3.5), layout="constrained")
    epochs = [record["epoch"] for record in history]
    for axes, title, names in zip(
        figure.subplots(1, 2), ("loss", "accuracy"), (("loss", "val_loss"), ("accuracy", "val_top1")), strict=True
    ):
        for name, label in zip(names, ("training, pictures as augmented", "validation, averaged weights"), strict=True):
            if name in history[0]:
                axes.plot(epochs, [record[name] for record in history], marker=".", label=label)
        axes.set(title=title, xlabel="epoch")
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def draw_confusion(confusion: Tensor, classes: Sequence[str], path: Path) -> None:
    """Rows are what the pictures show, columns what they were taken for, in shares of the row."""
    k = len(classes)
    side = min(max(3.0, 0.55 * k + 1.5), 14)
    figure = need_matplotlib()(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    shares = (confusion / confusion.sum(1, keepdim=True).clamp(min=1)).tolist()
    figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0, vmax=1), label="share of the row")
    axes.set(xlabel="taken for", ylabel="is")
    if k <= 40:
        axes.set_xticks(range(k), classes, rotation=90)
        axes.set_yticks(range(k), classes)
    if k <= 20:
        for i, row in enumerate(shares):
            for j, share in enumerate(row):
                if share:
                    color = "white" if share > 0.5 else "black"
                    axes.text(j, i, str(int(confusion[i, j])), ha="center", va="center", color=color, fontsize=8)
    figure.savefig(path, dpi=120)


def need_matplotlib() -> "type[Figure]":
    """matplotlib's Figure, which needs no screen."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("Drawing curves or a confusion matrix", "train") from error
    return Figure
