"""The text halves of the registry."""

from fnmatch import fnmatchcase

import pytest

from vitlite.errors import InputError
from vitlite.zoo import registry
from vitlite.zoo.text import KINDS, ROWS, text_record


def _readable() -> list[str]:
    found = []
    for name in registry.RECORDS:
        try:
            text_record(name)
        except InputError:
            continue
        found.append(name)
    return found


def test_rows_fit_the_checkpoints() -> None:
    names = _readable()
    assert len(names) > 60
    for name in names:
        record, config = text_record(name), registry.find(name).config
        assert (config.num_classes > 0) == (record.scores == "softmax"), name  # CLIP's projection is the head
        assert (config.mlp == "quick_gelu") == (record.mlp == "quick_gelu"), name
        assert config.pool != "mean", name


def test_every_row_is_used() -> None:
    for (pattern, kind, _, _), reason in ROWS:
        assert any(fnmatchcase(name, pattern) for name in registry.RECORDS), pattern
        assert kind in KINDS or (kind == "-" and reason), pattern


def test_every_checkpoint_of_clip_and_siglip_has_a_row() -> None:
    patterns = [pattern for (pattern, *_), _ in ROWS]
    joint = [name for name in registry.RECORDS if any(part in name for part in ("clip", "siglip", "pe_core"))]
    assert [name for name in joint if not any(fnmatchcase(name, pattern) for pattern in patterns)] == []


def test_rows_equal_open_clip() -> None:
    from peers import open_clip

    config = {record["hf_hub"].strip("/"): name for name, tags in open_clip.pretrained._PRETRAINED.items()
              for record in tags.values()}  # fmt: skip
    quick = {record["hf_hub"].strip("/") for tags in open_clip.pretrained._PRETRAINED.values()
             for record in tags.values() if record.get("quick_gelu")}  # fmt: skip
    for name in _readable():
        record = text_record(name)
        assert record.repo in config, name
        text = open_clip.get_model_config(config[record.repo])["text_cfg"]
        assert record.context == text["context_length"], name
        assert record.head_dim == text["width"] // text["heads"], name
        assert record.causal == (not text.get("no_causal_mask", False)), name
        assert record.pool == text.get("pool_type", "argmax"), name
        assert (record.clean == "canonical") == (text.get("tokenizer_kwargs", {}).get("clean") == "canonicalize"), name
        assert record.norm_eps == (text.get("norm_kwargs") or {}).get("eps", 1e-5), name
        assert (record.mlp == "quick_gelu") == (record.repo in quick), name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit_base_16.clip_openai", "use the checkpoint with clip_quickgelu"),
        ("vit_base_16.siglip_gap_webli", "use the checkpoint without _gap"),
        ("vit_base_16.clip_laion2b_ft_in1k", "fine-tuned as a classifier"),
        ("vit_base_16.dino", "not trained with text"),
    ],
)
def test_the_others_say_why(name: str, reason: str) -> None:
    with pytest.raises(InputError, match=f"{name} cannot read text: .*{reason}"):
        text_record(name)
