"""A model as a file for other runtimes, ONNX or torch.export: any batch, any image size, compared before it is kept.

What a picture needs before it goes in, and the labels of what comes out, are in the file too, as JSON under "vitlite".
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim

from vitlite.disk import replacing
from vitlite.errors import ExportError, OptimizedError, missing_extra
from vitlite.images import Preprocess
from vitlite.model import ViT
from vitlite.speed.optimize import OptimizedViT

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

Format = Literal["onnx", "torch"]
SUFFIX = {"onnx": ".onnx", "torch": ".pt2"}
NEAR = {torch.float32: 1e-4, torch.float64: 1e-6}  # max |difference| / max |logit|
NEAR_OTHERS = 0.05
ONE_FILE = 1 << 30  # bytes; above, ONNX keeps weights in a second file, since protobuf ends at 2 GiB


def export(model: ViT, path: str | PathLike[str], *, to: Format) -> float | None:
    """Writes a model for another runtime, runs the file on three batches, and keeps it if it answers the same.

    Args:
        model: In eval mode, and not optimized. Its device and dtype become the file's.
        path: The file to write. What was there is replaced once the new file is right.
        to: "onnx", with an input `images` and an output `logits`, or "torch", for `torch.export.load`.

    Returns:
        How far the file's logits are from the model's, max |difference| / max |logit|, or None where onnxruntime is
        not installed, and nothing was compared.

    Raises:
        ExportError: No such format, a model in training mode, a file that cannot be written, or one that answers
            something else.
        OptimizedError: The model was optimized before.
        MissingExtraError: onnx or onnxscript is not installed.

    >>> import vitlite
    >>> model = vitlite.create("vit_nano_4.cifar10")
    >>> export(model, "model.pt2", to="torch") < 1e-6
    True
    """
    if to not in SUFFIX:
        raise ExportError(f"Cannot export to {to!r}. Valid: {', '.join(SUFFIX)}.")
    if isinstance(model, OptimizedViT):
        raise OptimizedError("An optimized model cannot be exported.", python="Create it again and export that.")
    if model.training:
        raise ExportError(
            "A model in training mode would be exported with its dropout.", python="Call model.eval() before."
        )
    path = Path(path)
    try:
        # In a folder of their own: ONNX's file names the one with its weights, so both need their final names.
        with TemporaryDirectory(dir=path.parent, prefix=".vitlite-") as folder, torch.no_grad():
            file = Path(folder, path.name)
            if to == "onnx":
                _write_onnx(model, file)
                run = _open_onnx(file)
            else:
                _write_torch(model, file)
                run = _open_torch(file)
            farthest = None if run is None else _compare(model, run)
            _move_into_place(Path(folder), path)
    except FileNotFoundError as error:
        raise ExportError(f"Cannot write {path}: there is no folder {path.parent}. Make it first.") from error
    except OSError as error:
        raise ExportError(f"Cannot write {path}: {error.strerror or error}.") from error
    return farthest


def _move_into_place(folder: Path, path: Path) -> None:
    """Every file of the folder goes beside `path`, the one that names the others last."""
    files = [file for file in folder.iterdir() if file.name != path.name]
    for file in (*files, folder / path.name):
        with replacing(path.parent / file.name) as temporary:
            file.replace(temporary)


def _write_torch(model: ViT, file: Path) -> None:
    program = torch.export.export(model, (_images(model, TRACED),), dynamic_shapes=(_dynamic_shapes(model),))
    torch.export.save(program, file, extra_files={"vitlite": _description(model)})


def _write_onnx(model: ViT, file: Path) -> None:
    need_onnx()
    with _quietly():
        program: ONNXProgram | None = torch.onnx.export(
            model,
            (_images(model, TRACED),),
            dynamo=True,
            dynamic_shapes=(_dynamic_shapes(model),),
            input_names=["images"],
            output_names=["logits"],
            verbose=False,
        )
    assert program is not None  # with dynamo=True
    program.model.metadata_props["vitlite"] = _description(model)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    program.save(file, external_data=weights > ONE_FILE)


def need_onnx() -> None:
    """Names the extra where it is missing, which torch's own error does not."""
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise missing_extra("Export to ONNX", "onnx") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what the exporter says of torch's own parts, and of torchvision, where that is not installed."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


def _dynamic_shapes(model: ViT) -> dict[int, Any]:
    """Batch, height and width are free, but for the patches that height and width must divide into."""
    p = model.config.patch_size
    return {0: Dim("batch"), 2: p * Dim("rows"), 3: p * Dim("columns")}


class Batch(NamedTuple):
    """Images by their number, and by their sides in terms of the model's own."""

    number: int
    height: float
    width: float


TRACED = Batch(2, 1, 1)
COMPARED = (TRACED, Batch(1, 1.5, 0.5), Batch(3, 0.5, 1.25))


def _images(model: ViT, batch: Batch) -> Tensor:
    """Noise of that shape, of two patches at least each way."""
    config = model.config
    rows = max(2, round(config.grid[0] * batch.height))
    columns = max(2, round(config.grid[1] * batch.width))
    shape = batch.number, config.channels, config.patch_size * rows, config.patch_size * columns
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return noise.to(model.device, model.dtype)


def _description(model: ViT) -> str:
    """What the network's file does not say itself."""
    recipe = model.preprocess.recipe.to_dict() if isinstance(model.preprocess, Preprocess) else None
    return json.dumps({"config": model.config.to_dict(), "labels": model.labels, "preprocess": recipe})


def _open_torch(file: Path) -> Callable[[Tensor], Tensor]:
    return torch.export.load(file).module()


def _open_onnx(file: Path) -> Callable[[Tensor], Tensor] | None:
    """What runs the file, or None where onnxruntime is missing."""
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        (logits,) = session.run(None, {"images": images.numpy(force=True)})
        return torch.from_numpy(logits)

    return run


def _compare(model: ViT, run: Callable[[Tensor], Tensor]) -> float:
    """How far the file is from the model at most, on images of three sizes."""
    limit = NEAR.get(model.dtype, NEAR_OTHERS)
    farthest = 0.0
    for batch in COMPARED:
        images = _images(model, batch)
        wanted = model(images)
        difference = (run(images).to(wanted) - wanted).abs().max()
        far = (difference / wanted.abs().max().clamp(min=1e-30)).item()
        if not far <= limit:  # nor what is no number
            raise ExportError(
                f"The exported file answers something else than the model: its logits differ by {far:.1g} of the "
                f"largest, on images {tuple(images.shape)}. Nothing was written. This torch, {torch.__version__}, or "
                "the runtime has a fault; try another version of either."
            )
        farthest = max(farthest, far)
    return farthest
