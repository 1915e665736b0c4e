"""Convert weights to the format of another library.

The result is a file that contains only the tensors, or a folder that the library can load. This module is the only part
of vitlite that accepts pickles (.pth, .bin).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlite.checkpoints.build import BuildOptions, build
from vitlite.checkpoints.formats.timm import format_for_timm, pools_as_timm, timm_cannot_read
from vitlite.checkpoints.formats.transformers import (
    computed_by,
    contents_for_transformers,
    format_for_transformers,
    model_type,
)
from vitlite.checkpoints.formats.vitlite import metadata_content
from vitlite.checkpoints.key_mapping import FORMATS, KeyMapping, map_keys, patch_geometry, rename_tensors
from vitlite.checkpoints.metadata import (
    CONFIG,
    ID,
    PREPROCESSOR,
    Metadata,
    metadata_from_config,
    read_metadata,
)
from vitlite.checkpoints.pickles import without_pickle
from vitlite.checkpoints.reader import (
    FLOATS,
    PICKLES,
    WEIGHTS,
    WeightsFile,
    files_of,
    metadata_folder,
    open_weights,
    path_of,
    weights_in,
)
from vitlite.checkpoints.resolve import map_and_resolve
from vitlite.checkpoints.save import (
    check_overwrite,
    check_savable,
    check_values,
    explaining_write_errors,
    save,
    write_folder,
    write_tensors,
)
from vitlite.config import ViTConfig
from vitlite.errors import CheckpointError, ConfigError
from vitlite.factory import load, metadata_like
from vitlite.images.transform import Margin, Preprocess
from vitlite.nn.vit import ViT
from vitlite.storage import folder_obstacle, obstacle

Target = Literal["timm", "transformers", "torchvision", "vitlite"]

TORCHVISION = dict(FORMATS["torchvision"].fixed) | {  # the field values that torchvision's model cannot change
    "channels": 3, "class_token": True, "registers": 0, "positions": "learned", "rope": None, "head_dim": None,
    "mlp": "gelu", "final_norm": "tokens", "stem": None,
}  # fmt: skip
WITHOUT_SHAPE = {"heads": 1, "norm_eps": 1e-6, "mlp": "gelu", "pool": "cls"}  # fields that no shape depends on


def convert(
    source: str | PathLike[str],
    target: str | PathLike[str],
    to: Target,
    *,
    config: ViTConfig | None = None,
    like: str | None = None,
    num_classes: int | None = None,
    labels: Sequence[str] | None = None,
    margin: Margin | None = None,
    key: str | None = None,
) -> None:
    """Convert weights to the format of another library. The values and dtypes of the tensors do not change.

    Args:
        source: A file or folder that `vitlite.load` accepts, or a pickle (.pth, .bin), which is opened with
            weights_only=True.
        target: A .safetensors file, which will contain only tensors, or a folder for a complete model.
        to: The library to convert to. For "vitlite", the tensors have timm's names.
        config: The complete config of the weights, instead of `like`.
        like: The name of the checkpoint in the zoo that `source` contains or was fine-tuned from. If the target is a
            folder, it gets the preprocessing of this checkpoint, and the labels unless `num_classes` is passed.
        num_classes: The number of classes of a model that was fine-tuned from `like`.
        labels: The names of the classes, instead of those of `like` or of the source.
        margin: How the target rounds half of an odd crop margin: "down" (transformers) or "nearest" (timm). Required if
            the source rounds differently; some crops then move by one pixel.
        key: The key of the network in a pickle that contains several networks, such as "teacher".

    Raises:
        CheckpointError: `source` is not a plain ViT, other files would be overwritten, or the library has no model that
            computes the same results.
        ConfigError: An option is invalid, or the target is a folder but the config of `source` is unknown.
        UnknownNameError: There is no checkpoint with the name `like`.
    """
    if to not in get_args(Target):
        raise ConfigError(f"Cannot convert to {to!r}. Pass one of {', '.join(get_args(Target))} as to= (--to).")
    if config is not None and like is not None:
        raise ConfigError("config= and like= cannot be combined, because each is a complete config. Pass only one.")
    source, target = path_of(source, "source"), path_of(target, "target")
    only_tensors = target.suffix == ".safetensors"
    check_target(source, target)
    if only_tensors and (margin, labels) != (None, None):
        raise ConfigError(
            "A .safetensors file contains neither preprocessing nor labels. Leave out margin= and labels= (--margin, "
            "--labels), or pass a folder as the target."
        )
    with without_pickle(source, key) as path, open_weights(path) as file:
        head = map_keys(file.shapes).tensors.get("head.weight")
        own_classes = head.shape[0] if head else 0
        if labels is not None and num_classes is None:
            num_classes = len(labels)
        if num_classes not in (None, own_classes):
            raise CheckpointError(
                f"num_classes= (--num-classes, or the number of --labels) must be the number of classes in {source}, "
                f"which is {own_classes}, got {num_classes}. A conversion cannot change the number of classes."
            )
        if only_tensors:
            model = _load_for_tensors(file, path, to, _given(config, like, num_classes))
        else:
            model = load(path, like=like, config=config, num_classes=num_classes, dtype=_common_dtype(file))
    if only_tensors:
        tensors = _rename(model, to)
        with explaining_write_errors(target):
            write_tensors(target, tensors)
        return
    model.labels = model.labels if labels is None else tuple(labels)
    if margin is not None:
        _set_margin(model, margin)
    if like is None and to != "vitlite":
        _check_labels(model)
    _write_folder(model, target, to)


def check_target(source: Path, target: Path) -> None:
    """Check that the target can be written without overwriting an input or another model.

    Raises:
        CheckpointError: The target cannot be written, or other files would be overwritten.
        ConfigError: The target has the extension of a pickle.
    """
    if target.suffix in PICKLES:
        raise ConfigError(
            f"Cannot write {target}: vitlite does not write pickles. Pass a folder or a .safetensors file."
        )
    if not source.exists():
        raise CheckpointError(f"There is no file or folder {source}. Check the path.")
    is_file = target.suffix == ".safetensors"
    path = weights_in(source) if source.is_dir() else source
    read = [path] if path.suffix in PICKLES else [path, *files_of(path)[1]]
    folder = metadata_folder(path)
    if folder is not None:
        read += [folder / CONFIG, folder / PREPROCESSOR]
    written = [target] if is_file else [target / name for name in (WEIGHTS, CONFIG, PREPROCESSOR)]
    for file in written:
        if any(file.exists() and other.exists() and file.samefile(other) for other in read):
            raise CheckpointError(f"The conversion would overwrite its input {file}. Pass a target in another folder.")
    if is_file and target.name == WEIGHTS and (target.parent / CONFIG).exists():
        raise CheckpointError(
            f"Cannot write {target}: the {CONFIG} in this folder describes other weights. Pass another target."
        )
    problem = obstacle(target) if is_file else folder_obstacle(target)
    if problem:
        raise CheckpointError(f"Cannot write {target}: {problem}. Pass another target.")
    if not is_file:
        check_overwrite(target)


def _common_dtype(file: WeightsFile) -> torch.dtype | None:
    """Return the smallest dtype that holds all floating-point values of a file exactly, or None if there are none."""
    common: torch.dtype | None = None
    for entry in file.entries.values():
        if entry.dtype in FLOATS:
            dtype = FLOATS[entry.dtype]
            common = torch.promote_types(common or dtype, dtype)
    return common


def _given(config: ViTConfig | None, like: str | None, num_classes: int | None) -> Metadata:
    """Return the metadata of the checkpoint `like` or of `config`, or empty metadata if both are None."""
    if like is not None:
        return metadata_like(like, num_classes)[0]
    if config is None:
        return Metadata()
    return metadata_from_config(config if num_classes is None else config.replace(num_classes=num_classes))


def _load_for_tensors(
    file: WeightsFile,
    path: Path,
    to: Target,
    given: Metadata,
) -> ViT:
    """Load a model of which only the tensors are used. Unknown fields that affect no shape get arbitrary values."""
    mapping = map_keys(file.shapes)
    fixed = FORMATS[to].fixed if to in FORMATS else {}
    made_up: dict[str, Any] = {name: value for name, value in WITHOUT_SHAPE.items() if name not in fixed}
    if "cls_token" not in mapping.tensors:
        made_up["pool"] = "mean"
    folder = metadata_folder(path)
    own = Metadata() if folder is None else read_metadata(folder, weights_id=file.header.get(ID))
    if to in ("timm", "vitlite"):  # the position table does not change
        given = replace(given, usual_image_size=_any_image_size(mapping))
    mapping, resolved = map_and_resolve(file, own, given, made_up)
    options = BuildOptions(resolved.config, False, torch.device("cpu"), _common_dtype(file) or torch.float32)
    return build(file, mapping, resolved.config, options, resolved.provenance, check_finite=True)[0]


def _any_image_size(mapping: KeyMapping) -> tuple[int, int]:
    """Return an image size (height, width) that fits the position table. The image has a single row of patches."""
    patch: int = patch_geometry(mapping.tensors)["patch_size"]
    rows = mapping.tensors["pos_embed"].shape[1] if "pos_embed" in mapping.tensors else 1
    has_row = "cls_token" in mapping.tensors and "reg_token" not in mapping.tensors and mapping.format.cls_rows[0]
    return patch, patch * max(rows - has_row, 1)


def _check_labels(model: ViT) -> None:
    """Check that the class names of the source can be used, if there are any.

    Raises:
        CheckpointError: The source has class names that cannot be used.
    """
    unlabelled = model.source.report.unlabelled if model.source else ""
    if unlabelled:
        raise CheckpointError(
            f"The class names of the source cannot be used: {unlabelled}. Correct them in config.json. To convert "
            "without class names, pass a .safetensors file as the target, or convert to vitlite (--to vitlite)."
        )


def _set_margin(model: ViT, margin: Margin) -> None:
    transform = getattr(model.preprocess, "transform", None)
    if transform is None:
        raise ConfigError(
            "margin= (--margin) cannot be used, because the source has no preprocessing. Leave out margin=."
        )
    model.preprocess = Preprocess(replace(transform, margin=margin), model)


def _write_folder(model: ViT, folder: Path, to: Target) -> None:
    if to == "vitlite":
        save(model, folder)
        return
    check_savable(model, "convert")
    transform = getattr(model.preprocess, "transform", None)
    name = format_for_timm(model.config)
    reason = timm_cannot_read(model.config, transform, name) if to == "timm" else ""
    if reason:
        raise CheckpointError(
            f"{reason} Convert to a .safetensors file, which contains only the tensors, or to vitlite (--to vitlite)."
        )
    tensors = _rename(model, to)
    contents: dict[str, dict[str, Any]] = {}
    if to == "timm":
        contents = {
            CONFIG: metadata_content(model.config, model.labels, transform, name, model.scores, model.thresholds)
        }
    if to == "transformers":
        contents = contents_for_transformers(model.config, model.labels, transform, model.scores)
    write_folder(folder, tensors, contents)


def _rename(model: ViT, to: Target) -> dict[str, Tensor]:
    """Return the tensors of a model under the names that the target library uses.

    Raises:
        CheckpointError: The library has no model that computes the same results.
    """
    tensors, config = model.state_dict(), model.config
    check_values(tensors)
    if to == "vitlite":
        return tensors
    if to == "timm":
        if not pools_as_timm(config):
            raise _computes_otherwise(to, f"pool={config.pool!r}")
        name = format_for_timm(config)
        prefix = "encoder." if name == "timm-qwen3" else ""
        return tensors if name == "timm" else rename_tensors(FORMATS[name], prefix, tensors)
    if "pos_embed" in tensors and config.class_token and not config.cls_position and not config.registers:
        tensors["pos_embed"] = F.pad(tensors["pos_embed"], (0, 0, 1, 0))  # these formats need a row for the class token
    if to == "transformers":
        kind = model_type(config)
        _check_arithmetic(config, computed_by(kind, config), to)
        return rename_tensors(
            FORMATS[format_for_transformers(config)], f"{kind}." if config.num_classes else "", tensors
        )
    _check_arithmetic(config, TORCHVISION | {"image_size": config.size[0]}, to)
    if not config.qkv_bias:  # torchvision's model always has these biases
        for block in range(config.depth):
            weight = tensors[f"blocks.{block}.attn.qkv.weight"]
            tensors[f"blocks.{block}.attn.qkv.bias"] = weight.new_zeros(len(weight))
    return rename_tensors(FORMATS["torchvision"], "", tensors)


def _check_arithmetic(config: ViTConfig, computed: Mapping[str, Any], to: Target) -> None:
    """Check that a library has a model that computes the same results.

    Args:
        config: The config of the model to convert.
        computed: The field values that the library's model cannot change.
        to: The library, for the error message.

    Raises:
        CheckpointError: The library has no such model.
    """
    differing = [
        f"{name}={getattr(config, name)!r}" for name, value in computed.items() if getattr(config, name) != value
    ]
    if differing:
        raise _computes_otherwise(to, ", ".join(differing))


def _computes_otherwise(to: Target, fields: str) -> CheckpointError:
    return CheckpointError(
        f"{to} has no model with {fields}, so the results would differ. Convert to vitlite instead (--to vitlite)."
    )
