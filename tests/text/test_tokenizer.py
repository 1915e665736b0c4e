"""Token ids equal those of open_clip, which the checkpoints were trained with."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peers import open_clip
from vocabularies import clip_tokenizer, nasty_sentences, write_siglip_tokenizer

from vitlite.errors import CheckpointError, InputError
from vitlite.text.tokenizer import Tokenizer, open_vocabulary
from vitlite.zoo.text import CLIP, SIGLIP


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("clip")
    clip_tokenizer().save_pretrained(folder)
    return Tokenizer(open_vocabulary(folder / "tokenizer.json"), replace(CLIP, context=300))


def _siglip(folder: Path, pad: str, context: int = 400) -> Tokenizer:
    write_siglip_tokenizer(folder, pad)
    record = replace(SIGLIP, context=context, pad=0 if pad == "<pad>" else 1)
    return Tokenizer(open_vocabulary(folder / "tokenizer.json"), record)


def test_clip_ids_equal(clip: Tokenizer) -> None:
    sentences = nasty_sentences()
    assert len(sentences) == 300
    expected = open_clip.SimpleTokenizer(context_length=300)(sentences)
    for sentence, ours, theirs in zip(sentences, clip(sentences), expected, strict=True):
        assert ours.tolist() == theirs.tolist(), sentence


@pytest.mark.parametrize("pad", ["<pad>", "</s>"], ids=["SigLIP 2", "SigLIP"])
def test_siglip_ids_equal(pad: str, tmp_path: Path) -> None:
    ours = _siglip(tmp_path, pad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = open_clip.tokenizer.HFTokenizer(str(tmp_path), context_length=400, clean="canonicalize")
    sentences = nasty_sentences()
    end = torch.tensor([[1]])
    for sentence, row in zip(sentences, ours(sentences), strict=True):
        # The trained tokenizer adds no end of sentence, unlike those of the Hub.
        ids = theirs.tokenizer(theirs.clean_fn(sentence), return_tensors="pt").input_ids
        expected = torch.cat([ids.long().view(1, -1), end], 1)
        assert row[: expected.shape[1]].tolist() == expected[0].tolist(), sentence
        assert set(row[expected.shape[1] :].tolist()) <= {ours.record.pad}


def test_canonical_form_is_needed(tmp_path: Path) -> None:
    ours = _siglip(tmp_path, "<pad>")
    plain = Tokenizer(open_vocabulary(tmp_path / "tokenizer.json"), replace(ours.record, clean="lower"))
    assert not torch.equal(ours(["A photo of a cat."]), plain(["A photo of a cat."]))
    assert torch.equal(ours(["A photo, of_a  CAT!"]), ours(["a photo of a cat"]))


def test_a_sentence_that_does_not_fit_is_an_error(clip: Tokenizer) -> None:
    short = Tokenizer(clip._vocabulary, CLIP)
    assert short(["a " * 75]).shape == (1, 77)
    with pytest.raises(InputError, match=r"'a a a .*\.\.\.' has 202 tokens, but the checkpoint reads at most 77"):
        short(["a " * 200])
    with pytest.raises(InputError, match="must be a string, got 3"):
        short([3])  # type: ignore[list-item]


def test_special_tokens_in_a_sentence_are_text(clip: Tokenizer) -> None:
    assert (clip(["a <|endoftext|> b"]) == CLIP.end).sum() == 1


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        open_vocabulary(tmp_path / "tokenizer.json")
