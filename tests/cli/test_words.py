"""classify --labels, search by words and embed --text, with tiny joint checkpoints on a local server."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commands import Run
from joint import write_repository
from safetensors.torch import load_file
from server import Hub

import vitlite
from vitlite.text.half import open_text_half

REPO = "owner/tiny-joint"


@pytest.fixture(scope="module", params=["clip", "siglip"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_repository(folder, request.param)
    return folder


@pytest.fixture
def hub(folder: Path, server: Hub) -> Hub:
    files = {"_".join(path.name.rsplit(".", 1)): path.read_bytes() for path in folder.iterdir() if path.is_file()}
    server.publish(REPO, **files)
    return server


def test_classify_by_labels(run: Run, hub: Hub, folder: Path, images: Path, tmp_path: Path) -> None:
    labels = ["cat", "dog", "rusty bolt"]
    (tmp_path / "labels.txt").write_text("cat\ndog\n\nrusty bolt\n")
    for words in ("cat, dog,rusty bolt", tmp_path / "labels.txt"):
        code, out, error = run("classify", images, "--model", REPO, "--labels", words, "--format", "jsonl")
        assert code == 0, error
        lines = [json.loads(line) for line in out.splitlines()]
    model = vitlite.with_labels(vitlite.load(folder), labels)
    for line in lines:
        expected = {answer.label: answer.score for answer in model.predict(line["path"])}
        assert {row["label"]: row["score"] for row in line["predictions"]} == pytest.approx(expected, abs=2e-6)
    before = len(hub.log)
    code, out, error = run(
        "classify",
        images,
        "--model",
        REPO,
        "--labels",
        "cat,dog",
        "--template",
        "the {}",
        "--fast",
        "--dtype",
        "bfloat16",
    )
    assert code == 0, error
    assert not [request for request in hub.log[before:] if request.method == "GET"]  # everything is in the cache
    code, _, error = run("classify", images, "--model", REPO, "--template", "the {}")
    assert (code, "--template needs --labels" in error) == (1, True)
    code, _, error = run("classify", images, "--model", REPO, "--labels", "no.txt")
    assert (code, "there is no file no.txt" in error) == (2, True)
    code, _, error = run("classify", images, "--model", REPO, "--labels", " , ")
    assert (code, "contains no labels" in error) == (2, True)


@torch.no_grad()
def test_search_by_words(run: Run, hub: Hub, folder: Path, images: Path, tmp_path: Path) -> None:
    vectors = tmp_path / "vectors.safetensors"
    code, _, error = run("embed", images, "--model", REPO, "--out", vectors)
    assert code == 0, error
    code, out, error = run("search", vectors, "a red car at night", "cat", images / "a.png", "--format", "jsonl")
    assert code == 0, error
    found = [json.loads(line) for line in out.splitlines()]
    assert [found[0].get("path"), found[1].get("text"), found[2].get("text")] == [
        str(images / "a.png"), "a red car at night", "cat",
    ]  # fmt: skip
    model = vitlite.load(folder)
    paths = [match["path"] for match in found[0]["matches"]]
    batch = F.normalize(model(model.preprocess(paths)), dim=1)  # brute force: CLIP's head is the projection
    for row, sentence in zip(found[1:], ("a red car at night", "cat"), strict=True):
        expected = dict(zip(paths, (batch @ open_text_half(model).vectors([sentence])[0]).tolist(), strict=True))
        scores = {match["path"]: match["score"] for match in row["matches"]}
        assert scores == pytest.approx(expected, abs=1e-5)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
    code, out, error = run("search", vectors, "is it a cat?")
    assert (code, out.splitlines()[0]) == (0, '"is it a cat?"'), error
    code, _, error = run("search", vectors, "cat", "--out", tmp_path / "sheet.jpg")
    assert (code, "--out draws only the matches of images" in error) == (1, True)
    code, _, error = run("search", vectors, "missing.jpg")
    assert (code, "missing.jpg" in error) == (1, True)
    layer = tmp_path / "layer.safetensors"
    assert run("embed", images, "--model", REPO, "--layer", "0", "--out", layer)[0] == 0
    code, _, error = run("search", layer, "cat")
    assert (code, "vectors of block" in error) == (1, True)


@torch.no_grad()
def test_embed_text(run: Run, hub: Hub, folder: Path, images: Path, tmp_path: Path) -> None:
    sentences = ["a cat", "a red car at night"]
    (tmp_path / "sentences.txt").write_text("\n\n".join(sentences))
    out = tmp_path / "text.safetensors"
    code, said, error = run("embed", "--text", tmp_path / "sentences.txt", "--model", REPO, "--out", out)
    assert code == 0, error
    expected = open_text_half(vitlite.load(folder)).vectors(sentences)
    assert said == f"wrote {out}: 2 vectors of {expected.shape[1]}\n"
    torch.testing.assert_close(load_file(out)["vectors"], expected)
    wrong: list[tuple[list[Any], str]] = [
        ([], "nothing to embed"),
        ([images, "--text", "x.txt"], "cannot be combined with PATH"),
        (["--text", "no.txt"], "Cannot read no.txt"),
    ]
    for words, message in wrong:
        code, _, error = run("embed", *words, "--model", REPO, "--out", out)
        assert (code, message in error) == (1, True), error
    (tmp_path / "empty.txt").write_text("\n")
    code, _, error = run("embed", "--text", tmp_path / "empty.txt", "--model", REPO, "--out", out)
    assert (code, "contains no sentences" in error) == (1, True)
    code, _, error = run("search", out, images / "a.png")  # vectors of text are not vectors of images
    assert (code, "is not a valid file of vectors" in error) == (1, True)


def test_checkpoint_without_text_is_an_error_before_its_download(run: Run, server: Hub, images: Path) -> None:
    code, _, error = run("classify", images, "--model", "vit_tiny_16.deit_fb_in1k", "--labels", "cat,dog")
    assert code == 1
    assert "vit_tiny_16.deit_fb_in1k cannot read text: it was not trained with text" in error
    assert not server.log
