"""The documented way to prepare images for an exported model equals `model.preprocess`."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitlite

ROOT = Path(__file__).parents[2]


def documented() -> Callable[..., np.ndarray]:
    """Return the function `prepare` of the page on exporting."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "def prepare(" in block)
    imports = "\n".join(line for line in block.splitlines() if re.match("import numpy|from PIL", line))
    names: dict[str, Any] = {}
    exec(imports + "\n" + block[block.index("def prepare(") : block.index("images = prepare(")], names)
    return names["prepare"]


def files() -> dict[str, bytes]:
    """Return one photo in every mode that the page names."""

    def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        return buffer.getvalue()

    photo = Image.open(ROOT / "examples" / "photos" / "chelsea.png").convert("RGB")
    alpha = Image.fromarray((np.indices((photo.height, photo.width)).sum(0) % 256).astype(np.uint8))
    cut_out = photo.copy()
    cut_out.putalpha(alpha)
    deep = np.array(photo.convert("L")).astype(np.uint16) * 256 + np.array(alpha)
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "RGB": encoded(photo),
        "turned": encoded(photo, "JPEG", exif=exif),
        "CMYK": encoded(photo.convert("CMYK"), "JPEG"),
        "L": encoded(photo.convert("L")),
        "1": encoded(photo.convert("1")),
        "P": encoded(photo.quantize(16)),
        "P with alpha": encoded(photo.quantize(16), transparency=3),
        "RGBA": encoded(cut_out),
        "LA": encoded(cut_out.convert("LA")),
        "I;16": encoded(Image.fromarray(deep)),
        "I;16 TIFF": encoded(Image.fromarray(deep[::2]), "TIFF"),
        "I;16B": encoded(Image.fromarray(deep.astype(">u2")), "TIFF"),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"resize": (37, 37), "margin": "down", "interpolation": "bilinear"},
        {"resize": (40, 36), "mode": "squash"},
        {"size": (28, 28), "cut": (32, 32), "background": "white"},
    ],
)
def test_the_documented_recipe_equals_preprocess(changes: dict[str, Any]) -> None:
    prepare, model = documented(), vitlite.create("vit_nano_4.cifar10")
    transform = replace(model.preprocess.transform, **changes)
    model.preprocess = transform
    about = json.loads(json.dumps(transform.to_dict()))
    for name, content in files().items():
        expected = model.preprocess(content).numpy()
        assert np.abs(prepare(io.BytesIO(content), **about) - expected).max() < 1e-5, name
