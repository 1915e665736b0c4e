"""`create` and `load` turn a name or a path into a model.

Each step is in a separate module: `zoo.registry` finds the record, `checkpoints.reader` finds the file,
`checkpoints.resolve` determines the config, and `checkpoints.build` fills the model. This module adds the labels and
the preprocessing.
"""

import hashlib
from dataclasses import replace
from os import PathLike
from typing import NamedTuple

import torch

from vitlite import storage
from vitlite.checkpoints.build import BuildOptions, Source, build, sample_of
from vitlite.checkpoints.metadata import (
    ID,
    Metadata,
    metadata_from_config,
    metadata_from_preset,
    metadata_from_record,
    read_metadata,
)
from vitlite.checkpoints.reader import FLOATS, Location, locate, open_weights, path_of
from vitlite.checkpoints.resolve import understand
from vitlite.config import Pool, ViTConfig
from vitlite.errors import ConfigError, UnknownNameError
from vitlite.images.transform import MissingPreprocess
from vitlite.nn.vit import ViT
from vitlite.presets import PRESETS
from vitlite.zoo import registry

ImageSize = int | tuple[int, int]
Place = str | PathLike[str]


class LoadOptions(NamedTuple):
    """The options that `create` and `load` share: changes to the checkpoint's config, and device and dtype."""

    num_classes: int | None
    image_size: ImageSize | None
    patch_size: int | None
    pool: Pool | None
    channels: int | None
    drop_path: float | None
    checkpointing: bool | None
    device: torch.device
    dtype: torch.dtype

    def apply(self, config: ViTConfig) -> ViTConfig:
        """Return the config with the changes applied."""
        changes = {name: value for name, value in self._asdict().items() if value is not None}
        del changes["device"], changes["dtype"]
        return replace(config, **changes)


