"""`create` and `load`, where all the rest meets: the record, the file, the loaded model, and its preprocessing."""

import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial, wraps
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, ParamSpec

import torch

from vitlite.config import PRESETS, Pool, ViTConfig
from vitlite.errors import CheckpointError, ConfigError, DownloadError, ImageError, UnknownNameError, closest
from vitlite.images import Preprocess, Recipe
from vitlite.model import ViT
from vitlite.weights import hub, zoo
from vitlite.weights.checkpoint import (
    INDEX,
    PICKLES,
    USER,
    WEIGHTS,
    Claim,
    Source,
    files_of,
    open_checkpoint,
    read,
)
from vitlite.weights.sidecar import Description

P = ParamSpec("P")
Size = int | tuple[int, int]
Place = str | PathLike[str]

HABITS = {  # what other libraries call it
    "pretrained": "Trained weights are what create gives; for random ones: weights=None.",
    "checkpoint_path": "Write weights=.",
    "img_size": "Write image_size=.",
    "in_chans": "Write channels=.",
    "global_pool": "Write pool=.",
    "num_labels": "Write num_classes=.",
}
ARCHITECTURE = ("heads", "norm_eps", "gelu", "pool", "cls_position")  # what timm's name for one tells


class Options(NamedTuple):
    """What the caller wants other than the checkpoint has."""

    num_classes: int | None
    image_size: Size | None
    pool: Pool | None
    channels: int | None
    device: torch.device | str | int | None
    dtype: torch.dtype | None

    def apply(self, config: ViTConfig) -> ViTConfig:
        """The config with these changes."""
        wanted = {name: getattr(self, name) for name in ("num_classes", "image_size", "pool", "channels")}
        return config.replace(**{name: value for name, value in wanted.items() if value is not None})


class Weights(NamedTuple):
    """A file whose bytes were hashed, and where it came from."""

    path: Path
    described: bool  # whether the config.json beside it speaks for it
    repo: str | None = None
    commit: str | None = None
    sha256: str | None = None
    verified: hub.Verified | None = None


def _answering(function: Callable[P, ViT]) -> Callable[P, ViT]:
    """Answers an option that does not exist with the one that does."""
    names = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> ViT:
        for option in options:
            if option not in names:
                hint = f" {HABITS[option]}" if option in HABITS else closest(option, names)
                raise ConfigError(
                    f"{function.__name__} has no option {option}=.{hint} Options: {', '.join(names[1:])}."
                )
        return function(*args, **options)

    return checked


