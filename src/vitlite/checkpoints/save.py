"""Save a model to a folder, or upload it to the Hugging Face Hub.

The tensors have timm's names. config.json describes the model for vitlite and, if timm can build it, for timm.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from logging import getLogger
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from vitlite.checkpoints.build import is_finite
from vitlite.checkpoints.compare import check_unmodified
from vitlite.checkpoints.fingerprint import bytes_of
from vitlite.checkpoints.formats.timm import timm_cannot_read
from vitlite.checkpoints.formats.vitlite import metadata_content
from vitlite.checkpoints.metadata import CONFIG, ID, PREPROCESSOR
from vitlite.checkpoints.reader import FLOATS, INDEX, WEIGHTS, checked_metadata, naming_damage, path_of
from vitlite.errors import CheckpointError, DownloadError, VitliteError
from vitlite.images.transform import transform_to_save
from vitlite.nn.vit import ViT
from vitlite.storage import atomic_write, lock, read_json, remove_leftovers
from vitlite.zoo.download import endpoint, is_offline

_log = getLogger("vitlite")

CARD = "README.md"
STORED_AS = {  # names of dtypes in safetensors files
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def save(model: ViT, folder: str | PathLike[str]) -> None:
    """Save a model as model.safetensors and config.json, with its labels and preprocessing.

    `vitlite.load(folder)` loads the model. If timm can build the model,
    `timm.create_model("local-dir:" + folder, pretrained=True)` also loads it. Otherwise, a warning gives the reason.

    Raises:
        CheckpointError: The model was modified so that its config does not describe it, a weight is NaN or infinity, or
            the folder contains a model that vitlite did not write. Nothing is written.
    """
    folder, transform = path_of(folder, "folder"), transform_to_save(model)
    check_overwrite(folder)
    check_savable(model)
    config = metadata_content(model.config, model.labels, transform, scores=model.scores, thresholds=model.thresholds)
    write_folder(folder, model.state_dict(), {CONFIG: config})
    _warn_once(timm_cannot_read(model.config, transform))


@cache  # warn only once, although training saves a model repeatedly
def _warn_once(reason: str) -> None:
    if reason:
        _log.warning(
            "timm and transformers cannot load the saved model: %s To write a folder for another library, use vitlite "
            "convert.",
            reason,
        )


def check_savable(model: ViT, task: str = "save") -> None:
    """Check that saving and loading would give the same model.

    Raises:
        CheckpointError: The modules or tensors differ from the config, the number of labels differs from the number of
            classes, or a value is not finite.
    """
    check_unmodified(model, task)
    if model.labels is not None and len(model.labels) != model.config.num_classes:
        raise CheckpointError(
            f"The length of model.labels must be the number of classes, {model.config.num_classes}, got "
            f"{len(model.labels)}. Set model.labels to one name per class, or to None."
        )
    metadata_content(model.config, model.labels, None, scores=model.scores, thresholds=model.thresholds)
    check_values(model.state_dict())


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Check that tensors are plain, finite, and of a floating-point dtype that `load` supports.

    Raises:
        CheckpointError: A tensor is a subclass of `Tensor` or on the meta device, has another dtype, or is not finite.
    """
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__}"
            raise CheckpointError(
                f"{name} is {kind}, but only plain tensors can be saved. Gather sharded weights first, or save the "
                "model before quantising it."
            )
        if tensor.dtype not in FLOATS.values():
            supported = ", ".join(str(dtype) for dtype in FLOATS.values())
            raise CheckpointError(
                f"{name} has the dtype {tensor.dtype}, which cannot be saved. Convert the model to one of {supported}, "
                "for example with model.float()."
            )
        if not is_finite(tensor.detach()):
            raise CheckpointError(f"{name} contains NaN or infinity. Replace these values before saving.")