def create(
    name: str,
    *,
    weights: Place | None = "default",
    num_classes: int | None = None,
    image_size: ImageSize | None = None,
    patch_size: int | None = None,
    pool: Pool | None = None,
    channels: int | None = None,
    drop_path: float | None = None,
    checkpointing: bool | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> ViT:
    """Create a named model with trained weights in eval mode, or with random weights in train mode.

    Args:
        name: A checkpoint of `list_models()`, a preset, or timm's full name. A preset means its default checkpoint
            or, if `weights` is a path, only a shape (see `like` in `load`).
        weights: "default" for the weights of the checkpoint, downloaded once and verified, or None for random weights.
            A path or a repository ("owner/name") is the same as `load(weights, like=name)`.
        num_classes: If different from that of the weights, the model gets a head of zeros and no labels. 0: no head.
        image_size: If different from that of the weights, the position table is resized as `config.resample` states.
        patch_size: If different from that of the weights, the patch kernel and the position table are resized. FlexiViT
            was trained for this; other weights become less accurate.
        pool: The pooling, if different from that of the weights. Requires `num_classes`.
        channels: The number of image channels. For 1, the channels of the patch kernel are summed. For other numbers,
            they are repeated in turn and scaled by old / new channels.
        drop_path: For training: the stochastic depth rate of the last block, rising linearly from 0 in the first block.
        checkpointing: For training: recompute blocks in the backward pass, which is slower but takes less memory.
            Neither this nor `drop_path` changes the outputs in eval mode.
        device: The device of the weights. None means torch's default device.
        dtype: The dtype of the weights. None means torch's default (float32) whatever the dtype of the file.

    Raises:
        UnknownNameError: The name does not exist, or is a preset without a default checkpoint.
        DownloadError: The weights cannot be downloaded, or have the wrong hash.
        CheckpointError: The file is damaged, or contains a different model.
        ConfigError: An option is invalid or does not fit the weights.

    >>> create("vit_nano_4", weights=None, num_classes=3).config.num_classes
    3
    """
    options = LoadOptions(
        num_classes, image_size, patch_size, pool, channels, drop_path, checkpointing, _device(device), _dtype(dtype)
    )
    if weights is None:
        config = registry.network(name)
        with options.device:
            return ViT(options.apply(config)).to(options.dtype)
    if weights == "default":
        from vitlite.checkpoints.hub import fetch_record

        record = registry.find(name)
        return _open(fetch_record(record), metadata_from_record(record), options, record.name)
    if not isinstance(weights, (str, PathLike)):
        raise ConfigError(f"weights must be a path, 'owner/name', 'default' or None, got {weights!r}.")
    return _load_like(weights, name, options)


def load(
    source: Place,
    *,
    like: str | None = None,
    config: ViTConfig | None = None,
    num_classes: int | None = None,
    image_size: ImageSize | None = None,
    patch_size: int | None = None,
    pool: Pool | None = None,
    channels: int | None = None,
    drop_path: float | None = None,
    checkpointing: bool | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> ViT:
    """Load any plain ViT from a disk or the Hub, in eval mode. The other options are those of `create`.

    A config.json beside the weights takes priority, and `like` supplies what is missing there. The config.json of a
    fine-tune may differ from `like` in pool, epsilon and GELU, and its labels and preprocessing are used if it has any.
    All other fields that both state must agree, also with the tensors. For a fine-tune with other classes than `like`,
    pass the number of its classes as `num_classes`; the head is then kept.

    Args:
        source: A repository of the Hub ("owner/name", "owner/name@revision"), a folder, a .safetensors or .npz file,
            or the index.json of shards. A config.json in the folder, or beside a model.safetensors, is read.
        like: The checkpoint of the zoo that the weights are or were made from. A preset determines only the shape.
        config: The complete config of the weights, instead of `like`.

    Raises:
        DownloadError, CheckpointError: As in `create`.
        ConfigError: An option is invalid or does not fit the weights, or a field of their config is unknown.
    """
    options = LoadOptions(
        num_classes, image_size, patch_size, pool, channels, drop_path, checkpointing, _device(device), _dtype(dtype)
    )
    if like is not None:
        if config is not None:
            raise ConfigError("Pass like= or config=, not both.")
        return _load_like(source, like, options)
    if str(source) in registry.NAMES and "/" not in str(source) and not path_of(source).exists():
        raise UnknownNameError(f"{str(source)!r} is a model name. Use vitlite.create({str(source)!r}).")
    if config is not None and not isinstance(config, ViTConfig):
        raise ConfigError(f"config must be a vitlite.ViTConfig, got {config!r}.")
    given = Metadata() if config is None else metadata_from_config(config)
    return _open(locate(source), given, options)


def _load_like(source: Place, like: str, options: LoadOptions) -> ViT:
    if isinstance(like, str) and like in PRESETS:
        return _open(locate(source), metadata_from_preset(like), options)
    record = registry.find(like)
    given = metadata_from_record(record)
    if options.num_classes is not None:  # then a fine-tune has classes of its own
        fields = {name: value for name, value in given.fields.items() if name != "num_classes"}
        why = f"num_classes= was given, so its classes are not taken for those of {record.name}"
        given = replace(given, fields=fields, labels=None, labels_error=why)
    return _open(locate(source), given, options, record.name)


def _open(location: Location, given: Metadata, options: LoadOptions, name: str | None = None) -> ViT:
    """Read a file, build its model, and attach labels and preprocessing.

    Args:
        location: The location of the file.
        given: The metadata from the caller. Metadata beside the file takes priority.
        options: The options from the caller.
        name: The name of the checkpoint in the zoo.
    """
    with open_weights(location.path) as file:
        if len(file.files) == 1:
            sha256 = storage.check_sha256(file.files[0], location.sha256)
        else:
            hashes = "".join(storage.sha256_of(path) for path in file.files)
            sha256 = hashlib.sha256(hashes.encode()).hexdigest()
        own = Metadata() if location.metadata is None else read_metadata(location.metadata, file.metadata.get(ID))
        mapping, (config, provenance) = understand(file, own, given)
        target = options.apply(config)
        if target != config:
            _check_changes(config, target, options)
        other_head = target.pool != config.pool or target.num_classes != config.num_classes
        new_head = target.num_classes > 0 and other_head
        build_options = BuildOptions(target, new_head, options.device, options.dtype)
        scan = not all(storage.was_scanned(path) for path in file.files)
        model, report = build(file, mapping, config, build_options, provenance, scan=scan)
        if scan and not report.dropped and not report.resampled:  # then every value of the file was scanned
            for path in file.files:
                storage.mark_scanned(path)
    if target.num_classes and not new_head:
        model.labels, error = _labels(own, given, location, target.num_classes)
        report = replace(report, unlabelled=error)
    model.source = Source(file.path, sha256, location.verified, report, name, location.repo, location.commit)
    transform = own.transform or given.transform
    if own.transform_error:
        model.preprocess = MissingPreprocess(f"{file.path.parent}: {own.transform_error}".rstrip("."))
    elif transform is not None:
        if options.image_size is not None:
            transform = transform.scaled(target.size)
        model.preprocess = transform.in_whole_patches(target.patch_size)
    model.__dict__["_sample"] = sample_of(model)  # by which `hash_of_weights` knows whether they are still the file's
    return model.eval()


def _check_changes(config: ViTConfig, target: ViTConfig, options: LoadOptions) -> None:
    """Check that the changes to the config do not invalidate the trained weights.

    Raises:
        ConfigError: A change cannot be made to these weights.
    """
    if target.pool != config.pool and config.num_classes and options.num_classes is None:
        raise ConfigError(
            f"The head was trained with pool={config.pool!r} and does not fit pool={target.pool!r}. Leave pool= out, "
            "or pass num_classes= (--num-classes) for a new head, or 0 for none."
        )
    if target.pool != config.pool and target.pool == "map":
        raise ConfigError("pool='map' needs its own trained weights, which the file does not have. Leave pool= out.")
    if target.pooled_dim != config.pooled_dim and (config.fc_norm or config.pre_logits):
        raise ConfigError(f"pool={target.pool!r} would change the width of a trained layer. Leave pool= out.")
    if target.patch_size != config.patch_size and (config.patch_norm or config.stem is not None):
        what = "a norm of the pixels of a patch" if config.patch_norm else "a stem"
        raise ConfigError(f"These weights have {what}, so patch_size cannot be changed. Leave patch_size= out.")
    if target.channels != config.channels and config.patch_norm:
        raise ConfigError(f"These weights normalize patches of {config.channels} channels. Leave channels= out.")


def _labels(own: Metadata, given: Metadata, location: Location, num_classes: int) -> tuple[tuple[str, ...] | None, str]:
    """Return the labels, or None and the reason. Labels in `own`, the metadata beside the file, take priority."""
    labels = own.labels
    error = own.labels_error
    if labels is None and not error and not own.is_vitlite:
        labels, error = given.labels, given.labels_error
        # A folder that names timm's architecture has the labels of that checkpoint, if it is its own repository.
        alias = registry.ALIASES.get(own.architecture)
        if labels is None and alias is not None and registry.RECORDS[alias].repo == location.repo:
            labels = registry.RECORDS[alias].labels
    if labels is not None and len(labels) != num_classes:
        return None, f"there are {len(labels)} labels for {num_classes} classes"
    return labels, (error if labels is None else "")


def _device(device: torch.device | str | int | None) -> torch.device:
    """Return the device of the model after checking that it exists on this machine."""
    if device is None:
        return torch.empty(0).device  # torch.get_default_device of 2.6 does not see a `with torch.device(...)`
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:  # depending on how torch was built
        reason = str(error).partition("\n")[0].rstrip(". ")
        raise ConfigError(
            f"The device {device!r} cannot be used here: {reason}. To run on the CPU, pass device='cpu' (--device cpu)."
        ) from error
    return found


def _dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the weights after checking that it is a floating-point type."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in FLOATS.values():
        raise ConfigError(
            f"dtype must be one of {', '.join(map(str, FLOATS.values()))}, got {dtype!r}. For int8, use "
            "vitlite.optimize(model, dtype=torch.int8, calibrate=images) (--fast --dtype int8 --calibrate FOLDER)."
        )
    return dtype
