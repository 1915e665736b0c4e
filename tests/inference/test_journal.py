"""Vector files, as the libraries that read them see them, and the journal of an interrupted run."""

import errno
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from pyarrow import parquet
from safetensors import safe_open

from vitlite.errors import InputError, MissingExtraError
from vitlite.inference import journal as journals
from vitlite.inference.journal import WRITERS, Journal, Picture, check_names, check_target, open_journal

RUN = {"sha256": "ab", "dtype": "float32"}
ROWS = {"a.jpg": [1.0, -2.5, 1 / 3], "über/b.png": [0.0, 1e-30, 3e38], "c": [1.0, 2.0, 3.0]}


def files(*names: str) -> list[Picture]:
    return [Picture(name, 10, 20, 30, 40) for name in names]


ALL = files(*ROWS)


def add(journal: Journal, *names: str) -> None:
    journal.add(files(*names), b"".join(struct.pack("<3f", *ROWS[name]) for name in names))


def whole(target: Path) -> Path:
    with Journal(target, RUN) as journal:
        add(journal, "a.jpg", "über/b.png")
        add(journal, "c")
        assert journal.finish(ALL, {"model": "m"}) == 3
    return target


def read(target: Path) -> tuple[list[str], np.ndarray]:
    if target.suffix == ".npz":
        with np.load(target) as arrays:  # allow_pickle is off
            return arrays["paths"].tolist(), arrays["vectors"]
    if target.suffix == ".npy":
        array = np.load(target)
        return array["path"].tolist(), np.ascontiguousarray(array["vector"])
    if target.suffix == ".parquet":
        columns = parquet.read_table(target)
        assert columns.schema.metadata[b"model"] == b"m"
        return columns["path"].to_pylist(), np.stack(columns["vector"].to_numpy(zero_copy_only=False))
    if target.suffix == ".jsonl":
        rows = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
        return [row["path"] for row in rows], np.array([row["vector"] for row in rows], dtype=np.float32)
    with safe_open(target, "np") as file:
        assert file.metadata()["model"] == "m"
        return json.loads(file.metadata()["paths"]), file.get_tensor("vectors")


@pytest.mark.parametrize("suffix", WRITERS)
def test_other_libraries_read_the_file(tmp_path: Path, suffix: str) -> None:
    paths, vectors = read(whole(tmp_path / f"out{suffix}"))
    assert paths == list(ROWS)
    assert vectors.dtype == np.float32
    assert (vectors == np.array(list(ROWS.values()), dtype=np.float32)).all()
    assert os.listdir(tmp_path) == [f"out{suffix}"]  # neither journal nor temporary file


NOT_UNICODE = os.fsdecode(b"caf\xe9.jpg")  # as Linux may have it


@pytest.mark.parametrize("suffix", [suffix for suffix in WRITERS if suffix != ".parquet"])
def test_names_that_are_no_unicode(tmp_path: Path, suffix: str) -> None:
    name = NOT_UNICODE
    check_names(tmp_path / f"out{suffix}", [name])
    with Journal(tmp_path / f"out{suffix}", RUN) as journal:
        journal.add(files(name), struct.pack("<3f", 1, 2, 3))
        journal.finish(files(name), {"model": "m"})
    paths, _ = read(tmp_path / f"out{suffix}")
    assert paths == [name]


def test_names_that_are_no_unicode_are_refused_for_parquet(tmp_path: Path) -> None:
    """Written in other letters, one could be the name of another picture."""
    with pytest.raises(
        InputError, match=r"caf\\udce9\.jpg is a name that is no Unicode, .*ends in \.safetensors, \.npz"
    ):
        check_names(tmp_path / "out.parquet", ["caf\\xe9.jpg", NOT_UNICODE])
    check_names(tmp_path / "out.parquet", ["caf\\xe9.jpg", "café.jpg"])


@pytest.mark.parametrize("suffix", WRITERS)
def test_more_vectors_than_are_written_together(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "ROW_GROUP", 2)
    paths, vectors = read(whole(tmp_path / f"out{suffix}"))
    assert paths == list(ROWS)
    assert (vectors == np.array(list(ROWS.values()), dtype=np.float32)).all()


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"Writing Parquet needs .* pip install 'vitlite\[parquet\]'"):
        journals.check_target(tmp_path / "out.parquet")


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_run_cut_anywhere_continues_to_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    expected = whole(tmp_path / f"whole{suffix}").read_bytes()
    target = tmp_path / f"out{suffix}"
    with Journal(target, RUN) as journal:
        add(journal, "a.jpg", "über/b.png")
        first = journal.path.stat().st_size
        add(journal, "c")
    written = journal.path.read_bytes()
    for cut in (0, 3, first - 1, first, first + 1, len(written) - 1, len(written)):
        journal.path.write_bytes(written[:cut])
        with Journal(target, RUN) as once:  # stopped a second time
            if ALL[0] not in once.done:
                add(once, "a.jpg", "über/b.png")
        with Journal(target, RUN) as again:
            assert ALL[0] in again.done
            if ALL[2] not in again.done:
                add(again, "c")
            again.finish(ALL, {"model": "m"})
        assert target.read_bytes() == expected


