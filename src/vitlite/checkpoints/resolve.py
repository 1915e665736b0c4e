"""Determine the config of a checkpoint from three sources: the tensors, the metadata and the checkpoint format.

If more than one source determines a field, the values must agree. A field that no source determines is an error.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitlite.checkpoints.build import parameter_shapes
from vitlite.checkpoints.key_mapping import (
    CheckpointFormat,
    KeyMapping,
    fold_token_rows,
    infer_geometry,
    map_keys,
    map_own_names,
)
from vitlite.checkpoints.metadata import CONFIG_ARGUMENT, Metadata
from vitlite.checkpoints.reader import Shape, WeightsFile
from vitlite.config import FIELDS, ViTConfig
from vitlite.errors import CheckpointError, ConfigError, VitliteError
from vitlite.nn.vit import model_on_meta
from vitlite.zoo import registry

TENSORS = "the tensors"
CHECK_CONFIG = "Check that the config belongs to these weights."
REQUIRED = (
    "patch_size",
    "image_size",
    "positions",
    "rope",
    "heads",
    "norm_eps",
    "mlp",
    "pool",
    "final_norm",
)
RUNTIME = ("resample", "dropout", "drop_path", "checkpointing")  # fields that do not depend on the weights
FINE_TUNED = ("pool", "norm_eps", "mlp", "cls_position", "layer_scale")  # fields that may differ from `like`
SQUARE = ("torchvision", "google")  # formats of libraries that support only square images
MEAN_WITHOUT_CLS = ("transformers", "transformers-siglip-classifier")  # formats that imply mean pooling without a cls
LISTED = 4  # number of candidates in an error
ASSUMED = {  # assumptions for the load report, because unpublished networks have the same tensor names
    "timm": {"norms": "assumed: before attention and MLP. In timm's ResPostBlock, norms of the same names come after"},
    "vit-pytorch": {"tokens": "assumed: all tokens go through all blocks. vit-pytorch's ats_vit drops some"},
}


class Value(NamedTuple):
    """The value of a config field, and the name of the source that states it."""

    value: Any
    source: str


class Resolved(NamedTuple):
    """The config of a checkpoint, and the name of each field's source, such as {"heads": "config.json"}."""

    config: ViTConfig
    provenance: Mapping[str, str]


class Evidence(NamedTuple):
    """The information that was inferred from the names and shapes of the tensors in a file."""

    format: CheckpointFormat
    geometry: Mapping[str, Any]  # the result of `infer_geometry`
    ambiguous: Mapping[str, str]  # the fields that the tensors only suggest, and the reasons


def map_and_resolve(
    file: WeightsFile, own: Metadata, given: Metadata, defaults: Mapping[str, Any] | None = None
) -> tuple[KeyMapping, Resolved]:
    """Map the tensor names of a file to vitlite's names, and determine the config.

    Args:
        file: The open file.
        own: The metadata beside the file.
        given: The metadata from the argument `like` or `config` of `load`, for fields that are missing in `own`. Other
            fields must agree with `own`, except `RUNTIME` and, for `like`, `FINE_TUNED`.
        defaults: Values for fields that would otherwise be unknown.

    Raises:
        CheckpointError: The file is not a plain ViT, or the metadata contradicts the tensors.
        ConfigError: A field of the config is not determined by any source.
    """
    try:
        # If only a complete record of the zoo describes the file, and the tensors have our names and the shapes of the
        # record, there is nothing to infer. The record must be in timm's format, too: `resample` of another library's
        # record would be wrong for such a file (see `_stated_fields`).
        if own == Metadata() and given.fields.keys() == set(FIELDS) and (given.format or "").startswith("timm"):
            config = ViTConfig(**given.fields)
            if file.shapes == parameter_shapes(model_on_meta(config)):
                file.check_dtypes(list(file.shapes))
                return map_own_names(file.shapes), Resolved(config, dict.fromkeys(FIELDS, given.source))
        patch_size = own.fields.get("patch_size", given.fields.get("patch_size"))
        mapping = map_keys(file.shapes, patch_size if isinstance(patch_size, int) else None)
        geometry = infer_geometry(mapping, file.shapes)
        file.check_dtypes(mapping.parts)
        names_network = own.names_network or given.names_network
        ambiguous = _ambiguous_fields(mapping, file.shapes, geometry, names_network=names_network)
        evidence = Evidence(mapping.format, geometry, ambiguous)
        values = resolve_fields(evidence, own, given, defaults or {})
        if not names_network:
            _check_network(mapping, evidence, own, values)
        unknown = _unknown_fields(values)
        if unknown:
            raise _unknown_error(evidence, own, given, unknown)
        config = ViTConfig(**{name: value.value for name, value in values.items()})
        provenance = {name: value.source for name, value in values.items()}
        if not names_network:
            provenance |= _assumptions(evidence, config)
        # In vitlite, registers have no rows in the position table. Add their rows to the tokens instead.
        if geometry["token_rows"] and geometry["position_rows"] != math.prod(config.grid):
            mapping = fold_token_rows(mapping)
    except (CheckpointError, ConfigError) as error:
        raise error.within(str(file.path)) from None
    return mapping, Resolved(config, provenance)


