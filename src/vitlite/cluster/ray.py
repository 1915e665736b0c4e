"""The Ray actors `Embedder` and `Classifier`, for Ray Data's `map_batches`.

Ray schedules the work, limits memory, and replaces lost actors and nodes. In the jobs of `vitlite.cluster.jobs`, Ray
passes only paths to the actors, which read the images themselves. With `ray.data.read_binary_files`, the first
unreadable file would end the whole job.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from vitlite.cluster.folder import READERS
from vitlite.cluster.sources import locate
from vitlite.errors import ImageError, InputError, check_count

if TYPE_CHECKING:
    import pyarrow as pa
    from ray import ObjectRef

    from vitlite.inference.predict import Outcomes
    from vitlite.nn.vit import ViT

T = TypeVar("T")


class Embedder:
    """A Ray actor that computes vectors for tables of images, and adds the columns `vector` and `error` to them.

    A table needs a column `path`. If it also has a column `bytes`, the images are read from that column, which is then
    removed; otherwise, they are read from their paths. Other columns are kept. If an image cannot be read, the vector
    is null and `error` gives the reason.

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
        """Make an optimized copy of a model in the process of the actor.

        Args:
            model: A model that has preprocessing and is not optimized, or the result of `ray.put(model)`. With
                `ray.put`, the weights are sent to each node only once.
            batch: The number of images per batch.
            dtype: The dtype of the computation, such as "bfloat16". Default: the dtype of the model.
            device: The device, such as "cuda". Default: the device of the model.
            threads: The number of threads that torch uses in this process, usually the `num_cpus` of the actor.

        Raises:
            InputError: `batch` or `threads` is not a positive integer.
        """
        check_count(batch, "batch")
        self.model, self.batch = _prepare(model, dtype, device, threads), batch

    def __call__(self, table: "pa.Table") -> "pa.Table":
        import pyarrow as pa

        from vitlite.inference.predict import embed

        table, answers, errors = _work_through(table, lambda files: embed(self.model, files, self.batch))
        vectors = [None if vector is None else vector.numpy() for vector in answers]
        table = table.append_column("vector", pa.array(vectors, pa.list_(pa.float32())))
        return table.append_column("error", errors)


class Classifier:
    """A Ray actor that computes labels for tables of images, and adds the columns `labels`, `scores` and `error`.

    The tables are the same as for `Embedder`. If an image cannot be read, its labels and scores are null and `error`
    gives the reason.
    """

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
        """Make an optimized copy of a model in the process of the actor.

        Args:
            model: A model that has labels and preprocessing and is not optimized, or the result of `ray.put(model)`,
                with which the weights are sent to each node only once.
            top: The number of labels per image.
            batch: The number of images per batch.
            dtype: The dtype of the computation, such as "bfloat16". Default: the dtype of the model.
            device: The device, such as "cuda". Default: the device of the model.
            threads: The number of threads that torch uses in this process, usually the `num_cpus` of the actor.

        Raises:
            InputError: `top`, `batch` or `threads` is not a positive integer.
        """
        check_count(top, "top")
        check_count(batch, "batch")
        self.model, self.top, self.batch = _prepare(model, dtype, device, threads), top, batch

    def __call__(self, table: "pa.Table") -> "pa.Table":
        import pyarrow as pa

        from vitlite.inference.predict import classify

        table, answers, errors = _work_through(table, lambda files: classify(self.model, files, self.top, self.batch))
        labels = [None if best is None else [prediction.label for prediction in best] for best in answers]
        scores = [None if best is None else [prediction.score for prediction in best] for best in answers]
        table = table.append_column("labels", pa.array(labels, pa.list_(pa.string())))
        table = table.append_column("scores", pa.array(scores, pa.list_(pa.float32())))
        return table.append_column("error", errors)


def _prepare(model: "ViT | ObjectRef[ViT]", dtype: str | None, device: str | None, threads: int) -> "ViT":
    """Return an optimized copy of a model on the device of this actor, and set the number of torch threads."""
    import torch

    from vitlite.fast.optimize import optimize
    from vitlite.nn.vit import ViT

    check_count(threads, "threads")
    torch.set_num_threads(threads)
    if not isinstance(model, ViT):
        import ray

        model = ray.get(model)
    return optimize(model.to(device or model.device), dtype=getattr(torch, dtype) if dtype else None)


def _work_through(
    table: "pa.Table", work: "Callable[[Iterator[bytes]], Outcomes[T]]"
) -> "tuple[pa.Table, list[T | None], pa.Array]":
    """Compute the results for a table of images.

    Args:
        table: A table with a column `path` and optionally a column `bytes`.
        work: A function that yields a result or an error for each image file.

    Returns:
        The table without the column `bytes`; the result of each image, or None; the error of each image, or null.

    Raises:
        InputError: `table` is not an Arrow table, or has no column `path`.
    """
    import pyarrow as pa

    if not isinstance(table, pa.Table) or "path" not in table.column_names:
        given = table.column_names if isinstance(table, pa.Table) else type(table).__name__
        raise InputError(
            f"Embedder and Classifier expect Arrow tables with a column named path, got {given}. Pass "
            'batch_format="pyarrow" to map_batches. If you call read_binary_files, also pass include_paths=True.'
        )
    paths = table["path"].to_pylist()
    results: list[T | None] = [None] * len(paths)
    errors: list[str | None] = [None] * len(paths)
    rows: list[int] = []  # rows of the readable images, in the order of `work`

    def readable() -> Iterator[bytes]:
        contents = iter(table["bytes"].to_pylist()) if "bytes" in table.column_names else _read_ahead(paths)
        for row, content in enumerate(contents):
            if isinstance(content, bytes):
                rows.append(row)
                yield content
            else:
                errors[row] = f"Cannot read {paths[row]}: {content or 'the column bytes is null'}"

    for position, (_, outcome) in enumerate(work(readable())):
        row = rows[position]
        if isinstance(outcome, ImageError):
            errors[row] = str(outcome.within(str(paths[row])))
        else:
            results[row] = outcome
    kept = [name for name in table.column_names if name != "bytes"]
    return table.select(kept), results, pa.array(errors, pa.string())


def _read_ahead(paths: Sequence[str | None]) -> Iterator[bytes | Exception]:
    """Yield the content of each file in order, or the error if a file cannot be read.

    Background threads read a few files in advance.
    """
    reading: deque[Future[bytes | Exception]] = deque()
    with ThreadPoolExecutor(READERS, "vitlite-files") as readers:
        for path in paths:
            reading.append(readers.submit(_read, path))
            if len(reading) > READERS:
                yield reading.popleft().result()
        for content in reading:
            yield content.result()


def _read(path: str | None) -> bytes | Exception:
    """Return the content of the file at a path or URL, or the error if it cannot be read."""
    import pyarrow as pa

    if path is None:
        return InputError("the column path is null")
    try:
        files, place = locate(path)
        with files.open_input_stream(place, compression=None) as file:
            return file.read()
    except (OSError, pa.ArrowException, InputError) as error:
        return error
