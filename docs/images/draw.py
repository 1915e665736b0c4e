"""Draws the pictures of the documentation: `python docs/images/draw.py`. The numbers are the embedded model's own."""

from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image

import vitlite
from vitlite.draw import (
    arrange,
    attention_distances,
    picture_of_attention,
    picture_of_distances,
    picture_of_filters,
    picture_of_positions,
)
from vitlite.images import Preprocess
from vitlite.weights.sidecar import recipe_from_record

HERE = Path(__file__).parent
PHOTOS = HERE.parents[1] / "examples" / "photos"
MODEL = "vit_nano_4.cifar10"


def patches() -> None:
    """A photo as ViT-B/16 gets it, and the same in 14 x 14 patches."""
    recipe = recipe_from_record(vitlite.info("vit_base_16"), (224, 224))
    photo = Preprocess(recipe, vitlite.create(MODEL)).pixels(PHOTOS / "chelsea.png").float()
    cut = F.pad(rearrange(photo, "c (h p) (w q) -> c h w p q", p=16, q=16), (0, 5, 0, 5), value=255)
    cut = rearrange(cut, "c h w p q -> (h p) (w q) c")[:-5, :-5]
    whole = F.interpolate(photo[None], cut.shape[:2], mode="bilinear", antialias=True)[0]
    arrange({"224 x 224 pixels": rearrange(whole, "c h w -> h w c"), "196 patches of 16 x 16": cut}, 2).save(
        HERE / "patches.jpg", quality=90
    )


def photo_of_the_notebook() -> None:
    """The photo of the page, small enough to stand in a cell."""
    with Image.open(PHOTOS / "chelsea.png") as photo:
        photo.convert("RGB").resize((300, 200), Image.Resampling.BICUBIC).save(HERE / "chelsea.jpg", quality=85)


def filters() -> None:
    """The first principal components of the patch embedding's columns."""
    picture_of_filters(vitlite.create(MODEL)).save(HERE / "filters.png")


def distances() -> None:
    """How far each head looks, over the four photos."""
    model = vitlite.create(MODEL)
    photos = sorted([*PHOTOS.glob("*.png"), *PHOTOS.glob("*.jpg")])
    by_photo = [attention_distances(model, model.preprocess(photo))[0] for photo in photos]
    picture_of_distances(torch.stack(by_photo).mean(0)).save(HERE / "distances.png")


def positions() -> None:
    """How similar the position embeddings are."""
    picture_of_positions(vitlite.create(MODEL)).save(HERE / "positions.png")


def attention() -> None:
    """Where the last block looks, at a finer grid than the model's own."""
    picture_of_attention(vitlite.create(MODEL, image_size=96), PHOTOS / "chelsea.png").save(
        HERE / "attention.jpg", quality=90
    )


def rollout() -> None:
    """The attention of all blocks, multiplied."""
    picture = picture_of_attention(vitlite.create(MODEL, image_size=96), PHOTOS / "chelsea.png", rolled_out=True)
    picture.save(HERE / "rollout.jpg", quality=90)


def block() -> None:
    """One pre-norm block: two branches, each added to the stream."""
    parts: list[str] = []

    def box(x: int, text: str, fill: str, width: int = 96) -> None:
        parts.append(f'<rect x="{x}" y="34" width="{width}" height="40" rx="6" fill="{fill}" stroke="#445"/>')
        parts.append(f'<text x="{x + width // 2}" y="59">{text}</text>')

    def line(*points: tuple[int, int], arrow: bool = True) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        end = ' marker-end="url(#tip)"' if arrow else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="#445" stroke-width="1.6"{end}/>')

    def plus(x: int) -> None:
        parts.append(f'<circle cx="{x}" cy="120" r="12" fill="#fff" stroke="#445"/><text x="{x}" y="125">+</text>')

    line((70, 120), (364, 120))
    line((394, 120), (688, 120))
    line((718, 120), (776, 120))
    for start, names, join in (
        (100, (("LayerNorm", "#eceff4", 96), ("attention", "#cfe3f7", 96)), 378),
        (424, (("LayerNorm", "#eceff4", 96), ("MLP", "#f9dfc4", 96)), 702),
    ):
        line((start, 120), (start, 54), (start + 20, 54))
        x = start + 22
        for i, (text, fill, width) in enumerate(names):
            box(x, text, fill, width)
            x += width
            if i == 0:
                line((x, 54), (x + 22, 54))
                x += 24
        line((x, 54), (join, 54), (join, 106))
        plus(join)
    parts.append('<text x="44" y="125">z</text><text x="802" y="125">z"</text><text x="410" y="146">z\'</text>')
    (HERE / "block.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 830 170" font-family="sans-serif" font-size="14" '
        'text-anchor="middle" fill="#223">\n'
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#445"/></marker></defs>\n'
        '<rect width="830" height="170" rx="8" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    for draw in (patches, photo_of_the_notebook, filters, distances, positions, attention, rollout, block):
        draw()
