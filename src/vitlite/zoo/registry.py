"""The zoo: one frozen record for each checkpoint, read from the table in data/zoo.txt, and finding one by name.

Nothing here imports torch. To add a checkpoint is to add a row to the table; `make pin` then fills in its hash.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import log
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from vitlite.config import ViTConfig
from vitlite.errors import UnknownNameError, closest, shown
from vitlite.nn import costs
from vitlite.presets import PRESETS

DATA = Path(__file__).parent / "data"
MOST_NAMES = 16  # that an error lists

Color = tuple[float, float, float]
CropMode = Literal["center", "squash"]
Interpolation = Literal["bicubic", "bilinear"]


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
    pixels: int  # of a side of its pictures; its image_size is what whole patches see of them
    mean: Color
    std: Color
    crop_pct: float
    crop_mode: CropMode
    interpolation: Interpolation
    license: str
    top1: float | None  # percent, in this preprocessing: of CIFAR-10 for its labels, of ImageNet-1k for all others
    labels_name: str | None  # the label set that `labels.labels_of` reads; None where the classes have no names
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


class Row(NamedTuple):
    """A row of a data file: its cells, and the remark after '#'."""

    cells: list[str]
    remark: str


class Refusal(NamedTuple):
    """A row of refused.txt: checkpoints that the zoo does not have, and why."""

    name: str  # or a pattern of names
    nearest: str | None  # of the zoo
    instead: str | None  # who runs the very checkpoint: timm, or load
    reason: str

    def fits(self, name: str) -> bool:
        """Whether a name is meant, with its tag or without."""
        return fnmatchcase(name, self.name) or name == _architecture(self.name)


def _read_rows(table: str) -> list[Row]:
    rows = []
    for line in (DATA / table).read_text(encoding="utf-8").splitlines():
        cells, _, remark = line.partition("#")
        if cells.strip():
            rows.append(Row(cells.split(), remark.strip()))
    return rows


def _read_records() -> dict[str, Record]:
    """The table zoo.txt, whose head explains its columns, with the pins of pins.txt."""
    words = json.loads((DATA / "words.json").read_text(encoding="utf-8"))
    pins = _read_pins()
    header, *rows = _read_rows("zoo.txt")
    records = {}
    for row in rows:
        cells = dict(zip(header.cells, row.cells, strict=True))
        record = _record(cells, row.remark, words, pins)
        records[record.name] = record
    return records


def _read_pins() -> dict[str, tuple[str | None, str | None]]:
    """The commit and the sha256 of each checkpoint's file."""
    return {name: (_cell(commit), _cell(sha256)) for (name, commit, sha256), _ in _read_rows("pins.txt")}


def _record(
    cells: dict[str, str], note: str, words: dict[str, Any], pins: dict[str, tuple[str | None, str | None]]
) -> Record:
    name = cells["name"].removeprefix("*")
    preset = name.partition(".")[0]
    mean, std = words["mean_std"][cells["mean_std"]]
    top1 = _cell(cells["top1"])
    commit, sha256 = pins.get(name, (None, None))
    return Record(
        name=name,
        preset=preset,
        default=cells["name"].startswith("*"),
        alias=_cell(cells["alias"]) or "",
        repo=_repo(cells),
        file=f"{name}.safetensors" if cells["repo"] == "-" else None,
        layout=cells["layout"],
        config=_config(preset, cells, words["traits"]),
        pixels=int(cells["size"]),
        mean=tuple(mean),
        std=tuple(std),
        crop_pct=float(cells["crop_pct"]),
        crop_mode=cast(CropMode, cells["crop_mode"]),
        interpolation=cast(Interpolation, cells["interpolation"]),
        license=cells["license"],
        top1=float(top1) if top1 else None,
        labels_name=_cell(cells["labels"]),
        note=note,
        commit=commit,
        sha256=sha256,
    )


def _cell(text: str) -> str | None:
    """What a cell says; None for '-'."""
    return None if text == "-" else text


def _repo(cells: dict[str, str]) -> str:
    """The repository on the Hub; "" where there is none."""
    if cells["repo"] != "=":
        return _cell(cells["repo"]) or ""
    if cells["layout"].startswith("timm"):
        return f"timm/{cells['alias']}"
    return cells["alias"]


