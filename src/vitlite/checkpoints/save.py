"""Out again: a model -> a folder, or a repository of the Hub.

What is saved has timm's tensor names, and a config.json that vitlite reads back in full, and timm as far as it goes.
Written without numpy, and each file whole or not at all.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from logging import getLogger
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from vitlite.checkpoints.build import Source, check_tensors, is_finite
from vitlite.checkpoints.fingerprint import bytes_of
from vitlite.checkpoints.forensics import COMPUTING, differences, replaced_method
from vitlite.checkpoints.metadata import (
    CONFIG,
    PAIR,
    PICTURES,
    PROCESSOR,
    WRITER,
    begin_metadata_files,
    end_metadata_files,
    is_as_written,
    is_paired,
    metadata_content,
    unread_by_timm,
    weights_of_others,
)
from vitlite.checkpoints.reader import (
    FLOATS,
    INDEX,
    WEIGHTS,
    Entry,
    WeightsFile,
    explain_damage,
    metadata_folder,
    metadata_of,
    path_of,
)
from vitlite.checkpoints.resolve import Claim, understand
from vitlite.config import ViTConfig
from vitlite.errors import CheckpointError, ConfigError, DownloadError, shown
from vitlite.images.transform import transform_to_save
from vitlite.nn.vit import ViT, model_on_meta
from vitlite.schema import anything, by_name, read_json
from vitlite.storage import atomic_write, lock, remove_leftovers
from vitlite.zoo.download import endpoint, is_offline

_log = getLogger("vitlite")

STORED_AS = {  # how safetensors calls what torch has
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
CARD = "README.md"


def save(model: ViT, folder: str | PathLike[str]) -> None:
    """Writes a folder: model.safetensors, and config.json with labels and preprocessing.

    `vitlite.load(folder)` gives the model back, in torch's default dtype unless told otherwise; and where timm can
    build such a model, so does `timm.create_model("local-dir:" + folder, pretrained=True)`; where it cannot, the log
    and the config.json say why. Hooks are no part of a model: what they change, they change in this program alone.

    Raises:
        CheckpointError: Loading would refuse it, or give something else; or the folder has a model that vitlite did not
            write. Nothing was written.
    """
    folder, transform = path_of(folder, "save"), transform_to_save(model)
    check_overwrite(folder)
    check_savable(model, folder / WEIGHTS)
    config = metadata_content(model.config, model.labels, transform)
    write_folder(folder, model.state_dict(), {CONFIG: config})
    _say_once(unread_by_timm(model.config, transform))


@cache  # a run saves its best model again and again
def _say_once(unread: str) -> None:
    """Says on the log that a folder is for vitlite alone, if it is."""
    if unread:
        _log.warning(
            "The folder is for vitlite alone, not for timm, nor for transformers, which asks timm: %s For the other "
            "library's own layout: vitlite convert.",
            unread,
        )


def write_folder(folder: Path, tensors: Mapping[str, Tensor], contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes weights and the JSON files that describe them. A kill at any moment leaves the old model or the new.

    Raises:
        CheckpointError: Another process is writing there, or nothing can be written; what was there is.
    """
    lock_file = folder / f"{WEIGHTS}.lock"
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with lock(lock_file, timeout=0):
                remove_leftovers(folder / WEIGHTS)
                _write_pair(folder, tensors, contents)
        except TimeoutError:
            raise CheckpointError(
                f"Another process is writing {shown(str(folder))}. Wait for it. If there is none, delete "
                f"{shown(str(lock_file))}."
            ) from None


@contextmanager
def explained(place: Path) -> Iterator[None]:
    """Says what to do where nothing can be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {shown(str(place))}: {error.strerror}. What was there is still there.",
            python="Make room, and start again.",
        ) from None


def _write_pair(folder: Path, tensors: Mapping[str, Tensor], contents: Mapping[str, Mapping[str, Any]]) -> None:
    _settle(folder)  # what a killed process left: weights may stand there whose JSON is only begun
    try:
        pair = begin_metadata_files(folder, contents)
        write_tensors(folder / WEIGHTS, tensors, {PAIR: pair})
    finally:
        _settle(folder)


def _settle(folder: Path) -> None:
    """Lets the JSON of the weights that stand there take its place, and removes what was begun for others."""
    weights = folder / WEIGHTS
    said = _said_in(weights)
    if said is not None or not os.path.lexists(weights):  # else nobody knows what was begun for them
        end_metadata_files(folder, (said or {}).get(PAIR))


def _pair_in(weights: Path) -> str | None:
    """The mark of weights that vitlite wrote together with JSON."""
    return (_said_in(weights) or {}).get(PAIR)


def _said_in(weights: Path) -> dict[str, str] | None:
    """What weights say of themselves; None of such as are not there, or cannot be read."""
    try:
        with explain_damage(weights):
            return metadata_of(weights) if weights.is_file() else None
    except CheckpointError:
        return None


def check_overwrite(folder: Path) -> None:
    """Makes sure that a folder has no model but one that vitlite wrote: such a one may be replaced.

    Raises:
        CheckpointError: It has another, which stays; or is no folder, or something in it cannot be replaced.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{shown(str(folder))} is no folder. Name one.")
    there = [name for name in (WEIGHTS, INDEX, CONFIG, PICTURES, PROCESSOR) if os.path.lexists(folder / name)]
    for name in there:
        if not (folder / name).is_file():
            raise CheckpointError(f"{shown(str(folder / name))} is no file, and stands where one is to be written.")
    added = [name for name in (PICTURES, PROCESSOR) if name in there and not is_paired(folder / name)]  # to ours
    foreign = added if _is_ours(folder) else there
    if foreign:
        raise CheckpointError(
            f"{shown(str(folder))} has {', '.join(foreign)}, which vitlite did not write. What is there stays. Name a "
            "folder that is new."
        )


