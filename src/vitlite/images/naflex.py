"""Preprocess images for NaFlex models such as those of SigLIP 2, which keep the aspect ratio of each image."""

import math
from dataclasses import dataclass, replace

from vitlite.errors import ConfigError
from vitlite.images.transform import Mode, TransformConfig

PRECISION = 1e-5  # of the search for the scale of an image, as in timm and transformers
LARGEST_SCALE = 100.0  # upper limit of this search, as in timm and transformers
LARGEST = {"max_patches": 2**16, "patch_size": 1024}


@dataclass(frozen=True, kw_only=True)
class NaFlexTransform(TransformConfig):
    """Resize each image to at most `max_patches` whole patches, without a crop, and normalise it.

    Resized images can have different shapes, so a list of images may not fit in one batch.

    >>> naflex = NaFlexTransform(size=(256, 256), interpolation="bilinear", mean=(0.5,), std=(0.5,))
    >>> naflex.resized(300, 451)
    (208, 304)
    """

    mode: Mode = "squash"
    resize: tuple[int, int] = (1, 1)  # computed as a square of `max_patches` patches, but at least `size`
    max_patches: int = 256
    patch_size: int = 16

    def __post_init__(self) -> None:
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= largest:
                option = " (--max-patches)" if name == "max_patches" else ""
                raise ConfigError(f"{name}{option} must be an integer from 1 to {largest}, got {value!r}.")
        side = math.isqrt(self.max_patches - 1) + 1
        object.__setattr__(self, "resize", tuple(max(side * self.patch_size, length) for length in self.size))
        super().__post_init__()

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the largest height and width that `max_patches` allows for an image, in whole patches.

        As in timm and transformers, the scale is found by bisection, and both sides are rounded up to whole patches.
        """

        def grid(scale: float) -> tuple[int, int]:
            rows, columns = (math.ceil(side * scale / self.patch_size) for side in (height, width))
            return max(rows, 1), max(columns, 1)

        low, high = PRECISION / 10, LARGEST_SCALE
        while high - low >= PRECISION:
            middle = (low + high) / 2
            low, high = (middle, high) if math.prod(grid(middle)) <= self.max_patches else (low, middle)
        rows, columns = grid(low)
        return rows * self.patch_size, columns * self.patch_size

    def crop_box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the whole resized image as (left, top, right, bottom)."""
        return 0, 0, width, height

    def scaled(self, size: tuple[int, int]) -> TransformConfig:
        """Return the transform for another image size. `max_patches` becomes the number of patches of this size."""
        patches = math.prod(side // self.patch_size for side in size)
        return replace(self, size=size, max_patches=patches)

    def in_whole_patches(self, patch: int) -> TransformConfig:
        """Return the transform for a patch size. For a new one, `max_patches` is the number of patches of `size`."""
        size = super().in_whole_patches(patch).size
        if patch == self.patch_size:
            return replace(self, size=size)
        return replace(self, size=size, patch_size=patch, max_patches=math.prod(side // patch for side in size))

    def squashed(self) -> TransformConfig:
        """Return a transform that resizes every image to exactly `size`. Training needs images of one size."""
        return TransformConfig(
            size=self.size, resize=self.size, mode="squash", interpolation=self.interpolation, mean=self.mean,
            std=self.std, scale=self.scale, background=self.background,
        )  # fmt: skip
