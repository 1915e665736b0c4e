# ruff: noqa: E501, RUF001
"""Tokenizers for tests: CLIP's real one, from the vocabulary that comes with open_clip, and a small one like SigLIP's.

SigLIP's real vocabularies come with no package, so a unigram model is trained on some words.
"""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from peers import open_clip, transformers

WORDS = """a photo of the cat dog rusty bolt car red night small bad good and in it is not with red blue green an
old house by the sea two people walk under a tree 0 1 2 3 4 5 6 7 8 9 é ü ß ñ 中 文 日本 I'm don't hello world"""


@cache
def clip_tokenizer() -> Any:
    """transformers' tokenizer with the vocabulary of open_clip."""
    lines = gzip.decompress(Path(open_clip.tokenizer.default_bpe()).read_bytes()).decode().split("\n")
    merges = [tuple(line.split()) for line in lines[1 : 49152 - 256 - 2 + 1]]
    letters = list(open_clip.tokenizer.bytes_to_unicode().values())
    words = letters + [letter + "</w>" for letter in letters] + ["".join(merge) for merge in merges]
    words += ["<|startoftext|>", "<|endoftext|>"]
    return transformers.CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=merges)


def write_siglip_tokenizer(folder: Path, pad: str) -> int:
    """Write tokenizer.json and tokenizer_config.json. Return the number of words."""
    special = ["<pad>", "</s>", "<unk>"]
    model = tokenizers.SentencePieceUnigramTokenizer()
    model.train_from_iterator(
        [WORDS] * 3, vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    model.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": pad, "unk_token": "<unk>",
        "model_max_length": 16,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(model.get_vocab_size())


def nasty_sentences() -> list[str]:
    """300 sentences of which most go wrong in some tokenizer."""
    parts = [
        "", " ", "a photo of a cat", "A PHOTO of a CAT!", "  two   spaces\tand\na line ", "naïve café, Ünïcödé", "ﬁne ligature",
        "\u201ccurly\u201d \u2018quotes\u2019", "don't, I'm, we'll, they've, it's, he'd, you're", "DON'T WE'LL", "a_b__c", "e-mail: a@b.c/d?e=f&g",
        "&amp; &lt;b&gt; &amp;amp; &eacute;", "schÃ¶n", "中文的照片", "日本語 の 写真", "한국어", "русский текст", "ΟΔΟΣ Σ", "İstanbul ığ",
        "😀 emoji 👩‍👩‍👧 🇩🇪", "½ ² ³ ①", "1234567890 3.14 1e-5", "full ｗｉｄｔｈ", "nul\u0000byte", "zero\u200bwidth", "soft\u00adhyphen",
        "e\u0301 combining", "tab\tnew\r\nline", "<b>html</b>", "...!!!???", "{}[]()<>|\\", "C++ #1 50% $5 *", "x" * 30, "ab" * 20, "\u00a0nbsp\u00a0",
        "<pad> </s> <unk>", "a.b.c.d", "'s 't 're", "¡Hola! ¿Qué?", "ไทย", "हिन्दी", "עברית", "العربية",
    ]  # fmt: skip
    sentences = list(parts)
    for i, part in enumerate(parts * 6):
        sentences.append(f"{part} {parts[(7 * i + 3) % len(parts)]}" if i % 2 else f"a photo of {part}".title())
    return sentences[:300]
