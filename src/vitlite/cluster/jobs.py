"""Whole jobs on Ray: a vector or labels for each of millions of pictures, in Parquet files.

A job that was killed and is started again goes on where it stood.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vitlite.cluster.folder import Output, claimed, count
from vitlite.cluster.ray import Classifier, Embedder
from vitlite.cluster.sources import Source, locate, remaining
from vitlite.errors import check_count, missing_extra
from vitlite.inference.embed import identity_of

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset

    from vitlite.nn.vit import ViT

BLOCK = 256  # paths in a unit of work: what a lost actor costs again
FILE = 4096  # rows in an output file, at least: what each killed job loses


@dataclass(frozen=True)
class Actors:
    """How the actors work.

    Attributes:
        batch: Pictures at a time.
        dtype: What to compute in, such as "bfloat16"; None: the model's own.
        device: Such as "cuda"; None: where the model is.
        count: How many there are; None: one a core, or with `device="cuda"` one a GPU.

    Raises:
        InputError: `batch` or `count` is no positive number.
    """

    batch: int = 32
    dtype: str | None = None
    device: str | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        check_count(self.batch, "batch")
        if self.count is not None:
            check_count(self.count, "count")

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
    """A kind of job: its worker and that one's options, the type of each column of answers, and what decides them."""

    worker: type
    options: dict[str, Any]
    columns: dict[str, str]
    decided_by: dict[str, Any]  # beside the vectors


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
    from vitlite.inference.predict import embed

    embed(model, ())  # says what the model lacks
    return _run(_Task(Embedder, {}, {"vector": "float"}, {}), model, source, out, actors, name, on_resume)


def classify_pictures(
    model: "ViT", source: Source, out: str, actors: Actors, *, top: int, name: str, on_resume: Callable[[int], None]
) -> Summary:
    """Writes the `top` best labels of each picture, as `embed_pictures` writes vectors.

    Raises:
        ImageError: The model has no preprocessing.
        InputError: The model has no labels, or the folder holds the answers of other weights or options.
    """
    from vitlite.checkpoints.fingerprint import hash_of_answers
    from vitlite.inference.predict import classify

    classify(model, (), top)  # says what the model lacks
    decided_by = {"top": top, "answers": hash_of_answers(model)}
    task = _Task(Classifier, {"top": top}, {"labels": "string", "scores": "float"}, decided_by)
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
    identity = identity_of(model, dtype=actors.dtype, fast=True) | task.decided_by
    files, folder = locate(out)
    with claimed(files, folder, _columns(task.columns), identity) as output:
        if len(output.done):
            on_resume(len(output.done))
        _start_ray()
        rows, units = remaining(source, output.done, BLOCK)
        if rows is not None:
            chosen = min(actors.count or _cores_or_gpus(actors), units)
            _write(_answers(rows, task, model, actors, chosen), output, min(max(2, chosen // 16), units))
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


def _answers(rows: "Dataset", task: _Task, model: "ViT", actors: Actors, workers: int) -> "Dataset":
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
        compute=ray.data.ActorPoolStrategy(size=workers),
    )
