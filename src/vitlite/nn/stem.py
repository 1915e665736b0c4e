"""The ResNet before the patch projection in the hybrid models of the ViT paper: BiT's ResNet with post-activation.

Shapes: b images, c channels, h and w cells of the feature map down and across.
"""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlite.config import ViTConfig

GROUPS = 32  # number of groups in each group norm


class StandardConv(nn.Conv2d):
    """A convolution with standardised filters: (b, c, h, w) -> (b, d, h / stride, w / stride).

    If the stride divides the height and width, the padding equals TensorFlow's "same", with the larger half at the
    right and bottom.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        border = max(kernel - stride, 0)
        even = border % 2 == 0
        super().__init__(inputs, outputs, kernel, stride, padding=border // 2 if even else 0, bias=False)
        self.border = nn.Identity() if even else nn.ZeroPad2d((border // 2, border // 2 + 1) * 2)

    def standardised(self) -> Tensor:
        """Return the filters scaled to mean 0 and variance 1: (d, c, p, p). They are computed in float32 or float64."""
        filters = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        variance, mean = torch.var_mean(filters, dim=(1, 2, 3), correction=0, keepdim=True)
        return ((filters - mean) * torch.rsqrt(variance + 1e-8)).to(self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.border(x), self.standardised(), None, self.stride, self.padding)


class Unit(nn.Module):
    """A residual bottleneck unit of a ResNet: (b, c, h, w) -> (b, d, h / stride, w / stride)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inner = outputs // 4
        projection = OrderedDict(conv=StandardConv(inputs, outputs, 1, stride), norm=nn.GroupNorm(GROUPS, outputs))
        self.downsample = nn.Identity() if inputs == outputs else nn.Sequential(projection)
        self.conv1, self.norm1 = StandardConv(inputs, inner, 1), nn.GroupNorm(GROUPS, inner)
        self.conv2, self.norm2 = StandardConv(inner, inner, 3, stride), nn.GroupNorm(GROUPS, inner)
        self.conv3, self.norm3 = StandardConv(inner, outputs, 1), nn.GroupNorm(GROUPS, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.downsample(x))


class Stage(nn.Module):
    """A sequence of residual units of the same width. The first one has the given stride, all others have stride 1."""

    def __init__(self, inputs: int, outputs: int, stride: int, units: int) -> None:
        super().__init__()
        first = Unit(inputs, outputs, stride)
        self.blocks = nn.Sequential(first, *(Unit(outputs, outputs, 1) for _ in range(units - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Stem(nn.Module):
    """A ResNet without its head: (b, c, h, w) -> (b, 256 * 2 ** (stages - 1), h / stride, w / stride)."""

    def __init__(self, channels: int, units: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = root(channels)
        self.stages = nn.Sequential()
        inputs = 64
        for i, count in enumerate(units):
            outputs = 256 * 2**i
            self.stages.append(Stage(inputs, outputs, 1 if i == 0 else 2, count))
            inputs = outputs

    def forward(self, images: Tensor) -> Tensor:
        return self.stages(self.stem(images))


def root(channels: int) -> nn.Sequential:
    """Return the first layers of a ResNet, from a convolution to max pooling: (b, c, h, w) -> (b, 64, h / 4, w / 4)."""
    return nn.Sequential(
        OrderedDict(
            conv=StandardConv(channels, 64, 7, 2),
            norm=nn.GroupNorm(GROUPS, 64),
            act=nn.ReLU(),
            border=nn.ConstantPad2d((0, 1, 0, 1), -math.inf),  # "same" padding before max pooling
            pool=nn.MaxPool2d(3, 2),
        )
    )


def stem(config: ViTConfig) -> nn.Module:
    """Return the ResNet before the patch projection: `root`, followed by one stage for each entry of `config.stem`."""
    return Stem(config.channels, config.stem) if config.stem else root(config.channels)
