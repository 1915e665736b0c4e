"""`vitlite embed`."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Run, start
from PIL import Image
from safetensors.torch import load_file

import vitlite
from vitlite.inference import journal
from vitlite.inference.find import find_images
from vitlite.inference.journal import ImageFile, Journal, open_journal
from vitlite.retrieval import open_vectors


def test_embed_equals_model_embed(run: Run, model: Path, broken: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    out = tmp_path / "out.safetensors"
    code, shown, err = run("embed", broken, "--model", model, "--out", out)
    assert code == 1
    assert "aa.png" in err
    assert shown == f"wrote {out}: 4 vectors of 32\n"
    with safe_open(out, "pt") as file:
        vectors, about = file.get_tensor("vectors"), file.metadata()
    paths = json.loads(about["paths"])
    loaded = vitlite.load(model)
    with torch.no_grad():
        torch.testing.assert_close(vectors, loaded.embed(loaded.preprocess(paths)))
    assert about["sha256"] == loaded.source.sha256


def test_a_killed_embed_resumes_to_the_same_bytes(run: Run, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    noise = torch.Generator().manual_seed(0)
    for i in range(200):
        pixels = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8, generator=noise)
        Image.fromarray(pixels.numpy()).save(folder / f"{i:03}.bmp")
    (folder / "005.bmp").write_bytes(b"BM")  # in the first batch
    whole, out = tmp_path / "whole.npz", tmp_path / "out.npz"
    words = ("embed", folder, "--model", model, "--batch", 8, "--out")
    assert run(*words, whole)[0] == 1

    partial = tmp_path / "out.npz.partial"
    vectors = partial / "vectors.f32"
    process = start(*words, out)
    while not vectors.exists() or vectors.stat().st_size < 6_000:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.kill()
    process.communicate(timeout=60)
    assert not out.exists()
    code, _, err = run(*words, out)
    assert code == 1
    assert "resuming" in err
    assert "005.bmp" in err  # said again
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()


@pytest.fixture
def interrupted(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """A command that was interrupted after four of six images, in the folder a."""
    for i, folder in enumerate("ab"):
        (tmp_path / folder).mkdir()
        for j in range(6):
            Image.new("RGB", (20, 20), (100 * i, 40 * j, 0)).save(tmp_path / folder / f"{j}.bmp")
    monkeypatch.chdir(tmp_path / "a")
    words = ("embed", *(f"{j}.bmp" for j in range(6)), "--model", model, "--batch", 2, "--out", tmp_path / "out.jsonl")
    add, calls = Journal.add, iter(range(3))

    def stops(*arguments: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        add(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", stops)
        assert run(*words)[0] == 130
    return words


def test_embed_resumes_only_with_the_same_inputs(
    run: Run, interrupted: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same relative names are other images in another folder."""
    embed, first, *others = interrupted
    for folder, words in (("b", interrupted), ("a", (embed, first, *others[5:]))):
        monkeypatch.chdir(tmp_path / folder)
        code, _, err = run(*words)
        assert code == 1
        assert "out.jsonl.partial, because these settings have changed: inputs. Use the same model" in err
    assert re.search(r"4 \w+ are done", run(*interrupted)[2])


