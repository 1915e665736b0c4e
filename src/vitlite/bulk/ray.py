"""Pictures by the million on Ray: `Embedder` and `Classifier` for Ray Data's `map_batches`, and whole jobs of them.

Scheduling, memory limits, and recovery from lost actors and nodes are Ray's. Paths travel through it, and each actor
reads its own pictures: `ray.data.read_binary_files` ends the whole job at the first file that it cannot open.
"""

import math
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from vitlite.bulk.folder import READERS, Output, claimed, count
from vitlite.bulk.local import identity_of
from vitlite.errors import ImageError, InputError, missing_extra
from vitlite.images import SUFFIXES

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem
    from ray import ObjectRef
    from ray.data import Dataset

    from vitlite.model import ViT
    from vitlite.predict import Outcomes

T = TypeVar("T")

BLOCK = 256  # paths in a unit of work: what a lost actor costs again
FILE = 4096  # rows in an output file, at least: what each killed job loses


class Embedder:
    """Gives each picture of a table its vector: columns `path`, and `bytes` if they are there -> `vector`, `error`.

    Other columns stay; `bytes` goes. A broken picture gets an error and no vector.

        ds = ray.data.read_binary_files("s3://bucket/photos", include_paths=True)
        ds.map_batches(vitlite.bulk.ray.Embedder, fn_constructor_args=(ray.put(model),), batch_format="pyarrow",
                       batch_size=256, num_cpus=1, compute=ray.data.ActorPoolStrategy(size=64))
    """

    def __init__(
        self,
        model: "ViT | ObjectRef[ViT]",
        *,
        batch: int = 32,
        dtype: str | None = None,
        device: str | None = None,
        threads: int = 1,
    ) -> None:
        """Optimizes the actor's own copy of a model.

        Args:
            model: With preprocessing, not optimized yet. `ray.put(model)` brings its weights to each node only once.
            batch: Pictures at a time.
            dtype: What to compute in, such as "bfloat16"; None: the model's own.
            device: Such as "cuda"; None: where the model is.
            threads: Of this process: the actor's `num_cpus`.
        """
        self.model, self.batch = _ready(model, dtype, device, threads), batch

    def __call__(self, table: "pa.Table") -> "pa.Table":
        import pyarrow as pa

        from vitlite.predict import embed

        table, answers, errors = _answered(table, lambda files: embed(self.model, files, self.batch))
        vectors = [None if vector is None else vector.numpy() for vector in answers]
        table = table.append_column("vector", pa.array(vectors, pa.list_(pa.float32())))
        return table.append_column("error", errors)


class Classifier:
    """Gives each picture of a table its best labels, as `Embedder` gives vectors: -> `labels`, `scores`, `error`."""

    def __init__(
        self,
        model: "ViT | ObjectRef[ViT]",
        *,
        top: int = 5,
        batch: int = 32,
        dtype: str | None = None,
        device: str | None = None,
        threads: int = 1,
    ) -> None:
        """As `Embedder`; the model has labels, and `top` is how many of them a picture gets."""
        self.model, self.top, self.batch = _ready(model, dtype, device, threads), top, batch

    def __call__(self, table: "pa.Table") -> "pa.Table":
        import pyarrow as pa

        from vitlite.predict import classify

        table, answers, errors = _answered(table, lambda files: classify(self.model, files, self.top, self.batch))
        labels = [None if best is None else [prediction.label for prediction in best] for best in answers]
        scores = [None if best is None else [prediction.score for prediction in best] for best in answers]
        table = table.append_column("labels", pa.array(labels, pa.list_(pa.string())))
        table = table.append_column("scores", pa.array(scores, pa.list_(pa.float32())))
        return table.append_column("error", errors)


