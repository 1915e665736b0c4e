"""A weights file -> another library's layout: its tensors alone, or a folder that the library loads.

It also takes pickles (.pth, .bin), which nothing else in vitlite does.
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
from vitlite.checkpoints.key_mapping import FORMATS, KeyMapping, map_keys, patch_geometry, rename_tensors
from vitlite.checkpoints.metadata import (
    CONFIG,
    PICTURES,
    computed_by,
    is_pooled_alike,
    layout_for_timm,
    layout_of,
    metadata_content,
    metadata_contents_for_transformers,
    model_type,
    unread_by_timm,
)
from vitlite.checkpoints.pickles import described_in, pickle_of, without_pickles
from vitlite.checkpoints.reader import (
    FLOATS,
    PICKLES,
    WEIGHTS,
    WeightsFile,
    files_of,
    metadata_folder,
    open_weights,
    path_of,
)
from vitlite.checkpoints.resolve import CALLER, Claim, understand
from vitlite.checkpoints.save import (
    check_overwrite,
    check_savable,
    explained,
    refuse_to_part,
    save,
    write_folder,
    write_tensors,
)
from vitlite.config import ViTConfig, refuse_unknown_fields
from vitlite.errors import CheckpointError, ConfigError, shown
from vitlite.factory import claims_about, create, load
from vitlite.images.transform import Margin, Preprocess
from vitlite.nn.vit import ViT
from vitlite.storage import folder_obstacle, obstacle
from vitlite.zoo import registry

Target = Literal["timm", "transformers", "torchvision", "vitlite"]

TORCHVISION = dict(FORMATS["torchvision"].fixed) | {  # what its model computes, of squares
    "channels": 3, "class_token": True, "registers": 0, "positions": "learned", "head_dim": None, "mlp": "gelu",
    "final_norm": True, "stem": None,
}  # fmt: skip
GIVES_NO_SHAPE = {"heads": 1, "norm_eps": 1e-6, "gelu": "exact", "pool": "cls"}  # any value makes the same tensors


def convert(
    source: str | PathLike[str],
    target: str | PathLike[str],
    to: Target,
    *,
    config: ViTConfig | Mapping[str, Any] | None = None,
    like: str | None = None,
    margin: Margin | None = None,
) -> None:
    """Rewrites a weights file in another layout; the numbers and their type stay as they are.

    Args:
        source: A file or folder as `vitlite.load` takes it, or a pickle (.pth, .bin), opened with weights_only=True.
        target: A .safetensors file, for the tensors alone; or a folder, for a whole model with its config.json.
        to: Whose layout. vitlite's is timm's.
        config: As in `vitlite.load`, or fields of one by name. A file needs of it only what gives tensors their shape.
        like: In its place the checkpoint of the zoo that `source` has the tensors of, or a fine-tune of it. A folder
            gets its preprocessing and its labels too; of a fine-tune with classes of its own, for which
            `config={"num_classes": 3}` says how many, no labels.
        margin: How the folder's pictures shall be cut instead, so that the library has words for it: half of an odd
            margin "down" for transformers, to the "nearest" even number for timm. Some are cut a pixel further on.

    Raises:
        CheckpointError: `source` is no whole plain ViT, or would be written over; or the library has no model that
            computes the same.
        ConfigError: A folder is wanted, and `source` does not tell all of the config; or a pickle is wanted.
        UnknownNameError: The zoo has no such checkpoint.
    """
    record = None if like is None else registry.find(like)
    if record is not None and config is not None and _classes_said(config) is None:
        raise ConfigError(
            f"{record.name} says all of the config.",
            python="Leave out like= or config=.",
            command="Leave out --like, or what else says something of the model.",
        )
    if to not in get_args(Target):
        raise ConfigError(f"Cannot convert to {to!r}. Valid: {', '.join(get_args(Target))}.")
    source, target = path_of(source, "convert"), path_of(target, "convert")
    if target.suffix in PICKLES:
        raise ConfigError(f"Cannot write {target}: no pickles are made. Name a folder, or a .safetensors file.")
    refuse_to_write_over(source, target)
    if margin is not None and target.suffix == ".safetensors":
        raise ConfigError(
            "A .safetensors file has the tensors alone, and a margin is about how pictures are cut.",
            python="Leave out margin=, or name a folder.",
            command="Leave out --margin, or name a folder.",
        )
    if target.suffix == ".safetensors":
        _convert_tensors(source, target, to, config, record)
        return
    with without_pickles(source) as path:
        model = _load_whole(path, config, record)
    if margin is not None:
        _cut_otherwise(model, margin)
    if record is None and to != "vitlite":
        _refuse_lost_names(model)
    _write_folder(model, target, to)


def _refuse_lost_names(model: ViT) -> None:
    """Makes sure that classes which are named in the source are not LABEL_0, LABEL_1, ... in what is written.

    Raises:
        CheckpointError: vitlite cannot use their names: the scores are no shares of the classes, say.
    """
    why = model.source.report.unlabelled if model.source else ""
    if why:
        raise CheckpointError(
            f"The names of the classes would be lost, and with them what their scores mean: {why}.",
            python="Convert to a .safetensors file, which has the tensors alone; or to vitlite.",
        )


def refuse_to_write_over(source: Path, target: Path) -> None:
    """Makes sure that nothing which is read is written, by whatever name: a link, a shard, or the folder it is in.

    Raises:
        CheckpointError: It would be.
    """
    read, written = _files_read(source), _files_written(target)
    for file in written:
        if any(_is_same(file, other) for other in read):
            kind = "file" if written == [target] else "folder"
            raise CheckpointError(f"{target} is to be read and to be written. Name another {kind}.")


def _files_read(source: Path) -> list[Path]:
    """The source, the files with its tensors, and the JSON that speaks for them, where there is some."""
    pickle = pickle_of(source)
    if pickle is not None:
        return [source, pickle, *described_in(pickle)]
    index, shards = files_of(source)
    folder = metadata_folder(source)
    described = [] if folder is None else [folder / CONFIG, folder / PICTURES]
    return [source, index, *shards, *described]


def _files_written(target: Path) -> list[Path]:
    if target.suffix == ".safetensors":
        return [target]
    return [target, target / WEIGHTS, target / CONFIG, target / PICTURES]


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there
        return False


def _convert_tensors(
    source: Path, target: Path, to: Target, config: ViTConfig | Mapping[str, Any] | None, record: registry.Record | None
) -> None:
    """Rewrites the tensors alone, by the config of a checkpoint that they are like, where one is named."""
    refuse_to_part(target)
    refuse_unwritable(target)
    if record is not None:
        classes = _classes_said(config)
        config = record.config if classes is None else record.config.replace(num_classes=classes)
    with without_pickles(source) as path:
        model = _load_for_tensors(path, config, to)
    tensors = _readable_tensors(model, to, target)
    with explained(target):
        write_tensors(target, tensors)


def refuse_unwritable(target: Path) -> None:
    """Says before weights are read that nothing can be written there.

    Raises:
        CheckpointError: It cannot.
    """
    in_the_way = obstacle(target) if target.suffix == ".safetensors" else folder_obstacle(target)
    if in_the_way:
        raise CheckpointError(
            f"Cannot write {shown(str(target))}: {in_the_way}. Name another place, which can be written."
        )


def _cut_otherwise(model: ViT, margin: Margin) -> None:
    """Changes how the pictures of a model are cut, where the caller said so.

    Raises:
        ConfigError: Nobody knows how they are prepared.
    """
    transform = getattr(model.preprocess, "transform", None)
    if transform is None:
        raise ConfigError("margin is of pictures, and nothing says how this model's are prepared.", field="margin")
    model.preprocess = Preprocess(replace(transform, margin=margin), model)


def _classes_said(config: ViTConfig | Mapping[str, Any] | None) -> int | None:
    """The number of classes, where a config says that and nothing else."""
    if not isinstance(config, Mapping) or set(config) != {"num_classes"}:
        return None
    classes: int = config["num_classes"]
    return classes


def _load_whole(path: Path, config: ViTConfig | Mapping[str, Any] | None, record: registry.Record | None) -> ViT:
    """The model of a file in the file's own type, with all that belongs to it."""
    with open_weights(path) as file:
        dtype = _common_dtype(file)
        if record is not None:
            return _like(record, file, path, _classes_said(config), dtype)
        if isinstance(config, Mapping):
            config = understand(file, _said(file, path, config))[1].config
    return load(path, config=config, dtype=dtype)


