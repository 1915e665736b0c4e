"""A model with labels from text equals transformers and open_clip, and is an ordinary classifier."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from joint import JOINT, spread, write, write_repository
from models import near, tiny_model
from peers import open_clip, transformers
from server import Hub
from torch import Tensor
from vocabularies import clip_tokenizer, write_siglip_tokenizer

import vitlite
from vitlite.checkpoints.fingerprint import hash_of_weights
from vitlite.config import ViTConfig
from vitlite.errors import CheckpointError, InputError, VitliteError
from vitlite.nn.vit import ViT
from vitlite.text.half import half_of_repository, open_text_half
from vitlite.zoo.text import text_record

LABELS = ["cat", "dog", "rusty bolt", "red car at night"]
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
PHOTO = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)


@pytest.fixture(scope="module", params=["clip", "siglip"])
def joint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return write_repository(folder, request.param), folder


@pytest.fixture
def labelled(joint: tuple[Any, Path]) -> ViT:
    return vitlite.with_labels(vitlite.load(joint[1]), LABELS)


def _reference(theirs: Any, folder: Path, sentences: list[str]) -> tuple[Tensor, Tensor]:
    """Logits (images, sentences) and scores of transformers, for sentences that need no preparation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    is_clip = "Clip" in type(theirs).__name__ or "CLIP" in type(theirs).__name__
    length = 77 if is_clip else 64
    if is_clip:
        ids = open_clip.SimpleTokenizer()(sentences)
    else:
        rows = [[*tokenizer(sentence, add_special_tokens=False).input_ids, 1] for sentence in sentences]
        ids = torch.tensor([row + [1] * (length - len(row)) for row in rows])
    with torch.no_grad():
        logits = theirs(input_ids=ids, pixel_values=IMAGES).logits_per_image
    return logits, logits.softmax(-1) if is_clip else logits.sigmoid()


@torch.no_grad()
def test_logits_and_scores_equal(joint: tuple[Any, Path], labelled: ViT) -> None:
    logits, scores = _reference(*joint, [f"a photo of a {label}" for label in LABELS])
    found = labelled(IMAGES)
    assert near(found, logits)
    ours = found.softmax(-1) if labelled.scores == "softmax" else found.sigmoid()
    torch.testing.assert_close(ours, scores, atol=1e-5, rtol=0)
    assert labelled.labels == tuple(LABELS)
    assert labelled.scores == ("softmax" if "CLIP" in type(joint[0]).__name__ else "sigmoid")
    other = found.sigmoid() if labelled.scores == "softmax" else found.softmax(-1)
    assert not torch.allclose(other, scores, atol=1e-3)  # softmax for sigmoid is noticed
    forgotten = copy.deepcopy(labelled)
    forgotten.head.weight.copy_(F.normalize(forgotten.head.weight, dim=-1))
    assert not near(forgotten(IMAGES), logits)  # a forgotten scale is noticed


@torch.no_grad()
def test_templates_are_averaged(joint: tuple[Any, Path]) -> None:
    model = vitlite.load(joint[1])
    half = open_text_half(model)
    templates = ["a photo of a {}", "a {} in it"]
    found = vitlite.with_labels(model, LABELS, templates)
    one, other = (half.vectors([template.replace("{}", label) for label in LABELS]) for template in templates)
    expected = F.normalize((F.normalize(one, dim=1) + F.normalize(other, dim=1)) / 2, dim=1)
    assert near(F.normalize(found.head.weight, dim=1), expected)
    if model.config.num_classes:  # 80 sentences with the words of CLIP's tokenizer
        assert vitlite.with_labels(model, LABELS, "imagenet").head.weight.shape == (4, 24)


