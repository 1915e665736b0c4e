"""`create` and `load`: from a name or a path to a model.

The steps, each in a module of its own: `zoo.registry` finds the record, `checkpoints.reader` the file,
`checkpoints.resolve` its config, and `checkpoints.build` fills the model. Here labels and preprocessing are attached.
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
    """The options that `create` and `load` share: changes to the config of the checkpoint, device and type."""

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
        """Return the config with the changes."""
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
    """Create a named model with trained weights, in eval mode; with `weights=None` with random ones, in train mode.

    Args:
        name: A checkpoint of `list_models()`, a preset, or timm's full name. A preset is its default checkpoint; with
            a path in `weights` it is a shape alone, see `load`.
        weights: "default": the checkpoint's own, downloaded once and verified. A path or a repository ("owner/name"):
            the same as `load(weights, like=name)`. None: random.
        num_classes: If it differs from the weights', the model gets a new head of zeros and no labels; 0 means no head.
        image_size: Resizes the position table, as `config.resample` says.
        patch_size: Resizes the patch kernel, so that it gives for resized patches what it gave for the old ones, and
            the position table. FlexiViT's weights were trained for it; expect less of others.
        pool: Another pool than the checkpoint's, only together with `num_classes`.
        channels: 1: the kernel's channels are summed. Others: repeated in turn, and scaled by old / new channels.
        drop_path: For training: stochastic depth of the last block, rising linearly from 0 at the first.
        checkpointing: For training: blocks are computed again in the backward pass, which is slower and takes less
            memory. Neither this nor `drop_path` changes the outputs in eval mode.
        device: Where the weights go; None: torch's default device.
        dtype: Type of the weights; None: torch's default, float32, whatever type the file has.

    Raises:
        UnknownNameError: There is no such name, or it is a preset without a default checkpoint.
        DownloadError: The weights cannot be fetched, or have the wrong hash.
        CheckpointError: The file is damaged, or is not this model.
        ConfigError: An option does not fit.

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

    A config.json beside the weights comes first. `like` fills in what it leaves open: a fine-tune may differ from the
    checkpoint in its pool, epsilon and GELU, and has its own labels and preprocessing if they are stated there. If a
    fine-tune has other classes, pass `num_classes`: with the number of the weights, their head is kept. Whatever else
    the tensors, the config.json and `like` or `config` both state must agree.

    Args:
        source: A repository of the Hub ("owner/name", "owner/name@revision"), a folder, a .safetensors or .npz file,
            or the index.json of shards. A config.json in the folder, or beside a model.safetensors, is read.
        like: The checkpoint of the zoo that this is or was made from. A preset gives only the shape.
        config: The complete config of the weights, in place of `like`.

    Raises:
        DownloadError, CheckpointError: As in `create`.
        ConfigError: An option does not fit, or something about the weights remains unknown.
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
        location: Of the file.
        given: Metadata from the caller. The metadata beside the file come first.
        options: Of the caller.
        name: Of the checkpoint in the zoo.
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
    """Check that trained weights keep their meaning.

    Raises:
        ConfigError: A change does not go with these weights.
    """
    if target.pool != config.pool and config.num_classes and options.num_classes is None:
        raise ConfigError(
            f"The head was trained with pool={config.pool!r} and does not fit {target.pool!r}. Leave pool= out, or "
            "pass num_classes= (--num-classes) for a new head, or 0 for none."
        )
    if target.pool != config.pool and target.pool == "map":
        raise ConfigError("pool='map' needs trained weights of its own, which the file does not have. Leave it out.")
    if target.pooled_dim != config.pooled_dim and (config.fc_norm or config.pre_logits):
        raise ConfigError(f"pool={target.pool!r} changes the width of a trained layer before the head. Leave it out.")
    if target.patch_size != config.patch_size and (config.patch_norm or config.stem is not None):
        what = "a norm of the pixels of a patch" if config.patch_norm else "a stem"
        raise ConfigError(f"These weights have {what}, so their patches cannot change. Leave patch_size= out.")
    if target.channels != config.channels and config.patch_norm:
        raise ConfigError(f"These weights normalize patches of {config.channels} channels. Leave channels= out.")


def _labels(own: Metadata, given: Metadata, location: Location, num_classes: int) -> tuple[tuple[str, ...] | None, str]:
    """Return the labels, or None and the reason. Labels beside the file have priority over those of a checkpoint."""
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
    """Return the device of the model, which must exist on this machine."""
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
    """Return the type of the weights, which must be a floating-point type."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in FLOATS.values():
        raise ConfigError(
            f"dtype must be one of {', '.join(map(str, FLOATS.values()))}, got {dtype!r}. For int8, use "
            "vitlite.optimize(model, dtype=torch.int8, calibrate=images) (--fast --dtype int8 --calibrate FOLDER)."
        )
    return dtype