def _like(
    record: registry.Record, file: WeightsFile, path: Path, classes: int | None, dtype: torch.dtype | None
) -> ViT:
    """The model of a file that has the tensors of a checkpoint, or of a fine-tune of it with so many classes.

    Raises:
        CheckpointError: It has another number of classes; a new head, or none, would be no conversion.
    """
    head = map_keys(file.shapes).tensors.get("head.weight")
    own = 0 if head is None else head.shape[0]
    if classes not in (None, own):
        there = f"a head of {own} classes" if own else "no head"
        raise CheckpointError(f"{shown(str(file.path))} has {there}, not {classes} classes.")
    return create(record.name, weights=path, num_classes=classes, dtype=dtype)


def _said(file: WeightsFile, path: Path, config: ViTConfig | Mapping[str, Any] | None) -> list[Claim]:
    """What stands beside a file, and what the caller says of it."""
    if not isinstance(config, Mapping):
        return claims_about(file, metadata_folder(path), config)[1]
    refuse_unknown_fields(config)
    return [*claims_about(file, metadata_folder(path), None)[1], Claim(CALLER, config)]


def _write_folder(model: ViT, folder: Path, to: Target) -> None:
    if to == "vitlite":
        save(model, folder)
        return
    if to == "timm":
        _refuse_what_timm_cannot_tell(model)
    check_overwrite(folder)
    tensors = _readable_tensors(model, to, folder / WEIGHTS)
    transform = getattr(model.preprocess, "transform", None)
    contents: dict[str, dict[str, Any]] = {}
    if to == "timm":
        contents = {CONFIG: metadata_content(model.config, model.labels, transform, layout_for_timm(model.config))}
    if to == "transformers":
        contents = metadata_contents_for_transformers(model.config, model.labels, transform)
    write_folder(folder, tensors, contents)