def check_overwrite(folder: Path) -> None:
    """Check that saving to a folder would overwrite only files that vitlite wrote.

    Raises:
        CheckpointError: The folder contains a model of another program, or the path is not a folder.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"Cannot save to {folder}, because it is not a folder. Pass a new folder.")
    foreign = [
        name for name in (WEIGHTS, CONFIG, PREPROCESSOR) if (folder / name).exists() and not _is_ours(folder / name)
    ]
    if (folder / INDEX).exists():
        foreign.append(INDEX)
    if foreign:
        raise CheckpointError(
            f"Cannot save to {folder}, because it contains {', '.join(foreign)}, which vitlite did not write. Pass a "
            "new folder."
        )


def _is_ours(file: Path) -> bool:
    try:
        with naming_damage(file):
            return ID in (checked_metadata(file) if file.suffix == ".safetensors" else read_json(file))
    except VitliteError:
        return False


def write_folder(folder: Path, tensors: Mapping[str, Tensor], contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Write weights and the JSON files that describe the weights, all with the same id.

    All new files are complete before the first old file is replaced. If the process is killed between two
    replacements, the ids differ, and `load` raises an error.

    Args:
        folder: The folder, which is created if needed.
        tensors: The tensors by name.
        contents: The content of each JSON file by file name. If there are none, only the tensors are written.

    Raises:
        CheckpointError: Another process is writing to the folder, or the folder is not writable.
    """
    metadata = {}
    if contents:
        metadata[ID] = hashlib.sha256(json.dumps(contents, ensure_ascii=False).encode()).hexdigest()[:32]
    with explaining_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with lock(folder / f"{WEIGHTS}.lock", timeout=0), ExitStack() as stack:
                for name in (WEIGHTS, *contents):
                    remove_leftovers(folder / name)
                for name, content in contents.items():
                    text = json.dumps({**content, **metadata}, indent=2, ensure_ascii=False) + "\n"
                    stack.enter_context(atomic_write(folder / name)).write_text(text, encoding="utf-8", newline="")
                write_tensors(folder / WEIGHTS, tensors, metadata)
            for name in (CONFIG, PREPROCESSOR):  # remove the files of the previous model
                if name not in contents:
                    (folder / name).unlink(missing_ok=True)
        except TimeoutError:
            raise CheckpointError(
                f"Another process is writing to {folder}. Wait until that process has finished, or pass another folder."
            ) from None


@contextmanager
def explaining_write_errors(place: Path) -> Iterator[None]:
    """Turn an OSError that is raised while writing into a CheckpointError that names the path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {place}: {error.strerror or error}. Existing files were kept. Check the permissions and the "
            "free space, or pass another path."
        ) from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically, without numpy.

    The functions of the safetensors library that write files need numpy, which is not a dependency of vitlite.

    Args:
        path: The file. An existing file is replaced.
        tensors: The tensors by name, on any device.
        metadata: Strings to store in the header.

    Raises:
        CheckpointError: A tensor is a subclass of `Tensor`, or safetensors does not support its dtype.
    """
    # Aligned without gaps, because the largest items come first.
    in_file_order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in in_file_order:
        tensor = tensors[name]
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype not in STORED_AS:
            raise CheckpointError(
                f"Cannot write {name}: {type(tensor).__name__} with the dtype {tensor.dtype} is not supported. Convert "
                "it to a plain torch.Tensor with the dtype torch.float32."
            )
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": STORED_AS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in in_file_order:
            file.write(bytes_of(tensors[name]))


def push_to_hub(model: ViT, repo: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload a model and a model card to the Hugging Face Hub. The repository is created if it does not exist.

    Args:
        model: The model to save and upload.
        repo: The repository, as "owner/name". If it has a README.md, no model card is uploaded.
        private: If True, a new repository is private. Otherwise, it is public.
        token: An access token. If None, the environment variable HF_TOKEN or the login from `hf auth login` is used.

    Returns:
        The URL of the commit.

    Raises:
        CheckpointError: The model cannot be saved.
        DownloadError: The repository name is invalid, or the Hub cannot be reached or rejects the upload.
    """
    if is_offline():
        raise DownloadError(
            f"Cannot upload to {endpoint()}/{repo}: offline mode is on. Unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE."
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
        except Exception as error:  # requests, httpx and the client share no base class
            raise DownloadError(
                f"Cannot upload to {endpoint()}/{repo}: {str(error).strip().splitlines()[0]}. Check the name and the "
                "network, and log in with `hf auth login` or use a token with write permission."
            ) from error
    return str(commit.commit_url)


def card(model: ViT, repo: str) -> str:
    """Return the text of the model card, which shows the usage, the config and the origin of the weights."""
    tag, task = "image-feature-extraction", "turns images into vectors"
    call = 'model.embed(model.preprocess("image.jpg"))'
    if model.config.num_classes:
        tag, task = "image-classification", f"classifies images into {model.config.num_classes} classes"
        call = 'model.predict("image.jpg")'
    origin = "It was trained from random weights."
    if model.source is not None:
        name = model.source.name or model.source.repo or model.source.path.name
        origin = f"Its initial weights were `{name}` (sha256 `{model.source.sha256}`)."
    rows = "\n".join(f"| {name} | {value} |" for name, value in model.config.to_dict().items())
    return f"""---
library_name: vitlite
pipeline_tag: {tag}
tags: [vision-transformer, vitlite, timm]
---
# {repo.split("/")[-1]}

A Vision Transformer that {task}. {origin}

```python
import vitlite

model = vitlite.load("{repo}")
{call}
```

| | |
|---|---|
{rows}
"""
