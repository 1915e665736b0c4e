"""Random changes to training pictures, a whole batch at a time.

Every number drawn is a function of (seed, epoch, sample, name of the draw): it depends neither on the batch a sample
is in, nor on the worker, nor on what was drawn before. So a resumed or distributed run sees the same pictures.
Shapes: b samples, c channels, h and w pixels, k classes.
"""

import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from vitlite.errors import TrainError
from vitlite.training.recipe_checks import check_fields, number

CHECKS = {  # what each field of an `Augmentation` may be: shares, of the pictures or of a side
    name: number(0, 1) for name in ("flip", "shift", "warp", "colour", "erase", "mixup", "cutmix")
}
MIX = 0x5851F42D4C957F2D  # Knuth's multiplier of 64-bit congruential generators; odd, below 2^63
STRETCH = 0x2545F4914F6CDD1D  # the xorshift* multiplier


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How training pictures are changed; zero leaves that change out.

    Raises:
        TrainError: A value is no share, or mixup and cutmix together are more than all pictures.
    """

    flip: float = 0.5  # share of pictures mirrored
    shift: float = 0.125  # up to this share of the side, in whole pixels: 4 of 32
    warp: float = 0.25  # share of pictures turned, sheared and zoomed
    colour: float = 0.25  # share of pictures with other brightness, contrast and saturation
    erase: float = 0.1  # share of pictures with a rectangle blanked
    mixup: float = 0.0  # share of pictures blended with another, Zhang et al. 2018
    cutmix: float = 0.3  # share of pictures with a rectangle of another, Yun et al. 2019

    def __post_init__(self) -> None:
        check_fields(self, CHECKS)
        if self.mixup + self.cutmix > 1 + 1e-9:  # shares that make 1 may add up to a little more
            raise TrainError(
                f"mixup and cutmix must be at most 1 together, as a picture gets one of them, got {self.mixup:g} and "
                f"{self.cutmix:g}.",
                field="mixup",
            )


STRENGTHS = {
    "none": Augmentation(flip=0, shift=0, warp=0, colour=0, erase=0, mixup=0, cutmix=0),
    "weak": Augmentation(),  # for runs of a few dozen epochs
    "strong": Augmentation(warp=0.5, colour=0.5, erase=0.25, mixup=0.25, cutmix=0.5),  # for hundreds
}


class Draws:
    """Uniform numbers in [0, 1), one per sample and name."""

    def __init__(self, seed: int, epoch: int, samples: Tensor) -> None:
        self.keys = _scramble(_scramble(_scramble(torch.tensor(seed, device="cpu")) + epoch) + samples)  # (b,)

    def __call__(self, name: str, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Between low and high: (b,)."""
        bits = _scramble(self.keys + zlib.crc32(name.encode()))
        return low + (bits >> 40 & 0xFFFFFF).float() * ((high - low) / 2**24)

    def chance(self, name: str, share: float) -> Tensor:
        """True for that share of the samples: (b,)."""
        return self(name) < share


def shuffled(seed: int, epoch: int, count: int) -> Tensor:
    """The order in which an epoch visits the samples: (count,)."""
    keys = _scramble(_scramble(torch.tensor(seed, device="cpu")) + ~epoch)
    return torch.argsort(_scramble(keys + torch.arange(count, device="cpu")))


def augment(images: Tensor, draws: Draws, augmentation: Augmentation) -> Tensor:
    """Moves, recolours and blanks parts of pictures with values from 0 to 1: (b, c, h, w) as given."""
    images = _move(images, draws, augmentation)
    images = _colour(images, draws, augmentation)
    blank = _rectangle(draws, "erase", images, 0.02, 0.2) & _per_picture(draws.chance("erase", augmentation.erase))
    return images.masked_fill(blank, 0.5)


def mix(
    images: Tensor, labels: Tensor, others: Tensor, other_labels: Tensor, draws: Draws, augmentation: Augmentation
) -> tuple[Tensor, Tensor]:
    """Blends pictures and label vectors with those of partners: (b, c, h, w) and (b, k) as given."""
    kind = draws("mix")  # mixup below the one share, cutmix above it, and above both neither
    is_mixup = kind < augmentation.mixup
    is_cutmix = (kind >= augmentation.mixup) & (kind < augmentation.mixup + augmentation.cutmix)
    blend = is_mixup.float() * draws("lam", 0.0, 0.5)  # the partner's share in all pixels
    cut = _rectangle(draws, "cutmix", images, 0.05, 0.6) & _per_picture(is_cutmix)
    share = torch.where(cut, 1.0, _per_picture(blend))  # (b, 1, h, w)
    weight = reduce(share, "b 1 h w -> b 1", "mean")
    return images.lerp(others, share), labels.lerp(other_labels, weight)


