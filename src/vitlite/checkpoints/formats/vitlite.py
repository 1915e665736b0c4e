"""Read and write vitlite's own section of config.json, which contains the config, the labels and the preprocessing."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from vitlite import __version__
from vitlite.checkpoints.formats.keys import STRINGS, TABLE, as_json, check_types, is_numbers, labels_in_order
from vitlite.checkpoints.formats.timm import config_to_timm, timm_cannot_read
from vitlite.checkpoints.metadata import Metadata, Scores
from vitlite.config import FIELDS, ViTConfig
from vitlite.errors import CheckpointError, ConfigError
from vitlite.images.naflex import NaFlexTransform
from vitlite.images.transform import TransformConfig


def metadata_from_vitlite(content: Mapping[str, Any]) -> Metadata:
    """Read vitlite's section of a config.json.

    Raises:
        CheckpointError: The section is invalid.
    """
    check_types(content, {"vitlite": TABLE})
    section = content["vitlite"]
    check_types(section, {"config": TABLE, "labels": STRINGS, "preprocess": TABLE}, "vitlite.")
    fields = section.get("config")
    if fields is None:
        raise CheckpointError("The section `vitlite` of the file has no entry `config`. Save the model again.")
    unknown = sorted(fields.keys() - set(FIELDS))
    if unknown:
        raise CheckpointError(
            f"vitlite.config has unknown fields: {', '.join(unknown)}. If a newer version of vitlite wrote the file, "
            "upgrade vitlite."
        )
    try:
        config = ViTConfig(**fields)
    except ConfigError as error:
        raise CheckpointError(f"vitlite.config: {error}") from None
    scores = section.get("scores", "softmax")
    if scores not in get_args(Scores):
        raise CheckpointError(f"vitlite.scores must be {' or '.join(get_args(Scores))}, got {scores!r}.")
    thresholds, count = section.get("thresholds"), config.num_classes
    if thresholds is not None and not (is_numbers(thresholds) and len(thresholds) == count):
        raise CheckpointError(f"vitlite.thresholds must be a list of {count} numbers, got {thresholds!r}.")
    transform, transform_error = None, ""
    if section.get("preprocess"):
        try:
            transform = transform_from_vitlite(section["preprocess"])
        except ConfigError as error:
            transform_error = str(error)
    labels, labels_error = labels_in_order(section.get("labels"))
    return Metadata(
        source="config.json",
        fields={name: getattr(config, name) for name in fields},
        names_network=True,
        transform=transform,
        transform_error=transform_error,
        labels=labels,
        labels_error=labels_error,
        scores=scores,
        thresholds=tuple(thresholds) if thresholds else None,
        is_vitlite=True,
    )


def transform_from_vitlite(fields: Mapping[str, Any]) -> TransformConfig:
    """Create a `TransformConfig` from a dictionary that `TransformConfig.to_dict` returned or that was read from JSON.

    Raises:
        ConfigError: A field is unknown, missing or invalid.
    """
    known: dict[str, Any] = {}
    for name, value in fields.items():
        known[name] = tuple(value) if isinstance(value, list) else value
    try:
        return NaFlexTransform(**known) if "max_patches" in known else TransformConfig(**known)
    except TypeError as error:
        raise ConfigError(f"Invalid preprocessing config: {error}. Save the model again.") from None


def metadata_content(
    config: ViTConfig,
    labels: Sequence[str] | None,
    transform: TransformConfig | None,
    format: str = "timm",
    scores: Scores = "softmax",
    thresholds: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the content of a config.json for vitlite and, if timm can build the model, for timm.

    Args:
        config: The config of the model.
        labels: The names of the classes.
        transform: The preprocessing of the images.
        format: The checkpoint format of the tensors.
        scores: How `predict` turns the logits into scores: "softmax" or "sigmoid".
        thresholds: For each class, the minimum score at which an image gets the label.

    Raises:
        CheckpointError: vitlite cannot read the content back, for example because a label is not a string.
    """
    preprocess = None
    if transform is not None:
        preprocess = transform.to_dict() | ({} if transform.crop_pct is None else {"crop_pct": transform.crop_pct})
    section: dict[str, Any] = {"version": __version__, "config": config.to_dict(), "labels": labels}
    section |= {"scores": scores, "thresholds": thresholds, "preprocess": preprocess}
    content: dict[str, Any] = {"vitlite": section}
    reason = timm_cannot_read(config, transform, format)
    if reason:
        section["for_vitlite_alone"] = reason
    else:
        content |= config_to_timm(config, labels, transform)
    metadata_from_vitlite(as_json(content))
    return content
