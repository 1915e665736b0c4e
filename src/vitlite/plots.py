"""What a model looks for, where it looks and what it knows of positions, as tensors and as pictures.

And the pictures of a training run. Photos are drawn on with Pillow, plots with matplotlib. Shapes: b images, h and w
patches down and across (or pixels, for pictures), n tokens.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from vitlite.errors import ImageError, InputError, check_count, missing_extra, shown
from vitlite.images.decode import read_image
from vitlite.images.transform import Preprocess, image_list
from vitlite.inference.predict import evaluating
from vitlite.nn.positions import sincos_positions
from vitlite.storage import atomic_write, obstacle

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

    from vitlite.nn.vit import ViT

# Matplotlib's colour maps of these names, at every eighth of the way.
INFERNO = "000004 210c4a 57106e 8a226a bc3754 e45a31 f98e09 f9cb35 fcffa4"
VIRIDIS = "440154 472d7b 3b528b 2c728e 21918c 28ae80 5ec962 addc30 fde725"
PANEL = 256  # pixels of one panel's longer side
GAP = 12  # between panels
CAPTION = 21  # pixels of the letters below a panel: to be read also where the picture is as wide as a phone
SHEET = 800  # pixels of one side of the picture of positions, about
FILTER = 96  # of one filter, about
FILTERS_IN_A_ROW = 7  # four rows of them, as in the paper
PLOT = 5.25, 3.5  # inches: its letters can be read also on a phone
INK = "#333333"  # of captions
FORMATS = {  # that hold a drawing as it is, by the endings of their names: an icon would be scaled, a GIF lose colours
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".ppm": "PPM",
    ".pdf": "PDF",
}
PNG = b"\x89PNG\r\n\x1a\n"  # how a file of this kind begins
MARKED, MARK = "Software", "vitlite"  # what plots say of themselves, by which it is known which may be replaced
WHITE = -1.0  # stands for what no colour map has


def attention(model: "ViT", images: Tensor, layer: int = -1) -> Tensor:
    """How much the output of each head depends on each patch in one block, (b, c, h, w) -> (b, heads, h, w).

    That is the class token's row of the attention map; with mean pooling the mean row of all patches.

    >>> from vitlite import ViT, ViTConfig
    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128))
    >>> attention(model, torch.zeros(1, 3, 32, 48)).shape
    torch.Size([1, 4, 4, 6])
    """
    with evaluating(model):
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
    with evaluating(model):
        maps = model.attention_maps(images, layers=range(model.config.depth)).float().mean(2)  # (layers, b, n, n)
    keep = torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device)
    rolled = keep
    with torch.autocast(maps.device.type, enabled=False):  # one around may round the model, and nothing after it
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
    if model.config.positions in ("none", "rope"):
        kind = model.config.positions
        raise InputError(f"This model has no position embeddings (positions={kind!r}), so there is nothing to compare.")
    learned = model.pos_embed
    table = sincos_positions((h, w), model.config.dim) if learned is None else learned.detach()
    rows = F.normalize(table[0, -h * w :].float(), dim=-1)
    with torch.autocast(rows.device.type, enabled=False):
        cosines = rows @ rows.T
    return rearrange(cosines, "(h w) (i j) -> h w i j", h=h, w=w, i=h, j=w).cpu()


def attention_distances(model: "ViT", images: Tensor) -> Tensor:
    """How far each head looks, on average, in pixels of the images: (b, c, h, w) -> (b, depth, heads).

    Dosovitskiy et al. 2021, Figure 7 (right): the distances between the centres of patches, averaged with the attention
    that patches pay to patches as weights. A class token and registers are nowhere, and left out.

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
    """The principal components of a patch embedding's filters, the strongest first."""

    components: Tensor  # (k, c, h, w), each of length 1
    shares: Tensor  # (k,), of the filters' variance; those of all components add up to 1


def patch_filters(model: "ViT", count: int = 28) -> Filters:
    """What the patch embedding looks for: its first `count` principal components, or as many as there are.

    Dosovitskiy et al. 2021, Figure 7 (left), with the mean filter taken off.

    >>> from vitlite import ViT, ViTConfig
    >>> model = ViT(ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=4, mlp_dim=128))
    >>> patch_filters(model).components.shape
    torch.Size([28, 3, 8, 8])
    """
    check_count(count, "count")
    if model.config.stem is not None:
        raise InputError("A hybrid's patches are cut from the features of a ResNet, so its filters are no pictures.")
    weight = model.patch_embed.proj.weight.detach().float().cpu()  # (d, c, h, w)
    filters = weight.flatten(1)
    _, lengths, components = torch.linalg.svd(filters - filters.mean(0), full_matrices=False)
    variances = lengths.square()
    shares = variances / variances.sum()
    return Filters(components[:count].unflatten(1, weight.shape[1:]), shares[:count])