def _config(preset: str, cells: dict[str, str], traits: dict[str, dict[str, Any]]) -> ViTConfig:
    """The preset's config with what the row says otherwise. Every field is given: a record leaves nothing open."""
    fields = PRESETS[preset].to_dict()
    fields["num_classes"] = int(cells["classes"])
    for trait in cells["traits"].split("+"):
        fields |= traits[trait]
    pixels = int(cells["size"])
    fields["image_size"] = pixels - pixels % fields["patch_size"]
    return ViTConfig(**fields)


def _refusal(cells: list[str], reason: str) -> Refusal:
    name, nearest, instead = cells
    return Refusal(name, _cell(nearest), _cell(instead), reason)


RECORDS = _read_records()
DEFAULTS = {record.preset: record.name for record in RECORDS.values() if record.default}
ALIASES = {record.alias: record.name for record in RECORDS.values() if record.alias}
FORMER = {former: ALIASES[alias] for (former, alias), _ in _read_rows("former_names.txt")}
SIZES = {"ti": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant"}  # as others shorten them
NAMES = {  # all that `find` knows, and the checkpoint that it means
    **{name: name for name in RECORDS},
    **DEFAULTS,
    **FORMER,
    **ALIASES,
    **{f"timm/{alias}": name for alias, name in ALIASES.items()},
}
REFUSED = [_refusal(*row) for row in _read_rows("refused.txt")]


def find(name: str) -> Record:
    """The record of a checkpoint, by its name, its preset's name where it is the default, or timm's full name.

    Raises:
        UnknownNameError: with the names that come close, or the reason why the zoo has no such checkpoint.
    """
    if not isinstance(name, str):
        raise UnknownNameError(f"The name of a model is a text, got {shown(repr(name))}.")
    if name in NAMES:
        return RECORDS[NAMES[name]]
    raise _unknown(name)


def network(name: str) -> ViTConfig:
    """The config that a name stands for without its weights: a preset's, a checkpoint's, or timm's without a tag.

    Raises:
        UnknownNameError: as `find`.
    """
    if name in PRESETS:
        return PRESETS[name]
    tagged = _tagged(name) if isinstance(name, str) and name not in NAMES else []
    return find(tagged[0] if tagged else name).config  # timm's default comes first, and the others are built alike


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
    if not isinstance(pattern, str):
        raise UnknownNameError(f"A pattern is a text such as 'vit_small*', got {shown(repr(pattern))}.")
    return [name for name in (*DEFAULTS, *RECORDS) if fnmatchcase(name, pattern)]


def _unknown(name: str) -> UnknownNameError:
    """The error for a name that the zoo does not have, with what comes near to it, or why it is not here."""
    if name in PRESETS:
        return _preset_without_default(name)
    timm_name = re.sub("^(hf[-_]hub:)?(timm/)?", "", str(name))
    preset = timm_name.partition(".")[0]
    if _checkpoints_of(preset):
        return _no_such_checkpoint(name, preset)
    tagged = _tagged(name)
    if tagged:
        return _tag_is_missing(name, tagged)
    for refusal in REFUSED:
        if refusal.fits(timm_name):
            return _refused(timm_name, refusal)
    valid = did_you_mean(timm_name) or f" Presets: {', '.join(PRESETS)}."
    return UnknownNameError(
        f"There is no model {shown(repr(name))}.{valid}",
        python="All names: vitlite.list_models(). A repository of the Hub, a folder or a file: vitlite.load(source).",
        command="All names: `vitlite list`. A repository of the Hub, a folder or a file: --model PATH, "
        "--model OWNER/NAME.",
    )


def _no_such_checkpoint(name: str, preset: str) -> UnknownNameError:
    """A preset's name with a tag that nobody has: those that begin so, or come near."""
    checkpoints = _checkpoints_of(preset)
    begun = [checkpoint for checkpoint in checkpoints if checkpoint.startswith(name)]
    hint = f" Did you mean {', '.join(begun)}?" if begun else closest(name, checkpoints)
    text = f"There is no checkpoint {shown(repr(name))}.{hint}"
    if len(checkpoints) <= MOST_NAMES:
        return UnknownNameError(f"{text} Checkpoints of {preset}: {', '.join(checkpoints)}.")
    return UnknownNameError(
        f"{text} {preset} has {len(checkpoints)} checkpoints.",
        python=f"vitlite.list_models('{preset}.*') names them.",
        command=f"`vitlite list '{preset}.*'` names them.",
    )


def _tag_is_missing(name: str, tagged: Sequence[str]) -> UnknownNameError:
    """timm's name of a network, of which the zoo has trained weights under full names."""
    return UnknownNameError(
        f"{name!r} is what timm calls a network; the weights trained for it have a tag behind a dot. "
        f"In the zoo: {', '.join(tagged)}.",
        python=f"For random weights: create({name!r}, weights=None).",
        command=f"For random weights: vitlite train --model {tagged[0]} --weights none.",
    )


def _refused(timm_name: str, refusal: Refusal) -> UnknownNameError:
    nearest = "" if refusal.nearest is None else f" The nearest that is: {refusal.nearest}."
    text = f"{timm_name!r} is not in the zoo: {refusal.reason}.{nearest}"
    if refusal.instead == "load":
        return UnknownNameError(text, python=f"vitlite.load({timm_name!r}).", command=f"--model {timm_name}.")
    python, command = f"vitlite.create({refusal.nearest!r}).", "Use that name, or another of `vitlite list`."
    if refusal.instead == "timm":
        python += f" The very one: timm.create_model({timm_name!r}, pretrained=True)."
    return UnknownNameError(text, python=python, command=command)


def _preset_without_default(preset: str) -> UnknownNameError:
    params = costs.params(PRESETS[preset])

    def distance(other: str) -> float:
        return abs(log(costs.params(PRESETS[other]) / params))

    checkpoints = ", ".join(_checkpoints_of(preset)) or "none"
    nearest = sorted(DEFAULTS, key=distance)[:3]
    return UnknownNameError(
        f"The preset {preset!r} has no default checkpoint. Its checkpoints: {checkpoints}. "
        f"The presets nearest in size that have one: {', '.join(nearest)}.",
        python=f"For random weights: create({preset!r}, weights=None).",
        command=f"For random weights: vitlite train --model {preset} --weights none.",
    )


def _checkpoints_of(preset: str) -> list[str]:
    return [record.name for record in RECORDS.values() if record.preset == preset]


def did_you_mean(name: str) -> str:
    """The hint for a name that is none: those with all its parts, in whatever order, else what is spelt alike.

    >>> did_you_mean("deit_tiny_16")
    ' Did you mean vit_tiny_16.deit_fb_in1k, vit_tiny_16.deit_distilled_fb_in1k?'
    >>> did_you_mean("dino_vits8")  # as torch.hub has it
    ' Did you mean vit_small_8.dino?'
    """
    parts = _words_of(name)
    complete = [other for other in (*DEFAULTS, *RECORDS) if _has_words(other, parts)]
    if len(parts) > 1 and complete:
        return f" Did you mean {', '.join(sorted(complete, key=len)[:4])}?"
    return closest(name, [other for other in NAMES if other not in FORMER])


def _words_of(name: str) -> set[str]:
    """The parts of a name, of torchvision's, torch.hub's and CLIP's too: vit_b_16, dino_vits8, ViT-B/16."""
    words = set()
    for part in filter(None, re.split(r"[-_./]", name.lower())):
        joined = re.fullmatch(r"vit(ti|[sblhg])(\d+)|(?:patch|p)(\d+)", part)
        pieces = ("vit", *joined.groups()) if joined else (part,)
        words |= {SIZES.get(piece, piece) for piece in pieces if piece}
    return words


def _has_words(name: str, parts: set[str]) -> bool:
    """Whether a name of ours has all these parts; "reg4" is one "reg"."""
    words = re.split(r"[._]", name)
    return all(any(word == part or word.rstrip("0123456789") == part for word in words) for part in parts)


def _tagged(timm_name: str) -> list[str]:
    """timm's full names of the checkpoints of one of its networks."""
    network = timm_name.removeprefix("timm/")
    return [alias for alias in ALIASES if _architecture(alias) == network]


def _architecture(timm_name: str) -> str:
    """timm's full name without the tag, which says whose weights they are."""
    return timm_name.partition(".")[0]
