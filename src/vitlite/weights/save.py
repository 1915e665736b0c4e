"""Out again: a model -> a folder, or a repository of the Hub.

What is saved has timm's tensor names, and a config.json that vitlite reads back in full, and timm as far as it goes.
Written without numpy, and each file whole or not at all.
"""

import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory

import safetensors
from torch import Tensor

from vitlite.disk import replacing
from vitlite.images import recipe_alone
from vitlite.model import ViT
from vitlite.weights.build import Source
from vitlite.weights.files import WEIGHTS, path_of
from vitlite.weights.sidecar import write_sidecar


def save(model: ViT, folder: str | PathLike[str]) -> None:
    """Writes a folder: model.safetensors, and config.json with labels and preprocessing.

    `vitlite.load(folder)` gives the model back, in torch's default dtype unless told otherwise; and where timm can
    build such a model, so does `timm.create_model("local-dir:" + folder, pretrained=True)`.
    """
    folder, recipe = path_of(folder, "save"), recipe_alone(model.preprocess, "A saved model")
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, model.state_dict())
    write_sidecar(folder, model.config, model.labels, recipe)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Replaces a safetensors file, whole or not at all; as safetensors' own function writes it, which needs numpy.

    Args:
        path: The file.
        tensors: By name, on any device, tied and strided ones too.
        metadata: Texts for the file's header.
    """
    alive = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}  # until all is written
    specs = {}
    for name, tensor in alive.items():
        specs[name] = safetensors.TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
    with replacing(path) as temporary:
        safetensors.serialize_file(specs, temporary, {"format": "pt", **(metadata or {})})


def push_to_hub(model: ViT, repo: str, *, private: bool = False, token: str | None = None) -> str:
    """Uploads what `save` writes, with a model card, to the Hugging Face Hub; the repository is made if need be.

    Args:
        model: What to upload.
        repo: "owner/name".
        private: For a new repository: whether others see it.
        token: None: the one you are logged in with, or HF_TOKEN.

    Returns:
        The address of the commit.
    """
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    with TemporaryDirectory() as folder:
        save(model, folder)
        (Path(folder) / "README.md").write_text(card(model, repo), encoding="utf-8")
        hub.create_repo(repo, private=private, exist_ok=True)
        commit = hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload with vitlite")
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
