"""Draw the attention, the position embeddings and the filters of a model, and plot training histories.

Pillow draws on images, and matplotlib draws plots. Shapes: b images, n tokens, h and w patches down and across (or
pixels, for images).
"""

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from vitlite.errors import ImageError, InputError, check_count, missing_extra, printable
from vitlite.images.naflex import NaFlexTransform
from vitlite.images.transform import Preprocess, image_list
from vitlite.inference.predict import evaluating
from vitlite.nn.positions import sincos_positions
from vitlite.storage import atomic_write, obstacle

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

    from vitlite.nn.vit import ViT

# Nine evenly spaced colours of matplotlib's colour maps with these names.
INFERNO = "000004 210c4a 57106e 8a226a bc3754 e45a31 f98e09 f9cb35 fcffa4"
VIRIDIS = "440154 472d7b 3b528b 2c728e 21918c 28ae80 5ec962 addc30 fde725"
PANEL = 256  # length of a panel's longer side in pixels
GAP = 12  # distance between panels in pixels
CAPTION = 21  # font size of a caption in pixels, readable on a phone
SHEET = 800  # approximate side of the sheet of positions in pixels
FILTER = 96  # approximate side of a filter in pixels
FILTERS_PER_ROW = 7  # 28 filters fill four rows, as in the paper
PLOT = 5.25, 3.5  # inches
PLOT_DPI, DPI = 160, 96  # pixels per inch, of plots and of images with captions
INK = "#333333"  # colour of captions
FORMATS = {  # not ICO, which Pillow scales, or GIF, which has only 256 colours
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".ppm": "PPM",
    ".pdf": "PDF",
    ".svg": "SVG",
}
VECTOR = ("PDF", "SVG")


def attention(model: "ViT", images: Tensor, layer: int = -1) -> Tensor:
    """Return the attention of each head from the pooled tokens to each patch: (b, c, h, w) -> (b, heads, h, w).

    If the model pools the class token, this is one row of the attention map. If it pools the mean of the patches, this
    is the mean of their rows.

    >>> from vitlite import ViT, ViTConfig
    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128))
    >>> attention(model, torch.zeros(1, 3, 32, 48)).shape
    torch.Size([1, 4, 4, 6])
    """
    with evaluating(model):
        maps = model.attention_maps(images, layers=(layer,))[0]
    return _as_grid(model, maps, images)


def rollout(model: "ViT", images: Tensor) -> Tensor:
    """Return the attention rollout over all blocks: (b, c, h, w) -> (b, h, w).

    The heads are averaged, each map is averaged with the identity for the residual path, and the maps of all blocks
    are multiplied (Abnar and Zuidema 2020).

    >>> from vitlite import ViT, ViTConfig
    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128))
    >>> rollout(model, torch.zeros(1, 3, 32, 48)).shape
    torch.Size([1, 4, 6])
    """
    with evaluating(model):
        maps = model.attention_maps(images, layers=range(model.config.depth)).float().mean(2)  # (layers, b, n, n)
    keep = torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device)
    rolled = keep
    with torch.autocast(maps.device.type, enabled=False):  # autocast is only for the model
        for layer in maps:
            rolled = (layer + keep) / 2 @ rolled
    return _as_grid(model, rolled[:, None], images)[:, 0]


def position_similarity(model: "ViT") -> Tensor:
    """Return the cosine similarity between the position embeddings of all pairs of patches: (h, w, h, w).

    >>> from vitlite import ViT, ViTConfig
    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128))
    >>> position_similarity(model).shape
    torch.Size([4, 4, 4, 4])
    """
    h, w = model.config.grid
    if model.config.positions == "none":
        raise InputError(
            f"This model has no position embeddings to draw (positions={model.config.positions!r}). Use another model."
        )
    learned = model.pos_embed
    table = sincos_positions((h, w), model.config.dim) if learned is None else learned.detach()
    rows = F.normalize(table[0, -h * w :].float(), dim=-1)
    with torch.autocast(rows.device.type, enabled=False):
        cosines = rows @ rows.T
    return rearrange(cosines, "(h w) (i j) -> h w i j", h=h, w=w, i=h, j=w).cpu()


