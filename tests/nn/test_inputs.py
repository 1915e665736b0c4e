"""What a model cannot take is refused in words; the texts are those of `vitlite.nn.inputs`."""

from typing import Any

import pytest
import torch

from vitlite import ViTConfig
from vitlite.errors import InputError
from vitlite.nn.inputs import check_images

CONFIG = ViTConfig(image_size=32, patch_size=8, dim=16, depth=1, heads=2, mlp_dim=16)
CPU, FLOAT = torch.device("cpu"), torch.float32


@pytest.mark.parametrize(("images", "text"), [
    ("cat.jpg", r"takes a tensor \(batch, 3, height, width\), got str\. For pictures: model\.predict"),
    (torch.zeros(3, 32, 32), r"got shape \(3, 32, 32\)\. Add the batch: images\[None\]\."),
    (torch.zeros(32, 32), r"takes \(batch, 3, height, width\), got shape \(32, 32\)\.$"),
    (torch.zeros(1, 32, 32, 3), r"Channels come second: images\.permute\(0, 3, 1, 2\)\."),
    (torch.zeros(1, 4, 32, 32), r"For other channels: create\(\.\.\., channels=4\)\."),
    (torch.zeros(0, 3, 32, 32), r"The batch is empty"),
    (torch.zeros(1, 3, 30, 32), r"30 x 32 pixels do not divide into patches of 8\. .*height 24 or 32\."),
    (torch.zeros(1, 3, 0, 32), r"0 x 32 pixels do not divide into patches of 8\. .*height 8\."),
    (torch.zeros(1, 3, 32, 32).to_sparse(), r"takes dense tensors, got one that is torch\.sparse_coo\. images"),
    (torch.zeros(1, 3, 32, 32).to_mkldnn(), r"takes dense tensors, got one that is torch\._mkldnn"),
    (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), r"takes normalised floats, got torch\.uint8"),
    (torch.zeros(1, 3, 32, 32, device="meta"), r"Images are on meta, the model on cpu"),
    (torch.zeros(1, 3, 32, 32, dtype=torch.float64), r"Images are torch\.float64, the model torch\.float32"),
])  # fmt: skip
def test_images_that_do_not_fit(images: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        check_images(images, CONFIG, CPU, FLOAT)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_images() -> None:
    for layout in (torch.strided, torch.jagged):
        images = torch.nested.nested_tensor([torch.zeros(3, 32, 32)], layout=layout)
        with pytest.raises(InputError, match=r"got one that is nested\. .*torch\.stack\(images\.unbind\(\)\)"):
            check_images(images, CONFIG, CPU, FLOAT)


def test_images_that_fit() -> None:
    check_images(torch.zeros(2, 3, 32, 64), CONFIG, CPU, FLOAT)
    with torch.autocast("cpu", torch.bfloat16):
        check_images(torch.zeros(1, 3, 32, 32, dtype=torch.bfloat16), CONFIG, CPU, FLOAT)
