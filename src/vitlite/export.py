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
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.export import Dim

from vitlite.errors import ExportError, OptimizedError, missing_extra
from vitlite.images import Preprocess
from vitlite.model import ViT
from vitlite.speed.optimize import OptimizedViT

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

Format = Literal["onnx", "torch"]
SUFFIX = {"onnx": ".onnx", "torch": ".pt2"}
NEAR = {torch.float32: 1e-4, torch.float64: 1e-6}  # max |difference| / max |logit|; other types: 0.05
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
        raise OptimizedError("An optimized model cannot be exported. Create it again and export that.")
    if model.training:
        raise ExportError("A model in training mode would be exported with its dropout. Call model.eval() before.")
    path = Path(path)
    try:
        with TemporaryDirectory(dir=path.parent, prefix=".vitlite-") as folder, torch.no_grad():
            file = Path(folder, path.name)
            {"onnx": _write_onnx, "torch": _write_torch}[to](model, file)
            opened = _open(file, to)
            far = opened and _compare(model, opened)
            for part in Path(folder).iterdir():
                part.replace(path.parent / part.name)
    except FileNotFoundError as error:
        raise ExportError(f"Cannot write {path}: there is no folder {path.parent}. Make it first.") from error
    except OSError as error:
        raise ExportError(f"Cannot write {path}: {error.strerror or error}.") from error
    return far


def _write_torch(model: ViT, file: Path) -> None:
    program = torch.export.export(model, (_images(model, (2, 1, 1)),), dynamic_shapes=(_shapes(model),))
    torch.export.save(program, file, extra_files={"vitlite": _about(model)})


def _write_onnx(model: ViT, file: Path) -> None:
    need_onnx()
    with _quietly():
        program: ONNXProgram | None = torch.onnx.export(
            model,
            (_images(model, (2, 1, 1)),),
            dynamo=True,
            dynamic_shapes=(_shapes(model),),
            input_names=["images"],
            output_names=["logits"],
            verbose=False,
        )
    assert program is not None  # with dynamo=True
    program.model.metadata_props["vitlite"] = _about(model)
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


def _shapes(model: ViT) -> dict[int, Any]:
    """Batch, height and width are free, but for the patches that height and width must divide into."""
    p = model.config.patch_size
    return {0: Dim("batch"), 2: p * Dim("rows"), 3: p * Dim("columns")}


def _images(model: ViT, shape: tuple[int, float, float]) -> Tensor:
    """Noise of so many images, as many times as high and as wide as the model's own."""
    p, (rows, columns) = model.config.patch_size, model.config.grid
    size = (shape[0], model.config.channels, p * max(2, round(rows * shape[1])), p * max(2, round(columns * shape[2])))
    noise = torch.randn(size, generator=torch.Generator().manual_seed(0))
    return noise.to(model.device, model.dtype)


def _about(model: ViT) -> str:
    recipe = model.preprocess.recipe.to_dict() if isinstance(model.preprocess, Preprocess) else None
    return json.dumps({"config": model.config.to_dict(), "labels": model.labels, "preprocess": recipe})


def _open(file: Path, to: Format) -> Callable[[Tensor], Tensor] | None:
    """What runs the file, or None where onnxruntime is missing."""
    if to == "torch":
        return torch.export.load(file).module()
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy(force=True)})[0])


def _compare(model: ViT, run: Callable[[Tensor], Tensor]) -> float:
    """How far the file is from the model at most, on images of three sizes."""
    farthest = 0.0
    for shape in ((2, 1, 1), (1, 1.5, 0.5), (3, 0.5, 1.25)):
        images = _images(model, shape)
        wanted = model(images)
        far = ((run(images).to(wanted) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)).item()
        farthest = max(farthest, far)
        if not far <= NEAR.get(model.dtype, 0.05):
            raise ExportError(
                f"The exported file answers something else than the model: its logits differ by {far:.1g} of the "
                f"largest, on images {tuple(images.shape)}. Nothing was written. This torch, {torch.__version__}, or "
                "the runtime has a fault; try another version of either."
            )
    return farthest
