"""Read the metadata of a checkpoint: the config, the labels, the preprocessing and the format.

The metadata of a record of the zoo, a config.json, a preset and a `ViTConfig` all have the type `Metadata`. The modules
in `formats` read the files of other libraries and are imported only if there is such a file.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitlite.config import ViTConfig
from vitlite.errors import CheckpointError
from vitlite.images.transform import TransformConfig, before_crop, naflex_like
from vitlite.presets import PRESETS
from vitlite.storage import read_json
from vitlite.zoo.registry import Record

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # transformers'; takes priority over PREPROCESSOR
ADAPTER = "adapter_config.json"  # peft's
BESIDE_WEIGHTS = (CONFIG, PREPROCESSOR, PROCESSOR, ADAPTER)
ID = "vitlite_id"  # the key of the id that a config.json shares with the header of its weights
CONFIG_ARGUMENT = "config="  # the source of fields from the argument `config`
Scores = Literal["softmax", "sigmoid"]  # how `predict` turns the logits into scores
SHAPE = ("patch_size", "dim", "depth", "heads", "mlp_dim")  # the fields that a preset determines


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The information about a checkpoint in one source, such as a config.json or a record of the zoo."""

    source: str = ""  # the name of the source in errors: "config.json", "the record of vit_base_16.dino"
    fields: Mapping[str, Any] = field(default_factory=dict)  # fields of `ViTConfig`
    # True: the source says which network this is, so that other networks with the same tensor names are ruled out.
    names_network: bool = False
    usual_image_size: int | tuple[int, int] | None = None  # used if `fields` has no size and the position table fits
    format: str | None = None  # the checkpoint format
    transform: TransformConfig | None = None
    transform_error: str = ""  # why the preprocessing of the source cannot be used
    labels: tuple[str, ...] | None = None
    labels_error: str = ""  # why the class names of the source cannot be used
    scores: Scores = "softmax"
    thresholds: tuple[float, ...] | None = None  # for each class, the score from which an image has the label
    is_vitlite: bool = False  # True: written by vitlite, so that missing labels are not taken from elsewhere
    architecture: str = ""  # timm's name of the architecture, with the tag of the checkpoint


def metadata_from_record(record: Record) -> Metadata:
    """Return the metadata of a checkpoint of the zoo."""
    return Metadata(
        source=f"the record of {record.name}",
        fields=vars(record.config),
        names_network=True,
        format=record.format,
        transform=transform_from_record(record),
        labels=record.labels,
    )


def metadata_from_preset(name: str) -> Metadata:
    """Return the metadata of a preset, which determines only the shape of a network."""
    config = PRESETS[name]
    fields = {name: getattr(config, name) for name in SHAPE}
    return Metadata(source=f"the preset {name}", fields=fields, usual_image_size=config.image_size)


def metadata_from_config(config: ViTConfig) -> Metadata:
    """Return the metadata for a complete config that the caller passed as `config`."""
    return Metadata(source=CONFIG_ARGUMENT, fields=vars(config))


def transform_from_record(record: Record) -> TransformConfig:
    """Return the preprocessing of a zoo checkpoint for images of the size of its config."""
    size = (record.pixels, record.pixels)
    transform = TransformConfig(
        size=size,
        resize=before_crop(size, record.crop_pct),
        mode=record.crop_mode,
        interpolation=record.interpolation,
        mean=record.mean,
        std=record.std,
        crop_pct=record.crop_pct,
    )
    if record.config.resample == "naflex":
        return naflex_like(transform, record.config.size, record.config.patch_size)
    return transform.in_whole_patches(record.config.patch_size)


def read_metadata(folder: Path, weights_id: str | None = None) -> Metadata:
    """Read config.json and preprocessor_config.json beside the weights.

    The section `vitlite` of config.json is used if config.json and the header of the weights have the same id, or if
    neither has one. If only one of them has an id, another library has rewritten one of the two files, and the entries
    of timm or transformers in config.json are used instead. Two different ids are an error.

    Args:
        folder: The folder of the weights.
        weights_id: The `vitlite_id` in the header of the weights, or None if there is none.

    Raises:
        CheckpointError: A file is damaged, was written for other weights, or describes an unsupported model.
    """
    if os.path.lexists(folder / ADAPTER):
        raise CheckpointError(
            f"{folder} contains an adapter ({ADAPTER}), which vitlite does not support. Merge the adapter with peft: "
            "model.merge_and_unload().save_pretrained(FOLDER). To ignore the adapter, move it to another folder."
        )
    config = _read_table(folder / CONFIG)
    config_id = config.get(ID)
    try:
        if config_id != weights_id and None not in (config_id, weights_id):
            raise CheckpointError(
                f"This file was written for other weights: its {ID} is {config_id}, but {weights_id} in the weights "
                "file. Save the model again."
            )
        if "vitlite" in config and config_id == weights_id:
            from vitlite.checkpoints.formats.vitlite import metadata_from_vitlite

            return metadata_from_vitlite(config)
        if "architecture" in config:
            from vitlite.checkpoints.formats.timm import metadata_from_timm

            return metadata_from_timm(config)
        if "model_type" in config:
            from vitlite.checkpoints.formats.transformers import metadata_from_transformers

            return metadata_from_transformers(config, _read_preprocessor(folder))
        if "vitlite" in config:
            raise CheckpointError(
                f"This file and the weights were not saved together: only one of them has a {ID}. Use files that were "
                "saved together, or save the model again."
            )
    except CheckpointError as error:
        raise error.within(str(folder / CONFIG)) from None
    return Metadata()


def _read_preprocessor(folder: Path) -> Mapping[str, Any]:
    """Return the image preprocessing config that transformers wrote, or an empty mapping if there is none."""
    processor = _read_table(folder / PROCESSOR).get("image_processor")
    return processor if isinstance(processor, dict) else _read_table(folder / PREPROCESSOR)


def _read_table(file: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = read_json(file) if os.path.lexists(file) else {}
    return content
