"""Create a model from a name (`create`) or a path (`load`).

Each step is in a separate module: `zoo.registry` finds the record, `checkpoints.reader` finds the file,
`checkpoints.resolve` determines the config, and `checkpoints.build` builds the model and loads the weights. This module
adds the labels and the preprocessing.
"""

import hashlib
from dataclasses import replace
from os import PathLike
from typing import NamedTuple

import torch

from vitlite import storage
from vitlite.checkpoints.build import BuildOptions, Source, build, sample_of_weights
from vitlite.checkpoints.metadata import (
    ID,
    Metadata,
    metadata_from_config,
    metadata_from_preset,
    metadata_from_record,
    read_metadata,
)
from vitlite.checkpoints.reader import FLOATS, Location, locate, open_weights, path_of
from vitlite.checkpoints.resolve import map_and_resolve
from vitlite.config import Pool, ViTConfig
from vitlite.errors import ConfigError, UnknownNameError
from vitlite.images.transform import MissingPreprocess
from vitlite.nn.vit import ViT
from vitlite.presets import PRESETS
from vitlite.zoo import registry

ImageSize = int | tuple[int, int]
Place = str | PathLike[str]


class LoadOptions(NamedTuple):
    """The options that `create` and `load` share: changes to the config of a checkpoint, the device and the dtype."""

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
        """Return a copy of the config with these changes. Options that are None change nothing."""
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
    """Create a named model, either with trained weights in eval mode or with random weights in train mode.

    Args:
        name: A checkpoint from `list_models()`, a preset, or timm's full name. A preset selects its default checkpoint.
            If `weights` is a path, a preset determines only the shape of the network.
        weights: By default, the weights of the checkpoint, which are downloaded and verified on first use. With None,
            the weights are random. A path or a repository ("owner/name") is the same as `load(weights, like=name)`.
        num_classes: The number of classes. If the weights have a different number, the new head is initialised to zero
            and the model has no labels. 0 removes the head.
        image_size: The image size. If the weights have a different size, the position table is resized.
        patch_size: The patch size. If the weights have a different size, the patch kernel and the position table are
            resized. FlexiViT was trained for this; other weights become less accurate.
        pool: How the tokens are pooled, such as "cls" or "mean". If the weights were trained with a different pooling,
            `num_classes` is required, because their head cannot be used.
        channels: The number of image channels. If the weights have a different number, the patch kernel is adapted. For
            1 channel, its channels are summed. Otherwise, they are repeated in turn and rescaled.
        drop_path: The stochastic depth rate of the last block, rising linearly from 0 in the first block. It affects
            only training.
        checkpointing: If True, recompute blocks in the backward pass. Training is then slower but takes less memory.
        device: The device of the weights. None means torch's default device.
        dtype: The dtype of the weights. None means torch's default dtype (float32), not the dtype of the file.

    Raises:
        UnknownNameError: The name does not exist, or is a preset without a default checkpoint.
        DownloadError: The weights cannot be downloaded, or have the wrong hash.
        CheckpointError: The weights file is damaged, or contains a different model.
        ConfigError: An option is invalid or does not fit the weights.

    >>> create("vit_nano_4", weights=None, num_classes=3).config.num_classes
    3
    """
    options = LoadOptions(
        num_classes, image_size, patch_size, pool, channels, drop_path, checkpointing, as_device(device), _dtype(dtype)
    )
    if weights is None:
        config = registry.network(name)
        with options.device:
            return ViT(options.apply(config)).to(options.dtype)
    if weights == "default":
        from vitlite.checkpoints.hub import fetch_record

        record = registry.find(name)
        return _load_model(fetch_record(record), metadata_from_record(record), options, record.name)
    if not isinstance(weights, (str, PathLike)):
        raise ConfigError(f"weights must be a path, 'owner/name', 'default' or None, got {weights!r}.")
    given, checkpoint = metadata_like(name, num_classes)
    return _load_model(locate(weights), given, options, checkpoint)


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
    """Load a plain ViT from a file, a folder or the Hugging Face Hub. The model is in eval mode.

    A config.json beside the weights takes priority over `like`, which supplies missing fields. The config.json of a
    fine-tuned model may differ from `like` in pooling, epsilon and GELU, and may have its own labels and preprocessing.
    All other fields must agree with `like` and with the tensors. If a fine-tuned model has a different number of
    classes than `like`, pass this number as `num_classes` to keep the trained head.

    Args:
        source: A Hub repository ("owner/name" or "owner/name@revision"), a folder, a .safetensors or .npz file,
            or the index.json of shards. A config.json in the folder, or beside a model.safetensors, is read.
        like: The name of the checkpoint in the zoo that `source` contains or was fine-tuned from. A preset determines
            only the shape of the network.
        config: The complete config of the weights, instead of `like`.
        num_classes: The number of classes. All other options are described in `create`.

    Raises:
        DownloadError: The weights cannot be downloaded.
        CheckpointError: The weights file is damaged, or is not a plain ViT with this config.
        ConfigError: An option is invalid or does not fit the weights, or the config is incomplete.
    """
    options = LoadOptions(
        num_classes, image_size, patch_size, pool, channels, drop_path, checkpointing, as_device(device), _dtype(dtype)
    )
    if like is not None:
        if config is not None:
            raise ConfigError("like= and config= cannot be combined. Pass only one.")
        given, checkpoint = metadata_like(like, num_classes)
        return _load_model(locate(source), given, options, checkpoint)
    if str(source) in registry.NAMES and "/" not in str(source) and not path_of(source).exists():
        raise UnknownNameError(f"{str(source)!r} is a model name. Use vitlite.create({str(source)!r}).")
    if config is not None and not isinstance(config, ViTConfig):
        raise ConfigError(f"config must be a vitlite.ViTConfig, got {config!r}.")
    given = Metadata() if config is None else metadata_from_config(config)
    return _load_model(locate(source), given, options)


