"""The folder of a job on Ray: what is there already stays, and only what bears its mark is taken for its own."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from vitlite.cluster.folder import LOCK, MARK, MARK_BEGUN, claimed, count
from vitlite.errors import InputError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem  # noqa: E402

COLUMNS = pa.schema([("path", pa.string()), ("vector", pa.list_(pa.float32())), ("error", pa.string())])
IDENTITY = {"weights": "ab", "dtype": None, "config": {"size": (8, 8)}}


def claim(out: Path, identity: dict[str, Any] = IDENTITY) -> Any:
    return claimed(LocalFileSystem(), str(out), COLUMNS, identity)


def write(output: Any, name: str, *paths: str, schema: Any = None) -> Path:
    """A file as Ray writes it."""
    table = pa.table({"path": paths, "vector": [[1.0]] * len(paths), "error": [None] * len(paths)})
    file = Path(output.folder, f"{output.prefix}_{name}.parquet")
    pq.write_table(table.cast(schema or output.schema), file)
    return file


def whole(out: Path) -> Any:
    """A folder with two files of two pictures."""
    with claim(out) as output:
        write(output, "0", "a", "b")
        write(output, "1", "c", "d")
    return output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    before = whole(out)
    assert sorted(os.listdir(out)) == sorted([MARK, *(f"{before.prefix}_{i}.parquet" for i in "01")])
    with claim(out) as output:
        assert sorted(output.done.to_pylist()) == ["a", "b", "c", "d"]
        assert (output.prefix, count(output, distinct=True)) == (before.prefix, (4, 0))
    assert pq.read_table(out).column_names == ["path", "vector", "error"]  # the mark is no data to others


def test_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = whole(out)
    torn = write(output, "2", "e")
    torn.write_bytes(torn.read_bytes()[:-50])
    for name in (LOCK, MARK_BEGUN):
        (out / name).write_bytes(b"")
    with claim(out) as output:
        assert sorted(output.done.to_pylist()) == ["a", "b", "c", "d"]
    assert not torn.exists()
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / MARK_BEGUN).write_text('{"written by')
    with claim(begun) as output:
        assert output.done.to_pylist() == []
    assert os.listdir(begun) == [MARK]


def others(out: Path) -> dict[str, Any]:
    """Ways in which something else is in a folder."""
    torn = b"PAR1 of another program that is still writing"
    return {
        "torn.parquet": lambda: (out / "torn.parquet").write_bytes(torn),
        "data.parquet": lambda: pq.write_table(pa.table({"number": [1]}), out / "data.parquet"),
        "vitlite-0123456789abcdef_0.parquet": lambda: (out / "vitlite-0123456789abcdef_0.parquet").write_bytes(torn),
        "notes.txt": lambda: (out / "notes.txt").write_text("mine"),
        ".hidden": lambda: (out / ".hidden").write_text("mine"),
        "inner": lambda: (out / "inner").mkdir(),
        "two\\nlines": lambda: (out / "two\nlines").write_text("mine"),
    }


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", sorted(others(Path())))
def test_a_folder_with_anything_else_is_refused_and_left_as_it_is(tmp_path: Path, name: str, marked: bool) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if marked:
        whole(out)
    others(out)[name]()
    before, names = contents(out), sorted(os.listdir(out))
    refused = re.escape(f"{out} holds {name}, which this command did not write. Choose a folder that is new.")
    with pytest.raises(InputError, match=refused), claim(out):
        pass
    assert (contents(out), sorted(os.listdir(out))) == (before, names)


def test_another_commands_folder_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = whole(out)
    before = contents(out)
    wrong = "was not written by this command with these weights and options. Choose another folder."
    with pytest.raises(InputError, match=re.escape(f"{MARK} {wrong}")), claim(out, {"weights": "other"}):
        pass
    assert contents(out) == before
    file = write(output, "2", "e", schema=COLUMNS)  # under our name, and without what decided its numbers
    with pytest.raises(InputError, match=re.escape(f"{file} {wrong}")), claim(out):
        pass
    assert file.exists()
    alone = tmp_path / "file"
    alone.write_text("mine")
    with pytest.raises(InputError, match="file is a file"), claim(alone):
        pass
    assert alone.read_text() == "mine"


@pytest.mark.parametrize("content", [
    b"", b"{}", b"[" * 10**5, b'{"written by": "vitlite", "files": "", "identity": {}}',
    b'{"written by": "vitlite", "files": 3, "identity": {}}', b'{"written by": "vitlite", "files": "x", "identity": 3}',
    b'{"written by": "vitlite", "files": "\\u001b[31m", "identity": {}}', b"\xff\xfe", b"9" * 5000,
])  # fmt: skip
def test_a_mark_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MARK).write_bytes(content)
    (tmp_path / "photo.parquet").write_bytes(b"mine")
    with pytest.raises(InputError, match=re.escape(str(tmp_path / MARK))) as error, claim(tmp_path):
        pass
    assert str(error.value).isprintable()
    assert contents(tmp_path) == {MARK: content, "photo.parquet": b"mine"}


def test_one_process_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(InputError, match="another process is writing it")
    with claim(tmp_path / "out"), refused, claim(tmp_path / "out"):
        pass


def test_what_is_torn_where_nothing_can_be_locked_is_refused(tmp_path: Path) -> None:
    output = whole(tmp_path / "out")
    torn = write(output, "2", "e")
    torn.write_bytes(torn.read_bytes()[:-50])
    remote = SubTreeFileSystem(str(tmp_path), LocalFileSystem())  # no local one, as S3 is none
    refused = pytest.raises(InputError, match="is cut short: its job was killed, or still writes it")
    with refused, claimed(remote, "out", COLUMNS, IDENTITY):
        pass
    assert torn.exists()
    torn.unlink()
    with claimed(remote, "out", COLUMNS, IDENTITY) as output:
        assert len(output.done) == 4


def test_pictures_that_are_there_twice(tmp_path: Path) -> None:
    output = whole(tmp_path / "out")
    write(output, "2", "a")
    with claim(tmp_path / "out") as output, pytest.raises(InputError, match="has some pictures twice"):
        count(output, distinct=True)
    assert count(output, distinct=False) == (5, 0)
