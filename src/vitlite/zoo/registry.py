"""The registry of checkpoints: one record per row of data/zoo.txt, and lookup by name.

This module does not import torch. To add a checkpoint, add a row to the table and run `make pin`, which adds the hash.
"""

import atexit
import json
import re
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from vitlite.config import ViTConfig
from vitlite.errors import UnknownNameError, closest
from vitlite.presets import PRESETS

DATA = files("vitlite.zoo") / "data"
LISTED = 16  # maximum number of names in an error
SIZES = {"ti": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant"}  # in other libraries

Color = tuple[float, float, float]
CropMode = Literal["center", "squash"]
Interpolation = Literal["bicubic", "bilinear"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of a checkpoint: its architecture, the location of its weights, its preprocessing and its licence."""

    name: str
    preset: str
    default: bool  # True: the name of the preset selects this checkpoint
    alias: str  # timm's full name, or the repository; "" for a checkpoint that is part of vitlite
    repo: str  # the repository on the Hugging Face Hub; "" for a checkpoint that is part of vitlite
    file: str | None  # the file in vitlite's data folder; None for a checkpoint on the Hub
    format: str  # the checkpoint format of the file
    config: ViTConfig
    pixels: int  # height and width of the images; config.image_size is rounded down to whole patches
    mean: Color
    std: Color
    crop_pct: float
    crop_mode: CropMode
    interpolation: Interpolation
    license: str
    top1: float | None  # accuracy in percent, on CIFAR-10 for its ten classes, otherwise on ImageNet-1k
    labels_name: str | None  # the name of the file in data/labels; None if the classes have no names
    note: str
    commit: str | None  # None: not pinned; the first download decides
    sha256: str | None
    filename: str = "model.safetensors"  # the path in the repository

    @property
    def params(self) -> int:
        """The number of parameters."""
        from vitlite.nn.costs import params

        return params(self.config)

    @property
    def gmacs(self) -> float:
        """The number of multiply-adds for one image of size `config.image_size`, in billions."""
        from vitlite.nn.costs import gmacs

        return gmacs(self.config)

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The names of the classes in class order, or None if the classes have no names.

        >>> info("vit_base_16").labels[285]
        'Egyptian cat'
        """
        if self.labels_name is None:
            return None
        return tuple((DATA / "labels" / f"{self.labels_name}.txt").read_text(encoding="utf-8").splitlines())


def embedded(file: str) -> Path:
    """Return the path of a weights file that is part of vitlite."""
    path = DATA / file
    return path if isinstance(path, Path) else _extracted(file)


@cache
def _extracted(file: str) -> Path:
    """Extract a weights file from a zipped package, and return its path. The copy exists until the process ends."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(as_file(DATA / file))


class Refusal(NamedTuple):
    """A row of refused.txt: checkpoints that are not in the registry, and the reason."""

    name: str  # a name or a pattern of names
    nearest: str | None  # the most similar checkpoint of the registry
    instead: str | None  # another way to run the checkpoint: "timm", or "load" for vitlite.load
    reason: str

    def fits(self, name: str) -> bool:
        """Return whether this row applies to a name, with or without a tag."""
        return fnmatchcase(name, self.name) or name == self.name.partition(".")[0]


def read_rows(table: str) -> list[tuple[list[str], str]]:
    """Return the cells of each row of a table in the data folder, and the remark after "#"."""
    rows = []
    for line in (DATA / table).read_text(encoding="utf-8").splitlines():
        cells, _, remark = line.partition("#")
        if cells.strip():
            rows.append((cells.split(), remark.strip()))
    return rows


def _read_records() -> dict[str, Record]:
    """Read the checkpoints in zoo.txt and the hashes in pins.txt. The top of zoo.txt explains the columns."""
    tables = json.loads((DATA / "traits.json").read_text(encoding="utf-8"))
    pins = {name: (_cell(commit), _cell(sha256)) for (name, commit, sha256), _ in read_rows("pins.txt")}
    (header, _), *rows = read_rows("zoo.txt")
    records = {}
    for cells, note in rows:
        record = _record(dict(zip(header, cells, strict=True)), note, tables, pins)
        records[record.name] = record
    return records


def _record(
    cells: dict[str, str], note: str, tables: dict[str, Any], pins: dict[str, tuple[str | None, str | None]]
) -> Record:
    name = cells["name"].removeprefix("*")
    preset = name.partition(".")[0]
    repo = _cell(cells["repo"]) or ""
    if repo == "=":
        repo = f"timm/{cells['alias']}" if cells["format"].startswith("timm") else cells["alias"]
    fields = PRESETS[preset].to_dict() | {"num_classes": int(cells["classes"])}
    for trait in cells["traits"].split("+"):
        fields |= tables["traits"][trait]
    pixels = int(cells["size"])
    fields["image_size"] = pixels - pixels % fields["patch_size"]
    mean, std = tables["mean_std"][cells["mean_std"]]
    commit, sha256 = pins.get(name, (None, None))
    return Record(
        name=name,
        preset=preset,
        default=cells["name"].startswith("*"),
        alias=_cell(cells["alias"]) or "",
        repo=repo,
        file=None if repo else f"{name}.safetensors",
        format=cells["format"],
        config=ViTConfig(**fields),
        pixels=pixels,
        mean=tuple(mean),
        std=tuple(std),
        crop_pct=float(cells["crop_pct"]),
        crop_mode=cast(CropMode, cells["crop_mode"]),
        interpolation=cast(Interpolation, cells["interpolation"]),
        license=cells["license"],
        top1=None if cells["top1"] == "-" else float(cells["top1"]),
        labels_name=_cell(cells["labels"]),
        note=note,
        commit=commit,
        sha256=sha256,
    )


def _cell(text: str) -> str | None:
    return None if text == "-" else text


RECORDS = _read_records()
DEFAULTS = {record.preset: record.name for record in RECORDS.values() if record.default}
ALIASES = {record.alias: record.name for record in RECORDS.values() if record.alias}
FORMER = {former: ALIASES[alias] for (former, alias), _ in read_rows("former_names.txt")}  # timm's names without tags
NAMES = {  # from every name that `find` accepts to the name of the checkpoint
    **{name: name for name in RECORDS},
    **DEFAULTS,
    **FORMER,
    **ALIASES,
    **{f"timm/{alias}": name for alias, name in ALIASES.items()},
}
REFUSED = [
    Refusal(name, _cell(nearest), _cell(instead), reason)
    for (name, nearest, instead), reason in read_rows("refused.txt")
]


def find(name: str) -> Record:
    """Return the record of a checkpoint. The name may also be a preset with a default, or timm's full name.

    Raises:
        UnknownNameError: There is no such checkpoint. The message gives similar names or a reason.
    """
    if not isinstance(name, str):
        raise UnknownNameError(f"A model name must be a string, got {name!r}.")
    if name not in NAMES:
        raise _unknown(name)
    return RECORDS[NAMES[name]]


def network(name: str) -> ViTConfig:
    """Return the config of a preset, a checkpoint, or a timm architecture (a timm name without a tag).

    Raises:
        UnknownNameError: The name is unknown.
    """
    if name in PRESETS:
        return PRESETS[name]
    tagged = _tagged(name) if isinstance(name, str) and name not in NAMES else []
    return find(tagged[0] if tagged else name).config  # timm's default; other tags differ only in num_classes


def info(name: str) -> Record:
    """Return the record of a checkpoint, with location, size, accuracy and preprocessing.

    Args:
        name: A checkpoint or a preset from `list_models()`, or timm's full name.

    Raises:
        UnknownNameError: There is no such checkpoint. The message gives similar names or a reason.

    >>> info("vit_base_16").top1
    85.108
    """
    return find(name)


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of trained models that match a shell-style pattern: first presets, then checkpoints.

    A preset is listed if it has a default checkpoint.

    >>> list_models("vit_small_8*")
    ['vit_small_8.dino']
    """
    if not isinstance(pattern, str):
        raise UnknownNameError(f"The pattern must be a string such as 'vit_small*', got {pattern!r}.")
    return [name for name in (*DEFAULTS, *RECORDS) if fnmatchcase(name, pattern)]


def did_you_mean(name: str) -> str:
    """Return a hint with names that contain all parts of an unknown name, or otherwise with similar names.

    >>> did_you_mean("deit_tiny_16")
    ' Did you mean vit_tiny_16.deit_fb_in1k, vit_tiny_16.deit_distilled_fb_in1k?'
    >>> did_you_mean("dino_vits8")  # the name on torch.hub
    ' Did you mean vit_small_8.dino?'
    """
    parts = _parts(name)
    complete = [other for other in (*DEFAULTS, *RECORDS) if parts <= _parts_of_ours(other)]
    if len(parts) > 1 and complete:
        return f" Did you mean {', '.join(sorted(complete, key=len)[:4])}?"
    return closest(name, [other for other in NAMES if other not in FORMER])


def _parts(name: str) -> set[str]:
    """Split a name into parts. Names from torchvision, torch.hub and CLIP also work: vit_b_16, dino_vits8, ViT-B/16."""
    parts: set[str] = set()
    for part in re.split(r"[-_./]", name.lower()):
        joined = re.fullmatch(r"vit(ti|[sblhg])(\d+)|(?:patch|p)(\d+)", part)
        pieces = ("vit", *joined.groups()) if joined else (part,)
        parts |= {SIZES.get(piece, piece) for piece in pieces if piece}
    return parts


def _parts_of_ours(name: str) -> set[str]:
    """Split one of vitlite's names into parts. "reg4" results in both "reg4" and "reg"."""
    parts = re.split(r"[._]", name)
    return {*parts, *(part.rstrip("0123456789") for part in parts)}


def _unknown(name: str) -> UnknownNameError:
    """Return the error for an unknown name, with a reason or similar names."""
    timm_name = re.sub("^(hf[-_]hub:)?(timm/)?", "", name)
    preset = timm_name.partition(".")[0]
    checkpoints = [record.name for record in RECORDS.values() if record.preset == preset]
    tagged = _tagged(name)
    refusal = next((row for row in REFUSED if row.fits(timm_name)), None)
    if name in PRESETS:
        listed = f"Its checkpoints: {', '.join(checkpoints)}" if checkpoints else "It has no checkpoints"
        text = f"The preset {name!r} has no default checkpoint. {listed}. {_random_weights(name)}"
    elif checkpoints:
        begun = [checkpoint for checkpoint in checkpoints if checkpoint.startswith(name)]
        hint = f" Did you mean {', '.join(begun)}?" if begun else closest(name, checkpoints)
        listed = f"Checkpoints of {preset}: {', '.join(checkpoints)}."
        if len(checkpoints) > LISTED:
            listed = (
                f"To list all {len(checkpoints)} checkpoints of {preset}, use list_models('{preset}.*') (vitlite list)."
            )
        text = f"There is no checkpoint {name!r}.{hint} {listed}"
    elif tagged:
        text = (
            f"{name!r} is timm's name for an architecture. Pass a checkpoint of it: {', '.join(tagged)}. "
            f"{_random_weights(name)}"
        )
    elif refusal is not None:
        text = _refused(timm_name, refusal)
    else:
        text = (
            f"There is no model {name!r}.{did_you_mean(timm_name)} To list all names, use list_models() (vitlite "
            "list). To load a Hub repository, a folder or a file, use vitlite.load(source) (--model SOURCE)."
        )
    return UnknownNameError(text)


def _random_weights(name: str) -> str:
    return f"For random weights, use create({name!r}, weights=None) (--weights none)."


def _refused(timm_name: str, refusal: Refusal) -> str:
    text = f"{timm_name!r} is not in the zoo: {refusal.reason}."
    if refusal.nearest is not None:
        text += f" The nearest checkpoint is {refusal.nearest!r}."
    if refusal.instead == "load":
        text += f" Use vitlite.load({timm_name!r}) (--model {timm_name})."
    if refusal.instead == "timm":
        text += f" timm has it: timm.create_model({timm_name!r}, pretrained=True)."
    return text


def _tagged(timm_name: str) -> list[str]:
    """Return timm's full names of the checkpoints of an architecture."""
    network = timm_name.removeprefix("timm/")
    return [alias for alias in ALIASES if alias.partition(".")[0] == network]
