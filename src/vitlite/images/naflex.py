"""Preprocess images for NaFlex models, such as SigLIP 2's, which see each image with its own aspect ratio."""

import math
from dataclasses import dataclass, replace

from vitlite.errors import ConfigError
from vitlite.images.transform import Mode, TransformConfig

PRECISION = 1e-5  # of the search for the scale of an image, in timm and in transformers
LARGEST_SCALE = 100.0  # there, too
LARGEST = {"max_patches": 2**16, "patch_size": 1024}


@dataclass(frozen=True, kw_only=True)
class NaFlexTransform(TransformConfig):
    """Resize each image to whole patches, of which there are at most `max_patches`, and normalise. There is no crop.

    The images of a model can have different shapes, so that a list of images may not fit in one batch.

    >>> naflex = NaFlexTransform(size=(256, 256), interpolation="bilinear", mean=(0.5,), std=(0.5,))
    >>> naflex.resized(300, 451)
    (208, 304)
    """

    mode: Mode = "squash"
    resize: tuple[int, int] = (1, 1)  # computed: the square with `max_patches` patches, or `size`
    max_patches: int = 256
    patch_size: int = 16

    def __post_init__(self) -> None:
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= largest:
                raise ConfigError(f"NaFlexTransform: {name} must be an integer from 1 to {largest}, got {value!r}.")
        side = math.isqrt(self.max_patches - 1) + 1
        object.__setattr__(self, "resize", tuple(max(side * self.patch_size, length) for length in self.size))
        super().__post_init__()

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of an image of the given size after resizing: as large as `max_patches` allows.

        timm and transformers find the scale by the same bisection, and then round both sides up to whole patches.
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
        """Return the transform for a model of another image size, with as many patches as an image of this size has."""
        patches = math.prod(side // self.patch_size for side in size)
        return replace(self, size=size, max_patches=patches)

    def squashed(self) -> TransformConfig:
        """Return a transform that resizes all images to `size`, as training needs."""
        return TransformConfig(
            size=self.size, resize=self.size, mode="squash", interpolation=self.interpolation, mean=self.mean,
            std=self.std, scale=self.scale, background=self.background,
        )  # fmt: skip
