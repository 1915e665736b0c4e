"""Augment batches of training images at random.

Every random number is a function of (seed, epoch, sample, name of the number). It does not depend on the batch, the
process or earlier random numbers. A resumed or distributed run therefore sees the same images.
Shapes: b samples, c channels, h and w pixels, k classes.
"""

import math
import zlib

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from vitlite.training.settings import Augmentation

MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's multiplier of 64-bit congruential generators; odd, below 2^63
XORSHIFT = 0x2545F4914F6CDD1D  # the multiplier of xorshift*


class SampleRandom:
    """Generate uniform random numbers for the samples of a batch. Each name has its own numbers."""

    def __init__(self, seed: int, epoch: int, samples: Tensor) -> None:
        self.keys = _scramble(_scramble(_scramble(torch.tensor(seed, device="cpu")) + epoch) + samples)  # (b,)

    def __call__(self, name: str, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return a random number from `low` to `high` for each sample: (b,)."""
        bits = _scramble(self.keys + zlib.crc32(name.encode()))
        return low + (bits >> 40 & 0xFFFFFF).float() * ((high - low) / 2**24)

    def chance(self, name: str, share: float) -> Tensor:
        """Return a random mask that is True with probability `share` for each sample: (b,)."""
        return self(name) < share


def shuffled(seed: int, epoch: int, count: int) -> Tensor:
    """Return the order in which an epoch visits the samples: (count,)."""
    keys = _scramble(_scramble(torch.tensor(seed, device="cpu")) + ~epoch)
    return torch.argsort(_scramble(keys + torch.arange(count, device="cpu")))


def augment(images: Tensor, random: SampleRandom, augmentation: Augmentation) -> Tensor:
    """Apply random geometric, colour and erasing augmentations to images with values from 0 to 1: (b, c, h, w)."""
    images = _move(images, random, augmentation)
    images = _colour(images, random, augmentation)
    blank = _rectangle(random, "erase", images, 0.02, 0.2) & _per_image(random.chance("erase", augmentation.erase))
    return images.masked_fill(blank, 0.5)


def mix(
    images: Tensor,
    labels: Tensor,
    others: Tensor,
    other_labels: Tensor,
    random: SampleRandom,
    augmentation: Augmentation,
) -> tuple[Tensor, Tensor]:
    """Mix images (b, c, h, w) and label vectors (b, k) with other images and labels, by mixup or cutmix."""
    kind = random("mix")  # one number chooses mixup, cutmix or neither, because no image gets both
    is_mixup = kind < augmentation.mixup
    is_cutmix = (kind >= augmentation.mixup) & (kind < augmentation.mixup + augmentation.cutmix)
    blend = is_mixup.float() * random("lam", 0.0, 0.5)  # the share of `others` in every pixel
    cut = _rectangle(random, "cutmix", images, 0.05, 0.6) & _per_image(is_cutmix)
    share = torch.where(cut, 1.0, _per_image(blend))  # (b, 1, h, w)
    weight = reduce(share, "b 1 h w -> b 1", "mean")
    return images.lerp(others, share), labels.lerp(other_labels, weight)


def _scramble(x: Tensor) -> Tensor:
    """Hash 64-bit integers without collisions."""
    for multiplier in (MULTIPLIER, XORSHIFT):
        x = (x + 0x1E3779B97F4A7C15) * multiplier
        x = x ^ (x >> 29 & 0x7FFFFFFFF)  # the mask makes the shift unsigned
    return x


def _move(images: Tensor, random: SampleRandom, augmentation: Augmentation) -> Tensor:
    """Flip, shift, rotate, shear and zoom images in a single bilinear resampling step."""
    b, _, h, w = images.shape
    grid = F.affine_grid(_affine(h, w, random, augmentation), [b, 1, h, w], align_corners=False)  # (b, h, w, 2)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _affine(h: int, w: int, random: SampleRandom, augmentation: Augmentation) -> Tensor:
    """Return the affine maps from output to input coordinates, both from -1 to 1: (b, 2, 3).

    The steps are mirroring, shear, rotation with zoom, and shift, in this order. Rotation and shear use pixel units,
    because the units of the coordinates across and down differ if an image is not square.
    """
    shift = augmentation.shift
    flip = 1 - 2 * random.chance("flip", augmentation.flip).float()  # -1 where an image is mirrored
    right = random("right", -shift, shift).mul(w).round() * 2 / w
    down = random("down", -shift, shift).mul(h).round() * 2 / h
    warp = random.chance("warp", augmentation.warp).float()
    angle = random("angle", -15, 15) * warp * (math.pi / 180)
    zoom = torch.exp(random("zoom", -0.2, 0.2) * warp)
    shear = random("shear", -0.2, 0.2) * warp
    cos, sin = angle.cos() * zoom, angle.sin() * zoom
    # [[cos, -sin], [sin, cos]] times [[1, shear], [0, 1]]
    across = torch.stack([cos * flip, (cos * shear - sin) * h / w, right], 1)  # (b, 3)
    along = torch.stack([sin * flip * w / h, sin * shear + cos, down], 1)  # (b, 3)
    return torch.stack([across, along], 1)


def _colour(images: Tensor, random: SampleRandom, augmentation: Augmentation) -> Tensor:
    """Change the saturation, contrast and brightness of some images."""
    chosen = random.chance("colour", augmentation.colour)

    def factor(name: str) -> Tensor:
        return _per_image(torch.where(chosen, random(name, 0.6, 1.4), 1.0))

    grey = images.mean(1, keepdim=True)  # (b, 1, h, w)
    images = grey.lerp(images, factor("saturation"))
    level = grey.mean((2, 3), keepdim=True)  # (b, 1, 1, 1)
    return level.lerp(images, factor("contrast")).mul_(factor("brightness")).clamp_(0, 1)


def _rectangle(random: SampleRandom, name: str, images: Tensor, low: float, high: float) -> Tensor:
    """Return a mask of a random rectangle per image: (b, 1, h, w). It covers a share of `low` to `high` of the area."""
    h, w = images.shape[2:]
    area, ratio = random(name + "area", low, high), torch.exp(random(name + "ratio", -0.7, 0.7))
    tall = ((area * ratio).sqrt() * h).clamp(max=h).round()
    wide = ((area / ratio).sqrt() * w).clamp(max=w).round()
    rows = _interval(random(name + "top"), tall, h)
    columns = _interval(random(name + "left"), wide, w)
    return rearrange(rows, "b h -> b 1 h 1") & rearrange(columns, "b w -> b 1 1 w")


def _interval(where: Tensor, length: Tensor, side: int) -> Tensor:
    """Return a mask of an interval of a side: (b,) -> (b, side). Its relative position is `where`, from 0 to 1."""
    first = rearrange((where * (side - length + 1)).floor(), "b -> b 1")
    places = torch.arange(side, device=first.device)
    return (places >= first) & (places < first + rearrange(length, "b -> b 1"))


def _per_image(values: Tensor) -> Tensor:
    """Reshape one value per image so that it broadcasts over the pixels: (b,) -> (b, 1, 1, 1)."""
    return rearrange(values, "b -> b 1 1 1")