def resolve_fields(
    evidence: Evidence, own: Metadata, given: Metadata, defaults: Mapping[str, Any] | None = None
) -> dict[str, Value]:
    """Return the value of each config field that the tensors, the checkpoint format or the metadata determine.

    Raises:
        CheckpointError: Two sources disagree about a field.
    """
    checkpoint_format, geometry, ambiguous = evidence
    values, disagreements = _stated_fields(own, given, checkpoint_format)
    for name in FIELDS:
        if name not in geometry or name == "layer_scale":  # for layer_scale, geometry has only a flag
            continue
        measured = Value(geometry[name], TENSORS)
        if name in values and values[name].value != measured.value:
            disagreements[name] = _difference(name, measured, values[name])
        if name not in ambiguous:
            values[name] = measured
    for name in checkpoint_format.fixed.keys() - ambiguous.keys() - set(checkpoint_format.assumed):
        fixed = Value(checkpoint_format.fixed[name], f"the {checkpoint_format.name} format")
        known = values.setdefault(name, fixed)
        if known.value != fixed.value and known.source != TENSORS:  # tensors overrule the format
            disagreements[name] = _difference(name, fixed, known)
    _resolve_layer_scale(values, disagreements, has_scale=geometry["layer_scale"])
    if "mlp" in values and values["mlp"].value == "swiglu" and not geometry["gated"]:
        disagreements["mlp"] = _difference("mlp", Value("not gated", TENSORS), values["mlp"])
    if disagreements:
        raise _disagreement(disagreements, given, geometry["num_classes"])
    _fill_in_defaults(values, evidence, defaults or {})
    _read_position_table(values, evidence, own, given)
    _resolve_heads(values, geometry)
    _check_pool(values, checkpoint_format, has_attention_pool=geometry["attention_pool"])
    return values


def _difference(name: str, one: Value, other: Value) -> str:
    return f"{name} is {one.value} in {one.source} and {other.value} in {other.source}"


def _stated_fields(
    own: Metadata, given: Metadata, checkpoint_format: CheckpointFormat
) -> tuple[dict[str, Value], dict[str, str]]:
    """Return the value of each config field in the metadata, and a clause about each field with two values."""
    values = {name: Value(value, own.source) for name, value in own.fields.items()}
    is_config = given.source == CONFIG_ARGUMENT
    may_differ = RUNTIME if is_config else (*RUNTIME, *FINE_TUNED)
    disagreements = {}
    for name, value in given.fields.items():
        if name == "resample" and given.format and _library(given.format) != _library(checkpoint_format.name):
            continue  # the library of this file resizes position tables differently
        known = values.get(name)
        if known is None or (is_config and name in RUNTIME):
            values[name] = Value(value, given.source)
        elif known.value != value and name not in may_differ:
            disagreements[name] = _difference(name, known, Value(value, given.source))
    return values, disagreements


def _library(format_name: str) -> str:
    return format_name.partition("-")[0]