def _ready(model: "ViT | ObjectRef[ViT]", dtype: str | None, device: str | None, threads: int) -> "ViT":
    """The actor's own copy of the model, where it computes, and optimized."""
    import torch

    from vitlite.model import ViT
    from vitlite.speed.optimize import optimize

    torch.set_num_threads(threads)
    if not isinstance(model, ViT):
        import ray

        model = ray.get(model)
    return optimize(model.to(device or model.device), dtype=getattr(torch, dtype) if dtype else None)


def _answered(
    table: "pa.Table", work: "Callable[[Iterator[BytesIO]], Outcomes[T]]"
) -> "tuple[pa.Table, list[T | None], pa.Array]":
    """The table without `bytes`, what `work` makes of each picture, and the errors of those that it cannot take."""
    import pyarrow as pa

    _check_table(table)
    paths = table["path"].to_pylist()
    if "bytes" in table.column_names:
        files: Iterator[BytesIO] = map(_Picture, paths, table["bytes"].to_pylist())
    else:
        files = _read_ahead(paths)
    answers: list[T | None] = []
    errors: list[str | None] = []
    for _, outcome in work(files):
        if isinstance(outcome, ImageError):
            answers.append(None)
            errors.append(str(outcome))
        else:
            answers.append(outcome)
            errors.append(None)
    kept = [name for name in table.column_names if name != "bytes"]
    return table.select(kept), answers, pa.array(errors, pa.string())


def _check_table(table: "pa.Table") -> None:
    import pyarrow as pa

    columns = table.column_names if isinstance(table, pa.Table) else ()
    if "path" not in columns:
        given = f"the columns {', '.join(columns)}" if columns else type(table).__name__
        raise InputError(
            f"This takes Arrow tables with a column path, got {given}.",
            python='In map_batches, say batch_format="pyarrow"; in read_binary_files, include_paths=True.',
        )


class _Picture(BytesIO):
    """A picture file in memory, by its name. One that could not be read says why when it is opened, as a broken one."""

    def __init__(self, name: str, content: bytes | Exception | None) -> None:
        super().__init__(content if isinstance(content, bytes) else b"")
        self.name = name
        self.error: Exception | None = None
        if not isinstance(content, bytes):
            self.error = content or InputError("the column bytes is null")

    def read(self, size: int | None = -1) -> bytes:
        if self.error:
            raise self.error
        return super().read(size)

    def __repr__(self) -> str:  # Pillow quotes it where it knows no such format
        return repr(self.name)


def _read_ahead(paths: Sequence[str]) -> Iterator[BytesIO]:
    """The pictures in their order, some of them read while others are decoded."""
    reading: deque[tuple[str, Future[bytes | Exception]]] = deque()
    with ThreadPoolExecutor(READERS, "vitlite-files") as readers:
        for path in paths:
            reading.append((path, readers.submit(_contents, path)))
            if len(reading) > READERS:
                first, content = reading.popleft()
                yield _Picture(first, content.result())
        for path, content in reading:
            yield _Picture(path, content.result())


def _contents(path: str) -> bytes | Exception:
    import pyarrow as pa

    try:
        files, place = _locate(path)
        with files.open_input_stream(place, compression=None) as file:
            return file.read()
    except (OSError, pa.ArrowException) as error:
        return error


def _locate(path: str) -> tuple["FileSystem", str]:
    """The file system of a path or URL, and what it calls the place."""
    from pyarrow.fs import LocalFileSystem

    scheme, separator, location = path.partition("://")
    if not separator:
        return LocalFileSystem(), os.path.abspath(path)
    host, _, inside = location.partition("/")
    files, root = _file_system(f"{scheme}://{host}/")
    return files, f"{root.rstrip('/')}/{inside}"


@lru_cache(maxsize=64)
def _file_system(url: str) -> tuple["FileSystem", str]:
    from pyarrow.fs import FileSystem

    return FileSystem.from_uri(url)


class Source(NamedTuple):
    """Pictures to work through.

    Attributes:
        name: The folder, list or Parquet that they are in.
        paths: Theirs, each once; None for Parquet that holds their bytes, which is read where it is needed.
        skipped: How many files of which ending a folder has beside pictures.
    """

    name: str
    paths: "pa.Array | None"
    skipped: Counter[str]


