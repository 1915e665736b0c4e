"""A file, understood, and a config -> a model that is filled from it, strictly, with a report on every tensor.

The model is built on meta, so that nothing is allocated twice, and filled tensor by tensor in the order of the file.
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
from vitlite.zoo.verify import Verified

LONGEST_DIFF = 40  # lines


@dataclass(frozen=True)
class LoadReport:
    """What became of every tensor, with shapes: under our names, the dropped ones under the file's."""

    format: str
    loaded: Mapping[str, Shape] = field(repr=False)
    resampled: Mapping[str, tuple[Shape, Shape]]  # before and after: the position table, the kernel
    reinitialised: Mapping[str, Shape]
    dropped: Mapping[str, Shape]
    supplied: Mapping[str, Shape]  # what the format leaves out and its code defines: zero biases, an identity
    provenance: Mapping[str, str] = field(repr=False)  # who said each field of the config
    unlabelled: str = ""  # why the labels beside the file are not the model's, where there are some


@dataclass(frozen=True)
class Source:
    """Where a model's weights came from; `path` is a file, or the index of its shards."""

    path: Path
    sha256: str  # of the file; of shards: of their hashes, joined in the order of their names
    verified: Verified | None  # None: a local file, hashed and compared with nothing
    report: LoadReport
    name: str | None = None  # in the zoo
    repo: str | None = None
    commit: str | None = None


class BuildOptions(NamedTuple):
    """What the model shall be: the file's own config, or one that differs in what may differ."""

    config: ViTConfig
    new_head: bool  # zeros in place of the trained head
    device: torch.device
    dtype: torch.dtype


def build(
    file: WeightsFile,
    mapping: KeyMapping,
    config: ViTConfig,
    wish: BuildOptions,
    provenance: Mapping[str, str],
    *,
    scan: bool,
) -> tuple[ViT, LoadReport]:
    """Builds the model wished for and fills it from the file, which must have all that its own config wants, no more.

    Args:
        file: Open.
        mapping: Where our tensors are in it.
        config: The file's own.
        wish: What to build.
        provenance: Who said each field of the config, for the report.
        scan: Whether to look for values that are not finite.

    Raises:
        CheckpointError: The file does not fit its config, or is damaged.
    """
    with torch.device("cpu"):  # where files are read, whatever the default is
        model = model_on_meta(wish.config)
        check_tensors(file, mapping, model if wish.config == config else model_on_meta(config))
        _refuse_other_periods(file, mapping)
        filling = Filling(file, mapping, config, wish, scan)
        wanted = _parameter_shapes(model)
        state: dict[str, Tensor] = {}
        for name in _in_file_order(file, mapping):
            if name in wanted and not (wish.new_head and name.startswith("head.")):
                state[name] = filling.tensor(name, wanted[name])
        renewed = {name: shape for name, shape in wanted.items() if name not in state}
        report = _report(file, mapping, state, filling.resampled, renewed, provenance)
        for name, shape in renewed.items():
            state[name] = torch.zeros(shape, dtype=wish.dtype, device=wish.device)
        model.load_state_dict(state, assign=True)
    return model, report


def _parameter_shapes(model: ViT) -> dict[str, Shape]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}  # a ViT has no buffers


def _in_file_order(file: WeightsFile, mapping: KeyMapping) -> list[str]:
    """Our names, in the order in which their parts stand in the file."""
    place = {name: i for i, name in enumerate(file.entries)}
    return sorted(mapping.tensors, key=lambda name: [place[part] for part in mapping.tensors[name].parts])


def check_tensors(file: WeightsFile, mapping: KeyMapping, model: ViT) -> None:
    """Compares the tensors that a model has with those found in a file.

    Raises:
        CheckpointError: They differ; the difference in the file's own names, - what is missing, + what is there.
    """
    wanted = _parameter_shapes(model)
    found = mapping.tensors
    lines: list[tuple[str, str]] = []
    for name, shape in wanted.items():
        if name not in found or found[name].shape != shape:
            lines.append(("-", f"{' + '.join(mapping.format.spell(mapping.prefix, name))} {shape}"))
    for name, tensor in found.items():
        if tensor.shape != wanted.get(name):
            lines.append(("+", f"{' + '.join(tensor.parts) or name} {tensor.shape}"))
    for name in mapping.unknown:
        lines.append(("+", f"{name} {file.shapes[name]}"))
    if not lines:
        return
    lines.sort(key=lambda line: (line[1].split()[0], line[0] == "+"))
    shown = [f"{sign} {text}" for sign, text in lines[:LONGEST_DIFF]]
    if len(lines) > LONGEST_DIFF:
        shown.append(f"... and {len(lines) - LONGEST_DIFF} more")
    raise CheckpointError(
        f"{file.path} ({mapping.format.name} format) does not fit its config: - is missing, + is there instead\n"
        + "\n".join(shown)
    )


def _refuse_other_periods(file: WeightsFile, mapping: KeyMapping) -> None:
    """Makes sure that a file which has the periods of its rotation turns as DINOv3 does; some are rounded to bfloat16.

    Raises:
        CheckpointError: It does not.
    """
    for name in mapping.dropped:
        if name.endswith(".periods"):
            periods = file.read(name).float()
            steps = torch.arange(len(periods), dtype=torch.float32, device=periods.device)
            wanted = 100 ** (steps / len(periods))
            if not torch.allclose(periods, wanted, rtol=2**-8, atol=0):
                raise CheckpointError(
                    f"{file.path}: {name} are not those of DINOv3, {wanted.tolist()[:4]}, ..., but "
                    f"{periods.tolist()[:4]}, ... vitlite runs no other rotation."
                )


