"""A file -> what is in it -> a config and, strictly, a model.

The header of a safetensors file is checked by the format's own library, opened with backend="pread" (0.8 on), so that
nothing is mapped. The bytes are read here, each tensor once and straight into its own memory: for ViT-B in 0.14 CPU
seconds, as one read of the whole file, where the library takes 0.17. Google's .npz is read with the standard library.
Nothing here passes through numpy or unpickles.
"""

import ast
import ctypes
import json
import math
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import safetensors
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitlite.config import ViTConfig
from vitlite.errors import CheckpointError, ConfigError
from vitlite.model import ViT, resample_positions
from vitlite.weights.layouts import OPS, Found, Layout, Shape, Translation, facts, translate
from vitlite.weights.sidecar import Description, describe, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NPY_TYPES = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "|V2": "BF16"}  # numpy has no name for bfloat16
PICKLES = (".bin", ".pth", ".pt", ".th", ".ckpt")

CHOICES = ("resample", "dropout", "drop_path", "checkpointing")  # no facts of a file: config= decides, else the file
UNTOLD = ("image_size", "positions", "heads", "norm_eps", "gelu", "pool")  # what tensors may leave open
USER = "config= says"
LOOSE = ("pool", "norm_eps", "gelu", "cls_position", "head_dim")  # files and records may differ; we follow the file


@dataclass(frozen=True)
class LoadReport:
    """What became of every tensor, with shapes: under our names, the dropped ones under the file's."""

    layout: str
    loaded: Mapping[str, Shape] = field(repr=False)
    resampled: Mapping[str, tuple[Shape, Shape]]  # before and after: the position table, the channels of the kernel
    reinitialised: Mapping[str, Shape]
    dropped: Mapping[str, Shape]
    supplied: Mapping[str, Shape]  # what the layout leaves out and its code defines: zero biases, an identity


@dataclass(frozen=True)
class Source:
    """Where a model's weights came from; `path` is a file, or the index of its shards."""

    path: Path
    sha256: str  # of the file; of shards: of their hashes, joined in the order of their names
    verified: Literal["record", "hub", "first use"] | None  # None: a local file, hashed and compared with nothing
    report: LoadReport
    name: str | None = None  # in the zoo
    repo: str | None = None
    commit: str | None = None


class Claim(NamedTuple):
    """What somebody says of a config. Firm: contradicting what is known is an error; else it fills in the rest."""

    who: str
    fields: Mapping[str, Any]
    firm: bool = True


class Entry(NamedTuple):
    """One tensor of a file, not read yet."""

    shape: Shape
    dtype: str  # as safetensors writes it
    read: Callable[[], Tensor]


class Checkpoint:
    """What is in a weights file, or in all shards of one: names, shapes and types, and values when they are wanted."""

    def __init__(self, path: Path, files: Sequence[Path], entries: Mapping[str, Entry], about: Description) -> None:
        self.path, self.files, self.entries, self.about = path, files, entries, about
        self.shapes = {name: entry.shape for name, entry in entries.items()}

    def understand(self, claims: Sequence[Claim]) -> tuple[Translation, ViTConfig]:
        """Where our tensors are in it, and its config.

        Raises:
            CheckpointError: it is no plain ViT, or claims contradict it.
            ConfigError: neither the tensors nor the claims tell all of the config.
        """
        self.patch = next((claim.fields["patch_size"] for claim in claims if "patch_size" in claim.fields), None)
        try:
            translation = translate(self.shapes, self.patch)
            known = facts(translation, self.shapes)
            for name in {part for tensor in translation.found.values() for part in tensor.parts}:
                if (kind := self.entries[name].dtype) not in FLOATS:
                    raise CheckpointError(
                        f"{name} is of type {kind}, and vitlite reads {', '.join(FLOATS)}: quantised weights, fp8 and "
                        "whole numbers are refused, objects never unpickled. Get the file in a floating-point type."
                    )
            return translation, resolve(translation.layout, known, claims)
        except (CheckpointError, ConfigError) as error:
            raise type(error)(f"{self.path}: {error}") from error

    def produce(self, found: Found, last: dict[str, Tensor]) -> Tensor:
        """Reads one of our tensors. `last` keeps what was read for it, in case the next is made of the same."""
        if not found.parts:
            return torch.eye(found.shape[0]) if found.op == "identity" else torch.zeros(found.shape)
        for name in last.keys() - set(found.parts):
            del last[name]
        for name in found.parts:
            if name not in last:
                last[name] = _whole(self.path, self.entries[name].read)
        if found.op == "same" and found.row is None:
            return last.pop(found.parts[0])
        parts = [last[name] if found.row is None else last[name][found.row] for name in found.parts]
        return OPS[found.op](parts, self.patch).contiguous()