@dataclass(frozen=True)
class Actors:
    """How the actors work.

    Attributes:
        batch: Pictures at a time.
        dtype: What to compute in, such as "bfloat16"; None: the model's own.
        device: Such as "cuda"; None: where the model is.
        count: How many there are; None: one a core, or with `device="cuda"` one a GPU.
    """

    batch: int = 32
    dtype: str | None = None
    device: str | None = None
    count: int | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether each of them needs a GPU of its own."""
        return self.device is not None and self.device.startswith("cuda")


class Summary(NamedTuple):
    """What an output holds after a job: its pictures, those among them that are broken, and those that are new."""

    pictures: int
    broken: int
    new: int


class _Task(NamedTuple):
    """A kind of job: its worker with the options that decide the answers, and the type of each column of answers."""

    worker: type
    options: dict[str, Any]
    columns: dict[str, str]


def check_installed() -> None:
    """Says at once if Ray is missing."""
    try:
        import pyarrow  # noqa: F401
        import ray.data  # noqa: F401
    except ImportError as error:
        raise missing_extra("--engine ray", "ray") from error


def embed_pictures(
    model: "ViT", source: Source, out: str, actors: Actors, *, name: str, on_resume: Callable[[int], None]
) -> Summary:
    """Writes a vector for each picture into Parquet files; a job started again goes on where it stood.

    Args:
        model: With preprocessing, not optimized yet.
        source: What `find_pictures` found.
        out: The folder for the files, or its URL.
        actors: How many work, and how.
        name: What to call the model's weights where it does not know their hash.
        on_resume: Called with the number of pictures that are done already, if there are any.

    Raises:
        ImageError: The model has no preprocessing.
        InputError: The folder holds the answers of other weights or options.
    """
    from vitlite.predict import embed

    embed(model, ())  # says what the model lacks
    return _run(_Task(Embedder, {}, {"vector": "float"}), model, source, out, actors, name, on_resume)


def classify_pictures(
    model: "ViT", source: Source, out: str, actors: Actors, *, top: int, name: str, on_resume: Callable[[int], None]
) -> Summary:
    """Writes the `top` best labels of each picture, as `embed_pictures` writes vectors.

    Raises:
        ImageError: The model has no preprocessing.
        InputError: The model has no labels, or the folder holds the answers of other weights or options.
    """
    from vitlite.predict import classify

    classify(model, (), top)  # says what the model lacks
    task = _Task(Classifier, {"top": top}, {"labels": "string", "scores": "float"})
    return _run(task, model, source, out, actors, name, on_resume)


def _run(
    task: _Task,
    model: "ViT",
    source: Source,
    out: str,
    actors: Actors,
    name: str,
    on_resume: Callable[[int], None],
) -> Summary:
    """Puts the pictures that the output does not hold yet through actors, and counts what it holds then."""
    identity = identity_of(model, name, dtype=actors.dtype, fast=True) | task.options
    files, folder = _locate(out)
    with claimed(files, folder, _columns(task.columns), identity) as output:
        if len(output.done):
            on_resume(len(output.done))
        _start_ray()
        remaining, units = _remaining(source, output.done)
        if remaining is not None:
            chosen = min(actors.count or _cores_or_gpus(actors), units)
            _write(_answers(remaining, task, model, actors, chosen), output, min(max(2, chosen // 16), units))
        pictures, broken = count(output, distinct=source.paths is not None)
        return Summary(pictures, broken, pictures - len(output.done))


def _columns(answers: dict[str, str]) -> "pa.Schema":
    """The output's columns."""
    import pyarrow as pa

    fields = [("path", pa.string())]
    for name, kind in answers.items():
        fields.append((name, pa.list_(pa.type_for_alias(kind))))
    fields.append(("error", pa.string()))
    return pa.schema(fields)


