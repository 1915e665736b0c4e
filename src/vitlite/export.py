"""A model as a file for other runtimes, ONNX or torch.export: any batch, any image size, compared before it is kept.

What a picture needs before it goes in, and the labels of what comes out, are in the file too, as JSON under "vitlite".
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
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim

from vitlite.checkpoints.save import check_savable
from vitlite.errors import CheckpointError, ExportError, OptimizedError, missing_extra, shown
from vitlite.fast.optimize import OptimizedViT
from vitlite.images.transform import transform_alone
from vitlite.nn.vit import ViT
from vitlite.storage import beginning_of, locked, obstacle, replacing
from vitlite.versions import since

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

Format = Literal["onnx", "torch"]
Run = Callable[[Tensor], Tensor]  # images -> logits
Opened = Callable[[Path], Run | None]  # an exported file -> what runs it, where its engine is installed
SUFFIX = {"onnx": ".onnx", "torch": ".pt2"}
LEAST = {"onnx": 1, "torch": 2}  # patches each way: of torch.export, a side of one is another program's
NEAR = {torch.float32: 1e-4, torch.float64: 1e-6}  # max |difference| / max |logit|
NEAR_OTHERS = 0.05
ONE_FILE = 1 << 30  # bytes; above, ONNX keeps weights in a second file, since protobuf ends at 2 GiB
WEIGHTS_BESIDE = rb"\.[0-9a-f]{16}\.data"  # how the name of that file ends
MOST_WITHOUT_WEIGHTS = 1 << 26  # bytes of the first file, where there is a second
WORKPLACE = ".vitlite-export-"  # how a folder is called in which a file is made and compared
LOCK = "lock"


def export(model: ViT, path: str | PathLike[str], *, to: Format) -> dict[str, float]:
    """Writes a model for another runtime, runs the file on three batches, and keeps it if it answers the same.

    Args:
        model: In eval mode, and not optimized. Its device and dtype become the file's.
        path: The file to write. What was there is replaced once the new file is right.
        to: "onnx", with an input `images` and an output `logits`, or "torch", for `torch.export.load`; this one refuses
            images that are a single patch high or wide.

    Returns:
        How far the file's logits are from the model's, max |difference| / max |logit|, by the engine that ran it:
        "torch", or those of "onnxruntime" and "openvino" that are installed. Where none is, nothing was compared.

    Raises:
        ExportError: No such format, a model in training mode or with other parts than its config says, a file that
            cannot be written, or one that answers something else.
        OptimizedError: The model was optimized before.
        MissingExtraError: onnx or onnxscript is not installed.

    >>> import vitlite
    >>> model = vitlite.create("vit_nano_4.cifar10")
    >>> export(model, "model.pt2", to="torch")["torch"] < 1e-6
    True
    """
    if to not in SUFFIX:
        raise ExportError(f"Cannot export to {to!r}. Valid: {', '.join(SUFFIX)}.")
    path = check_target(path)
    if model.source is not None and path.exists() and path.samefile(model.source.path):
        raise ExportError(f"{path} is the file that this model was loaded from. Name another.")
    _check_model(model, path)
    compared: dict[str, float] = {}
    try:
        alone = torch.autocast(model.device.type, enabled=False)  # one around would become part of the file
        with _workplace(path) as folder, torch.no_grad(), alone:
            file = folder / path.name
            if to == "onnx":
                _write_onnx(model, file)
            else:
                _write_torch(model, file)
            for engine, opened in ENGINES[to].items():
                run = _opened_by(engine, opened, file, model)
                if run is not None:
                    compared[engine] = _compare(model, run, engine)
            _move_into_place(folder, path)
    except OSError as error:
        raise ExportError(f"Cannot write {path}: {error.strerror or error}.") from error
    return compared


def _check_model(model: ViT, path: Path) -> None:
    """Makes sure that a model is what its config says, which goes into the file: what could not be saved is refused.

    Raises:
        ExportError: It is in training mode, or has other parts, tensors or labels.
        OptimizedError: It was optimized.
    """
    if isinstance(model, OptimizedViT):
        raise OptimizedError("An optimized model cannot be exported.", python="Create it again and export that.")
    if model.training:
        raise ExportError(
            "A model in training mode would be exported with its dropout.", python="Call model.eval() before."
        )
    try:
        check_savable(model, path)
    except CheckpointError as error:
        raise ExportError(error.text, python=error.python, command=error.command) from None


def check_target(path: str | PathLike[str]) -> Path:
    """The file to write, once it is known that it may be.

    Raises:
        ExportError: It is a folder or a device, or in no folder.
    """
    path = Path(path)
    in_the_way = obstacle(path)
    if not in_the_way and path.suffix == SUFFIX["onnx"]:  # as its weights may stand in a file of a longer name
        in_the_way = obstacle(path.with_name(_name_of_weights(path)))
    if in_the_way:
        raise ExportError(
            f"Cannot write {path}: {in_the_way}.", python="Name a file in a folder that exists and can be written."
        )
    return path


@contextmanager
def _workplace(path: Path) -> Iterator[Path]:
    """A folder beside `path` for what is not known to be right yet; those that a killed export left are removed.

    Theirs nobody holds the lock of any more.
    """
    for left in path.parent.glob(f"{WORKPLACE}{8 * '[a-z0-9_]'}"):
        if left.joinpath(LOCK).is_file():
            # An error where another process is at work there, or another user's was.
            with suppress(OSError), locked(left / LOCK, wait=False):
                shutil.rmtree(left)
    with (
        TemporaryDirectory(dir=path.parent, prefix=WORKPLACE, ignore_cleanup_errors=True) as name,
        locked(Path(name, LOCK), wait=False),
    ):
        yield Path(name)


def _move_into_place(folder: Path, path: Path) -> None:
    """Every file of the folder goes beside `path`, the one that names the others last; nothing else is overwritten."""
    before = _weights_beside(path)
    files = [file for file in folder.iterdir() if file.name not in (path.name, LOCK)]
    for file in (*files, folder / path.name):
        with replacing(path.parent / file.name) as temporary:
            file.replace(temporary)
    for file in before:
        if not _is_named_beside(file):
            with suppress(PermissionError):  # on Windows, of a session that has it open
                file.unlink(missing_ok=True)


def _is_named_beside(weights: Path) -> bool:
    """Whether another file of the folder, such as a copy of an exported one, has its weights there."""
    others = (file for file in weights.parent.iterdir() if file.suffix != weights.suffix)
    return any(weights.name.encode() in beginning_of(file, MOST_WITHOUT_WEIGHTS) for file in others)


def _weights_beside(path: Path) -> list[Path]:
    """The file with the weights of an exported one, as only exporting names it."""
    if not path.is_file():
        return []
    pattern = re.escape(path.name).encode() + WEIGHTS_BESIDE
    with open(path, "rb") as file:
        content = file.read(MOST_WITHOUT_WEIGHTS + 1)
    if len(content) > MOST_WITHOUT_WEIGHTS:  # it has its weights in it
        return []
    return [path.parent / name.decode() for name in set(re.findall(pattern, content))]


def _write_torch(model: ViT, file: Path) -> None:
    with _explained():
        program = torch.export.export(model, (_images(model, TRACED),), dynamic_shapes=(_dynamic_shapes(model),))
    content = io.BytesIO()  # where torch itself writes a file and the disk is full, the process is aborted
    torch.export.save(program, content, extra_files={"vitlite": _description(model)})
    file.write_bytes(content.getbuffer())


def _write_onnx(model: ViT, file: Path) -> None:
    need_onnx()
    with _quietly(), _explained():
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
    if weights <= ONE_FILE:
        program.save(file)
        return
    import onnx_ir

    # No name that somebody's file could have, nor that of the weights which this export may be about to replace.
    onnx_ir.save(program.model, file, external_data=_name_of_weights(file))


def _name_of_weights(path: Path) -> str:
    """A name as `WEIGHTS_BESIDE` says, which nobody has."""
    return f"{path.name}.{secrets.token_hex(8)}.data"


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


@contextmanager
def _explained() -> Iterator[None]:
    """Says of whatever an exporter raises, which may be anything, that it is not the model's fault."""
    try:
        yield
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ExportError(f"torch cannot export this model ({shown(first_line)}). {_fault()}") from error


