"""What stands beside a weights file, in config.json and preprocessor_config.json: read and written in this room only.

A library, a module: `vitlite`, `timm` and `transformers`, with its `processors`, each check their JSON, turn it into a
`Metadata`, and back.

What vitlite writes bears the same mark, `PAIR`, as the weights that it is written for. First the JSON is put beside,
under a name with that mark in it; then the weights take their place, and only then the JSON its own. Whoever finds
weights with one mark beside JSON with another takes what stands there under the name with theirs: of a process that is
killed, the old model is left or the new, and never a mix.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlite import __version__
from vitlite.checkpoints.formats import timm, transformers, vitlite
from vitlite.checkpoints.formats.processors import transform_from_transformers, transform_to_transformers
from vitlite.checkpoints.formats.record import Metadata, UnreadTransform, as_json
from vitlite.checkpoints.formats.timm import (
    config_to_timm,
    is_pooled_alike,
    layout_for_timm,
    transform_from_record,
    transform_from_timm,
    transform_to_timm,
    unlike_timm,
)
from vitlite.checkpoints.formats.transformers import WRITER, computed_by, config_to_transformers, layout_of, model_type
from vitlite.checkpoints.formats.vitlite import config_to_vitlite, transform_from_vitlite
from vitlite.checkpoints.reader import INDEX, USUAL_PICKLES, WEIGHTS
from vitlite.config import ViTConfig
from vitlite.errors import CheckpointError, ConfigError, VitliteError, shown
from vitlite.images import TransformConfig
from vitlite.schema import anything, by_name, read_json
from vitlite.storage import write_json

__all__ = [
    "BESIDE_WEIGHTS",
    "CONFIG",
    "PAIR",
    "PICTURES",
    "PROCESSOR",
    "WRITER",
    "Metadata",
    "UnreadTransform",
    "begin_metadata_files",
    "computed_by",
    "config_to_timm",
    "contradictions",
    "end_metadata_files",
    "is_as_written",
    "is_paired",
    "is_pooled_alike",
    "layout_for_timm",
    "layout_of",
    "metadata_content",
    "metadata_contents_for_transformers",
    "model_type",
    "read_metadata",
    "transform_from_record",
    "transform_from_timm",
    "transform_from_transformers",
    "transform_from_vitlite",
    "transform_of",
    "transform_to_timm",
    "transform_to_transformers",
    "unread_by_timm",
    "weights_of_others",
]

CONFIG, PICTURES = "config.json", "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # transformers', of texts and pictures: of the latter it counts before PICTURES
ADAPTER = "adapter_config.json"  # peft's, for tensors that transformers adds to those of the model beside it; refused
BESIDE_WEIGHTS = (CONFIG, PICTURES, PROCESSOR, ADAPTER)  # what is looked at, wherever weights are opened
WEIGHTS_OF_OTHERS = (INDEX, *USUAL_PICKLES)
PAIR = "vitlite_pair"  # in these, and in the header of their weights
PAIRS = re.compile(r"[0-9a-f]{32}")
TABLE = by_name(anything)


def read_metadata(folder: Path, pair: str | None = None) -> Metadata:
    """What stands beside the weights of a folder, as vitlite, timm or transformers wrote it; empty where nothing does.

    Args:
        folder: Of the weights.
        pair: The mark in their header, if there is one.

    Raises:
        CheckpointError: It is damaged, of a model that vitlite does not run, or of other weights.
    """
    _refuse_adapter(folder)
    path, config = _read(folder / CONFIG, pair)
    if pair is not None and config.get(PAIR) == pair:
        _refuse_words_of_others(folder, pair)
    is_of_others = PAIR in config and pair is None  # they keep our words beside theirs, which alone are theirs
    if is_of_others and "vitlite" in config and is_as_written(folder):
        raise _of_unmarked_weights(path)
    try:
        if "vitlite" in config and not is_of_others:
            ours = vitlite.metadata_from_vitlite(config)
            _refuse_a_changed_half(config, ours)
            return ours
        if "architecture" in config:
            return timm.metadata_from_timm(config)
        if "model_type" in config:
            return transformers.metadata_from_transformers(config, _pictures(folder, pair))
    except CheckpointError as error:
        raise error.within(shown(str(path))) from None
    if "vitlite" in config:
        raise _of_unmarked_weights(path)
    return Metadata()


def _of_unmarked_weights(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{shown(str(path))} was written for weights that bear its mark, {PAIR}, and those beside it bear none: "
        "another program wrote them.",
        python=f"If they belong to each other, take {PAIR} out of it.",
    )


def is_as_written(folder: Path, pair: str | None = None) -> bool:
    """Whether the JSON in a folder is still what vitlite wrote: no other program has, whose words alone would be true.

    Args:
        folder: Where it stands.
        pair: The mark of the weights there; None: that in its config.json.
    """
    pair = _table(folder / CONFIG).get(PAIR) if pair is None else pair
    if not isinstance(pair, str):
        return False
    contents = {}
    for name in (CONFIG, PICTURES):
        file = _begun(folder / name, pair) if _is_begun(folder / name, pair) else folder / name
        content = dict(_table(file))
        if content.pop(PAIR, None) == pair and content:
            contents[name] = content
    return _mark_of(contents) == pair


def weights_of_others(folder: Path) -> list[str]:
    """The names of those in a folder that transformers writes and vitlite never does."""
    return [name for name in WEIGHTS_OF_OTHERS if os.path.lexists(folder / name)]


def _refuse_words_of_others(folder: Path, pair: str) -> None:
    """Makes sure that no program which saved other weights beside ours has changed what stands beside both.

    transformers keeps the old weights where it saves shards, and our mark in the config.json that it writes for those.

    Raises:
        CheckpointError: One has: old weights would get the names of new classes.
    """
    others = weights_of_others(folder)
    if others and not is_as_written(folder, pair):
        raise CheckpointError(
            f"{shown(str(folder))} has {WEIGHTS}, which vitlite wrote, and {shown(others[0])}, and its {CONFIG} was "
            "changed since: it may be of either.",
            python=f"If another program saved a model there, move {WEIGHTS} away, which is older. If you changed "
            f"{CONFIG}, move {shown(others[0])} away.",
        )


def _refuse_a_changed_half(config: Mapping[str, Any], ours: Metadata) -> None:
    """Makes sure that nobody has changed what timm reads, where what vitlite reads is as it was written.

    Raises:
        CheckpointError: Somebody has: timm would answer otherwise.
    """
    content = {name: value for name, value in config.items() if name != PAIR}
    if PAIR not in config or _mark_of({CONFIG: content}) == config[PAIR]:
        return
    try:
        written = as_json(metadata_content(ViTConfig(**ours.claims), ours.labels, transform_of(ours, None)))
    except VitliteError:  # nobody would have written that
        return
    if _mark_of({CONFIG: written}) != config[PAIR]:  # ours was changed, and counts
        return
    for name in sorted(written.keys() & content.keys() - {"vitlite"}):
        changed = _changed(written[name], content[name])
        if changed is not None:
            raise CheckpointError(
                f"its {name} was changed ({changed}), which timm reads, and its vitlite, which vitlite reads, was not. "
                "Change both, or take vitlite out of it."
            )


def _changed(before: Any, now: Any) -> str | None:
    """What is another now, of what is still there: libraries leave out and add; None where nothing is."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in before.keys() & now.keys():
            changed = _changed(before[name], now[name])
            if changed is not None:
                return f"{name}: {changed}"
        return None
    return None if before == now else f"{shown(repr(before), 60)} to {shown(repr(now), 60)}"