@contextmanager
def open_checkpoint(path: Path, described: bool = True) -> Iterator[Checkpoint]:
    """Opens a file, a folder, or an index of shards; `described`: what a config.json says of it counts too.

    Raises:
        CheckpointError: there are no weights, or they are damaged, or pickled.
    """
    if sys.byteorder != "little":
        raise CheckpointError(f"{path} cannot be read here: weights files are little-endian, and this machine is not.")
    beside = described and (path.is_dir() or path.name in (WEIGHTS, INDEX))
    path, files = files_of(path)
    entries: dict[str, Entry] = {}
    with ExitStack() as stack:
        for file in files:
            found = _whole(file, _npz if file.suffix == ".npz" else _safetensors, file, stack)
            if double := entries.keys() & found:
                raise CheckpointError(f"{path}: more than one shard has {', '.join(sorted(double))}.")
            entries |= found
        about = _whole(path.parent / "config.json", describe, path.parent) if beside else Description()
        yield Checkpoint(path, files, entries, about)


def _whole(file: Path, read: Callable[..., Any], *args: Any) -> Any:
    try:
        return read(*args)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file makes readers raise nearly anything
        raise CheckpointError(
            f"{file} cannot be read as {file.suffix or 'weights'}: {type(error).__name__}: {error}. It is damaged, cut "
            "short, or something else; fetch it again."
        ) from error


def files_of(path: Path) -> tuple[Path, list[Path]]:
    """The weights file, or the index, and the files that hold the tensors."""
    if path.is_dir():
        inside = [path / name for name in (WEIGHTS, INDEX) if (path / name).exists()]
        inside = inside or [file for file in sorted(path.iterdir()) if file.suffix in (".safetensors", ".npz")]
        if len(inside) != 1 and inside[:1] != [path / WEIGHTS]:
            names = sorted(file.name for file in path.iterdir())
            pickled = any(name.endswith(PICKLES) for name in names)
            hint = f" vitlite unpickles nothing here; first: vitlite convert {path} OUT --to vitlite" if pickled else ""
            raise CheckpointError(
                f"The folder {path} has no {WEIGHTS}, nor one other weights file; it has "
                f"{', '.join(names) or 'nothing'}.{hint}"
            )
        path = inside[0]
    if path.suffix in PICKLES:
        raise CheckpointError(
            f"{path} is a pickle, which can run code when opened, so it is not loaded. Make it a safetensors file: "
            f"vitlite convert {path} OUT.safetensors --to timm"
        )
    if path.suffix == ".json":
        shards = _whole(path, lambda: sorted(set(read_json(path)["weight_map"].values())))
        if not shards or any(Path(name).name != name for name in shards):
            raise CheckpointError(f"{path} is no index of safetensors shards beside it: its weight_map names {shards}.")
        return path, [path.parent / name for name in shards]
    if path.suffix not in (".safetensors", ".npz"):
        raise CheckpointError(
            f"{path} is no weights file that vitlite reads: .safetensors, .npz, {INDEX}, or a folder."
        )
    return path, [path]


def _safetensors(file: Path, stack: ExitStack) -> dict[str, Entry]:
    with safetensors.safe_open(file, framework="pt", backend="pread"):
        pass  # types, shapes, and offsets without gaps or overlaps are checked by opening
    opened = stack.enter_context(FileIO(file))
    start = 8 + int.from_bytes(opened.read(8), "little")
    header = json.loads(opened.read(start - 8))
    header.pop("__metadata__", None)
    return {
        name: Entry(tuple(x["shape"]), x["dtype"], partial(_bytes, opened, start + x["data_offsets"][0], x))
        for name, x in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    }


def _bytes(opened: FileIO, start: int, about: Mapping[str, Any]) -> Tensor:
    tensor = torch.empty(about["shape"], dtype=FLOATS[about["dtype"]], device="cpu")
    wanted = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
    opened.seek(start)
    while wanted:
        if not (got := opened.readinto(wanted)):
            raise EOFError("it ends early")
        wanted = wanted[got:]
    return tensor


def _npz(file: Path, stack: ExitStack) -> dict[str, Entry]:
    archive = stack.enter_context(zipfile.ZipFile(file))
    entries = {}
    for member in archive.infolist():
        with archive.open(member) as npy:
            shape, kind, _ = _npy_header(npy)
        name = member.filename.removesuffix(".npy")
        entries[name] = Entry(shape, NPY_TYPES.get(kind, kind), partial(_npy, archive, member))
    return entries