def _fault() -> str:
    """Which torch exports what vitlite is made of."""
    return f"This torch, {torch.__version__}, or the engine has a fault: from torch {since('export')} on none is known."


def _dynamic_shapes(model: ViT) -> dict[int, Any]:
    """Batch, height and width are free, but for the patches that height and width must divide into."""
    p = model.config.patch_size
    return {0: Dim("batch", max=2**31 - 1), 2: p * Dim("rows"), 3: p * Dim("columns")}


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
    transform = transform_alone(model.preprocess, "An exported file")
    pictures = transform.to_dict() if transform else None
    return json.dumps({"config": model.config.to_dict(), "labels": model.labels, "preprocess": pictures})


def _open_torch(file: Path) -> Run:
    with _quietly():  # torch 2.10 warns of its own buffers
        return torch.export.load(file).module()


def _open_onnx(file: Path) -> Run | None:
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


def _open_openvino(file: Path) -> Run | None:
    """The same by OpenVINO, in the precision of the file, which it would change on some CPUs."""
    try:
        import openvino  # type: ignore[import-not-found]
    except ImportError:
        return None
    hints = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(file), "CPU", hints)

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(compiled(images.numpy(force=True))[0])

    return run


ENGINES: dict[str, dict[str, Opened]] = {
    "onnx": {"onnxruntime": _open_onnx, "openvino": _open_openvino},
    "torch": {"torch": _open_torch},
}


def _opened_by(engine: str, opened: Opened, file: Path, model: ViT) -> Run | None:
    """What runs a file, or None where the engine is missing.

    Raises:
        ExportError: It cannot open it.
    """
    try:
        return opened(file)
    except Exception as error:  # each engine has errors of its own
        advice = "" if model.dtype is torch.float32 else "Export it in float32, for which engines have all operators."
        raise ExportError(
            f"The exported file, in {model.dtype}, does not run: {engine} says: {shown(str(error))}. Nothing was "
            f"written. {advice or _fault()}"
        ) from error


def _compare(model: ViT, run: Run, engine: str) -> float:
    """How far the file is from the model at most, on images of three sizes."""
    limit = NEAR.get(model.dtype, NEAR_OTHERS)
    farthest = 0.0
    for batch in COMPARED:
        images = _images(model, batch)
        wanted = model(images)
        difference = (_answer(run, images, engine).to(wanted) - wanted).abs().max()
        far = (difference / wanted.abs().max().clamp(min=1e-30)).item()
        if not far <= limit:  # nor what is no number
            raise ExportError(
                f"The exported file answers something else than the model: in {engine}, its logits differ by {far:.1g} "
                f"of the largest, on images {tuple(images.shape)}. Nothing was written. {_fault()}"
            )
        farthest = max(farthest, far)
    return farthest


def _answer(run: Run, images: Tensor, engine: str) -> Tensor:
    """What an engine makes of a file.

    Raises:
        ExportError: It cannot run it.
    """
    try:
        return run(images)
    except Exception as error:  # each engine has errors of its own
        raise ExportError(
            f"The exported file does not run: {engine} says of images {tuple(images.shape)}: {shown(str(error))}. "
            f"Nothing was written. {_fault()}"
        ) from error