def metadata_like(like: str, num_classes: int | None) -> tuple[Metadata, str | None]:
    """Return the metadata of the preset or checkpoint `like`, and the name of the checkpoint or None for a preset.

    If the caller passes `num_classes`, the labels of the checkpoint are left out, because a fine-tuned model may have
    other classes.
    """
    if isinstance(like, str) and like in PRESETS:
        return metadata_from_preset(like), None
    record = registry.find(like)
    given = metadata_from_record(record)
    if num_classes is not None:
        fields = {name: value for name, value in given.fields.items() if name != "num_classes"}
        why = f"num_classes was passed, so the classes may differ from those of {record.name}"
        given = replace(given, fields=fields, labels=None, labels_error=why)
    return given, record.name


def _load_model(location: Location, given: Metadata, options: LoadOptions, name: str | None = None) -> ViT:
    """Read a weights file, build the model, and attach labels and preprocessing.

    Args:
        location: The location of the weights.
        given: The metadata from `like` or `config`. Metadata beside the weights takes priority.
        options: The options of `create` or `load`.
        name: The name of the checkpoint in the zoo, or None if the caller passed none.
    """
    with open_weights(location.path) as file:
        if len(file.files) == 1:
            # After a download, the cache knows the hash. Other files are hashed here when they are first loaded.
            sha256 = storage.check_sha256(file.files[0], location.sha256)
        else:
            hashes = "".join(storage.sha256_of(path) for path in file.files)
            sha256 = hashlib.sha256(hashes.encode()).hexdigest()
        folder = location.metadata_folder
        own = Metadata() if folder is None else read_metadata(folder, weights_id=file.header.get(ID))
        mapping, (config, provenance) = map_and_resolve(file, own, given)
        target = options.apply(config)
        if target != config:
            _check_changes(config, target, options)
        head_changes = target.pool != config.pool or target.num_classes != config.num_classes
        new_head = head_changes and target.num_classes > 0
        target = target.replace(cosine_head=None) if head_changes else target  # a new head is a linear layer
        build_options = BuildOptions(target, new_head, options.device, options.dtype)
        check_finite = not all(storage.is_known_finite(path) for path in file.files)
        model, report = build(file, mapping, config, build_options, provenance, check_finite=check_finite)
        if check_finite and not report.dropped and not report.resampled:  # all values in the file were checked
            for path in file.files:
                storage.mark_finite(path)
    if target.num_classes and not new_head:
        model.labels, error = _labels(own, given, location, target.num_classes)
        model.scores, model.thresholds = own.scores, own.thresholds  # scores: "softmax" or "sigmoid"
        report = replace(report, unlabelled=error)
    model.source = Source(file.path, sha256, location.verified, report, name, location.repo, location.commit)
    transform = own.transform or given.transform
    if own.transform_error:
        model.preprocess = MissingPreprocess(f"{file.path.parent}: {own.transform_error}".rstrip("."))
    elif transform is not None:
        if options.image_size is not None:
            transform = transform.scaled(target.size)
        model.preprocess = transform.in_whole_patches(target.patch_size)
    model.loaded_sample = sample_of_weights(model)
    return model.eval()


