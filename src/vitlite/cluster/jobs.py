"""Ray jobs that write the vectors or labels of millions of images to Parquet files.

To resume a job that was killed, run it again with the same arguments.
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

BLOCK = 256  # paths in a unit of work; if an actor is lost, the unit is computed again
FILE = 4096  # minimum number of rows in an output file; a killed job loses the rows of incomplete files


@dataclass(frozen=True)
class Actors:
    """The number of Ray actors, and their settings.

    Attributes:
        batch: The number of images per batch.
        dtype: The dtype of the computation, such as "bfloat16". Default: the dtype of the model.
        device: The device, such as "cuda". Default: the device of the model.
        count: The number of actors. Default: one per core, or one per GPU with `device="cuda"`.

    Raises:
        InputError: `batch` or `count` is not a positive integer.
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
        """True if each actor needs its own GPU."""
        return self.device is not None and self.device.startswith("cuda")


class Summary(NamedTuple):
    """The numbers of images in the output folder of a job.

    Attributes:
        images: The number of images in the folder, including those that could not be read.
        broken: The number of images that could not be read.
        new: The number of images that this run added.
    """

    images: int
    broken: int
    new: int


class _Job(NamedTuple):
    """The parts of a job that differ between computing vectors and computing labels.

    Attributes:
        actor: The class of the actors.
        options: Additional arguments of this class.
        columns: The names of the columns of results, with the type of the values in each.
        identity: The values that determine the results, apart from the identity of the model.
    """

    actor: type
    options: dict[str, Any]
    columns: dict[str, str]
    identity: dict[str, Any]


def check_installed() -> None:
    """Check that Ray and pyarrow are installed.

    Raises:
        MissingExtraError: Ray or pyarrow is not installed.
    """
    try:
        import pyarrow  # noqa: F401
        import ray.data  # noqa: F401
    except ImportError as error:
        raise missing_extra("--engine ray", "ray") from error


def embed_images(
    model: "ViT", source: Source, out: str, actors: Actors, *, on_resume: Callable[[int], None]
) -> Summary:
    """Write the vector of each image to Parquet files, or resume an earlier run of the same job.

    Args:
        model: A model that has preprocessing and is not optimized.
        source: The images, as `find_source` returns them.
        out: The path or URL of the output folder.
        actors: The number of actors and their settings.
        on_resume: A function that is called with the number of images already done, if there are any.

    Raises:
        ImageError: The model has no preprocessing.
        InputError: The folder contains results of another model or other options.
    """
    from vitlite.inference.predict import embed

    embed(model, ())  # raises an error now if the model has no preprocessing
    return _run(_Job(Embedder, {}, {"vector": "float"}, {}), model, source, out, actors, on_resume)


def classify_images(
    model: "ViT", source: Source, out: str, actors: Actors, *, top: int, on_resume: Callable[[int], None]
) -> Summary:
    """Write the most probable labels of each image to Parquet files, or resume an earlier run of the same job.

    Args:
        model: A model that has labels and preprocessing and is not optimized.
        source: The images, as `find_source` returns them.
        out: The path or URL of the output folder.
        actors: The number of actors and their settings.
        top: The number of labels per image.
        on_resume: A function that is called with the number of images already done, if there are any.

    Raises:
        ImageError: The model has no preprocessing.
        InputError: The model has no labels, or the folder contains results of another model or other options.
    """
    from vitlite.checkpoints.fingerprint import hash_of_answers
    from vitlite.inference.predict import classify

    classify(model, (), top)  # raises an error now if the model has no preprocessing or labels
    identity = {"top": top, "answers": hash_of_answers(model)}
    job = _Job(Classifier, {"top": top}, {"labels": "string", "scores": "float"}, identity)
    return _run(job, model, source, out, actors, on_resume)


def _run(
    job: _Job, model: "ViT", source: Source, out: str, actors: Actors, on_resume: Callable[[int], None]
) -> Summary:
    """Process all images that are not in the output folder yet, and return a summary of the folder."""
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
    """Return a lazy dataset of the results that the actors compute from the images in `rows`."""
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
    """Compute the results of a lazy dataset, and write them to new Parquet files in the output folder."""
    from ray.data.datasource import FilenameProvider

    schema = output.schema
    answers.write_parquet(
        output.folder,
        filesystem=output.files,
        filename_provider=FilenameProvider(output.prefix, "parquet"),
        min_rows_per_file=FILE,
        arrow_parquet_args_fn=lambda: {"schema": schema},
        ray_remote_args={"num_cpus": 0},  # the actors occupy all cores
        concurrency=writers,
    )


def _summary(output: Output) -> Summary:
    from pyarrow import dataset

    files = own_files(output.files, output.folder, output.prefix)
    rows = dataset.dataset(files, output.schema, filesystem=output.files, format="parquet")
    images = rows.count_rows()
    broken = rows.count_rows(filter=~dataset.field("error").is_null())
    return Summary(images, broken, images - len(output.done))
