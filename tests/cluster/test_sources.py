"""The input of a job on Ray. These tests do not need Ray."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_model
from PIL import Image

from vitlite.errors import InputError
from vitlite.inference.find import find_images

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from vitlite.cluster.ray import Embedder  # noqa: E402
from vitlite.cluster.sources import find_source, locate, read_row_group  # noqa: E402

ODD = ["a\u2028b.png", "c\x85d.png", "e\x0cf.png", "g\x1ch.png", " i .png", "b.png"]


def found(name: Path | str) -> list[str]:
    paths = find_source(str(name)).paths
    assert paths is not None
    return [os.path.relpath(path) for path in paths.to_pylist()]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_a_list_has_the_same_names_as_with_the_local_engine(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ODD:
        Path(name).touch()
    Path("list.txt").write_bytes(end.join([*ODD, ""]).encode())
    with open("list.txt", encoding="utf-8") as lines:
        assert found("list.txt") == find_images(["-"], lines) == ODD


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are Unicode")
def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.png")).touch()
    (tmp_path / "list.txt").write_bytes(b"a.png\n\xff.png\n")
    for name in ("folder", "list.txt"):
        with pytest.raises(
            InputError, match=r"udcff\.png is not valid Unicode.*Rename the file, or use --engine local"
        ):
            find_source(str(tmp_path / name))


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"path": ["a.png", None]}, "has 1 row without a path"),
        ({"path": ["a.png", None], "bytes": [b"", b""]}, "has 1 row without a path"),
        ({"other": [1, 2]}, "but none named path"),
    ],
)
def test_parquet_needs_paths(columns: dict[str, Any], reason: str, tmp_path: Path) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=reason):
        find_source(str(tmp_path / "a.parquet"))


def test_damaged_parquet_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(InputError, match=r"Cannot read .* as Parquet: "):
        find_source(str(tmp_path / "a.parquet"))
    ends = pa.array([0, 1], pa.int32()).buffers()[1]
    names = pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(b"\xff")])  # no text
    pq.write_table(pa.table({"path": names}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"Cannot read .* as Parquet: .*codec can't decode"):
        find_source(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_paths_of_every_text_type(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    of = pa.dictionary(pa.int32(), pa.string()) if kind == "dictionary" else getattr(pa, kind)()
    names = pa.array(["a.png", "b.png", "a.png"]).cast(of)
    pq.write_table(pa.table({"path": names}), "a.parquet")
    assert found("a.parquet") == ["a.png", "b.png"]
    pq.write_table(pa.table({"path": names, "bytes": [b""] * 3}), "a.parquet")
    assert find_source("a.parquet").paths is None
    (rows,) = read_row_group(*locate("a.parquet"), 0, 10)
    assert rows["path"].type == pa.string()
    assert rows["path"].to_pylist() == ["a.png", "b.png", "a.png"]


@pytest.mark.parametrize("url", ["http://host/photos", "s3x://bucket/photos"])
def test_urls_of_an_unknown_kind(url: str) -> None:
    with pytest.raises(InputError, match=r"Cannot open .*begins with file, s3, gs, abfs or hdfs"):
        find_source(url)


def test_every_image_that_cannot_be_read_has_its_own_error(tmp_path: Path) -> None:
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    names = [str(tmp_path / "a.png"), str(tmp_path / "b.png"), "http://host/a.png", None, "a\0b.png"]
    threads = torch.get_num_threads()
    try:
        rows = Embedder(tiny_model())(pa.table({"path": names})).to_pylist()
    finally:
        torch.set_num_threads(threads)
    assert [row["path"] for row in rows] == names
    assert [row["vector"] is None for row in rows] == [False, True, True, True, True]
    errors = [row["error"] for row in rows]
    assert errors[0] is None
    assert errors[1].startswith(f"{tmp_path / 'b.png'}: ")
    assert "Cannot open http://host/" in errors[2]
    assert errors[3] == "Cannot read None: the column path is null"
    assert errors[4].startswith("Cannot read a\0b.png: ")


def test_bytes_are_used_if_present(tmp_path: Path) -> None:
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    table = pa.table({"path": ["one", "two"], "bytes": [(tmp_path / "a.png").read_bytes(), None], "more": [1, 2]})
    threads = torch.get_num_threads()
    try:
        found = Embedder(tiny_model())(table)
    finally:
        torch.set_num_threads(threads)
    assert found.column_names == ["path", "more", "vector", "error"]
    assert found["error"].to_pylist() == [None, "Cannot read two: the column bytes is null"]