def _write(answers: "Dataset", output: Output, writers: int) -> None:
    """Puts rows into new files of the folder, so many at a time."""
    from ray.data.datasource import FilenameProvider

    written = output.schema
    answers.write_parquet(
        output.folder,
        filesystem=output.files,
        filename_provider=FilenameProvider(output.prefix, "parquet"),
        min_rows_per_file=FILE,
        arrow_parquet_args_fn=lambda: {"schema": written},
        ray_remote_args={"num_cpus": 0},  # the actors have all cores
        concurrency=writers,
    )


def _start_ray() -> None:
    import ray.data

    if not ray.is_initialized():
        ray.init()
    ray.data.DataContext.get_current().enable_progress_bars = sys.stderr.isatty()


def _cores_or_gpus(actors: Actors) -> int:
    """How many of what each actor needs one of."""
    import ray

    return int(ray.cluster_resources().get("GPU" if actors.on_gpu else "CPU", 1))


def _answers(rows: "Dataset", task: _Task, model: "ViT", actors: Actors, count: int) -> "Dataset":
    """What so many actors make of the pictures."""
    import ray.data

    return rows.map_batches(
        task.worker,
        fn_constructor_args=(ray.put(model),),
        fn_constructor_kwargs=task.options | {"batch": actors.batch, "dtype": actors.dtype, "device": actors.device},
        batch_format="pyarrow",
        batch_size=BLOCK,
        num_cpus=1,
        num_gpus=1 if actors.on_gpu else None,
        compute=ray.data.ActorPoolStrategy(size=count),
    )


def find_pictures(name: str) -> Source:
    """The pictures that a folder, a list or Parquet means, also one with a URL.

    Raises:
        ImageError: There is nothing of this name, or no picture in it.
        InputError: Parquet without a column `path`.
    """
    from pyarrow.fs import FileType

    name = name.rstrip("/") or name
    files, place = _locate(name)
    kind = files.get_file_info(place).type
    if kind == FileType.NotFound:
        raise ImageError(f"No such folder, list or Parquet file: {name}")
    is_folder = kind == FileType.Directory
    inside = _files_below(files, place) if is_folder else [place]
    pictures = _pictures_among(inside, name, place)
    if pictures:
        return Source(name, _unique(pictures), _others_among(inside) if is_folder else Counter())
    if any(path.endswith(".parquet") for path in inside):
        return _source_of_parquet(name, files, place)
    if is_folder:
        raise _no_pictures(name)
    return _source_of_list(name, files, place)


def _no_pictures(name: str) -> ImageError:
    return ImageError(f"No pictures in {name}. In folders, names end in {' '.join(sorted(SUFFIXES))}.")


def _source_of_parquet(name: str, files: "FileSystem", place: str) -> Source:
    """Paths in a column, or the pictures themselves in another beside it."""
    from pyarrow import dataset

    rows = dataset.dataset(place, filesystem=files, format="parquet")
    columns = rows.schema.names
    if "path" not in columns:
        raise InputError(f"{name} needs a column path, and bytes if it holds the pictures: {columns}.")
    if "bytes" in columns and rows.count_rows() > 0:
        return Source(name, None, Counter())
    paths = rows.to_table(columns=["path"])["path"].to_pylist()
    if not paths:
        raise _no_pictures(name)
    return Source(name, _unique(paths), Counter())


def _source_of_list(name: str, files: "FileSystem", place: str) -> Source:
    """A path a line, in UTF-8 or whatever the file system writes."""
    with files.open_input_stream(place, compression=None) as file:
        content = file.read()
    if b"\0" in content:
        raise ImageError(f"{name} is no list of pictures, a path a line, and no picture by its name.")
    lines = content.decode(errors="surrogateescape").splitlines()
    paths = [line for line in lines if line.strip()]
    if not paths:
        raise _no_pictures(name)
    return Source(name, _unique(paths), Counter())


def _files_below(files: "FileSystem", folder: str) -> list[str]:
    from pyarrow.fs import FileSelector

    below = files.get_file_info(FileSelector(folder, recursive=True))
    return sorted(file.path for file in below if file.is_file)