def _scramble(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers under which neighbours become unrelated (after xorshift* and PCG)."""
    for multiplier in (MIX, STRETCH):
        x = (x + 0x1E3779B97F4A7C15) * multiplier
        x = x ^ (x >> 29 & 0x7FFFFFFFF)  # the mask makes the shift unsigned
    return x


def _move(images: Tensor, draws: Draws, augmentation: Augmentation) -> Tensor:
    """Flip, shift, turn, shear and zoom, as one affine map of bilinear samples; unmoved pixels keep their values."""
    b, _, h, w = images.shape
    grid = F.affine_grid(_affine(h, w, draws, augmentation), [b, 1, h, w], align_corners=False)  # (b, h, w, 2)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _affine(h: int, w: int, draws: Draws, augmentation: Augmentation) -> Tensor:
    """From places in a changed picture to those in the given one, both from -1 to 1 across and along: (b, 2, 3).

    First mirrored, then sheared, turned and zoomed, then shifted. Angles are those of pixels, which are square where
    the picture is not.
    """
    shift = augmentation.shift
    flip = 1 - 2 * draws.chance("flip", augmentation.flip).float()  # -1 where a picture is mirrored
    right = draws("right", -shift, shift).mul(w).round() * 2 / w
    down = draws("down", -shift, shift).mul(h).round() * 2 / h
    warp = draws.chance("warp", augmentation.warp).float()
    angle = draws("angle", -15, 15) * warp * (math.pi / 180)
    zoom = torch.exp(draws("zoom", -0.2, 0.2) * warp)
    shear = draws("shear", -0.2, 0.2) * warp
    cos, sin = angle.cos() * zoom, angle.sin() * zoom
    # [[cos, -sin], [sin, cos]] times [[1, shear], [0, 1]]
    across = torch.stack([cos * flip, (cos * shear - sin) * h / w, right], 1)  # (b, 3)
    along = torch.stack([sin * flip * w / h, sin * shear + cos, down], 1)  # (b, 3)
    return torch.stack([across, along], 1)


def _colour(images: Tensor, draws: Draws, augmentation: Augmentation) -> Tensor:
    """Moves some pictures away from, or towards, their grey version (saturation), mean grey (contrast), and black."""
    chosen = draws.chance("colour", augmentation.colour)

    def factor(name: str) -> Tensor:
        return _per_picture(torch.where(chosen, draws(name, 0.6, 1.4), 1.0))

    grey = images.mean(1, keepdim=True)  # (b, 1, h, w)
    images = grey.lerp(images, factor("saturation"))
    level = grey.mean((2, 3), keepdim=True)  # (b, 1, 1, 1)
    return level.lerp(images, factor("contrast")).mul_(factor("brightness")).clamp_(0, 1)


def _rectangle(draws: Draws, name: str, images: Tensor, low: float, high: float) -> Tensor:
    """A mask with one rectangle in each picture, of low to high of its area: (b, 1, h, w)."""
    h, w = images.shape[2:]
    area, ratio = draws(name + "area", low, high), torch.exp(draws(name + "ratio", -0.7, 0.7))
    tall = ((area * ratio).sqrt() * h).clamp(max=h).round()
    wide = ((area / ratio).sqrt() * w).clamp(max=w).round()
    rows = _interval(draws(name + "top"), tall, h)
    columns = _interval(draws(name + "left"), wide, w)
    return rearrange(rows, "b h -> b 1 h 1") & rearrange(columns, "b w -> b 1 1 w")


def _interval(where: Tensor, length: Tensor, side: int) -> Tensor:
    """A mask with so many places of a side, as near to its end as `where` says, from 0 to 1: (b,) -> (b, side)."""
    first = rearrange((where * (side - length + 1)).floor(), "b -> b 1")
    places = torch.arange(side, device=first.device)
    return (places >= first) & (places < first + rearrange(length, "b -> b 1"))


def _per_picture(values: Tensor) -> Tensor:
    """A value for each picture, to go with its pixels: (b,) -> (b, 1, 1, 1)."""
    return rearrange(values, "b -> b 1 1 1")