def _disagreement(disagreements: Mapping[str, str], given: Metadata, num_classes: int) -> CheckpointError:
    in_order = [disagreements[name] for name in FIELDS if name in disagreements]
    text = f"Checkpoint and config disagree: {'; '.join(in_order)}."
    if given.format and list(disagreements) == ["num_classes"]:
        text += (
            f" For a model fine-tuned on {num_classes} classes, pass num_classes={num_classes} (vitlite convert "
            f"--num-classes {num_classes} --labels ...)."
        )
    else:
        text += f" {CHECK_CONFIG}"
    return CheckpointError(text)


def _resolve_layer_scale(values: dict[str, Value], disagreements: dict[str, str], *, has_scale: bool) -> None:
    """Check that tensors and metadata agree on whether the model has layer scale, and set its initial value."""
    stated = values.get("layer_scale")
    if stated is not None and (stated.value is not None) != has_scale:
        there = "present" if has_scale else "absent"
        disagreements["layer_scale"] = f"layer_scale is {there} in the tensors and {stated.value} in {stated.source}"
    if not has_scale:
        values["layer_scale"] = Value(None, TENSORS)
    elif stated is None:
        values["layer_scale"] = Value(1e-5, "assumed: used only for random weights")


def _fill_in_defaults(values: dict[str, Value], evidence: Evidence, defaults: Mapping[str, Any]) -> None:
    checkpoint_format, geometry, ambiguous = evidence
    usual = {"resample": checkpoint_format.resample[geometry["registers"] > 0]}
    if geometry["attention_pool"] and "pool" not in geometry and not geometry["class_token"] + geometry["registers"]:
        usual["pool"] = "map"  # the same as map_all
    if not geometry["rotary"] and "rope" not in ambiguous:
        usual["rope"] = None
    for name in checkpoint_format.assumed:
        if name not in ambiguous:
            usual[name] = checkpoint_format.fixed[name]
    for name, value in usual.items():
        values.setdefault(name, Value(value, f"the {checkpoint_format.name} format"))
    for name, value in defaults.items():
        if name != "image_size":
            values.setdefault(name, Value(value, "assumed"))


# ---- The position table


def _read_position_table(values: dict[str, Value], evidence: Evidence, own: Metadata, given: Metadata) -> None:
    """Set image_size and cls_position from the number of rows of the position table and the image size in the metadata.

    Raises:
        CheckpointError: The number of rows does not fit the image size in the metadata.
    """
    checkpoint_format, geometry, _ = evidence
    rows = geometry["position_rows"]
    if "patch_size" not in values:
        return
    patch = values["patch_size"].value
    sizes = [values["image_size"]] if "image_size" in values else _usual_sizes(own, given)
    if not rows:
        if sizes:
            values["image_size"] = sizes[0]
        return
    for token_rows in _possible_token_rows(checkpoint_format, geometry):
        side = math.isqrt(max(rows - token_rows, 0)) * patch
        squares = checkpoint_format.name.startswith(SQUARE) and "image_size" not in values
        candidate_sizes = [*sizes, Value(side, TENSORS)] if squares else sizes
        patches = rows - token_rows
        for size in candidate_sizes:
            if patches > 0 and _patches_in(size.value, patch) == patches:
                values["image_size"] = size
                _set_cls_position(values, geometry, has_row=token_rows > 0)
                return
    if "image_size" in values:
        size = values["image_size"]
        raise CheckpointError(
            f"Checkpoint and config disagree: image_size is {size.value} in {size.source}, but the position table in "
            f"the file has {rows} rows, which is not the number of tokens for this size and patch_size {patch}. Use "
            "the image size of the weights in the config. To run the model at another size, pass image_size= (--size)."
        )


def _usual_sizes(*sources: Metadata) -> list[Value]:
    return [Value(each.usual_image_size, each.source) for each in sources if each.usual_image_size is not None]


def _possible_token_rows(checkpoint_format: CheckpointFormat, geometry: Mapping[str, Any]) -> Sequence[int]:
    """Return how many rows of the position table may belong to class token and registers, most likely number first."""
    if geometry["token_rows"]:
        return [0, geometry["token_rows"]]
    if not geometry["class_token"] or geometry["registers"]:
        return [0]
    return [int(has_row) for has_row in checkpoint_format.cls_rows]


