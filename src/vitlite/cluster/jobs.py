"""Whole jobs on Ray: a vector or labels for each of millions of images, in Parquet files.

A job that was killed resumes when it is started again.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vitlite.cluster.folder import Output, open_output, own_files
from vitlite.cluster.ray import Classifier, Embedder
from vitlite.cluster.sources import Source, locate, remaining
from vitlite.errors import check_count, missing_extra
from vitlite.inference.embed import identity_of

if TYPE_CHECKING:
    from ray.data import Dataset

    from vitlite.nn.vit import ViT

BLOCK = 256  # paths in a unit of work, which is repeated if an actor is lost
FILE = 4096  # rows in an output file, at least; those of an unfinished file are lost when a job is killed


@dataclass(frozen=True)
class Actors:
    """The number of actors and their settings.

    Attributes:
        batch: Images at a time.
        dtype: What to compute in, such as "bfloat16"; None for the model's own.
        device: Such as "cuda"; None for where the model is.
        count: How many there are; None for one a core, or with `device="cuda"` one a GPU.

    Raises:
        InputError: `batch` or `count` is not positive.
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
        """True if each actor needs a GPU of its own."""
        return self.device is not None and self.device.startswith("cuda")


class Summary(NamedTuple):
    """The contents of an output after a job: its images, how many of them are broken, and how many are new."""

    images: int
    broken: int
    new: int


class _Job(NamedTuple):
    """A kind of job.

    Attributes:
        actor: The class that does the work.
        options: Its options.
        columns: The type of each column of answers.
        identity: What determines the answers, beside the model.
    """

    actor: type
    options: dict[str, Any]
    columns: dict[str, str]
    identity: dict[str, Any]


def check_installed() -> None:
    """Raise `MissingExtraError` if Ray is not installed."""
    try:
        import pyarrow  # noqa: F401
        import ray.data  # noqa: F401
    except ImportError as error:
        raise missing_extra("--engine ray", "ray") from error


def embed_images(
    model: "ViT", source: Source, out: str, actors: Actors, *, on_resume: Callable[[int], None]
) -> Summary:
    """Write a vector for each image into Parquet files, and resume an earlier run of the same job.

    Args:
        model: A model with preprocessing, not optimized yet.
        source: The result of `find_source`.
        out: The folder for the files, or its URL.
        actors: The number of actors and their settings.
        on_resume: Called with the number of images that are done already, if there are any.

    Raises:
        ImageError: The model has no preprocessing.
        InputError: The folder has answers of another model or other options.
    """
    from vitlite.inference.predict import embed

    embed(model, ())  # raises at once what the model lacks
    return _run(_Job(Embedder, {}, {"vector": "float"}, {}), model, source, out, actors, on_resume)


def classify_images(
    model: "ViT", source: Source, out: str, actors: Actors, *, top: int, on_resume: Callable[[int], None]
) -> Summary:
    """Write the `top` best labels of each image, as `embed_images` writes vectors.

    Raises:
        ImageError: The model has no preprocessing.
        InputError: The model has no labels, or the folder has answers of another model or other options.
    """
    from vitlite.checkpoints.fingerprint import hash_of_answers
    from vitlite.inference.predict import classify

    classify(model, (), top)  # raises at once what the model lacks
    identity = {"top": top, "answers": hash_of_answers(model)}
    job = _Job(Classifier, {"top": top}, {"labels": "string", "scores": "float"}, identity)
    return _run(job, model, source, out, actors, on_resume)


def _run(
    job: _Job, model: "ViT", source: Source, out: str, actors: Actors, on_resume: Callable[[int], None]
) -> Summary:
    """Process the images that the output does not have yet, and count what it has then."""
    import pyarrow as pa
    import ray.data

    columns = {name: pa.list_(pa.type_for_alias(kind)) for name, kind in job.columns.items()}
    schema = pa.schema({"path": pa.string(), **columns, "error": pa.string()})
    identity = asdict(identity_of(model, dtype=actors.dtype, fast=True)) | job.identity
    files, folder = locate(out)
    with open_output(files, folder, schema, identity) as output:
        if len(output.done):
            on_resume(len(output.done))
        if not ray.is_initialized():
            ray.init()
        ray.data.DataContext.get_current().enable_progress_bars = sys.stderr.isatty()
        rows, units = remaining(source, output.done, BLOCK)
        if rows is not None:
            available = int(ray.cluster_resources().get("GPU" if actors.on_gpu else "CPU", 1))
            workers = min(actors.count or available, units)
            _write(_answers(rows, job, model, actors, workers), output, min(max(2, workers // 16), units))
        return _summary(output)


def _answers(rows: "Dataset", job: _Job, model: "ViT", actors: Actors, workers: int) -> "Dataset":
    """Return what the actors answer for each row, computed as it is consumed."""
    import ray.data

    return rows.map_batches(
        job.actor,
        fn_constructor_args=(ray.put(model),),
        fn_constructor_kwargs=job.options | {"batch": actors.batch, "dtype": actors.dtype, "device": actors.device},
        batch_format="pyarrow",
        batch_size=BLOCK,
        num_cpus=1,
        num_gpus=1 if actors.on_gpu else None,
        compute=ray.data.ActorPoolStrategy(size=workers),
    )


def _write(answers: "Dataset", output: Output, writers: int) -> None:
    """Write rows into new files of the folder."""
    from ray.data.datasource import FilenameProvider

    schema = output.schema
    answers.write_parquet(
        output.folder,
        filesystem=output.files,
        filename_provider=FilenameProvider(output.prefix, "parquet"),
        min_rows_per_file=FILE,
        arrow_parquet_args_fn=lambda: {"schema": schema},
        ray_remote_args={"num_cpus": 0},  # the actors have all cores
        concurrency=writers,
    )


def _summary(output: Output) -> Summary:
    from pyarrow import dataset

    files = own_files(output.files, output.folder, output.prefix)
    rows = dataset.dataset(files, output.schema, filesystem=output.files, format="parquet")
    images = rows.count_rows()
    broken = rows.count_rows(filter=~dataset.field("error").is_null())
    return Summary(images, broken, images - len(output.done))
