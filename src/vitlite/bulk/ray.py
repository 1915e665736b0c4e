"""Pictures by the million: `Embedder` and `Classifier` for Ray Data's `map_batches`, and `--engine ray` made of them.

Scheduling, memory limits, and recovery from lost actors and nodes are Ray's. Paths travel through it, and each actor
reads its own pictures: `ray.data.read_binary_files` ends the whole job at the first file that it cannot open.
"""

import json
import os
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeVar

from vitlite.bulk.local import SUFFIXES, identity
from vitlite.cli.options import open_model
from vitlite.errors import ImageError, InputError, missing_extra

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
READERS = 16  # files that an actor reads at once, since storage over a network answers late rather than slowly


class Embedder:
    """Gives each picture of a table its vector: columns `path`, and `bytes` if they are there -> `vector`, `error`.

    Other columns stay; `bytes` goes. A broken picture gets an error and no vector.

        ds = ray.data.read_binary_files("s3://bucket/photos", include_paths=True)
        ds.map_batches(vitlite.ray.Embedder, fn_constructor_args=(ray.put(model),), batch_format="pyarrow",
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

        table, outcomes, errors = _outcomes(table, lambda files: embed(self.model, files, self.batch))
        vectors = [None if vector is None else vector.numpy() for vector in outcomes]
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

        table, outcomes, errors = _outcomes(table, lambda files: classify(self.model, files, self.top, self.batch))
        labels = [None if best is None else [label for label, _, _ in best] for best in outcomes]
        scores = [None if best is None else [score for _, _, score in best] for best in outcomes]
        table = table.append_column("labels", pa.array(labels, pa.list_(pa.string())))
        table = table.append_column("scores", pa.array(scores, pa.list_(pa.float32())))
        return table.append_column("error", errors)


def _ready(model: "ViT | ObjectRef[ViT]", dtype: str | None, device: str | None, threads: int) -> "ViT":
    import torch

    from vitlite.model import ViT
    from vitlite.speed.optimize import optimize

    torch.set_num_threads(threads)
    if not isinstance(model, ViT):
        import ray

        model = ray.get(model)
    return optimize(model.to(device or model.device), dtype=getattr(torch, dtype) if dtype else None)


def _outcomes(
    table: "pa.Table", work: "Callable[[Iterator[BytesIO]], Outcomes[T]]"
) -> "tuple[pa.Table, list[T | None], pa.Array]":
    """The table without `bytes`, what `work` makes of each picture, and the errors of those that it cannot take."""
    import pyarrow as pa

    columns = table.column_names if isinstance(table, pa.Table) else ()
    if "path" not in columns:
        got = f"the columns {', '.join(columns)}" if columns else type(table).__name__
        raise InputError(
            f"This takes Arrow tables with a column path, got {got}. "
            'In map_batches, say batch_format="pyarrow"; in read_binary_files, include_paths=True.'
        )
    paths = table["path"].to_pylist()
    files = map(_Picture, paths, table["bytes"].to_pylist()) if "bytes" in columns else _read_ahead(paths)
    outcomes = [outcome for _, outcome in work(files)]
    results = [None if isinstance(outcome, ImageError) else outcome for outcome in outcomes]
    errors = [str(outcome) if isinstance(outcome, ImageError) else None for outcome in outcomes]
    kept = table.select([name for name in columns if name != "bytes"])
    return kept, results, pa.array(errors, pa.string())


class _Picture(BytesIO):
    """A picture file in memory, by its name. One that could not be read says why when it is opened, as a broken one."""

    def __init__(self, name: str, content: bytes | Exception | None) -> None:
        super().__init__(content if isinstance(content, bytes) else b"")
        self.name = name
        self.error = None if isinstance(content, bytes) else content or InputError("the column bytes is null")

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

    scheme, mark, rest = path.partition("://")
    if not mark:
        return LocalFileSystem(), os.path.abspath(path)
    host, _, inner = rest.partition("/")
    files, start = _file_system(f"{scheme}://{host}/")
    return files, f"{start.rstrip('/')}/{inner}"


@lru_cache(maxsize=64)
def _file_system(url: str) -> tuple["FileSystem", str]:
    from pyarrow.fs import FileSystem

    return FileSystem.from_uri(url)


def run_embed(args: Namespace) -> int:
    """`vitlite embed --engine ray`."""
    from vitlite.predict import embed

    return _run(args, Embedder, {}, {"vector": "float"}, lambda model: embed(model, ()))


def run_classify(args: Namespace) -> int:
    """`vitlite classify --engine ray`."""
    from vitlite.predict import classify

    answers = {"labels": "string", "scores": "float"}
    return _run(args, Classifier, {"top": args.top}, answers, lambda model: classify(model, (), args.top))


def _run(
    args: Namespace, worker: type, options: dict[str, Any], answers: dict[str, str], check: "Callable[[ViT], object]"
) -> int:
    """Puts the pictures that the output does not hold yet through actors, and says what it holds then."""
    if len(args.paths) != 1 or not args.out:
        raise InputError("--engine ray takes one folder, list or Parquet file as PATH, and --out with a folder.")
    try:
        import pyarrow as pa
        import ray.data
    except ImportError as error:
        raise missing_extra("--engine ray", "ray") from error

    begun = time.monotonic()
    paths = _paths(args.paths[0])
    model = open_model(Namespace(**vars(args) | {"fast": False, "device": None, "dtype": None}))  # left to the actors
    check(model)
    about = identity(model, args) | options | {"fast": True}
    fields = [("path", pa.string()), *((name, pa.list_(pa.type_for_alias(kind))) for name, kind in answers.items())]
    schema = pa.schema([*fields, ("error", pa.string())], {"vitlite": json.dumps(about, sort_keys=True)})
    files, place = _locate(args.out)
    done = _done(files, place, schema)
    if len(done):
        print(f"vitlite: continuing {args.out}: {len(done)} pictures are done", file=sys.stderr)

    if not ray.is_initialized():
        ray.init()
    ray.data.DataContext.get_current().enable_progress_bars = sys.stderr.isatty()
    unit = "GPU" if args.device and args.device.startswith("cuda") else "CPU"
    workers = args.workers or int(ray.cluster_resources().get(unit, 1))
    rows, most = _rows(args.paths[0], paths, done)
    if rows is not None:
        workers = min(workers, most)
        options |= {"batch": args.batch, "dtype": args.dtype, "device": args.device}
        rows.map_batches(
            worker,
            fn_constructor_args=(ray.put(model),),
            fn_constructor_kwargs=options,
            batch_format="pyarrow",
            batch_size=BLOCK,
            num_cpus=1,
            num_gpus=1 if unit == "GPU" else None,
            compute=ray.data.ActorPoolStrategy(size=workers),
        ).write_parquet(
            place,
            filesystem=files,
            min_rows_per_file=FILE,
            arrow_parquet_args_fn=lambda: {"schema": schema},
            ray_remote_args={"num_cpus": 0},  # the actors have all cores
            concurrency=min(max(2, workers // 16), most),
        )
    total, broken = _count(files, place)
    seconds, new = time.monotonic() - begun, total - len(done)
    print(f"{args.out}: {total} pictures, {broken} of them broken (column error); {new} new in {seconds:.0f} s")
    return int(broken > 0)


def _paths(source: str) -> "pa.Array | None":
    """The pictures that a folder, a list or Parquet means, each once; None for Parquet that holds their bytes."""
    import pyarrow as pa
    from pyarrow import dataset
    from pyarrow.fs import FileSelector, FileType

    files, place = _locate(source.rstrip("/"))
    kind = files.get_file_info(place).type
    if kind == FileType.NotFound:
        raise ImageError(f"No such folder, list or Parquet file: {source}")
    inside = [place]
    if kind == FileType.Directory:
        inside = sorted(file.path for file in files.get_file_info(FileSelector(place, recursive=True)) if file.is_file)
    root = source.rstrip("/") if "://" in source else place
    found = [root + path[len(place) :] for path in inside if path.lower().endswith(tuple(SUFFIXES))]
    if not found and any(path.endswith(".parquet") for path in inside):
        rows = dataset.dataset(place, filesystem=files, format="parquet")
        if "path" not in rows.schema.names:
            raise InputError(f"{source} needs a column path, and bytes if it holds the pictures: {rows.schema.names}.")
        if "bytes" not in rows.schema.names:
            found = rows.to_table(columns=["path"])["path"].to_pylist()
        elif rows.count_rows():
            return None
    elif not found and kind == FileType.File:
        with files.open_input_stream(place, compression=None) as file:
            found = [line for line in file.read().decode().splitlines() if line.strip()]
    if not found:
        raise ImageError(f"No pictures in {source}. In folders, names end in {' '.join(sorted(SUFFIXES))}.")
    absolute = [path if "://" in path else os.path.abspath(path) for path in found]  # the cluster works elsewhere
    return pa.chunked_array([absolute], pa.string()).unique()


def _rows(source: str, paths: "pa.Array | None", done: "pa.Array") -> "tuple[Dataset | None, int]":
    """What is left to do as a dataset, if anything; and at most how many units of work that is."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import ray.data

    if paths is None:
        return _stored_rows(source, done)
    paths = paths.filter(pc.invert(pc.is_in(paths, value_set=done)))
    table = pa.table({"path": paths})
    parts = [table.slice(start, BLOCK) for start in range(0, len(table), BLOCK)]
    return ray.data.from_arrow(parts) if parts else None, len(parts)


