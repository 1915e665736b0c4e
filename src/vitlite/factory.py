"""`create` and `load`: the record, the verified file, its config, the filled model, and what belongs to it.

Five steps, each of a module of its own: `weights.zoo` finds the record, `weights.locate` gets the file,
`weights.resolve` works out its config, `weights.build` fills the model, and here labels and preprocessing are attached.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import NamedTuple, ParamSpec

import torch

from vitlite.checkpoints.build import BuildOptions, LoadReport, Source, build
from vitlite.checkpoints.fingerprint import sample_of
from vitlite.checkpoints.key_mapping import KeyMapping
from vitlite.checkpoints.locate import Location, locate, locate_record
from vitlite.checkpoints.metadata import (
    PAIR,
    Metadata,
    contradictions,
    read_metadata,
    transform_from_record,
    transform_of,
)
from vitlite.checkpoints.reader import FLOATS, WeightsFile, open_weights, path_of
from vitlite.checkpoints.resolve import ARCHITECTURE, CALLER, METADATA, OPTION, Claim, Resolved, understand
from vitlite.config import Pool, ViTConfig
from vitlite.errors import ConfigError, UnknownNameError, shown
from vitlite.images.transform import MissingPreprocess, Preprocess, TransformConfig
from vitlite.nn.vit import ViT
from vitlite.presets import PRESETS
from vitlite.zoo import registry, verify

P = ParamSpec("P")
Size = int | tuple[int, int]
Place = str | PathLike[str]

# What a preset says of weights that are not its own, and why it may. What a file leaves open beside this, it asks for:
# the name of a shape does not tell how something of that shape is computed.
PRESET_MAY_SAY = {
    **dict.fromkeys(("patch_size", "dim", "depth", "mlp_dim"), "the tensors say it too, and contradicting is an error"),
    "heads": "part of the shape that the name stands for, and no tensor tells it",
    "image_size": "only where the position table has a row for each patch of such an image",
}


class Options(NamedTuple):
    """What the caller wants other than the checkpoint has."""

    num_classes: int | None
    image_size: Size | None
    patch_size: int | None
    pool: Pool | None
    channels: int | None
    drop_path: float | None
    checkpointing: bool | None
    device: torch.device | str | int | None
    dtype: torch.dtype | None

    @property
    def placed_on(self) -> torch.device:
        """Where the weights go.

        Raises:
            ConfigError: It is no device, or none of this machine's.
        """
        if self.device is None:
            return torch.empty(0).device  # torch.get_default_device of 2.6 does not see a `with torch.device(...)`
        try:
            device = torch.device(self.device)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, ImportError, TypeError) as error:  # depending on how torch was built
            reason = str(error).partition("\n")[0].rstrip(". ")
            raise ConfigError(
                f"The device {shown(repr(self.device))} cannot be used here: {shown(reason)}.",
                python='To run on the CPU: device="cpu".',
                command="To run on the CPU: --device cpu.",
            ) from error
        return device

    @property
    def made_of(self) -> torch.dtype:
        """The type of the weights.

        Raises:
            ConfigError: It is none for weights.
        """
        dtype = torch.get_default_dtype() if self.dtype is None else self.dtype
        if dtype not in FLOATS.values():
            raise ConfigError(
                f"Weights are of {', '.join(map(str, FLOATS.values()))}, not of {shown(repr(dtype))}.",
                python="For int8: vitlite.optimize(model, dtype=torch.int8, calibrate=pictures).",
                command="For int8: --fast --dtype int8 --calibrate FOLDER.",
            )
        return dtype

    def apply(self, config: ViTConfig) -> ViTConfig:
        """The config with these changes."""
        wanted = self._asdict()
        del wanted["device"], wanted["dtype"]  # which are no part of a config
        return config.replace(**{name: value for name, value in wanted.items() if value is not None})


def create(
    name: str,
    *,
    weights: Place | None = "default",
    num_classes: int | None = None,
    image_size: Size | None = None,
    patch_size: int | None = None,
    pool: Pool | None = None,
    channels: int | None = None,
    drop_path: float | None = None,
    checkpointing: bool | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> ViT:
    """A named model with trained weights, in eval mode; or with `weights=None` random ones, in train mode.

    Args:
        name: A checkpoint of `list_models()`, a preset (its default checkpoint), or timm's full name.
        weights: "default": those of the name, downloaded once and verified. A path or a repository ("owner/name"):
            those, in this model; their preprocessing and labels are the checkpoint's, if `name` is one (a folder that
            vitlite saved with others is refused), else what stands beside the file. None: random.
        num_classes: Another number than the weights': a new head of zeros, and no labels. 0: no head. The weights' own
            number keeps their head, also that of a fine-tune with other classes than the checkpoint, whose labels
            then are those beside the file, or none.
        image_size: Stretches the position table, as `config.resample` says.
        patch_size: Other patches: the kernel is resized so that it gives resized patches what it gave the old ones, and
            the position table stretched. FlexiViT's weights were trained for it; of others, expect less.
        pool: Other than the checkpoint's, only together with `num_classes`: the trained head would see nonsense.
        channels: 1: the kernel's channels are summed. Others: repeated in turn, and scaled by old / new channels.
        drop_path: For training: stochastic depth of the last block, rising linearly from 0 at the first.
        checkpointing: For training: blocks are computed again in the backward pass, which is slower, and takes less
            memory. Neither this nor `drop_path` changes what the model gives in eval mode.
        device: Where the weights go at once; None: torch's default device.
        dtype: Type of the weights; None: torch's default, float32, whatever the file has.

    Raises:
        UnknownNameError: No such name, or a preset without a default checkpoint.
        DownloadError: The weights cannot be fetched, or are not what they should be.
        CheckpointError: The file is damaged, or is not this model.
        ConfigError: An option that does not fit.

    >>> create("vit_nano_4", weights=None, num_classes=3).config.num_classes
    3
    """
    options = Options(num_classes, image_size, patch_size, pool, channels, drop_path, checkpointing, device, dtype)
    if weights is None:
        return _random(name, options)
    if not isinstance(weights, (str, PathLike)):
        raise ConfigError(f"weights={weights!r}: give a path, 'owner/name', None (random), or leave it out (trained).")
    if weights == "default":
        record = registry.find(name)
        return _open(locate_record(record), [_claim_of_record(record)], options, record)
    if name in PRESETS:
        return _open(locate(weights), _claims_of_preset(name), options)
    record = registry.find(name)
    return _open(locate(weights), [_claim_of_record(record, num_classes)], options, record)


def load(
    source: Place,
    *,
    config: ViTConfig | None = None,
    num_classes: int | None = None,
    image_size: Size | None = None,
    patch_size: int | None = None,
    pool: Pool | None = None,
    channels: int | None = None,
    drop_path: float | None = None,
    checkpointing: bool | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> ViT:
    """Any plain ViT, from the Hub or a disk, in eval mode. The other options are those of `create`.

    Args:
        source: A repository of the Hub ("owner/name", "owner/name@revision"), a folder, a .safetensors or .npz file,
            or the index.json of shards. A config.json in the folder, or beside a model.safetensors, is read too.
        config: Says what neither the tensors nor a config.json tell, by the fields that are set in it:
            `ViTConfig(heads=12, norm_eps=1e-6, gelu="exact", pool="cls")`.

    Raises:
        DownloadError, CheckpointError, ConfigError: as in `create`; what remains unknown is asked for by name.
    """
    path = path_of(source, "load")
    if str(source) in registry.NAMES and not path.exists() and "/" not in str(source):
        raise UnknownNameError(
            f"{source!r} is a name of the zoo, not a place:", python=f"vitlite.create({str(source)!r})."
        )
    if config is not None and not isinstance(config, ViTConfig):
        raise ConfigError(f"config= takes a vitlite.ViTConfig, got {config!r}.")
    options = Options(num_classes, image_size, patch_size, pool, channels, drop_path, checkpointing, device, dtype)
    return _open(locate(source), [], options, config=config)


def _random(name: str, options: Options) -> ViT:
    config = registry.network(name)
    with torch.device(options.placed_on):
        return ViT(options.apply(config)).to(options.made_of)


def _claim_of_record(record: registry.Record, own_classes: int | None = None) -> Claim:
    """What a record says of its own weights; or of a fine-tune of them, which may have classes of its own."""
    return Claim(
        f"the record of {record.name} says",
        record.config.to_dict(),
        knows_network=True,
        checkpoint=record.name,
        own_classes=own_classes,
    )


def _claims_of_preset(name: str) -> list[Claim]:
    """What `PRESET_MAY_SAY`; the image size is no claim about a file, but may be a guess that fits it."""
    fields = {field: getattr(PRESETS[name], field) for field in PRESET_MAY_SAY}
    size = {"image_size": fields.pop("image_size")}
    return [
        Claim(f"the preset {name} says", fields, shape_alone=True),
        Claim(f"the preset {name} says, and the position table fits it", size, firm=False),
    ]


def claims_about(
    file: WeightsFile, folder: Path | None, config: ViTConfig | None, others: Sequence[Claim] = ()
) -> tuple[Metadata, list[Claim]]:
    """What stands beside weights, and all that is said of them: there, by others, and by the caller's config.

    Raises:
        CheckpointError: What stands beside them is damaged, of other weights, or names another network.
    """
    metadata = Metadata() if folder is None else read_metadata(folder, file.metadata.get(PAIR))
    known = metadata.library is not None
    said = [
        Claim(METADATA, metadata.claims, knows_network=known),
        Claim(ARCHITECTURE, metadata.built),
        Claim(ARCHITECTURE, metadata.usual, firm=False),
        *others,
    ]
    if config is not None:
        said.append(Claim(CALLER, {field: getattr(config, field) for field in config.given}))
    return metadata, said


def _open(
    location: Location,
    claims: Sequence[Claim],
    options: Options,
    record: registry.Record | None = None,
    config: ViTConfig | None = None,
) -> ViT:
    """Weights on this disk, and what others say of them -> the model, with all that belongs to it."""
    with open_weights(location.path) as file:
        sha256 = _verify(file, location)
        metadata, said = claims_about(file, location.metadata, config, claims)
        if options.pool:
            said.append(Claim(OPTION, {"pool": options.pool}, firm=False))

        mapping, resolved = understand(file, said)
        wish = _wish(resolved.config, options)
        same_classes = record is not None and _has_its_classes(record, resolved.config, metadata, options, sha256)
        if record is not None:
            _refuse_another_fine_tune(file, metadata, record, labels_count=same_classes and not wish.new_head)

        model, report = _fill(file, mapping, resolved, wish)

    if wish.config.num_classes and not wish.new_head:
        model.labels, unlabelled = _labels(
            record, metadata, location, wish.config.num_classes, same_classes=same_classes
        )
        report = replace(report, unlabelled=unlabelled)
    name = record.name if record else None
    model.source = Source(file.path, sha256, location.verified, report, name, location.repo, location.commit)
    image_size = wish.config.size if record or options.image_size else None  # None: the file's own
    _attach_preprocessing(model, file, record, metadata, image_size)
    model.__dict__["_sample"] = sample_of(model)  # by which `hash_of_weights` knows whether they are still the file's
    return model.eval()


def _has_its_classes(
    record: registry.Record, config: ViTConfig, metadata: Metadata, options: Options, sha256: str
) -> bool:
    """Whether weights have the classes of a checkpoint, by name and order.

    Who says how many there are, has others; and who saved a model without labels, took them away.
    """
    if config.num_classes != record.config.num_classes:
        return False
    took_them_away = metadata.library == "vitlite" and not metadata.labels
    return sha256 == record.sha256 or (options.num_classes is None and not took_them_away)


def _fill(file: WeightsFile, mapping: KeyMapping, resolved: Resolved, wish: BuildOptions) -> tuple[ViT, LoadReport]:
    """The model that is wished for, and what became of each tensor; a file is scanned for damage once."""
    scan = not all(verify.was_scanned(path) for path in file.files)
    model, report = build(file, mapping, resolved.config, wish, resolved.provenance, scan=scan)
    if scan and not report.dropped:
        for path in file.files:
            verify.mark_scanned(path)
    return model, report


def _verify(file: WeightsFile, location: Location) -> str:
    """The sha256 of the bytes, compared where there is something to compare with; of shards: of all their hashes."""
    if len(file.files) == 1:
        return verify.check_sha256(file.files[0], location.sha256)
    hashes = [verify.sha256_of(path) for path in file.files]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _wish(config: ViTConfig, options: Options) -> BuildOptions:
    """What to build; refused where trained weights would lose their meaning.

    Raises:
        ConfigError: An option does not go with these weights.
    """
    target = options.apply(config)
    moved = target.pool != config.pool
    if moved and config.num_classes and options.num_classes is None:
        raise ConfigError(
            f"These weights pool {config.pool!r}, and their head means nothing after {target.pool!r}.",
            python="Leave pool out, or say which head you want with it: num_classes=0 for none, another number for a "
            "new one.",
        )
    if moved and target.pool == "map":
        raise ConfigError("pool='map' has trained weights of its own, and these have none of them. Leave pool out.")
    if target.pooled_dim != config.pooled_dim and (config.fc_norm or config.pre_logits):
        raise ConfigError(f"pool={target.pool!r} changes the width of a trained layer before the head. Leave it out.")
    _refuse_other_patches(config, target)
    new_head = target.num_classes > 0 and (moved or target.num_classes != config.num_classes)
    return BuildOptions(target, new_head, options.placed_on, options.made_of)


def _refuse_other_patches(config: ViTConfig, target: ViTConfig) -> None:
    """Makes sure that a kernel which is to be resized, or to see other channels, is all that sees the pixels.

    Raises:
        ConfigError: A norm or a stem does.
    """
    if target.patch_size != config.patch_size and (config.patch_norm or config.stem is not None):
        what = "a norm of the pixels of a patch" if config.patch_norm else "a stem"
        raise ConfigError(f"These weights have {what}, so their patches cannot change. Leave patch_size out.")
    if target.channels != config.channels and config.patch_norm:
        raise ConfigError(f"These weights norm patches of {config.channels} channels, so channels= cannot change.")


def _refuse_another_fine_tune(
    file: WeightsFile, metadata: Metadata, record: registry.Record, *, labels_count: bool
) -> None:
    """Makes sure that what stands beside the weights does not contradict the record's labels and preprocessing.

    Raises:
        ConfigError: It does; where they differ, up to three places.
    """
    labels = record.labels if labels_count else None
    transform = transform_from_record(record, record.config.size)
    different = contradictions(metadata, labels, transform, record.config.patch_size)
    if different:
        raise ConfigError(
            f"{shown(str(file.path))} is not {record.name} as the record has it: {'; '.join(different[:3])}. For the "
            "file's own labels and preprocessing:",
            python="vitlite.load(PATH).",
            command="--model PATH.",
        )


def _labels(
    record: registry.Record | None, metadata: Metadata, location: Location, classes: int, *, same_classes: bool
) -> tuple[Sequence[str] | None, str]:
    """The record's, else those beside the file, else those of the checkpoint that it names; or none, and why."""
    labels = record.labels if record and same_classes else None
    labels = labels or metadata.labels
    named = registry.ALIASES.get(metadata.architecture or "")
    if not labels and named is not None and registry.RECORDS[named].repo == location.repo:
        labels = registry.RECORDS[named].labels  # of this very repository: a fine-tune keeps the name of its origin
    if not labels and record and not same_classes:
        return None, f"{record.name} has {record.config.num_classes} classes, and this fine-tune {classes} of its own"
    if not labels:
        return None, metadata.unlabelled
    if len(labels) != classes:
        return None, f"{len(labels)} classes are named, and there are {classes}"
    return labels, ""


def _attach_preprocessing(
    model: ViT, file: WeightsFile, record: registry.Record | None, metadata: Metadata, size: tuple[int, int] | None
) -> None:
    """As the record says, else as the file's own config does; without a size, at its own.

    What is not understood is no error until a picture is to be prepared.
    """
    try:
        if record is not None and size is not None:
            transform: TransformConfig | None = transform_from_record(record, size)
        else:
            transform = transform_of(metadata, size, model.config.patch_size)
    except ConfigError as error:
        model.preprocess = MissingPreprocess(f"{file.path.parent}: {str(error).rstrip('.')}")
    else:
        if transform is not None:
            model.preprocess = Preprocess(transform, model)
