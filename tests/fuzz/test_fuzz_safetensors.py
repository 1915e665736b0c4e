"""Any safetensors file: what the format's own library reads from it, or one error that names it."""

import json
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from attempts import CASES, Content, attempt, json_values, kept, spoilt, spoilt_bytes
from files_made import TINY, trained
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save

CORPUS = sorted((Path(__file__).parent / "corpus" / "safetensors").iterdir())


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


@cache
def good() -> tuple[dict[str, Any], bytes]:
    """The header of a small model's file, and its data."""
    content = save(dict(trained().state_dict()))
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: Any, data: bytes) -> Content:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return Content(struct.pack("<Q", len(text)) + text + data)


def check(content: bytes) -> None:
    """The tensors that safetensors reads, or an error."""
    with kept(content, ".safetensors"), TemporaryDirectory() as name:
        path = Path(name, "vit.safetensors")
        path.write_bytes(content)
        model = attempt(path, config=TINY)
        if model is None:
            return
        theirs = load_file(path)
        ours = model.state_dict()
        assert theirs.keys() == ours.keys() | model.source.report.dropped.keys()
        for tensor_name, tensor in ours.items():
            assert torch.equal(tensor, theirs[tensor_name].float())


NAMES = sorted(good()[0])
SHAPES = [[], [1], [16], [16, 16], [2, 8], [0], [-1], [2**63], [2**64], [1] * 70, [4, 2, 2], [1.0], [True], [16, 0]]
OFFSETS = [[0, 0], [0, 64], [64, 0], [0, 2**63], [-64, 0], [64], [0, 64, 128], [2**64, 2**64 + 64], [0.0, 64]]
TYPES = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F4", "I32", "I64", "U8", "BOOL", "C64", "F33", "f32", "", "Q4"]
header_values = json_values | st.sampled_from([*SHAPES, *OFFSETS, *TYPES])
header_values |= st.sampled_from(NAMES).map(good()[0].__getitem__)


@CASES
@given(spoilt(good()[0], header_values), st.booleans())
@example({"__metadata__": {"format": "pt", "n": 1}, **good()[0]}, False)
@example({"__metadata__": {"x" * 5000: "y"}, **good()[0]}, False)
def test_any_header(header: Any, is_cut: bool) -> None:
    data = good()[1]
    check(joined(header, data[:-4] if is_cut else data))


@st.composite
def rearranged(draw: st.DrawFn) -> bytes:
    """Whole tensors renamed, left out, swapped, of other types and shapes, with the data that they then need."""
    tensors = [
        (name, "F32", list(tensor.shape), tensor.numpy().tobytes()) for name, tensor in trained().state_dict().items()
    ]
    for _ in range(draw(st.integers(0, 3))):
        place, other = draw(st.integers(0, len(tensors) - 1)), draw(st.integers(0, len(tensors) - 1))
        name, kind, shape, data = tensors[place]
        what = draw(st.sampled_from(["name", "rename", "swap", "type", "shape", "remove", "move"]))
        if what == "name":
            name = draw(
                st.sampled_from(["blocks.2.norm1.weight", f"blocks.{'9' * 5000}.norm1.weight", "", "a" * 70_000])
                | st.text()
            )
        elif what == "rename":
            name = f"{name}{draw(st.sampled_from(['.', 's', chr(0), chr(27), ' ', '.weight']))}"
        elif what == "swap":
            data = tensors[other][3][: len(data)].ljust(len(data), b"\0")
        elif what == "type":
            kind = draw(st.sampled_from(["F64", "F16", "BF16", "I32", "F8_E4M3", "BOOL"]))
            data *= 2 if kind == "F64" else 1
            data = data[: len(data) // {"F16": 2, "BF16": 2, "F8_E4M3": 4, "BOOL": 4}.get(kind, 1)]
        elif what == "shape":
            shape = draw(st.sampled_from([shape[::-1], [1, *shape], [*shape, 1], [len(data) // 4], [*shape, 0]]))
            data = b"" if 0 in shape else data
        tensors[place] = (name, kind, shape, data)
        if what == "remove" and len(tensors) > 1:
            del tensors[place]
        if what == "move":
            tensors.insert(other % len(tensors), tensors.pop(place))
    return joined(dict(_entries(tensors)), b"".join(tensor[3] for tensor in tensors))


def _entries(tensors: list[tuple[str, str, list[int], bytes]]) -> Iterator[tuple[str, Any]]:
    start = 0
    for name, kind, shape, data in tensors:
        yield name, {"dtype": kind, "shape": shape, "data_offsets": [start, start + len(data)]}
        start += len(data)


@CASES
@given(rearranged())
def test_other_tensors(content: bytes) -> None:
    check(content)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    return spoilt_bytes(draw, joined(*good()), among=draw(st.sampled_from([10, 5000, 10**6])))


@CASES
@given(damaged() | st.binary(max_size=100))
@example(struct.pack("<Q", 2**63) + b"{}")
@example(joined(b"[" * 100_000 + b"]" * 100_000, b""))
@example(joined(b'{"a":' * 5000 + b"1" + b"}" * 5000, b""))
@example(joined(b'{"a": ' + b"9" * 5000 + b"}", b""))
def test_any_bytes(content: bytes) -> None:
    check(content)


def test_a_header_of_a_million_empty_tensors() -> None:
    entry = '"a%d": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    check(joined(f"{{{', '.join(entry % i for i in range(1_000_000))}}}".encode(), b""))


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.name)
def test_what_was_ever_found(file: Path) -> None:
    check(file.read_bytes())