@torch.no_grad()
def test_predict_save_load_and_optimize(labelled: ViT, tmp_path: Path) -> None:
    expected, answers = labelled(IMAGES), labelled.predict(PHOTO)
    assert {answer.label for answer in answers} == set(LABELS)
    total = sum(answer.score for answer in answers)
    assert (abs(total - 1) < 1e-5) == (labelled.scores == "softmax")
    labelled.save(tmp_path / "model")
    loaded = vitlite.load(tmp_path / "model")
    assert torch.equal(loaded(IMAGES), expected)
    assert loaded.predict(PHOTO) == answers
    fast = vitlite.optimize(vitlite.load(tmp_path / "model"))
    assert near(fast(IMAGES), expected)
    assert [answer.label for answer in fast.predict(PHOTO)] == [answer.label for answer in answers]
    with pytest.raises(InputError, match=r"got OptimizedViT\. Call with_labels before vitlite\.optimize\."):
        vitlite.with_labels(fast, LABELS)
    with pytest.raises(InputError, match=r"Expected a list of sentences, got 'red car'"):
        open_text_half(labelled).vectors("red car")
    half = vitlite.optimize(vitlite.load(tmp_path / "model"), dtype=torch.bfloat16)
    assert (half(IMAGES) - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("joint", ["siglip"], indirect=True)  # one of the two: the head is the same
def test_onnx(labelled: ViT, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from vitlite.export import export

    export(labelled, tmp_path / "model.onnx", to="onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})[:1]
    with torch.no_grad():
        assert near(torch.from_numpy(found), labelled(IMAGES))


@torch.no_grad()
def test_the_image_tower_is_shared_and_unchanged(joint: tuple[Any, Path]) -> None:
    model = vitlite.load(joint[1]).requires_grad_(False)
    before = model(IMAGES)
    first = vitlite.with_labels(model, LABELS)
    assert first.blocks[0].mlp.fc1.weight.data_ptr() == model.blocks[0].mlp.fc1.weight.data_ptr()
    assert torch.equal(model(IMAGES), before)
    assert not any(weight.requires_grad for weight in model.parameters())
    assert hash_of_weights(first) == hash_of_weights(model)  # embed and search accept either
    second = vitlite.with_labels(first, LABELS[::-1])  # from a model with labels
    assert torch.equal(second(IMAGES).flip(1), first(IMAGES))
    assert torch.equal(first.embed(IMAGES), model.embed(IMAGES))


@torch.no_grad()
def test_another_head_is_not_taken_for_the_projection(joint: tuple[Any, Path]) -> None:
    width = vitlite.load(joint[1]).config.num_classes or 24
    models = [vitlite.load(joint[1], num_classes=width + 1), vitlite.load(joint[1])]
    models[1].reset_head(width)
    if vitlite.load(joint[1]).config.num_classes:  # CLIP needs the projection
        models.append(vitlite.load(joint[1], num_classes=0))
    for model in models:
        with pytest.raises(InputError, match="head or its pooling differs from that of its checkpoint"):
            vitlite.with_labels(model, LABELS)


@pytest.mark.parametrize(
    ("labels", "template", "message"),
    [
        (["Cat", "dog", "cat"], "a {}", r"reads the labels 'Cat' and 'cat' both as 'cat'"),
        (["cat", "  "], "a {}", r"reads the label '  ' as an empty text"),
        ([], "a {}", r"at least one label, got \[\]"),
        ("cat", "a {}", r"at least one label, got 'cat'"),
        (["cat"], "a photo", r"one \{\} for the label, or 'imagenet', got 'a photo'"),
        (["cat " * 90], "a {}", r"tokens, but the checkpoint reads at most"),
        (["cat", 3], "a {}", r"must be a string, got 3"),
    ],
)
def test_wrong_labels_are_errors(joint: tuple[Any, Path], labels: Any, template: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        vitlite.with_labels(vitlite.load(joint[1]), labels, template)


def test_labels_that_differ_in_punctuation_are_equal_for_siglip(joint: tuple[Any, Path]) -> None:
    model, labels = vitlite.load(joint[1]), ["red-car", "redcar"]
    if model.config.num_classes:
        assert vitlite.with_labels(model, labels).labels == ("red-car", "redcar")
    else:
        with pytest.raises(InputError, match="'red-car' and 'redcar' both as 'redcar'"):
            vitlite.with_labels(model, labels)


def _without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "spiece.model").write_bytes(b"")


def _other_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary["cat</w>"] = 60_000
    else:
        filler = [[f"word{i}", -99.0] for i in range(700)]
        tokenizer["model"]["vocab"] = [*vocabulary, *filler, ["▁cat", -0.1]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _changed(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["text_config"] |= changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_tokenizer, r"no tokenizer\.json beside .* To create tokenizer\.json from spiece\.model, call"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{}"), "sets eos_token to None"),
        (_changed(hidden_act="relu"), "hidden_act is 'relu'"),
        (_changed(hidden_size="wide"), "hidden_size must be a non-negative integer"),
        (_changed(max_position_embeddings=33), "expected 33"),
        (_changed(num_attention_heads=3), "not a multiple of the width of its heads, 10"),
        (_other_tokenizer, "has only [0-9]+ tokens"),
    ],
)
def test_wrong_files_are_errors(
    joint: tuple[Any, Path], change: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(joint[1], folder)
    model = vitlite.load(folder)
    change(folder)
    with pytest.raises((InputError, CheckpointError), match=message):
        vitlite.with_labels(model, LABELS)


def test_models_without_text_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="do not come from a checkpoint"):
        vitlite.with_labels(tiny_model(), LABELS)
    with pytest.raises(InputError, match=r"vit_nano_4\.cifar10 cannot read text: it was not trained with text"):
        vitlite.with_labels(vitlite.create("vit_nano_4.cifar10"), LABELS)
    tiny_model().save(tmp_path / "model")
    with pytest.raises(InputError, match=r"no tokenizer\.json and no tokenizer_config\.json beside"):
        vitlite.with_labels(vitlite.load(tmp_path / "model"), LABELS)


def test_text_halves_of_the_zoo_come_from_open_clip_files(server: Hub, tmp_path: Path) -> None:
    model = spread(JOINT["open_clip, SigLIP"].build())
    write(model, tmp_path / "open_clip_model.safetensors")
    write_siglip_tokenizer(tmp_path, "<pad>")
    names = ("open_clip_model.safetensors", "tokenizer.json")
    files = {"_".join(name.rsplit(".", 1)): (tmp_path / name).read_bytes() for name in names}
    server.publish("owner/joint", **files)
    record = replace(JOINT["open_clip, SigLIP"].record, repo="owner/joint", pad=0)
    found = half_of_repository(record).vectors(["a cat", "cat"])
    half = half_of_repository(record)
    ids = half.tokenizer(["a cat", "cat"])
    with torch.no_grad():
        assert near(found, model.encode_text(ids, normalize=True))
    asked = len(server.log)
    half_of_repository(record)
    assert len(server.log) == asked  # from the cache
    server.publish("owner/other", tokenizer_json=b"{}")
    with pytest.raises(CheckpointError, match=r"owner/other has neither open_clip_model\.safetensors nor model"):
        half_of_repository(replace(record, repo="owner/other"))


@torch.no_grad()
def test_a_file_of_open_clip_that_is_like_a_checkpoint(server: Hub, tmp_path: Path) -> None:
    text = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 2}
    image = {"image_size": 32, "layers": 2, "width": 48, "head_width": 16, "patch_size": 8}
    theirs = spread(open_clip.CLIP(24, image, text))
    path = tmp_path / "joint.safetensors"
    write(theirs, path)
    sizes = {"image_size": 32, "patch_size": 8, "dim": 48, "depth": 2, "heads": 3, "mlp_dim": 192, "num_classes": 24}
    model = vitlite.load(path, config=ViTConfig(**sizes, input_norm="tokens", norm_eps=1e-5))
    with pytest.raises(InputError, match=r"no config\.json and no .* beside"):
        vitlite.with_labels(model, LABELS)
    name = "vit_base_16.clip_laion2b"
    model.source = replace(model.source, name=name)  # as by like=, which needs a file of the size of a real checkpoint
    clip_tokenizer().save_pretrained(tmp_path)
    server.publish(text_record(name).repo, tokenizer_json=(tmp_path / "tokenizer.json").read_bytes())
    ids = open_clip.SimpleTokenizer()([f"a photo of a {label}" for label in LABELS])
    expected, _ = theirs.get_logits(IMAGES, ids)
    assert near(vitlite.with_labels(model, LABELS)(IMAGES), expected)
    write(spread(open_clip.CLIP(24, image, {**text, "layers": 1})), path)
    with pytest.raises(VitliteError, match="Wrong hash"):
        vitlite.with_labels(model, LABELS)


def test_shards(joint: tuple[Any, Path], tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    shutil.copytree(joint[1], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    joint[0].save_pretrained(folder, max_shard_size="100KB")
    assert not (folder / "model.safetensors").exists()
    found = vitlite.with_labels(vitlite.load(folder), LABELS)
    assert torch.equal(found.head.weight, vitlite.with_labels(vitlite.load(joint[1]), LABELS).head.weight)
