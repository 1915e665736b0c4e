"""Read the text tower of a joint checkpoint, which contains an image tower and a text tower.

The files of open_clip, OpenAI and transformers are supported. Unknown tensors in a file are an error.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitlite.checkpoints.build import is_finite
from vitlite.checkpoints.key_mapping import OPS, CheckpointFormat, read_formats
from vitlite.checkpoints.reader import WeightsFile, open_weights
from vitlite.errors import CheckpointError
from vitlite.nn.text import TextConfig, TextTower
from vitlite.zoo.text import TextRecord

FORMATS, _ = read_formats("text_formats.txt")
IMAGE_HALF = ("visual.", "vision_model.", "visual_projection.")
UNUSED = (  # tensors that are not part of the text tower
    "attn_mask", "text.attn_mask", "input_resolution", "context_length", "vocab_size", "logit_scale", "logit_bias",
    "text_model.embeddings.position_ids",
)  # fmt: skip


@dataclass(frozen=True)
class JointWeights:
    """The text tower of a joint checkpoint, and the scale and bias that turn cosine similarities into logits."""

    tower: TextTower
    scale: float  # logits = scale * cosine + bias
    bias: float | None  # None for a checkpoint that was trained with softmax rather than sigmoid


def read_text_tower(path: Path, record: TextRecord) -> JointWeights:
    """Read the text tower and the logit scale from a joint checkpoint. The tensors of the image tower are not read.

    Raises:
        CheckpointError: The file has no text tower, or vitlite does not support the text tower.
    """
    with open_weights(path) as file, torch.device("cpu"):
        found = _find_format(file)
        if found is None:
            raise CheckpointError(
                f"{file.path} contains no CLIP or SigLIP text tower. Use a checkpoint with an image tower and a text "
                "tower."
            )
        text_format, prefix = found
        names = _names(file, text_format, prefix)
        extra = [
            name
            for name in file.shapes.keys() - {part for parts, _ in names.values() for part in parts} - set(UNUSED)
            if not name.startswith(IMAGE_HALF)
        ]
        if extra or "logit_scale" not in file.shapes:
            what = f"with {min(extra)}" if extra else "without logit_scale"
            raise CheckpointError(
                f"{file.path}: vitlite does not support a text tower {what}. Use another CLIP or SigLIP checkpoint."
            )
        file.check_dtypes([part for parts, _ in names.values() for part in parts])
        config = _config(file, names, record)
        with torch.device("meta"):
            tower = TextTower(config)
        state = {}
        for name, expected in tower.state_dict().items():
            state[name] = _read(file, names, name)
            if state[name].shape != expected.shape:
                raise CheckpointError(
                    f"{file.path}: {name} of the text tower has the shape {tuple(state[name].shape)}, expected "
                    f"{tuple(expected.shape)}. Download the file again."
                )
        tower.load_state_dict(state, assign=True)
        scale = float(file.read("logit_scale").float().exp())
        bias = float(file.read("logit_bias").float()) if "logit_bias" in file.shapes else None
    return JointWeights(tower.eval().requires_grad_(False), scale, bias)


def _find_format(file: WeightsFile) -> tuple[CheckpointFormat, str] | None:
    for text_format in FORMATS.values():
        prefix = text_format.find_prefix(file.shapes)
        if prefix is not None:
            return text_format, prefix
    return None


def _names(file: WeightsFile, text_format: CheckpointFormat, prefix: str) -> Mapping[str, tuple[Sequence[str], str]]:
    """Map each name of a tensor in vitlite to the names in the file, and to the operation that converts them."""
    found: dict[str, tuple[Sequence[str], str]] = {}
    pattern = next(rule.theirs[0] for rule in text_format.rules if rule.ours == "blocks.#.norm1.weight")
    depth = 0
    while text_format.full_name(prefix, pattern, (depth,)) in file.shapes:
        depth += 1
    for rule in text_format.rules:
        for number in range(depth) if "#" in rule.ours else (None,):
            numbers = () if number is None else (number,)
            parts = [text_format.full_name(prefix, name, numbers) for name in rule.theirs]
            ours = rule.ours.replace("#", str(number))
            if ours not in found and all(part in file.shapes for part in parts):
                found[ours] = parts, rule.op
    return found


def _config(file: WeightsFile, names: Mapping[str, tuple[Sequence[str], str]], record: TextRecord) -> TextConfig:
    shape = {name: file.shapes[parts[0]] for name, (parts, _) in names.items()}
    missing = {"token_embedding.weight", "pos_embed", "norm.weight", "blocks.0.mlp.fc1.weight"} - shape.keys()
    if missing:
        raise CheckpointError(f"{file.path}: the text tower has no {min(missing)}. Download the file again.")
    vocabulary, dim = shape["token_embedding.weight"]
    projection = shape.get("projection.weight")
    embed_dim = dim
    if projection is not None:
        embed_dim = projection[1] if names["projection.weight"][1] == "transposed" else projection[0]
    if shape["pos_embed"][0] != record.context:
        raise CheckpointError(
            f"{file.path}: the text tower reads {shape['pos_embed'][0]} tokens, expected {record.context}. Use files "
            "from the same checkpoint."
        )
    if dim % record.head_dim:
        raise CheckpointError(
            f"{file.path}: the width of the text tower is {dim}, which is not a multiple of the width of its heads, "
            f"{record.head_dim}. Use files from the same checkpoint."
        )
    return TextConfig(
        vocabulary=vocabulary,
        context=shape["pos_embed"][0],
        dim=dim,
        depth=sum(re.fullmatch(r"blocks\.\d+\.norm1\.weight", name) is not None for name in names),
        heads=dim // record.head_dim,
        mlp_dim=shape["blocks.0.mlp.fc1.weight"][0],
        mlp=record.mlp,
        norm_eps=record.norm_eps,
        causal=record.causal,
        pool=record.pool,
        eos=record.end,
        embed_dim=embed_dim,
        projection="none" if projection is None else "bias" if "projection.bias" in names else "linear",
    )


def _read(file: WeightsFile, names: Mapping[str, tuple[Sequence[str], str]], name: str) -> Tensor:
    if name not in names:
        raise CheckpointError(f"{file.path}: the text tower has no {name}. Download the file again.")
    parts, op = names[name]
    value = OPS[op]([file.read(part) for part in parts], None).float().contiguous()
    if not is_finite(value):
        raise CheckpointError(f"{file.path}: {parts[0]} has values that are not finite. Download the file again.")
    return value