def test_only_what_is_asked_for_is_written(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.npz", RUN) as journal:
        add(journal, "a.jpg", "c")
        assert journal.finish(files("c", "never seen"), {}) == 1
    assert read(tmp_path / "out.npz")[0] == ["c"]


def test_rows_come_as_they_are_asked_for(tmp_path: Path) -> None:
    """Also where a later run has put one in that was broken, or changed."""
    with Journal(tmp_path / "out.npz", RUN) as journal:
        add(journal, "c", "a.jpg")
        add(journal, "über/b.png")
        journal.finish(ALL, {})
    paths, rows = read(tmp_path / "out.npz")
    assert paths == list(ROWS)
    assert (rows == np.array(list(ROWS.values()), dtype=np.float32)).all()


def test_of_two_versions_of_a_picture_the_one_asked_for_is_written(tmp_path: Path) -> None:
    old, new = files("a.jpg")[0], Picture("a.jpg", 10, 21, 31, 40)
    for asked, value in ((old, 1), (new, 2)):
        with Journal(tmp_path / "out.npz", RUN) as journal:
            journal.add([old], struct.pack("<f", 1))
            journal.add([new], struct.pack("<f", 2))
            assert journal.finish([asked], {}) == 1
        paths, rows = read(tmp_path / "out.npz")
        assert (paths, rows.tolist()) == (["a.jpg"], [[value]])


def test_a_flipped_byte_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    """It is refused, or cut off with its line and done again; no vector of other numbers is ever written."""
    expected = whole(tmp_path / "whole.npz").read_bytes()
    with Journal(tmp_path / "out.npz", RUN) as journal:
        add(journal, "a.jpg", "über/b.png")
        add(journal, "c")
    written = journal.path.read_bytes()
    vector = written.index(b'"vectors": "') + 15
    damaged = written[:vector] + bytes([written[vector] ^ 1]) + written[vector + 1 :]
    journal.path.write_bytes(damaged)
    with pytest.raises(InputError, match=r"out\.npz\.partial, line 2: its checksum is that of other content"):
        Journal(tmp_path / "out.npz", RUN)
    refused = 0
    for place in range(len(written)):
        journal.path.write_bytes(written[:place] + bytes([written[place] ^ 1]) + written[place + 1 :])
        try:
            with Journal(tmp_path / "out.npz", RUN) as again:
                add(again, *(picture.path for picture in again.missing(ALL)))
                again.finish(ALL, {"model": "m"})
            assert (tmp_path / "out.npz").read_bytes() == expected
        except InputError:
            refused += 1
    assert refused > len(written) - 20


def test_a_journal_of_an_older_vitlite_has_no_checksum(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole.npz").read_bytes()
    with Journal(tmp_path / "out.npz", RUN) as journal:
        add(journal, "a.jpg", "über/b.png")
        add(journal, "c")
    written = journal.path.read_bytes()
    older = re.sub(rb', "crc32": \d+', b"", written)
    assert len(older) < len(written)
    journal.path.write_bytes(older)
    with Journal(tmp_path / "out.npz", RUN) as again:
        assert again.finish(ALL, {"model": "m"}) == 3
    assert (tmp_path / "out.npz").read_bytes() == expected


def test_a_replaced_file_is_another_picture(tmp_path: Path) -> None:
    path, other = tmp_path / "a.bmp", tmp_path / "b.bmp"
    for file in (path, other):
        file.write_bytes(b"1234")
        os.utime(file, ns=(0, 0))  # as out of an archive
    before = Picture.at(str(path))
    assert before == Picture.at(str(path))
    other.replace(path)
    assert Picture.at(str(path)) != before
    assert Picture.at(str(other)) == Picture(str(other), -1, -1, -1, -1)
    assert Picture.at("a\0b").size == -1


def test_pictures_under_a_link_that_leads_elsewhere_are_others(tmp_path: Path) -> None:
    """Of one size, and written in one tick of the disk's clock, as may be out of an archive: then times are equal."""
    link = tmp_path / "now"
    seen = []
    for folder in (tmp_path / "before", tmp_path / "after"):
        folder.mkdir()
        (folder / "a.bmp").write_bytes(b"1234")
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        seen.append(Picture.at(str(link / "a.bmp"))._replace(mtime_ns=0, ctime_ns=0))
    assert seen[0] != seen[1]


def test_a_full_disk_costs_no_vector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.npz"

    def write(file: BinaryIO, *_: object) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal(target, RUN) as journal, monkeypatch.context() as patch:
        add(journal, *ROWS)
        patch.setitem(journals.WRITERS, ".npz", write)
        with pytest.raises(
            InputError, match=r"out\.npz: No space left on device\. The vectors stay in .*partial: make"
        ):
            journal.finish(ALL, {})
    assert os.listdir(tmp_path) == ["out.npz.partial"]
    with Journal(target, RUN) as journal:
        assert journal.finish(ALL, {}) == 3


def test_a_run_without_any_vector_leaves_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.npz", RUN) as journal:
        journal.add([], b"", ["broken.png"])
        with pytest.raises(InputError, match="no picture could be read"):
            journal.finish(files("broken.png"), {})
    assert os.listdir(tmp_path) == []


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    refused = pytest.raises(InputError, match=r"^target .*out\.npz: another process is writing it\. Wait for it")
    with open_journal(target, RUN):
        with refused, open_journal(target, RUN):
            pass
        with refused, open_journal(target, RUN):  # the first refusal took nothing away
            pass
        with open_journal(tmp_path / "other.npz", RUN):
            pass
    assert os.listdir(tmp_path) == []
    with pytest.raises(ZeroDivisionError), open_journal(target, RUN):
        raise ZeroDivisionError
    with open_journal(target, RUN):
        pass


def test_what_is_missing_and_what_was_tried(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.npz", RUN) as journal:
        assert (journal.missing(ALL), journal.tried) == (ALL, set())
        journal.add(files("c"), struct.pack("<3f", *ROWS["c"]), ["a.jpg"])
    with Journal(tmp_path / "out.npz", RUN) as journal:
        assert (journal.missing(ALL), journal.tried) == (ALL[:2], {"a.jpg", "c"})


def test_a_journal_that_something_else_changed(tmp_path: Path) -> None:
    with Journal(tmp_path / "other.npz", RUN) as other:
        add(other, "c")
    with Journal(tmp_path / "out.npz", RUN) as journal:
        add(journal, "a.jpg")
        journal.path.write_bytes(other.path.read_bytes())
        other.path.unlink()
        with pytest.raises(InputError, match=r"out\.npz\.partial was changed while it was in use\. Delete it"):
            journal.finish(files("a.jpg"), {})
    assert os.listdir(tmp_path) == ["out.npz.partial"]


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"out\.txt: the name must end in one of \.safetensors, \.npz, \.npy, \.jsonl, \.parquet"
    ):
        check_target(tmp_path / "out.txt")
    with pytest.raises(InputError, match="there is no folder"):
        check_target(tmp_path / "none" / "out.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        check_target(tmp_path / "folder.npz")
    target = tmp_path / "out.npz"
    with Journal(target, RUN) as journal:
        add(journal, "c")
    with pytest.raises(InputError, match=r"left by a run with another dtype\. Repeat that command"):
        Journal(target, RUN | {"dtype": "bfloat16"})
    with Journal(target, RUN) as journal, pytest.raises(InputError, match="nothing to write"):
        journal.finish([], {})
    (tmp_path / "out.npz.partial").write_text("hello\n")
    with pytest.raises(InputError, match="not the journal of an interrupted run"):
        Journal(target, RUN)


LINE = {"pictures": [["a.jpg", 10, 20, 30, 40]], "vectors": "AACAPw==", "broken": []}


@pytest.mark.parametrize(("change", "said"), [
    ({"pictures": 5}, "pictures must be a list"), ({"pictures": ["a.jpg"]}, r"pictures\[0\] must be a picture"),
    ({"pictures": [["a.jpg", 10, 20, 30]]}, r"pictures\[0\] must be a picture"),
    ({"pictures": [[5, 10, 20, 30, 40]]}, r"pictures\[0\]\[0\] must be the path of a picture, got 5"),
    ({"pictures": [["a", 1.5, 2, 3, 4]]}, r"pictures\[0\]\[1\] must be a whole number"),
    ({"pictures": [["a", True, 2, 3, 4]]}, r"pictures\[0\]\[1\] must be a whole number"),
    ({"pictures": [["a", 10**4000, 2, 3, 4]]}, r"pictures\[0\]\[1\] must be a whole number"),
    ({"pictures": []}, "4 bytes of vectors for 0 pictures"), ({"vectors": ""}, "0 bytes of vectors for 1 pictures"),
    ({"vectors": "AAA="}, "2 bytes of vectors for 1"), ({"vectors": 3}, "vectors must be a text"),
    ({"vectors": "*" * 8}, "vectors must be base64"), ({"vectors": "AACAPw==" * 2}, "vectors must be base64"),
    ({"vectors": "AACAPwAAgD8="}, "8 bytes of vectors for 1 pictures"),  # others have one number
    ({"broken": {}}, "broken must be a list"), ({"broken": [None]}, r"broken\[0\] must be the path"),
    ({"pictures": [["\x1b[31m" * 10**5, 1, 2, 3, 4]]}, r"pictures\[0\]\[0\] must .* got '\\x1b\[31m.* letters\)\."),
])  # fmt: skip
def test_a_line_of_another_kind(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    target = tmp_path / "out.npz"
    partial = tmp_path / "out.npz.partial"
    lines = [json.dumps(line) + "\n" for line in (RUN, LINE, LINE | {"pictures": [["b", 1, 2, 3, 4]]} | change)]
    partial.write_text("".join(lines))
    before = partial.read_bytes()
    with pytest.raises(InputError, match=rf"out\.npz\.partial, line 3: {said}") as error:
        Journal(target, RUN)
    assert "Move it away." in str(error.value)
    assert len(str(error.value)) < 1000
    assert str(error.value).isprintable()
    assert partial.read_bytes() == before


@pytest.mark.parametrize("content", [
    b"what another program is loading", b"PK\x03\x04 without an end", b"{", b"\0" * 20 + b"x",
    b'{"sha256": "cd", "dtype": "float32"}', b'{"sha256": "ab", "dtype": "float32"}\n{"other": ',
])  # fmt: skip
def test_a_file_of_somebody_else_is_not_cut(tmp_path: Path, content: bytes) -> None:
    """It bears the journal's name, and its last line has no end, as a torn one of ours."""
    partial = tmp_path / "out.npz.partial"
    partial.write_bytes(content)
    if json.dumps(RUN).encode().startswith(content):
        with Journal(tmp_path / "out.npz", RUN) as journal:
            assert not journal.done
        return
    with pytest.raises(InputError, match=r"it has no end, and is none that vitlite began.*Move it away"):
        Journal(tmp_path / "out.npz", RUN)
    assert partial.read_bytes() == content


def test_what_a_lost_power_supply_leaves(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    with Journal(target, RUN) as journal:
        add(journal, "c")
    with journal.path.open("ab") as file:
        file.write(bytes(1000))
    with Journal(target, RUN) as journal:
        assert journal.finish(files("c"), {}) == 1


def test_one_is_not_true(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    with Journal(target, RUN | {"fast": True}) as journal:
        add(journal, "c")
    with pytest.raises(InputError, match="by a run with another fast"):
        Journal(target, RUN | {"fast": 1})


def test_a_batch_too_large_for_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "MOST_LINE", 100)
    with (
        pytest.raises(InputError, match=r"A batch takes \d+ bytes, and may take 100\. Choose a smaller one"),
        Journal(tmp_path / "out.npz", RUN) as journal,
    ):
        journal.add(ALL, bytes(300))
    assert os.listdir(tmp_path) == []


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """SIGKILL in the middle of writing batches: what stands in the journal is whole."""
    code = (
        "import struct, sys; from pathlib import Path; from vitlite.inference.journal import Journal, Picture\n"
        "j = Journal(Path(sys.argv[1]), {})\n"
        "for i in range(10**6):\n"
        "    j.add([Picture(str(i), 0, 0, 0, 0)], struct.pack('<64f', *[i] * 64)); print(i, flush=True)"
    )
    target = tmp_path / "out.npz"
    process = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = 0
    for line in process.stdout:
        last = int(line)
        if last == 50:
            process.kill()
            break
    process.stdout.close()
    process.wait()
    with Journal(target, {}) as journal:
        done = journal.done
        assert {Picture(str(i), 0, 0, 0, 0) for i in range(last + 1)} <= done
        journal.finish(sorted(done), {})
    paths, vectors = read(target)
    assert all((row == float(path)).all() for path, row in zip(paths, vectors, strict=True))


def test_more_names_than_a_safetensors_file_can_be_read_with_are_refused_at_once(tmp_path: Path) -> None:
    target, many = tmp_path / "x.safetensors", 11_000
    most = [f"{i:08991d}" for i in range(many)]  # and quotes, a comma, a space
    check_names(target, most)
    with target.open("wb") as file:
        WRITERS[".safetensors"](file, most, iter([bytes(4)] * many), {"identity": "x" * 10_000})
    with safe_open(target, "pt") as opened:
        assert json.loads(opened.metadata()["paths"]) == most
    with pytest.raises(
        InputError, match=r"names of 11100 pictures take \d+ bytes, .* ends in .npz, .npy, .jsonl or .par"
    ):
        check_names(target, [*most, *most[:100]])
    check_names(tmp_path / "x.npz", [*most, *most[:100]])