class Filling:
    """Makes our tensors of a file's, one after the other, as a model wants them."""

    def __init__(
        self, file: WeightsFile, mapping: KeyMapping, config: ViTConfig, wish: BuildOptions, scan: bool
    ) -> None:
        self.file, self.mapping, self.config, self.wish, self.scan = file, mapping, config, wish, scan
        self.resampled: dict[str, tuple[Shape, Shape]] = {}
        self._last_read: dict[str, Tensor] = {}  # kept in case that the next of ours is made of the same

    def tensor(self, name: str, wanted: Shape) -> Tensor:
        """One of our tensors, of the device and type wished for.

        Raises:
            CheckpointError: It has values that are not finite.
        """
        found = self.mapping.tensors[name]
        value = self._read(found)
        changed = self._changed(name, value)
        if changed is not None:
            value = changed
            self.resampled[name] = found.shape, wanted
        value = value.to(self.wish.dtype)
        if self.scan or changed is not None or self._may_overflow(found):
            self._refuse_infinite(found, value)
        return value.to(self.wish.device)

    def _read(self, found: MappedTensor) -> Tensor:
        if found.op == "identity":
            return torch.eye(found.shape[0])
        if not found.parts:
            return torch.zeros(found.shape)
        for name in self._last_read.keys() - set(found.parts):
            del self._last_read[name]
        for name in found.parts:
            if name not in self._last_read:
                self._last_read[name] = self.file.read(name)
        if found.op == "same" and found.row is None:
            return self._last_read.pop(found.parts[0])
        parts = [self._last_read[name] for name in found.parts]
        if found.row is not None:
            parts = [part[found.row] for part in parts]
        return OPS[found.op](parts, self.mapping.patch_size).contiguous()

    def _changed(self, name: str, value: Tensor) -> Tensor | None:
        """The tensor for another image size, other patches or other channels; None where it stays as it is."""
        config, target = self.config, self.wish.config
        if name == "pos_embed" and target.grid != config.grid:
            return resample_positions(value.float(), config.grid, target.grid, target.resample)
        pixels = first_kernel(config.stem)
        if name != pixels or (target.channels, target.patch_size) == (config.channels, config.patch_size):
            return None
        if target.channels != config.channels:
            value = recolor(value.float(), target.channels)
        if target.patch_size != config.patch_size:
            value = resample_kernel(value.float(), target.patch_size, target.resample)
        return value

    def _may_overflow(self, found: MappedTensor) -> bool:
        """Whether the type wished for holds smaller numbers than the file's."""
        largest = torch.finfo(self.wish.dtype).max
        return any(torch.finfo(self.file.dtype(part)).max > largest for part in found.parts)

    def _refuse_infinite(self, found: MappedTensor, value: Tensor) -> None:
        if not is_finite(value):
            raise CheckpointError(
                f"{self.file.path}: {', '.join(found.parts)} has values that are not finite in {self.wish.dtype}. "
                "The file is damaged, or its numbers are too large for this dtype."
            )


def _report(
    file: WeightsFile,
    mapping: KeyMapping,
    filled: Mapping[str, Tensor],
    resampled: Mapping[str, tuple[Shape, Shape]],
    renewed: Mapping[str, Shape],
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
    return LoadReport(mapping.format.name, loaded, resampled, renewed, dropped, supplied, provenance)


def is_finite(values: Tensor) -> bool:
    """Whether all values are. A sum is finite only where all are, and takes a fifth of the time of asking each."""
    narrow = values.dtype in (torch.float16, torch.bfloat16)
    total = values.sum(dtype=torch.float32) if narrow else values.sum()
    return bool(total.isfinite()) or bool(values.isfinite().all())


def recolor(kernel: Tensor, channels: int) -> Tensor:
    """timm's rule: one channel sees the sum; more take turns repeating the old ones, scaled to keep the sum."""
    old = kernel.shape[1]
    if channels == 1:
        return kernel.sum(1, keepdim=True)
    rounds = -(-channels // old)
    return kernel.repeat(1, rounds, 1, 1)[:, :channels] * (old / channels)


def resample_kernel(kernel: Tensor, patch: int, method: Resample = "timm") -> Tensor:
    """FlexiViT's rule: what a kernel gives for a patch, the new one gives for that patch resized: (d, c, p, p).

    Resizing is a matrix, and the kernel is multiplied with its pseudo-inverse (Beyer et al. 2023, section 3.4). As in
    timm, a patch is resized bilinearly where the position table is, which FlexiViT was trained for; else bicubically.
    """
    old = kernel.shape[-1]
    pixels = torch.eye(old * old, dtype=torch.float64).view(-1, 1, old, old)  # each alone in a patch
    mode = RESAMPLE[method]["mode"]
    resized = F.interpolate(pixels, size=(patch, patch), mode=mode, antialias=mode == "bicubic")
    inverse = torch.linalg.pinv(resized.flatten(1).T)  # (p p of old, p p of new)
    new = kernel.double().flatten(2) @ inverse
    return new.unflatten(2, (patch, patch)).to(kernel.dtype)
