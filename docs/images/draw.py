"""Draws the pictures of the documentation: `python docs/images/draw.py`. The numbers are the embedded model's own."""

from pathlib import Path

import torch.nn.functional as F
from einops import rearrange

import vitlite
from vitlite.plots import (
    arrange,
    attention_distances,
    draw_attention,
    draw_distances,
    draw_filters,
    draw_positions,
)

HERE = Path(__file__).parent
MODEL = "vit_nano_4.cifar10"


def patches() -> None:
    """A photo as the model gets it, and the same in 8 x 8 patches."""
    model = vitlite.create(MODEL)
    photo = rearrange(model.preprocess.pixels(vitlite.sample), "c h w -> h w c").float()
    whole = photo.repeat_interleave(10, 0).repeat_interleave(10, 1)
    cut = F.pad(rearrange(whole, "(h p) (w q) c -> h w c p q", p=40, q=40), (0, 8, 0, 8), value=255)
    cut = rearrange(cut, "h w c p q -> (h p) (w q) c")[:-8, :-8]
    whole = F.pad(whole, (0, 0, 0, cut.shape[1] - 320, 0, cut.shape[0] - 320), value=255)
    panels = {"32 x 32 pixels": whole, "64 patches of 4 x 4": cut}
    arrange(panels, 2).save(HERE / "patches.jpg", quality=90)


def filters() -> None:
    """The first principal components of the patch embedding's columns."""
    draw_filters(vitlite.create(MODEL)).save(HERE / "filters.png")


def distances() -> None:
    """How far each head looks."""
    model = vitlite.create(MODEL)
    draw_distances(attention_distances(model, model.preprocess(vitlite.sample))[0]).save(HERE / "distances.png")


def positions() -> None:
    """How similar the position embeddings are."""
    draw_positions(vitlite.create(MODEL)).save(HERE / "positions.png")


def attention() -> None:
    """Where the last block looks, at a finer grid than the model's own."""
    draw_attention(vitlite.create(MODEL, image_size=96), vitlite.sample).save(HERE / "attention.jpg", quality=90)


def rollout() -> None:
    """The attention of all blocks, multiplied."""
    picture = draw_attention(vitlite.create(MODEL, image_size=96), vitlite.sample, rolled_out=True)
    picture.save(HERE / "rollout.jpg", quality=90)


def block() -> None:
    """One pre-norm block: two branches, each added to the stream."""
    parts: list[str] = []

    def text_at(x: int, y: int, text: str) -> str:
        return f'<text x="{x}" y="{y}">{text}</text>'

    def box(x: int, y: int, text: str, fill: str) -> None:
        parts.append(f'<rect x="{x}" y="{y}" width="96" height="40" rx="6" fill="{fill}" stroke="#445"/>')
        parts.append(text_at(x + 48, y + 26, text))

    def line(*points: tuple[int, int]) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="#445" stroke-width="1.6" marker-end="url(#tip)"/>')

    for top, start, name, fill, end in (
        (0, "z", "attention", "#cfe3f7", "z'"),
        (140, "z'", "MLP", "#f9dfc4", 'z"'),
    ):
        line((34, top + 106), (296, top + 106))
        line((326, top + 106), (366, top + 106))
        line((64, top + 106), (64, top + 40), (80, top + 40))
        box(82, top + 20, "LayerNorm", "#eceff4")
        line((178, top + 40), (198, top + 40))
        box(200, top + 20, name, fill)
        line((296, top + 40), (311, top + 40), (311, top + 92))
        parts.append(f'<circle cx="311" cy="{top + 106}" r="12" fill="#fff" stroke="#445"/>')
        parts += [text_at(311, top + 111, "+"), text_at(18, top + 111, start), text_at(384, top + 111, end)]
    (HERE / "block.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="400" viewBox="0 0 400 270" font-family="sans-serif" '
        'font-size="16" text-anchor="middle" fill="#223">\n'
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#445"/></marker></defs>\n'
        '<rect width="400" height="270" rx="8" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    for draw in (patches, filters, distances, positions, attention, rollout, block):
        draw()
