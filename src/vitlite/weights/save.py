"""Out again: a model -> a folder, a weights file -> another library's layout, a model -> the Hub.

What is saved has timm's tensor names, and a config.json that vitlite reads back in full, and timm as far as it goes.
Written without numpy, and first to a temporary name, so that a file is there whole or not at all.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import reduce
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlite import __version__
from vitlite.config import ViTConfig
from vitlite.errors import CheckpointError, ConfigError
from vitlite.factory import load
from vitlite.images import PILLOW_CODES, Recipe
from vitlite.model import ViT
from vitlite.weights.checkpoint import FLOATS, PICKLES, USER, WEIGHTS, Claim, open_checkpoint, read
from vitlite.weights.layouts import LAYOUTS, to_theirs
from vitlite.weights.sidecar import GELUS, POOLS

Target = Literal["timm", "transformers", "torchvision", "vitlite"]
NESTED = ("model", "state_dict", "encoder", "teacher", "module")  # where training scripts keep the network
AVERAGED = ("model_ema", "state_dict_ema", "ema")  # where they keep an average of its weights
TIMM_POOLS = {ours: theirs for theirs, ours in POOLS.items()}
TIMM_GELUS = {"exact": "gelu", "tanh": "gelu_tanh", "quick": "quick_gelu"}
RESAMPLES = {name: code for code, name in PILLOW_CODES.items()}


def save(model: ViT, folder: str | PathLike[str]) -> None:
    """Writes a folder: model.safetensors, and config.json with labels and preprocessing.

    `vitlite.load(folder)` gives the model back, in torch's default dtype unless told otherwise; and where timm can
    build such a model, so does `timm.create_model("local-dir:" + folder, pretrained=True)`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    recipe = getattr(model.preprocess, "recipe", None)
    about = {"config": model.config.to_dict(), "labels": model.labels, "preprocess": recipe and recipe.to_dict()}
    _write_tensors(folder / WEIGHTS, model.state_dict())
    _write_json(folder / "config.json", {"vitlite": {"version": __version__} | about} | _timm(model, recipe))


def convert(
    source: str | PathLike[str], target: str | PathLike[str], to: Target, *, config: ViTConfig | None = None
) -> None:
    """Rewrites a weights file in another layout; the numbers and their type stay as they are.

    Args:
        source: A file or folder as `vitlite.load` takes it, or a pickle (.pth, .bin), opened with weights_only=True.
        target: A .safetensors file, for the tensors alone; or a folder, for a whole model with its config.json.
        to: Whose layout. vitlite's is timm's.
        config: As in `vitlite.load`. A file needs of it only what gives tensors their shape.

    Raises:
        CheckpointError: `source` is no whole plain ViT, or the library has no model that computes the same.
        ConfigError: A folder is wanted, and `source` does not tell all of the config; or a pickle is wanted.
    """
    if to not in get_args(Target):
        raise ConfigError(f"Cannot convert to {to!r}. Valid: {', '.join(get_args(Target))}.")
    target = Path(target)
    if target.suffix in PICKLES:
        raise ConfigError(f"Cannot write {target}: no pickles are made. Name a folder, or a .safetensors file.")
    alone = target.suffix == ".safetensors"
    with _unpickled(Path(source)) as path:
        model = _tensors_of(path, config, to) if alone else load(path, config=config, dtype=_dtype_of(path))
    if alone:
        _write_tensors(target, _renamed(model, to))
    elif to in ("timm", "vitlite"):
        save(model, target)
    else:
        target.mkdir(parents=True, exist_ok=True)
        _write_tensors(target / WEIGHTS, _renamed(model, to))
        if to == "transformers":
            _write_json(target / "config.json", _transformers(model))
            pictures = target / "preprocessor_config.json"
            if recipe := getattr(model.preprocess, "recipe", None):
                _write_json(pictures, _transformers_pictures(recipe))
            else:
                pictures.unlink(missing_ok=True)  # of what was there before


def push_to_hub(model: ViT, repo: str, *, private: bool = False, token: str | None = None) -> str:
    """Uploads what `save` writes, with a model card, to the Hugging Face Hub; the repository is made if need be.

    Args:
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
        return str(hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload with vitlite").commit_url)


def card(model: ViT, repo: str) -> str:
    """The model card of a repository: how to use the model, what it is, and where its weights came from."""
    c, source = model.config, model.source
    task = f"classifies pictures into {c.num_classes} classes" if c.num_classes else "turns pictures into vectors"
    origin = "It was trained from random weights."
    if source:
        came = source.name or source.repo or source.path.name
        origin = f"Its weights began as `{came}`" + (f" (sha256 `{source.sha256}`)." if source.sha256 else ".")
    rows = "\n".join(f"| {name} | {value} |" for name, value in c.to_dict().items())
    return f"""---
library_name: vitlite
pipeline_tag: {"image-classification" if c.num_classes else "image-feature-extraction"}
tags: [vision-transformer, vitlite, timm]
---
# {repo.split("/")[-1]}

A Vision Transformer that {task}. {origin}