def _npy_header(npy: IO[bytes]) -> tuple[Shape, str, bool]:
    """A magic, a version, the length of a Python literal, and that literal: shape, type, whether columns come first."""
    magic = npy.read(8)
    length = int.from_bytes(npy.read(2 if magic[6:7] == b"\x01" else 4), "little")
    about = ast.literal_eval(npy.read(min(length, 1 << 16)).decode("latin1")) if magic[:6] == b"\x93NUMPY" else {}
    if about.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("a member is no .npy file")
    return tuple(about["shape"]), str(about["descr"]), about["fortran_order"]


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Tensor:
    with archive.open(member) as npy:
        shape, kind, columns = _npy_header(npy)
        values = torch.frombuffer(bytearray(npy.read()), dtype=FLOATS[NPY_TYPES[kind]])
    return values.view(shape[::-1]).permute(*range(len(shape))[::-1]) if columns else values.view(shape)


def resolve(layout: Layout, tensors: Mapping[str, Any], claims: Sequence[Claim]) -> ViTConfig:
    """The config of a file: what its tensors say, what its layout's code fixes, what others claim, in that order."""
    known: dict[str, Any] = {name: value for name, value in tensors.items() if name in ViTConfig.__dataclass_fields__}
    by = dict.fromkeys(known, "the tensors say")
    wrong = []
    for who, fields, firm in (Claim(f"the {layout.name} layout says", layout.fixed, False), *claims):
        for name, value in fields.items():
            if name in CHOICES or (name == "head_dim" and value is None):
                continue
            if name == "image_size":
                value = ViTConfig(image_size=value, patch_size=1).size  # or what is wrong with it
            if name == "layer_scale":  # which number it began with, only others can say
                if known[name] is True and value is not None:
                    known[name] = value
                elif firm and tensors[name] == (value is None):
                    wrong.append(f"layer_scale: the tensors have {'one' if tensors[name] else 'none'}, {who} {value}")
            elif name not in known or (who == USER and name in layout.assumed):
                known[name], by[name] = value, who
            elif firm and known[name] != value and (name not in LOOSE or who == USER):
                wrong.append(f"{name}: {by[name]} {known[name]}, {who} {value}")
    if type(known["layer_scale"]) is bool:  # nobody said the number, which may well be 1.0
        known["layer_scale"] = 1e-5 if known["layer_scale"] else None
    known |= _places(layout, tensors, known)
    if "image_size" in known and known["image_size"][0] == known["image_size"][1]:
        known["image_size"] = known["image_size"][0]
    if "heads" not in known and known.get("head_dim"):
        known["heads"] = tensors["attention_dim"] // known["head_dim"]
    if wrong:
        raise CheckpointError(f"It is not what it is said to be. {'; '.join(wrong)}.")
    if untold := [name for name in UNTOLD if name not in known]:
        hint = f" ({layout.name} files pool {' or '.join(layout.pools)})" if "pool" in untold else ""
        raise ConfigError(
            f"The tensors do not tell {', '.join(untold)}{hint}. Say so: vitlite.load(..., config=ViTConfig("
            + ", ".join(f"dim={known['dim']}, heads=..." if name == "heads" else f"{name}=..." for name in untold)
            + ")), or vitlite.create(name, weights=...) with the name of a model like it."
        )
    heads, inner = known["heads"], tensors["attention_dim"]
    whole = type(heads) is int and heads > 0 and inner % heads == 0
    if not whole or (known.get("head_dim") or inner // heads) != inner // heads:
        raise CheckpointError(f"Its attention is {inner} wide, which is not {heads} heads of equal width.")
    known["head_dim"] = inner // heads if inner != known["dim"] else None
    if known["class_token"] and known["pool"] not in layout.pools:
        raise CheckpointError(f"{layout.name} files pool {' or '.join(layout.pools)}, not {known['pool']!r}.")
    choices = [
        {"resample": layout.resample[known["registers"] > 0]},
        *(claim.fields for claim in reversed(claims) if claim.firm and claim.who != USER),
        *(claim.fields for claim in claims if claim.who == USER),
    ]
    return ViTConfig(**known | {name: said[name] for said in choices for name in CHOICES if name in said})


def _places(layout: Layout, tensors: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The image size and whether the class token has a position, from the rows of the position table."""
    rows, cls, patch = tensors["position_rows"], tensors["class_token"], tensors["patch_size"]
    if not rows:
        return {}
    choices = layout.cls_rows if cls and not tensors["registers"] else (False,)
    if "image_size" not in known and known.get("cls_position") in choices:
        choices = (known["cls_position"],)
    for own in choices:
        if choices[0] and not own and "image_size" not in known:
            break  # k * k rows may as well be (k - 1) * (k + 1), and one for the class token
        side = math.isqrt(rows - own)
        size = known.get("image_size", (side * patch, side * patch))
        if side and (size[0] // patch) * (size[1] // patch) == rows - own:
            return {"positions": "learned", "image_size": size} | (
                {"cls_position": own} if cls or tensors["registers"] else {}
            )
    if "image_size" in known:
        raise CheckpointError(
            f"Its position table has {rows} rows, which is not an image of {known['image_size']} in patches of {patch}."
            " To run it at another size: image_size=."
        )
    return {"positions": "learned"}


def read(
    checkpoint: Checkpoint,
    translation: Translation,
    config: ViTConfig,
    target: ViTConfig,
    *,
    new_head: bool,
    device: torch.device,
    dtype: torch.dtype,
    scan: bool,
) -> tuple[ViT, LoadReport]:
    """Builds `target` and fills it from the file, which must have all that its own config wants and no more.

    `new_head` puts a zero head in place of the trained one; `scan` looks for values that are not finite.
    """
    layout, prefix, found, dropped, extra = translation
    with torch.device("meta"), _NoInitialValues():
        model = ViT(target)
        own = {name: tuple(x.shape) for name, x in (model if target == config else ViT(config)).named_parameters()}
    ours = {name: tensor.shape for name, tensor in found.items()}
    lines = [f"- {' + '.join(layout.spell(prefix, name))} {own[name]}" for name in own if own[name] != ours.get(name)]
    lines += [f"+ {' + '.join(t.parts) or name} {t.shape}" for name, t in found.items() if t.shape != own.get(name)]
    lines += [f"+ {name} {checkpoint.shapes[name]}" for name in extra]
    if lines:
        lines.sort(key=lambda line: (line.split()[1], line[0] == "+"))
        more = f"\n... and {len(lines) - 40} more" if len(lines) > 40 else ""
        raise CheckpointError(
            f"{checkpoint.path} ({layout.name} layout) does not fit its config: - is missing, + is there instead\n"
            + "\n".join(lines[:40])
            + more
        )
    resampled: dict[str, tuple[Shape, Shape]] = {}
    state: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    wanted = {name: tuple(x.shape) for name, x in model.named_parameters()}  # a ViT has no buffers
    place = {name: i for i, name in enumerate(checkpoint.entries)}
    unused = {part: checkpoint.shapes[part] for part in dropped}
    for name, tensor in sorted(found.items(), key=lambda item: [place[part] for part in item[1].parts]):
        if name.startswith("head.") and (new_head or name not in wanted):
            unused |= {part: checkpoint.shapes[part] for part in tensor.parts}
            continue
        value = checkpoint.produce(tensor, last)
        if name == "pos_embed" and target.grid != config.grid:
            value = resample_positions(value.float(), config.grid, target.grid, target.resample)
            resampled[name] = tensor.shape, wanted[name]
        elif name == "patch_embed.proj.weight" and target.channels != config.channels:
            value, resampled[name] = _recolor(value.float(), target.channels), (tensor.shape, wanted[name])
        value = value.to(dtype)
        stored = [torch.finfo(FLOATS[checkpoint.entries[part].dtype]).max for part in tensor.parts]
        if (scan or name in resampled or max(stored, default=0) > torch.finfo(dtype).max) and not _finite(value):
            raise CheckpointError(
                f"{checkpoint.path}: {', '.join(tensor.parts)} has values that are not finite in {dtype}. The file is "
                "damaged, or its numbers are too large for this dtype."
            )
        state[name] = value.to(device)
    loaded = {name: ours[name] for name in state if found[name].parts and name not in resampled}
    supplied = {name: ours[name] for name in state if not found[name].parts}
    renewed = {name: shape for name, shape in wanted.items() if name not in state}
    state |= {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in renewed.items()}
    model.load_state_dict(state, assign=True)
    return model, LoadReport(layout.name, loaded, resampled, renewed, unused, supplied)


class _NoInitialValues(TorchFunctionMode):
    """Leaves out nn.init: on meta it changes nothing, and took a tenth of the time of loading ViT-B."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _finite(values: Tensor) -> bool:
    """A sum is finite only where all values are, and takes a fifth of the time of asking each."""
    total = values.sum(dtype=torch.float32) if values.dtype in (torch.float16, torch.bfloat16) else values.sum()
    return bool(total.isfinite()) or bool(values.isfinite().all())


def _recolor(kernel: Tensor, channels: int) -> Tensor:
    """timm's rule: one channel sees the sum; more take turns repeating the old ones, scaled to keep the sum."""
    old = kernel.shape[1]
    if channels == 1:
        return kernel.sum(1, keepdim=True)
    return kernel.repeat(1, -(-channels // old), 1, 1)[:, :channels] * (old / channels)
