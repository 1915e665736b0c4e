"""Turn sentences into token ids, prepared as they were when the checkpoint was trained."""

import html
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitlite.errors import CheckpointError, InputError, missing_extra, printable

Clean = Literal["lower", "canonical"]
WITHOUT_PUNCTUATION = str.maketrans("_", " ", string.punctuation.replace("_", ""))
SHOWN = 60  # characters of a sentence in an error


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """The preparation of a sentence, which the vocabulary does not determine.

    Attributes:
        clean: "lower" repairs the encoding, replaces HTML entities, joins white space and lowers the case (CLIP).
            "canonical" also removes punctuation (SigLIP).
        start: The id before every sentence, or None.
        end: The id after every sentence.
        pad: The id that fills a sentence up to the context.
    """

    clean: Clean
    start: int | None
    end: int
    pad: int


class Tokenizer:
    """The tokenizer of a checkpoint: sentences -> ids (b, context)."""

    def __init__(self, file: Path, rules: TokenRules, context: int) -> None:
        """Read a tokenizer.json.

        Raises:
            MissingExtraError: The packages tokenizers and ftfy are not installed.
            CheckpointError: The file is damaged.
        """
        try:
            import ftfy
            import tokenizers
        except ImportError as error:
            raise missing_extra("Reading text", "text") from error
        try:
            self._vocabulary: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises no type of its own
            raise CheckpointError(f"{file} is damaged or not a tokenizer.json ({error}). Download it again.") from None
        self._vocabulary.no_padding()
        self._vocabulary.no_truncation()
        self._vocabulary.encode_special_tokens = True  # "<|endoftext|>" in a sentence is text, not the end
        self._repair = ftfy.fix_text
        self.rules = rules
        self.context = context

    def clean(self, sentence: str) -> str:
        """Return the sentence as the checkpoint was trained to read it."""
        if not isinstance(sentence, str):
            raise InputError(f"A sentence must be a string, got {sentence!r}.")
        text = html.unescape(html.unescape(self._repair(sentence)))
        if self.rules.clean == "canonical":
            text = text.translate(WITHOUT_PUNCTUATION)
        return " ".join(text.lower().split())

    def __call__(self, sentences: Sequence[str]) -> Tensor:
        """Return the token ids of sentences, padded to the context: (b, context).

        Raises:
            InputError: A sentence is not a string, or has more tokens than the context.
        """
        rows = []
        for sentence in sentences:
            ids = self._vocabulary.encode(self.clean(sentence), add_special_tokens=False).ids
            ids = [*([] if self.rules.start is None else [self.rules.start]), *ids, self.rules.end]
            if len(ids) > self.context:
                shown = printable(sentence if len(sentence) <= SHOWN else f"{sentence[:SHOWN]}...")
                raise InputError(
                    f"The sentence {shown!r} has {len(ids)} tokens, but the checkpoint reads at most {self.context}. "
                    "Shorten the sentence."
                )
            rows.append(ids + [self.rules.pad] * (self.context - len(ids)))
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), self.context)
