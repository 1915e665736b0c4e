"""Where transformers keeps how pictures are prepared: in two files, one of which counts before the other."""

import json
from pathlib import Path

import pytest
import torch
from peers import transformers
from PIL import Image
from tokenizers import Tokenizer, models

from vitlite import load
from vitlite.errors import ImageError

PHOTO = Path(__file__).parents[2] / "examples" / "photos" / "chelsea.png"
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = {"vocab_size": 50, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
Pictures = __import__("transformers.models.clip.image_processing_pil_clip", fromlist=["x"]).CLIPImageProcessorPil


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """A folder with the weights of both towers."""
    config = transformers.CLIPConfig(
        vision_config=SMALL | {"image_size": 32, "patch_size": 8}, text_config=SMALL | WORDS, projection_dim=6
    )
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    return tmp_path


def write_processor(folder: Path) -> None:
    """As a fine-tune saves it: of texts and of pictures, in one file."""
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    pictures = Pictures(size={"shortest_edge": 40}, crop_size=32, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    transformers.CLIPProcessor(image_processor=pictures, tokenizer=tokenizer).save_pretrained(folder)
    assert "image_processor" in json.loads((folder / "processor_config.json").read_text())


def prepares_as_transformers(folder: Path) -> bool:
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    with Image.open(PHOTO) as photo:
        pixels = processor(photo.convert("RGB"), return_tensors="pt")["pixel_values"]
    return torch.allclose(load(folder).preprocess(PHOTO), pixels, rtol=0, atol=1e-5)


@pytest.mark.parametrize("old", [False, True])
def test_the_processor_of_both_counts_before_an_older_one_of_pictures(clip: Path, old: bool) -> None:
    if old:  # of the first training, in the folder that the second went into
        Pictures(size={"shortest_edge": 32}, crop_size=32).save_pretrained(clip)
        assert prepares_as_transformers(clip)
    write_processor(clip)
    assert (clip / "preprocessor_config.json").exists() == old
    assert prepares_as_transformers(clip)


def test_a_processor_of_texts_alone_says_nothing_of_pictures(clip: Path) -> None:
    (clip / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')
    with pytest.raises(ImageError, match="came without preprocessing"):
        load(clip).preprocess(PHOTO)
    Pictures(size={"shortest_edge": 32}, crop_size=32).save_pretrained(clip)
    assert prepares_as_transformers(clip)