def test_embed_repeats_a_changed_image(run: Run, interrupted: tuple[object, ...], tmp_path: Path) -> None:
    shutil.copy(tmp_path / "b" / "2.bmp", tmp_path / "a" / "2.bmp")
    code, shown, err = run(*interrupted)
    assert (code, shown) == (0, f"wrote {tmp_path / 'out.jsonl'}: 6 vectors of 32\n")
    assert re.search(r"3 \w+ are done", err)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["path"] for row in rows] == [f"{j}.bmp" for j in range(6)]
    assert run(*interrupted)[0] == 0  # a run of its own
    afresh = {row["path"]: row["vector"] for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    for row in rows:
        assert row["vector"] == pytest.approx(afresh[row["path"]], abs=1e-5)
    assert not list(tmp_path.glob("out.jsonl?*"))


def test_embed_leaves_nothing_if_no_image_can_be_read(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    code, _, err = run("embed", tmp_path / "a.png", "--model", model, "--out", tmp_path / "out.npz")
    assert code == 1
    assert "No image could be read" in err
    assert not list(tmp_path.glob("out*"))


def test_embed_does_not_mix_two_models(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Journal(out, {"weights": "others"}, 32) as journal:
        journal.add([ImageFile("a.png", 0, 0)], [torch.zeros(32)])
    code, _, err = run("embed", images, "--model", model, "--out", out)
    assert code == 1
    assert re.search("these settings have changed: config, .*preprocessing, .*weights", err)
    assert "name that ends in .safetensors" in run("embed", images, "--model", model, "--out", "x.csv")[2]


def test_embed_locks_its_output(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    words = ("embed", images, "--model", model, "--out", tmp_path / "out.npz")
    with open_journal(tmp_path / "out.npz", {}, 32):
        code, shown, err = run(*words)
        assert (code, shown) == (1, "")
        assert re.search(r"Another process is writing .*out\.npz\. .*\n\Z", err)
    assert run(*words)[0] == 0
    assert not list(tmp_path.glob("out.npz?*"))


def test_quick_decode_is_part_of_the_identity(run: Run, model: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    photo = tmp_path / "photo.jpg"
    gradient = torch.arange(512, dtype=torch.int64).mul(37).remainder(256).to(torch.uint8)
    Image.fromarray(gradient.expand(512, 512).contiguous().numpy()).convert("RGB").save(photo)
    found = []
    for options in ((), ("--quick-decode",)):
        out = tmp_path / f"out{len(options)}.safetensors"
        assert run("embed", photo, "--model", model, "--out", out, *options)[0] == 0
        with safe_open(out, "pt") as file:
            found.append((file.get_tensor("vectors"), json.loads(file.metadata()["identity"])))
    assert not torch.equal(found[0][0], found[1][0])
    assert found[1][1] == found[0][1] | {"quick_decode": True}


def test_classify_takes_quick_decode(run: Run, model: Path, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    Image.new("RGB", (300, 300), "teal").save(photo)  # another format: decoded whole, and the same
    code, whole, _ = run("classify", photo, "--model", model, "--format", "csv")
    assert (code, whole) == run("classify", photo, "--model", model, "--format", "csv", "--quick-decode")[:2]


def test_vectors_of_a_block(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    """They are the pooled output of the block after the final norm, and `search` knows the block."""
    out, last, usual = (tmp_path / f"{name}.safetensors" for name in ("first", "last", "usual"))
    for more, target in ((("--layer", 0), out), (("--layer", -1), last), ((), usual)):
        assert run("embed", images, "--model", model, *more, "--out", target)[0] == 0
    opened, loaded = open_vectors(out), vitlite.load(model)
    pixels = loaded.preprocess(opened.paths)
    with torch.no_grad():
        expected = loaded.features(pixels, layers=0, norm=True).layers[0][:, 0]
    torch.testing.assert_close(next(opened.parts()), expected)
    torch.testing.assert_close(next(open_vectors(last).parts()), next(open_vectors(usual).parts()), rtol=0, atol=0)
    code, found, _ = run("search", out, images / "a.png", "--top", 1)
    assert (code, found.splitlines()[1]) == (0, f"  1.0000  {images / 'a.png'}")
    with pytest.raises(vitlite.VitliteError, match="this model differs in weights, config"):
        opened.check_model(loaded)
    assert "from -2 to 1, got 7" in run("embed", images, "--model", model, "--layer", 7, "--out", out)[2]
    assert run("embed", images, "--model", model, "--layer", 0, "--fast", "--out", out)[0] == 0
    torch.testing.assert_close(next(open_vectors(out).parts()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2**24])
def test_vectors_of_patches(run: Run, model: Path, images: Path, tmp_path: Path, chunk: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(journal, "CHUNK", chunk)
    loaded = vitlite.load(model, image_size=(16, 32))
    paths = find_images([str(images)])
    with torch.no_grad():
        expected = loaded.features(loaded.preprocess(paths)).map().movedim(1, 3)
    for suffix in ("safetensors", "npz", "npy"):
        out = tmp_path / f"p.{suffix}"
        words = ("embed", images, "--model", model, "--size", "16x32", "--patches", "--out", out)
        assert run(*words)[1] == f"wrote {out}: 4 x 2 x 4 vectors of 32\n"
        if suffix == "safetensors":
            found = load_file(out)["vectors"]
        else:
            array = np.load(out)
            assert [*(array["paths"] if suffix == "npz" else array["path"])] == paths
            found = torch.from_numpy(array["vectors" if suffix == "npz" else "vector"])
        torch.testing.assert_close(found, expected)
    assert "has one vector per patch" in run("search", tmp_path / "p.safetensors", images / "a.png")[2]
    assert "--patches needs" in run("embed", images, "--model", model, "--patches", "--out", tmp_path / "p.jsonl")[2]


def test_shards_together_are_the_whole(run: Run, model: Path, images: Path, tmp_path: Path) -> None:
    from vitlite.retrieval import open_vectors

    whole = tmp_path / "whole.safetensors"
    assert run("embed", images, "--model", model, "--out", whole)[0] == 0
    found: dict[str, torch.Tensor] = {}
    for part in (1, 2):
        out = tmp_path / f"{part}.safetensors"
        assert run("embed", images, "--model", model, "--shard", f"{part}/2", "--out", out)[0] == 0
        vectors = open_vectors(out)
        assert not found.keys() & set(vectors.paths)
        found |= dict(zip(vectors.paths, next(vectors.parts()), strict=True))
    vectors = open_vectors(whole)
    assert sorted(found) == sorted(vectors.paths)
    for path, vector in zip(vectors.paths, next(vectors.parts()), strict=True):
        torch.testing.assert_close(found[path], vector)


@pytest.mark.parametrize(
    ("shard", "code", "error"),
    [
        ("0/2", 2, "argument --shard: must be I/N with I from 1 to N, such as 3/16, got '0/2'"),
        ("3/2", 2, "argument --shard: must be I/N with I from 1 to N, such as 3/16, got '3/2'"),
        ("1", 2, "argument --shard: must be I/N with I from 1 to N, such as 3/16, got '1'"),
        ("1/999", 1, "There are fewer images (1) than parts (999). Use a smaller --shard I/N."),
    ],
)
def test_wrong_shard_is_an_error(shard: str, code: int, error: str, run: Run, model: Path, tmp_path: Path) -> None:
    Image.new("RGB", (40, 40)).save(tmp_path / "one.png")
    words = ("embed", tmp_path / "one.png", "--model", model, "--out", tmp_path / "a.npz", "--shard", shard)
    found, _, err = run(*words)
    assert (found, error in err) == (code, True), err
