"""`--engine ray` on a cluster of several nodes on this machine, some of which are killed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import small_model
from PIL import Image

import vitlite
from vitlite.cli.main import main
from vitlite.errors import ImageError, InputError

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own, of its own settings
]

from ray.cluster_utils import Cluster  # noqa: E402

from vitlite.cluster.jobs import Actors, classify_images, embed_images  # noqa: E402
from vitlite.cluster.ray import Classifier, Embedder  # noqa: E402
from vitlite.cluster.sources import find_source  # noqa: E402

COUNT = 300
BROKEN = "0005.png"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
LIMIT = 240  # seconds a test, where it takes some 20
STORE = 100 << 20  # bytes of shared memory a node


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """End a test whose job hangs, and the cluster with it."""

    def hangs(*_: object) -> None:
        pytest.fail(f"not finished within {LIMIT} s")  # no Exception, which the command would take for its own

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random model."""
    return small_model(tmp_path_factory.mktemp("model"), tuple("abcdefg"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images, one of them broken."""
    folder = tmp_path_factory.mktemp("images")
    noise = torch.Generator().manual_seed(0)
    for i in range(COUNT):
        pixels = torch.randint(0, 256, (24, 32, 3), dtype=torch.uint8, generator=noise)
        Image.fromarray(pixels.numpy()).save(folder / f"{i:04}.png")
    (folder / BROKEN).write_bytes(b"\x89PNG and no more")
    return folder


@pytest.fixture(scope="module")
def vectors(model: Path, images: Path) -> dict[str, torch.Tensor]:
    """The vectors that a single process computes."""
    paths = sorted(str(path) for path in images.iterdir() if path.name != BROKEN)
    loaded = vitlite.load(model)
    with torch.no_grad():
        return dict(zip(paths, loaded.embed(loaded.preprocess(paths)), strict=True))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without cores, and two nodes with one core each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
        try:
            for _ in range(2):
                made.add_node(num_cpus=1, object_store_memory=STORE)
            ray.init(address=made.address, log_to_driver=False)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def check(out: Path, vectors: dict[str, torch.Tensor], images: Path) -> None:
    """Check that every image has one row, the broken one an error, and the others the vectors of a single process."""
    rows = pq.read_table(out)
    assert rows.column_names == ["path", "vector", "error"]
    assert sorted(rows["path"].to_pylist()) == sorted(str(path) for path in images.iterdir())
    found = {row["path"]: row for row in rows.to_pylist()}
    broken = found.pop(str(images / BROKEN))
    assert broken["vector"] is None
    assert BROKEN in broken["error"]
    for path, row in found.items():
        assert row["error"] is None
        torch.testing.assert_close(torch.tensor(row["vector"]), vectors[path], rtol=1e-5, atol=1e-5)


def embed(model: Path, source: object, out: Path, *more: str) -> int:
    return main(["embed", str(source), "--engine", "ray", "--out", str(out), "--model", str(model), *more])


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until a job has done something."""
    while not happened():
        assert process.poll() is None, "the job ended too early"
        time.sleep(0.01)


def rows_in(out: Path) -> int:
    """Return the number of rows in the complete files of the output."""
    files = [file for file in out.glob("*.parquet") if re.fullmatch(rb"PAR1.+PAR1", file.read_bytes(), re.DOTALL)]
    return sum(pq.read_metadata(file).num_rows for file in files)


@contextmanager
def slow_job(cluster: Cluster, model: Path, images: Path, out: Path, notes: Path, workers: int) -> Iterator[Any]:
    """Start `vitlite embed --engine ray`. Each actor leaves a note, and waits after three tables for the file "go"."""
    code = f"""
import os, sys, time
import ray
from vitlite.cluster import jobs
from pathlib import Path
from vitlite.cli.main import main

class Slow(jobs.Embedder):
    tables = 0
    def __call__(self, table):
        Path({str(notes)!r}, f"{{os.getpid()}}").touch()
        self.tables += 1
        while self.tables > 3 and not Path({str(notes)!r}).with_name("go").exists():
            time.sleep(0.05)
        return super().__call__(table)

jobs.Embedder, jobs.BLOCK, jobs.FILE = Slow, 16, 32
words = ["embed", {str(images)!r}, "--engine", "ray", "--workers", "{workers}"]
sys.exit(main([*words, "--out", {str(out)!r}, "--model", {str(model)!r}]))
"""
    notes.mkdir()
    environment = os.environ | QUIET | {"RAY_ADDRESS": cluster.address}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_every_image_once_if_an_actor_is_killed(
    cluster: Cluster, model: Path, images: Path, vectors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    notes, out = tmp_path / "notes", tmp_path / "out"
    with slow_job(cluster, model, images, out, notes, workers=2) as job:
        wait_for(lambda: len(list(notes.iterdir())) == 2 and rows_in(out) > 0, job)
        os.kill(int(next(notes.iterdir()).name), signal.SIGKILL)
        assert rows_in(out) < COUNT / 2
        (tmp_path / "go").touch()
        assert job.wait() == 1  # the broken image
    assert len(list(notes.iterdir())) == 3  # another took the place of the lost one
    check(out, vectors, images)


def test_every_image_once_if_a_node_is_lost(
    cluster: Cluster, model: Path, images: Path, vectors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    notes, out = tmp_path / "notes", tmp_path / "out"
    with slow_job(cluster, model, images, out, notes, workers=3) as job:
        wait_for(lambda: len(list(notes.iterdir())) == 2, job)
        node = cluster.add_node(num_cpus=1, object_store_memory=STORE)  # for the third, to which the job is no guest
        wait_for(lambda: len(list(notes.iterdir())) == 3, job)
        cluster.remove_node(node, allow_graceful=False)
        assert rows_in(out) < COUNT / 2
        (tmp_path / "go").touch()
        assert job.wait() == 1
    check(out, vectors, images)


def test_a_killed_job_resumes(
    cluster: Cluster,
    model: Path,
    images: Path,
    vectors: dict[str, torch.Tensor],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    with slow_job(cluster, model, images, out, tmp_path / "notes", workers=2) as job:
        wait_for(lambda: rows_in(out) >= 64, job)
    while ray.available_resources().get("CPU") != 2:  # until Ray has ended the job's actors
        time.sleep(0.1)
    held = rows_in(out)
    assert 0 < held < COUNT
    file = next(out.glob("*.parquet"))
    torn = file.with_name(f"{file.stem}-9.parquet")
    torn.write_bytes(file.read_bytes()[:-50])

    assert embed(model, images, out) == 1
    assert f"resuming {out}: {held} " in capsys.readouterr().err
    check(out, vectors, images)
    assert not torn.exists()
    assert embed(model, images, out) == 1
    assert f"{COUNT} images, 0 of them new" in capsys.readouterr().out
    check(out, vectors, images)
    assert embed(model, images, out, "--dtype", "bfloat16") == 1
    refusal = "was started with another model or other options. Use the same model and options, or choose another out="
    assert refusal in capsys.readouterr().err
    with pytest.raises(InputError, match=re.escape(refusal)):
        embed_images(
            vitlite.load(model),
            find_source(str(images)),
            str(out),
            Actors(dtype="bfloat16"),
            on_resume=lambda done: None,
        )


def test_files_of_other_programs_stay(
    cluster: Cluster, model: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other columns, and a file that another program is still writing."""
    pq.write_table(pa.table({"number": [1, 2, 3]}), tmp_path / "numbers.parquet")
    (tmp_path / "begun.parquet").write_bytes((tmp_path / "numbers.parquet").read_bytes()[:-20])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert embed(model, images, tmp_path) == 1
    said = f"{tmp_path} contains files that vitlite did not write, such as begun.parquet. Choose a new or empty folder"
    assert said in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_images_in_parquet_are_classified(
    cluster: Cluster, model: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = sorted(images.iterdir())[:20]
    source, out = tmp_path / "source.parquet", tmp_path / "out"
    contents = [path.read_bytes() for path in paths]
    pq.write_table(pa.table({"path": [path.name for path in paths[:8]], "bytes": contents[:8]}), source)
    words = ["classify", str(source), "--engine", "ray", "--out", str(out), "--model", str(model), "--top", "2"]
    assert main(words) == 1
    names = [path.name for path in paths] + ["nothing"]
    pq.write_table(pa.table({"path": names, "bytes": [*contents, None]}), source, row_group_size=6)
    assert main(words) == 1
    assert "21 images, 13 of them new" in capsys.readouterr().out
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "21 images, 0 of them new" in shown.out, shown.err

    rows = pq.read_table(out)
    assert rows.column_names == ["path", "labels", "scores", "error"]
    assert sorted(rows["path"].to_pylist()) == sorted(names)
    found = {row["path"]: row for row in rows.to_pylist()}
    assert found.pop("nothing")["error"] == "Cannot read nothing: the column bytes is null"
    assert BROKEN in found.pop(BROKEN)["error"]
    loaded = vitlite.load(model)
    for path in paths:
        if path.name != BROKEN:
            best = loaded.predict(path, top=2)
            assert found[path.name]["labels"] == [label for label, _, _ in best]
            assert found[path.name]["scores"] == pytest.approx([score for _, _, score in best], abs=1e-5)
    renamed, trained = vitlite.load(model), vitlite.load(model)
    renamed.labels = [f"neu {label}" for label in renamed.labels]
    with torch.no_grad():
        trained.head.weight.neg_()
    for other in (renamed, trained):  # whose vectors are the same, and whose answers are not
        with pytest.raises(InputError, match="was started with another model or other options"):
            classify_images(
                other,
                find_source(str(source)),
                str(out),
                Actors(),
                top=2,
                on_resume=lambda done: None,
            )


def test_a_list_with_missing_files(
    cluster: Cluster, model: Path, images: Path, vectors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    one = str(images / "0001.png")
    source, out = tmp_path / "list.txt", tmp_path / "out"
    source.write_text(f"{one}\n{one}\nfile://{one}\n/not/there.png\n\nnowhere://at/all.png\n")
    assert embed(model, source, out) == 1
    rows = {row["path"]: row for row in pq.read_table(out).to_pylist()}
    assert len(rows) == pq.read_table(out).num_rows == 4  # named twice, it is there once
    for path in (one, f"file://{one}"):
        torch.testing.assert_close(torch.tensor(rows[path]["vector"]), vectors[one], rtol=1e-5, atol=1e-5)
    assert rows["/not/there.png"]["error"].startswith("Cannot read /not/there.png: ")
    assert "nowhere" in rows["nowhere://at/all.png"]["error"]


def test_embedder_in_a_pipeline(cluster: Cluster, model: Path, images: Path, vectors: dict[str, torch.Tensor]) -> None:
    paths = sorted(vectors)[:30]
    data = ray.data.read_binary_files(paths, include_paths=True, ray_remote_args={"num_cpus": 0})
    options = {"batch_format": "pyarrow", "compute": ray.data.ActorPoolStrategy(size=1)}
    rows = data.map_batches(Embedder, fn_constructor_args=(ray.put(vitlite.load(model)),), **options).take_all()
    assert sorted(row["path"] for row in rows) == paths
    for row in rows:
        torch.testing.assert_close(torch.tensor(row["vector"]), vectors[row["path"]], rtol=1e-5, atol=1e-5)
        assert row["error"] is None


def test_tables_without_paths_are_errors(model: Path) -> None:
    worker = Classifier(vitlite.load(model))
    with pytest.raises(InputError, match=r"a column named path, got \['image'\]"):
        worker(pa.table({"image": [b""]}))
    with pytest.raises(InputError, match="a column named path, got dict"):
        worker({"path": ["a"]})


def test_links_in_a_folder_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    (folder / "inner").mkdir(parents=True)
    for name in ("inner/a.png", "notes.txt"):
        (folder / name).touch()
    for name in ("round", "again"):
        (folder / "inner" / name).symlink_to(folder)
    found = find_source(str(folder))
    assert found.paths is not None
    assert found.paths.to_pylist() == [str(folder / "inner" / "a.png")]
    assert found.skipped == {".txt": 1}


def test_sources_without_images(tmp_path: Path) -> None:
    table = tmp_path / "a.parquet"
    with pytest.raises(ImageError, match="There is no file or folder"):
        find_source(str(tmp_path / "nowhere"))
    with pytest.raises(ImageError, match="No images found in"):
        find_source(str(tmp_path))
    pq.write_table(pa.table({"path": pa.array([], pa.string()), "bytes": pa.array([], pa.binary())}), table)
    with pytest.raises(ImageError, match="No images found in"):
        find_source(str(table))
    pq.write_table(pa.table({"file": ["a.png"]}), table)
    with pytest.raises(InputError, match=r"has the columns .*, but none named path"):
        find_source(str(table))