def refuse_to_part(weights: Path) -> None:
    """Makes sure that a file which is to be written alone does not take the place of one that belongs to a config.json.

    Raises:
        CheckpointError: It would.
    """
    described = metadata_folder(weights) is not None and os.path.lexists(weights.parent / CONFIG)
    if described and _pair_in(weights) is not None:
        raise CheckpointError(
            f"{shown(str(weights))} belongs to the {CONFIG} beside it, which would be wrong of other tensors. Name "
            "another file, or a folder."
        )


def _is_ours(folder: Path) -> bool:
    """By its weights, and by its config.json where that is there already: other programs keep our words in theirs."""
    said = _said_in(folder / WEIGHTS)
    if (said is not None and PAIR not in said) or _has_weights_of_others(folder):
        return False
    if not os.path.lexists(folder / CONFIG):
        return _pair_in(folder / WEIGHTS) is not None
    try:
        config = read_json(folder / CONFIG, by_name(anything))
    except CheckpointError:
        return False
    return "vitlite" in config or WRITER in config


def _has_weights_of_others(folder: Path) -> bool:
    """Shards, which vitlite never writes; or what a config.json may be of that another program has changed."""
    if os.path.lexists(folder / INDEX):
        return True
    return bool(weights_of_others(folder)) and not is_as_written(folder)


def check_savable(
    model: ViT, path: Path, tensors: Mapping[str, Tensor] | None = None, config: ViTConfig | None = None
) -> None:
    """Makes sure that loading gives this very model back. Whoever writes a model asks this before the first byte.

    Args:
        model: What is to be written.
        path: Where its weights will stand.
        tensors: They, as they will stand there; None: under the model's own names.
        config: What these tensors are of; None: the model's own.

    Raises:
        CheckpointError: Its class, a part, a setting, a label or a number is another than its config says.
    """
    tensors = model.state_dict() if tensors is None else tensors
    _refuse_other_tensors(tensors)
    _refuse_other_methods(model)
    _refuse_other_parts(model)
    _refuse_other_shapes(model)
    if model.labels is not None and len(model.labels) != model.config.num_classes:
        raise CheckpointError(
            f"This model has {len(model.labels)} labels and {model.config.num_classes} classes.",
            python="Set model.labels to one name a class, or to None.",
            command="",
        )
    metadata_content(model.config, model.labels, None)
    _refuse_unreadable(path, tensors, config or model.config)


def _refuse_other_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Of a sharded or quantised tensor, what it seems to hold is not in memory."""
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, nn.Parameter):
            raise CheckpointError(
                f"{name} is a {type(tensor).__name__}, and no plain tensor, whose values alone can be written.",
                python="Of FSDP: gather the weights, load_state_dict them into a ViT(model.config), and save that. "
                "Of quantised weights: save before you quantise.",
                command="",
            )


def _refuse_other_methods(model: ViT) -> None:
    for name in (*COMPUTING, "__call__"):
        if hasattr(ViT, name) and getattr(type(model), name) is not getattr(ViT, name):
            raise CheckpointError(
                f"This model is a {type(model).__name__} with its own {name}, which no config tells.",
                python="Write its tensors alone: vitlite.checkpoints.save.write_tensors(file, model.state_dict()).",
                command="",
            )
    own = replaced_method(model)
    if own:
        raise _another(own, "set on this model", "that of a ViT")


def _refuse_other_parts(model: ViT) -> None:
    for difference in differences(model):
        raise _another(*difference)


def _refuse_other_shapes(model: ViT) -> None:
    """A table without the class token's row, put in place of its own, would be written as that of another network."""
    tensors = model.state_dict()
    for name, wanted in model_on_meta(model.config).state_dict().items():
        if name in tensors and tensors[name].shape != wanted.shape:
            raise _another(name, str(tuple(tensors[name].shape)), str(tuple(wanted.shape)))