def _refuse_what_timm_cannot_tell(model: ViT) -> None:
    """Makes sure that timm, too, opens the folder that `save` writes.

    Raises:
        CheckpointError: Its config.json has no words for this model, or for how its pictures are prepared.
    """
    unread = unread_by_timm(model.config, getattr(model.preprocess, "transform", None), layout_for_timm(model.config))
    if unread:
        raise CheckpointError(
            unread, python="Convert to a .safetensors file, which has the tensors alone; or to vitlite."
        )


def _common_dtype(file: WeightsFile) -> torch.dtype | None:
    """The narrowest type that holds all numbers of a file; None where none are floats."""
    common: torch.dtype | None = None
    for entry in file.entries.values():
        if entry.dtype in FLOATS:
            dtype = FLOATS[entry.dtype]
            common = torch.promote_types(common or dtype, dtype)
    return common


def _load_for_tensors(path: Path, config: ViTConfig | Mapping[str, Any] | None, to: Target) -> ViT:
    """The model of a file, for its tensors only: what gives them no shape may remain unknown, and is made up."""
    with open_weights(path) as file:
        mapping, resolved = understand(file, [*_said(file, path, config), _made_up(file, to)])
        dtype = _common_dtype(file) or torch.float32
        wish = BuildOptions(resolved.config, new_head=False, device=torch.device("cpu"), dtype=dtype)
        model, _ = build(file, mapping, resolved.config, wish, resolved.provenance, scan=True)
    return model