def _as_grid(model: "ViT", maps: Tensor, images: Tensor) -> Tensor:
    """The rows that the output is read from, on the patches only: (b, heads, n, n) -> (b, heads, h, w)."""
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


def picture_of_attention(model: "ViT", image: Any, *, layer: int | None = None, rolled_out: bool = False) -> "Image":
    """The photo as the model saw it, and the attention laid over it: all heads together, then each.

    Every panel is scaled by its own range, so that its colours show where a head looks, not how strongly.

    Args:
        model: With its preprocessing.
        image: Anything that `model.preprocess` takes, but no more than one.
        layer: The block, from 0, or from the last with -1; None: the last.
        rolled_out: Draws `rollout` instead, through all blocks.
    """
    if rolled_out and layer is not None:
        raise InputError(
            f"A rollout goes through all blocks, and not through {layer} alone.",
            python="Leave out layer= or rolled_out=.",
            command="Leave out --layer or --rollout.",
        )
    layer = -1 if layer is None else layer
    several = image_list(image)
    if several is not None:
        if len(several) != 1:
            raise InputError(f"Attention is drawn for one image, got {len(several)}. Pass one at a time.")
        (image,) = several
    if hasattr(image, "read"):  # an open file may not be readable twice
        image = read_image(image, model.config.channels)
    images, photo = model.preprocess(image), _photo(model, image)
    if rolled_out:
        grids = {"rollout through all blocks": rollout(model, images)[0]}
    else:
        heads = attention(model, images, layer)[0]
        grids = {f"block {layer % model.config.depth}, all heads": heads.mean(0)}
        for i, head in enumerate(heads):
            grids[f"head {i}"] = head
    panels = {"photo": photo}
    for caption, grid in grids.items():
        panels[caption] = overlaid(photo, grid)
    return arrange(panels, columns=_columns(len(panels)))


def _columns(panels: int) -> int:
    """All in one row where they are few, else about twice as many across as down."""
    if panels <= 4:
        return panels
    return max(2, round((1.8 * panels) ** 0.5))