def _pictures_among(paths: Sequence[str], name: str, place: str) -> list[str]:
    """Those that end as pictures do, under the name that was asked for: a URL stays one."""
    root = name if "://" in name else place
    suffixes = tuple(SUFFIXES)
    return [root + path.removeprefix(place) for path in paths if path.lower().endswith(suffixes)]


def _others_among(paths: Sequence[str]) -> Counter[str]:
    """How many of them end as no pictures do, by their ending, but for what is hidden."""
    shown_names = (os.path.basename(path) for path in paths if not os.path.basename(path).startswith("."))
    return Counter(suffix for name in shown_names if (suffix := os.path.splitext(name)[1].lower()) not in SUFFIXES)


def _unique(paths: Sequence[str]) -> "pa.Array":
    """Each path once, and absolute, since the cluster works elsewhere."""
    import pyarrow as pa

    absolute = [path if "://" in path else os.path.abspath(path) for path in paths]
    return pa.chunked_array([absolute], pa.string()).unique()


def _remaining(source: Source, done: "pa.Array") -> "tuple[Dataset | None, int]":
    """What is left to do as a dataset, if anything; and at most how many units of work that is."""
    import pyarrow as pa
    import ray.data

    if source.paths is None:
        return _remaining_stored(source.name, done)
    table = _without(pa.table({"path": source.paths}), done)
    units = [table.slice(start, BLOCK) for start in range(0, len(table), BLOCK)]
    return ray.data.from_arrow(units) if units else None, len(units)


def _without(table: "pa.Table", done: "pa.Array") -> "pa.Table":
    """The rows whose paths are not done."""
    import pyarrow.compute as pc

    return table.filter(pc.invert(pc.is_in(table["path"], value_set=done)))


def _remaining_stored(name: str, done: "pa.Array") -> "tuple[Dataset, int]":
    """The same of Parquet that holds the pictures, read a row group a task.

    The tasks need no core, since the actors have all of them; `ray.data.read_parquet` lists its files in one that does.
    """
    import pyarrow as pa
    import ray.data

    files, place = _locate(name)
    groups = _row_groups(files, place)
    held = ray.put(done)

    def read(tasks: pa.Table) -> Iterator[pa.Table]:
        for task in tasks.to_pylist():
            for rows in _read_row_group(files, task["file"], task["number"]):
                yield _without(rows, ray.get(held))

    tasks = [pa.table({"file": [group.file], "number": [group.number]}) for group in groups]
    pictures = sum(group.rows for group in groups)
    rows = ray.data.from_arrow(tasks).map_batches(read, batch_format="pyarrow", batch_size=None, num_cpus=0)
    return rows, math.ceil(pictures / BLOCK)


class _RowGroup(NamedTuple):
    """A part of a Parquet file that can be read alone."""

    file: str
    number: int
    rows: int


def _row_groups(files: "FileSystem", place: str) -> list[_RowGroup]:
    """Those of all files there. The files' ends, which say so, are read at the same time."""
    from pyarrow import dataset

    fragments = dataset.dataset(place, filesystem=files, format="parquet").get_fragments()
    with ThreadPoolExecutor(READERS) as readers:
        return list(chain.from_iterable(readers.map(_row_groups_of, fragments)))


def _row_groups_of(fragment: Any) -> list[_RowGroup]:
    return [_RowGroup(fragment.path, number, group.num_rows) for number, group in enumerate(fragment.row_groups)]


def _read_row_group(files: "FileSystem", path: str, number: int) -> "Iterator[pa.Table]":
    """Paths and pictures, a unit of work at a time."""
    import pyarrow as pa
    from pyarrow import parquet

    with files.open_input_file(path) as file:
        for rows in parquet.ParquetFile(file).iter_batches(BLOCK, row_groups=[number], columns=["path", "bytes"]):
            yield pa.Table.from_batches([rows])
