"""The output folder of a job on Ray: files of others stay, and a job resumes only in its own folder."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from vitlite.cluster.folder import LOCK, MARK, MARK_BEGUN, open_output
from vitlite.cluster.jobs import _summary
from vitlite.errors import InputError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem  # noqa: E402

COLUMNS = pa.schema([("path", pa.string()), ("vector", pa.list_(pa.float32())), ("error", pa.string())])
IDENTITY = {"weights": "ab", "dtype": None, "config": {"size": (8, 8)}}


def claim(out: Path, identity: dict[str, Any] = IDENTITY) -> Any:
    return open_output(LocalFileSystem(), str(out), COLUMNS, identity)


def write(output: Any, name: str, *paths: str, schema: Any = None) -> Path:
    """Write a file as Ray does."""
    table = pa.table({"path": paths, "vector": [[1.0]] * len(paths), "error": [None] * len(paths)})
    file = Path(output.folder, f"{output.prefix}_{name}.parquet")
    pq.write_table(table.cast(schema or output.schema), file)
    return file


def whole(out: Path) -> Any:
    """Write two files of two images."""
    with claim(out) as output:
        write(output, "0", "a", "b")
        write(output, "1", "c", "d")
    return output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_resumes_in_its_folder(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    before = whole(out)
    assert sorted(os.listdir(out)) == sorted([MARK, *(f"{before.prefix}_{i}.parquet" for i in "01")])
    with claim(out) as output:
        assert sorted(output.done.to_pylist()) == ["a", "b", "c", "d"]
        assert output.prefix == before.prefix
        assert _summary(output) == (4, 0, 0)
    assert pq.read_table(out).column_names == ["path", "vector", "error"]  # readers skip the mark


def test_files_of_a_killed_job_are_removed(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["torn.parquet", "notes.txt", ".hidden"])
def test_a_folder_of_another_program_is_an_error(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(b"PAR1 of another program that is still writing")
    before = contents(out)
    error = re.escape(
        f"The output folder {out} contains files that vitlite did not write, such as {name}. Choose a new"
    )
    with pytest.raises(InputError, match=error), claim(out):
        pass
    assert contents(out) == before


def test_files_of_other_programs_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole(out)
    pq.write_table(pa.table({"number": [1]}), out / "data.parquet")
    (out / "torn.parquet").write_bytes(b"PAR1")
    before = contents(out)
    with claim(out) as output:
        assert _summary(output) == (4, 0, 0)
    assert contents(out) == before


def test_the_folder_of_another_job_is_an_error(tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole(out)
    before = contents(out)
    wrong = f"{out}, because it was started with another model or other options. Use the same model and options"
    with pytest.raises(InputError, match=re.escape(wrong)), claim(out, {"weights": "other"}):
        pass
    assert contents(out) == before
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InputError, match="file is a file"), claim(file):
        pass
    assert file.read_text() == "mine"


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 10**5, b"\xff\xfe", b'{"prefix": "x"}', b"5"])
def test_a_damaged_mark_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MARK).write_bytes(content)
    (tmp_path / "photo.parquet").write_bytes(b"mine")
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / MARK} is damaged")), claim(tmp_path):
        pass
    assert contents(tmp_path) == {MARK: content, "photo.parquet": b"mine"}


def test_one_process_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(InputError, match="Another process is writing")
    with claim(tmp_path / "out"), refused, claim(tmp_path / "out"):
        pass


def test_an_incomplete_file_without_a_lock_is_an_error(tmp_path: Path) -> None:
    output = whole(tmp_path / "out")
    torn = write(output, "2", "e")
    torn.write_bytes(torn.read_bytes()[:-50])
    remote = SubTreeFileSystem(str(tmp_path), LocalFileSystem())  # not local, like S3
    refused = pytest.raises(InputError, match="is incomplete, because a job is still writing it or was killed")
    with refused, open_output(remote, "out", COLUMNS, IDENTITY):
        pass
    assert torn.exists()
    torn.unlink()
    with open_output(remote, "out", COLUMNS, IDENTITY) as output:
        assert len(output.done) == 4