def picture_of_positions(model: "ViT") -> "Image":
    """One tile a patch: how similar its position embedding is to those of all patches, itself brightest.

    After Figure 7 (centre) of Dosovitskiy et al. 2021.
    """
    similarity = position_similarity(model)
    low = similarity.min().item()
    tiles = (similarity - low) / max(1 - low, 1e-6)  # (h, w, i, j): one tile for each patch, itself a grid of patches
    side = max(1, SHEET // max(similarity.shape) ** 2)  # pixels of a patch within a tile
    gap = max(2, side)
    tiles = tiles.repeat_interleave(side, 2).repeat_interleave(side, 3)
    framed = F.pad(tiles, (0, gap, 0, gap), value=WHITE)  # to the right of each and below
    sheet = rearrange(framed, "h w i j -> (h i) (w j)")
    sheet = F.pad(sheet, (gap, 0, gap, 0), value=WHITE)  # to the left and above all
    colors = colored(sheet.clamp(0, 1), VIRIDIS)
    colors[sheet == WHITE] = 255.0
    return _with_scale(to_pillow(colors), low)


def picture_of_filters(model: "ViT") -> "Image":
    """The principal components of the patch embedding, each scaled by its own range, with its share of the variance.

    After Figure 7 (left) of Dosovitskiy et al. 2021.
    """
    if model.config.channels not in (1, 3):
        raise InputError(f"Filters are drawn in grey or in colours, of 1 or 3 channels, not {model.config.channels}.")
    panels = {}
    for i, (component, share) in enumerate(zip(*patch_filters(model), strict=True), 1):
        low, high = component.aminmax()
        pixels = (component - low) / (high - low).clamp(min=1e-12) * 255
        times = max(1, FILTER // model.config.patch_size)
        large = pixels.repeat_interleave(times, 1).repeat_interleave(times, 2)
        panels[f"{i}: {share:.1%}"] = rearrange(large, "c h w -> h w c").expand(-1, -1, 3)
    return arrange(panels, columns=FILTERS_IN_A_ROW)


def picture_of_distances(distances: Tensor) -> "Image":
    """A dot for each head, block by block: (depth, heads), such as the mean of `attention_distances` over pictures.

    After Figure 7 (right) of Dosovitskiy et al. 2021.
    """
    figure = need_matplotlib()(figsize=PLOT, layout="constrained")
    axes = figure.subplots()
    heads = distances.shape[1]
    for head, by_block in enumerate(distances.T.tolist()):
        aside = 0.4 * ((head + 0.5) / heads - 0.5)  # so that no dot hides another
        axes.plot([block + aside for block in range(len(by_block))], by_block, ".", markersize=9, label=f"head {head}")
    axes.set(xlabel="block", ylabel="mean attention distance (pixels)", ylim=(0, None))
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.grid(alpha=0.3)
    if heads <= 16:
        figure.legend(loc="outside right upper")
    return _drawn(figure)


def picture_of_few_shots(curves: Sequence[tuple[str, Mapping[int, Sequence[float]]]]) -> "Image":
    """A curve for each model: right answers by the pictures a class that were fitted to, mean and deviation.

    Args:
        curves: The name of each model, and for each number of pictures the shares of right answers by draw, such as
            `vitlite.retrieval.probe(...).few`.
    """
    counts = sorted({count for _, few in curves for count in few})
    if not counts:
        raise InputError("There is no curve to draw: no number of pictures a class was measured.")
    figure = need_matplotlib()(figsize=PLOT, layout="constrained")
    axes = figure.subplots()
    for name, few in curves:
        shares = [100 * torch.tensor(list(few[count]), dtype=torch.float64, device="cpu") for count in sorted(few)]
        means = [float(share.mean()) for share in shares]
        deviations = [float(share.std(correction=0)) for share in shares]
        axes.errorbar(sorted(few), means, deviations, marker=".", markersize=9, capsize=4, label=_plain(name))
    axes.set(xlabel="pictures of each class", ylabel="right (percent)", xscale="log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.legend()
    return _drawn(figure)


def _drawn(figure: "Figure") -> "Image":
    """The pixels of a plot."""
    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=160, format="png")
    picture: Image = _pillow().image.open(pixels).convert("RGB")
    return picture


def _photo(model: "ViT", image: Any) -> Tensor:
    """What the model saw of a picture, large enough to look at: float (h, w, 3), 0..255."""
    if not isinstance(model.preprocess, Preprocess):
        raise ImageError(
            "To draw on a picture, model.preprocess must be a vitlite.images.Preprocess, with its transform."
        )
    channels = model.config.channels
    if channels not in (1, 3):
        raise InputError(f"Attention is drawn on pictures of 1 or 3 channels, and the model takes {channels}.")
    transform = model.preprocess.transform
    factor = PANEL / max(transform.size)
    cut = transform.cut and _enlarged(transform.cut, factor)
    large = replace(
        transform, size=_enlarged(transform.size, factor), resize=_enlarged(transform.resize, factor), cut=cut
    )
    pixels = model.preprocess.replace(transform=large).pixels(image)
    return rearrange(pixels, "c h w -> h w c").float().expand(-1, -1, 3)


def _enlarged(sides: tuple[int, int], factor: float) -> tuple[int, int]:
    height, width = sides
    return round(height * factor), round(width * factor)


def overlaid(photo: Tensor, grid: Tensor) -> Tensor:
    """Attention as light on a dimmed photo: (h, w, 3) and a grid of patches -> (h, w, 3)."""
    lowest = (grid - grid.min())[None, None]
    smooth = F.interpolate(lowest, photo.shape[:2], mode="bicubic", align_corners=False)[0, 0].clamp(min=0)
    heat = (smooth / smooth.max().clamp(min=1e-12)).sqrt()[..., None]  # the root: one bright patch hides no others
    dimmed = 0.5 * photo.mean(-1, keepdim=True) + 0.15 * photo
    return dimmed * (1 - 0.8 * heat) + colored(heat[..., 0], INFERNO) * 0.9 * heat


def colored(values: Tensor, anchors: str) -> Tensor:
    """Numbers from 0 to 1 in a colour map: (...) -> (..., 3), 0..255."""
    colors = torch.tensor(
        [list(bytes.fromhex(anchor)) for anchor in anchors.split()], dtype=torch.float32, device=values.device
    )
    place = values * (len(colors) - 1)
    below = place.long().clamp(max=len(colors) - 2)
    return torch.lerp(colors[below], colors[below + 1], (place - below)[..., None])


def arrange(panels: dict[str, Tensor], columns: int, letters: int = CAPTION) -> "Image":
    """Panels with their captions, of a line or more each, row by row on white."""
    pillow = _pillow()
    h, w = next(iter(panels.values())).shape[:2]
    rows = -(-len(panels) // columns)
    line = letters + 4
    below = 4 + line * (1 + max(caption.count("\n") for caption in panels))
    size = columns * (w + GAP) + GAP, rows * (h + below + GAP) + GAP
    sheet = pillow.image.new("RGB", size, "white")
    pen = pillow.draw.Draw(sheet)
    for i, (caption, pixels) in enumerate(panels.items()):
        row, column = divmod(i, columns)
        left, top = GAP + column * (w + GAP), GAP + row * (h + below + GAP)
        sheet.paste(to_pillow(pixels), (left, top))
        pen.text((left, top + h + 4), caption, fill=INK, font=pillow.font(letters))
    return sheet


def _with_scale(sheet: "Image", low: float) -> "Image":
    """The sheet with its colour scale to the right, from `low` to 1."""
    pillow = _pillow()
    height = max(sheet.height, 2 * GAP + 3 * CAPTION)  # room for both numbers beside a narrow strip
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
    """Floats (h, w, 3), 0..255."""
    h, w, _ = pixels.shape
    data = pixels.round().clamp(0, 255).to(torch.uint8).contiguous().view(-1)
    return _pillow().image.frombytes("RGB", (w, h), bytes(data.tolist()))


class Pillow(NamedTuple):
    """The parts of Pillow that draw."""

    image: Any  # its module Image
    draw: Any  # its module ImageDraw
    font: Any  # of letters of a height


def _pillow() -> Pillow:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise missing_extra("Drawing", "images") from error
    return Pillow(Image, ImageDraw, ImageFont.load_default)


def check_target(path: str | PathLike[str]) -> None:
    """Refuses, before a model is fetched for nothing, a picture that could not be written."""
    target = Path(path)
    in_the_way = obstacle(target)
    if not in_the_way and target.suffix.lower() not in _formats():
        in_the_way = f"its name ends in none of {' '.join(_formats())}"
    if in_the_way:
        raise InputError(
            f"Cannot write the picture {path}: {in_the_way}. Name a .png file in a folder that exists and can be "
            "written."
        )


def save_picture(picture: "Image", path: str | PathLike[str]) -> None:
    """Writes a picture in the format that the path's suffix names, whole or not at all."""
    check_target(path)
    target = Path(path)
    try:
        with atomic_write(target) as temporary:
            picture.save(temporary, _formats()[target.suffix.lower()])
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"Cannot write the picture {path}: {reason}. Name a .png file in a folder that exists, can be "
            "written and has room for it."
        ) from error


def _formats() -> dict[str, str]:
    """Those of the `FORMATS` that this Pillow writes."""
    image = _pillow().image
    image.init()  # before, it does not know all that it can write
    return {suffix: name for suffix, name in FORMATS.items() if name in image.SAVE}


def draw_curves(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss and accuracy by epoch; `history` is what `train` returns."""
    figure = need_matplotlib()(figsize=(9, 3.5), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    _draw_by_epoch(loss, "loss", history, "loss", "val_loss")
    _draw_by_epoch(accuracy, "accuracy", history, "accuracy", "val_top1")
    _save_figure(figure, path)


def _draw_by_epoch(axes: Any, title: str, history: Sequence[dict[str, Any]], training: str, validation: str) -> None:
    """Two fields of the history, as far as it has them."""
    labels = {training: "training, pictures as augmented", validation: "validation, averaged weights"}
    for field, label in labels.items():
        there = [(record["epoch"], record[field]) for record in history if field in record]
        if there:
            axes.plot(*zip(*there, strict=True), marker=".", label=label)
    axes.set(title=title, xlabel="epoch")
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.grid(alpha=0.3)
    axes.legend()


def draw_confusion(confusion: Tensor, classes: Sequence[str], path: Path) -> None:
    """Rows are what the pictures show, columns what they were taken for, in shares of the row."""
    k = len(classes)
    side = min(max(3.0, 0.55 * k + 1.5), 14)
    figure = need_matplotlib()(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    shares = confusion / confusion.sum(1, keepdim=True).clamp(min=1)
    figure.colorbar(axes.imshow(shares.tolist(), cmap="Blues", vmin=0, vmax=1), label="share of the row")
    axes.set(xlabel="taken for", ylabel="is")
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
    """A name as matplotlib draws it letter by letter: what stands between two dollars would be a formula."""
    return shown(name).replace("$", r"\$")


def _save_figure(figure: "Figure", path: Path) -> None:
    mark = {MARKED: MARK} if path.suffix == ".png" else None
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=120, format=path.suffix.lstrip("."), metadata=mark)


def is_plot_of_ours(path: Path) -> bool:
    """Whether a file is a .png that `draw_curves` or `draw_confusion` wrote: it says so before its pixels."""
    with open(path, "rb") as file:
        beginning = file.read(1000)
    return beginning.startswith(PNG) and f"tEXt{MARKED}\0{MARK}".encode() in beginning


def need_matplotlib() -> "type[Figure]":
    """matplotlib's Figure, which needs no screen."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("Drawing a plot", "plot") from error
    return Figure
