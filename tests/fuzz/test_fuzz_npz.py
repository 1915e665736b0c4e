"""Any .npz of Google's: the arrays that numpy reads from it, or one error that names it."""

import io
import struct
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pytest
import torch
from attempts import CASES, Content, attempt, kept, spoilt_bytes
from files_made import flax
from hypothesis import given
from hypothesis import strategies as st

CORPUS = sorted((Path(__file__).parent / "corpus" / "npz").iterdir())
ARRAYS = flax()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLITE_CACHE", str(tmp_path / "cache"))


class Member(NamedTuple):
    """A file of an archive, in the parts that can be wrong."""

    name: str
    literal: str  # numpy's header
    data: bytes
    magic: bytes = b"\x93NUMPY\x01\x00"
    compression: int = zipfile.ZIP_STORED

    def content(self) -> bytes:
        header = self.literal.encode("latin1", "replace")
        size = struct.pack("<H" if self.magic[6:7] == b"\x01" else "<I", len(header) % 65536)
        return self.magic + size + header + self.data


@cache
def good() -> list[Member]:
    members = []
    for name, array in ARRAYS.items():
        literal = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {array.shape}, }}"
        members.append(Member(f"{name}.npy", literal, array.tobytes()))
    return members


def archive(members: list[Member]) -> Content:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for member in members:
            info = zipfile.ZipInfo(member.name)
            info.compress_type = member.compression
            file.writestr(info, member.content())
    return Content(buffer.getvalue())


def check(content: bytes) -> None:
    """The same as from an archive which numpy makes of what it reads there, or an error."""
    with kept(content, ".npz"), TemporaryDirectory() as name:
        path, again = Path(name, "vit.npz"), Path(name, "again.npz")
        path.write_bytes(content)
        model = attempt(path)
        if model is None:
            return
        with np.load(path, allow_pickle=False) as arrays:
            needed = {each for each in arrays if not each.startswith("opt/")}
            np.savez(again, **{each: arrays[each] for each in needed})
        wanted = attempt(again)
        assert wanted is not None
        assert model.config == wanted.config
        for tensor_name, tensor in model.state_dict().items():
            assert torch.equal(tensor, wanted.state_dict()[tensor_name])


LITERALS = [
    "", "{}", "None", "[" * 9000, "(" * 190 + ")" * 190, "-" * 9000 + "1", "1" * 5000, "{'descr': '<f4'}",
    "__import__('os')",
    "{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
    "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': 3, }",
    "{'descr': '<f4', 'fortran_order': 'no', 'shape': (3,), }",
]  # fmt: skip
DESCRIPTIONS = [
    "'<f8'",
    "'>f4'",
    "'<f2'",
    "'|V2'",
    "'<i4'",
    "'|O'",
    "'<U3'",
    "'|b1'",
    "'<c8'",
    "None",
    "['<f4']",
    "3",
    "b'<f4'",
]
SHAPES = [
    "(-1,)",
    "()",
    "(0,)",
    "(16, 0)",
    "(2**62,)",
    f"({2**62},)",
    f"({2**70}, 0)",
    "(3.0,)",
    "(True, 3)",
    "'3'",
    "(1, 3)",
]
NAMES = ["head/bias.npy", "head/bias", "../x.npy", "/etc/passwd", "a" * 5000, "x\x1b[31m.npy", "opt/step.npy", ""]
NAMES += [
    "Transformer/encoderblock_1/LayerNorm_0/scale.npy",
    f"Transformer/encoderblock_{'9' * 5000}/LayerNorm_0/scale.npy",
]


@st.composite
def archives(draw: st.DrawFn) -> Content:
    """A good archive with some members that are otherwise, missing, twice, or new."""
    members = list(good())
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(members) - 1))
        member = members[place]
        what = draw(
            st.sampled_from(
                ["type", "shape", "columns", "wide", "literal", "name", "data", "twice", "gone", "packed", "magic"]
            )
        )
        if what == "type":
            member = member._replace(literal=member.literal.replace("'<f4'", draw(st.sampled_from(DESCRIPTIONS))))
        elif what == "shape":
            before = member.literal.partition("'shape': ")[0]
            member = member._replace(literal=f"{before}'shape': {draw(st.sampled_from(SHAPES))}, }}")
        elif what == "columns":
            member = member._replace(literal=member.literal.replace("False", "True"))
        elif what == "wide":
            values = np.frombuffer(member.data, "<f4") if len(member.data) % 4 == 0 else np.zeros(1, "f4")
            kind = draw(st.sampled_from(["f8", "f2"] if np.abs(values).max(initial=0) < 6e4 else ["f8"]))
            member = member._replace(
                literal=member.literal.replace("'<f4'", f"'<{kind}'"), data=values.astype(kind).tobytes()
            )
        elif what == "literal":
            member = member._replace(literal=draw(st.sampled_from(LITERALS) | st.text(max_size=60)))
        elif what == "name":
            member = member._replace(name=draw(st.sampled_from(NAMES) | st.text(min_size=1, max_size=8)))
        elif what == "data":
            member = member._replace(
                data=draw(st.sampled_from([b"", member.data[:-4], member.data + b"1234", b"\xff" * len(member.data)]))
            )
        elif what == "twice":
            members.append(member._replace(name=member.name.removesuffix(draw(st.sampled_from(["", ".npy"])))))
        elif what == "packed":
            kinds = [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
            member = member._replace(compression=draw(st.sampled_from(kinds)))
        elif what == "magic":
            magics = [b"\x93NUMPY\x02\x00", b"\x93NUMPY\x03\x00", b"\x93NUMPY\x09\x00", b"PK\x03\x04\x01\0\0\0", b""]
            member = member._replace(magic=draw(st.sampled_from(magics)))
        members[place] = member
        if what == "gone" and len(members) > 1:
            del members[place]
    return archive(members)


@CASES
@pytest.mark.filterwarnings("ignore:Duplicate name")
@given(archives())
def test_any_members(content: Content) -> None:
    check(content)


@st.composite
def damaged(draw: st.DrawFn) -> Content:
    """Bytes changed at the beginning, or near the end, where the archive's list of members is."""
    content = archive(good())
    if draw(st.booleans()):
        return spoilt_bytes(draw, content, among=draw(st.sampled_from([60, 600, 10**6])))
    tail = draw(st.sampled_from([30, 300, 3000]))
    return Content(content[:-tail] + spoilt_bytes(draw, content[-tail:]))


@CASES
@given(damaged() | st.binary(max_size=100))
def test_any_bytes(content: bytes) -> None:
    check(content)


def test_a_bomb(tmp_path: Path) -> None:
    """More than a gigabyte of zeros in a megabyte."""
    path, name, rows = tmp_path / "vit.npz", "Transformer/posembed_input/pos_embedding.npy", 2**28 // 16 + 2**20
    literal = f"{{'descr': '<f4', 'fortran_order': False, 'shape': (1, {rows}, 16), }}"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for member in good():
            if member.name != name:
                file.writestr(member.name, member.content())
        with file.open(name, "w", force_zip64=True) as bomb:
            bomb.write(Member("", literal, b"").content())
            for _ in range(rows * 64 // 2**20):
                bomb.write(bytes(2**20))
    assert attempt(path) is None


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.name)
def test_what_was_ever_found(file: Path) -> None:
    check(file.read_bytes())