def _patches_in(size: int | tuple[int, int], patch: int) -> int:
    height, width = (size, size) if isinstance(size, int) else size
    return 0 if height % patch or width % patch else (height // patch) * (width // patch)


def _set_cls_position(values: dict[str, Value], geometry: Mapping[str, Any], *, has_row: bool) -> None:
    if geometry["registers"]:  # their rows are added to the tokens
        values["cls_position"] = Value(False, TENSORS)
    elif geometry["class_token"]:
        stated = values.get("cls_position")
        if stated is not None and stated.value != has_row:
            raise CheckpointError(
                f"Checkpoint and config disagree: cls_position is {stated.value} in {stated.source}, but the position "
                f"table in the file has {'a' if has_row else 'no'} row for the class token. {CHECK_CONFIG}"
            )
        values["cls_position"] = Value(has_row, TENSORS)


# ---- Heads and pool


def _resolve_heads(values: dict[str, Value], geometry: Mapping[str, Any]) -> None:
    """Check that the number of heads fits the attention layers. Set head_dim if their width differs from dim."""
    if "heads" not in values:
        return
    heads, width, dim = values["heads"], geometry["attention_dim"], values["dim"].value
    stated = values.pop("head_dim", Value(None, ""))
    if type(heads.value) is not int or heads.value < 1 or width % heads.value:
        raise CheckpointError(
            f"Checkpoint and config disagree: heads is {heads.value} in {heads.source}, but the attention layers in "
            f"the file have {width} channels, which cannot be divided into this number of heads. {CHECK_CONFIG}"
        )
    if stated.value is not None and stated.value * heads.value != width:
        raise CheckpointError(
            f"Checkpoint and config disagree: heads is {heads.value} in {heads.source} and head_dim is {stated.value} "
            f"in {stated.source}, but the attention layers in the file have {width} channels, not "
            f"{heads.value * stated.value}. {CHECK_CONFIG}"
        )
    if width != dim:
        values["head_dim"] = Value(width // heads.value, TENSORS)


def _check_pool(values: Mapping[str, Value], checkpoint_format: CheckpointFormat, *, has_attention_pool: bool) -> None:
    """Check that the library that defines the checkpoint format supports the pooling."""
    pool = values.get("pool")
    if pool is None:
        return
    by_attention = pool.value in ("map", "map_all")
    if by_attention != has_attention_pool:
        measured = Value("map" if has_attention_pool else "not map", TENSORS)
        raise CheckpointError(f"Checkpoint and config disagree: {_difference('pool', measured, pool)}. {CHECK_CONFIG}")
    if by_attention or not values["class_token"].value or pool.value in checkpoint_format.pools:
        return
    if pool.value == "cls_and_distillation" and values["registers"].value == 1:
        return
    raise CheckpointError(
        f"Checkpoint and config disagree: pool is {pool.value} in {pool.source}, but a file in the "
        f"{checkpoint_format.name} format must have {' or '.join(checkpoint_format.pools)}. {CHECK_CONFIG}"
    )


# ---- Unknown and ambiguous fields


def _ambiguous_fields(
    mapping: KeyMapping, shapes: Mapping[str, Shape], geometry: Mapping[str, Any], *, names_network: bool
) -> dict[str, str]:
    """Return the config fields that the tensors suggest but do not determine, and the reasons."""
    name, tensors = mapping.format.name, mapping.tensors
    ambiguous = {}
    kernel = tensors["patch_embed.proj.weight"]
    if mapping.patch_size is None and len(shapes[kernel.parts[0]]) == 2:
        ambiguous["patch_size"] = "a flattened patch does not determine its side and number of channels"
    if name == "openai":
        ambiguous["pool"] = "open_clip models use the class token or a mean"
    elif geometry.get("pool") == "mean" and not mapping.format.bare_proj and name not in MEAN_WITHOUT_CLS:
        ambiguous["pool"] = "models without a class token use the mean, the maximum, both, or attention"
    elif name.startswith("transformers-dinov2") and geometry["num_classes"] and geometry.get("pool") is None:
        ambiguous["pool"] = "the head of transformers' DINOv2 reads two vectors, but this head reads one"
    scale = tensors.get("blocks.0.ls1.gamma")
    if scale is not None and scale.parts[0].endswith("gamma_1") and geometry["position_rows"]:
        ambiguous["rope"] = "DeiT III and networks with rotary positions both have scales named gamma_1"
    gate = tensors["blocks.0.mlp.fc1.weight"].parts[0]
    any_gate = name in ("timm", "transformers-dinov3") and not gate.endswith("w12.weight")  # Meta's gate, always SiLU
    if geometry["gated"] and any_gate and not names_network:
        ambiguous["mlp"] = "the activation of the gate is unknown; vitlite supports SiLU, mlp='swiglu'"
    return ambiguous


def _check_network(mapping: KeyMapping, evidence: Evidence, own: Metadata, values: Mapping[str, Value]) -> None:
    """Check that the tensors of a file cannot belong to another kind of network.

    Raises:
        ConfigError: Networks of other kinds have tensors of the same names and shapes.
    """
    from vitlite.checkpoints.look_alikes import look_alike

    rotary = "rope" in values and values["rope"].value is not None
    pools_all = "pool" in values and values["pool"].value == "map_all"
    alike = look_alike(mapping, evidence.geometry, rotary=rotary, pools_all=pools_all)
    if evidence.geometry["rotary"] and "rope" in values and not rotary and not alike:
        alike = "layer scale without a position table, or learned frequencies, indicate rotary positions"
    if alike:
        raise ConfigError(
            f"The tensors do not determine the network: {alike}. Pass the name of the original checkpoint as like= "
            "(--model NAME --weights PATH), or put its config.json beside the file."
            f"{_named(candidates(evidence, own))}"
        )


def _unknown_fields(values: Mapping[str, Value]) -> list[str]:
    """Return the names of the required config fields that have no value."""
    return [name for name in REQUIRED if name not in values]


def _unknown_error(evidence: Evidence, own: Metadata, given: Metadata, unknown: Sequence[str]) -> ConfigError:
    reasons = [f"{name}: {evidence.ambiguous[name]}" for name in unknown if name in evidence.ambiguous]
    if given.usual_image_size is not None and not given.names_network:  # a preset
        reasons.append(f"{given.source} determines only the shape")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return ConfigError(
        f"The tensors do not determine {', '.join(unknown)}{why}. Pass the name of the original checkpoint as like= "
        "(--model NAME --weights PATH), or pass a complete ViTConfig as config=."
        f"{_named(candidates(evidence, own))}"
    )


def candidates(evidence: Evidence, own: Metadata) -> list[str]:
    """Return the checkpoints of the zoo that have the same tensor names and shapes and agree with the metadata."""
    library = _library(evidence.format.name)
    ambiguous = {name: why for name, why in evidence.ambiguous.items() if name != "mlp"}  # records contain the gate
    names = []
    for record in registry.RECORDS.values():
        if _library(record.format) != library:
            continue
        given = Metadata(source=record.name, fields=vars(record.config), names_network=True, format=record.format)
        try:
            values = resolve_fields(evidence._replace(ambiguous=ambiguous), own, given)
        except VitliteError:
            continue
        if not _unknown_fields(values):
            names.append(record.name)
    return names


def _named(names: Sequence[str]) -> str:
    """Return a sentence that lists checkpoints with the same tensors, or "" if `names` is empty."""
    if not names:
        return ""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f" Checkpoints with the same tensor names and shapes: {', '.join(names[:LISTED])}{more}."


def _assumptions(evidence: Evidence, config: ViTConfig) -> dict[str, str]:
    """Return the assumptions for the load report of a file whose metadata does not name the network."""
    name = evidence.format.name.removesuffix(" before 1.0")
    assumed = dict(ASSUMED.get(name, {}))
    if name == "timm" and config.positions == "learned" and config.rope is None and config.layer_scale is None:
        assumed["rotation"] = "assumed: none. timm's Eva may have both a position table and rotary positions"
    if name == "transformers-dinov3":
        assumed["rotation"] = "assumed: DINOv3's, with periods from 1 to 100. The file contains no periods"
    return assumed
