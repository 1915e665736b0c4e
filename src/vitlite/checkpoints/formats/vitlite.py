"""vitlite's own part of config.json: all of a config, the labels, and the transform. Read first, then written."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitlite import __version__
from vitlite.checkpoints.formats.record import LABEL, Metadata, UnreadTransform
from vitlite.config import ViTConfig, check_fields
from vitlite.errors import CheckpointError, ConfigError, shown
from vitlite.images import TransformConfig
from vitlite.schema import anything, by_name, optional, several, table, verify

CONFIG = table(
    {
        "vitlite": table(
            {
                "config": by_name(anything, most=100),  # see check_fields
                "labels": optional(several(LABEL)),
                "preprocess": optional(by_name(anything, most=100)),  # whose fields a TransformConfig checks
            },
            required=("config",),
        )
    }
)


def metadata_from_vitlite(config: Mapping[str, Any]) -> Metadata:
    """What the config.json says that `config_to_vitlite` wrote.

    Raises:
        CheckpointError: It was not what wrote it.
    """
    verify(config, CONFIG)
    saved = config["vitlite"]
    try:
        check_fields(saved["config"])  # those, too, that tensors will overrule
    except ConfigError as error:
        raise CheckpointError(error.text) from None
    labels = saved.get("labels")
    transform = saved.get("preprocess")
    return Metadata(
        claims=saved["config"],
        labels=tuple(labels) if labels else None,
        transform=UnreadTransform("vitlite", transform) if transform else None,
        library="vitlite",
    )


def transform_from_vitlite(fields: Mapping[str, Any], size: tuple[int, int] | None = None) -> TransformConfig:
    """Return the transform of `config_to_vitlite` or `TransformConfig.to_dict`; `size` scales its numbers.

    Raises:
        ConfigError: It is none.
    """
    known: dict[str, Any] = {}
    for name, value in fields.items():
        known[name] = tuple(value) if isinstance(value, list) else value
    try:
        transform = TransformConfig(**known)
    except TypeError as error:
        raise ConfigError(
            f"These are not the fields of a TransformConfig: {shown(str(error))}. Given: {shown(', '.join(fields))}."
        ) from None
    return transform.scaled(size) if size else transform


def config_to_vitlite(
    config: ViTConfig, labels: Sequence[str] | None, transform: TransformConfig | None
) -> dict[str, Any]:
    """All that `vitlite.load` needs to give a model back."""
    return {
        "vitlite": {
            "version": __version__,
            "config": config.to_dict(),
            "labels": labels,
            "preprocess": _recipe_to_vitlite(transform) if transform else None,
        }
    }


def _recipe_to_vitlite(transform: TransformConfig) -> dict[str, Any]:
    """All of a transform; of its share nothing where none is known."""
    share = {} if transform.share is None else {"share": transform.share}
    return transform.to_dict() | share