def _pictures(folder: Path, pair: str | None) -> Mapping[str, Any]:
    """What transformers says of the pictures; empty where it says nothing."""
    _, pictures = _read(folder / PICTURES, pair)
    if PAIR not in pictures:
        processor = _table(folder / PROCESSOR).get("image_processor")
        if isinstance(processor, Mapping):
            return processor
    return pictures


def _refuse_adapter(folder: Path) -> None:
    """Makes sure that no adapter stands beside the weights, without which they are not the model that was trained.

    Raises:
        CheckpointError: One does.
    """
    if os.path.lexists(folder / ADAPTER):
        raise CheckpointError(
            f"{shown(str(folder))} has an adapter beside its weights ({ADAPTER}), which vitlite does not add to them, "
            "as transformers does. For the weights alone, copy them and their config.json into another folder.",
            python="With the adapter: peft's model.merge_and_unload().save_pretrained(folder), and load that.",
            command="With the adapter: merge it into them by peft, in Python, and name the folder where that is saved.",
        )


def _read(file: Path, pair: str | None) -> tuple[Path, Mapping[str, Any]]:
    """A table in JSON, and where it stands; an empty one where there is no such file.

    Raises:
        CheckpointError: It is damaged, or of other weights.
    """
    content = _table(file)
    if pair is None or content.get(PAIR) == pair:
        return file, content
    begun = _begun(file, pair)
    if PAIRS.fullmatch(pair) and os.path.lexists(begun):
        return begun, _table(begun)
    if PAIR in content:
        raise CheckpointError(
            f"{shown(str(file))} was written for other weights than those beside it: one of the two was replaced "
            "without the other, or is about to be.",
            python="Copy both from the same place, or save the model again.",
            command="Copy both from the same place.",
        )
    return file, content