def _another(name: str, found: str, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"This model is not what its config says: {name} is {found}, and not {wanted}.",
        python="Of a new head: model.reset_head(classes), then its weights. Of LoRA: merge it first.",
        command="",
    )


def _refuse_unreadable(path: Path, tensors: Mapping[str, Tensor], config: ViTConfig) -> None:
    """By the rules of loading itself."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(f"{name} has no values: the model is on torch's meta device.")
        if tensor.dtype in FLOATS.values() and not is_finite(tensor.detach()):
            raise CheckpointError(f"{name} has values that are not finite, and loading would refuse them.")
    try:
        file = WeightsFile(path, [path], {name: _entry(tensor) for name, tensor in tensors.items()}, stats={})
        mapping, resolved = understand(file, [Claim("its config says", config.to_dict(), knows_network=True)])
        check_tensors(file, mapping, model_on_meta(resolved.config))
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(
            f"What would be written could not be loaded. {error.text}",
            python="Of a new head: model.reset_head(classes), then its weights. Of LoRA: merge it first.",
            command="",
        ) from None


def _entry(tensor: Tensor) -> Entry:
    kinds = {dtype: name for name, dtype in FLOATS.items()}
    return Entry(tuple(tensor.shape), kinds.get(tensor.dtype, str(tensor.dtype)), lambda: tensor)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Replaces a safetensors file, whole or not at all; as safetensors' own function writes it.

    That one needs numpy, or a version that few have, and holds every tensor in memory twice where it is older.

    Args:
        path: The file.
        tensors: By name, on any device, tied and strided ones too.
        metadata: Texts for the file's header.

    Raises:
        CheckpointError: A tensor is of a type that such a file cannot have.
    """
    _refuse_other_tensors(tensors)
    in_file_order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # aligned without gaps
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in in_file_order:
        tensor = tensors[name]
        if tensor.dtype not in STORED_AS:
            raise CheckpointError(f"{name} is of {tensor.dtype}, which is not written. Convert it first.")
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": STORED_AS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in in_file_order:
            file.write(bytes_of(tensors[name]))


def push_to_hub(model: ViT, repo: str, *, private: bool = False, token: str | None = None) -> str:
    """Uploads what `save` writes, with a model card, to the Hugging Face Hub; the repository is made if need be.

    Args:
        model: What to upload.
        repo: "owner/name". A README.md that is there stays.
        private: For a new repository: whether others see it.
        token: None: the one you are logged in with, or HF_TOKEN.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: The model cannot be saved.
        DownloadError: `repo` is no repository, or the Hub cannot be reached, or refuses.
    """
    if is_offline():
        raise DownloadError(
            f"Cannot upload to {endpoint()}/{shown(repo)}: HF_HUB_OFFLINE is set.", python="Set it to 0."
        )
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=endpoint(), token=token)
    with TemporaryDirectory() as folder:
        save(model, folder)
        try:
            hub.create_repo(repo, private=private, exist_ok=True)
            if not hub.file_exists(repo, CARD):
                (Path(folder) / CARD).write_text(card(model, repo), encoding="utf-8", newline="")
            commit = hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload with vitlite")
        except Exception as error:  # requests, httpx and the client have no base class in common
            raise DownloadError(
                f"Cannot upload to {endpoint()}/{repo}: {str(error).strip().splitlines()[0]}.",
                python="Check the name and the network. It takes a login, hf auth login, or a token that may write.",
            ) from error
    return str(commit.commit_url)


def card(model: ViT, repo: str) -> str:
    """The model card of a repository: how to use the model, what it is, and where its weights came from."""
    classes = model.config.num_classes
    tag, task = "image-feature-extraction", "turns pictures into vectors"
    call = 'model.embed(model.preprocess("picture.jpg"))'
    if classes:
        tag, task = "image-classification", f"classifies pictures into {classes} classes"
        call = 'model.predict("picture.jpg")'
    rows = "\n".join(f"| {name} | {value} |" for name, value in model.config.to_dict().items())
    return f"""---
library_name: vitlite
pipeline_tag: {tag}
tags: [vision-transformer, vitlite, timm]
---
# {repo.split("/")[-1]}

A Vision Transformer that {task}. {_origin(model.source)}

```python
import vitlite

model = vitlite.load("{repo}")
{call}
```

| | |
|---|---|
{rows}
"""


def _origin(source: Source | None) -> str:
    """The sentence that says where weights came from."""
    if source is None:
        return "It was trained from random weights."
    return f"Its weights began as `{source.name or source.repo or source.path.name}` (sha256 `{source.sha256}`)."
