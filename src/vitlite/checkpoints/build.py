"""Build a model from the tensors of an open weights file, and report how each tensor was used.

The model is built on the meta device, and the tensors from the file are assigned to it. Memory is thus allocated once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlite.checkpoints.key_mapping import OPS, KeyMapping, MappedTensor, first_kernel
from vitlite.checkpoints.reader import Shape, WeightsFile
from vitlite.config import Resample, ViTConfig
from vitlite.errors import CheckpointError
from vitlite.nn.positions import RESAMPLE, resample_positions
from vitlite.nn.vit import ViT, model_on_meta
from vitlite.storage import Verified

MAX_DIFF = 40  # lines
SMALL = 10_000  # elements; `sample_of_weights` returns smaller weights, such as biases and norms, completely


@dataclass(frozen=True)
class LoadReport:
    """A report on how each tensor was loaded, available as `model.source.report`.

    Attributes:
        format: The checkpoint format of the file, such as "timm".
        loaded: The names and shapes of the model's tensors that were loaded unchanged.
        resampled: The names of the model's tensors that were resized, with the shapes before and after.
        reinitialised: The names and shapes of the model's tensors that were set to zero for a new head.
        dropped: The names and shapes of the tensors in the file that the model does not use.
        supplied: The names and shapes of the model's tensors that are not in the file because the format implies their
            values, such as zero biases.
        provenance: The source of each config field, such as "config.json", and assumptions about the network.
        unlabelled: The reason why the labels of the checkpoint were not used, or "" if there is none.
    """

    format: str
    loaded: Mapping[str, Shape] = field(repr=False)
    resampled: Mapping[str, tuple[Shape, Shape]]
    reinitialised: Mapping[str, Shape]
    dropped: Mapping[str, Shape]
    supplied: Mapping[str, Shape]
    provenance: Mapping[str, str] = field(repr=False)
    unlabelled: str = ""


@dataclass(frozen=True)
class Source:
    """The origin of a model's weights, available as `model.source`.

    Attributes:
        path: The weights file, or the index of the shards.
        sha256: The hash of the file. For shards, the hash of the concatenated hashes of all shards.
        verified: What the hash was compared with: "record" (the hash in vitlite's registry), "hub" (the hash that the
            Hub reported) or "first use" (no other hash was known). None for a local file.
        report: The report on how each tensor was loaded.
        name: The name of the zoo checkpoint that was loaded or passed as `like`, or None.
        repo: The repository on the Hub, or None for a local file.
        commit: The commit of the repository, or None for a local file.
    """

    path: Path
    sha256: str
    verified: Verified | None
    report: LoadReport
    name: str | None = None
    repo: str | None = None
    commit: str | None = None


class BuildOptions(NamedTuple):
    """Options of `build`: the config of the new model, its head, its device and its dtype."""

    target: ViTConfig  # the config of the weights with the changes that the caller asked for
    new_head: bool  # True: a head of zeros instead of the trained head
    device: torch.device
    dtype: torch.dtype


def build(
    file: WeightsFile,
    mapping: KeyMapping,
    config: ViTConfig,
    options: BuildOptions,
    provenance: Mapping[str, str],
    *,
    check_finite: bool,
) -> tuple[ViT, LoadReport]:
    """Build a model and load the weights from a file.

    Args:
        file: The open file.
        mapping: The mapping from the tensors of the model to the tensors of the file.
        config: The config of the weights. It must fit the tensors of the file exactly.
        options: The config, head, device and dtype of the new model.
        provenance: The source of each config field, for the report.
        check_finite: If True, check that all values are finite. Otherwise, the file was checked before: check only
            tensors that are resized or whose values may be too large for the dtype.

    Raises:
        CheckpointError: The tensors do not fit the config, or the file is damaged.
    """
    with torch.device("cpu"):  # reading must not depend on the default device
        model = model_on_meta(options.target)
        check_tensors(file, mapping, model if options.target == config else model_on_meta(config))
        for name in mapping.dropped:
            if name.endswith(".periods"):
                _check_periods(file, name)
        shapes = parameter_shapes(model)
        state: dict[str, Tensor] = {}
        resampled: dict[str, tuple[Shape, Shape]] = {}
        position = {name: i for i, name in enumerate(file.entries)}
        # The values read for the previous tensor, because big_vision stacks the tensors of all blocks in one.
        parts: dict[str, Tensor] = {}
        in_file_order = sorted(([position[part] for part in t.parts], name) for name, t in mapping.tensors.items())
        for _, name in in_file_order:
            tensor = mapping.tensors[name]
            if name not in shapes or (options.new_head and name.startswith("head.")):
                continue
            parts = {part: parts[part] if part in parts else file.read(part) for part in tensor.parts}
            value = _combine(tensor, parts, mapping.patch_size)
            adapted = _adapt(name, value, config, options.target)
            if adapted is not value:
                resampled[name] = tensor.shape, shapes[name]
            state[name] = adapted.to(options.dtype)
            largest = max((torch.finfo(file.dtype(part)).max for part in tensor.parts), default=0.0)
            # The file was not checked before, the values have changed, or they may be too large for the dtype.
            if check_finite or adapted is not value or largest > torch.finfo(options.dtype).max:
                _check_finite(file, tensor, state[name])
            state[name] = state[name].to(options.device)
        new = {name: shape for name, shape in shapes.items() if name not in state}
        report = _report(file, mapping, state, resampled, new, provenance)
        for name, shape in new.items():
            state[name] = torch.zeros(shape, dtype=options.dtype, device=options.device)
        model.load_state_dict(state, assign=True)
    return model, report


def parameter_shapes(model: ViT) -> dict[str, Shape]:
    """Return the shapes of a model's parameters by name. A `ViT` has no buffers."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def check_tensors(file: WeightsFile, mapping: KeyMapping, model: ViT) -> None:
    """Compare the tensors in a file with the tensors that a model needs.

    Raises:
        CheckpointError: There are differences. The message lists them with the tensor names of the file.
    """
    expected = parameter_shapes(model)
    if not mapping.unknown and expected == {name: tensor.shape for name, tensor in mapping.tensors.items()}:
        return
    lines: list[tuple[str, str]] = []
    for name, shape in expected.items():
        if name not in mapping.tensors or mapping.tensors[name].shape != shape:
            lines.append(("-", f"{' + '.join(mapping.format.spell(mapping.prefix, name))} {shape}"))
    for name, tensor in mapping.tensors.items():
        if tensor.shape != expected.get(name):
            lines.append(("+", f"{' + '.join(tensor.parts) or name} {tensor.shape}"))
    for name in mapping.unknown:
        lines.append(("+", f"{name} {file.shapes[name]}"))
    lines.sort(key=lambda line: (line[1].split()[0], line[0] == "+"))
    diff = [f"{sign} {text}" for sign, text in lines[:MAX_DIFF]]
    if len(lines) > MAX_DIFF:
        diff.append(f"... and {len(lines) - MAX_DIFF} more")
    raise CheckpointError(
        f"The tensors in {file.path} ({mapping.format.name} format) do not fit the config. Check that the config "
        "belongs to these weights. Differences (- expected, + in the file):\n" + "\n".join(diff)
    )


