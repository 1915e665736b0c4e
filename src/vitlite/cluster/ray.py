"""Workers on Ray: `Embedder` and `Classifier` for Ray Data's `map_batches`.

Scheduling, memory limits, and recovery from lost actors and nodes are Ray's. Paths travel through it, and each actor
reads its own pictures: `ray.data.read_binary_files` ends the whole job at the first file that it cannot open.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from typing import TYPE_CHECKING, TypeVar

from vitlite.cluster.folder import READERS
from vitlite.cluster.sources import CONTENT, TEXT, check_kind, locate
from vitlite.errors import ImageError, InputError, check_count

if TYPE_CHECKING:
    import pyarrow as pa
    from ray import ObjectRef

    from vitlite.inference.predict import Outcomes
    from vitlite.nn.vit import ViT

T = TypeVar("T")


class Embedder:
    """Gives each picture of a table its vector: columns `path`, and `bytes` if they are there -> `vector`, `error`.

    Other columns stay; `bytes` goes. A broken picture gets an error and no vector.

        ds = ray.data.read_binary_files("s3://bucket/photos", include_paths=True)
        ds.map_batches(vitlite.cluster.ray.Embedder, fn_constructor_args=(ray.put(model),), batch_format="pyarrow",
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

        Raises:
            InputError: `batch` or `threads` is no positive number.
        """
        check_count(batch, "batch")
        self.model, self.batch = _ready(model, dtype, device, threads), batch

    def __call__(self, table: "pa.Table") -> "pa.Table":
        import pyarrow as pa

        from vitlite.inference.predict import embed

        table, answers, errors = _answered(
            table, ("vector", "error"), lambda files: embed(self.model, files, self.batch)
        )
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
        check_count(top, "top")
        check_count(batch, "batch")
        self.model, self.top, self.batch = _ready(model, dtype, device, threads), top, batch

    def __call__(self, table: "pa.Table") -> "pa.Table":
        import pyarrow as pa

        from vitlite.inference.predict import classify

        table, answers, errors = _answered(
            table, ("labels", "scores", "error"), lambda files: classify(self.model, files, self.top, self.batch)
        )
        labels = [None if best is None else [prediction.label for prediction in best] for best in answers]
        scores = [None if best is None else [prediction.score for prediction in best] for best in answers]
        table = table.append_column("labels", pa.array(labels, pa.list_(pa.string())))
        table = table.append_column("scores", pa.array(scores, pa.list_(pa.float32())))
        return table.append_column("error", errors)


def _ready(model: "ViT | ObjectRef[ViT]", dtype: str | None, device: str | None, threads: int) -> "ViT":
    """The actor's own copy of the model, where it computes, and optimized."""
    import torch

    from vitlite.fast.optimize import optimize
    from vitlite.nn.vit import ViT

    check_count(threads, "threads")
    torch.set_num_threads(threads)
    if not isinstance(model, ViT):
        import ray

        model = ray.get(model)
    return optimize(model.to(device or model.device), dtype=getattr(torch, dtype) if dtype else None)


def _answered(
    table: "pa.Table", added: Sequence[str], work: "Callable[[Iterator[BytesIO]], Outcomes[T]]"
) -> "tuple[pa.Table, list[T | None], pa.Array]":
    """The table without `bytes`, what `work` makes of each picture, and the errors of those that it cannot take."""
    import pyarrow as pa

    _check_table(table, added)
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


def _check_table(table: "pa.Table", added: Sequence[str]) -> None:
    import pyarrow as pa

    columns = table.column_names if isinstance(table, pa.Table) else ()
    if "path" not in columns:
        given = f"the columns {', '.join(columns)}" if columns else type(table).__name__
        raise InputError(
            f"This takes Arrow tables with a column path, got {given}.",
            python='In map_batches, say batch_format="pyarrow"; in read_binary_files, include_paths=True.',
        )
    check_kind("path", table["path"].type, TEXT)
    if "bytes" in columns:
        check_kind("bytes", table["bytes"].type, CONTENT)
    there = [name for name in added if name in columns]
    if there:
        raise InputError(
            f"This adds the columns {', '.join(added)} to a table, and it has {', '.join(there)} already.",
            python="Rename or drop what is there: table.rename_columns(...), table.drop_columns(...).",
            command="",
        )


class _Picture(BytesIO):
    """A picture file in memory, by its name. One that could not be read says why when it is opened, as a broken one."""

    def __init__(self, name: str | None, content: bytes | Exception | None) -> None:
        super().__init__(content if isinstance(content, bytes) else b"")
        self.name = str(name)
        self.error: Exception | None = None
        if not isinstance(content, bytes):
            self.error = content or InputError("the column bytes is null")

    def read(self, size: int | None = -1) -> bytes:
        if self.error:
            raise self.error
        return super().read(size)

    def __repr__(self) -> str:  # Pillow quotes it where it knows no such format
        return repr(self.name)


def _read_ahead(paths: Sequence[str | None]) -> Iterator[BytesIO]:
    """The pictures in their order, some of them read while others are decoded."""
    reading: deque[tuple[str | None, Future[bytes | Exception]]] = deque()
    with ThreadPoolExecutor(READERS, "vitlite-files") as readers:
        for path in paths:
            reading.append((path, readers.submit(_contents, path)))
            if len(reading) > READERS:
                first, content = reading.popleft()
                yield _Picture(first, content.result())
        for path, content in reading:
            yield _Picture(path, content.result())


def _contents(path: str | None) -> bytes | Exception:
    import pyarrow as pa

    if path is None:
        return InputError("the column path is null")
    try:
        files, place = locate(path)
        with files.open_input_stream(place, compression=None) as file:
            return file.read()
    except (OSError, pa.ArrowException, InputError) as error:
        return error
