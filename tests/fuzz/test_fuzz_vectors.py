"""Any file of vectors gives the largest cosines, or one error that names the file."""

import json
import struct
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from attempts import CASES, LONGEST_ERROR, Content, bounded, json_values, kept, spoilt, spoilt_bytes
from hypothesis import example, given
from hypothesis import strategies as st
from models import tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save

from vitlite.errors import VitliteError
from vitlite.inference.embed import identity_of
from vitlite.retrieval import nearest, open_vectors

ROWS, WIDTH = 5, 16
METADATA = "__metadata__"


@cache
def good() -> tuple[dict[str, Any], bytes]:
    """Return the header of a file of `vitlite embed`, with its JSON parsed, and the data."""
    vectors = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    content = save({"vectors": vectors})
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    identity = json.loads(json.dumps(asdict(identity_of(tiny_model()))))
    header[METADATA] = {"paths": [f"{row}.png" for row in range(ROWS)], "identity": identity, "model": "tiny"}
    return header, content[8 + length :]


def joined(header: Any, data: bytes) -> Content:
    """Return a file with this header. Metadata that are not text are written as JSON."""
    if isinstance(header, dict) and isinstance(header.get(METADATA), dict):
        as_text = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in header[METADATA].items()
        }
        header = {**header, METADATA: as_text}
    text = json.dumps(header).encode()
    return Content(struct.pack("<Q", len(text)) + text + data)


def check(content: bytes) -> None:
    """Compare the matches with cosines of what safetensors reads, unless there is an error."""
    with kept(content, ".safetensors"), TemporaryDirectory() as folder:
        path = Path(folder, "vectors.safetensors")
        path.write_bytes(content)
        with bounded():
            try:
                opened = open_vectors(path)
                queries = torch.randn(2, opened.dim, generator=torch.Generator().manual_seed(1))
                found = nearest(opened, queries, top=3)
                size = opened.image_size
                opened.check_model(tiny_model())
            except VitliteError as error:
                said, found = str(error), None
        if found is None:
            assert str(path) in said
            assert len(said) < LONGEST_ERROR
            assert said.isprintable()
            return
        assert size == tiny_model().config.image_size
        with safe_open(path, "pt") as file:
            paths = json.loads(file.metadata()["paths"])
        vectors = load_file(path)["vectors"].double()
        lengths = vectors.norm(dim=1).clamp_min(1e-300)
        cosines = queries.double() @ vectors.T / lengths / queries.double().norm(dim=1, keepdim=True)
        for matches, right in zip(found, cosines, strict=True):
            best = right.topk(min(3, len(paths))).values
            assert [match.score for match in matches] == pytest.approx(best.tolist(), abs=1e-5)
            for match in matches:
                rows = [row for row, path in enumerate(paths) if path == match.path]
                assert min(abs(match.score - right[row].item()) for row in rows) < 1e-5


SHAPES = [[], [ROWS], [ROWS, WIDTH, 1], [WIDTH, ROWS], [0, WIDTH], [ROWS, 0], [2**63, 0], [-1, 16], [1, 80], [10, 8]]
TYPES = ["F64", "F16", "BF16", "I32", "U8", "BOOL", "C64", "F8_E4M3", "F4", "F33", ""]
values = json_values | st.sampled_from([*SHAPES, *TYPES, [0, 0], [0, 80], [0, 160], [0, 640], "tiny", "a/b", "../x"])
FLOATS = st.floats(width=32) | st.sampled_from([0.0, 3e38, -3e38, 1e-30, 1e-45])


@CASES
@given(st.binary(max_size=200))
@example(b"")
@example(struct.pack("<Q", 2) + b"{}")
def test_any_bytes(content: bytes) -> None:
    check(Content(content))


@CASES
@given(spoilt(good()[0], values))
def test_any_header(header: Any) -> None:
    check(joined(header, good()[1]))


@CASES
@given(st.data())
def test_a_good_one_with_bytes_changed(data: st.DataObject) -> None:
    content = joined(*good())
    check(spoilt_bytes(data.draw, content, among=len(content) - len(good()[1]) if data.draw(st.booleans()) else 10**9))


@CASES
@given(st.lists(FLOATS, min_size=ROWS * WIDTH, max_size=ROWS * WIDTH))
@example([3e38] * ROWS * WIDTH)
@example([1e-30] * ROWS * WIDTH)
@example([0.0] * ROWS * WIDTH)
def test_any_numbers(numbers: list[float]) -> None:
    check(joined(good()[0], struct.pack(f"<{ROWS * WIDTH}f", *numbers)))