def attention_distances(model: "ViT", images: Tensor) -> Tensor:
    """Return the mean attention distance of each head, in pixels of the images: (b, c, h, w) -> (b, depth, heads).

    The distance is the mean over pairs of patches, weighted by the attention from one patch to the other, as in Figure
    7 (right) of Dosovitskiy et al. 2021. The class token and registers have no position and are left out.

    >>> from vitlite import ViT, ViTConfig
    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128))
    >>> attention_distances(model, torch.zeros(1, 3, 32, 48)).shape
    torch.Size([1, 2, 4])
    """
    with evaluating(model):
        maps = model.attention_maps(images, layers=range(model.config.depth))
    first, p = model.config.prefix_tokens, model.config.patch_size
    between_patches = maps[..., first:, first:].float()
    rows, columns = (torch.arange(side // p, device=maps.device) for side in images.shape[2:])
    centres = p * torch.cartesian_prod(rows, columns).float()  # (n, 2)
    apart = torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")
    far = reduce(between_patches * apart, "layers b heads n m -> b layers heads", "sum")
    paid = reduce(between_patches, "layers b heads n m -> b layers heads", "sum")
    return (far / paid).cpu()


class Filters(NamedTuple):
    """The principal components of the filters of a patch embedding, in the order of decreasing variance.

    Attributes:
        components: The components (k, c, h, w), each with norm 1.
        shares: The share of the variance that each component explains (k,). The shares of all components sum to 1.
    """

    components: Tensor
    shares: Tensor


def patch_filters(model: "ViT", count: int = 28) -> Filters:
    """Return the first `count` principal components of the patch embedding, or all components if there are fewer.

    The mean filter is subtracted first. Figure 7 (left) of Dosovitskiy et al. 2021 shows these components.

    >>> from vitlite import ViT, ViTConfig
    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128))
    >>> patch_filters(model).components.shape
    torch.Size([28, 3, 8, 8])
    """
    check_count(count, "count")
    if model.config.stem is not None:
        raise InputError(
            "The filters of a hybrid model cannot be drawn, because they apply to ResNet features. Use another model."
        )
    weight = model.patch_embed.proj.weight.detach().float().cpu()  # (d, c, h, w)
    filters = weight.flatten(1)
    _, lengths, components = torch.linalg.svd(filters - filters.mean(0), full_matrices=False)
    variances = lengths.square()
    shares = variances / variances.sum()
    return Filters(components[:count].unflatten(1, weight.shape[1:]), shares[:count])


def principal_components(vectors: Tensor, count: int = 3) -> Tensor:
    """Return the vectors in the coordinates of their principal components: (n, d) -> (n, count) in float64.

    The sign of a component is arbitrary, so it is chosen such that the largest weight of the component is positive.

    >>> principal_components(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), count=1)
    tensor([[-2.5000],
            [ 2.5000]], dtype=torch.float64)
    """
    centred = vectors.detach().cpu().double()
    centred = centred - centred.mean(0)
    directions = torch.linalg.eigh(centred.mT @ centred).eigenvectors.flip(1)[:, :count]  # largest variance first
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    return centred @ (directions * largest.sign())


def patch_similarity(model: "ViT", images: Tensor, place: tuple[float, float]) -> Tensor:
    """Return the cosine similarity of the features of one patch and of all patches: (b, c, h, w) -> (b, h, w).

    Args:
        model: The model.
        images: The images (b, c, h, w).
        place: A point in the patch, as fractions of the width from the left and of the height from the top. For
            example, (0.5, 0.25) is in the middle of the width and at a quarter of the height.
    """
    with evaluating(model):
        features = F.normalize(model.features(images).map().float(), dim=1)
    row, column = _patch_at(place, features.shape[2:])
    return (features * features[:, :, row, column, None, None]).sum(1).cpu()


def _patch_at(place: tuple[float, float], grid: Sequence[int]) -> tuple[int, int]:
    """Return the row and the column of the patch that contains a point.

    Args:
        place: The point, as fractions of the width from the left and of the height from the top.
        grid: The number of patches down and across.

    Raises:
        InputError: The point is outside of the image.
    """
    x, y = place
    if not (0 <= x <= 1 and 0 <= y <= 1):
        raise InputError(f"The point of the patch, place= (--patch), must be two fractions from 0 to 1, got {x},{y}.")
    return min(int(y * grid[0]), grid[0] - 1), min(int(x * grid[1]), grid[1] - 1)


def _as_grid(model: "ViT", maps: Tensor, images: Tensor) -> Tensor:
    """Return the mean attention from the pooled tokens to each patch: (b, heads, n, n) -> (b, heads, h, w)."""
    first, p = model.config.prefix_tokens, model.config.patch_size
    if model.config.pool in ("mean", "map"):
        read = slice(first, None)
    elif model.config.pool == "mean_with_cls":
        read = slice(None)
    else:
        read = slice(2 if model.config.pool == "cls_and_distillation" else 1)
    patches = reduce(maps[:, :, read, first:].float(), "b heads rows n -> b heads n", "mean")
    h, w = images.shape[2] // p, images.shape[3] // p
    return rearrange(patches, "b heads (h w) -> b heads h w", h=h, w=w).cpu()


def draw_attention(
    model: "ViT",
    image: Any,
    *,
    layer: int | None = None,
    rolled_out: bool = False,
    head: int | None = None,
    labels: bool = True,
    dpi: int = DPI,
) -> "Image":
    """Draw an image as the model sees it, and overlays of the mean attention and of the attention of each head.

    Every panel uses the whole range of colours, so the strength of attention cannot be compared between panels.

    Args:
        model: A model with preprocessing.
        image: One image, in any form that `model.preprocess` accepts.
        layer: The index of the block. Negative indices count from the last block. None means the last block.
        rolled_out: If True, draw the result of `rollout`; otherwise, draw the attention of one block.
        head: The index of the only head to draw, from 0. None means all heads.
        labels: If True, draw a caption below each panel; otherwise, draw no captions.
        dpi: The resolution in pixels per inch. The longer side of a panel is 2.7 inches.

    Raises:
        InputError: The arguments contradict each other, or the model has no such block or head.
    """
    if rolled_out and (layer, head) != (None, None):
        raise InputError(
            "A rollout combines all blocks and heads, so layer= (--layer) and head= (--head) cannot be used with it. "
            f"Leave them out, or leave out rolled_out= (--rollout). Got layer={layer} and head={head}."
        )
    check_count(dpi, "dpi (--dpi)")
    layer = -1 if layer is None else layer
    several = image_list(image)
    if several is not None:
        if len(several) != 1:
            raise InputError(f"Attention can only be drawn for one image, got {len(several)}. Pass a single image.")
        (image,) = several
    if hasattr(image, "read"):  # the file is read twice below
        image = image.read()
    images, seen = model.preprocess(image), _as_seen(model, image, round(PANEL * dpi / DPI))
    if rolled_out:
        grids = {"rollout through all blocks": rollout(model, images)[0]}
    else:
        grids = _heads(model, images, layer, head)
    panels = {"image": seen} | {caption: overlay(seen, grid) for caption, grid in grids.items()}
    columns = len(panels) if len(panels) <= 4 else round((1.8 * len(panels)) ** 0.5)  # about twice as wide as high
    drawn = arrange(panels, columns, round(CAPTION * dpi / DPI) if labels else 0)
    drawn.info["dpi"] = (dpi, dpi)
    return drawn


def _heads(model: "ViT", images: Tensor, layer: int, head: int | None) -> dict[str, Tensor]:
    """Return attention maps (h, w) by caption: the mean of all heads and each head, or only the given head.

    Raises:
        InputError: The model has no such head.
    """
    heads = attention(model, images, layer)[0]
    block = f"block {layer % model.config.depth}"
    if head is None:
        return {f"{block}, all heads": heads.mean(0)} | {f"head {i}": each for i, each in enumerate(heads)}
    if head not in range(len(heads)):
        raise InputError(f"head= (--head) must be an integer from 0 to {len(heads) - 1}, got {head}.")
    return {f"{block}, head {head}": heads[head]}


def draw_pca(model: "ViT", images: Sequence[Any]) -> "Image":
    """Draw images, and beside each the first three principal components of its patch features as red, green and blue.

    The components are computed from all images together, so equal colours in different images mean similar patches. The
    range of each colour leaves out the lowest and the highest hundredth of the values.

    Args:
        model: A model with preprocessing.
        images: The images, each in any form that `model.preprocess` accepts.
    """
    maps = []
    for image in images:
        with evaluating(model):
            maps.append(model.features(model.preprocess(image)).map()[0].movedim(0, 2).cpu())  # (h, w, d)
    components = principal_components(torch.cat([each.flatten(0, 1) for each in maps]))
    low, high = components.quantile(torch.tensor([0.01, 0.99], dtype=torch.float64, device="cpu"), dim=0).unbind(0)
    colors = (255 * (components - low) / (high - low).clamp(min=1e-12)).clamp(0, 255).float()
    panels = {}
    of_images = torch.split(colors, [each.shape[0] * each.shape[1] for each in maps])
    for i, (image, grid, color) in enumerate(zip(images, maps, of_images, strict=True), 1):
        seen = _as_seen(model, image)
        panels[f"image {i}"] = seen
        panels[f"features {i}"] = _enlarged(color.view(*grid.shape[:2], 3), seen.shape)
    return arrange(panels, columns=2 * max(1, round((len(maps) / 2) ** 0.5)))


def draw_similarity(model: "ViT", image: Any, place: tuple[float, float]) -> "Image":
    """Draw an image with a frame around one patch, and the similarity of all patches to this patch.

    Args:
        model: A model with preprocessing.
        image: One image, in any form that `model.preprocess` accepts.
        place: A point in the patch, as fractions of the width from the left and of the height from the top.
    """
    similarity = patch_similarity(model, model.preprocess(image), place)[0]
    seen, low = _as_seen(model, image), similarity.min().item()
    row, column = _patch_at(place, similarity.shape)
    top, bottom = (round(seen.shape[0] * edge / similarity.shape[0]) for edge in (row, row + 1))
    left, right = (round(seen.shape[1] * edge / similarity.shape[1]) for edge in (column, column + 1))
    framed = seen.clone()
    framed[max(top - 3, 0) : bottom + 3, max(left - 3, 0) : right + 3] = torch.tensor(
        [255.0, 0, 0], dtype=torch.float32, device="cpu"
    )
    framed[top:bottom, left:right] = seen[top:bottom, left:right]
    colors = colored((similarity - low) / max(1 - low, 1e-6), VIRIDIS)
    panels = {"image": framed, "cosine": _enlarged(colors, seen.shape)}
    return _with_scale(arrange(panels, columns=2), low)


def _enlarged(grid: Tensor, shape: Sequence[int]) -> Tensor:
    """Enlarge an image with one pixel per patch to the size of a panel: (h, w, 3) -> (height, width, 3)."""
    enlarged = F.interpolate(rearrange(grid, "h w c -> 1 c h w"), tuple(shape[:2]), mode="nearest-exact")
    return rearrange(enlarged, "1 c h w -> h w c")


def draw_positions(model: "ViT") -> "Image":
    """Draw one tile per patch, with the similarity between its position embedding and the embedding of every patch.

    The layout follows Figure 7 (centre) of Dosovitskiy et al. 2021.
    """
    similarity = position_similarity(model)
    low = similarity.min().item()
    tiles = (similarity - low) / max(1 - low, 1e-6)  # (h, w, i, j): the tile of each patch is a grid of patches
    side = max(1, SHEET // max(similarity.shape) ** 2)  # pixels of a patch within a tile
    gap = max(2, side)
    tiles = tiles.repeat_interleave(side, 2).repeat_interleave(side, 3)
    framed = F.pad(tiles, (0, gap, 0, gap), value=-1.0)  # -1 becomes white below
    sheet = F.pad(rearrange(framed, "h w i j -> (h i) (w j)"), (gap, 0, gap, 0), value=-1.0)
    colors = colored(sheet.clamp(0, 1), VIRIDIS)
    colors[sheet < 0] = 255.0
    return _with_scale(to_pillow(colors), low)


def draw_filters(model: "ViT") -> "Image":
    """Draw the principal components of the patch embedding, and the share of the variance that each component explains.

    Every component uses the whole range of colours, as in Figure 7 (left) of Dosovitskiy et al. 2021.
    """
    if model.config.channels not in (1, 3):
        raise InputError(
            f"Filters can only be drawn for models with 1 or 3 channels, but this model has {model.config.channels}. "
            "Use another model."
        )
    panels = {}
    for i, (component, share) in enumerate(zip(*patch_filters(model), strict=True), 1):
        low, high = component.aminmax()
        pixels = (component - low) / (high - low).clamp(min=1e-12) * 255
        times = max(1, FILTER // model.config.patch_size)
        large = pixels.repeat_interleave(times, 1).repeat_interleave(times, 2)
        panels[f"{i}: {share:.1%}"] = rearrange(large, "c h w -> h w c").expand(-1, -1, 3)
    return arrange(panels, columns=FILTERS_PER_ROW)


def draw_distances(distances: Tensor) -> "Image":
    """Draw the mean attention distance of each head by block, as in Figure 7 (right) of Dosovitskiy et al. 2021.

    Args:
        distances: The mean of `attention_distances` over several images (depth, heads).
    """
    return _to_image(plot_distances(distances))


def plot_distances(distances: Tensor) -> "Figure":
    """Return the plot of `draw_distances` as a matplotlib figure, which `save_image` can write as vector graphics."""
    figure = need_matplotlib()(figsize=PLOT, layout="constrained")
    axes = figure.subplots()
    heads = distances.shape[1]
    for head, by_block in enumerate(distances.T.tolist()):
        aside = 0.4 * ((head + 0.5) / heads - 0.5)  # shift the dots of a block, so that they do not overlap
        axes.plot([block + aside for block in range(len(by_block))], by_block, ".", markersize=9, label=f"head {head}")
    axes.set(xlabel="block", ylabel="mean attention distance (pixels)", ylim=(0, None))
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.grid(alpha=0.3)
    if heads <= 16:
        figure.legend(loc="outside right upper")
    return figure


def draw_few_shots(curves: Sequence[tuple[str, Mapping[int, Sequence[float]]]]) -> "Image":
    """Draw the accuracy of few-shot classifiers by the number of images per class, with one curve per model.

    Args:
        curves: Pairs of the name of a model and its accuracies, such as `vitlite.retrieval.probe(...).few`: a
            dictionary from the number of images per class to the accuracies of all random draws. The curve shows the
            mean and the standard deviation.
    """
    return _to_image(plot_few_shots(curves))


def plot_few_shots(curves: Sequence[tuple[str, Mapping[int, Sequence[float]]]]) -> "Figure":
    """Return the plot of `draw_few_shots` as a matplotlib figure, which `save_image` can write as vector graphics."""
    counts = sorted({count for _, few in curves for count in few})
    if not counts:
        raise InputError(
            "There is no curve to draw, because a class has fewer images than the smallest number of shots. Pass "
            "smaller numbers as shots= (--shots)."
        )
    figure = need_matplotlib()(figsize=PLOT, layout="constrained")
    axes = figure.subplots()
    for name, few in curves:
        means = [100 * mean(few[count]) for count in sorted(few)]
        deviations = [100 * pstdev(few[count]) for count in sorted(few)]
        axes.errorbar(sorted(few), means, deviations, marker=".", markersize=9, capsize=4, label=_plain(name))
    axes.set(xlabel="images of each class", ylabel="accuracy (percent)", xscale="log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _to_image(figure: "Figure", dpi: int = PLOT_DPI) -> "Image":
    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=dpi, format="png")
    image: Image = _pillow().image.open(pixels).convert("RGB")
    image.info["dpi"] = (dpi, dpi)
    return image


def _as_seen(model: "ViT", image: Any, side: int = PANEL) -> Tensor:
    """Return the part of an image that the model sees, enlarged for drawing: floats (h, w, 3) from 0 to 255."""
    if not isinstance(model.preprocess, Preprocess):
        raise ImageError(
            "To draw on an image, model.preprocess must be a vitlite.images.Preprocess. Set model.preprocess to a "
            "TransformConfig."
        )
    channels = model.config.channels
    if channels not in (1, 3):
        raise InputError(
            f"Attention can only be drawn on images with 1 or 3 channels, but the model needs {channels}. "
            "Use another model."
        )
    transform = model.preprocess.transform
    factor = side / max(transform.size)

    def enlarged(sides: tuple[int, int]) -> tuple[int, int]:
        return round(sides[0] * factor), round(sides[1] * factor)

    cut = transform.cut and enlarged(transform.cut)
    large = replace(transform, size=enlarged(transform.size), resize=enlarged(transform.resize), cut=cut)
    if isinstance(transform, NaFlexTransform):  # with larger patches, an image has the same grid
        large = replace(transform, patch_size=round(transform.patch_size * factor))
    pixels = model.preprocess.replace(transform=large).pixels(image)
    return rearrange(pixels, "c h w -> h w c").float().expand(-1, -1, 3)


def overlay(image: Tensor, grid: Tensor) -> Tensor:
    """Darken an image, and draw the attention to its patches over it in colour.

    Args:
        image: The image (height, width, 3), with values from 0 to 255.
        grid: The attention to each patch (h, w).
    """
    lowest = (grid - grid.min())[None, None]
    smooth = F.interpolate(lowest, image.shape[:2], mode="bicubic", align_corners=False)[0, 0].clamp(min=0)
    heat = (smooth / smooth.max().clamp(min=1e-12)).sqrt()[..., None]  # the square root makes weak attention visible
    dimmed = 0.5 * image.mean(-1, keepdim=True) + 0.15 * image
    return dimmed * (1 - 0.8 * heat) + colored(heat[..., 0], INFERNO) * 0.9 * heat


def colored(values: Tensor, anchors: str) -> Tensor:
    """Map numbers from 0 to 1 to colours with values from 0 to 255: (...) -> (..., 3)."""
    colors = torch.tensor(
        [list(bytes.fromhex(anchor)) for anchor in anchors.split()], dtype=torch.float32, device=values.device
    )
    place = values * (len(colors) - 1)
    below = place.long().clamp(max=len(colors) - 2)
    return torch.lerp(colors[below], colors[below + 1], (place - below)[..., None])


def arrange(panels: dict[str, Tensor], columns: int, letters: int = CAPTION) -> "Image":
    """Arrange panels in rows on white.

    Args:
        panels: The panels (h, w, 3) by caption.
        columns: The number of panels per row.
        letters: The font size of the captions in pixels. If 0, there are no captions.
    """
    pillow = _pillow()
    h, w = (max(panel.shape[axis] for panel in panels.values()) for axis in (0, 1))
    rows = -(-len(panels) // columns)
    line = letters + 4
    below = 4 + line * (1 + max(caption.count("\n") for caption in panels)) if letters else 0
    size = columns * (w + GAP) + GAP, rows * (h + below + GAP) + GAP
    sheet = pillow.image.new("RGB", size, "white")
    pen = pillow.draw.Draw(sheet)
    for i, (caption, pixels) in enumerate(panels.items()):
        row, column = divmod(i, columns)
        left, top = GAP + column * (w + GAP), GAP + row * (h + below + GAP)
        sheet.paste(to_pillow(pixels), (left, top))
        if letters:
            pen.text((left, top + h + 4), caption, fill=INK, font=pillow.font(letters))
    return sheet


def _with_scale(sheet: "Image", low: float) -> "Image":
    """Return the drawing with a colour scale from `low` to 1 added at the right."""
    pillow = _pillow()
    height = max(sheet.height, 2 * GAP + 3 * CAPTION)  # room for both numbers
    wide = pillow.image.new("RGB", (sheet.width + 80, height), "white")
    wide.paste(sheet, (0, 0))
    falling = torch.linspace(1, 0, height - 2 * GAP, dtype=torch.float32, device="cpu")
    bar = colored(falling[:, None].expand(-1, 16), VIRIDIS)
    wide.paste(to_pillow(bar), (sheet.width + 6, GAP))
    pen = pillow.draw.Draw(wide)
    left = sheet.width + 28
    pen.text((left, GAP), "1.0", fill=INK, font=pillow.font(CAPTION))
    pen.text((left, height - GAP - CAPTION), f"{low:.1f}", fill=INK, font=pillow.font(CAPTION))
    return wide


def to_pillow(pixels: Tensor) -> "Image":
    """Convert floats (h, w, 3) from 0 to 255 to a Pillow image."""
    image: Image = _pillow().image.fromarray(pixels.round().clamp(0, 255).to(torch.uint8).cpu().numpy())
    return image


class Pillow(NamedTuple):
    """The parts of Pillow that are used for drawing: two modules and a font loader."""

    image: Any
    draw: Any
    font: Any


def _pillow() -> Pillow:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise missing_extra("Drawing an image", "images") from error
    return Pillow(Image, ImageDraw, ImageFont.load_default)


def check_target(path: str | PathLike[str]) -> None:
    """Check that an image can be written to a path.

    Raises:
        InputError: The format is not supported, or the folder does not exist or is not writable.
    """
    target = Path(path)
    reason = obstacle(target)
    if not reason and target.suffix.lower() not in FORMATS:
        reason = f"the name must end in one of {' '.join(FORMATS)}"
    if reason:
        raise InputError(
            f"Cannot write the image {path}: {reason}. Pass the path of a .png file in an existing folder."
        )


def save_image(image: "Image | Figure", path: str | PathLike[str], dpi: int = PLOT_DPI) -> None:
    """Write an image or a matplotlib figure to a file, in the format of the file's extension.

    Figures are written as vector graphics to .pdf and .svg files, and with `dpi` pixels per inch in other formats. If
    writing fails, an existing file is kept.

    Raises:
        InputError: The format is not supported, or the file cannot be written.
    """
    check_target(path)
    target = Path(path)
    kind = FORMATS[target.suffix.lower()]
    try:
        with atomic_write(target) as temporary:
            if hasattr(image, "savefig"):  # a figure
                if kind in VECTOR:
                    image.savefig(temporary, format=kind.lower())
                    return
                image = _to_image(image, dpi)  # type: ignore[arg-type]  # mypy does not see that it is a figure
            _write_pixels(image, temporary, kind)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"Cannot write the image {path}: {reason}. Pass the path of a .png file in an existing folder."
        ) from error


def _write_pixels(image: "Image", path: Path, kind: str) -> None:
    """Write an image to a file. In a PDF or SVG file, the pixels are embedded at the resolution of the image."""
    dpi = round(image.info.get("dpi", (DPI, DPI))[0])
    if kind != "SVG":
        exact = {"quality": 100, "subsampling": 0} if kind == "PDF" else {}  # Pillow embeds a JPEG in a PDF
        image.save(path, kind, dpi=(dpi, dpi), resolution=dpi, **exact)
        return
    pixels = io.BytesIO()
    image.save(pixels, "PNG")
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{image.width / dpi}in" height="{image.height / dpi}in" '
        f'viewBox="0 0 {image.width} {image.height}"><image width="{image.width}" height="{image.height}" '
        f'href="data:image/png;base64,{b64encode(pixels.getvalue()).decode()}"/></svg>\n',
        encoding="utf-8",
        newline="",
    )


def draw_curves(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss and the accuracy, or the mAP, by epoch, from the history of `train`, and write them to a file."""
    figure = need_matplotlib()(figsize=(9, 3.5), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    _draw_by_epoch(loss, "loss", history, "loss", "val_loss")
    if any("val_map" in record for record in history):
        _draw_by_epoch(accuracy, "mean average precision", history, "", "val_map")
    else:
        _draw_by_epoch(accuracy, "accuracy", history, "accuracy", "val_top1")
    _save_figure(figure, path)


def _draw_by_epoch(axes: Any, title: str, history: Sequence[dict[str, Any]], training: str, validation: str) -> None:
    """Plot a training value and a validation value by epoch, as far as the history contains them.

    Args:
        axes: The axes of a matplotlib figure.
        title: The title of the plot.
        history: The history that `train` returns, with one record per epoch.
        training: The name of the training value in the records.
        validation: The name of the validation value in the records.
    """
    labels = {training: "training, augmented images", validation: "validation, averaged weights"}
    for field, label in labels.items():
        points = [(record["epoch"], record[field]) for record in history if field in record]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", label=label)
    axes.set(title=title, xlabel="epoch")
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.grid(alpha=0.3)
    axes.legend()


def draw_confusion(confusion: Tensor, classes: Sequence[str], path: Path) -> None:
    """Draw a confusion matrix and write it to a file. The colours show the shares of the predicted classes in each row.

    Args:
        confusion: The number of images by true class (row) and predicted class (column).
        classes: The names of the classes.
        path: The file to write.
    """
    k = len(classes)
    side = min(max(3.0, 0.55 * k + 1.5), 14)
    figure = need_matplotlib()(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    shares = confusion / confusion.sum(1, keepdim=True).clamp(min=1)
    figure.colorbar(axes.imshow(shares.tolist(), cmap="Blues", vmin=0, vmax=1), label="share of the row")
    axes.set(xlabel="predicted", ylabel="true class")
    if k <= 40:
        names = [_plain(name) for name in classes]
        axes.set_xticks(range(k), names, rotation=90)
        axes.set_yticks(range(k), names)
    if k <= 20:
        for row, column in confusion.nonzero().tolist():
            color = "white" if shares[row, column] > 0.5 else "black"
            count = str(int(confusion[row, column]))
            axes.text(column, row, count, ha="center", va="center", color=color, fontsize=8)
    _save_figure(figure, path)


def _plain(name: str) -> str:
    """Escape the dollar signs in a name, because matplotlib would typeset the text between them as a formula."""
    return printable(name).replace("$", r"\$")


def _save_figure(figure: "Figure", path: Path) -> None:
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=120, format=path.suffix.lstrip("."))


def need_matplotlib() -> "type[Figure]":
    """Return matplotlib's `Figure` class, which works without a display.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("Drawing a plot", "plot") from error
    return Figure