def _table(file: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = read_json(file, TABLE) if os.path.lexists(file) else {}
    return content


def _begun(file: Path, pair: str) -> Path:
    """Where a file stands before its weights have taken their place."""
    return file.parent / f"{file.name}.{pair}"


def transform_of(metadata: Metadata, size: tuple[int, int] | None, patch: int = 1) -> TransformConfig | None:
    """How pictures are prepared for images of `size`, or of the file's own; None where nothing is said of it.

    Args:
        metadata: What stands beside the weights.
        size: Height and width in pixels.
        patch: Pixels of a patch: of images that patches do not cover, they see the upper left part.

    Raises:
        ConfigError: It is not understood.
    """
    if metadata.transform is None:
        return None
    return _recipe_of(metadata.transform, size).in_whole_patches(patch)


def _recipe_of(unread: UnreadTransform, size: tuple[int, int] | None) -> TransformConfig:
    library, fields = unread
    if library == "vitlite":
        return transform_from_vitlite(fields, size)
    if library == "timm":
        return transform_from_timm(fields, size)
    return transform_from_transformers(fields, size)


def contradictions(
    metadata: Metadata, labels: Sequence[str] | None, transform: TransformConfig, patch: int = 1
) -> list[str]:
    """Return how a metadata differs from these labels and this transform, such as "mean (0.5,), not (0.4,)"."""
    different = _other_labels(metadata, labels) if labels else []
    try:
        own = transform_of(metadata, None, patch)
    except ConfigError as error:
        return [*different, error.text]
    if own is not None:
        for name in own.to_dict() | transform.to_dict():
            here, there = getattr(own, name), getattr(transform, name)
            if here != there and name != "margin":  # which no other library's files tell
                different.append(f"{name} is {here}, not {there}")
    return different


def _other_labels(metadata: Metadata, labels: Sequence[str]) -> list[str]:
    """Where a metadata that names classes does not name these."""
    if metadata.unlabelled:
        return [f"its classes are others: {metadata.unlabelled}"]
    if not metadata.labels:
        return []
    different = []
    for number, (here, there) in enumerate(zip(metadata.labels, labels, strict=False)):
        if here != there:
            different.append(f"{number} is {shown(here)}, not {shown(there)}")
    if len(metadata.labels) != len(labels):
        different.append(f"{len(metadata.labels)} classes are named, not {len(labels)}")
    return different


def metadata_content(
    config: ViTConfig, labels: Sequence[str] | None, transform: TransformConfig | None, layout: str = "timm"
) -> dict[str, Any]:
    """The config.json which vitlite reads back in full, and timm as far as it goes, beside tensors of this layout.

    Raises:
        CheckpointError: It could not be read back: a label is no text, say.
    """
    content = config_to_vitlite(config, labels, transform)
    unread = unread_by_timm(config, transform, layout)
    if unread:
        content["vitlite"]["for_vitlite_alone"] = unread
    else:
        content |= config_to_timm(config, labels, transform)
    vitlite.metadata_from_vitlite(as_json(content))
    return content


def unread_by_timm(config: ViTConfig, transform: TransformConfig | None, layout: str = "timm") -> str:
    """Why timm cannot open a folder with tensors of this layout, in a sentence; nothing where it can."""
    unlike = unlike_timm(config, transform)
    if unlike:
        return f"timm's config.json has no words for {unlike}."
    if layout != layout_for_timm(config):
        return "timm has other names for the tensors of such a model: `vitlite convert --to timm` writes them."
    return ""


def metadata_contents_for_transformers(
    config: ViTConfig, labels: Sequence[str] | None, transform: TransformConfig | None
) -> dict[str, dict[str, Any]]:
    """config.json and, where there is a transform, preprocessor_config.json, by their names.

    Raises:
        CheckpointError: transformers has no processor that prepares pictures like this.
    """
    contents = {CONFIG: config_to_transformers(config, labels) | {WRITER: f"vitlite {__version__}"}}
    if transform is not None:
        contents[PICTURES] = transform_to_transformers(transform, config.channels)
    transformers.metadata_from_transformers(as_json(contents[CONFIG]), as_json(contents.get(PICTURES, {})))
    return contents


def begin_metadata_files(folder: Path, contents: Mapping[str, Mapping[str, Any]]) -> str:
    """Puts JSON files, by their names, beside where they will stand; the mark for the header of their weights."""
    pair = _mark_of(contents)
    for name in (CONFIG, PICTURES):
        write_json(_begun(folder / name, pair), {PAIR: pair, **contents.get(name, {})})
    return pair


def _mark_of(contents: Mapping[str, Mapping[str, Any]]) -> str:
    as_read_again = as_json(contents)  # numbers of classes are texts there, which are sorted otherwise
    return hashlib.sha256(json.dumps(as_read_again, sort_keys=True).encode()).hexdigest()[:32]


def end_metadata_files(folder: Path, pair: str | None) -> None:
    """Lets the files that were begun for weights with this mark take their place, and removes what else was begun.

    Where nothing is said in one, what stood in its place was of others.
    """
    for name in (CONFIG, PICTURES):
        if pair is not None and _is_begun(folder / name, pair):
            _end(folder / name, pair)
    _remove_begun(folder)


def _is_begun(file: Path, pair: str) -> bool:
    """Whether a file waits for weights with this mark: its name and what is in it say so."""
    return PAIRS.fullmatch(pair) is not None and _says(_begun(file, pair), pair)


def _end(file: Path, pair: str) -> None:
    begun = _begun(file, pair)
    if _table(begun).keys() == {PAIR}:
        file.unlink(missing_ok=True)
    else:
        os.replace(begun, file)


def is_paired(file: Path) -> bool:
    """Whether this is JSON that vitlite wrote beside weights."""
    try:
        return PAIR in _table(file)
    except CheckpointError:
        return False


def _remove_begun(folder: Path) -> None:
    for name in (CONFIG, PICTURES):
        for file in folder.glob(f"{name}.*"):
            if _is_begun(folder / name, file.name.removeprefix(f"{name}.")):
                file.unlink()


def _says(file: Path, pair: str) -> bool:
    try:
        return bool(_table(file).get(PAIR) == pair)
    except CheckpointError:
        return False