```python
import vitlite

model = vitlite.load("{repo}")
{'model.predict("picture.jpg")' if c.num_classes else 'model.embed(model.preprocess("picture.jpg"))'}
```

| | |
|---|---|
{rows}
"""


@contextmanager
def _unpickled(source: Path) -> Iterator[Path]:
    """The source itself; or for a pickle, the safetensors file made of it, in a folder that is gone afterwards."""
    source = source.expanduser()
    if source.suffix in PICKLES and not source.exists():
        raise CheckpointError(f"There is no file {source}.")
    pickles = [source] if source.is_file() else sorted(source.glob("*")) if source.is_dir() else []
    pickles = [file for file in pickles if file.suffix in PICKLES]
    if len(pickles) != 1 or (source.is_dir() and (source / WEIGHTS).exists()):
        yield source
        return
    with TemporaryDirectory() as folder:
        try:
            tensors = torch.load(pickles[0], map_location="cpu", weights_only=True)
        except Exception as error:  # a file that is no pickle makes torch raise nearly anything
            raise CheckpointError(f"{pickles[0]} cannot be opened with weights_only=True: {error}") from error
        while isinstance(tensors, Mapping) and not any(isinstance(value, Tensor) for value in tensors.values()):
            if averaged := [key for key in tensors if str(key) in AVERAGED]:
                raise CheckpointError(
                    f"{pickles[0]} has averaged weights, {averaged[0]}, beside others. Choose: "
                    f'torch.save(torch.load(path, weights_only=True)["{averaged[0]}"], "chosen.pth")'
                )
            inner = [key for key in NESTED if isinstance(tensors.get(key), Mapping)]
            if not inner:
                raise CheckpointError(f"{pickles[0]} has no tensors, but: {', '.join(map(str, tensors))[:300]}.")
            tensors = tensors[inner[0]]
        _write_tensors(Path(folder) / WEIGHTS, {k: x for k, x in dict(tensors).items() if isinstance(x, Tensor)})
        for name in ("config.json", "preprocessor_config.json"):
            with suppress(FileNotFoundError):
                shutil.copy(pickles[0].with_name(name), folder)
        try:
            yield Path(folder)
        except (CheckpointError, ConfigError) as error:
            raise type(error)(str(error).replace(str(Path(folder) / WEIGHTS), str(pickles[0]))) from error


def _dtype_of(path: Path) -> torch.dtype | None:
    """The narrowest type that holds all numbers of a file."""
    with open_checkpoint(path) as file:
        kinds = {FLOATS[entry.dtype] for entry in file.entries.values() if entry.dtype in FLOATS}
    return reduce(torch.promote_types, kinds) if kinds else None


def _tensors_of(path: Path, config: ViTConfig | None, to: Target) -> ViT:
    """The model of a file, for its tensors only: what gives them no shape may remain unknown, and is made up."""
    with open_checkpoint(path) as file:
        claims = [Claim("its config.json says", file.about.claims)]
        if config:
            claims.append(Claim(USER, {name: getattr(config, name) for name in config.given}))
        fixed = LAYOUTS[to].fixed if to in LAYOUTS else {}  # what its code decides has to be known
        made_up = {"heads": 1, "norm_eps": 1e-6, "gelu": "exact", "pool": "cls"}
        claims.append(Claim("", {name: made_up[name] for name in made_up if name not in fixed}, firm=False))
        translation, found = file.understand(claims)
        dtype = _dtype_of(path) or torch.float32
        device = torch.device("cpu")
        return read(file, translation, found, found, new_head=False, device=device, dtype=dtype, scan=True)[0]


def _renamed(model: ViT, to: Target) -> dict[str, Tensor]:
    """The tensors under the names of a library that has a model which computes the same."""
    tensors, c = model.state_dict(), model.config
    if to in ("timm", "vitlite"):
        return tensors
    kind, prefix = _kind(c), ""
    layout = LAYOUTS["torchvision"]
    if to == "transformers":
        layout = LAYOUTS["transformers-dinov2" if kind == "dinov2" else "transformers"]
        prefix = f"{kind}." if c.num_classes else ""
    wanted = dict(layout.fixed) | {"class_token": (to, kind) != ("transformers", "ijepa"), "positions": "learned"}
    wanted |= {"registers": 0, "head_dim": None, "pool": "cls" if c.class_token else "mean"}
    if kind == "dinov2":
        wanted |= {"mlp_dim": c.mlp_dim // c.dim * c.dim} | ({"pool": "cls_and_mean"} if c.num_classes else {})
    if differs := [f"{name}={getattr(c, name)!r}" for name, value in wanted.items() if getattr(c, name) != value]:
        raise CheckpointError(f"{to} has no model that computes what this one does: {', '.join(differs)}.")
    if c.class_token and not c.cls_position:
        tensors["pos_embed"] = F.pad(tensors["pos_embed"], (0, 0, 1, 0))  # zeros for the class token
    if to == "torchvision" and not c.qkv_bias:
        tensors |= {f"blocks.{i}.attn.qkv.bias": torch.zeros(3 * c.dim) for i in range(c.depth)}
    return dict(to_theirs(layout, prefix, tensors))


def _kind(c: ViTConfig) -> str:
    return "dinov2" if c.layer_scale is not None else "vit" if c.class_token else "ijepa"


def _timm(model: ViT, recipe: Recipe | None) -> dict[str, Any]:
    """What timm needs to build this model; nothing where it has none such."""
    c = model.config
    ratio = c.mlp_dim / c.dim
    plain = c.norm_eps == 1e-6 and c.positions != "sincos2d" and not (c.patch_norm or c.pre_logits or c.head_dim)
    pictures = _timm_pictures(recipe) if recipe else {}
    if not plain or c.pool not in TIMM_POOLS or int(c.dim * ratio) != c.mlp_dim or pictures is None:
        return {}
    return {
        "architecture": "vit_tiny_patch16_224",  # any name of a plain ViT: model_args says all of it
        "num_classes": c.num_classes,
        "global_pool": TIMM_POOLS[c.pool],
        "model_args": {
            "img_size": list(c.size),
            "patch_size": c.patch_size,
            "in_chans": c.channels,
            "embed_dim": c.dim,
            "depth": c.depth,
            "num_heads": c.heads,
            "mlp_ratio": ratio,
            "qkv_bias": c.qkv_bias,
            "init_values": c.layer_scale,
            "class_token": c.class_token,
            "no_embed_class": not c.cls_position,
            "reg_tokens": c.registers,
            "pos_embed": "learn" if c.positions == "learned" else "none",
            "pre_norm": c.pre_norm,
            "fc_norm": c.fc_norm,
            "scale_attn_norm": c.inner_norm,
            "scale_mlp_norm": c.inner_norm,
            "act_layer": TIMM_GELUS[c.gelu],
            "global_pool": TIMM_POOLS[c.pool],
        },
        "pretrained_cfg": {"input_size": [c.channels, *c.size], "num_classes": c.num_classes}
        | ({"label_names": list(model.labels)} if model.labels else {})
        | pictures,
    }


def _timm_pictures(recipe: Recipe) -> dict[str, Any] | None:
    """timm's words for the preprocessing; None where it has none."""
    sides = list(zip(recipe.size, recipe.resize, strict=True))
    most, least = min(size / resize for size, resize in sides), max(size / (resize + 1) for size, resize in sides)
    shares = [x for x in (most, (most + least) / 2) if all(int(size / x) == resize for size, resize in sides)]
    if not shares:
        return None
    white = 255 * recipe.scale  # timm's pixels are 0..1 before mean and std
    return {
        "mean": [value / white for value in recipe.mean],
        "std": [value / white for value in recipe.std],
        "interpolation": recipe.interpolation,
        "crop_mode": recipe.mode,
        "crop_pct": shares[0],
    }


