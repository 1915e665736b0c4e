"""Export a model to an ONNX or torch.export file, for any batch size and image size.

Before an existing file is replaced, the exported file is run and compared with the model. The file also contains the
config, the labels and the preprocessing as JSON, in the metadata entry "vitlite".
"""

import io
import json
import logging
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim

from vitlite.checkpoints.save import check_savable
from vitlite.errors import CheckpointError, ExportError, OptimizedError, missing_extra
from vitlite.fast.optimize import OptimizedViT
from vitlite.images.transform import transform_to_save
from vitlite.nn.vit import ViT
from vitlite.storage import atomic_write

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

Format = Literal["onnx", "torch"]
Run = Callable[[Tensor], Tensor]  # images -> logits
SUFFIX = {"onnx": ".onnx", "torch": ".pt2"}
MIN_PATCHES = {"onnx": 1, "torch": 2}  # minimum number of patches per side; torch.export would fix a size of 1
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}  # max |difference| / max |logit|
LOW_PRECISION_TOLERANCE = 0.05
ONE_FILE = 1 << 30  # bytes; larger weights are written to a second file, because protobuf is limited to 2 GiB
NEEDS_TORCH = "2.8"  # older versions fix some sizes or fail to trace position resampling


def export(model: ViT, path: str | PathLike[str], *, to: Format, fixed_size: bool = False) -> dict[str, float]:
    """Write a model to a file for another runtime, and compare the file with the model on three batches.

    Args:
        model: A model in eval mode that is not optimized. The exported model has the same device and dtype.
        path: The file to write. An existing file is replaced after the comparison.
        to: "onnx" writes an ONNX file with the input `images` and the output `logits`. "torch" writes a file for
            `torch.export.load`, which does not support images that are only one patch high or wide.
        fixed_size: If True, the file accepts only images of the model's own size, in batches of any size. Some
            quantizers and compilers need this, because they read the shape of every tensor from the file.

    Returns:
        A dictionary from each engine that ran the file to the largest difference of the logits, relative to the largest
        logit. The engine is "torch" for a torch file. For ONNX, the engines are "onnxruntime" and "openvino", if
        installed.

    Raises:
        ExportError: The format is unknown, the model is in training mode or was modified, the file cannot be written,
            or its logits differ from those of the model.
        OptimizedError: The model was optimized.
        MissingExtraError: onnx or onnxscript is not installed.

    >>> import vitlite
    >>> model = vitlite.create("vit_nano_4.cifar10")
    >>> export(model, "model.pt2", to="torch")["torch"] < 1e-6
    True
    """
    if to not in SUFFIX:
        raise ExportError(f"Cannot export to {to!r}: to= (--to) must be {' or '.join(SUFFIX)}.")
    path = check_target(path)
    if model.source is not None and path.exists() and path.samefile(model.source.path):
        raise ExportError(f"The export would overwrite {path}, from which the model was loaded. Pass another path.")
    _check_model(model, path)
    compared: dict[str, float] = {}
    try:
        no_autocast = torch.autocast(model.device.type, enabled=False)  # autocast would be exported, too
        with _temporary_folder(path) as folder, torch.no_grad(), no_autocast:
            file = folder / path.name
            if to == "onnx":
                _write_onnx(model, file, fixed_size)
            else:
                _write_torch(model, file, fixed_size)
            for engine, open_file in ENGINES[to].items():
                if find_spec(engine) is not None:
                    compared[engine] = _compare(model, engine, open_file, file, fixed_size)
            _move_into_place(folder, path)
    except OSError as error:
        raise ExportError(
            f"Cannot write {path}: {error.strerror or error}. Check the permissions and the free space, or pass "
            "another path."
        ) from error
    return compared


def _check_model(model: ViT, path: Path) -> None:
    """Check that a model can be exported.

    Raises:
        ExportError: The model is in training mode, or was modified so that its config no longer describes it.
        OptimizedError: The model was optimized.
    """
    if isinstance(model, OptimizedViT):
        raise OptimizedError(
            "An optimized model cannot be exported. Create the model again, and export it without optimizing it."
        )
    if model.training:
        raise ExportError("The model is in training mode, so dropout would be exported. Call model.eval() first.")
    try:
        check_savable(model, "export")
    except CheckpointError as error:
        raise ExportError(str(error)) from None


def check_target(path: str | PathLike[str]) -> Path:
    """Check that a file can be written to a path, and return the path.

    Raises:
        ExportError: The path is a folder, or the parent folder does not exist.
    """
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ExportError(f"Cannot write {path}: {reason}. Pass the path of a file in an existing folder.")
    return path


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Return a context manager that creates a folder beside `path`, and deletes the folder on exit.

    If an earlier export was killed and left this folder behind, it is deleted first.
    """
    folder = path.with_name(f".{path.name}.vitlite-export")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move_into_place(folder: Path, path: Path) -> None:
    """Move the files in `folder` to the folder of `path`, and delete the weights of an earlier export to `path`.

    The file `path` itself is moved last, so that it never refers to weights that are not there yet.
    """
    weights = [file for file in folder.iterdir() if file.name != path.name]
    for file in (*weights, folder / path.name):
        with atomic_write(path.parent / file.name) as temporary:
            file.replace(temporary)
    current = {file.name for file in weights}
    ours = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{16}}\.data")
    for file in path.parent.iterdir():
        if ours.fullmatch(file.name) and file.name not in current:
            with suppress(PermissionError):  # on Windows, another program may have the file open
                file.unlink()


def _write_torch(model: ViT, file: Path, fixed_size: bool) -> None:
    with _explain_failure():
        shapes = _dynamic_shapes(model, fixed_size)
        program = torch.export.export(model, (_images(model, TRACED),), dynamic_shapes=(shapes,))
    content = io.BytesIO()  # torch aborts the process if it writes to a full disk
    torch.export.save(program, content, extra_files={"vitlite": _description(model)})
    file.write_bytes(content.getbuffer())


def _write_onnx(model: ViT, file: Path, fixed_size: bool) -> None:
    check_onnx_installed()
    with _without_warnings(), _explain_failure():
        program: ONNXProgram | None = torch.onnx.export(
            model,
            (_images(model, TRACED),),
            dynamo=True,
            dynamic_shapes=(_dynamic_shapes(model, fixed_size),),
            input_names=["images"],
            output_names=["logits"],
            verbose=False,
        )
    assert program is not None  # with dynamo=True
    program.model.metadata_props["vitlite"] = _description(model)
    if sum(tensor.nbytes for tensor in model.state_dict().values()) <= ONE_FILE:
        program.save(file)
        return
    import onnx_ir

    # Use a new name, because the previous .onnx file refers to the previous weights until it is replaced.
    onnx_ir.save(program.model, file, external_data=f"{file.name}.{secrets.token_hex(8)}.data")


def check_onnx_installed() -> None:
    """Check that the packages that are needed for ONNX files are installed.

    Raises:
        MissingExtraError: A package is not installed.
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise missing_extra("Exporting a model to ONNX", "onnx") from error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Return a context manager that hides the exporter's warnings about torch's own code and a missing torchvision."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


