"""Open the text half of the checkpoint from which a model was created."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlite.checkpoints.formats.keys import COUNT, NUMBER, STRING, check_types
from vitlite.checkpoints.metadata import CONFIG
from vitlite.checkpoints.reader import WEIGHTS
from vitlite.config import Mlp
from vitlite.errors import CheckpointError, InputError
from vitlite.storage import check_sha256, read_json
from vitlite.text.tokenizer import Tokenizer, open_vocabulary
from vitlite.text.weights import JointWeights, read_text_tower
from vitlite.zoo import download, registry
from vitlite.zoo.text import CLIP, SIGLIP, TextRecord, text_record

if TYPE_CHECKING:
    import tokenizers

    from vitlite.checkpoints.build import Source
    from vitlite.nn.vit import ViT

JOINT_WEIGHTS = ("open_clip_model.safetensors", WEIGHTS)  # in repositories of open_clip
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GELUS: dict[str, Mlp] = {"gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh"}
TEXT_TYPES = {
    "hidden_size": COUNT, "num_attention_heads": COUNT, "max_position_embeddings": COUNT, "layer_norm_eps": NUMBER,
    "hidden_act": STRING,
}  # fmt: skip
WIDTHS = {CLIP: 512, SIGLIP: 768}  # default hidden_size in transformers; by default, a head has a width of 64
OLD_EOS = 2  # wrong id of the end of text in old CLIP configs, for which transformers pools the token of largest id
BATCH = 64  # number of sentences that the text tower computes at once


class TextHalf(NamedTuple):
    """The text tower, the logit scale and the tokenizer of a joint checkpoint for images and text."""

    weights: JointWeights
    tokenizer: Tokenizer

    def vectors(self, sentences: Sequence[str]) -> Tensor:
        """Return the vectors of sentences, scaled to length 1: (b, e)."""
        if isinstance(sentences, str):
            raise InputError(f"Expected a list of sentences, got {sentences!r}. Pass [{sentences!r}].")
        ids, vocabulary = self.tokenizer(sentences), self.weights.tower.config.vocabulary
        if ids.numel() and int(ids.max()) >= vocabulary:
            raise CheckpointError(
                f"The tokenizer returned the token id {int(ids.max())}, but the text tower has only {vocabulary} "
                "tokens. Use a tokenizer and weights from the same checkpoint."
            )
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = [self.weights.tower(part) for part in torch.split(ids, BATCH)]
        return F.normalize(torch.cat(found), dim=-1)


def open_text_half(model: "ViT") -> TextHalf:
    """Open the text half of the checkpoint from which a model was created, and download it if necessary.

    Raises:
        InputError: The checkpoint has no text half.
        CheckpointError: The text half is damaged, or vitlite does not support it.
        DownloadError: The text half cannot be downloaded.
        MissingExtraError: The packages for text are not installed.
    """
    source = model.source
    if source is None:
        raise InputError(
            "The model cannot read text, because its weights do not come from a checkpoint. Create it from a CLIP or "
            "SigLIP checkpoint, such as vit_base_16.siglip_v2_webli."
        )
    if source.name is not None and source.repo == registry.find(source.name).repo:
        return half_of_repository(text_record(source.name))
    if source.path.suffix != ".json":  # the index of shards, which `sha256` does not cover
        check_sha256(source.path, source.sha256)
    if source.name is not None:  # like=
        record = text_record(source.name)
        vocabulary = open_vocabulary(download.fetch(record.repo, TOKENIZER, prefer_cache=True).path)
    else:
        files = _files_beside(source)
        vocabulary = open_vocabulary(files[TOKENIZER])
        record = _record_from_transformers(files, vocabulary)
    return TextHalf(read_text_tower(source.path, record), Tokenizer(vocabulary, record))


def half_of_repository(record: TextRecord) -> TextHalf:
    """Open the text half of a checkpoint in the zoo, and download it unless it is in the cache."""
    weights, vocabulary = fetch_text_half(record)
    return TextHalf(read_text_tower(weights.path, record), Tokenizer(open_vocabulary(vocabulary.path), record))


def fetch_text_half(
    record: TextRecord, *, prefer_cache: bool = True
) -> tuple[download.Downloaded, download.Downloaded]:
    """Return the verified joint weights and tokenizer of a checkpoint in the zoo.

    Raises:
        CheckpointError: The repository has no weights that vitlite can read.
        DownloadError: The files cannot be downloaded, or have the wrong hash.
    """
    for name in JOINT_WEIGHTS:
        weights = download.fetch_optional(record.repo, name, prefer_cache=prefer_cache)
        if weights is not None:
            break
    else:
        raise CheckpointError(
            f"{record.repo} has neither {' nor '.join(JOINT_WEIGHTS)}. vitlite needs one of them to read text. Use "
            "another checkpoint."
        )
    return weights, download.fetch(record.repo, TOKENIZER, revision=weights.commit)


def _files_beside(source: "Source") -> dict[str, Path]:
    """Return the paths, by file name, of the config and the tokenizer in the folder of the weights.

    Raises:
        InputError: One of the files is missing.
    """
    paths = {}
    for name in (CONFIG, TOKENIZER, TOKENIZER_CONFIG):
        paths[name] = source.path.parent / name
        if source.repo is not None:
            download.fetch_optional(source.repo, name, revision=source.commit)
    missing = [name for name, path in paths.items() if not path.is_file()]
    if missing:
        hint = ""
        if TOKENIZER in missing and (source.path.parent / "spiece.model").exists():
            hint = (
                f" To create {TOKENIZER} from spiece.model, call "
                "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
            )
        raise InputError(
            f"The model cannot read text, because there is no {' and no '.join(missing)} beside "
            f"{source.path}.{hint} For a checkpoint of the zoo, pass its name to vitlite.create (--model NAME)."
        )
    return paths


def _record_from_transformers(paths: Mapping[str, Path], vocabulary: "tokenizers.Tokenizer") -> TextRecord:
    """Return the record of a text half that config.json and tokenizer_config.json describe.

    Raises:
        InputError: The files describe a model without a text half.
        CheckpointError: vitlite does not support the text half.
    """
    config = read_json(paths[CONFIG])
    text = config.get("text_config")
    family = {"clip": CLIP, "siglip": SIGLIP}.get(str(config.get("model_type")))
    if family is None or not isinstance(text, dict):
        raise InputError(
            f"The model cannot read text, because {paths[CONFIG]} describes a model of type "
            f"{config.get('model_type')!r} without a text half that vitlite supports. Use a complete CLIPModel or "
            "SiglipModel."
        )
    check_types(text, TEXT_TYPES, "text_config.")
    special = read_json(paths[TOKENIZER_CONFIG])
    end = _special_id(special, "eos_token", vocabulary)
    other = _special_id(special, "bos_token" if family is CLIP else "pad_token", vocabulary)
    act = text.get("hidden_act", "quick_gelu" if family is CLIP else "gelu_pytorch_tanh")
    if act not in GELUS:
        raise CheckpointError(f"{paths[CONFIG]}: hidden_act is {act!r}, but vitlite supports only {', '.join(GELUS)}.")
    record = replace(
        family,
        head_dim=text.get("hidden_size", WIDTHS[family]) // (text.get("num_attention_heads") or WIDTHS[family] // 64),
        mlp=GELUS[act],
        norm_eps=text.get("layer_norm_eps", family.norm_eps),
        context=text.get("max_position_embeddings", family.context),
        end=end,
    )
    if family is SIGLIP:
        return replace(record, pad=other)
    return replace(record, start=other, pool="argmax" if text.get("eos_token_id") == OLD_EOS else "eos")


def _special_id(special: Mapping[str, Any], name: str, vocabulary: "tokenizers.Tokenizer") -> int:
    """Return the id of a special token that tokenizer_config.json names."""
    token = special.get(name)
    content = token.get("content") if isinstance(token, dict) else token
    found = vocabulary.token_to_id(content) if isinstance(content, str) else None
    if found is None:
        raise CheckpointError(
            f"{TOKENIZER_CONFIG} sets {name} to {content!r}, but {TOKENIZER} does not contain this token. Use files "
            "from the same checkpoint."
        )
    return found
