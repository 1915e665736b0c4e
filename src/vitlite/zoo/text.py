"""The text encoders of checkpoints such as CLIP and SigLIP: one record per row of data/text.txt."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from vitlite.config import Mlp
from vitlite.errors import InputError
from vitlite.zoo.registry import read_rows

TextPool = Literal["argmax", "eos", "last"]
Clean = Literal["lower", "canonical"]


@dataclass(frozen=True, kw_only=True)
class TextRecord:
    """The settings of a text encoder that its tensors and its vocabulary do not determine.

    Attributes:
        head_dim: The width of an attention head.
        mlp: The activation of the MLPs, as in `ViTConfig`.
        norm_eps: The epsilon of the norms.
        causal: If True, a token attends only to itself and the tokens before it.
        pool: The token whose vector is returned. "argmax": the token with the largest id, which is CLIP's end of text.
            "eos": the first token with the id `end`. "last": the last token, which may be padding (SigLIP).
        clean: How a sentence is changed first. "lower" repairs the encoding, replaces HTML entities, joins white space
            and converts to lower case (CLIP). "canonical" also removes punctuation (SigLIP).
        start: The id of the token before every sentence, or None if there is none.
        end: The id of the token after every sentence.
        pad: The id of the token that fills a sentence up to `context` tokens.
        context: The number of tokens of every sentence after padding.
        scores: How the checkpoint was trained to score labels: "softmax" or "sigmoid".
        repo: The repository that contains the weights for text and images, and the tokenizer.
    """

    head_dim: int = 64
    mlp: Mlp
    norm_eps: float
    causal: bool
    pool: TextPool
    clean: Clean
    start: int | None
    end: int
    pad: int
    context: int
    scores: Literal["softmax", "sigmoid"]
    repo: str = ""


CLIP = TextRecord(
    mlp="gelu", norm_eps=1e-5, causal=True, pool="argmax", clean="lower", start=49406, end=49407, pad=0, context=77,
    scores="softmax",
)  # fmt: skip
SIGLIP = TextRecord(
    mlp="gelu_tanh", norm_eps=1e-6, causal=False, pool="last", clean="canonical", start=None, end=1, pad=1, context=64,
    scores="sigmoid",
)  # fmt: skip
KINDS = {
    "clip": CLIP,
    "clip-quick": replace(CLIP, mlp="quick_gelu"),
    "clip-unmasked": replace(CLIP, causal=False),  # MobileCLIP 2
    "clip-32": replace(CLIP, context=32),  # Perception Encoder
    "clip-72": replace(CLIP, context=72),
    "siglip": SIGLIP,
    "siglip-16": replace(SIGLIP, context=16),
    "siglip2": replace(SIGLIP, pad=0),
}
ROWS = read_rows("text.txt")
WITHOUT_TEXT = "it was not trained with text"


def text_record(name: str) -> TextRecord:
    """Return the record of the text encoder that was trained with a checkpoint.

    Raises:
        InputError: The checkpoint has no text encoder. The message gives the reason.

    >>> text_record("vit_base_16.siglip_v2_webli").repo
    'timm/ViT-B-16-SigLIP2'
    """
    for (pattern, kind, head, repo), reason in ROWS:
        if fnmatchcase(name, pattern):
            if kind == "-":
                hint = "" if "; use " in reason else "; use another checkpoint, such as vit_base_16.siglip_v2_webli"
                raise InputError(f"{name} cannot read text: {reason}{hint}.")
            return replace(KINDS[kind], head_dim=int(head), repo=repo)
    raise InputError(
        f"{name} cannot read text: {WITHOUT_TEXT}. Use a CLIP or SigLIP checkpoint, such as "
        "vit_base_16.siglip_v2_webli."
    )