def _check_periods(file: WeightsFile, name: str) -> None:
    """Check that the periods of rotary positions in a file equal DINOv3's, except for rounding to bfloat16.

    Raises:
        CheckpointError: The file contains other periods.
    """
    periods = file.read(name).float()
    expected = 100 ** (torch.arange(len(periods), dtype=torch.float32) / len(periods))
    if not torch.allclose(periods, expected, rtol=2**-8, atol=0):
        raise CheckpointError(
            f"{file.path} has rotary positions that vitlite does not support: the periods {name} must be "
            f"DINOv3's, {expected.tolist()[:4]}, ..., got {periods.tolist()[:4]}, ..."
        )


def _combine(tensor: MappedTensor, parts: dict[str, Tensor], patch_size: int | None) -> Tensor:
    """Compute a tensor of the model from tensors of the file."""
    if tensor.op == "identity":
        return torch.eye(tensor.shape[0])
    if not parts:
        return torch.zeros(tensor.shape)
    values = [parts[name] if tensor.row is None else parts[name][tensor.row] for name in tensor.parts]
    return OPS[tensor.op](values, patch_size).contiguous()


def _adapt(name: str, value: Tensor, config: ViTConfig, target: ViTConfig) -> Tensor:
    """Return a tensor adapted to the image size, patch size and channels of `target`, or unchanged."""
    if name == "pos_embed" and target.grid != config.grid:
        return resample_positions(value.float(), config.grid, target.grid, target.resample)
    changed = (target.channels, target.patch_size) != (config.channels, config.patch_size)
    if changed and name == first_kernel(config.stem):
        if target.channels != config.channels:
            value = adapt_channels(value.float(), target.channels)
        if target.patch_size != config.patch_size:
            value = resample_kernel(value.float(), target.patch_size, target.resample)
    return value


