"""Vector files, as the libraries that read them see them, and the journal of an interrupted run."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors import safe_open

from vitlite.errors import InputError, MissingExtraError
from vitlite.inference import journal as journals
from vitlite.inference.journal import WRITERS, ImageFile, Journal, check_names, check_target, open_journal

RUN = {"weights": "ab", "dtype": "float32"}
ROWS = {"a.jpg": [1.0, -2.5, 1 / 3], "über/b.png": [0.0, 1e-30, 3e38], "c": [1.0, 2.0, 3.0]}


def files(*names: str) -> list[ImageFile]:
    return [ImageFile(name, 10, 20) for name in names]


ALL = files(*ROWS)


def add(journal: Journal, *names: str) -> None:
    journal.add(files(*names), [torch.tensor(ROWS[name]) for name in names])


def write_all(target: Path) -> Path:
    with Journal(target, RUN, 3) as journal:
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


@pytest.mark.parametrize("chunk", [2, 2**14])
@pytest.mark.parametrize("suffix", WRITERS)
def test_other_libraries_read_the_file(
    tmp_path: Path, suffix: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "CHUNK", chunk)
    paths, vectors = read(write_all(tmp_path / f"out{suffix}"))
    assert paths == list(ROWS)
    assert vectors.dtype == np.float32
    assert (vectors == np.array(list(ROWS.values()), dtype=np.float32)).all()
    assert os.listdir(tmp_path) == [f"out{suffix}"]  # neither journal nor temporary file


@pytest.mark.parametrize("suffix", WRITERS)
def test_names_that_are_not_unicode(tmp_path: Path, suffix: str) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    with Journal(tmp_path / f"out{suffix}", RUN, 3) as journal:
        journal.add(files(name), [torch.zeros(3)])
        journal.finish(files(name), {"model": "m"})
    assert read(tmp_path / f"out{suffix}")[0] == ["caf?.jpg" if suffix == ".parquet" else name]


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"Writing a Parquet file needs .* pip install 'vitlite\[parquet\]'"):
        check_target(tmp_path / "out.parquet")


def sizes(journal: Journal) -> tuple[int, int]:
    return (journal.folder / "images.jsonl").stat().st_size, (journal.folder / "vectors.f32").stat().st_size


def content(target: Path) -> bytes:
    if target.suffix != ".safetensors":  # whose library writes the metadata in any order
        return target.read_bytes()
    paths, vectors = read(target)
    return json.dumps(paths).encode() + vectors.tobytes()


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_run_cut_anywhere_continues_to_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    expected = content(write_all(tmp_path / f"whole{suffix}"))
    target = tmp_path / f"out{suffix}"
    with Journal(target, RUN, 3) as journal:
        identity = sizes(journal)
        add(journal, "a.jpg", "über/b.png")
        first = sizes(journal)
        add(journal, "c")
        last = sizes(journal)
    images, vectors = ((journal.folder / name).read_bytes() for name in ("images.jsonl", "vectors.f32"))
    cuts = [(0, 0), (3, 0), identity, (identity[0], 5), (first[0] - 1, first[1]), first, (first[0], first[1] + 5),
            (first[0], last[1]), (last[0] - 1, last[1]), last]  # fmt: skip
    for lines, rows in cuts:
        journal.folder.mkdir(exist_ok=True)
        (journal.folder / "images.jsonl").write_bytes(images[:lines])
        (journal.folder / "vectors.f32").write_bytes(vectors[:rows])
        with Journal(target, RUN, 3) as once:  # stopped a second time
            if ALL[0] not in once.rows:
                add(once, "a.jpg", "über/b.png")
        with Journal(target, RUN, 3) as again:
            assert ALL[0] in again.rows
            if ALL[2] not in again.rows:
                add(again, "c")
            again.finish(ALL, {"model": "m"})
        assert content(target) == expected
        assert not journal.folder.exists()


def test_lines_whose_rows_are_missing_are_dropped(tmp_path: Path) -> None:
    """A journal is removed file by file, and a kill may leave one of them."""
    with Journal(tmp_path / "out.npz", RUN, 3) as journal:
        add(journal, "a.jpg")
        add(journal, "c")
    (journal.folder / "vectors.f32").unlink()
    with Journal(tmp_path / "out.npz", RUN, 3) as journal:
        assert not journal.rows


def test_zeros_after_a_power_failure_are_dropped(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.npz", RUN, 3) as journal:
        add(journal, "c")
    for name in ("images.jsonl", "vectors.f32"):
        with (journal.folder / name).open("ab") as file:
            file.write(bytes(1000))
    with Journal(tmp_path / "out.npz", RUN, 3) as journal:
        assert journal.finish(files("c"), {}) == 1


def test_rows_have_the_requested_order(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.npz", RUN, 3) as journal:
        add(journal, "c", "a.jpg")
        add(journal, "über/b.png")
        assert journal.finish([ALL[0], *files("never seen"), ALL[2]], {}) == 2
    paths, rows = read(tmp_path / "out.npz")
    assert paths == ["a.jpg", "c"]
    assert (rows == np.array([ROWS["a.jpg"], ROWS["c"]], dtype=np.float32)).all()
    assert os.listdir(tmp_path) == ["out.npz"]


def test_a_changed_file_is_another_image(tmp_path: Path) -> None:
    path = tmp_path / "a.bmp"
    path.write_bytes(b"1234")
    old = ImageFile.at(str(path))
    assert old == ImageFile.at(str(path))
    os.utime(path, ns=(0, 0))
    new = ImageFile.at(str(path))
    assert new != old
    assert ImageFile.at(str(tmp_path / "none")).size == ImageFile.at("a\0b").size == -1
    for image, value in ((old, 1), (new, 2)):
        with Journal(tmp_path / "out.npz", RUN, 1) as journal:
            journal.add([old], [torch.ones(1)])
            journal.add([new], [2 * torch.ones(1)])
            assert journal.finish([image], {}) == 1
        assert read(tmp_path / "out.npz")[1].tolist() == [[value]]


def test_a_full_disk_keeps_the_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.npz"

    def write(temporary: Path, *_: object) -> None:
        temporary.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal(target, RUN, 3) as journal, monkeypatch.context() as patch:
        add(journal, *ROWS)
        patch.setitem(journals.WRITERS, ".npz", write)
        with pytest.raises(InputError, match=r"out\.npz: No space left on device\. The vectors are kept in .*partial"):
            journal.finish(ALL, {})
    assert os.listdir(tmp_path) == ["out.npz.partial"]
    with Journal(target, RUN, 3) as journal:
        assert journal.finish(ALL, {}) == 3


def test_a_run_without_vectors_leaves_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.npz", RUN, 3) as journal:
        journal.add([], [], ["broken.png"])
        with pytest.raises(InputError, match="No image could be read"):
            journal.finish(files("broken.png"), {})
    assert os.listdir(tmp_path) == []


def test_failed_images_are_remembered(tmp_path: Path) -> None:
    for _ in range(2):
        with Journal(tmp_path / "out.npz", RUN, 3) as journal:
            if not journal.rows:
                journal.add(files("c"), [torch.ones(3)], ["a.jpg"])
            assert (set(journal.rows), journal.failed) == (set(files("c")), {"a.jpg"})


def test_one_process_at_a_time(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    with open_journal(target, RUN, 3):
        refused = pytest.raises(InputError, match=r"Another process is writing .*out\.npz\. Wait until it finishes")
        with refused, open_journal(target, RUN, 3):
            pass
        with open_journal(tmp_path / "other.npz", RUN, 3):
            pass
    with pytest.raises(ZeroDivisionError), open_journal(target, RUN, 3):
        raise ZeroDivisionError
    (tmp_path / "out.npz.partial").write_text("another program's")
    with pytest.raises(InputError, match=r"Cannot write .*out\.npz\.partial"), open_journal(target, RUN, 3):
        pass
    assert (tmp_path / "out.npz.partial").read_text() == "another program's"


def test_targets_that_cannot_be_written(tmp_path: Path) -> None:
    for name, reason in (
        (
            "out.txt",
            r"extension is not supported\. Choose a name that ends in \.safetensors, \.npz, \.npy, \.jsonl, \.parquet",
        ),
        ("none/out.npz", "there is no folder"),
        ("folder.npz", "it is "),
    ):
        (tmp_path / "folder.npz").mkdir(exist_ok=True)
        with pytest.raises(InputError, match=reason):
            check_target(tmp_path / name)


def test_a_journal_of_another_run_is_an_error(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    with Journal(target, RUN, 3) as journal:
        add(journal, "c")
    with pytest.raises(
        InputError, match=r"these settings have changed: dtype\. Use the same model, options and inputs"
    ):
        Journal(target, RUN | {"dtype": "bfloat16"}, 3)
    with Journal(target, RUN, 3) as journal:
        assert journal.finish(files("c"), {}) == 1


@pytest.mark.parametrize("line", [
    "{", "5", "null", "{}", '{"images": 5, "failed": []}', '{"images": [["a", 1]], "failed": []}',
    '{"images": [], "failed": [[]]}', '{"images": [[[], 1, 2]], "failed": []}', "[" * 10**5,
])  # fmt: skip
def test_a_damaged_line_is_an_error(tmp_path: Path, line: str) -> None:
    with Journal(tmp_path / "out.npz", RUN, 3) as journal:
        add(journal, "c")
    with (journal.folder / "images.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(
        InputError,
        match=r"journal of an earlier run is damaged in .*images\.jsonl, line 3\. Delete .*out\.npz\.partial",
    ):
        Journal(tmp_path / "out.npz", RUN, 3)


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """The journal of a process that is killed while it writes has complete batches."""
    code = (
        "import sys, torch; from pathlib import Path; from vitlite.inference.journal import ImageFile, Journal\n"
        "j = Journal(Path(sys.argv[1]), {}, 64)\n"
        "for i in range(10**6):\n"
        "    j.add([ImageFile(str(i), 0, 0)], [torch.full((64,), float(i))]); print(i, flush=True)"
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
    with Journal(target, {}, 64) as journal:
        done = list(journal.rows)
        assert done[: last + 1] == [ImageFile(str(i), 0, 0) for i in range(last + 1)]
        journal.finish(done, {})
    paths, vectors = read(target)
    assert all((row == float(path)).all() for path, row in zip(paths, vectors, strict=True))


def test_more_names_than_a_safetensors_header_holds(tmp_path: Path) -> None:
    target, many = tmp_path / "x.safetensors", 11_000
    most = [f"{i:08991d}" for i in range(many)]  # and quotes, a comma, a space
    check_names(target, most)
    WRITERS[".safetensors"](target, most, np.zeros((many, 1), "<f4"), {"identity": "x" * 10_000})
    with safe_open(target, "pt") as opened:
        assert json.loads(opened.metadata()["paths"]) == most
    with pytest.raises(InputError, match=r"paths of 11100 images take [\d,]+ bytes, .* Write \.npz"):
        check_names(target, [*most, *most[:100]])
    check_names(tmp_path / "x.npz", [*most, *most[:100]])


def test_memory_does_not_grow_with_the_vectors(tmp_path: Path) -> None:
    """Rows out of order are rearranged on the disk. Pages of mapped files do not count: the system may drop them."""
    code = """
import sys, threading, time, torch
from pathlib import Path
import numpy, pyarrow.parquet, safetensors.numpy
from vitlite.inference import journal as journals
from vitlite.inference.journal import ImageFile, Journal

def allocated():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) // 1024

def watch():
    while not done.wait(0.002):
        peaks.append(allocated())

journals.CHUNK = 256
images = [ImageFile(str(i), 0, 0) for i in range(10_000)]
for suffix in (".safetensors", ".npz", ".npy", ".parquet"):
    with Journal(Path(sys.argv[1], "out" + suffix), {}, 3072) as journal:
        for start in range(0, len(images), 1000):
            journal.add(images[start : start + 1000], list(torch.rand(1000, 3072)))
        done, peaks, before = threading.Event(), [0], allocated()
        watcher = threading.Thread(target=watch)
        watcher.start()
        journal.finish(images[::-1], {})
        done.set()
        watcher.join()
        print(suffix, max(peaks) - before)
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    for line in result.stdout.splitlines():
        assert int(line.split()[1]) < 90, result.stdout  # MB; the vectors have 120