@_answering
def create(
    name: str,
    *,
    weights: Place | None = "default",
    num_classes: int | None = None,
    image_size: Size | None = None,
    pool: Pool | None = None,
    channels: int | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> ViT:
    """A named model with trained weights, in eval mode; or with `weights=None` random ones, in train mode.

    Args:
        name: A checkpoint of `list_models()`, a preset (its default checkpoint), or timm's full name.
        weights: "default": those of the name, downloaded once and verified. A path or a repository ("owner/name"):
            those, in this model; their preprocessing and labels are the checkpoint's, if `name` is one (a folder that
            vitlite saved with others is refused), else what stands beside the file. None: random.
        num_classes: Another number than the checkpoint's: a new head of zeros, and no labels. 0: no head. The
            checkpoint's own number keeps its head.
        image_size: Stretches the position table, as `config.resample` says.
        pool: Other than the checkpoint's, only together with `num_classes`: the trained head would see nonsense.
        channels: 1: the kernel's channels are summed. Others: repeated in turn, and scaled by old / new channels.
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
    options = Options(num_classes, image_size, pool, channels, device, dtype)
    if weights is None:
        return _random(PRESETS[name] if name in PRESETS else zoo.find(name).config, options)
    if not isinstance(weights, (str, PathLike)):
        raise ConfigError(f"weights={weights!r}: give a path, 'owner/name', None (random), or leave it out (trained).")
    if weights == "default" or name not in PRESETS:
        record = zoo.find(name)
        file = _fetched(record) if weights == "default" else _place(weights)
        return _open(file, [Claim(f"the record of {record.name} says", record.config.to_dict())], options, record)
    config = PRESETS[name]
    shape = {field: getattr(config, field) for field in config.given - {"image_size", "num_classes"}}
    rest = {field: value for field, value in config.to_dict().items() if field not in {*config.given, "cls_position"}}
    return _open(_place(weights), [Claim(f"the preset {name} says", shape), Claim("", rest, firm=False)], options)


@_answering
def load(
    source: Place,
    *,
    config: ViTConfig | None = None,
    num_classes: int | None = None,
    image_size: Size | None = None,
    pool: Pool | None = None,
    channels: int | None = None,
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
    if str(source) in zoo.NAMES and not Path(source).exists() and "/" not in str(source):
        raise UnknownNameError(f"{source!r} is a name of the zoo, not a place: vitlite.create({str(source)!r}).")
    if config is not None and not isinstance(config, ViTConfig):
        raise ConfigError(f"config= takes a vitlite.ViTConfig, got {config!r}.")
    claims = [Claim(USER, {name: getattr(config, name) for name in config.given})] if config else []
    return _open(_place(source), claims, Options(num_classes, image_size, pool, channels, device, dtype))


def _random(config: ViTConfig, options: Options) -> ViT:
    with torch.device(_device(options)):
        return ViT(options.apply(config)).to(options.dtype)


def _device(options: Options) -> torch.device:
    return torch.get_default_device() if options.device is None else torch.device(options.device)


def _fetched(record: zoo.Record) -> Weights:
    """The file of a record: in the package, in the cache, or from the Hub."""
    if record.file:
        return Weights(zoo.DATA / record.file, False, sha256=record.sha256, verified="record")
    got = hub.fetch(record.repo, record.filename, revision=record.commit, sha256=record.sha256, pin=record.name)
    return Weights(got.path, False, record.repo, got.commit, got.sha256, got.verified)


def _place(source: Place) -> Weights:
    """A path, or else a repository of the Hub with what describes its weights."""
    path = Path(source).expanduser()
    if path.exists():
        return Weights(path, True)
    match = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?:@(.+))?", str(source))
    if not match or isinstance(source, PathLike) or path.suffix in (".safetensors", ".npz", ".json", *PICKLES):
        raise CheckpointError(
            f"There is no file or folder {path}, and it is no repository of the Hub (owner/name, owner/name@revision)."
            f"{closest(str(source), zoo.NAMES)}"
        )
    repo, revision = match.groups()
    got = hub.fetch_optional(repo, WEIGHTS, revision=revision) or hub.fetch_optional(repo, INDEX, revision=revision)
    if got is None:
        raise DownloadError(
            f"{repo} has no {WEIGHTS}, whole or in shards. A pickle (.bin, .pth) of it is loaded only by way of "
            "vitlite convert; fetch it yourself, if you trust it."
        )
    for name in ("config.json", "preprocessor_config.json"):
        hub.fetch_optional(repo, name, revision=got.commit or revision)
    if got.path.name == INDEX:
        for shard in files_of(got.path)[1]:
            hub.fetch(repo, shard.name, revision=got.commit or revision)
    return Weights(got.path, True, repo, got.commit, got.sha256, got.verified)


def _open(weights: Weights, claims: Sequence[Claim], options: Options, record: zoo.Record | None = None) -> ViT:
    """The loaded model, with its labels, its preprocessing and where it came from."""
    with open_checkpoint(weights.path, weights.described) as file:
        hashes = [hub.check_file(path, weights.sha256 if len(file.files) == 1 else None) for path in file.files]
        about, like = file.about, _like(file.about)
        said = [Claim("its config.json says", about.claims)]
        if like:
            fields = {name: getattr(like.config, name) for name in ARCHITECTURE if name not in about.untold}
            said.append(Claim(f"its architecture, that of {like.name}, says", fields, firm=False))
        said += claims
        if options.pool:
            said.append(Claim("", {"pool": options.pool}, firm=False))
        translation, config = file.understand(said)
        target, new_head = _target(config, options)
        if record and about.ours and not new_head and (differ := _differ(record, about)):
            raise ConfigError(
                f"{file.path} is not {record.name} as the record has it: {differ}. For the file's own labels and "
                "preprocessing: vitlite.load(PATH)."
            )
        scan = not all(map(hub.is_scanned, file.files))
        model, report = read(
            file,
            translation,
            config,
            target,
            new_head=new_head,
            device=_device(options),
            dtype=options.dtype or torch.get_default_dtype(),
            scan=scan,
        )
    if scan and not report.dropped:
        for path in file.files:
            hub.mark_scanned(path)
    sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    model.source = Source(
        file.path, sha256, weights.verified, report, record.name if record else None, weights.repo, weights.commit
    )
    if not new_head:
        # a fine-tune keeps the name of what it began with, not its classes
        own = zoo.labels(like) if like and like.repo == weights.repo else None
        labels = (zoo.labels(record) if record else None) or about.labels or own
        model.labels = labels if labels and len(labels) == target.num_classes else None
    try:
        if recipe := _recipe(record, about, target.size if record or options.image_size else None):
            model.preprocess = Preprocess(recipe, model)
    except (ConfigError, TypeError, ArithmeticError, AttributeError, KeyError) as error:  # or a value of another kind
        model.preprocess = partial(_unprepared, f"{file.path.parent}: its preprocessing is not understood: {error}")
    return model.eval()


def _differ(record: zoo.Record, about: Description) -> str:
    """Which labels and what of the preprocessing a file says otherwise than the record, up to three."""
    names = about.contradictions(zoo.labels(record), Recipe.from_record(record, record.config.size).to_dict())
    return "; ".join(f"{name} {own}, not {theirs}" for name, (own, theirs) in list(names.items())[:3])


def _unprepared(reason: str, images: Any) -> NoReturn:
    """Stands for preprocessing that was not understood."""
    raise ImageError(reason)


def _target(config: ViTConfig, options: Options) -> tuple[ViTConfig, bool]:
    """The config wanted, and whether its head is a new one; refused where trained weights would lose their meaning."""
    target = options.apply(config)
    moved = target.pool != config.pool
    if moved and config.num_classes and options.num_classes is None:
        raise ConfigError(
            f"These weights pool {config.pool!r}, and their head means nothing after {target.pool!r}. Leave pool out, "
            "or say which head you want with it: num_classes=0 for none, another number for a new one."
        )
    if moved and "cls_and_mean" in (target.pool, config.pool) and (config.fc_norm or config.pre_logits):
        raise ConfigError(f"pool={target.pool!r} changes the width of a trained layer before the head. Leave it out.")
    if target.channels != config.channels and config.patch_norm:
        raise ConfigError(f"These weights norm patches of {config.channels} channels, so channels= cannot change.")
    new = target.num_classes > 0 and (moved or target.num_classes != config.num_classes)
    return target, new


def _like(about: Description) -> zoo.Record | None:
    """The zoo's record of what timm's config.json names: this very checkpoint, or one of the same architecture."""
    named = about.architecture or ""
    exact = zoo.ALIASES.get(named)
    same = [name for alias, name in zoo.ALIASES.items() if alias.split(".")[0] == named.split(".")[0]]
    return zoo.RECORDS[exact or same[0]] if exact or same else None


def _recipe(record: zoo.Record | None, about: Description, size: tuple[int, int] | None) -> Recipe | None:
    """How pictures are prepared: as the record says, else as the file's own config does; None: at its own size."""
    if record and size:
        return Recipe.from_record(record, size)
    if about.recipe is None:
        return None
    made = {"vitlite": Recipe.from_dict, "timm": Recipe.from_timm, "transformers": Recipe.from_transformers}
    return made[about.recipe[0]](about.recipe[1], size)