def adapt_channels(kernel: Tensor, channels: int) -> Tensor:
    """Adapt a patch kernel to another number of image channels. The computation is the same as in timm.

    For one channel, the channels of the kernel are summed. Otherwise, they are repeated and rescaled.
    """
    old = kernel.shape[1]
    if channels == 1:
        return kernel.sum(1, keepdim=True)
    rounds = -(-channels // old)
    return kernel.repeat(1, rounds, 1, 1)[:, :channels] * (old / channels)


def resample_kernel(kernel: Tensor, patch_size: int, method: Resample = "timm") -> Tensor:
    """Resize a patch kernel of shape (d, c, p, p) so that a resized patch gives the same token as the original patch.

    The kernel is multiplied by the pseudo-inverse of the matrix that resizes a patch (Beyer et al. 2023, section 3.4).
    Patches are resized bilinearly if `method` resizes position tables bilinearly (FlexiViT), otherwise bicubically
    (timm).
    """
    old = kernel.shape[-1]
    pixels = torch.eye(old * old, dtype=torch.float64).view(-1, 1, old, old)  # one patch for each pixel
    mode = RESAMPLE[method]["mode"]
    resized = F.interpolate(pixels, size=(patch_size, patch_size), mode=mode, antialias=mode == "bicubic")
    inverse = torch.linalg.pinv(resized.flatten(1).T)  # (p p of old, p p of new)
    new = kernel.double().flatten(2) @ inverse
    return new.unflatten(2, (patch_size, patch_size)).to(kernel.dtype)


def _check_finite(file: WeightsFile, tensor: MappedTensor, value: Tensor) -> None:
    if not is_finite(value):
        raise CheckpointError(
            f"{file.path}: {', '.join(tensor.parts)} contains NaN or infinity in {value.dtype}. The file is damaged, "
            "or its values are too large for this dtype. Pass dtype=torch.float32 (--dtype float32), or download the "
            "file again."
        )


def is_finite(values: Tensor) -> bool:
    """Return whether all values are finite. The sum is checked first, because this takes a fifth of the time."""
    narrow = values.dtype in (torch.float16, torch.bfloat16)
    total = values.sum(dtype=torch.float32) if narrow else values.sum()
    return bool(total.isfinite()) or bool(values.isfinite().all())


def sample_of_weights(model: ViT) -> Tensor:
    """Return some elements of each weight, to detect changes after loading (see `fingerprint.hash_of_source`).

    The head is left out, because it does not affect embeddings. Hashing all weights of a ViT-B instead would take a
    third of a second.
    """
    parts = []
    for name, weight in model.named_parameters():
        if not name.startswith("head."):
            # One element of each row. The -1 moves the column from row to row.
            step = 1 if weight.numel() <= SMALL else max(weight.shape[-1] - 1, 1)
            parts.append(weight.detach().flatten()[::step])
    sample = torch.cat(parts) if parts else torch.empty(0, device="cpu")
    return sample if sample.is_meta else sample.cpu()


def _report(
    file: WeightsFile,
    mapping: KeyMapping,
    filled: Mapping[str, Tensor],
    resampled: Mapping[str, tuple[Shape, Shape]],
    new: Mapping[str, Shape],
    provenance: Mapping[str, str],
) -> LoadReport:
    loaded: dict[str, Shape] = {}
    supplied: dict[str, Shape] = {}
    dropped = {part: file.shapes[part] for part in mapping.dropped}
    for name, tensor in mapping.tensors.items():
        if name not in filled:
            dropped |= {part: file.shapes[part] for part in tensor.parts}
        elif not tensor.parts:
            supplied[name] = tensor.shape
        elif name not in resampled:
            loaded[name] = tensor.shape
    return LoadReport(mapping.format.name, loaded, resampled, new, dropped, supplied, provenance)