def _check_changes(config: ViTConfig, target: ViTConfig, options: LoadOptions) -> None:
    """Check that the trained weights can be adapted to the changed config.

    Raises:
        ConfigError: A change would need weights that were not trained.
    """
    if target.pool != config.pool and config.num_classes and options.num_classes is None:
        raise ConfigError(
            f"The head was trained with pool={config.pool!r} and does not fit pool={target.pool!r}. Leave out pool=, "
            "or pass num_classes= (--num-classes) to create a new head."
        )
    if target.pool != config.pool and target.pool in ("map", "map_all"):
        raise ConfigError(
            f"pool={target.pool!r} needs a trained pooling layer, which these weights do not have. Leave out pool=."
        )
    if target.pooled_dim != config.pooled_dim and (config.final_norm == "pooled" or config.pre_logits):
        raise ConfigError(
            f"The weights were trained with pool={config.pool!r}, and pool={target.pool!r} would change the width of a "
            "trained layer. Leave out pool=."
        )
    normed = config.input_norm == "patches"
    if target.patch_size != config.patch_size and (normed or config.stem is not None):
        layer = "a norm of the pixels of each patch" if normed else "a stem"
        raise ConfigError(f"The patch size cannot be changed in a model with {layer}. Leave out patch_size=.")
    if target.channels != config.channels and normed:
        raise ConfigError(
            f"The number of channels cannot be changed from {config.channels} in a model with a norm of the pixels of "
            "each patch. Leave out channels=."
        )


def _labels(own: Metadata, given: Metadata, location: Location, num_classes: int) -> tuple[tuple[str, ...] | None, str]:
    """Return the labels and "", or None and the reason why there are no labels.

    Labels in `own`, the metadata beside the weights, take priority over labels in `given`.
    """
    labels = own.labels
    error = own.labels_error
    if labels is None and not error and not own.is_vitlite:
        labels, error = given.labels, given.labels_error
        # timm's own repositories have no labels in config.json. The registry knows the labels of these repositories.
        name = registry.ALIASES.get(own.architecture)
        if labels is None and name is not None and registry.RECORDS[name].repo == location.repo:
            labels = registry.RECORDS[name].labels
    if labels is not None and len(labels) != num_classes:
        return None, f"there are {len(labels)} labels but {num_classes} classes"
    return labels, (error if labels is None else "")


def as_device(device: torch.device | str | int | None) -> torch.device:
    """Return a device that torch can use. None means torch's default device.

    Raises:
        ConfigError: torch cannot use the device on this machine.
    """
    if device is None:
        return torch.empty(0).device  # torch.get_default_device of torch 2.6 ignores `with torch.device(...)`
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:  # depends on the build of torch
        reason = str(error).partition("\n")[0].rstrip(". ")
        raise ConfigError(
            f"Cannot use the device {device!r}: {reason}. To run on the CPU, pass device='cpu' (--device cpu)."
        ) from error
    return found


def _dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return a dtype that weights can have. None means torch's default dtype.

    Raises:
        ConfigError: The dtype is not a supported floating-point type.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in FLOATS.values():
        raise ConfigError(
            f"dtype must be one of {', '.join(map(str, FLOATS.values()))}, got {dtype!r}. For int8, use "
            "vitlite.optimize(model, dtype=torch.int8, calibrate=images) (--fast --dtype int8 --calibrate FOLDER)."
        )
    return dtype