def _made_up(file: WeightsFile, to: Target) -> Claim:
    """Values for what gives no tensor its shape, but for what the target's code decides: that has to be known."""
    fixed = FORMATS[to].fixed if to in FORMATS else {}
    made_up = {name: value for name, value in GIVES_NO_SHAPE.items() if name not in fixed}
    mapping = map_keys(file.shapes)
    if "cls_token" not in mapping.tensors:
        made_up["pool"] = "mean"
    if to in ("timm", "vitlite"):  # where a table is written as it is
        made_up["image_size"] = _any_size(mapping)
    return Claim("convert assumes", made_up, firm=False)


def _any_size(mapping: KeyMapping) -> tuple[int, int]:
    """The size of an image, one patch high, that the position table fits, if there is one."""
    found = mapping.tensors
    patch = patch_geometry(found)["patch_size"]
    rows = found["pos_embed"].shape[1] if "pos_embed" in found else 1
    has_row = "cls_token" in found and "reg_token" not in found and mapping.format.cls_rows[0]
    return patch, patch * max(rows - has_row, 1)


def _readable_tensors(model: ViT, to: Target, path: Path) -> dict[str, Tensor]:
    """The tensors under a library's names, once it is known that they would be read as this model."""
    tensors, config = _their_tensors(model, to), model.config
    if to == "torchvision":
        config = config.replace(qkv_bias=True)  # of zeros
    check_savable(model, path, tensors, config)
    return tensors


def _their_tensors(model: ViT, to: Target) -> dict[str, Tensor]:
    """The tensors under the names of a library that has a model which computes the same."""
    tensors, config = model.state_dict(), model.config
    if to == "vitlite":
        return tensors
    if to == "timm":
        if not is_pooled_alike(config):
            raise _computes_otherwise(to, [f"pool={config.pool!r}"])
        own = layout_for_timm(config)
        return tensors if own == "timm" else rename_tensors(FORMATS[own], "", tensors)
    if to == "transformers":
        kind = model_type(config)
        _refuse_other_arithmetic(config, computed_by(kind, config), to)
        prefix = f"{kind}." if config.num_classes else ""
        return rename_tensors(FORMATS[layout_of(config)], prefix, _with_class_row(tensors, config))
    _refuse_other_arithmetic(config, TORCHVISION | {"image_size": config.size[0]}, to)
    return rename_tensors(FORMATS["torchvision"], "", _with_biases(_with_class_row(tensors, config), config))


def _with_class_row(tensors: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """The tensors, with a row of zeros in the position table for a class token that had none."""
    if config.registers or config.cls_position or not config.class_token or "pos_embed" not in tensors:
        return tensors
    return tensors | {"pos_embed": F.pad(tensors["pos_embed"], (0, 0, 1, 0))}


def _with_biases(tensors: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """The tensors, with biases of zeros for queries, keys and values that had none."""
    if config.qkv_bias:
        return tensors
    zeros = {}
    for block in range(config.depth):
        weight = tensors[f"blocks.{block}.attn.qkv.weight"]
        zeros[f"blocks.{block}.attn.qkv.bias"] = weight.new_zeros(len(weight))
    return tensors | zeros


def _refuse_other_arithmetic(config: ViTConfig, computed: Mapping[str, Any], to: Target) -> None:
    """Makes sure that a library has a model which computes what this one does.

    Raises:
        CheckpointError: It has none; by which fields of the config.
    """
    differing = []
    for name, value in computed.items():
        if getattr(config, name) != value:
            differing.append(f"{name}={getattr(config, name)!r}")
    if differing:
        raise _computes_otherwise(to, differing)


def _computes_otherwise(to: Target, differing: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"{to} has no model that computes what this one does: {', '.join(differing)}.")