@contextmanager
def _explain_failure() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch raises errors of many types here
        first_line = str(error).strip().partition("\n")[0]
        raise ExportError(f"torch cannot export this model ({first_line}). {_advice()}") from error


def _advice() -> str:
    return f"Try another version of torch. Exports need {NEEDS_TORCH} or later, and {torch.__version__} is installed."


def _dynamic_shapes(model: ViT, fixed_size: bool) -> dict[int, Any]:
    """Return the axes of the input whose sizes are not fixed, with the sizes that are allowed.

    The batch size can always be any number. The height and width are fixed if `fixed_size` is True; otherwise, they can
    be any multiple of the patch size.
    """
    if fixed_size:
        return {0: Dim("batch", max=2**31 - 1)}
    p = model.config.patch_size
    return {0: Dim("batch", max=2**31 - 1), 2: p * Dim("rows"), 3: p * Dim("columns")}


class Batch(NamedTuple):
    """The number of images in a test batch, and their height and width relative to the image size of the model."""

    number: int
    height: float
    width: float


TRACED = Batch(2, 1, 1)
COMPARED = (TRACED, Batch(1, 1.5, 0.5), Batch(3, 0.5, 1.25))
COMPARED_FIXED = (TRACED, Batch(1, 1, 1), Batch(3, 1, 1))


def _images(model: ViT, batch: Batch) -> Tensor:
    """Return a batch of random images for a model. Each side has at least two patches."""
    config = model.config
    rows = max(2, round(config.grid[0] * batch.height))
    columns = max(2, round(config.grid[1] * batch.width))
    shape = batch.number, config.channels, config.patch_size * rows, config.patch_size * columns
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return noise.to(model.device, model.dtype)


def _description(model: ViT) -> str:
    """Return a JSON string with the config, the labels, the kind of scores and the preprocessing of a model."""
    transform = transform_to_save(model)
    preprocess = transform.to_dict() if transform else None
    description: dict[str, Any] = {"config": model.config.to_dict(), "labels": model.labels, "scores": model.scores}
    description["thresholds"] = model.thresholds
    return json.dumps(description | {"preprocess": preprocess})


def _open_torch(file: Path) -> Run:
    with _without_warnings():  # torch 2.10 warns about buffers of torch
        return torch.export.load(file).module()


def _open_onnxruntime(file: Path) -> Run:
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        (logits,) = session.run(None, {"images": images.numpy(force=True)})
        return torch.from_numpy(logits)

    return run


def _open_openvino(file: Path) -> Run:
    import openvino  # type: ignore[import-not-found]

    hints = {"INFERENCE_PRECISION_HINT": "f32"}  # on some CPUs the default is bfloat16
    compiled = openvino.Core().compile_model(str(file), "CPU", hints)

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(compiled(images.numpy(force=True))[0])

    return run


ENGINES: dict[str, dict[str, Callable[[Path], Run]]] = {
    "onnx": {"onnxruntime": _open_onnxruntime, "openvino": _open_openvino},
    "torch": {"torch": _open_torch},
}


def _compare(model: ViT, engine: str, open_file: Callable[[Path], Run], file: Path, fixed_size: bool) -> float:
    """Compare an exported file with the model on three batches.

    Returns:
        The largest difference of the logits, relative to the largest logit.

    Raises:
        ExportError: The engine cannot run the file, or the difference is too large.
    """
    tolerance = TOLERANCE.get(model.dtype, LOW_PRECISION_TOLERANCE)
    largest = 0.0
    run = None
    for batch in COMPARED_FIXED if fixed_size else COMPARED:
        images = _images(model, batch)
        expected = model(images)
        try:
            run = run or open_file(file)
            logits = run(images).to(expected)
        except Exception as error:  # engines raise errors of many types
            advice = "Export the model in float32." if model.dtype != torch.float32 else _advice()
            raise ExportError(
                f"{engine} cannot run the exported model on images of shape {tuple(images.shape)} in {model.dtype}: "
                f"{error}. Nothing was written. {advice}"
            ) from error
        difference = ((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
        if not difference <= tolerance:  # also true for NaN
            raise ExportError(
                f"The exported model gives different logits: in {engine}, the relative difference is {difference:.1g} "
                f"for images of shape {tuple(images.shape)}. Nothing was written. {_advice()}"
            )
        largest = max(largest, difference)
    return largest
