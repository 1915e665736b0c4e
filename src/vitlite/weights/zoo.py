"""The zoo: one frozen record for each checkpoint, read from the table in data/zoo.txt, and finding one by name.

Nothing here imports torch. To add a checkpoint is to add a row to the table; `make pin` then fills in its hash.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import log
from pathlib import Path
from typing import Any, Literal

from vitlite import costs
from vitlite.config import PRESETS, ViTConfig
from vitlite.errors import UnknownNameError, closest

DATA = Path(__file__).parent / "data"

Color = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Record:
    """All that is known of one checkpoint: what it is, where it is, and how its pictures are prepared."""

    name: str
    preset: str
    default: bool  # whether the preset's own name means this checkpoint
    alias: str  # timm's full name, or the repository; "" for a checkpoint that comes with vitlite
    repo: str  # on the Hugging Face Hub; "" for one that comes with vitlite
    file: str | None  # its file in vitlite's data folder, where it comes with vitlite
    layout: str  # whose tensor names the file has
    config: ViTConfig
    mean: Color
    std: Color
    crop_pct: float
    crop_mode: Literal["center", "squash"]
    interpolation: Literal["bicubic", "bilinear"]
    license: str
    top1: float | None  # percent, in this preprocessing: of CIFAR-10 for its labels, of ImageNet-1k for all others
    labels_name: str | None
    note: str
    commit: str | None  # None: not pinned yet, the first download pins it for this user
    sha256: str | None
    filename: str = "model.safetensors"  # in the repository

    @property
    def params(self) -> int:
        """How many numbers the model learns."""
        return costs.params(self.config)

    @property
    def gmacs(self) -> float:
        """Billions of multiply-adds for one image of the checkpoint's own size."""
        return costs.gmacs(self.config)


def _rows(table: str) -> Iterator[tuple[list[str], str]]:
    """The rows of a data file: its cells, and the remark after '#'."""
    for line in (DATA / table).read_text(encoding="utf-8").splitlines():
        cells, _, remark = line.partition("#")
        if cells.strip():
            yield cells.split(), remark.strip()


def _records() -> Iterator[Record]:
    words = json.loads((DATA / "words.json").read_text(encoding="utf-8"))
    pins = {name: pin for (name, *pin), _ in _rows("pins.txt")}
    (columns, _), *rows = _rows("zoo.txt")
    for cells, note in rows:
        row: dict[str, Any] = dict(zip(columns, cells, strict=True))
        name, alias, repo = row["name"].lstrip("*"), row["alias"], row["repo"]
        preset = name.split(".")[0]
        config = PRESETS[preset].to_dict() | {"image_size": int(row["size"]), "num_classes": int(row["classes"])}
        for trait in row["traits"].split("+"):
            config |= words["traits"][trait]
        mean, std = map(tuple, words["mean_std"][row["mean_std"]])
        commit, sha256 = pins.get(name, (None, None))
        yield Record(
            name=name,
            preset=preset,
            default=row["name"].startswith("*"),
            alias=alias if alias != "-" else "",
            repo={"-": "", "=": f"timm/{alias}" if row["layout"] == "timm" else alias}.get(repo, repo),
            file=f"{name}.safetensors" if repo == "-" else None,
            layout=row["layout"],
            config=ViTConfig(**config),  # every field given: a record leaves nothing open
            mean=mean,
            std=std,
            crop_pct=float(row["crop_pct"]),
            crop_mode=row["crop_mode"],
            interpolation=row["interpolation"],
            license=row["license"],
            top1=float(row["top1"]) if row["top1"] != "-" else None,
            labels_name=words["labels"].get(row["classes"]),
            note=note,
            commit=commit if commit != "-" else None,
            sha256=sha256,
        )


RECORDS = {record.name: record for record in _records()}
DEFAULTS = {record.preset: record.name for record in RECORDS.values() if record.default}
ALIASES = {record.alias: record.name for record in RECORDS.values() if record.alias}
NAMES = {name: name for name in RECORDS} | DEFAULTS | ALIASES | {f"timm/{a}": n for a, n in ALIASES.items()}
REFUSED = {alias: why for (alias,), why in _rows("refused.txt")}


def find(name: str) -> Record:
    """The record of a checkpoint, by its name, its preset's name where it is the default, or timm's full name.

    Raises:
        UnknownNameError: with the names that come close, or the reason why the zoo has no such checkpoint.
    """
    if name in NAMES:
        return RECORDS[NAMES[name]]
    raise UnknownNameError(_why_not(name))


def info(name: str) -> Record:
    """The record of a checkpoint: where it is, whose, how big, how good, and how its pictures are prepared.

    Args:
        name: a checkpoint or a preset of `list_models()`, or timm's full name for one.

    Raises:
        UnknownNameError: with the names that come close, or the reason why the zoo has no such checkpoint.

    >>> info("vit_base_16").top1
    85.108
    """
    return find(name)


def list_models(pattern: str = "*") -> list[str]:
    """Every name that `create` gives trained weights for: presets with a default checkpoint, then checkpoints.

    >>> list_models("vit_small_8*")
    ['vit_small_8.dino']
    """
    return [name for name in (*DEFAULTS, *RECORDS) if fnmatchcase(name, pattern)]


def labels(record: Record) -> tuple[str, ...] | None:
    """What the classes of a checkpoint's head are called; None where it has no classes.

    >>> labels(info("vit_base_16"))[285]
    'Egyptian cat'
    """
    if record.labels_name is None:
        return None
    return tuple((DATA / f"{record.labels_name}.txt").read_text(encoding="utf-8").splitlines())


def _why_not(name: str) -> str:
    """What to say to somebody who asks for a name that the zoo does not have."""
    timm_name = str(name).removeprefix("timm/")
    preset = timm_name.split(".")[0]
    own = [record.name for record in RECORDS.values() if record.preset == preset]
    if name in PRESETS:
        size = costs.params(PRESETS[name])
        near = sorted(DEFAULTS, key=lambda other: abs(log(costs.params(PRESETS[other]) / size)))[:3]
        return (
            f"The preset {name!r} has no default checkpoint. Its checkpoints: {', '.join(own) or 'none'}. The presets "
            f"nearest in size that have one: {', '.join(near)}. For random weights: create({name!r}, weights=None)."
        )
    if own:
        return f"There is no checkpoint {name!r}.{closest(name, own)} Checkpoints of {preset}: {', '.join(own)}."
    tags = [alias for alias in ALIASES if alias.split(".")[0] == timm_name]  # timm's name without its tag
    for alias, why in REFUSED.items():
        if timm_name == alias or (not tags and timm_name == alias.split(".")[0]):
            return f"{name!r} is not in the zoo: {why}. vitlite.list_models() names what is."
    hint = f" Did you mean {', '.join(tags)}?" if tags else closest(timm_name, NAMES)
    return (
        f"There is no model {name!r}.{hint} Presets: {', '.join(PRESETS)}. Their checkpoints: vitlite.list_models(). "
        "A repository of the Hub, a folder or a file: vitlite.load(source)."
    )
