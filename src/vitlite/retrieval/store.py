"""A file of vectors that `vitlite embed` wrote: of which pictures, by which model, and the vectors part by part."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitlite.errors import InputError, check_count, shown
from vitlite.inference.embed import identity_of
from vitlite.inference.journal import PATH
from vitlite.schema import either, parse_json, several, table, text, verify, whole

if TYPE_CHECKING:
    from vitlite.nn.vit import ViT

MOST = 10_000_000  # pictures
PART = 2**16  # vectors that are in memory together
DECIDES = ("weights", "config", "preprocessing", "quick_decode")  # of `identity_of`, what makes vectors comparable
SIDE = whole(1, 100_000)  # pixels
IDENTITY = table({"config": table({"image_size": either(SIDE, several(SIDE, 2, 2))})})
LONGEST_NAME = 10_000  # letters, of a model's name or place
KINDS = ("F64", "F32", "F16", "BF16")  # of numbers
AFTER = ("num_classes", "dropout", "drop_path", "checkpointing")  # fields of the config that no vector depends on


@dataclass(frozen=True)
class Vectors:
    """A file of vectors. The vectors themselves stay in it until they are asked for."""

    path: Path
    pictures: list[str]  # a path for each row
    dim: int
    model: str  # what it was called when the vectors were made
    identity: Mapping[str, Any]  # what decides the numbers: weights, config, preprocessing
    stamp: tuple[int, ...]  # of the file when its pictures were read: another that took its place has other rows

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def image_size(self) -> int | tuple[int, int] | None:
        """Of the pictures as the model saw them; None where that is not known."""
        config = self.identity.get("config")
        size = config.get("image_size") if isinstance(config, dict) else None
        return tuple(size) if isinstance(size, list) else size

    @property
    def quick_decode(self) -> bool:
        """Whether JPEG files were scaled while they were decoded."""
        return bool(self.identity.get("quick_decode"))

    def parts(self, rows: int = PART) -> Iterator[Tensor]:
        """The vectors, so many at a time: (rows, d) each in float32, or float64 if the file has that.

        Raises:
            InputError: There are numbers among them that are not finite; or the file was replaced since it was opened;
                or `rows` is no positive number.
        """
        check_count(rows, "rows")
        with _opened(self.path) as file:
            if _stamp(self.path) != self.stamp:
                raise InputError(
                    f"{shown(str(self.path), 1000)} was written again since it was opened.",
                    python="Open it again: open_vectors(path).",
                    command="Start the same command again.",
                )
            stored = file.get_slice("vectors")
            for first in range(0, len(self), rows):
                with torch.device("cpu"):  # safetensors asks for torch's default device
                    part: Tensor = stored[first : first + rows]
                part = part.to(torch.promote_types(part.dtype, torch.float32))  # large ones of float64 stay numbers
                if not part.isfinite().all():
                    name = shown(str(self.path), 1000)
                    raise InputError(f"{name} has vectors that are not finite numbers. Embed the pictures again.")
                yield part

    def refuse_other_model(self, model: "ViT") -> None:
        """Makes sure that a model makes vectors which can be compared with these, as far as `search` says.

        Raises:
            InputError: It has other weights, another config, other preprocessing, or another way to decode.
        """
        ours = _comparable(json.loads(json.dumps(identity_of(model, dtype=None, fast=False))))
        theirs = _comparable(self.identity)
        differing = [name for name in DECIDES if ours[name] != theirs[name]]
        if differing:
            decoder = "with_quick_decode()" if self.quick_decode else "transform"
            so = f", with model.preprocess = model.preprocess.{decoder}" if "quick_decode" in differing else ""
            raise InputError(
                f"The vectors in {shown(str(self.path), 1000)} were made by {shown(self.model)}; this model "
                f"differs in {', '.join(differing)}: no distance to them means anything.",
                python=f"Open that model{so}, or embed the pictures again with this one.",
                command="Leave out --model and --size to use that one, and say --weights only if `embed` was told "
                "so; or embed the pictures again.",
            )


def open_vectors(path: str | PathLike[str]) -> Vectors:
    """Opens what `vitlite embed --out NAME.safetensors` wrote.

    Raises:
        InputError: It is no such file, or does not say which model made it.
    """
    path, name = Path(path), shown(str(path), 1000)
    if path.suffix != ".safetensors":
        raise InputError(f"{name} must be a .safetensors file that `vitlite embed` wrote: others do not say by whom.")
    if not path.is_file():
        raise InputError(f"There is no file {name}. Make it: vitlite embed PATH --out {name}.")
    stamp = _stamp(path)  # before it is read: what takes its place meanwhile is noticed later
    with _opened(path) as file:
        about, dim, rows = file.metadata() or {}, 0, 0
        if "vectors" in file.keys():  # noqa: SIM118  # no dict
            rows, dim = _shape(file.get_slice("vectors"))
    if not dim or not {"paths", "identity", "model"} <= about.keys():
        raise InputError(f"{name} does not say which model made it, of which pictures. Embed them again.")
    paths = several(PATH, most=MOST)
    pictures = parse_json(about["paths"], paths, f"{path}, paths", most_bytes=2**30, error=InputError)
    identity = parse_json(about["identity"], IDENTITY, f"{path}, identity", error=InputError)
    verify(about["model"], text(LONGEST_NAME), f"{path}, model", error=InputError)
    if len(pictures) != rows:
        raise InputError(f"{name} has {rows} vectors of {len(pictures)} pictures. Embed them again.")
    return Vectors(path, pictures, dim, about["model"], identity, stamp)


def _stamp(path: Path) -> tuple[int, ...]:
    """By which a file is known again; nothing where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _shape(stored: Any) -> tuple[int, int]:
    """Of vectors; no rows and no numbers where they are none."""
    shape = stored.get_shape()
    if len(shape) != 2 or stored.get_dtype() not in KINDS:
        return 0, 0
    return shape[0], shape[1]


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{shown(str(path), 1000)} cannot be read as a file of vectors: {shown(str(error))}. Embed the pictures "
            "again."
        ) from error


def _comparable(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What two vectors must have in common."""
    found = {name: identity.get(name) for name in DECIDES}
    config = found["config"]
    if isinstance(config, dict):
        found["config"] = {field: value for field, value in config.items() if field not in AFTER}
    return found