def _transformers(model: ViT) -> dict[str, Any]:
    c, kind = model.config, _kind(model.config)
    name = {"vit": "ViT", "ijepa": "IJepa", "dinov2": "Dinov2"}[kind]
    labels = model.labels or [f"LABEL_{i}" for i in range(c.num_classes)]
    return {
        "architectures": [f"{name}ForImageClassification" if c.num_classes else f"{name}Model"],
        "model_type": kind,
        "image_size": c.image_size,
        "patch_size": c.patch_size,
        "hidden_size": c.dim,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads,
        **({"mlp_ratio": c.mlp_dim // c.dim} if kind == "dinov2" else {"intermediate_size": c.mlp_dim}),
        "num_channels": c.channels,
        "layer_norm_eps": c.norm_eps,
        "hidden_act": next(theirs for theirs, ours in GELUS.items() if ours == c.gelu),
        "qkv_bias": c.qkv_bias,
        **({"id2label": dict(enumerate(labels)), "label2id": {x: i for i, x in enumerate(labels)}} if labels else {}),
    }


def _transformers_pictures(recipe: Recipe) -> dict[str, Any]:
    height, width = recipe.resize
    if recipe.mode == "center" and height != width:
        raise CheckpointError(
            f"transformers has no preprocessing that resizes pictures to cover {height} x {width} pixels. "
            "Convert to a .safetensors file, which has the tensors alone."
        )
    square = {"height": height, "width": width}
    return {
        "image_processor_type": "CLIPImageProcessor" if recipe.mode == "center" else "DeiTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": height} if recipe.mode == "center" else square,
        "resample": RESAMPLES[recipe.interpolation],
        "do_center_crop": True,
        "crop_size": {"height": recipe.size[0], "width": recipe.size[1]},
        "do_rescale": True,
        "rescale_factor": recipe.scale,
        "do_normalize": True,
        "image_mean": recipe.mean,
        "image_std": recipe.std,
    }


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with _replacing(path) as temporary:
        write_tensors(temporary, tensors, {})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """A safetensors file, as safetensors' own function writes it, which needs numpy."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}  # alive until written
    specs = {
        name: safetensors.TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in whole.items()
    }
    safetensors.serialize_file(specs, path, {"format": "pt", **about})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with _replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside the path, that becomes the path's once all is written."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
