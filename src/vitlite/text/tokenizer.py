"""Turn sentences into token ids. Text is cleaned as it was when the checkpoint was trained."""

import html
import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitlite.errors import CheckpointError, InputError, missing_extra, printable
from vitlite.zoo.text import TextRecord

if TYPE_CHECKING:
    import tokenizers

WITHOUT_PUNCTUATION = str.maketrans("_", " ", string.punctuation.replace("_", ""))
SHOWN = 60  # maximum number of characters of a sentence in an error


def open_vocabulary(file: Path) -> "tokenizers.Tokenizer":
    """Read a tokenizer.json.

    Raises:
        MissingExtraError: The packages tokenizers and ftfy are not installed.
        CheckpointError: The file is damaged.
    """
    try:
        import ftfy  # noqa: F401
        import tokenizers
    except ImportError as error:
        raise missing_extra("Reading text", "text") from error
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise CheckpointError(f"{file} is damaged or not a tokenizer.json ({error}). Download it again.") from None


class Tokenizer:
    """The tokenizer of a checkpoint, which turns sentences into token ids (b, context).

    Args:
        vocabulary: The result of `open_vocabulary`.
        record: The text cleaning, the special tokens and the context of the checkpoint.
    """

    def __init__(self, vocabulary: "tokenizers.Tokenizer", record: TextRecord) -> None:
        self._vocabulary = vocabulary
        self._vocabulary.no_padding()
        self._vocabulary.no_truncation()
        self._vocabulary.encode_special_tokens = True  # "<|endoftext|>" in a sentence is text, not the end
        self.record = record

    def clean(self, sentence: str) -> str:
        """Clean a sentence in the same way as for the training of the checkpoint."""
        import ftfy

        if not isinstance(sentence, str):
            raise InputError(f"A sentence must be a string, got {sentence!r}.")
        text = html.unescape(html.unescape(ftfy.fix_text(sentence)))
        if self.record.clean == "canonical":
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
            ids = [*([] if self.record.start is None else [self.record.start]), *ids, self.record.end]
            if len(ids) > self.record.context:
                shown = printable(sentence if len(sentence) <= SHOWN else f"{sentence[:SHOWN]}...")
                raise InputError(
                    f"The sentence {shown!r} has {len(ids)} tokens, but the checkpoint reads at most "
                    f"{self.record.context}. Shorten the sentence."
                )
            rows.append(ids + [self.record.pad] * (self.record.context - len(ids)))
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), self.record.context)
