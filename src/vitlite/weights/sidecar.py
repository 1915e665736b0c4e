"""What stands beside a weights file, as vitlite, timm and transformers write it: config.json and its companions."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vitlite.errors import CheckpointError

GELUS = {  # their names -> ours; the first for one of ours is what is written
    "gelu": "exact", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_tanh": "tanh",
    "quick_gelu": "quick",
}  # fmt: skip
POOLS = {"token": "cls", "avg": "mean"}
ASSUMED = {  # what a model_type's class has where its config is silent: epsilon, activation, processor; and 12 heads
    "vit": (1e-12, "gelu", "ViT"), "deit": (1e-12, "gelu", "DeiT"), "vit_mae": (1e-12, "gelu", "ViT"),
    "ijepa": (1e-12, "gelu", "ViT"), "vit_msn": (1e-6, "gelu", "ViT"), "dinov2": (1e-6, "gelu", "Bit"),
    "dinov2_with_registers": (1e-6, "gelu", "Bit"), "clip": (1e-5, "quick_gelu", "CLIP"),
    "clip_vision_model": (1e-5, "quick_gelu", "CLIP"), "metaclip_2": (1e-5, "quick_gelu", "CLIP"),
    "metaclip_2_vision_model": (1e-5, "quick_gelu", "CLIP"),
}  # fmt: skip
TRANSFORMERS = {  # their config.json -> ViTConfig
    "image_size": "image_size", "patch_size": "patch_size", "hidden_size": "dim", "num_hidden_layers": "depth",
    "num_attention_heads": "heads", "num_channels": "channels", "layer_norm_eps": "norm_eps",
}  # fmt: skip


@dataclass(frozen=True)
class Description:
    """What stands beside the tensors, in config.json and preprocessor_config.json."""

    claims: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    recipe: tuple[Literal["vitlite", "timm", "transformers"], Mapping[str, Any]] | None = None
    architecture: str | None = None  # timm's name, which stands for a config
    untold: Sequence[str] = ()  # what that config does not tell here
    ours: bool = False  # vitlite saved it

    def contradictions(self, labels: Sequence[str] | None, recipe: Mapping[str, Any]) -> dict[Any, tuple[Any, Any]]:
        """What is said here of labels, by number, and of a recipe's fields, and what is said there; where both say."""
        own = dict(enumerate(self.labels or ())) | dict(self.recipe[1] if self.recipe else {})
        theirs = dict(enumerate(labels or ())) | json.loads(json.dumps(recipe))
        return {name: (value, theirs[name]) for name, value in own.items() if theirs.get(name, value) != value}


def read_json(file: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(file.read_text(encoding="utf-8"))


def describe(folder: Path) -> Description:
    """What config.json says, as vitlite, timm or transformers wrote it; nothing where there is none."""
    files = folder / "config.json", folder / "preprocessor_config.json"
    config, pictures = (read_json(file) if file.exists() else {} for file in files)
    if "vitlite" in config:
        ours = config["vitlite"]
        labels, recipe = ours.get("labels"), ours.get("preprocess")
        return Description(
            dict(ours["config"]),
            tuple(labels) if labels else None,
            ("vitlite", dict(recipe)) if recipe else None,
            ours=True,
        )
    if "architecture" in config:
        return _timm(config)
    if "model_type" in config:
        return _transformers(config, pictures)
    return Description()


def _timm(config: Mapping[str, Any]) -> Description:
    args, pretrained = config.get("model_args", {}), config.get("pretrained_cfg", {})
    said = (about.get("global_pool") for about in (args, config, pretrained))
    pool: Any = next((pool for pool in said if pool is not None), None)
    if pool == "" and config.get("num_classes") == 0:
        pool = None  # there is nothing to pool for
    for name, value, known in (("global_pool", pool, POOLS), ("act_layer", args.get("act_layer") or "gelu", GELUS)):
        if value is not None and value not in known:
            raise CheckpointError(f"config.json has {name} {value!r}; vitlite runs {', '.join(known)}.")
    if args.get("pool_include_prefix"):
        raise CheckpointError("config.json has pool_include_prefix; vitlite's mean is that of the patches.")
    if found := re.search("rope|rpn", config["architecture"]):
        raise CheckpointError(
            f"config.json says {config['architecture']}, which is no plain ViT though its tensors have the same names: "
            + {"rope": "its attention turns by position.", "rpn": "its norms stand after the layers."}[found[0]]
        )
    claims = {"pool": POOLS.get(pool), "num_classes": config.get("num_classes"), "heads": args.get("num_heads")}
    claims |= {"image_size": args.get("img_size"), "gelu": GELUS.get(args.get("act_layer"))}
    if "no_embed_class" in args:
        claims["cls_position"] = not args["no_embed_class"]
    if args.get("img_size") and not args.get("dynamic_img_size"):  # then timm's model takes no other
        side = args["img_size"]
        pretrained = {**pretrained, "input_size": [0, *(side if isinstance(side, list) else (side, side))]}
    names = _in_order(config.get("label_names") or pretrained.get("label_names"))
    about = config.get("label_descriptions") or pretrained.get("label_descriptions") or {}
    return Description(
        {name: value for name, value in claims.items() if value is not None},
        names and tuple(about.get(name, name) for name in names),
        ("timm", pretrained) if "mean" in pretrained else None,
        ".".join(filter(None, (config["architecture"], pretrained.get("tag")))),
        ("norm_eps",) if args.get("norm_layer") else (),  # timm's have other epsilons than some architectures
    )


def _transformers(config: Mapping[str, Any], pictures: Mapping[str, Any]) -> Description:
    vision: Mapping[str, Any] = config.get("vision_config", config)
    kind = vision.get("model_type", config["model_type"])
    if kind in ASSUMED:  # of other classes, what their config does not say is asked for
        eps, gelu, processor = ASSUMED[kind]
        vision = {"num_attention_heads": 12, "layer_norm_eps": eps, "hidden_act": gelu, **vision}
        if pictures and "feature_extractor_type" not in pictures:
            pictures = {"image_processor_type": processor, **pictures}
    claims = {ours: vision[name] for name, ours in TRANSFORMERS.items() if vision.get(name) is not None}
    if (act := vision.get("hidden_act")) is not None:
        if act not in GELUS:
            raise CheckpointError(f"config.json has hidden_act {act!r}; vitlite runs {', '.join(GELUS)}.")
        claims["gelu"] = GELUS[act]
    if "intermediate_size" in vision and "mlp_ratio" not in vision:  # DINOv2 has both and uses the ratio
        claims["mlp_dim"] = vision["intermediate_size"]
    if isinstance(sides := claims.get("patch_size"), list) and len(set(sides)) == 1:
        claims["patch_size"] = sides[0]
    labels = None
    if str((config.get("architectures") or [""])[0]).endswith("ForImageClassification"):
        names = config.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
        claims["num_classes"] = len(names)
        if config.get("problem_type") in (None, "single_label_classification"):  # no softmax over others
            labels = _in_order(names)
    return Description(claims, labels, ("transformers", pictures) if pictures else None)


def _in_order(names: Sequence[str] | Mapping[str, str] | None) -> tuple[str, ...] | None:
    """Labels as a list, or by number; None where numbers are missing, since nobody then knows whose an output is."""
    if isinstance(names, Mapping):
        numbered = {int(number): name for number, name in names.items()}
        names = [numbered[i] for i in range(len(names)) if i in numbered]
        return tuple(names) if len(names) == len(numbered) else None
    return tuple(names) if names else None
