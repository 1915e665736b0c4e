"""What a job on Ray works through is found, or refused in words; Ray itself is not needed for that."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_model
from PIL import Image

from vitlite.errors import ImageError, InputError
from vitlite.inference.embed import gather

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from vitlite.cluster.ray import Embedder  # noqa: E402
from vitlite.cluster.sources import _read_row_group, find_pictures, locate  # noqa: E402

ODD = ["a\u2028b.png", "c\x85d.png", "e\x0cf.png", "g\x1ch.png", " i .png", "b.png"]


def found(name: Path | str) -> list[str]:
    paths = find_pictures(str(name)).paths
    assert paths is not None
    return [os.path.relpath(path) for path in paths.to_pylist()]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_a_list_has_the_names_that_it_has_on_this_machine_alone(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ODD:
        Path(name).touch()
    Path("list.txt").write_bytes(end.join([*ODD, ""]).encode())
    with open("list.txt", encoding="utf-8") as lines:
        assert found("list.txt") == gather(["-"], lines) == ODD


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are Unicode")
def test_names_that_are_no_unicode_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.png")).touch()
    (tmp_path / "list.txt").write_bytes(b"a.png\n\xff.png\n")
    for name in ("folder", "list.txt"):
        with pytest.raises(InputError, match=r"udcff\.png is a name that is no Unicode.*Rename it") as raised:
            find_pictures(str(tmp_path / name))
        assert "or leave out --engine ray" in raised.value.for_command_line()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"path": ["a.png", None]}, "has rows without a path: 1 of 2. Leave them out"),
        ({"path": ["a.png", None], "bytes": [b"", b""]}, "has rows without a path: 1 of 2"),
        ({"path": [1, 2]}, "The column path must be of the type string, got int64"),
        ({"path": [None]}, "must be of the type string, got null"),
        ({"path": [b"a.png"]}, "must be of the type string, got binary"),
        ({"path": ["a.png"], "bytes": ["text"]}, "The column bytes must be of the type binary, got string"),
    ],
)
def test_parquet_with_other_columns_is_refused(columns: dict[str, Any], said: str, tmp_path: Path) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=said):
        find_pictures(str(tmp_path / "a.parquet"))


def test_a_folder_of_parquet_of_which_a_file_has_no_paths_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"path": ["a.png"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"other": ["a.png"]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="has rows without a path: 1 of 2"):
        find_pictures(str(tmp_path))


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(InputError, match="cannot be read as Parquet: "):
        find_pictures(str(tmp_path / "a.parquet"))
    ends = pa.array([0, 1], pa.int32()).buffers()[1]
    names = pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(b"\xff")])  # no text
    pq.write_table(pa.table({"path": names}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"cannot be read as Parquet: .*codec can't decode"):
        find_pictures(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_paths_of_every_type_of_text_are_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    of = pa.dictionary(pa.int32(), pa.string()) if kind == "dictionary" else getattr(pa, kind)()
    names = pa.array(["a.png", "b.png", "a.png"]).cast(of)
    pq.write_table(pa.table({"path": names}), "a.parquet")
    assert found("a.parquet") == ["a.png", "b.png"]
    pq.write_table(pa.table({"path": names, "bytes": [b""] * 3}), "a.parquet")
    assert find_pictures("a.parquet").paths is None
    (rows,) = _read_row_group(*locate("a.parquet"), 0, 10)
    assert rows["path"].type == pa.string()
    assert rows["path"].to_pylist() == ["a.png", "b.png", "a.png"]


@pytest.mark.parametrize("url", ["http://host/photos", "s3x://bucket/photos"])
def test_urls_of_no_known_kind_are_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"cannot be opened: .*URLs begin with file, s3, gs, abfs or hdfs"):
        find_pictures(url)


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_names_that_nothing_has(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.png").touch()
    with pytest.raises(ImageError, match="No such folder, list or Parquet file"):
        find_pictures(name)


def test_a_picture_at_an_unknown_url_or_without_a_path_has_its_own_error(tmp_path: Path) -> None:
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    names = [str(tmp_path / "a.png"), "http://host/a.png", None, "a\0b.png"]
    threads = torch.get_num_threads()
    try:
        rows = Embedder(tiny_model())(pa.table({"path": names})).to_pylist()
    finally:
        torch.set_num_threads(threads)
    assert [row["path"] for row in rows] == names
    assert [row["vector"] is None for row in rows] == [False, True, True, True]
    errors = [row["error"] for row in rows]
    assert errors[0] is None
    assert "http://host/ cannot be opened" in errors[1]
    assert errors[2] == "Cannot read None as an image: the column path is null"
    assert "NUL" in errors[3]


def test_tables_that_have_a_column_of_the_answers_already_are_refused() -> None:
    """Of two of one name, one is lost, and Parquet is not read again."""
    table = pa.table({"path": ["a.png"], "vector": ["mine"], "error": ["none"]})
    with pytest.raises(InputError, match="adds the columns vector, error to a table, and it has vector, error already"):
        Embedder(tiny_model())(table)


@pytest.mark.parametrize("columns", [{"path": [b"a.png"]}, {"path": ["a.png"], "bytes": ["text"]}])
def test_tables_with_columns_of_another_type_are_refused(columns: dict[str, Any]) -> None:
    threads = torch.get_num_threads()
    try:
        with pytest.raises(InputError, match="must be of the type"):
            Embedder(tiny_model())(pa.table(columns))
    finally:
        torch.set_num_threads(threads)