def _stored_rows(source: str, done: "pa.Array") -> "tuple[Dataset, int]":
    """The same of Parquet that holds the pictures, read a row group a task.

    The tasks need no core, since the actors have all of them; `ray.data.read_parquet` lists its files in one that does.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import ray.data
    from pyarrow import dataset, parquet

    files, place = _locate(source)
    fragments = list(dataset.dataset(place, filesystem=files, format="parquet").get_fragments())
    with ThreadPoolExecutor(READERS) as readers:
        groups = list(readers.map(lambda fragment: [group.num_rows for group in fragment.row_groups], fragments))
    held = ray.put(done)

    def left(units: pa.Table) -> Iterator[pa.Table]:
        for unit in units.to_pylist():
            with files.open_input_file(unit["file"]) as file:
                stored = parquet.ParquetFile(file)
                for rows in stored.iter_batches(BLOCK, row_groups=[unit["group"]], columns=["path", "bytes"]):
                    table = pa.Table.from_batches([rows])
                    yield table.filter(pc.invert(pc.is_in(table["path"], value_set=ray.get(held))))

    units = [
        pa.table({"file": [fragment.path], "group": [index]})
        for fragment, rows in zip(fragments, groups, strict=True)
        for index in range(len(rows))
    ]
    rows = ray.data.from_arrow(units).map_batches(left, batch_format="pyarrow", batch_size=None, num_cpus=0)
    return rows, -(-sum(map(sum, groups)) // BLOCK)


def _done(files: "FileSystem", place: str, schema: "pa.Schema") -> "pa.Array":
    """The paths in the output's whole files. A file that a killed job left unfinished is removed."""
    import pyarrow as pa
    from pyarrow import parquet
    from pyarrow.fs import FileSelector

    def read(path: str) -> "pa.ChunkedArray | None":
        with files.open_input_file(path) as file:
            try:
                table = parquet.read_table(file, columns=["path"])
            except pa.ArrowInvalid:  # Parquet is complete only with its last bytes
                table = None
        if table is None:
            files.delete_file(path)
            return None
        ours = (table.schema.metadata or {}).get(b"vitlite")
        if ours != schema.metadata[b"vitlite"]:
            raise InputError(
                f"{path} was not written by this command with these weights and options. Choose another --out."
            )
        return table["path"]

    found = files.get_file_info(FileSelector(place, allow_not_found=True))
    with ThreadPoolExecutor(READERS) as readers:
        columns = list(readers.map(read, [file.path for file in found if file.path.endswith(".parquet")]))
    chunks = [chunk for column in columns if column is not None for chunk in column.chunks]
    return pa.chunked_array(chunks, pa.string()).combine_chunks()


def _count(files: "FileSystem", place: str) -> tuple[int, int]:
    """How many rows the output has, and how many of them have an error."""
    from pyarrow import dataset

    rows = dataset.dataset(place, filesystem=files, format="parquet")
    return rows.count_rows(), rows.count_rows(filter=~dataset.field("error").is_null())
